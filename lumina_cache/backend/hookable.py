"""Which layers of one model the attention hook reaches, found by running the model on a few tokens.

A layer is reached if its rows are attended to exactly once in each step, by a call that names it. Some models compute
attention themselves (scores capped by a tanh, kernels called directly), some read one layer's rows from several places;
those are listed with the reason instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..layers import CacheList, ManagedLayer, adopt, leaves, managed
from ..steps import StepTracker
from .attention import AttentionHook, attention_hook, tap
from .bench import FILLED, forward

__all__ = ["Hookable", "HookedLayer", "hookable"]

#: Tokens of the steps that are watched: a chunk of a prompt, then one of decoding.
STEPS = (2, 1)


@dataclass(frozen=True)
class HookedLayer:
    """What the hook sees of one layer that holds rows."""

    name: str
    kind: str
    #: Attention calls that name the layer, in each of the steps watched.
    calls: tuple[int, ...]
    #: Whether attention is handed the very arrays that the layer returned: only then can a server be given another form.
    direct: bool
    #: Why it is not reached; None if it is.
    reason: str | None = None


@dataclass(frozen=True)
class Hookable:
    """What the hook sees of one model."""

    layers: tuple[HookedLayer, ...]
    sites: tuple[str, ...]  #: names in module globals that hold the call

    @property
    def seen(self) -> tuple[str, ...]:
        """Names of the layers whose attention the hook sees, once in each step."""
        return tuple(layer.name for layer in self.layers if layer.reason is None)

    @property
    def unseen(self) -> dict[str, str]:
        """Names of the other layers that hold rows, with the reason."""
        return {layer.name: layer.reason for layer in self.layers if layer.reason is not None}

    @property
    def servable(self) -> tuple[str, ...]:
        """Names of the layers whose attention could be computed from another form of their rows."""
        return tuple(layer.name for layer in self.layers if layer.reason is None and layer.direct)

    def __bool__(self) -> bool:
        return bool(self.seen)

    def __str__(self) -> str:
        if not self.layers:
            return "the model holds no rows"
        reasons = dict.fromkeys(self.unseen.values())
        text = f"{len(self.seen)} of {len(self.layers)} layers seen"
        return "; ".join([text, *reasons])


@dataclass
class _Watched:
    """What was seen of one layer in one step."""

    calls: int = 0
    direct: bool = True
    updated_by: tuple[str, CodeType] | None = None
    fetched: tuple[Any, Any] | None = None
    foreign: int = 0


@dataclass
class _Watcher:
    """Observes every layer of one cache; holds what it saw by the layer's name."""

    seen: dict[str, _Watched] = field(default_factory=dict)

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
        one = self.seen.setdefault(layer.name, _Watched())
        one.calls += 1
        one.direct &= one.fetched is not None and keys is one.fetched[0] and values is one.fetched[1]
        return ()

    def update(self, name: str, update: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            caller = sys._getframe(1)
            one = self.seen.setdefault(name, _Watched())
            one.updated_by = str(caller.f_globals.get("__name__")), caller.f_code
            one.fetched = update(*args, **options)
            return one.fetched

        return watched


def hookable(model: Any) -> Hookable:
    """Run ``model`` on a few tokens of a throw-away cache and say which of its layers the hook reaches.

    Leaves no hook, array or state behind.

    Raises:
        UnsupportedCacheError: if ``model`` is not a model, or its cache is of a kind that is not managed.
    """
    with attention_hook(model) as hook:
        steps = StepTracker(name="probe")
        entries = [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))]
        forward(model, entries, FILLED, 0)
        watched, position = [], FILLED
        for tokens in STEPS:
            watched.append(_watch(model, entries, hook, tokens, position))
            position += tokens
        rows = [leaf for leaf in leaves(entries) if isinstance(leaf, ManagedLayer) and leaf.holds_rows]
        found = (_judged(leaf, _list_of(leaf, entries), watched) for leaf in rows if leaf.name in watched[0])
        return Hookable(tuple(found), hook.sites)


def _watch(
    model: Any, entries: list[Any], hook: AttentionHook, tokens: int, position: int
) -> dict[str, _Watched]:
    watcher = _Watcher()
    layers = [layer for entry in entries for layer in managed(entry)]
    rows: list[Any] = [layer for layer in layers if layer.holds_rows]
    try:
        for layer in layers if hook.sites else ():
            hook.observe(layer, watcher)
        for layer in rows:
            layer.__dict__["update_and_fetch"] = watcher.update(layer.name, layer.update_and_fetch)
        tap.calls = []
        forward(model, entries, tokens, position)
        _count_foreign(watcher, rows, tap.calls)
    finally:
        tap.calls = None
        for layer in layers:
            layer.__dict__.pop("update_and_fetch", None)
            hook.release(layer)
    return watcher.seen


def _count_foreign(watcher: _Watcher, rows: Iterable[Any], calls: list[Any]) -> None:
    """Calls that name no cache and read rows of a layer all the same."""
    read = [kwargs["keys"] if "keys" in kwargs else args[1] for args, kwargs in calls]
    for layer in rows:
        one = watcher.seen.get(layer.name)
        if one is None or one.fetched is None:
            continue
        held = one.fetched[0]
        one.foreign = sum(keys is held or (_same(keys, held)) for keys in read)


def _same(a: Any, b: Any) -> bool:
    return (
        isinstance(a, mx.array)
        and isinstance(b, mx.array)
        and a.shape == b.shape
        and bool(mx.array_equal(a, b).item())
    )


def _list_of(leaf: ManagedLayer, entries: list[Any]) -> str | None:
    """Name of the list of caches that ``leaf`` is part of."""
    for entry in entries:
        if isinstance(entry, CacheList) and leaf in list(managed(entry)):
            return entry.name
    return None


def _judged(leaf: ManagedLayer, in_list: str | None, watched: list[dict[str, _Watched]]) -> HookedLayer:
    seen = [w.get(leaf.name, _Watched()) for w in watched]
    calls = tuple(one.calls for one in seen)
    return HookedLayer(
        leaf.name,
        leaf.kind,
        calls,
        all(one.calls and one.direct for one in seen),
        _reason(calls, max(one.foreign for one in seen), seen[0].updated_by, in_list, watched),
    )


def _reason(
    calls: tuple[int, ...],
    foreign: int,
    updated_by: tuple[str, CodeType] | None,
    in_list: str | None,
    watched: list[dict[str, _Watched]],
) -> str | None:
    if foreign:
        return f"its rows are also read by {foreign} calls that name no cache"
    if all(n == 1 for n in calls):
        return None
    if max(calls) > 1:
        return f"its rows are attended to {max(calls)} times in one step"
    if in_list is not None and any(in_list in w for w in watched):
        return "attention names a list of caches, not the one whose rows it reads"
    if any(calls):
        return f"attention names it in some steps only ({', '.join(map(str, calls))})"
    if updated_by is None:
        return "attention over its rows is nowhere to be seen"
    module, code = updated_by
    return f"{code.co_qualname} of {module} {_instead(code)}"


def _instead(code: CodeType) -> str:
    """What a function that updates a cache does in place of calling mlx-lm's attention."""
    if {"fast", "scaled_dot_product_attention"} <= set(code.co_names):
        return "calls mx.fast.scaled_dot_product_attention itself"
    if "softmax" in code.co_names:
        return "computes its softmax by hand"
    return "does not call mlx-lm's attention"
