"""Everything that is read off a store of observations, as one value for reports, JSON and tests.

``analyse("store")`` gives an :class:`Analysis`: what was measured really and what was simulated, apart; in each, a
:class:`StratumAnalysis` per model, context, phase and set of versions; and refusals, counted. All are frozen, and
``to_record()`` is what ``json.dumps`` takes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import AnalysisError
from .attribution import Attribution, LayerCost, begin, by_layer, of_domain
from .cells import Cells, Missing, Stratum, cells_of, strata_of
from .gap import (
    BUDGETS,
    SLACK,
    TIME_WEIGHTS,
    Best,
    Closed,
    Gap,
    Goal,
    Parts,
    Placebo,
    _record,
    best_of,
    closed,
    gap_between,
    goals,
    members,
    parts,
    placebo,
    prepare,
    sides,
)
from .resample import LEVEL, Estimate
from .store import Engine, Problem, RefusalTable, ScoredTable, Store, of_one_state, open_tables

__all__ = [
    "Analysis",
    "Point",
    "Refusal",
    "Settings",
    "StateAnalysis",
    "StratumAnalysis",
    "Trend",
    "analyse",
    "analyse_table",
    "count_refusals",
]


@dataclass(frozen=True)
class Settings:
    """What an analysis was made with."""

    budgets: tuple[float, ...] = BUDGETS
    time_weights: tuple[float, ...] = TIME_WEIGHTS
    draws: int = 10_000
    seed: int = 0
    level: float = LEVEL
    slack: float = SLACK
    #: budget → text form of what the policy chose there, for the controller's part
    policy: Mapping[float, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.budgets or any(not 0 < b <= 1 for b in self.budgets):
            raise AnalysisError(f"budgets {self.budgets}: give shares of dense rows between 0 and 1")
        if self.draws < 100:
            raise AnalysisError(
                f"draws={self.draws}: an interval needs at least 100, and 10,000 to be steady"
            )

    def to_record(self) -> dict[str, Any]:
        return _record(self) | {"policy": {str(b): a for b, a in self.policy.items()}}


@dataclass(frozen=True)
class Point:
    """One action in a stratum: a point of the plot of bytes against damage."""

    action: str
    rung: int
    requires: tuple[str, ...]
    role: str
    share: float  #: of dense 16-bit rows, the largest over documents
    kl: Estimate  #: nats per token
    score: Estimate  #: points, without time
    top1: float | None
    nll_change: float | None  #: nats per token
    time_ratio: float | None  #: geometric mean over the documents that were timed
    timed: int  #: documents
    front: tuple[str, ...]  #: sides on whose front of bytes against mean KL it lies

    def to_record(self) -> dict[str, Any]:
        return _record(self)


@dataclass(frozen=True)
class StratumAnalysis:
    """All figures of one stratum in one execution state."""

    stratum: Stratum
    execution_state: str
    documents: tuple[str, ...]
    domains: Mapping[str, int]  #: documents in each
    states: int
    sides: tuple[str, ...]
    points: tuple[Point, ...]
    bests: tuple[Best, ...]  #: per budget and side, λ_T = 0
    gaps: tuple[Gap, ...]  #: per budget and pair of sides, λ_T = 0
    time_sweep: tuple[Gap, ...]  #: points and nats per λ_T > 0, budget and pair; empty without times
    closed: tuple[Closed, ...]
    goals: tuple[Goal, ...]
    parts: tuple[Parts, ...]
    placebos: tuple[Placebo, ...]
    attributions: tuple[Attribution, ...]  #: per rung and budget, over all documents and by domain
    layers: tuple[LayerCost, ...]  #: empty where no action is a plan for one range of layers
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]

    def gap(self, low: str, high: str, budget: float) -> Gap:
        """The gap between two sides at λ_T = 0.

        Raises:
            AnalysisError: it is not among those that were analysed.
        """
        for one in self.gaps:
            if (one.low, one.high, one.budget) == (low, high, budget):
                return one
        raise AnalysisError(f"no gap from {low!r} to {high!r} at {budget} was analysed")

    def to_record(self) -> dict[str, Any]:
        return _record(self) | {"domains": dict(self.domains)}


@dataclass(frozen=True)
class Trend:
    """One gap over versions of mlx-lm, all else being the same."""

    model_name: str
    context: int
    phase: str
    low: str
    high: str
    budget: float
    versions: tuple[
        tuple[str, Estimate | None], ...
    ]  #: of mlx-lm, and of others where those differ too → points

    def to_record(self) -> dict[str, Any]:
        return _record(self) | {
            "versions": [[v, None if e is None else e.to_record()] for v, e in self.versions]
        }


@dataclass(frozen=True)
class StateAnalysis:
    """All strata of one execution state."""

    execution_state: str
    observations: int
    strata: tuple[StratumAnalysis, ...]
    trends: tuple[Trend, ...]  #: empty with a single version of mlx-lm

    def to_record(self) -> dict[str, Any]:
        return _record(self)


@dataclass(frozen=True)
class Refusal:
    """How often something was refused, and why. No figure."""

    code: str
    capability: str | None
    rung: int  #: least rung that would execute the actions
    backend_rung: int  #: rung whose profile refused
    actions: int
    observations: int
    example: str  #: one of the actions
    text: str  #: its reasons

    def to_record(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Analysis:
    """What a store, or several, say. Real and simulated figures never meet."""

    stores: tuple[str, ...]
    engine: str
    settings: Settings
    real: StateAnalysis | None  #: None without an observation
    simulated: StateAnalysis | None
    refusals: tuple[Refusal, ...]
    refused: int  #: observations
    problems: tuple[Problem, ...]  #: what was left out of the stores
    seconds: float

    def to_record(self) -> dict[str, Any]:
        return {"kind": "lumina-cache gap", "schema": 1, **_record(self)}


def analyse(
    stores: Store | str | os.PathLike[str] | Sequence[Store | str | os.PathLike[str]],
    *,
    settings: Settings | None = None,
    engine: Engine | None = None,
) -> Analysis:
    """Analyse one store, or several as one.

    Args:
        engine: what reduces the observations; DuckDB with 1 GB for None.

    Raises:
        AnalysisError: a store is not there, or holds no observation.
        AnalysisUnavailableError: a package is missing.
    """
    start = time.perf_counter()
    settings = settings or Settings()
    several = [stores] if isinstance(stores, Store | str | os.PathLike) else list(stores)
    tables = open_tables(several, engine)
    if not tables.real.rows and not tables.simulated.rows and not tables.refusals.rows:
        told = "".join(f"; {p.kind}: {p.where}" for p in tables.problems[:3])
        raise AnalysisError(f"no observation in {', '.join(map(_path, several))}{told}")
    return Analysis(
        stores=tuple(map(_path, several)),
        engine=tables.engine.name,
        settings=settings,
        real=analyse_table(tables.real, settings) if tables.real.rows else None,
        simulated=analyse_table(tables.simulated, settings) if tables.simulated.rows else None,
        refusals=count_refusals(tables.refusals),
        refused=tables.refusals.rows,
        problems=tables.problems,
        seconds=time.perf_counter() - start,
    )


def _path(store: Store | str | os.PathLike[str]) -> str:
    return str(store.path if isinstance(store, Store) else Path(store))


def analyse_table(table: ScoredTable, settings: Settings | None = None) -> StateAnalysis:
    """Analyse all strata of one table.

    Raises:
        MixedExecutionStateError: not a table of real or of simulated observations.
    """
    of_one_state(table)
    settings = settings or Settings()
    found = tuple(
        _stratum(cells_of(table, one, draws=settings.draws, seed=settings.seed), settings)
        for one in strata_of(table)
    )
    return StateAnalysis(table.execution_state, table.rows, found, _trends(found))


def count_refusals(table: RefusalTable) -> tuple[Refusal, ...]:
    """Refusals by reason, most observations first.

    Raises:
        MixedExecutionStateError: not a table of refusals.
    """
    of_one_state(table, allowed=(RefusalTable,))
    t = table.table
    grouped = t.group_by("code", "capability", "rung", "backend_rung").aggregate(
        actions=t.action.nunique(), observations=t.count(), example=t.action.min(), text=t.text.min()
    )
    found = [Refusal(**row) for row in grouped.to_pyarrow().to_pylist()]
    return tuple(sorted(found, key=lambda r: (-r.observations, r.code, r.capability or "", r.rung)))


def _stratum(cells: Cells, settings: Settings) -> StratumAnalysis:
    names = sides(cells)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    rungs = [n for n in names if n in ("native", "cache", "hook")]
    notes = list(cells.notes)
    docs = cells.resampling
    if not docs.spread:
        notes.append("some domain has a single document: there are no intervals")
    elif docs.count < 30:
        notes.append(f"{docs.count} documents: 30 are the least for a headline figure")
    if not cells.facts:
        notes.append("no action was measured in every state")
    timed = bool(np.isfinite(cells.time).any())
    if not timed:
        notes.append("no times: quality at equal bytes only")
    prepare(cells, settings.budgets, [w for w in settings.time_weights if timed or w == 0.0])
    references = ["full", *(n for n in names if n in ("hook", "all", "ceiling"))]
    attributions = _attributions(cells, rungs, settings, notes) if len(names) > len(rungs) else ()
    layers = by_layer(cells)
    if not layers:
        notes.append("no action is a plan for one range of layers: nothing can be said by layer")
    return StratumAnalysis(
        stratum=cells.stratum,
        execution_state=cells.execution_state,
        documents=cells.documents,
        domains={name: int(index.size) for name, index in docs.of_domain.items()},
        states=cells.states,
        sides=names,
        points=_points(cells, names),
        bests=tuple(best_of(cells, side, b) for b in settings.budgets for side in names),
        gaps=tuple(gap_between(cells, low, high, b) for b in settings.budgets for low, high in pairs),
        time_sweep=tuple(
            gap_between(cells, low, high, b, weight)
            for weight in settings.time_weights
            if weight > 0 and timed
            for b in settings.budgets
            for low, high in pairs
        ),
        closed=tuple(
            closed(cells, rungs[i], better, reference, b)
            for b in settings.budgets
            for i in range(len(rungs))
            for better in rungs[i + 1 :]
            for reference in references
            if reference not in rungs or rungs.index(reference) > rungs.index(better)
        ),
        goals=goals(cells),
        parts=tuple(parts(cells, rung, b, settings.policy.get(b)) for b in settings.budgets for rung in rungs)
        if "all" in names or settings.policy
        else (),
        placebos=tuple(placebo(cells, b) for b in settings.budgets),
        attributions=attributions,
        layers=layers,
        missing=cells.missing,
        notes=tuple(notes),
    )


def _attributions(
    cells: Cells, rungs: Sequence[str], settings: Settings, notes: list[str]
) -> tuple[Attribution, ...]:
    groups = [("all", cells)]
    if len(cells.resampling.of_domain) > 1:
        groups += [(name, of_domain(cells, name)) for name in cells.resampling.of_domain]
    begun = []
    for rung in rungs:
        for budget in settings.budgets:
            for name, some in groups:
                try:
                    begun.append(begin(some, rung, budget, documents=name))
                except AnalysisError as error:
                    notes.append(f"no attribution of {rung} at {budget:.4g} ({name}): {error}")
    return tuple(finish() for finish in begun)


def _points(cells: Cells, names: Sequence[str]) -> tuple[Point, ...]:
    docs = cells.resampling
    score = -cells.quality_whole + 0.0
    means = docs.mean(cells.kl_whole)
    fronts: dict[int, list[str]] = {}
    for side in names:
        least = np.inf
        index = members(cells, side)
        for i in index[np.lexsort((means[index], cells.shares[index]))]:
            if means[i] < least:
                least = means[i]
                fronts.setdefault(int(i), []).append(side)
    damage, points = docs.estimates(cells.kl_whole), docs.estimates(score)
    found = []
    for i, fact in enumerate(cells.facts):
        times = cells.time[i][np.isfinite(cells.time[i])]
        found.append(
            Point(
                fact.action,
                fact.rung,
                fact.requires,
                fact.role,
                float(cells.shares[i]),
                damage[i],
                points[i],
                _known(docs.mean(cells.top1[i])),
                _known(docs.mean(cells.nll_change[i])),
                float(1.1 ** times.mean()) if times.size else None,
                int(times.size),
                tuple(fronts.get(i, ())),
            )
        )
    return tuple(found)


def _known(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _trends(strata: Sequence[StratumAnalysis]) -> tuple[Trend, ...]:
    """Gaps whose strata differ in versions alone."""
    groups: dict[tuple[Any, ...], list[StratumAnalysis]] = {}
    for one in strata:
        s = one.stratum
        key = (s.model, s.model_name, s.context, s.phase, s.horizon, s.source, s.device, s.machine)
        groups.setdefault(key, []).append(one)
    found = []
    for several in groups.values():
        if len(several) < 2:
            continue
        named = [s.stratum.mlx_lm for s in several]
        if len(set(named)) < len(named):  # versions of something else differ as well
            named = [
                f"{s.stratum.mlx_lm} (mlx {s.stratum.mlx}, lumina-cache {s.stratum.lumina_cache})"
                for s in several
            ]
        versions = dict(sorted(zip(named, several, strict=True), key=lambda item: _version(item[0])))
        s = several[0].stratum
        pairs = dict.fromkeys((g.low, g.high, g.budget) for one in several for g in one.gaps)
        for low, high, budget in pairs:
            points = tuple((v, _points_of(one, low, high, budget)) for v, one in versions.items())
            found.append(Trend(s.model_name, s.context, s.phase, low, high, budget, points))
    return tuple(found)


def _points_of(one: StratumAnalysis, low: str, high: str, budget: float) -> Estimate | None:
    same = [g.points for g in one.gaps if (g.low, g.high, g.budget) == (low, high, budget)]
    return same[0] if same else None


def _version(text: str) -> tuple[tuple[int, int, str], ...]:
    """In the order in which versions came out: numbers as numbers."""
    parts = re.split(r"[^0-9A-Za-z]+", text)
    return tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts)
