"""Telemetry: what the machine is doing, read without privilege, with a reason for whatever is unknown."""

from __future__ import annotations

from lumina_cache.telemetry.assemble import read_once
from lumina_cache.telemetry.sampler import Sampler, TelemetryError
from lumina_cache.telemetry.snapshot import PowerSource, PressureLevel, Reading, Snapshot, ThermalState

__all__ = [
    "PowerSource",
    "PressureLevel",
    "Reading",
    "Sampler",
    "Snapshot",
    "TelemetryError",
    "ThermalState",
    "read_once",
]
