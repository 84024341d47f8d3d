"""How much the cache may take: the budget, or less while the machine is short of memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache.policy.limits import AGAIN_SECONDS, CALM_SECONDS, LimitKeeper, price_of_time
from lumina_cache.policy.score import Weights
from lumina_cache.telemetry import PressureLevel, Snapshot, ThermalState

MB = 1 << 20


def machine(at: float = 0.0, pressure: PressureLevel = PressureLevel.NORMAL, **fields: object) -> Snapshot:
    return Snapshot(
        monotonic_seconds=at,
        unix_seconds=0.0,
        platform="test",
        pressure_level=pressure,
        **fields,  # type: ignore[arg-type]
    )


def run(keeper: LimitKeeper, script: list[Snapshot], held: int) -> tuple[LimitKeeper, list[int | None]]:
    """Limits over time for a cache that always gives way at once."""
    limits = []
    for one in script:
        keeper, limit = keeper.after(one, held)
        limits.append(limit.nbytes)
        held = held if limit.nbytes is None else min(held, limit.nbytes)
    return keeper, limits


def test_on_a_calm_machine_the_budget_is_the_limit() -> None:
    _, limit = LimitKeeper(100 * MB).after(machine(memory_available_bytes=1 << 40), 90 * MB)
    assert (limit.nbytes, limit.why) == (100 * MB, "the budget")


def test_without_telemetry_the_budget_is_the_limit_and_it_is_said() -> None:
    _, limit = LimitKeeper(100 * MB).after(None, 90 * MB)
    assert limit.nbytes == 100 * MB
    assert "telemetry is off" in limit.why


def test_nothing_is_limited_where_nothing_is_known_and_nothing_was_asked_and_it_is_said() -> None:
    unknown = machine(pressure=PressureLevel.UNKNOWN, unknown={"headroom_bytes": "no such file"})
    _, limit = LimitKeeper(None).after(unknown, 90 * MB)
    assert limit.nbytes is None
    assert "no such file" in limit.why


@pytest.mark.parametrize(
    ("pressure", "left"), [(PressureLevel.WARN, 75), (PressureLevel.CRITICAL, 50)], ids=["warn", "critical"]
)
def test_pressure_takes_a_share_of_what_is_held_at_once(pressure: PressureLevel, left: int) -> None:
    _, limit = LimitKeeper(None).after(machine(pressure=pressure), 100 * MB)
    assert limit.nbytes == left * MB
    assert pressure.value in limit.why


def test_swapping_out_is_trouble_whatever_the_level_says() -> None:
    _, limit = LimitKeeper(200 * MB).after(machine(swap_out_bytes_per_second=1e6), 100 * MB)
    assert limit.nbytes == 75 * MB
    assert "swapping" in limit.why


def test_only_a_share_of_the_room_that_is_left_may_be_grown_into() -> None:
    _, limit = LimitKeeper(1 << 40).after(
        machine(headroom_bytes=10 * MB, memory_available_bytes=1 << 40), 100 * MB
    )
    assert limit.nbytes == 105 * MB
    _, limit = LimitKeeper(1 << 40).after(machine(memory_available_bytes=10 * MB), 100 * MB)
    assert limit.nbytes == 105 * MB


def test_pressure_that_comes_and_goes_is_given_way_to_once() -> None:
    script = [
        machine(t / 4, PressureLevel.WARN if t % 2 else PressureLevel.NORMAL, memory_available_bytes=1 << 40)
        for t in range(int(4 * AGAIN_SECONDS))
    ]
    _, limits = run(LimitKeeper(100 * MB), script, 100 * MB)
    assert set(limits) == {100 * MB, 75 * MB}
    assert limits.index(75 * MB) == 1
    assert set(limits[1:]) == {75 * MB}


def test_pressure_that_stays_is_given_way_to_again_down_to_the_floor() -> None:
    script = [machine(float(t), PressureLevel.WARN) for t in range(100)]
    _, limits = run(LimitKeeper(100 * MB, floor=20 * MB), script, 100 * MB)
    assert limits[0] == 75 * MB
    assert limits[-1] == 20 * MB
    falls = sum(a != b for a, b in itertools.pairwise(limits))
    assert falls <= 100 / AGAIN_SECONDS


def test_worse_pressure_is_given_way_to_at_once() -> None:
    script = [machine(0.0, PressureLevel.WARN), machine(0.5, PressureLevel.CRITICAL)]
    _, limits = run(LimitKeeper(100 * MB), script, 100 * MB)
    assert limits == [75 * MB, int(75 * MB * 0.5)]


def test_after_calm_the_limit_rises_step_by_step_to_the_budget() -> None:
    script = [machine(0.0, PressureLevel.CRITICAL)]
    script += [machine(1.0 + t, memory_available_bytes=1 << 40) for t in range(int(6 * CALM_SECONDS))]
    keeper, limits = run(LimitKeeper(100 * MB), script, 100 * MB)
    rising = [x for x in limits if x is not None]
    assert rising == sorted(rising)
    assert limits[int(CALM_SECONDS) - 1] == 50 * MB
    assert limits[-1] == 100 * MB
    assert keeper.lowered is None


@settings(deadline=None)
@given(
    script=st.lists(
        st.tuples(
            st.floats(0.01, 60),
            st.sampled_from(list(PressureLevel)),
            st.one_of(st.none(), st.integers(0, 1 << 34)),
            st.one_of(st.none(), st.floats(0, 1e8)),
        ),
        max_size=40,
    ),
    budget=st.integers(30 * MB, 1 << 33),
    held=st.integers(0, 1 << 33),
)
def test_the_limit_never_passes_the_budget_and_never_falls_below_the_floor(
    script: list[tuple[float, PressureLevel, int | None, float | None]], budget: int, held: int
) -> None:
    keeper, now = LimitKeeper(budget, floor=30 * MB), 0.0
    for wait, pressure, room, swap in script:
        now += wait
        seen = machine(now, pressure, headroom_bytes=room, swap_out_bytes_per_second=swap)
        keeper, limit = keeper.after(seen, held)
        assert limit.nbytes is not None
        assert 30 * MB <= limit.nbytes <= budget
        held = min(held, limit.nbytes)


def test_time_costs_more_on_a_hot_machine_and_in_low_power_mode() -> None:
    calm = Weights()
    assert price_of_time(None, calm) == price_of_time(machine(), calm) == calm
    assert price_of_time(machine(thermal_state=ThermalState.SERIOUS), calm).time == 2.0
    assert price_of_time(machine(thermal_state=ThermalState.CRITICAL, low_power_mode=True), calm).time == 8.0
    assert price_of_time(machine(thermal_state=ThermalState.UNKNOWN), calm) == calm
