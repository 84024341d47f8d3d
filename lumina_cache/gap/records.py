"""Observations, typed by how they came about: real, backend_infeasible or simulated. The three never mix.

- :class:`Real`: the action ran in the backend on a real forward and was measured there.
- :class:`Simulated`: the figures are an estimate, or come from a forward that keeps the whole cache.
- :class:`BackendInfeasible`: the backend, or the classifier before it, refused. It has reasons and *no* figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import LogFormatError, MixedExecutionStateError

__all__ = ["BackendInfeasible", "Observation", "Real", "Simulated", "Weighed", "best", "weighed_decision"]


@dataclass(frozen=True)
class Observation:
    """One action in one state."""

    action: str


@dataclass(frozen=True)
class Real(Observation):
    """A score made of measurements of the action as the backend ran it."""

    score: float


@dataclass(frozen=True)
class Simulated(Observation):
    """A score made of estimates. ``source`` says where the expected damage comes from."""

    score: float
    source: str


@dataclass(frozen=True)
class BackendInfeasible(Observation):
    """A refusal: reasons, and nothing to compare."""

    reasons: tuple[Mapping[str, Any], ...]


Scored = TypeVar("Scored", Real, Simulated)


def best(observations: Iterable[Scored]) -> Scored | None:
    """The observation with the highest score; the first of equals; None of none.

    Raises:
        MixedExecutionStateError: if the observations are not all of one scored execution state.
    """
    found = list(observations)
    states = {type(o) for o in found}
    if len(states) > 1 or BackendInfeasible in states or not states <= {Real, Simulated}:
        names = ", ".join(sorted(t.__name__ for t in states))
        raise MixedExecutionStateError(
            f"observations of different execution states cannot be compared: {names}. "
            "Compute one figure per state"
        )
    return max(found, key=lambda o: o.score, default=None)


@dataclass(frozen=True)
class Weighed:
    """One decision as its log line tells it."""

    cache: str
    decision: int
    phase: str | None
    rows: int
    limit: int  #: bytes
    everything: tuple[Simulated, ...]  #: A, as far as it could be scored
    feasible: tuple[Simulated, ...]  #: F, as far as it could be scored
    refused: tuple[BackendInfeasible, ...]  #: A without F, with reasons
    unscored: tuple[str, ...]  #: actions for which there is no figure
    chosen: Simulated | None


def weighed_decision(record: Mapping[str, Any]) -> Weighed:
    """Read a ``decision`` record.

    Raises:
        LogFormatError: naming the field that is missing or odd.
    """
    try:
        candidates = record["candidates"]
        scored = [
            (c, Simulated(c["action"], float(c["score"]["total"]), str(c["inputs"]["source"])))
            for c in candidates
            if c["score"]["total"] is not None
        ]
        state = record["state"]
        return Weighed(
            cache=record["cache"],
            decision=record["decision"],
            phase=state["phase"],
            rows=max((one["rows"] for one in state["layers"]), default=0),
            limit=int(state["limit"]["nbytes"]),
            everything=tuple(s for _, s in scored),
            feasible=tuple(s for c, s in scored if c["feasible"]),
            refused=tuple(
                BackendInfeasible(c["action"], tuple(c["reasons"])) for c in candidates if not c["feasible"]
            ),
            unscored=tuple(c["action"] for c in candidates if c["score"]["total"] is None),
            chosen=next((s for _, s in scored if s.action == record["chosen"]), None),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise LogFormatError(f"decision {record.get('decision')}: {what}") from None
