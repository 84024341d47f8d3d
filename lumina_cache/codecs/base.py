"""What a codec is: a way to store rows. One file per codec, one line in the registry (``codecs/__init__.py``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

__all__ = [
    "STEP",
    "Codec",
    "Encoded",
    "append_rows",
    "cut_rows",
    "encoded_nbytes",
    "gather_rows",
    "grown_capacity",
]

#: Rows by which buffers grow, as in ``mlx_lm.models.cache.KVCache.step``.
STEP = 256

#: Encoded rows: one or more arrays of shape (B, H, T, ·) that share the row axis T.
Encoded = tuple[mx.array, ...]


@dataclass(frozen=True)
class Codec(ABC):
    """How the rows of keys or values are stored. A value: two codecs with equal parameters are equal."""

    #: Whether mlx-lm's packed attention reads the encoded rows as they are (triples of codes, scales, biases).
    packed: ClassVar[bool]

    @abstractmethod
    def encode(self, rows: mx.array) -> Encoded:
        """Encode dense rows (B, H, T, D) into arrays (B, H, T, ·)."""

    @abstractmethod
    def decode(self, encoded: Encoded) -> mx.array:
        """The dense rows (B, H, T, D) that ``encoded`` stands for."""

    @abstractmethod
    def row_nbytes(self, head_dim: int, itemsize: int) -> int:
        """Exact bytes of one encoded row of one head; ``itemsize`` is that of the dense dtype, in bytes."""


def grown_capacity(rows: int, capacity: int, n: int) -> int:
    """Capacity (rows) of a buffer after appending ``n`` rows, by the growth rule of ``mlx_lm``'s KVCache.

    A full buffer is cut to its live rows unless those end on a step, then ⌈n/256⌉ steps are added.
    """
    if rows + n <= capacity:
        return capacity
    kept = capacity if rows % STEP == 0 else rows
    return kept + -(-n // STEP) * STEP


def append_rows(buffers: Encoded | None, rows: int, new: Encoded) -> Encoded:
    """Write ``new`` behind the first ``rows`` rows of ``buffers``, growing by steps; returns the buffers to keep."""
    n = new[0].shape[2]
    capacity = 0 if buffers is None else buffers[0].shape[2]
    wanted = grown_capacity(rows, capacity, n)
    if buffers is None:
        buffers = tuple(mx.zeros((*a.shape[:2], wanted, a.shape[3]), a.dtype) for a in new)
    elif wanted != capacity:
        kept = capacity if rows % STEP == 0 else rows
        buffers = tuple(
            mx.concatenate(
                [a[..., :kept, :], mx.zeros((*a.shape[:2], wanted - kept, a.shape[3]), a.dtype)], 2
            )
            for a in buffers
        )
    for buffer, piece in zip(buffers, new, strict=True):
        buffer[..., rows : rows + n, :] = piece
    return buffers


def cut_rows(buffers: Encoded, rows: int) -> Encoded:
    """The first ``rows`` rows, as views of the buffers."""
    if rows == buffers[0].shape[2]:
        return buffers
    return tuple(a[..., :rows, :] for a in buffers)


def gather_rows(buffers: Encoded, index: mx.array) -> Encoded:
    """Copies of the rows at ``index`` (T',) int32, the same for every head: codes stay codes, bit for bit."""
    return tuple(mx.take(a, index, axis=2) for a in buffers)


def encoded_nbytes(buffers: Sequence[mx.array]) -> int:
    """Bytes allocated for the buffers, slack included."""
    return sum(a.nbytes for a in buffers)
