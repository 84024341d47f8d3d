"""Rows of protected positions survive every eviction, or the eviction is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import feed, held_of, quiet, settle, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lumina_cache.cache import LuminaCache
from lumina_cache.errors import ActionInfeasibleError, BudgetError, UnsupportedCacheError
from lumina_cache.scorers import SCORERS

RANGE = range(20, 36)


def positions(cache: LuminaCache) -> list[np.ndarray]:
    """Per layer that an eviction changed, the positions of the rows held by each head: (heads, T)."""
    kept = [layer.positions() for layer in cache if layer.kind == "kv"]
    return [p.reshape(-1, p.shape[-1]) for p in kept]


def assert_all_held(cache: LuminaCache, wanted: range) -> None:
    for layer in positions(cache):
        for head in layer:
            assert set(wanted) <= set(head.tolist())


def filled(model: Any, n: int = 90, **kwargs: Any) -> LuminaCache:
    cache = quiet(model, **kwargs)
    feed(model, cache, tokens(n), [n - 1, 1])
    return cache


@pytest.mark.parametrize("scorer", SCORERS)
def test_no_scorer_evicts_protected_rows(tiny: Any, scorer: str) -> None:
    model = tiny("llama")
    free, held = filled(model), filled(model, protect=RANGE)
    free.apply(f"evict:{scorer}@rows=26")
    held.apply(f"evict:{scorer}@rows=26")
    assert_all_held(held, RANGE)
    assert {one.rows for one in held_of(held)} == {26}
    gone = [set(RANGE) - set(head.tolist()) for layer in positions(free) for head in layer]
    assert any(gone), "nothing was at stake"


@pytest.mark.parametrize("scorer", ["sinks_window", "keydiff", "random"])
def test_protected_rows_survive_repeated_evictions(tiny: Any, scorer: str) -> None:
    model = tiny("llama")
    cache = filled(model, plan=f"evict:{scorer}@rows=24,slack=3", protect=RANGE)
    feed(model, cache, tokens(20), [1] * 20)
    assert_all_held(cache, RANGE)
    assert max(one.rows for one in held_of(cache)) <= 27


@pytest.mark.parametrize(
    "codec",
    [
        "kivi,bits=4,group=32",
        "hadamard,bits=4,group=32",
        "affine_fetch,bits=8,group=32,residual=16",
        "affine,bits=8,group=32",
    ],
)
@pytest.mark.parametrize("scorer", ["sinks_window", "keydiff"])
def test_protected_rows_survive_with_rows_encoded_together(tiny: Any, codec: str, scorer: str) -> None:
    model = tiny("llama")
    cache = filled(model, 300, protect=range(70, 100))
    cache.apply(f"quant:{codec}")
    cache.apply(f"evict:{scorer}@rows=190")
    assert_all_held(cache, range(70, 100))
    assert_all_held(cache, range(4))


def test_a_composite_protects_as_its_parts_do(tiny: Any) -> None:
    cache = filled(tiny("llama"), 300, protect=range(70, 100))
    cache.apply("quant:kivi,bits=4,group=32+evict:keydiff@rows=190")
    assert_all_held(cache, range(70, 100))


def test_blocks_that_leave_no_room_for_protected_rows_are_refused_and_nothing_is_changed(tiny: Any) -> None:
    model = tiny("llama")
    # 33 protected rows lie in three blocks of 32; with the sinks' there are four, and 100 rows leave room for three.
    cache = filled(model, 300, protect=range(63, 97))
    cache.apply("quant:kivi,bits=4,group=32")
    before = held_of(cache)
    with pytest.raises(ActionInfeasibleError, match="blocks of 32 rows"):
        cache.apply("evict:keydiff@rows=100")
    assert held_of(cache) == before
    [refused] = [r for r in cache.log.records if r["event"] == "action.refused"]
    assert refused["reasons"][0]["code"] == "protected_rows"
    cache.apply("evict:keydiff@rows=180")
    assert_all_held(cache, range(63, 97))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.integers(0, 150), length=st.integers(1, 60), kept=st.integers(8, 150), kivi=st.booleans(),
    twice=st.booleans(), scorer=st.sampled_from(["sinks_window", "keydiff", "random"]),
)  # fmt: skip
def test_either_all_protected_rows_stay_or_nothing_happens(
    tiny: Any, first: int, length: int, kept: int, kivi: bool, twice: bool, scorer: str
) -> None:
    cache = filled(tiny("llama"), 170, protect=range(first, first + length), guard=False)
    if kivi:
        cache.apply("quant:kivi,bits=4,group=32")
    for rows in (kept, kept // 2)[: 1 + twice]:
        before = held_of(cache)
        try:
            cache.apply(f"evict:{scorer}@rows={max(1, rows)}")
        except ActionInfeasibleError:
            assert held_of(cache) == before
        assert_all_held(cache, range(first, min(170, first + length)))


def test_a_plan_that_cannot_keep_what_is_protected_is_refused_at_once(tiny: Any) -> None:
    model = tiny("llama")
    with pytest.raises(ActionInfeasibleError, match="40 rows leave no choice beside 104 protected"):
        quiet(model, plan="evict:sinks_window@rows=40", protect=[range(50, 100), range(60, 150)])
    cache = quiet(model, plan="evict:sinks_window@rows=40", protect=range(4, 20))
    with pytest.raises(ActionInfeasibleError, match="keep more rows, or protect fewer"):
        cache.protect(range(100, 10**12))
    assert cache._control.protect == ((4, 20),)


def test_a_share_that_turns_out_too_small_for_what_is_protected_is_in_the_log(tiny: Any) -> None:
    model = tiny("llama")
    cache = filled(model, plan="evict:sinks_window@0.15", protect=RANGE)
    feed(model, cache, tokens(4), [1] * 4)
    [refused] = [r for r in cache.log.records if r["event"] == "action.refused"]
    assert "leave no choice" in refused["reasons"][0]["text"]
    assert {one.rows for one in held_of(cache)} == {94}


def test_a_budget_keeps_protected_rows_too(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, budget=300_000, protect=range(50, 110))
    for seed in range(60):
        model(tokens(80, seed=seed), cache=cache)
        settle(cache)
    assert min(one.rows for one in held_of(cache)) < 4800
    assert_all_held(cache, range(50, 110))


def test_a_budget_too_small_for_what_is_protected_is_refused(tiny: Any) -> None:
    model = tiny("llama")
    quiet(model, budget=300_000)
    with pytest.raises(BudgetError, match="the smallest that works"):
        quiet(model, budget=300_000, protect=range(4000))


def test_positions_protected_later_are_kept_from_then_on(tiny: Any) -> None:
    cache = filled(tiny("llama"))
    cache.protect(range(30, 36), range(50, 52))
    cache.apply("evict:sinks_window@rows=20")
    assert_all_held(cache, range(30, 36))
    assert_all_held(cache, range(50, 52))


@pytest.mark.parametrize("bad", [range(0, 10, 2), range(-3, 5), (0, 10), 7, "0-10"])
def test_what_is_no_range_of_positions_is_refused(tiny: Any, bad: Any) -> None:
    with pytest.raises(UnsupportedCacheError, match="range"):
        quiet(tiny("llama"), protect=[bad])
    with pytest.raises(UnsupportedCacheError, match="range"):
        quiet(tiny("llama")).protect(bad)
