from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lumina_cache.telemetry.assemble import SnapshotReader
from lumina_cache.telemetry.linux import LinuxReader, linux_readers
from lumina_cache.telemetry.snapshot import PowerSource, PressureLevel, Snapshot, ThermalState

SAMPLES = Path(__file__).parent / "data" / "telemetry"
KIB = 1024
UNLIMITED_V1 = "9223372036854771712\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "ascii")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for source, target in (
        ("meminfo.txt", "proc/meminfo"),
        ("psi.txt", "proc/pressure/memory"),
        ("self_status.txt", "proc/self/status"),
        ("vmstat.txt", "proc/vmstat"),
        ("cgroup_v2.txt", "proc/self/cgroup"),
    ):
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SAMPLES / source, tmp_path / target)
    return tmp_path


def _v2(root: Path, group: str, limit: str, used: int, stat: str | None = None) -> None:
    base = root / "sys/fs/cgroup" / group
    _write(base / "memory.max", limit)
    _write(base / "memory.current", f"{used}\n")
    _write(base / "memory.stat", stat or "inactive_file 0\n")


def _v1(root: Path, group: str, limit: str, used: int) -> None:
    base = root / "sys/fs/cgroup/memory" / group
    _write(base / "memory.limit_in_bytes", limit)
    _write(base / "memory.usage_in_bytes", f"{used}\n")
    shutil.copy(SAMPLES / "memory_stat_v1.txt", base / "memory.stat")


def _read(root: Path) -> Snapshot:
    reader = SnapshotReader(linux_readers(root))
    try:
        return reader.read()
    finally:
        reader.close()


def test_memory_swap_and_process_are_read_from_proc(root: Path) -> None:
    snapshot = _read(root)
    assert snapshot.memory_total_bytes == 16332144 * KIB
    assert snapshot.memory_available_bytes == 8901234 * KIB
    assert snapshot.memory_compressed_bytes == 262144 * KIB
    assert snapshot.swap_used_bytes == (4194300 - 3145724) * KIB
    assert snapshot.process_resident_bytes == 123456 * KIB
    assert snapshot.process_footprint_bytes == (123456 + 2048) * KIB
    assert snapshot.stall_some_percent == 12.34
    assert snapshot.pressure_raw == "some=12.34 full=4.20"
    assert snapshot.pressure_level is PressureLevel.WARN
    assert snapshot.memory_wired_bytes is None
    assert snapshot.thermal_state is ThermalState.UNKNOWN


def test_without_psi_the_level_rests_on_what_is_available_and_says_so(root: Path) -> None:
    (root / "proc/pressure/memory").unlink()
    snapshot = _read(root)
    assert snapshot.stall_some_percent is None
    assert snapshot.pressure_level is PressureLevel.NORMAL
    assert snapshot.sources["pressure_level"] == "derived from the share available alone (no PSI)"


def test_without_psi_and_meminfo_the_level_is_unknown(root: Path) -> None:
    (root / "proc/pressure/memory").unlink()
    (root / "proc/meminfo").write_text("MemTotal:       163", "ascii")
    snapshot = _read(root)
    assert snapshot.pressure_level is PressureLevel.UNKNOWN
    assert snapshot.headroom_bytes is None
    assert snapshot.memory_total_bytes is None


def test_an_empty_root_gives_a_snapshot_of_reasons(tmp_path: Path) -> None:
    snapshot = _read(tmp_path)
    known = set(snapshot.sources)
    assert known <= {"disk_free_bytes", "mlx_active_bytes", "mlx_pool_bytes", "mlx_peak_bytes"}
    assert "No such file or directory" in snapshot.unknown["memory_total_bytes"]


def test_the_tightest_limit_of_the_path_and_its_parents_holds(root: Path) -> None:
    _v2(root, "user.slice/app.scope", "max\n", 100 << 20)
    _v2(root, "user.slice", f"{512 << 20}\n", 300 << 20, (SAMPLES / "memory_stat_v2.txt").read_text("ascii"))
    snapshot = _read(root)
    assert snapshot.memory_limit_bytes == 512 << 20
    # Of the 300 MiB in use, 50 MiB are file pages that can be dropped at once.
    assert snapshot.memory_available_bytes == (512 - 300 + 50) << 20
    assert snapshot.sources["memory_limit_bytes"] == "cgroup /sys/fs/cgroup/user.slice"


def test_the_least_room_counts_even_below_a_looser_limit(root: Path) -> None:
    _v2(root, "user.slice/app.scope", f"{256 << 20}\n", 16 << 20)
    _v2(root, "user.slice", f"{512 << 20}\n", 500 << 20)
    snapshot = _read(root)
    assert snapshot.memory_limit_bytes == 256 << 20
    assert snapshot.memory_available_bytes == 12 << 20
    assert snapshot.pressure_level is PressureLevel.CRITICAL  # 12 of 256 MiB


