"""The gap of a stratum: what the best action of one side is worth over the best of another, at equal bytes.

A *side* is a set of actions::

    native, cache, hook    candidates that this rung executes, or one above it
    all                    every candidate, whatever would have to be built for it, and the placebos
    ceiling                all, and the actions that look into the future

Real observations have the first three; what no backend ran is simulated only. Both sides of a gap come from the same
:class:`~lumina_cache.gap.cells.Cells`, so from one execution state, one set of documents and one estimator.

**Choosing and scoring.** ``Score = −(Q + λ_T·T)`` in points, at budgets that hold on every document, so without the risk
of an overflow. A maximum over noisy figures is too high, so each side chooses its action on the even blocks of 16 tokens,
pooled over all documents, and is scored on the odd ones; then the other way round, and the mean of the two is taken
(cross-fitting). Ties go to the lower rung, then fewer bytes. The sign of a gap is kept.

With ``v(side, d)`` the mean of the two cross-fitted scores on document d, every figure here is a mean over documents of
differences on the same document, and its interval is :class:`~lumina_cache.gap.resample.Documents`'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backend.capabilities import Rung
from ..errors import AnalysisError, MixedExecutionStateError
from .cells import Cells
from .resample import Array, Drawn, Estimate

__all__ = [
    "BUDGETS",
    "GOALS",
    "SLACK",
    "TIME_WEIGHTS",
    "Best",
    "Closed",
    "Gap",
    "Goal",
    "Parts",
    "Placebo",
    "best_of",
    "closed",
    "fits",
    "gap_between",
    "goals",
    "members",
    "parts",
    "placebo",
    "prepare",
    "scores",
    "sides",
    "together",
]

#: Shares of dense 16-bit rows.
BUDGETS = (0.5, 0.28, 0.25, 0.125, 0.0625)

#: An action fits a budget up to this factor above it.
SLACK = 1.02

#: λ_T of the sweep; the headline is 0, quality at equal bytes.
TIME_WEIGHTS = (0.0, 0.25, 1.0, 4.0)

_RUNGS = {"native": Rung.NATIVE, "cache": Rung.CACHE, "hook": Rung.HOOK}

Index = npt.NDArray[np.int64]


def sides(cells: Cells) -> tuple[str, ...]:
    """Names of the sides that these observations have, each holding the one before it.

    Raises:
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    names = list(_RUNGS)
    if cells.execution_state == "simulated":
        names.append("all")
        if any(f.role == "ceiling" for f in cells.facts):
            names.append("ceiling")
    return tuple(names)


def members(cells: Cells, side: str) -> Index:
    """Numbers of the actions of a side, whatever bytes they take.

    Raises:
        AnalysisError: these observations have no such side.
        MixedExecutionStateError: not the cells of one execution state.
    """
    if side not in sides(cells):
        raise AnalysisError(
            f"{side!r} is no side of {cells.execution_state} observations: {', '.join(sides(cells))}"
        )
    if side in _RUNGS:
        found = [f.role == "candidate" and f.rung <= _RUNGS[side] for f in cells.facts]
    else:
        roles = ("candidate", "placebo") if side == "all" else ("candidate", "placebo", "ceiling")
        found = [f.role in roles for f in cells.facts]
    return np.flatnonzero(np.array(found, dtype=bool))


def fits(cells: Cells, index: Index, budget: float) -> Index:
    """Those of ``index`` that take ``budget`` or less of dense 16-bit rows on every document.

    Raises:
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    return index[cells.shares[index] <= budget * SLACK]


def scores(cells: Cells, time_weight: float = 0.0) -> Array:
    """Scores over even and odd blocks, shape (2, actions, documents); NaN where λ_T asks for a time that is not there.

    Times are of whole runs, so both halves have the same. An action that was timed on some documents only has its mean
    there on all of them.

    Raises:
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    if time_weight == 0.0:
        return -cells.quality + 0.0
    with np.errstate(invalid="ignore"):
        some = np.isfinite(cells.time)
        mean = np.where(
            some.any(axis=1), np.nansum(cells.time, axis=1) / np.maximum(some.sum(axis=1), 1), np.nan
        )
    times = np.where(some.all(axis=1, keepdims=True), cells.time, mean[:, None])
    return -(cells.quality + time_weight * times) + 0.0


