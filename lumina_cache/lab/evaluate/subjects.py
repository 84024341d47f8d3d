"""What is compared: actions of this library, and other ways to shrink the same cache (mlx-lm's own, other packages').

Every subject gets the same full cache, as the prompt left it, and gives back a changed copy of it. Text forms are those
of actions, and for the others::

    mlx-lm:kv_bits=4,group=64       mlx-lm's own conversion, as its ``kv_bits`` option does it
    mlx-turboquant:bits=4,group=64  the package mlx-turboquant, if it is installed
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import cache as stock

from ...actions import Action, Evict, parse_action, singles
from ...backend.capabilities import DISK_TIER
from ...cache import LuminaCache
from ...errors import ActionInfeasibleError, ActionSyntaxError, EngagementError
from ...scorers.observed import OBSERVED
from ..answer import detached_copy

__all__ = ["Refused", "Subject", "Taken", "parse_subject", "parse_subjects"]

Reasons = tuple[Mapping[str, Any], ...]


class Refused(Exception):
    """A subject that cannot be carried out here, with its reasons. Nothing was measured."""

    def __init__(self, reasons: Reasons) -> None:
        super().__init__("; ".join(str(r["text"]) for r in reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class Taken:
    """A changed copy of the full cache. Predicted bytes are None for what this library does not predict."""

    cache: Any
    seconds: float
    changed: bool  #: whether something lossy happened, so that no difference at all would be a fault
    predicted_live: int | None = None
    predicted_allocated: int | None = None


class Subject(Protocol):
    """One way to shrink a cache."""

    @property
    def text(self) -> str: ...

    @property
    def version(self) -> str | None:
        """Of the package that does it; None for this library."""
        ...

    @property
    def needs_disk(self) -> bool:
        """Whether rows are written to files."""
        ...

    @property
    def observes(self) -> tuple[str, ...]:
        """Scorers that have to watch the prompt's attention."""
        ...

    def surroundings(self) -> AbstractContextManager[None]:
        """What is to be in place while its caches are used, and undone afterwards."""
        ...

    def take(self, full: LuminaCache, model: Any) -> Taken:
        """A changed copy; ``full`` stays as it is.

        Raises:
            Refused: it cannot be carried out; says why.
        """
        ...


