"""Carry out an action on layers, one layer at a time, and prove from the arrays that it happened."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .actions import Action, Evict, Keep, Offload, Plan, Quantize, Reclaim, Reserve, singles
from .backend.capabilities import OWN_PACKED_ATTENTION
from .codecs import CODECS, Codec
from .errors import ActionInfeasibleError, EngagementError
from .estimate import Held, after_action, applies, nbytes_allocated, nbytes_live, rows_to_disk
from .evict import evict, why_unforeseen, why_unseen, would_lose
from .guarding import Guard, guarded
from .layers import ArraysCache, ChunkedKVCache, KVCache, ManagedLayer, RotatingKVCache, RowLayer
from .rows import Pinned
from .scorers import SCORERS
from .scorers.banked import BANKED
from .scorers.observed import OBSERVED
from .seen import UNHOOKED

if TYPE_CHECKING:
    from .disk import DiskStore

__all__ = [
    "Applied",
    "Footprint",
    "execute",
    "first_guarded",
    "held",
    "held_all",
    "not_built",
    "opaque_nbytes",
    "why_not_protected",
]


@dataclass(frozen=True)
class Footprint:
    """Bytes at one moment: the layers' live rows, their allocation, and what MLX counts for the whole process."""

    nbytes_live: int
    nbytes_allocated: int
    mlx_active: int
    mlx_pool: int

    @classmethod
    def of(cls, layers: Iterable[Any]) -> Footprint:
        now = held_all(layers)
        return cls(nbytes_live(now), nbytes_allocated(now), mx.get_active_memory(), mx.get_cache_memory())


@dataclass(frozen=True)
class Applied:
    """What an action did: asked against observed, measured around it. Execution state: real."""

    action: Action
    before: Footprint
    after: Footprint
    predicted_live: int
    predicted_allocated: int
    layers_changed: tuple[str, ...]
    rows_before: int
    rows_after: int
    seconds: float  #: of the action itself; what the model still owed the arrays before it is not in it
    #: Most bytes allocated on the way, the layers' and the action's own; None where MLX's highest mark hides it.
    observed_peak: int | None = None
    #: Layers that the outlier guard did something else to, by name: the action as done, or ``keep``.
    guarded: Mapping[str, str] = field(default_factory=dict)


def held(layer: Any) -> Held:
    """The storage of one cache object as numbers, without reading any array."""
    name = getattr(layer, "name", type(layer).__name__)
    if isinstance(layer, ArraysCache):
        return Held(name, "not_kv", fixed_nbytes=layer.nbytes_allocated, index=layer.index)
    if not isinstance(layer, RowLayer):
        return Held(name, "opaque", fixed_nbytes=opaque_nbytes(layer))
    shapes = layer.shapes
    if shapes is None:
        return Held(name, layer.kind, max_size=_limit(layer), offset=layer.offset, index=layer.index)
    return Held(
        name,
        layer.kind,
        rows=layer.rows,
        capacity=layer.capacity,
        offset=int(layer.offset),
        key_width=shapes[0][0] * shapes[0][1],
        value_width=shapes[1][0] * shapes[1][1],
        itemsize=layer.itemsize,
        layout=layer.layout,
        heads=shapes[0][0],
        max_size=_limit(layer),
        keep=layer.keep if isinstance(layer, RotatingKVCache) else 0,
        index=layer.index,
        evicted=layer.evicted,
        **_parts_of(layer),
    )


def _parts_of(layer: RowLayer) -> dict[str, int]:
    store = layer.store if isinstance(layer, KVCache) else None
    if store is None:
        return {}
    room = store.layout.tail_capacity if store.tail_keys is not None else 0
    return {"tail": store.tail, "tail_capacity": room, "on_disk": store.on_disk, "head": store.head}


def _limit(layer: ManagedLayer) -> int:
    """Rows (tokens) of the sliding window or attention chunk; 0 without one."""
    if isinstance(layer, RotatingKVCache):
        return int(layer.max_size)
    return int(layer.chunk_size) if isinstance(layer, ChunkedKVCache) else 0


def held_all(layers: Iterable[Any]) -> tuple[Held, ...]:
    return tuple(held(layer) for layer in layers)


