"""Which missing capability costs how much: by itself, in the best order, and as its Shapley value.

A rung *has* the capabilities of its depth and above (:mod:`lumina_cache.backend.capabilities`), and whatever else its own
actions need. For a set S of those that it lacks::

    v(S) = best score over actions whose requirements ⊆ has ∪ S, at one budget

chosen and scored as in :mod:`lumina_cache.gap.gap`. Then v(∅) is the best of the rung, v(all) that of side ``all`` without
placebos, and v(all) − v(∅) the gap that is to be explained:

- *alone*: v({c}) − v(∅). These need not add up: an action may need two things at once.
- *in the best order*: give the capability that gains most, then the next. These add up to the gap.
- *Shapley*: the mean of v(S ∪ {c}) − v(S) over all orders in which capabilities could be given,
  ``φ_c = Σ_S |S|!·(n−1−|S|)!/n! · (v(S ∪ {c}) − v(S))`` (Shapley, A value for n-person games, 1953), by enumeration of
  all 2ⁿ sets. These add up to the gap as well, and do not depend on an order.

Every v(S) is a choice of two actions, one per half, so that each figure is a fixed combination of scores per document:
intervals come from the same draws of documents as all others, with the choices held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..actions import Plan, parse_action
from ..backend import capabilities
from ..errors import ActionSyntaxError, AnalysisError
from ..methods import METHODS
from .cells import Cells, Fact
from .gap import Index, _record, fits, scores, together
from .resample import Array, Estimate

__all__ = [
    "MAX_CAPABILITIES",
    "Attribution",
    "Capability",
    "LayerCost",
    "attribute",
    "begin",
    "by_layer",
    "of_domain",
    "together_needed",
]

#: Shapley values are enumerated, so 2ⁿ sets of n capabilities; more than this many are refused.
MAX_CAPABILITIES = 16

#: What comes with any cache object of one's own behind mlx-lm's interface, and is not given apart.
_ROWS = frozenset({"KEYS", "VALUES", "ROW_GATHER", "ROW_CHOICE"})

#: Every capability that is known by name → the rung that it takes.
_DEPTHS = {
    str(c): int(c.rung)
    for c in (
        *(one for one in vars(capabilities).values() if isinstance(one, capabilities.Capability)),
        *(one for method in METHODS.values() for one in method.requires),
    )
}

_RUNGS = {"native": 0, "cache": 1, "hook": 2}


def together_needed(requires: Iterable[str]) -> frozenset[str]:
    """Capabilities as somebody would build them.

    Seeing keys and values, gathering rows and choosing them come as one (``ROWS``); so do element formats
    (``FORMATS``). Statistics of the attention (``OBSERVED_…``) are kept by whoever sees queries or weights.
    """
    found = set(requires)
    if found & {"QUERIES", "ATTENTION_WEIGHTS"}:
        found = {c for c in found if not c.startswith("OBSERVED_")}
    named = {"ROWS" if c in _ROWS else "FORMATS" if c.startswith("FORMAT_") else c for c in found}
    return frozenset("OBSERVED" if c.startswith("OBSERVED_") else c for c in named)


@dataclass(frozen=True)
class Capability:
    """What one missing capability is worth at a budget, in points."""

    name: str
    alone: Estimate
    shapley: Estimate
    order: int  #: its place in the best order, from 1
    in_order: Estimate  #: what it adds there
    actions: int  #: actions that fit and need it

    def to_record(self) -> dict[str, Any]:
        return _record(self)


@dataclass(frozen=True)
class Attribution:
    """The gap between a rung and everything, by capability."""

    base: str
    budget: float
    documents: str  #: ``"all"``, or a domain
    total: Estimate | None  #: v(all) − v(∅), points
    capabilities: tuple[Capability, ...]  #: largest Shapley value first
    #: for every number of capabilities the best set of that size and its gain, points
    best_sets: tuple[tuple[tuple[str, ...], float], ...]
    why: str = ""  #: why there is nothing, if so

    def to_record(self) -> dict[str, Any]:
        return _record(self)


@dataclass(frozen=True)
class LayerCost:
    """What an action costs on a range of layers alone, all others being kept."""

    layers: tuple[int, int]
    action: str
    points: Estimate  #: of damage, so positive where it harms

    def to_record(self) -> dict[str, Any]:
        return _record(self)


def attribute(
    cells: Cells,
    base: str,
    budget: float,
    *,
    named: Callable[[Iterable[str]], frozenset[str]] = together_needed,
    documents: str = "all",
) -> Attribution:
    """Attribute the gap between rung ``base`` and all candidates at ``budget``.

    Args:
        base: native, cache or hook.
        named: from an action's requirements to the capabilities that are told apart.
        documents: what ``cells`` are, for the record; see :func:`of_domain`.

    Raises:
        AnalysisError: there are more than MAX_CAPABILITIES to tell apart, or no such rung.
        MixedExecutionStateError: not the cells of one execution state.
    """
    return begin(cells, base, budget, named=named, documents=documents)()


def begin(
    cells: Cells,
    base: str,
    budget: float,
    *,
    named: Callable[[Iterable[str]], frozenset[str]] = together_needed,
    documents: str = "all",
) -> Callable[[], Attribution]:
    """The first half of :func:`attribute`: what it returns works out the intervals, together with whatever else waits.

    Raises:
        AnalysisError: there are more than MAX_CAPABILITIES to tell apart, or no such rung.
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    if base not in _RUNGS:
        raise AnalysisError(f"{base!r}: capabilities are missing from {', '.join(_RUNGS)}")
    candidates = np.array([f.role == "candidate" for f in cells.facts], dtype=bool)
    index = fits(cells, np.flatnonzero(candidates), budget)
    key = ("lacking", base, named)
    if key not in cells.memo:
        cells.memo[key] = _lacking(cells.facts, _RUNGS[base], named)
    needs = {int(i): cells.memo[key][int(i)] for i in index}
    names = sorted(set().union(*needs.values()))
    if len(names) > MAX_CAPABILITIES:
        raise AnalysisError(
            f"{len(names)} capabilities are missing from {base}, and the sets of at most {MAX_CAPABILITIES} can be "
            f"enumerated: tell fewer apart with named=. They are {', '.join(names)}"
        )
    if not any(not n for n in needs.values()):
        nothing = Attribution(base, budget, documents, None, (), (), f"no action of {base} fits {budget:.4g}")
        return lambda: nothing
    if not names:
        return lambda: _nothing_lacking(cells, base, budget, documents)
    return _enumerated(cells, base, budget, documents, needs, names)


