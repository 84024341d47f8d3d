"""H2O: rows that drew much attention so far stay.

Zhang et al., *H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models*, arXiv:2306.14048.

``score_j = Σ_t a_{t,j}``, a_{t,j} the weight that query t gave row j, summed over all queries and averaged over the query
heads of each K/V head.

Rows seen by many queries have collected more, whatever each query gave them. :class:`H2OMean` takes that out:
``score_j = Σ_t a_{t,j} / #{t : t sees j}``, as kvpress does (``ObservedAttentionPress``).

``stride`` looks at every stride-th position only, for an estimate of the same sums at a fraction of the cost. Weights are
largest between neighbours, so a row whose own position is looked at would seem to draw more than its neighbours: ``apart``
leaves out what a query gives to the newest rows before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ...backend.capabilities import ATTENTION_WEIGHTS
from ...method import Method, observed_method
from .base import Attended, ObservedScorer, Rotation, Statistics, fold, grown
from .weights import attended_sums

__all__ = ["H2O", "H2OMean"]


@dataclass(frozen=True)
class H2O(ObservedScorer):
    """The more attention collected the better.

    ``stride``: positions from one query looked at to the next. ``apart``: rows, its own included, that a query looked at
    gives nothing to; at least ``stride`` unless that is 1.
    """

    stride: int = 1
    apart: int = 0

    method: ClassVar[Method] = observed_method(
        "h2o", "H2O, arXiv:2306.14048", "accumulated attention weights", ATTENTION_WEIGHTS
    )
    reads_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.stride < 1 or self.apart < (0 if self.stride == 1 else self.stride):
            raise ValueError(
                f"stride={self.stride}, apart={self.apart}: give a stride of 1 or more and, where it is more, apart as large"
            )

    def _seen(
        self, stats: Statistics, seen: Attended
    ) -> tuple[Mapping[str, mx.array], Mapping[str, mx.array]]:
        sums, counts = attended_sums(
            seen.queries,
            seen.keys,
            seen.scale,
            seen.mask,
            seen.sinks,
            start=-seen.first_position % self.stride,
            stride=self.stride,
            apart=self.apart,
        )
        sums = fold(sums, seen.n_kv_heads)
        counts = mx.broadcast_to(fold(counts, seen.n_kv_heads), sums.shape)
        return {
            "attention": grown(stats, "attention", seen.rows) + sums,
            "exposure": grown(stats, "exposure", seen.rows) + counts,
        }, {}

    def scores(
        self,
        stats: Statistics,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        rotation: Rotation | None = None,
    ) -> mx.array:
        return stats.rows["attention"]


@dataclass(frozen=True)
class H2OMean(H2O):
    """The more attention drawn from each query that sees the row the better; rows that none saw yet come last."""

    method: ClassVar[Method] = observed_method(
        "h2o_mean",
        "H2O, arXiv:2306.14048; kvpress ObservedAttentionPress",
        "accumulated attention weights / queries that saw the row",
        ATTENTION_WEIGHTS,
    )

    def scores(
        self,
        stats: Statistics,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        rotation: Rotation | None = None,
    ) -> mx.array:
        return stats.rows["attention"] / mx.maximum(stats.rows["exposure"], 1.0)