@dataclass(frozen=True, eq=False)
class Chosen:
    """What one side chooses, and what it is worth on each document; arrays have shape (documents,)."""

    actions: tuple[int, int]  #: chosen on even blocks, on odd ones
    values: Array  #: cross-fitted scores
    kl: Array  #: cross-fitted KL of the same actions, nats per token
    ties: tuple[int, ...]  #: others that were as good, on either half
    considered: Index
    untimed: tuple[int, ...]  #: left out for want of a time


@dataclass(frozen=True, eq=False)
class Achieved:
    """A side at a budget: its choice, and everything that differences between sides are made of."""

    chosen: Chosen
    #: score, KL, score held out, score statewise, score in hindsight, of each document: shape (5, documents)
    values: Array
    draws: Drawn  #: of the first two
    more_draws: Drawn | None  #: of the others, where they are wanted

    @property
    def drawn(self) -> Array:
        """Means of score and KL in every draw of documents, shape (2, draws)."""
        return self.draws.drawn


def choose(cells: Cells, index: Index, score: Array) -> Chosen | None:
    """The choice among ``index`` by cross-fitting; None if there is nothing to choose from."""
    timed = index[np.isfinite(score[0, index]).all(axis=1)] if index.size else index
    if not timed.size:
        return None
    order = timed[np.lexsort((cells.shares[timed], [cells.facts[i].rung for i in timed]))]
    picks: list[int] = []
    ties: set[int] = set()
    for half in (0, 1):
        means = cells.resampling.mean(score[half, order])
        best = int(np.argmax(means))
        picks.append(int(order[best]))
        ties |= {int(i) for i in order[means == means[best]]}
    even, odd = picks
    return Chosen(
        (even, odd),
        (score[1, even] + score[0, odd]) / 2,
        (cells.kl[1, even] + cells.kl[0, odd]) / 2,
        tuple(sorted(ties - set(picks))),
        timed,
        tuple(int(i) for i in np.setdiff1d(index, timed)),
    )


def _held_out(cells: Cells, index: Index, score: Array) -> Array:
    """As the values of :func:`choose`, choosing on the other half of the documents as well, shape (documents,).

    Documents of each domain take turns between two folds. What is chosen on even blocks of one fold is scored on odd
    blocks of the other, and so on: nothing that is scored has had a part in the choice.
    """
    docs = cells.resampling
    fold = np.zeros(docs.count, dtype=np.int64)
    for of_domain in docs.of_domain.values():
        fold[of_domain] = np.arange(of_domain.size) % 2
    values = np.zeros(docs.count)
    for half in (0, 1):
        for other in (0, 1):
            weights = np.where(fold != other, docs.weights, 0.0)
            best = index[int(np.argmax(score[half, index] @ weights))]
            values += np.where(fold == other, score[1 - half, best] / 2, 0.0)
    return values


def _statewise(index: Index, score: Array) -> Array:
    """As :func:`choose`, with a choice of its own for every document, shape (documents,)."""
    d = np.arange(score.shape[2])
    even, odd = (index[np.argmax(score[half, index], axis=0)] for half in (0, 1))
    found: Array = (score[1, even, d] + score[0, odd, d]) / 2
    return found


# -- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """What a side achieves at a budget."""

    side: str
    budget: float
    time_weight: float
    actions: tuple[str, ...]  #: chosen on even blocks and on odd ones; once if they agree
    score: Estimate | None  #: points
    kl: Estimate | None  #: nats per token
    share: float | None  #: of dense 16-bit rows, of the larger of ``actions``
    considered: int  #: actions that fit
    ties: tuple[str, ...]
    untimed: tuple[str, ...]  #: left out because λ_T > 0 and they have no time
    why: str = ""  #: why there is nothing, if so

    def to_record(self) -> dict[str, Any]:
        return _record(self)


@dataclass(frozen=True)
class Gap:
    """``high`` over ``low`` at a budget. All differences are positive where ``high`` is better."""

    low: str
    high: str
    budget: float
    time_weight: float
    points: Estimate | None  #: of Score, cross-fitted: the headline
    nats: Estimate | None  #: nats per token that the same choices save at equal bytes
    bytes_times: (
        Estimate | None
    )  #: bytes that ``low`` needs for the quality of ``high``, over those of ``high``
    held_out: Estimate | None  #: points, choosing on other documents as well
    statewise: Estimate | None  #: points, each side choosing anew for every document
    hindsight: (
        Estimate | None
    )  #: points, choosing and scoring on the same tokens: never negative for nested sides
    low_actions: tuple[str, ...] = ()
    high_actions: tuple[str, ...] = ()
    why: str = ""  #: why the gap is not defined, if so
    bytes_why: str = ""  #: why ``bytes_times`` is not

    def to_record(self) -> dict[str, Any]:
        return _record(self)


