"""What a figure is, whoever draws it: series of numbers, axes, a sentence and a table. Nothing here draws.

The page and the pictures for papers are made from the same values, so neither can show what the other does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .resample import Estimate

__all__ = [
    "Axis",
    "Figure",
    "Section",
    "Series",
    "View",
    "brief",
    "number",
    "percent",
    "share_axis",
    "spelled",
    "with_interval",
]

#: Places in the palette that keep their meaning in all figures.
COLOURS = {
    "native": 0,
    "cache": 1,
    "hook": 2,
    "all": 3,
    "ceiling": 4,
    "kernel": 5,
    "trained": 6,
    "placebo": 7,
    "reference": 7,
}


@dataclass(frozen=True)
class Axis:
    """``kind``: linear, log or category. ``ticks``: (value, text) where they are to be; empty: wherever they fit."""

    title: str
    kind: str = "linear"
    ticks: tuple[tuple[float, str], ...] = ()
    descending: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one colour and form. ``y`` None leaves a hole: the figure is not known, or not on the axis.

    Attributes:
        kind: line, steps (a line that keeps its height up to the next point), points or bars.
        low, high: ends of the intervals; empty without any.
        labels: what each point says when it is pointed at.
        colour: place in the palette.
        offset: moves the points a little sideways, so that intervals at the same place do not cover each other.
    """

    name: str
    kind: str
    x: tuple[Any, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    labels: tuple[str, ...] = ()
    colour: int = 0
    dashed: bool = False
    shown: bool = True
    offset: int = 0

    def __post_init__(self) -> None:
        lengths = {len(one) for one in (self.x, self.y, self.low, self.high, self.labels) if len(one)}
        if len(lengths) > 1:
            raise ValueError(f"series {self.name!r}: columns of different lengths")


@dataclass(frozen=True)
class View:
    """One way of showing a figure, for example another unit or budget, with its own sentence and table."""

    name: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    sentence: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    horizontal: bool = False  #: bars lie: categories go down the page
    stacked: bool = False
    lines: tuple[tuple[float, str], ...] = ()  #: heights with a name, such as a budget
    uprights: tuple[tuple[float, str], ...] = ()  #: the same of the other axis


@dataclass(frozen=True)
class Figure:
    """A figure of one execution state. ``key`` names its files and its place on the page."""

    key: str
    title: str
    execution_state: str
    views: tuple[View, ...]
    choice: str = ""  #: what tells the views apart

    @property
    def sentence(self) -> str:
        return self.views[0].sentence


@dataclass(frozen=True)
class Section:
    """Figures that belong together, with what is known of where they come from."""

    key: str
    title: str
    execution_state: str
    lead: tuple[str, ...]  #: what the figures come to, a sentence each
    facts: tuple[tuple[str, str], ...]  #: provenance
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()


def number(value: float | None, digits: int = 3) -> str:
    """A number for people; ``–`` for one that is not known."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """``12.5 %`` of a share of 1."""
    return "–" if share is None else f"{number(100 * share)} %"


def with_interval(one: Estimate | None, unit: str = "") -> str:
    """``1.23 points [0.9, 1.5]``."""
    if one is None:
        return "–"
    tail = f" {unit}" if unit else ""
    if one.low is None or one.high is None:
        return f"{number(one.value)}{tail} (no interval)"
    return f"{number(one.value)}{tail} [{number(one.low)}, {number(one.high)}]"


def brief(action: str, most: int = 60) -> str:
    """An action that fits into a sentence; plans by layer are long."""
    return action if len(action) <= most else action[: most - 1] + "…"


def spelled(names: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    found = list(names)
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def share_axis(shares: Sequence[float], title: str = "budget, share of 16-bit dense rows") -> Axis:
    """A logarithmic axis of shares, large ones first; of ticks that are close together every other one is set lower."""
    ticks: list[tuple[float, str]] = []
    lower = False
    for share in sorted(set(shares), reverse=True):
        lower = bool(ticks) and ticks[-1][0] / share < 1.3 and not lower
        ticks.append((share, ("\n" if lower else "") + percent(share)))
    return Axis(title, "log", tuple(ticks), descending=True)
