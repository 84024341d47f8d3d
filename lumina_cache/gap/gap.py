"""The backend-induced optimality gap of the decisions in an audit log.

``Gap(s) = max over A of Score − max over F of Score``: what the best action would be worth if the backend could execute
everything, less what the best executable one is worth. Both sides are scored by the same estimator in the same
execution state. The sign is kept: a negative gap would mean that F holds something A does not, a fault to show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..audit import LogContents
from ..errors import LogFormatError
from .records import BackendInfeasible, Simulated, Weighed, best, weighed_decision

__all__ = ["DecisionGap", "GapReport", "decision_gap", "gap_of_log"]


@dataclass(frozen=True)
class DecisionGap:
    """One decision's gap in points, with its two sides and what closing each single limit would bring."""

    cache: str
    decision: int
    phase: str | None
    rows: int
    limit: int  #: bytes that the layers could take: the budget, or less under pressure
    best_all: Simulated
    best_feasible: Simulated
    chosen: Simulated | None
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


def _relaxations(weighed: Weighed, reachable: Simulated) -> tuple[tuple[str, float], ...]:
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


def _texts(refused: Iterable[BackendInfeasible]) -> Iterable[str]:
    for one in refused:
        yield from {str(r.get("capability") or r.get("code")) for r in one.reasons}
