from __future__ import annotations

import struct
import sys
from collections.abc import Sequence

import pytest

from lumina_cache.telemetry.assemble import SnapshotReader
from lumina_cache.telemetry.darwin import LOW_POWER_KEY, POWER_KEY, THERMAL_KEY
from lumina_cache.telemetry.doctor import Check, Status, checks, darwin_checks, watch_levels
from lumina_cache.telemetry.probes import Probe, ReaderSet, Readings
from lumina_cache.telemetry.snapshot import PressureLevel, Reading

PAGE = 16384


class Mac:
    """A Mac that agrees with its own commands, unless told otherwise."""

    def __init__(self) -> None:
        self.level = 1
        self.counts = [46_000, 250_000, 240_000, 170_000, 290_000]
        self.thermal = 0
        self.power = 1 << 19 | 64
        self.allocated = 1 << 30
        self.swap_used = 1 << 30
        self.tick = 0

    def sysctl(self, name: str, room: int) -> bytes:
        values = {
            "kern.memorystatus_vm_pressure_level": struct.pack("<i", self.level),
            "kern.memorystatus_level": struct.pack("<i", 57),
            "hw.memsize": struct.pack("<q", 16 << 30),
            "hw.memsize_usable": struct.pack("<q", 15 << 30),
            "vm.swapusage": struct.pack("<QQQIi", 2 << 30, 1 << 30, self.swap_used, PAGE, 1),
        }
        if name not in values:
            raise OSError(2, f"sysctlbyname {name}: none")
        return values[name]

    def vm_info64(self) -> bytes:
        self.tick += 1
        free, active, inactive, wired, compressed = self.counts
        faults = self.tick // 6  # a fresh answer every sixth time
        head = struct.pack("<4I 4Q Q 4Q", free, active, inactive, wired, *[0] * 4, faults, *[0] * 4)
        return head + struct.pack("<2I 4Q 4I Q", 0, 0, 0, 0, 0, 0, compressed, 0, 0, 0, 0)

    def kernel_page_bytes(self) -> int:
        return PAGE

    def rusage(self) -> bytes:
        raw = bytearray(296)
        struct.pack_into("<QQ", raw, 64, 132 << 20, 64 << 30)
        return bytes(raw)

    def notify_state(self, key: str) -> int:
        return {THERMAL_KEY: self.thermal, POWER_KEY: self.power, LOW_POWER_KEY: 0}[key]

    def gpu_nodes(self) -> list[dict[str, object]]:
        return [
            {
                "Device Utilization %": 12,
                "Alloc system memory": self.allocated,
                "In use system memory": 1 << 20,
            }
        ]

    def forget(self) -> None: ...

    def close(self) -> None: ...

    def run(self, arguments: Sequence[str]) -> bytes:
        printed = {
            "kern.memorystatus_vm_pressure_level": "1",
            "kern.memorystatus_level": "57",
            "hw.memsize": str(16 << 30),
            "hw.memsize_usable": str(15 << 30),
            "vm.swapusage": "total = 2048.00M  used = 1024.00M  free = 1024.00M  (encrypted)",
        }
        if arguments[0] == "/usr/sbin/sysctl":
            return "".join(f"{name}: {printed[name]}\n" for name in arguments[2:] if name in printed).encode()
        if arguments[0] == "/usr/bin/notifyutil":
            return b"com.apple.system.thermalpressurelevel 0\n"
        if arguments[-1] == "batt":
            return b"Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t64%; discharging; 1:00\n"
        return b" lowpowermode         0\n"

    def allocate(self, nbytes: int) -> object:
        if nbytes > 1 << 20:
            self.allocated += nbytes
        return object()


def _checks(mac: Mac) -> dict[str, Check]:
    found = darwin_checks(mac, run=mac.run, allocate=mac.allocate, rest=lambda seconds: None)
    return {check.name: check for check in found}