@dataclass(frozen=True)
class Closed:
    """The share of a gap that a side closes.

    ``share = (v(better) − v(base)) / (v(reference) − v(base))``, means over the same documents, with an interval of the
    ratio. ``reference`` is a side, or ``"full"``: the dense, full cache, whose score is 0 by definition, so that the
    share is that of the damage which ``base`` leaves. Not defined where the interval of the denominator reaches 0.
    """

    base: str
    better: str
    reference: str
    budget: float
    share: Estimate | None
    left: Estimate | None  #: the denominator, points
    why: str = ""

    def to_record(self) -> dict[str, Any]:
        return _record(self)


@dataclass(frozen=True)
class Goal:
    """A goal that was set beforehand, and how it stands."""

    name: str
    text: str
    threshold: float
    closed: Closed
    met: bool | None  #: the whole interval is at or above the threshold; None: there is no interval
    reached: bool | None  #: the figure is, whatever the interval
    gain_sure: bool | None  #: the interval of the gap that is closed leaves 0 out

    def to_record(self) -> dict[str, Any]:
        return _record(self)


@dataclass(frozen=True)
class Parts:
    """``ceiling − policy = foresight + backend + controller``, exactly, for one rung. None where a side is missing."""

    rung: str
    budget: float
    foresight: Estimate | None  #: ceiling − all: only for who knows the text that comes
    backend: Estimate | None  #: all − rung: what the backend cannot execute
    controller: Estimate | None  #: rung − the policy's choice; None if nobody said what the policy chose
    policy: str | None

    def to_record(self) -> dict[str, Any]:
        return _record(self)


@dataclass(frozen=True)
class Placebo:
    """What mere choice among actions that do not differ buys at a budget, in points over their mean."""

    budget: float
    actions: tuple[str, ...]
    crossed: Estimate | None  #: choosing on one half, scoring on the other: 0 if only noise tells them apart
    same: Estimate | None  #: choosing and scoring on the same tokens
    in_gap: Estimate | None  #: what the placebos add to the side ``all``
    why: str = ""

    def to_record(self) -> dict[str, Any]:
        return _record(self)


