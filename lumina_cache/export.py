"""Back to plain mlx-lm cache objects."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from .codecs import Affine
from .codecs.base import cut_rows
from .errors import UnsupportedCacheError
from .layers import CacheList, KVCache, ManagedLayer

__all__ = ["to_mlx"]


def to_mlx(entry: Any, *, decode: bool = False) -> Any:
    """A plain mlx-lm object with the contents of ``entry``; arrays are not shared with it.

    Dense rows become a ``KVCache``, packed rows a ``QuantizedKVCache``. Rows with holes (evicted) become a
    ``ChunkedKVCache``, the one class whose rows need not begin at position 0; its masks are right for one token at a
    time and for models that ask for ``"causal"``.

    Raises:
        UnsupportedCacheError: rows that are packed and evicted, unless ``decode`` is given.
    """
    if isinstance(entry, CacheList):
        return stock.CacheList(*(to_mlx(child, decode=decode) for child in entry.caches))
    if not isinstance(entry, ManagedLayer):
        return copy.deepcopy(entry)
    entry._touch()
    if not (isinstance(entry, KVCache) and entry.changed):
        plain = getattr(stock, type(entry).__name__)
        if plain is stock.ConcatenateKVCache and entry.keys is None:  # its state cannot be set without rows
            return plain()
        return plain.from_state(copy.deepcopy(entry.state))
    return _changed(entry, decode)


def _changed(layer: KVCache, decode: bool) -> Any:
    codec, rows = layer.codec, layer.rows
    packed = isinstance(codec, Affine)
    if packed and layer.evicted and not decode:
        raise UnsupportedCacheError(
            f"{layer.name} holds packed rows with some evicted; mlx-lm has no class for that. "
            "Use to_mlx(decode=True) to decode the rows, at the price of their dense size"
        )
    if layer.keys is None:
        return (
            stock.QuantizedKVCache(codec.group_size, codec.bits)
            if isinstance(codec, Affine)
            else stock.KVCache()
        )
    keys = cut_rows(layer.keys if packed else (layer.keys,), rows)
    values = cut_rows(layer.values if packed else (layer.values,), rows)
    if isinstance(codec, Affine) and not layer.evicted:
        plain = stock.QuantizedKVCache(codec.group_size, codec.bits)
        plain.keys, plain.values, plain.offset = _own(keys), _own(values), layer.offset
        return plain
    dense_keys, dense_values = mx.contiguous(codec.decode(keys)), mx.contiguous(codec.decode(values))
    if not layer.evicted:
        plain = stock.KVCache()
    else:
        # No chunk limit: mlx-lm's llama4 alone trims chunked caches, and its own are never of this kind.
        plain = stock.ChunkedKVCache(1 << 40)
        plain.start_position = layer.offset - rows
    plain.keys, plain.values, plain.offset = dense_keys, dense_values, layer.offset
    return plain


def _own(arrays: tuple[mx.array, ...]) -> list[mx.array]:
    return [mx.contiguous(a) for a in arrays]
