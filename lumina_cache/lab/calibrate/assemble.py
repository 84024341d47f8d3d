"""From records to a profile: means over documents, layers' sensitivities, times; and how far the assumptions are off.

Nothing here runs a model. Domains have equal weights, as in an evaluation. A figure's ``kl`` is the mean of that of
continuation and that of copying, where the model can copy; both are kept, so that another weighting can be computed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

from ...actions import Action, Evict, Plan, Quantize
from ...profile import CodecFigure, EvictionFigure, Parts, Profile
from ..evaluate.statistics import bootstrap_mean
from ..evaluate.table import gates
from .grid import Grid, ModelShape
from .settings import Settings
from .times import OWN_WORK_ROWS, median_and_quartiles

__all__ = ["Measured", "Quality", "assemble", "times_of", "whole_documents"]

Record = Mapping[str, Any]


class _QualityOf(Protocol):
    def __call__(self, action: Action, among: Iterable[str] | None = None) -> Quality | None: ...


@dataclass(frozen=True)
class Quality:
    """What one action costs on some documents, in nats per token; None where it was not measured."""

    continuation: float
    copying: float | None
    p95: float
    low: float | None  #: 95 % interval of ``continuation`` over documents
    high: float | None
    copying_low: float | None
    copying_high: float | None
    documents: int

    @property
    def kl(self) -> float:
        """What is expected when it is not known whether lost rows will be needed again: the mean of the two."""
        return self.continuation if self.copying is None else (self.continuation + self.copying) / 2

    def to_record(self) -> dict[str, Any]:
        def interval(low: float | None, high: float | None) -> list[float | None]:
            return [_short(low), _short(high)]

        return {
            "continuation": _short(self.continuation),
            "continuation_95": interval(self.low, self.high),
            "copying": _short(self.copying),
            "copying_95": interval(self.copying_low, self.copying_high),
            "p95": _short(self.p95),
            "documents": self.documents,
        }


@dataclass(frozen=True)
class Measured:
    """The records of one calibration. ``documents``: name → domain, in the order in which they were measured."""

    documents: Mapping[str, str]
    quality: Sequence[Record]
    steps: Sequence[Record]
    chunks: Sequence[Record] = ()
    dense: Record | None = None  #: seconds of the dense cache by rows
    _cache: dict[Any, Quality | None] = field(default_factory=dict, compare=False)

    @cached_property
    def by_action(self) -> dict[str, dict[str, Record]]:
        found: dict[str, dict[str, Record]] = {}
        for record in self.quality:
            if record["kind"] == "subject" and record["state"] == "real":
                found.setdefault(record["action"], {})[record["document"]] = record
        return found

    @cached_property
    def unmeasured(self) -> dict[str, str]:
        """Action → why it has no figure of quality."""
        return _reasons(self.quality)

    @cached_property
    def untimed(self) -> dict[str, str]:
        """Action → why its steps were not timed."""
        return _reasons(self.steps)

    def on(self, action: Action) -> set[str]:
        """Documents that ``action`` was measured on."""
        return set(self.by_action.get(str(action), {}))

    def quality_of(
        self, action: Action, settings: Settings, copied: frozenset[str], among: Iterable[str] | None = None
    ) -> Quality | None:
        """Means over the documents ``among`` which it was measured.

        Args:
            copied: documents on which copying says something.
        """
        chosen = self.on(action) if among is None else self.on(action) & set(among)
        key = (str(action), frozenset(chosen))
        if key not in self._cache:
            records = [self.by_action[str(action)][name] for name in self.documents if name in chosen]
            self._cache[key] = self._quality(records, settings, copied) if records else None
        return self._cache[key]

    def _quality(
        self, records: Sequence[Record], settings: Settings, copied: frozenset[str]
    ) -> Quality | None:
        def mean(read: Callable[[Record], float], which: Iterable[Record]) -> Any:
            strata: dict[str, list[float]] = {}
            for record in which:
                # Rounding may leave a divergence a hair below nothing.
                strata.setdefault(self.documents[record["document"]], []).append(max(0.0, read(record)))
            return bootstrap_mean(strata, draws=2000, seed=settings.seed)

        going = mean(lambda r: float(r["T1"]["kl_mean"]), records)
        tail = mean(lambda r: float(r["T1"]["kl_p95"]), records)
        copy = mean(
            lambda r: float(r["T2"]["kl_mean"]), [r for r in records if "T2" in r and r["document"] in copied]
        )
        return Quality(
            going.mean,
            None if copy is None else copy.mean,
            tail.mean,
            going.low,
            going.high,
            None if copy is None else copy.low,
            None if copy is None else copy.high,
            len(records),
        )


def _reasons(records: Iterable[Record]) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in records:
        if record.get("state") == "backend_infeasible":
            found[record["action"]] = "; ".join(str(r["text"]) for r in record["reasons"])
        elif record.get("state") == "failed":
            found[record["action"]] = f"failed: {record['error']}"
    return found


def assemble(
    measured: Measured, grid: Grid, shape: ModelShape, settings: Settings, provenance: Mapping[str, Any]
) -> Profile:
    """The profile, with everything that it was made of in its provenance."""
    gate = next((g for g in gates(measured.quality, settings.plan) if g.test == "T2"), None)
    copied = frozenset(gate.documents) if gate is not None and gate.passed else frozenset[str]()
    whole = whole_documents(measured, grid)

    def quality(action: Action, among: Iterable[str] | None = None) -> Quality | None:
        return measured.quality_of(action, settings, copied, among)

    # Figures that are compared with each other come from the same documents.
    core = {a: q for a in grid.core if (q := quality(a, whole or None)) is not None}
    checked = {a: q for a in grid.checks if (q := quality(a)) is not None}
    weights = _sensitivity(grid, shape, checked)
    seconds, spread = _own_work(measured)
    return Profile(
        name=str(provenance["name"]),
        borrowed=False,
        codecs=tuple(_codecs(grid, core, measured)),
        evictors=_evictors(grid, core, settings),
        sensitivity=tuple(_short(w) for w in weights),
        seconds_per_byte=seconds,
        step_seconds=_dense_seconds(measured.steps),
        prompt_seconds=_dense_seconds(measured.chunks),
        dense_steps=_by_rows(measured.dense, "steps"),
        dense_chunks=_by_rows(measured.dense, "chunks"),
        provenance={
            **provenance,
            "documents": len(whole) or max((q.documents for q in core.values()), default=0),
            "every_action_on_each": bool(whole),
            "copying": gate.text if gate is not None else "not asked",
            "kl_is": "mean of continuation and copying"
            if copied
            else "continuation alone: the model cannot copy",
            "points": {str(a): q.to_record() for a, q in core.items()},
            "layers": {str(a): q.to_record() for a, q in checked.items() if a in grid.by_layer},
            "assumptions": _assumptions(measured, grid, checked, weights, shape, quality),
            "time_spread": _time_spread(measured.steps),
            "chunk_time_spread": _time_spread(measured.chunks),
            "own_work_spread": spread,
            "unmeasured": dict(measured.unmeasured),
            "untimed": dict(measured.untimed),
        },
    )


def whole_documents(measured: Measured, grid: Grid) -> set[str]:
    """Documents on which every action of the core was measured, those left aside that are refused everywhere."""
    found = [measured.on(a) for a in grid.core if measured.on(a)]
    return set.intersection(*found) if found else set()


# -- figures ----------------------------------------------------------------------------------------------------------


def _codecs(grid: Grid, core: Mapping[Action, Quality], measured: Measured) -> Iterator[CodecFigure]:
    for codec in grid.codecs:
        if codec in core:
            found = core[codec]
            yield CodecFigure(
                codec,
                _short(found.kl),
                _short(found.p95),
                times_of(codec, measured.steps),
                times_of(codec, measured.chunks),
                _parts(found),
            )


def _parts(one: Quality) -> Parts:
    """What ``kl`` is the mean of."""
    return _short(one.continuation), _short(one.copying)


def times_of(codec: Quantize, records: Iterable[Record]) -> tuple[tuple[int, float], ...]:
    """(rows, ratio to the dense cache) of a codec."""
    return tuple(
        (int(r["context"]), _short(r["ratio"]))
        for r in records
        if r["action"] == str(codec) and r["state"] == "real"
    )


def _evictors(grid: Grid, core: Mapping[Action, Quality], settings: Settings) -> tuple[EvictionFigure, ...]:
    found: dict[str, dict[float, Quality]] = {}
    for one in grid.evictions:
        if one in core and one.ratio is not None:
            found.setdefault(one.scorer, {})[one.ratio] = core[one]
    return tuple(
        EvictionFigure(
            scorer,
            settings.recent,
            tuple((share, _short(one.kl), _short(one.p95)) for share, one in sorted(points.items())),
            tuple(_parts(one) for _, one in sorted(points.items())),
        )
        for scorer, points in found.items()
    )


def _sensitivity(grid: Grid, shape: ModelShape, checked: Mapping[Action, Quality]) -> tuple[float, ...]:
    """Mean 1 over the layers that were measured; 1 for those that were not; empty if not all groups were."""
    if not grid.groups or any(plan not in checked for plan in grid.by_layer):
        return ()
    each: dict[int, float] = {}
    for plan, group in zip(grid.by_layer, grid.groups, strict=True):
        each |= dict.fromkeys(group, checked[plan].kl / len(group))
    mean = statistics.fmean(each.values())
    if mean <= 0.0:
        return ()
    return tuple(each.get(i, mean) / mean for i in range(shape.entries))


# -- times ------------------------------------------------------------------------------------------------------------


def _own_work(measured: Measured) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Seconds per byte of the rows that an action found: median over actions, and quartiles."""
    live = {r["document"]: r["dense"]["live"] for r in measured.quality if r["kind"] == "document"}
    families: dict[str, list[float]] = {}
    for record in measured.quality:
        family = record["action"].partition(":")[0] if record["kind"] == "subject" else ""
        whole = family in ("evict", "quant") and "+" not in record["action"]
        if whole and record["state"] == "real":
            families.setdefault(family, []).append(record["take_seconds"] / live[record["document"]])
    for record in measured.steps:
        if record["action"].startswith("offload") and record["state"] == "real":
            per_byte = record["take_seconds"] / record["dense_live"]
            families.setdefault("offload", []).append(per_byte)
            # Rows are read back in every step: what that adds to one.
            extra = (record["ratio"] - 1.0) * record["dense_seconds"] / record["dense_live"]
            families.setdefault("offload_step", []).append(max(0.0, extra))
    middle, spread = {}, {}
    for family, values in families.items():
        median, low, high = median_and_quartiles(values)
        middle[family], spread[family] = _short(median), [_short(low), _short(high)]
    return middle, spread


