"""Which installation this is: read, never set, and unknown with a reason."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from lumina_cache.backend.installation import device_kind, probe_installation

SETTERS = (
    "set_memory_limit",
    "set_cache_limit",
    "set_wired_limit",
    "reset_peak_memory",
    "set_default_device",
)


def test_it_reads_without_setting_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTERS:
        monkeypatch.setattr(mx, name, lambda *a, _name=name, **k: pytest.fail(f"{_name} was called"))
    found = probe_installation()
    assert found.device == device_kind()
    assert found.mlx == mx.__version__
    assert found.memory_limit == mx.get_memory_limit()
    assert dict(found.device_info) == dict(mx.device_info())


def test_what_mlx_does_not_say_has_a_reason_and_no_number() -> None:
    found = probe_installation()
    assert "cache_limit" in found.unknown
    for name in ("memory_size", "max_recommended_working_set_size", "max_buffer_length"):
        assert (name in found.device_info) != (f"device_info.{name}" in found.unknown)
    assert all(found.unknown.values())


def test_a_device_that_cannot_be_asked_is_unknown_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(mx, "device_info", fail)
    monkeypatch.setattr(mx, "get_memory_limit", fail)
    found = probe_installation()
    assert found.memory_limit is None
    assert found.unknown["memory_limit"] == found.unknown["device_info"] == "RuntimeError: no such device"


@pytest.mark.parametrize(
    ("device", "metal", "kind"), [("cpu", True, "cpu"), ("gpu", True, "metal"), ("gpu", False, "cuda")]
)
def test_the_kind_of_device_is_where_mlx_computes(
    monkeypatch: pytest.MonkeyPatch, device: str, metal: bool, kind: str
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx.DeviceType, device)))
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    assert device_kind() == kind
