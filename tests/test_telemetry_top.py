from __future__ import annotations

import builtins
import io
import json
import sys
from typing import Any

import pytest

from lumina_cache.telemetry.probes import Probe, ReaderSet
from lumina_cache.telemetry.sampler import Sampler
from lumina_cache.telemetry.snapshot import (
    FIELD_GROUPS,
    PowerSource,
    PressureLevel,
    Reading,
    Snapshot,
    ThermalState,
    Value,
)
from lumina_cache.telemetry.top import TopError, render, run_live

pytest.importorskip("rich")
from rich.console import Console

MAC: dict[str, Value] = {
    "pressure_level": PressureLevel.WARN,
    "pressure_raw": 2,
    "pressure_ratio": 0.47,
    "headroom_bytes": 2_500_000_000,
    "memory_total_bytes": 16 << 30,
    "memory_free_bytes": 1 << 30,
    "memory_wired_bytes": 2 << 30,
    "memory_compressed_bytes": 5 << 30,
    "swap_used_bytes": 12 << 30,
    "swap_out_bytes_per_second": 31_000_000.0,
    "gpu_utilization_percent": 86,
    "gpu_allocated_bytes": 22 << 30,
    "thermal_state": ThermalState.SERIOUS,
    "thermal_raw": 2,
    "power_source": PowerSource.BATTERY,
    "battery_percent": 64,
    "low_power_mode": True,
    "chip": "Apple M4",
    "gpu_working_set_bytes": 12 << 30,
}


def _snapshot(**values: Value) -> Snapshot:
    return Snapshot.from_readings(
        {name: Reading(value, "test") for name, value in values.items()},
        platform="darwin",
        read_at={"pressure": 8.0},
        monotonic_seconds=10.0,
    )


def _picture(snapshot: Snapshot, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(snapshot, now=10.0))
    return console.export_text()


def _sampler() -> Sampler:
    read = Probe("level", ("pressure_level",), lambda: {"pressure_level": Reading(PressureLevel.NORMAL, "x")})
    return Sampler(readers=ReaderSet("test", (read,)))


def test_the_view_shows_levels_sizes_rates_and_ages() -> None:
    text = _picture(_snapshot(**MAC))
    for shown in (
        "Apple M4",
        "warn",
        "headroom 2.50 GB",
        "wired and compressed 7.52 GB of 17.18 GB",
        "free 1.07 GB",
        "compressed 5.37 GB",
        "used 12.88 GB",
        "out 31.00 MB/s",
        "busy 86 %",
        "serious",
        "battery  charge 64 %",
        "low-power mode on",
        "working set 12.88 GB",
        "2.0 s ago",
        "no value",
    ):
        assert shown in text, shown


def test_what_is_unknown_is_listed_with_its_reason_and_never_shown_as_zero_or_normal() -> None:
    text = _picture(_snapshot())
    assert f"unknown here ({len(FIELD_GROUPS)})" in text
    assert "no reader for it on darwin" in text
    assert "normal" not in text
    assert "nominal" not in text
    assert " 0 B" not in text
    assert "0 %" not in text


def test_only_the_level_itself_is_coloured() -> None:
    console = Console(width=120, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(_snapshot(**MAC), now=10.0))
    assert isinstance(console.file, io.StringIO)
    line = next(line for line in console.file.getvalue().splitlines() if "headroom" in line)
    before_headroom = line[: line.index("headroom")]
    assert before_headroom.endswith("\x1b[0m  ")  # every style is over


def test_zero_is_shown_as_zero() -> None:
    assert "used 0 B" in _picture(_snapshot(swap_used_bytes=0))
    assert "low-power mode off" in _picture(_snapshot(low_power_mode=False))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_view_fits_the_width_it_is_given(width: int) -> None:
    for snapshot in (_snapshot(), _snapshot(**MAC)):
        assert max(len(line) for line in _picture(snapshot, width).splitlines()) <= width


def test_the_bar_counts_to_the_control_groups_limit() -> None:
    text = _picture(
        _snapshot(memory_total_bytes=100_000, memory_limit_bytes=10_000, memory_available_bytes=5_000)
    )
    assert "available 5.00 kB of 10.00 kB" in text
    assert text.count("█") == 14


def test_once_as_json_is_one_line_of_the_whole_record() -> None:
    out = io.StringIO()
    with _sampler() as sampler:
        run_live(sampler, once=True, as_json=True, out=out)
        assert sampler.running  # one that was given is not closed
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert record["pressure_level"] == "normal"
    assert record["swap_used_bytes"] is None
    assert record["unknown"]["swap_used_bytes"] == "no reader for it on test"


def test_json_goes_on_until_interrupted_one_record_a_line() -> None:
    out, rests = io.StringIO(), list[float]()

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            raise KeyboardInterrupt

    with _sampler() as sampler:
        run_live(sampler, as_json=True, out=out, refresh_seconds=0.25, rest=rest)
    assert rests == [0.25] * 3
    assert [json.loads(line)["platform"] for line in out.getvalue().splitlines()] == ["test"] * 3


def test_the_live_view_is_drawn_again_and_again_and_ends_without_a_traceback() -> None:
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    rests = 0

    def rest(seconds: float) -> None:
        nonlocal rests
        rests += 1
        if rests == 3:
            raise KeyboardInterrupt

    with _sampler() as sampler:
        run_live(sampler, console=console, rest=rest)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("pressure") >= 3


def test_a_view_of_its_own_closes_its_sampler() -> None:
    out = io.StringIO()
    run_live(once=True, as_json=True, out=out)
    record = json.loads(out.getvalue())
    assert record["platform"] == ("linux" if sys.platform == "linux" else record["platform"])
    assert set(FIELD_GROUPS) <= set(record)


def test_without_rich_the_view_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_rich(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_rich)
    with _sampler() as sampler, pytest.raises(TopError, match=r"lumina-cache\[cli\]"):
        run_live(sampler, once=True)
