"""Affine packing that is read packed one token at a time, and decoded for chunks of a prompt.

The same codes as :mod:`.affine`. mlx-lm's packed attention reads few bytes, which makes a decode step fast; over a chunk of
a prompt it multiplies every token with packed rows, and takes several times as long as attention over rows that are decoded
once for the whole chunk. So a step of one token gets packed rows, and any other step gets dense ones.
"""

from __future__ import annotations

from ..backend.capabilities import DENSE_REENCODE
from ..method import quant_method
from .affine import AffineSteps
from .base import CodecFamily, Sides

__all__ = ["FAMILY"]


def _make(key_bits: int, value_bits: int, group_size: int) -> Sides:
    return Sides(AffineSteps(key_bits, group_size), AffineSteps(value_bits, group_size))


# It needs packed attention as well, which depends on bits and group size: see Quantize.requires.
FAMILY = CodecFamily(
    quant_method(
        "affine_steps",
        "mlx.core.quantize; packed for one token, decoded for chunks",
        "as affine",
        DENSE_REENCODE,
    ),
    _make,
)
