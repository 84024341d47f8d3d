"""What is weighed in a state: actions with a figure of quality, solved for the bytes that may be held."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ..actions import Action, Composite, Evict, Keep, Plan, Quantize, Reclaim, in_ranges, singles
from ..allocate import Option, allocate, allocate_alike, lower_hull
from ..backend.capabilities import BackendProfile
from ..backend.feasibility import Facts, coarsest, facts_of, numbered, reasons_against
from ..codecs import Layout
from ..estimate import (
    LANE_KINDS,
    Held,
    after_action,
    after_append,
    carried_out,
    held_within,
    layout_of,
    nbytes_allocated,
    nbytes_live,
    parts_carried_out,
    row_nbytes,
    rows_left,
    scoring_nbytes,
    transient_of_action,
    uneven,
)
from ..evolve import evolve
from ..profile import CodecFigure, EvictionFigure, Profile
from ..rows import Pinned
from .ahead import Against, Ahead, Taken
from .columns import ALL_ROWS, Column, column_of
from .expected import Expected, Lost, Stored, is_ours, lost_by, own_seconds, source_of, stored
from .families import Families
from .fit import rows_within
from .partial import coarser_already, on_the_rest, quick
from .score import Inputs, score
from .table import Part, Table
from .values import Candidate, Group, State

__all__ = ["PlannedLayers", "Weighing", "candidates_for", "grouped", "next_layers", "plans_for", "weigh"]

#: Shares of the tokens seen that rows are cut to where a plan gives every layer a codec of its own.
PLAN_SHARES = (1.0, 0.75, 0.5, 0.25)

#: Most layers whose codecs are chosen by exact search; beyond, an exact search would take longer than it gains.
SEARCHED_EXACTLY = 16

#: What makes two layers equal, their names and numbers apart.
_ALIKE = attrgetter(
    "kind", "rows", "capacity", "offset", "key_width", "value_width", "itemsize", "layout", "heads", "tail",
    "tail_capacity", "on_disk", "head", "evicted", "max_size", "keep", "fixed_nbytes", "token_nbytes",
)  # fmt: skip


def next_layers(layers: Iterable[Held], tokens: int) -> tuple[Held, ...]:
    """The layers after the coming step and one token more, so that an action's room outlasts a chunk."""
    return after_append(after_append(layers, tokens), 1)


def grouped(state: State, profile: Profile) -> tuple[Group, ...]:
    """Equal layers counted, with the sum of their sensitivities."""
    if not state.each:
        return tuple(Group(one, one.count) for one in state.layers)
    depth = _depth(state)
    found: dict[tuple[object, ...], tuple[Held, int, float]] = {}
    for one in state.each:
        key = _ALIKE(one)
        first, count, weight = found.get(key, (one, 0, 0.0))
        found[key] = first, count + 1, weight + profile.weight(one.index, depth)
    return tuple(Group(evolve(first, count=n, index=-1), weight) for first, n, weight in found.values())


def _depth(state: State) -> int:
    """How many layers the model has."""
    return 1 + max((one.index for one in state.each), default=-1)


# -- what is weighed ------------------------------------------------------------------------------------------------


def candidates_for(state: State, profile: Profile) -> tuple[Action, ...]:
    """Actions with a figure of quality: every codec, every scorer, and the two together.

    Evictions are solved for: just as many rows as the limit holds, for rows as they are stored now and for every codec.
    A coarse grid of ratios would throw away rows that fit. Codecs that hold every row within the limit stand alone, and
    so do those that another one beats in everything.
    """
    codecs = [one.action for one in profile.codecs]
    found: list[Action] = [Keep(), Reclaim(), *codecs]
    usable = _usable(state, profile)
    for place, rows in joined(state, profile, columns_in(state, profile)):
        evictions = [_evict(profile.evictors[i], rows) for i in usable]
        found += evictions if place < 0 else [Composite((e, codecs[place])) for e in evictions]
    return tuple(found)


def _usable(state: State, profile: Profile) -> list[int]:
    """Places of the scorers that may evict: all of them, or the one that rows are missing by already."""
    return [i for i, one in enumerate(profile.evictors) if state.evicted_by in (None, one.scorer)]


