"""What is weighed in a state: actions with a figure of quality, solved for the bytes that may be held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..actions import Action, Composite, Evict, Keep, Plan, Quantize, Reclaim, singles
from ..allocate import Option, allocate
from ..backend.capabilities import BackendProfile
from ..backend.feasibility import Reason, classify
from ..estimate import Held, after_action, after_append, most_rows_within, nbytes_allocated, peak_of_action
from ..profile import Profile
from .expected import expected, own_seconds
from .score import Inputs, score
from .values import Candidate, State

__all__ = ["candidates_for", "next_layers", "plans_for", "weigh"]

#: Shares of the tokens seen that rows are cut to where a plan gives every layer a codec of its own.
PLAN_SHARES = (1.0, 0.75, 0.5, 0.25)


def next_layers(layers: Iterable[Held], tokens: int) -> tuple[Held, ...]:
    """The layers after the coming step and one token more, so that an action's room outlasts a chunk."""
    return after_append(after_append(layers, tokens), 1)


def candidates_for(state: State, profile: Profile) -> tuple[Action, ...]:
    """Actions with a figure of quality: every codec, every scorer, and the two together.

    Evictions are solved for: just as many rows as the limit holds, for rows as they are stored now and for every codec.
    A coarse grid of ratios would throw away rows that fit. Codecs that hold every row within the limit stand alone.
    """
    codecs = [one.action for one in profile.codecs]
    if state.limit.nbytes is None:
        return (Keep(), Reclaim(), *codecs)
    scorers = [one.scorer for one in profile.evictors if state.evicted_by in (None, one.scorer)]
    recent = {one.scorer: one.recent for one in profile.evictors}
    found: list[Action] = [Keep(), Reclaim(), *codecs]
    held = max((one.rows for one in state.layers if one.changeable), default=0)
    solved: dict[object, int] = {}
    for codec in (None, *codecs):
        layout = None if codec is None else codec.layout
        if layout not in solved:
            solved[layout] = most_rows_within(
                state.layers,
                state.limit.nbytes,
                then=lambda layers: next_layers(layers, state.tokens),
                quantize=codec,
            )
        rows = solved[layout]
        if not 0 < rows < held:
            continue
        for scorer in scorers:
            evict = Evict(scorer, rows=rows, recent=min(recent[scorer], rows // 2))
            found.append(evict if codec is None else Composite((evict, codec)))
    return tuple(found)


def plans_for(
    state: State, profile: Profile, feasible: Sequence[Quantize], scorer: str | None
) -> tuple[Plan, ...]:
    """Plans that give every layer a codec of its own, by the layers' sensitivity: one for each share of rows kept.

    Args:
        feasible: codecs that this backend can execute on every layer.
        scorer: for the plans that evict as well; None: no plan does.
    """
    each = [one for one in state.each if one.changeable]
    if state.limit.nbytes is None or not each or not feasible or not profile.sensitivity:
        return ()
    others = tuple(one for one in state.each if not one.changeable)
    room = state.limit.nbytes - nbytes_allocated(next_layers(others, state.tokens))
    plans = []
    for share in PLAN_SHARES if scorer is not None else (1.0,):
        evict = None if share == 1.0 or scorer is None else _evict(scorer, each, share, profile)
        if share < 1.0 and evict is None:
            continue
        plan = _plan(state, profile, each, feasible, evict, room)
        if plan is not None:
            plans.append(plan)
    return tuple(plans)


def _evict(scorer: str, each: Sequence[Held], share: float, profile: Profile) -> Evict | None:
    offset, held = max(one.offset for one in each), max(one.rows for one in each)
    rows, figure = round(share * offset), profile.evictor(scorer)
    return (
        Evict(scorer, rows=rows, recent=min(figure.recent, rows // 2)) if figure and 0 < rows < held else None
    )


def _plan(
    state: State,
    profile: Profile,
    each: Sequence[Held],
    feasible: Sequence[Quantize],
    evict: Evict | None,
    room: int,
) -> Plan | None:
    choices: list[list[Action]] = []
    options: list[list[Option]] = []
    costs: dict[tuple[Held, Action], int] = {}
    for one in each:
        actions: list[Action] = []
        here: list[Option] = []
        for codec in (None, *feasible):
            figure = profile.by_layout.get(one.layout) if codec is None else profile.codec(codec)
            if codec is not None and _coarser_already(one, codec):
                continue
            if figure is None and not (codec is None and one.layout.dense):
                continue
            parts = [part for part in (evict, codec) if part is not None]
            action = Keep() if not parts else parts[0] if len(parts) == 1 else Composite(tuple(parts))
            like = replace(one, index=-1, name="")
            if (like, action) not in costs:
                costs[like, action] = nbytes_allocated(
                    next_layers(after_action([like], action), state.tokens)
                )
            loss = 0.0 if figure is None else figure.kl * profile.weight(one.index, len(each))
            actions.append(action)
            here.append(Option(costs[like, action], loss))
        choices.append(actions)
        options.append(here)
    found = allocate(options, room)
    if found is None:
        return None
    chosen = [(one.index, actions[j]) for one, actions, j in zip(each, choices, found.chosen, strict=True)]
    if len({action for _, action in chosen}) < 2:
        return None  # the same for all: that is among the other candidates
    return Plan(_ranges(chosen))


def _coarser_already(held: Held, codec: Quantize) -> bool:
    keys, values = held.layout.keys.code_bits, held.layout.values.code_bits
    now = (keys if keys is not None else 99, values if values is not None else 99)
    wanted = (codec.key_bits, codec.value_bits)
    return wanted == now or wanted[0] > now[0] or wanted[1] > now[1]


def _ranges(chosen: Sequence[tuple[int, Action]]) -> tuple[tuple[tuple[int, int], Action], ...]:
    """Runs of neighbouring layers with the same action; layers that are kept as they are need no name."""
    runs: list[tuple[tuple[int, int], Action]] = []
    for index, action in sorted(chosen, key=lambda one: one[0]):
        if action == Keep():
            continue
        if runs and runs[-1][1] == action and runs[-1][0][1] >= index - 1:
            runs[-1] = ((runs[-1][0][0], index), action)
        else:
            runs.append(((index, index), action))
    return tuple(runs)


def weigh(
    state: State, actions: Iterable[Action], backend: BackendProfile, profile: Profile
) -> tuple[Candidate, ...]:
    """Bytes, score terms and reasons for every action."""
    verdicts = classify(
        actions,
        backend,
        state.layers,
        available=state.available,
        rows_must_stay=state.rows_must_stay,
        pinned=state.pinned,
    )
    known: dict[object, _Bytes] = {}
    return tuple(_weighed(state, v.action, v.reasons, profile, known) for v in verdicts)


@dataclass(frozen=True)
class _Bytes:
    after: tuple[Held, ...]
    nbytes_next: int
    nbytes_peak: int


def _bytes_of(state: State, action: Action, known: dict[object, _Bytes]) -> _Bytes:
    """Bytes depend on how many rows stay and how they are stored, not on which ones: actions share them."""
    key = tuple(_storage(part) for part in action.parts)
    if key not in known:
        layers = state.each if isinstance(action, Plan) else state.layers
        after = after_action(layers, action)
        known[key] = _Bytes(
            after, nbytes_allocated(next_layers(after, state.tokens)), peak_of_action(layers, action)
        )
    return known[key]


def _storage(part: Action) -> object:
    if isinstance(part, Evict):
        return "evict", part.rows, part.ratio
    if isinstance(part, Quantize) and part.layout is not None:
        return part.layout
    return part


def _weighed(
    state: State, action: Action, reasons: tuple[Reason, ...], profile: Profile, known: dict[object, _Bytes]
) -> Candidate:
    nbytes = _bytes_of(state, action, known)
    figures = expected(nbytes.after, profile, _scorer(action) or state.evicted_by)
    mean, spread = state.prediction_error
    inputs = Inputs(
        nbytes_next=nbytes.nbytes_next,
        nbytes_peak=nbytes.nbytes_peak,
        limit=state.limit.nbytes,
        memory=None if state.available is None else nbytes_allocated(state.layers) + state.available,
        kl=figures.kl,
        p95=figures.p95,
        source=figures.source,
        time_ratio=figures.time_ratio,
        own_seconds=own_seconds(action, state.layers, profile),
        step_seconds=profile.step_seconds,
        horizon=state.horizon,
        error_mean=mean,
        error_spread=spread,
    )
    return Candidate(action, reasons, inputs, score(inputs, state.weights))


def _scorer(action: Action) -> str | None:
    return next((p.scorer for p in singles(action) if isinstance(p, Evict)), None)
