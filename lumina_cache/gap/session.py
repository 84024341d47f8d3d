"""From a user's own audit log to figures: what was held, what was decided, and what the backend cost. Pure.

Bytes and actions of a log are real: they were observed. Scores are simulated: estimates made before anything ran. Each
figure says which it is, and none shows both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ..audit import LogContents
from ..budget import format_bytes
from .decisions import DecisionGap, EstimatedScore, GapReport
from .figure import Axis, Figure, Section, Series, View, brief, number, spelled
from .figures import refusal_view

__all__ = ["cost", "session_sections"]

_MB = 1e6

#: Decisions whose candidates are drawn: the ones with the widest gaps, and the last.
MOST_DECISIONS = 6

#: Fields of a snapshot of the machine that are drawn where they are known: name, axis, factor.
_MACHINE = (
    ("process_footprint_bytes", "this process, MB", _MB),
    ("memory_available_bytes", "memory available, MB", _MB),
    ("headroom_bytes", "headroom before pressure, MB", _MB),
    ("swap_used_bytes", "swap used, MB", _MB),
    ("gpu_utilization_percent", "GPU busy, %", 1.0),
    ("gpu_in_use_bytes", "GPU memory in use, MB", _MB),
    ("battery_percent", "battery, %", 1.0),
)

_Record = Mapping[str, Any]


def session_sections(
    name: str, contents: LogContents, report: GapReport, index: int = 1
) -> tuple[Section, ...]:
    """What was observed, what was weighed, and what was refused, each in a section of its own execution state."""
    records = contents.records
    start = min((float(r["time"]) for r in records), default=0.0)
    key = f"log-{index}"
    real = [f for f in (_memory(key, contents, start), _machine(key, contents, start)) if f is not None]
    simulated = [
        f
        for f in (
            _gaps(key, report),
            _sides(key, report),
            _candidates(key, contents, report),
            _causes(key, report),
        )
        if f is not None
    ]
    facts = tuple(_facts(name, contents, start))
    found = [
        Section(
            f"{key}-real", f"What happened in {name}", "real", tuple(_happened(contents)), facts, tuple(real)
        )
    ]
    found.append(
        Section(
            f"{key}-simulated",
            f"What the backend cost in {name}",
            "simulated",
            tuple(cost(report)),
            (("scores are estimates, from", spelled(_sources(report)) or "nothing: no decision was taken"),),
            tuple(simulated),
            report.problems,
        )
    )
    if report.refusals:
        examples = _examples(contents)
        reasons = [(r, n, "", examples.get(r, "")) for r, n in report.refusals]
        figure = Figure(
            f"{key}-refusals-reasons", "Refusals by reason", "backend_infeasible", (refusal_view(reasons),)
        )
        found.append(
            Section(f"{key}-refusals", f"What was refused in {name}", "backend_infeasible", (), (), (figure,))
        )
    return tuple(found)


def _facts(name: str, contents: LogContents, start: float) -> Iterator[tuple[str, str]]:
    yield "log", f"{name}, {len(contents.records)} records, {len(contents.problems)} lines left out"
    if contents.records:
        yield "began", datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds")
    for session in contents.of("session.started"):
        model, profile = session["model"], session["profile"] or {}
        machine = session["telemetry"] or {}
        yield (
            f"cache {session['cache']}",
            f"{model['model_type']} ({model['fingerprint']}), policy {session['policy']}",
        )
        yield "device", f"{profile.get('device', 'unknown')}, {machine.get('chip') or 'chip unknown'}"
        yield (
            "versions",
            f"MLX {model['mlx']}, mlx-lm {model['mlx_lm']}, lumina_cache {session['lumina_cache']}",
        )
        budget = session["budget"]
        yield "budget", "none" if budget is None else format_bytes(budget)


def _happened(contents: LogContents) -> Iterator[str]:
    applied, decisions = contents.of("action.applied"), contents.of("decision")
    refused = contents.of("action.refused")
    yield (
        f"{_several(len(decisions), 'decision')}, {_several(len(applied), 'action')} carried out, "
        f"{len(refused)} refused when {'it was' if len(refused) == 1 else 'they were'} to be carried out."
    )
    if applied:
        saved = sum(a["before"]["nbytes_allocated"] - a["after"]["nbytes_allocated"] for a in applied)
        seconds = sum(a["seconds"] for a in applied)
        evicted = sum(a["rows_evicted"] for a in applied)
        yield (
            f"Together they gave back {format_bytes(saved)} in {number(seconds)} s"
            + (f" and evicted {evicted:,} rows per layer." if evicted else " and evicted no row.")
        )


def cost(report: GapReport) -> Iterator[str]:
    """What the backend cost over a log, in sentences."""
    if not report.gaps:
        yield "No decision was taken: the budget was never in danger, or there was none. So there is no gap to report."
        return
    backend, total = report.mean_backend or 0.0, report.mean or 0.0
    worst = max(report.gaps, key=lambda g: g.backend)
    over = f"Over {_several(len(report.gaps), 'decision')} the limits of the backend cost "
    missing = f"code that lumina_cache does not have yet cost {number(total - backend)}"
    if worst.backend > 0:
        yield (
            f"{over}{number(backend)} points on average, at most {number(worst.backend)} (decision {worst.decision}); "
            f"{missing}."
        )
    else:
        yield f"{over}nothing; {missing}."
    lost = [g.controller for g in report.gaps if g.controller is not None]
    if lost:
        yield f"The policy's choices were {number(sum(lost) / len(lost))} points from the best feasible ones on average."
    yield "One point is about the damage of plain 4-bit rows, or a decode step that takes 10 % longer."


def _sources(report: GapReport) -> list[str]:
    sides = [side for gap in report.gaps for side in (gap.best_all, gap.best_feasible, gap.chosen)]
    return list(dict.fromkeys(one.source for one in sides if one is not None))


def _examples(contents: LogContents) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in contents.of("decision"):
        for candidate in record["candidates"]:
            for reason in candidate["reasons"]:
                found.setdefault(
                    str(reason.get("capability") or reason.get("code")),
                    f"{candidate['action']}: {reason['text']}",
                )
    return found


# -- what happened ------------------------------------------------------------------------------------------------------


def _memory(key: str, contents: LogContents, start: float) -> Figure | None:
    """Bytes allocated and live over time, from steps and from what was observed around actions."""
    series: list[Series] = []
    rows: list[tuple[str, ...]] = []
    caches = list(dict.fromkeys(r["cache"] for r in contents.records))
    for i, cache in enumerate(caches):
        points: list[tuple[float, int, int | None, str]] = []
        for r in contents.records:
            if r["cache"] != cache:
                continue
            at = float(r["time"]) - start
            if r["event"] == "step":
                what = f"step {r['step']}, {r['phase']}, {r['rows']:,} rows"
                points.append((at, r["nbytes_allocated"], r["nbytes_live"], what))
            elif r["event"] == "decision":
                what = f"decision {r['decision']}: {r['chosen']}"
                points.append((at, r["state"]["nbytes_allocated"], None, what))
            elif r["event"] == "action.applied":
                for when in ("before", "after"):
                    what = f"{when} {r['action']} ({r['origin']})"
                    points.append((at, r[when]["nbytes_allocated"], r[when]["nbytes_live"], what))
        if not points:
            continue
        named = f" of {cache}" if len(caches) > 1 else ""
        live = [p for p in points if p[2] is not None]
        series += [
            Series(
                f"allocated{named}",
                "line",
                tuple(p[0] for p in points),
                tuple(p[1] / _MB for p in points),
                labels=tuple(f"{p[3]}: {format_bytes(p[1])} allocated" for p in points),
                colour=2 * i,
            ),
            Series(
                f"live{named}",
                "line",
                tuple(p[0] for p in live),
                tuple((p[2] or 0) / _MB for p in live),
                labels=tuple(f"{p[3]}: {format_bytes(p[2] or 0)} live" for p in live),
                colour=2 * i + 1,
                dashed=True,
            ),
        ]
        rows += [
            (number(p[0]), cache, p[3], format_bytes(p[1]), "–" if p[2] is None else format_bytes(p[2]))
            for p in points
        ]
    if not series:
        return None
    budgets = sorted({s["budget"] for s in contents.of("session.started") if s["budget"] is not None})
    most = max(y for s in series for y in s.y if y is not None) * _MB
    against = (
        f", {number(100 * most / budgets[0])} % of the budget of {format_bytes(budgets[0])}"
        if budgets
        else ""
    )
    view = View(
        "",
        Axis("seconds since the log began"),
        Axis("MB"),
        tuple(series),
        f"The most that the layers were seen to take is {format_bytes(round(most))}{against}; steps are sampled, so "
        "what lies between two points was not seen.",
        ("seconds", "cache", "event", "allocated", "live"),
        tuple(rows),
        lines=tuple((b / _MB, "budget") for b in budgets),
    )
    return Figure(f"{key}-memory", "Memory and actions over time", "real", (view,))


def _snapshots(contents: LogContents) -> Iterator[tuple[float, _Record]]:
    for r in contents.records:
        found = {
            "session.started": r.get("telemetry"),
            "decision": r.get("state", {}).get("machine") if r["event"] == "decision" else None,
            "telemetry": r.get("snapshot"),
        }.get(r["event"])
        if found:
            yield float(r["time"]), found


def _machine(key: str, contents: LogContents, start: float) -> Figure | None:
    """What is known of the machine over time, a view per quantity."""
    snapshots = list(_snapshots(contents))
    views = []
    levels = list(dict.fromkeys(s["pressure_level"] for _, s in snapshots if s.get("pressure_level")))
    if levels:
        order = {name: i for i, name in enumerate(("normal", "warning", "critical"))}
        order |= {name: len(order) + i for i, name in enumerate(n for n in levels if n not in order)}
        known = [(t - start, s["pressure_level"]) for t, s in snapshots if s.get("pressure_level")]
        raised = sum(order[level] > 0 for _, level in known)
        views.append(
            View(
                "pressure",
                Axis("seconds since the log began"),
                Axis("memory pressure", ticks=tuple((float(i), n) for n, i in order.items())),
                (
                    Series(
                        "pressure",
                        "steps",
                        tuple(t for t, _ in known),
                        tuple(float(order[level]) for _, level in known),
                        labels=tuple(f"{number(t)} s: {level}" for t, level in known),
                    ),
                ),
                f"{raised} of {len(known)} readings of the memory's pressure were above normal.",
                ("seconds", "pressure"),
                tuple((number(t), level) for t, level in known),
            )
        )
    for field, axis, factor in _MACHINE:
        values = [(t - start, float(s[field])) for t, s in snapshots if s.get(field) is not None]
        if not values:
            continue
        low, high = min(v for _, v in values) / factor, max(v for _, v in values) / factor
        views.append(
            View(
                axis.split(",")[0],
                Axis("seconds since the log began"),
                Axis(axis),
                (
                    Series(
                        axis.split(",")[0],
                        "line",
                        tuple(t for t, _ in values),
                        tuple(v / factor for _, v in values),
                        labels=tuple(f"{number(t)} s: {axis} {number(v / factor)}" for t, v in values),
                    ),
                ),
                f"{axis}: between {number(low)} and {number(high)} in {_several(len(values), 'reading')}.",
                ("seconds", axis),
                tuple((number(t), number(v / factor, 5)) for t, v in values),
            )
        )
    return (
        Figure(f"{key}-machine", "The machine over time", "real", tuple(views), "quantity") if views else None
    )


# -- what it cost -------------------------------------------------------------------------------------------------------


def _label(gap: DecisionGap, several: bool) -> str:
    return f"{gap.decision}" + (f" ({gap.cache})" if several else "")


def _gaps(key: str, report: GapReport) -> Figure | None:
    if not report.gaps:
        return None
    several = len({g.cache for g in report.gaps}) > 1
    names = tuple(_label(g, several) for g in report.gaps)
    kinds: list[tuple[str, list[float | None], int]] = [
        ("backend", [g.backend for g in report.gaps], 3),
        ("code not there yet", [g.library for g in report.gaps], 1),
        ("controller", [g.controller for g in report.gaps], 2),
    ]
    series = tuple(
        Series(
            name,
            "bars",
            names,
            tuple(values),
            labels=tuple(
                f"decision {n}, {name}: {number(v)} points" for n, v in zip(names, values, strict=True)
            ),
            colour=colour,
        )
        for name, values, colour in kinds
    )
    worst = max(report.gaps, key=lambda g: g.gap)
    view = View(
        "",
        Axis("decision", "category"),
        Axis("points"),
        series,
        f"The widest gap is that of decision {worst.decision}, {number(worst.gap)} points: "
        + (
            f"{brief(worst.best_all.action)} would be best and cannot be had"
            + (f", because {worst.causes[0]}" if worst.causes else "")
            if worst.gap > 0
            else "what would be best could be carried out every time"
        )
        + ".",
        ("decision", "phase", "rows", "limit", "backend", "code not there yet", "controller", "because"),
        tuple(
            (
                n,
                g.phase or "before the first step",
                f"{g.rows:,}",
                format_bytes(g.limit),
                number(g.backend),
                number(g.library),
                number(g.controller),
                "; ".join(g.causes),
            )
            for n, g in zip(names, report.gaps, strict=True)
        ),
    )
    return Figure(f"{key}-gap", "The gap of each decision", "simulated", (view,))


def _sides(key: str, report: GapReport) -> Figure | None:
    if not report.gaps:
        return None
    several = len({g.cache for g in report.gaps}) > 1
    names = tuple(_label(g, several) for g in report.gaps)
    kinds: list[tuple[str, list[EstimatedScore | None], int]] = [
        ("best of A", [g.best_all for g in report.gaps], 3),
        ("best of F", [g.best_feasible for g in report.gaps], 1),
        ("policy's choice", [g.chosen for g in report.gaps], 2),
    ]
    series = tuple(
        Series(
            name,
            "points" if len(names) == 1 else "line",
            names,
            tuple(None if s is None else s.score for s in sides),
            labels=tuple(
                f"decision {n}, {name}: "
                + ("no score" if s is None else f"{s.action}, {number(s.score)} points")
                for n, s in zip(names, sides, strict=True)
            ),
            colour=colour,
            dashed=name == "best of A",
        )
        for name, sides, colour in kinds
    )
    same = sum(g.chosen is not None and g.chosen.action == g.best_feasible.action for g in report.gaps)
    view = View(
        "",
        Axis("decision", "category"),
        Axis("Score, points; the full cache is 0"),
        series,
        f"The policy chose the best feasible action in {same} of {_several(len(report.gaps), 'decision')}.",
        ("decision", *(name for name, _, _ in kinds)),
        tuple(
            (n, *("–" if s is None else f"{s.action} ({number(s.score)})" for s in sides))
            for n, *sides in zip(names, *(sides for _, sides, _ in kinds), strict=True)
        ),
    )
    return Figure(f"{key}-sides", "Best of A, best of F, and the choice", "simulated", (view,))


def _candidates(key: str, contents: LogContents, report: GapReport) -> Figure | None:
    """Bytes against KL of all candidates of a decision, as they were estimated."""
    wanted = sorted(report.gaps, key=lambda g: -g.gap)[: MOST_DECISIONS - 1] + list(report.gaps[-1:])
    keys = {(g.cache, g.decision) for g in wanted}
    views = []
    for record in contents.of("decision"):
        if (record["cache"], record["decision"]) in keys:
            view = _candidates_view(record)
            if view is not None:
                views.append(view)
    if not views:
        return None
    return Figure(
        f"{key}-candidates", "Bytes against damage, as estimated", "simulated", tuple(views), "decision"
    )


def _candidates_view(record: _Record) -> View | None:
    known = [
        c
        for c in record["candidates"]
        if c["inputs"].get("kl") is not None and c["inputs"].get("nbytes_next") is not None
    ]
    shown = [c for c in known if c["inputs"]["kl"] > 0]
    if not shown:
        return None
    limit = record["state"]["limit"]["nbytes"]
    groups = [
        ("feasible (F)", [c for c in shown if c["feasible"]], 1, "points"),
        ("refused (A without F)", [c for c in shown if not c["feasible"]], 7, "points"),
        ("front of A", _front(shown), 3, "steps"),
        ("front of F", _front([c for c in shown if c["feasible"]]), 1, "steps"),
        ("chosen", [c for c in shown if c["action"] == record["chosen"]], 2, "points"),
    ]
    series = tuple(
        Series(
            name,
            kind,
            tuple(c["inputs"]["nbytes_next"] / _MB for c in some),
            tuple(c["inputs"]["kl"] for c in some),
            labels=tuple(_candidate_label(c) for c in some),
            colour=colour,
            dashed=name == "front of A",
        )
        for name, some, colour, kind in groups
        if some
    )
    fitting = [c for c in shown if c["inputs"]["nbytes_next"] <= limit]
    fits = sum(bool(c["feasible"]) for c in fitting)
    least = min(fitting, key=lambda c: c["inputs"]["kl"], default=None)
    told = "" if least is None else f"; the least damaging of them is {brief(least['action'])}"
    return View(
        f"decision {record['decision']} ({record['cache']})",
        Axis("bytes after the next step, MB"),
        Axis("estimated KL, nats per token", "log"),
        series,
        f"{len(fitting)} of {len(shown)} candidates with an estimated damage would leave at most the limit of "
        f"{format_bytes(limit)}, and {fits} of these can be carried out{told}.",
        ("action", "feasible", "bytes", "KL, nats per token", "Score", "why not"),
        tuple(
            (
                c["action"],
                "yes" if c["feasible"] else "no",
                format_bytes(c["inputs"]["nbytes_next"]),
                number(c["inputs"]["kl"]),
                number(c["score"]["total"]),
                "; ".join(r["text"] for r in c["reasons"]),
            )
            for c in sorted(known, key=lambda c: c["inputs"]["nbytes_next"])
        ),
        uprights=((limit / _MB, "limit"),),
    )


def _candidate_label(c: _Record) -> str:
    why = "" if c["feasible"] else f", refused: {c['reasons'][0]['text']}"
    return f"{c['action']}: {format_bytes(c['inputs']['nbytes_next'])}, {number(c['inputs']['kl'])} nats per token{why}"


def _front(candidates: Iterable[_Record]) -> list[_Record]:
    """Those that do less damage than all that take as many bytes or fewer."""
    best = float("inf")
    found = []
    for c in sorted(candidates, key=lambda c: (c["inputs"]["nbytes_next"], c["inputs"]["kl"])):
        if c["inputs"]["kl"] < best:
            best = c["inputs"]["kl"]
            found.append(c)
    return found


def _causes(key: str, report: GapReport) -> Figure | None:
    gains: dict[str, list[float]] = {}
    for gap in report.gaps:
        for capability, gain in gap.relaxations:
            gains.setdefault(capability, []).append(gain)
    ranked: Sequence[tuple[str, float, float, int]] = sorted(
        ((name, sum(g) / len(report.gaps), max(g), len(g)) for name, g in gains.items()),
        key=lambda r: (-r[1], r[0]),
    )
    if not ranked:
        return None
    shown = ranked[:12]
    first = ranked[0]
    view = View(
        "",
        Axis("", "category"),
        Axis("points gained by it alone, mean over decisions"),
        (
            Series(
                "alone",
                "bars",
                tuple(r[0] for r in shown),
                tuple(r[1] for r in shown),
                labels=tuple(
                    f"{r[0]} alone: {number(r[1])} points on average, at most {number(r[2])}" for r in shown
                ),
                colour=3,
            ),
        ),
        (
            f"Of the capabilities that this backend lacks, {first[0]} alone would have gained most, {number(first[1])} "
            f"points on average over {_several(len(report.gaps), 'decision')}."
            if first[1] > 0
            else "No single capability that this backend lacks would have changed a decision for the better."
        ),
        ("capability", "mean, points", "most, points", "decisions in which an action lacked it alone"),
        tuple((r[0], number(r[1]), number(r[2]), str(r[3])) for r in ranked),
        horizontal=True,
    )
    return Figure(f"{key}-causes", "Causes of the gap", "simulated", (view,))


def _several(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")
