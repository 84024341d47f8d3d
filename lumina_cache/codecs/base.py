"""What a codec is: a way to store rows. One file per codec, one line in the registry (``codecs/__init__.py``).

An encoded side (keys or values) is a tuple of arrays that share a *row axis*. Most codecs encode each row by itself;
some encode ``block`` neighbouring rows together, and then the arrays hold a whole number of blocks: entry counts along
the row axis are ``blocks × spans[i]``. Everything in this module works on blocks, so that codes are appended, cut,
gathered and written to disk as codes, never decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import mlx.core as mx

from ..method import Method

__all__ = [
    "STEP",
    "Codec",
    "CodecFamily",
    "Encoded",
    "Sides",
    "append_rows",
    "capacity_of",
    "cut_rows",
    "encoded_nbytes",
    "gather_rows",
    "grown_capacity",
    "join_rows",
    "own_rows",
    "slice_rows",
]

#: Rows by which buffers grow, as in ``mlx_lm.models.cache.KVCache.step``.
STEP = 256

#: Encoded rows of keys or of values: arrays that share the row axis of their codec.
Encoded = tuple[mx.array, ...]


@dataclass(frozen=True)
class Codec(ABC):
    """How the rows of keys or values are stored. A value: two codecs with equal parameters are equal."""

    #: Whether mlx-lm's packed attention reads the encoded rows as they are (triples of codes, scales, biases).
    packed: ClassVar[bool] = False
    #: Whether such rows are decoded all the same for a step of several tokens.
    decoded_for_chunks: ClassVar[bool] = False
    #: The row axis of the encoded arrays.
    axis: ClassVar[int] = 2
    #: Float32 copies of the dense rows that encoding makes for a while, at most. Measured on the CPU, where mlx computes
    #: step by step what is one kernel on a GPU.
    copies: ClassVar[float] = 0.0

    @property
    def block(self) -> int:
        """Rows that are encoded together."""
        return 1

    @property
    def spans(self) -> tuple[int, ...]:
        """Entries along the row axis that one block has, for each encoded array."""
        return (1,)

    @property
    def code_bits(self) -> int | None:
        """Bits per element of the codes, scales not counted; None for rows as they come."""
        return None

    @abstractmethod
    def encode(self, rows: mx.array) -> Encoded:
        """Encode dense rows (B, H, T, D), T a multiple of :attr:`block`."""

    @abstractmethod
    def decode(self, encoded: Encoded, dtype: mx.Dtype) -> mx.array:
        """The dense rows (B, H, T, D) of ``dtype`` that ``encoded`` stands for."""

    @abstractmethod
    def row_nbytes(self, width: int, itemsize: int) -> int:
        """Exact bytes of one row of ``width`` elements (over all heads); ``itemsize`` is that of the dense dtype, in bytes.

        Of a codec with blocks: the bytes of a block divided by its rows, which must divide.
        """

    def why_not(self, head_dim: int) -> str | None:
        """Why rows of ``head_dim`` elements cannot be stored like this; None if they can."""
        return None


class Sides(NamedTuple):
    """How keys and values are stored."""

    keys: Codec
    values: Codec


@dataclass(frozen=True)
class CodecFamily:
    """A codec by the name it has in an action's text form.

    ``make(key_bits, value_bits, group_size)`` gives the codecs of both sides. ``residual`` is how many of the newest
    rows stay dense by default, ``sinks`` how many of the first ones.
    """

    method: Method
    make: Callable[[int, int, int], Sides]
    residual: int = 0
    sinks: int = 0


def grown_capacity(rows: int, capacity: int, n: int) -> int:
    """Capacity (rows) of a buffer after appending ``n`` rows, by the growth rule of ``mlx_lm``'s KVCache.

    A full buffer is cut to its live rows unless those end on a step, then ⌈n/256⌉ steps are added.
    """
    if rows + n <= capacity:
        return capacity
    kept = capacity if rows % STEP == 0 else rows
    return kept + -(-n // STEP) * STEP


def capacity_of(buffers: Encoded, codec: Codec) -> int:
    """Rows that the buffers have room for."""
    return int(buffers[0].shape[codec.axis]) // codec.spans[0] * codec.block


def append_rows(buffers: Encoded | None, rows: int, new: Encoded, codec: Codec) -> Encoded:
    """Write ``new`` behind the first ``rows`` rows of ``buffers``, growing by steps; returns the buffers to keep."""
    n = capacity_of(new, codec)
    capacity = 0 if buffers is None else capacity_of(buffers, codec)
    wanted = grown_capacity(rows, capacity, n)
    kept = capacity if rows % STEP == 0 else rows
    if buffers is None:
        buffers = tuple(_zeros(a, wanted, codec, i) for i, a in enumerate(new))
    elif wanted != capacity:
        held = buffers if kept == capacity else cut_rows(buffers, kept, codec)
        buffers = tuple(
            mx.concatenate([a, _zeros(a, wanted - kept, codec, i)], codec.axis) for i, a in enumerate(held)
        )
    for i, (buffer, piece) in enumerate(zip(buffers, new, strict=True)):
        start = rows // codec.block * codec.spans[i]
        where = slice(start, start + piece.shape[codec.axis])
        if codec.axis == 2:
            buffer[:, :, where] = piece
        else:
            buffer[..., where] = piece
    return buffers


def _zeros(like: mx.array, rows: int, codec: Codec, which: int) -> mx.array:
    shape = list(like.shape)
    shape[codec.axis] = rows // codec.block * codec.spans[which]
    return mx.zeros(shape, like.dtype)


def cut_rows(buffers: Encoded, rows: int, codec: Codec) -> Encoded:
    """The first ``rows`` rows, as views of the buffers."""
    return buffers if rows == capacity_of(buffers, codec) else slice_rows(buffers, 0, rows, codec)


def slice_rows(buffers: Encoded, first: int, end: int, codec: Codec) -> Encoded:
    """Rows [first, end), both on block boundaries, as views of the buffers."""
    where = [slice(first // codec.block * span, end // codec.block * span) for span in codec.spans]
    if codec.axis == 2:
        return tuple(a[:, :, w] for a, w in zip(buffers, where, strict=True))
    return tuple(a[..., w] for a, w in zip(buffers, where, strict=True))


def join_rows(pieces: Sequence[Encoded], codec: Codec) -> Encoded:
    """Several runs of rows, one behind the other."""
    if len(pieces) == 1:
        return pieces[0]
    return tuple(mx.concatenate(list(one), codec.axis) for one in zip(*pieces, strict=True))


def gather_rows(buffers: Encoded, index: mx.array, codec: Codec, block: int | None = None) -> Encoded:
    """Copies of the blocks at ``index`` (B, H, n) int32, chosen per head: codes stay codes, bit for bit.

    ``block`` is the number of rows that one index stands for, a multiple of the codec's own (by default that).
    """
    out = []
    for a, entries_per_block in zip(buffers, codec.spans, strict=True):
        span = entries_per_block * (1 if block is None else block // codec.block)
        if span > 1:
            entries = index[..., None] * span + mx.arange(span, dtype=index.dtype)
            where = entries.reshape(*index.shape[:2], -1)
        else:
            where = index
        where = where[..., None] if codec.axis == 2 else where[:, :, None]
        out.append(mx.take_along_axis(a, where, axis=codec.axis))
    return tuple(out)


def own_rows(encoded: Encoded) -> Encoded:
    """The same rows in buffers of their own: a view would keep the whole buffer that it looks into alive."""
    return tuple(mx.contiguous(a) for a in encoded)


def encoded_nbytes(buffers: Sequence[mx.array]) -> int:
    """Bytes allocated for the buffers, slack included."""
    return sum(a.nbytes for a in buffers)
