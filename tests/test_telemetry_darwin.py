from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lumina_cache.telemetry.assemble import SnapshotReader, read_once
from lumina_cache.telemetry.darwin import DarwinCalls, darwin_readers, run_command
from lumina_cache.telemetry.snapshot import FIELD_GROUPS, PowerSource, PressureLevel, Snapshot, ThermalState

SAMPLES = Path(__file__).parent / "data" / "telemetry"
PAGE = 16384
RAM = 16 << 30


def pages(free: int, active: int, inactive: int, wired: int, compressed: int, swapouts: int = 0) -> bytes:
    head = struct.pack("<4I", free, active, inactive, wired)
    return head + struct.pack("<9Q 2I 4Q 4I Q", *[0] * 9, 11, 0, 0, 0, 0, swapouts, compressed, 0, 0, 0, 0)


def rusage(footprint: int, resident: int) -> bytes:
    raw = bytearray(296)
    struct.pack_into("<QQ", raw, 64, resident, footprint)
    return bytes(raw)


class FakeCalls:
    """A Mac in values: an exception in place of a value is raised."""

    def __init__(self) -> None:
        self.sysctls: dict[str, bytes | Exception] = {
            "kern.memorystatus_vm_pressure_level": struct.pack("<i", 1),
            "kern.memorystatus_level": struct.pack("<i", 57),
            "vm.swapusage": struct.pack("<QQQIi", 2 << 30, 1 << 30, 1 << 30, PAGE, 1),
            "hw.memsize": struct.pack("<q", RAM),
            "iogpu.wired_limit_mb": struct.pack("<q", 14000),
            "machdep.cpu.brand_string": b"Apple M4\0",
            "hw.model": b"Mac16,1\0",
            "hw.perflevel0.physicalcpu": struct.pack("<i", 4),
        }
        self.pages: bytes | Exception = pages(40_000, 250_000, 240_000, 170_000, 290_000)
        self.states: dict[str, int | Exception] = {
            "com.apple.system.thermalpressurelevel": 0,
            "com.apple.system.powersources.percent": 1 << 19 | 64,
            "com.apple.system.lowpowermode": 0,
        }
        self.gpu: list[dict[str, object]] | Exception = [
            {"Device Utilization %": 86, "Alloc system memory": 22 << 30, "recoveryCount": 0}
        ]
        self.page_bytes = PAGE
        self.forgotten = self.closed = 0

    @staticmethod
    def _give(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    def sysctl(self, name: str, room: int) -> bytes:
        return self._give(self.sysctls.get(name, OSError(2, f"sysctlbyname {name}: none")))[:room]

    def vm_info64(self) -> bytes:
        return self._give(self.pages)

    def kernel_page_bytes(self) -> int:
        return self.page_bytes

    def rusage(self) -> bytes:
        return rusage(1100 << 20, 132 << 20)

    def notify_state(self, key: str) -> int:
        return self._give(self.states[key])

    def gpu_nodes(self) -> list[dict[str, object]]:
        return self._give(self.gpu)

    def forget(self) -> None:
        self.forgotten += 1

    def close(self) -> None:
        self.closed += 1


def no_commands(arguments: Sequence[str]) -> bytes:
    raise OSError(f"{arguments[0]}: not to be run")


def read(calls: FakeCalls, run: Callable[[Sequence[str]], bytes] = no_commands) -> Snapshot:
    return read_once(darwin_readers(calls, run=run))


def test_a_mac_is_read_in_process_without_any_command() -> None:
    ran: list[Sequence[str]] = []
    snapshot = read(FakeCalls(), lambda arguments: ran.append(arguments) or b"")  # type: ignore[func-returns-value]
    assert ran == []
    assert snapshot.pressure_level is PressureLevel.NORMAL
    assert snapshot.pressure_raw == 1
    assert snapshot.pressure_share_percent == 57
    assert snapshot.pressure_ratio == pytest.approx(530 / 820, abs=1e-3)
    assert snapshot.headroom_bytes == (530_000 - 290_000) * PAGE
    assert snapshot.memory_total_bytes == RAM
    assert snapshot.memory_compressed_bytes == 290_000 * PAGE
    assert snapshot.memory_purgeable_bytes == 11 * PAGE
    assert snapshot.swap_used_bytes == 1 << 30
    assert snapshot.process_footprint_bytes == 1100 << 20
    assert snapshot.gpu_utilization_percent == 86
    assert snapshot.gpu_allocated_bytes == 22 << 30
    assert snapshot.thermal_state is ThermalState.NOMINAL
    assert snapshot.thermal_raw == 0
    assert snapshot.power_source is PowerSource.BATTERY
    assert snapshot.battery_percent == 64
    assert snapshot.low_power_mode is False
    assert snapshot.chip == "Apple M4"
    assert snapshot.performance_cores == 4
    assert snapshot.wired_limit_bytes == 14000 << 20


def test_normal_with_swap_in_use_is_both_reported() -> None:
    calls = FakeCalls()
    calls.sysctls["vm.swapusage"] = struct.pack("<QQQIi", 13 << 30, 1 << 30, 12 << 30, PAGE, 1)
    snapshot = read(calls)
    assert (snapshot.pressure_level, snapshot.swap_used_bytes) == (PressureLevel.NORMAL, 12 << 30)


@pytest.mark.parametrize("raw", [0, 3, 8])
def test_a_level_that_is_none_of_the_three_is_never_normal_by_itself(raw: int) -> None:
    calls = FakeCalls()
    calls.sysctls["kern.memorystatus_vm_pressure_level"] = struct.pack("<i", raw)
    calls.pages = OSError("denied")
    snapshot = read(calls)
    assert snapshot.pressure_level is PressureLevel.UNKNOWN
    assert snapshot.pressure_raw is None
    assert f"is {raw}" in snapshot.unknown["pressure_level"]
    assert snapshot.headroom_bytes is None


def test_without_the_sysctl_the_level_follows_from_the_page_counts_and_says_so() -> None:
    calls = FakeCalls()
    calls.sysctls["kern.memorystatus_vm_pressure_level"] = OSError(2, "none")
    calls.pages = pages(10_000, 100_000, 90_000, 300_000, 400_000)
    snapshot = read(calls)
    assert snapshot.pressure_level is PressureLevel.CRITICAL
    assert snapshot.sources["pressure_level"] == "derived from page counts by the kernel's rule"
    assert snapshot.unknown["headroom_bytes"] == "there is no level after critical"


def test_commands_stand_in_where_the_process_may_not_look() -> None:
    calls = FakeCalls()
    calls.sysctls = {}
    calls.pages = OSError("denied")
    calls.states = {key: OSError("notifyd is gone") for key in calls.states}
    calls.gpu = OSError("no IOAccelerator service")
    files = {
        "/usr/sbin/sysctl": "sysctl.txt",
        "/usr/bin/vm_stat": "vm_stat.txt",
        "/usr/bin/notifyutil": "notifyutil.txt",
        "/usr/sbin/ioreg": "ioreg.plist",
    }

    def run(arguments: Sequence[str]) -> bytes:
        if arguments[0] == "/usr/bin/pmset":
            name = "pmset_batt_battery.txt" if arguments[-1] == "batt" else "pmset_g.txt"
        else:
            name = files[arguments[0]]
        return (SAMPLES / name).read_bytes()

    snapshot = read(calls, run)
    assert snapshot.pressure_level is PressureLevel.WARN
    assert snapshot.pressure_raw == 2
    assert snapshot.sources["pressure_level"] == "/usr/sbin/sysctl"
    assert snapshot.memory_free_bytes == (41234 + 10987) * PAGE
    assert snapshot.sources["memory_free_bytes"] == "/usr/bin/vm_stat"
    assert snapshot.thermal_state is ThermalState.SERIOUS
    assert snapshot.gpu_utilization_percent == 73
    assert snapshot.power_source is PowerSource.BATTERY
    assert snapshot.low_power_mode is True
    assert snapshot.wired_limit_bytes == 14000 << 20
    assert snapshot.chip == "Apple M4"


def test_when_everything_fails_everything_is_unknown_with_both_reasons() -> None:
    calls = FakeCalls()
    calls.sysctls = {}
    calls.pages = OSError("denied")
    calls.states = {key: OSError("notifyd is gone") for key in calls.states}
    calls.gpu = OSError("no IOAccelerator service")
    calls.rusage = lambda: b"short"  # type: ignore[method-assign]
    snapshot = read(calls)
    known = {name for name in FIELD_GROUPS if name not in snapshot.unknown}
    assert known <= {"disk_free_bytes", "mlx_active_bytes", "mlx_pool_bytes", "mlx_peak_bytes"}
    assert "notifyd is gone" in snapshot.unknown["thermal_state"]
    assert "/usr/bin/notifyutil: not to be run" in snapshot.unknown["thermal_state"]


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 3, b"\xff" * 600, b"text\n"])
def test_garbage_from_every_source_never_raises_and_never_shows_a_level(garbage: bytes) -> None:
    calls = FakeCalls()
    calls.sysctls = dict.fromkeys(calls.sysctls, garbage)
    calls.pages = garbage
    calls.rusage = lambda: garbage  # type: ignore[method-assign]
    calls.states = dict.fromkeys(calls.states, 1 << 50)
    calls.gpu = []
    snapshot = read(calls, lambda arguments: garbage)
    for name in (
        "memory_free_bytes",
        "swap_used_bytes",
        "process_footprint_bytes",
        "gpu_utilization_percent",
    ):
        assert getattr(snapshot, name) is None, name
    assert snapshot.pressure_level is PressureLevel.UNKNOWN
    assert snapshot.thermal_state is ThermalState.UNKNOWN
    assert snapshot.power_source is PowerSource.UNKNOWN