def _lacking(
    facts: Sequence[Fact], rung: int, named: Callable[[Iterable[str]], frozenset[str]]
) -> dict[int, frozenset[str]]:
    """What each action needs beyond what the rung has; nothing for actions that the rung executes."""
    has: frozenset[str] = named(name for name, depth in _DEPTHS.items() if depth <= rung).union(
        *(named(f.requires) for f in facts if f.role == "candidate" and f.rung <= rung)
    )
    found = {}
    for i, fact in enumerate(facts):
        if fact.rung <= rung:
            found[i] = frozenset[str]()
        else:
            # An action above the rung that names nothing the rung lacks still needs something.
            found[i] = (named(fact.requires) - has) or frozenset({f"RUNG_{fact.rung}"})
    return found


def _nothing_lacking(cells: Cells, base: str, budget: float, documents: str) -> Attribution:
    zero = cells.resampling.estimate(np.zeros(cells.resampling.count))
    return Attribution(
        base, budget, documents, zero, (), (), f"no action that fits needs more than {base} has"
    )


def _enumerated(
    cells: Cells,
    base: str,
    budget: float,
    documents: str,
    needs: Mapping[int, frozenset[str]],
    names: Sequence[str],
) -> Callable[[], Attribution]:
    docs, score = cells.resampling, scores(cells)
    n = len(names)
    bit = {name: 1 << i for i, name in enumerate(names)}
    index = np.array(list(needs))
    # A tie goes to the lower rung, then to fewer bytes.
    index = index[np.lexsort((cells.shares[index], [cells.facts[i].rung for i in index]))]
    mask = np.array([sum(bit[c] for c in needs[int(i)]) for i in index])
    picks = [_picks(docs.mean(score[half]), index, mask, n) for half in (0, 1)]

    def value(which: int) -> Array:
        """v of a set on each document."""
        found: Array = (score[1, picks[0][which]] + score[0, picks[1][which]]) / 2
        return found

    # Of half 0's choice the score on half 1 counts, and the other way round.
    means = (docs.mean(score[1])[picks[0]] + docs.mean(score[0])[picks[1]]) / 2
    nothing = value(0)
    order = _best_order(means, n)
    given, places = 0, dict[int, int]()
    rows = [value((1 << n) - 1) - nothing]
    for place, one in enumerate(order, 1):
        rows.append(value(given | 1 << one) - value(given))
        places[one] = place
        given |= 1 << one
    rows += [value(1 << i) - nothing for i in range(n)]
    rows += [_shapley(i, n, picks, score) for i in range(n)]
    drawn = docs.later(np.stack(rows))
    counts = {name: sum(name in lacking for lacking in needs.values()) for name in names}

    def finish() -> Attribution:
        total, *each = drawn.estimates
        in_order, alone, shapley = each[:n], each[n : 2 * n], each[2 * n :]
        found = [
            Capability(name, alone[i], shapley[i], places[i], in_order[places[i] - 1], counts[name])
            for i, name in enumerate(names)
        ]
        found.sort(key=lambda c: (-c.shapley.value, c.order))
        return Attribution(base, budget, documents, total, tuple(found), _best_sets(means, names))

    return finish


