"""A profile's codecs as columns: what a decision needs of all of them at once, as NumPy arrays.

Everything here is the same for every state that a profile is used in, and is worked out once per profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .estimate import layout_of

if TYPE_CHECKING:
    from .codecs import Layout
    from .profile import EvictionFigure, Profile

__all__ = ["CodecColumns", "Curves", "EvictionColumns", "Kinds"]

Array = Any  #: numpy.ndarray; of integers, of floats or of booleans as its name says


@dataclass(frozen=True)
class Curves:
    """Piecewise linear curves, one a row, interpolated together by the arithmetic of ``profile.interpolate``."""

    x: Array  #: (curves, points), ascending; filled up with infinity
    y: Array
    n: Array  #: points of each
    beyond: bool = False

    @classmethod
    def of(cls, curves: Sequence[Sequence[tuple[float, float]]], *, beyond: bool = False) -> Curves:
        most = max([1, *map(len, curves)])
        x, y = np.full((len(curves), most), np.inf), np.full((len(curves), most), np.nan)
        for i, points in enumerate(curves):
            for j, (at, value) in enumerate(points):
                x[i, j], y[i, j] = at, value
        return cls(x, y, np.array([len(points) for points in curves], np.int64), beyond)

    def at(self, which: Array, where: Array) -> Array:
        """Curve ``which`` at ``where``, elementwise; NaN for a curve without points."""
        x, y, last = self.x, self.y, np.maximum(self.n[which] - 1, 0)
        upper = np.minimum(np.maximum((x[which] < where[..., None]).sum(-1), 1), last)
        lower = np.maximum(upper - 1, 0)
        x0, y0, x1, y1 = x[which, lower], y[which, lower], x[which, upper], y[which, upper]
        with np.errstate(invalid="ignore", divide="ignore"):
            inside = y0 + (y1 - y0) * (where - x0) / (x1 - x0)
        first = y[which, 0]
        if self.beyond:
            return np.where(last == 0, first, inside)
        below, above = where <= x[which, 0], where >= x[which, last]
        return np.where((last == 0) | below, first, np.where(above, y[which, last], inside))


@dataclass(frozen=True)
class Kinds:
    """How one layer's rows would be stored by each codec, and, last, how they are stored now."""

    block: Array
    unit: Array
    residual: Array
    sinks: Array
    room: Array  #: rows allocated for the tail
    key_row: Array  #: bytes of one sealed row's keys
    row: Array  #: bytes of one sealed row
    key_copies: Array
    value_copies: Array
    same: Array  #: whether that is how they are stored already


