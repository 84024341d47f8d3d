"""What is weighed in a state: actions with a figure of quality, solved for the bytes that may be held."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType

from ..actions import DEFAULT_SINKS, Action, Composite, Evict, Keep, Plan, Quantize, Reclaim, singles
from ..allocate import Option, allocate, lower_hull
from ..backend.capabilities import BackendProfile
from ..backend.feasibility import Reason, Verdict, classify
from ..codecs import Layout
from ..codecs.base import grown_capacity
from ..estimate import (
    LANE_KINDS,
    Held,
    after_action,
    after_append,
    carried_out,
    dense_row_nbytes,
    held_within,
    kept_of,
    layout_of,
    nbytes_allocated,
    nbytes_live,
    parts_carried_out,
    rows_left,
    scoring_nbytes,
    transient_of_action,
    uneven,
)
from ..evolve import evolve
from ..profile import CodecFigure, EvictionFigure, Profile
from .expected import Expected, Lost, Stored, evicted, lost_by, own_seconds, stored
from .partial import coarser_already
from .score import Inputs, score
from .values import Candidate, Group, State

__all__ = ["PlannedLayers", "candidates_for", "grouped", "next_layers", "plans_for", "rows_that_fit", "weigh"]

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


# -- how many rows fit ----------------------------------------------------------------------------------------------


def rows_that_fit(state: State, limit: int, codec: Quantize | None) -> int:
    """The most rows that an eviction, and ``codec`` after it, may leave to stay within ``limit`` bytes.

    Bytes are those after the coming step and one token more; 0 if no number of rows is few enough. Plain numbers, without
    building values: it is asked once for every codec in every decision. ``codec`` None stands for rows as they are
    stored.
    """
    ours = [one for one in state.layers if one.changeable]
    others: Iterable[Held] = [one for one in state.layers if not one.changeable]
    if codec is not None:
        others = after_action(others, codec)
    fixed = nbytes_allocated(next_layers(others, state.tokens))

    stores = [_Store.of(one, codec) for one in ours]

    def nbytes_with(rows: int) -> int:
        return fixed + sum(store.nbytes_next(rows, state) for store in stores)

    low, high = 0, max((one.rows for one in ours), default=0)
    low_bytes, high_bytes = fixed, nbytes_with(high)
    if high_bytes <= limit:
        return high
    while high - low > 1:
        # Bytes are close to linear in rows: guess there first, and halve where that does not help.
        guess = low + int((limit - low_bytes) * (high - low) / max(1, high_bytes - low_bytes))
        for rows in {
            min(high - 1, max(low + 1, guess)),
            min(high - 1, max(low + 1, guess + 1)),
            (low + high) // 2,
        }:
            if not low < rows < high:
                continue
            nbytes = nbytes_with(rows)
            if nbytes <= limit:
                low, low_bytes = rows, nbytes
            else:
                high, high_bytes = rows, nbytes
    return low


@dataclass(frozen=True)
class _Store:
    """Equal layers, and how they will be stored."""

    held: Held
    codec: Quantize | None
    layout: Layout
    row: int  #: bytes of one sealed row then
    dense_row: int

    @classmethod
    def of(cls, held: Held, codec: Quantize | None) -> _Store:
        layout = held.layout if codec is None else layout_of(codec)
        row = layout.row_nbytes(held.key_width, held.value_width, held.itemsize)
        return cls(held, codec, layout, row, dense_row_nbytes(held))

    def nbytes_next(self, rows: int, state: State) -> int:
        """Bytes after an eviction to ``rows`` rows, the codec, a step of the state's tokens, and one token more."""
        one, layout = self.held, self.layout
        if one.on_disk:
            eviction = Evict("sinks_window", rows=max(1, rows))
            action = eviction if self.codec is None else Composite((eviction, self.codec))
            return nbytes_allocated(next_layers(after_action([one], action, state.protect), state.tokens))
        head, tail, capacity, room = one.head, one.tail, one.capacity, one.tail_capacity
        sealed = one.rows - head - tail
        if rows < one.rows:
            in_tail, kept = kept_of(one, max(1, rows), DEFAULT_SINKS, state.protect)
            if head + in_tail + kept < one.rows:
                tail, sealed, capacity = in_tail, kept, kept
        held = head + tail + sealed
        if layout is not one.layout and layout != one.layout:
            head = min(layout.sinks, held)
            capacity = sealed = layout.sealable(held - head)
            tail, room = held - head - sealed, layout.tail_capacity
        for n in (state.tokens, 1):
            if n == 0:
                continue
            first = min(n, layout.sinks - head) if held == head < layout.sinks else 0
            head, tail, held, room = head + first, tail + n - first, held + n, layout.tail_capacity
            more = layout.sealable(tail)
            capacity = grown_capacity(sealed, capacity, more)
            sealed, tail = sealed + more, tail - more
        return one.count * (capacity * self.row + (head + room) * self.dense_row + one.fixed_nbytes)