def best_of(cells: Cells, side: str, budget: float, time_weight: float = 0.0) -> Best:
    """What ``side`` chooses at ``budget``, and what it is worth.

    Raises:
        AnalysisError: these observations have no such side.
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    found = _achieved(cells, side, budget, time_weight)
    if isinstance(found, str):
        return Best(side, budget, time_weight, (), None, None, None, 0, (), (), found)
    chosen, docs = found.chosen, cells.resampling
    means = docs.mean(found.values)
    return Best(
        side,
        budget,
        time_weight,
        _texts(cells, chosen.actions),
        docs.of_draws(float(means[0]), found.drawn[0]),
        docs.of_draws(float(means[1]), found.drawn[1]),
        float(cells.shares[list(chosen.actions)].max()),
        int(chosen.considered.size),
        _texts(cells, chosen.ties),
        _texts(cells, chosen.untimed),
    )


def prepare(cells: Cells, budgets: Sequence[float], time_weights: Sequence[float]) -> None:
    """Make all choices now, so that their intervals are worked out at once.

    Raises:
        MixedExecutionStateError: not the cells of one execution state.
    """
    for side in sides(cells):
        for budget in budgets:
            for weight in time_weights:
                _achieved(cells, side, budget, weight)


def _achieved(cells: Cells, side: str, budget: float, time_weight: float = 0.0) -> Achieved | str:
    """What a side achieves, or why nothing; worked out once."""
    key = ("achieved", side, budget, time_weight)
    if key not in cells.memo:
        cells.memo[key] = _achieve(cells, side, budget, time_weight)
    found: Achieved | str = cells.memo[key]
    return found


def _achieve(cells: Cells, side: str, budget: float, time_weight: float) -> Achieved | str:
    index = fits(cells, members(cells, side), budget)
    if not index.size:
        return f"no action of {side} takes {budget:.4g} of dense rows or less"
    if ("scores", time_weight) not in cells.memo:
        cells.memo["scores", time_weight] = scores(cells, time_weight)
    score, docs = cells.memo["scores", time_weight], cells.resampling
    chosen = choose(cells, index, score)
    if chosen is None:
        return f"no action of {side} at {budget:.4g} has a time"
    index = chosen.considered
    whole = score.mean(axis=0)
    seen = whole[index[int(np.argmax(docs.mean(whole[index])))]]
    held = _held_out(cells, index, score) if docs.spread else np.full(docs.count, np.nan)
    values = np.stack([chosen.values, chosen.kl, held, _statewise(index, score), seen])
    more = docs.later(values[2:]) if time_weight == 0.0 else None
    return Achieved(chosen, values, docs.later(values[:2]), more)


def gap_between(cells: Cells, low: str, high: str, budget: float, time_weight: float = 0.0) -> Gap:
    """The gap between two sides at a budget; with λ_T > 0 ``points`` and ``nats`` alone.

    Raises:
        AnalysisError: these observations have no such side.
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    a, b = (_achieved(cells, side, budget, time_weight) for side in (low, high))
    if isinstance(a, str) or isinstance(b, str):
        why = "; ".join(one for one in (a, b) if isinstance(one, str))
        return Gap(low, high, budget, time_weight, None, None, None, None, None, None, why=why, bytes_why=why)
    docs = cells.resampling
    means, drawn = docs.mean(b.values - a.values), b.drawn - a.drawn
    if a.more_draws is not None and b.more_draws is not None:
        drawn = np.concatenate([drawn, b.more_draws.drawn - a.more_draws.drawn])
    points, nats, *more = (docs.of_draws(float(m), d) for m, d in zip(means, drawn, strict=False))
    held, wise, seen = more or (None, None, None)
    times, why = _bytes_times(cells, low, b) if time_weight == 0.0 else (None, "")
    return Gap(
        low,
        high,
        budget,
        time_weight,
        points=points,
        nats=Estimate(
            -nats.value + 0.0,
            None if nats.high is None else -nats.high,
            None if nats.low is None else -nats.low,
            nats.documents,
        ),
        bytes_times=times,
        held_out=held if docs.spread else None,
        statewise=wise,
        hindsight=seen,
        low_actions=_texts(cells, a.chosen.actions),
        high_actions=_texts(cells, b.chosen.actions),
        bytes_why=why,
    )


# -- bytes at equal quality -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Front:
    """Cross-fitted KL of a side's best action at every budget that lets in one more of them."""

    shares: Array  #: increasing, shape (steps,)
    kl: Array  #: shape (steps, documents)
    drawn: Array  #: means in every draw, shape (steps, draws)


def _front(cells: Cells, side: str) -> _Front:
    """At each share: the action with the least KL that fits, chosen on one half and measured on the other."""
    index = members(cells, side)
    index = index[np.argsort(cells.shares[index], kind="stable")]
    docs = cells.resampling
    picks = []
    for half in (0, 1):
        means = docs.mean(cells.kl[half, index])
        least = np.minimum.accumulate(means)
        first = np.where(means == least, np.arange(index.size), 0)
        picks.append(index[np.maximum.accumulate(first)])
    # Whoever takes no more bytes than the next, and is not its equal, is on the front.
    shares = cells.shares[index]
    last = np.append(np.diff(shares) > 0, True)
    even, odd = picks[0][last], picks[1][last]
    shares = shares[last]
    changed = np.append(True, (np.diff(even) != 0) | (np.diff(odd) != 0))
    even, odd, shares = even[changed], odd[changed], shares[changed]
    values = (cells.kl[1, even] + cells.kl[0, odd]) / 2
    return _Front(shares, values, docs.draw(values))


