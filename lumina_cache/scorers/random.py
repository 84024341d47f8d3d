"""The control: choice without knowledge. What a scorer adds is what it adds to this.

``score = h(p)``: for each head a hash h, drawn by the seed, of the row's absolute position p. h is a bijection of 32-bit
numbers (MurmurHash3's finaliser, A. Appleby, applied to p ⊕ salt), so the order of the positions is a permutation.

Because a position keeps its score for good, evicting again and again leaves a uniform sample of all rows ever held, as
bottom-k sampling does; a fresh draw each time (kvpress ``RandomPress``) would favour recent rows. A scorer does not know
its layer: the same head of every layer chooses the same positions. Give the layers seeds of their own to avoid it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..method import Method, evict_method
from .base import Scorer

__all__ = ["Random"]


def _mix(x: mx.array) -> mx.array:
    """MurmurHash3's ``fmix32`` of a uint32 array: every bit of the input stirs every bit of the output."""
    x = (x ^ (x >> 16)) * mx.array(0x85EBCA6B, mx.uint32)
    x = (x ^ (x >> 13)) * mx.array(0xC2B2AE35, mx.uint32)
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Random(Scorer):
    """A seeded permutation for each head. ``seed`` is any integer; its lowest 32 bits count."""

    seed: int = 0

    method: ClassVar[Method] = evict_method(
        "random", "the control: choice without knowledge", "a permutation per head, by a seed"
    )
    reads_rows: ClassVar[bool] = False

    def scores(self, keys: mx.array | None, values: mx.array | None, positions: mx.array) -> mx.array:
        batch, heads, _ = positions.shape
        number = mx.arange(1, batch * heads + 1, dtype=mx.uint32)  # no head is 0, which _mix leaves at 0
        salt = _mix(number ^ _mix(mx.array(self.seed & 0xFFFFFFFF, mx.uint32)))
        stirred = _mix(positions.astype(mx.uint32) ^ salt.reshape(batch, heads, 1))
        # float32 holds 24 bits exactly.
        return (stirred >> 8).astype(mx.float32) * 2**-24
