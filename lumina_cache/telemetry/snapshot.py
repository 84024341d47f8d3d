"""What is known of the machine at one moment: values, where each came from, and why the others are unknown.

Unknown is ``None`` (for the enumerations: ``UNKNOWN``) with a reason in `Snapshot.unknown`; it is never 0 and
never "normal".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

__all__ = [
    "FIELD_GROUPS",
    "PowerSource",
    "PressureLevel",
    "Reading",
    "Snapshot",
    "ThermalState",
    "Value",
]


class PressureLevel(StrEnum):
    """The operating system's own judgement of memory scarcity."""

    NORMAL = "normal"
    WARN = "warn"
    CRITICAL = "critical"
    UNKNOWN = "unknown"

    @property
    def severity(self) -> int | None:
        """0 normal, 1 warn, 2 critical; None when unknown, so that no comparison takes it for normal."""
        return {"normal": 0, "warn": 1, "critical": 2}.get(self.value)


class ThermalState(StrEnum):
    """How far the machine says that heat limits it. Nominal is not proof of full clocks: see `throttle`."""

    NOMINAL = "nominal"
    FAIR = "fair"
    SERIOUS = "serious"
    CRITICAL = "critical"
    UNKNOWN = "unknown"


class PowerSource(StrEnum):
    """What the machine draws from."""

    AC = "ac"
    BATTERY = "battery"
    UPS = "ups"
    UNKNOWN = "unknown"


Value = int | float | str | bool | PressureLevel | ThermalState | PowerSource
_ENUMS = (PressureLevel, ThermalState, PowerSource)


