"""``lumina-cache eval``: what the command does once its options are read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ...pages import update_page
from ..bar import progress_bar
from ..models import load_model
from .documents import user_texts
from .plan import QUICK, Plan, parse_contexts
from .render import as_json, as_markdown, print_result
from .results import read_result
from .run import Progress, evaluate, rungs_of
from .subjects import parse_subjects

__all__ = ["DEFAULT_ACTIONS", "eval_command"]

#: Measured when no action is named.
DEFAULT_ACTIONS = (
    "keep",
    "quant:affine,bits=8,group=64",
    "quant:affine,bits=4,group=64",
    "mlx-lm:kv_bits=4,group=64",
    "evict:sinks_window@0.50",
    "evict:sinks_window@0.25",
)


def eval_command(
    *,
    model: str | None,
    actions: Sequence[str],
    texts: Sequence[Path],
    contexts: str | None,
    documents: str | None,
    tests: str | None,
    block: int | None,
    seed: int,
    rung: str,
    quick: bool,
    out: Path | None,
    result: Path | None,
    page: Path | None,
    part: str,
    as_json_text: bool,
) -> bool:
    """Measure, or read a finished ``result``, and print it. Returns whether every row is free of faults."""
    if result is not None:
        found = read_result(result)
    else:
        plan = _plan(quick, contexts, documents, tests, block, seed)
        subjects = parse_subjects(actions or DEFAULT_ACTIONS)
        levels = rungs_of(rung)
        own = user_texts(texts) if texts else None
        console = Console(stderr=True)
        with console.status("loading the model"):
            loaded = load_model(model)
        with progress_bar(console) as bar:
            task = bar.add_task("", total=None)

            def show(progress: Progress) -> None:
                bar.update(task, completed=progress.done, total=progress.total, description=progress.what)

            try:
                found = evaluate(loaded, subjects, plan, rung=levels, texts=own, out=out, on_progress=show)
            except KeyboardInterrupt:
                bar.stop()
                if out is not None:
                    console.print(
                        f"what was measured is in {out}.partial; the same command goes on from there"
                    )
                raise
    if page is not None:
        update_page(page, part, as_markdown(found))
    if as_json_text:
        print(as_json(found))
    else:
        # A pipe or a file has no width; the table should not be folded for the 80 columns that are assumed then.
        print_result(found, Console() if sys.stdout.isatty() else Console(width=160))
    return all(row["state"] != "failed" for row in found["rows"])


def _plan(
    quick: bool, contexts: str | None, documents: str | None, tests: str | None, block: int | None, seed: int
) -> Plan:
    plan = replace(QUICK if quick else Plan(), seed=seed)
    if contexts is not None or documents is not None:
        shown = contexts or ",".join(str(c) for c, _ in plan.contexts)
        plan = replace(plan, contexts=parse_contexts(shown, documents or str(plan.contexts[0][1])))
    if tests is not None:
        plan = replace(plan, tests=tuple(t.strip() for t in tests.split(",")))
    if block is not None:
        plan = replace(plan, block=block)
    return plan
