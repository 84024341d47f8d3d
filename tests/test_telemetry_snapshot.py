from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError

import pytest

from lumina_cache.telemetry.snapshot import (
    FIELD_GROUPS,
    PowerSource,
    PressureLevel,
    Reading,
    Snapshot,
    ThermalState,
)


def _snapshot(**readings: Reading) -> Snapshot:
    return Snapshot.from_readings(readings, platform="test", read_at={"swap": 90.0}, monotonic_seconds=100.0)


def test_a_reading_has_either_a_value_or_a_reason() -> None:
    assert Reading(0, "somewhere").known
    assert not Reading.unknown("it is gone", "somewhere").known
    for value, reason in ((None, None), (1, "why")):
        with pytest.raises(ValueError, match="either a value or a reason"):
            Reading(value, "somewhere", reason)


def test_a_field_that_nobody_reads_is_unknown_and_says_so() -> None:
    snapshot = _snapshot()
    assert set(snapshot.unknown) == set(FIELD_GROUPS)
    assert snapshot.unknown["gpu_utilization_percent"] == "no reader for it on test"
    assert snapshot.pressure_level is PressureLevel.UNKNOWN
    assert snapshot.thermal_state is ThermalState.UNKNOWN
    assert snapshot.power_source is PowerSource.UNKNOWN


def test_zero_is_a_value_and_is_kept_apart_from_unknown() -> None:
    snapshot = _snapshot(
        swap_used_bytes=Reading(0, "counter"), swap_total_bytes=Reading.unknown("cut off", "counter")
    )
    record = snapshot.to_record()
    assert record["swap_used_bytes"] == 0
    assert record["swap_total_bytes"] is None
    assert snapshot.sources["swap_used_bytes"] == "counter"
    assert snapshot.unknown["swap_total_bytes"] == "cut off"
    assert _snapshot(low_power_mode=Reading(False, "key")).to_record()["low_power_mode"] is False


def test_an_unknown_level_is_null_in_the_record_and_has_no_severity() -> None:
    snapshot = _snapshot(pressure_level=Reading(PressureLevel.UNKNOWN, "kernel"))
    assert snapshot.to_record()["pressure_level"] is None
    assert snapshot.unknown["pressure_level"] == "the source says unknown"
    assert PressureLevel.UNKNOWN.severity is None
    severities = [
        level.severity for level in (PressureLevel.NORMAL, PressureLevel.WARN, PressureLevel.CRITICAL)
    ]
    assert severities == [0, 1, 2]


def test_the_record_is_plain_json_and_its_ages_count_to_the_given_moment() -> None:
    snapshot = _snapshot(
        pressure_level=Reading(PressureLevel.WARN, "kernel"), pressure_raw=Reading(2, "kernel")
    )
    assert json.loads(json.dumps(snapshot.to_record()))["pressure_level"] == "warn"
    assert type(snapshot.to_record()["pressure_level"]) is str
    assert snapshot.to_record()["age_seconds"] == {"swap": 10.0}
    assert snapshot.to_record(now=130.0)["age_seconds"] == {"swap": 40.0}
    assert snapshot.age("swap", 95.0) == 5.0
    assert snapshot.age("gpu", 95.0) is None


def test_a_snapshot_cannot_be_changed_but_can_be_copied_pickled_and_hashed() -> None:
    snapshot = _snapshot(chip=Reading("a chip", "kernel"))
    with pytest.raises(FrozenInstanceError):
        snapshot.chip = "another"  # type: ignore[misc]
    assert copy.deepcopy(snapshot) == pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert isinstance(hash(snapshot), int)


def test_every_field_belongs_to_a_group() -> None:
    assert FIELD_GROUPS["gpu_working_set_bytes"] == "limits"
    assert FIELD_GROUPS["headroom_bytes"] == "pressure"
    assert {"pressure", "memory", "swap", "process", "gpu", "thermal", "power", "mlx", "disk"} <= set(
        FIELD_GROUPS.values()
    )
