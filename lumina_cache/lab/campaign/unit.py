"""Measure one unit: a document whose prompt is read once, and every trial on it in an order drawn from the plan's seed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ...errors import CampaignError
from ...gap.records import Observation, Provenance, Simulated, State
from ..evaluate import parse_subject
from ..evaluate.documents import EvalDocument
from ..evaluate.measure import Bench
from ..evaluate.run import measured
from ..models import LoadedModel, load_model
from .observe import now, observations_of, state_of
from .plan import CampaignPlan
from .simulated import Imposed, observers
from .trial import Trial

__all__ = ["READING", "Failure", "Found", "Said", "Unit", "in_order", "measure", "measure_in_worker"]

#: How much longer it takes to read a prompt and answer with the full cache than to measure one trial.
READING = 8.0


@dataclass(frozen=True)
class Unit:
    """One document of one model and seed, with everything that a process needs to measure it. Hashable by ``name``."""

    plan: CampaignPlan
    model: str  #: what the plan calls it
    fingerprint: str
    document: EvalDocument
    index: int  #: of the document within its context
    seed: int

    @property
    def name(self) -> str:
        return f"{self.fingerprint}/{self.document.context}/{self.document.name}/{self.seed}"


@dataclass(frozen=True)
class Failure:
    """A trial that was carried out and went wrong."""

    document: str
    execution: str
    action: str
    error: str


@dataclass(frozen=True)
class Said:
    """Work done since the last word, in trials, and what comes now."""

    done: float
    what: str


@dataclass(frozen=True)
class Found:
    """What was found on a unit."""

    unit: Unit
    observations: tuple[Observation, ...]
    failures: tuple[Failure, ...]
    seconds: float


def in_order(unit: Unit) -> list[Trial]:
    """The trials in the order drawn for a unit: the same for the same plan and document, whatever was run before."""
    digest = hashlib.sha256(f"{unit.plan.order_seed}/{unit.name}".encode()).digest()
    drawn = np.random.default_rng(list(digest)).permutation(len(unit.plan.trials))
    return [unit.plan.trials[i] for i in drawn]


_warm: set[str] = set()  # models that this process has warmed up


def measure_in_worker(task: tuple[Unit, Provenance], say: Callable[[Said], None]) -> Found:
    """As :func:`measure`, with a model of the worker's own.

    Raises:
        CampaignError: the model is not the one that the campaign is about.
    """
    unit, provenance = task
    model = _loaded(unit.model)
    if model.fingerprint != unit.fingerprint:
        raise CampaignError(f"{unit.model} is not what it was when the campaign began: {model.fingerprint}")
    return measure(model, unit, provenance, say)


@lru_cache(maxsize=1)
def _loaded(name: str) -> LoadedModel:
    return load_model(name)


def measure(
    model: LoadedModel, unit: Unit, provenance: Provenance, say: Callable[[Said], None] = lambda said: None
) -> Found:
    """Every trial of the plan on one document."""
    plan, document = unit.plan, unit.document
    started = time.monotonic()
    found: list[Observation] = []
    failures: list[Failure] = []
    say(Said(0.0, f"{document.name}  (reading)"))
    provenance = replace(
        provenance, text_sha256=document.text_sha256, tokens_sha256=document.tokens_sha256, made=now()
    )
    with closing(_bench(model, unit)) as bench:
        one = _Trials(bench, unit, provenance)
        trials = in_order(unit)
        if unit.fingerprint not in _warm:
            for trial in trials[: plan.warm_up]:
                one.carry_out(trial)
            _warm.add(unit.fingerprint)
        done = READING
        for trial in trials:
            say(Said(done, f"{document.name}  {trial.action}"))
            result = one.carry_out(trial)
            if isinstance(result, Failure):
                failures.append(result)
            else:
                found += result
            done = 1.0
            if plan.idle_seconds:
                time.sleep(plan.idle_seconds)
        say(Said(done, document.name))
    return Found(unit, tuple(found), tuple(failures), time.monotonic() - started)


def _bench(model: LoadedModel, unit: Unit) -> Bench:
    plan = unit.plan
    return Bench(
        model.model,
        model.tokenizer,
        unit.document,
        plan.bench_plan(unit.document.context),
        unit.index,
        any(parse_subject(t.action).needs_disk for t in plan.trials if t.execution == "real"),
        rungs=plan.levels,
        observe=_observed(plan.trials),
        by_token=True,
    )


class _Trials:
    """Carries trials out on one bench."""

    def __init__(self, bench: Bench, unit: Unit, provenance: Provenance) -> None:
        self.bench, self.unit, self.provenance = bench, unit, provenance
        self.state: State = state_of(unit.fingerprint, unit.document, unit.seed, unit.plan.scored)
        self.imposed: Imposed | None = None
        if any(t.execution == "simulated" for t in unit.plan.trials):
            self.imposed = Imposed(bench, unit.seed, provenance)

    def carry_out(self, trial: Trial) -> list[Observation] | Failure:
        """Its observations, or what went wrong: one broken action must not end a run of hours."""
        provenance = replace(self.provenance, made=now())
        if trial.execution == "simulated":
            assert self.imposed is not None
            try:
                found = self.imposed.measured(trial.action)
            except Exception as error:
                return self._failure(trial, f"{type(error).__name__}: {' '.join(str(error).split())}")
            return [Simulated(self.state, trial.what(), provenance, found)]
        record = measured(self.bench, parse_subject(trial.action))
        if record["state"] == "failed":
            return self._failure(trial, record["error"])
        return list(observations_of(trial, record, self.state, provenance, self.unit.plan.levels))

    def _failure(self, trial: Trial, text: str) -> Failure:
        return Failure(self.unit.document.name, trial.execution, trial.action, text)


def _observed(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Scorers whose statistics some trial needs."""
    real = [n for t in trials if t.execution == "real" for n in parse_subject(t.action).observes]
    imposed = observers(t.action for t in trials if t.execution == "simulated")
    return tuple(dict.fromkeys((*real, *imposed)))
