"""How many rows an eviction may leave, for many codecs at once.

Bytes do not simply rise with rows: rows are sealed in units, and a buffer grows by 256 rows when a unit is sealed behind
a full one, so that a row more may take fewer bytes. What does rise is bytes from every row to the one a common multiple
of the units above it. So rows are looked at in windows of that length: the first window from above in which any number
of rows fits holds the greatest one that does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from .columns import Column

__all__ = ["rows_within"]

Array = Any  #: numpy.ndarray of integers
#: Bytes above the limit, of numbers of rows (codecs, n) and of which codecs.
Over = Callable[[Array, Array], Array]

_FAR = np.iinfo(np.int64).max


def rows_within(
    columns: Sequence[Column], limit: int, codecs: Array, units: Collection[int], tokens: int
) -> Array:
    """The most rows that an eviction, and each of ``codecs`` after it, may leave to stay within ``limit`` bytes.

    Bytes are those after a step of ``tokens`` tokens and one token more; 0 where no number of rows is few enough.

    Args:
        codecs: places in the profile, −1 for rows as they are stored.
        units: rows that any of the layers seals or moves together, before or after.
    """
    ours = [one for one in columns if one.held.changeable]
    fixed = np.zeros(codecs.shape, np.int64)
    for one in columns:
        if not one.held.changeable:
            fixed = fixed + one.nbytes_next(codecs, codecs, tokens)

    def over(rows: Array, which: Array) -> Array:
        """Bytes above the limit, by codec and number of rows."""
        total = (fixed[which] - limit)[:, None]
        for one in ours:
            total = total + one.nbytes_next(rows, codecs[which][:, None], tokens)
        return total

    found = np.zeros(codecs.shape, np.int64)
    # From one of these numbers of rows down some layer is cut that was not cut before.
    bounds = sorted({one.held.rows for one in ours}, reverse=True)
    if not bounds:
        return found
    left, length = np.arange(len(codecs)), math.lcm(*units)
    for upper, lower in zip(bounds, [*bounds[1:], 1], strict=True):
        at_ends = over(np.array([[upper, max(upper - 1, lower), lower]]), left)
        fits = at_ends[:, 0] <= 0  # where this layer is not cut
        found[left[fits]] = upper
        left, at_ends = left[~fits], at_ends[~fits, 1:]
        if left.size and upper > lower:
            here = partial(_of_these, over, left)
            found[left] = _within_segment(here, at_ends, lower, upper - 1, length)
            left = left[found[left] == 0]
        if not left.size:
            break
    return found


def _of_these(over: Over, these: Array, rows: Array, which: Array) -> Array:
    return over(rows, these[which])


def _within_segment(over: Over, at_ends: Array, lowest: int, highest: int, length: int) -> Array:
    """The most rows in [lowest, highest] that are not over the limit, for each codec; 0 if none are.

    Args:
        at_ends: bytes over the limit at the highest and at the lowest number of rows (codecs, 2).
    """
    n, windows = len(at_ends), -(-(highest - lowest + 1) // length)
    below = np.arange(length)

    def look(k: Array, which: Array) -> tuple[Array, Array]:
        """The greatest number of rows that fits in window ``k`` (from above), or 0; and least bytes over the limit."""
        rows = highest - k[:, None] * length - below
        excess = np.where(rows < lowest, _FAR, over(np.maximum(rows, lowest), which))
        fits = excess <= 0
        return np.where(fits.any(1), rows[np.arange(len(k)), fits.argmax(1)], 0), excess.min(1)

    found = np.zeros(n, np.int64)
    # The windows known to hold none and to hold one. Bytes fall by about as much from each to the next.
    none, some = np.full(n, -1), np.full(n, windows)
    step = np.maximum(1, (at_ends[:, 0] - at_ends[:, 1]) // windows)
    guess, tries = -(at_ends[:, 0] // -step), 0
    while (which := np.flatnonzero(some - none > 1)).size:
        k = np.minimum(np.maximum(guess[which], none[which] + 1), some[which] - 1)
        best, excess = look(k, which)
        fits = best > 0
        found[which] = np.where(fits, best, found[which])
        some[which], none[which] = np.where(fits, k, some[which]), np.where(fits, none[which], k)
        tries += 1
        if tries < 4:
            # As many windows up as should still fit, or down until one should.
            move = np.where(
                fits, -np.maximum(1, -excess // step[which]), np.maximum(1, -(excess // -step[which]))
            )
            guess[which] = k + move
        else:
            guess[which] = (none[which] + some[which]) // 2
    return found
