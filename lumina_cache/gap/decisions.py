"""The backend-induced optimality gap of the decisions in an audit log.

``Gap(s) = max over A of Score − max over F of Score``: what the best action would be worth if the backend could execute
everything, less what the best executable one is worth. Both sides are scored by the same estimator in the same
execution state. The sign is kept: a negative gap would mean that F holds something A does not, a fault to show.

The scores of a log are estimates made before anything ran. What was measured is in :mod:`lumina_cache.gap.records`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..audit import LogContents
from ..errors import LogFormatError, MixedExecutionStateError

__all__ = [
    "DecisionGap",
    "EstimatedScore",
    "GapReport",
    "Judged",
    "RealScore",
    "RefusedAction",
    "Weighed",
    "best",
    "decision_gap",
    "gap_of_log",
    "weighed_decision",
]


@dataclass(frozen=True)
class Judged:
    """One action in one state."""

    action: str


@dataclass(frozen=True)
class RealScore(Judged):
    """A score made of measurements of the action as the backend ran it."""

    score: float


@dataclass(frozen=True)
class EstimatedScore(Judged):
    """A score made of estimates. ``source`` says where the expected damage comes from."""

    score: float
    source: str


@dataclass(frozen=True)
class RefusedAction(Judged):
    """A refusal: reasons, and nothing to compare."""

    reasons: tuple[Mapping[str, Any], ...]


Scored = TypeVar("Scored", RealScore, EstimatedScore)


def best(observations: Iterable[Scored]) -> Scored | None:
    """The observation with the highest score; the first of equals; None of none.

    Raises:
        MixedExecutionStateError: if the observations are not all of one scored execution state.
    """
    found = list(observations)
    states = {type(o) for o in found}
    if len(states) > 1 or RefusedAction in states or not states <= {RealScore, EstimatedScore}:
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
    everything: tuple[EstimatedScore, ...]  #: A, as far as it could be scored
    feasible: tuple[EstimatedScore, ...]  #: F, as far as it could be scored
    refused: tuple[RefusedAction, ...]  #: A without F, with reasons
    unscored: tuple[str, ...]  #: actions for which there is no figure
    chosen: EstimatedScore | None


def weighed_decision(record: Mapping[str, Any]) -> Weighed:
    """Read a ``decision`` record.

    Raises:
        LogFormatError: naming the field that is missing or odd.
    """
    try:
        candidates = record["candidates"]
        scored = [
            (c, EstimatedScore(c["action"], float(c["score"]["total"]), str(c["inputs"]["source"])))
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
                RefusedAction(c["action"], tuple(c["reasons"])) for c in candidates if not c["feasible"]
            ),
            unscored=tuple(c["action"] for c in candidates if c["score"]["total"] is None),
            chosen=next((s for _, s in scored if s.action == record["chosen"]), None),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise LogFormatError(f"decision {record.get('decision')}: {what}") from None


@dataclass(frozen=True)
class DecisionGap:
    """One decision's gap in points, with its two sides and what closing each single limit would bring."""

    cache: str
    decision: int
    phase: str | None
    rows: int
    limit: int  #: bytes that the layers could take: the budget, or less under pressure
    best_all: EstimatedScore
    best_feasible: EstimatedScore
    chosen: EstimatedScore | None
    gap: float  #: best of A − best of F, the sum of the next two
    backend: float  #: best of A − best of what this backend could execute if all of it were built
    library: (
        float  #: best of what the backend could execute − best of F: code that lumina_cache does not have yet
    )
    controller: float | None  #: best of F − what the policy chose; None if the choice has no score
    causes: tuple[str, ...]  #: why the best of A is not in F; empty when it is
    relaxations: tuple[
        tuple[str, float], ...
    ]  #: capability → points gained if the backend had it alone, largest first
    refused: int
    unscored: int
    execution_state: str = "simulated"


@dataclass(frozen=True)
class GapReport:
    """The gaps of a log. All of them are simulated: candidates are scored by estimates before they run."""

    gaps: tuple[DecisionGap, ...]
    refusals: tuple[tuple[str, int], ...]  #: reason → how many candidates it kept out of F, most first
    problems: tuple[str, ...]
    execution_state: str = "simulated"

    @property
    def mean(self) -> float | None:
        """Mean gap in points; None without a decision."""
        return self._mean([g.gap for g in self.gaps])

    @property
    def mean_backend(self) -> float | None:
        """Mean of the part that the backend's limits cause."""
        return self._mean([g.backend for g in self.gaps])

    @staticmethod
    def _mean(points: list[float]) -> float | None:
        return sum(points) / len(points) if points else None


def decision_gap(weighed: Weighed) -> DecisionGap:
    """Gap, controller loss and single relaxations of one decision.

    Raises:
        LogFormatError: if neither A nor F holds an action with a score.
    """
    top, reachable = best(weighed.everything), best(weighed.feasible)
    if top is None or reachable is None:
        raise LogFormatError(
            f"decision {weighed.decision}: no candidate has a score, so there is nothing to compare"
        )
    refused = {r.action: r for r in weighed.refused}
    unbuilt = {r.action for r in weighed.refused if all(_code(reason) == "not_built" for reason in r.reasons)}
    buildable = (
        best([*weighed.feasible, *(s for s in weighed.everything if s.action in unbuilt)]) or reachable
    )
    cause = refused.get(top.action)
    return DecisionGap(
        cache=weighed.cache,
        decision=weighed.decision,
        phase=weighed.phase,
        rows=weighed.rows,
        limit=weighed.limit,
        best_all=top,
        best_feasible=reachable,
        chosen=weighed.chosen,
        gap=top.score - reachable.score,
        backend=top.score - buildable.score,
        library=buildable.score - reachable.score,
        controller=None if weighed.chosen is None else reachable.score - weighed.chosen.score,
        causes=() if cause is None else tuple(str(r["text"]) for r in cause.reasons),
        relaxations=_relaxations(weighed, reachable),
        refused=len(weighed.refused),
        unscored=len(weighed.unscored),
    )


def _relaxations(weighed: Weighed, reachable: EstimatedScore) -> tuple[tuple[str, float], ...]:
    """For every missing capability: the gain if it alone were given. Gains of single ones need not add up."""
    scores = {s.action: s.score for s in weighed.everything}
    gains: dict[str, float] = {}
    for one in weighed.refused:
        missing = {_capability(r) for r in one.reasons if _code(r) != "not_built"}
        if len(missing) == 1 and None not in missing and one.action in scores:
            (name,) = missing
            gains[str(name)] = max(gains.get(str(name), 0.0), scores[one.action] - reachable.score)
    return tuple(sorted(gains.items(), key=lambda item: -item[1]))


def _code(reason: object) -> str | None:
    return reason.get("code") if isinstance(reason, dict) else None


def _capability(reason: object) -> str | None:
    return reason.get("capability") if isinstance(reason, dict) else None


def gap_of_log(contents: LogContents) -> GapReport:
    """The gaps of all decisions of a log; decisions that cannot be read are named in ``problems``."""
    gaps: list[DecisionGap] = []
    problems = list(contents.problems)
    refusals: Counter[str] = Counter()
    for record in contents.of("decision"):
        try:
            weighed = weighed_decision(record)
            gaps.append(decision_gap(weighed))
        except LogFormatError as error:
            problems.append(str(error))
            continue
        refusals.update(_texts(weighed.refused))
    return GapReport(tuple(gaps), tuple(refusals.most_common()), tuple(problems))


def _texts(refused: Iterable[RefusedAction]) -> Iterable[str]:
    for one in refused:
        yield from {str(r.get("capability") or r.get("code")) for r in one.reasons}
