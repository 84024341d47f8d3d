from __future__ import annotations

import json
import mmap
import os
import sys

import pytest

from lumina_cache.telemetry import PressureLevel, ThermalState, read_once
from lumina_cache.telemetry.assemble import SnapshotReader, derive
from lumina_cache.telemetry.probes import Probe, ReaderSet, Tier
from lumina_cache.telemetry.snapshot import FIELD_GROUPS, Reading, Value


def test_read_once_gives_plain_json_in_which_every_field_has_a_value_or_a_reason() -> None:
    record = json.loads(json.dumps(read_once().to_record()))
    for name in FIELD_GROUPS:
        assert (record[name] is None) == (name in record["unknown"]), name
        assert (record[name] is not None) == (name in record["sources"]), name
        assert record["unknown"].get(name, "a reason").strip()


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux lacks is tested on Linux")
def test_on_linux_what_only_a_mac_has_is_null_and_never_zero_or_nominal() -> None:
    snapshot = read_once()
    record = snapshot.to_record()
    for name in FIELD_GROUPS:
        if name.startswith(("gpu_", "wired_")):
            assert record[name] is None, name
    assert snapshot.memory_wired_bytes is None
    if snapshot.thermal_raw is None:
        assert snapshot.thermal_state is ThermalState.UNKNOWN
    assert snapshot.memory_total_bytes is not None
    assert snapshot.memory_total_bytes > 1 << 28
    assert snapshot.pressure_level is not PressureLevel.UNKNOWN
    assert snapshot.process_footprint_bytes is not None
    assert snapshot.process_footprint_bytes > 1 << 20


def _readings(**values: Value) -> dict[str, Reading]:
    return {name: Reading(value, "test") for name, value in values.items()}


def test_the_kernels_level_stands_and_the_rule_adds_ratio_and_headroom() -> None:
    found = derive(
        "darwin",
        _readings(
            pressure_level=PressureLevel.WARN,
            memory_free_bytes=100,
            memory_active_bytes=500,
            memory_inactive_bytes=400,
            memory_compressed_bytes=1150,
        ),
    )
    assert found["pressure_level"] == Reading(PressureLevel.WARN, "test")
    assert found["pressure_ratio"].value == pytest.approx(1000 / 2150)
    assert found["headroom_bytes"].value == 1000 - 600


def test_without_all_page_counts_there_is_no_ratio_and_no_headroom() -> None:
    found = derive("darwin", _readings(memory_free_bytes=100, memory_compressed_bytes=5))
    assert "pressure_ratio" not in found
    assert found["headroom_bytes"].reason == "it follows from page counts that are unknown"
    assert "pressure_level" not in found


def test_on_linux_the_effective_total_is_the_smaller_of_machine_and_limit() -> None:
    found = derive(
        "linux",
        _readings(memory_total_bytes=1000, memory_limit_bytes=100, memory_available_bytes=8),
    )
    assert found["pressure_level"].value is PressureLevel.WARN
    assert found["headroom_bytes"].value == 3


def test_a_reader_keeps_the_level_it_saw_for_its_hysteresis() -> None:
    available = [9]

    def read() -> dict[str, Reading]:
        return _readings(memory_total_bytes=100, memory_available_bytes=available[0])

    probe = Probe("memory", ("memory_total_bytes", "memory_available_bytes"), read)
    reader = SnapshotReader(ReaderSet("linux", (probe,)))
    assert reader.read().pressure_level is PressureLevel.WARN
    available[0] = 11
    assert reader.read().pressure_level is PressureLevel.WARN
    available[0] = 13
    assert reader.read().pressure_level is PressureLevel.NORMAL


def test_fast_only_leaves_out_what_may_wait_on_others() -> None:
    def slow() -> dict[str, Reading]:
        raise AssertionError("it was read")

    probe = Probe("slow", ("disk_free_bytes",), slow, Tier.SLOW)
    snapshot = SnapshotReader(ReaderSet("test", (probe,)), fast_only=True).read()
    assert snapshot.unknown["disk_free_bytes"] == "no reader for it on test"


def test_on_another_system_only_what_is_the_same_everywhere_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "plan9")
    snapshot = read_once()
    assert snapshot.platform == "plan9"
    assert snapshot.pressure_level is PressureLevel.UNKNOWN
    assert snapshot.disk_free_bytes is not None


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the process through /proc")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_reader_that_is_taken_through_a_fork_reads_the_child_and_not_the_parent() -> None:
    reader = SnapshotReader(fast_only=True)
    parent = reader.read().process_resident_bytes
    assert parent is not None
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # a child starts without the file pages that its parent has mapped in, so only its own growth tells
            before = reader.read().process_resident_bytes
            # mapped anew: the allocator may have so much left over that a parent's pages would be used again
            held = mmap.mmap(-1, 256 << 20)
            held.write(b"x" * len(held))
            after = reader.read().process_resident_bytes
            grown = before is not None and after is not None and after > before + len(held) // 2
            status = 0 if grown else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    after = reader.read().process_resident_bytes
    assert after is not None
    assert after < parent + (64 << 20)
    reader.close()
