"""The score's terms in points, and what is left out of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache.policy import Inputs, Weights, score

HELD = Inputs(
    nbytes_next=90,
    nbytes_peak=100,
    limit=100,
    memory=1000,
    kl=0.0,
    p95=0.0,
    lost_kl=0.0,
    lost_p95=0.0,
    source="test",
)


def test_the_full_cache_with_room_to_spare_scores_zero() -> None:
    found = score(replace(HELD, time_ratio=1.0))
    assert (found.quality, found.time, found.risk, found.total) == (0.0, 0.0, 0.0, 0.0)
    assert math.copysign(1.0, found.total or 0.0) == 1.0


def test_a_point_of_quality_is_two_hundredths_of_a_nat() -> None:
    assert score(replace(HELD, kl=0.02, p95=0.08)).quality == pytest.approx(1.0)
    assert score(replace(HELD, kl=0.1, p95=0.1)).quality == pytest.approx(5.0)


def test_a_tail_heavier_than_four_times_the_mean_costs_half_of_the_excess() -> None:
    assert score(replace(HELD, kl=0.02, p95=0.16)).quality == pytest.approx(1.0 + 0.08 / 2 / 0.02)


def test_a_tail_that_nobody_measured_costs_nothing() -> None:
    assert score(replace(HELD, kl=0.02, p95=None)).quality == pytest.approx(1.0)


def test_a_point_of_time_is_ten_percent() -> None:
    assert score(replace(HELD, time_ratio=1.1)).time == pytest.approx(1.0)
    assert score(replace(HELD, time_ratio=1.21)).time == pytest.approx(2.0)
    assert score(replace(HELD, time_ratio=1 / 1.1)).time == pytest.approx(-1.0)


def test_the_actions_own_time_is_shared_by_the_steps_that_it_is_held_for() -> None:
    own = replace(HELD, time_ratio=1.0, own_seconds=1.0, step_seconds=0.1, horizon=100)
    assert score(own).time == pytest.approx(1.0)
    assert score(replace(own, horizon=1000)).time == pytest.approx(math.log(1.01) / math.log(1.1))
    assert score(replace(own, own_seconds=None)).time == 0.0
    assert score(replace(own, step_seconds=None)).time == 0.0


def test_within_a_prompt_its_chunks_count_too() -> None:
    decode = replace(HELD, time_ratio=1.1, own_seconds=0.0, step_seconds=0.1, horizon=10)
    prompt = replace(decode, prompt_tokens=100, prompt_seconds=0.01, prompt_ratio=5.0)
    assert score(decode).time == pytest.approx(1.0)
    assert score(prompt).time == pytest.approx(math.log((1.0 * 5.0 + 1.1) / 2.0) / math.log(1.1))
    assert score(replace(prompt, prompt_tokens=0)).time == pytest.approx(1.0)
    assert score(replace(prompt, prompt_ratio=None)).time is None
    # Nobody has measured what the prompt would take at all: only decode steps are compared.
    assert score(replace(prompt, prompt_seconds=None)).time == pytest.approx(1.0)


def test_unknown_time_is_left_out_and_unknown_quality_leaves_no_total() -> None:
    known = score(replace(HELD, kl=0.02, p95=0.0))
    assert known.time is None
    assert known.total == pytest.approx(-1.0)
    unknown = score(replace(HELD, kl=None, p95=None, time_ratio=1.1))
    assert (unknown.quality, unknown.total) == (None, None)
    assert unknown.time == pytest.approx(1.0)


@pytest.mark.parametrize(("limit", "risk"), [(90, 0.0), (89, 100.0), (None, 0.0)])
def test_bytes_held_past_the_limit_are_certain_overflow(limit: int | None, risk: float) -> None:
    assert score(replace(HELD, limit=limit)).risk == risk


@pytest.mark.parametrize(("memory", "risk"), [(100, 0.0), (99, 100.0), (0, 100.0), (None, 0.0)])
def test_a_peak_past_the_memory_there_is_is_overflow_while_no_prediction_was_off(
    memory: int | None, risk: float
) -> None:
    assert score(replace(HELD, memory=memory)).risk == risk


def test_the_peaks_risk_follows_the_errors_of_past_predictions() -> None:
    """ln(observed/predicted) normal with mean 0.1 and spread 0.2: P(peak > memory) at one spread above is 0.1587."""
    peak = replace(HELD, error_mean=0.1, error_spread=0.2, nbytes_peak=10**6)
    for spreads, probability in ((0, 0.5), (1, 0.158655), (-1, 0.841345), (3, 0.0013499)):
        memory = round(10**6 * math.exp(0.1 + 0.2 * spreads))
        assert score(replace(peak, memory=memory)).risk == pytest.approx(100 * probability, rel=1e-3)


def test_the_sum_weighs_time_and_risk() -> None:
    x = replace(HELD, kl=0.04, p95=0.0, time_ratio=1.1, limit=10)
    assert score(x).total == pytest.approx(-(2.0 + 1.0 + 100.0))
    assert score(x, Weights(time=4.0, risk=0.5)).total == pytest.approx(-(2.0 + 4.0 + 50.0))


unit = st.floats(0, 10)
maybe = st.one_of(st.none(), unit)
inputs = st.builds(
    Inputs,
    nbytes_next=st.integers(0, 1 << 40),
    nbytes_peak=st.integers(0, 1 << 40),
    limit=st.one_of(st.none(), st.integers(0, 1 << 40)),
    memory=st.one_of(st.none(), st.integers(0, 1 << 40)),
    kl=maybe,
    p95=maybe,
    lost_kl=maybe,
    lost_p95=maybe,
    source=st.text(max_size=5),
    time_ratio=st.one_of(st.none(), st.floats(0.01, 100)),
    own_seconds=maybe,
    step_seconds=maybe,
    horizon=st.integers(1, 10**6),
    prompt_tokens=st.integers(0, 10**6),
    prompt_ratio=st.one_of(st.none(), st.floats(0.01, 100)),
    prompt_seconds=maybe,
    error_mean=st.floats(-1, 1),
    error_spread=st.floats(0, 1),
)


@settings(deadline=None)
@given(x=inputs, weights=st.builds(Weights, unit, unit))
def test_a_score_is_the_same_from_its_line_in_the_log(x: Inputs, weights: Weights) -> None:
    read = Inputs.from_record(json.loads(json.dumps(x.to_record())))
    assert read == x
    assert score(read, Weights(**json.loads(json.dumps(weights.to_record())))) == score(x, weights)


@settings(deadline=None)
@given(x=inputs, more=st.floats(0.001, 1))
def test_more_damage_more_time_and_less_room_never_score_better(x: Inputs, more: float) -> None:
    x = replace(x, kl=x.kl or 0.0, p95=None, time_ratio=x.time_ratio or 1.0, limit=x.limit or 0)
    now = score(x).total or 0.0
    for worse in (
        replace(x, kl=(x.kl or 0.0) + more),
        replace(x, time_ratio=(x.time_ratio or 1.0) + more),
        replace(x, limit=(x.limit or 0) // 2),
        replace(x, nbytes_next=x.nbytes_next * 2),
    ):
        assert (score(worse).total or 0.0) <= now + 1e-9
