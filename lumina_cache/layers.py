"""The layer objects: each a subclass of the mlx-lm cache class it stands for, with its storage swapped inside.

Until an action is taken a layer runs mlx-lm's own code on mlx-lm's own fields, so its results are those of the stock
class bit for bit. An action changes what ``keys`` and ``values`` hold and sets the few fields below; the object itself
stays in its list, and ``offset`` stays the absolute position of the next token.

Classes carry the names of the classes they stand for, because mlx-lm writes ``type(layer).__name__`` into saved
caches and error messages.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as stock
from mlx_lm.models.base import create_causal_mask

from .codecs import Affine, Layout
from .codecs.base import Encoded, encoded_nbytes
from .errors import DiskTierError, UnsupportedCacheError
from .lanes import Lanes
from .rows import DiskRows, Parts, RowStore, drift, shapes_of
from .seen import Seen
from .steps import StepTracker

if TYPE_CHECKING:
    from .bank import Banks
    from .disk import DiskStore

__all__ = [
    "ArraysCache",
    "CacheList",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "Handed",
    "History",
    "KVCache",
    "ManagedLayer",
    "QuantizedKVCache",
    "RotatingKVCache",
    "Storage",
    "adopt",
    "leaves",
    "managed",
]


_AS_THEY_COME = Layout()


@dataclass(frozen=True)
class History:
    """What was done to a layer's rows for good."""

    lowest_bits: int | None = (
        None  #: fewest bits per element that rows were ever stored with; None: never encoded
    )
    evicted: int = 0  #: rows dropped (tokens)

    @property
    def lossy(self) -> bool:
        """Whether attention may see something else than the full cache would show it."""
        return self.lowest_bits is not None or self.evicted > 0


@dataclass(frozen=True)
class Storage:
    """How a changed layer's arrays are to be read; part of its ``state``.

    It is deliberately not serialisable: mlx-lm has no class that could read a changed layer back from a file, so
    ``save_prompt_cache`` refuses it with this value's text as the reason.
    """

    layout: Layout
    dtype: mx.Dtype | None
    history: History
    positions: Any = (
        None  #: of the rows that survived the last eviction, per head; None where none are missing
    )
    sealed: int = 0
    tail: int = 0
    disk: DiskRows | None = None
    shapes: Any = None
    head: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Storage:
        return self

    def __str__(self) -> str:
        rows = "" if self.positions is None else ", rows evicted"
        return f"a layer changed by lumina_cache ({self.layout}{rows}); save LuminaCache.to_mlx() instead"

    __repr__ = __str__


@dataclass(frozen=True)
class Handed:
    """What a layer returned for one step, and the same rows as they lie, for whoever attends to those instead.

    The arrays are held weakly: nothing has computed them, and nobody may want to.
    """

    keys: weakref.ref[mx.array]
    values: weakref.ref[mx.array]
    parts: Parts


class ManagedLayer:
    """What every managed layer adds to the mlx-lm class it stands for."""

    #: Whether the layer holds one row per token (and so can be evicted from or re-encoded).
    holds_rows: ClassVar[bool] = False
    #: ``kv``, ``rotating``, ``chunked``, ``concatenate``, ``quantized``, ``not_kv`` or ``list``.
    kind: ClassVar[str]

    # Class-level defaults: mlx-lm's ``from_state`` builds objects without calling ``__init__``.
    _steps: StepTracker | None = None
    _seen: int = 0
    #: Whether the arrays were let go of, and are kept elsewhere.
    _away: bool = False
    name: str = "layer ?"  #: "layer 3", or "layer 3.1" for the second leaf of a nested cache
    history: History = History()
    #: What an attention hook saw of it; None if none ever watched. Not part of ``state``, which is mlx-lm's.
    seen: Seen | None = None
    #: Where to find what queries of this layer's model are usually like; None if nobody said which model it is.
    banks: Banks | None = None

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
    def layout(self) -> Layout | None:
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
        return self.nbytes_allocated + (0 if self.seen is None else self.seen.nbytes)

    def can_trim(self, n: int) -> bool:
        """Whether exactly ``n`` tokens can be taken back."""
        return False

    def takes_back(self, n: int) -> bool:
        """Whether the newest ``n`` rows can be dropped such that nothing tells that they were there."""
        return self.can_trim(n)

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

    def let_go(self) -> None:
        """Drop every array, for a state that is kept elsewhere; what is not an array stays."""
        self._drop_arrays()
        self._forget()
        self._away = True

    def _drop_arrays(self) -> None:
        raise NotImplementedError

    def _touch(self) -> None:
        if self._steps is not None:
            self._steps.on_touch()

    def _replaced(self) -> None:
        """The layer's rows were set from outside."""
        self._away = False
        self._forget()
        if self._steps is not None:
            self._steps.on_replaced()

    def _forget(self) -> None:
        """What was seen was of other rows."""
        if self.seen is not None:
            self.seen = self.seen.forgotten()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._touch()
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for key, value in self.__dict__.items():
            if key not in ("_steps", "served", "hands_out", "_handed"):
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


