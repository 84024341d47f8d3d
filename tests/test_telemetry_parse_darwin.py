from __future__ import annotations

import ctypes
import plistlib
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lumina_cache.telemetry import parse_darwin as parse
from lumina_cache.telemetry.parse import MAX_BYTES, Unknown
from lumina_cache.telemetry.snapshot import PowerSource, PressureLevel, ThermalState

SAMPLES = Path(__file__).parent / "data" / "telemetry"
PAGE = 16384
RAM = 16 << 30
ORDER = (
    *("free", "active", "inactive", "wire", "zero_fill", "reactivations", "pageins", "pageouts", "faults"),
    *("cow_faults", "lookups", "hits", "purges", "purgeable", "speculative", "decompressions"),
    *("compressions", "swapins", "swapouts", "compressor", "throttled", "external", "internal", "stored"),
)
KEY = "com.apple.system.thermalpressurelevel"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text("ascii")


def pages(**counts: int) -> bytes:
    """A vm_statistics64 as the kernel would fill it, packed by hand from the published header."""
    assert not set(counts) - set(ORDER)
    return struct.pack("<4I 9Q 2I 4Q 4I Q", *(counts.get(name, 0) for name in ORDER))


# --- sizes and offsets, against the published headers ---


def test_the_structures_have_the_published_sizes() -> None:
    assert ctypes.sizeof(parse.VmStatistics64) == 152
    assert parse.VM_INFO64_COUNT == 38
    assert ctypes.sizeof(parse.XswUsage) == 32
    assert parse.RUSAGE_V4_BYTES == 296


@pytest.mark.parametrize(
    ("field", "offset"),
    [
        ("free_count", 0),
        ("active_count", 4),
        ("inactive_count", 8),
        ("wire_count", 12),
        ("zero_fill_count", 16),
        ("pageouts", 40),
        ("purges", 80),
        ("purgeable_count", 88),
        ("speculative_count", 92),
        ("decompressions", 96),
        ("compressions", 104),
        ("swapins", 112),
        ("swapouts", 120),
        ("compressor_page_count", 128),
        ("throttled_count", 132),
        ("external_page_count", 136),
        ("internal_page_count", 140),
        ("total_uncompressed_pages_in_compressor", 144),
    ],
)
def test_each_page_counter_lies_where_the_header_puts_it(field: str, offset: int) -> None:
    assert getattr(parse.VmStatistics64, field).offset == offset


# --- structures ---


def test_the_pressure_level_is_1_2_or_4_and_nothing_else_is_normal() -> None:
    for raw, level in ((1, PressureLevel.NORMAL), (2, PressureLevel.WARN), (4, PressureLevel.CRITICAL)):
        assert parse.decode_pressure_level(struct.pack("<i", raw)) == (raw, level)
    for raw in (0, 3, 5, 8, -1):
        found = parse.decode_pressure_level(struct.pack("<i", raw))
        assert isinstance(found, Unknown)
        assert str(raw) in found.reason
    for buffer in (b"", b"\1", b"\1\0\0", b"\1" + b"\0" * 15):
        assert isinstance(parse.decode_pressure_level(buffer), Unknown)


def test_integers_are_taken_at_the_width_that_came_back() -> None:
    assert parse.decode_integer(struct.pack("<i", 14000)) == 14000
    assert parse.decode_integer(struct.pack("<q", 17179869184)) == 17179869184
    assert isinstance(parse.decode_integer(b"\0" * 3), Unknown)


def test_page_counts_are_bytes_and_free_includes_speculative_pages() -> None:
    raw = pages(free=46340, speculative=14083, active=254966, inactive=240318, wire=172591, compressor=294851)
    counts = parse.decode_vm_info64(raw, PAGE, RAM)
    assert isinstance(counts, parse.PageCounts)
    assert counts.free == 46340 * PAGE
    assert counts.compressed == 294851 * PAGE
    assert counts.wired == 172591 * PAGE
    assert parse.decode_vm_info64(raw, 4096, RAM) != counts


def test_the_logical_size_of_the_compressor_is_not_taken_for_what_it_occupies() -> None:
    raw = pages(free=1000, active=1000, compressor=500, stored=900_000_000)
    counts = parse.decode_vm_info64(raw, PAGE, RAM)
    assert isinstance(counts, parse.PageCounts)
    assert counts.compressed == 500 * PAGE


