"""Tables of an analysis for a Markdown page, so that no figure in the documents is typed.

    python -m lumina_cache.gap.markdown PAGE STORE…

puts them between the two marks of the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import AnalysisError, PageError
from ..pages import update_page
from .analysis import Analysis, StratumAnalysis, analyse
from .resample import Estimate

__all__ = ["PART", "as_markdown"]

#: The part of the page that is made.
PART = "campaign"

#: Pairs of sides that are shown, by execution state.
PAIRS = {
    "real": (("native", "cache"), ("native", "hook"), ("cache", "hook")),
    "simulated": (("native", "all"), ("cache", "all"), ("hook", "all"), ("all", "ceiling")),
}


def as_markdown(analysis: Analysis) -> str:
    """Tables of every stratum: real ones, then simulated ones, never one with both."""
    parts: list[str] = []
    for state in (analysis.real, analysis.simulated):
        for one in state.strata if state is not None else ():
            parts += [
                "\n".join(lines) for lines in (_head(one), _bests(one), _gaps(one), _causes(one)) if lines
            ]
    return "\n\n".join(parts)


def _head(one: StratumAnalysis) -> list[str]:
    s = one.stratum
    counts = ", ".join(f"{n} {domain}" for domain, n in sorted(one.domains.items()))
    lines = [
        f"**{one.execution_state}**: {s.model_name}, {s.context:,} tokens held, {s.horizon} scored, "
        f"{len(one.documents)} documents ({counts}), {len(one.points)} actions; {s.device}, mlx {s.mlx}, mlx-lm "
        f"{s.mlx_lm}. 95 % intervals in brackets.",
        "",
    ]
    for goal in one.goals:
        share = goal.closed.share
        closes = goal.closed.why if share is None else f"closes {_of(share, percent=True)}"
        verdict = {True: "met", False: "missed", None: "not known"}[goal.met]
        lines.append(f"- {goal.text}: **{verdict}**; {closes}.")
    return lines


def _bests(one: StratumAnalysis) -> list[str]:
    lines = [
        "KL of what each side chooses, in nats per token:",
        "",
        f"| bytes | {' | '.join(one.sides)} |",
        f"| ---: | {' | '.join('---' for _ in one.sides)} |",
    ]
    for budget in dict.fromkeys(b.budget for b in one.bests):
        found = {b.side: b for b in one.bests if b.budget == budget}
        lines.append(
            f"| {_percent(budget)} | "
            + " | ".join(
                "–" if s not in found or found[s].kl is None else _of(found[s].kl) for s in one.sides
            )
            + " |"
        )
    return lines


def _gaps(one: StratumAnalysis) -> list[str]:
    lines = [
        "| bytes | gap | points | nats per token, at equal bytes | times the bytes, at equal quality |",
        "| ---: | --- | --- | --- | --- |",
    ]
    for gap in one.gaps:
        if (gap.low, gap.high) in PAIRS[one.execution_state]:
            cells = (_of(gap.points), _of(gap.nats), _of(gap.bytes_times))
            lines.append(f"| {_percent(gap.budget)} | {gap.low} → {gap.high} | {' | '.join(cells)} |")
    return lines


def _causes(one: StratumAnalysis) -> list[str]:
    rows = [
        f"| {_percent(a.budget)} | {a.base} | {c.name} | {_of(c.alone)} | {_of(c.in_order)} | {_of(c.shapley)} |"
        for a in one.attributions
        if a.documents == "all"
        for c in sorted(a.capabilities, key=lambda c: -c.shapley.value)
        if c.shapley.value or c.alone.value
    ]
    if not rows:
        return []
    return [
        "Causes of the gap to all actions, in points:",
        "",
        "| bytes | rung | missing capability | alone | in the best order | Shapley |",
        "| ---: | --- | --- | --- | --- | --- |",
        *rows,
    ]


def _of(one: Estimate | None, *, percent: bool = False) -> str:
    if one is None:
        return "–"
    scale, unit = (100.0, " %") if percent else (1.0, "")
    # Adding 0 turns a negative zero into zero.
    value = f"{one.value * scale + 0.0:.3g}{unit}"
    if one.low is None or one.high is None:
        return value
    return f"{value} [{one.low * scale + 0.0:.3g}, {one.high * scale + 0.0:.3g}]"


def _percent(share: float) -> str:
    return f"{share * 100:g} %"


def _main(arguments: list[str]) -> Iterator[str]:
    if len(arguments) < 2:
        raise AnalysisError(
            "give a page and at least one store: python -m lumina_cache.gap.markdown PAGE STORE…"
        )
    page = Path(arguments[0])
    update_page(page, PART, as_markdown(analyse(arguments[1:])))
    yield f"tables of {', '.join(arguments[1:])} are in {page}"


if __name__ == "__main__":
    try:
        for line in _main(sys.argv[1:]):
            print(line)
    except (AnalysisError, PageError) as error:
        sys.exit(f"lumina-cache: {error}")
