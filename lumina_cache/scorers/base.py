"""What a scorer is: it ranks rows for eviction. One file per scorer, one line in the registry (``scorers/__init__.py``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

__all__ = ["Scorer"]


@dataclass(frozen=True)
class Scorer(ABC):
    """Chooses which rows stay. A value without state: everything it looks at is passed in."""

    @abstractmethod
    def keep(self, rows: int, kept: int, sinks: int) -> np.ndarray:
        """Indices (kept,) int32, ascending, of the rows that stay out of ``rows``; the first ``sinks`` are among them."""