def test_page_counts_beyond_the_machines_memory_are_refused() -> None:
    assert isinstance(parse.decode_vm_info64(pages(free=2_000_000), PAGE, RAM), Unknown)
    assert isinstance(parse.decode_vm_info64(pages(), PAGE, RAM), Unknown)
    assert isinstance(parse.decode_vm_info64(pages(free=10, speculative=99999), PAGE, RAM), Unknown)
    assert isinstance(parse.decode_vm_info64(pages(free=1000)[:-1], PAGE, RAM), Unknown)
    assert isinstance(parse.decode_vm_info64(pages(free=1000), 12345, RAM), Unknown)
    assert isinstance(parse.decode_vm_info64(pages(free=1000) + b"\0" * 16, PAGE, RAM), parse.PageCounts)


def test_swap_usage_is_read_from_its_structure() -> None:
    raw = struct.pack("<QQQIi", 2 << 30, 1 << 30, 1 << 30, PAGE, 1)
    assert parse.decode_swap_usage(raw) == parse.SwapUsage(total=2 << 30, used=1 << 30)
    assert parse.decode_swap_usage(struct.pack("<QQQIi", 0, 0, 0, PAGE, 0)) == parse.SwapUsage(0, 0)
    for wrong in (raw[:-1], raw + b"\0", struct.pack("<QQQIi", 1, 0, 2, PAGE, 1), b"\xff" * 32):
        assert isinstance(parse.decode_swap_usage(wrong), Unknown)


def test_the_footprint_is_not_the_resident_set() -> None:
    raw = bytearray(296)
    struct.pack_into("<Q", raw, 64, 132 << 20)
    struct.pack_into("<Q", raw, 72, 1100 << 20)
    assert parse.decode_rusage(bytes(raw)) == (1100 << 20, 132 << 20)
    assert isinstance(parse.decode_rusage(bytes(raw[:-1])), Unknown)
    assert isinstance(parse.decode_rusage(b"\0" * 296), Unknown)
    assert isinstance(parse.decode_rusage(b"\xff" * 512), Unknown)


def test_a_string_ends_at_its_nul() -> None:
    assert parse.decode_string(b"Apple M4 Pro\0junk") == "Apple M4 Pro"
    for wrong in (b"", b"\0", b"no end", b"\xff\xfe\0", b"a\x01b\0"):
        assert isinstance(parse.decode_string(wrong), Unknown)


# --- notification states ---


def test_heavy_thermal_pressure_is_serious_and_values_of_other_systems_are_unknown() -> None:
    expected = [ThermalState.NOMINAL, ThermalState.FAIR, ThermalState.SERIOUS] + [ThermalState.CRITICAL] * 2
    assert [parse.thermal_state(raw) for raw in range(5)] == expected
    for raw in (-1, 5, 10, 20, 50, 1 << 63):
        assert isinstance(parse.thermal_state(raw), Unknown)


def test_power_is_battery_only_if_valid_and_not_external() -> None:
    valid, external, charging = 1 << 19, 1 << 16, 1 << 17
    assert parse.power_state(valid | 64) == parse.PowerState(PowerSource.BATTERY, 64)
    assert parse.power_state(valid | external | 80) == parse.PowerState(PowerSource.AC, 80)
    assert parse.power_state(valid | external | charging | 100) == parse.PowerState(PowerSource.AC, 100)
    assert parse.power_state(0) is None
    assert isinstance(parse.power_state(valid | 101), Unknown)
    assert isinstance(parse.power_state(1 << 40), Unknown)


def test_notifyutil_prints_its_failure_like_an_answer_and_it_is_not_taken_for_one() -> None:
    assert parse.parse_notifyutil(sample("notifyutil.txt"), KEY) == 2
    assert isinstance(parse.parse_notifyutil(sample("notifyutil_failed.txt"), KEY), Unknown)
    assert isinstance(parse.parse_notifyutil("com.apple.other 2\n", KEY), Unknown)


# --- graphics ---


def test_gpu_statistics_match_the_exact_key() -> None:
    assert parse.parse_ioreg_plist(sample("ioreg.plist").encode()) == parse.GpuStatistics(
        utilization_percent=73,
        renderer_percent=71,
        in_use_bytes=946872064,
        allocated_bytes=5614056960,
        recoveries_total=3,
    )


def test_of_several_accelerators_the_busiest_counts() -> None:
    found = parse.gpu_statistics([{"Device Utilization %": 5}, {"Device Utilization %": 60}, {"model": "x"}])
    assert isinstance(found, parse.GpuStatistics)
    assert found.utilization_percent == 60
    assert found.in_use_bytes is None


def test_a_busy_share_above_100_is_clamped_and_flagged() -> None:
    found = parse.gpu_statistics([{"Device Utilization %": 117}])
    assert isinstance(found, parse.GpuStatistics)
    assert (found.utilization_percent, found.clamped) == (100, True)


