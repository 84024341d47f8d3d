"""What one decode step costs in Python beyond the stock cache, and that memory stays flat over many steps."""

from __future__ import annotations

import gc
import statistics
import time
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock

from lumina_cache import LuminaCache
from lumina_cache.layers import leaves

N_LAYERS = 32
LIMIT_MICROSECONDS = 50.0


@pytest.fixture
def stub_arrays(monkeypatch):
    """mlx-lm's array work replaced by counting, so that only Python around it is timed."""

    def update_and_fetch(self, keys, values):
        self.offset += 1
        return keys, values

    monkeypatch.setattr(stock.KVCache, "update_and_fetch", update_and_fetch)
    return SimpleNamespace(shape=(1, 8, 1, 128))


def _model():
    return SimpleNamespace(layers=[None] * N_LAYERS, model_type="stub")


def _step(entries, row) -> None:
    entries[0].make_mask(1, return_array=False, window_size=None)
    for entry in entries:
        entry.update_and_fetch(row, row)


def _paired_microseconds(ours, theirs, row, rounds: int = 400) -> list[float]:
    """Extra time per step, each measured beside a stock step of the same moment."""
    extra = []
    for _ in range(rounds):
        a = time.perf_counter()
        _step(theirs, row)
        b = time.perf_counter()
        _step(ours, row)
        c = time.perf_counter()
        extra.append(((c - b) - (b - a)) * 1e6)
    return extra


@pytest.mark.parametrize("budget", [None, "1TB"], ids=["watching", "with a budget"])
def test_a_decode_step_of_32_layers_costs_at_most_50_microseconds_more(benchmark, stub_arrays, budget):
    ours = LuminaCache(_model(), telemetry=False)
    if budget is not None:
        # The probe needs a real model; what is timed is the hot path with a budget and a policy in place.
        ours._control.budget = 10**12
        ours._control.policy = SimpleNamespace(name="never asked")
        ours._control._slack = 1 << 40
    theirs = [stock.KVCache() for _ in range(N_LAYERS)]
    extra = _paired_microseconds(ours, theirs, stub_arrays)
    benchmark.extra_info["extra microseconds per step, median"] = statistics.median(extra)
    benchmark.extra_info["extra microseconds per step, quartiles"] = statistics.quantiles(extra, n=4)
    benchmark(_step, ours, stub_arrays)
    print(
        f"\nextra per step: median {statistics.median(extra):.1f} µs, quartiles {statistics.quantiles(extra, n=4)}"
    )
    assert statistics.median(extra) <= LIMIT_MICROSECONDS


def test_two_thousand_decode_steps_leave_no_memory_behind(tiny):
    model = tiny("llama")
    cache = LuminaCache(model)
    token = mx.array([[3]])

    def beyond_the_cache() -> int:
        gc.collect()
        held = sum(a.nbytes for leaf in leaves(cache) for a in (leaf.keys, leaf.values))
        return mx.get_active_memory() - held

    for _ in range(10):
        mx.eval(model(token, cache=cache))
    start = beyond_the_cache()
    seen = []
    for _ in range(4):
        for _ in range(500):
            mx.eval(model(token, cache=cache))
        seen.append(beyond_the_cache() - start)
    print(f"\nactive memory beyond the cache's own arrays, growth after each 500 steps: {seen} bytes")
    assert max(abs(x) for x in seen) <= 64 * 1024
