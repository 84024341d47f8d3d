"""Everything but plans, weighed together: how many rows stay, which codec stores them, which scorer chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..actions import DEFAULT_SINKS, Action, Composite, Evict, Keep, Quantize
from ..apply import not_built
from ..backend.capabilities import RAGGED_LAYERS
from ..backend.feasibility import Facts, coarsest, reasons_against
from ..estimate import Held, nbytes_allocated, nbytes_live, rows_left, whole_blocks
from ..evolve import evolve
from ..figure_columns import CodecColumns, EvictionColumns
from ..profile import Profile
from .ahead import Ahead, Taken, able_codecs
from .columns import ALL_ROWS, Changed, Column, column_of
from .expected import is_ours, own_seconds, source_of
from .score import OVERFLOW_POINTS, Inputs, Score, exceeds, quality_points, time_points
from .table import Columns, Part
from .values import Candidate, Group, State

__all__ = ["Families"]

Array = Any  #: numpy.ndarray


@dataclass(frozen=True)
class _Stored:
    """What storing the layers like this costs, by family; NaN where it is not known. See ``expected.stored``."""

    kl: Array
    p95: Array
    time_ratio: Array
    prompt_ratio: Array
    lost_kl: Array
    lost_p95: Array
    kept: Array  #: least share of the tokens seen whose rows a layer holds when the prompt ends
    kept_now: Array  #: the same after the action
    sources: list[str]


class Families:
    """Keep, every codec, and every scorer with each of ``joined``: (place of a codec or −1, rows).

    Args:
        same: the inputs that are the same for every action.
    """

    def __init__(
        self,
        state: State,
        profile: Profile,
        groups: Sequence[Group],
        columns: Sequence[Column],
        facts: Facts,
        same: Inputs,
        ahead: Ahead,
        joined: Sequence[tuple[int, int]],
        scorers: Sequence[int],
    ) -> None:
        self.state, self.profile, self.facts, self.same, self.ahead = state, profile, facts, same, ahead
        self.groups, self.layers = groups, columns
        self.of_codecs: CodecColumns = profile.codec_columns
        self.of_scorers: EvictionColumns = profile.eviction_columns
        plain = 1 + len(self.of_codecs)  # families without an eviction, which are one candidate each
        self.codecs = np.array([-1, *range(plain - 1), *(codec for codec, _ in joined)], np.int64)
        self.rows = np.array([ALL_ROWS] * plain + [rows for _, rows in joined], np.int64)
        #: Of every candidate its family, and its scorer as a place in the profile; −1 for none.
        self.family = np.concatenate(
            [np.arange(plain), np.repeat(np.arange(plain, len(self.rows)), len(scorers))]
        )
        self.scorer = np.concatenate([np.full(plain, -1), np.tile(np.array(scorers, np.int64), len(joined))])
        self.plain = plain
        self._weigh()

    def __len__(self) -> int:
        return len(self.family)

    # -- weighing ---------------------------------------------------------------------------------------------------

    def _weigh(self) -> None:
        state, family = self.state, self.family
        changed = [one.changed(self.rows, self.codecs) for one in self.layers]
        self.next = _sum(one.nbytes_next(self.rows, self.codecs, state.tokens) for one in self.layers)
        self.peak = self._peak(changed)
        self._set_rest(changed)
        self.stored = self._stored(changed)
        self._set_quality()
        time = self._time()
        quality = quality_points(self.kl, self.p95, np.maximum)
        risk = self._risk()
        weights = state.weights
        total = -(quality + weights.time * np.where(np.isnan(time), 0.0, time) + weights.risk * risk) + 0.0
        self.quality, self.risk = quality, risk
        self.columns = Columns(self._feasible(), self.next[family], self.kl, time, total)

    def _peak(self, changed: Sequence[Changed]) -> Array:
        """Most bytes allocated on the way, of every candidate. See ``estimate.carried_out`` and ``_After.peak_with``."""
        counts = [one.held.count for one in self.layers]
        now = [nbytes_allocated([one.held]) // one.held.count for one in self.layers]
        first = sum(n * size for n, size in zip(counts, now, strict=True))
        cut = _sum(n * one.nbytes_cut for n, one in zip(counts, changed, strict=True))
        last = _sum(n * one.nbytes for n, one in zip(counts, changed, strict=True))
        before = np.maximum(first, cut)
        most = np.maximum(before, last)
        scoring = np.zeros((len(self.rows), len(self.of_scorers.scorers)), np.int64)
        for layer, size, one in zip(self.layers, now, changed, strict=True):
            if one.cut.any():
                others = np.maximum(first - size, cut - one.nbytes_cut)
                # What any scorer takes at least: ranks.
                beside = np.where(one.cut, np.maximum(one.moving, layer.scoring("sinks_window")), 0)
                most = np.maximum(most, others + size + beside)
                of_each = np.array([layer.scoring(name) for name in self.of_scorers.scorers], np.int64)
                scoring = np.maximum(scoring, one.cut[:, None] * of_each)
            if one.coded.any():
                others = np.maximum(cut - one.nbytes_cut, last - one.nbytes)
                most = np.maximum(most, others + one.nbytes_cut + one.coding)
        peak = most[self.family]
        chosen = self.scorer >= 0
        family = self.family[chosen]
        peak[chosen] = np.maximum(peak[chosen], before[family] + scoring[family, self.scorer[chosen]])
        return peak

    def _set_rest(self, changed: Sequence[Changed]) -> None:
        """Rows that layers gain until the prompt ends, and of what they hold then: the rows now, and their bits."""
        n = len(self.codecs)
        each, left = np.zeros(n, np.int64), np.zeros(n, np.int64)
        keys = values = np.full(n, coarsest(())[0])
        for group, one in zip(self.groups, changed, strict=True):
            held, of_codecs = group.held, self.of_codecs
            if not held.changeable:
                continue
            kinds = of_codecs.kinds(held.layout, held.key_width, held.value_width, held.itemsize)
            each = each + held.count * np.where(one.coded, kinds.row[self.codecs], kinds.row[-1])
            left = np.maximum(left, one.rows)
            now = coarsest([held.layout])
            keys = np.minimum(
                keys, np.where(one.coded, np.append(of_codecs.key_bits, 0)[self.codecs], now[0])
            )
            values = np.minimum(
                values, np.where(one.coded, np.append(of_codecs.value_bits, 0)[self.codecs], now[1])
            )
        self.left, self.bits, self.grown = left, (keys, values), self.ahead.grown(self.next, each)

    def _stored(self, changed: Sequence[Changed]) -> _Stored:
        profile, of_codecs, codecs = self.profile, self.of_codecs, self.codecs
        n = len(codecs)
        ours = [(g, c) for g, c in zip(self.groups, changed, strict=True) if is_ours(g.held)]
        total = sum(g.held.count for g, _ in ours)
        lost_kl, lost_p95, unknown = np.zeros(n), np.zeros(n), np.zeros(n, bool)
        for group, one in ours:
            was = group.held.layout
            if was.dense or not one.coded.any():
                continue
            figure = profile.by_layout.get(was)
            if figure is None:
                unknown |= one.coded
                continue
            lost_kl = np.where(one.coded, lost_kl + figure.kl * group.weight / total, lost_kl)
            lost_p95 = np.where(one.coded, lost_p95 + figure.p95 * group.weight / total, lost_p95)
        if self.state.lost is None:
            unknown[:] = True
        else:
            lost_kl, lost_p95 = lost_kl + self.state.lost[0], lost_p95 + self.state.lost[1]
        lost_kl, lost_p95 = np.where(unknown, np.nan, lost_kl), np.where(unknown, np.nan, lost_p95)
        kl, p95, time, prompt = lost_kl, lost_p95, np.zeros(n), np.zeros(n)
        kept, kept_now, coded = np.ones(n), np.ones(n), np.zeros(n, bool)
        ahead, grown = self.ahead, self.grown
        short = grown < ahead.tokens
        missing: dict[int, str] = {}
        for group, one in ours:
            held = group.held
            at_end = half_way = one.rows
            fewer: Array = np.ones(n)
            fewer_half_way: Array = fewer
            if held.changeable:
                at_end, half_way = (ahead.left(one.rows, grown, n) for n in (ahead.tokens, ahead.half))
                missing_rows = one.cut | held.evicted
                share = np.where(missing_rows, one.rows / held.offset, np.inf)
                kept_now = np.minimum(kept_now, share)
                share = np.where(missing_rows | short, at_end / (held.offset + ahead.tokens), np.inf)
                kept = np.minimum(kept, share)
                fewer = of_codecs.dense_step(at_end, held.offset + ahead.tokens)
                fewer_half_way = of_codecs.dense_chunk(half_way, held.offset + ahead.half)
            # The figure of the very codec where rows are stored like that; else that of how they are stored.
            place = of_codecs.places.get(held.layout, -1)
            same = of_codecs.kinds(held.layout, held.key_width, held.value_width, held.itemsize).same[codecs]
            which = np.where(one.coded | ((codecs >= 0) & same), codecs, place)
            dense = ~one.coded & held.layout.dense
            if not held.layout.dense and place < 0:
                for i in np.flatnonzero(which < 0):
                    missing.setdefault(int(i), f"no figure for {held.layout}")
            at_end, half_way = at_end.astype(float), half_way.astype(float)
            add_kl = np.where(dense, 0.0, of_codecs.kl[which] * group.weight / total)
            add_p95 = np.where(dense, 0.0, of_codecs.p95[which] * group.weight / total)
            kl, p95 = kl + add_kl, p95 + add_p95
            ratio = np.where(dense, 1.0, of_codecs.times.at(which, at_end))
            chunk = np.where(dense, 1.0, of_codecs.chunk_times.at(which, half_way))
            time = time + ratio * fewer * held.count / total
            prompt = prompt + chunk * fewer_half_way * held.count / total
            coded |= ~dense
        none = unknown.copy()
        none[list(missing)] = True
        for column in (kl, p95, time, prompt):
            column[none] = np.nan
        measured, exact = source_of(profile), "exact: dense and complete"
        sources = [
            "no figure for how rows were stored before"
            if unknown[i]
            else missing.get(i) or (measured if coded[i] or lost_kl[i] else exact)
            for i in range(n)
        ]
        return _Stored(kl, p95, time, prompt, lost_kl, lost_p95, kept, kept_now, sources)

    def _set_quality(self) -> None:
        """Quality and ratios of every candidate where the prompt ends, with the damage of the missing rows."""
        stored, family = self.stored, self.family
        by = self.state.evicted_by
        missing_by = -1 if by is None else self.of_scorers.place(by)
        scorer = np.where(self.scorer >= 0, self.scorer, missing_by)
        ends = self.ahead.ends(
            Taken(
                kl=stored.kl[family],
                p95=stored.p95[family],
                step=stored.time_ratio[family],
                chunk=stored.prompt_ratio[family],
                kept=stored.kept[family],
                kept_now=stored.kept_now[family],
                scorer=scorer,
                rows=self.left[family],
                grown=self.grown[family],
                key_bits=self.bits[0][family],
                value_bits=self.bits[1][family],
            )
        )
        self.kl, self.p95, self.then = ends.kl, ends.p95, ends.then
        self.time_ratio, self.prompt_ratio = ends.step, ends.chunk
        self.damaged = ((stored.kept[family] < 1.0) | (self.then >= 0)) & ~np.isnan(self.kl)
        self.unfigured = (stored.kept_now[family] < 1.0) & ~np.isnan(stored.kl[family]) & (scorer < 0)
        for column in (self.kl, self.p95, self.time_ratio, self.prompt_ratio):
            column[self.unfigured] = np.nan
        self.then[self.unfigured] = -1

    def _time(self) -> Array:
        """T of every candidate. See ``score``."""
        x = self.same
        touched, depth = nbytes_live(self.state.layers), 1
        sample: tuple[Action, ...] = (Keep(), _A_CODEC, _AN_EVICTION, Composite((_AN_EVICTION, _A_CODEC)))
        self.own_kinds = [own_seconds(one, touched, self.profile, depth) for one in sample]
        self.own = 2 * (self.rows != ALL_ROWS) + (self.codecs >= 0)
        family, ratio = self.family, self.time_ratio
        if x.step_seconds:
            prompt, steps = x.prompt_tokens * (x.prompt_seconds or 0.0), x.step_seconds * max(1, x.horizon)
            own = np.array([seconds or 0.0 for seconds in self.own_kinds])[self.own][family]
            chunks = self.prompt_ratio if prompt else 0.0
            ratio = (own + prompt * chunks + steps * ratio) / (prompt + steps)
        # One logarithm for each time: within a family most are the same.
        found, which = np.unique(ratio, return_inverse=True)
        return np.array([time_points(one) for one in found.tolist()])[which]

    def _risk(self) -> Array:
        x = self.same
        held = (
            np.zeros(len(self.family))
            if x.limit is None
            else (self.next[self.family] > x.limit).astype(float)
        )
        if x.memory is not None:
            peaks, which = np.unique(self.peak, return_inverse=True)
            over = [exceeds(peak, x.memory, x.error_mean, x.error_spread) for peak in peaks.tolist()]
            held = np.maximum(held, np.array(over)[which])
        return OVERFLOW_POINTS * held

    # -- what can be done -------------------------------------------------------------------------------------------

    def _feasible(self) -> Array:
        """Whether there is no reason against a candidate. See ``feasibility.reasons_against``, which says which."""
        facts, of_codecs = self.facts, self.of_codecs
        present = facts.profile.present
        able = able_codecs(facts, of_codecs)
        keys, values = of_codecs.key_bits, of_codecs.value_bits
        at_keys, at_values = facts.coarsest
        able &= ~((keys > at_keys) | (values > at_values) | ((keys == at_keys) & (values == at_values)))
        if not facts.rows:
            able &= _any_lane(facts.lanes, of_codecs)
        families = np.append(able, True)[self.codecs]
        feasible = families[self.family]
        chosen = np.flatnonzero(self.scorer >= 0)
        if chosen.size:
            rows, scorer = self.rows[self.family[chosen]], self.scorer[chosen]
            recent = np.minimum(self.of_scorers.recent[scorer], rows // 2)
            guarded = whole_blocks(DEFAULT_SINKS + facts.pinned, facts.block) + recent
            able_scorers = [
                not_built(one := Evict(name, rows=1)) is None and one.requires <= present
                for name in self.of_scorers.scorers
            ]
            can = np.array(able_scorers, bool)[scorer] & (rows < facts.rows) & (rows > guarded)
            if facts.rows_must_stay:
                can[:] = False
            feasible[chosen] &= can & self._even()[self.family[chosen]]
        if facts.available is not None:
            feasible &= self._transient() <= facts.available
        return feasible

    def _even(self) -> Array:
        """Families that leave all layers with as many rows, or that may leave them with different numbers."""
        facts = self.facts
        if not facts.uneven or facts.profile.has(RAGGED_LAYERS):
            return np.ones(len(self.rows), bool)
        return np.array(
            [
                rows == ALL_ROWS
                or len(rows_left(facts.uneven, Evict("sinks_window", rows=rows), facts.protect)) < 2
                for rows in self.rows.tolist()
            ]
        )

    def _transient(self) -> Array:
        """Bytes beside the layer that needs most, of every candidate."""
        most = np.zeros(len(self.family), np.int64)
        chosen = self.scorer >= 0
        for held in self.facts.largest:
            layer = column_of(held, self.of_codecs, ())
            one = layer.changed(self.rows, self.codecs)
            most = np.maximum(most, np.maximum(one.moving, one.coding)[self.family])
            of_each = np.array([layer.scoring(name) for name in self.of_scorers.scorers], np.int64)
            scoring = np.where(one.cut[self.family[chosen]], of_each[self.scorer[chosen]], 0)
            most[chosen] = np.maximum(most[chosen], scoring)
        return most

    def feasible_codecs(self) -> list[Quantize]:
        """Codecs that can be executed on all rows."""
        return [
            one
            for one, can in zip(self.of_codecs.actions, self.columns.feasible[1:].tolist(), strict=False)
            if can
        ]

    def best_scorer(self) -> str | None:
        """The feasible scorer that is expected to lose least; None if there is none."""
        can = (self.scorer >= 0) & self.columns.feasible & ~np.isnan(self.kl)
        if not can.any():
            return None
        least = can & (self.kl == self.kl[can].min())
        best: str = min(self.of_scorers.scorers[i] for i in self.scorer[least].tolist())
        return best

    # -- candidates -------------------------------------------------------------------------------------------------

    @cached_property
    def _lists(self) -> dict[str, list[Any]]:
        """The columns as lists of Python's own numbers."""
        stored, columns = self.stored, self.columns
        whole = {"peak": self.peak, "feasible": columns.feasible, "next": self.next, "own": self.own}
        whole |= {"kept": stored.kept, "then": self.then}
        broken = {"kl": self.kl, "p95": self.p95, "lost_kl": stored.lost_kl, "lost_p95": stored.lost_p95}
        broken |= {"time_ratio": self.time_ratio, "prompt_ratio": self.prompt_ratio}
        broken |= {"Q": self.quality, "T": columns.time, "R": self.risk, "total": columns.total}
        return {name: one.tolist() for name, one in whole.items()} | {
            name: _or_none(one) for name, one in broken.items()
        }

    def action(self, i: int) -> Action:
        family, scorer = int(self.family[i]), int(self.scorer[i])
        place, rows = int(self.codecs[family]), int(self.rows[family])
        codec = self.of_codecs.actions[place] if place >= 0 else None
        if scorer < 0:
            return Keep() if codec is None else codec
        figure = self.profile.evictors[scorer]
        eviction = Evict(figure.scorer, rows=rows, recent=min(figure.recent, rows // 2))
        return eviction if codec is None else Composite((eviction, codec))

    def candidate(self, i: int) -> Candidate:
        x, family = self._lists, int(self.family[i])
        action = self.action(i)
        reasons = () if x["feasible"][i] else reasons_against(action, self.facts)
        inputs = evolve(
            self.same,
            nbytes_next=x["next"][family],
            nbytes_peak=x["peak"][i],
            kl=x["kl"][i],
            p95=x["p95"][i],
            lost_kl=x["lost_kl"][family],
            lost_p95=x["lost_p95"][family],
            source=self.source(i),
            time_ratio=x["time_ratio"][i],
            prompt_ratio=x["prompt_ratio"][i],
            kept=x["kept"][family],
            then=self.of_codecs.texts[place] if (place := x["then"][i]) >= 0 else "",
            own_seconds=self.own_kinds[x["own"][family]],
        )
        return Candidate(action, reasons, inputs, Score(x["Q"][i], x["T"][i], x["R"][i], x["total"][i]))

    def source(self, i: int) -> str:
        if self.unfigured[i]:
            return f"no figure for evicting by {self.state.evicted_by}"
        return source_of(self.profile) if self.damaged[i] else self.stored.sources[self.family[i]]

    def find(self, action: Action) -> int | None:
        """The place of ``action``; None if it is not there."""
        parts = action.parts
        evict = parts[0] if isinstance(parts[0], Evict) else None
        codec = parts[-1] if isinstance(parts[-1], Quantize) else None
        possible = self.codecs == (-1 if codec is None else self.of_codecs.index.get(codec, -2))
        possible &= self.rows == (ALL_ROWS if evict is None else evict.rows or -1)
        for i in np.flatnonzero(possible[self.family]).tolist():
            if self.action(i) == action:
                return i
        return None

    def part(self, first: int, end: int) -> Part:
        """Candidates [first, end) of all."""
        return Part(
            Columns(*(getattr(self.columns, name)[first:end] for name in Columns.__dataclass_fields__)),
            lambda i: self.candidate(first + i),
            lambda action: None if (i := self.find(action)) is None or not first <= i < end else i - first,
        )


#: Examples, for what an action's work takes by its kind.
_A_CODEC = Quantize("affine", 8, 8)
_AN_EVICTION = Evict("sinks_window", rows=1)


def _sum(columns: Any) -> Array:
    first, *rest = columns
    for one in rest:
        first = first + one
    return first


def _or_none(column: Array) -> list[float | None]:
    """NaN as None."""
    found: list[float | None] = column.tolist()
    for i in np.flatnonzero(np.isnan(column)).tolist():
        found[i] = None
    return found


def _any_lane(lanes: Sequence[Held], codecs: CodecColumns) -> Array:
    """Codecs that at least one of the sliding windows and chunks takes."""
    takes = np.zeros(len(codecs), bool)
    for one in lanes:
        same = codecs.kinds(one.layout, one.key_width, one.value_width, one.itemsize).same[:-1]
        takes |= codecs.row_by_row & ~same
    return takes