class RowLayer(ManagedLayer):
    """A layer of K/V rows stored densely by mlx-lm's own code."""

    holds_rows = True

    #: Whether every attention over the layer can be served from its codes, and whether any can; set by whoever attaches
    #: a server.
    served: bool = False
    hands_out: bool = False
    _handed: Handed | None = None

    @property
    def layout(self) -> Layout:
        return _AS_THEY_COME

    def take_handed(self, keys: Any, values: Any) -> Parts | None:
        """The rows of this step as they lie, if ``keys`` and ``values`` are what was returned for it; only once.

        Latent attention uses the one array that it needs on both sides.
        """
        handed, self._handed = self._handed, None
        if handed is None or handed.keys() is not keys:
            return None
        if values is keys:
            return handed.parts.keys_twice()
        return handed.parts if handed.values() is values else None

    def _hand_out(self, parts: Parts) -> tuple[Any, Any]:
        """What is returned to the model."""
        keys, values = parts.fetch()
        if self.hands_out and isinstance(keys, mx.array):
            self._handed = Handed(weakref.ref(keys), weakref.ref(values), parts)
        return keys, values

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

    def _drop_arrays(self) -> None:
        self.keys = self.values = None

    def _append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        return super().update_and_fetch(keys, values)  # type: ignore[misc, no-any-return]

    def _fetch(self) -> tuple[Any, Any]:
        return super().keys_and_values()  # type: ignore[misc, no-any-return]

    @property
    def capacity(self) -> int:
        """Rows allocated (tokens)."""
        return 0 if self.keys is None else _parts(self.keys)[0].shape[2]

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """(B·H, D) of keys and of values; None before the first row."""
        return None if self.keys is None else shapes_of(self.keys, self.values)

    @property
    def itemsize(self) -> int:
        """Bytes per element of dense rows; 0 before the first row."""
        return 0 if self.keys is None else self.keys.dtype.size

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


