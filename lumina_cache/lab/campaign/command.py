"""``lumina-cache campaign``: what the command does once its options are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ...backend.capabilities import Rung
from ..bar import progress_bar
from ..models import LoadedModel, load_model
from .plan import CampaignPlan, read_plan
from .run import Outcome, Progress, campaign, units_of

__all__ = ["campaign_command"]


def campaign_command(*, plan: Path, out: Path, workers: int, dry_run: bool, as_json: bool) -> bool:
    """Run the campaign, or say what it would do, and print it. Returns whether nothing went wrong."""
    read = read_plan(plan)
    console = Console(stderr=True)
    with console.status("loading the model"):
        models = [load_model(name) for name in read.models]
    if dry_run:
        found = planned(read, models)
        print(json.dumps(found) if as_json else _planned_text(found, read))
        return True
    with progress_bar(console) as bar:
        task = bar.add_task("", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, description=progress.what)

        try:
            outcome = campaign(read, models, out, workers=workers, on_progress=show)
        except KeyboardInterrupt:
            bar.stop()
            console.print(
                f"whole documents are in {out}; the same command goes on from there", soft_wrap=True
            )
            raise
    print(json.dumps(_record(outcome, out)) if as_json else _outcome_text(outcome, out))
    return not outcome.failures


def planned(plan: CampaignPlan, models: Sequence[LoadedModel]) -> dict[str, object]:
    """What would be measured on what."""
    units, lacking, documents = units_of(plan, models)
    return {
        "plan": plan.to_record(),
        "documents": {m.name: [d.to_record() for d in documents[m.fingerprint]] for m in models},
        "units": len(units),
        "trials": len(units) * len(plan.trials),
        "lacking": [vars(one) for one in lacking],
    }


def _planned_text(found: dict[str, object], plan: CampaignPlan) -> str:
    lines = [
        f"{plan.name}: {found['units']} documents × {len(plan.trials)} actions = {found['trials']} trials"
    ]
    for execution, role, rung, action in sorted((t.execution, t.role, t.rung, t.action) for t in plan.trials):
        lines.append(f"{execution:9} {role:9} {Rung(rung).name.lower():7} {action}")
    documents = found["documents"]
    assert isinstance(documents, dict)
    for model, some in documents.items():
        each = Counter((d["context"], d["domain"]) for d in some)
        spread = ", ".join(f"{n} {domain} of {context}" for (context, domain), n in each.items())
        lines.append(f"{model}: {spread}")
    lines += [f"lacking: {s['domain']}: {s['text']}" for s in found["lacking"]]  # type: ignore[attr-defined]
    return "\n".join(lines)


def _record(outcome: Outcome, out: Path) -> dict[str, object]:
    return {**asdict(outcome), "store": str(out)}


def _outcome_text(outcome: Outcome, out: Path) -> str:
    counts = ", ".join(f"{n:,} {state}" for state, n in sorted(outcome.observations.items()))
    lines = [
        f"{outcome.run}: {outcome.units} documents, {counts or 'no observation'}",
        f"{outcome.seconds / 60:.1f} min of work; store: {out}",
    ]
    lines += [f"FAILED on {f.document}: {f.execution} {f.action}: {f.error}" for f in outcome.failures]
    lines += [f"lacking at {s.context:,}, {s.domain}: {s.text}" for s in outcome.lacking]
    return "\n".join(lines)
