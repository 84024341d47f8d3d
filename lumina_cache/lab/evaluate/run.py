"""Run an evaluation from start to end, or from where it stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...backend.capabilities import Rung
from ...errors import EvaluationError
from ...reach import rung_of
from ..corpus import Document
from ..models import LoadedModel
from .documents import EvalDocument, Shortage, select
from .measure import Bench
from .plan import Plan
from .provenance import code_fingerprint, conditions, provenance
from .results import KIND, SCHEMA, Store
from .subjects import Refused, Subject, is_reference
from .table import best_per_rung, gates, rows

__all__ = ["Progress", "evaluate", "measured", "rungs_of"]


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is; ``done`` and ``total`` in tokens fed, a measure of the work."""

    done: float
    total: float
    what: str


def evaluate(
    loaded: LoadedModel,
    subjects: Sequence[Subject],
    plan: Plan,
    *,
    rung: str | Rung | Sequence[str | Rung] = Rung.CACHE,
    texts: Sequence[Document] | None = None,
    out: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Measure every subject on every document and return the result, which is also written to ``out``.

    With ``out``, what is measured is on disk at once; the same call after a crash or an interruption goes on from there.

    Args:
        rung: how deep caches reach into mlx-lm, see :class:`~lumina_cache.cache.LuminaCache`. At ``hook`` they watch the
            prompt's attention for the scorers among ``subjects``, and serve rows from codes. Several, as a sequence or
            separated by commas: each action is measured once, at the least of them that carries it out.
        texts: the user's own texts; None for those that every installation has.

    Raises:
        UnsupportedCacheError: there is no such rung, or this model has not got it.
        EvaluationError: no text is long enough, or ``out`` holds figures made under other conditions.
    """
    if not subjects:
        raise EvaluationError("no action to evaluate: name at least one, such as quant:affine,bits=4")
    levels = rungs_of(rung)
    documents, lacking = _documents(loaded, plan, texts)
    header = {
        **conditions(loaded),
        "rung": ",".join(level.name.lower() for level in levels),
        "plan": plan.to_record(),
        "documents": [d.to_record() for d in documents],
    }
    store = Store(out, header)
    try:
        _measure_all(loaded, subjects, plan, levels, documents, store, on_progress)
        result = _result(subjects, plan, documents, lacking, store)
        store.finish(result)
    finally:
        store.close()
    return result


def rungs_of(named: str | Rung | Sequence[str | Rung]) -> tuple[Rung, ...]:
    """The rungs that a caller named, the least first: one, several, or names separated by commas.

    Raises:
        UnsupportedCacheError: there is no such rung.
    """
    if isinstance(named, str):
        named = [part.strip() for part in named.split(",")]
    names = [named] if isinstance(named, Rung) else named
    return tuple(sorted({rung_of(name) for name in names}))


def _documents(
    loaded: LoadedModel, plan: Plan, texts: Sequence[Document] | None
) -> tuple[list[EvalDocument], list[Shortage]]:
    documents: list[EvalDocument] = []
    lacking: list[Shortage] = []
    for context, count in plan.contexts:
        found, missing = select(loaded.tokenizer, context, count, plan.length(context), texts)
        documents += found
        lacking += missing
    return documents, lacking


def _measure_all(
    loaded: LoadedModel,
    subjects: Sequence[Subject],
    plan: Plan,
    rungs: tuple[Rung, ...],
    documents: Sequence[EvalDocument],
    store: Store,
    on_progress: Callable[[Progress], None],
) -> None:
    code, disk = code_fingerprint(), any(s.needs_disk for s in subjects)
    observe = tuple(dict.fromkeys(name for s in subjects for name in s.observes))
    index: dict[int, int] = {}
    total = sum(_prefill_work(d, plan) + len(subjects) * _subject_work(plan, d) for d in documents)
    done = 0.0
    for document in documents:
        number = index.setdefault(document.context, 0)
        index[document.context] += 1
        due = [s for s in subjects if not _known(store.get(document.context, document.name, s.text), code)]
        known = store.get(document.context, document.name, None)
        on_progress(Progress(done, total, document.name))
        with ExitStack() as stack:
            bench = None
            if due or known is None:
                bench = Bench(
                    loaded.model, loaded.tokenizer, document, plan, number, disk, rungs=rungs, observe=observe
                )
                stack.callback(bench.close)
                if known is None:
                    store.add({**bench.document_record(), "code": code})
            done += _prefill_work(document, plan)
            for subject in subjects:
                on_progress(Progress(done, total, f"{document.name}  {subject.text}"))
                if subject in due and bench is not None:
                    store.add({**measured(bench, subject), "code": code})
                done += _subject_work(plan, document)
    on_progress(Progress(done, total, "done"))


def _known(record: dict[str, Any] | None, code: str) -> bool:
    """Whether a record still stands; refusals and faults are those of the code that made them."""
    return record is not None and (record["state"] == "real" or record["code"] == code)


def measured(bench: Bench, subject: Subject) -> dict[str, Any]:
    """The record of a subject on a document, one of a refusal or of a fault instead of raising."""
    base = {
        "kind": "subject",
        "document": bench.document.name,
        "context": bench.document.context,
        "action": subject.text,
    }
    try:
        with subject.surroundings():
            return bench.measure(subject)
    except Refused as refusal:
        return {**base, "state": "backend_infeasible", "reasons": [dict(r) for r in refusal.reasons]}
    except Exception as error:  # one broken action must not end a run of hours; it is reported as a fault
        return {**base, "state": "failed", "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _prefill_work(document: EvalDocument, plan: Plan) -> float:
    return document.context * (2 if {"T2", "T3"} & set(plan.tests) else 1) + _subject_work(plan, document)


def _subject_work(plan: Plan, document: EvalDocument) -> float:
    """Tokens fed per subject, those of a long context weighing more."""
    tokens = {
        "T1": plan.scored,
        "T2": plan.planted,
        "T3": plan.asked * 10,
    }
    return sum(n for test, n in tokens.items() if test in plan.tests) * (1 + document.context / 4096) * 2


def _result(
    subjects: Sequence[Subject],
    plan: Plan,
    documents: Sequence[EvalDocument],
    lacking: Sequence[Shortage],
    store: Store,
) -> dict[str, Any]:
    records = [
        record
        for document in documents
        for action in (None, *(s.text for s in subjects))
        if (record := store.get(document.context, document.name, action)) is not None
    ]
    domains = {(d.context, d.name): d.domain for d in documents}
    found = rows(records, [s.text for s in subjects], domains, plan)
    rungs = store.header["rung"].split(",")
    references = {s.text for s in subjects if is_reference(s)}
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "header": store.header,
        "provenance": {
            **provenance(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "codes": sorted({r["code"] for r in records}),
            "packages": {s.text: s.version for s in subjects if s.version is not None},
        },
        "lacking": [vars(s) for s in lacking],
        "gates": [vars(g) for g in gates(records, plan)],
        "rows": [r.to_record() for r in found],
        "best": [vars(b) for b in best_per_rung(found, rungs, references)],
        "seconds": _seconds(records),
        "records": records,
    }


def _seconds(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Time spent by stage, summed over documents and actions."""
    found: dict[str, float] = {}
    for record in records:
        for stage, seconds in record.get("seconds", {}).items():
            found[stage] = found.get(stage, 0.0) + seconds
    return found