def _bytes_times(cells: Cells, low: str, high: Achieved) -> tuple[Estimate | None, str]:
    """Bytes that ``low`` needs to be as good as ``high``'s choice, over the bytes of that choice.

    ``low``'s front is the KL of its best action as a function of bytes, made to fall by taking the least so far, and
    joined by straight lines: a cache that treats a part of its layers as one neighbour on the front says and the others
    as the other would lie about there. Lines flatter ``low`` over the steps that its actions really are, so the figure
    is rather too small. Not defined where ``high`` is better than ``low`` with any bytes, or worse than ``low`` with
    the fewest that it was measured with.
    """
    if ("front", low) not in cells.memo:
        cells.memo["front", low] = _front(cells, low)
    front, docs = cells.memo["front", low], cells.resampling
    own = float(np.mean([cells.shares[i] for i in high.chosen.actions]))
    wanted = np.atleast_1d(docs.mean(high.chosen.kl))
    needed = _crossing(front.shares, docs.mean(front.kl)[None], wanted)[0]
    if not np.isfinite(needed):
        if wanted[0] > docs.mean(front.kl)[0]:
            return None, f"{low} is better already with the fewest bytes that it was measured with"
        return None, f"{low} is not as good with any bytes that it was measured with"
    value = float(needed / own)
    if not docs.spread:
        return Estimate(value, None, None, docs.count), ""
    drawn = _crossing(front.shares, front.drawn.T, high.drawn[1]) / own
    found = docs.of_draws(value, drawn)
    why = "" if found.low is not None else "no interval: some draws leave the range that was measured"
    return found, why


def _crossing(shares: Array, kl: Array, wanted: Array) -> Array:
    """The share at which a falling line through (share, KL) reaches ``wanted``; NaN outside.

    Args:
        shares: increasing, shape (steps,).
        kl: shape (draws, steps); made to fall.
        wanted: shape (draws,).
    """
    falling = np.minimum.accumulate(kl, axis=1)
    # Means of the same figures, summed in another order, are not the same to the last bit.
    near = 1e-9 * np.abs(wanted) + 1e-15
    enough = falling <= (wanted + near)[:, None]
    draws = np.arange(len(wanted))
    at = enough.argmax(axis=1)
    before = np.maximum(at - 1, 0)
    high, low = falling[draws, before], falling[draws, at]
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(high > low, (high - wanted) / (high - low), 0.0)
    found = shares[before] + part * (shares[at] - shares[before])
    inside = enough.any(axis=1) & ((at > 0) | (falling[:, 0] >= wanted - near))
    result: Array = np.where(inside, found, np.nan)
    return result


# -- shares, goals, parts, placebos -----------------------------------------------------------------------------------


def closed(cells: Cells, base: str, better: str, reference: str, budget: float) -> Closed:
    """The share of the gap between ``base`` and ``reference`` that ``better`` closes, see :class:`Closed`.

    Raises:
        AnalysisError: these observations have no such side.
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    names = [base, better] if reference == "full" else [base, better, reference]
    found = [_achieved(cells, side, budget) for side in names]
    missing = [one for one in found if isinstance(one, str)]
    if missing:
        return Closed(base, better, reference, budget, None, None, missing[0])
    each = [one for one in found if isinstance(one, Achieved)]
    docs = cells.resampling
    means = [float(docs.mean(one.values[0])) for one in each] + [0.0]
    drawn = [one.drawn[0] for one in each] + [np.zeros_like(each[0].drawn[0])]
    left = docs.of_draws(means[2] - means[0], drawn[2] - drawn[0])
    if left.value <= 0 or (left.low is not None and left.low <= 0):
        why = f"{base} leaves nothing that can be told from 0"
        return Closed(base, better, reference, budget, None, left, why)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (drawn[1] - drawn[0]) / (drawn[2] - drawn[0])
    share = docs.of_draws((means[1] - means[0]) / (means[2] - means[0]), ratios)
    return Closed(base, better, reference, budget, share, left)


#: Goals: name → text, base, better, budget, least share.
GOALS: Mapping[str, tuple[str, str, str, float, float]] = {
    "cache at 28 %": (
        "rung cache closes at least two thirds of what rung native leaves at 28 % of the bytes",
        "native",
        "cache",
        0.28,
        2 / 3,
    ),
    "hook at 12.5 %": (
        "rung hook closes at least half of what rung cache leaves at 12.5 % of the bytes",
        "cache",
        "hook",
        0.125,
        0.5,
    ),
}


def goals(cells: Cells) -> tuple[Goal, ...]:
    """The goals against every reference that these observations have.

    What a rung *leaves* is its distance to a reference: the full cache (``"full"``), which has no damage; and, where
    everything was simulated, the best of ``all`` and of ``ceiling`` at the same budget. A goal is met when the whole
    interval of the share lies at or above its threshold.
    """
    together(cells)
    references = ["full", *(s for s in ("all", "ceiling") if s in sides(cells))]
    found = []
    for name, (text, base, better, budget, threshold) in GOALS.items():
        for reference in references:
            share = closed(cells, base, better, reference, budget)
            gap = gap_between(cells, base, better, budget).points
            known = share.share
            met = None if known is None or known.low is None else known.low >= threshold
            reached = None if known is None else known.value >= threshold
            sure = None if gap is None or gap.low is None else gap.low > 0
            found.append(
                Goal(name, f"{text}, measured up to {reference}", threshold, share, met, reached, sure)
            )
    return tuple(found)


def parts(cells: Cells, rung: str, budget: float, policy: str | None = None) -> Parts:
    """Where the points go between the best with foresight and what the policy chose.

    Args:
        rung: native, cache or hook.
        policy: text form of the action that the policy chose at this budget; None if it is not known.

    Raises:
        AnalysisError: the policy's choice is not among the actions that were measured everywhere.
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    docs = cells.resampling
    found: dict[str, tuple[float, Array]] = {}
    for side in (rung, "all", "ceiling"):
        one = _achieved(cells, side, budget) if side in sides(cells) else ""
        if isinstance(one, Achieved):
            found[side] = float(docs.mean(one.values[0])), one.drawn[0]
    if policy is not None:
        numbers = [i for i, f in enumerate(cells.facts) if f.action == policy]
        if not numbers:
            raise AnalysisError(f"the policy's choice {policy!r} was not measured on every document")
        # The policy saw no half of these tokens, so both may score it.
        values = scores(cells)[:, numbers[0]].mean(axis=0)
        found["policy"] = float(docs.mean(values)), docs.draw(values[None])[0]

    def part(above: str, below: str) -> Estimate | None:
        if above not in found or below not in found:
            return None
        return docs.of_draws(found[above][0] - found[below][0], found[above][1] - found[below][1])

    return Parts(rung, budget, part("ceiling", "all"), part("all", rung), part(rung, "policy"), policy)


