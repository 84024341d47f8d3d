"""The rows of one layer as this library stores them: sealed rows, encoded, and behind them a dense tail.

Used by a layer from the moment an action changes it. Codes are appended, cut, gathered and written to disk as codes:
nothing that stays is ever decoded and encoded again, except when it is re-encoded in another layout.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .codecs.base import (
    Codec,
    Encoded,
    append_rows,
    capacity_of,
    cut_rows,
    encoded_nbytes,
    gather_rows,
    join_rows,
    own_rows,
    slice_rows,
)
from .codecs.dense import Dense
from .codecs.layout import Layout

if TYPE_CHECKING:
    from .disk import DiskBlock, DiskStore

__all__ = ["DRIFT_ROWS", "DiskRows", "Parts", "Pinned", "RowStore", "drift", "shapes_of"]

#: Ranges of absolute positions (first, end), end excluded, whose rows stay.
Pinned = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DiskRows:
    """The oldest sealed rows, in a file."""

    store: DiskStore
    block: DiskBlock
    rows: int
    key_arrays: int  #: how many of the block's arrays belong to the keys

    def load(self) -> tuple[Encoded, Encoded]:
        """Encoded keys and values, verified against the checksum.

        Raises:
            DiskTierError: the file is gone, or is not what was written.
        """
        arrays = self.store.load(self.block)
        return arrays[: self.key_arrays], arrays[self.key_arrays :]

    def __deepcopy__(self, memo: dict[int, Any]) -> DiskRows:
        # The file is written once and never changed, so copies of a cache may share it.
        return self


@dataclass(frozen=True)
class Parts:
    """The rows that attention is to see, as they lie: the dense head, sealed ones, and dense ones behind them."""

    layout: Layout
    dtype: mx.Dtype
    keys: Encoded | None  #: sealed rows; None where there are none
    values: Encoded | None
    head: tuple[mx.array, mx.array] | None = None  #: keys and values (B, H, R, D)
    tail: tuple[mx.array, mx.array] | None = None
    decoded: bool = False  #: whether attention gets dense arrays even of packed rows

    def keys_twice(self) -> Parts:
        """With the keys in the place of the values as well, as in latent attention."""
        head, tail = (None if pair is None else (pair[0], pair[0]) for pair in (self.head, self.tail))
        layout = replace(self.layout, values=self.layout.keys)
        return replace(self, layout=layout, values=self.keys, head=head, tail=tail)

    def fetch(self) -> tuple[Any, Any]:
        """What mlx-lm's attention gets: triples of packed codes, or dense arrays (B, H, T, D)."""
        if self.layout.packed and self.keys is not None and not self.decoded:
            return self.keys, self.values
        return self.dense()

    def dense(self) -> tuple[mx.array, mx.array]:
        """All rows decoded: (B, H, T, D) each. Nothing is computed until they are used."""
        pieces = [] if self.head is None else [self.head]
        if self.keys is not None and self.values is not None:
            layout = self.layout
            pieces.append(
                (layout.keys.decode(self.keys, self.dtype), layout.values.decode(self.values, self.dtype))
            )
        if self.tail is not None and (self.tail[0].shape[2] or not pieces):
            pieces.append(self.tail)
        if len(pieces) == 1:
            return pieces[0]
        return mx.concatenate([k for k, _ in pieces], 2), mx.concatenate([v for _, v in pieces], 2)


