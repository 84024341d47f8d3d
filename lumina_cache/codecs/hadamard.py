"""Affine packing of rotated rows: a Walsh–Hadamard transform spreads an outlier over all channels of its head.

``x → affine(H·x/√D)`` with H the D×D matrix of ±1 that ``mlx.core.hadamard_transform`` applies, rotated back when the
rows are fetched. H/√D is orthogonal, so an error keeps its length on the way back. Bits per element are those of
:mod:`.affine`. QuaRot, arXiv:2404.00456 (there the rotation is merged into the weights; a cache sees rows only).

In float16 a row's Euclidean length has to stay below 65,504: the rotation may gather all of it in one element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..backend.capabilities import DENSE_REENCODE
from ..errors import ActionInfeasibleError
from ..method import quant_method
from .affine import AffineFetch
from .base import CodecFamily, Encoded, Sides

__all__ = ["FAMILY", "Hadamard", "rotate", "rotate_back", "why_not_rotated"]

#: Odd parts of the widths that mlx has a matrix for, with their smallest power of two, symmetric ones first.
_ORDERS = (1, 12, 20, 28)
_SYMMETRIC = (1, 12)
#: Largest power of two in a width, for float32.
_LARGEST_POWER = 8192


def _order(width: int) -> int | None:
    """The m of ``width = m·2ᵏ`` with m among the orders that mlx knows; None if there is none.

    Worked out here and never tried: for some other widths (36, 576, ...) mlx 0.32 writes outside its buffers.
    """
    for order in _ORDERS:
        power, rest = divmod(width, order)
        if rest == 0 and power.bit_count() == 1 and power <= _LARGEST_POWER:
            return order
    return None


def why_not_rotated(width: int) -> str | None:
    """Why rows of ``width`` elements cannot be rotated; None if they can."""
    if _order(width) is not None:
        return None
    return f"mlx.core.hadamard_transform takes m·2ᵏ elements with m = 1, 12, 20 or 28, not {width}"


def rotate(rows: mx.array) -> mx.array:
    """``H·x/√D`` of rows x (…, D)."""
    return mx.hadamard_transform(rows)


def rotate_back(rows: mx.array) -> mx.array:
    """The rows x (…, D) that :func:`rotate` was given."""
    width = rows.shape[-1]
    if _order(width) in _SYMMETRIC:
        return mx.hadamard_transform(rows)  # symmetric and orthogonal: its own inverse
    # The matrices of order 20 and 28 are not symmetric: the inverse is the transpose, which mlx has no transform for.
    return rows @ mx.hadamard_transform(mx.eye(width)).T.astype(rows.dtype)


@dataclass(frozen=True)
class Hadamard(AffineFetch):
    """As :class:`AffineFetch`, of rows rotated along the head dimension.

    :meth:`encode` raises ActionInfeasibleError for a head dim that :meth:`why_not` refuses.
    """

    copies: ClassVar[float] = 1.1

    def to_grouped(self, rows: mx.array) -> mx.array:
        # In float32, so that 16-bit rows are rounded once, by the codes.
        return rotate(rows.astype(mx.float32))

    def from_grouped(self, grouped: mx.array) -> mx.array:
        return rotate_back(grouped)

    def encode(self, rows: mx.array) -> Encoded:
        why = self.why_not(rows.shape[-1])
        if why is not None:
            raise ActionInfeasibleError(f"{self}: {why}; store these rows with another codec")
        return super().encode(rows)

    def why_not(self, head_dim: int) -> str | None:
        return super().why_not(head_dim) or why_not_rotated(head_dim)


def _make(key_bits: int, value_bits: int, group_size: int) -> Sides:
    return Sides(Hadamard(key_bits, group_size), Hadamard(value_bits, group_size))


FAMILY = CodecFamily(
    quant_method(
        "hadamard", "QuaRot, arXiv:2404.00456", "affine of H·x/√d, rotated back on fetch", DENSE_REENCODE
    ),
    _make,
)
