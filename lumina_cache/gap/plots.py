"""Figures as PNG and SVG for papers, through matplotlib (the extra ``analysis``). One file per view and format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import AnalysisError, AnalysisUnavailableError
from .figure import Axis, Figure, Section, Series, View

__all__ = ["FORMATS", "write_plots"]

FORMATS = ("png", "svg")

#: As on the page, in its light colours.
_COLOURS = ("#0072b2", "#c95100", "#00815c", "#8e44ad", "#b8860b", "#c2185b", "#5d4037", "#7a828c")
_MARKERS = ("o", "s", "D", "^", "x", "*", "P", "v")
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d9dde2",
    "grid.linewidth": 0.6,
    "svg.hashsalt": "lumina_cache",  # the same figures make the same file
    "svg.fonttype": "none",
}


def write_plots(
    sections: Sequence[Section], folder: str | Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Draw every view of every figure into ``folder``. Each picture says its execution state.

    Raises:
        AnalysisUnavailableError: matplotlib is not installed.
        AnalysisError: the folder cannot be written to.
    """
    matplotlib = _matplotlib()
    target = Path(folder)
    written: list[Path] = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_STYLE):
            for figure in (f for s in sections for f in s.figures):
                for view in figure.views:
                    written += _write(target, figure, view, formats)
    except OSError as error:
        raise AnalysisError(f"cannot write into {target}: {error.strerror or error}") from None
    return written


def _write(target: Path, figure: Figure, view: View, formats: Iterable[str]) -> list[Path]:
    name = figure.key + (f"-{_file_name(view.name)}" if view.name else "")
    drawn = _drawn(figure, view)
    paths = []
    for kind in formats:
        path = target / f"{name}.{kind}"
        about = {"Date": None} if kind == "svg" else {"Software": "lumina_cache"}
        drawn.savefig(path, format=kind, dpi=200, bbox_inches="tight", metadata=about)
        paths.append(path)
    return paths


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.]+", "-", text).strip("-")


def _drawn(figure: Figure, view: View) -> Any:
    from matplotlib.figure import Figure as Canvas

    names = list(dict.fromkeys(x for s in view.series for x in s.x)) if view.x.kind == "category" else None
    bars = [s for s in view.series if s.kind == "bars"]
    height = 1.2 + 0.16 * len(names) * (len(bars) + 1) if view.horizontal and names else 3.6
    canvas = Canvas(figsize=(5.6, max(2.2, height)), layout="constrained")
    axes = canvas.add_subplot()
    axes.set_axisbelow(True)
    for number, series in enumerate(view.series):
        _series(axes, view, series, number, names, bars)
    _axis(axes, view.y if view.horizontal else view.x, "x", None if view.horizontal else names)
    _axis(axes, view.x if view.horizontal else view.y, "y", names if view.horizontal else None)
    for at, text in view.lines:
        axes.axhline(at, color="#59616b", linewidth=0.9, linestyle=":")
        axes.annotate(
            text, (1, at), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7.5
        )
    for at, text in view.uprights:
        axes.axvline(at, color="#59616b", linewidth=0.9, linestyle=":")
        axes.annotate(text, (at, 1), xycoords=("data", "axes fraction"), va="top", fontsize=7.5)
    if view.horizontal:
        axes.invert_yaxis()
    title = figure.title + (f", {view.name}" if view.name else "")
    axes.set_title(f"{title} [{figure.execution_state}]", fontsize=9.5, loc="left")
    if len(view.series) > 1:
        canvas.legend(
            loc="outside lower center", ncols=2 if len(view.series) > 3 else 3, frameon=False, fontsize=8
        )
    return canvas


def _series(
    axes: Any, view: View, s: Series, number: int, names: Sequence[Any] | None, bars: Sequence[Series]
) -> None:
    colour = _COLOURS[s.colour % len(_COLOURS)]
    kept = [i for i, y in enumerate(s.y) if y is not None]
    ys = [float(y) for y in s.y if y is not None]
    xs = [_place(view, s, i, names) for i in kept]
    error = None
    if s.low:
        error = [
            [0.0 if (low := s.low[i]) is None else max(0.0, y - low) for i, y in zip(kept, ys, strict=True)],
            [
                0.0 if (high := s.high[i]) is None else max(0.0, high - y)
                for i, y in zip(kept, ys, strict=True)
            ],
        ]
    if s.kind == "bars":
        width = 0.8 / max(1, len(bars))
        at = [x + (bars.index(s) - (len(bars) - 1) / 2) * width for x in xs]
        style = {"color": colour, "label": s.name, "error_kw": {"elinewidth": 0.9, "capsize": 2}}
        if view.horizontal:
            axes.barh(at, ys, height=width, xerr=error, **style)
        else:
            axes.bar(at, ys, width=width, yerr=error, **style)
        return
    line = "none" if s.kind == "points" else "--" if s.dashed else "-"
    marker = None if s.kind == "steps" else _MARKERS[number % len(_MARKERS)]
    if s.kind == "steps":
        axes.step(xs, ys, where="post", color=colour, linestyle=line, linewidth=1.3, label=s.name)
        return
    axes.errorbar(
        xs, ys, yerr=error, color=colour, linestyle=line, marker=marker, markersize=4, linewidth=1.3,
        elinewidth=0.9, capsize=2, label=s.name,
    )  # fmt: skip


def _place(view: View, s: Series, i: int, names: Sequence[Any] | None) -> float:
    if names is not None:
        return names.index(s.x[i]) + (0.0 if s.kind == "bars" else 0.02 * s.offset)
    x = float(s.x[i])
    return x * 1.008**s.offset if view.x.kind == "log" else x


def _axis(axes: Any, axis: Axis, which: str, names: Sequence[Any] | None) -> None:
    setter = getattr(axes, f"set_{which}label")
    setter(axis.title)
    if axis.kind == "log":
        getattr(axes, f"set_{which}scale")("log")
    if names is not None:
        getattr(axes, f"set_{which}ticks")(range(len(names)), [str(n) for n in names])
    elif axis.ticks:
        getattr(axes, f"set_{which}ticks")([t for t, _ in axis.ticks], [text for _, text in axis.ticks])
        if axis.kind == "log":
            from matplotlib.ticker import NullLocator

            getattr(axes, f"{which}axis").set_minor_locator(NullLocator())
    if axis.descending and axis.ticks:
        least, most = min(t for t, _ in axis.ticks), max(t for t, _ in axis.ticks)
        room = (most / least) ** 0.08 if most > least else 1.2
        getattr(axes, f"set_{which}lim")(most * room, least / room)
    elif axis.descending:
        getattr(axes, f"invert_{which}axis")()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise AnalysisUnavailableError(
            f"pictures need {error.name}; install it with: pip install 'lumina-cache[analysis]'"
        ) from None
    return matplotlib
