"""Reads a Linux machine from ``/proc`` and ``/sys`` below an injectable root.

No level of memory pressure exists on Linux: it is derived by `pressure.LinuxRule`. What Linux does not
have (wired, purgeable, a GPU working set) stays unknown with a reason.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lumina_cache.telemetry.common import disk_probe, mlx_probes
from lumina_cache.telemetry.parse import Unknown
from lumina_cache.telemetry.parse_linux import (
    CgroupMembership,
    parse_cgroup_limit,
    parse_cgroup_membership,
    parse_counter,
    parse_kib_table,
    parse_psi,
    parse_table,
)
from lumina_cache.telemetry.probes import NEEDS_TWO_READINGS, Probe, ReaderSet, Readings, Tier
from lumina_cache.telemetry.snapshot import PowerSource, Reading, ThermalState

__all__ = ["LinuxReader", "linux_readers"]

_MEMBERSHIP_SECONDS = 10.0
_NOT_HERE = {
    "memory_wired_bytes": "Linux has no count of wired pages",
    "memory_purgeable_bytes": "Linux has no purgeable pages",
    "pressure_share_percent": "macOS only",
    "pressure_ratio": "macOS only",
    "compression_bytes_per_second": "macOS only",
    "gpu_utilization_percent": "no reader for it on Linux",
    "gpu_renderer_percent": "no reader for it on Linux",
    "gpu_in_use_bytes": "no reader for it on Linux",
    "gpu_allocated_bytes": "no reader for it on Linux",
    "gpu_recoveries_total": "no reader for it on Linux",
    "wired_limit_bytes": "macOS only",
    "performance_cores": "no reader for it on Linux",
}


class LinuxReader:
    """Files below `root`, kept open between reads; a file that vanished is opened anew."""

    def __init__(self, root: Path | str = "/") -> None:
        self._root = Path(root)
        self._open: dict[str, int] = {}
        self._limit_files: tuple[tuple[str, bool], ...] | None = None
        self._limit_files_until = 0.0
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._swap_before: tuple[float, int, int] | None = None

    # --- files ---

    def read(self, path: str) -> str:
        """Text of ``root/path``. Raises OSError."""
        descriptor = self._open.get(path)
        if descriptor is not None:
            try:
                return self._pread(descriptor)
            except OSError:
                self._drop(path)
        descriptor = os.open(self._root / path, os.O_RDONLY | os.O_CLOEXEC)
        self._open[path] = descriptor
        return self._pread(descriptor)

    @staticmethod
    def _pread(descriptor: int) -> str:
        chunks, at = [], 0
        while chunk := os.pread(descriptor, 1 << 16, at):
            chunks.append(chunk)
            at += len(chunk)
        return b"".join(chunks).decode("ascii", "replace")

    def _drop(self, path: str) -> None:
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Close every file. Reading afterwards opens them again. Also right after a fork: the descriptors are
        copies, and ``/proc/self`` of the parent is not that of the child."""
        for path in list(self._open):
            self._drop(path)
        self._limit_files = None
        self._swap_before = None

    # --- control groups ---

    def cgroup_directories(self, membership: CgroupMembership) -> list[tuple[str, bool]]:
        """Directories from this process's group up to the top, below the root; True marks v1."""
        found: list[tuple[str, bool]] = []
        for path, bases, v1 in (
            (membership.v1_memory, ("sys/fs/cgroup/memory",), True),
            (membership.v2, ("sys/fs/cgroup", "sys/fs/cgroup/unified"), False),
        ):
            if path is None:
                continue
            parts = [part for part in path.split("/") if part not in ("", ".", "..")]
            for base in bases:
                # In a container the path may be the host's, of which only the top is mounted.
                found += [("/".join([base, *parts[:depth]]), v1) for depth in range(len(parts), -1, -1)]
        return found

    def _find_limit_files(self) -> tuple[tuple[str, bool], ...]:
        membership = parse_cgroup_membership(self.read("proc/self/cgroup"))
        if isinstance(membership, Unknown):
            raise ValueError(f"/proc/self/cgroup: {membership.reason}")
        files = []
        for directory, v1 in self.cgroup_directories(membership):
            name = "memory.limit_in_bytes" if v1 else "memory.max"
            if (self._root / directory / name).exists():
                files.append((directory, v1))
        return tuple(files)

    def cgroup_room(self) -> tuple[int | None, int | None, str]:
        """(tightest limit, least room left below any limit, where) over this process's group and its parents.

        Room is limit minus usage, where file pages that can be dropped at once (``inactive_file``) do not
        count as used. None, None: no limit anywhere. Raises OSError or ValueError when it cannot be read.
        """
        now = time.monotonic()
        if self._limit_files is None or now > self._limit_files_until:
            self._limit_files = self._find_limit_files()
            self._limit_files_until = now + _MEMBERSHIP_SECONDS  # a process can be moved to another group
        limit: int | None = None
        room: int | None = None
        where = "no memory control group"
        for directory, v1 in self._limit_files:
            own = parse_cgroup_limit(
                self.read(f"{directory}/" + ("memory.limit_in_bytes" if v1 else "memory.max"))
            )
            if isinstance(own, Unknown):
                raise ValueError(f"/{directory}: {own.reason}")
            if limit is None:
                where = f"/{directory}"
            if own is None:
                continue
            used = parse_counter(
                self.read(f"{directory}/" + ("memory.usage_in_bytes" if v1 else "memory.current"))
            )
            if isinstance(used, Unknown):
                raise ValueError(f"/{directory}: {used.reason}")
            droppable = parse_table(self.read(f"{directory}/memory.stat")).get(
                "total_inactive_file" if v1 else "inactive_file", 0
            )
            left = max(0, own - max(0, used - droppable))
            room = left if room is None else min(room, left)
            if limit is None or own < limit:
                limit, where = own, f"/{directory}"
        return limit, room, where

    # --- probes ---

    def memory(self) -> Readings:
        table = parse_kib_table(self.read("proc/meminfo"))
        source = "/proc/meminfo"
        found: Readings = {}
        for field, name in (
            ("memory_total_bytes", "MemTotal"),
            ("memory_free_bytes", "MemFree"),
            ("memory_active_bytes", "Active"),
            ("memory_inactive_bytes", "Inactive"),
            ("memory_available_bytes", "MemAvailable"),
            ("memory_compressed_bytes", "Zswap"),
            ("swap_total_bytes", "SwapTotal"),
        ):
            found[field] = _looked_up(table, name, source)
        total, free = table.get("SwapTotal"), table.get("SwapFree")
        if total is None or free is None or free > total:
            found["swap_used_bytes"] = Reading.unknown("SwapTotal and SwapFree are not both there", source)
        else:
            found["swap_used_bytes"] = Reading(total - free, source)
        self._apply_cgroup(found)
        return found

    def _apply_cgroup(self, found: Readings) -> None:
        try:
            limit, room, where = self.cgroup_room()
        except (OSError, ValueError) as error:
            self._limit_files = None
            found["memory_limit_bytes"] = Reading.unknown(f"cannot be read: {error}", "cgroup")
            return
        if limit is None:
            found["memory_limit_bytes"] = Reading.unknown(f"no limit is set ({where})", "cgroup")
            return
        found["memory_limit_bytes"] = Reading(limit, f"cgroup {where}")
        available = found["memory_available_bytes"].value
        if room is not None and (not isinstance(available, int) or room < available):
            found["memory_available_bytes"] = Reading(room, f"cgroup {where}: limit minus what is in use")

    def stalls(self) -> Readings:
        """PSI of the whole system. A group's own file is preferred by `group_stalls`."""
        return self._psi("proc/pressure/memory")

    def group_stalls(self) -> Readings:
        """PSI of this process's own v2 group: what a limited container feels, which the system may not."""
        membership = parse_cgroup_membership(self.read("proc/self/cgroup"))
        if isinstance(membership, Unknown) or membership.v2 in (None, "/"):
            raise FileNotFoundError("this process is in no v2 group of its own")
        assert membership.v2 is not None
        for base in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
            path = f"{base}{membership.v2}/memory.pressure"
            if (self._root / path).exists():
                return self._psi(path)
        raise FileNotFoundError("this process's v2 group has no memory.pressure")

    def _psi(self, path: str) -> Readings:
        stall = parse_psi(self.read(path))
        fields = ("stall_some_percent", "stall_full_percent", "pressure_raw")
        if isinstance(stall, Unknown):
            return {name: Reading.unknown(stall.reason, f"/{path}") for name in fields}
        raw = f"some={stall.some_percent:.2f} full={stall.full_percent:.2f}"
        values: tuple[float | str, ...] = (stall.some_percent, stall.full_percent, raw)
        return {name: Reading(value, f"/{path}") for name, value in zip(fields, values, strict=True)}

    def swap_rates(self, now: Callable[[], float]) -> Readings:
        table = parse_table(self.read("proc/vmstat"))
        source = "/proc/vmstat"
        fields = ("swap_out_bytes_per_second", "swap_in_bytes_per_second")
        out, into, at = table.get("pswpout"), table.get("pswpin"), now()
        if out is None or into is None:
            return {name: Reading.unknown("no pswpin and pswpout", source) for name in fields}
        before, self._swap_before = self._swap_before, (at, out, into)
        if before is None or at <= before[0]:
            return {name: Reading.unknown(NEEDS_TWO_READINGS, source) for name in fields}
        scale = self._page_bytes / (at - before[0])
        deltas = (out - before[1], into - before[2])
        return {
            name: Reading(delta * scale, source)
            if delta >= 0
            else Reading.unknown("the counter fell", source)
            for name, delta in zip(fields, deltas, strict=True)
        }

    def process(self) -> Readings:
        table = parse_kib_table(self.read("proc/self/status"))
        source = "/proc/self/status"
        resident, swapped = table.get("VmRSS"), table.get("VmSwap")
        footprint = (
            Reading.unknown("VmRSS and VmSwap are not both there", source)
            if resident is None or swapped is None
            else Reading(resident + swapped, f"{source} VmRSS + VmSwap")
        )
        return {
            "process_resident_bytes": _looked_up(table, "VmRSS", source),
            "process_footprint_bytes": footprint,
        }

    def chip(self) -> Readings:
        for line in self.read("proc/cpuinfo").split("\n"):
            name, colon, value = line.partition(":")
            if colon and name.strip() in ("model name", "Model") and value.strip():
                return {"chip": Reading(value.strip(), "/proc/cpuinfo")}
        return {"chip": Reading.unknown("no model name", "/proc/cpuinfo")}

    def model(self) -> Readings:
        source = "/sys/class/dmi/id/product_name"
        text = self.read("sys/class/dmi/id/product_name").strip()
        reading = Reading(text, source) if text else Reading.unknown("it is empty", source)
        return {"machine_model": reading}

    def power(self) -> Readings:
        """Mains online, else a battery that is there and discharging; nothing listed is unknown, not AC."""
        base = self._root / "sys/class/power_supply"
        source = "/sys/class/power_supply"
        mains: list[bool] = []
        percents: list[int] = []
        discharging = False
        for entry in sorted(base.iterdir()):
            kind = _text(entry / "type")
            if kind in ("Mains", "USB") and (online := _text(entry / "online")) in ("0", "1"):
                mains.append(online == "1")
            if kind == "Battery" and _text(entry / "scope") != "Device":
                capacity = _text(entry / "capacity") or ""
                if capacity.isascii() and capacity.isdigit() and int(capacity) <= 100:
                    percents.append(int(capacity))
                discharging |= _text(entry / "status") == "Discharging"
        reading = Reading.unknown("no power supply says whether it is in use", source)
        if any(mains) and not discharging:
            reading = Reading(PowerSource.AC, source)
        elif discharging:
            reading = Reading(PowerSource.BATTERY, source)
        return {
            "power_source": reading,
            "battery_percent": Reading(percents[0], source)
            if percents
            else Reading.unknown("no battery", source),
        }

    def low_power(self) -> Readings:
        source = "/sys/firmware/acpi/platform_profile"
        profile = self.read("sys/firmware/acpi/platform_profile").strip()
        if not profile.replace("-", "").isalpha():
            return {"low_power_mode": Reading.unknown("not the name of a profile", source)}
        return {"low_power_mode": Reading(profile in ("low-power", "quiet"), source)}


