"""Which installation this is: device, versions, what MLX says of the device, and MLX's own limits. Reads, sets nothing."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from .interface import mlx_lm_version, mlx_version
from .isolate import first_line

__all__ = ["Installation", "device_kind", "probe_installation"]

#: What planning for memory would like to know of a device; MLX says it on Apple silicon only.
_WANTED = ("memory_size", "max_recommended_working_set_size", "max_buffer_length")


@dataclass(frozen=True)
class Installation:
    """One device with one pair of versions. Bytes where a field counts memory."""

    device: str  #: ``cpu``, ``metal`` or ``cuda``
    mlx: str
    mlx_lm: str
    python: str
    system: str  #: operating system and processor architecture
    device_info: Mapping[str, str | int]  #: as MLX gives it
    memory_limit: int | None  #: bytes that MLX allocates before it waits for buffers to be freed
    unknown: Mapping[str, str]  #: field → why it is not known

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


def device_kind() -> str:
    """``cpu``, ``metal`` or ``cuda``: where MLX computes by default."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def probe_installation() -> Installation:
    """Never raises: what cannot be read is in ``unknown`` with the reason."""
    unknown = {
        "cache_limit": "MLX tells it only to who sets it, and this reads",
        "wired_limit": "MLX tells it only to who sets it, and this reads",
    }
    described: dict[str, str | int] = {}
    try:
        described = dict(mx.device_info())
    except Exception as error:
        unknown["device_info"] = first_line(error)
    unknown |= {
        f"device_info.{name}": f"MLX does not say it of a {device_kind()} device"
        for name in _WANTED
        if name not in described
    }
    limit: int | None = None
    try:
        limit = int(mx.get_memory_limit())
    except Exception as error:
        unknown["memory_limit"] = first_line(error)
    return Installation(
        device=device_kind(),
        mlx=mlx_version(),
        mlx_lm=mlx_lm_version,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        device_info=described,
        memory_limit=limit,
        unknown=unknown,
    )
