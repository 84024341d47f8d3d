from __future__ import annotations

import json
import sys

import pytest

from lumina_cache.telemetry import PressureLevel, ThermalState, read_once
from lumina_cache.telemetry.snapshot import FIELD_GROUPS


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