def _by_rows(dense: Record | None, which: str) -> tuple[tuple[int, float], ...]:
    """(rows, seconds per token), ascending; none where they were not measured."""
    if dense is None or dense["state"] != "real":
        return ()
    return tuple(sorted((int(rows), float(_short(seconds))) for rows, seconds in dense[which].items()))


def _dense_seconds(records: Iterable[Record]) -> float | None:
    """Seconds per token of the dense cache's steps or chunks."""
    real = [r for r in records if r["state"] == "real"]
    if not real:
        return None
    rows = min({int(r["context"]) for r in real}, key=lambda n: abs(n - OWN_WORK_ROWS))
    seconds = statistics.median(float(r["dense_seconds"]) for r in real if r["context"] == rows)
    return float(_short(seconds))


def _time_spread(records: Iterable[Record]) -> dict[str, dict[str, list[float]]]:
    """Action → rows → lower and upper quartile of its paired ratios."""
    found: dict[str, dict[str, list[float]]] = {}
    for r in records:
        if r["state"] == "real":
            found.setdefault(r["action"], {})[str(r["context"])] = [_short(r["low"]), _short(r["high"])]
    return found


# -- assumptions ------------------------------------------------------------------------------------------------------


def _assumptions(
    measured: Measured,
    grid: Grid,
    checked: Mapping[Action, Quality],
    weights: Sequence[float],
    shape: ModelShape,
    quality: _QualityOf,
) -> dict[str, Any]:
    """What is predicted from single figures beside what was measured, on the same documents."""
    composites = []
    for one in grid.composites:
        if one in checked:
            parts = [quality(part, measured.on(one)) for part in one.parts]
            if all(p is not None and p.documents == checked[one].documents for p in parts):
                composites.append(
                    _compared(str(one), math.fsum(p.kl for p in parts if p is not None), checked[one])
                )
    plans = []
    for plan in grid.mixed:
        if plan in checked and weights:
            among = partial(quality, among=measured.on(plan))
            predicted = _of_plan(plan, weights, shape, among)
            even = _of_plan(plan, [1.0] * len(weights), shape, among)
            if predicted is not None and even is not None:
                plans.append(_compared(str(plan), predicted, checked[plan], all_alike=_short(even)))
    return {
        "damages_add_up": composites,
        "layers_add_up": plans,
        "sum_of_layers": _sum_of_layers(measured, grid, checked, quality),
    }


