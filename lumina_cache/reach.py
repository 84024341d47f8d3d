"""How deep one cache reaches into the backend, and what it holds there while it does.

The *rung* says how much may be used: ``native``, mlx-lm's own layouts and packed attention; ``cache``, an own cache
object behind mlx-lm's interface; ``hook``, also the calls of attention themselves, which are watched for the scorers that
rank rows by them, and served from codes where rows are encoded. A rung is part of what the backend can do, so it is said
in the profile: everything that decides what is feasible reads it there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .actions import Action, Evict, singles
from .backend.attention import AttentionHook, attention_hook
from .backend.capabilities import (
    ATTENTION_WEIGHTS,
    OWN_PACKED_ATTENTION,
    QUERIES,
    QUERY_STATISTICS,
    BackendProfile,
    Capability,
    Outcome,
    Rung,
    observed,
)
from .backend.hookable import Hookable, HookedLayer, hookable
from .backend.isolate import first_line
from .backend.observing import attended, rotations
from .backend.serving import PackedServer
from .bank import NO_BANK, banks_of
from .errors import UnsupportedCacheError
from .layers import ChunkedKVCache, KVCache, ManagedLayer, RotatingKVCache, RowLayer
from .scorers.observed import OBSERVED, Rotation
from .seen import UNHOOKED, Seen

__all__ = ["DEFAULT_OBSERVED", "Reach", "rung_of"]

#: Watched at rung hook unless somebody says otherwise: it keeps queries and computes nothing while the model runs.
DEFAULT_OBSERVED = ("snapkv",)

_NAMES = {"native": Rung.NATIVE, "cache": Rung.CACHE, "hook": Rung.HOOK}
_NATIVE = "this cache was opened at rung native, which has mlx-lm's own layouts and packed attention only"
_CLOSED = "this cache was closed, and its attention hook with it"


def rung_of(name: str | Rung) -> Rung:
    """The rung that a caller named.

    Raises:
        UnsupportedCacheError: for any other name.
    """
    if isinstance(name, Rung) and name in _NAMES.values():
        return name
    if name in _NAMES:
        return _NAMES[str(name)]
    raise UnsupportedCacheError(f"rung={name!r}: give one of {', '.join(map(repr, _NAMES))}")


@dataclass(frozen=True)
class _Known:
    """What the hook reaches of one model."""

    layers: Mapping[str, HookedLayer]
    none: str | None = None  #: why it reaches nothing
    rotations: Mapping[str, Rotation] | None = None  #: None while nobody has needed them

    def why_unseen(self, name: str) -> str | None:
        one = self.layers.get(name)
        if one is None:
            return self.none or "its attention is nowhere to be seen"
        return one.reason

    def why_unserved(self, name: str) -> str | None:
        why = self.why_unseen(name)
        if why is None and not self.layers[name].direct:
            return "attention reads other arrays than the layer returns"
        return why

    def why_unranked(self, name: str, scorer: str) -> str | None:
        """Why ``scorer`` cannot be kept statistics for."""
        why = self.why_unseen(name)
        if why is not None:
            return why
        if OBSERVED[scorer].reads_keys and not self.layers[name].direct:
            return "attention reads other keys than those held, which this scorer ranks rows by"
        if OBSERVED[scorer].needs_rotation and name not in (self.rotations or {}):
            return "how its queries are rotated could not be told"
        return None


class Reach:
    """The rung of one cache; at rung hook, an open hook with what it watches and serves. Holds layers weakly."""

    def __init__(self, rung: Rung = Rung.CACHE, model: Any = None, scorers: Iterable[str] = ()) -> None:
        """Opens the hook, at rung hook; ``scorers``: names of those whose statistics are kept."""
        self.rung = rung
        self.scorers = tuple(dict.fromkeys(scorers))
        self._attached: weakref.WeakSet[RowLayer] = weakref.WeakSet()
        self._hook: AttentionHook | None = None
        self._banks = None if model is None or rung == Rung.NATIVE else banks_of(model)
        if rung == Rung.HOOK:
            self._known = _known(model, any(OBSERVED[s].needs_rotation for s in self.scorers))
            self._hook = attention_hook(model)

    @classmethod
    def asked(
        cls, rung: str | Rung, model: Any, observe: Iterable[str] | str | None, plan: Action | None
    ) -> Reach:
        """What the arguments of a cache ask for.

        Raises:
            UnsupportedCacheError: an unknown rung or scorer, or scorers to watch for without a hook.
        """
        level = rung_of(rung)
        names = (observe,) if isinstance(observe, str) else None if observe is None else tuple(observe)
        if names and level != Rung.HOOK:
            raise UnsupportedCacheError(f"observe={observe!r} at rung {level.name.lower()}: {UNHOOKED}")
        for name in names or ():
            if name not in OBSERVED:
                raise UnsupportedCacheError(
                    f"observe: there is no scorer {name!r} that watches attention; known: {', '.join(OBSERVED)}"
                )
        planned = [] if plan is None else [p.scorer for p in singles(plan) if isinstance(p, Evict)]
        named = [name for name in planned if name in OBSERVED]
        if names is None:
            names = tuple(named) or DEFAULT_OBSERVED
        return cls(level, model, (*names, *named))

    def copy(self, model: Any) -> Reach:
        """For a copy of the cache: the same, with a hook of its own."""
        return Reach(self.rung, model, self.scorers)

    @property
    def closed(self) -> bool:
        return self._hook is not None and self._hook.closed

    def close(self) -> None:
        """Close the hook; layers are attended to by mlx-lm again."""
        for layer in list(self._attached):
            layer.served = layer.hands_out = False
        self._attached.clear()
        if self._hook is not None:
            self._hook.close()

    def attach(self, layers: Iterable[Any]) -> None:
        """Let the hook reach ``layers`` and no others, and tell all of them where the model's query bank is."""
        layers = list(layers)
        for layer in layers:
            if isinstance(layer, KVCache):
                layer.banks = self._banks
        hook = self._hook
        if hook is None or hook.closed:
            return
        wanted = {layer for layer in layers if isinstance(layer, RowLayer)}
        for layer in set(self._attached) - wanted:
            layer.served = layer.hands_out = False
            hook.release(layer)
            self._attached.discard(layer)
        for layer in wanted - set(self._attached):
            self._attach(hook, layer)

    def _attach(self, hook: AttentionHook, layer: RowLayer) -> None:
        known = self._known
        names = [s for s in self.scorers if known.why_unranked(layer.name, s) is None]
        if isinstance(layer, KVCache) and names:
            if layer.seen is None or set(layer.seen.scorers) != set(names):
                rotation = (known.rotations or {}).get(layer.name)
                layer.seen = Seen({s: OBSERVED[s]() for s in names}, rotation)
            hook.observe(layer, _OBSERVER)
            self._attached.add(layer)
        if known.why_unseen(layer.name) is None:
            hook.serve(layer, _SERVER)
            layer.hands_out, layer.served = True, known.why_unserved(layer.name) is None
            self._attached.add(layer)

    # -- what is feasible -------------------------------------------------------------------------------------------

    def profile(self, found: BackendProfile, layers: Sequence[Any]) -> BackendProfile:
        """``found`` as far as this rung goes, with what the hook adds for ``layers`` as they are now."""
        if self.rung == Rung.NATIVE:
            deep = [c for c in {*found.outcomes, QUERY_STATISTICS, *_HOOKED} if c.rung > Rung.NATIVE]
            return replace(found, outcomes={**found.outcomes, **dict.fromkeys(deep, Outcome(False, _NATIVE))})
        found = replace(found, outcomes={**found.outcomes, QUERY_STATISTICS: self._foreseen(layers)})
        if self._hook is None:
            more = {c: Outcome(False, UNHOOKED) for c in _HOOKED if c not in found.outcomes}
            return replace(found, outcomes={**found.outcomes, **more})
        if self._hook.closed:
            return replace(
                found, outcomes={**found.outcomes, **dict.fromkeys(_HOOKED, Outcome(False, _CLOSED))}
            )
        return replace(found, outcomes={**found.outcomes, **self._outcomes(layers)})

    def _foreseen(self, layers: Sequence[Any]) -> Outcome:
        """Whether there is a query bank of the model, and what of ``layers`` is not in it."""
        lacking = NO_BANK if self._banks is None else self._banks.lacking
        if lacking is not None or self._banks is None:
            return Outcome(False, lacking)
        rows = [layer for layer in layers if isinstance(layer, KVCache)]
        return _all_but((layer.name, self._banks.why_not(layer.name)) for layer in rows)

    def _outcomes(self, layers: Sequence[Any]) -> dict[Capability, Outcome]:
        known = self._known
        rows = [layer for layer in layers if isinstance(layer, KVCache)]
        seen = _all_but((layer.name, known.why_unseen(layer.name)) for layer in rows)
        encodable = [x for x in layers if isinstance(x, KVCache | RotatingKVCache | ChunkedKVCache)]
        served = _all_but((layer.name, known.why_unserved(layer.name)) for layer in encodable)
        outcomes = {QUERIES: seen, ATTENTION_WEIGHTS: seen, OWN_PACKED_ATTENTION: served}
        for name in OBSERVED:
            if name in self.scorers:
                outcomes[observed(name)] = _all_but((one.name, self._why_not(one, name)) for one in rows)
            else:
                asked = repr((*self.scorers, name))
                text = f"this cache does not watch for it; LuminaCache(…, observe={asked}) does"
                outcomes[observed(name)] = Outcome(False, text)
        return outcomes

    def _why_not(self, layer: KVCache, scorer: str) -> str | None:
        why = self._known.why_unranked(layer.name, scorer)
        if why is None and layer.seen is not None:
            why = layer.seen.why_not(scorer, int(layer.offset), layer.rows)
        return why

    # -- bytes ------------------------------------------------------------------------------------------------------

    def nbytes_after(self, n: int) -> int:
        """Bytes of what is kept of the attention after ``n`` more tokens, see :meth:`Seen.nbytes_after`."""
        return sum(layer.seen.nbytes_after(n) for layer in self._attached if layer.seen is not None)

    def room(self) -> int | None:
        """Tokens until :meth:`nbytes_after` can change; None if it never will."""
        rooms = [layer.seen.room() for layer in self._attached if layer.seen is not None]
        return min((room for room in rooms if room is not None), default=None)


