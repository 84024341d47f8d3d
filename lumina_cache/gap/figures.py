"""From an analysis to figures: gap against budget, bytes against damage, causes, refusals, trends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from .analysis import Analysis, Point, Refusal, StateAnalysis, StratumAnalysis, Trend
from .attribution import Attribution
from .figure import (
    COLOURS,
    Axis,
    Figure,
    Section,
    Series,
    View,
    number,
    percent,
    share_axis,
    spelled,
    with_interval,
)
from .gap import Best, Gap
from .resample import Estimate

__all__ = ["RUNGS", "goal_lines", "pairs", "reasons", "refusal_view", "sections"]

RUNGS = ("native", "cache", "hook", "kernel", "trained")

#: Most bars that a figure of causes shows; the table has all of them.
MOST_BARS = 12

#: Documents that are named beside the figures.
MOST_NAMES = 40

_Row = tuple[str, ...]


def sections(analysis: Analysis) -> tuple[Section, ...]:
    """A section per execution state and stratum, one for refusals and one for trends; never two states in one."""
    found: list[Section] = []
    for state in (analysis.real, analysis.simulated):
        if state is not None:
            found += [_stratum(state, i, one) for i, one in enumerate(state.strata)]
            if state.trends:
                found.append(_trends(state))
    if analysis.refusals:
        found.append(_refusals(analysis))
    return tuple(found)


# -- a stratum ----------------------------------------------------------------------------------------------------------


def _stratum(state: StateAnalysis, index: int, one: StratumAnalysis) -> Section:
    key = f"{one.execution_state}-{index + 1}"
    s = one.stratum
    domains = ", ".join(f"{name} {n}" for name, n in one.domains.items())
    facts = (
        ("model", f"{s.model_name} ({s.model})"),
        ("held when the action is taken", f"{s.context:,} tokens, {s.phase}"),
        ("scored after it", f"{s.horizon:,} tokens"),
        ("documents", f"{len(one.documents)} ({domains}), {one.states} states"),
        ("their names", _names(one.documents)),
        ("device", f"{s.device}, {s.machine}"),
        ("versions", f"MLX {s.mlx}, mlx-lm {s.mlx_lm}, lumina_cache {s.lumina_cache}"),
        ("source", s.source),
        ("actions", f"{len(one.points)} measured everywhere, {len(one.missing)} left out"),
    )
    makers: list[Callable[[str, StratumAnalysis], Figure | None]] = [
        _gap_figure,
        _best_figure,
        _pareto_figure,
        _causes_figure,
        _causes_by_budget,
        _domains_figure,
        _layers_figure,
        _parts_figure,
        _placebo_figure,
        _times_figure,
    ]
    figures = tuple(made for make in makers if (made := make(key, one)) is not None)
    return Section(
        key,
        _title(one, state.strata),
        one.execution_state,
        tuple(goal_lines(one)),
        facts,
        figures,
        one.notes,
    )


def _names(documents: Sequence[str]) -> str:
    more = len(documents) - MOST_NAMES
    return ", ".join(documents[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _title(one: StratumAnalysis, strata: Sequence[StratumAnalysis]) -> str:
    """Model, length and phase, and of everything else what tells this stratum from those with the same of these."""
    s = one.stratum
    alike = [
        o.stratum
        for o in strata
        if (o.stratum.model_name, o.stratum.context, o.stratum.phase) == (s.model_name, s.context, s.phase)
    ]
    names = {
        "mlx_lm": "mlx-lm ",
        "mlx": "MLX ",
        "lumina_cache": "lumina_cache ",
        "device": "",
        "machine": "",
        "source": "",
    }
    names |= {"horizon": "horizon ", "model": "fingerprint "}
    differ = [
        f"{text}{getattr(s, n)}" for n, text in names.items() if len({getattr(o, n) for o in alike}) > 1
    ]
    return ", ".join([s.model_name, f"{s.context:,} tokens", s.phase, *differ])


def goal_lines(one: StratumAnalysis) -> Iterator[str]:
    """How the goals stand, each in a sentence."""
    for goal in one.goals:
        known = goal.closed.share
        if known is None:
            yield f"Goal “{goal.text}”: not known, {goal.closed.why or 'nothing was measured for it'}."
            continue
        verdict = "met" if goal.met else "reached, but not for sure" if goal.reached else "not met"
        interval = (
            "no interval"
            if known.low is None or known.high is None
            else f"{percent(known.low)} to {percent(known.high)}"
        )
        yield f"Goal “{goal.text}”: {verdict}; it closes {percent(known.value)} ({interval}) of it."


def pairs(one: StratumAnalysis) -> list[tuple[str, str]]:
    """Pairs of sides worth a line: neighbours and ends of the staircase; simulated, each rung against what is above."""
    rungs = [s for s in one.sides if s in RUNGS]
    above = [s for s in one.sides if s not in RUNGS]
    if not above:
        ends = [(rungs[0], rungs[-1])] if len(rungs) > 2 else []
        return [*pairwise(rungs), *ends]
    found = [(rung, side) for side in above for rung in rungs]
    return [*found, *([("all", "ceiling")] if {"all", "ceiling"} <= set(above) else [])]


def _dashed(one: StratumAnalysis, low: str, high: str) -> bool:
    """Of two lines in the colour of their lower side, the one that goes further up."""
    above = [b for a, b in pairs(one) if a == low]
    return len(above) > 1 and high == above[-1]


def _gap_figure(key: str, one: StratumAnalysis) -> Figure | None:
    units: list[tuple[str, str, Callable[[Gap], Estimate | None], str]] = [
        ("points", "gap in points of Score", lambda g: g.points, "points"),
        ("nats per token", "KL saved at equal bytes, nats per token", lambda g: g.nats, "nats per token"),
        ("bytes", "times the bytes at equal quality", lambda g: g.bytes_times, "times the bytes"),
    ]
    views = [v for unit in units if (v := _gap_view(one, *unit)) is not None]
    title = "Gap against budget"
    return Figure(f"{key}-gap", title, one.execution_state, tuple(views), "unit") if views else None


def _gap_view(
    one: StratumAnalysis, name: str, axis: str, of: Callable[[Gap], Estimate | None], unit: str
) -> View | None:
    shown = pairs(one)
    budgets = sorted({g.budget for g in one.gaps}, reverse=True)
    series = []
    rows: list[_Row] = []
    for i, (low, high) in enumerate(shown):
        gaps = [g for g in one.gaps if (g.low, g.high) == (low, high)]
        gaps.sort(key=lambda g: -g.budget)
        known = [(g, e) for g in gaps if (e := of(g)) is not None]
        rows += [
            (
                f"{low} → {high}",
                percent(g.budget),
                with_interval(of(g)),
                " / ".join(g.low_actions) or "–",
                " / ".join(g.high_actions) or "–",
                "" if of(g) is not None else (g.why or g.bytes_why),
            )
            for g in gaps
        ]
        if known:
            series.append(
                Series(
                    f"{low} → {high}",
                    "line",
                    tuple(g.budget for g, _ in known),
                    tuple(e.value for _, e in known),
                    tuple(e.low for _, e in known),
                    tuple(e.high for _, e in known),
                    tuple(
                        f"{low} → {high} at {percent(g.budget)}: {with_interval(e, unit)}" for g, e in known
                    ),
                    colour=COLOURS[low] if high != "ceiling" or low != "all" else COLOURS["ceiling"],
                    dashed=high == "ceiling"
                    or (low, high) == (shown[-1] if "all" not in one.sides else None),
                    offset=2 * i - len(shown) + 1,
                )
            )
    if not series:
        return None
    return View(
        name,
        share_axis(budgets),
        Axis(axis),
        tuple(series),
        _gap_sentence(one, shown, of, unit),
        ("sides", "budget", unit, "chosen by the lower side", "chosen by the higher side", "why not"),
        tuple(rows),
        lines=((1.0, "equal"),) if unit == "times the bytes" else ((0.0, ""),),
    )


def _gap_sentence(
    one: StratumAnalysis, shown: Sequence[tuple[str, str]], of: Callable[[Gap], Estimate | None], unit: str
) -> str:
    known = [(g, e) for g in one.gaps if (g.low, g.high) in shown and (e := of(g)) is not None]
    top, estimate = max(known, key=lambda item: item[1].value)
    neutral = 1.0 if unit == "times the bytes" else 0.0
    sure = sum(e.low is not None and e.low > neutral for _, e in known)
    below = sum(e.high is not None and e.high < neutral for _, e in known)
    widest = (
        f"The widest gap is that from {top.low} to {top.high} at {percent(top.budget)} of the bytes, "
        f"{with_interval(estimate, unit)}"
    )
    told = [e for _, e in known if e.low is not None]
    if not told:
        return f"{widest}; with so few documents there are no intervals, so that none can be told from noise."
    text = f"{widest}; {sure} of {len(told)} gaps with an interval lie above {number(neutral)} with all of it"
    return text + (f", and {below} below it." if below else ".")


def _best_figure(key: str, one: StratumAnalysis) -> Figure | None:
    """What each side achieves at every budget: the staircase itself."""
    budgets = sorted({b.budget for b in one.bests}, reverse=True)
    series, rows = [], []
    for i, side in enumerate(one.sides):
        bests = sorted((b for b in one.bests if b.side == side), key=lambda b: -b.budget)
        rows += [
            (
                side,
                percent(b.budget),
                with_interval(b.kl),
                with_interval(b.score),
                " / ".join(b.actions) or "–",
                percent(b.share),
                b.why,
            )
            for b in bests
        ]
        known = [(b, b.kl) for b in bests if b.kl is not None and b.kl.value > 0]
        if known:
            series.append(
                Series(
                    side,
                    "line",
                    tuple(b.budget for b, _ in known),
                    tuple(e.value for _, e in known),
                    tuple(e.low if e.low is not None and e.low > 0 else None for _, e in known),
                    tuple(e.high for _, e in known),
                    tuple(
                        f"{side} at {percent(b.budget)}: {with_interval(e, 'nats per token')} with "
                        f"{' / '.join(b.actions)}"
                        for b, e in known
                    ),
                    colour=COLOURS[side],
                    dashed=side in ("all", "ceiling"),
                    offset=2 * i - len(one.sides) + 1,
                )
            )
    if not series:
        return None
    view = View(
        "",
        share_axis(budgets),
        Axis("KL to the full cache, nats per token", "log"),
        tuple(series),
        _best_sentence(one),
        ("side", "budget", "KL, nats per token", "Score, points", "chosen", "bytes of it", "why not"),
        tuple(rows),
    )
    return Figure(f"{key}-best", "The best of each side", one.execution_state, (view,))


def _best_sentence(one: StratumAnalysis) -> str:
    known: dict[float, list[Best]] = {}
    for best in one.bests:
        if best.kl is not None:
            known.setdefault(best.budget, []).append(best)
    if not known:
        return "At no budget does any side have an action that fits."
    budget = max(known, key=lambda b: (len(known[b]), -b))
    texts = ", ".join(f"{b.side} {with_interval(b.kl)}" for b in known[budget])
    return f"At {percent(budget)} of the bytes the best action costs, in nats per token: {texts}."


# -- bytes against damage -----------------------------------------------------------------------------------------------


def _pareto_figure(key: str, one: StratumAnalysis) -> Figure | None:
    shown = [p for p in one.points if p.kl.value > 0]
    if not shown:
        return None
    groups: dict[str, list[Point]] = {}
    for point in shown:
        groups.setdefault(_group(point), []).append(point)
    order = [g for g in (*RUNGS, "placebo", "ceiling", "reference") if g in groups]
    series = [
        Series(
            _named(name),
            "points",
            tuple(p.share for p in groups[name]),
            tuple(p.kl.value for p in groups[name]),
            labels=tuple(_point_label(p) for p in groups[name]),
            colour=COLOURS[name],
        )
        for name in order
    ]
    fronts = [s for s in one.sides if any(s in p.front for p in shown)]
    for side in fronts:
        front = sorted((p for p in shown if side in p.front), key=lambda p: p.share)
        series.append(
            Series(
                f"front of {'F, ' if side in RUNGS else 'A, ' if side == 'all' else ''}{side}",
                "steps",
                tuple(p.share for p in front),
                tuple(p.kl.value for p in front),
                labels=tuple(f"front of {side}: {_point_label(p)}" for p in front),
                colour=COLOURS[side],
                dashed=side in ("all", "ceiling"),
            )
        )
    rows = tuple(
        (
            p.action,
            _named(_group(p)),
            percent(p.share),
            with_interval(p.kl),
            with_interval(p.score),
            "–" if p.time_ratio is None else f"× {number(p.time_ratio)}",
            spelled(p.front),
        )
        for p in sorted(one.points, key=lambda p: (p.share, p.kl.value))
    )
    exact = len(one.points) - len(shown)
    lossless = f" {exact} without any damage cannot be shown on this axis; see the table." if exact else ""
    best = _fewest(shown, fronts)
    view = View(
        "",
        Axis("live bytes, share of 16-bit dense rows", "log", _share_ticks(shown)),
        Axis("KL to the full cache, nats per token", "log"),
        tuple(series),
        f"{len(shown):,} actions by the bytes they leave and the damage they do, with the least damage that each side "
        f"reaches with as many bytes or fewer; {best}.{lossless}",
        (
            "action",
            "rung or role",
            "bytes",
            "KL, nats per token",
            "Score, points",
            "time of a step",
            "on the front of",
        ),
        rows,
    )
    return Figure(f"{key}-pareto", "Bytes against damage", one.execution_state, (view,))


def _share_ticks(points: Sequence[Point]) -> tuple[tuple[float, str], ...]:
    least, most = min(p.share for p in points), max(p.share for p in points)
    return tuple(
        (t, percent(t)) for t in (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0) if least / 1.5 <= t <= most * 1.5
    )


def _group(point: Point) -> str:
    return RUNGS[point.rung] if point.role == "candidate" else point.role


def _named(group: str) -> str:
    names = {"placebo": "placebos", "ceiling": "looks ahead", "reference": "other packages"}
    return names.get(group, f"rung {group}")


def _point_label(p: Point) -> str:
    return f"{p.action}: {percent(p.share)} of the bytes, {with_interval(p.kl, 'nats per token')}"


def _fewest(points: Sequence[Point], fronts: Sequence[str]) -> str:
    """With how few bytes each side stays below a damage that all of them reach."""
    if not fronts:
        return "no side has a front"
    reached = {s: min(p.kl.value for p in points if s in p.front) for s in fronts}
    level = max(reached.values())
    parts = [
        f"{s} {percent(min(p.share for p in points if s in p.front and p.kl.value <= level))}" for s in fronts
    ]
    return f"{number(level)} nats per token, which all of them reach, takes {', '.join(parts)} of the bytes"


# -- causes -------------------------------------------------------------------------------------------------------------


def _causes_figure(key: str, one: StratumAnalysis) -> Figure | None:
    found = [a for a in one.attributions if a.documents == "all" and a.capabilities and a.total is not None]
    found.sort(key=lambda a: -abs(a.total.value) if a.total is not None else 0.0)
    views = tuple(_causes_view(a) for a in found)
    if not views:
        return None
    return Figure(f"{key}-causes", "Causes of the gap", one.execution_state, views, "rung and budget")


def _causes_view(a: Attribution) -> View:
    shown = a.capabilities[:MOST_BARS]
    names = tuple(c.name for c in shown)
    kinds: list[tuple[str, list[Estimate]]] = [
        ("Shapley", [c.shapley for c in shown]),
        ("in the best order", [c.in_order for c in shown]),
        ("alone", [c.alone for c in shown]),
    ]
    series = tuple(
        Series(
            name,
            "bars",
            names,
            tuple(e.value for e in estimates),
            tuple(e.low for e in estimates),
            tuple(e.high for e in estimates),
            tuple(
                f"{c}, {name}: {with_interval(e, 'points')}" for c, e in zip(names, estimates, strict=True)
            ),
            colour=i,
        )
        for i, (name, estimates) in enumerate(kinds)
    )
    first = a.capabilities[0]
    total = a.total.value if a.total is not None else 0.0
    part = f" ({percent(first.shapley.value / total)} of it)" if total > 0 else ""
    more = len(a.capabilities) - len(shown)
    sentence = (
        f"Of the {with_interval(a.total, 'points')} between {a.base} and all at {percent(a.budget)} of the bytes, "
        f"{first.name} accounts for {with_interval(first.shapley, 'points')}{part} as its Shapley value and for "
        f"{with_interval(first.alone, 'points')} given alone"
        + (f"; {more} more are in the table." if more else ".")
    )
    rows = tuple(
        (
            c.name,
            with_interval(c.alone),
            f"{c.order}.",
            with_interval(c.in_order),
            with_interval(c.shapley),
            str(c.actions),
        )
        for c in a.capabilities
    )
    heads = (
        "capability",
        "alone, points",
        "place in the best order",
        "there, points",
        "Shapley, points",
        "actions",
    )
    return View(
        f"{a.base} at {percent(a.budget)}",
        Axis("", "category"),
        Axis("points that it closes"),
        series,
        sentence,
        heads,
        rows,
        horizontal=True,
    )


def _causes_by_budget(key: str, one: StratumAnalysis) -> Figure | None:
    """Shapley values against budget, a view per rung."""
    views = []
    for base in dict.fromkeys(a.base for a in one.attributions):
        mine = [a for a in one.attributions if a.base == base and a.documents == "all" and a.capabilities]
        mine.sort(key=lambda a: -a.budget)
        values = {(a.budget, c.name): c.shapley for a in mine for c in a.capabilities}
        weight: dict[str, float] = {}
        for (_, name), estimate in values.items():
            weight[name] = weight.get(name, 0.0) + abs(estimate.value)
        names = sorted(weight, key=lambda n: -weight[n])
        if len(mine) < 2 or not names:
            continue
        budgets = [a.budget for a in mine]
        series = []
        for i, name in enumerate(names[:6]):
            known = [(b, values[b, name]) for b in budgets if (b, name) in values]
            series.append(
                Series(
                    name,
                    "line",
                    tuple(b for b, _ in known),
                    tuple(e.value for _, e in known),
                    tuple(e.low for _, e in known),
                    tuple(e.high for _, e in known),
                    tuple(f"{name} at {percent(b)}: {with_interval(e, 'points')}" for b, e in known),
                    colour=i,
                    offset=2 * i - min(len(names), 6) + 1,
                )
            )
        first = {a.budget: a.capabilities[0].name for a in mine}
        told = "; ".join(f"{percent(b)}: {name}" for b, name in first.items())
        views.append(
            View(
                f"from {base}",
                share_axis(budgets),
                Axis("Shapley value, points"),
                tuple(series),
                f"What {base} lacks most, by budget: {told}.",
                ("capability", *map(percent, budgets)),
                tuple((n, *(with_interval(values.get((b, n))) for b in budgets)) for n in names),
                lines=((0.0, ""),),
            )
        )
    if not views:
        return None
    return Figure(f"{key}-causes-budget", "Causes by budget", one.execution_state, tuple(views), "rung")


def _domains_figure(key: str, one: StratumAnalysis) -> Figure | None:
    """Shapley values by domain, where there are several."""
    views = []
    grouped: dict[tuple[str, float], list[Attribution]] = {}
    for a in one.attributions:
        if a.documents != "all" and a.capabilities and a.total is not None:
            grouped.setdefault((a.base, a.budget), []).append(a)
    for (base, budget), some in grouped.items():
        if len(some) < 2:
            continue
        names = list(dict.fromkeys(c.name for a in some for c in a.capabilities))[:MOST_BARS]
        value = {(a.documents, c.name): c.shapley for a in some for c in a.capabilities}
        series = tuple(
            Series(
                a.documents,
                "bars",
                tuple(names),
                tuple(e.value if (e := value.get((a.documents, n))) else None for n in names),
                tuple(e.low if (e := value.get((a.documents, n))) else None for n in names),
                tuple(e.high if (e := value.get((a.documents, n))) else None for n in names),
                tuple(
                    f"{n}, {a.documents}: {with_interval(value.get((a.documents, n)), 'points')}"
                    for n in names
                ),
                colour=i,
            )
            for i, a in enumerate(some)
        )
        told = ", ".join(
            f"{a.documents} {with_interval(a.total)} (first {a.capabilities[0].name})" for a in some
        )
        views.append(
            View(
                f"{base} at {percent(budget)}",
                Axis("", "category"),
                Axis("Shapley value, points"),
                series,
                f"The gap between {base} and all at {percent(budget)} of the bytes, in points by kind of text: {told}.",
                ("capability", *(a.documents for a in some)),
                tuple((n, *(with_interval(value.get((a.documents, n))) for a in some)) for n in names),
                horizontal=True,
            )
        )
    if not views:
        return None
    return Figure(
        f"{key}-domains", "Causes by kind of text", one.execution_state, tuple(views), "rung and budget"
    )


def _layers_figure(key: str, one: StratumAnalysis) -> Figure | None:
    views = []
    for action in dict.fromkeys(c.action for c in one.layers):
        costs = sorted((c for c in one.layers if c.action == action), key=lambda c: c.layers)
        names = tuple(
            f"{c.layers[0]}" if c.layers[0] == c.layers[1] else f"{c.layers[0]}–{c.layers[1]}" for c in costs
        )
        worst = max(costs, key=lambda c: c.points.value)
        total = sum(c.points.value for c in costs)
        part = f", {percent(worst.points.value / total)} of the sum over all" if total > 0 else ""
        views.append(
            View(
                action,
                Axis("layers", "category"),
                Axis("damage, points"),
                (
                    Series(
                        action,
                        "bars",
                        names,
                        tuple(c.points.value for c in costs),
                        tuple(c.points.low for c in costs),
                        tuple(c.points.high for c in costs),
                        tuple(
                            f"layers {n}: {with_interval(c.points, 'points')}"
                            for n, c in zip(names, costs, strict=True)
                        ),
                    ),
                ),
                f"{action} on some layers alone does most damage on layers {worst.layers[0]} to {worst.layers[1]}: "
                f"{with_interval(worst.points, 'points')}{part}.",
                ("layers", "damage, points"),
                tuple((n, with_interval(c.points)) for n, c in zip(names, costs, strict=True)),
            )
        )
    if not views:
        return None
    return Figure(f"{key}-layers", "Damage by layer", one.execution_state, tuple(views), "action")


# -- where the points go ------------------------------------------------------------------------------------------------


def _parts_figure(key: str, one: StratumAnalysis) -> Figure | None:
    views = []
    for rung in dict.fromkeys(p.rung for p in one.parts):
        mine = sorted((p for p in one.parts if p.rung == rung), key=lambda p: -p.budget)
        columns: list[tuple[str, list[Estimate | None]]] = [
            ("foresight", [p.foresight for p in mine]),
            ("backend", [p.backend for p in mine]),
            ("controller", [p.controller for p in mine]),
        ]
        known = [(n, c) for n, c in columns if any(e is not None for e in c)]
        if not known:
            continue
        names = tuple(percent(p.budget) for p in mine)
        series = tuple(
            Series(
                n,
                "bars",
                names,
                tuple(None if e is None else e.value for e in c),
                tuple(None if e is None else e.low for e in c),
                tuple(None if e is None else e.high for e in c),
                tuple(f"{n} at {b}: {with_interval(e, 'points')}" for b, e in zip(names, c, strict=True)),
                colour={"foresight": 4, "backend": 3, "controller": 1}[n],
            )
            for n, c in known
        )
        # The smallest budget at which there is most to tell.
        last = max(mine, key=lambda p: (sum(e is not None for e in (p.foresight, p.backend)), -p.budget))
        told = [
            f"{n} {with_interval(e)}"
            for n, e in (
                ("foresight", last.foresight),
                ("the backend", last.backend),
                ("the controller", last.controller),
            )
            if e is not None
        ]
        unknown = (
            ""
            if any(p.controller is not None for p in mine)
            else "; what a policy would choose was not recorded"
        )
        views.append(
            View(
                f"rung {rung}",
                Axis("budget, share of 16-bit dense rows", "category"),
                Axis("points"),
                series,
                f"From the best with foresight down to rung {rung}, in points at {percent(last.budget)} of the bytes: "
                f"{spelled(told) or 'nothing is known'}{unknown}.",
                ("budget", "foresight", "backend", "controller", "policy's choice"),
                tuple(
                    (
                        b,
                        with_interval(p.foresight),
                        with_interval(p.backend),
                        with_interval(p.controller),
                        p.policy or "–",
                    )
                    for b, p in zip(names, mine, strict=True)
                ),
            )
        )
    if not views:
        return None
    return Figure(f"{key}-parts", "Where the points go", one.execution_state, tuple(views), "rung")


def _placebo_figure(key: str, one: StratumAnalysis) -> Figure | None:
    known = sorted((p for p in one.placebos if p.crossed is not None), key=lambda p: -p.budget)
    if not known:
        return None
    kinds: list[tuple[str, list[Estimate | None]]] = [
        ("chosen and scored on different tokens", [p.crossed for p in known]),
        ("chosen and scored on the same tokens", [p.same for p in known]),
        ("added to the side all", [p.in_gap for p in known]),
    ]
    series = []
    for i, (name, estimates) in enumerate(kinds):
        there = [(p.budget, e) for p, e in zip(known, estimates, strict=True) if e is not None]
        if there:
            series.append(
                Series(
                    name,
                    "line",
                    tuple(b for b, _ in there),
                    tuple(e.value for _, e in there),
                    tuple(e.low for _, e in there),
                    tuple(e.high for _, e in there),
                    tuple(f"{name}, {percent(b)}: {with_interval(e, 'points')}" for b, e in there),
                    colour=i,
                    offset=2 * i - 2,
                )
            )
    apart = sum(p.crossed is not None and p.crossed.sure for p in known)
    worst = max(known, key=lambda p: abs(p.crossed.value) if p.crossed is not None else 0.0)
    view = View(
        "",
        share_axis([p.budget for p in known]),
        Axis("points over the placebos' mean"),
        tuple(series),
        f"Choosing among actions that differ by a seed alone buys at most {with_interval(worst.crossed, 'points')} "
        f"(at {percent(worst.budget)}) when it is scored on other tokens; at {apart} of {len(known)} budgets this "
        "cannot be put down to noise.",
        ("budget", *(name for name, _ in kinds), "placebos"),
        tuple(
            (
                percent(p.budget),
                with_interval(p.crossed),
                with_interval(p.same),
                with_interval(p.in_gap),
                ", ".join(p.actions),
            )
            for p in known
        ),
        lines=((0.0, ""),),
    )
    return Figure(f"{key}-placebo", "What mere choice buys", one.execution_state, (view,))


def _times_figure(key: str, one: StratumAnalysis) -> Figure | None:
    """The gap against the weight of time in the score, a view per budget."""
    if not one.time_sweep:
        return None
    shown, views = pairs(one), []
    for budget in sorted({g.budget for g in one.time_sweep}, reverse=True):
        series, rows = [], []
        for i, (low, high) in enumerate(shown):
            mine = [
                g for g in (*one.gaps, *one.time_sweep) if (g.low, g.high, g.budget) == (low, high, budget)
            ]
            mine.sort(key=lambda g: g.time_weight)
            rows += [(f"{low} → {high}", f"{g.time_weight:g}", with_interval(g.points), g.why) for g in mine]
            known = [(g, g.points) for g in mine if g.points is not None]
            if known:
                series.append(
                    Series(
                        f"{low} → {high}",
                        "line",
                        tuple(f"{g.time_weight:g}" for g, _ in known),
                        tuple(e.value for _, e in known),
                        tuple(e.low for _, e in known),
                        tuple(e.high for _, e in known),
                        tuple(
                            f"{low} → {high}, λ {g.time_weight:g}: {with_interval(e, 'points')}"
                            for g, e in known
                        ),
                        colour=COLOURS[low],
                        dashed=_dashed(one, low, high),
                        offset=2 * i - len(shown) + 1,
                    )
                )
        if not series:
            continue
        turned = [s.name for s in series if (s.y[0] or 0) * (s.y[-1] or 0) < 0]
        told = f"{spelled(turned)} change sign" if turned else "no gap changes its sign"
        views.append(
            View(
                percent(budget),
                Axis("weight of time in the score, λ", "category"),
                Axis("gap in points of Score"),
                tuple(series),
                f"With time weighing from nothing to {rows[-1][1]} at {percent(budget)} of the bytes, {told}.",
                ("sides", "λ", "points", "why not"),
                tuple(rows),
                lines=((0.0, ""),),
            )
        )
    if not views:
        return None
    return Figure(f"{key}-times", "When time counts", one.execution_state, tuple(views), "budget")


# -- refusals and trends ------------------------------------------------------------------------------------------------


def _refusals(analysis: Analysis) -> Section:
    figure = Figure(
        "refusals-reasons",
        "Refusals by reason",
        "backend_infeasible",
        (refusal_view(reasons(analysis.refusals)),),
    )
    rungs = sorted({r.backend_rung for r in analysis.refusals})
    return Section(
        "refusals",
        "Refusals",
        "backend_infeasible",
        (),
        (
            ("refusals", f"{analysis.refused:,}"),
            ("refused by the profile of", spelled(f"rung {RUNGS[r]}" for r in rungs)),
        ),
        (figure,),
    )


def reasons(refusals: Iterable[Refusal]) -> list[tuple[str, int, str, str]]:
    """(capability or code, refusals, actions, text), most first."""
    found: dict[str, list[Refusal]] = {}
    for one in refusals:
        found.setdefault(one.capability or one.code, []).append(one)
    rows = [
        (name, sum(r.observations for r in some), str(sum(r.actions for r in some)), some[0].text)
        for name, some in found.items()
    ]
    return sorted(rows, key=lambda r: (-r[1], r[0]))


def refusal_view(reasons: Sequence[tuple[str, int, str, str]]) -> View:
    """Bars of (reason, how often, what it says of actions, text)."""
    shown = reasons[:MOST_BARS]
    total = sum(r[1] for r in reasons)
    first = reasons[0]
    return View(
        "",
        Axis("", "category"),
        Axis("refusals"),
        (
            Series(
                "refusals",
                "bars",
                tuple(r[0] for r in shown),
                tuple(float(r[1]) for r in shown),
                labels=tuple(f"{r[0]}: {r[1]:,} refusals. {r[3]}" for r in shown),
                colour=7,
            ),
        ),
        f"{first[0]} is the reason of {first[1]:,} of {total:,} refusals, {percent(first[1] / total)}; "
        f"there are {len(reasons)} {'reason' if len(reasons) == 1 else 'different reasons'}.",
        ("reason", "refusals", "actions", "for example"),
        tuple((r[0], f"{r[1]:,}", r[2], r[3]) for r in reasons),
        horizontal=True,
    )


def _trends(state: StateAnalysis) -> Section:
    grouped: dict[tuple[str, int, str], list[Trend]] = {}
    for trend in state.trends:
        grouped.setdefault((trend.model_name, trend.context, trend.phase), []).append(trend)
    figures = []
    for i, ((model, context, phase), trends) in enumerate(grouped.items()):
        views = []
        for budget in sorted({t.budget for t in trends}, reverse=True):
            view = _trend_view([t for t in trends if t.budget == budget], budget)
            if view is not None:
                views.append(view)
        if views:
            title = f"{model}, {context:,} tokens, {phase}"
            figures.append(
                Figure(
                    f"{state.execution_state}-trend-{i + 1}",
                    title,
                    state.execution_state,
                    tuple(views),
                    "budget",
                )
            )
    versions = list(dict.fromkeys(v for t in state.trends for v, _ in t.versions))
    return Section(
        f"{state.execution_state}-trend",
        "Trend over versions",
        state.execution_state,
        (),
        (("versions of mlx-lm", ", ".join(versions)),),
        tuple(figures),
    )


def _trend_view(trends: Sequence[Trend], budget: float) -> View | None:
    series, rows, told = [], [], []
    for i, t in enumerate(trends):
        known = [(v, e) for v, e in t.versions if e is not None]
        rows += [(f"{t.low} → {t.high}", v, with_interval(e)) for v, e in t.versions]
        if not known:
            continue
        if len(known) > 1:
            change = known[-1][1].value - known[0][1].value
            told.append(f"{t.low} → {t.high} by {'+' if change >= 0 else ''}{number(change)}")
        series.append(
            Series(
                f"{t.low} → {t.high}",
                "line",
                tuple(v for v, _ in known),
                tuple(e.value for _, e in known),
                tuple(e.low for _, e in known),
                tuple(e.high for _, e in known),
                tuple(f"{t.low} → {t.high}, mlx-lm {v}: {with_interval(e, 'points')}" for v, e in known),
                colour=i,
                dashed=t.high == "ceiling",
                offset=2 * i - len(trends) + 1,
            )
        )
    if not series:
        return None
    first, last = trends[0].versions[0][0], trends[0].versions[-1][0]
    return View(
        percent(budget),
        Axis("version of mlx-lm", "category"),
        Axis("gap in points of Score"),
        tuple(series),
        f"From mlx-lm {first} to {last} the gaps at {percent(budget)} of the bytes changed, in points: "
        f"{', '.join(told) or 'none is known twice'}.",
        ("sides", "mlx-lm", "points"),
        tuple(rows),
        lines=((0.0, ""),),
    )
