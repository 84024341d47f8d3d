"""TOVA: rows that the newest query attends to stay, the same ones for every head.

Oren et al., *Transformers are Multi-State RNNs*, arXiv:2401.06104.

``score_j = mean over all heads of a_{t,j}``, t the newest query. The paper found one ranking per layer to do better than
one per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ...backend.capabilities import QUERIES
from ...method import Method, observed_method
from .recent import RecentQueries

__all__ = ["TOVA"]


@dataclass(frozen=True)
class TOVA(RecentQueries):
    """The more of the newest query's attention the better."""

    method: ClassVar[Method] = observed_method(
        "tova", "TOVA, arXiv:2401.06104", "weights of the newest query", QUERIES
    )

    @property
    def queries(self) -> int:
        return 1

    def _ranked(self, weights: mx.array, positions: mx.array, end: int) -> mx.array:
        return mx.broadcast_to(weights.mean(axis=(1, 2))[:, None], positions.shape)