def test_a_hybrid_host_has_its_memory_limit_in_v1(root: Path) -> None:
    shutil.copy(SAMPLES / "cgroup_hybrid.txt", root / "proc/self/cgroup")
    _v1(root, "jobs/one", f"{1 << 30}\n", 600 << 20)
    _v1(root, "jobs", UNLIMITED_V1, 700 << 20)
    _v1(root, "", UNLIMITED_V1, 800 << 20)
    snapshot = _read(root)
    assert snapshot.memory_limit_bytes == 1 << 30
    assert snapshot.memory_available_bytes == (1024 - 600 + 50) << 20


def test_no_limit_is_told_from_a_limit_that_cannot_be_read(root: Path) -> None:
    _v2(root, "user.slice/app.scope", "max\n", 1)
    assert _read(root).unknown["memory_limit_bytes"].startswith("no limit is set")
    _v2(root, "user.slice/app.scope", "53687\n09", 1)
    assert "not one number" in _read(root).unknown["memory_limit_bytes"]
    (root / "proc/self/cgroup").write_text("garbage", "ascii")
    assert "no line of the form" in _read(root).unknown["memory_limit_bytes"]


def test_a_container_that_sees_only_the_top_of_its_group_reads_that(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/docker/0123abcd\n", "ascii")
    _v2(root, "", f"{2 << 30}\n", 1 << 30)
    assert _read(root).memory_limit_bytes == 2 << 30


def test_a_path_that_climbs_out_of_the_hierarchy_is_not_followed(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/../../../etc\n", "ascii")
    _v2(root, "", "max\n", 1)
    assert _read(root).unknown["memory_limit_bytes"].startswith("no limit is set")


def test_the_stalls_of_the_own_group_are_preferred_to_those_of_the_system(root: Path) -> None:
    own = root / "sys/fs/cgroup/user.slice/app.scope/memory.pressure"
    _write(own, (SAMPLES / "psi.txt").read_text("ascii").replace("4.20", "44.20"))
    snapshot = _read(root)
    assert snapshot.stall_full_percent == 44.20
    assert snapshot.pressure_level is PressureLevel.CRITICAL


def test_swap_rates_come_from_two_readings(root: Path) -> None:
    now = [0.0]
    reader = SnapshotReader(linux_readers(root, clock=lambda: now[0]), clock=lambda: now[0])
    assert reader.read().unknown["swap_out_bytes_per_second"] == "needs two readings"
    vmstat = root / "proc/vmstat"
    vmstat.write_text(vmstat.read_text("ascii").replace("pswpout 2100", "pswpout 2612"), "ascii")
    now[0] = 2.0
    snapshot = reader.read()
    import os

    assert snapshot.swap_out_bytes_per_second == 256 * os.sysconf("SC_PAGE_SIZE")
    assert snapshot.swap_in_bytes_per_second == 0.0
    vmstat.write_text("pswpin 0\npswpout 0\n", "ascii")
    now[0] = 4.0
    assert reader.read().unknown["swap_out_bytes_per_second"] == "the counter fell"
    reader.close()


def test_a_file_that_comes_back_is_read_again(root: Path) -> None:
    reader = LinuxReader(root)
    assert reader.memory()["memory_total_bytes"].value == 16332144 * KIB
    reader.close()
    assert reader.memory()["memory_total_bytes"].value == 16332144 * KIB
    reader.close()


@pytest.mark.parametrize(
    ("supplies", "source"),
    [
        ({"AC": {"type": "Mains", "online": "1"}}, PowerSource.AC),
        (
            {
                "AC": {"type": "Mains", "online": "0"},
                "BAT0": {"type": "Battery", "status": "Discharging", "capacity": "64"},
            },
            PowerSource.BATTERY,
        ),
        ({"mouse": {"type": "Battery", "scope": "Device", "status": "Discharging"}}, PowerSource.UNKNOWN),
        ({"BAT0": {"type": "Battery", "status": "Unknown", "capacity": "640"}}, PowerSource.UNKNOWN),
        ({}, PowerSource.UNKNOWN),
    ],
)
def test_the_power_source_is_known_only_when_a_supply_says_so(
    root: Path, supplies: dict[str, dict[str, str]], source: PowerSource
) -> None:
    (root / "sys/class/power_supply").mkdir(parents=True)
    for name, attributes in supplies.items():
        for attribute, text in attributes.items():
            _write(root / "sys/class/power_supply" / name / attribute, text + "\n")
    snapshot = _read(root)
    assert snapshot.power_source is source
    assert snapshot.battery_percent == (64 if source is PowerSource.BATTERY else None)


def test_the_platform_profile_tells_low_power_mode(root: Path) -> None:
    profile = root / "sys/firmware/acpi/platform_profile"
    for text, low in (("low-power\n", True), ("balanced\n", False), ("\0\0", None)):
        _write(profile, text)
        assert _read(root).low_power_mode is low