def test_no_published_battery_is_settled_by_the_public_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    psutil = pytest.importorskip("psutil")
    calls = FakeCalls()
    calls.states["com.apple.system.powersources.percent"] = 0

    class Battery:
        percent, power_plugged = 55.4, False

    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert read(calls).power_source is PowerSource.AC
    monkeypatch.setattr(psutil, "sensors_battery", Battery, raising=False)
    snapshot = read(calls)
    assert (snapshot.power_source, snapshot.battery_percent) == (PowerSource.BATTERY, 55)


def test_the_default_wired_limit_is_unknown_and_not_zero() -> None:
    calls = FakeCalls()
    calls.sysctls["iogpu.wired_limit_mb"] = struct.pack("<i", 0)
    snapshot = read(calls)
    assert snapshot.wired_limit_bytes is None
    assert snapshot.unknown["wired_limit_bytes"] == "not set: the system's default applies"


def test_a_process_translated_for_another_page_size_uses_the_kernels() -> None:
    calls = FakeCalls()
    calls.page_bytes = 4096
    assert read(calls).memory_compressed_bytes == 290_000 * 4096


def test_swap_rates_follow_from_two_readings_of_the_counters() -> None:
    now = [0.0]
    calls = FakeCalls()
    readers = darwin_readers(calls, run=no_commands, clock=lambda: now[0])
    reader = SnapshotReader(readers, clock=lambda: now[0])
    assert reader.read().unknown["swap_out_bytes_per_second"].startswith("needs two readings")
    calls.pages = pages(40_000, 250_000, 240_000, 170_000, 290_000, swapouts=64)
    now[0] = 2.0
    assert reader.read().swap_out_bytes_per_second == 32 * PAGE


