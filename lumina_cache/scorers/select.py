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

    Of equal scores the newer row stays. Where more rows are protected than may stay, the newest of them do.

    Args:
        scores: (B, H, T), higher is better; rows whose score is not a number rank below all others.
        kept: how many rows stay; all of them where it is more than T.
        protected: bool (B, H, T).
    """
    rows = scores.shape[-1]
    scores = scores.astype(mx.float32)
    # The lowest place is for what is not a number, so minus infinity moves up to the lowest number.
    scores = mx.where(mx.isnan(scores), -mx.inf, mx.maximum(scores, mx.finfo(mx.float32).min))
    # Ranks instead of scores, so that the protected rows can be put above all others without losing any precision.
    # argsort is stable, so the newer of two equal rows gets the higher rank.
    rank = mx.argsort(mx.argsort(scores, axis=-1), axis=-1)
    rank = mx.where(protected, mx.arange(rows, dtype=rank.dtype) + rows, rank)
    best = mx.argsort(rank, axis=-1)[..., max(0, rows - kept) :]
    return mx.sort(best, axis=-1).astype(mx.int32)
