"""Judging actions has to be cheap enough to happen at every decision."""

from __future__ import annotations

import statistics

import pytest

from lumina_cache.actions import action_space
from lumina_cache.backend.capabilities import (
    DENSE_REENCODE,
    DISK_TIER,
    KEYS,
    RESERVE,
    ROW_CHOICE,
    ROW_GATHER,
    VALUES,
    BackendProfile,
    Outcome,
    packed_attention,
)
from lumina_cache.backend.feasibility import classify
from lumina_cache.estimate import Held

LIMIT_SECONDS = 0.005


@pytest.mark.parametrize("available", [None, 1_000_000], ids=["memory unknown", "memory known"])
def test_five_hundred_actions_over_64_layers_are_judged_in_5_milliseconds(benchmark, available):
    actions = action_space()[:500]
    layers = tuple(
        Held(
            f"layer {i}", "kv", 1000 + i, 1024 + i, 1200, key_width=512, value_width=512, itemsize=2, index=i
        )
        for i in range(64)
    )
    rows = (KEYS, VALUES, ROW_GATHER, ROW_CHOICE, DENSE_REENCODE, RESERVE, DISK_TIER)
    present = (*rows, packed_attention(8, 64), packed_attention(4, 64))
    profile = BackendProfile("cpu", "0", "0", "test", {c: Outcome(True) for c in present})
    verdicts = benchmark(classify, actions, profile, layers, available=available)
    assert len(verdicts) == 500
    assert statistics.median(benchmark.stats.stats.data) <= LIMIT_SECONDS
