"""mlx-lm's own eviction: its rotating cache with ``keep`` first rows and the newest ones, filled from a full cache.

What mlx-lm does with a rotating cache is read the prompt through it: every row beyond the window is then computed from
rows that had lost their past. Here the full cache's rows are put in instead (the first ``keep`` and the newest), so that
this action sees the state that all others see, and loses no more by it than they do. That is the generous form.

Positions stay those of the full cache: the rotating cache takes the position of the next token from ``offset``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

__all__ = ["KEEP", "OneByOne", "rotating"]

#: First rows that ``make_prompt_cache(model, max_kv_size=…)`` of mlx-lm keeps.
KEEP = 4


class OneByOne(stock.RotatingKVCache):  # type: ignore[misc]
    """The rotating cache, whose mask lets each of several tokens see what it would see if they came one by one.

    mlx-lm's mask for N tokens takes the i-th oldest rows from the i-th token. After a wrap those are the ``keep`` first
    rows and not the oldest of the window, so from the fifth token of a block on no attention sink would be left. Tokens
    that are generated come one by one and keep their sinks; blocks are a matter of how they are scored.
    """

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if N == 1 or window_size is not None:
            return super().make_mask(N, window_size=window_size, return_array=return_array)
        before = min(self._held(), self.max_size - 1)  # what update_and_fetch will leave of the rows held
        row, token = mx.arange(before + N)[None], mx.arange(before, before + N)[:, None]
        near = token - row < self.max_size - self.keep
        return (row <= token) & (near | (row < self.keep))

    def _held(self) -> int:
        """Rows in order of time, as the next several tokens will find them."""
        if self.keys is None:
            return 0
        capacity = int(self.keys.shape[2])
        return capacity if self._idx == capacity or self._idx < self.offset else self._idx


def rotating(plain: Sequence[Any], max_size: int) -> list[Any]:
    """The rows of ``plain`` (mlx-lm's full caches) in rotating ones of at most ``max_size`` rows (tokens).

    Entries of other classes are left as they are, as ``max_kv_size`` leaves those of models that make their own.

    Args:
        max_size: more than :data:`KEEP`.
    """
    return [_filled(entry, max_size) if type(entry) is stock.KVCache else entry for entry in plain]


def _filled(entry: Any, max_size: int) -> OneByOne:
    new = OneByOne(max_size=max_size, keep=KEEP)
    if entry.empty():
        return new
    keys, values = (_kept(rows, max_size) for rows in entry.keys_and_values())
    # In order of time: what comes next goes behind the last row, or where the oldest one of the window is.
    new.state = (keys, values, int(entry.offset), KEEP, max_size, int(keys.shape[2]))
    return new


def _kept(rows: mx.array, max_size: int) -> mx.array:
    """(B, H, T, D) → the first :data:`KEEP` and the newest rows, ``max_size`` at most."""
    held = rows.shape[2]
    if held <= max_size:
        return rows + mx.zeros_like(rows)  # a buffer of its own
    return mx.concatenate([rows[..., :KEEP, :], rows[..., held - (max_size - KEEP) :, :]], axis=2)