# -- what is weighed ------------------------------------------------------------------------------------------------


def candidates_for(state: State, profile: Profile) -> tuple[Action, ...]:
    """Actions with a figure of quality: every codec, every scorer, and the two together.

    Evictions are solved for: just as many rows as the limit holds, for rows as they are stored now and for every codec.
    A coarse grid of ratios would throw away rows that fit. Codecs that hold every row within the limit stand alone, and
    so do those that another one beats in everything.
    """
    codecs = [one.action for one in profile.codecs]
    found: list[Action] = [Keep(), Reclaim(), *codecs]
    limit = state.limit.nbytes
    if limit is None:
        return tuple(found)
    held = max((one.rows for one in state.layers if one.changeable), default=0)
    usable = [one for one in profile.evictors if state.evicted_by in (None, one.scorer)]
    for codec in (None, *_worth_joining(state, profile)):
        rows = _even(state, rows_that_fit(state, limit, codec))
        if 0 < rows < held:
            evictions = [_evict(figure, rows) for figure in usable]
            found += evictions if codec is None else [Composite((e, codec)) for e in evictions]
    return tuple(found)


def _worth_joining(state: State, profile: Profile) -> list[Quantize]:
    """Codecs that no other one beats in bytes, damage and time alike, among those that can do at least where they can."""
    ours = [one for one in state.layers if one.changeable]
    rows = max((one.rows for one in ours), default=0)
    able = []
    for figure in profile.codecs:
        layout = figure.action.layout
        if layout is None or any(layout.why_not(one.key_dim, one.value_dim) for one in ours):
            continue
        nbytes = sum(_Store.of(one, figure.action).nbytes_next(one.rows, state) for one in ours)
        time = figure.time_at(rows)
        costs = (nbytes, figure.kl, figure.p95, math.inf if time is None else time)
        able.append((figure.action, figure.action.requires, costs))
    return [
        action
        for action, requires, costs in able
        if not any(
            other != costs and needs <= requires and all(a <= b for a, b in zip(other, costs, strict=True))
            for _, needs, other in able
        )
    ]


def _even(state: State, rows: int) -> int:
    """As many rows or a few less, so that an eviction leaves every layer with the same number, if there is one."""
    layers = uneven(state.layers)
    for _ in range(4):
        left = rows_left(layers, Evict("sinks_window", rows=max(1, rows)), state.protect)
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
    planner = _Planner(
        state,
        profile,
        tuple(sorted(units.items())),
        tuple(others),
        figures,
        tuple(profile.weight(index, _depth(state)) for index in sorted(units)),
        state.limit.nbytes - nbytes_allocated(next_layers(others, state.tokens)),
    )
    found = []
    for share in PLAN_SHARES:
        rows = _even(state, round(share * offset))
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

    action: Action
    nbytes_next: int
    kl: float  #: before the layer's sensitivity


