"""Run a campaign from start to end, or from where it stopped.

A *unit* is one document of one context, model and seed. Its prompt is read once, its trials come in an order drawn from
the plan's seed, and when all are done their observations go to the store at once. What a kill interrupts is so one
unit, which the next run does again from its start.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ...gap.records import Observation, Provenance, State
from ...gap.store import Store
from ..evaluate import parse_subject, select, user_texts
from ..evaluate.documents import EvalDocument, Shortage
from ..evaluate.measure import Bench
from ..evaluate.run import measured
from ..models import LoadedModel
from ..simulate import Simulator
from . import simulated
from .manifest import Manifest, locked, made_under
from .observe import observations_of, state_of
from .plan import CampaignPlan
from .trial import Trial

__all__ = ["Failure", "Outcome", "Progress", "Unit", "campaign", "in_order", "units_of"]

#: How much longer it takes to read a prompt and answer with the full cache than to measure one trial.
READING = 6.0


@dataclass(frozen=True)
class Unit:
    """One document of one model and seed."""

    model: LoadedModel
    document: EvalDocument
    index: int  #: of the document within its context
    seed: int

    @property
    def name(self) -> str:
        return f"{self.model.fingerprint}/{self.document.context}/{self.document.name}/{self.seed}"


@dataclass(frozen=True)
class Failure:
    """A trial that was carried out and went wrong."""

    document: str
    execution: str
    action: str
    error: str


@dataclass(frozen=True)
class Progress:
    """How far a campaign is; ``done`` and ``total`` count trials, and reading a prompt as several."""

    done: float
    total: float
    what: str


@dataclass
class Outcome:
    """What a campaign left in its store, all runs together."""

    run: str
    units: int
    observations: dict[str, int]  #: execution state → how many
    failures: list[Failure] = field(default_factory=list)
    lacking: list[Shortage] = field(default_factory=list)
    seconds: float = 0.0  #: of all runs


def units_of(
    plan: CampaignPlan, models: Sequence[LoadedModel]
) -> tuple[list[Unit], list[Shortage], dict[str, list[EvalDocument]]]:
    """Units in the order in which they are measured, what was lacking, and the documents of each model.

    Raises:
        EvaluationError: a text cannot be read, or none is long enough.
    """
    own = user_texts([Path(t) for t in plan.texts]) if plan.texts else None
    units: list[Unit] = []
    lacking: list[Shortage] = []
    documents: dict[str, list[EvalDocument]] = {}
    for model in models:
        for context in plan.contexts:
            length = plan.bench_plan(context).length(context)
            found, missing = select(
                model.tokenizer, context, plan.documents, length, own, domains=plan.domains
            )
            lacking += missing
            documents.setdefault(model.fingerprint, []).extend(found)
            units += [Unit(model, d, i, seed) for seed in plan.seeds for i, d in enumerate(found)]
    return units, lacking, documents


def in_order(trials: Sequence[Trial], plan: CampaignPlan, unit: Unit) -> list[Trial]:
    """The trials in the order drawn for a unit: the same for the same plan and document, whatever was run before."""
    digest = hashlib.sha256(f"{plan.order_seed}/{unit.name}".encode()).digest()
    drawn = np.random.default_rng(list(digest)).permutation(len(trials))
    return [trials[i] for i in drawn]


def campaign(
    plan: CampaignPlan,
    models: Sequence[LoadedModel],
    out: Path,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Measure everything in ``plan`` that is not in the store ``out`` yet.

    Raises:
        CampaignError: the store holds another campaign, or another process is filling it.
        EvaluationError: a text cannot be read, or none is long enough.
    """
    with locked(out):
        return _Campaign(plan, models, out, on_progress).all()