@pytest.mark.parametrize("value", [-1, True, "12", 12.0, 1 << 62, None])
def test_a_gpu_value_of_another_kind_is_left_unknown(value: object) -> None:
    found = parse.gpu_statistics([{"Device Utilization %": value, "Alloc system memory": 1}])
    assert isinstance(found, parse.GpuStatistics)
    assert found.utilization_percent is None


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"\n",
        b"not xml",
        plistlib.dumps({"PerformanceStatistics": {}}),
        plistlib.dumps([]),
        plistlib.dumps([1, "two", {"PerformanceStatistics": "three"}]),
        plistlib.dumps([{"PerformanceStatistics": {"Tiler Utilization %": 3}}]),
        b"<plist><array><dict><key>PerformanceStatistics</key><dict><key>Alloc system memory</key>"
        b"<integer>1_0</integer></dict></dict></array></plist>",
    ],
)
def test_without_statistics_the_gpu_is_unknown(output: bytes) -> None:
    assert isinstance(parse.parse_ioreg_plist(output), Unknown)


# --- command output ---


def test_vm_stat_takes_the_page_size_from_its_header_and_adds_speculative_pages_back() -> None:
    counts = parse.parse_vm_stat(sample("vm_stat.txt"))
    assert isinstance(counts, parse.PageCounts)
    assert counts.free == (41234 + 10987) * PAGE
    assert counts.compressed == 154321 * PAGE
    assert counts.swapouts_total == 8642 * PAGE
    small = parse.parse_vm_stat(sample("vm_stat_4096.txt"))
    assert isinstance(small, parse.PageCounts)
    assert small.wired == 187654 * 4096


def test_vm_stat_without_speculative_pages_does_not_know_free() -> None:
    lines = [line for line in sample("vm_stat.txt").splitlines(keepends=True) if "speculative" not in line]
    counts = parse.parse_vm_stat("".join(lines))
    assert isinstance(counts, parse.PageCounts)
    assert counts.free is None
    assert counts.active == 312345 * PAGE


def test_sysctl_text_is_read_by_name_and_a_report_of_a_change_is_no_value() -> None:
    printed = parse.parse_sysctl_text(sample("sysctl.txt"))
    assert printed["kern.memorystatus_vm_pressure_level"] == "2"
    assert printed["machdep.cpu.brand_string"] == "Apple M4"
    assert parse.parse_swap_text(printed["vm.swapusage"]) == parse.SwapUsage(
        total=2048 << 20, used=int(1375.25 * (1 << 20))
    )
    assert parse.parse_sysctl_text("iogpu.wired_limit_mb: 0 -> 14000\n") == {}
    assert parse.parse_sysctl_text("sysctl: unknown oid 'x'\n") == {}


def test_swap_text_must_be_complete_and_possible() -> None:
    for wrong in (
        "",
        "total = 1.00M",
        "total = 1.00M  used = 2.00M  free = 0.00M",
        "total = 1,00M  used = 0,00M",
    ):
        assert isinstance(parse.parse_swap_text(wrong), Unknown)


def test_the_power_source_is_the_first_line_whatever_the_battery_says() -> None:
    assert parse.parse_pmset_batt(sample("pmset_batt_battery.txt")) == parse.PowerState(
        PowerSource.BATTERY, 64
    )
    assert parse.parse_pmset_batt(sample("pmset_batt_ac_hold.txt")) == parse.PowerState(PowerSource.AC, 80)
    assert parse.parse_pmset_batt(sample("pmset_batt_desktop.txt")) == parse.PowerState(PowerSource.AC, None)
    assert isinstance(parse.parse_pmset_batt("Battery Power\n"), Unknown)


def test_high_power_mode_is_not_low_power_mode() -> None:
    assert parse.parse_pmset_low_power(sample("pmset_g.txt")) is True
    assert parse.parse_pmset_low_power(sample("pmset_g_powermode.txt")) is False
    assert parse.parse_pmset_low_power(" powermode            1\n") is True
    assert isinstance(parse.parse_pmset_low_power(" sleep 1\n"), Unknown)


# --- cut, garbled and random input ---


def _fields(found: object) -> dict[str, object]:
    if found is None or isinstance(found, Unknown):
        return {}
    if isinstance(found, int | bool):
        return {"value": found}
    return {name: value for name, value in asdict(found).items() if value is not None}  # type: ignore[call-overload]


