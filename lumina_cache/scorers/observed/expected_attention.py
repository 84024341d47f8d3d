"""Expected attention: rows that queries still to come are likely to attend to stay.

Devoto et al., *Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution*,
arXiv:2510.00636. Queries before rotation are taken for normal, with the mean μ and covariance Σ of those seen. The
average rotation R̄ over the next positions turns them into those to come, and for a normal q

``E exp(s·q·k) = exp(s·k·R̄μ + ½·s²·kᵀR̄ΣR̄ᵀk)``, s the scale of the scores.

``score_j = (mean over the heads of a group of softmax_j(log E) + ε)·‖v_j‖₂``. Defaults are those of kvpress
(``ExpectedAttentionPress``: 512 positions, the first 4 queries left out for being sinks, covariance, ‖v‖, ε = 0).

Statistics are (B, Hq, D) and (B, Hq, D, D) float32 per layer, whatever the number of rows. The queries seen are rotated;
they are turned back with the model's own rotation, which has to be given (:class:`~.base.Rotation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ...backend.capabilities import KEYS, QUERIES, VALUES
from ...errors import ObservationError
from ...method import Method, observed_method
from .base import Attended, ObservedScorer, Rotation, Statistics
from .weights import BLOCK_BYTES

__all__ = ["ExpectedAttention", "average_rotation", "turned_back"]


@dataclass(frozen=True)
class ExpectedAttention(ObservedScorer):
    """The more attention to be expected of the next ``future`` queries the better.

    ``skipped``: positions whose queries do not count. ``covariance``: whether the second term above is in.
    """

    future: int = 512
    skipped: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    method: ClassVar[Method] = observed_method(
        "expected_attention",
        "Expected Attention, arXiv:2510.00636",
        "E over future q of softmax weight × ‖v‖",
        KEYS,
        VALUES,
        QUERIES,
    )
    needs_rotation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.future < 1 or self.skipped < 0:
            raise ValueError(
                f"future={self.future}, skipped={self.skipped}: give 1 or more positions, 0 or more queries"
            )

    def _seen(
        self, stats: Statistics, seen: Attended
    ) -> tuple[Mapping[str, mx.array], Mapping[str, mx.array]]:
        if seen.rotation is None:
            raise ObservationError(
                f"{self.method.name} turns queries back to before their rotation, and how this layer rotates them is not "
                "known: see rotations(model)"
            )
        first = max(0, self.skipped - seen.first_position)
        if first >= seen.new:
            return {}, stats.heads
        queries = turned_back(seen.queries.astype(mx.float32), seen.first_position, seen.rotation)
        queries = queries[:, :, first:]
        had = stats.heads
        heads = {
            "count": had.get("count", mx.array(0.0)) + float(seen.new - first),
            "sum": had.get("sum", 0.0) + queries.sum(axis=2),
        }
        if self.covariance:
            heads["products"] = had.get("products", 0.0) + queries.swapaxes(-1, -2) @ queries
        return {}, heads

    def missing(self, stats: Statistics) -> str | None:
        if "count" not in stats.heads:
            return f"no query at position {self.skipped} or later was seen"
        return super().missing(stats)

    def scores(
        self,
        stats: Statistics,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        rotation: Rotation | None = None,
    ) -> mx.array:
        if "count" not in stats.heads or rotation is None:
            missing = "no query was seen" if rotation is not None else "the layer's rotation was not given"
            raise ObservationError(
                f"{self.method.name}: {missing}; positions below {self.skipped} do not count"
            )
        batch, n_kv_heads, _, dim = keys.shape
        count, mean = stats.heads["count"], stats.heads["sum"] / stats.heads["count"]
        turn = average_rotation(rotation, stats.end, self.future, dim)
        # Rows are vectors from the left: R̄x is x·turn.
        towards = (mean @ turn).reshape(batch, n_kv_heads, -1, dim)
        keys = keys.astype(mx.float32)
        logs = stats.scale * (towards @ keys.swapaxes(-1, -2))
        if self.covariance:
            spread = stats.heads["products"] / count - mean[..., :, None] * mean[..., None, :]
            spread = (turn.T @ spread @ turn).reshape(batch, n_kv_heads, -1, dim, dim)
            logs = logs + 0.5 * stats.scale**2 * _quadratic(keys, spread)
        expected = mx.softmax(logs, axis=-1, precise=True).mean(axis=2)
        if self.value_norm:
            expected = (expected + self.epsilon) * mx.linalg.norm(values.astype(mx.float32), axis=-1)
        return expected


def _quadratic(keys: mx.array, spread: mx.array) -> mx.array:
    """kᵀΣk (B, H, G, T) of keys (B, H, T, D) and Σ (B, H, G, D, D), one of each group at a time."""
    found: list[mx.array] = []
    for i in range(spread.shape[2]):
        one = mx.depends(spread[:, :, i], found[-1]) if found else spread[:, :, i]
        found.append(((keys @ one) * keys).sum(axis=-1))
    return mx.stack(found, axis=2)


def turned_back(x: mx.array, first_position: int, rotation: Rotation) -> mx.array:
    """Rows (B, H, N, D) as they were before ``rotation`` turned them at the positions from ``first_position`` on.

    Row i is to be turned by −(first_position + i), and a rotation only counts upwards: so the order is reversed. Some
    models' rotations scale as well (YaRN); at position 0 there is nothing else, which tells by how much.
    """
    n, dim = x.shape[2:]
    gain = rotation(mx.ones((1, 1, 1, dim), x.dtype), 0)
    return rotation(x[:, :, ::-1], -(first_position + n - 1))[:, :, ::-1] / gain**2


def average_rotation(rotation: Rotation, first_position: int, n: int, dim: int) -> mx.array:
    """Mean over ``n`` positions from ``first_position`` on of the matrix (dim, dim) M with ``rotation(x) = x·M``.

    Found by turning the unit vectors, as many positions at a time as BLOCK_BYTES allow.
    """
    total, size = mx.zeros((dim, dim)), max(1, BLOCK_BYTES // (4 * dim * dim))
    for first in range(0, n, size):
        unit = mx.depends(mx.eye(dim), total) if first else mx.eye(dim)
        some = mx.broadcast_to(unit[None, :, None], (1, dim, min(size, n - first), dim))
        total = total + rotation(some, first_position + first).sum(axis=2)[0]
    return total / n