class _Campaign:
    def __init__(
        self,
        plan: CampaignPlan,
        models: Sequence[LoadedModel],
        out: Path,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.plan = plan
        self.store = Store(out)
        self.units, self.lacking, documents = units_of(plan, models)
        under = made_under(plan, models, documents)
        self.manifest = Manifest.of(self.store, under, self.lacking, _now())
        self.machine = under["machine"]
        self.about = {k: under[k] for k in ("device", "mlx", "mlx_lm", "lumina_cache")}
        self.observes = _observed(plan.trials)
        self.disk = any(parse_subject(t.action).needs_disk for t in plan.trials if t.execution == "real")
        self.say = on_progress
        self.finished = 0.0
        self.warm = plan.warm_up == 0

    def all(self) -> Outcome:
        self.manifest.write()
        each = READING + len(self.plan.trials)
        due = [u for u in self.units if not self.manifest.done(u.name)]
        self.total = each * len(due)
        for i, unit in enumerate(due):
            started = time.monotonic()
            found, failures = self._unit(unit, f"{i + 1} of {len(due)}")
            counts = self._put(found)
            self.manifest.enter(
                unit.name,
                {
                    "finished": _now(),
                    "seconds": round(time.monotonic() - started, 1),
                    "observations": counts,
                    "failures": [vars(f) for f in failures],
                },
            )
        if self.manifest.record["finished"] is None:
            self.manifest.record["finished"] = _now()
            self.manifest.write()
        self.say(Progress(self.total, self.total, "done"))
        return self._outcome()

    def _put(self, found: Sequence[Observation]) -> dict[str, int]:
        """Append what is not there yet: a kill between two files of a unit leaves one of them."""
        known = {state: self.store.ids(state) for state in {o.execution_state for o in found}}
        self.store.append([o for o in found if o.id not in known[o.execution_state]])
        counts: dict[str, int] = {}
        for one in found:
            counts[one.execution_state] = counts.get(one.execution_state, 0) + 1
        return counts

    def _unit(self, unit: Unit, place: str) -> tuple[list[Observation], list[Failure]]:
        plan = self.plan
        self.say(Progress(self.finished, self.total, f"{place}  {unit.document.name}  (reading)"))
        found: list[Observation] = []
        failures: list[Failure] = []
        with closing(self._bench(unit)) as bench:
            self.finished += READING
            state = state_of(unit.model.fingerprint, unit.document, unit.seed, plan.scored)
            trials = in_order(plan.trials, plan, unit)
            # The simulator reads the bench's caches and changes none of them.
            imposing = any(t.execution == "simulated" for t in trials)
            simulator = simulated.simulator(bench, unit.seed, self._provenance(unit)) if imposing else None
            if not self.warm:
                for trial in trials[: plan.warm_up]:
                    self._trial(trial, bench, simulator, unit, state)
                self.warm = True
            for trial in trials:
                self.say(
                    Progress(self.finished, self.total, f"{place}  {unit.document.name}  {trial.action}")
                )
                result = self._trial(trial, bench, simulator, unit, state)
                if isinstance(result, Failure):
                    failures.append(result)
                else:
                    found += result
                self.finished += 1
                if plan.idle_seconds:
                    time.sleep(plan.idle_seconds)
        return found, failures

    def _bench(self, unit: Unit) -> Bench:
        plan = self.plan
        return Bench(
            unit.model.model,
            unit.model.tokenizer,
            unit.document,
            plan.bench_plan(unit.document.context),
            unit.index,
            self.disk,
            rung=plan.levels[-1],
            rungs=plan.levels,
            observe=self.observes,
            by_token=True,
        )

    def _trial(
        self, trial: Trial, bench: Bench, simulator: Simulator | None, unit: Unit, state: State
    ) -> list[Observation] | Failure:
        provenance = self._provenance(unit)
        if trial.execution == "simulated":
            assert simulator is not None
            return self._simulated(trial, simulator, unit, provenance)
        record = measured(bench, parse_subject(trial.action))
        if record["state"] == "failed":
            return Failure(unit.document.name, trial.execution, trial.action, record["error"])
        return list(observations_of(trial, record, state, provenance, self.plan.levels))

    def _simulated(
        self, trial: Trial, simulator: Simulator, unit: Unit, provenance: Provenance
    ) -> list[Observation] | Failure:
        try:
            found = simulator.simulate(trial.action)
        except Exception as error:  # as for real ones: one broken action must not end a run of hours
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Failure(unit.document.name, trial.execution, trial.action, text)
        return [replace(found, what=trial.what(), provenance=provenance)]

    def _provenance(self, unit: Unit) -> Provenance:
        return Provenance(
            source="campaign",
            run=self.manifest.run,
            made=_now(),
            model_name=unit.model.name,
            text_sha256=unit.document.text_sha256,
            tokens_sha256=unit.document.tokens_sha256,
            machine=self.machine,
            git_commit=self.manifest.record["provenance"]["commit"],
            **self.about,
        )

    def _outcome(self) -> Outcome:
        entered = list(self.manifest.record["units"].values())
        counts: dict[str, int] = {}
        for unit in entered:
            for state, n in unit["observations"].items():
                counts[state] = counts.get(state, 0) + n
        return Outcome(
            self.manifest.run,
            len(entered),
            counts,
            [Failure(**f) for unit in entered for f in unit["failures"]],
            self.lacking,
            sum(unit["seconds"] for unit in entered),
        )


def _observed(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Scorers whose statistics some trial needs."""
    names: list[str] = []
    for trial in trials:
        if trial.execution == "real":
            names += parse_subject(trial.action).observes
        else:
            names += simulated.observed_by(simulated.parse(trial.action))
    return tuple(dict.fromkeys(names))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