class KVCache(RowLayer, stock.KVCache):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.KVCache``: one row per token, dense until an action re-encodes or evicts."""

    kind = "kv"

    #: None while mlx-lm's own code runs on ``keys`` and ``values``; otherwise where the rows are.
    store: RowStore | None = None
    #: Absolute positions (B, H, T') int32 of the rows that survived the last eviction; rows behind them are contiguous.
    _kept: np.ndarray | None = None
    #: Tokens seen whose rows are gone: offset − rows.
    _dropped: int = 0

    # ``bits`` and ``group_size`` appear on the instance exactly while packed triples are returned: their mere
    # presence switches mlx-lm's attention.

    @property
    def keys(self) -> Any:
        """Dense rows (B, H, capacity, D) while unchanged; afterwards every array that the keys are stored in."""
        if self.store is None:
            return self.__dict__.get("keys")
        return _one_or_all(self.store.key_arrays)

    @keys.setter
    def keys(self, value: Any) -> None:
        # Models set these to tie the arrays to others that must be computed with them (mx.depends).
        if self.store is None:
            self.__dict__["keys"] = value
        else:
            self.store.put(keys=_fitting(self.name, value, self.store.key_arrays))

    @property
    def values(self) -> Any:
        """As :attr:`keys`."""
        if self.store is None:
            return self.__dict__.get("values")
        return _one_or_all(self.store.value_arrays)

    @values.setter
    def values(self, value: Any) -> None:
        if self.store is None:
            self.__dict__["values"] = value
        else:
            self.store.put(values=_fitting(self.name, value, self.store.value_arrays))

    @property
    def layout(self) -> Layout:
        return _AS_THEY_COME if self.store is None else self.store.layout

    @property
    def changed(self) -> bool:
        return self.store is not None

    @property
    def evicted(self) -> bool:
        return self._dropped > 0

    @property
    def rows(self) -> int:
        return int(self.offset - self._dropped)

    @property
    def capacity(self) -> int:
        return super().capacity if self.store is None else self.store.capacity

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        return super().shapes if self.store is None else self.store.shapes

    @property
    def heads(self) -> tuple[int, int]:
        """(B, H) of the rows held."""
        held = None if self.store is None else self.store.disk
        shape = held.block.shapes[0] if held is not None else _parts(self.keys)[0].shape
        return int(shape[0]), int(shape[1])

    @property
    def itemsize(self) -> int:
        if self.store is None:
            return super().itemsize
        return 0 if self.store.dtype is None else self.store.dtype.size

    @property
    def on_disk(self) -> int:
        """Rows whose only copy is in a file."""
        return 0 if self.store is None else self.store.on_disk

    @property
    def nbytes_allocated(self) -> int:
        return super().nbytes_allocated if self.store is None else self.store.nbytes_allocated

    @property
    def nbytes_live(self) -> int:
        store = self.store
        if store is None:
            return super().nbytes_live
        tails = 0 if store.tail_keys is None else store.layout.tail_capacity
        dense = encoded_nbytes([a for a in (store.tail_keys, store.tail_values) if a is not None])
        sealed = encoded_nbytes((*(store.keys or ()), *(store.values or ())))
        live = sealed // store.capacity * store.sealed if store.capacity else 0
        head = encoded_nbytes([a for a in (store.head_keys, store.head_values) if a is not None])
        return live + head + (dense // tails * store.tail if tails else 0)

    def positions(self) -> np.ndarray:
        """Absolute positions int32 of the rows held, ascending: (T,), or (B, H, T) where heads keep different ones."""
        kept = self._kept
        if kept is None:
            return np.arange(self._dropped, self.offset, dtype=np.int32)
        tail = np.arange(kept.shape[-1] + self._dropped, self.offset, dtype=np.int32)
        return np.concatenate([kept, np.broadcast_to(tail, (*kept.shape[:-1], tail.size))], axis=-1)

    def _append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if self.store is None:
            return super()._append(keys, values)
        if self.store.disk is not None:
            return self._append_behind_disk(self.store, keys, values)
        self.offset += keys.shape[2]
        return self._hand_out(self._for_step(self.store.append(keys, values), keys.shape[2]))

    def _append_behind_disk(self, store: RowStore, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """As :meth:`_append`; if the rows on disk cannot be read, the layer and those before it are as they were."""
        # The rows of the layers before this one are let go before those of this one are read.
        mx.eval(keys, values)
        before = replace(store)
        try:
            fetched = self._hand_out(self._for_step(store.append(keys, values), keys.shape[2]))
        except DiskTierError as error:
            self.store = before
            if self._steps is not None:
                self._steps.on_failed(self, keys.shape[2], error)
            raise
        self.offset += keys.shape[2]
        return fetched

    def _for_step(self, parts: Parts, tokens: int) -> Parts:
        """What a step of so many tokens gets to see."""
        if not parts.layout.decoded_for_chunks:
            return parts
        self._expose(parts.layout if tokens == 1 else None)
        return replace(parts, decoded=tokens != 1)

    def _fetch(self) -> tuple[Any, Any]:
        if self.store is None:
            return super()._fetch()
        # As at the last step: layers that borrow its rows attend in the same way.
        return replace(self.store.parts(), decoded="bits" not in self.__dict__).fetch()

    def keys_and_values(self) -> tuple[Any, Any]:
        steps = self._steps
        inside = steps is not None and not steps.at_boundary
        try:
            return super().keys_and_values()
        except DiskTierError as error:
            if steps is not None and inside:
                steps.on_failed(None, steps.tokens, error)
            raise

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if self._steps is not None:
            self._steps.on_mask(N)
        if self._dropped == 0:
            return stock.KVCache.make_mask(self, N, return_array=return_array, window_size=window_size)
        if window_size is None:
            if N == 1:
                return None
            return create_causal_mask(N, self.rows) if return_array else "causal"
        positions = self.positions()
        if positions.ndim > 1:
            raise UnsupportedCacheError(
                f"{self.name}: its heads keep rows of different positions, so no window of {window_size} tokens can be "
                "laid over them; evict by position (sinks_window) on this model"
            )
        query = np.arange(self.offset, self.offset + N, dtype=np.int32)
        key = np.concatenate([positions, query])
        distance = query[:, None] - key[None, :]
        return mx.array((distance >= 0) & (distance < window_size))

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> KVCache:
        """Called by mlx-lm after every step when its user gave ``kv_bits``: converts in place, once."""
        if self.store is None or not self.store.layout.packed:
            codec = Affine(bits, group_size)
            if self._steps is None:
                self.reencode(Layout.both(codec))
            else:
                self._steps.quantize_for_caller(self, codec)
        return self

    # -- what actions do to a layer; each leaves new, evaluated buffers and no reference to the old ones -----------

    def reencode(self, layout: Layout) -> tuple[float | None, float | None]:
        """Store all rows in ``layout`` from now on; rows already held are converted and evaluated.

        Returns the drift of keys and of values, see :func:`~lumina_cache.rows.drift`.
        """
        store, disk = RowStore(layout), None
        drifts: tuple[float | None, float | None] = (None, None)
        if self.keys is not None or self.on_disk:
            disk = None if self.store is None else self.store.disk
            share = self.on_disk / max(1, self.rows)
            keys, values = self.dense_rows()
            store = RowStore.holding(layout, keys, values)
            head = store.head
            drifts = (
                drift(layout.keys, store.keys, keys[:, :, head:]),
                drift(layout.values, store.values, values[:, :, head:]),
            )
            if disk is not None:
                store.offload(disk.store, round(share * store.sealed))
        self._take(store)
        if layout.bits is not None:
            lowest = min(layout.bits, self.history.lowest_bits or layout.bits)
            self.history = replace(self.history, lowest_bits=lowest)
        return drifts

    def dense_rows(self) -> tuple[mx.array, mx.array]:
        """All rows as dense arrays (B, H, T, D)."""
        if self.store is not None:
            return self.store.dense()
        rows = self.rows
        return self.keys[..., :rows, :], self.values[..., :rows, :]

    def own_store(self) -> RowStore:
        """Where the rows are; an unchanged layer's rows are taken over as they lie in their buffers."""
        if self.store is None:
            keys, values = self.keys, self.values
            store = RowStore(_AS_THEY_COME)
            if keys is not None:
                store.dtype, store.shapes = keys.dtype, shapes_of(keys, values)
                store.keys, store.values, store.sealed = (keys,), (values,), self.rows
            self._take(store)
            return store
        return self.store

    def gather(self, index: np.ndarray, tail: np.ndarray | None = None) -> None:
        """Keep only some of the rows, those of the dense head among them; the codes of kept rows do not change.

        Args:
            index: blocks of sealed rows to keep (n,) or (B, H, n) int32, ascending, counted from the first sealed row;
                row numbers where rows are sealed one by one.
            tail: rows of the dense tail to keep, (m,) or (B, H, m); None for all of them.
        """
        before, positions = self.rows, self.positions()
        store = self.own_store()
        block, head, sealed = store.layout.block, store.head, store.on_disk + store.sealed
        kept_tail = np.arange(store.tail, dtype=np.int32) if tail is None else tail
        rows = index if block == 1 else _rows_of_blocks(index, block)
        shape = rows.shape[:-1] or kept_tail.shape[:-1] or positions.shape[:-1]
        kept = np.concatenate(
            [
                np.broadcast_to(np.arange(head, dtype=np.int32), (*shape, head)),
                np.broadcast_to(rows + head, (*shape, rows.shape[-1])),
                np.broadcast_to(kept_tail + head + sealed, (*shape, kept_tail.shape[-1])),
            ],
            axis=-1,
        )
        if kept.shape[-1] == before:
            return
        to_disk = store.gather(_per_head(index), _per_head(kept_tail))
        if positions.ndim == 1:
            positions = np.broadcast_to(positions, (*shape, before))
        self._kept = np.take_along_axis(positions, kept, axis=-1)
        self._dropped = int(self.offset) - kept.shape[-1]
        if self.seen is not None:
            self.seen = self.seen.gather(kept, before)
        self.history = replace(self.history, evicted=self.history.evicted + before - kept.shape[-1])
        if to_disk is not None:
            store.offload(*to_disk)

    def compact(self) -> None:
        """Cut the allocation down to the live rows."""
        if self.store is not None:
            self.store.compact()
        elif self.keys is not None and self.capacity > self.rows:
            rows = self.rows
            keys, values = mx.contiguous(self.keys[..., :rows, :]), mx.contiguous(self.values[..., :rows, :])
            mx.eval(keys, values)
            self.keys, self.values = keys, values

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows, so that growing to there copies nothing."""
        if self.rows:
            self.own_store().reserve(rows)

    def offload(self, disk: DiskStore, rows: int) -> None:
        """Keep the oldest ``rows`` sealed rows in a file only."""
        if self.keys is not None or self.on_disk:
            self.own_store().offload(disk, rows)

    def restore(self) -> None:
        """Bring rows that are in a file back into memory."""
        if self.store is not None:
            self.store.restore()

    def _take(self, store: RowStore | None) -> None:
        self.store = store
        self.__dict__.pop("keys", None)
        self.__dict__.pop("values", None)
        self._expose(store.layout if store is not None and store.layout.packed else None)

    def _expose(self, packed: Layout | None) -> None:
        """Show mlx-lm's attention that it gets packed rows, or that it does not."""
        codec = None if packed is None else packed.keys
        for field in ("bits", "group_size"):
            if codec is not None:
                setattr(self, field, getattr(codec, field))
            else:
                self.__dict__.pop(field, None)

    def _drop_arrays(self) -> None:
        self._take(None)

    def takes_back(self, n: int) -> bool:
        return self.store is None or self.store.layout.unit == 1 or n <= self.store.tail

    def _trim_rows(self, n: int) -> None:
        if self.store is not None:
            self.store.trim(n)
        self.offset -= n
        if self.seen is not None:
            self.seen = self.seen.back_to(int(self.offset))

    def empty(self) -> bool:
        return self.rows == 0 and self.keys is None

    @property
    def trimmable(self) -> bool:
        return not self.evicted

    @property
    def state(self) -> tuple[Any, ...]:
        self._touch()
        store = self.store
        if store is None:
            return self.keys, self.values, self.offset
        how = Storage(
            store.layout,
            store.dtype,
            self.history,
            self._kept,
            store.sealed,
            store.tail,
            store.disk,
            store.shapes,
            store.head,
        )
        return store.key_arrays, store.value_arrays, self.offset, how

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        keys, values, self.offset, *rest = value
        how: Storage | None = rest[0] if rest else None
        self._take(None if how is None else _store_of(how, keys, values))
        if how is None:
            self.keys, self.values = keys, values
        self.history = History() if how is None else how.history
        self._kept = None if how is None else how.positions
        self._dropped = 0 if self.store is None else self.offset - self.store.rows
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


