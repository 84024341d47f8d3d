"""The layer objects: each a subclass of the mlx-lm cache class it stands for, with its storage swapped inside.

Until an action is taken a layer runs mlx-lm's own code on mlx-lm's own fields, so its results are those of the stock
class bit for bit. An action changes what ``keys`` and ``values`` hold and sets the few fields below; the object itself
stays in its list, and ``offset`` stays the absolute position of the next token.

Classes carry the names of the classes they stand for, because mlx-lm writes ``type(layer).__name__`` into saved
caches and error messages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as stock
from mlx_lm.models.base import create_causal_mask

from .codecs import Affine, Codec, Dense
from .codecs.base import Encoded, append_rows, cut_rows, encoded_nbytes
from .errors import UnsupportedCacheError
from .steps import StepTracker

__all__ = [
    "ArraysCache",
    "CacheList",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "KVCache",
    "ManagedLayer",
    "QuantizedKVCache",
    "RotatingKVCache",
    "Storage",
    "adopt",
    "leaves",
    "managed",
]


@dataclass(frozen=True)
class Storage:
    """How a changed layer's arrays are to be read; part of its ``state``.

    It is deliberately not serialisable: mlx-lm has no class that could read a changed layer back from a file, so
    ``save_prompt_cache`` refuses it with this value's text as the reason.
    """

    codec: Codec
    positions: tuple[int, ...] | None

    def __str__(self) -> str:
        rows = "" if self.positions is None else ", rows evicted"
        return f"a layer changed by lumina_cache ({self.codec}{rows}); save LuminaCache.to_mlx() instead"

    __repr__ = __str__


class ManagedLayer:
    """What every managed layer adds to the mlx-lm class it stands for."""

    #: Whether the layer holds one row per token (and so can be evicted from or re-encoded).
    holds_rows: ClassVar[bool] = False
    #: ``kv``, ``rotating``, ``chunked``, ``concatenate``, ``quantized``, ``not_kv`` or ``list``.
    kind: ClassVar[str]

    # Class-level defaults: mlx-lm's ``from_state`` builds objects without calling ``__init__``.
    _steps: StepTracker | None = None
    _seen: int = 0
    name: str = "layer ?"  #: "layer 3", or "layer 3.1" for the second leaf of a nested cache

    keys: Any
    values: Any
    offset: Any
    state: Any

    @property
    def index(self) -> int:
        """Number of the entry in its model's list; −1 for a layer that belongs to none."""
        number = self.name.rsplit(" ", 1)[-1].split(".", 1)[0]
        return int(number) if number.isdecimal() else -1

    @property
    def rows(self) -> int:
        """Rows held (tokens); 0 for layers that hold none."""
        return 0

    @property
    def nbytes_live(self) -> int:
        """Bytes of the rows held (or of the recurrent state), without slack."""
        raise NotImplementedError

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of the arrays as allocated, slack of the growth step included."""
        raise NotImplementedError

    @property
    def codec(self) -> Codec | None:
        """How rows are stored; None for layers that hold none."""
        return None

    @property
    def evicted(self) -> bool:
        """Whether rows were dropped by an action."""
        return False

    @property
    def changed(self) -> bool:
        """Whether an action has changed how this layer stores its rows."""
        return False

    @property
    def nbytes(self) -> int:
        self._touch()
        return self.nbytes_allocated

    def can_trim(self, n: int) -> bool:
        """Whether exactly ``n`` tokens can be taken back."""
        return False

    def is_trimmable(self) -> bool:
        self._touch()
        return self.trimmable and (self._steps is None or not self._steps.rows_may_go(self))

    @property
    def trimmable(self) -> bool:
        """What the layer itself says, before asking whether anything may still be evicted."""
        return False

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens; all layers of the model can do exactly that, or nothing changes.

        Returns the number of tokens taken back: ``n`` clamped to [0, offset], or 0.
        """
        self._touch()
        n = min(max(int(n), 0), int(self.offset))
        if n == 0 or not self.is_trimmable() or not self.can_trim(n):
            return 0
        if self._steps is not None and not _peers_can_reach(self._steps, int(self.offset) - n):
            return 0
        self._trim_rows(n)
        return n

    def _trim_rows(self, n: int) -> None:
        self.offset -= n

    def _touch(self) -> None:
        if self._steps is not None:
            self._steps.on_touch()

    def _replaced(self) -> None:
        """The layer's rows were set from outside."""
        if self._steps is not None:
            self._steps.on_replaced()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._touch()
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for key, value in self.__dict__.items():
            if key != "_steps":
                new.__dict__[key] = copy.deepcopy(value, memo)
        if self._steps is not None:
            copy.deepcopy(self._steps, memo).attach(new)
        return new


