"""A bank of queries, and what the output of attention would lose: the damage of dropping one row, foreseen.

Without row j, whose weight is a_j, the output o of a query moves by ``a_j/(1 − a_j)·(o − v_j)``: a row of great weight that
says what the others say is no loss, and one that says something else is. With the bank's queries as in
:mod:`.query_bank`::

    score_j = mean over q of a_j·‖v_j − o‖ / ‖o‖

CAOTE (arXiv:2504.14051) scores by the same difference, with the weights of the last query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ...backend.capabilities import KEYS, QUERY_STATISTICS, VALUES
from ...method import Method, evict_method
from ..observed.weights import BLOCK_BYTES
from .base import AHEAD, BankedScorer, Foreseen, blocks

__all__ = ["QueryBankValues"]

#: Outputs shorter than this share of the longest value count as that long.
_SHORTEST = 1e-6


@dataclass(frozen=True)
class QueryBankValues(BankedScorer):
    """The more the output of the bank's attention would move the better."""

    ahead: int = AHEAD

    method: ClassVar[Method] = evict_method(
        "query_bank_values",
        "this project; cf. CAOTE, arXiv:2504.14051",
        "mean over stored q of weight × ‖v − output‖/‖output‖",
        KEYS,
        VALUES,
        QUERY_STATISTICS,
    )
    copies: ClassVar[float] = 1.0
    scratch: ClassVar[int] = 8 * BLOCK_BYTES

    def scores(self, known: Foreseen, keys: mx.array, values: mx.array, offset: int) -> mx.array:
        queries, statistics = known.ahead(offset, self.ahead), known.statistics
        values = values.astype(mx.float32)
        squares = (values * values).sum(axis=-1)[:, :, None]
        shortest = mx.maximum(_SHORTEST * mx.sqrt(squares.max(axis=-1, keepdims=True)), 1e-30)
        total = mx.zeros(keys.shape[:3])
        for weights in blocks(queries, keys, statistics.scale, statistics.sinks):
            output = weights @ values
            own = (output * output).sum(axis=-1, keepdims=True)
            apart = squares - 2 * (output @ values.swapaxes(-1, -2)) + own
            far = mx.sqrt(mx.maximum(apart, 0.0)) / mx.maximum(mx.sqrt(own), shortest)
            total = total + (weights * far).sum(axis=2)
            mx.eval(total)
        return total / (queries.shape[1] // keys.shape[1] * queries.shape[2])