@dataclass
class RowStore:
    """Rows (B, H, T, D) in this order: the dense head, those on disk, sealed ones in growing buffers, the dense tail."""

    layout: Layout
    dtype: mx.Dtype | None = None  #: of dense rows; None before the first row
    keys: Encoded | None = None
    values: Encoded | None = None
    sealed: int = 0  #: sealed rows in memory
    tail_keys: mx.array | None = None
    tail_values: mx.array | None = None
    tail: int = 0  #: rows in the tail
    disk: DiskRows | None = None
    #: (B·H, D) of keys and of values; None before the first row.
    shapes: tuple[tuple[int, int], tuple[int, int]] | None = None
    head_keys: mx.array | None = None  #: the first rows, where the layout keeps them dense
    head_values: mx.array | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RowStore:
        arrays = ("keys", "values", "tail_keys", "tail_values", "head_keys", "head_values")
        return replace(self, **{name: copy.deepcopy(getattr(self, name), memo) for name in arrays})

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def on_disk(self) -> int:
        return 0 if self.disk is None else self.disk.rows

    @property
    def rows(self) -> int:
        return self.head + self.on_disk + self.sealed + self.tail

    @property
    def head(self) -> int:
        """Rows in the dense head."""
        return 0 if self.head_keys is None else int(self.head_keys.shape[2])

    @property
    def capacity(self) -> int:
        """Rows allocated for sealed ones, in memory."""
        return 0 if self.keys is None else capacity_of(self.keys, self.layout.keys)

    @property
    def key_arrays(self) -> Encoded:
        return (self.keys or ()) + tuple(a for a in (self.tail_keys, self.head_keys) if a is not None)

    @property
    def value_arrays(self) -> Encoded:
        return (self.values or ()) + tuple(a for a in (self.tail_values, self.head_values) if a is not None)

    @property
    def nbytes_allocated(self) -> int:
        return encoded_nbytes(self.key_arrays + self.value_arrays)

    def put(self, *, keys: Encoded | None = None, values: Encoded | None = None) -> None:
        """Take other arrays in the place of those that there are, of the same shapes."""
        if keys is not None:
            split = len(keys) - (self.tail_keys is not None)
            self.keys = keys[:split] or None
            self.tail_keys = keys[split] if split < len(keys) else None
        if values is not None:
            split = len(values) - (self.tail_values is not None)
            self.values = values[:split] or None
            self.tail_values = values[split] if split < len(values) else None

    # -- what a step does -------------------------------------------------------------------------------------------

    def append(self, keys: mx.array, values: mx.array) -> Parts:
        """Add rows (B, H, N, D) and return what attention is to see.

        The rows of one step see each other as they came; whole units of the tail are sealed behind it, as in KIVI
        (arXiv:2402.02750). Packed rows are sealed at once, because mlx-lm's attention takes no dense ones beside them.
        """
        self.dtype, self.shapes = keys.dtype, shapes_of(keys, values)
        if self.head < self.layout.sinks and self.rows == self.head:
            keys, values = self._fill_head(keys, values)
        if self.layout.unit == 1:
            self._seal(keys, values)
            return self.parts()
        old, new = self.tail, self.tail + keys.shape[2]
        if self.tail_keys is not None and self.tail_values is not None:
            if new < self.layout.tail_capacity:
                self.tail_keys[:, :, old:new] = keys
                self.tail_values[:, :, old:new] = values
                self.tail = new
                return self.parts()
            if old:
                keys = mx.concatenate([self.tail_keys[:, :, :old], keys], 2)
                values = mx.concatenate([self.tail_values[:, :, :old], values], 2)
        sealed = self.sealed
        self._take_in(keys, values)
        # What is held is computed before anybody attends to these rows: left for later, as a model leaves it, it would
        # keep the dense rows of every layer alive until the end of the step.
        keys, values = mx.depends([keys, values], [*self.key_arrays, *self.value_arrays])
        # Looked at in the buffers as they are now: somebody who still had to read the old ones would have them copied.
        return self._parts((keys, values), sealed)

    def _fill_head(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Put the first rows into the head; returns the others."""
        n = self.layout.sinks - self.head
        first_keys, first_values = mx.contiguous(keys[:, :, :n]), mx.contiguous(values[:, :, :n])
        if self.head_keys is not None and self.head_values is not None:
            first_keys = mx.concatenate([self.head_keys, first_keys], 2)
            first_values = mx.concatenate([self.head_values, first_values], 2)
        self.head_keys, self.head_values = first_keys, first_values
        return keys[:, :, n:], values[:, :, n:]

    def _take_in(self, keys: mx.array, values: mx.array) -> None:
        """Seal what is to be sealed; the rest becomes the tail."""
        whole = self.layout.sealable(keys.shape[2])
        if whole:
            self._seal(keys[:, :, :whole], values[:, :, :whole])
        self._set_tail(keys[:, :, whole:], values[:, :, whole:])

    def _seal(self, keys: mx.array, values: mx.array) -> None:
        layout = self.layout
        self.keys = append_rows(self.keys, self.sealed, layout.keys.encode(keys), layout.keys)
        self.values = append_rows(self.values, self.sealed, layout.values.encode(values), layout.values)
        self.sealed += keys.shape[2]

    def _set_tail(self, keys: mx.array, values: mx.array) -> None:
        self.tail = keys.shape[2]
        if self.layout.unit == 1:
            assert self.tail == 0, "rows without a place"
            self.tail_keys = self.tail_values = None
            return
        self.tail_keys = _padded(keys, self.layout.tail_capacity)
        self.tail_values = _padded(values, self.layout.tail_capacity)

    def fetch(self) -> tuple[Any, Any]:
        """What the attention gets: triples of packed codes, or dense arrays (B, H, T, D)."""
        return self.parts().fetch()

    def encoded(self, sealed: int | None = None) -> tuple[Encoded, Encoded]:
        """Sealed rows as they are stored: those on disk, and the first ``sealed`` in memory (by default all)."""
        sealed = self.sealed if sealed is None else sealed
        if self.disk is None:
            return self._in_memory(sealed)
        keys, values = self.disk.load()
        if sealed:
            more_keys, more_values = self._in_memory(sealed)
            keys = join_rows([keys, more_keys], self.layout.keys)
            values = join_rows([values, more_values], self.layout.values)
        return keys, values

    def _in_memory(self, sealed: int) -> tuple[Encoded, Encoded]:
        assert self.keys is not None
        assert self.values is not None
        return cut_rows(self.keys, sealed, self.layout.keys), cut_rows(
            self.values, sealed, self.layout.values
        )

    def dense(self) -> tuple[mx.array, mx.array]:
        """All rows decoded: (B, H, T, D) each."""
        return self.parts().dense()

    def parts(self) -> Parts:
        """All rows, as they lie."""
        if self.tail_keys is None or self.tail_values is None:
            return self._parts(None)
        return self._parts((self.tail_keys[:, :, : self.tail], self.tail_values[:, :, : self.tail]))

    def _parts(self, tail: tuple[mx.array, mx.array] | None, sealed: int | None = None) -> Parts:
        """All rows but those in memory that were sealed behind the first ``sealed``, which are in ``tail`` then."""
        assert self.dtype is not None, "no rows yet"
        sealed = self.sealed if sealed is None else sealed
        keys, values = self.encoded(sealed) if self.on_disk + sealed else (None, None)
        head = None
        if self.head_keys is not None and self.head_values is not None:
            head = self.head_keys, self.head_values
        return Parts(self.layout, self.dtype, keys, values, head, tail)

    # -- what actions do --------------------------------------------------------------------------------------------

    @classmethod
    def holding(cls, layout: Layout, keys: mx.array, values: mx.array) -> RowStore:
        """Dense rows (B, H, T, D) stored in ``layout``, without slack and evaluated, one side after the other."""
        new = cls(layout, keys.dtype, shapes=shapes_of(keys, values))
        if layout.sinks:
            keys, values = new._fill_head(keys, values)
            mx.eval(new.head_keys, new.head_values)
        whole = layout.sealable(keys.shape[2])
        if whole:
            new.keys = _owned(layout.keys, keys[:, :, :whole])
            mx.eval(new.keys)
            new.values = _owned(layout.values, values[:, :, :whole])
            mx.eval(new.values)
            new.sealed = whole
        new._set_tail(keys[:, :, whole:], values[:, :, whole:])
        mx.eval(new.tail_keys, new.tail_values)
        return new

    def trim(self, n: int) -> None:
        """Take back the last ``n`` rows. The rest of a block that is cut through goes to the tail, decoded."""
        if n <= self.tail:
            self.tail -= n
            return
        n -= self.tail
        if n > self.sealed and self.disk is not None:
            self.restore()
        keep = self.sealed - n
        whole = keep // self.layout.block * self.layout.block
        if whole < keep:
            assert self.keys is not None
            assert self.values is not None
            assert self.dtype is not None
            end, layout = whole + self.layout.block, self.layout
            keys = layout.keys.decode(slice_rows(self.keys, whole, end, layout.keys), self.dtype)
            values = layout.values.decode(slice_rows(self.values, whole, end, layout.values), self.dtype)
            self._set_tail(keys[:, :, : keep - whole], values[:, :, : keep - whole])
        else:
            self.tail = 0
        self.sealed = whole

    def gather(self, blocks: mx.array, tail: mx.array) -> tuple[DiskStore, int] | None:
        """Keep the blocks at ``blocks`` (B, H, n) int32 of all sealed rows and the rows at ``tail`` (B, H, m) of the tail.

        All of them are in memory then. Returns where the share of them that was on disk goes back to with
        :meth:`offload`, and how many rows that are; None if nothing was there.

        Raises:
            DiskTierError: the file is gone, or is not what was written; the rows are as they were.
        """
        layout, disk = self.layout, self.disk
        share = self.on_disk / max(1, self.on_disk + self.sealed)
        if self.on_disk + self.sealed:
            keys, values = self.encoded()
            self.keys = gather_rows(keys, blocks, layout.keys, layout.block) if blocks.shape[2] else None
            self.values = (
                gather_rows(values, blocks, layout.values, layout.block) if blocks.shape[2] else None
            )
            mx.eval(self.keys, self.values)
            self.disk = None
            self.sealed = blocks.shape[2] * layout.block
        else:
            self.keys = self.values = None  # room that was reserved goes as well
        if self.tail_keys is not None and self.tail_values is not None:
            self._set_tail(
                *gather_rows((self.tail_keys,), tail, _DENSE), *gather_rows((self.tail_values,), tail, _DENSE)
            )
            mx.eval(self.tail_keys, self.tail_values)
        return None if disk is None else (disk.store, disk_rows(self.sealed, share, layout.block))

    def compact(self) -> None:
        """Cut the allocation down to the live rows; the tail keeps its size."""
        if self.keys is None or self.values is None or self.capacity == self.sealed:
            return
        keys, values = self._in_memory(self.sealed)
        self.keys, self.values = own_rows(keys), own_rows(values)
        mx.eval(self.keys, self.values)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` sealed rows in memory, rounded up to whole blocks."""
        layout = self.layout
        rows = -(-rows // layout.block) * layout.block
        if self.capacity >= rows or self.rows == 0:
            return
        if self.keys is None or self.values is None:
            self.keys, self.values = self._nothing_sealed()
        self.keys = _widened(self.keys, rows, layout.keys)
        mx.eval(self.keys)
        self.values = _widened(self.values, rows, layout.values)
        mx.eval(self.values)

    def _nothing_sealed(self) -> tuple[Encoded, Encoded]:
        """Buffers without rows, of the shapes that sealed rows have."""
        layout = self.layout
        if self.disk is not None:
            like = [
                mx.zeros(s, d) for s, d in zip(self.disk.block.shapes, self.disk.block.dtypes, strict=True)
            ]
            keys, values = tuple(like[: self.disk.key_arrays]), tuple(like[self.disk.key_arrays :])
        else:
            assert self.tail_keys is not None
            assert self.tail_values is not None
            some = (slice(None), slice(None), slice(layout.block))
            keys = layout.keys.encode(self.tail_keys[some])
            values = layout.values.encode(self.tail_values[some])
        return slice_rows(keys, 0, 0, layout.keys), slice_rows(values, 0, 0, layout.values)

    def offload(self, store: DiskStore, rows: int) -> None:
        """Write the oldest ``rows`` sealed rows (those on disk already included) to a file and drop them from memory.

        Raises:
            DiskTierError: the file could not be written; the rows are where they were.
        """
        rows = rows // self.layout.block * self.layout.block
        if rows <= self.on_disk:
            return
        keys, values = self.encoded()
        layout = self.layout
        gone_keys, gone_values = cut_rows(keys, rows, layout.keys), cut_rows(values, rows, layout.values)
        block = store.put((*gone_keys, *gone_values))
        total = self.on_disk + self.sealed
        if rows < total:
            self.keys = own_rows(slice_rows(keys, rows, total, layout.keys))
            self.values = own_rows(slice_rows(values, rows, total, layout.values))
            mx.eval(self.keys, self.values)
        else:
            self.keys = self.values = None
        self.sealed = total - rows
        self.disk = DiskRows(store, block, rows, len(gone_keys))

    def restore(self) -> None:
        """Bring the rows on disk back into memory.

        Raises:
            DiskTierError: the file is gone, or is not what was written.
        """
        if self.disk is None:
            return
        keys, values = self.encoded()
        mx.eval(keys, values)
        self.sealed += self.on_disk
        self.keys, self.values, self.disk = own_rows(keys), own_rows(values), None
        mx.eval(self.keys, self.values)


#: Rows whose drift is measured after re-encoding: enough that not all of them can be representable by chance.
DRIFT_ROWS = 64


def drift(codec: Codec, encoded: Encoded | None, rows: mx.array) -> float | None:
    """Root-mean-square error of the oldest rows as encoded, relative to their own; None where there is nothing to see.

    Args:
        encoded: the same rows and perhaps more behind them, in ``codec``.
        rows: dense (B, H, T, D). Rows whose elements are all equal, or that have none, are representable in any codec
            and say nothing.
    """
    if codec.code_bits is None or encoded is None or rows.shape[-1] == 0:
        return None
    n = min(capacity_of(encoded, codec), max(DRIFT_ROWS, codec.block))
    old = rows[:, :, :n].astype(mx.float32)
    if not (old.max(axis=-1) > old.min(axis=-1)).any().item():
        return None
    new = codec.decode(slice_rows(encoded, 0, n, codec), rows.dtype).astype(mx.float32)
    error: Any = mx.sqrt(mx.square(new - old).mean() / mx.square(old).mean()).item()
    return float(error)


def shapes_of(keys: mx.array, values: mx.array) -> tuple[tuple[int, int], tuple[int, int]]:
    """(B·H, D) of keys and of values (B, H, T, D)."""
    batch, heads, _, dim = keys.shape
    return (batch * heads, dim), (values.shape[0] * values.shape[1], values.shape[3])


def disk_rows(sealed: int, share: float, block: int) -> int:
    """How many of ``sealed`` rows go to disk for a ``share`` of them: whole blocks."""
    return round(share * sealed) // block * block


def _owned(codec: Codec, rows: mx.array) -> Encoded:
    return own_rows(codec.encode(rows))


def _padded(rows: mx.array, capacity: int) -> mx.array:
    buffer = mx.zeros((*rows.shape[:2], capacity, rows.shape[3]), rows.dtype)
    if rows.shape[2]:
        buffer[:, :, : rows.shape[2]] = rows
    return buffer


def _widened(buffers: Encoded, rows: int, codec: Codec) -> Encoded:
    return tuple(
        _widen(a, rows // codec.block * span, codec.axis)
        for a, span in zip(buffers, codec.spans, strict=True)
    )


def _widen(a: mx.array, entries: int, axis: int) -> mx.array:
    """The same entries in front of zeros: nothing is there for a while but the two."""
    shape = list(a.shape)
    shape[axis] = entries
    wider = mx.zeros(shape, a.dtype)
    if axis == 2:
        wider[:, :, : a.shape[2]] = a
    else:
        wider[..., : a.shape[axis]] = a
    return wider


_DENSE = Dense()
