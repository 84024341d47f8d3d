"""Expected attention from stored statistics: mean and covariance of queries of other texts.

Devoto et al., *Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution*,
arXiv:2510.00636; kvpress has this form too (``ExpectedAttentionStatsPress``). As
:mod:`~lumina_cache.scorers.observed.expected_attention`, whose statistics are those of the prompt::

    score_j = mean over the heads of a group of softmax_j(s·k·R̄μ + ½·s²·kᵀR̄ΣR̄ᵀk)

The factor ‖v‖ of the paper is left out: with it the loss was larger (docs/bank.md). The covariance is stored as the
directions in which queries spread most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ...backend.capabilities import KEYS, QUERY_STATISTICS
from ...errors import ObservationError
from ...method import Method, evict_method
from ..observed.expected_attention import average_rotation
from ..observed.weights import BLOCK_BYTES
from .base import AHEAD, BankedScorer, Foreseen

__all__ = ["ExpectedBank"]


@dataclass(frozen=True)
class ExpectedBank(BankedScorer):
    """The more attention to be expected of the next ``ahead`` queries the better."""

    ahead: int = AHEAD

    method: ClassVar[Method] = evict_method(
        "expected_bank",
        "Expected Attention, arXiv:2510.00636",
        "E over q of stored mean and covariance of softmax weight",
        KEYS,
        QUERY_STATISTICS,
    )
    copies: ClassVar[float] = 2.0
    scratch: ClassVar[int] = 3 * BLOCK_BYTES

    def scores(self, known: Foreseen, keys: mx.array, values: mx.array, offset: int) -> mx.array:
        statistics = known.statistics
        if statistics.mean is None or statistics.spread is None:
            raise ObservationError(f"{self.method.name}: this query bank holds no mean and no covariance")
        _, heads, _, dim = keys.shape
        turn = average_rotation(known.rotation, offset, self.ahead, dim)
        # Rows are vectors from the left: R̄x is x·turn.
        mean = (statistics.mean @ turn).reshape(1, heads, -1, dim)
        spread = (statistics.spread @ turn).reshape(1, heads, mean.shape[2], -1, dim)
        keys = keys.astype(mx.float32).swapaxes(-1, -2)
        logs = statistics.scale * (mean @ keys)
        found: list[mx.array] = []
        for i in range(mean.shape[2]):
            along = spread[:, :, i] @ keys
            found.append(0.5 * statistics.scale**2 * (along * along).sum(axis=-2))
            mx.eval(found[-1])
        return mx.softmax(logs + mx.stack(found, axis=2), axis=-1, precise=True).mean(axis=2)
