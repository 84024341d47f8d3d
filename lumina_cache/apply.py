"""Carry out an action on layers, one layer at a time, and prove from the arrays that it happened."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .actions import Action, Evict, Keep, Plan, Quantize, Reclaim
from .codecs import CODECS, Affine
from .errors import ActionInfeasibleError, EngagementError
from .estimate import Held, after_action, nbytes_allocated, nbytes_live
from .layers import ArraysCache, ChunkedKVCache, KVCache, ManagedLayer, RotatingKVCache
from .scorers import SCORERS

__all__ = ["Applied", "Footprint", "execute", "held", "held_all", "not_built", "opaque_nbytes"]


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


def held(layer: Any) -> Held:
    """The storage of one cache object as numbers, without reading any array."""
    name = getattr(layer, "name", type(layer).__name__)
    if isinstance(layer, ArraysCache):
        return Held(name, "not_kv", fixed_nbytes=layer.nbytes_allocated, index=layer.index)
    if not isinstance(layer, ManagedLayer):
        return Held(name, "opaque", fixed_nbytes=opaque_nbytes(layer))
    if layer.keys is None:
        return Held(name, layer.kind, max_size=_limit(layer), offset=layer.offset, index=layer.index)
    keys, values = layer.keys, layer.values
    codec = layer.codec
    if isinstance(codec, Affine):
        per_code = 32 // codec.bits if 32 % codec.bits == 0 else 0
        key_width = _width(keys[0]) * per_code if per_code else _width(keys[0]) * 32 // codec.bits
        value_width = _width(values[0]) * per_code if per_code else _width(values[0]) * 32 // codec.bits
        itemsize, bits, group, capacity = keys[1].dtype.size, codec.bits, codec.group_size, keys[0].shape[2]
    else:
        key_width, value_width = _width(keys), _width(values)
        itemsize, bits, group, capacity = keys.dtype.size, None, 0, keys.shape[2]
    return Held(
        name,
        layer.kind,
        rows=layer.rows,
        capacity=capacity,
        offset=int(layer.offset),
        key_width=key_width,
        value_width=value_width,
        itemsize=itemsize,
        bits=bits,
        group_size=group,
        max_size=_limit(layer),
        keep=layer.keep if isinstance(layer, RotatingKVCache) else 0,
        index=layer.index,
    )


def _limit(layer: ManagedLayer) -> int:
    """Rows (tokens) of the sliding window or attention chunk; 0 without one."""
    if isinstance(layer, RotatingKVCache):
        return int(layer.max_size)
    return int(layer.chunk_size) if isinstance(layer, ChunkedKVCache) else 0


def held_all(layers: Iterable[Any]) -> tuple[Held, ...]:
    return tuple(held(layer) for layer in layers)


def execute(layers: Sequence[Any], action: Action) -> Applied:
    """Carry out ``action`` on every layer it applies to and check that it took hold.

    Layer by layer: new buffers are evaluated and the old ones dropped before the next layer is touched, so that the
    transient is one layer, not all. Afterwards MLX's buffer pool is returned.

    Raises:
        ActionInfeasibleError: this library has no code for the action; nothing was changed.
        EngagementError: the bytes or rows afterwards are not those that were asked for.
    """
    _check_executable(action)
    targets = [layer for layer in layers if isinstance(layer, KVCache) and layer.rows > 0]
    # Whatever the model still owes these arrays is computed first, in the model's own order: converting a layer whose
    # inputs are unevaluated would keep the old buffers of all layers before it alive.
    mx.eval([(layer.keys, layer.values) for layer in targets])
    start = time.perf_counter()
    asked = held_all(layers)
    before = Footprint.of(layers)
    predicted = after_action(asked, action)
    rows_before = max((one.rows for one in asked if one.kind == "kv"), default=0)
    for part in action.parts:
        for layer in targets:
            _act(layer, part)
    mx.clear_cache()
    observed = held_all(layers)
    after = Footprint.of(layers)
    _check_engaged(action, predicted, observed)
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
    )


def not_built(action: Action) -> str | None:
    """Why this version of the library cannot carry ``action`` out whatever the backend; None if it can."""
    if isinstance(action, Plan):
        return "plans by layer"
    for part in action.parts:
        match part:
            case Keep() | Reclaim():
                continue
            case Evict():
                if part.scorer not in SCORERS:
                    return f"the scorer {part.scorer}"
            case Quantize():
                if part.codec not in CODECS:
                    return f"the codec {part.codec}"
                if part.key_bits != part.value_bits:
                    return "different bits for keys and values"
            case _:
                return str(part).partition(":")[0]
    return None


def _check_executable(action: Action) -> None:
    missing = not_built(action)
    if missing is not None:
        raise ActionInfeasibleError(f"{action}: this version of lumina_cache has no code for {missing}")


def _act(layer: KVCache, action: Action) -> None:
    match action:
        case Keep():
            pass
        case Reclaim():
            layer.compact()
        case Evict():
            kept = action.rows_kept(layer.rows)
            if kept < layer.rows:
                layer.gather(SCORERS[action.scorer].keep(layer.rows, kept, action.sinks))
        case Quantize():
            layer.reencode(CODECS[action.codec](action.key_bits, action.group_size))


def _check_engaged(action: Action, predicted: Sequence[Held], observed: Sequence[Held]) -> None:
    for want, got in zip(predicted, observed, strict=True):
        if (want.rows, want.capacity, want.bits) != (got.rows, got.capacity, got.bits):
            raise EngagementError(
                f"{action}: {got.name} should hold {want.rows} rows in {want.capacity} at "
                f"{want.bits or 'dense'} bits, but holds {got.rows} in {got.capacity} at {got.bits or 'dense'}"
            )
        if (nbytes_allocated([want]), nbytes_live([want])) != (nbytes_allocated([got]), nbytes_live([got])):
            raise EngagementError(f"{action}: {got.name} should take {want} but takes {got}")


def _width(rows: mx.array) -> int:
    batch, heads, _, dim = rows.shape
    return int(batch * heads * dim)


def opaque_nbytes(entry: Any) -> int:
    """What a cache object of an unknown class says of its own size; 0 only where it says so or cannot."""
    try:
        return int(entry.nbytes)
    except Exception:
        return 0