@dataclass(frozen=True)
class _Done:
    """What comes of a choice: a layer's caches after it, and for each its bytes before, after and beside it meanwhile."""

    after: tuple[Held, ...]
    nbytes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _Planner:
    """What is the same for every share of rows."""

    state: State
    profile: Profile
    units: tuple[
        tuple[int, list[Held]], ...
    ]  #: number of a layer, and its caches (models may have several in one)
    others: tuple[Held, ...]
    figures: Sequence[CodecFigure]
    weights: tuple[float, ...]
    room: int  #: bytes

    def plan(self, evict: Evict | None) -> PlannedLayers | None:
        """The codecs that lose least in all within the room; None if there are none, or all are the same."""
        exact = len(self.units) <= SEARCHED_EXACTLY
        kinds: dict[tuple[object, ...], list[_Choice]] = {}
        choices: list[list[_Choice]] = []
        for _, unit in self.units:
            key = tuple(_ALIKE(one) for one in unit)
            if key not in kinds:
                front = self._choices(unit, evict)
                if not exact:
                    hull = lower_hull([Option(c.nbytes_next, c.kl) for c in front])
                    front = [front[i] for i in reversed(hull)]
                kinds[key] = front
            choices.append(kinds[key])
        options = [
            [Option(one.nbytes_next, one.kl * weight) for one in each]
            for each, weight in zip(choices, self.weights, strict=True)
        ]
        if not all(options):
            return None
        # Weights scale a layer's losses, so what is left of its choices lies on its hull.
        hulls = None if exact else [list(range(len(each)))[::-1] for each in choices]
        found = allocate(options, self.room, exact=exact, hulls=hulls)
        if found is None:
            return None
        chosen = [each[j] for each, j in zip(choices, found.chosen, strict=True)]
        if len({one.action for one in chosen}) < 2:
            return None  # the same for all: that is among the other candidates
        plan = Plan(_ranges([(unit[0], one.action) for unit, one in zip(self.units, chosen, strict=True)]))
        done = self._all_done(chosen)
        return PlannedLayers(
            plan, self._groups(chosen, done), self._peak(chosen, done), self._lost(done, chosen)
        )

    def _all_done(self, chosen: Sequence[_Choice]) -> dict[int, _Done]:
        done: dict[int, _Done] = {}  # equal layers share their choices
        for (_, unit), one in zip(self.units, chosen, strict=True):
            if id(one) not in done:
                done[id(one)] = self._done(unit, one.action)
        return done

    def _choices(self, unit: Sequence[Held], evict: Evict | None) -> list[_Choice]:
        """Everything that these caches could do, without what another choice beats in bytes and loss alike."""
        figures = [self.profile.by_layout.get(one.layout) for one in unit]
        known = all(f is not None or one.layout.dense for f, one in zip(figures, unit, strict=True))
        if not known:
            return []
        now = sum(
            f.kl for f in figures if f is not None
        )  # codes that are there already have lost it for good
        stay = [(None, now)]
        coded = [
            (f.action, now + f.kl * len(unit))
            for f in self.figures
            if not any(coarser_already(one, f.action) for one in unit)
        ]
        found = sorted(
            ((self._nbytes_next(unit, evict, codec), kl, codec) for codec, kl in (*stay, *coded)),
            key=lambda one: one[:2],
        )
        front: list[_Choice] = []
        for nbytes, kl, codec in found:
            if not front or kl < front[-1].kl:
                parts: tuple[Action, ...] = tuple(part for part in (evict, codec) if part is not None)
                action = Keep() if not parts else parts[0] if len(parts) == 1 else Composite(parts)
                front.append(_Choice(action, nbytes, kl))
        return front

    def _nbytes_next(self, unit: Sequence[Held], evict: Evict | None, codec: Quantize | None) -> int:
        return sum(
            _Store.of(one, codec).nbytes_next(
                one.rows if evict is None else evict.rows_kept(one.rows), self.state
            )
            for one in unit
        )

    def _done(self, unit: Sequence[Held], action: Action) -> _Done:
        protect = self.state.protect
        after = after_action(unit, action, protect)
        nbytes = tuple(
            (nbytes_allocated([a]), nbytes_allocated([b]), transient_of_action(a, action, protect))
            for a, b in zip(unit, after, strict=True)
        )
        return _Done(after, nbytes)

    def _groups(self, chosen: Sequence[_Choice], done: Mapping[int, _Done]) -> tuple[Group, ...]:
        sums: dict[int, tuple[int, float]] = {}
        for one, weight in zip(chosen, self.weights, strict=True):
            count, so_far = sums.get(id(one), (0, 0.0))
            sums[id(one)] = count + 1, so_far + weight
        ours = [
            Group(evolve(held, count=n, index=-1), weight)
            for key, (n, weight) in sums.items()
            for held in done[key].after
        ]
        depth = _depth(self.state)
        return (*ours, *(Group(one, self.profile.weight(one.index, depth)) for one in self.others))

    def _lost(self, done: Mapping[int, _Done], chosen: Sequence[_Choice]) -> Lost:
        before = [
            Group(one, weight)
            for (_, unit), weight in zip(self.units, self.weights, strict=True)
            for one in unit
        ]
        after = [held for one in chosen for held in done[id(one)].after]
        found = lost_by(before, after, self.profile)
        assert found is not None, "a layer without a figure has no choice"
        # Shares of the units alone; windows beside them count as layers too.
        windows = sum(one.kind in LANE_KINDS and one.rows > 0 for one in self.others)
        share = len(before) / (len(before) + windows)
        return found[0] * share, found[1] * share

    def _peak(self, chosen: Sequence[_Choice], done: Mapping[int, _Done]) -> int:
        """As :func:`~lumina_cache.estimate.carried_out` has it."""
        each = [one for choice in chosen for one in done[id(choice)].nbytes]
        first = nbytes_allocated(self.state.layers)
        last = first + sum(after - before for before, after, _ in each)
        most = max(first, last)
        for before, after, beside in each:
            most = max(most, max(first - before, last - after) + before + beside)
        return most


