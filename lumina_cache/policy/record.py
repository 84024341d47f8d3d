"""Candidates as a decision's record has them: a list of dictionaries, each made when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from .values import Candidate

__all__ = ["CandidateRecords"]


class CandidateRecords(Sequence[dict[str, Any]]):
    """Most records are never read, and to make them takes longer than to decide."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [one.to_record() for one in self._candidates[index]]
        return self._candidates[index].to_record()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (one.to_record() for one in self._candidates)