def columns_in(state: State, profile: Profile) -> list[Column]:
    """A column for each kind of layer."""
    return [column_of(group.held, profile.codec_columns, state.protect) for group in grouped(state, profile)]


def joined(state: State, profile: Profile, columns: Sequence[Column]) -> list[tuple[int, int]]:
    """Codecs to evict before, by their place in the profile (−1 for rows as they are stored), and the rows to keep."""
    limit, held = state.limit.nbytes, max((one.rows for one in state.layers if one.changeable), default=0)
    if limit is None:
        return []
    codecs = np.array([-1, *_worth_joining(state, profile, columns)], np.int64)
    now = [one for column in columns for one in (column.held.layout.unit, column.held.layout.block)]
    rows = rows_within(columns, limit, codecs, {*profile.codec_columns.units, *now}, state.tokens)
    layers = uneven(state.layers)
    even = [_even(layers, most, state.protect) for most in rows.tolist()]
    return [(place, most) for place, most in zip(codecs.tolist(), even, strict=True) if 0 < most < held]


def _worth_joining(state: State, profile: Profile, columns: Sequence[Column]) -> list[int]:
    """Codecs that no other one beats in bytes, damage and time alike, among those that can do at least where they can."""
    codecs = profile.codec_columns
    ours = [one for one in columns if one.held.changeable]
    able = np.array([one.action.layout is not None for one in profile.codecs], bool)
    for one in ours:
        able &= codecs.fits(one.held.key_dim, one.held.value_dim)
    places = np.flatnonzero(able)
    nbytes = np.zeros(places.shape, np.int64)
    for one in ours:
        nbytes = nbytes + one.nbytes_next(np.full(places.shape, ALL_ROWS), places, state.tokens)
    rows = np.full(places.shape, max((one.held.rows for one in ours), default=0), float)
    times = codecs.listed_times.at(places, rows)
    costs = (
        nbytes,
        np.array([one.kl for one in profile.codecs], float)[places],
        np.array([one.p95 for one in profile.codecs], float)[places],
        np.where(np.isnan(times), np.inf, times),
    )
    beats = codecs.undemanding[np.ix_(places, places)]
    for cost in costs:
        beats = beats & (cost[:, None] <= cost)
    other = np.zeros_like(beats)
    for cost in costs:
        other |= cost[:, None] != cost
    return [int(place) for place in places[~(beats & other).any(0)]]


def _even(layers: tuple[Held, ...], rows: int, protect: Pinned) -> int:
    """As many rows or a few less, so that an eviction leaves every layer with the same number, if there is one.

    Args:
        layers: those that may be left with different numbers of rows.
    """
    for _ in range(4 if layers else 0):
        left = rows_left(layers, Evict("sinks_window", rows=max(1, rows)), protect)
        if len(left) < 2 or min(left) >= rows:
            break
        rows = min(left)
    return rows


