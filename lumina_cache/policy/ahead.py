"""Where the prompt is expected to end, and the answer: what is held there, and what will have to be done on the way.

An action is judged there and not after the next chunk. Bytes per row are known, so it is known how many rows will fit; when
they do not all fit, something else has to follow: rows are evicted, or all are stored in a coarser codec. The cheaper of the
two is part of what the action costs. Otherwise fine codecs would be followed by slightly coarser ones, chunk after chunk,
each of them on top of the damage of the one before.

How long a prompt is nobody says; see :attr:`~lumina_cache.policy.values.State.prompt_tokens` for what is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..actions import Action, Evict
from ..apply import not_built
from ..backend.feasibility import Facts, Reason
from ..estimate import LANE_KINDS, Held
from ..figure_columns import CodecColumns
from ..profile import Profile
from .columns import ALL_ROWS, Column
from .score import TIME_PER_POINT, Inputs, quality_points
from .values import State

__all__ = ["Against", "Ahead", "Ends", "Taken", "able_codecs"]

Array = Any  #: numpy.ndarray

#: Reasons against an action, from what was tried before.
Against = Callable[[Action], tuple[Reason, ...]]


def able_codecs(facts: Facts, codecs: CodecColumns) -> Array:
    """Codecs that this backend can store these layers in, whatever they hold by now."""
    able = np.array([one <= facts.profile.present for one in codecs.requires], bool)
    if facts.rows_must_stay:
        able &= codecs.unit == 1
    for kind, key_dim, value_dim in facts.dims:
        fits = codecs.fits(key_dim, value_dim)
        able &= fits | ~codecs.row_by_row if kind in LANE_KINDS else fits
    return able


@dataclass(frozen=True)
class Taken:
    """Actions as far as what follows depends on them; arrays of one length."""

    kl: Array  #: of how rows are stored
    p95: Array
    step: Array  #: ratio of a decode step with the rows that are left where the prompt ends; NaN for unknown
    chunk: Array  #: and of the prompt's chunks until then
    kept: Array  #: share of the rows seen that is held there
    kept_now: Array  #: and right after the action
    scorer: Array  #: by which rows are missing, as a place in the profile; −1 for none
    rows: Array  #: that the action leaves
    grown: Array  #: and that are gained until then
    key_bits: Array
    value_bits: Array


@dataclass(frozen=True)
class Ends:
    """What actions cost where the prompt ends; arrays of one length."""

    kl: Array
    p95: Array
    step: Array  #: of a decode step's time to that of the dense, full cache; NaN for unknown
    chunk: Array  #: the same of a prompt's chunks
    then: Array  #: place of the codec that is expected to follow; −1 for none


class Ahead:
    """The rest of a prompt, for all actions that are weighed in one state.

    Args:
        columns: of the layers; empty where codecs cannot be weighed together, then rows can only be evicted later.
        against: codecs that are of no use, because they were refused when they were tried.
    """

    def __init__(
        self,
        state: State,
        profile: Profile,
        facts: Facts,
        same: Inputs,
        columns: Sequence[Column],
        against: Against | None = None,
    ) -> None:
        self.state, self.profile, self.same, self.limit = state, profile, same, state.limit.nbytes
        kv = [one for one in state.layers if one.changeable]
        self.tokens = state.to_come if kv else 0
        #: Half of what is expected of the prompt, which its chunks see in the mean.
        self.half = state.prompt_tokens // 2
        self.rows, self.offset = (max((n(one) for one in kv), default=0) for n in (_rows, _offset))
        self.scorers = self._able_scorers(facts)
        self._codecs = profile.codec_columns
        self._able = np.zeros(0, np.int64)
        if columns and self.limit is not None and self.tokens:
            self._set_codecs(columns, facts, against)

    def _able_scorers(self, facts: Facts) -> Array:
        """Places of the scorers that rows may be evicted by later; all of them where none may."""
        names = self.profile.eviction_columns.scorers
        by = self.state.evicted_by
        usable = [i for i, name in enumerate(names) if by in (None, name)] or list(range(len(names)))
        can = [
            i
            for i in usable
            if not facts.rows_must_stay
            and not_built(one := Evict(names[i], rows=1)) is None
            and one.requires <= facts.profile.present
        ]
        return np.array(can or usable, np.int64)

    def _set_codecs(self, columns: Sequence[Column], facts: Facts, against: Against | None) -> None:
        able = able_codecs(facts, self._codecs)
        if against is not None:
            able &= np.array([not against(one) for one in self._codecs.actions], bool)
        places = self._able = np.flatnonzero(able)
        nbytes = np.zeros(places.shape, np.int64)
        each = np.zeros(places.shape, np.int64)
        for one in columns:
            nbytes = nbytes + one.nbytes_next(np.full(places.shape, ALL_ROWS), places, self.state.tokens)
            held = one.held
            if held.changeable:
                kinds = self._codecs.kinds(held.layout, held.key_width, held.value_width, held.itemsize)
                each = each + held.count * kinds.row[places]
        #: Bytes of the rows held now, and of a row more in all layers, by codec.
        self._nbytes, self._each = nbytes, each

    # -- rows -------------------------------------------------------------------------------------------------------

    def grown(self, nbytes_next: Any, each: Any) -> Any:
        """Rows that layers gain until the prompt ends, of those to come: as many as fit.

        Args:
            nbytes_next: bytes after the coming step and one token more; integers, or arrays of them.
            each: bytes of a row more in all layers.
        """
        if self.limit is None or not self.tokens:
            return np.zeros_like(nbytes_next) + self.tokens
        fit = self.state.tokens + 1 + (self.limit - nbytes_next) // np.maximum(each, 1)
        return np.minimum(fit, self.tokens)

    def left(self, rows: Any, grown: Any, tokens: int) -> Any:
        """Rows of a layer that holds ``rows`` now after so many tokens."""
        return np.maximum(1, rows + np.minimum(grown, tokens))

    def rows_of(self, held: Held, grown: int, tokens: int) -> int:
        """The same of one layer; sliding windows hold what they hold."""
        return int(self.left(held.rows, grown, tokens)) if held.changeable else held.rows

    def dense_ratio(self, held: Held, rows: int, tokens: int, at: Callable[[float], float | None]) -> float:
        """Time over ``rows`` dense rows to that over all that were seen by then; 1 where nobody measured it."""
        most = at(held.offset + tokens) if held.changeable else None
        return (at(rows) or most) / most if most else 1.0

    # -- what follows -----------------------------------------------------------------------------------------------

    def ends(self, x: Taken) -> Ends:
        """What actions cost where the prompt ends: there, or, as likely where nobody says, right after the action."""
        found, likely = self._at_end(x), self.state.likelihood
        if likely == 1.0:
            return found
        kl, p95 = self._evicted(x.scorer, x.kept_now)
        return replace(
            found,
            kl=likely * found.kl + (1.0 - likely) * (x.kl + kl),
            p95=likely * found.p95 + (1.0 - likely) * (x.p95 + p95),
            # Chunks count by how likely they are already: see State.prompt_likely.
            step=likely * found.step + (1.0 - likely) * x.step,
        )

    def _at_end(self, x: Taken) -> Ends:
        kl, p95 = self._evicted(x.scorer, x.kept)
        none = np.full(len(x.kl), -1, np.int64)
        found = Ends(x.kl + kl, x.p95 + p95, x.step.copy(), x.chunk.copy(), none)
        short = np.flatnonzero((x.grown < self.tokens) & ~np.isnan(x.kl))
        if not short.size or not self._able.size:
            return found
        columns = (x.rows, x.grown, x.key_bits, x.value_bits, np.nan_to_num(x.chunk, nan=1.0))
        once, which = np.unique(np.stack([one[short] for one in columns]), axis=1, return_inverse=True)
        more = Ends(*(one[which.ravel()] for one in _values(self._recoded(*once))))
        kl, p95 = self._evicted(x.scorer[short], x.kept_now[short])
        other = replace(more, kl=x.kl[short] + kl + more.kl, p95=x.p95[short] + p95 + more.p95)
        further = Ends(*(one[short] for one in _values(found)))
        both = self._points(
            Ends(*(np.stack(pair, axis=1) for pair in zip(*map(_values, (further, other)), strict=True)))
        )
        better = both[:, 1] < both[:, 0]
        for column, values in zip(_values(found), _values(other), strict=True):
            column[short] = np.where(better, values, column[short])
        return found

    def _evicted(self, scorer: Array, kept: Array) -> tuple[Array, Array]:
        """Damage of the missing rows; by the best scorer there is where nobody has chosen any yet."""
        curves = self.profile.eviction_columns
        kl, p95 = np.zeros(len(kept)), np.zeros(len(kept))
        missing = kept < 1.0
        chosen = np.flatnonzero(missing & (scorer >= 0))
        kl[chosen], p95[chosen] = curves.at(scorer[chosen], kept[chosen])
        free = np.flatnonzero(missing & (scorer < 0))
        if free.size and self.scorers.size:
            shares, which = np.unique(kept[free], return_inverse=True)
            each = np.broadcast_to(self.scorers[:, None], (len(self.scorers), len(shares)))
            kls, tails = curves.at(each, np.broadcast_to(shares, each.shape))
            best, columns = kls.argmin(0), np.arange(len(shares))
            kl[free], p95[free] = kls[best, columns][which], tails[best, columns][which]
        return kl, p95

    def _recoded(self, rows: Array, grown: Array, key_bits: Array, value_bits: Array, chunk: Array) -> Ends:
        """The best coarser codec that holds all rows until the end; KL is infinite where there is none.

        Chunks are read as they are stored until rows do not fit any more, and as that codec stores them then.
        """
        codecs, places = self._codecs, self._able
        more = rows[:, None] + self.tokens - self.rows - self.state.tokens - 1
        fits = self._nbytes + self._each * more <= (self.limit or 0)
        keys, values = codecs.key_bits[places], codecs.value_bits[places]
        fits &= (keys <= key_bits[:, None]) & (values <= value_bits[:, None])
        fits &= (keys < key_bits[:, None]) | (values < value_bits[:, None])
        which, at = np.broadcast_to(places, fits.shape), rows + self.tokens
        everywhere = np.broadcast_to(at[:, None], fits.shape)
        steps = codecs.times.at(which, everywhere) * codecs.dense_step(at, self.offset + self.tokens)[:, None]
        prompt = self.state.prompt_tokens
        first = np.clip(grown / prompt, 0.0, 1.0)[:, None] if prompt else np.ones((len(rows), 1))
        chunks = first * chunk[:, None] + (1.0 - first) * codecs.chunk_times.at(which, everywhere)
        kl, p95 = (np.where(fits, one[places], np.inf) for one in (codecs.kl, codecs.p95))
        best, each = self._points(Ends(kl, p95, steps, chunks, which)).argmin(1), np.arange(len(rows))
        return Ends(*(one[each, best] for one in (kl, p95, steps, chunks, which)))

    def _points(self, x: Ends) -> Array:
        """Q and T of ways on (actions, ways); a time that nobody measured counts as that of the slowest way."""
        same = self.same
        prompt = same.prompt_tokens * (same.prompt_seconds or 0.0)
        steps = (same.step_seconds or 0.0) * max(1, same.horizon)
        ratio, chunks = (_known(one) for one in (x.step, x.chunk))
        with np.errstate(invalid="ignore"):
            quality = np.where(np.isinf(x.kl), np.inf, quality_points(x.kl, x.p95, np.maximum))
        if steps:
            ratio = (prompt * chunks + steps * ratio) / (prompt + steps)
        return quality + self.state.weights.time * np.log(ratio) / TIME_PER_POINT


def _values(x: Ends) -> tuple[Array, ...]:
    return x.kl, x.p95, x.step, x.chunk, x.then


def _known(ratios: Array) -> Array:
    unknown = np.isnan(ratios)
    if not unknown.any():
        return ratios
    slowest = np.where(unknown, -np.inf, ratios).max(1, keepdims=True)
    return np.where(unknown, np.where(np.isinf(slowest), 1.0, slowest), ratios)


def _rows(held: Held) -> int:
    return held.rows


def _offset(held: Held) -> int:
    return held.offset
