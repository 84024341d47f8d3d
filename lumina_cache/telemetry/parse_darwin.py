"""Pure parsers of what macOS returns: C structures as bytes, and the text of its commands.

Structures and meanings are those of Apple's published sources (xnu ``mach/vm_statistics.h``,
``bsd/sys/sysctl.h``, ``bsd/sys/resource.h``, ``kern_memorystatus_notify.c``; Libc
``OSThermalNotification.h``; IOKitUser ``IOPowerSources.c``; system_cmds ``vm_stat.c``; PowerManagement
``pmset.m``). All of it runs on any system.
"""

from __future__ import annotations

import ctypes
import plistlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lumina_cache.telemetry.parse import MAX_BYTES, Unknown, complete_lines, only_line, unsigned
from lumina_cache.telemetry.snapshot import PowerSource, PressureLevel, ThermalState

__all__ = [
    "RUSAGE_V4_BYTES",
    "VM_INFO64_COUNT",
    "GpuStatistics",
    "PageCounts",
    "PowerState",
    "SwapUsage",
    "decode_integer",
    "decode_pressure_level",
    "decode_rusage",
    "decode_string",
    "decode_swap_usage",
    "decode_vm_info64",
    "gpu_statistics",
    "parse_ioreg_plist",
    "parse_notifyutil",
    "parse_pmset_batt",
    "parse_pmset_low_power",
    "parse_swap_text",
    "parse_sysctl_text",
    "parse_vm_stat",
    "power_state",
    "pressure_level",
    "thermal_state",
]

_PAGE_SIZES = (4096, 16384)