def _picks(means: Array, index: Index, mask: Index, n: int) -> Index:
    """For every set of capabilities, as a number of n bits, the action with the highest mean, shape (2ⁿ,).

    Args:
        means: of every action.
        index: the actions to choose from, shape (k,).
        mask: what each of them lacks, as a number of n bits, shape (k,).
    """
    best = np.full(1 << n, -np.inf)
    pick = np.full(1 << n, -1, dtype=np.int64)
    for one, lacks in zip(index.tolist(), mask.tolist(), strict=True):
        if means[one] > best[lacks]:
            best[lacks], pick[lacks] = means[one], one
    for j in range(n):
        # Sets without capability j, and the same sets with it: whatever the former can do, the latter can.
        value, chosen = best.reshape(-1, 2, 1 << j), pick.reshape(-1, 2, 1 << j)
        better = value[:, 0] >= value[:, 1]
        value[:, 1] = np.where(better, value[:, 0], value[:, 1])
        chosen[:, 1] = np.where(better, chosen[:, 0], chosen[:, 1])
    return pick


def _shapley(i: int, n: int, picks: Sequence[Index], score: Array) -> Array:
    """φ of capability i on each document, shape (documents,)."""
    without = np.flatnonzero((np.arange(1 << n) >> i) & 1 == 0)
    sizes = np.array([int(s).bit_count() for s in without])
    weight = np.array([math.factorial(k) * math.factorial(n - 1 - k) / math.factorial(n) for k in range(n)])
    total: Array = np.zeros(score.shape[2])
    for half in (0, 1):
        # How much of each action's score is in φ: most sets differ in nothing, and cancel.
        coefficients = np.zeros(score.shape[1])
        np.add.at(coefficients, picks[half][without | 1 << i], weight[sizes])
        np.subtract.at(coefficients, picks[half][without], weight[sizes])
        moved = picks[half][without | 1 << i] != picks[half][without]
        if moved.any():
            total = total + coefficients @ score[1 - half] / 2
    return total


def _best_order(means: Array, n: int) -> list[int]:
    """Capabilities in the order in which each adds most to those before it; if none adds, by what follows from it."""
    given, order = 0, list[int]()
    while len(order) < n:
        left = [i for i in range(n) if not given >> i & 1]
        equal = _largest(left, [float(means[given | 1 << i]) for i in left])
        if len(equal) > 1:
            equal = _largest(equal, [_with(means, given | 1 << i) for i in equal])
        best = equal[0]
        order.append(best)
        given |= 1 << best
    return order


def _largest(of: Sequence[int], values: Sequence[float]) -> list[int]:
    """Those of ``of`` with the largest value. Sums of the same numbers in another order count as equal."""
    least = max(values) - 1e-9 * max(1.0, abs(max(values)))
    return [i for i, v in zip(of, values, strict=True) if v >= least]


def _with(means: Array, given: int) -> float:
    """Mean worth of all sets that hold ``given``: what it opens up later."""
    held = np.flatnonzero(np.arange(means.size) & given == given)
    return float(means[held].mean())


def _best_sets(means: Array, names: Sequence[str]) -> tuple[tuple[tuple[str, ...], float], ...]:
    n = len(names)
    sizes = np.array([int(s).bit_count() for s in range(1 << n)])
    found = []
    for k in range(1, n + 1):
        of_size = np.flatnonzero(sizes == k)
        best = int(of_size[np.argmax(means[of_size])])
        found.append((tuple(names[i] for i in range(n) if best >> i & 1), float(means[best] - means[0])))
    return tuple(found)


def of_domain(cells: Cells, domain: str) -> Cells:
    """The documents of one domain alone.

    Raises:
        AnalysisError: there is no such domain.
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    if domain not in cells.resampling.of_domain:
        raise AnalysisError(f"no document of domain {domain!r}: {', '.join(cells.resampling.of_domain)}")
    index = cells.resampling.of_domain[domain]
    arrays = {
        name: getattr(cells, name)[..., index]
        for name in ("quality", "kl", "quality_whole", "kl_whole", "top1", "nll_change", "share", "time")
    }
    names = tuple(cells.documents[i] for i in index)
    return replace(cells, documents=names, resampling=cells.resampling.only(domain), memo={}, **arrays)


def by_layer(cells: Cells) -> tuple[LayerCost, ...]:
    """Damage by layer, from actions that are plans for a single range of layers; empty if there are none.

    Raises:
        MixedExecutionStateError: not the cells of one execution state.
    """
    together(cells)
    found = []
    for i, fact in enumerate(cells.facts):
        try:
            action = parse_action(fact.action)
        except ActionSyntaxError:
            continue
        if isinstance(action, Plan):
            changed = [(layers, one) for layers, one in action.assignments if one.lossy]
            if len(changed) == 1:
                layers, one = changed[0]
                points = cells.resampling.estimate(cells.quality_whole[i])
                found.append(LayerCost(layers, str(one), points))
    return tuple(sorted(found, key=lambda c: (c.action, c.layers)))
