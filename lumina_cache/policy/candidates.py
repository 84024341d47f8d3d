"""What is weighed in a state: actions with a figure of quality, solved for the bytes that may be held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from ..actions import DEFAULT_SINKS, Action, Composite, Evict, Keep, Plan, Quantize, Reclaim, singles
from ..allocate import Option, allocate
from ..backend.capabilities import BackendProfile
from ..backend.feasibility import Reason, classify
from ..codecs import Layout
from ..codecs.base import grown_capacity
from ..estimate import (
    Held,
    after_action,
    after_append,
    dense_row_nbytes,
    held_within,
    kept_of,
    nbytes_allocated,
    nbytes_live,
    peak_of_action,
)
from ..profile import CodecFigure, EvictionFigure, Profile
from .expected import Expected, Stored, evicted, own_seconds, stored
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
    changeable = sum(one.changeable for one in state.each)
    found: dict[tuple[object, ...], tuple[Held, int, float]] = {}
    for one in state.each:
        key = _ALIKE(one)
        first, count, weight = found.get(key, (one, 0, 0.0))
        found[key] = first, count + 1, weight + profile.weight(one.index, changeable)
    return tuple(Group(replace(first, count=n, index=-1), weight) for first, n, weight in found.values())


# -- how many rows fit ----------------------------------------------------------------------------------------------


def rows_that_fit(state: State, limit: int, codec: Quantize | None) -> int:
    """The most rows per layer that stay within ``limit`` bytes after the coming step and one token more; 0 if none do.

    As ``most_rows_within(layers, limit, then=next_layers, quantize=…)`` in plain numbers, without building values: it is
    asked once for every codec in every decision. ``codec`` None stands for rows as they are stored.
    """
    tokens, layout = state.tokens, None if codec is None else codec.layout
    ours = [one for one in state.layers if one.changeable]
    others: Iterable[Held] = [one for one in state.layers if not one.changeable]
    if codec is not None:
        others = after_action(others, codec)
    fixed = nbytes_allocated(next_layers(others, tokens))
    low, high = 0, max((one.rows for one in ours), default=0)
    low_bytes, high_bytes = fixed, fixed + sum(_after(one, high, state, layout) for one in ours)
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
            nbytes = fixed + sum(_after(one, rows, state, layout) for one in ours)
            if nbytes <= limit:
                low, low_bytes = rows, nbytes
            else:
                high, high_bytes = rows, nbytes
    return low


def _after(one: Held, rows: int, state: State, layout: Layout | None) -> int:
    """Bytes of layers cut to ``rows`` rows, re-encoded, after two steps of ``tokens`` tokens and of one."""
    in_tail, sealed = kept_of(one, min(rows, one.rows), DEFAULT_SINKS, state.protect)
    if layout is None:
        layout, head, tail = one.layout, one.head, in_tail
    else:
        rows = one.head + in_tail + sealed
        head = min(layout.sinks, rows)
        sealed = layout.sealable(rows - head)
        tail = rows - head - sealed
    capacity = sealed
    for n in (state.tokens, 1):
        if n == 0:
            continue
        new = layout.sealable(tail + n)
        capacity = grown_capacity(sealed, capacity, new)
        sealed, tail = sealed + new, tail + n - new
    row = layout.row_nbytes(one.key_width, one.value_width, one.itemsize)
    return one.count * (capacity * row + (head + layout.tail_capacity) * dense_row_nbytes(one))


# -- what is weighed ------------------------------------------------------------------------------------------------


def candidates_for(state: State, profile: Profile) -> tuple[Action, ...]:
    """Actions with a figure of quality: every codec, every scorer, and the two together.

    Evictions are solved for: just as many rows as the limit holds, for rows as they are stored now and for every codec.
    A coarse grid of ratios would throw away rows that fit. Codecs that hold every row within the limit stand alone.
    """
    codecs = [one.action for one in profile.codecs]
    found: list[Action] = [Keep(), Reclaim(), *codecs]
    limit = state.limit.nbytes
    if limit is None:
        return tuple(found)
    held = max((one.rows for one in state.layers if one.changeable), default=0)
    usable = [one for one in profile.evictors if state.evicted_by in (None, one.scorer)]
    for codec in (None, *codecs):
        if codec is not None and codec.layout is None:
            continue
        rows = rows_that_fit(state, limit, codec)
        if 0 < rows < held:
            evictions = [_evict(figure, rows) for figure in usable]
            found += evictions if codec is None else [Composite((e, codec)) for e in evictions]
    return tuple(found)


def _evict(figure: EvictionFigure, rows: int) -> Evict:
    return Evict(figure.scorer, rows=rows, recent=min(figure.recent, rows // 2))


@dataclass(frozen=True)
class PlannedLayers:
    """A plan with the layers as they are after it, so that they need not be worked out again."""

    plan: Plan
    groups: tuple[Group, ...]


def plans_for(
    state: State, profile: Profile, feasible: Sequence[Quantize], scorer: str | None
) -> tuple[PlannedLayers, ...]:
    """Plans that give every layer a codec of its own, by the layers' sensitivity: one for each share of rows kept.

    Args:
        feasible: codecs that this backend can execute on every layer.
        scorer: for the plans that evict as well; None: no plan does.
    """
    if state.limit.nbytes is None or not state.each or not feasible or not profile.sensitivity:
        return ()
    each = [one for one in state.each if one.changeable]
    if not each:
        return ()
    others = tuple(one for one in state.each if not one.changeable)
    room = state.limit.nbytes - nbytes_allocated(next_layers(others, state.tokens))
    figures = [figure for codec in feasible if (figure := profile.by_layout.get(_layout(codec))) is not None]
    eviction = None if scorer is None else profile.evictor(scorer)
    offset, held = max(one.offset for one in each), max(one.rows for one in each)
    found = []
    for share in PLAN_SHARES:
        rows = round(share * offset)
        if share < 1.0 and (eviction is None or not 0 < rows < held):
            continue
        evict = None if share == 1.0 or eviction is None else _evict(eviction, rows)
        planned = _plan(state, profile, each, others, figures, evict, room)
        if planned is not None:
            found.append(planned)
    return tuple(found)


def _layout(codec: Quantize) -> Layout:
    assert codec.layout is not None
    return codec.layout


@dataclass(frozen=True)
class _Choice:
    """What equal layers could do: actions, what each leaves of one layer, its bytes, and its damage before weighting."""

    actions: tuple[Action, ...]
    after: tuple[Held, ...]
    nbytes: tuple[int, ...]
    kl: tuple[float, ...]


def _plan(
    state: State,
    profile: Profile,
    each: Sequence[Held],
    others: Sequence[Held],
    figures: Sequence[CodecFigure],
    evict: Evict | None,
    room: int,
) -> PlannedLayers | None:
    kinds: dict[tuple[object, ...], _Choice] = {}
    choices: list[_Choice] = []
    for one in each:
        key = _ALIKE(one)
        if key not in kinds:
            kinds[key] = _choices(replace(one, index=-1), state, profile, figures, evict)
        choices.append(kinds[key])
    weights = [profile.weight(one.index, len(each)) for one in each]
    options = [
        [Option(n, kl * weight) for n, kl in zip(choice.nbytes, choice.kl, strict=True)]
        for choice, weight in zip(choices, weights, strict=True)
    ]
    found = allocate(options, room, exact=len(each) <= SEARCHED_EXACTLY) if all(options) else None
    if found is None:
        return None
    chosen = [
        (one.index, choice.actions[j]) for one, choice, j in zip(each, choices, found.chosen, strict=True)
    ]
    if len({str(action) for _, action in chosen}) < 2:
        return None  # the same for all: that is among the other candidates
    sums: dict[tuple[int, int], tuple[Held, int, float]] = {}
    for choice, j, weight in zip(choices, found.chosen, weights, strict=True):
        held, count, so_far = sums.get((id(choice), j), (choice.after[j], 0, 0.0))
        sums[id(choice), j] = held, count + 1, so_far + weight
    groups = [Group(replace(held, count=n), weight) for held, n, weight in sums.values()]
    return PlannedLayers(Plan(_ranges(chosen)), (*groups, *(Group(one, one.count) for one in others)))


def _choices(
    one: Held, state: State, profile: Profile, figures: Sequence[CodecFigure], evict: Evict | None
) -> _Choice:
    now = profile.by_layout.get(one.layout)
    stay = () if now is None and not one.layout.dense else ((None, 0.0 if now is None else now.kl),)
    coded = [(figure.action, figure.kl) for figure in figures if not _coarser_already(one, figure.action)]
    actions: list[Action] = []
    kls: list[float] = []
    for codec, kl in (*stay, *coded):
        parts: tuple[Action, ...] = tuple(part for part in (evict, codec) if part is not None)
        actions.append(Keep() if not parts else parts[0] if len(parts) == 1 else Composite(parts))
        kls.append(kl)
    after = tuple(after_action([one], action, state.protect)[0] for action in actions)
    nbytes = tuple(nbytes_allocated(next_layers([held], state.tokens)) for held in after)
    return _Choice(tuple(actions), after, nbytes, tuple(kls))


def _coarser_already(held: Held, codec: Quantize) -> bool:
    keys, values = held.layout.keys.code_bits, held.layout.values.code_bits
    now = (keys if keys is not None else 99, values if values is not None else 99)
    wanted = (codec.key_bits, codec.value_bits)
    return wanted == now or wanted[0] > now[0] or wanted[1] > now[1]


def _ranges(chosen: Sequence[tuple[int, Action]]) -> tuple[tuple[tuple[int, int], Action], ...]:
    """Runs of neighbouring layers with the same action; layers that are kept as they are need no name."""
    runs: list[tuple[int, int, Action]] = []
    for index, action in sorted(chosen, key=lambda one: one[0]):
        if runs and runs[-1][2] is action and runs[-1][1] >= index - 1:
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
    verdicts = classify(
        [*actions, *(one.plan for one in planned)],
        backend,
        state.layers,
        available=state.available,
        rows_must_stay=state.rows_must_stay,
        pinned=held_within(state.protect, state.layers),
    )
    plans = {id(one.plan): one.groups for one in planned}
    weighing = _Weighing(state, profile, grouped(state, profile), nbytes_live(state.layers), {}, plans)
    return tuple(weighing.candidate(v.action, v.reasons) for v in verdicts)


@dataclass(frozen=True)
class _After:
    """What depends on how many rows stay and how they are stored, not on which ones: actions share it."""

    stored: Stored
    nbytes_next: int
    nbytes_peak: int


@dataclass(frozen=True)
class _Weighing:
    state: State
    profile: Profile
    groups: tuple[Group, ...]
    touched: int
    known: dict[object, _After]
    plans: Mapping[int, tuple[Group, ...]]

    def candidate(self, action: Action, reasons: tuple[Reason, ...]) -> Candidate:
        state = self.state
        after = self._after(action)
        scorer = next((p.scorer for p in singles(action) if isinstance(p, Evict)), None)
        figures: Expected = evicted(after.stored, self.profile, scorer or state.evicted_by)
        inputs = Inputs(
            nbytes_next=after.nbytes_next,
            nbytes_peak=after.nbytes_peak,
            limit=state.limit.nbytes,
            memory=None if state.available is None else nbytes_allocated(state.layers) + state.available,
            kl=figures.kl,
            p95=figures.p95,
            source=figures.source,
            time_ratio=figures.time_ratio,
            own_seconds=own_seconds(action, self.touched, self.profile),
            step_seconds=self.profile.step_seconds,
            horizon=state.horizon,
            error_mean=state.prediction_error[0],
            error_spread=state.prediction_error[1],
        )
        return Candidate(action, reasons, inputs, score(inputs, state.weights))

    def _after(self, action: Action) -> _After:
        key = id(action) if isinstance(action, Plan) else tuple(_storage(part) for part in action.parts)
        if key not in self.known:
            self.known[key] = self._work_out(action)
        return self.known[key]

    def _work_out(self, action: Action) -> _After:
        held = [group.held for group in self.groups]
        if isinstance(action, Plan):
            after = self.plans.get(id(action)) or self._after_plan(action)
            # Layer by layer, and never more than one layer's transient above what is held.
            peak = max(peak_of_action(held, a, self.state.protect) for _, a in action.assignments)
        else:
            layers = after_action(held, action, self.state.protect)
            after = tuple(Group(one, g.weight) for one, g in zip(layers, self.groups, strict=True))
            peak = peak_of_action(held, action, self.state.protect)
        nbytes = nbytes_allocated(next_layers((g.held for g in after), self.state.tokens))
        return _After(stored(after, self.profile), nbytes, peak)

    def _after_plan(self, action: Plan) -> tuple[Group, ...]:
        each = after_action(self.state.each, action, self.state.protect)
        return grouped(replace(self.state, each=each), self.profile)


def _storage(part: Action) -> object:
    if isinstance(part, Evict):
        return part.rows, part.ratio
    if isinstance(part, Quantize):
        return part.codec, part.key_bits, part.value_bits, part.group_size, part.residual
    return part
