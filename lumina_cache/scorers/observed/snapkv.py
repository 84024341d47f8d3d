"""SnapKV: rows that the last queries of the prompt attend to stay, and their neighbours with them.

Li et al., *SnapKV: LLM Knows What You are Looking for Before Generation*, arXiv:2404.14469.

``score_j = mean over the heads of a group of pool(mean over the last w queries of a_{t,j})``: rows before the window are
pooled over ``kernel`` neighbours (the paper's text takes the maximum, its code the mean by default, as here), those in
the window stay. Weights are of the softmax over the rows held; after an eviction, neighbours are those still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx

from ...backend.capabilities import QUERIES
from ...method import Method, observed_method
from .recent import RecentQueries

__all__ = ["SnapKV"]


@dataclass(frozen=True)
class SnapKV(RecentQueries):
    """The more of the window's attention a row and its neighbours draw the better.

    ``window``: queries looked at, and rows that stay in any case. ``kernel``: rows pooled, odd; 1 pools none.
    """

    window: int = 32
    kernel: int = 5
    pool: Literal["mean", "max"] = "mean"

    method: ClassVar[Method] = observed_method(
        "snapkv", "SnapKV, arXiv:2404.14469", "pooled weights of the last w queries", QUERIES
    )

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"window={self.window}, kernel={self.kernel}: give a window of 1 or more, an odd kernel"
            )

    @property
    def queries(self) -> int:
        return self.window

    def _ranked(self, weights: mx.array, positions: mx.array, end: int) -> mx.array:
        in_window = positions >= end - self.window
        before = mx.where(in_window[:, :, None], 0.0, weights)
        pooled = _pooled(before, self.kernel, self.pool).mean(axis=2)
        return mx.where(in_window, mx.inf, pooled)


def _pooled(x: mx.array, kernel: int, pool: str) -> mx.array:
    """Mean (zeros beyond the ends) or maximum over ``kernel`` neighbours along the last axis."""
    half, rows = kernel // 2, x.shape[-1]
    padded = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)])
    shifted = mx.stack([padded[..., i : i + rows] for i in range(kernel)])
    return shifted.max(axis=0) if pool == "max" else shifted.mean(axis=0)