@dataclass(frozen=True, slots=True)
class Reading:
    """One value with its source, or None with the reason why there is none."""

    value: Value | None
    source: str
    reason: str | None = None
    settled: bool = False
    """The source answered that there is no value: asking another one is of no use."""

    def __post_init__(self) -> None:
        if (self.value is None) != (self.reason is not None):
            raise ValueError(f"a reading has either a value or a reason: {self.value!r}, {self.reason!r}")

    @classmethod
    def unknown(cls, reason: str, source: str, *, settled: bool = False) -> Reading:
        return cls(None, source, reason, settled)

    @property
    def known(self) -> bool:
        return self.value is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The machine at `monotonic_seconds` (``time.monotonic``). Sizes in bytes, rates in bytes per second.

    Groups are read at different paces; `age` gives how old each one is. All counts are system-wide unless the
    name says `process` or `mlx`.
    """

    monotonic_seconds: float
    unix_seconds: float
    platform: str

    pressure_level: PressureLevel = PressureLevel.UNKNOWN
    """The level to act on: debounced when it comes from a `Sampler`."""
    pressure_raw: int | str | None = None
    """What the operating system said, unmapped: 1, 2, 4 on macOS, the PSI averages on Linux."""
    pressure_share_percent: int | None = None
    """macOS ``kern.memorystatus_level``: share of memory neither wired nor compressed. It is not free
    memory.
    """
    pressure_ratio: float | None = None
    """macOS: uncompressed pageable pages n over n plus pages held by the compressor; see `pressure`."""
    headroom_bytes: int | None = None
    """First-order number of bytes that may still be wired or dirtied before the next level."""
    stall_some_percent: float | None = None
    """Linux PSI ``some avg10`` of memory: share of time in which some task waited for memory."""
    stall_full_percent: float | None = None
    """Linux PSI ``full avg10`` of memory: share of time in which all tasks waited for memory."""

    memory_total_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """Tightest control-group limit on this process; None with a reason also when there is no limit."""
    memory_available_bytes: int | None = None
    """Linux ``MemAvailable``, or what the control group still allows if that is less."""
    memory_free_bytes: int | None = None
    memory_active_bytes: int | None = None
    memory_inactive_bytes: int | None = None
    memory_wired_bytes: int | None = None
    memory_compressed_bytes: int | None = None
    """RAM occupied by the compressor (not the logical size of what it holds)."""
    memory_purgeable_bytes: int | None = None

    swap_used_bytes: int | None = None
    swap_total_bytes: int | None = None
    """macOS grows and shrinks this on demand: used over total is no gauge there."""
    swap_out_bytes_per_second: float | None = None
    swap_in_bytes_per_second: float | None = None
    compression_bytes_per_second: float | None = None

    process_footprint_bytes: int | None = None
    """What the kernel charges this process: macOS ``ri_phys_footprint``, Linux resident plus swapped."""
    process_resident_bytes: int | None = None
    """Resident set. On macOS it leaves out Metal buffers."""

    gpu_utilization_percent: int | None = None
    """A point read by the driver (0 to 100), not an average over the interval; advisory."""
    gpu_renderer_percent: int | None = None
    gpu_in_use_bytes: int | None = None
    gpu_allocated_bytes: int | None = None
    """Nearer to committed GPU memory than `gpu_in_use_bytes`, which does not follow model size."""
    gpu_recoveries_total: int | None = None
    """GPU resets since boot."""

    thermal_state: ThermalState = ThermalState.UNKNOWN
    thermal_raw: int | float | None = None
    """macOS: the kernel's 0 to 4. Linux: the hottest sensor in degrees Celsius."""
    power_source: PowerSource = PowerSource.UNKNOWN
    battery_percent: int | None = None
    low_power_mode: bool | None = None

    chip: str | None = None
    machine_model: str | None = None
    performance_cores: int | None = None
    gpu_working_set_bytes: int | None = None
    """Metal's ``max_recommended_working_set_size``, as this process saw it first."""
    wired_limit_bytes: int | None = None
    """``iogpu.wired_limit_mb`` when somebody set it; None with a reason while the system's default holds."""

    mlx_active_bytes: int | None = None
    mlx_pool_bytes: int | None = None
    """Freed buffers that MLX keeps; the process holds active plus pool."""
    mlx_peak_bytes: int | None = None
    """Highest active since start or since somebody reset it; the pool is not in it."""

    disk_free_bytes: int | None = None

    read_at: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Monotonic time of the last read of each group."""
    unknown: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Why each unknown field is unknown."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Where each known field came from."""

    @classmethod
    def from_readings(
        cls,
        readings: Mapping[str, Reading],
        *,
        platform: str,
        read_at: Mapping[str, float] | None = None,
        monotonic_seconds: float | None = None,
        unix_seconds: float | None = None,
    ) -> Snapshot:
        """Build a snapshot; a field without a reading is unknown because nothing here reads it."""
        values: dict[str, Value] = {}
        unknown: dict[str, str] = {}
        sources: dict[str, str] = {}
        for name in FIELD_GROUPS:
            reading = readings.get(name)
            if reading is None:
                unknown[name] = f"no reader for it on {platform}"
            elif reading.value is None or reading.value in _UNKNOWN_MEMBERS:
                unknown[name] = reading.reason or "the source says unknown"
            else:
                values[name] = reading.value
                sources[name] = reading.source
        return cls(
            monotonic_seconds=time.monotonic() if monotonic_seconds is None else monotonic_seconds,
            unix_seconds=time.time() if unix_seconds is None else unix_seconds,
            platform=platform,
            read_at=dict(read_at or {}),
            unknown=unknown,
            sources=sources,
            **values,  # type: ignore[arg-type]
        )

    def age(self, group: str, now: float | None = None) -> float | None:
        """Seconds since `group` was last read, or None if it never was. `now` is ``time.monotonic()``."""
        at = self.read_at.get(group)
        if at is None:
            return None
        return max(0.0, (time.monotonic() if now is None else now) - at)

    def to_record(self, now: float | None = None) -> dict[str, object]:
        """Plain JSON types: every field (None for unknown), then `unknown`, `sources` and `age_seconds`.

        `age_seconds` is as of `now`, by default the moment of the snapshot.
        """
        record: dict[str, object] = {
            "monotonic_seconds": self.monotonic_seconds,
            "unix_seconds": self.unix_seconds,
            "platform": self.platform,
        }
        for name in FIELD_GROUPS:
            value = getattr(self, name)
            if isinstance(value, _ENUMS):
                value = None if value in _UNKNOWN_MEMBERS else value.value
            record[name] = value
        at = self.monotonic_seconds if now is None else now
        record["unknown"] = dict(self.unknown)
        record["sources"] = dict(self.sources)
        record["age_seconds"] = {group: round(max(0.0, at - read), 3) for group, read in self.read_at.items()}
        return record


_UNKNOWN_MEMBERS = frozenset({PressureLevel.UNKNOWN, ThermalState.UNKNOWN, PowerSource.UNKNOWN})

_PREFIX_GROUPS = (
    ("pressure_", "pressure"),
    ("headroom_", "pressure"),
    ("stall_", "pressure"),
    ("memory_", "memory"),
    ("swap_", "swap"),
    ("compression_", "swap"),
    ("process_", "process"),
    ("gpu_working_set_", "limits"),
    ("gpu_", "gpu"),
    ("thermal_", "thermal"),
    ("power_", "power"),
    ("battery_", "power"),
    ("low_power_", "power"),
    ("wired_", "limits"),
    ("mlx_", "mlx"),
    ("disk_", "disk"),
    ("chip", "identity"),
    ("machine_", "identity"),
    ("performance_", "identity"),
)


def _group_of(name: str) -> str:
    return next(group for prefix, group in _PREFIX_GROUPS if name.startswith(prefix))


_NOT_READ = {"monotonic_seconds", "unix_seconds", "platform", "read_at", "unknown", "sources"}
FIELD_GROUPS: Mapping[str, str] = {
    f.name: _group_of(f.name) for f in fields(Snapshot) if f.name not in _NOT_READ
}
"""Every field that a reader can fill, and the group whose age applies to it."""
