"""What a scorer is that needs queries: it keeps statistics of the attention it is shown, and ranks rows by them.

Statistics grow with the rows: each step of the model adds to them (:meth:`ObservedScorer.update`), each eviction takes the
same rows out of them as out of the layer (:meth:`Statistics.gather`). No matrix of tokens by tokens is ever kept, and
none larger than a stated number of bytes is made on the way (see :mod:`.weights`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import mlx.core as mx

from ...errors import ObservationError
from ...method import Method

__all__ = ["Attended", "ObservedScorer", "Rotation", "Statistics", "fold", "grown"]

#: Turns rows (B, H, N, D) as the model does those at the positions from the given one on.
Rotation = Callable[[mx.array, int], mx.array]


@dataclass(frozen=True)
class Attended:
    """One attention call over one layer, new rows included."""

    queries: mx.array  #: (B, Hq, N, D), rotated
    keys: mx.array  #: (B, H, T, D); H is that of the call, which models with latent rows expand in prefill
    scale: float
    mask: (
        Any  #: None, ``"causal"``, or an array that broadcasts to (B, Hq, N, T): bool, or added to the scores
    )
    first_position: int  #: absolute position of the first query
    n_kv_heads: int  #: heads whose rows are held
    sinks: mx.array | None = None  #: (Hq,) logits of a row without value
    rotation: Rotation | None = None  #: how the queries were rotated; None if it is not known

    @property
    def new(self) -> int:
        """Queries, and so rows, that are new (N)."""
        return int(self.queries.shape[2])

    @property
    def rows(self) -> int:
        """Rows attended to (T)."""
        return int(self.keys.shape[2])


_NONE: Mapping[str, mx.array] = MappingProxyType({})


@dataclass(frozen=True)
class Statistics:
    """What was seen of one layer's attention; a value, replaced at every step."""

    held: int  #: rows that the statistics stand for
    since: int  #: absolute position of the first query seen; what came before is not in the statistics
    end: int  #: absolute position behind the last query seen
    scale: float
    rows: Mapping[str, mx.array] = field(default_factory=lambda: _NONE)  #: (B, H, held) float32 each
    heads: Mapping[str, mx.array] = field(default_factory=lambda: _NONE)  #: per query head, without row axis

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All arrays, to be evaluated with the step or saved with the rows."""
        return (*self.rows.values(), *self.heads.values())

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    def __deepcopy__(self, memo: dict[int, Any]) -> Statistics:
        # Nothing is written into its arrays, so copies of a cache may share them.
        return self

    def to_state(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays by name and plain values, to be saved beside the rows; :meth:`from_state` reads them."""
        arrays = {f"rows.{name}": a for name, a in self.rows.items()}
        arrays |= {f"heads.{name}": a for name, a in self.heads.items()}
        return arrays, {"held": self.held, "since": self.since, "end": self.end, "scale": self.scale}

    @classmethod
    def from_state(cls, arrays: Mapping[str, mx.array], plain: Mapping[str, Any]) -> Statistics:
        """What :meth:`to_state` gave."""
        rows, heads = (
            {name.removeprefix(kind): a for name, a in arrays.items() if name.startswith(kind)}
            for kind in ("rows.", "heads.")
        )
        return cls(rows=rows, heads=heads, **plain)

    def gather(self, index: mx.array) -> Statistics:
        """The statistics of the rows at ``index`` (B, H, T') int32, in its order."""
        rows = {name: mx.take_along_axis(a, index, axis=2) for name, a in self.rows.items()}
        return replace(self, rows=rows, held=int(index.shape[2]))


