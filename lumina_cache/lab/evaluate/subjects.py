"""What is compared: actions of this library, and other ways to shrink the same cache (mlx-lm's own, other packages').

Every subject gets the same full cache, as the prompt left it, and gives back a changed copy of it. Text forms are those
of actions, and for the others::

    spread:evict:h2o_mean@0.25      the eviction with rows for each layer by the attention in it, see ``LuminaCache.spread``
    mlx-lm:kv_bits=4,group=64       mlx-lm's own conversion, as its ``kv_bits`` option does it
    mlx-lm:max_kv_size=50%          mlx-lm's own eviction, its rotating cache, with a share of the rows held, or as many
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
from ...backend.attention import stepped_aside
from ...backend.capabilities import DISK_TIER, RAGGED_LAYERS, Capability, Rung
from ...cache import LuminaCache
from ...errors import ActionInfeasibleError, ActionSyntaxError, EngagementError
from ...scorers.observed import OBSERVED
from ..answer import detached_copy
from .rotating import KEEP, rotating

__all__ = [
    "OwnAction",
    "Reasons",
    "Refused",
    "Spread",
    "Subject",
    "Taken",
    "is_placebo",
    "is_reference",
    "parse_subject",
    "parse_subjects",
]

SPREAD = "spread"

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
    def rung(self) -> Rung | None:
        """How deep it reaches by itself; None for an action, of which the cache decides."""
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
    def rung(self) -> Rung | None:
        return None

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
    def requires(self) -> frozenset[Capability]:
        """Capabilities that a backend must have for it."""
        return self.action.requires

    @property
    def needs_disk(self) -> bool:
        return DISK_TIER in self.requires

    @property
    def observes(self) -> tuple[str, ...]:
        evictions = (part for part in singles(self.action) if isinstance(part, Evict))
        return tuple(part.scorer for part in evictions if part.scorer in OBSERVED)

    def _on(self, fork: LuminaCache) -> Action:
        """What is carried out on ``fork``."""
        return self.action

    def take(self, full: LuminaCache, model: Any) -> Taken:
        fork = detached_copy(full)
        try:
            applied = fork.apply(self._on(fork))
        except ActionInfeasibleError as error:
            reasons = _reasons(fork, error)  # before closing writes another record
            fork.close()
            raise Refused(reasons) from None
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


@dataclass(frozen=True)
class Spread(OwnAction):
    """An eviction whose rows are handed out over the layers by what each of them attends to."""

    @property
    def text(self) -> str:
        return f"{SPREAD}:{self.action}"

    @property
    def requires(self) -> frozenset[Capability]:
        return self.action.requires | {RAGGED_LAYERS}

    def _on(self, fork: LuminaCache) -> Action:
        return fork.spread(self.action)


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
    def rung(self) -> Rung:
        return Rung.NATIVE

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
class StockRotating(_Plain):
    """mlx-lm's rotating cache with the newest rows of the full one, see :mod:`.rotating`: what ``max_kv_size`` keeps.

    Exactly one of ``rows`` (tokens) and ``share`` (of the rows held) is given. With ``bits`` the rows would have to be
    packed as well, which mlx-lm's class refuses.
    """

    rows: int | None = None
    share: float | None = None
    bits: int | None = None
    group_size: int = 64

    @property
    def text(self) -> str:
        size = f"{self.rows}" if self.share is None else f"{100 * self.share:g}%"
        packed = "" if self.bits is None else f",kv_bits={self.bits},group={self.group_size}"
        return f"mlx-lm:max_kv_size={size}{packed}"

    def size(self, held: int) -> int:
        """Rows that are kept of ``held``, and from then on."""
        if self.share is not None:
            return round(self.share * held)
        assert self.rows is not None, "the parser gives one of them"
        return self.rows

    @property
    def rung(self) -> Rung:
        return Rung.NATIVE

    @property
    def version(self) -> str:
        return importlib.metadata.version("mlx-lm")

    def take(self, full: LuminaCache, model: Any) -> Taken:
        plain = _plain(full)
        held = max((int(e.offset) for e in plain if type(e) is stock.KVCache), default=0)
        if held == 0:
            raise Refused(
                ({"code": "nothing_to_change", "text": "mlx-lm: no layer holds rows in a full cache"},)
            )
        size = self.size(held)
        if size <= KEEP:
            text = f"mlx-lm: a rotating cache of {size} rows has no room beside the {KEEP} that it keeps"
            raise Refused(({"code": "too_few_rows", "text": text, "wanted": size, "limit": KEEP},))
        start = time.perf_counter()
        cache = rotating(plain, size)
        if self.bits is not None:
            try:
                cache = [entry.to_quantized(group_size=self.group_size, bits=self.bits) for entry in cache]
            except NotImplementedError as error:
                raise Refused(({"code": "refused", "text": f"mlx-lm: {_line(error)}"},)) from None
        mx.eval([entry.state for entry in cache])
        return Taken(cache, time.perf_counter() - start, size < held)


@dataclass(frozen=True)
class TurboQuant(_Plain):
    """The package mlx-turboquant: its caches, filled with the rows of the full one."""

    bits: int
    group_size: int

    @property
    def text(self) -> str:
        return f"mlx-turboquant:bits={self.bits},group={self.group_size}"

    @property
    def rung(self) -> Rung:
        # It puts a function of its own in the place of mlx-lm's attention.
        return Rung.HOOK

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


def is_reference(subject: Subject) -> bool:
    """Whether it is measured for comparison only: what another package does is no action of any rung."""
    return isinstance(subject, TurboQuant)


def is_placebo(subject: Subject) -> bool:
    """Whether it drops rows by lot: what anything that looks at the rows has to beat."""
    return isinstance(subject, OwnAction) and any(
        isinstance(part, Evict) and part.scorer == "random" for part in singles(subject.action)
    )


@contextmanager
def _mlx_lm_as_it_was() -> Iterator[None]:
    """Undo what a package does to mlx-lm's functions: others are measured in the same process."""
    with stepped_aside():
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