def _ranges(chosen: Iterable[tuple[int, Action]]) -> tuple[tuple[tuple[int, int], Action], ...]:
    """Runs of neighbouring layers with the same action; layers that are kept as they are need no name."""
    runs: list[tuple[int, int, Action]] = []
    for index, action in chosen:
        if runs and runs[-1][1] == index - 1 and runs[-1][2] == action:
            runs[-1] = (runs[-1][0], index, action)
        elif not isinstance(action, Keep):
            runs.append((index, index, action))
    return tuple(((first, last), action) for first, last, action in runs)


# -- weighing -------------------------------------------------------------------------------------------------------


def weigh(
    state: State,
    actions: Iterable[Action],
    backend: BackendProfile,
    profile: Profile,
    planned: Sequence[PlannedLayers] = (),
) -> tuple[Candidate, ...]:
    """Bytes, score terms and reasons for every action, and for every plan that was worked out."""
    actions = list(actions)
    singly = [*(a for a in actions if isinstance(a, Plan)), *(one.plan for one in planned)]
    verdicts = (
        *_judged([a for a in actions if not isinstance(a, Plan)], state, state.layers, backend),
        # Only layers with their numbers can be told apart by a plan.
        *_judged(singly, state, state.each or state.layers, backend),
    )
    plans = {id(one.plan): one for one in planned}
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
        step_seconds=profile.step_seconds,
        horizon=state.horizon,
        prompt_tokens=state.prompt_tokens,
        prompt_seconds=profile.prompt_seconds,
        error_mean=state.prediction_error[0],
        error_spread=state.prediction_error[1],
    )
    groups, touched = grouped(state, profile), nbytes_live(state.layers)
    weighing = _Weighing(state, profile, groups, touched, _depth(state), same, {}, plans)
    return tuple(weighing.candidate(v.action, v.reasons) for v in verdicts)


def _judged(
    actions: Sequence[Action], state: State, layers: Sequence[Held], backend: BackendProfile
) -> tuple[Verdict, ...]:
    return classify(
        actions,
        backend,
        layers,
        available=state.available,
        rows_must_stay=state.rows_must_stay,
        pinned=held_within(state.protect, layers),
        protect=state.protect,
    )


@dataclass(frozen=True)
class _After:
    """What depends on how many rows stay and how they are stored, not on which ones: actions share it."""

    stored: Stored
    lost: Lost | None
    nbytes_next: int
    nbytes_peak: int  #: while rows are moved and encoded
    nbytes_before: int = 0  #: most bytes allocated before or after the first part
    chosen_from: tuple[Held, ...] = ()  #: layers that the first part takes rows from

    def peak_with(self, first: Action) -> int:
        """The peak where the rows that stay are chosen by ``first``."""
        if not isinstance(first, Evict):
            return self.nbytes_peak
        scoring = max((scoring_nbytes(one, first) for one in self.chosen_from), default=0)
        return max(self.nbytes_peak, self.nbytes_before + scoring)


@dataclass(frozen=True)
class _Weighing:
    state: State
    profile: Profile
    groups: tuple[Group, ...]
    touched: int
    depth: int
    same: Inputs  #: what is the same for every action
    known: dict[object, _After]
    plans: Mapping[int, PlannedLayers]

    def candidate(self, action: Action, reasons: tuple[Reason, ...]) -> Candidate:
        state = self.state
        after = self._after(action)
        parts = singles(action) if isinstance(action, Plan) else action.parts
        scorer = next((p.scorer for p in parts if isinstance(p, Evict)), state.evicted_by)
        figures: Expected = evicted(after.stored, self.profile, scorer)
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
            own_seconds=own_seconds(action, self.touched, self.profile, self.depth),
        )
        return Candidate(action, reasons, inputs, score(inputs, state.weights))

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
        return _After(stored(after, self.profile, lost, own), lost, nbytes, peak, before, chosen_from)


def _storage(part: Action) -> object:
    """What of the first part decides how rows are stored afterwards, and how many."""
    return (part.rows, part.ratio, part.sinks) if isinstance(part, Evict) else part
