"""Affine packing along the head dimension, the layout that mlx-lm's packed attention reads.

For each group of ``group_size`` neighbouring elements w of one row: ``scale = (max w − min w)/(2^bits − 1)``,
``bias = min w``, ``code = round((w − bias)/scale)``, packed into uint32 words (``mlx.core.quantize``, mode "affine").
Stored bits per element are ``bits + 2·w/group_size`` with w the bits of the dense dtype: scales and biases count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from .base import Codec, Encoded

__all__ = ["Affine"]


@dataclass(frozen=True)
class Affine(Codec):
    """Packed codes of ``bits`` bits with one scale and one bias per ``group_size`` elements."""

    bits: int
    group_size: int

    packed: ClassVar[bool] = True

    def encode(self, rows: mx.array) -> Encoded:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))

    def decode(self, encoded: Encoded) -> mx.array:
        codes, scales, biases = encoded
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)

    def row_nbytes(self, head_dim: int, itemsize: int) -> int:
        return head_dim * self.bits // 8 + 2 * (head_dim // self.group_size) * itemsize