@dataclass(frozen=True)
class ObservedScorer(ABC):
    """Ranks rows by what was seen of the queries. A value without state: statistics are passed in and handed back."""

    method: ClassVar[Method]
    #: Whether scores are computed from the keys held: they must then be the keys that attention reads.
    reads_keys: ClassVar[bool] = True
    #: Whether queries are taken back to where they were before they were rotated: calls must say how they were.
    needs_rotation: ClassVar[bool] = False
    #: Whether scores are amounts of attention: not negative, so that sums and shares of them mean something.
    in_amounts: ClassVar[bool] = True

    def update(self, stats: Statistics | None, seen: Attended) -> Statistics:
        """The statistics with one attention call added; a pure function, and lazy: nothing is evaluated.

        A call that starts before the last one ended follows on tokens that were taken back: see :meth:`trim`. Rows
        that were there before the first call count as never attended to; :attr:`Statistics.since` says from where on.

        Raises:
            ObservationError: if steps were missed, or the rows are not those that the statistics stand for, and the new.
        """
        before = seen.rows - seen.new
        if stats is None:
            stats = Statistics(before, seen.first_position, seen.first_position, seen.scale)
        if seen.first_position < stats.end:
            stats = self.trim(stats, stats.end - seen.first_position)
        if seen.first_position > stats.end:
            raise ObservationError(
                f"the statistics of {self.method.name} end at position {stats.end}, and this step starts at "
                f"{seen.first_position}: what lies between was not seen; start anew with None"
            )
        if stats.held != before:
            raise ObservationError(
                f"the statistics of {self.method.name} stand for {stats.held} rows, but the layer held {before} before "
                "this step: gather them along with the rows, or start anew with None"
            )
        rows, heads = self._seen(stats, seen)
        return replace(
            stats,
            held=seen.rows,
            end=seen.first_position + seen.new,
            scale=seen.scale,
            rows=rows,
            heads=heads,
        )

    def trim(self, stats: Statistics, n: int) -> Statistics:
        """The statistics after the last ``n`` tokens were taken back, with their rows.

        What those tokens' queries added to older rows cannot be told apart any more, and stays.
        """
        n = min(n, stats.held)
        held = stats.held - n
        rows = {name: a[:, :, :held] for name, a in stats.rows.items()}
        return replace(stats, held=held, end=stats.end - n, since=min(stats.since, stats.end - n), rows=rows)

    def missing(self, stats: Statistics) -> str | None:
        """What was not seen that the ranking would have to be guessed without; None if nothing is missing.

        Unless a scorer says otherwise, all queries from position 0 on count.
        """
        if stats.since == 0:
            return None
        return f"the queries before position {stats.since} were not seen"

    @abstractmethod
    def _seen(
        self, stats: Statistics, seen: Attended
    ) -> tuple[Mapping[str, mx.array], Mapping[str, mx.array]]:
        """The new arrays (per row, per head), given statistics that lack the new rows."""

    @abstractmethod
    def scores(
        self,
        stats: Statistics,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        rotation: Rotation | None = None,
    ) -> mx.array:
        """How much each row is worth keeping: float32 (B, H, T), higher is better. A pure function.

        Args:
            stats: of these very rows.
            keys: (B, H, T, D), as they are cached.
            values: (B, H, T, Dv).
            positions: absolute positions (B, H, T) int32, ascending along T.
            rotation: that of the layer, for scorers that need it.

        Raises:
            ObservationError: if nothing was seen that scores could be computed from.
        """


def grown(stats: Statistics, name: str, rows: int) -> mx.array | float:
    """The array ``name`` with zeros for the rows that it lacks; 0 if there is none yet."""
    had = stats.rows.get(name)
    if had is None:
        return 0.0
    return mx.pad(had, [(0, 0), (0, 0), (0, rows - had.shape[2])])


def fold(heads: mx.array, n_kv_heads: int) -> mx.array:
    """Per-head sums (B, H, T) of a call as (B, n_kv_heads, T): the mean over heads that were made of one that is held."""
    batch, n, rows = heads.shape
    return heads if n in (1, n_kv_heads) else heads.reshape(batch, n_kv_heads, -1, rows).mean(axis=2)
