"""A bank of queries: rows stay that queries of other texts, as if they came next, attend to.

SnapKV (arXiv:2404.14469) asks the prompt's last queries; these are others of the same model and head, captured once and
turned to the positions behind the newest row. They are no guess at what will be asked but a sample of what the head asks
in general, and need nothing of the attention of the model that runs.

``score_j = mean over the bank's queries q of all heads of a group of softmax_j(s·q·K)``
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ...backend.capabilities import KEYS, QUERY_STATISTICS
from ...method import Method, evict_method
from ..observed.weights import BLOCK_BYTES
from .base import AHEAD, BankedScorer, Foreseen, blocks

__all__ = ["QueryBank"]


@dataclass(frozen=True)
class QueryBank(BankedScorer):
    """The more of the bank's attention the better; ``ahead``: positions that its queries are spread over."""

    ahead: int = AHEAD

    method: ClassVar[Method] = evict_method(
        "query_bank",
        "this project; cf. SnapKV, arXiv:2404.14469",
        "mean over stored q of softmax weight",
        KEYS,
        QUERY_STATISTICS,
    )
    scratch: ClassVar[int] = 4 * BLOCK_BYTES

    def scores(self, known: Foreseen, keys: mx.array, values: mx.array, offset: int) -> mx.array:
        queries, statistics = known.ahead(offset, self.ahead), known.statistics
        total = mx.zeros(keys.shape[:3])
        for weights in blocks(queries, keys, statistics.scale, statistics.sinks):
            total = total + weights.sum(axis=2)
            mx.eval(total)
        return total / (queries.shape[1] // keys.shape[1] * queries.shape[2])
