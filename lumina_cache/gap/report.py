"""The gap of a log in words, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..budget import format_bytes
from .decisions import DecisionGap, GapReport

__all__ = ["as_json", "as_text"]


def as_json(report: GapReport) -> str:
    return json.dumps({**asdict(report), "mean": report.mean, "mean_backend": report.mean_backend})


def as_text(report: GapReport) -> str:
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
        f"  best of A            {gap.best_all.score:+9.3f}  {gap.best_all.action}",
        f"  best of F            {gap.best_feasible.score:+9.3f}  {gap.best_feasible.action}",
        f"  gap                  {gap.gap:+9.3f}  = backend {gap.backend:+.3f}, "
        f"code that is not there yet {gap.library:+.3f}",
    ]
    if gap.chosen is None:
        lines.append("  chosen                unscored")
    else:
        lines.append(f"  policy's choice      {gap.chosen.score:+9.3f}  {gap.chosen.action}")
    for cause in gap.causes:
        lines.append(f"  because               {cause}")
    for capability, gain in gap.relaxations[:3]:
        lines.append(f"  with {capability} alone: {gain:+.3f} points")
    lines.append(f"  {gap.refused} candidates refused, {gap.unscored} without a figure")
    return lines