def _numbers(text: str) -> dict[str, object]:
    printed = parse.parse_sysctl_text(text)
    names = (
        "kern.memorystatus_vm_pressure_level",
        "kern.memorystatus_level",
        "hw.memsize",
        "iogpu.wired_limit_mb",
    )
    return {name: printed[name] for name in names if printed.get(name, "").isdigit()}


READERS: dict[str, Callable[[str], dict[str, object]]] = {
    "vm_stat.txt": lambda text: _fields(parse.parse_vm_stat(text)),
    "sysctl.txt": _numbers,
    "notifyutil.txt": lambda text: _fields(parse.parse_notifyutil(text, KEY)),
    "pmset_batt_battery.txt": lambda text: _fields(parse.parse_pmset_batt(text)),
    "pmset_g.txt": lambda text: _fields(parse.parse_pmset_low_power(text)),
    "ioreg.plist": lambda text: _fields(parse.parse_ioreg_plist(text.encode("utf-8", "replace"))),
}
# A digit or a blank in place of a digit can leave a well-formed number: no parser could tell.
GARBAGE = st.text(
    st.characters(exclude_categories=["Nd", "Zs", "Cs"]).filter(
        lambda character: not character.isspace() and not character.isdigit()
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", READERS)
def test_cut_anywhere_a_command_gives_true_values_or_none(name: str) -> None:
    whole, fields = sample(name), READERS[name]
    truth = fields(whole)
    assert truth
    for at in range(len(whole)):
        assert fields(whole[:at]).items() <= truth.items()


@pytest.mark.parametrize("name", READERS)
@given(where=st.integers(0, 2000), garbage=GARBAGE)
def test_garbled_anywhere_a_command_gives_true_values_or_none(name: str, where: int, garbage: str) -> None:
    whole, fields = sample(name), READERS[name]
    at = where % len(whole)
    garbled = fields(whole[:at] + garbage + whole[at + len(garbage) :])
    assert garbled.items() <= fields(whole).items()


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "replace")))
@example("Mach Virtual Memory Statistics: (page size of 16384 bytes)\n")
@example("Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free: 99999999999999999999.\n")
def test_no_text_makes_a_parser_raise_or_give_a_number(text: str) -> None:
    assert _fields(parse.parse_vm_stat(text)) == {}
    assert isinstance(parse.parse_swap_text(text), Unknown)
    assert isinstance(parse.parse_pmset_batt(text), Unknown)
    assert isinstance(parse.parse_notifyutil(text, KEY), Unknown)
    assert isinstance(parse.parse_pmset_low_power(text), Unknown)
    parse.parse_sysctl_text(text)


@given(st.binary(max_size=600))
@example(b"\xff" * 296)
@example(b"bplist00\xff")
@example(b"<?xml version='1.0' encoding='utf-7'?><plist/>")
@example(b"<plist><dict><dict/></plist>")
@example(b"<plist><date>x</date></plist>")
def test_no_bytes_make_a_decoder_raise_or_give_what_cannot_be(buffer: bytes) -> None:
    assert isinstance(parse.parse_ioreg_plist(buffer), Unknown)
    counts = parse.decode_vm_info64(buffer, PAGE, RAM)
    if not isinstance(counts, Unknown):
        assert (
            0
            < (counts.free or 0)
            + (counts.wired or 0)
            + (counts.active or 0)
            + (counts.compressed or 0)
            + (counts.inactive or 0)
            <= RAM * 11 // 10
        )
    swap = parse.decode_swap_usage(buffer)
    assert isinstance(swap, Unknown) or 0 <= swap.used <= swap.total <= MAX_BYTES
    rusage = parse.decode_rusage(buffer)
    assert isinstance(rusage, Unknown) or max(rusage) <= MAX_BYTES
    level = parse.decode_pressure_level(buffer)
    assert isinstance(level, Unknown) or level[0] in (1, 2, 4)
    parse.decode_integer(buffer)
    parse.decode_string(buffer)


@given(st.integers(-(1 << 64), 1 << 64))
def test_no_state_makes_a_decoder_raise(state: int) -> None:
    power = parse.power_state(state)
    assert power is None or isinstance(power, Unknown) or 0 <= (power.battery_percent or 0) <= 100
    thermal = parse.thermal_state(state)
    assert isinstance(thermal, Unknown) or 0 <= state <= 4


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["Device Utilization %", "Alloc system memory"]),
            st.none() | st.integers() | st.text() | st.booleans() | st.floats(),
        )
    )
)
def test_no_node_makes_the_gpu_reader_raise(nodes: list[dict[str, object]]) -> None:
    found = parse.gpu_statistics(nodes)
    assert isinstance(found, Unknown) or 0 <= (found.utilization_percent or 0) <= 100
