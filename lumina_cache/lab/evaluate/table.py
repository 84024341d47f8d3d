"""From records to a row per action and context, with gates applied and intervals over documents.

Execution states are types (:mod:`lumina_cache.gap.decisions`): a row is :class:`RealScore`, its score being −Q of T1 in
points, or :class:`RefusedAction` with reasons and no figure. What was carried out and turned out wrong is
:class:`Failed`; it has no figure either, and is a fault to look into, not a property of the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...backend.capabilities import Rung
from ...gap.decisions import Judged, RealScore, RefusedAction
from ...policy import quality_points
from .plan import Plan
from .statistics import Estimate, bootstrap_mean, geometric_mean

__all__ = ["Best", "Failed", "Gate", "Row", "best_per_rung", "gates", "rows"]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Failed(Judged):
    """Carried out, and not what it should be: an error message, and nothing to compare."""

    error: str


@dataclass(frozen=True)
class Gate:
    """Whether a test says anything about this model at this context, and on which documents."""

    test: str
    context: int
    passed: bool
    text: str
    documents: tuple[str, ...]  #: those on which the test counts


@dataclass(frozen=True)
class Row:
    """One action at one context. Figures are None where a test was not run, or did not pass its gate."""

    context: int
    observation: Judged
    rung: str | None = None  #: the least that carries it out, on all documents
    documents: int = 0  #: measured
    refused_documents: int = 0
    share16: float | None = None  #: of dense 16-bit rows, rows held
    share16_allocated: float | None = None
    live: float | None = None  #: bytes, mean over documents
    allocated: float | None = None
    bytes_exact: bool | None = None  #: predicted = observed on every document; None if not predicted
    figures: Mapping[str, Estimate | None] | None = None
    by_domain: Mapping[str, Mapping[str, float]] | None = None
    by_depth: Mapping[str, Mapping[str, float]] | None = None

    @property
    def action(self) -> str:
        return self.observation.action

    def to_record(self) -> dict[str, Any]:
        states = {RealScore: "real", RefusedAction: "backend_infeasible", Failed: "failed"}
        record = {"action": self.action, "context": self.context, "state": states[type(self.observation)]}
        if isinstance(self.observation, RefusedAction):
            return record | {"reasons": [dict(r) for r in self.observation.reasons], "documents": 0}
        if isinstance(self.observation, Failed):
            return record | {"error": self.observation.error, "documents": 0}
        assert isinstance(self.observation, RealScore)
        kept = asdict(self)
        del kept["observation"], kept["context"]
        return record | {"score": self.observation.score} | kept


def gates(records: Iterable[Record], plan: Plan) -> list[Gate]:
    """Every test's gate at every context, from the full cache's own figures."""
    found: list[Gate] = []
    documents = [r for r in records if r["kind"] == "document"]
    for context, _ in plan.contexts:
        here = [r for r in documents if r["context"] == context]
        if not here:
            continue
        found += [
            gate(context, [r for r in here if test in r and "reason" not in r[test]], here, plan)
            for test, gate in (("T1", _continuation_gate), ("T2", _copy_gate), ("T3", _lookup_gate))
            if test in plan.tests
        ]
    return found


def _continuation_gate(context: int, measured: Sequence[Record], here: Sequence[Record], plan: Plan) -> Gate:
    full = _mean([r["T1"]["nll"] for r in measured])
    short = _mean([r["T1"]["nll_short_context"] for r in measured])
    falls = sum(r["T1"]["nll"] < r["T1"]["nll_short_context"] for r in measured)
    return Gate(
        "T1",
        context,
        full < short,
        f"{full:.3f} nats per token after the whole context, {short:.3f} after its last {plan.short_context} tokens; "
        f"lower on {falls} of {len(measured)} documents",
        tuple(r["document"] for r in measured),
    )


def _copy_gate(context: int, measured: Sequence[Record], here: Sequence[Record], plan: Plan) -> Gate:
    least, most = plan.gates["T2_full"], plan.gates["T2_no_context"]
    good = tuple(
        r["document"]
        for r in measured
        if r["T2"]["accuracy"] >= least and r["T2"]["accuracy_no_context"] <= most
    )
    full = _mean([r["T2"]["accuracy"] for r in measured])
    alone = _mean([r["T2"]["accuracy_no_context"] for r in measured])
    return Gate(
        "T2",
        context,
        bool(good),
        f"{len(good)} of {len(measured)} documents are copied to {least:.0%} or more with the full cache and to "
        f"{most:.0%} or less without context (means {full:.3f} and {alone:.3f})",
        good,
    )


def _lookup_gate(context: int, measured: Sequence[Record], here: Sequence[Record], plan: Plan) -> Gate:
    least, chance = plan.gates["T3_full"], 1 / plan.candidates
    if not measured:
        reasons = {str(r["T3"]["reason"]) for r in here if "reason" in r.get("T3", {})}
        return Gate("T3", context, False, "not asked: " + "; ".join(sorted(reasons)), ())
    full = _mean([r["T3"]["accuracy"] for r in measured])
    questions = sum(r["T3"]["questions"] for r in measured)
    passed = full >= least
    return Gate(
        "T3",
        context,
        passed,
        f"{full:.3f} of {questions} questions are answered with the full cache; {least:.2f} are needed, "
        f"chance is {chance:.3f}",
        tuple(r["document"] for r in measured) if passed else (),
    )


#: Figures of a row: name → test, and how to read it from a record.
_FIGURES: Mapping[str, tuple[str, Callable[[Record], float]]] = {
    "kl_mean": ("T1", lambda r: r["T1"]["kl_mean"]),
    "kl_p95": ("T1", lambda r: r["T1"]["kl_p95"]),
    "top1": ("T1", lambda r: r["T1"]["top1"]),
    "nll_change": ("T1", lambda r: r["T1"]["nll_change"]),
    "copy_kl": ("T2", lambda r: r["T2"]["kl_mean"]),
    "copy_accuracy": ("T2", lambda r: r["T2"]["accuracy"]),
    "lookup_accuracy": ("T3", lambda r: r["T3"]["accuracy"]),
    "lookup_flips": ("T3", lambda r: r["T3"]["flips"]),
    "agreed_tokens": ("T5", lambda r: r["T5"]["agreed"]),
    "time_ratio": ("time", lambda r: r["time"]["ratio"]),
}


def rows(
    records: Sequence[Record], actions: Sequence[str], domains: Mapping[tuple[int, str], str], plan: Plan
) -> list[Row]:
    """A row per context and action, in the order of ``actions``.

    Args:
        domains: (context, document) → domain, the strata of the intervals.
    """
    open_to = {
        (g.context, g.test): set(g.documents) for g in gates(records, plan) if g.passed or g.test == "T1"
    }
    found = []
    for context, _ in plan.contexts:
        for action in actions:
            here = [
                r
                for r in records
                if r["kind"] == "subject" and r["context"] == context and r["action"] == action
            ]
            if here:
                found.append(_row(context, action, here, domains, open_to, plan))
    return found


def _row(
    context: int,
    action: str,
    here: Sequence[Record],
    domains: Mapping[tuple[int, str], str],
    open_to: Mapping[tuple[int, str], set[str]],
    plan: Plan,
) -> Row:
    failed = [r for r in here if r["state"] == "failed"]
    real = [r for r in here if r["state"] == "real"]
    refused = [r for r in here if r["state"] == "backend_infeasible"]
    if failed:
        return Row(
            context, Failed(action, f"{failed[0]['error']} (on {len(failed)} of {len(here)} documents)")
        )
    if not real:
        reasons = {(x.get("rung"), str(x["text"])): x for r in refused for x in r["reasons"]}
        return Row(context, RefusedAction(action, tuple(reasons.values())))

    def grouped(test: str, read: Callable[[Record], float]) -> dict[str, list[float]]:
        allowed = open_to.get((context, test), set()) if test in ("T1", "T2", "T3") else None
        out: dict[str, list[float]] = {}
        for r in real:
            if test in r and (allowed is None or r["document"] in allowed):
                out.setdefault(domains[context, r["document"]], []).append(float(read(r)))
        return out

    figures: dict[str, Estimate | None] = {}
    by_domain: dict[str, dict[str, float]] = {}
    for name, (test, read) in _FIGURES.items():
        values = grouped(test, read)
        interval = geometric_mean if test == "time" else bootstrap_mean
        figures[name] = interval(values, draws=plan.draws, seed=plan.seed)
        for domain, some in values.items():
            by_domain.setdefault(domain, {})[name] = _mean(some)
    kl, tail = figures["kl_mean"], figures["kl_p95"]
    score = float("nan") if kl is None or tail is None else -quality_points(kl.mean, tail.mean)
    predicted = [r["bytes"] for r in real if r["bytes"]["predicted_live"] is not None]
    return Row(
        context=context,
        observation=RealScore(action, score),
        rung=_deepest(r.get("rung") for r in real),
        documents=len(real),
        refused_documents=len(refused),
        share16=_mean([r["bytes"]["share16"] for r in real]),
        share16_allocated=_mean([r["bytes"]["share16_allocated"] for r in real]),
        live=_mean([r["bytes"]["live"] for r in real]),
        allocated=_mean([r["bytes"]["allocated"] for r in real]),
        bytes_exact=all(
            b["predicted_live"] == b["live"] and b["predicted_allocated"] == b["allocated"] for b in predicted
        )
        if predicted
        else None,
        figures=figures,
        by_domain=by_domain,
        by_depth=_by_depth([r for r in real if r["document"] in open_to.get((context, "T2"), set())]),
    )


def _deepest(names: Iterable[str | None]) -> str | None:
    """A rung from which on every document could be done; None for records of a single rung that do not say."""
    known = [Rung[name.upper()] for name in names if name is not None]
    return max(known).name.lower() if known else None


#: Shares of dense 16-bit rows for which the best action of every rung is named, and how far above one still counts.
SHARES, TOLERANCE = (0.28, 0.25, 0.125, 0.0625), 1.02


@dataclass(frozen=True)
class Best:
    """The action with the least KL of T1 among those that a rung carries out within a share; None of none."""

    context: int
    share: float
    rung: str
    action: str | None = None
    share16: float | None = None
    kl_mean: float | None = None


def best_per_rung(found: Sequence[Row], rungs: Sequence[str], others: Iterable[str] = ()) -> list[Best]:
    """For every context and share, the best of each rung: what a rung can do, all deeper ones can as well.

    Args:
        others: actions that are measured for comparison, and are no rung's.
    """
    skipped = set(others)
    levels = [Rung[name.upper()] for name in rungs]
    best = []
    for context in dict.fromkeys(row.context for row in found):
        real = [(row, kl) for row in found if row.context == context and (kl := _kl(row)) is not None
                and row.action not in skipped]  # fmt: skip
        for share in SHARES:
            for level in levels:
                fit = [
                    (kl, row) for row, kl in real
                    if row.share16 is not None and row.share16 <= share * TOLERANCE
                    and row.rung is not None and Rung[row.rung.upper()] <= level
                ]  # fmt: skip
                if not fit:
                    best.append(Best(context, share, level.name.lower()))
                    continue
                kl, row = min(fit, key=lambda one: one[0])
                best.append(Best(context, share, level.name.lower(), row.action, row.share16, kl))
    return best


def _kl(row: Row) -> float | None:
    figure = (row.figures or {}).get("kl_mean")
    return None if figure is None else figure.mean


def _by_depth(real: Sequence[Record]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = {}
    for r in real:
        for one in r["T2"]["by_depth"] if "T2" in r else ():
            at = found.setdefault(f"{one['depth']:.2f}", {"kl": [], "accuracy": []})
            at["kl"].append(one["kl"])
            at["accuracy"].append(one["accuracy"])
    return {depth: {name: _mean(v) for name, v in at.items()} for depth, at in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
