"""The parsers against recordings of other people's machines, wherever those are: set LUMINA_FIXTURES to
their folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lumina_cache.telemetry import parse_darwin, parse_linux, pressure
from lumina_cache.telemetry.parse import Unknown
from lumina_cache.telemetry.snapshot import PowerSource, PressureLevel

FOLDER = os.environ.get("LUMINA_FIXTURES")
if not FOLDER:
    pytest.skip(
        "LUMINA_FIXTURES names no folder: recorded outputs of real machines were not parsed",
        allow_module_level=True,
    )
PAGE = 16384
THERMAL = "com.apple.system.thermalpressurelevel"


def recorded(name: str) -> str:
    return (Path(FOLDER or "") / f"{name}.txt").read_text("utf-8")


def counts(name: str) -> parse_darwin.PageCounts:
    found = parse_darwin.parse_vm_stat(recorded(name))
    assert isinstance(found, parse_darwin.PageCounts), found
    return found


@pytest.mark.parametrize(
    ("name", "free", "compressed", "page"),
    [
        ("vm_stat-m4_16gb", 32257 + 14083, 294851, PAGE),
        ("vm_stat-macmini_32gb_a", 15160 + 2084, 120555, PAGE),
        ("vm_stat-macmini_32gb_b", 652276 + 183582, 96636, PAGE),
        ("vm_stat-m4pro_trimmed", 6107 + 738, 433409, PAGE),
        ("vm_stat-m5_macos27_mte_SYNTHETIC_normal", 182344 + 12870, 312560, PAGE),
        ("vm_stat-x86_vm_4k", 6127229 + 430715, 0, 4096),
    ],
)
def test_recorded_page_counts_are_read(name: str, free: int, compressed: int, page: int) -> None:
    assert (counts(name).free, counts(name).compressed) == (free * page, compressed * page)


def test_a_record_cut_after_twelve_lines_leaves_the_rest_unknown() -> None:
    found = counts("vm_stat-mac_16gb_head12")
    assert found.wired == 123968 * PAGE
    assert found.compressed is None
    assert found.swapouts_total is None


@pytest.mark.parametrize("machine", ["m4_16gb", "macmini_32gb_a", "macmini_32gb_b"])
def test_the_kernels_rule_gives_normal_where_the_machine_was_normal(machine: str) -> None:
    found = counts(f"vm_stat-{machine}")
    assert found.free is not None
    assert found.active is not None
    assert found.inactive is not None
    assert found.compressed is not None
    n = found.free + found.active + found.inactive
    assert pressure.compressor_level(n, found.compressed) is PressureLevel.NORMAL


@pytest.mark.parametrize(
    ("name", "level", "swap_used_mib"),
    [
        ("sysctl-m4pro_swap12g_level1", PressureLevel.NORMAL, 11947.44),
        ("sysctl-macos27_SYNTHETIC_pressure2", PressureLevel.WARN, 3017.25),
        ("sysctl-macos27_SYNTHETIC_pressure4", PressureLevel.CRITICAL, 9811.50),
    ],
)
def test_recorded_levels_and_swap_are_read(name: str, level: PressureLevel, swap_used_mib: float) -> None:
    printed = parse_darwin.parse_sysctl_text(recorded(name))
    assert parse_darwin.pressure_level(int(printed["kern.memorystatus_vm_pressure_level"])) is level
    swap = parse_darwin.parse_swap_text(printed["vm.swapusage"])
    assert isinstance(swap, parse_darwin.SwapUsage)
    assert swap.used == pytest.approx(swap_used_mib * (1 << 20), abs=1 << 14)


def test_the_report_of_a_set_wired_limit_is_no_value() -> None:
    assert parse_darwin.parse_sysctl_text(recorded("sysctl-wired_limit_set_SIDE_EFFECT_FORMAT")) == {}
    assert parse_darwin.parse_sysctl_text(recorded("sysctl-m1_macos11_unknown_oid.stderr")) == {}


@pytest.mark.parametrize(
    ("name", "busy", "allocated"),
    [
        ("ioreg_plist-36gb_busy_trimmed", 86, 22620471296),
        ("ioreg_plist-g15s_trimmed", 14, 2472755200),
        ("ioreg_plist-m5pro_macos27.0_trimmed", 12, 6614056960),
    ],
)
def test_recorded_accelerators_are_read(name: str, busy: int, allocated: int) -> None:
    found = parse_darwin.parse_ioreg_plist(recorded(name).encode())
    assert isinstance(found, parse_darwin.GpuStatistics)
    assert (found.utilization_percent, found.allocated_bytes) == (busy, allocated)


def test_no_accelerator_prints_nothing_and_is_unknown() -> None:
    assert isinstance(parse_darwin.parse_ioreg_plist(recorded("ioreg_text-no_match_empty").encode()), Unknown)


@pytest.mark.parametrize(
    ("name", "source", "percent"),
    [
        ("m1_mbp_macos26.2_ac", PowerSource.AC, 83),
        ("m1_mbp_macos26.2_battery", PowerSource.BATTERY, 78),
        ("m5pro_mbp_macos26.5.1_ac_hold", PowerSource.AC, 80),
        ("mbp_no_estimate", PowerSource.AC, 93),
        ("finishing_charge", PowerSource.AC, 99),
        ("desktop_no_battery", PowerSource.AC, None),
    ],
)
def test_recorded_power_sources_are_read(name: str, source: PowerSource, percent: int | None) -> None:
    found = parse_darwin.parse_pmset_batt(recorded(f"pmset_batt-{name}"))
    assert found == parse_darwin.PowerState(source, percent)


def test_recorded_low_power_mode_is_read() -> None:
    assert parse_darwin.parse_pmset_low_power(recorded("pmset_g-m1_mbp_macos26.2")) is False


def test_recorded_thermal_levels_are_read() -> None:
    for name, level in (("m5_macos27.2_level0", 0), ("SYNTHETIC_level2", 2)):
        assert parse_darwin.parse_notifyutil(recorded(f"notifyutil-{name}"), THERMAL) == level
    assert isinstance(
        parse_darwin.parse_notifyutil(recorded("notifyutil-SYNTHETIC_failed"), THERMAL), Unknown
    )


def test_recorded_linux_files_are_read() -> None:
    assert parse_linux.parse_kib_table(recorded("linux_meminfo-vm_24gb"))["MemTotal"] == 24683656 * 1024
    assert parse_linux.parse_psi(recorded("linux_psi_memory-vm_kernel6.18")) == parse_linux.Stall(0.0, 0.0)
    assert parse_linux.parse_psi(recorded("linux_psi_memory-SYNTHETIC_stalled")) == parse_linux.Stall(
        12.34, 4.2
    )
    membership = parse_linux.parse_cgroup_membership(recorded("linux_proc_self_cgroup-hybrid_v1"))
    assert isinstance(membership, parse_linux.CgroupMembership)
    assert membership.v2 == "/"
    assert membership.v1_memory is not None
    for name in ("linux_cgroup_v1_memory_limit-unlimited", "linux_cgroup_v2_memory_max-SYNTHETIC_unlimited"):
        assert parse_linux.parse_cgroup_limit(recorded(name)) is None


PARSERS: tuple[Callable[[str], object], ...] = (
    parse_darwin.parse_vm_stat,
    parse_darwin.parse_sysctl_text,
    parse_darwin.parse_swap_text,
    lambda text: parse_darwin.parse_ioreg_plist(text.encode()),
    lambda text: parse_darwin.parse_notifyutil(text, THERMAL),
    parse_darwin.parse_pmset_batt,
    parse_darwin.parse_pmset_low_power,
    parse_linux.parse_psi,
    parse_linux.parse_kib_table,
    parse_linux.parse_cgroup_membership,
    parse_linux.parse_cgroup_limit,
)


def test_every_parser_survives_every_record_whole_cut_and_with_its_digits_spoilt() -> None:
    files = sorted(Path(FOLDER or "").glob("*.txt"))
    assert files
    for file in files:
        text = file.read_text("utf-8", "replace")
        cuts = [text[:at] for at in range(0, len(text), max(1, len(text) // 60))]
        for damaged in (text, *cuts, re.sub(r"\d", "?", text), text.replace("\n", "\0")):
            for parse in PARSERS:
                parse(damaged)
