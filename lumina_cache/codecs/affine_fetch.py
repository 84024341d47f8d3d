"""Affine packing along the head dimension, decoded when the rows are fetched.

The same codes as :mod:`.affine`, for models whose attention cannot read packed rows (attention sinks, latent attention,
borrowed K/V, sliding windows) and for unequal bits of keys and values, at the price of one layer's dense rows per step.
"""

from __future__ import annotations

from ..backend.capabilities import DENSE_REENCODE
from ..method import quant_method
from .affine import AffineFetch
from .base import CodecFamily, Sides

__all__ = ["FAMILY"]


def _make(key_bits: int, value_bits: int, group_size: int) -> Sides:
    return Sides(AffineFetch(key_bits, group_size), AffineFetch(value_bits, group_size))


FAMILY = CodecFamily(
    quant_method("affine_fetch", "mlx.core.quantize, decoded on fetch", "as affine", DENSE_REENCODE), _make
)
