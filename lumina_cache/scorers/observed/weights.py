"""Attention weights summed over queries, a block of queries at a time.

The scores of one block are (B, Hq, n, T) float32, n being as large as ``limit`` bytes allow; the weights made of them
are as many again. Each block waits for the sum of the one before, so that no two are in memory together.

On a CPU nearly all of the time goes into exponentials. MLX's own, which its softmax uses, takes 2.7 times as long there as
its power (without Accelerate), so the softmax is put together here, and never divided: rows are summed over queries by one
product with what each query's weights would be divided by. Blocks are smaller under a causal mask, as half of what is
computed for a block's own rows is hidden.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx

__all__ = ["BLOCK_BYTES", "attended_sums", "window_sums"]

#: Bytes that the scores of one block of queries may take.
BLOCK_BYTES = 8 << 20

#: Queries of one block under a causal mask, at most, on a CPU.
CAUSAL_QUERIES = 64


def attended_sums(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    *,
    start: int = 0,
    stride: int = 1,
    apart: int = 0,
    limit: int = BLOCK_BYTES,
) -> tuple[mx.array, mx.array]:
    """How much attention each row drew, and from how many queries it could have drawn any.

    ``sums[j] = Σᵢ softmax(scale·q_i·K + mask_i)[j]`` over the queries ``start``, ``start + stride``, …

    Args:
        queries: (B, Hq, N, D).
        keys: (B, H, T, D), H dividing Hq.
        mask: None, ``"causal"``, or an array that broadcasts to (B, Hq, N, T): bool, or added to the scores.
        sinks: (Hq,) logits of a row without value, in the sum of the softmax only.
        apart: rows between a query's own and the newest that counts; weights of those in between are left out of the
            sums, not of the softmax.
        limit: bytes of the scores of one block, if one query's take no more.

    Returns:
        sums (B, H, T) float32, and the queries that saw each row, float32 broadcasting to (B, H, T); both the mean over
        the query heads of each K/V head.
    """
    (batch, n_heads, new, _), (_, n_kv_heads, rows, _) = queries.shape, keys.shape
    total, exposure = mx.zeros((batch, n_kv_heads, rows)), mx.zeros((1, 1, rows))
    size = max(1, limit // (4 * batch * n_heads * rows))
    if isinstance(mask, str) and _on_cpu():
        size = min(size, CAUSAL_QUERIES)
    size *= stride
    for first in range(start, new, size):
        last = min(first + size, new)
        one, at = queries[:, :, first:last:stride], mx.arange(first, last, stride)
        if first > start:
            one = mx.depends(one, total)
        allowed = _mask(mask, at, new, rows, n_kv_heads, n_heads)
        # Behind the last query of a causal block nothing is seen: those rows need no product.
        seen = rows - new + last if isinstance(mask, str) else rows
        if allowed is not None:
            allowed = allowed[..., :seen]
        weights = _weights(one * scale, keys[:, :, :seen], allowed, sinks)
        sums, counts = weights.over_queries(), _seen_by(allowed, at.size, seen)
        if apart > 0:
            # Only the rows from this one on are near to any query of the block.
            near = max(0, rows - new + first - apart + 1)
            far = at[:, None] + (rows - new) - mx.arange(near, seen) >= apart
            some = weights.only(far, near).over_queries()
            sums = mx.concatenate([sums[..., :near], some], axis=-1)
            visible = far if allowed is None else _visible(allowed[..., near:]) & far
            some = _seen_by(visible, at.size, seen - near)
            counts = mx.broadcast_to(counts, (*some.shape[:2], seen))
            counts = mx.concatenate([counts[..., :near], some], axis=-1)
        unseen = [(0, 0), (0, 0), (0, rows - seen)]
        total = total + mx.pad(sums * (n_kv_heads / n_heads), unseen)
        exposure = exposure + mx.pad(counts, unseen)
    return total, exposure


def window_sums(
    queries: mx.array,
    first_position: int,
    keys: mx.array,
    positions: mx.array,
    scale: float,
    sinks: mx.array | None = None,
    *,
    limit: int = BLOCK_BYTES,
) -> mx.array:
    """Weights (B, H, G, T) float32 that rows draw from queries at ``first_position`` and after, summed over these.

    A query sees the rows up to its own position. G = Hq/H query heads share a K/V head.

    Args:
        queries: (B, Hq, N, D).
        keys: (B, H, T, D).
        positions: absolute positions (B, H, T) int32 of the rows.
    """
    (batch, n_heads, new, _), (_, n_kv_heads, rows, _) = queries.shape, keys.shape
    total = mx.zeros((batch, n_kv_heads, n_heads // n_kv_heads, rows))
    size = max(1, limit // (4 * batch * n_heads * rows))
    for first in range(0, new, size):
        one = queries[:, :, first : first + size]
        if first > 0:
            one = mx.depends(one, total)
        at = mx.arange(first_position + first, first_position + first + one.shape[2])
        allowed = positions[:, :, None, None, :] <= at[:, None]
        total = total + _weights(one * scale, keys, allowed, sinks).over_each_heads_queries()
    return total


class _Weights(NamedTuple):
    """``shares·exponentials``: softmax(q·k + mask) as (B, H, G, n, T) float32."""

    exponentials: mx.array
    shares: mx.array | None  #: (B, H, G, n, 1); None where the exponentials are divided already

    def only(self, where: mx.array, first: int) -> _Weights:
        """Those of the rows from ``first`` on, and zero where ``where`` does not hold."""
        return _Weights(mx.where(where, self.exponentials[..., first:], 0.0), self.shares)

    def over_queries(self) -> mx.array:
        """Sums over the queries of all heads of a group, (B, H, T)."""
        if self.shares is None:
            return self.exponentials.sum(axis=(2, 3))
        batch, heads, group, n, rows = self.exponentials.shape
        flat = self.exponentials.reshape(batch, heads, group * n, rows)
        return (self.shares.reshape(batch, heads, 1, group * n) @ flat)[:, :, 0]

    def over_each_heads_queries(self) -> mx.array:
        """Sums over the queries of each head, (B, H, G, T)."""
        if self.shares is None:
            return self.exponentials.sum(axis=3)
        return (self.shares.swapaxes(-1, -2) @ self.exponentials)[..., 0, :]


def _weights(queries: mx.array, keys: mx.array, mask: mx.array | None, sinks: mx.array | None) -> _Weights:
    """Weights of queries (B, Hq, n, D) on keys (B, H, T, D); ``mask`` broadcasts to (B, H, G, n, T)."""
    batch, n_heads, n, dim = queries.shape
    n_kv_heads, rows = keys.shape[1:3]
    group = n_heads // n_kv_heads
    # One product per K/V head instead of a copy of the keys for each query head.
    scores = queries.reshape(batch, n_kv_heads, group * n, dim) @ keys.swapaxes(-1, -2)
    scores = scores.reshape(batch, n_kv_heads, group, n, rows).astype(mx.float32)
    if mask is not None:
        if mask.dtype == mx.bool_:
            scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
        else:
            scores = scores + mask.astype(mx.float32)
    sink = None if sinks is None else sinks.astype(mx.float32).reshape(1, n_kv_heads, group, 1, 1)
    if _on_cpu():
        return _undivided(scores, sink)
    if sink is None:
        return _Weights(mx.softmax(scores, axis=-1, precise=True), None)
    return _Weights(mx.exp(scores - mx.logaddexp(mx.logsumexp(scores, axis=-1, keepdims=True), sink)), None)


def _undivided(scores: mx.array, sink: mx.array | None) -> _Weights:
    highest = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        highest = mx.maximum(highest, sink)
    exponentials = mx.power(math.e, scores - highest)
    total = exponentials.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + mx.power(math.e, sink - highest)
    return _Weights(exponentials, 1.0 / total)


def _on_cpu() -> bool:
    return bool(mx.default_device() == mx.cpu)


def _mask(mask: Any, at: mx.array, new: int, rows: int, n_kv_heads: int, n_heads: int) -> mx.array | None:
    """The mask of the queries ``at``, of ``new`` over ``rows``; broadcasts to (B, H, G, n, T)."""
    if mask is None:
        return None
    if isinstance(mask, str):
        return mx.arange(rows) <= at[:, None] + (rows - new)
    four: mx.array = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if four.shape[2] > 1:
        four = mx.take(four, at, axis=2)
    batch, heads, n, width = four.shape
    if heads == 1:
        return four[:, :, None]
    return four.reshape(batch, n_kv_heads, n_heads // n_kv_heads, n, width)


def _seen_by(mask: mx.array | None, queries: int, rows: int) -> mx.array:
    """How many of the queries each row is visible to, the mean over the heads of a group: (B|1, H|1, T) float32."""
    if mask is None:
        return mx.full((1, 1, rows), float(queries))
    visible = _visible(mask)
    if visible.ndim == 2:
        visible = visible[None, None, None]
    counts = visible.astype(mx.float32).sum(axis=3).mean(axis=2)
    return counts * queries if visible.shape[3] == 1 and queries > 1 else counts


def _visible(mask: mx.array) -> mx.array:
    return mask if mask.dtype == mx.bool_ else mask > mx.finfo(mask.dtype).min