def _fitting(name: str, value: Any, held: Encoded) -> Encoded:
    """Arrays that a model puts in the place of those of a changed layer."""
    arrays = _parts(value)
    if [(a.shape, a.dtype) for a in arrays] != [(a.shape, a.dtype) for a in held]:
        raise UnsupportedCacheError(
            f"{name} was changed by an action and holds arrays of the shapes {[a.shape for a in held]}; the model sets "
            f"some of {[a.shape for a in arrays]}. Leave this model's rows as they are"
        )
    return arrays


def _one_or_all(arrays: Encoded) -> Any:
    return (arrays[0] if len(arrays) == 1 else arrays) if arrays else None


def _rows_of_blocks(index: np.ndarray, block: int) -> np.ndarray:
    rows = index[..., None] * block + np.arange(block, dtype=np.int32)
    return rows.reshape(*index.shape[:-1], -1)


def _per_head(index: np.ndarray) -> mx.array:
    return mx.array(index if index.ndim == 3 else index[None, None], mx.int32)


def _store_of(how: Storage, keys: Encoded, values: Encoded) -> RowStore:
    sealed_keys, tail_keys, head_keys = _split(how, keys)
    sealed_values, tail_values, head_values = _split(how, values)
    return RowStore(
        how.layout,
        how.dtype,
        sealed_keys,
        sealed_values,
        how.sealed,
        tail_keys,
        tail_values,
        how.tail,
        how.disk,
        how.shapes,
        head_keys,
        head_values,
    )


