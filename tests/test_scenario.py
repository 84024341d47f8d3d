"""The scripted machine of the benchmarks, played to a cache for a while."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from lumina_cache.telemetry import PressureLevel

PATH = Path(__file__).parents[1] / "benchmarks" / "scenario.py"


@pytest.fixture(scope="module")
def scenario() -> Any:
    spec = importlib.util.spec_from_file_location("scenario", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenario"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scenario"]


@pytest.mark.parametrize("budget", [None, 900_000], ids=["no budget", "budget"])
def test_under_the_script_bytes_fall_with_the_limit_and_never_pass_it(
    scenario: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    calm, warn = {"pressure_level": PressureLevel.NORMAL}, {"pressure_level": PressureLevel.WARN}
    monkeypatch.setattr(scenario, "SCRIPT", ((0, calm), (140, warn), (145, calm)))
    monkeypatch.setattr(scenario, "END", 155.0)
    moments, cache = scenario.play(tiny("llama"), budget, None, 96)
    single = [m for m in moments if m.offset > scenario.PROMPT]
    assert all(m.limit is None or m.nbytes <= m.limit for m in single)
    before, after = [m.nbytes for m in single if m.seconds < 140][-1], single[-1].nbytes
    assert after <= 0.75 * before
    acted = [m.seconds for m in single if m.actions]
    assert acted
    assert 140 <= acted[0] < 141
    assert cache.observe().limit == moments[-1].limit