def execute(
    layers: Sequence[Any],
    action: Action,
    *,
    pinned: Pinned = (),
    disk: DiskStore | None = None,
    guard: Guard | None = None,
) -> Applied:
    """Carry out ``action`` on every layer it applies to and check that it took hold.

    Layer by layer: new buffers are evaluated and the old ones dropped before the next layer is touched, so that the
    transient is one layer, not all. Afterwards MLX's buffer pool is returned.

    Args:
        pinned: ranges of absolute positions (first, end) whose rows are not evicted.
        disk: where rows are written to; needed only to offload.
        guard: raises the bits of layers that the action's would spoil; None for none.

    Raises:
        ActionInfeasibleError: this library has no code for the action, there is no disk to write to, a row that must
            stay would be evicted, or attention was to be watched or served that is not; nothing was changed.
        DiskTierError: rows could not be written to, or read back from, their file; layers before that one are changed.
        EngagementError: the bytes or rows afterwards are not those that were asked for.
    """
    _check_executable(action, disk)
    targets = [layer for layer in layers if isinstance(layer, RowLayer) and layer.rows > 0]
    # Whatever the model still owes these arrays is computed first, in the model's own order: converting a layer whose
    # inputs are unevaluated would keep the old buffers of all layers before it alive.
    mx.eval([(layer.keys, layer.values) for layer in targets])
    start = time.perf_counter()
    asked = held_all(layers)
    why = why_not_protected(targets, action, pinned)
    if why is not None:
        raise ActionInfeasibleError(f"{why}; keep more rows, or protect fewer")
    _check_hooked(targets, action)
    before, mark = Footprint.of(layers), mx.get_peak_memory()
    rows_before = max((one.rows for one in asked if one.kind == "kv"), default=0)
    done: dict[int, list[Action]] = {}
    changes: dict[str, str] = {}
    for layer, part in _in_order(targets, action):
        effective = _effective(layer, part, guard)
        _act(layer, effective, pinned, disk)
        done.setdefault(id(layer), []).append(effective)
        if effective != part:
            changes[layer.name] = str(effective)
    predicted = tuple(
        _after(one, done.get(id(layer), []), pinned) for one, layer in zip(asked, layers, strict=True)
    )
    peak = mx.get_peak_memory()
    mx.clear_cache()
    observed = held_all(layers)
    after = Footprint.of(layers)
    _check_engaged(action, predicted, observed, layers)
    return Applied(
        action=action,
        before=before,
        after=after,
        predicted_live=nbytes_live(predicted),
        predicted_allocated=nbytes_allocated(predicted),
        layers_changed=tuple(b.name for a, b in zip(asked, observed, strict=True) if a != b),
        rows_before=rows_before,
        rows_after=max((one.rows for one in observed if one.kind == "kv"), default=0),
        seconds=time.perf_counter() - start,
        observed_peak=before.nbytes_allocated + peak - before.mlx_active if peak > mark else None,
        guarded=changes,
    )


def _effective(layer: RowLayer, part: Action, guard: Guard | None) -> Action:
    """What is done to ``layer`` for ``part``: the guard may have it that more bits are needed, or nothing at all."""
    if guard is None or not isinstance(part, Quantize) or not applies(held(layer), part):
        return part
    assert isinstance(layer, KVCache | RotatingKVCache | ChunkedKVCache)
    return guarded(layer, part, guard) or Keep()


def first_guarded(layers: Iterable[Any], action: Action, guard: Guard) -> tuple[str, Quantize, Action] | None:
    """The first layer, by name, to which the guard would do something else than ``action`` says: the part, and what.

    Looked at before anything is done, so on rows that an eviction of the same action may yet drop.
    """
    targets = [layer for layer in layers if isinstance(layer, RowLayer) and layer.rows > 0]
    for layer, part in _in_order(targets, action):
        if isinstance(part, Quantize) and (effective := _effective(layer, part, guard)) != part:
            return layer.name, part, effective
    return None


def _after(one: Held, parts: Iterable[Action], pinned: Pinned) -> Held:
    for part in parts:
        [one] = after_action([one], part, pinned)
    return one


def why_not_protected(layers: Iterable[Any], action: Action, pinned: Pinned) -> str | None:
    """Why ``action`` would evict a row that must stay: the first, the last or a pinned one; None if it does not."""
    for layer in layers:
        if isinstance(layer, KVCache) and layer.rows > 0:
            parts = action.for_layer(layer.index).parts if isinstance(action, Plan) else action.parts
            why = would_lose(layer, held(layer), parts, pinned)
            if why is not None:
                return why
    return None


def _in_order(targets: Sequence[RowLayer], action: Action) -> Iterator[tuple[RowLayer, Action]]:
    """Part by part and within it layer by layer: all layers are smaller before the next part needs memory."""
    if isinstance(action, Plan):
        for layer in targets:
            for part in action.for_layer(layer.index).parts:
                yield layer, part
        return
    for part in action.parts:
        for layer in targets:
            yield layer, part


