"""Run a campaign from start to end, or from where it stopped.

When all trials of a unit (one document of one context, model and seed) are done, their observations go to the store at
once. What a kill interrupts is so one unit per worker, which the next run does again from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import CampaignError
from ...gap.records import Observation, Provenance
from ...gap.store import Store
from ..evaluate import select, user_texts
from ..evaluate.documents import EvalDocument, Shortage
from ..models import LoadedModel
from ..workers import in_processes
from .manifest import Manifest, locked, made_under
from .observe import now
from .plan import CampaignPlan
from .unit import READING, Failure, Found, Said, Unit, measure

__all__ = ["Outcome", "Progress", "campaign", "units_of"]


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
    seconds: float = 0.0  #: of all units, summed over workers


def units_of(
    plan: CampaignPlan, models: Sequence[LoadedModel]
) -> tuple[list[Unit], list[Shortage], dict[str, list[EvalDocument]]]:
    """Units in the order in which they are measured, what was lacking, and the documents of each model.

    Args:
        models: in the plan's order.

    Raises:
        EvaluationError: a text cannot be read, or none is long enough.
    """
    own = user_texts([Path(t) for t in plan.texts]) if plan.texts else None
    units: list[Unit] = []
    lacking: list[Shortage] = []
    documents: dict[str, list[EvalDocument]] = {}
    for name, model in zip(plan.models, models, strict=True):
        for context in plan.contexts:
            length = plan.bench_plan(context).length(context)
            found, missing = select(
                model.tokenizer, context, plan.documents, length, own, domains=plan.domains
            )
            lacking += missing
            documents.setdefault(model.fingerprint, []).extend(found)
            units += [
                Unit(plan, name, model.fingerprint, document, i, seed)
                for seed in plan.seeds
                for i, document in enumerate(found)
            ]
    return units, lacking, documents


def campaign(
    plan: CampaignPlan,
    models: Sequence[LoadedModel],
    out: Path,
    *,
    workers: int = 1,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Measure everything in ``plan`` that is not in the store ``out`` yet.

    Args:
        models: in the plan's order.
        workers: processes; 1 measures in this one. With several, each loads the plan's models by name.

    Raises:
        CampaignError: the store holds another campaign, another process is filling it, or times are asked of several
            workers.
        EvaluationError: a text cannot be read, or none is long enough.
        WorkerLostError: a worker was killed.
    """
    if workers < 1:
        raise CampaignError(f"workers = {workers}: give at least 1")
    if workers > 1 and plan.timed_documents:
        raise CampaignError(
            f"timed_documents = {plan.timed_documents} with {workers} workers: they would disturb each other's times; "
            "leave --workers out"
        )
    with locked(out):
        return _Campaign(plan, models, out, on_progress).all(workers)


class _Campaign:
    def __init__(
        self,
        plan: CampaignPlan,
        models: Sequence[LoadedModel],
        out: Path,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.plan = plan
        self.models = {model.fingerprint: model for model in models}
        self.store = Store(out)
        self.units, self.lacking, documents = units_of(plan, models)
        under = made_under(plan, models, documents)
        self.manifest = Manifest.of(self.store, under, self.lacking)
        self.about = {k: under[k] for k in ("device", "machine", "mlx", "mlx_lm", "lumina_cache")}
        self.on_progress = on_progress
        self.done, self.total = 0.0, 0.0

    def all(self, workers: int) -> Outcome:
        self.manifest.write()
        due = [unit for unit in self.units if not self.manifest.done(unit.name)]
        self.total = len(due) * (READING + len(self.plan.trials))
        for i, found in enumerate(self._measured(due, workers)):
            counts = self._put(found.observations)
            self.manifest.enter(found.unit.name, _entry(found, counts))
            self._say(Said(0.0, f"{i + 1} of {len(due)} documents"))
        self.manifest.finish()
        self.on_progress(Progress(self.total, self.total, "done"))
        return self._outcome()

    def _measured(self, due: Sequence[Unit], workers: int) -> Iterator[Found]:
        tasks = [(unit, self._provenance(unit)) for unit in due]
        if workers > 1:
            work = f"{measure.__module__}:measure_in_worker"
            yield from in_processes(work, tasks, workers, on_message=self._say)
        else:
            for unit, provenance in tasks:
                yield measure(self.models[unit.fingerprint], unit, provenance, self._say)

    def _say(self, said: Said) -> None:
        self.done += said.done
        self.on_progress(Progress(self.done, self.total, said.what))

    def _put(self, found: Sequence[Observation]) -> Mapping[str, int]:
        """Append what is not there yet: a kill between two files of a unit leaves one of them."""
        known = {state: self.store.ids(state) for state in {o.execution_state for o in found}}
        self.store.append([o for o in found if o.id not in known[o.execution_state]])
        return {state: sum(o.execution_state == state for o in found) for state in sorted(known)}

    def _provenance(self, unit: Unit) -> Provenance:
        return Provenance(
            source="campaign",
            run=self.manifest.run,
            made=now(),
            model_name=self.models[unit.fingerprint].name,
            text_sha256=unit.document.text_sha256,
            tokens_sha256=unit.document.tokens_sha256,
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


def _entry(found: Found, counts: Mapping[str, int]) -> dict[str, object]:
    return {
        "finished": now(),
        "seconds": round(found.seconds, 1),
        "observations": dict(counts),
        "failures": [vars(f) for f in found.failures],
    }