def _peers_can_reach(steps: StepTracker, target: int) -> bool:
    """Whether every layer of the model is at ``target`` tokens already or can be trimmed to exactly that."""
    for peer in steps.layers:
        if isinstance(peer, CacheList):
            continue
        if not peer.trimmable:
            return False
        excess = int(peer.offset) - target
        if excess > 0 and not peer.can_trim(excess):
            return False
    return True


class _RowLayer(ManagedLayer):
    """A layer of K/V rows stored densely by mlx-lm's own code."""

    holds_rows = True

    @property
    def codec(self) -> Codec | None:
        return Dense()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        steps = self._steps
        if steps is None:
            return self._append(keys, values)
        steps.on_update(self, keys.shape[2])
        fetched = self._append(keys, values)
        steps.on_updated()
        return fetched

    def keys_and_values(self) -> tuple[Any, Any]:
        if self._steps is not None:
            self._steps.on_read()
        return self._fetch()

    def _append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        return super().update_and_fetch(keys, values)  # type: ignore[misc, no-any-return]

    def _fetch(self) -> tuple[Any, Any]:
        return super().keys_and_values()  # type: ignore[misc, no-any-return]

    @property
    def capacity(self) -> int:
        """Rows allocated (tokens)."""
        return 0 if self.keys is None else _parts(self.keys)[0].shape[2]

    @property
    def nbytes_allocated(self) -> int:
        return 0 if self.keys is None else encoded_nbytes((*_parts(self.keys), *_parts(self.values)))

    @property
    def nbytes_live(self) -> int:
        capacity = self.capacity
        return 0 if capacity == 0 else self.nbytes_allocated // capacity * self.rows

    @property
    def trimmable(self) -> bool:
        return True

    def can_trim(self, n: int) -> bool:
        return 0 <= n <= self.rows

    def size(self) -> int:
        return self.rows


