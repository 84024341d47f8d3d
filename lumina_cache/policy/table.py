"""The candidates of a decision as a table: weighed together as columns, made one by one when they are asked for.

What actions leave and cost depends on a *family*, how many rows stay and which codec stores them, and within a family on
the scorer that chooses the rows. Families are weighed with NumPy, all together; a candidate is built from its row of the
table. Each is what :func:`~lumina_cache.policy.candidates.weigh` makes of its action.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from ..actions import Action
from .values import Candidate

__all__ = ["Columns", "Table", "columns_of", "position_of"]

Array = Any  #: numpy.ndarray


@dataclass(frozen=True)
class Columns:
    """What policies compare candidates by; NaN for unknown."""

    feasible: Array
    nbytes_next: Array
    kl: Array
    time: Array  #: T in points
    total: Array  #: the score

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Columns:
        return cls(
            np.array([c.feasible for c in candidates], bool),
            np.array([c.nbytes_next for c in candidates], np.int64),
            *(
                np.array([math.nan if x is None else x for x in column], float)
                for column in (
                    [c.inputs.kl for c in candidates],
                    [c.score.time for c in candidates],
                    [c.score.total for c in candidates],
                )
            ),
        )


@dataclass(frozen=True)
class Part:
    """A run of candidates: their columns, and how the i-th of them is made."""

    columns: Columns
    make: Callable[[int], Candidate]
    #: The place of an action in the run, or None if it is not there.
    find: Callable[[Action], int | None]

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Part:
        return cls(Columns.of(candidates), candidates.__getitem__, lambda action: _found(candidates, action))


class Table(Sequence[Candidate]):
    """Candidates in order. A sequence like any other, and values: the same index always gives the same object."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.columns = Columns(
            *(
                np.concatenate([getattr(part.columns, name) for part in parts])
                for name in Columns.__dataclass_fields__
            )
        )
        self._starts: list[int] = []
        self._length = 0
        for part in parts:
            self._starts.append(self._length)
            self._length += len(part.columns.feasible)
        self._made: dict[int, Candidate] = {}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...
    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(self._length)))
        if index < 0:
            index += self._length
        if not 0 <= index < self._length:
            raise IndexError("candidate index out of range")
        if index not in self._made:
            which = bisect_right(self._starts, index) - 1
            self._made[index] = self.parts[which].make(index - self._starts[which])
        return self._made[index]

    def __iter__(self) -> Iterator[Candidate]:
        return (self[i] for i in range(self._length))

    def position(self, action: Action) -> int | None:
        """Where ``action`` is; None if it is not there."""
        for start, part in zip(self._starts, self.parts, strict=True):
            found = part.find(action)
            if found is not None:
                return start + found
        return None


def columns_of(candidates: Sequence[Candidate]) -> Columns:
    return candidates.columns if isinstance(candidates, Table) else Columns.of(candidates)


def position_of(candidates: Sequence[Candidate], action: Action) -> int | None:
    """Where the candidate of ``action`` is; None if there is none."""
    return candidates.position(action) if isinstance(candidates, Table) else _found(candidates, action)


def _found(candidates: Sequence[Candidate], action: Action) -> int | None:
    return next((i for i, one in enumerate(candidates) if one.action == action), None)
