"""What is known of the attention over a full cache: by scorers that watch, by an oracle, by another pass over the context.

Everything is found when it is first asked for, and once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from ...backend.capabilities import Rung
from ...cache import LuminaCache
from ...errors import SimulationError
from ...layers import KVCache, leaves
from ...scorers.observed import OBSERVED, Statistics
from ...scorers.observed.weights import attended_sums
from ...seen import Seen
from ..compare import kl_and_agreement
from ..evaluate.measure import Bench, read_prompt
from .forward import Forward
from .reconstruct import reconstruction

__all__ = ["Known"]

#: Mean KL (nats per token) up to which the same tokens fed at once and in blocks count as the same.
SAME = 1e-4

#: Scorers watched when the prompt is read again, and whose rankings their statistics serve.
_GATHERED: Mapping[str, tuple[str, ...]] = {
    "h2o": ("h2o", "h2o_mean", "vatp"),
    "snapkv": ("snapkv", "tova"),
    "expected_attention": ("expected_attention",),
}


class Known:
    """Of the full cache of one bench."""

    def __init__(self, bench: Bench, forward: Forward) -> None:
        self._bench = bench
        self._forward = forward

    def seen(self, layer: KVCache, needed: Sequence[str]) -> Seen | None:
        """Statistics for the scorers ``needed``; None if there are none. The bench's own, if it watched for them.

        Raises:
            SimulationError: a scorer would have to guess.
        """
        if not needed:
            return None
        found = layer.seen
        if found is None or any(name not in found.stats for name in needed):
            found = self._gathered.get(layer.name)
        for name in needed:
            why = (
                "its attention is not seen"
                if found is None
                else found.why_not(name, int(layer.offset), layer.rows)
            )
            if why is not None:
                raise SimulationError(f"{name} on {layer.name}: {why}; choose a scorer that needs no queries")
        return found

    @cached_property
    def _gathered(self) -> Mapping[str, Seen]:
        """Statistics of every scorer, by layer, from reading the prompt once more."""
        with LuminaCache(
            self._bench.model,
            telemetry=False,
            log=None,
            guard=False,
            rung=Rung.HOOK,
            observe=tuple(_GATHERED),
        ) as cache:
            read_prompt(self._bench.model, cache, self._bench.task.context, self._bench.plan.chunk)
            seen = [(leaf.name, leaf.seen) for leaf in leaves(list(cache)) if isinstance(leaf, KVCache)]
            mx.eval([one.arrays for _, one in seen if one is not None])
        return {name: _shared(one) for name, one in seen if one is not None}

    @cached_property
    def future(self) -> Mapping[str, mx.array]:
        """Attention (1, H, T) that each row draws from the scored tokens, by layer.

        Raises:
            SimulationError: as :meth:`check_one_forward`, or the attention of a layer is not seen.
        """
        self._check_watched()
        return self._at_once

    @cached_property
    def reconstruction(self) -> Mapping[str, mx.array]:
        """Largest weight (1, H, T) that each row draws while the context is repeated, by layer.

        Raises:
            SimulationError: the attention of a layer is not seen.
        """
        self._check_watched()
        return reconstruction(self._bench)

    def _check_watched(self) -> None:
        for layer in self._forward.row_layers:
            why = self._forward.why_not(layer)
            if why is not None:
                raise SimulationError(
                    f"{layer.name}: {why}; choose rows neither by an oracle nor by repeating the context"
                )

    def check_one_forward(self) -> None:
        """
        Raises:
            SimulationError: the model gives other logits for the same tokens fed at once than in blocks.
        """
        _ = self._at_once

    @cached_property
    def _at_once(self) -> Mapping[str, mx.array]:
        """As :attr:`future`, as far as it is seen, from a forward that is found to be the bench's own."""
        watch = _Sums({layer.name: layer.rows for layer in self._forward.row_layers})
        logprobs = self._forward.logprobs([None for _ in self._forward.full], watch)
        mx.eval(list(watch.sums.values()))
        kl, _ = kl_and_agreement(self._bench.continued, logprobs)
        if abs(float(kl.mean())) > SAME:
            raise SimulationError(
                f"the model gives other logits for the same tokens fed at once than in blocks of {self._bench.plan.block} "
                f"({float(kl.mean()):.2g} nats per token): it cannot be simulated in one forward"
            )
        return watch.sums


def _shared(seen: Seen) -> Seen:
    """With the same statistics under the name of every scorer that they serve."""
    stats: dict[str, Statistics] = {}
    for name, served in _GATHERED.items():
        if name in seen.stats:
            stats |= dict.fromkeys(served, seen.stats[name])
    return replace(seen, scorers={name: OBSERVED[name]() for name in stats}, stats=stats)


class _Sums:
    """Keeps how much attention each row of the full cache draws, by layer."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        self.sums: dict[str, mx.array] = {}
        self._rows = rows

    def observe(
        self,
        layer: Any,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> tuple[mx.array, ...]:
        sums, _ = attended_sums(queries, keys, scale, mask, sinks)
        self.sums[layer.name] = sums[..., : self._rows[layer.name]]
        return (self.sums[layer.name],)
