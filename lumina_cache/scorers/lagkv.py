"""LagKV: rows that vary much, seen from the block after theirs, stay.

Liang et al., *LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important*, arXiv:2504.04704. Past the
sinks the rows are cut into blocks of ``lag``. With the smallest and largest value of every channel in the next block::

    x̄ = (x − min) / (max − min)                        x: a row's key or value
    s = softmax over the block of std(x̄)               std over the channels, with D − 1 in the denominator
    score = rank of s_k + s_v within the block / lag    0 … 1 − 1/lag

so every block gives up the same share. Sinks score 2; the last whole block and the rows after it, which have no block to
be compared with, score 1. Fewer rows than the sinks and two blocks are ranked by age, the newest best.

The authors' code keeps the best rows of each block, once, as soon as the next block is complete; the rank in place of
that, the default of 4 sinks and blocks of 128, and the fallback are those of kvpress (``LagKVPress``). Both take the keys as
they are cached, rotated. For a channel that is constant in the next block, x̄ is 0/0 in both; it counts as 0 here, and
no x̄ counts for more than ±10⁶. As up to 2·lag − 1 rows rank above all others, a budget not larger than that makes
this a window of recent rows: a small budget needs a small lag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..backend.capabilities import KEYS, VALUES
from ..method import Method, evict_method
from .base import Scorer, given

__all__ = ["LagKV"]

_FURTHEST = 1e6


@dataclass(frozen=True)
class LagKV(Scorer):
    """``sinks`` rows in front are kept, the rest is compared in blocks of ``lag`` rows."""

    sinks: int = 4
    lag: int = 128

    method: ClassVar[Method] = evict_method(
        "lagkv", "LagKV, arXiv:2504.04704", "spread of k and v relative to the next block", KEYS, VALUES
    )

    copies: ClassVar[float] = 4.0

    def scores(self, keys: mx.array | None, values: mx.array | None, positions: mx.array) -> mx.array:
        batch, heads, rows = positions.shape
        blocks = (rows - self.sinks) // self.lag
        if blocks < 2:
            age = mx.arange(rows, dtype=mx.float32) / rows
            return mx.broadcast_to(mx.where(mx.arange(rows) < self.sinks, 2.0, age), positions.shape)
        spread = self._spread(given(keys), blocks) + self._spread(given(values), blocks)
        # Twice argsort is the rank. Of equal rows the newer one gets the higher rank, because argsort is stable.
        rank = mx.argsort(mx.argsort(spread, axis=-1), axis=-1).astype(mx.float32) / self.lag
        compared = rank.reshape(batch, heads, -1)
        after = rows - self.sinks - compared.shape[-1]
        return mx.concatenate(
            [mx.full((batch, heads, self.sinks), 2.0), compared, mx.ones((batch, heads, after))], axis=-1
        )

    def _spread(self, x: mx.array, blocks: int) -> mx.array:
        """softmax of std(x̄) for all blocks but the last: (B, H, blocks − 1, lag)."""
        batch, heads, _, width = x.shape
        past = x[:, :, self.sinks : self.sinks + blocks * self.lag].astype(mx.float32)
        cut = past.reshape(batch, heads, blocks, self.lag, width)
        if width < 2:  # one channel has no spread; some models cache values without any
            return mx.full((batch, heads, blocks - 1, self.lag), 1 / self.lag)
        low = mx.min(cut[:, :, 1:], axis=-2, keepdims=True)
        span = mx.max(cut[:, :, 1:], axis=-2, keepdims=True) - low
        relative = mx.where(span > 0, (cut[:, :, :-1] - low) / mx.where(span > 0, span, 1.0), 0.0)
        relative = mx.clip(relative, -_FURTHEST, _FURTHEST)
        return mx.softmax(mx.std(relative, axis=-1, ddof=1), axis=-1)
