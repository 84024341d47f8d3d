"""One option for every layer, so that the sum of losses is least within a sum of bytes.

A multiple-choice knapsack. With a price λ per byte each layer chooses alone, and all choices together are best for the
bytes that they happen to take (Everett 1963, *Generalized Lagrange multiplier method*): those are the points on the lower
convex hull of the trade. Walking down the layers' own hulls, steepest step first, meets them all in order, and shows what
no choice can do better than. Between two such points dynamic programming over bytes finds the optimum, exactly where the
options' common divisor is coarse enough, else to within rounding up to 1/2048 of the budget; what that leaves unspent is
filled greedily.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Allocation", "Option", "allocate", "allocate_alike", "allocate_exhaustively", "lower_hull"]


@dataclass(frozen=True)
class Option:
    """What one layer could do: bytes it would take, and the loss (any unit that adds up over layers)."""

    nbytes: int
    loss: float


@dataclass(frozen=True)
class Allocation:
    """An option (its index) for every layer."""

    chosen: tuple[int, ...]
    nbytes: int
    loss: float
    at_least: float  #: no allocation within the same bytes has less loss than this


def lower_hull(options: Sequence[Option]) -> list[int]:
    """Indices of the options on the lower convex hull of (bytes, loss), by falling bytes and rising loss."""
    order = sorted(range(len(options)), key=lambda i: (-options[i].nbytes, options[i].loss))
    hull: list[int] = []
    for i in reversed(
        order
    ):  # from few bytes to many: an option is of use only if it loses less than all smaller ones
        here = options[i]
        if hull and here.nbytes == options[hull[-1]].nbytes:
            hull.pop()
        if hull and here.loss >= options[hull[-1]].loss:
            continue
        while len(hull) >= 2 and _slope(options, hull[-2], hull[-1]) <= _slope(options, hull[-1], i):
            hull.pop()
        hull.append(i)
    return hull[::-1]


def _slope(options: Sequence[Option], small: int, large: int) -> float:
    """Loss saved per byte from the smaller option to the larger one."""
    return (options[small].loss - options[large].loss) / (options[large].nbytes - options[small].nbytes)


#: Units that a budget is divided into for dynamic programming.
UNITS = 2048


def allocate(
    layers: Sequence[Sequence[Option]],
    budget: int,
    *,
    exact: bool = True,
    hulls: Sequence[list[int]] | None = None,
) -> Allocation | None:
    """The best option for every layer within ``budget`` bytes; None if even the smallest ones do not fit.

    Of two methods the better result: the walk down the hulls, and dynamic programming over bytes in units of
    budget/2048 (or of the options' common divisor, where that is coarser; then it is exact). The second takes
    milliseconds where the first takes a fraction of one; ``exact=False`` leaves it out.

    Args:
        hulls: of every layer, as :func:`lower_hull` gives them, if they are known.
    """
    walked = _walk(layers, budget, [lower_hull(options) for options in layers] if hulls is None else hulls)
    if walked is None or not exact or walked.loss <= walked.at_least:
        return walked
    chosen = _by_units(layers, budget)
    if chosen is None:
        return walked
    nbytes = sum(layers[i][j].nbytes for i, j in enumerate(chosen))
    loss = float(sum(layers[i][j].loss for i, j in enumerate(chosen)))
    nbytes, loss = _fill(layers, chosen, nbytes, loss, budget)
    return walked if walked.loss <= loss else Allocation(tuple(chosen), nbytes, loss, walked.at_least)


def _by_units(layers: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """Least loss with bytes rounded up to units, so that what it finds always fits."""
    common = math.gcd(*(option.nbytes for options in layers for option in options)) or 1
    unit = max(common, -(-budget // UNITS))
    room = budget // unit
    best = np.zeros(room + 1)  # least loss of the layers so far within so many units
    taken = np.zeros((len(layers), room + 1), dtype=np.int16)
    within = np.arange(room + 1)
    for i, options in enumerate(layers):
        units = np.array([-(-option.nbytes // unit) for option in options])
        left = within - units[:, None]
        with_each = np.where(left >= 0, best[np.maximum(left, 0)], np.inf) + np.array(
            [[o.loss] for o in options]
        )
        taken[i] = with_each.argmin(axis=0)
        best = with_each[taken[i], within]
    if not np.isfinite(best[room]):
        return None
    chosen, left = [0] * len(layers), room
    for i in reversed(range(len(layers))):
        chosen[i] = int(taken[i, left])
        left -= -(-layers[i][chosen[i]].nbytes // unit)
    return chosen


def _walk(layers: Sequence[Sequence[Option]], budget: int, hulls: Sequence[list[int]]) -> Allocation | None:
    """Down the hulls, steepest step first."""
    at = [len(hull) - 1 for hull in hulls]  # the smallest option of each layer
    nbytes = sum(layers[i][hull[-1]].nbytes for i, hull in enumerate(hulls))
    loss = sum(layers[i][hull[-1]].loss for i, hull in enumerate(hulls))
    if nbytes > budget:
        return None
    steps = [(-_gain(layers[i], hulls[i], at[i]), i) for i in range(len(layers)) if at[i] > 0]
    heapq.heapify(steps)
    at_least: float | None = None
    while steps:
        gain, i = heapq.heappop(steps)
        smaller, larger = layers[i][hulls[i][at[i]]], layers[i][hulls[i][at[i] - 1]]
        if nbytes + larger.nbytes - smaller.nbytes > budget:
            if at_least is None:  # the relaxed problem takes this step in part
                at_least = loss + gain * (budget - nbytes)
            continue
        nbytes, loss, at[i] = (
            nbytes + larger.nbytes - smaller.nbytes,
            loss + larger.loss - smaller.loss,
            at[i] - 1,
        )
        if at[i] > 0:
            heapq.heappush(steps, (-_gain(layers[i], hulls[i], at[i]), i))
    chosen = [hull[position] for hull, position in zip(hulls, at, strict=True)]
    nbytes, loss = _fill(layers, chosen, nbytes, loss, budget)
    return Allocation(tuple(chosen), nbytes, loss, loss if at_least is None else min(at_least, loss))


def _gain(options: Sequence[Option], hull: Sequence[int], position: int) -> float:
    return _slope(options, hull[position], hull[position - 1])


def _fill(
    layers: Sequence[Sequence[Option]], chosen: list[int], nbytes: int, loss: float, budget: int
) -> tuple[int, float]:
    """Spend what is left of the budget on single options off the hull, most loss saved first."""
    while True:
        best: tuple[float, int, int] | None = None
        for i, options in enumerate(layers):
            now = options[chosen[i]]
            for j, option in enumerate(options):
                saved = now.loss - option.loss
                if (
                    saved > 0
                    and nbytes + option.nbytes - now.nbytes <= budget
                    and (best is None or saved > best[0])
                ):
                    best = (saved, i, j)
        if best is None:
            return nbytes, loss
        saved, i, j = best
        nbytes, loss = nbytes + layers[i][j].nbytes - layers[i][chosen[i]].nbytes, loss - saved
        chosen[i] = j


def allocate_alike(
    kinds: Sequence[int], hulls: Sequence[Sequence[Option]], weights: Sequence[float], budget: int
) -> list[int] | None:
    """What the walk of :func:`allocate` chooses where many layers have the same options, weighted: places in their hulls.

    Args:
        kinds: of every layer, which of ``hulls`` its options are.
        hulls: options by rising bytes and falling loss, all of them on the lower convex hull.
        weights: of every layer's losses.
    """
    if not all(hulls):
        return None
    nbytes = sum(hulls[kind][0].nbytes for kind in kinds)
    if nbytes > budget:
        return None
    of_kind, each = np.array(kinds), np.array(weights, float)
    layers, more, steep = [], [], []
    for kind, hull in enumerate(hulls):
        mine = np.flatnonzero(of_kind == kind)
        size = np.diff(np.array([one.nbytes for one in hull], np.int64))
        loss = np.array([one.loss for one in hull]) * each[mine, None]
        # A steeper step that rounding has put behind another one of its layer comes right after it.
        gain = np.minimum.accumulate(-np.diff(loss) / size, axis=1)
        layers.append(np.repeat(mine, len(size)))
        more.append(np.tile(size, len(mine)))
        steep.append(gain.ravel())
    joined, layer = np.concatenate(more), np.concatenate(layers)
    order = np.lexsort((layer, -np.concatenate(steep)))
    layer, joined = layer[order], joined[order]
    within = int(np.searchsorted(np.cumsum(joined), budget - nbytes, side="right"))
    chosen: list[int] = np.bincount(layer[:within], minlength=len(kinds)).tolist()
    nbytes += int(joined[:within].sum())
    stuck: set[int] = set()  # layers whose next step takes too many bytes
    for i, step in zip(layer[within:].tolist(), joined[within:].tolist(), strict=True):
        if i in stuck:
            continue
        if nbytes + step > budget:
            stuck.add(i)
            if len(stuck) == len(kinds):
                break
            continue
        chosen[i], nbytes = chosen[i] + 1, nbytes + step
    return chosen


def allocate_exhaustively(layers: Sequence[Sequence[Option]], budget: int) -> Allocation | None:
    """The optimum by trying everything: exponential in the number of layers, to check :func:`allocate` against."""
    best: Allocation | None = None
    for chosen in itertools.product(*(range(len(options)) for options in layers)):
        nbytes = sum(layers[i][j].nbytes for i, j in enumerate(chosen))
        loss = sum(layers[i][j].loss for i, j in enumerate(chosen))
        if nbytes <= budget and (best is None or loss < best.loss):
            best = Allocation(chosen, nbytes, loss, loss)
    return best
