"""Reads a Mac in its own process through ctypes; commands only where that fails.

`DarwinCalls` is the thin layer: it returns bytes and numbers and knows no meaning. `darwin_readers` gives
them to the parsers of `parse_darwin`. Importing this file loads no library; on other systems the first
call raises OSError.

Every prototype is declared, since ctypes' default result is a 32-bit int that cuts pointers. What is
created or copied is released; what is only got is not. A call releases the GIL while it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from lumina_cache.telemetry import parse_darwin as parse
from lumina_cache.telemetry.common import disk_probe, mlx_probes
from lumina_cache.telemetry.parse import MAX_BYTES, Unknown
from lumina_cache.telemetry.probes import NEEDS_TWO_READINGS, Probe, ReaderSet, Readings, Tier
from lumina_cache.telemetry.snapshot import PowerSource, PressureLevel, Reading

__all__ = ["COMMAND_TIMEOUT_SECONDS", "Calls", "DarwinCalls", "darwin_readers", "run_command"]

LIB_SYSTEM = "/usr/lib/libSystem.B.dylib"
IO_KIT = "/System/Library/Frameworks/IOKit.framework/IOKit"
CORE_FOUNDATION = "/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation"

THERMAL_KEY = "com.apple.system.thermalpressurelevel"
POWER_KEY = "com.apple.system.powersources.percent"
LOW_POWER_KEY = "com.apple.system.lowpowermode"

_HOST_VM_INFO64 = 4
_RUSAGE_INFO_V4 = 4
_CF_UTF8 = 0x08000100
_CF_NUMBER_SINT64 = 4
_GPU_KEYS = (
    "Device Utilization %",
    "Renderer Utilization %",
    "In use system memory",
    "Alloc system memory",
    "recoveryCount",
)

COMMAND_TIMEOUT_SECONDS = 2.0
_FALLBACK_PERIOD_SECONDS = 5.0


class Calls(Protocol):
    """What the readers need of macOS. Each raises OSError when the system refuses or has no such thing."""

    def sysctl(self, name: str, room: int) -> bytes: ...
    def vm_info64(self) -> bytes: ...
    def kernel_page_bytes(self) -> int: ...
    def rusage(self) -> bytes: ...
    def notify_state(self, key: str) -> int: ...
    def gpu_nodes(self) -> list[dict[str, object]]: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


class DarwinCalls:
    """The calls themselves. `load` opens a library by path (``ctypes.CDLL``), so that tests can give
    another.
    """

    def __init__(self, load: Callable[[str], Any] | None = None) -> None:
        self._load = load or (lambda path: ctypes.CDLL(path, use_errno=True))
        self._libraries: dict[str, Any] = {}
        self._host: int | None = None
        self._tokens: dict[str, int] = {}
        self._services: list[int] | None = None
        self._keys: dict[str, Any] = {}

    # --- libSystem ---

    def _system(self) -> Any:
        library = self._libraries.get(LIB_SYSTEM)
        if library is None:
            library = self._load(LIB_SYSTEM)
            size_t = ctypes.c_size_t
            _declare(
                library.sysctlbyname,
                ctypes.c_int,
                ctypes.c_char_p,
                ctypes.c_void_p,
                ctypes.POINTER(size_t),
                ctypes.c_void_p,
                size_t,
            )
            _declare(library.mach_host_self, ctypes.c_uint32)
            _declare(
                library.host_statistics64,
                ctypes.c_int,
                ctypes.c_uint32,
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.POINTER(ctypes.c_uint32),
            )
            _declare(library.proc_pid_rusage, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
            _declare(
                library.notify_register_check, ctypes.c_uint32, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int)
            )
            _declare(library.notify_get_state, ctypes.c_uint32, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
            _declare(library.notify_cancel, ctypes.c_uint32, ctypes.c_int)
            self._libraries[LIB_SYSTEM] = library
        return library

    def sysctl(self, name: str, room: int) -> bytes:
        """``sysctlbyname``: as many bytes as the kernel returned, at most `room`."""
        buffer = ctypes.create_string_buffer(room)
        length = ctypes.c_size_t(room)
        if self._system().sysctlbyname(name.encode(), buffer, ctypes.byref(length), None, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"sysctlbyname {name}: {os.strerror(code)}")
        return buffer.raw[: min(length.value, room)]

    def vm_info64(self) -> bytes:
        """``host_statistics64(HOST_VM_INFO64)``. The kernel serves programs outside the system a few
        fresh answers per second *together* and otherwise repeats the last one, so this is not to be asked
        more than once a second.
        """
        system = self._system()
        if self._host is None:
            self._host = system.mach_host_self()  # each call would add a send right
        buffer = ctypes.create_string_buffer(parse.VM_INFO64_COUNT * 4)
        count = ctypes.c_uint32(parse.VM_INFO64_COUNT)
        status = system.host_statistics64(self._host, _HOST_VM_INFO64, buffer, ctypes.byref(count))
        if status != 0:
            raise OSError(f"host_statistics64: kern_return {status}")
        return buffer.raw[: min(count.value, parse.VM_INFO64_COUNT) * 4]

    def kernel_page_bytes(self) -> int:
        """The kernel's page size: under Rosetta ``getpagesize`` gives another."""
        return int(ctypes.c_ulong.in_dll(self._system(), "vm_kernel_page_size").value)

    def rusage(self) -> bytes:
        """``proc_pid_rusage(RUSAGE_INFO_V4)`` of this process."""
        buffer = ctypes.create_string_buffer(512)  # later flavours are longer
        if self._system().proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V4, buffer) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"proc_pid_rusage: {os.strerror(code)}")
        return buffer.raw[: parse.RUSAGE_V4_BYTES]

    def notify_state(self, key: str) -> int:
        """State of a libnotify key: one synchronous message to notifyd. A key nobody posted reads 0."""
        system = self._system()
        token = self._tokens.get(key)
        if token is None:
            fresh = ctypes.c_int(-1)
            status = system.notify_register_check(key.encode(), ctypes.byref(fresh))
            if status != 0:
                raise OSError(f"notify_register_check {key}: status {status}")
            token = self._tokens[key] = fresh.value
        state = ctypes.c_uint64(0)
        status = system.notify_get_state(token, ctypes.byref(state))
        if status != 0:
            self._tokens.pop(key, None)
            system.notify_cancel(token)
            raise OSError(f"notify_get_state {key}: status {status}")
        return int(state.value)

    # --- IOKit ---

    def _frameworks(self) -> tuple[Any, Any]:
        kit, foundation = self._libraries.get(IO_KIT), self._libraries.get(CORE_FOUNDATION)
        if kit is None or foundation is None:
            kit, foundation = self._load(IO_KIT), self._load(CORE_FOUNDATION)
            void_p, uint32 = ctypes.c_void_p, ctypes.c_uint32
            _declare(kit.IOServiceMatching, void_p, ctypes.c_char_p)
            _declare(kit.IOServiceGetMatchingServices, ctypes.c_int, uint32, void_p, ctypes.POINTER(uint32))
            _declare(kit.IOIteratorNext, uint32, uint32)
            _declare(kit.IORegistryEntryCreateCFProperty, void_p, uint32, void_p, void_p, uint32)
            _declare(kit.IOObjectRelease, ctypes.c_int, uint32)
            _declare(foundation.CFStringCreateWithCString, void_p, void_p, ctypes.c_char_p, uint32)
            _declare(foundation.CFDictionaryGetValue, void_p, void_p, void_p)
            _declare(foundation.CFGetTypeID, ctypes.c_ulong, void_p)
            _declare(foundation.CFDictionaryGetTypeID, ctypes.c_ulong)
            _declare(foundation.CFNumberGetTypeID, ctypes.c_ulong)
            _declare(foundation.CFNumberGetValue, ctypes.c_ubyte, void_p, ctypes.c_long, void_p)
            _declare(foundation.CFRelease, None, void_p)
            self._libraries[IO_KIT], self._libraries[CORE_FOUNDATION] = kit, foundation
        return kit, foundation

    def _accelerators(self) -> list[int]:
        if self._services:
            return self._services
        kit, _ = self._frameworks()
        services: list[int] = []
        # The base class matches every chip by inheritance; the second name is for a system where it does not.
        for name in (b"IOAccelerator", b"AGXAccelerator"):
            matching = kit.IOServiceMatching(name)
            iterator = ctypes.c_uint32(0)
            if not matching:
                continue
            # consumes `matching`, whatever it returns; port 0 is the default
            if kit.IOServiceGetMatchingServices(0, matching, ctypes.byref(iterator)) != 0:
                continue
            while service := kit.IOIteratorNext(iterator.value):
                services.append(service)
            kit.IOObjectRelease(iterator.value)
            if services:
                break
        if not services:
            raise OSError("no IOAccelerator service")
        self._services = services
        return services

    def _key(self, text: str) -> Any:
        key = self._keys.get(text)
        if key is None:
            key = self._frameworks()[1].CFStringCreateWithCString(None, text.encode(), _CF_UTF8)
            if not key:
                raise OSError(f"CFStringCreateWithCString {text!r}")
            self._keys[text] = key
        return key

    def gpu_nodes(self) -> list[dict[str, object]]:
        """``PerformanceStatistics`` of every accelerator: one property, never the whole node of some 45
        KB.
        """
        services = self._accelerators()
        kit, foundation = self._frameworks()
        wanted = self._key("PerformanceStatistics")
        nodes: list[dict[str, object]] = []
        for service in services:
            statistics = kit.IORegistryEntryCreateCFProperty(service, wanted, None, 0)
            if not statistics:
                continue
            try:
                if foundation.CFGetTypeID(statistics) == foundation.CFDictionaryGetTypeID():
                    nodes.append(self._numbers(foundation, statistics))
            finally:
                foundation.CFRelease(statistics)
        return nodes

    def _numbers(self, foundation: Any, dictionary: Any) -> dict[str, object]:
        found: dict[str, object] = {}
        for text in _GPU_KEYS:
            number = foundation.CFDictionaryGetValue(dictionary, self._key(text))
            if not number or foundation.CFGetTypeID(number) != foundation.CFNumberGetTypeID():
                continue
            value = ctypes.c_int64(0)
            if foundation.CFNumberGetValue(number, _CF_NUMBER_SINT64, ctypes.byref(value)):
                found[text] = int(value.value)
        return found

    # --- letting go ---

    def forget(self) -> None:
        """After a fork: ports, tokens and services are the parent's; drop them unreleased and open anew
        on use.
        """
        self._host = None
        self._tokens.clear()
        self._services = None

    def close(self) -> None:
        """Release everything held. Calling again opens anew."""
        for token in self._tokens.values():
            self._system().notify_cancel(token)
        self._tokens.clear()
        if self._services:
            kit, _ = self._frameworks()
            for service in self._services:
                kit.IOObjectRelease(service)
        self._services = None
        if self._keys:
            _, foundation = self._frameworks()
            for key in self._keys.values():
                foundation.CFRelease(key)
            self._keys.clear()


