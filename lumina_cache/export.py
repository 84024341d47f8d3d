"""Back to plain mlx-lm cache objects."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from .codecs import Affine, Layout
from .errors import UnsupportedCacheError
from .layers import CacheList, ChunkedKVCache, KVCache, ManagedLayer, RotatingKVCache

__all__ = ["to_mlx"]


def to_mlx(entry: Any, *, decode: bool = False) -> Any:
    """A plain mlx-lm object with the contents of ``entry``; arrays are not shared with it.

    Dense rows become a ``KVCache``, packed rows a ``QuantizedKVCache``. Rows with holes (evicted) become a
    ``ChunkedKVCache``, the one class whose rows need not begin at position 0; its masks are right for one token at a
    time and for models that ask for ``"causal"``.

    Raises:
        UnsupportedCacheError: encoded rows that mlx-lm has no class for, unless ``decode`` is given.
        DiskTierError: rows in a file that cannot be read back.
    """
    if isinstance(entry, CacheList):
        return stock.CacheList(*(to_mlx(child, decode=decode) for child in entry.caches))
    if not isinstance(entry, ManagedLayer):
        return copy.deepcopy(entry)
    entry._touch()
    if not entry.changed:
        plain = getattr(stock, type(entry).__name__)
        if plain is stock.ConcatenateKVCache and entry.keys is None:  # its state cannot be set without rows
            return plain()
        return plain.from_state(copy.deepcopy(entry.state))
    if isinstance(entry, KVCache):
        return _changed(entry, decode)
    assert isinstance(entry, RotatingKVCache | ChunkedKVCache)
    return _lanes(entry, decode)


def _changed(layer: KVCache, decode: bool) -> Any:
    store, layout = layer.store, layer.layout
    assert store is not None
    codec = layout.keys
    if isinstance(codec, Affine) and layout.packed and not layer.evicted:
        plain = stock.QuantizedKVCache(codec.group_size, codec.bits)
        if store.rows:
            keys, values = store.encoded()
            plain.keys, plain.values, plain.offset = _own(keys), _own(values), layer.offset
        return plain
    if not layout.dense and not decode:
        raise _must_decode(layer, layout)
    if store.rows == 0:
        return stock.KVCache()
    dense_keys, dense_values = (mx.contiguous(a) for a in store.dense())
    if not layer.evicted:
        plain = stock.KVCache()
    else:
        # No chunk limit: mlx-lm's llama4 alone trims chunked caches, and its own are never of this kind.
        plain = stock.ChunkedKVCache(1 << 40)
        plain.start_position = layer.offset - layer.rows
    plain.keys, plain.values, plain.offset = dense_keys, dense_values, layer.offset
    return plain


def _lanes(layer: RotatingKVCache | ChunkedKVCache, decode: bool) -> Any:
    """A sliding window or an attention chunk with encoded rows: mlx-lm's class with them decoded."""
    if not decode:
        raise _must_decode(layer, layer.layout)
    assert layer.lanes is not None
    plain = copy.deepcopy(layer.lanes.first)
    plain.keys, plain.values = layer.lanes.buffers()
    return plain


def _must_decode(layer: ManagedLayer, layout: Layout) -> UnsupportedCacheError:
    what = "packed rows with some evicted" if layout.packed else f"rows stored as {layout}"
    return UnsupportedCacheError(
        f"{layer.name} holds {what}; mlx-lm has no class for that. "
        "Use to_mlx(decode=True) to decode the rows, at the price of their dense size"
    )


def _own(arrays: tuple[mx.array, ...]) -> list[mx.array]:
    return [mx.contiguous(a) for a in arrays]
