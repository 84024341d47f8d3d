"""The outlier guard at work: what is really done to a layer whose rows a codec would spoil.

Before a layer is re-encoded, the noise of rounding is predicted from its rows (:mod:`.codecs.guard`). Where it is above
the limit the bits are raised along the codec's ladder, of keys and values each for itself, or of both where they share
one packed layout; where not even the most bits are enough, or would not coarsen what is there, the layer stays as it is.
Codecs without a grid of equal steps (mxfp4, mxfp8, nvfp4) are not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from .actions import Quantize
from .codecs import Affine, Codec, Layout
from .codecs.guard import LIMIT, guarded_bits
from .layers import ChunkedKVCache, KVCache, RotatingKVCache

__all__ = ["FEWEST_JUDGED", "Guard", "guarded"]

#: Rows below which their spread along the tokens says nothing, and the codec is used as asked.
FEWEST_JUDGED = 16


@dataclass(frozen=True)
class Guard:
    """How much noise is let through, relative to how the rows vary along the tokens."""

    limit: float = LIMIT
    #: Whether the backend can carry out an action; asked of packed layouts that nobody named.
    can: Callable[[Quantize], bool] = lambda _: True


def guarded(
    layer: KVCache | RotatingKVCache | ChunkedKVCache, action: Quantize, guard: Guard
) -> Quantize | None:
    """``action`` with as many bits as the rows of ``layer`` need; None if the layer had better stay as it is."""
    layout = action.layout
    if layout is None or not (isinstance(layout.keys, Affine) or isinstance(layout.values, Affine)):
        return action
    # Rows that stay dense are not judged.
    first = min(layout.sinks, layer.rows) if isinstance(layer, KVCache) else 0
    end = first + layout.sealable(layer.rows - first) if isinstance(layer, KVCache) else layer.rows
    if end - first < FEWEST_JUDGED:
        return action
    keys, values = (a[:, :, first:end] for a in layer.dense_rows())
    ladder = action.method.bits
    key_bits = _bits(keys, layout.keys, action.key_bits, guard.limit, ladder)
    value_bits = _bits(values, layout.values, action.value_bits, guard.limit, ladder)
    if key_bits is None or value_bits is None:
        return None
    if (key_bits, value_bits) == (action.key_bits, action.value_bits):
        return action
    raised: Quantize | None
    if layout.packed:
        raised = _fewest_packed(action, max(key_bits, value_bits), guard)
    else:
        raised = _with_bits(action, key_bits, value_bits)
    return None if raised is None or _as_coarse(layer.layout, raised) else raised


def _fewest_packed(action: Quantize, bits: int, guard: Guard) -> Quantize | None:
    """``action`` with the same number of bits on both sides, ``bits`` or more, that the model can read."""
    finer = (_with_bits(action, b, b) for b in sorted(action.method.bits) if b >= bits)
    return next((one for one in finer if guard.can(one)), None)


def _with_bits(action: Quantize, key_bits: int, value_bits: int) -> Quantize:
    return replace(action, key_bits=key_bits, value_bits=value_bits)


def _bits(rows: mx.array, codec: Codec, asked: int, limit: float, ladder: tuple[int, ...]) -> int | None:
    return guarded_bits(rows, codec, limit, ladder) if isinstance(codec, Affine) else asked


def _as_coarse(layout: Layout, action: Quantize) -> bool:
    """Whether rows stored in ``layout`` have no more bits than ``action`` would leave them on either side."""
    keys, values = layout.keys.code_bits, layout.values.code_bits
    return keys is not None and values is not None and keys <= action.key_bits and values <= action.value_bits