def _declare(function: Any, result: Any, *arguments: Any) -> None:
    function.restype = result
    function.argtypes = list(arguments)


def run_command(arguments: Sequence[str], timeout_seconds: float = COMMAND_TIMEOUT_SECONDS) -> bytes:
    """Standard output of a command given by absolute path: C locale, no input, no shell, killed at the
    timeout.

    Raises OSError when it cannot start, fails or does not end; one that cannot be killed is left behind,
    not waited for.
    """
    if not arguments[0].startswith("/"):
        raise ValueError(f"{arguments[0]!r} is not an absolute path")
    child = subprocess.Popen(
        list(arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"LC_ALL": "C", "LANG": "C", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )
    try:
        output, _ = child.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=0.5)
        raise OSError(f"{arguments[0]} did not end within {timeout_seconds:g} s") from None
    if child.returncode != 0:
        raise OSError(f"{arguments[0]} ended with status {child.returncode}")
    return output


class _DarwinReader:
    """Probe functions over `calls` and `run`: every value goes through a parser that may refuse it."""

    def __init__(
        self, calls: Calls, run: Callable[[Sequence[str]], bytes], clock: Callable[[], float]
    ) -> None:
        self._calls = calls
        self._run = run
        self._clock = clock
        self._memory_bytes: int | None = None
        self._pages_before: tuple[float, parse.PageCounts] | None = None

    # --- in process ---

    def pressure(self) -> Readings:
        source = "sysctlbyname kern.memorystatus_vm_pressure_level"
        decoded = parse.decode_pressure_level(self._calls.sysctl("kern.memorystatus_vm_pressure_level", 8))
        return _level_readings(decoded, source)

    def share(self) -> Readings:
        source = "sysctlbyname kern.memorystatus_level"
        value = parse.decode_integer(self._calls.sysctl("kern.memorystatus_level", 8))
        if not isinstance(value, Unknown) and not 0 <= value <= 100:
            value = Unknown(f"{value} is no percentage")
        return {"pressure_share_percent": _reading(value, source)}

    def swap(self) -> Readings:
        usage = parse.decode_swap_usage(self._calls.sysctl("vm.swapusage", 32))
        return _swap_readings(usage, "sysctlbyname vm.swapusage")

    def process(self) -> Readings:
        source = "proc_pid_rusage"
        decoded = parse.decode_rusage(self._calls.rusage())
        footprint, resident = (decoded, decoded) if isinstance(decoded, Unknown) else decoded
        return {
            "process_footprint_bytes": _reading(footprint, f"{source} ri_phys_footprint"),
            "process_resident_bytes": _reading(resident, f"{source} ri_resident_size"),
        }

    def memory_total(self) -> Readings:
        source = "sysctlbyname hw.memsize"
        value = parse.decode_integer(self._calls.sysctl("hw.memsize", 8))
        if not isinstance(value, Unknown) and not 1 << 28 <= value <= MAX_BYTES:
            value = Unknown(f"a memory of {value} bytes")
        if not isinstance(value, Unknown):
            self._memory_bytes = value
        return {"memory_total_bytes": _reading(value, source)}

    def pages(self) -> Readings:
        counts = parse.decode_vm_info64(
            self._calls.vm_info64(), self._calls.kernel_page_bytes(), self._memory_bytes
        )
        return self._page_readings(counts, "host_statistics64")

    def _page_readings(self, counts: parse.PageCounts | Unknown, source: str) -> Readings:
        if isinstance(counts, Unknown):
            return {name: Reading.unknown(counts.reason, source) for name in PAGE_FIELDS}
        missing = Unknown("not printed")
        found = {
            "memory_free_bytes": counts.free,
            "memory_active_bytes": counts.active,
            "memory_inactive_bytes": counts.inactive,
            "memory_wired_bytes": counts.wired,
            "memory_compressed_bytes": counts.compressed,
            "memory_purgeable_bytes": counts.purgeable,
        }
        readings = {
            name: _reading(missing if value is None else value, source) for name, value in found.items()
        }
        now = self._clock()
        before, self._pages_before = self._pages_before, (now, counts)
        for name, attribute in (
            ("swap_out_bytes_per_second", "swapouts_total"),
            ("swap_in_bytes_per_second", "swapins_total"),
            ("compression_bytes_per_second", "compressions_total"),
        ):
            readings[name] = _rate(name, attribute, before, (now, counts), source)
        return readings

    def thermal(self) -> Readings:
        source = f"notify_get_state {THERMAL_KEY}"
        return _thermal_readings(self._calls.notify_state(THERMAL_KEY), source)

    def power(self) -> Readings:
        source = f"notify_get_state {POWER_KEY}"
        state = parse.power_state(self._calls.notify_state(POWER_KEY))
        if state is None:
            # No battery published. A key that nobody posted reads the same, so the public interface decides.
            return _power_from_psutil()
        return _power_readings(state, source)

    def low_power(self) -> Readings:
        state = self._calls.notify_state(LOW_POWER_KEY)
        return {"low_power_mode": Reading(state != 0, f"notify_get_state {LOW_POWER_KEY}")}

    def gpu(self) -> Readings:
        return _gpu_readings(parse.gpu_statistics(self._calls.gpu_nodes()), "IOKit PerformanceStatistics")

    def chip(self) -> Readings:
        source = "sysctlbyname machdep.cpu.brand_string"
        return {
            "chip": _reading(parse.decode_string(self._calls.sysctl("machdep.cpu.brand_string", 256)), source)
        }

    def model(self) -> Readings:
        text = parse.decode_string(self._calls.sysctl("hw.model", 256))
        return {"machine_model": _reading(text, "sysctlbyname hw.model")}

    def cores(self) -> Readings:
        source = "sysctlbyname hw.perflevel0.physicalcpu"
        value = parse.decode_integer(self._calls.sysctl("hw.perflevel0.physicalcpu", 8))
        if not isinstance(value, Unknown) and not 0 < value <= 1024:
            value = Unknown(f"{value} cores")
        return {"performance_cores": _reading(value, source)}

    def wired_limit(self) -> Readings:
        source = "sysctlbyname iogpu.wired_limit_mb"
        value = parse.decode_integer(self._calls.sysctl("iogpu.wired_limit_mb", 8))
        return {"wired_limit_bytes": _wired_limit(value, source)}

    # --- commands ---

    def _text(self, *arguments: str) -> str:
        return self._run(arguments).decode("utf-8", "replace")

    def sysctl_command(self) -> Readings:
        names = {
            "pressure": "kern.memorystatus_vm_pressure_level",
            "share": "kern.memorystatus_level",
            "swap": "vm.swapusage",
            "total": "hw.memsize",
            "wired": "iogpu.wired_limit_mb",
            "chip": "machdep.cpu.brand_string",
            "model": "hw.model",
        }
        source = "/usr/sbin/sysctl"
        printed = parse.parse_sysctl_text(self._text("/usr/sbin/sysctl", "-i", *names.values()))

        def number(key: str, floor: int, ceiling: int) -> int | Unknown:
            text = printed.get(names[key], "")
            value = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None
            if value is None or not floor <= value <= ceiling:
                return Unknown(f"{names[key]} not printed as a number in range")
            return value

        level = number("pressure", 0, 1 << 31)
        decoded: tuple[int, PressureLevel] | Unknown
        if isinstance(level, Unknown):
            decoded = level
        else:
            mapped = parse.pressure_level(level)
            decoded = mapped if isinstance(mapped, Unknown) else (level, mapped)
        readings = _level_readings(decoded, source)
        readings |= _swap_readings(parse.parse_swap_text(printed.get(names["swap"], "")), source)
        readings["pressure_share_percent"] = _reading(number("share", 0, 100), source)
        readings["memory_total_bytes"] = _reading(number("total", 1 << 28, MAX_BYTES), source)
        readings["wired_limit_bytes"] = _wired_limit(number("wired", 0, 1 << 31), source)
        for field, key in (("chip", "chip"), ("machine_model", "model")):
            text = printed.get(names[key], "").strip()
            readings[field] = _reading(
                text if text.isprintable() and text else Unknown("not printed"), source
            )
        return readings

    def vm_stat_command(self) -> Readings:
        return self._page_readings(parse.parse_vm_stat(self._text("/usr/bin/vm_stat")), "/usr/bin/vm_stat")

    def notifyutil_command(self) -> Readings:
        source = "/usr/bin/notifyutil"
        value = parse.parse_notifyutil(self._text("/usr/bin/notifyutil", "-g", THERMAL_KEY), THERMAL_KEY)
        if isinstance(value, Unknown):
            return {name: Reading.unknown(value.reason, source) for name in THERMAL_FIELDS}
        return _thermal_readings(value, source)

    def ioreg_command(self) -> Readings:
        output = self._run(("/usr/sbin/ioreg", "-a", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"))
        return _gpu_readings(parse.parse_ioreg_plist(output), "/usr/sbin/ioreg")

    def battery_command(self) -> Readings:
        state = parse.parse_pmset_batt(self._text("/usr/bin/pmset", "-g", "batt"))
        return _power_readings(state, "/usr/bin/pmset -g batt")

    def low_power_command(self) -> Readings:
        value = parse.parse_pmset_low_power(self._text("/usr/bin/pmset", "-g"))
        return {"low_power_mode": _reading(value, "/usr/bin/pmset -g")}


def _reading(value: Any, source: str) -> Reading:
    return Reading.unknown(value.reason, source) if isinstance(value, Unknown) else Reading(value, source)


def _level_readings(decoded: tuple[int, PressureLevel] | Unknown, source: str) -> Readings:
    raw, level = (decoded, decoded) if isinstance(decoded, Unknown) else decoded
    return {"pressure_raw": _reading(raw, source), "pressure_level": _reading(level, source)}


def _swap_readings(usage: parse.SwapUsage | Unknown, source: str) -> Readings:
    used, total = (usage, usage) if isinstance(usage, Unknown) else (usage.used, usage.total)
    return {"swap_used_bytes": _reading(used, source), "swap_total_bytes": _reading(total, source)}


def _thermal_readings(raw: int, source: str) -> Readings:
    state = parse.thermal_state(raw)
    if isinstance(state, Unknown):
        return {name: Reading.unknown(state.reason, source) for name in THERMAL_FIELDS}
    return {"thermal_state": Reading(state, source), "thermal_raw": Reading(raw, source)}


def _power_readings(state: parse.PowerState | Unknown, source: str) -> Readings:
    if isinstance(state, Unknown):
        return {name: Reading.unknown(state.reason, source) for name in POWER_FIELDS}
    percent = state.battery_percent
    return {
        "power_source": Reading(state.source, source),
        "battery_percent": _reading(Unknown("not given") if percent is None else percent, source),
    }


def _power_from_psutil() -> Readings:
    import psutil

    source = "psutil.sensors_battery"
    battery = psutil.sensors_battery()
    if battery is None:
        return {
            "power_source": Reading(PowerSource.AC, f"{source}: there is no battery"),
            "battery_percent": Reading.unknown("there is no battery", source),
        }
    plugged = battery.power_plugged
    return {
        "power_source": Reading.unknown("the battery does not say", source)
        if plugged is None
        else Reading(PowerSource.AC if plugged else PowerSource.BATTERY, source),
        "battery_percent": Reading(round(battery.percent), source)
        if 0 <= battery.percent <= 100
        else Reading.unknown(f"a charge of {battery.percent} %", source),
    }


def _gpu_readings(gpu: parse.GpuStatistics | Unknown, source: str) -> Readings:
    if isinstance(gpu, Unknown):
        return {name: Reading.unknown(gpu.reason, source) for name in GPU_FIELDS}
    source = f"{source} (clamped to 100)" if gpu.clamped else source
    values = (
        gpu.utilization_percent,
        gpu.renderer_percent,
        gpu.in_use_bytes,
        gpu.allocated_bytes,
        gpu.recoveries_total,
    )
    return {
        name: _reading(Unknown("the driver does not publish it") if value is None else value, source)
        for name, value in zip(GPU_FIELDS, values, strict=True)
    }


def _wired_limit(mib: int | Unknown, source: str) -> Reading:
    if isinstance(mib, Unknown):
        return Reading.unknown(mib.reason, source)
    if mib == 0:
        return Reading.unknown("not set: the system's default applies", source, settled=True)
    if not 0 < mib << 20 <= MAX_BYTES:
        return Reading.unknown(f"a limit of {mib} MiB", source)
    return Reading(mib << 20, source)


def _rate(
    name: str,
    attribute: str,
    before: tuple[float, parse.PageCounts] | None,
    after: tuple[float, parse.PageCounts],
    source: str,
) -> Reading:
    new = getattr(after[1], attribute)
    if new is None:
        return Reading.unknown("not printed", source)
    old = getattr(before[1], attribute) if before else None
    if before is None or old is None or after[0] <= before[0]:
        return Reading.unknown(NEEDS_TWO_READINGS, source)
    if new < old:
        return Reading.unknown("the counter fell", source)
    return Reading((new - old) / (after[0] - before[0]), source)


THERMAL_FIELDS = ("thermal_state", "thermal_raw")
POWER_FIELDS = ("power_source", "battery_percent")
LEVEL_FIELDS = ("pressure_level", "pressure_raw")
SWAP_FIELDS = ("swap_used_bytes", "swap_total_bytes")
GPU_FIELDS = (
    "gpu_utilization_percent",
    "gpu_renderer_percent",
    "gpu_in_use_bytes",
    "gpu_allocated_bytes",
    "gpu_recoveries_total",
)
PAGE_FIELDS = (
    "memory_free_bytes",
    "memory_active_bytes",
    "memory_inactive_bytes",
    "memory_wired_bytes",
    "memory_compressed_bytes",
    "memory_purgeable_bytes",
    "swap_out_bytes_per_second",
    "swap_in_bytes_per_second",
    "compression_bytes_per_second",
)
_NOT_HERE = {
    "memory_limit_bytes": "Linux only: control groups",
    "memory_available_bytes": "not read: free plus inactive says nothing of the compressor",
    "stall_some_percent": "Linux only: PSI",
    "stall_full_percent": "Linux only: PSI",
}


def darwin_readers(
    calls: Calls | None = None,
    *,
    slow_calls: Calls | None = None,
    run: Callable[[Sequence[str]], bytes] = run_command,
    clock: Callable[[], float] = time.monotonic,
    disk_directory: Path | None = None,
) -> ReaderSet:
    """Every probe for macOS. `slow_calls` are those of the slow thread, which has handles of its own."""
    fast_calls = calls or DarwinCalls()
    other_calls = slow_calls or (DarwinCalls() if calls is None else calls)
    fast = _DarwinReader(fast_calls, run, clock)
    slow = _DarwinReader(other_calls, run, clock)
    absent = {name: Reading.unknown(reason, "macOS") for name, reason in _NOT_HERE.items()}
    once = 3600.0
    command = _FALLBACK_PERIOD_SECONDS
    sysctl_fields = (
        *LEVEL_FIELDS,
        *SWAP_FIELDS,
        "pressure_share_percent",
        "memory_total_bytes",
        "wired_limit_bytes",
        "chip",
        "machine_model",
    )
    probes = (
        Probe("memory size", ("memory_total_bytes",), fast.memory_total, Tier.FAST, once),
        Probe("pressure level", LEVEL_FIELDS, fast.pressure),
        Probe("pressure share", ("pressure_share_percent",), fast.share),
        Probe("swap", SWAP_FIELDS, fast.swap),
        Probe("process", ("process_footprint_bytes", "process_resident_bytes"), fast.process),
        Probe("pages", PAGE_FIELDS, fast.pages, Tier.FAST, 1.0),
        *mlx_probes(),
        # Messages to notifyd and IOKit wait on others, so they are not for the fast thread.
        Probe("thermal", THERMAL_FIELDS, slow.thermal, Tier.SLOW, 1.0),
        Probe("gpu", GPU_FIELDS, slow.gpu, Tier.SLOW, 1.0),
        Probe("power", POWER_FIELDS, slow.power, Tier.SLOW, 5.0),
        Probe("low power", ("low_power_mode",), slow.low_power, Tier.SLOW, 5.0),
        Probe("wired limit", ("wired_limit_bytes",), slow.wired_limit, Tier.SLOW, 10.0),
        Probe("chip", ("chip",), slow.chip, Tier.SLOW, once),
        Probe("model", ("machine_model",), slow.model, Tier.SLOW, once),
        Probe("cores", ("performance_cores",), slow.cores, Tier.SLOW, once),
        disk_probe(disk_directory),
        Probe("sysctl command", sysctl_fields, slow.sysctl_command, Tier.SLOW, command, fallback=True),
        Probe("vm_stat command", PAGE_FIELDS, slow.vm_stat_command, Tier.SLOW, command, fallback=True),
        Probe(
            "notifyutil command", THERMAL_FIELDS, slow.notifyutil_command, Tier.SLOW, command, fallback=True
        ),
        Probe("ioreg command", GPU_FIELDS, slow.ioreg_command, Tier.SLOW, command, fallback=True),
        Probe("pmset -g batt command", POWER_FIELDS, slow.battery_command, Tier.SLOW, command, fallback=True),
        Probe(
            "pmset -g command", ("low_power_mode",), slow.low_power_command, Tier.SLOW, command, fallback=True
        ),
        Probe("absent", tuple(_NOT_HERE), lambda: dict(absent), Tier.SLOW, once),
    )

    def forget() -> None:
        for each in {id(c): c for c in (fast_calls, other_calls)}.values():
            each.forget()

    def close() -> None:
        for each in {id(c): c for c in (fast_calls, other_calls)}.values():
            each.close()

    return ReaderSet("darwin", probes, forget=forget, close=close)