class VmStatistics64(ctypes.Structure):
    """``struct vm_statistics64`` of ``mach/vm_statistics.h``: 152 bytes, packed to 8."""

    _fields_ = [
        ("free_count", ctypes.c_uint32),
        ("active_count", ctypes.c_uint32),
        ("inactive_count", ctypes.c_uint32),
        ("wire_count", ctypes.c_uint32),
        ("zero_fill_count", ctypes.c_uint64),
        ("reactivations", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("pageouts", ctypes.c_uint64),
        ("faults", ctypes.c_uint64),
        ("cow_faults", ctypes.c_uint64),
        ("lookups", ctypes.c_uint64),
        ("hits", ctypes.c_uint64),
        ("purges", ctypes.c_uint64),
        ("purgeable_count", ctypes.c_uint32),
        ("speculative_count", ctypes.c_uint32),
        ("decompressions", ctypes.c_uint64),
        ("compressions", ctypes.c_uint64),
        ("swapins", ctypes.c_uint64),
        ("swapouts", ctypes.c_uint64),
        ("compressor_page_count", ctypes.c_uint32),
        ("throttled_count", ctypes.c_uint32),
        ("external_page_count", ctypes.c_uint32),
        ("internal_page_count", ctypes.c_uint32),
        ("total_uncompressed_pages_in_compressor", ctypes.c_uint64),
    ]


class XswUsage(ctypes.Structure):
    """``struct xsw_usage`` of ``bsd/sys/sysctl.h``: 32 bytes."""

    _fields_ = [
        ("total", ctypes.c_uint64),
        ("avail", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("pagesize", ctypes.c_uint32),
        ("encrypted", ctypes.c_int32),
    ]


VM_INFO64_COUNT = ctypes.sizeof(VmStatistics64) // 4
"""The count that ``host_statistics64`` takes: 38 words of 32 bits."""
RUSAGE_V4_BYTES = 296
"""``sizeof(struct rusage_info_v4)`` of ``bsd/sys/resource.h``."""
_RUSAGE_RESIDENT_AT = 64
_RUSAGE_FOOTPRINT_AT = 72


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Page counters in bytes (None where a command did not print one); the last five count up since boot."""

    free: int | None = None
    """Speculative pages included, as in the kernel's structure."""
    active: int | None = None
    inactive: int | None = None
    wired: int | None = None
    purgeable: int | None = None
    compressed: int | None = None
    compressions_total: int | None = None
    decompressions_total: int | None = None
    swapins_total: int | None = None
    swapouts_total: int | None = None


@dataclass(frozen=True, slots=True)
class SwapUsage:
    total: int
    used: int


@dataclass(frozen=True, slots=True)
class GpuStatistics:
    """``PerformanceStatistics`` of the graphics accelerator; percentages are clamped to 100 and `clamped`
    says so.
    """

    utilization_percent: int | None = None
    renderer_percent: int | None = None
    in_use_bytes: int | None = None
    allocated_bytes: int | None = None
    recoveries_total: int | None = None
    clamped: bool = False


@dataclass(frozen=True, slots=True)
class PowerState:
    source: PowerSource
    battery_percent: int | None


# --- structures ---


def decode_integer(buffer: bytes) -> int | Unknown:
    """A sysctl integer of 4 or 8 bytes, little-endian, as the returned length tells."""
    if len(buffer) not in (4, 8):
        return Unknown(f"{len(buffer)} bytes where an integer has 4 or 8")
    return int.from_bytes(buffer, "little", signed=True)


def decode_string(buffer: bytes) -> str | Unknown:
    """A NUL-terminated printable string."""
    head, nul, _ = buffer.partition(b"\0")
    text = head.decode("ascii", "replace").strip()
    if not nul or not text or not text.isascii() or not text.isprintable():
        return Unknown("not a NUL-terminated printable string")
    return text


def pressure_level(raw: int) -> PressureLevel | Unknown:
    """The sysctl converts the kernel's four levels to the dispatch constants 1, 2 and 4; no other value
    exists.
    """
    level = {1: PressureLevel.NORMAL, 2: PressureLevel.WARN, 4: PressureLevel.CRITICAL}.get(raw)
    return level or Unknown(f"kern.memorystatus_vm_pressure_level is {raw}, which is none of 1, 2, 4")


def decode_pressure_level(buffer: bytes) -> tuple[int, PressureLevel] | Unknown:
    """``kern.memorystatus_vm_pressure_level`` as (raw, level)."""
    raw = decode_integer(buffer)
    if isinstance(raw, Unknown):
        return raw
    level = pressure_level(raw)
    return level if isinstance(level, Unknown) else (raw, level)


def decode_vm_info64(buffer: bytes, page_bytes: int, memory_bytes: int | None) -> PageCounts | Unknown:
    """``host_statistics64(HOST_VM_INFO64)``.

    Refused when the counts cannot be: more pages than `memory_bytes` (by default 64 TiB) has, with 10 %
    to spare because the counters are not read at one instant.
    """
    if len(buffer) < ctypes.sizeof(VmStatistics64):
        return Unknown(f"{len(buffer)} bytes where vm_statistics64 has {ctypes.sizeof(VmStatistics64)}")
    if page_bytes not in _PAGE_SIZES:
        return Unknown(f"a page size of {page_bytes} bytes")
    vm = VmStatistics64.from_buffer_copy(buffer)
    pages = vm.free_count + vm.active_count + vm.inactive_count + vm.wire_count + vm.compressor_page_count
    ceiling = MAX_BYTES if memory_bytes is None else memory_bytes * 11 // 10
    if not 0 < pages * page_bytes <= ceiling or vm.speculative_count > vm.free_count + pages // 100:
        return Unknown(f"counts that cannot be: {pages} pages of {page_bytes} bytes")
    return PageCounts(
        free=vm.free_count * page_bytes,
        active=vm.active_count * page_bytes,
        inactive=vm.inactive_count * page_bytes,
        wired=vm.wire_count * page_bytes,
        purgeable=vm.purgeable_count * page_bytes if vm.purgeable_count <= pages else None,
        compressed=vm.compressor_page_count * page_bytes,
        compressions_total=vm.compressions * page_bytes,
        decompressions_total=vm.decompressions * page_bytes,
        swapins_total=vm.swapins * page_bytes,
        swapouts_total=vm.swapouts * page_bytes,
    )


def decode_swap_usage(buffer: bytes) -> SwapUsage | Unknown:
    """``vm.swapusage``. Used and available are not read at one instant, so their sum is not checked."""
    if len(buffer) != ctypes.sizeof(XswUsage):
        return Unknown(f"{len(buffer)} bytes where xsw_usage has {ctypes.sizeof(XswUsage)}")
    swap = XswUsage.from_buffer_copy(buffer)
    if swap.pagesize not in _PAGE_SIZES or swap.total > MAX_BYTES or max(swap.used, swap.avail) > swap.total:
        return Unknown(f"swap that cannot be: {swap.used} of {swap.total} bytes, pages of {swap.pagesize}")
    return SwapUsage(total=swap.total, used=swap.used)


def decode_rusage(buffer: bytes) -> tuple[int, int] | Unknown:
    """(physical footprint, resident set) in bytes from ``proc_pid_rusage(RUSAGE_INFO_V4)``."""
    if len(buffer) < RUSAGE_V4_BYTES:
        return Unknown(f"{len(buffer)} bytes where rusage_info_v4 has {RUSAGE_V4_BYTES}")
    footprint = int.from_bytes(buffer[_RUSAGE_FOOTPRINT_AT : _RUSAGE_FOOTPRINT_AT + 8], "little")
    resident = int.from_bytes(buffer[_RUSAGE_RESIDENT_AT : _RUSAGE_RESIDENT_AT + 8], "little")
    if not 0 < footprint <= MAX_BYTES or not 0 < resident <= MAX_BYTES:
        return Unknown(f"a footprint of {footprint} and a resident set of {resident} bytes")
    return footprint, resident


# --- notification states ---


def thermal_state(raw: int) -> ThermalState | Unknown:
    """``com.apple.system.thermalpressurelevel`` on macOS: 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4
    sleeping.

    Heavy is where the clocks come down, so 2 is called serious although NSProcessInfo folds it into fair. The
    values 10 to 50 belong to other Apple systems.
    """
    states = (ThermalState.NOMINAL, ThermalState.FAIR, ThermalState.SERIOUS, *(ThermalState.CRITICAL,) * 2)
    if 0 <= raw < len(states):
        return states[raw]
    return Unknown(f"thermal pressure level {raw} is outside 0 to 4")


_EXTERNAL, _VALID = 1 << 16, 1 << 19


def power_state(state: int) -> PowerState | Unknown | None:
    """``com.apple.system.powersources.percent``; None when no battery was published (no valid bit).

    Read as Apple's ``IOPSDrawingUnlimitedPower`` does: on battery only if valid and not external.
    """
    percent = state & 0xFFFF
    if not 0 <= state < 1 << 32 or percent > 100:
        return Unknown(f"power state {state:#x} holds no percentage")
    if not state & _VALID:
        return None
    return PowerState(PowerSource.AC if state & _EXTERNAL else PowerSource.BATTERY, percent)


def parse_notifyutil(text: str, key: str) -> int | Unknown:
    """``notifyutil -g KEY`` prints ``KEY 2``, or on failure ``KEY: Failed with code 9`` with exit status
    0.
    """
    line = only_line(text) or ""
    if line.startswith(f"{key} "):
        number = unsigned(line.removeprefix(f"{key} "))
        if number is not None and number < 1 << 64:
            return number
    return Unknown("not in the format of notifyutil -g")


# --- graphics ---


def gpu_statistics(nodes: Iterable[Mapping[str, object]]) -> GpuStatistics | Unknown:
    """Of several accelerators' ``PerformanceStatistics``, the one with the highest device utilisation."""
    best: GpuStatistics | None = None
    for node in nodes:
        found = _one_gpu(node)
        if found is not None and (
            best is None or (found.utilization_percent or -1) > (best.utilization_percent or -1)
        ):
            best = found
    return best or Unknown("no accelerator publishes performance statistics (so it is in virtual machines)")


def _one_gpu(node: Mapping[str, object]) -> GpuStatistics | None:
    def count(key: str, ceiling: int) -> int | None:
        value = node.get(key)
        return value if type(value) is int and 0 <= value <= ceiling else None

    device = count("Device Utilization %", 1000)
    renderer = count("Renderer Utilization %", 1000)
    in_use = count("In use system memory", MAX_BYTES)
    allocated = count("Alloc system memory", MAX_BYTES)
    recoveries = count("recoveryCount", 1 << 31)
    if all(value is None for value in (device, renderer, in_use, allocated, recoveries)):
        return None
    return GpuStatistics(
        utilization_percent=None if device is None else min(device, 100),
        renderer_percent=None if renderer is None else min(renderer, 100),
        in_use_bytes=in_use,
        allocated_bytes=allocated,
        recoveries_total=recoveries,
        clamped=max(device or 0, renderer or 0) > 100,
    )


def parse_ioreg_plist(output: bytes) -> GpuStatistics | Unknown:
    """``ioreg -a -r -d 1 -w 0 -c IOAccelerator``: a property list of nodes, or nothing at all when none
    matches.
    """
    if not output.strip():
        return Unknown("no IOAccelerator node")
    if len(output) > 16 << 20:
        return Unknown(f"{len(output)} bytes of ioreg output")
    if _NO_INTEGER.search(output):
        return Unknown("a property list with an integer that is none")
    try:
        nodes = plistlib.loads(output, fmt=plistlib.FMT_XML)
    except Exception as error:  # plistlib lets expat, value, overflow, attribute and other errors through
        return Unknown(f"not a property list: {type(error).__name__}")
    if not isinstance(nodes, list):
        return Unknown("a property list, but not of nodes")
    statistics = [node.get("PerformanceStatistics") for node in nodes if isinstance(node, dict)]
    return gpu_statistics(node for node in statistics if isinstance(node, dict))


# --- command output ---

_NO_INTEGER = re.compile(rb"<integer>(?!-?[0-9]+</integer>)")  # plistlib would read 1_0 and +1
_VM_STAT_HEADER = re.compile(r"Mach Virtual Memory Statistics: \(page size of ([0-9]{1,6}) bytes\)")
_VM_STAT_LINE = re.compile(r'"?([A-Z][A-Za-z -]*)"?:[ ]+([0-9]{1,20})\.')
_SWAP_TEXT = re.compile(
    r"total = ([0-9]{1,9})\.([0-9]{2})M  used = ([0-9]{1,9})\.([0-9]{2})M"
    r"  free = [0-9]{1,9}\.[0-9]{2}M(?:  \(encrypted\))?"
)
_BATTERY = re.compile(r" -InternalBattery-0 \(id=[0-9]+\)\t([0-9]{1,3})%;")
_DRAWING_FROM = {
    "Now drawing from 'AC Power'": PowerSource.AC,
    "Now drawing from 'Battery Power'": PowerSource.BATTERY,
    "Now drawing from 'UPS Power'": PowerSource.UPS,
}


def parse_vm_stat(text: str) -> PageCounts | Unknown:
    """``vm_stat``: the page size stands in the header; labels it does not know are skipped.

    The tool prints free without the speculative pages; they are added back, or free is unknown without them.
    """
    lines = complete_lines(text)
    header = _VM_STAT_HEADER.fullmatch(lines[0]) if lines else None
    if header is None or int(header[1]) not in _PAGE_SIZES:
        return Unknown("no vm_stat header with a page size of 4096 or 16384 bytes")
    page = int(header[1])
    counts: dict[str, int] = {}
    for line in lines[1:]:
        match = _VM_STAT_LINE.fullmatch(line)
        if match:
            counts[match[1]] = int(match[2]) * page

    def pages(label: str) -> int | None:
        value = counts.get(label)
        return value if value is not None and value <= MAX_BYTES else None

    free, speculative = pages("Pages free"), pages("Pages speculative")
    result = PageCounts(
        free=None if free is None or speculative is None else free + speculative,
        active=pages("Pages active"),
        inactive=pages("Pages inactive"),
        wired=pages("Pages wired down"),
        purgeable=pages("Pages purgeable"),
        compressed=pages("Pages occupied by compressor"),
        compressions_total=counts.get("Compressions"),
        decompressions_total=counts.get("Decompressions"),
        swapins_total=counts.get("Swapins"),
        swapouts_total=counts.get("Swapouts"),
    )
    return Unknown("a vm_stat header without counters") if result == PageCounts() else result


def parse_sysctl_text(text: str) -> dict[str, str]:
    """``sysctl -i a b c`` as text by name; a line that reports a change (``0 -> 14000``) is no value."""
    found: dict[str, str] = {}
    for line in complete_lines(text):
        name, colon, value = line.partition(": ")
        if colon and " -> " not in value and re.fullmatch(r"[a-z0-9_]+(?:\.[a-z0-9_]+)+", name):
            found[name] = value
    return found


def parse_swap_text(value: str) -> SwapUsage | Unknown:
    """The value of ``vm.swapusage``; sizes are always MiB with two decimals."""
    match = _SWAP_TEXT.fullmatch(value)
    if match is None:
        return Unknown("not in the format of vm.swapusage")
    total, used = (int(match[i] + match[i + 1]) * (1 << 20) // 100 for i in (1, 3))
    if used > total or total > MAX_BYTES:
        return Unknown(f"swap that cannot be: {used} of {total} bytes")
    return SwapUsage(total=total, used=used)


def parse_pmset_batt(text: str) -> PowerState | Unknown:
    """``pmset -g batt``: the first line decides; "not charging" does not mean on battery."""
    lines = complete_lines(text)
    source = _DRAWING_FROM.get(lines[0]) if lines else None
    if source is None:
        return Unknown("no line saying what is drawn from")
    match = next((m for m in map(_BATTERY.match, lines[1:]) if m), None)
    percent = int(match[1]) if match and int(match[1]) <= 100 else None
    return PowerState(source, percent)


def parse_pmset_low_power(text: str) -> bool | Unknown:
    """``pmset -g``: ``lowpowermode 0|1``, or ``powermode 0|1|2`` where 1 is low and 2 high."""
    for line in complete_lines(text):
        words = line.split()
        if len(words) == 2 and words[0] == "lowpowermode" and words[1] in ("0", "1"):
            return words[1] == "1"
        if len(words) == 2 and words[0] == "powermode" and words[1] in ("0", "1", "2"):
            return words[1] == "1"
    return Unknown("neither lowpowermode nor powermode")
