"""What was seen of one layer's attention, for every scorer that asked: it goes where the layer's rows go.

A value. The layer replaces it when rows are seen, taken back, evicted or set from outside; copies of the layer share it.
Where something was missed (the model ran without the hook, rows came from a file) nothing is filled in: what is kept says
from which position on it is complete, and :meth:`Seen.why_not` says what a scorer would have to guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from .codecs.base import STEP
from .errors import ObservationError
from .scorers.observed import Attended, ObservedScorer, Rotation, Statistics

__all__ = ["UNHOOKED", "Seen"]

#: Why attention calls are neither watched nor served.
UNHOOKED = 'this cache does not reach the attention calls; LuminaCache(…, rung="hook") does'


@dataclass(frozen=True)
class Seen:
    """Statistics of one layer by the name of their scorer; a scorer without any has seen nothing yet."""

    scorers: Mapping[str, ObservedScorer]
    rotation: Rotation | None = None  #: how the layer's queries are rotated; None if it is not known
    stats: Mapping[str, Statistics] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Seen:
        return self

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return tuple(a for one in self.stats.values() for a in one.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(one.nbytes for one in self.stats.values())

    def nbytes_after(self, n: int) -> int:
        """Bytes after ``n`` more tokens. What is kept per row is counted for whole steps of 256 rows, as rows are.

        A window of queries that is not full yet is counted as it is.
        """
        total = 0
        for one in self.stats.values():
            rows = sum(a.nbytes for a in one.rows.values())
            charged = -(-(one.held + n) // STEP) * STEP
            total += one.nbytes - rows + (rows // one.held * charged if one.held else 0)
        return total

    def room(self) -> int | None:
        """Tokens until :meth:`nbytes_after` can change; None if it never will."""
        return min((STEP - one.held % STEP for one in self.stats.values() if one.rows), default=None)

    def after(self, attended: Attended) -> Seen:
        """With one attention call more. A scorer that missed something starts anew from this call on."""
        stats = {}
        for name, scorer in self.scorers.items():
            try:
                stats[name] = scorer.update(self.stats.get(name), attended)
            except ObservationError:
                stats[name] = scorer.update(None, attended)
        return replace(self, stats=stats)

    def back_to(self, offset: int) -> Seen:
        """After tokens were taken back, so that ``offset`` are left."""
        stats = {
            name: self.scorers[name].trim(one, one.end - offset) if one.end > offset else one
            for name, one in self.stats.items()
        }
        return replace(self, stats=stats)

    def gather(self, kept: np.ndarray, before: int) -> Seen:
        """After only the rows at ``kept`` (T',) or (B, H, T') stayed, of ``before``; evaluated.

        Statistics that stand for another number of rows are dropped.
        """
        stats = {}
        for name, one in self.stats.items():
            if one.held == before:
                shape = next((a.shape[:2] for a in one.rows.values()), kept.shape[:-1] or (1, 1))
                index = np.broadcast_to(kept, (*shape, kept.shape[-1]))
                stats[name] = one.gather(mx.array(index, mx.int32))
        new = replace(self, stats=stats)
        mx.eval(new.arrays)
        return new

    def forgotten(self) -> Seen:
        """The same scorers, with nothing seen."""
        return replace(self, stats={})

    def mapped(self, change: Callable[[Any], Any]) -> Seen:
        """With ``change`` applied to every array, in the order of :attr:`arrays`."""
        stats = {
            name: replace(
                one,
                rows={k: change(a) for k, a in one.rows.items()},
                heads={k: change(a) for k, a in one.heads.items()},
            )
            for name, one in self.stats.items()
        }
        return replace(self, stats=stats)

    def why_not(self, name: str, offset: int, rows: int) -> str | None:
        """Why the ranking of scorer ``name`` would have to be guessed for ``rows`` rows of ``offset`` tokens."""
        if name not in self.scorers:
            return "its attention is not watched for this scorer"
        if rows == 0:
            return None
        one = self.stats.get(name)
        if one is None:
            return "nothing was seen of the attention over its rows"
        if one.end != offset or one.held != rows:
            return (
                f"it saw tokens up to position {one.end} and holds those up to {offset}: some came unwatched"
            )
        return self.scorers[name].missing(one)

    def scores(self, name: str, keys: mx.array, values: mx.array, positions: mx.array) -> mx.array:
        """The ranking (B, H, T), see :meth:`ObservedScorer.scores`.

        Raises:
            ObservationError: if nothing was seen, or not of these rows.
        """
        one = self.stats.get(name)
        if one is None or one.held != positions.shape[-1]:
            raise ObservationError(
                f"{name}: what was seen does not stand for these {positions.shape[-1]} rows"
            )
        return self.scorers[name].scores(one, keys, values, positions, self.rotation)
