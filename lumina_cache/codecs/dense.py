"""Rows as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from .base import Codec, Encoded

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense(Codec):
    """No encoding: ``head_dim`` elements of the model's own dtype per row."""

    packed: ClassVar[bool] = False

    def encode(self, rows: mx.array) -> Encoded:
        return (rows,)

    def decode(self, encoded: Encoded) -> mx.array:
        return encoded[0]

    def row_nbytes(self, head_dim: int, itemsize: int) -> int:
        return head_dim * itemsize