def _split(how: Storage, arrays: Encoded) -> tuple[Encoded | None, mx.array | None, mx.array | None]:
    """One side's arrays as ``RowStore`` lists them: sealed ones, the tail, the head."""
    rest = list(arrays)
    head = rest.pop() if how.head else None
    tail = rest.pop() if how.layout.unit > 1 and rest else None
    return tuple(rest) or None, tail, head


class _LaneLayer(RowLayer):
    """A layer that keeps mlx-lm's order of rows, also when they are encoded: see :mod:`.lanes`."""

    lanes: Lanes | None = None

    @property
    def keys(self) -> Any:
        """Dense rows (B, H, capacity, D) while unchanged; afterwards every array that the keys are stored in."""
        return self.__dict__.get("keys") if self.lanes is None else self.lanes.keys

    @keys.setter
    def keys(self, value: Any) -> None:
        if self.lanes is None:
            self.__dict__["keys"] = value
        else:
            self.lanes.keys = _fitting(self.name, value, self.lanes.keys or ())

    @property
    def values(self) -> Any:
        """As :attr:`keys`."""
        return self.__dict__.get("values") if self.lanes is None else self.lanes.values

    @values.setter
    def values(self, value: Any) -> None:
        if self.lanes is None:
            self.__dict__["values"] = value
        else:
            self.lanes.values = _fitting(self.name, value, self.lanes.values or ())

    @property
    def layout(self) -> Layout:
        return _AS_THEY_COME if self.lanes is None else self.lanes.layout

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        return super().shapes if self.lanes is None else self.lanes.shapes

    @property
    def itemsize(self) -> int:
        if self.lanes is None:
            return super().itemsize
        return 0 if self.lanes.dtype is None else self.lanes.dtype.size

    @property
    def changed(self) -> bool:
        return self.lanes is not None

    def _append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if self.lanes is None:
            return super()._append(keys, values)
        self.lanes.append(keys, values)
        self._follow(self.lanes.first)
        return self._hand_out(self.lanes.parts())

    def _fetch(self) -> tuple[Any, Any]:
        return super()._fetch() if self.lanes is None else self.lanes.fetch()

    def reencode(self, layout: Layout) -> tuple[float | None, float | None]:
        """As for :class:`KVCache`, with codecs that encode row by row and are decoded on fetch."""
        keys, values = self._buffers()
        lanes = Lanes.holding(layout, self._bare(), keys, values)
        drifts: tuple[float | None, float | None] = (None, None)
        if keys is not None and values is not None:
            drifts = drift(layout.keys, lanes.keys, keys), drift(layout.values, lanes.values, values)
        self.lanes = lanes
        self.__dict__.pop("keys", None)
        self.__dict__.pop("values", None)
        if layout.bits is not None:
            lowest = min(layout.bits, self.history.lowest_bits or layout.bits)
            self.history = replace(self.history, lowest_bits=lowest)
        return drifts

    def dense_rows(self) -> tuple[mx.array, mx.array]:
        """The rows held, decoded, (B, H, T, D) each, in the order in which they lie."""
        keys, values = self._buffers()
        return keys[:, :, : self.rows], values[:, :, : self.rows]

    def _buffers(self) -> tuple[Any, Any]:
        """The whole buffers, decoded; None before the first row."""
        return (self.keys, self.values) if self.lanes is None else self.lanes.buffers()

    def _set_rows(self, keys: Any, values: Any, rest: list[Storage]) -> None:
        """Rows from a ``state``, as they are or, with a :class:`Storage`, encoded."""
        self.lanes = None
        self.history = History()
        if not rest:
            self.keys, self.values = keys, values
            return
        self.__dict__.pop("keys", None)
        self.__dict__.pop("values", None)
        self.history = rest[0].history
        how = rest[0]
        self.lanes = Lanes.of_arrays(how.layout, how.dtype, self._bare(), keys, values, how.shapes)

    def _storage(self, lanes: Lanes) -> Storage:
        return Storage(lanes.layout, lanes.dtype, self.history, shapes=lanes.shapes)

    def _drop_arrays(self) -> None:
        self.lanes = None
        self.keys = self.values = None

    def _bare(self) -> Any:
        """A plain mlx-lm object at the same point, without rows."""
        raise NotImplementedError

    def _follow(self, lane: Any) -> None:
        """Take over the position that the lanes moved to."""
        raise NotImplementedError


