"""Floating-point elements with a shared scale: ``mxfp4``, ``mxfp8`` and ``nvfp4`` of ``mlx.core.quantize``.

Each group has one 8-bit scale s and no bias; x is stored as the nearest element e to x/s, and read as e·s.

======  =====  =======  ==========================  ==============================
name    group  element  scale                       bits per element, scale counted
======  =====  =======  ==========================  ==============================
mxfp4   32     E2M1     E8M0, a power of two        4.25
mxfp8   32     E4M3     E8M0, a power of two        8.25
nvfp4   16     E2M1     E4M3, at most 448           4.5
======  =====  =======  ==========================  ==============================

OCP Microscaling Formats (MX) v1.0; for nvfp4 the scheme of mlx without a global scale, which reaches from 2⁻¹⁰ to 2,688:
larger elements are clipped, and a group with none above 6·2⁻¹⁰ becomes zero. The mx formats have float32's own reach.
Whether a scale between two powers of two goes to the nearest or up is the device's choice, so codes differ between CPU
and Metal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from ..backend.capabilities import DENSE_REENCODE, element_format
from ..method import quant_method
from .base import Codec, CodecFamily, Encoded, Sides

__all__ = ["FAMILIES", "MXFP4", "MXFP8", "NVFP4", "ElementFormat"]

#: mlx 0.32 takes elements 32 at a time on the CPU, groups of 16 included: another row makes any odd number of them even.
_ENCODED_TOGETHER = 32


@dataclass(frozen=True)
class ElementFormat(Codec):
    """Elements of ``bits`` bits in the format ``name``, one byte of scale per ``group_size`` of them."""

    name: Literal["mxfp4", "mxfp8", "nvfp4"]
    bits: int
    group_size: int

    @property
    def copies(self) -> float:  # type: ignore[override]
        return 19.2 if self.name == "nvfp4" else 2.25

    @property
    def spans(self) -> tuple[int, ...]:
        return (1, 1)

    @property
    def code_bits(self) -> int:
        return self.bits

    def encode(self, rows: mx.array) -> Encoded:
        if rows.shape[-1] == 0:
            # An index cache keeps keys alone, and mlx looks for the least of the elements that its values do not have.
            return mx.zeros(rows.shape, mx.uint32), mx.zeros(rows.shape, mx.uint8)
        n = rows.shape[2]
        if rows.size % _ENCODED_TOGETHER:
            rows = mx.concatenate([rows, mx.zeros_like(rows[:, :, :1])], axis=2)
        encoded = mx.quantize(rows, group_size=self.group_size, bits=self.bits, mode=self.name)
        return tuple(a[:, :, :n] for a in encoded)

    def decode(self, encoded: Encoded, dtype: mx.Dtype) -> mx.array:
        codes, scales = encoded
        # Without dtype the rows would come back as bfloat16: the scales are bytes and do not tell.
        return mx.dequantize(
            codes, scales, group_size=self.group_size, bits=self.bits, mode=self.name, dtype=dtype
        )

    def row_nbytes(self, width: int, itemsize: int) -> int:
        return width * self.bits // 8 + width // self.group_size

    def why_not(self, head_dim: int) -> str | None:
        if head_dim % self.group_size == 0:
            return None
        return f"groups of {self.group_size} do not divide a head dim of {head_dim}"


MXFP4 = ElementFormat("mxfp4", 4, 32)
MXFP8 = ElementFormat("mxfp8", 8, 32)
NVFP4 = ElementFormat("nvfp4", 4, 16)


def _family(codec: ElementFormat, source: str, formula: str) -> CodecFamily:
    method = quant_method(
        codec.name,
        source,
        formula,
        DENSE_REENCODE,
        element_format(codec.name),
        bits=(codec.bits,),
        groups=(codec.group_size,),
    )
    return CodecFamily(method, lambda key_bits, value_bits, group_size: Sides(codec, codec))


FAMILIES: tuple[CodecFamily, ...] = (
    _family(MXFP4, "OCP microscaling; mlx.core.quantize", "E2M1 with a shared exponent"),
    _family(MXFP8, "OCP microscaling; mlx.core.quantize", "E4M3 with a shared exponent"),
    _family(NVFP4, "NVFP4; mlx.core.quantize", "E2M1 with an E4M3 scale"),
)
