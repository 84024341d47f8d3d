"""The gap of stores and of logs in words, as JSON, as a page and as pictures: what ``lumina-cache gap`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..audit import LogContents, read_log
from ..brief import brief
from ..budget import format_bytes
from ..errors import AnalysisError
from .decisions import DecisionGap, GapReport, gap_of_log
from .figure import Section, percent, spelled, with_interval

if TYPE_CHECKING:
    from .analysis import Analysis, StateAnalysis, StratumAnalysis
    from .resample import Estimate

__all__ = ["analysis_as_text", "as_json", "as_text", "gap_command", "report_page"]

#: Most lines of a kind that the text shows; the page and JSON have all.
MOST_LINES = 12

#: Capabilities that the text names for a rung.
MOST_CAUSES = 4

#: Longest text of a manifest that the page shows.
LONGEST_LEAF = 300


def gap_command(
    paths: Sequence[Path],
    *,
    html: Path | None = None,
    plots: Path | None = None,
    as_json_text: bool = False,
    command: str = "",
) -> str:
    """Read stores of observations and audit logs, write a page and pictures if asked, and give text or JSON.

    JSON is the analysis for stores, the report of a log for a single log, and ``{"analysis": …, "logs": {path: …}}``
    for both or several logs.

    Args:
        paths: folders are stores, which are analysed as one; files are audit logs, each for itself.
        html: where the page goes.
        plots: folder for PNG and SVG.
        command: what was called, for the page.

    Raises:
        AnalysisError: a store cannot be read, holds nothing, or a file cannot be written.
        AnalysisUnavailableError: a package of the extra ``analysis`` is missing.
        LogFormatError: a log cannot be read.
    """
    stores = [path for path in paths if path.is_dir()]
    logs = {str(path): read_log(path) for path in paths if not path.is_dir()}
    reports = {path: gap_of_log(contents) for path, contents in logs.items()}
    analysis = None
    if stores:
        from .analysis import analyse

        analysis = analyse([str(s) for s in stores])
    written: list[str] = []
    if html is not None or plots is not None:
        sections = _sections(analysis, logs, reports)
        if html is not None:
            _write_page(html, report_page(sections, analysis, logs, reports, command))
            written.append(f"page  {html}")
        if plots is not None:
            from .plots import write_plots

            written.append(f"{len(write_plots(sections, plots))} pictures in {plots}")
    if as_json_text:
        return _json_of(analysis, reports)
    texts = [] if analysis is None else [analysis_as_text(analysis)]
    for path, report in reports.items():
        texts.append((f"{path}\n" if len(paths) > 1 else "") + as_text(report))
    return "\n\n".join([*texts, *(["\n".join(written)] if written else [])])


def _json_of(analysis: Analysis | None, reports: dict[str, GapReport]) -> str:
    if analysis is not None and not reports:
        return json.dumps(analysis.to_record())
    if analysis is None and len(reports) == 1:
        return as_json(next(iter(reports.values())))
    record = None if analysis is None else analysis.to_record()
    return json.dumps({"analysis": record, "logs": {p: json.loads(as_json(r)) for p, r in reports.items()}})


def _sections(
    analysis: Analysis | None, logs: dict[str, LogContents], reports: dict[str, GapReport]
) -> tuple[Section, ...]:
    # The figures of stores need what the analysis needs; those of a log need nothing beyond the library.
    found: list[Section] = []
    if analysis is not None:
        from .figures import sections

        found += sections(analysis)
    for i, (path, contents) in enumerate(logs.items(), 1):
        from .session import session_sections

        found += session_sections(Path(path).name, contents, reports[path], i)
    return tuple(found)


def report_page(
    sections: Sequence[Section],
    analysis: Analysis | None,
    logs: dict[str, LogContents],
    reports: dict[str, GapReport],
    command: str,
) -> str:
    """The HTML page of what was read."""
    from .page import page

    facts = [("command", command)] if command else []
    facts += [
        ("made", datetime.now(UTC).isoformat(timespec="seconds")),
        ("made by", f"lumina_cache {__version__}"),
    ]
    problems: list[str] = []
    lead: list[str] = []
    if analysis is not None:
        facts += _facts(analysis)
        problems += [f"{p.kind}, {p.count}: {p.where}: {p.text}" for p in analysis.problems]
        problems += _failures(analysis)
        lead.append(_counts(analysis))
        lead += [
            f"{section.title} [{section.execution_state}]: {figure.sentence}"
            for section in sections
            for figure in section.figures[:1]
            if figure.key == f"{section.key}-gap"
        ][:MOST_LINES]
        title = "What the backend costs: " + spelled(_models(analysis))
    else:
        title = "What the backend cost in " + spelled(Path(p).name for p in logs)
    for path, contents in logs.items():
        problems += [f"{path}: {p}" for p in contents.problems]
        from .session import cost

        name = f"{Path(path).name} [simulated]: " if len(logs) > 1 or analysis is not None else ""
        lead += [name + sentence for sentence in list(cost(reports[path]))[:1]]
    return page(title, sections, facts, lead=lead, problems=problems)


def _models(analysis: Analysis) -> list[str]:
    states = [s for s in (analysis.real, analysis.simulated) if s is not None]
    return list(dict.fromkeys(one.stratum.model_name for s in states for one in s.strata)) or [
        "refusals only"
    ]


def _counts(analysis: Analysis) -> str:
    parts = [
        f"{s.observations:,} {name} observations in {len(s.strata)} {'stratum' if len(s.strata) == 1 else 'strata'}"
        for name, s in (("real", analysis.real), ("simulated", analysis.simulated))
        if s is not None
    ]
    parts.append(f"{analysis.refused:,} refusals")
    return f"{spelled(parts)}. Real and simulated figures are never put together."


def _facts(analysis: Analysis) -> Iterator[tuple[str, str]]:
    from .store import Store

    s = analysis.settings
    for path in analysis.stores:
        yield "store", path
        yield from ((f"manifest: {name}", text) for name, text in _leaves(Store(path).manifest or {}))
    yield "analysed with", f"{analysis.engine}, {analysis.seconds:.1f} s"
    yield (
        "intervals",
        f"{100 * s.level:g} %, bootstrap over documents within domains, {s.draws:,} draws, seed {s.seed}",
    )
    yield "budgets", ", ".join(percent(b) for b in s.budgets) + f", up to {100 * (s.slack - 1):.0f} % above"


def _leaves(manifest: Mapping[str, Any], above: str = "", depth: int = 3) -> Iterator[tuple[str, str]]:
    """What of a manifest fits on a line: texts, numbers and short lists of them, with the names that lead there."""
    for name, value in manifest.items():
        if name == "units":  # one for each document, for whoever goes on with the campaign
            continue
        if isinstance(value, Mapping) and depth > 1:
            yield from _leaves(value, f"{above}{name}.", depth - 1)
        elif isinstance(value, str | int | float) or (
            isinstance(value, list) and value and all(isinstance(v, str | int | float) for v in value)
        ):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            if len(text) <= LONGEST_LEAF:
                yield f"{above}{name}", text


def _failures(analysis: Analysis) -> Iterator[str]:
    """What a campaign tried and could not measure, as its manifest says."""
    from .store import Store

    for path in analysis.stores:
        units = (Store(path).manifest or {}).get("units", {})
        for name, unit in units.items() if isinstance(units, Mapping) else ():
            for failure in unit.get("failures", ()):
                yield f"failed in {name}: " + ", ".join(f"{k} {v}" for k, v in failure.items())


def _write_page(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise AnalysisError(f"cannot write {path}: {error.strerror or error}") from None


# -- stores in words ----------------------------------------------------------------------------------------------------


def analysis_as_text(analysis: Analysis) -> str:
    """Gaps, goals, causes and refusals; real and simulated under headings of their own."""
    lines = [_counts(analysis)]
    for state in (analysis.real, analysis.simulated):
        if state is not None:
            lines += _state(state)
    if analysis.refusals:
        lines += ["", "Refusals  [execution state: backend_infeasible]"]
        from .figures import reasons

        ranked = reasons(analysis.refusals)
        lines += [f"  {count:>8,}  {name}" for name, count, _, _ in ranked[:MOST_LINES]]
        lines += [f"  and {len(ranked) - MOST_LINES} other reasons"] if len(ranked) > MOST_LINES else []
    lines += [f"left out: {p.kind}, {p.count}: {p.where}: {p.text}" for p in analysis.problems]
    return "\n".join(lines)


def _state(state: StateAnalysis) -> Iterator[str]:
    for one in state.strata:
        yield ""
        yield f"Backend-induced optimality gap  [execution state: {state.execution_state}]"
        yield f"{one.stratum.label}; {len(one.documents)} documents, {one.stratum.source}, {one.stratum.machine}"
        yield from _gap_lines(one)
        yield from _cause_lines(one)
        yield from (f"  note: {note}" for note in one.notes[:MOST_LINES])
    for trend in state.trends:
        told = ", ".join(f"{version} {with_interval(e)}" for version, e in trend.versions if e is not None)
        if told:
            yield f"  trend {trend.low} → {trend.high} at {percent(trend.budget)}: {told}"


def _gap_lines(one: StratumAnalysis) -> Iterator[str]:
    from .figures import goal_lines, pairs

    shown = pairs(one)
    rows: list[tuple[str, ...]] = [("budget", "sides", "points", "nats per token", "times the bytes")]
    for gap in sorted(one.gaps, key=lambda g: -g.budget):
        if (gap.low, gap.high) in shown:
            figures = (gap.points, gap.nats, gap.bytes_times)
            cells = (gap.why, "", "") if gap.why else tuple(_short(e) for e in figures)
            rows.append((percent(gap.budget), f"{gap.low} → {gap.high}", *cells))
    widths = [max(len(row[i]) for row in rows if i < 2 or row[3]) for i in range(5)]
    yield from (
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    yield from (f"  {line}" for line in goal_lines(one))


def _cause_lines(one: StratumAnalysis) -> Iterator[str]:
    """For each rung the causes at the budget with the widest gap."""
    known = [a for a in one.attributions if a.documents == "all" and a.capabilities and a.total is not None]
    for rung in dict.fromkeys(a.base for a in known):
        mine = [a for a in known if a.base == rung]
        widest = max(mine, key=lambda a: a.total.value if a.total is not None else 0.0)
        told = ", ".join(f"{c.name} {_short(c.shapley)}" for c in widest.capabilities[:MOST_CAUSES])
        more = len(widest.capabilities) - MOST_CAUSES
        yield (
            f"  causes, {rung} at {percent(widest.budget)} (Shapley values of {_short(widest.total)} points): {told}"
            + (f" and {more} more" if more > 0 else "")
        )


def _short(one: Estimate | None) -> str:
    """A figure in a column; where intervals are missing a note says so once."""
    return with_interval(one).removesuffix(" (no interval)")


# -- a log in words -----------------------------------------------------------------------------------------------------


def as_json(report: GapReport) -> str:
    """The report of a log as JSON."""
    record: dict[str, Any] = asdict(report)
    return json.dumps({**record, "mean": report.mean, "mean_backend": report.mean_backend})


def as_text(report: GapReport) -> str:
    """The report of a log, decision by decision."""
    if not report.gaps:
        lines = [
            "No decision in this log: the budget was never in danger, or there was none.",
            "Without a decision there is nothing to compare, so there is no gap to report.",
        ]
        return "\n".join(lines + [f"problem: {p}" for p in report.problems])
    lines = [
        "Backend-induced optimality gap  [execution state: simulated]",
        "Scores are estimates made before anything ran: quality and time from a profile's figures "
        f"({_sources(report)}),",
        "bytes from the estimator. One point is about the damage of plain 4-bit rows.",
        "",
    ]
    for gap in report.gaps:
        lines += [*_decision(gap), ""]
    lines.append(
        f"mean gap over {len(report.gaps)} decisions: {report.mean:.3f} points, "
        f"of which the backend {report.mean_backend:.3f}"
    )
    if report.refusals:
        lines.append(
            "candidates kept out of F, by reason: " + ", ".join(f"{r} {n}" for r, n in report.refusals)
        )
    lines += [f"problem: {p}" for p in report.problems]
    return "\n".join(lines)


def _sources(report: GapReport) -> str:
    sides = [side for gap in report.gaps for side in (gap.best_all, gap.best_feasible, gap.chosen)]
    sources = dict.fromkeys(one.source for one in sides if one is not None)
    return "; ".join(one for one in sources if not one.startswith("exact")) or "none was needed"


def _decision(gap: DecisionGap) -> list[str]:
    head = (
        f"decision {gap.decision} (cache {gap.cache}, {gap.phase or 'before the first step'}, {gap.rows} rows, "
        f"limit {format_bytes(gap.limit)})"
    )
    lines = [
        head,
        f"  best of A            {gap.best_all.score:+9.3f}  {brief(str(gap.best_all.action))}",
        f"  best of F            {gap.best_feasible.score:+9.3f}  {brief(str(gap.best_feasible.action))}",
        f"  gap                  {gap.gap:+9.3f}  = backend {gap.backend:+.3f}, "
        f"code that is not there yet {gap.library:+.3f}",
    ]
    if gap.chosen is None:
        lines.append("  chosen                unscored")
    else:
        lines.append(f"  policy's choice      {gap.chosen.score:+9.3f}  {brief(str(gap.chosen.action))}")
    for cause in gap.causes:
        lines.append(f"  because               {cause}")
    for capability, gain in gap.relaxations[:3]:
        lines.append(f"  with {capability} alone: {gain:+.3f} points")
    lines.append(f"  {gap.refused} candidates refused, {gap.unscored} without a figure")
    return lines
