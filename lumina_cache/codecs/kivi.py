"""Keys in groups along the tokens, one channel at a time; values in groups along the head dimension.

Keys have channels that are large for every token. A group along the head dimension pays for them with a coarse step for
all; a group of ``group_size`` tokens of one channel does not. With k (T, D) the keys of a head, the groups are
``k[n·g:(n+1)·g, d]``, each packed as in :mod:`.affine`: ``mlx.core.quantize`` of the transposed rows, which is the layout
that ``mlx.core.quantized_matmul(q, *keys, transpose=False)`` reads. KIVI, arXiv:2402.02750.

``group_size`` rows are encoded together, and the newest ``RESIDUAL`` rows stay dense by default (the paper: groups of 32
and 128 dense rows). Values are packed row by row, in groups of at most 64 elements so that heads of 64 can have any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..backend.capabilities import DENSE_REENCODE
from ..method import quant_method
from .affine import AffineFetch
from .base import CodecFamily, Sides

__all__ = ["FAMILY", "RESIDUAL", "KiviKeys"]

#: Newest rows that stay dense.
RESIDUAL = 32
_LARGEST_VALUE_GROUP = 64
_SMALLEST_ITEMSIZE = 2


@dataclass(frozen=True)
class KiviKeys(AffineFetch):
    """Blocks of ``group_size`` rows: codes (B, H, D, T·bits/32) uint32, scales and biases (B, H, D, T/group_size)."""

    axis: ClassVar[int] = 3
    copies: ClassVar[float] = 1.0

    @property
    def block(self) -> int:
        return self.group_size

    @property
    def spans(self) -> tuple[int, ...]:
        return (self.group_size * self.bits // 32, 1, 1)

    def to_grouped(self, rows: mx.array) -> mx.array:
        return rows.swapaxes(-1, -2)

    def from_grouped(self, grouped: mx.array) -> mx.array:
        return grouped.swapaxes(-1, -2)

    def row_nbytes(self, width: int, itemsize: int) -> int:
        return width * self.bits // 8 + 2 * width * itemsize // self.group_size

    def why_not(self, head_dim: int) -> str | None:
        codes, scales = head_dim * self.bits, 2 * head_dim * _SMALLEST_ITEMSIZE
        if codes % 8 == 0 and scales % self.group_size == 0:
            return None
        return (
            f"a block of {self.group_size} rows with a head dim of {head_dim} "
            "does not come to a whole number of bytes per row"
        )


def _make(key_bits: int, value_bits: int, group_size: int) -> Sides:
    return Sides(
        KiviKeys(key_bits, group_size), AffineFetch(value_bits, min(group_size, _LARGEST_VALUE_GROUP))
    )


FAMILY = CodecFamily(
    quant_method(
        "kivi",
        "KIVI, arXiv:2402.02750",
        "keys grouped along tokens, values along the head dim",
        DENSE_REENCODE,
    ),
    _make,
    residual=RESIDUAL,
)