def _text(path: Path) -> str | None:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return None


def _looked_up(table: dict[str, int], name: str, source: str) -> Reading:
    value = table.get(name)
    return (
        Reading(value, f"{source} {name}")
        if value is not None
        else Reading.unknown(f"no well-formed {name}", source)
    )


def _temperatures() -> Readings:
    """The hottest sensor; a state only from sensors that publish their own limits."""
    import psutil

    source = "psutil.sensors_temperatures"
    sensors = [entry for group in psutil.sensors_temperatures().values() for entry in group]
    if not sensors:
        nothing = Reading.unknown("no temperature sensor", source)
        return {"thermal_state": nothing, "thermal_raw": nothing}
    raw = Reading(float(max(entry.current for entry in sensors)), source)
    state: ThermalState | None = None
    for entry in sensors:
        if entry.critical and entry.current >= entry.critical:
            state = ThermalState.CRITICAL
        elif entry.high and entry.current >= entry.high and state is not ThermalState.CRITICAL:
            state = ThermalState.SERIOUS
        elif (entry.high or entry.critical) and state is None:
            state = ThermalState.NOMINAL
    reading = Reading(state, source) if state else Reading.unknown("no sensor publishes a limit", source)
    return {"thermal_state": reading, "thermal_raw": raw}


def linux_readers(
    root: Path | str = "/",
    *,
    disk_directory: Path | None = None,
    clock: Callable[[], float] | None = None,
) -> ReaderSet:
    """Every probe for Linux. Sensors outside `root` (temperatures) are read only when `root` is ``/``."""
    now = clock or time.monotonic
    reader = LinuxReader(root)
    slow_reader = LinuxReader(root)  # each thread has its own descriptors
    absent = {name: Reading.unknown(reason, "linux") for name, reason in _NOT_HERE.items()}
    psi_fields = ("stall_some_percent", "stall_full_percent", "pressure_raw")
    memory_fields = (
        "memory_total_bytes",
        "memory_limit_bytes",
        "memory_available_bytes",
        "memory_free_bytes",
        "memory_active_bytes",
        "memory_inactive_bytes",
        "memory_compressed_bytes",
        "swap_used_bytes",
        "swap_total_bytes",
    )
    probes = [
        Probe("group stalls", psi_fields, reader.group_stalls),
        Probe("system stalls", psi_fields, reader.stalls, fallback=True),
        Probe("memory", memory_fields, reader.memory),
        Probe("process", ("process_footprint_bytes", "process_resident_bytes"), reader.process),
        Probe(
            "swap rates",
            ("swap_out_bytes_per_second", "swap_in_bytes_per_second"),
            lambda: reader.swap_rates(now),
            period_seconds=1.0,
        ),
        *mlx_probes(),
        Probe("chip", ("chip",), slow_reader.chip, Tier.SLOW, 3600.0),
        Probe("model", ("machine_model",), slow_reader.model, Tier.SLOW, 3600.0),
        Probe("power", ("power_source", "battery_percent"), slow_reader.power, Tier.SLOW, 5.0),
        Probe("low power", ("low_power_mode",), slow_reader.low_power, Tier.SLOW, 5.0),
        disk_probe(disk_directory),
        Probe("absent", tuple(_NOT_HERE), lambda: dict(absent), Tier.SLOW, 3600.0),
    ]
    if Path(root) == Path("/") and sys.platform == "linux":
        probes.append(Probe("temperatures", ("thermal_state", "thermal_raw"), _temperatures, Tier.SLOW, 2.0))

    def close() -> None:
        reader.close()
        slow_reader.close()

    return ReaderSet("linux", tuple(probes), forget=close, close=close)
