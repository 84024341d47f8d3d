"""Q-Filters: keys that point where queries point stay.

Godey et al., *Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression*, arXiv:2503.02812. Queries of a head,
rotated, lie mostly along one direction, the first right singular vector of a matrix of many of them. Of ±v the one is
taken that queries point along on average; those of the heads of a group are averaged.

``score = k·v``. NVIDIA's kvpress (``QFilterPress``) subtracts instead, as the filters that it downloads have the other sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ...backend.capabilities import KEYS, QUERY_STATISTICS
from ...method import Method, evict_method
from .base import BankedScorer, Foreseen

__all__ = ["QFilters"]


@dataclass(frozen=True)
class QFilters(BankedScorer):
    """The further along the direction of the queries the better."""

    method: ClassVar[Method] = evict_method(
        "q_filters",
        "Q-Filters, arXiv:2503.02812",
        "score = k · principal query direction",
        KEYS,
        QUERY_STATISTICS,
    )
    copies: ClassVar[float] = 0.0

    in_amounts: ClassVar[bool] = False

    def scores(self, known: Foreseen, keys: mx.array, values: mx.array, offset: int) -> mx.array:
        return (keys.astype(mx.float32) @ known.statistics.filters[None, :, :, None])[..., 0]