def test_letting_go_reaches_the_calls() -> None:
    calls = FakeCalls()
    readers = darwin_readers(calls)
    readers.forget()
    readers.close()
    assert (calls.forgotten, calls.closed) == (1, 1)


# --- commands ---


def test_a_command_that_hangs_is_killed_at_its_timeout() -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    begun = time.monotonic()
    with pytest.raises(OSError, match=r"did not end within 0\.2 s"):
        run_command([sleep, "30"], timeout_seconds=0.2)
    assert time.monotonic() - begun < 2.0


def test_a_command_that_fails_or_is_missing_is_an_oserror() -> None:
    false = shutil.which("false")
    assert false is not None
    with pytest.raises(OSError, match="status 1"):
        run_command([false])
    with pytest.raises(FileNotFoundError):
        run_command(["/nowhere/vm_stat"])
    with pytest.raises(ValueError, match="absolute"):
        run_command(["vm_stat"])


def test_a_command_gets_the_c_locale_and_no_input() -> None:
    output = run_command(
        [sys.executable, "-c", "import os, sys; print(os.environ['LC_ALL'], sys.stdin.read())"]
    )
    assert output == b"C \n"


# --- the calls themselves, against a stand-in with the same C interface ---


@pytest.fixture(scope="module")
def standin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for Apple's libraries")
    target = tmp_path_factory.mktemp("standin") / "standin.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(target), str(SAMPLES / "standin.c")], check=True, timeout=120
    )
    return target