class _Plain:
    """A subject that needs nothing around it."""

    @property
    def needs_disk(self) -> bool:
        return False

    @property
    def observes(self) -> tuple[str, ...]:
        return ()

    def surroundings(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class OwnAction(_Plain):
    """An action of this library."""

    action: Action
    version: str | None = None

    @property
    def text(self) -> str:
        return str(self.action)

    @property
    def needs_disk(self) -> bool:
        return DISK_TIER in self.action.requires

    @property
    def observes(self) -> tuple[str, ...]:
        evictions = (part for part in singles(self.action) if isinstance(part, Evict))
        return tuple(part.scorer for part in evictions if part.scorer in OBSERVED)

    def take(self, full: LuminaCache, model: Any) -> Taken:
        fork = detached_copy(full)
        try:
            applied = fork.apply(self.action)
        except ActionInfeasibleError as error:
            fork.close()
            raise Refused(_reasons(fork, error)) from None
        except BaseException:
            fork.close()
            raise
        if applied is None:
            fork.close()
            raise EngagementError(f"{self.action}: put off to a boundary, though the cache is at one")
        return Taken(
            fork,
            applied.seconds,
            self.action.lossy and bool(applied.layers_changed),
            applied.predicted_live,
            applied.predicted_allocated,
        )


def _reasons(cache: LuminaCache, error: ActionInfeasibleError) -> Reasons:
    last = cache.log.records[-1]
    if last["event"] == "action.refused" and last["reasons"]:
        return tuple(last["reasons"])
    return ({"code": "refused", "text": str(error)},)


@dataclass(frozen=True)
class StockQuantized(_Plain):
    """``to_quantized`` of mlx-lm's own cache objects, on those that have it: what its ``kv_bits`` option does."""

    bits: int
    group_size: int

    @property
    def text(self) -> str:
        return f"mlx-lm:kv_bits={self.bits},group={self.group_size}"

    @property
    def version(self) -> str:
        return importlib.metadata.version("mlx-lm")

    def take(self, full: LuminaCache, model: Any) -> Taken:
        plain = _plain(full)
        mx.eval([entry.state for entry in plain])
        start = time.perf_counter()
        try:
            cache = [
                entry.to_quantized(group_size=self.group_size, bits=self.bits)
                if hasattr(entry, "to_quantized")
                else entry
                for entry in plain
            ]
            mx.eval([entry.state for entry in cache])
        except (NotImplementedError, ValueError) as error:
            raise Refused(({"code": "refused", "text": f"mlx-lm: {_line(error)}"},)) from None
        seconds = time.perf_counter() - start
        return Taken(cache, seconds, any(type(e) is stock.QuantizedKVCache for e in cache))


@dataclass(frozen=True)
class TurboQuant(_Plain):
    """The package mlx-turboquant: its caches, filled with the rows of the full one."""

    bits: int
    group_size: int

    @property
    def text(self) -> str:
        return f"mlx-turboquant:bits={self.bits},group={self.group_size}"

    @property
    def version(self) -> str | None:
        try:
            return importlib.metadata.version("mlx-turboquant")
        except importlib.metadata.PackageNotFoundError:
            return None

    def surroundings(self) -> AbstractContextManager[None]:
        return _mlx_lm_as_it_was()

    def take(self, full: LuminaCache, model: Any) -> Taken:
        try:
            package = importlib.import_module("mlx_turboquant")
        except ImportError as error:
            raise Refused(
                (
                    {
                        "code": "not_installed",
                        "text": f"mlx-turboquant cannot be imported ({_line(error)}): pip install mlx-turboquant",
                    },
                )
            ) from None
        plain = _plain(full)
        if any(type(entry) is not stock.KVCache for entry in plain):
            kinds = ", ".join(sorted({type(entry).__name__ for entry in plain} - {"KVCache"}))
            raise Refused(({"code": "refused", "text": f"cannot be filled from {kinds}"},))
        start = time.perf_counter()
        try:
            cache = package.make_prompt_cache(model, kv_bits=self.bits, kv_group_size=self.group_size)
            for entry, new in zip(plain, cache, strict=True):
                new.update_and_fetch(*entry.keys_and_values())
            mx.eval([entry.state for entry in cache])
        except (NotImplementedError, ValueError) as error:
            raise Refused(({"code": "refused", "text": f"mlx-turboquant: {_line(error)}"},)) from None
        return Taken(cache, time.perf_counter() - start, True)


@contextmanager
def _mlx_lm_as_it_was() -> Iterator[None]:
    """Undo what a package does to mlx-lm's functions: others are measured in the same process."""
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "mlx_lm"]
    before = [(m, dict(vars(m))) for m in modules]
    try:
        yield
    finally:
        for module, names in before:
            for name, value in names.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)


def _plain(full: LuminaCache) -> list[Any]:
    """The full cache's contents as mlx-lm's own objects, with buffers of their own."""
    fork: LuminaCache = detached_copy(full)
    try:
        return fork.to_mlx()
    finally:
        fork.close()


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


#: Prefix of the text form → the settings it takes, with their defaults (None: has to be given), and the class.
_OTHERS: Mapping[str, tuple[Mapping[str, int | None], type[Any]]] = {
    "mlx-lm": ({"kv_bits": None, "group": 64}, StockQuantized),
    "mlx-turboquant": ({"bits": None, "group": 64}, TurboQuant),
}


def parse_subject(text: str) -> Subject:
    """An action's text form, or ``mlx-lm:…`` or ``mlx-turboquant:…``.

    Raises:
        ActionSyntaxError: naming the part that was not understood.
    """
    name, colon, settings = text.strip().partition(":")
    if name not in _OTHERS:
        return OwnAction(parse_action(text))
    known, make = _OTHERS[name]
    given = dict(known)
    for part in settings.split(",") if colon else []:
        key, _, number = part.strip().partition("=")
        if key not in known or not number.isdecimal():
            raise ActionSyntaxError(
                f"{text!r}: cannot read {part.strip()!r}; {name} takes {', '.join(f'{k}=N' for k in known)}"
            )
        given[key] = int(number)
    missing = [k for k, v in given.items() if v is None]
    if missing:
        raise ActionSyntaxError(f"{text!r}: give {missing[0]}=N")
    found: Subject = make(*given.values())
    return found


def parse_subjects(texts: Sequence[str]) -> list[Subject]:
    """All of ``texts``, which white space separates within one, in order and without repetitions."""
    found = {s.text: s for text in texts for s in (parse_subject(t) for t in text.split())}
    return list(found.values())
