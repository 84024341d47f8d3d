"""Affine packing along the head dimension, the layout that mlx-lm's packed attention reads.

For each group of ``group_size`` neighbouring elements w of one row: ``scale = (max w − min w)/(2^bits − 1)``,
``bias = min w``, ``code = round((w − bias)/scale)``, packed into uint32 words (``mlx.core.quantize``, mode "affine").
Stored bits per element are ``bits + 2·w/group_size`` with w the bits of the dense dtype: scales and biases count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..method import quant_method
from .base import Codec, CodecFamily, Encoded, Sides

__all__ = ["FAMILY", "Affine", "AffineFetch", "AffineSteps"]


@dataclass(frozen=True)
class Affine(Codec):
    """Packed codes of ``bits`` bits with one scale and one bias per ``group_size`` elements."""

    bits: int
    group_size: int

    packed: ClassVar[bool] = True

    @property
    def spans(self) -> tuple[int, ...]:
        return (1, 1, 1)

    @property
    def code_bits(self) -> int:
        return self.bits

    def to_grouped(self, rows: mx.array) -> mx.array:
        """What is quantised of ``rows`` (B, H, T, D): an array whose last axis is cut into groups."""
        return rows

    def from_grouped(self, grouped: mx.array) -> mx.array:
        """The inverse of :meth:`to_grouped`."""
        return grouped

    def encode(self, rows: mx.array) -> Encoded:
        codes, scales, biases = mx.quantize(self.to_grouped(rows), group_size=self.group_size, bits=self.bits)
        return codes, scales.astype(rows.dtype), biases.astype(rows.dtype)

    def decode(self, encoded: Encoded, dtype: mx.Dtype) -> mx.array:
        codes, scales, biases = encoded
        grouped = mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)
        return self.from_grouped(grouped.astype(dtype))

    def row_nbytes(self, width: int, itemsize: int) -> int:
        return width * self.bits // 8 + 2 * (width // self.group_size) * itemsize

    def why_not(self, head_dim: int) -> str | None:
        if head_dim % self.group_size == 0:
            return None
        return f"groups of {self.group_size} do not divide a head dim of {head_dim}"


@dataclass(frozen=True)
class AffineFetch(Affine):
    """The same codes, decoded when the rows are fetched: dense arrays are what the attention gets."""

    packed: ClassVar[bool] = False


@dataclass(frozen=True)
class AffineSteps(Affine):
    """The same codes, read packed by a step of one token, and decoded for a chunk of a prompt."""

    decoded_for_chunks: ClassVar[bool] = True


def _make(key_bits: int, value_bits: int, group_size: int) -> Sides:
    # mlx-lm's packed attention reads one pair of (bits, group size) for keys and values alike.
    codec = Affine if key_bits == value_bits else AffineFetch
    return Sides(codec(key_bits, group_size), codec(value_bits, group_size))


# What it needs depends on bits and group size: see Quantize.requires.
FAMILY = CodecFamily(
    quant_method(
        "affine",
        "mlx.core.quantize; mlx_lm QuantizedKVCache",
        "code = round((x − min)/(max − min)·(2ᵇ − 1))",
    ),
    _make,
)