class StandIn:
    def __init__(self, path: Path, copy: Path) -> None:
        shutil.copy(path, copy)  # a copy of its own, so that each test has fresh variables
        self.library = ctypes.CDLL(str(copy), use_errno=True)
        self.calls = DarwinCalls(lambda path: self.library)

    def number(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, f"standin_{name}").value

    def set(self, name: str, value: int, kind: Any = ctypes.c_int) -> None:
        kind.in_dll(self.library, f"standin_{name}").value = value

    def fill(self, name: str, raw: bytes) -> None:
        target = (ctypes.c_char * len(raw)).in_dll(self.library, f"standin_{name}")
        ctypes.memmove(target, raw, len(raw))


@pytest.fixture
def standin(standin_path: Path, tmp_path: Path) -> StandIn:
    return StandIn(standin_path, tmp_path / "standin.so")


def test_a_whole_snapshot_comes_through_the_c_interface(standin: StandIn) -> None:
    standin.fill("pages", pages(40_000, 250_000, 240_000, 170_000, 290_000))
    standin.fill("rusage", rusage(1100 << 20, 132 << 20))
    standin.fill("swap", struct.pack("<QQQIi", 2 << 30, 1 << 30, 1 << 30, PAGE, 1))
    standin.set("level", 2)
    standin.set("state", 1, ctypes.c_uint64)
    snapshot = read_once(darwin_readers(standin.calls, run=no_commands))
    assert snapshot.pressure_level is PressureLevel.WARN
    assert snapshot.memory_total_bytes == RAM
    assert snapshot.memory_wired_bytes == 170_000 * PAGE
    assert snapshot.process_footprint_bytes == 1100 << 20
    assert snapshot.swap_used_bytes == 1 << 30
    assert snapshot.thermal_state is ThermalState.FAIR
    assert snapshot.low_power_mode is True
    assert snapshot.chip == "Apple M4 Pro"
    assert snapshot.machine_model == "Mac16,8"
    assert snapshot.gpu_utilization_percent == 87  # the busier of two accelerators
    assert snapshot.gpu_in_use_bytes == 2 << 33
    assert snapshot.gpu_recoveries_total is None  # not published as a number


def test_a_sysctl_answers_at_its_own_width_or_with_the_systems_error(standin: StandIn) -> None:
    assert standin.calls.sysctl("kern.memorystatus_vm_pressure_level", 8) == struct.pack("<i", 1)
    assert len(standin.calls.sysctl("hw.memsize", 8)) == 8
    with pytest.raises(OSError, match=r"no\.such\.thing") as missing:
        standin.calls.sysctl("no.such.thing", 8)
    assert missing.value.errno == 2
    with pytest.raises(OSError, match=r"hw\.memsize"):
        standin.calls.sysctl("hw.memsize", 4)


def test_the_host_port_is_asked_for_once(standin: StandIn) -> None:
    standin.fill("pages", pages(1, 2, 3, 4, 5))
    for _ in range(50):
        assert struct.unpack_from("<I", standin.calls.vm_info64(), 0) == (1,)
    assert standin.number("host_rights") == 1
    assert standin.calls.kernel_page_bytes() == PAGE