class RotatingKVCache(_LaneLayer, stock.RotatingKVCache):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.RotatingKVCache``: a sliding window of at most ``max_size`` rows in decode."""

    kind = "rotating"

    @property
    def rows(self) -> int:
        return 0 if self.keys is None else min(self.offset, self.capacity)

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
        if self.lanes is not None:
            self.lanes.trim(n)

    def _bare(self) -> Any:
        bare = stock.RotatingKVCache(self.max_size, self.keep)
        bare.offset, bare._idx = self.offset, self._idx
        return bare

    def _follow(self, lane: Any) -> None:
        self.offset, self._idx = lane.offset, lane._idx

    @property
    def state(self) -> tuple[Any, ...]:
        self._touch()
        plain = (self.keys, self.values, self.offset, self.keep, self.max_size, self._idx)
        if self.lanes is None:
            return plain
        return (*plain, self._storage(self.lanes))

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        keys, values, self.offset, self.keep, self.max_size, self._idx, *rest = value
        self._set_rows(keys, values, rest)
        self._replaced()


class ChunkedKVCache(_LaneLayer, stock.ChunkedKVCache):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.ChunkedKVCache``: rows from ``start_position`` on."""

    kind = "chunked"

    @property
    def rows(self) -> int:
        return 0 if self.keys is None else int(self.offset - self.start_position)

    def maybe_trim_front(self) -> None:
        if self._away:  # llama4 does this before it asks for a mask
            self._touch()
        if self.lanes is None:
            stock.ChunkedKVCache.maybe_trim_front(self)
        else:
            self.lanes.trim_front()
            self._follow(self.lanes.first)

    def _trim_rows(self, n: int) -> None:
        self.offset -= n
        if self.lanes is not None:
            self.lanes.trim(n)

    def _bare(self) -> Any:
        bare = stock.ChunkedKVCache(self.chunk_size)
        bare.offset, bare.start_position = self.offset, self.start_position
        return bare

    def _follow(self, lane: Any) -> None:
        self.offset, self.start_position = lane.offset, lane.start_position

    @property
    def state(self) -> tuple[Any, ...]:
        self._touch()
        plain = (self.keys, self.values, self.offset, self.chunk_size, self.start_position)
        if self.lanes is None:
            return plain
        return (*plain, self._storage(self.lanes))

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        keys, values, self.offset, self.chunk_size, self.start_position, *rest = value
        self._set_rows(keys, values, rest)
        self._replaced()


