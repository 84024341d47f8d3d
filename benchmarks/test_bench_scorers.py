"""What ranking the rows of one layer costs, in steps of dense attention over the same rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import pytest

from lumina_cache.scorers import SCORERS, protected_rows, select

#: Query heads for each head of keys and values, as SmolLM2-135M and Llama 3 8B have them.
SHAPES = {"1x3x4096x64": ((1, 3, 4096, 64), 3), "1x8x4096x128": ((1, 8, 4096, 128), 4)}
#: An eviction is far rarer than a step, and the steps after it are cheaper. The bound is for a scorer that has gone
#: quadratic: the keys' T × T products are T/2g times the multiplications of a step with g queries per head, 500 here.
LIMIT_STEPS = 100.0


def _seconds(work: Callable[[], mx.array]) -> float:
    start = time.perf_counter()
    mx.eval(work())
    return time.perf_counter() - start


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCORERS)
def test_scoring_a_layer_costs_few_steps_of_attention(benchmark, name, shape):
    size, queries_per_head = SHAPES[shape]
    batch, heads, rows, width = size
    keys, values = mx.random.normal(size), mx.random.normal(size)
    query = mx.random.normal((batch, heads * queries_per_head, 1, width))
    positions = mx.broadcast_to(mx.arange(rows, dtype=mx.int32), (batch, heads, rows))
    protected = protected_rows(positions, 4, 32, ())
    mx.eval(keys, values, query, positions, protected)
    scorer = SCORERS[name]()

    def attend() -> mx.array:
        return mx.fast.scaled_dot_product_attention(query, keys, values, scale=width**-0.5)

    def score() -> mx.array:
        return scorer.scores(keys, values, positions)

    def choose() -> mx.array:
        return select(score(), rows // 2, protected)

    for work in (attend, score, choose):
        _seconds(work)
    ratios: dict[str, list[float]] = {"scores": [], "scores and choice": []}
    for _ in range(15):
        # Each beside an attention step of the same moment.
        step, scored, chosen = _seconds(attend), _seconds(score), _seconds(choose)
        ratios["scores"].append(scored / step)
        ratios["scores and choice"].append(chosen / step)
    for what, seen in ratios.items():
        benchmark.extra_info[f"{what} / attention step, quartiles"] = statistics.quantiles(seen, n=4)
        print(f"\n{name} {shape}: {what} / attention step, quartiles {statistics.quantiles(seen, n=4)}")
    benchmark.pedantic(lambda: mx.eval(score()), rounds=5)
    assert statistics.median(ratios["scores"]) <= LIMIT_STEPS
