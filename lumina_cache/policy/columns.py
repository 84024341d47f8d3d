"""Bytes of one layer under many evictions and codecs at once, as NumPy arrays of integers.

What :mod:`lumina_cache.estimate` says of one action on values, said of all of them together: a decision asks for some
hundred at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..actions import DEFAULT_SINKS, Evict
from ..codecs.base import STEP
from ..estimate import (
    LANE_KINDS,
    Held,
    after_append,
    decoding_nbytes,
    dense_row_nbytes,
    drift_nbytes,
    guarded_rows,
    nbytes_allocated,
    scoring_nbytes,
)
from ..evolve import evolve
from ..figure_columns import CodecColumns
from ..rows import DRIFT_ROWS, Pinned

__all__ = ["ALL_ROWS", "Changed", "Column", "column_of"]

Array = Any  #: numpy.ndarray of integers, or of booleans where it says so

#: As many rows as no layer holds: an eviction to so many evicts nothing.
ALL_ROWS = 1 << 60


@dataclass(frozen=True)
class Changed:
    """What becomes of a layer, by family: evicted to a number of rows first, and encoded then. Bytes are of one layer."""

    cut: Array  #: whether any row is evicted (booleans)
    coded: Array  #: whether the layer is encoded (booleans)
    rows: Array  #: that are left
    nbytes_cut: Array  #: allocated after the eviction
    nbytes: Array  #: allocated after both
    moving: Array  #: beside it while the rows that stay are moved; 0 where none goes
    coding: Array  #: beside it while they are encoded; 0 where they are not


class Column(Protocol):
    """Equal layers. ``rows`` is what an eviction keeps; ``codecs`` are places in the profile, −1 for rows as they are."""

    held: Held

    def nbytes_next(self, rows: Array, codecs: Array, tokens: int) -> Array:
        """Allocated bytes of all of them after an eviction, a codec, a step of ``tokens`` tokens, and one token more."""
        ...

    def changed(self, rows: Array, codecs: Array) -> Changed:
        """Not for layers with rows on disk."""
        ...

    def scoring(self, scorer: str) -> int:
        """Bytes beside one of them while its rows are scored."""
        ...


def column_of(held: Held, codecs: CodecColumns, protect: Pinned) -> Column:
    if held.changeable:
        return _Rows(held, codecs, protect)
    if held.kind in LANE_KINDS and held.rows > 0:
        return _Lanes(held, codecs)
    return _Same(held)


class _Same:
    """Layers that no action changes."""

    def __init__(self, held: Held) -> None:
        self.held = held

    def nbytes_next(self, rows: Array, codecs: Array, tokens: int) -> Array:
        [after] = after_append(after_append([self.held], tokens), 1)
        return np.broadcast_to(
            np.int64(nbytes_allocated([after])), np.broadcast_shapes(rows.shape, codecs.shape)
        )

    def changed(self, rows: Array, codecs: Array) -> Changed:
        no, nbytes, left = (
            np.broadcast_to(one, rows.shape)
            for one in (np.False_, np.int64(_nbytes_of_one(self.held)), np.int64(self.held.rows))
        )
        zero = np.zeros(rows.shape, np.int64)
        return Changed(no, no, left, nbytes, nbytes, zero, zero)

    def scoring(self, scorer: str) -> int:
        return 0


class _Lanes(_Same):
    """Sliding windows and attention chunks: they can be encoded row by row, slack included."""

    def __init__(self, held: Held, codecs: CodecColumns) -> None:
        super().__init__(held)
        self.kinds = codecs.kinds(held.layout, held.key_width, held.value_width, held.itemsize)
        #: Codecs that apply; none does where rows are stored like this already.
        self.applies = np.append(codecs.row_by_row, False) & ~self.kinds.same

    def _nbytes(self, held: Held, codecs: Array) -> Array:
        """Bytes of one layer with that much capacity in another layout."""
        row = np.where(self.applies, self.kinds.row, self.kinds.row[-1])
        return (_nbytes_of_one(held) + held.capacity * (row - self.kinds.row[-1]))[codecs]

    def nbytes_next(self, rows: Array, codecs: Array, tokens: int) -> Array:
        # Their buffers grow alike in every layout.
        [after] = after_append(after_append([self.held], tokens), 1)
        nbytes = self.held.count * self._nbytes(after, codecs)
        return np.broadcast_to(nbytes, np.broadcast_shapes(rows.shape, codecs.shape))

    def changed(self, rows: Array, codecs: Array) -> Changed:
        held, same = self.held, super().changed(rows, codecs)
        coded, nbytes = self.applies[codecs], self._nbytes(held, codecs)
        side = max(held.key_width, held.value_width) * held.capacity
        decoded = 0 if held.layout.dense else dense_row_nbytes(held) * held.capacity
        beside = nbytes + decoded + _scratch(self.kinds.key_copies[codecs], side)
        beside = beside + drift_nbytes(held, held.capacity)
        return evolve(same, coded=coded, nbytes=nbytes, coding=np.where(coded, beside, 0))


class _Rows:
    """Layers of our own making."""

    def __init__(self, held: Held, codecs: CodecColumns, protect: Pinned) -> None:
        self.held = held
        self.kinds = codecs.kinds(held.layout, held.key_width, held.value_width, held.itemsize)
        self.dense_row = dense_row_nbytes(held)
        self.guarded = guarded_rows(
            DEFAULT_SINKS, protect, held.offset - held.tail, held.layout.block, held.head
        )

    def scoring(self, scorer: str) -> int:
        return scoring_nbytes(self.held, Evict(scorer, rows=1))

    def _cut(self, rows: Array) -> tuple[Array, Array, Array]:
        """Whether an eviction to ``rows`` rows cuts the layer; rows of the tail and sealed ones afterwards.

        By the arithmetic of ``estimate.kept_of``.
        """
        held, block = self.held, self.held.layout.block
        kept = np.minimum(np.maximum(rows, 1), held.rows)
        if held.head == 0 and held.tail == 0 and block == 1:
            return kept != held.rows, np.zeros_like(kept), kept
        room, most = np.maximum(kept - held.head, 0), held.tail
        tail = np.minimum(room, most)
        sealed = (room - tail) // block * block
        wanted = min(self.guarded, held.rows - held.head - held.tail)
        if wanted:
            short = (sealed < wanted) & (wanted <= room)
            tail = np.where(short, np.minimum(most, room - wanted), tail)
            sealed = np.where(short, (room - tail) // block * block, sealed)
        sealed = np.where(tail + sealed == 0, block, sealed)
        cut = (kept != held.rows) & (held.head + tail + sealed != held.rows)
        return cut, np.where(cut, tail, most), np.where(cut, sealed, held.rows - held.head - most)

    def _coded(self, left: Array, codecs: Array) -> tuple[Array, Array, Array, Array]:
        """Whether ``left`` rows are encoded anew, and how many would be dense first, sealed, and dense last ones then."""
        kinds = self.kinds
        head = np.minimum(kinds.sinks[codecs], left)
        sealed = _sealable(left - head, kinds.unit[codecs], kinds.residual[codecs])
        return ~kinds.same[codecs], head, sealed, left - head - sealed

    def nbytes_next(self, rows: Array, codecs: Array, tokens: int) -> Array:
        held, kinds = self.held, self.kinds
        unit, residual, sinks = kinds.unit[codecs], kinds.residual[codecs], kinds.sinks[codecs]
        cut, tail, sealed = self._cut(rows)
        left = held.head + tail + sealed
        coded, head, new_sealed, new_tail = self._coded(left, codecs)
        if held.on_disk:
            away, new_away = self._on_disk(cut, sealed, left, new_sealed, codecs)
            sealed, new_sealed = sealed - away, new_sealed - new_away
        capacity = np.where(coded, new_sealed, np.where(cut, sealed, held.capacity))
        head = np.where(coded, head, held.head)
        sealed, tail = np.where(coded, new_sealed, sealed), np.where(coded, new_tail, tail)
        for n in (tokens, 1):
            if n:
                first = np.where(left == head, np.minimum(np.maximum(sinks - head, 0), n), 0)
                head, tail, left = head + first, tail + (n - first), left + n
                more = _sealable(tail, unit, residual)
                capacity = _grown(sealed, capacity, more)
                sealed, tail = sealed + more, tail - more
        dense = (head + kinds.room[codecs]) * self.dense_row
        return held.count * (capacity * kinds.row[codecs] + dense + held.fixed_nbytes)

    def _on_disk(
        self, cut: Array, sealed: Array, left: Array, new_sealed: Array, codecs: Array
    ) -> tuple[Array, Array]:
        """Sealed rows whose only copy is in a file after the eviction, and after encoding too: the same share, in blocks."""
        held, block = self.held, self.kinds.block
        share = held.on_disk / (held.on_disk + held.sealed)
        away = np.where(cut, _whole(np.rint(share * sealed), block[-1]), held.on_disk)
        return away, _whole(np.rint(away / left * new_sealed), block[codecs])

    def changed(self, rows: Array, codecs: Array) -> Changed:
        held, kinds = self.held, self.kinds
        cut, tail, sealed = self._cut(rows)
        capacity, left = np.where(cut, sealed, held.capacity), held.head + tail + sealed
        dense = (held.head + held.tail_capacity) * self.dense_row + held.fixed_nbytes
        nbytes_cut = capacity * kinds.row[-1] + dense
        coded, head, new_sealed, _ = self._coded(left, codecs)
        new = (
            new_sealed * kinds.row[codecs] + (head + kinds.room[codecs]) * self.dense_row + held.fixed_nbytes
        )
        return Changed(
            cut=cut,
            coded=coded,
            rows=left,
            nbytes_cut=nbytes_cut,
            nbytes=np.where(coded, new, nbytes_cut),
            moving=np.where(cut, nbytes_cut, 0),
            coding=np.where(coded, self._coding(codecs, left, capacity, new_sealed, new), 0),
        )

    def _coding(self, codecs: Array, left: Array, capacity: Array, sealed: Array, new: Array) -> Array:
        """As ``estimate._conversion`` has it: keys first, then values, and then the drift of both."""
        held, kinds = self.held, self.kinds
        key_copies, value_copies = kinds.key_copies[codecs], kinds.value_copies[codecs]
        if held.layout.dense:
            longer = np.where(capacity > sealed, sealed, 0) * held.itemsize
            keys = sealed * kinds.key_row[codecs] + longer * held.key_width
            keys = keys + _scratch(key_copies, held.key_width * sealed)
            values = new + longer * held.value_width + _scratch(value_copies, held.value_width * sealed)
            worst = np.maximum(keys, values)
        else:
            side = max(held.key_width, held.value_width) * left
            worst = new + decoding_nbytes(held, left) + _scratch(np.maximum(key_copies, value_copies), side)
        compared = np.minimum(sealed, DRIFT_ROWS)
        return np.maximum(worst, new + compared * drift_nbytes(held, 1))


def _nbytes_of_one(held: Held) -> int:
    return nbytes_allocated([held]) // held.count


def _whole(rows: Array, block: Array) -> Array:
    """Whole blocks of ``rows`` rows."""
    return rows.astype(np.int64) // block * block


def _sealable(tail: Array, unit: Array, residual: Array) -> Array:
    """``Layout.sealable``, elementwise. Units are powers of two, so that there is a mask for whole ones."""
    return np.maximum(tail - residual, 0) & -unit


def _grown(rows: Array, capacity: Array, n: Array) -> Array:
    """``codecs.base.grown_capacity``, elementwise; a step is a power of two as well."""
    grown = np.where(rows & (STEP - 1), rows, capacity) + ((n + STEP - 1) & -STEP)
    return np.where(rows + n <= capacity, capacity, grown)


def _scratch(copies: Array, elements: Any) -> Array:
    """Bytes of float32 copies; halves round to even, as ``round`` does."""
    return np.rint(copies * elements * 4).astype(np.int64)