def placebo(cells: Cells, budget: float) -> Placebo:
    """What choosing among placebos buys: actions that differ by a seed alone.

    Raises:
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    role = np.array([f.role == "placebo" for f in cells.facts], dtype=bool)
    index = fits(cells, np.flatnonzero(role), budget)
    # Those that take the same bytes, the most that fit: fewer rows would be worse for a reason.
    index = index[cells.shares[index] >= cells.shares[index].max() / SLACK] if index.size else index
    if index.size < 2:
        return Placebo(budget, _texts(cells, index), None, None, None, "fewer than two placebos fit")
    docs, score = cells.resampling, scores(cells)
    mean = score[:, index].mean(axis=(0, 1))
    crossed = choose(cells, index, score)
    assert crossed is not None
    whole = score.mean(axis=0)
    same = whole[index[int(np.argmax(docs.mean(whole[index])))]]
    in_gap = None
    if "all" in sides(cells):
        everything = fits(cells, members(cells, "all"), budget)
        without = everything[~role[everything]]
        pair = [choose(cells, one, score) for one in (everything, without)]
        if pair[0] is not None and pair[1] is not None:
            in_gap = docs.estimate(pair[0].values - pair[1].values)
    return Placebo(
        budget,
        _texts(cells, index),
        docs.estimate(crossed.values - mean),
        docs.estimate(same - mean),
        in_gap,
    )


# -- small things -----------------------------------------------------------------------------------------------------


def together(*cells: Cells) -> str:
    """The execution state of all of ``cells``.

    Raises:
        MixedExecutionStateError: they are of several, or something else is among them.
    """
    states = {c.execution_state if isinstance(c, Cells) else type(c).__name__ for c in cells}
    if len(states) != 1 or not states <= {"real", "simulated"}:
        raise MixedExecutionStateError(
            f"{', '.join(sorted(states))}: give cells of one execution state, real or simulated"
        )
    return states.pop()


def _texts(cells: Cells, numbers: Sequence[int] | Index) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cells.facts[int(i)].action for i in numbers))


def _record(value: Any) -> dict[str, Any]:
    """A value as JSON has it: estimates and what is nested as dicts."""
    out: dict[str, Any] = {}
    for name, one in vars(value).items():
        if hasattr(one, "to_record"):
            one = one.to_record()
        elif isinstance(one, tuple):
            one = [x.to_record() if hasattr(x, "to_record") else x for x in one]
        out[name] = one
    return out
