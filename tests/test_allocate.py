"""One option per layer: the optimum where it can be tried, close to the relaxed bound where it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache.allocate import Option, allocate, allocate_alike, allocate_exhaustively, lower_hull

options = st.lists(st.builds(Option, st.integers(1, 60), st.floats(0, 10)), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(layers=st.lists(options, min_size=1, max_size=5), budget=st.integers(0, 200))
def test_no_allocation_passes_its_budget_or_falls_short_of_its_bound(
    layers: list[list[Option]], budget: int
) -> None:
    found, best = allocate(layers, budget), allocate_exhaustively(layers, budget)
    assert (found is None) == (best is None)
    if found is None or best is None:
        return
    assert found.nbytes == sum(layers[i][j].nbytes for i, j in enumerate(found.chosen)) <= budget
    assert found.loss == pytest.approx(sum(layers[i][j].loss for i, j in enumerate(found.chosen)))
    assert found.at_least - 1e-9 <= best.loss <= found.loss + 1e-9


@settings(max_examples=200, deadline=None)
@given(layers=st.lists(options, min_size=1, max_size=5), price=st.floats(0.001, 10))
def test_what_lies_on_the_hull_is_the_optimum_of_its_own_bytes(
    layers: list[list[Option]], price: float
) -> None:
    chosen = [min(o, key=lambda x: (x.loss + price * x.nbytes, x.nbytes)) for o in layers]
    budget = sum(o.nbytes for o in chosen)
    found = allocate(layers, budget)
    assert found is not None
    assert found.loss == pytest.approx(sum(o.loss for o in chosen), abs=1e-9)


def test_the_hull_leaves_out_what_no_price_would_choose() -> None:
    every = [Option(10, 1.0), Option(8, 1.2), Option(6, 3.0), Option(4, 3.2), Option(6, 5.0), Option(9, 4.0)]
    assert lower_hull(every) == [0, 1, 3]


@settings(max_examples=300, deadline=None)
@given(
    fronts=st.lists(options, min_size=1, max_size=3),
    layers=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.3, 0.5, 0.5, 1.0, 1.7])), max_size=9
    ),
    share=st.floats(0.0, 1.1),
)
def test_layers_that_are_alike_are_given_what_a_walk_over_single_ones_gives_them(
    fronts: list[list[Option]], layers: list[tuple[int, float]], share: float
) -> None:
    hulls = [[front[i] for i in reversed(lower_hull(front))] for front in fronts]
    kinds, weights = [kind % len(hulls) for kind, _ in layers], [weight for _, weight in layers]
    if set(kinds) != set(range(len(hulls))):
        return
    budget = int(share * sum(hulls[kind][-1].nbytes for kind in kinds))
    single = [[Option(o.nbytes, o.loss * w) for o in hulls[k]] for k, w in zip(kinds, weights, strict=True)]
    found = allocate(single, budget, exact=False, hulls=[list(range(len(hulls[k])))[::-1] for k in kinds])
    assert allocate_alike(kinds, hulls, weights, budget) == (None if found is None else list(found.chosen))


def optimum(layers: list[list[Option]], budget: int) -> float:
    """Exact, by dynamic programming over single bytes, in plain Python."""
    best = {0: 0.0}
    for one in layers:
        after: dict[int, float] = {}
        for nbytes, loss in best.items():
            for option in one:
                total = nbytes + option.nbytes
                if total <= budget and loss + option.loss < after.get(total, np.inf):
                    after[total] = loss + option.loss
        best = after
    return min(best.values())


@pytest.mark.parametrize("seed", range(6))
def test_at_the_size_of_real_models_the_optimum_is_found(seed: int) -> None:
    """64 layers, seven codecs each, sensitivities spread over two orders of magnitude."""
    rng = np.random.default_rng(seed)
    bits, damage = (16, 8.5, 6.5, 5.5, 4.5, 3.5, 2.5), (0, 1e-4, 1e-3, 4e-3, 1.5e-2, 6e-2, 0.4)
    weight = rng.lognormal(0, 1, 64)
    layers = [[Option(int(b * 64), d * w) for b, d in zip(bits, damage, strict=True)] for w in weight]
    budget = int(rng.uniform(3, 12) * 64 * 64)
    found = allocate(layers, budget)
    assert found is not None
    assert found.loss == pytest.approx(optimum(layers, budget))


def test_where_bytes_have_no_common_divisor_the_loss_stays_close_to_the_bound() -> None:
    rng = np.random.default_rng(1)
    layers = [
        [
            Option(int(b * 81929) + int(rng.integers(0, 99)), d * w)
            for b, d in ((16, 0), (8.5, 0.01), (4.5, 1))
        ]
        for w in rng.lognormal(0, 1, 48)
    ]
    found = allocate(layers, 81929 * 48 * 7)
    assert found is not None
    # At these bytes one step of one layer is worth several percent of the whole loss.
    dearest = max(o.loss for one in layers for o in one) - min(o.loss for one in layers for o in one)
    assert found.at_least <= found.loss <= found.at_least + dearest
