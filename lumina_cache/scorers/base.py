"""What a scorer is: it ranks rows for eviction. One file per scorer, one line in the registry (``scorers/__init__.py``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..method import Method

__all__ = ["Scorer", "given"]


@dataclass(frozen=True)
class Scorer(ABC):
    """Ranks rows. A value without state: everything it looks at is passed in."""

    method: ClassVar[Method]
    #: Whether it looks at keys and values at all; if not, both may be None and nothing needs decoding.
    reads_rows: ClassVar[bool] = True

    #: Float32 copies of keys or of values that scoring makes for a while, at most, where the rows are float32.
    copies: ClassVar[float] = 0.0

    @abstractmethod
    def scores(self, keys: mx.array | None, values: mx.array | None, positions: mx.array) -> mx.array:
        """How much each row is worth keeping: float32 (B, H, T), higher is better. A pure function.

        Args:
            keys: (B, H, T, D), as they are cached (rotated by their positions).
            values: (B, H, T, Dv).
            positions: absolute positions (B, H, T) int32, ascending along T.
        """


def given(rows: mx.array | None) -> mx.array:
    """``rows``; raises TypeError where a scorer that reads them was handed None."""
    if rows is None:
        raise TypeError("this scorer reads keys or values that were not passed: see Scorer.reads_rows")
    return rows
