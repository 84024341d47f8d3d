"""Probes that are the same everywhere: MLX's counters, and the free space of a disk."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from lumina_cache.telemetry.probes import Probe, Readings, Tier
from lumina_cache.telemetry.snapshot import Reading

__all__ = ["disk_probe", "mlx_counters", "mlx_probes"]

_COUNTERS = {
    "mlx_active_bytes": "get_active_memory",
    "mlx_pool_bytes": "get_cache_memory",
    "mlx_peak_bytes": "get_peak_memory",
}


def mlx_counters() -> Readings:
    """MLX's own counters: unlocked reads that touch no array. MLX is not imported for their sake."""
    mx = sys.modules.get("mlx.core")
    found: Readings = {}
    for name, getter in _COUNTERS.items():
        read = getattr(mx, getter, None)
        if mx is None:
            found[name] = Reading.unknown("mlx is not imported in this process", "mlx")
        elif read is None:
            found[name] = Reading.unknown(f"this mlx has no {getter}", "mlx")
        else:
            found[name] = Reading(int(read()), f"mlx.core.{getter}")
    return found


def _working_set() -> Readings:
    """``mx.device_info`` creates the Metal device on its first call, which takes long: slow thread only."""
    field, source = "gpu_working_set_bytes", "mlx.core.device_info"
    mx = sys.modules.get("mlx.core")
    if mx is None:
        return {field: Reading.unknown("mlx is not imported in this process", source)}
    if not mx.metal.is_available():
        return {field: Reading.unknown("MLX has no Metal device here", source)}
    info = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    limit = info.get("max_recommended_working_set_size")
    if type(limit) is not int or limit <= 0:
        return {field: Reading.unknown("MLX's device has no max_recommended_working_set_size", source)}
    return {field: Reading(limit, source)}


def mlx_probes() -> tuple[Probe, ...]:
    return (
        Probe("mlx counters", tuple(_COUNTERS), mlx_counters),
        Probe("mlx device", ("gpu_working_set_bytes",), _working_set, Tier.SLOW, 30.0),
    )


def disk_probe(directory: Path | None = None) -> Probe:
    """Free bytes for this user on the file system of `directory`, by default the current directory."""

    def read() -> Readings:
        where = directory or Path(os.getcwd())
        return {"disk_free_bytes": Reading(shutil.disk_usage(where).free, f"statvfs {where}")}

    return Probe("disk", ("disk_free_bytes",), read, Tier.SLOW, 5.0)
