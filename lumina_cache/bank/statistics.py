"""What is kept of a model's queries: values, without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

__all__ = ["LayerStatistics", "QueryBank"]


@dataclass(frozen=True)
class LayerStatistics:
    """The queries of one layer, as they were before the model rotated them by their positions.

    ``rotation`` is the name of the module of the model that rotates them, ``turned_at`` and ``turned`` what it made of
    the first query of the first head there: so that it can be seen later whether it still does.
    """

    queries: mx.array  #: (Hq, N, D): some of them
    filters: mx.array  #: (H, D) float32: principal direction of the rotated ones, per K/V head (Q-Filters)
    scale: float  #: factor of q·k
    rotation: str
    turned_at: int
    turned: mx.array  #: (D,) float32
    mean: mx.array | None = None  #: (Hq, D) float32 of all queries
    spread: mx.array | None = (
        None  #: (Hq, R, D) float32: their covariance is spreadᵀ·spread, but for what R is too few for
    )
    sinks: mx.array | None = None  #: (Hq,) logits of a row without value

    @property
    def n_heads(self) -> int:
        return int(self.queries.shape[0])

    @property
    def n_kv_heads(self) -> int:
        return int(self.filters.shape[0])

    @property
    def dim(self) -> int:
        """Width of a query, and so of a key."""
        return int(self.queries.shape[-1])


@dataclass(frozen=True)
class QueryBank:
    """The statistics of one model's layers by name, and where they are from.

    ``fingerprints`` name the model, in each precision that it may be loaded in; layers that could not be captured are in
    ``refused`` with the reason.
    """

    fingerprints: tuple[str, ...]
    layers: Mapping[str, LayerStatistics]
    refused: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are held here."""
        total = 0
        for one in self.layers.values():
            arrays = (one.queries, one.filters, one.turned, one.mean, one.spread, one.sinks)
            total += sum(a.nbytes for a in arrays if a is not None)
        return total
