from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lumina_cache.telemetry.common import disk_probe, mlx_counters, mlx_probes


def test_mlx_counters_are_read_and_move_with_an_array() -> None:
    mx = pytest.importorskip("mlx.core")
    before = mlx_counters()["mlx_active_bytes"].value
    held = mx.zeros((1 << 20,), dtype=mx.float32)
    mx.eval(held)
    after = mlx_counters()["mlx_active_bytes"].value
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before >= 4 << 20


def test_mlx_without_metal_has_no_working_set_and_says_so() -> None:
    mx = pytest.importorskip("mlx.core")
    if mx.metal.is_available():
        pytest.skip("this machine has a Metal device")
    reading = mlx_probes()[1].read()["gpu_working_set_bytes"]
    assert reading.value is None
    assert reading.reason == "MLX has no Metal device here"


def test_importing_the_view_and_the_doctor_does_not_import_rich_or_psutil() -> None:
    code = (
        "import sys; import lumina_cache.telemetry.top, lumina_cache.telemetry.doctor;"
        "print([m for m in ('psutil', 'rich') if m in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert printed.stdout == "[]\n"


def test_a_getter_that_mlx_does_not_have_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", object())
    reading = mlx_counters()["mlx_peak_bytes"]
    assert reading.reason == "this mlx has no get_peak_memory"
    monkeypatch.delitem(sys.modules, "mlx.core")
    assert mlx_counters()["mlx_peak_bytes"].reason == "mlx is not imported in this process"


def test_the_working_set_comes_from_the_device_as_metal_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Metal:
        @staticmethod
        def is_available() -> bool:
            return True

    answer: dict[str, object] = {"max_recommended_working_set_size": 103079215104}  # an M3 Max with 128 GB

    class Mlx:
        metal = Metal

        @staticmethod
        def device_info() -> dict[str, object]:
            return answer

    monkeypatch.setitem(sys.modules, "mlx.core", Mlx)
    read = mlx_probes()[1].read
    assert read()["gpu_working_set_bytes"].value == 103079215104
    answer = {"architecture": "x"}
    assert read()["gpu_working_set_bytes"].value is None


def test_free_disk_space_is_that_of_the_directory_asked_for(tmp_path: Path) -> None:
    reading = disk_probe(tmp_path).read()["disk_free_bytes"]
    assert isinstance(reading.value, int)
    assert reading.value > 0
    assert str(tmp_path) in reading.source
    with pytest.raises(FileNotFoundError):
        disk_probe(tmp_path / "missing").read()