def _compared(action: str, predicted: float, found: Quality, **more: Any) -> dict[str, Any]:
    error = predicted / found.kl - 1.0 if found.kl > 0 else None
    return {
        "action": action,
        "predicted": _short(predicted),
        "measured": _short(found.kl),
        "relative_error": None if error is None else _short(error),
        **more,
        "documents": found.documents,
    }


def _of_plan(
    plan: Plan, weights: Sequence[float], shape: ModelShape, quality: Callable[[Action], Quality | None]
) -> float | None:
    """``Σ wₗ·KL(codecₗ)/L`` over the layers that hold rows."""
    terms = []
    for layer in shape.layers:
        action = plan.for_layer(layer)
        if isinstance(action, Evict | Plan):
            return None
        found = quality(action)
        if found is None:
            return None
        terms.append(weights[layer] * found.kl)
    return math.fsum(terms) / len(terms)


def _sum_of_layers(
    measured: Measured,
    grid: Grid,
    checked: Mapping[Action, Quality],
    quality: _QualityOf,
) -> dict[str, Any] | None:
    """The damages of single layers, added, beside that of all layers at once."""
    codec = grid.layer_codec
    if codec is None or any(plan not in checked for plan in grid.by_layer):
        return None
    among = set.intersection(*(measured.on(plan) for plan in grid.by_layer))
    parts = [quality(plan, among) for plan in grid.by_layer]
    whole = quality(codec, among)
    if whole is None or any(p is None for p in parts):
        return None
    return _compared(str(codec), math.fsum(p.kl for p in parts if p is not None), whole)


def _short(value: Any) -> Any:
    """Four significant digits: more are not known, and files stay small."""
    return None if value is None else float(f"{value:.4g}")
