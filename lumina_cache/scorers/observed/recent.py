"""The newest queries, kept until rows are to be ranked: what SnapKV and TOVA need, at no cost while the model runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

from ...errors import ObservationError
from .base import Attended, ObservedScorer, Rotation, Statistics
from .weights import window_sums

__all__ = ["RecentQueries"]

#: Queries kept besides those asked for, so that some are left when tokens are taken back.
SPARE = 16


@dataclass(frozen=True)
class RecentQueries(ObservedScorer):
    """Ranks rows by the weights that the last :attr:`queries` give them, computed when the ranking is asked for."""

    @property
    @abstractmethod
    def queries(self) -> int:
        """Queries looked at."""

    @abstractmethod
    def _ranked(self, weights: mx.array, positions: mx.array, end: int) -> mx.array:
        """Scores (B, H, T) from mean weights (B, H, G, T) of the queries looked at, the last before ``end``."""

    def _seen(
        self, stats: Statistics, seen: Attended
    ) -> tuple[Mapping[str, mx.array], Mapping[str, mx.array]]:
        wanted, had = self.queries + SPARE, stats.heads.get("queries")
        if had is None or seen.new >= wanted:
            joined = seen.queries[:, :, -wanted:]
        else:
            joined = mx.concatenate([had, seen.queries], axis=2)[:, :, -wanted:]
        # A copy: a slice would keep all queries of the step alive.
        heads = {"queries": mx.contiguous(joined)}
        return {}, heads if seen.sinks is None else heads | {"sinks": seen.sinks}

    def missing(self, stats: Statistics) -> str | None:
        queries = stats.heads.get("queries")
        if queries is None or queries.shape[2] == 0:
            return "none of the newest queries is left"
        if stats.since == 0 or stats.end - stats.since >= self.queries:
            return None
        return f"only {stats.end - stats.since} of the newest {self.queries} queries were seen"

    def trim(self, stats: Statistics, n: int) -> Statistics:
        left = super().trim(stats, n)
        if "queries" not in left.heads:
            return left
        kept = max(0, left.heads["queries"].shape[2] - n)
        return replace(left, heads={**left.heads, "queries": left.heads["queries"][:, :, :kept]})

    def scores(
        self,
        stats: Statistics,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        rotation: Rotation | None = None,
    ) -> mx.array:
        queries = stats.heads.get("queries")
        if queries is None or queries.shape[2] == 0:
            raise ObservationError(
                f"{self.method.name} ranks rows by the newest queries, and none is left: let the model run a step first"
            )
        queries = queries[:, :, -self.queries :]
        n = queries.shape[2]
        sums = window_sums(queries, stats.end - n, keys, positions, stats.scale, stats.heads.get("sinks"))
        return self._ranked(sums / n, positions, stats.end)