class _Dense:
    """Seconds by rows, by the arithmetic of ``Profile.step_at`` and ``chunk_at``."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self.curve = Curves.of([points], beyond=True) if points else None
        self.least = min((seconds for _, seconds in points), default=0.0) / 2

    def ratio(self, rows: Array, full: float) -> Array:
        if self.curve is None:
            return np.ones(rows.shape)
        seconds = self.curve.at(np.zeros(rows.size + 1, np.int64), np.append(rows.astype(float), float(full)))
        seconds = np.maximum(seconds, self.least)
        return (seconds[:-1] / seconds[-1]).reshape(rows.shape)


class CodecColumns:
    """The codecs of a profile, in its order.

    Figures are there twice: those of exactly the actions, and behind them those of ``by_layout``, which are looked up by
    how rows are stored. (A profile may have two figures for one action, once its groups were made smaller.)
    """

    def __init__(self, profile: Profile) -> None:
        codecs = profile.codecs
        self.actions = tuple(one.action for one in codecs)
        self.texts = tuple(map(str, self.actions))
        #: Whether this version of the library has code for all of them.
        self.built = all(one.layout is not None for one in self.actions)
        self.layouts = tuple(layout_of(one) for one in self.actions)
        self.requires = tuple(one.requires for one in self.actions)
        self.key_bits = np.array([one.key_bits for one in self.actions], np.int64)
        self.value_bits = np.array([one.value_bits for one in self.actions], np.int64)
        self.unit = np.array([one.unit for one in self.layouts], np.int64)
        self.row_by_row = np.array([one.row_by_row for one in self.layouts], bool)
        of_actions = [profile.codec(one) or figure for one, figure in zip(self.actions, codecs, strict=True)]
        self.places = {layout: len(codecs) + i for i, layout in enumerate(profile.by_layout)}
        figures = (*of_actions, *profile.by_layout.values())
        self.kl = np.array([one.kl for one in figures], float)
        self.p95 = np.array([one.p95 for one in figures], float)
        self.times = Curves.of([one.times for one in figures])
        self.chunk_times = Curves.of([one.chunk_times for one in figures])
        self._dense_steps, self._dense_chunks = _Dense(profile.dense_steps), _Dense(profile.dense_chunks)
        #: Times of the figures as they stand in the profile.
        self.listed_times = Curves.of([one.times for one in codecs])
        #: ``[i, j]``: whether codec i can be done at least where codec j can.
        self.undemanding = np.array([[a <= b for b in self.requires] for a in self.requires], bool)
        #: The first place of each action.
        self.index = {action: i for i, action in reversed(list(enumerate(self.actions)))}
        #: Rows that any of the codecs encodes or seals together.
        self.units = tuple({one for layout in self.layouts for one in (layout.unit, layout.block)})
        self.fits = lru_cache(64)(self._fits)
        self.kinds = lru_cache(64)(self._kinds)

    def __len__(self) -> int:
        return len(self.actions)

    def dense_step(self, rows: Array, full: float) -> Array:
        """Time of a dense decode step over ``rows`` rows to that over ``full``; 1 where nobody measured it."""
        return self._dense_steps.ratio(rows, full)

    def dense_chunk(self, rows: Array, full: float) -> Array:
        """The same of a chunk of a prompt."""
        return self._dense_chunks.ratio(rows, full)

    def _fits(self, key_dim: int, value_dim: int) -> Array:
        """Codecs whose groups divide these head dims."""
        return np.array([one.why_not(key_dim, value_dim) is None for one in self.layouts], bool)

    def _kinds(self, now: Layout, key_width: int, value_width: int, itemsize: int) -> Kinds:
        all_of = (*self.layouts, now)
        key_row = [one.keys.row_nbytes(key_width, itemsize) for one in all_of]
        value_row = [one.values.row_nbytes(value_width, itemsize) for one in all_of]

        def integers(name: str) -> Array:
            return np.array([getattr(one, name) for one in all_of], np.int64)

        unit = integers("unit")
        assert not (unit & (unit - 1)).any(), "units are powers of two"
        return Kinds(
            block=integers("block"),
            unit=unit,
            residual=integers("residual"),
            sinks=integers("sinks"),
            room=integers("tail_capacity"),
            key_row=np.array(key_row, np.int64),
            row=np.array(key_row, np.int64) + np.array(value_row, np.int64),
            key_copies=np.array([one.keys.copies for one in all_of], float),
            value_copies=np.array([one.values.copies for one in all_of], float),
            same=np.array([one == now for one in all_of], bool),
        )


class EvictionColumns:
    """The scorers of a profile, in its order."""

    def __init__(self, evictors: Sequence[EvictionFigure]) -> None:
        self.scorers = tuple(one.scorer for one in evictors)
        self.recent = np.array([one.recent for one in evictors], np.int64)
        kl, p95 = zip(*(one.curves for one in evictors), strict=True) if evictors else ((), ())
        self._kl, self._p95 = Curves.of(kl, beyond=True), Curves.of(p95, beyond=True)

    def place(self, scorer: str) -> int:
        """Where a scorer is; −1 for one without figures."""
        return self.scorers.index(scorer) if scorer in self.scorers else -1

    def at(self, which: Array, share: Array) -> tuple[Array, Array]:
        """What ``EvictionFigure.at`` gives, elementwise."""
        return (
            np.maximum(0.0, self._kl.at(which, share)),
            np.maximum(0.0, self._p95.at(which, share)),
        )
