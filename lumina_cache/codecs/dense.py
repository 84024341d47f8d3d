"""Rows as they come."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .base import Codec, Encoded

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense(Codec):
    """No encoding: elements of the model's own dtype."""

    def encode(self, rows: mx.array) -> Encoded:
        return (rows,)

    def decode(self, encoded: Encoded, dtype: mx.Dtype) -> mx.array:
        return encoded[0].astype(dtype)

    def row_nbytes(self, width: int, itemsize: int) -> int:
        return width * itemsize