def not_built(action: Action) -> str | None:
    """Why this version of the library cannot carry ``action`` out whatever the backend; None if it can."""
    each = action.distinct if isinstance(action, Plan) else (action,)
    for part in (part for one in each for part in one.parts):
        match part:
            case Keep() | Reclaim() | Reserve():
                continue
            case Evict():
                if not any(part.scorer in built for built in (SCORERS, BANKED, OBSERVED)):
                    return f"the scorer {part.scorer}"
            case Quantize():
                if part.codec not in CODECS:
                    return f"the codec {part.codec}"
            case Offload(how="layers" | "cold"):
                continue
            case Offload():
                return f"offload:{part.how}"
            case _:
                return str(part).partition(":")[0]
    return None


def _check_executable(action: Action, disk: DiskStore | None) -> None:
    missing = not_built(action)
    if missing is not None:
        raise ActionInfeasibleError(f"{action}: this version of lumina_cache has no code for {missing}")
    if disk is None and any(isinstance(part, Offload) for part in singles(action)):
        raise ActionInfeasibleError(f"{action}: this cache has no disk tier; give LuminaCache(disk=…)")


def _check_hooked(targets: Sequence[RowLayer], action: Action) -> None:
    """Raises ActionInfeasibleError where an action needs attention calls that nobody watches or serves, or a query bank."""
    for layer, part in _in_order(targets, action):
        if isinstance(part, Evict) and isinstance(layer, KVCache):
            why = why_unseen(layer, part) or why_unforeseen(layer, part)
            if why is not None:
                raise ActionInfeasibleError(why)
        elif OWN_PACKED_ATTENTION in part.requires and applies(held(layer), part) and not layer.served:
            raise ActionInfeasibleError(UNHOOKED)


def _act(layer: RowLayer, action: Action, pinned: Pinned, disk: DiskStore | None) -> None:
    now = held(layer)
    if not applies(now, action) or after_action([now], action, pinned) == (now,):
        return
    if isinstance(action, Quantize):
        _reencode(layer, action)
        return
    assert isinstance(layer, KVCache)
    match action:
        case Reclaim():
            layer.compact()
        case Reserve():
            layer.reserve(action.rows)
        case Evict():
            evict(layer, action, pinned)
        case Offload():
            assert disk is not None
            if action.layers is None or action.layers[0] <= layer.index <= action.layers[1]:
                store = layer.own_store()
                rows = rows_to_disk(action, store.on_disk + store.sealed, store.layout.block)
                layer.offload(disk, rows)


def _reencode(layer: RowLayer, action: Quantize) -> None:
    assert action.layout is not None
    assert isinstance(layer, KVCache | RotatingKVCache | ChunkedKVCache)
    lowest = layer.history.lowest_bits
    drifts = layer.reencode(action.layout)
    sides = action.layout.keys, action.layout.values
    if any(d == 0.0 and _must_lose(side, lowest) for d, side in zip(drifts, sides, strict=True)):
        raise EngagementError(
            f"{action}: {layer.name} gives back exactly the rows that it was given, which no code of "
            f"{action.key_bits} and {action.value_bits} bits can do: nothing was encoded"
        )


def _must_lose(codec: Codec, lowest_bits: int | None) -> bool:
    """Whether rows cannot come through unchanged; those that were held at as few bits before may."""
    return codec.code_bits is not None and (lowest_bits is None or codec.code_bits < lowest_bits)


def _check_engaged(
    action: Action, predicted: Sequence[Held], observed: Sequence[Held], layers: Sequence[Any]
) -> None:
    for want, got, layer in zip(predicted, observed, layers, strict=True):
        if replace(want, name=got.name) != got:
            raise EngagementError(f"{action}: {got.name} should hold {want} but holds {got}")
        if not isinstance(layer, RowLayer):
            continue
        asked = nbytes_allocated([want]), nbytes_live([want])
        taken = layer.nbytes_allocated, layer.nbytes_live
        if asked != taken:
            raise EngagementError(
                f"{action}: {got.name} should take {asked[0]} bytes, {asked[1]} of them for rows held, "
                f"but takes {taken[0]} and {taken[1]}"
            )


def opaque_nbytes(entry: Any) -> int:
    """What a cache object of an unknown class says of its own size; 0 only where it says so or cannot."""
    try:
        return int(entry.nbytes)
    except Exception:
        return 0