def test_a_mac_that_agrees_with_its_commands_passes() -> None:
    found = _checks(Mac())
    assert [name for name, check in found.items() if check.status is Status.FAIL] == []
    assert found["sysctl hw.memsize"].status is Status.PASS
    assert "in 8 bytes" in found["sysctl hw.memsize"].read
    assert found["level against page counts"].status is Status.PASS
    assert found["fresh answers of host_statistics64"].read.startswith("6 distinct of 30")
    assert "allocated +256 MiB" in found["GPU memory against an MLX buffer"].read
    assert found["footprint against MLX"].status is Status.PASS


def test_an_oid_that_neither_way_finds_is_told_from_one_that_only_we_miss() -> None:
    mac = Mac()
    check = _checks(mac)["sysctl iogpu.wired_limit_mb"]
    assert (check.status, check.note) == (Status.READ, "the command does not have it either")
    ours = mac.run
    mac.run = lambda arguments: ours(arguments) + b"iogpu.wired_limit_mb: 0\n"  # type: ignore[method-assign]
    assert _checks(mac)["sysctl iogpu.wired_limit_mb"].status is Status.FAIL


@pytest.mark.parametrize(
    ("attribute", "value", "name"),
    [
        ("level", 2, "level against page counts"),
        ("level", 2, "sysctl kern.memorystatus_vm_pressure_level"),
        ("thermal", 1, "thermal level"),
        ("power", 1 << 19 | 1 << 16 | 64, "power source"),
        ("swap_used", 2 << 30, "swap"),
    ],
)
def test_a_mac_that_disagrees_fails_with_both_values(attribute: str, value: int, name: str) -> None:
    mac = Mac()
    setattr(mac, attribute, value)
    check = _checks(mac)[name]
    assert check.status is Status.FAIL
    assert check.read


def test_a_source_that_breaks_is_a_failed_check_and_the_rest_go_on() -> None:
    mac = Mac()
    mac.gpu_nodes = lambda: 1 // 0  # type: ignore[method-assign, return-value]
    found = _checks(mac)
    assert found["GPU read"].status is Status.FAIL
    assert "ZeroDivisionError" in found["GPU read"].read
    assert found["footprint against MLX"].status is Status.PASS


def test_what_needs_privilege_is_left_to_a_person_with_the_command() -> None:
    manual = [check for check in _checks(Mac()).values() if check.status is Status.MANUAL]
    assert any("sudo memory_pressure -l warn" in check.read for check in manual)


def test_this_machine_is_checked_and_what_was_skipped_says_so() -> None:
    found = checks()
    assert [str(check) for check in found if check.status is Status.FAIL] == []
    if sys.platform != "darwin":
        skipped = [check for check in found if check.status is Status.SKIPPED]
        assert [check.name for check in skipped] == ["macOS sources"]
        assert sys.platform in skipped[0].read
    assert any(check.name == "hot path" for check in found)


def test_a_transition_is_held_against_the_rule_of_page_counts() -> None:
    now = [0.0]
    states = iter(
        [
            (PressureLevel.NORMAL, 2000, 1000),
            (PressureLevel.WARN, 900, 1000),  # n < c: as the rule says
            (PressureLevel.CRITICAL, 900, 1000),  # the rule says warn
        ]
    )

    def read() -> Readings:
        level, uncompressed, compressed = next(states)
        counts = {"free": uncompressed, "active": 0, "inactive": 0, "compressed": compressed}
        readings = {f"memory_{name}_bytes": Reading(value, "test") for name, value in counts.items()}
        return readings | {"pressure_level": Reading(level, "test"), "pressure_raw": Reading(1, "test")}

    fields = tuple(f"memory_{name}_bytes" for name in ("free", "active", "inactive", "compressed"))
    readers = ReaderSet("darwin", (Probe("all", (*fields, "pressure_level", "pressure_raw"), read),))

    def rest(seconds: float) -> None:
        now[0] += 1.0

    seen: list[Check] = []
    found = watch_levels(
        3.0, reader=SnapshotReader(readers), on_change=seen.append, rest=rest, clock=lambda: now[0]
    )
    assert seen == found
    assert [(check.name, check.status) for check in found] == [
        ("level normal to warn", Status.PASS),
        ("level warn to critical", Status.READ),
    ]
    assert "at ratio 0.474" in found[0].read
