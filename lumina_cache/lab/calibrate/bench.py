"""An evaluation's bench whose caches watch the model's attention, so that scorers that need to see it can be measured."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from ...cache import LuminaCache
from ...errors import BackendInterfaceError, UnsupportedCacheError
from ..evaluate.measure import Bench, read_prompt

__all__ = ["ObservedBench"]


@dataclass
class ObservedBench(Bench):
    """As :class:`Bench`, at rung hook where the model can be hooked: what a full cache computes is the same to rounding.

    Close it when the document is done: hooks stay on the model's modules until then.
    """

    observe: tuple[str, ...] = ()  #: scorers whose statistics are kept

    def _filled(self, context: tuple[int, ...]) -> LuminaCache:
        cache = self._cache()
        read_prompt(self.model, cache, context, self.plan.chunk)
        return cache

    def _cache(self) -> LuminaCache:
        settings: dict[str, Any] = {"telemetry": False, "log": None, "disk": self.disk, "guard": False}
        if self.observe:
            try:
                return LuminaCache(self.model, **settings, rung="hook", observe=self.observe)
            except (BackendInterfaceError, UnsupportedCacheError):
                self.observe = ()  # evictions that need it are then refused, with the reason
        return LuminaCache(self.model, **settings)

    def close(self) -> None:
        super().close()
        gc.collect()  # copies that subjects changed have hooks of their own, closed when they are collected
