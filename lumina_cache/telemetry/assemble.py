"""From readings to a snapshot: what follows from several readings together, and the readers of this
platform.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lumina_cache.telemetry import pressure
from lumina_cache.telemetry.probes import ProbeRunner, ReaderSet, Readings, Tier, merge
from lumina_cache.telemetry.snapshot import PressureLevel, Reading, Snapshot

__all__ = ["SnapshotReader", "derive", "platform_readers", "read_once"]


def platform_readers(disk_directory: Path | None = None) -> ReaderSet:
    """The readers for the system this runs on; elsewhere than macOS and Linux, only MLX and the disk."""
    if sys.platform == "darwin":
        from lumina_cache.telemetry.darwin import darwin_readers

        return darwin_readers(disk_directory=disk_directory)
    if sys.platform == "linux":
        from lumina_cache.telemetry.linux import linux_readers

        return linux_readers(disk_directory=disk_directory)
    from lumina_cache.telemetry.common import disk_probe, mlx_probes

    return ReaderSet(sys.platform, (*mlx_probes(), disk_probe(disk_directory)))


def derive(
    platform: str,
    readings: Mapping[str, Reading],
    previous: PressureLevel = PressureLevel.UNKNOWN,
    rule: pressure.LinuxRule | None = None,
) -> Readings:
    """`readings` with level, ratio and headroom filled in by the platform's rule. `previous` gives the
    hysteresis.
    """
    done = dict(readings)
    uncompressed = _sum(done, "memory_free_bytes", "memory_active_bytes", "memory_inactive_bytes")
    compressed = _sum(done, "memory_compressed_bytes")
    if platform == "linux":
        _derive_linux(done, previous, rule or pressure.LinuxRule())
    elif platform == "darwin" and uncompressed is not None and compressed is not None:
        _derive_darwin(done, uncompressed, compressed, previous)
    if "headroom_bytes" not in done:
        done["headroom_bytes"] = Reading.unknown("it follows from page counts that are unknown", "derived")
    return done


def _sum(readings: Mapping[str, Reading], *names: str) -> int | None:
    values = [readings[name].value if name in readings else None for name in names]
    return sum(values) if all(type(value) is int for value in values) else None  # type: ignore[arg-type]


def _derive_darwin(done: Readings, uncompressed: int, compressed: int, previous: PressureLevel) -> None:
    ratio = pressure.compressor_ratio(uncompressed, compressed)
    source = "derived from page counts by the kernel's rule"
    if ratio is not None:
        done["pressure_ratio"] = Reading(ratio, source)
    held = done.get("pressure_level")
    if held is None or not held.known:
        level = pressure.compressor_level(uncompressed, compressed, previous)
        if level is not PressureLevel.UNKNOWN:
            done["pressure_level"] = Reading(level, source)
    level_now = done["pressure_level"].value if "pressure_level" in done else None
    if isinstance(level_now, PressureLevel):
        headroom = pressure.compressor_headroom(level_now, uncompressed, compressed)
        reason = "there is no level after critical"
        done["headroom_bytes"] = (
            Reading.unknown(reason, source) if headroom is None else Reading(headroom, source)
        )


def _derive_linux(done: Readings, previous: PressureLevel, rule: pressure.LinuxRule) -> None:
    available = _sum(done, "memory_available_bytes")
    total, limit = _sum(done, "memory_total_bytes"), _sum(done, "memory_limit_bytes")
    effective = min((size for size in (total, limit) if size is not None), default=None)
    stalls = [done[n].value if n in done else None for n in ("stall_some_percent", "stall_full_percent")]
    some, full = (value if isinstance(value, float) else None for value in stalls)
    level = rule.level(
        available_bytes=available,
        total_bytes=effective,
        some_percent=some,
        full_percent=full,
        previous=previous,
    )
    source = "derived from PSI and the share available"
    if some is None or full is None:
        source = "derived from the share available alone (no PSI)"
    elif available is None:
        source = "derived from PSI alone (no count of available memory)"
    if level is PressureLevel.UNKNOWN:
        done["pressure_level"] = Reading.unknown("neither PSI nor available memory is known", source)
        return
    done["pressure_level"] = Reading(level, source)
    headroom = rule.headroom(level, available, effective)
    if headroom is not None:
        done["headroom_bytes"] = Reading(headroom, source)
    elif level is PressureLevel.CRITICAL:
        done["headroom_bytes"] = Reading.unknown("there is no level after critical", source)
    else:
        done["headroom_bytes"] = Reading.unknown("available memory is unknown", source)


class SnapshotReader:
    """Reads in the caller's thread, again and again, so that rates and hysteresis have a past. Not
    thread-safe.

    With ``fast_only`` nothing is read that could wait on another process or on a device.
    """

    def __init__(
        self,
        readers: ReaderSet | None = None,
        *,
        fast_only: bool = False,
        rule: pressure.LinuxRule | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers = readers or platform_readers()
        self._probes = [p for p in self._readers.probes if not fast_only or p.tier is Tier.FAST]
        self._runner = ProbeRunner(self._probes, clock=clock)
        self._rule = rule
        self._level = PressureLevel.UNKNOWN

    def read(self) -> Snapshot:
        """Read what is due and return everything. Raises nothing."""
        self._runner.run_due()
        parts = [self._runner.parts[p.name] for p in self._probes if p.name in self._runner.parts]
        readings = derive(self._readers.platform, merge(parts), self._level, self._rule)
        snapshot = Snapshot.from_readings(
            readings, platform=self._readers.platform, read_at=self._runner.read_at
        )
        self._level = snapshot.pressure_level
        return snapshot

    def close(self) -> None:
        """Let go of handles and files; reading again opens them anew."""
        self._readers.close()


def read_once(readers: ReaderSet | None = None, *, clock: Callable[[], float] = time.monotonic) -> Snapshot:
    """Read everything now, in this thread, and return it: no thread, nothing kept open, nothing raised.

    Rates need two readings and are unknown here. On a Mac a source that fails is replaced by a command, which
    may take up to two seconds each.
    """
    reader = SnapshotReader(readers, clock=clock)
    try:
        return reader.read()
    finally:
        reader.close()
