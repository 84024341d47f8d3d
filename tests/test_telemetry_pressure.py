from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumina_cache.telemetry.pressure import (
    Debounce,
    LinuxRule,
    PressureDebouncer,
    compressor_headroom,
    compressor_level,
    compressor_ratio,
)
from lumina_cache.telemetry.snapshot import PressureLevel

NORMAL, WARN, CRITICAL, UNKNOWN = PressureLevel
PAGE = 16384


@pytest.mark.parametrize(
    ("uncompressed", "compressed", "previous", "level"),
    [
        (1000, 0, UNKNOWN, NORMAL),
        (1000, 1000, UNKNOWN, NORMAL),  # n < c is warn, n = c is not
        (999, 1000, UNKNOWN, WARN),
        (1000, 1000, WARN, WARN),  # warn is left only above 1.5 c
        (1500, 1000, WARN, WARN),
        (1501, 1000, WARN, NORMAL),
        (1200, 2300, UNKNOWN, WARN),  # critical below 12/23 c
        (1199, 2300, UNKNOWN, CRITICAL),
        (2000, 3000, CRITICAL, CRITICAL),  # critical is left only above 2/3 c
        (2001, 3000, CRITICAL, WARN),
        (0, 0, NORMAL, UNKNOWN),
    ],
)
def test_the_level_follows_the_kernels_rule_with_its_hysteresis(
    uncompressed: int, compressed: int, previous: PressureLevel, level: PressureLevel
) -> None:
    assert compressor_level(uncompressed, compressed, previous) is level


def test_recorded_page_counts_of_real_macs_give_the_level_that_was_recorded_with_them() -> None:
    # M4, 16 GB: free + speculative, active, inactive against the compressor's pages; the kernel said 1.
    n, c = 32257 + 14083 + 254966 + 240318, 294851
    assert compressor_ratio(n, c) == pytest.approx(0.648, abs=0.001)
    assert compressor_level(n, c) is NORMAL


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 40))
def test_headroom_is_what_may_be_wired_before_the_level_turns(uncompressed: int, compressed: int) -> None:
    level = compressor_level(uncompressed, compressed)
    headroom = compressor_headroom(level, uncompressed, compressed)
    if level is CRITICAL:
        assert headroom is None
        return
    assert headroom is not None
    assert headroom >= 0
    still = compressor_level(max(0, uncompressed - headroom), compressed, level)
    assert (still.severity or 0) <= (level.severity or 0) or headroom == 0 or still is not NORMAL
    if compressed and uncompressed - headroom > 1:
        beyond = compressor_level(uncompressed - headroom - 2, compressed, level)
        assert (beyond.severity or 0) > (level.severity or 0)


def test_headroom_of_unknown_is_unknown() -> None:
    assert compressor_headroom(UNKNOWN, 10, 1) is None
    assert compressor_ratio(0, 0) is None


def _linux(previous: PressureLevel = UNKNOWN, **signs: float | int | None) -> PressureLevel:
    given_signs: dict[str, float | int | None] = {
        "available_bytes": 50,
        "total_bytes": 100,
        "some_percent": 0.0,
        "full_percent": 0.0,
    }
    return LinuxRule().level(**(given_signs | signs), previous=previous)  # type: ignore[arg-type]


def test_linux_is_judged_by_stalls_and_by_the_share_that_is_available() -> None:
    assert _linux() is NORMAL
    assert _linux(available_bytes=9) is WARN
    assert _linux(available_bytes=4) is CRITICAL
    assert _linux(some_percent=10.0) is WARN
    assert _linux(full_percent=10.0) is CRITICAL


def test_linux_leaves_a_level_only_with_room_to_spare() -> None:
    assert _linux(WARN, available_bytes=11) is WARN
    assert _linux(WARN, available_bytes=13) is NORMAL
    assert _linux(CRITICAL, full_percent=9.0, available_bytes=50) is CRITICAL
    assert _linux(CRITICAL, full_percent=7.0, available_bytes=50) is NORMAL


def test_linux_without_any_sign_is_unknown_and_one_sign_is_enough() -> None:
    assert _linux(available_bytes=None, some_percent=None, full_percent=None) is UNKNOWN
    assert _linux(available_bytes=None) is NORMAL
    assert _linux(some_percent=None, full_percent=None) is NORMAL
    assert _linux(total_bytes=None, some_percent=None) is UNKNOWN


def test_linux_headroom_counts_down_to_the_next_share() -> None:
    rule = LinuxRule()
    assert rule.headroom(NORMAL, 500, 1000) == 400
    assert rule.headroom(WARN, 80, 1000) == 30
    assert rule.headroom(CRITICAL, 10, 1000) is None
    assert rule.headroom(NORMAL, None, 1000) is None
    assert rule.headroom(NORMAL, 10, 1000) == 0


def _seen(*readings: PressureLevel, rule: Debounce | None = None) -> list[PressureLevel]:
    debouncer = PressureDebouncer(rule)
    return [debouncer.observe(reading) for reading in readings]


def test_critical_is_raised_at_once_and_warn_after_two_readings() -> None:
    assert _seen(NORMAL, CRITICAL) == [NORMAL, CRITICAL]
    assert _seen(NORMAL, WARN, WARN) == [NORMAL, NORMAL, WARN]
    assert _seen(NORMAL, WARN, NORMAL, WARN, NORMAL) == [NORMAL] * 5
    assert _seen(NORMAL, WARN, CRITICAL) == [NORMAL, NORMAL, CRITICAL]


def test_the_level_is_lowered_after_several_better_readings_in_a_row() -> None:
    rule = Debounce(lower_readings=3)
    assert _seen(CRITICAL, NORMAL, NORMAL, NORMAL, rule=rule) == [CRITICAL, CRITICAL, CRITICAL, NORMAL]
    assert _seen(CRITICAL, NORMAL, CRITICAL, NORMAL, NORMAL, rule=rule)[-1] is CRITICAL


def test_falling_by_way_of_different_levels_ends_at_the_worst_of_them() -> None:
    rule = Debounce(lower_readings=3)
    assert _seen(CRITICAL, NORMAL, WARN, NORMAL, rule=rule)[-1] is WARN


def test_an_unknown_reading_is_passed_on_at_once_and_the_next_known_one_stands() -> None:
    assert _seen(CRITICAL, UNKNOWN, NORMAL) == [CRITICAL, UNKNOWN, NORMAL]
    assert _seen(WARN) == [WARN]


@given(st.lists(st.sampled_from(list(PressureLevel)), min_size=1, max_size=60))
def test_the_debounced_level_is_never_normal_while_the_reading_is_critical_or_unknown(
    readings: list[PressureLevel],
) -> None:
    for reading, level in zip(readings, _seen(*readings), strict=True):
        if reading is CRITICAL:
            assert level is CRITICAL
        if reading is UNKNOWN:
            assert level is UNKNOWN


@given(st.lists(st.sampled_from([NORMAL, WARN, CRITICAL]), min_size=1, max_size=40))
def test_a_steady_reading_is_reached_in_the_end(readings: list[PressureLevel]) -> None:
    debouncer = PressureDebouncer()
    for reading in readings:
        debouncer.observe(reading)
    for _ in range(16):  # twice the readings of one lowering, since it may go by way of warn
        debouncer.observe(readings[-1])
    assert debouncer.level is readings[-1]