_HOOKED = (QUERIES, ATTENTION_WEIGHTS, OWN_PACKED_ATTENTION, *map(observed, OBSERVED))


def _all_but(reasons: Iterable[tuple[str, str | None]]) -> Outcome:
    """Present if there is no reason against any layer; else absent, naming the layers by their reasons."""
    against: dict[str, list[str]] = {}
    for name, why in reasons:
        if why is not None:
            against.setdefault(why, []).append(name.removeprefix("layer "))
    if not against:
        return Outcome(True)
    return Outcome(False, "; ".join(f"{_listed(names)}: {why}" for why, names in against.items()))


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"layer {names[0]}"
    if len(names) > 6:
        return f"layers {', '.join(names[:5])} and {len(names) - 5} more"
    return f"layers {', '.join(names[:-1])} and {names[-1]}"


class _Observer:
    """Adds what it is shown to what its layers have seen; holds nothing itself."""

    def observe(
        self,
        layer: ManagedLayer,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> tuple[mx.array, ...]:
        seen = layer.seen
        if seen is None:
            return ()
        if queries.shape[2] > 1:
            # mlx-lm computes nothing of a chunk but its rows, so the last layer's output may never be asked for.
            mx.async_eval(seen.arrays)  # type: ignore[no-untyped-call]
        layer.seen = seen.after(attended(layer, queries, keys, scale, mask, sinks, seen.rotation))
        return layer.seen.arrays


_OBSERVER = _Observer()
_SERVER = PackedServer()

_remembered: dict[int, tuple[weakref.ref[Any], _Known]] = {}


def _known(model: Any, turned: bool) -> _Known:
    """What the hook reaches of ``model``, found by running it once per live model; ``turned``: rotations as well."""
    key = id(model)
    alive, known = _remembered.get(key, (None, None))
    if known is None or alive is None or alive() is not model:
        known = _reached(model)
    if turned and known.rotations is None:
        known = replace(known, rotations={} if known.none else rotations(model))
    _remembered[key] = (weakref.ref(model, lambda _: _remembered.pop(key, None)), known)
    return known


def _reached(model: Any) -> _Known:
    try:
        found: Hookable = hookable(model)
    except Exception as error:  # whatever a model does on a few tokens, the cache can be used without a hook
        return _Known({}, f"the model could not be run to see what a hook reaches ({first_line(error)})")
    return _Known({layer.name: layer for layer in found.layers})