class ConcatenateKVCache(RowLayer, stock.ConcatenateKVCache):  # type: ignore[misc]
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


class QuantizedKVCache(RowLayer, stock.QuantizedKVCache):  # type: ignore[misc]
    """Stands for ``mlx_lm.models.cache.QuantizedKVCache``: packed from its first row, by the caller's own choice."""

    kind = "quantized"

    @property
    def layout(self) -> Layout:
        codec = Affine(self.bits, self.group_size)
        return Layout.both(codec)

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        if self.keys is None:
            return None
        (heads, words), (value_heads, value_words) = shapes_of(self.keys[0], self.values[0])
        return (heads, words * 32 // self.bits), (value_heads, value_words * 32 // self.bits)

    @property
    def itemsize(self) -> int:
        return 0 if self.keys is None else self.keys[1].dtype.size

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
    cache: Any
    left_padding: Any
    lengths: Any

    @property
    def nbytes_allocated(self) -> int:
        return sum(a.nbytes for a in self.cache if isinstance(a, mx.array))

    @property
    def nbytes_live(self) -> int:
        return self.nbytes_allocated

    def _drop_arrays(self) -> None:
        self.cache = [None] * len(self.cache)

    def __getitem__(self, index: int) -> Any:
        if self._away:  # some recurrent models ask for nothing but this
            self._touch()
        return self.cache[index]

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
