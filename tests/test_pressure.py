"""What a cache does while the machine is short of memory: with a budget, without one, and when trouble comes and goes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from harness import (
    CORE,
    UNEVICTABLE,
    UNPACKABLE,
    allocated,
    feed,
    held_of,
    pieces,
    real_bytes,
    same_bits,
    smallest,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache import LuminaCache
from lumina_cache.errors import BudgetError
from lumina_cache.policy.limits import AGAIN_SECONDS, CALM_SECONDS
from lumina_cache.telemetry import PressureLevel, Snapshot, ThermalState

PLENTY = 1 << 40


class Machine:
    """A machine whose state the test says; nothing reads the real one."""

    def __init__(self, **fields: Any) -> None:
        self.now = 0.0
        self.latest: Snapshot
        self.is_now(**fields)

    def is_now(
        self, pressure: PressureLevel = PressureLevel.NORMAL, *, after: float = 0.0, **fields: Any
    ) -> None:
        self.now += after
        self.latest = Snapshot(
            monotonic_seconds=self.now,
            unix_seconds=0.0,
            platform="test",
            pressure_level=pressure,
            **{"memory_available_bytes": PLENTY, **fields},
        )


def records(cache: LuminaCache, event: str) -> list[dict[str, Any]]:
    return [r for r in cache.log.records if r["event"] == event]


def actions(cache: LuminaCache) -> list[str]:
    return [r["action"] for r in records(cache, "action.applied")]


def limit_of(cache: LuminaCache) -> int:
    """The limit in force."""
    limit = cache.observe().limit
    assert limit is not None
    return limit


# -- without a budget ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1", "gpt_oss"])
@pytest.mark.parametrize(
    "machine",
    [
        Machine(),
        Machine(headroom_bytes=PLENTY, thermal_state=ThermalState.CRITICAL, low_power_mode=True),
        Machine(pressure=PressureLevel.UNKNOWN, memory_available_bytes=None),
    ],
    ids=["calm", "hot", "unknown"],
)
def test_out_of_trouble_nothing_is_decided_and_every_bit_is_the_stock_caches(
    tiny: Any, name: str, machine: Machine
) -> None:
    model, ids = tiny(name), tokens(340)
    cache = LuminaCache(model, telemetry=machine)
    steps = pieces(300, 100, 40)
    assert same_bits(feed(model, cache, ids, steps), feed(model, make_prompt_cache(model), ids, steps))
    assert records(cache, "decision") == actions(cache) == []


@pytest.mark.parametrize(("level", "share"), [(PressureLevel.WARN, 0.75), (PressureLevel.CRITICAL, 0.5)])
def test_under_pressure_rows_are_encoded_and_none_is_dropped(
    tiny: Any, level: PressureLevel, share: float
) -> None:
    model, machine = tiny("llama"), Machine()
    cache = LuminaCache(model, telemetry=machine)
    feed(model, cache, tokens(500), [500])
    before = allocated(cache)
    assert actions(cache) == []
    machine.is_now(level)
    feed(model, cache, tokens(3), [1])
    assert allocated(cache) == real_bytes(cache) <= share * before
    assert {one.rows for one in held_of(cache)} == {501}
    [decision] = records(cache, "decision")
    assert decision["trigger"] == "telemetry"
    assert level.value in decision["why"]
    assert decision["state"]["machine"]["pressure_level"] == level.value
    assert all("evict" not in action for action in actions(cache))


def test_rows_that_were_encoded_under_pressure_can_still_be_taken_back(tiny: Any) -> None:
    """Nobody agreed to lose rows, so prefix reuse and speculation go on."""
    from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

    model, machine = tiny("llama"), Machine()
    cache = LuminaCache(model, telemetry=machine)
    feed(model, cache, tokens(300), [300])
    machine.is_now(PressureLevel.CRITICAL)
    feed(model, cache, tokens(3), [1])
    assert actions(cache)
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, 100) == 100
    assert {one.rows for one in held_of(cache)} == {201}


def test_a_model_that_can_do_nothing_about_it_is_left_alone_and_asked_seldom(tiny: Any) -> None:
    model, machine = tiny("deepseek_v3"), Machine()
    assert "deepseek_v3" in UNPACKABLE
    cache, plain = LuminaCache(model, telemetry=machine), make_prompt_cache(model)
    ids = tokens(400)
    machine.is_now(PressureLevel.CRITICAL)
    got = []
    for start in range(0, 400, 2):
        machine.is_now(PressureLevel.CRITICAL, after=0.25)
        got.append(feed(model, cache, ids[:, start : start + 2], [1, 1]))
    want = feed(model, plain, ids, [1] * 400)
    lossy = [a for a in actions(cache) if a != "reclaim"]
    if not lossy:
        assert same_bits(mx.concatenate(got, axis=1), want)
    assert {one.rows for one in held_of(cache)} == {400}
    assert len(records(cache, "decision")) <= 100 / AGAIN_SECONDS + 10


def test_growth_into_the_last_of_the_machines_memory_is_acted_upon(tiny: Any) -> None:
    model, machine = tiny("llama"), Machine()
    cache = LuminaCache(model, telemetry=machine)
    feed(model, cache, tokens(256), [256])
    machine.is_now(headroom_bytes=1000)
    feed(model, cache, tokens(2), [1, 1])
    [decision] = records(cache, "decision")
    assert "headroom" in decision["state"]["limit"]["why"]
    assert actions(cache)


# -- with a budget ------------------------------------------------------------------------------------------------------


def test_pressure_lowers_the_limit_below_the_budget_and_calm_gives_it_back_but_not_the_rows(
    tiny: Any,
) -> None:
    model, machine = tiny("llama"), Machine()
    budget = 4 * smallest(model)
    cache = LuminaCache(model, telemetry=machine, budget=budget)
    feed(model, cache, tokens(800), [100] * 8)
    machine.is_now(PressureLevel.CRITICAL)
    held = allocated(cache)
    feed(model, cache, tokens(1), [1])
    assert limit_of(cache) == max(held // 2, smallest(model))
    low = {one.rows for one in held_of(cache)}, {one.bits for one in held_of(cache)}
    for _ in range(8):
        machine.is_now(after=CALM_SECONDS + 1)
        feed(model, cache, tokens(1), [1])
    assert limit_of(cache) == budget
    assert {one.bits for one in held_of(cache)} == low[1]
    assert {one.rows for one in held_of(cache)} == {rows + 8 for rows in low[0]}


@pytest.mark.parametrize("budget", [True, False], ids=["budget", "no budget"])
def test_pressure_that_comes_and_goes_every_second_is_given_way_to_no_more_often_than_if_it_stayed(
    tiny: Any, budget: bool
) -> None:
    model, machine = tiny("llama"), Machine()
    cache = LuminaCache(model, telemetry=machine, budget=4 * smallest(model) if budget else None)
    feed(model, cache, tokens(600), [100] * 6)
    before, done, bits = allocated(cache), len(actions(cache)), 99
    for second in range(60):
        machine.is_now(PressureLevel.WARN if second % 2 else PressureLevel.NORMAL, after=1.0)
        feed(model, cache, tokens(1, seed=second), [1])
        now = min((one.bits or 99) for one in held_of(cache))
        assert now <= bits, "something was undone"
        bits = now
    assert 1 <= len(actions(cache)) - done <= 60 / AGAIN_SECONDS
    assert allocated(cache) < before


def test_a_hot_machine_prices_time_higher_and_the_log_says_by_how_much(tiny: Any) -> None:
    model = tiny("llama")
    machine = Machine(thermal_state=ThermalState.SERIOUS)
    cache = LuminaCache(model, telemetry=machine, budget=smallest(model))
    feed(model, cache, tokens(500), [100] * 5)
    weights = {r["state"]["weights"]["time"] for r in records(cache, "decision")}
    assert weights == {2.0}


def test_what_the_machine_said_is_in_the_log_when_it_changes_and_only_then(tiny: Any) -> None:
    model, machine = tiny("llama"), Machine()
    cache = LuminaCache(model, telemetry=machine)
    for level in (PressureLevel.NORMAL, PressureLevel.WARN, PressureLevel.WARN, PressureLevel.NORMAL):
        machine.is_now(level, after=1.0)
        feed(model, cache, tokens(2), [1, 1])
    levels = [r["snapshot"]["pressure_level"] for r in records(cache, "telemetry")]
    assert levels == ["warn", "normal"]


# -- everything at once -------------------------------------------------------------------------------------------------

LEVELS = st.sampled_from(
    [
        PressureLevel.NORMAL,
        PressureLevel.NORMAL,
        PressureLevel.WARN,
        PressureLevel.CRITICAL,
        PressureLevel.UNKNOWN,
    ]
)
script = st.lists(
    st.tuples(
        LEVELS,
        st.floats(0.1, 40.0),
        st.one_of(st.none(), st.integers(0, 1 << 22)),
        st.sampled_from([None, 0.0, 1e6]),
    ),
    min_size=1,
    max_size=12,
)


def bound_is_held(
    model: Any,
    times: float,
    chunks: list[int],
    seen: list[tuple[PressureLevel, float, int | None, float | None]],
    protect: range,
    policy: str,
) -> LuminaCache:
    """Feed chunks, each followed by single tokens, under a script: the limit is held after every single token.

    (A chunk that mlx-lm hands over whole can pass it, and sliding windows hold a chunk until the next token.)
    """
    machine = Machine()
    least = smallest(model, protect=protect)
    cache = LuminaCache(model, telemetry=machine, budget=int(times * least), protect=protect, policy=policy)
    assert cache.budget is not None
    for turn, (pressure, wait, room, swap) in enumerate(seen):
        machine.is_now(pressure, after=wait, headroom_bytes=room, swap_out_bytes_per_second=swap)
        n = chunks[turn % len(chunks)]
        logits = feed(model, cache, tokens(n + 4, seed=turn), [n])
        assert mx.isfinite(logits).all().item()
        assert allocated(cache) == real_bytes(cache)
        for i in range(4):
            logits = feed(model, cache, tokens(1, seed=i), [1])
            assert mx.isfinite(logits).all().item()
            assert allocated(cache) == real_bytes(cache) <= limit_of(cache) <= cache.budget
    assert not [r for r in records(cache, "warning") if r["code"] in ("action_failed", "policy_failed")]
    for one in held_of(cache):
        if one.kind == "kv":
            assert one.rows >= len(range(protect.start, min(protect.stop, one.offset)))
    return cache


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_under_a_budget_and_any_pressure_the_bytes_stay_within_the_limit(tiny: Any, name: str) -> None:
    seen = [
        (PressureLevel.NORMAL, 1.0, None, None),
        (PressureLevel.WARN, 1.0, 0, None),
        (PressureLevel.CRITICAL, 1.0, 0, 1e6),
        (PressureLevel.NORMAL, 40.0, 1 << 30, 0.0),
        (PressureLevel.UNKNOWN, 40.0, None, None),
    ]
    cache = bound_is_held(tiny(name), 1.6, [250, 90], seen, range(30, 50), "adaptive")
    assert actions(cache)


def test_layers_that_a_plan_stored_differently_are_cut_to_equal_rows_later(tiny: Any) -> None:
    """Two caches per layer, one mask for all: a chunk after an eviction fails where rows differ."""
    normal, unknown = PressureLevel.NORMAL, PressureLevel.UNKNOWN
    seen = [
        (normal, 8.7, None, None),
        (normal, 0.3, None, None),
        (normal, 32.1, None, 1e6),
        (normal, 13.0, None, None),
        (normal, 0.1, None, 0.0),
        (PressureLevel.WARN, 39.2, 1009, 0.0),
        (unknown, 28.4, 29051, 0.0),
        (unknown, 9.8, 511, 1e6),
        (unknown, 25.6, 918, 1e6),
    ]
    bound_is_held(tiny("longcat_flash"), 3.0, [111, 106, 281], seen, range(125, 185), "greedy")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(set(CORE) - UNEVICTABLE)),
    times=st.floats(1.0, 4.0),
    chunks=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    seen=script,
    protect=st.tuples(st.integers(0, 300), st.integers(0, 60)).map(lambda x: range(x[0], sum(x))),
    policy=st.sampled_from(["adaptive", "greedy", "window"]),
)
def test_under_any_budget_and_any_pressure_any_model_stays_within_the_limit(
    tiny: Any,
    name: str,
    times: float,
    chunks: list[int],
    seen: list[tuple[PressureLevel, float, int | None, float | None]],
    protect: range,
    policy: str,
) -> None:
    model = tiny(name)
    bound_is_held(model, times, chunks, seen, protect, policy)
    with pytest.raises(BudgetError, match=str(smallest(model, protect=protect))):
        LuminaCache(model, telemetry=False, budget=smallest(model, protect=protect) - 1, protect=protect)