def _evict(figure: EvictionFigure, rows: int) -> Evict:
    return Evict(figure.scorer, rows=rows, recent=min(figure.recent, rows // 2))


@dataclass(frozen=True)
class PlannedLayers:
    """A plan with the layers as they are after it and the peak on the way, so that nothing is worked out again."""

    plan: Plan
    groups: tuple[Group, ...]
    nbytes_peak: int
    lost: Lost  #: by storing rows that are encoded already in another way


def plans_for(
    state: State, profile: Profile, feasible: Sequence[Quantize], scorer: str | None
) -> tuple[PlannedLayers, ...]:
    """Plans that give every layer a codec of its own, by the layers' sensitivity: one for each share of rows kept.

    Args:
        feasible: codecs that this backend can execute on every layer.
        scorer: for the plans that evict as well; None: no plan does.
    """
    if state.limit.nbytes is None or not feasible or not profile.sensitivity:
        return ()
    units: dict[int, list[Held]] = {}
    others = []
    for one in state.each:
        if one.changeable and one.index >= 0:
            units.setdefault(one.index, []).append(one)
        else:
            others.append(one)
    if len(units) < 2:
        return ()
    known = [figure for codec in feasible if (figure := profile.codec(codec)) is not None]
    figures = _cut_alike(known, [one for unit in units.values() for one in unit])
    eviction = None if scorer is None else profile.evictor(scorer)
    each = [one for unit in units.values() for one in unit]
    offset, held = max(one.offset for one in each), max(one.rows for one in each)
    ordered, depth = sorted(units.items()), _depth(state)
    kinds: dict[tuple[object, ...], int] = {}
    of_units = [kinds.setdefault(tuple(_ALIKE(one) for one in unit), len(kinds)) for _, unit in ordered]
    first = {kind: unit for kind, (_, unit) in reversed(list(zip(of_units, ordered, strict=True)))}
    planner = _Planner(
        state,
        profile,
        tuple(ordered),
        tuple(of_units),
        tuple(_Kind.of(first[kind], figures, state, profile) for kind in range(len(kinds))),
        tuple(others),
        tuple(profile.weight(index, depth) for index, _ in ordered),
        depth,
        state.limit.nbytes - nbytes_allocated(next_layers(others, state.tokens)),
    )
    found, layers = [], uneven(state.layers)
    for share in PLAN_SHARES:
        rows = _even(layers, round(share * offset), state.protect)
        if share < 1.0 and (eviction is None or not 0 < rows < held):
            continue
        planned = planner.plan(None if share == 1.0 or eviction is None else _evict(eviction, rows))
        if planned is not None:
            found.append(planned)
    return tuple(found)


def _cut_alike(figures: Sequence[CodecFigure], layers: Iterable[Held]) -> list[CodecFigure]:
    """Codecs of which a plan may give each layer another: those that encode rows one by one, and one kind of others.

    Layers that encode rows several together, in blocks of different sizes or behind tails of different lengths, could not
    be cut to equal rows later.
    """
    blocks = {_block(one.layout) for one in layers if one.layout.block > 1}
    if not blocks:
        several = [figure for figure in figures if layout_of(figure.action).block > 1]
        blocks = {_block(layout_of(min(several, key=lambda f: f.kl).action))} if several else set()
    return [
        figure
        for figure in figures
        if (layout := layout_of(figure.action)).block == 1 or {_block(layout)} == blocks
    ]


def _block(layout: Layout) -> tuple[int, int, int]:
    return layout.block, layout.residual, layout.sinks


@dataclass(frozen=True)
class _Choice:
    """One thing that the caches of a layer could do."""

    place: int  #: of the codec in the profile; −1 for none
    option: Option  #: bytes after it and the next step; KL before the layer's sensitivity

    def action(self, evict: Evict | None, profile: Profile) -> Action:
        codec = profile.codec_columns.actions[self.place] if self.place >= 0 else None
        parts: tuple[Action, ...] = tuple(part for part in (evict, codec) if part is not None)
        return Keep() if not parts else parts[0] if len(parts) == 1 else Composite(parts)


@dataclass(frozen=True)
class _Done:
    """What comes of a choice: a layer's caches after it, and for each its bytes before, after and beside it meanwhile."""

    action: Action
    after: tuple[Held, ...]
    nbytes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _Kind:
    """The caches of one layer, which others have alike, with the codecs that could store them."""

    unit: tuple[Held, ...]
    columns: tuple[Column, ...]
    places: NDArray[np.int64]  #: of the codecs in the profile; −1 for rows as they are stored
    kl: NDArray[np.float64]

    @classmethod
    def of(
        cls, unit: Sequence[Held], figures: Sequence[CodecFigure], state: State, profile: Profile
    ) -> _Kind:
        now = [profile.by_layout.get(one.layout) for one in unit]
        columns = tuple(column_of(one, profile.codec_columns, state.protect) for one in unit)
        if not all(f is not None or one.layout.dense for f, one in zip(now, unit, strict=True)):
            return cls(tuple(unit), columns, np.zeros(0, np.int64), np.zeros(0))
        # Codes that are there already have lost it for good.
        so_far = sum(f.kl for f in now if f is not None)
        coded = [f for f in figures if not any(coarser_already(one, f.action) for one in unit)]
        index = profile.codec_columns.index
        return cls(
            tuple(unit),
            columns,
            np.array([-1, *(index[f.action] for f in coded)], np.int64),
            np.array([so_far, *(so_far + f.kl * len(unit) for f in coded)], float),
        )

    def choices(self, evict: Evict | None, tokens: int) -> list[_Choice]:
        """Everything that these caches could do, without what another choice beats in bytes and loss alike."""
        nbytes = np.zeros(self.places.shape, np.int64)
        for one in self.columns:
            nbytes = nbytes + one.nbytes_next(self._rows(one, evict, self.places), self.places, tokens)
        front: list[_Choice] = []
        for i in np.lexsort((self.kl, nbytes)).tolist():
            kl = float(self.kl[i])
            if not front or kl < front[-1].option.loss:
                front.append(_Choice(int(self.places[i]), Option(int(nbytes[i]), kl)))
        return front

    def done(
        self, chosen: Sequence[_Choice], evict: Evict | None, state: State, profile: Profile
    ) -> list[_Done]:
        """What comes of each of the choices."""
        actions = [one.action(evict, profile) for one in chosen]
        afters = [after_action(self.unit, action, state.protect) for action in actions]
        places = np.array([one.place for one in chosen], np.int64)
        nbytes: list[list[tuple[int, int, int]]] = [[] for _ in chosen]
        for i, column in enumerate(self.columns):
            before = nbytes_allocated([column.held])
            if column.held.on_disk:
                beside = [transient_of_action(column.held, action, state.protect) for action in actions]
            else:
                changed = column.changed(self._rows(column, evict, places), places)
                scoring = 0 if evict is None else np.where(changed.cut, column.scoring(evict.scorer), 0)
                beside = np.maximum(scoring, np.maximum(changed.moving, changed.coding)).tolist()
            for sizes, after, most in zip(nbytes, afters, beside, strict=True):
                sizes.append((before, nbytes_allocated([after[i]]), most))
        return [
            _Done(action, after, tuple(sizes))
            for action, after, sizes in zip(actions, afters, nbytes, strict=True)
        ]

    @staticmethod
    def _rows(column: Column, evict: Evict | None, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full(places.shape, ALL_ROWS if evict is None else evict.rows_kept(column.held.rows))


#: A choice as the number of a kind and its place in that kind's front.
_Place = tuple[int, int]


@dataclass(frozen=True)
class _Planner:
    """What is the same for every share of rows."""

    state: State
    profile: Profile
    #: Number of a layer, and its caches (models may have several in one).
    units: tuple[tuple[int, list[Held]], ...]
    of_units: tuple[int, ...]  #: the kind of each
    kinds: tuple[_Kind, ...]
    others: tuple[Held, ...]
    weights: tuple[float, ...]
    depth: int
    room: int  #: bytes

    def plan(self, evict: Evict | None) -> PlannedLayers | None:
        """The codecs that lose least in all within the room; None if there are none, or all are the same."""
        fronts = [one.choices(evict, self.state.tokens) for one in self.kinds]
        places = self._allocated(fronts)
        if places is None:
            return None
        chosen = [(kind, place) for kind, place in zip(self.of_units, places, strict=True)]
        done = self._all_done(chosen, fronts, evict)
        # Equal actions become the same object, to be told from others without comparing.
        same: dict[Action, Action] = {}
        actions = {key: same.setdefault(one.action, one.action) for key, one in done.items()}
        if len(same) < 2:
            return None  # the same for all: that is among the other candidates
        sums = self._sums(chosen)
        plan = Plan(
            in_ranges([(unit[0], actions[key]) for unit, key in zip(self.units, chosen, strict=True)])
        )
        return PlannedLayers(plan, self._groups(sums, done), self._peak(chosen, done), self._lost(sums, done))

    def _allocated(self, fronts: list[list[_Choice]]) -> list[int] | None:
        """For every unit the place of its choice in its front; None if nothing fits. Fronts are cut to their hulls."""
        if len(self.units) > SEARCHED_EXACTLY:
            for front in fronts:
                front[:] = [front[i] for i in reversed(lower_hull([one.option for one in front]))]
            # Weights scale a layer's losses, so what is left of its choices lies on its hull.
            hulls = [[one.option for one in front] for front in fronts]
            return allocate_alike(self.of_units, hulls, self.weights, self.room)
        options = [
            [Option(one.option.nbytes, one.option.loss * weight) for one in fronts[kind]]
            for kind, weight in zip(self.of_units, self.weights, strict=True)
        ]
        found = allocate(options, self.room) if all(options) else None
        return None if found is None else list(found.chosen)

    def _all_done(
        self, chosen: Sequence[_Place], fronts: Sequence[Sequence[_Choice]], evict: Evict | None
    ) -> dict[_Place, _Done]:
        once = list(dict.fromkeys(chosen))
        found: dict[_Place, _Done] = {}
        for number, kind in enumerate(self.kinds):
            mine = [key for key in once if key[0] == number]
            options = [fronts[number][place] for _, place in mine]
            found.update(zip(mine, kind.done(options, evict, self.state, self.profile), strict=True))
        return found

    def _sums(self, chosen: Sequence[_Place]) -> dict[_Place, tuple[int, float]]:
        """How many layers do the same, and their weights together."""
        sums: dict[_Place, tuple[int, float]] = {}
        for key, weight in zip(chosen, self.weights, strict=True):
            count, so_far = sums.get(key, (0, 0.0))
            sums[key] = count + 1, so_far + weight
        return sums

    def _groups(
        self, sums: Mapping[_Place, tuple[int, float]], done: Mapping[_Place, _Done]
    ) -> tuple[Group, ...]:
        ours = [
            Group(evolve(held, count=n, index=-1), weight)
            for key, (n, weight) in sums.items()
            for held in done[key].after
        ]
        others = (Group(one, self.profile.weight(one.index, self.depth)) for one in self.others)
        return (*ours, *others)

    def _lost(self, sums: Mapping[_Place, tuple[int, float]], done: Mapping[_Place, _Done]) -> Lost:
        if all(one.layout.dense for kind in self.kinds for one in kind.unit):
            return 0.0, 0.0
        before = [
            Group(evolve(one, count=n, index=-1), weight)
            for key, (n, weight) in sums.items()
            for one in self.kinds[key[0]].unit
        ]
        after = [held for key in sums for held in done[key].after]
        found = lost_by(before, after, self.profile)
        assert found is not None, "a layer without a figure has no choice"
        # Shares of the units alone; windows beside them count as layers too.
        layers = sum(group.held.count for group in before)
        windows = sum(one.kind in LANE_KINDS and one.rows > 0 for one in self.others)
        share = layers / (layers + windows)
        return found[0] * share, found[1] * share

    def _peak(self, chosen: Sequence[_Place], done: Mapping[_Place, _Done]) -> int:
        """As :func:`~lumina_cache.estimate.carried_out` has it."""
        counts = Counter(chosen)
        each = {key: done[key].nbytes for key in counts}
        first = nbytes_allocated(self.state.layers)
        last = first + sum(
            counts[key] * (after - before) for key, caches in each.items() for before, after, _ in caches
        )
        most = max(first, last)
        for caches in each.values():
            for before, after, beside in caches:
                most = max(most, max(first - before, last - after) + before + beside)
        return most


# -- weighing -------------------------------------------------------------------------------------------------------


def weigh(
    state: State,
    actions: Iterable[Action],
    backend: BackendProfile,
    profile: Profile,
    planned: Sequence[PlannedLayers] = (),
) -> tuple[Candidate, ...]:
    """Bytes, score terms and reasons for every action, and for every plan that was worked out."""
    return Weighing.of(state, backend, profile).candidates(actions, planned)


@dataclass(frozen=True)
class _After:
    """What depends on how many rows stay and how they are stored, not on which ones: actions share it."""

    stored: Stored
    lost: Lost | None
    nbytes_next: int
    nbytes_peak: int  #: while rows are moved and encoded
    nbytes_before: int = 0  #: most bytes allocated before or after the first part
    chosen_from: tuple[Held, ...] = ()  #: layers that the first part takes rows from
    rows: int = 0  #: most that a layer holds
    grown: int = 0  #: rows that layers gain until the prompt ends
    bits: tuple[int, int] = (0, 0)  #: fewest of any layer's keys and values

    def peak_with(self, first: Action) -> int:
        """The peak where the rows that stay are chosen by ``first``."""
        if not isinstance(first, Evict):
            return self.nbytes_peak
        scoring = max((scoring_nbytes(one, first) for one in self.chosen_from), default=0)
        return max(self.nbytes_peak, self.nbytes_before + scoring)


@dataclass(frozen=True)
class Weighing:
    """A state with everything that is the same for all actions, and the actions weighed in it."""

    state: State
    profile: Profile
    facts: Facts
    groups: tuple[Group, ...]
    touched: int
    depth: int
    same: Inputs  #: what is the same for every action
    columns: list[Column]  #: of the groups; empty where codecs cannot be weighed together
    ahead: Ahead
    against: Against | None
    known: dict[object, _After]
    plans: dict[int, PlannedLayers]

    @classmethod
    def of(
        cls, state: State, backend: BackendProfile, profile: Profile, against: Against | None = None
    ) -> Weighing:
        """
        Args:
            against: more reasons against an action than the classifier knows of; nothing is planned with such codecs.
        """
        facts = facts_of(
            backend,
            state.layers,
            available=state.available,
            rows_must_stay=state.rows_must_stay,
            pinned=held_within(state.protect, state.layers),
            protect=state.protect,
        )
        # Equal layers are judged together, and only layers with their numbers can be told apart by a plan.
        facts = replace(facts, numbered=numbered(state.each))
        seen, coming = max((one.offset for one in state.layers), default=0), state.prompt_tokens
        end = seen + max(coming, state.to_come)
        same = Inputs(
            nbytes_next=0,
            nbytes_peak=0,
            limit=state.limit.nbytes,
            memory=None if state.available is None else nbytes_allocated(state.layers) + state.available,
            kl=None,
            p95=None,
            lost_kl=None,
            lost_p95=None,
            source="",
            step_seconds=profile.step_at(end),
            horizon=state.steps,
            prompt_tokens=state.prompt_likely,
            prompt_seconds=profile.chunk_at(seen + coming // 2),
            error_mean=state.prediction_error[0],
            error_spread=state.prediction_error[1],
        )
        groups, touched = grouped(state, profile), nbytes_live(state.layers)
        codecs = profile.codec_columns
        together = codecs.built and len(codecs) > 0 and not any(one.on_disk for one in state.layers)
        columns = [column_of(group.held, codecs, state.protect) for group in groups] if together else []
        ahead = Ahead(state, profile, facts, same, columns, against)
        return cls(
            state,
            profile,
            facts,
            groups,
            touched,
            _depth(state),
            same,
            columns,
            ahead,
            against,
            {},
            {},
        )

    def everything(self) -> tuple[Candidate, ...] | Table:
        """All candidates: those of :func:`candidates_for`, and the plans that follow from what is feasible of them."""
        state, profile, columns = self.state, self.profile, self.columns
        if not columns or not any(is_ours(one) for one in state.layers):
            found = self.candidates(candidates_for(state, profile))
            return (*found, *self.planned(_feasible_codecs(found), _best_scorer(found)))
        families = Families(
            state,
            profile,
            self.groups,
            columns,
            self.facts,
            self.same,
            self.ahead,
            joined(state, profile, columns),
            _usable(state, profile),
        )
        reclaim = self.candidates([Reclaim()])
        plans = self.planned(families.feasible_codecs(), families.best_scorer())
        return Table([families.part(0, 1), Part.of(reclaim), families.part(1, len(families)), Part.of(plans)])

    def planned(self, feasible: Sequence[Quantize], scorer: str | None) -> tuple[Candidate, ...]:
        """Plans of the codecs that lose least, of those that are fast for their bytes, and of one codec for some layers."""
        state, profile = self.state, self.profile
        if self.against is not None:
            feasible = [codec for codec in feasible if not self.against(codec)]
        # Room for all that is expected: few layers now, and few more with every chunk, end where all of them at once
        # would not have.
        ahead = replace(state, tokens=max(state.tokens, state.to_come))
        plans = plans_for(ahead, profile, feasible, scorer) or plans_for(state, profile, feasible, scorer)
        known, swift = {one.plan for one in plans}, quick(state, profile, feasible)
        if len(swift) < len(feasible):
            plans += tuple(p for p in plans_for(ahead, profile, swift, None) if p.plan not in known)
        alike = len({one.layout for one in state.layers if one.changeable}) < 2
        coarser = [] if alike else [one.action for one in profile.codecs if self._only_coarser(one.action)]
        return self.candidates((p for p in on_the_rest(state, coarser) if p not in known), plans)

    def _only_coarser(self, codec: Quantize) -> bool:
        """Whether nothing speaks against a codec but that some layer has as few bits already."""
        return {reason.code for reason in reasons_against(codec, self.facts)} == {"already_coarser"}

    def candidates(
        self, actions: Iterable[Action], planned: Sequence[PlannedLayers] = ()
    ) -> tuple[Candidate, ...]:
        """Each of the actions weighed by itself, and each of the plans that were worked out."""
        self.plans.update((id(one.plan), one) for one in planned)
        every = [*actions, *(one.plan for one in planned)]
        afters = [self._after(one) for one in every]
        ends = self._ends(afters, [_scorer_of(one) or self.state.evicted_by for one in every])
        return tuple(map(self._candidate, every, afters, ends))

    def _candidate(self, action: Action, after: _After, end: tuple[Expected, str]) -> Candidate:
        figures, then = end
        inputs = evolve(
            self.same,
            nbytes_next=after.nbytes_next,
            nbytes_peak=after.peak_with(action.parts[0]),
            kl=figures.kl,
            p95=figures.p95,
            lost_kl=None if after.lost is None else after.lost[0],
            lost_p95=None if after.lost is None else after.lost[1],
            source=figures.source,
            time_ratio=figures.time_ratio,
            prompt_ratio=figures.prompt_ratio,
            kept=after.stored.kept,
            then=then,
            own_seconds=own_seconds(action, self.touched, self.profile, self.depth),
        )
        reasons = reasons_against(action, self.facts)
        return Candidate(action, reasons, inputs, score(inputs, self.state.weights))

    def _ends(self, afters: Sequence[_After], scorers: Sequence[str | None]) -> list[tuple[Expected, str]]:
        """What is expected where the prompt ends, and the codec that has to follow until then."""
        found = [(one.stored.expected, "") for one in afters]
        places = [-1 if one is None else self.profile.eviction_columns.place(one) for one in scorers]
        rows: list[tuple[float, ...]] = []
        known: list[int] = []
        for i, (after, place) in enumerate(zip(afters, places, strict=True)):
            x, now = after.stored.expected, after.stored.kept_now
            if x.kl is None or x.p95 is None:
                continue
            if now < 1.0 and place < 0:
                found[i] = Expected(None, None, None, f"no figure for evicting by {scorers[i]}"), ""
                continue
            ratios = (math.nan if one is None else one for one in (x.time_ratio, x.prompt_ratio))
            bits = after.bits
            rows.append((x.kl, x.p95, *ratios, after.stored.kept, now, place, after.rows, after.grown, *bits))
            known.append(i)
        if not known:
            return found
        floats, integers = np.array([one[:6] for one in rows]).T, np.array([one[6:] for one in rows]).T
        ends = self.ahead.ends(Taken(*floats, *integers))
        for i, kl, p95, step, chunk, then in zip(
            known, *(one.tolist() for one in vars(ends).values()), strict=True
        ):
            x, texts = afters[i].stored, self.profile.codec_columns.texts
            found[i] = (
                Expected(
                    kl,
                    p95,
                    None if math.isnan(step) else step,
                    source_of(self.profile) if x.kept < 1.0 or then >= 0 else x.expected.source,
                    None if math.isnan(chunk) else chunk,
                ),
                "" if then < 0 else texts[then],
            )
        return found

    def _after(self, action: Action) -> _After:
        key = id(action) if isinstance(action, Plan) else (_storage(action.parts[0]), *action.parts[1:])
        if key not in self.known:
            self.known[key] = self._work_out(action)
        return self.known[key]

    def _work_out(self, action: Action) -> _After:
        planned = self.plans.get(id(action))
        if planned is not None:
            return self._leaving(planned.groups, planned.lost, planned.nbytes_peak)
        if isinstance(action, Plan):
            each, peak = carried_out(self.state.each, action, self.state.protect)
            weights = [self.profile.weight(one.index, self.depth) for one in self.state.each]
            before_it = [Group(one, w) for one, w in zip(self.state.each, weights, strict=True)]
            lost = lost_by(before_it, each, self.profile)
            return self._leaving(grouped(replace(self.state, each=each), self.profile), lost, peak)
        held, protect = tuple(group.held for group in self.groups), self.state.protect
        first, *rest = action.parts
        before, chosen_from = nbytes_allocated(held), tuple[Held, ...]()
        if isinstance(first, Evict):
            first = evolve(first, scorer="sinks_window")  # which takes no more room than any
            cut = after_action(held, first, protect)
            before = max(before, nbytes_allocated(cut))
            chosen_from = tuple(a for a, b in zip(held, cut, strict=True) if a != b)
        layers, peak = parts_carried_out(held, (first, *rest), protect)
        after = tuple(Group(one, g.weight) for one, g in zip(layers, self.groups, strict=True))
        lost = lost_by(self.groups, layers, self.profile)
        return self._leaving(after, lost, peak, before, chosen_from, self._own(action))

    def _own(self, action: Action) -> dict[Layout, CodecFigure]:
        """Figures of the codecs that ``action`` names."""
        codecs = (part for part in singles(action) if isinstance(part, Quantize))
        figures = (figure for part in codecs if (figure := self.profile.codec(part)) is not None)
        return {layout: one for one in figures if (layout := one.action.layout) is not None}

    def _leaving(
        self,
        after: Sequence[Group],
        lost: Lost | None,
        peak: int,
        before: int = 0,
        chosen_from: tuple[Held, ...] = (),
        own: Mapping[Layout, CodecFigure] = MappingProxyType({}),
    ) -> _After:
        nbytes = nbytes_allocated(next_layers((g.held for g in after), self.state.tokens))
        so_far = self.state.lost
        lost = None if lost is None or so_far is None else (lost[0] + so_far[0], lost[1] + so_far[1])
        rows = [g.held for g in after if g.held.changeable]
        grown = int(self.ahead.grown(nbytes, sum(one.count * row_nbytes(one) for one in rows)))
        known = stored(after, self.profile, self.ahead, grown, lost, own)
        left = max((one.rows for one in rows), default=0)
        return _After(
            known,
            lost,
            nbytes,
            peak,
            before,
            chosen_from,
            left,
            grown,
            coarsest([one.layout for one in rows]),
        )


def _feasible_codecs(candidates: Iterable[Candidate]) -> list[Quantize]:
    return [c.action for c in candidates if c.feasible and isinstance(c.action, Quantize)]


def _best_scorer(candidates: Iterable[Candidate]) -> str | None:
    """The feasible scorer that is expected to lose least."""
    evictions = [
        (c.inputs.kl, first.scorer)
        for c in candidates
        if c.feasible and isinstance(first := c.action.parts[0], Evict) and c.inputs.kl is not None
    ]
    return min(evictions)[1] if evictions else None


def _scorer_of(action: Action) -> str | None:
    """The first scorer that ``action`` evicts by."""
    each = action.distinct if isinstance(action, Plan) else (action,)
    return next((part.scorer for one in each for part in one.parts if isinstance(part, Evict)), None)


def _storage(part: Action) -> object:
    """What of the first part decides how rows are stored afterwards, and how many."""
    return (part.rows, part.ratio, part.sinks) if isinstance(part, Evict) else part