#: Prefix of the text form → the settings it takes.
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "mlx-lm": ("kv_bits", "group", "max_kv_size"),
    "mlx-turboquant": ("bits", "group"),
}


def parse_subject(text: str) -> Subject:
    """An action's text form, or ``mlx-lm:…`` or ``mlx-turboquant:…``.

    Raises:
        ActionSyntaxError: naming the part that was not understood.
    """
    name, colon, settings = text.strip().partition(":")
    if name == SPREAD:
        return Spread(parse_action(settings))
    if name not in _SETTINGS:
        return OwnAction(parse_action(text))
    known = _SETTINGS[name]
    given: dict[str, str] = {}
    for part in settings.split(",") if colon else []:
        key, _, value = part.strip().partition("=")
        number = value.removesuffix("%") if key == "max_kv_size" else value
        if key not in known or not _is_number(number, whole=number == value):
            raise ActionSyntaxError(
                f"{text!r}: cannot read {part.strip()!r}; {name} takes {', '.join(f'{k}=N' for k in known)}"
            )
        given[key] = value
    group = int(given.get("group", 64))
    if name == "mlx-turboquant":
        return TurboQuant(int(_needed(given, "bits", text)), group)
    if "max_kv_size" not in given:
        if "kv_bits" not in given:
            raise ActionSyntaxError(f"{text!r}: give kv_bits=N or max_kv_size=N")
        return StockQuantized(int(given["kv_bits"]), group)
    bits = int(given["kv_bits"]) if "kv_bits" in given else None
    size = given["max_kv_size"]
    if not size.endswith("%"):
        return StockRotating(rows=int(size), bits=bits, group_size=group)
    share = float(size[:-1]) / 100
    if not 0.0 < share < 1.0:
        raise ActionSyntaxError(f"{text!r}: max_kv_size={size} must lie between 0 and 100 %")
    return StockRotating(share=share, bits=bits, group_size=group)


def _is_number(text: str, *, whole: bool) -> bool:
    first, point, rest = text.partition(".")
    return first.isdecimal() and (rest.isdecimal() if point else True) and not (whole and point)


def _needed(given: Mapping[str, str], key: str, text: str) -> str:
    if key not in given:
        raise ActionSyntaxError(f"{text!r}: give {key}=N")
    return given[key]


def parse_subjects(texts: Sequence[str]) -> list[Subject]:
    """All of ``texts``, which white space separates within one, in order and without repetitions."""
    found = {s.text: s for text in texts for s in (parse_subject(t) for t in text.split())}
    return list(found.values())