def test_a_shorter_answer_of_an_older_kernel_is_passed_on_at_its_length(standin: StandIn) -> None:
    standin.set("reply_words", 24)
    assert len(standin.calls.vm_info64()) == 96
    standin.set("fail_host", 1)
    with pytest.raises(OSError, match="kern_return 5"):
        standin.calls.vm_info64()


def test_a_key_is_registered_once_and_anew_after_it_failed(standin: StandIn) -> None:
    key = "com.apple.system.thermalpressurelevel"
    standin.set("state", (1 << 40) + 7, ctypes.c_uint64)
    for _ in range(10):
        assert standin.calls.notify_state(key) == (1 << 40) + 7
    assert standin.number("registrations") == 1
    standin.set("fail_notify", 1)
    with pytest.raises(OSError, match="status 9"):
        standin.calls.notify_state(key)
    assert standin.number("live_tokens") == 0
    standin.set("fail_notify", 0)
    assert standin.calls.notify_state(key) == (1 << 40) + 7
    with pytest.raises(OSError, match="notify_register_check"):
        standin.calls.notify_state("org.example.key")


def test_ten_thousand_gpu_reads_leave_no_object_behind(standin: StandIn) -> None:
    standin.calls.gpu_nodes()
    held = standin.number("live_cf"), standin.number("live_io")
    for _ in range(10_000):
        nodes = standin.calls.gpu_nodes()
    assert (standin.number("live_cf"), standin.number("live_io")) == held
    assert [node["Device Utilization %"] for node in nodes] == [12, 87]
    assert nodes[1]["Alloc system memory"] == 3 << 33
    standin.calls.notify_state("com.apple.system.lowpowermode")
    standin.calls.close()
    assert [standin.number(name) for name in ("live_cf", "live_io", "live_tokens")] == [0, 0, 0]
    assert len(standin.calls.gpu_nodes()) == 2  # and it opens anew
    standin.calls.close()


def test_a_machine_without_an_accelerator_says_so(standin: StandIn) -> None:
    standin.set("accelerators", 0)
    with pytest.raises(OSError, match="no IOAccelerator service"):
        standin.calls.gpu_nodes()
    assert standin.number("live_io") == 0


def test_handles_of_the_parent_are_dropped_and_not_released_after_a_fork(standin: StandIn) -> None:
    standin.fill("pages", pages(1, 2, 3, 4, 5))
    standin.calls.vm_info64()
    standin.calls.gpu_nodes()
    standin.calls.notify_state("com.apple.system.lowpowermode")
    tokens, services = standin.number("live_tokens"), standin.number("live_io")
    standin.calls.forget()
    assert (standin.number("live_tokens"), standin.number("live_io")) == (tokens, services)
    assert len(standin.calls.gpu_nodes()) == 2
    assert standin.number("live_io") == services + 2
    assert standin.calls.notify_state("com.apple.system.lowpowermode") == 0
    assert standin.number("registrations") == 2


@pytest.mark.skipif(sys.platform == "darwin", reason="here the libraries are there")
def test_without_apples_libraries_each_call_is_an_oserror_and_the_snapshot_stands() -> None:
    calls = DarwinCalls()
    with pytest.raises(OSError, match="libSystem"):
        calls.sysctl("hw.memsize", 8)
    with pytest.raises(OSError, match="IOKit"):
        calls.gpu_nodes()
    snapshot = read_once(darwin_readers(calls))
    assert snapshot.pressure_level is PressureLevel.UNKNOWN
    assert "libSystem" in snapshot.unknown["swap_used_bytes"]


@pytest.mark.skipif(sys.platform != "darwin", reason="needs macOS")
def test_on_a_mac_every_in_process_source_answers() -> None:
    snapshot = read_once()
    assert snapshot.pressure_level is not PressureLevel.UNKNOWN
    for name in (
        "memory_total_bytes",
        "memory_compressed_bytes",
        "swap_used_bytes",
        "process_footprint_bytes",
    ):
        assert getattr(snapshot, name) is not None, snapshot.unknown.get(name)
    assert snapshot.sources["pressure_level"].startswith("sysctlbyname")
    assert os.uname().machine == "x86_64" or snapshot.chip is not None