class KVCache(_RowLayer, stock.KVCache):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.KVCache``: one row per token, dense until an action re-encodes or evicts."""

    kind = "kv"

    #: None while mlx-lm's own code runs; otherwise how the rows are stored.
    _codec: Codec | None = None
    #: Absolute positions (T',) int32 of the rows that survived the last eviction; rows behind them are contiguous.
    _kept: np.ndarray | None = None
    #: Tokens seen whose rows are gone: offset − rows.
    _dropped: int = 0

    # ``bits`` and ``group_size`` appear on the instance exactly while packed triples are returned: their mere
    # presence switches mlx-lm's attention.

    @property
    def codec(self) -> Codec:
        return self._codec or Dense()

    @property
    def changed(self) -> bool:
        return self._codec is not None

    @property
    def evicted(self) -> bool:
        return self._dropped > 0

    @property
    def rows(self) -> int:
        return int(self.offset - self._dropped)

    def positions(self) -> np.ndarray:
        """Absolute positions (T,) int32 of the rows held, ascending."""
        if self._kept is None:
            return np.arange(self._dropped, self.offset, dtype=np.int32)
        tail = np.arange(self._kept.size + self._dropped, self.offset, dtype=np.int32)
        return np.concatenate([self._kept, tail])

    def _append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if self._codec is None:
            return super()._append(keys, values)
        rows = self.offset - self._dropped
        self._hold(
            append_rows(_parts_or_none(self.keys), rows, self._codec.encode(keys)),
            append_rows(_parts_or_none(self.values), rows, self._codec.encode(values)),
        )
        self.offset += keys.shape[2]
        return self._fetch()

    def _fetch(self) -> tuple[Any, Any]:
        if self._codec is None:
            return super()._fetch()
        keys = cut_rows(_parts(self.keys), self.rows)
        values = cut_rows(_parts(self.values), self.rows)
        return (keys, values) if self._codec.packed else (keys[0], values[0])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if self._steps is not None:
            self._steps.on_mask(N)
        if self._dropped == 0:
            return stock.KVCache.make_mask(self, N, return_array=return_array, window_size=window_size)
        if window_size is None:
            if N == 1:
                return None
            return create_causal_mask(N, self.rows) if return_array else "causal"
        query = np.arange(self.offset, self.offset + N, dtype=np.int32)
        key = np.concatenate([self.positions(), query])
        distance = query[:, None] - key[None, :]
        return mx.array((distance >= 0) & (distance < window_size))

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> KVCache:
        """Called by mlx-lm after every step when its user gave ``kv_bits``: converts in place, once."""
        if self._codec is None or not self._codec.packed:
            codec = Affine(bits, group_size)
            if self._steps is None:
                self.reencode(codec)
            else:
                self._steps.quantize_for_caller(self, codec)
        return self

    # -- what actions do to a layer; each leaves new, evaluated buffers and no reference to the old ones -----------

    def reencode(self, codec: Codec) -> None:
        """Store all rows with ``codec`` from now on; rows already held are converted and evaluated."""
        if self.keys is not None:
            rows, old = self.rows, self.codec
            keys = codec.encode(old.decode(cut_rows(_parts(self.keys), rows)))
            values = codec.encode(old.decode(cut_rows(_parts(self.values), rows)))
            mx.eval(keys, values)
            self._hold(keys, values)
        self._set_codec(codec)

    def gather(self, index: np.ndarray) -> None:
        """Keep only the rows at ``index`` (T',) int32, ascending; the codes of kept rows do not change."""
        positions, rows = self.positions(), self.rows
        if len(index) == rows:
            return
        where = mx.array(index)
        keys = tuple(mx.take(a, where, axis=2) for a in cut_rows(_parts(self.keys), rows))
        values = tuple(mx.take(a, where, axis=2) for a in cut_rows(_parts(self.values), rows))
        mx.eval(keys, values)
        self._set_codec(self.codec)
        self._hold(keys, values)
        self._kept = positions[index]
        self._dropped = self.offset - len(index)

    def compact(self) -> None:
        """Cut the allocation down to the live rows."""
        if self.keys is not None and self.capacity > self.rows:
            rows = self.rows
            keys = tuple(mx.contiguous(a) for a in cut_rows(_parts(self.keys), rows))
            values = tuple(mx.contiguous(a) for a in cut_rows(_parts(self.values), rows))
            mx.eval(keys, values)
            self._hold(keys, values)

    def _hold(self, keys: Encoded, values: Encoded) -> None:
        single = len(keys) == 1
        self.keys = keys[0] if single else keys
        self.values = values[0] if single else values

    def _set_codec(self, codec: Codec | None) -> None:
        self._codec = codec
        for field in ("bits", "group_size"):
            if codec is not None and codec.packed:
                setattr(self, field, getattr(codec, field))
            else:
                self.__dict__.pop(field, None)

    @property
    def trimmable(self) -> bool:
        return not self.evicted

    @property
    def state(self) -> tuple[Any, ...]:
        self._touch()
        if self._codec is None:
            return self.keys, self.values, self.offset
        positions = tuple(self.positions().tolist()) if self.evicted else None
        return self.keys, self.values, self.offset, Storage(self._codec, positions)

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, *rest = value
        storage: Storage | None = rest[0] if rest else None
        self._set_codec(storage.codec if storage else None)
        kept = storage.positions if storage else None
        self._kept = None if kept is None else np.array(kept, dtype=np.int32)
        self._dropped = 0 if kept is None else self.offset - len(kept)
        self._replaced()

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        changed = [c.name for c in caches if isinstance(c, ManagedLayer) and c.changed]
        if changed:
            raise UnsupportedCacheError(
                f"{changed[0]} was changed by an action and cannot join a batch; batch plain caches, "
                "or pass LuminaCache.to_mlx() where the layer can be expressed in mlx-lm's own classes"
            )
        return stock.KVCache.merge(caches)


class RotatingKVCache(_RowLayer, stock.RotatingKVCache):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.RotatingKVCache``: a sliding window of at most ``max_size`` rows in decode."""

    kind = "rotating"

    @property
    def rows(self) -> int:
        return 0 if self.keys is None else min(self.offset, self.keys.shape[2])

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if self._steps is not None:
            self._steps.on_mask(N)
        return stock.RotatingKVCache.make_mask(self, N, window_size=window_size, return_array=return_array)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> RotatingKVCache:
        """mlx-lm cannot pack a ring of rows: the window stays dense, and a warning says so once."""
        if self._steps is None:
            raise NotImplementedError(f"{self.name}: mlx-lm cannot pack a sliding window; leave it dense")
        self._steps.refuse_for_caller(self, Affine(bits, group_size), "mlx-lm cannot pack a sliding window")
        return self

    def size(self) -> int:
        # Not the rows held: merging into a batch takes this many of the newest.
        return stock.RotatingKVCache.size(self)  # type: ignore[no-any-return]

    @property
    def trimmable(self) -> bool:
        return bool(self.offset < self.max_size)

    def can_trim(self, n: int) -> bool:
        return self.trimmable and 0 <= n <= self.rows

    def _trim_rows(self, n: int) -> None:
        self.offset -= n
        self._idx -= n

    @property
    def state(self) -> tuple[Any, ...]:
        self._touch()
        return self.keys, self.values, self.offset, self.keep, self.max_size, self._idx

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.keep, self.max_size, self._idx = value
        self._replaced()


class ChunkedKVCache(_RowLayer, stock.ChunkedKVCache):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.ChunkedKVCache``: rows from ``start_position`` on."""

    kind = "chunked"

    @property
    def rows(self) -> int:
        return 0 if self.keys is None else int(self.offset - self.start_position)

    @property
    def state(self) -> tuple[Any, ...]:
        self._touch()
        return self.keys, self.values, self.offset, self.chunk_size, self.start_position

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.chunk_size, self.start_position = value
        self._replaced()


class ConcatenateKVCache(_RowLayer, stock.ConcatenateKVCache):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.ConcatenateKVCache``; unlike it, trimmed rows do not come back."""

    kind = "concatenate"

    @property
    def rows(self) -> int:
        return 0 if self.keys is None else int(self.offset)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if self._steps is not None:
            self._steps.on_mask(N)
        return stock.ConcatenateKVCache.make_mask(self, N, return_array=return_array, window_size=window_size)

    def _trim_rows(self, n: int) -> None:
        self.offset -= n
        self.keys = self.keys[..., : self.offset, :]
        self.values = self.values[..., : self.offset, :]

    @property
    def state(self) -> tuple[Any, ...]:
        self._touch()
        return self.keys, self.values

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.keys, self.values = value
        self.offset = 0 if self.keys is None else self.keys.shape[-2]
        self._replaced()


class QuantizedKVCache(_RowLayer, stock.QuantizedKVCache):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.QuantizedKVCache``: packed from its first row, by the caller's own choice."""

    kind = "quantized"

    @property
    def codec(self) -> Codec:
        return Affine(self.bits, self.group_size)

    @property
    def rows(self) -> int:
        return 0 if self.keys is None else int(self.offset)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if self._steps is not None:
            self._steps.on_mask(N)
        return stock.QuantizedKVCache.make_mask(self, N, return_array=return_array, window_size=window_size)

    @property
    def state(self) -> tuple[Any, ...]:
        self._touch()
        return self.keys, self.values, self.offset, self.group_size, self.bits

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.group_size, self.bits = value
        self._replaced()


class ArraysCache(ManagedLayer, stock.ArraysCache):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.ArraysCache``: recurrent or convolution state, passed through and counted."""

    kind = "not_kv"
    offset: Any = 0

    @property
    def nbytes_allocated(self) -> int:
        return sum(a.nbytes for a in self.cache if isinstance(a, mx.array))

    @property
    def nbytes_live(self) -> int:
        return self.nbytes_allocated

    def make_mask(self, N: int) -> Any:
        if self._steps is not None:
            self._steps.on_state_mask(N)
        return stock.ArraysCache.make_mask(self, N)

    @property
    def state(self) -> tuple[Any, ...]:
        self._touch()
        return self.cache, self.left_padding, self.lengths

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.cache, self.left_padding, self.lengths = value
        self._replaced()


class CacheList(ManagedLayer, stock.CacheList):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.CacheList``: several caches of one layer, each of them managed."""

    kind = "list"
    caches: Any

    @property
    def rows(self) -> int:
        return max((c.rows for c in self.caches), default=0)

    @property
    def nbytes_allocated(self) -> int:
        return sum(c.nbytes_allocated for c in self.caches)

    @property
    def nbytes_live(self) -> int:
        return sum(c.nbytes_live for c in self.caches)

    @property
    def changed(self) -> bool:
        return any(c.changed for c in self.caches)

    @property
    def offset(self) -> int:
        """Most tokens that any of the caches has seen."""
        return max((int(getattr(c, "offset", 0)) for c in self.caches), default=0)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> CacheList:
        """As for the caches inside; mlx-lm's own class has no such method, and passes over them without a word."""
        for child in self.caches:
            if hasattr(child, "to_quantized"):
                child.to_quantized(group_size=group_size, bits=bits)
        return self

    @property
    def trimmable(self) -> bool:
        return all(c.is_trimmable() for c in self.caches)

    def trim(self, n: int) -> int:
        """As :meth:`ManagedLayer.trim`: every leaf does exactly ``n``, or none does anything."""
        self._touch()
        n = min(max(int(n), 0), self.offset)
        if n == 0 or not self.is_trimmable() or not all(c.can_trim(n) for c in self.caches):
            return 0
        done = {c.trim(n) for c in self.caches}
        return n if done == {n} else 0

    def can_trim(self, n: int) -> bool:
        return all(c.can_trim(n) for c in self.caches)

    @property
    def state(self) -> list[Any]:
        self._touch()
        return [(c.state, type(c).__name__) for c in self.caches]

    @state.setter
    def state(self, value: list[Any]) -> None:
        if "caches" in self.__dict__:
            for child, (state, _) in zip(self.caches, value, strict=True):
                child.state = state
        else:
            self.caches = tuple(_BY_NAME[name].from_state(state) for state, name in value)

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        return stock.CacheList.merge.__func__(stock.CacheList, caches)


_BY_NAME: dict[str, Any] = {
    c.__name__: c
    for c in (
        KVCache,
        RotatingKVCache,
        ChunkedKVCache,
        ConcatenateKVCache,
        QuantizedKVCache,
        ArraysCache,
        CacheList,
    )
}
_BY_STOCK: dict[type, Any] = {getattr(stock, name): c for name, c in _BY_NAME.items()}


def adopt(entry: Any, steps: StepTracker, name: str) -> Any:
    """The managed layer that stands for an mlx-lm cache object, with the object's contents.

    Objects of classes that mlx-lm's cache module does not define are returned as they are: they are passed through,
    counted where they can be, and reported.

    Raises:
        UnsupportedCacheError: for batched caches, whose offsets and masks are arrays.
    """
    if isinstance(entry, ManagedLayer):
        if entry._steps is not None:
            entry._steps.detach(entry)
        entry.name, entry._seen = name, 0
        if isinstance(entry, CacheList):
            entry.caches = tuple(adopt(c, steps, f"{name}.{i}") for i, c in enumerate(entry.caches))
        steps.attach(entry)
        return entry
    if isinstance(entry, stock.BatchKVCache | stock.BatchRotatingKVCache):
        raise UnsupportedCacheError(
            f"{name} is a {type(entry).__name__}: batched caches are not managed. "
            "Give each sequence its own LuminaCache, or use the stock cache for batches"
        )
    ours = _BY_STOCK.get(type(entry))
    if ours is None:
        return entry
    layer = ours.__new__(ours)
    layer.__dict__.update(entry.__dict__)
    layer.name = name
    if isinstance(layer, CacheList):
        layer.caches = tuple(adopt(c, steps, f"{name}.{i}") for i, c in enumerate(layer.caches))
    steps.attach(layer)
    return layer


def leaves(entries: Iterator[Any] | list[Any]) -> Iterator[Any]:
    """Every cache object that is not a list of others, in order."""
    for entry in entries:
        if isinstance(entry, stock.CacheList):
            yield from leaves(list(entry.caches))
        else:
            yield entry


def managed(entry: Any) -> Iterator[ManagedLayer]:
    """The entry and every cache inside it, as far as they are managed."""
    if isinstance(entry, ManagedLayer):
        yield entry
    if isinstance(entry, stock.CacheList):
        for child in entry.caches:
            yield from managed(child)


def _parts(buffers: Any) -> Encoded:
    return (buffers,) if isinstance(buffers, mx.array) else tuple(buffers)


def _parts_or_none(buffers: Any) -> Encoded | None:
    return None if buffers is None else _parts(buffers)
