from __future__ import annotations

import math
import random

import pytest

from lumina_cache.telemetry.throttle import (
    ThrottleDetector,
    ThrottleEstimate,
    ThrottleInputError,
    ThrottleRule,
)


def _step(context: int, clock: float = 1.0, rng: random.Random | None = None) -> float:
    """A decode step that costs 20 ms and 5 µs a row, on a machine at `clock` of its speed, with 5 % noise."""
    noise = rng.uniform(0.95, 1.05) if rng else 1.0
    return (0.020 + 5e-6 * context) / clock * noise


def _decode(
    detector: ThrottleDetector, contexts: range, clock: float = 1.0, seed: int = 1, key: str = ""
) -> ThrottleEstimate:
    rng = random.Random(seed)
    for context in contexts:
        detector.observe(_step(context, clock, rng), context, key)
    return detector.estimate


def test_steps_that_double_at_equal_context_are_throttling_whatever_the_sensors_say() -> None:
    detector = ThrottleDetector()
    assert _decode(detector, range(500, 580)).throttled is False
    estimate = _decode(detector, range(500, 540), clock=0.5)
    assert estimate.throttled is True
    assert estimate.slowdown == pytest.approx(2.0, rel=0.1)
    assert estimate.basis == "equal context"


def test_steps_that_grow_with_context_are_not_throttling() -> None:
    detector = ThrottleDetector()
    # 8 times the context and nearly three times the step time, at full clocks.
    estimate = _decode(detector, range(1000, 9000))
    assert _step(9000) > 2.4 * _step(1000)
    assert estimate.throttled is False


def test_throttling_in_a_context_never_seen_is_told_by_the_line_through_the_baselines() -> None:
    detector = ThrottleDetector()
    _decode(detector, range(500, 1600))
    estimate = _decode(detector, range(1700, 1800), clock=0.6)
    assert estimate.throttled is True
    assert estimate.basis == "line through baselines"
    assert estimate.slowdown == pytest.approx(1 / 0.6, rel=0.15)


def test_far_beyond_what_was_seen_the_answer_is_unknown() -> None:
    detector = ThrottleDetector()
    _decode(detector, range(500, 1600))
    estimate = detector.observe(_step(40_000), 40_000)
    assert estimate.throttled is None
    assert estimate.slowdown is None
    assert estimate.reason == "no baseline at this context yet"


def test_a_slow_context_does_not_become_the_norm() -> None:
    detector = ThrottleDetector()
    _decode(detector, range(500, 1600))
    _decode(detector, range(1700, 2300), clock=0.5)
    assert _decode(detector, range(1700, 1800), clock=0.5).throttled is True


def test_it_ends_when_the_steps_are_fast_again() -> None:
    detector = ThrottleDetector()
    _decode(detector, range(500, 580))
    assert _decode(detector, range(500, 540), clock=0.5).throttled is True
    assert _decode(detector, range(500, 540)).throttled is False


def test_single_slow_steps_are_not_throttling() -> None:
    detector = ThrottleDetector()
    _decode(detector, range(500, 580))
    for context in range(500, 580):
        slow = 10.0 if context % 4 == 0 else 1.0
        assert detector.observe(_step(context) * slow, context).throttled is not True


def test_another_storage_of_the_cache_has_a_baseline_of_its_own() -> None:
    detector = ThrottleDetector()
    _decode(detector, range(500, 580), key="dense")
    estimate = _decode(detector, range(500, 580), clock=0.5, key="packed 4")
    assert estimate.throttled is False
    assert _decode(detector, range(500, 580), key="dense").throttled is False


def test_a_baseline_taken_under_load_is_lowered() -> None:
    detector = ThrottleDetector()
    _decode(detector, range(500, 580), clock=0.5)
    assert _decode(detector, range(500, 600)).throttled is False
    assert _decode(detector, range(500, 540), clock=0.5).throttled is True


def test_before_there_is_a_baseline_the_answer_is_unknown_with_a_reason() -> None:
    detector = ThrottleDetector()
    assert detector.estimate.reason == "no step was seen"
    assert detector.observe(0.02, 500).reason == "warming up"
    estimate = _decode(detector, range(500, 520))
    assert (estimate.throttled, estimate.reason) == (None, "no baseline at this context yet")


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_step_that_cannot_have_been_is_refused(seconds: float) -> None:
    with pytest.raises(ThrottleInputError, match="step_seconds"):
        ThrottleDetector().observe(seconds, 10)
    with pytest.raises(ThrottleInputError, match="context_tokens"):
        ThrottleDetector().observe(0.1, -1)


def test_a_rule_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="clear < raise"):
        ThrottleRule(raise_ratio=1.05)
    with pytest.raises(ValueError, match="window"):
        ThrottleRule(window_steps=1)
