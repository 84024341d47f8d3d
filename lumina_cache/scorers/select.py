"""From scores to the rows that stay: the same number for every head of a layer, protected rows first."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["protected_rows", "select"]


def protected_rows(
    positions: mx.array, sinks: int, recent: int, pinned: tuple[tuple[int, int], ...]
) -> mx.array:
    """Rows that must stay: bool (B, H, T).

    Args:
        positions: absolute positions (B, H, T) int32, ascending along T.
        sinks: rows at the front of what is held.
        recent: rows at its end.
        pinned: ranges of absolute positions (first, end), end excluded.
    """
    index = mx.arange(positions.shape[-1])
    stay = mx.broadcast_to((index < sinks) | (index >= positions.shape[-1] - recent), positions.shape)
    for first, end in pinned:
        stay = stay | ((positions >= first) & (positions < end))
    return stay


def select(scores: mx.array, kept: int, protected: mx.array) -> mx.array:
    """Indices (B, H, kept) int32, ascending, of the rows that stay: the protected ones, then the highest scores.

    Of equal scores the newer row stays. Where more rows are protected than may stay, the newest protected ones go last.

    Args:
        scores: (B, H, T), higher is better; rows whose score is not a number rank below all others.
        protected: bool (B, H, T).
    """
    scores = mx.where(mx.isnan(scores), -mx.inf, scores.astype(mx.float32))
    # Ranks instead of scores, so that adding T to the protected ones puts them first without losing any precision.
    # Flipped, because argsort is stable: the newer of two equal rows gets the higher rank.
    order = mx.argsort(scores, axis=-1)
    rank = mx.argsort(order, axis=-1)
    rank = mx.where(protected, rank + scores.shape[-1], rank)
    best = mx.argsort(rank, axis=-1)[..., scores.shape[-1] - kept :]
    return mx.sort(best, axis=-1).astype(mx.int32)
