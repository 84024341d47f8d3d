"""Checks of every claim that telemetry makes about this machine: expected beside read.

On a Mac these settle what no other machine can: widths and agreement of the in-process reads with Apple's
commands, the kernel's level against the rule from page counts, how often the kernel gives a fresh answer,
what an IOKit read costs. On Linux the Linux sources are checked and the rest says that it was skipped.
Nothing here needs or asks for privilege; what only a privileged command can show is printed as a command
to run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lumina_cache.telemetry import parse_darwin as parse
from lumina_cache.telemetry import pressure
from lumina_cache.telemetry.assemble import SnapshotReader, platform_readers, read_once
from lumina_cache.telemetry.darwin import (
    LOW_POWER_KEY,
    POWER_KEY,
    THERMAL_KEY,
    Calls,
    DarwinCalls,
    run_command,
)
from lumina_cache.telemetry.parse import Unknown
from lumina_cache.telemetry.sampler import Sampler
from lumina_cache.telemetry.snapshot import PressureLevel, Snapshot

__all__ = ["Check", "Status", "checks", "darwin_checks", "watch_levels"]

_SYSCTLS = (
    ("kern.memorystatus_vm_pressure_level", (4,), "1, 2 or 4"),
    ("kern.memorystatus_level", (4,), "0 to 100"),
    ("hw.memsize", (8,), "bytes of RAM"),
    ("hw.memsize_usable", (8,), "at most hw.memsize"),
    ("iogpu.wired_limit_mb", (4, 8), "0 unless somebody set it"),
)
_DISTINCT_CALLS = 30
_PROBE_BYTES = 256 << 20


class Status(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    SKIPPED = "skipped"
    READ = "read"
    """A value to be seen: nothing here can judge it."""
    MANUAL = "manual"
    """Needs a person: the command stands in `read`."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor: what was expected, what was read, and what follows."""

    name: str
    status: Status
    expected: str
    read: str
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.status:7} {self.name}: expected {self.expected}; read {self.read}{note}"


def checks() -> list[Check]:
    """All checks for the machine this runs on, in about five seconds. Raises nothing."""
    found = [_completeness(read_once()), *_costs()]
    if sys.platform == "darwin":
        calls = DarwinCalls()
        try:
            found += darwin_checks(calls)
        finally:
            calls.close()
    else:
        found.append(
            Check(
                "macOS sources",
                Status.SKIPPED,
                "the checks of a Mac",
                f"this is {sys.platform}",
                "sysctl widths, page rule, IOKit, notify keys and Metal counters need a Mac",
            )
        )
    if sys.platform == "linux":
        found += _linux_checks()
    return found


# --- everywhere ---


def _completeness(snapshot: Snapshot) -> Check:
    record = snapshot.to_record()
    unknown = [name for name in snapshot.unknown if record[name] is None]
    silent = [name for name in unknown if not snapshot.unknown[name].strip()]
    return Check(
        "every unknown has a reason",
        Status.FAIL if silent else Status.PASS,
        "no unknown without a reason",
        f"{len(snapshot.sources)} known, {len(unknown)} unknown, {len(silent)} without a reason",
    )


def _costs() -> list[Check]:
    reader = SnapshotReader(fast_only=True)
    reader.read()
    samples = []
    for _ in range(50):
        begun = time.perf_counter()
        reader.read()
        samples.append(time.perf_counter() - begun)
    reader.close()
    sample = statistics.median(samples)
    with Sampler() as sampler:
        rounds = 20_000
        begun = time.perf_counter()
        for _ in range(rounds):
            _ = sampler.latest
        load = (time.perf_counter() - begun) / rounds
    return [
        Check(
            "hot path",
            Status.PASS if load < 1e-6 else Status.FAIL,
            "below 1 µs",
            f"{load * 1e9:.0f} ns",
        ),
        Check(
            "fast sample",
            Status.PASS if sample < 1e-3 else Status.FAIL,
            "below 1 ms",
            f"{sample * 1e6:.0f} µs, median of {len(samples)}",
        ),
    ]


# --- Linux ---


def _linux_checks() -> list[Check]:
    snapshot = read_once()
    found = []
    for name, field, wanted in (
        ("PSI", "stall_some_percent", "averages of memory stalls"),
        ("control group limit", "memory_limit_bytes", "a limit, or none set"),
        ("temperature", "thermal_raw", "a sensor, where there is one"),
    ):
        value = getattr(snapshot, field)
        read = f"{value} from {snapshot.sources[field]}" if value is not None else snapshot.unknown[field]
        found.append(Check(name, Status.READ, wanted, read))
    return found


# --- macOS ---


def darwin_checks(
    calls: Calls,
    *,
    run: Callable[[Sequence[str]], bytes] = run_command,
    allocate: Callable[[int], object] | None = None,
    rest: Callable[[float], None] = time.sleep,
) -> list[Check]:
    """The checks that only a Mac can answer. `allocate(nbytes)` returns an evaluated GPU buffer of that
    many bytes.
    """
    sections: tuple[tuple[str, Callable[[], list[Check]]], ...] = (
        ("sysctl", lambda: _sysctl_checks(calls, run)),
        ("swap", lambda: [_swap_check(calls, run)]),
        ("page rule", lambda: [_rule_check(calls)]),
        ("fresh answers", lambda: [_freshness_check(calls, rest)]),
        ("GPU read", lambda: [_gpu_check(calls)]),
        ("thermal", lambda: [_thermal_check(calls, run)]),
        ("power", lambda: [_power_check(calls, run), _low_power_check(calls, run)]),
        ("allocation", lambda: [_allocation_check(calls, allocate or _metal_buffer, rest)]),
        ("footprint", lambda: [_footprint_check(calls)]),
    )
    found: list[Check] = []
    for name, section in sections:
        try:
            found += section()
        except Exception as error:
            found.append(Check(name, Status.FAIL, "an answer", f"{type(error).__name__}: {error}"))
    found += _manual_checks()
    return found


def _text(run: Callable[[Sequence[str]], bytes], *arguments: str) -> str:
    return run(arguments).decode("utf-8", "replace")


def _sysctl_checks(calls: Calls, run: Callable[[Sequence[str]], bytes]) -> list[Check]:
    printed = parse.parse_sysctl_text(
        _text(run, "/usr/sbin/sysctl", "-i", *(name for name, _, _ in _SYSCTLS))
    )
    found = []
    for name, widths, meaning in _SYSCTLS:
        expected = f"{meaning}; {' or '.join(map(str, widths))} bytes; as the command says"
        try:
            buffer = calls.sysctl(name, 8)
        except OSError as error:
            missing = name not in printed
            note = "the command does not have it either" if missing else "the command has it"
            status = Status.READ if missing else Status.FAIL
            found.append(Check(f"sysctl {name}", status, expected, str(error), note))
            continue
        value = parse.decode_integer(buffer)
        shown = value.reason if isinstance(value, Unknown) else str(value)
        same = shown == printed.get(name)
        found.append(
            Check(
                f"sysctl {name}",
                Status.PASS if same and len(buffer) in widths else Status.FAIL,
                expected,
                f"{shown} in {len(buffer)} bytes; command: {printed.get(name, 'nothing')}",
            )
        )
    return found


def _swap_check(calls: Calls, run: Callable[[Sequence[str]], bytes]) -> Check:
    ours = parse.decode_swap_usage(calls.sysctl("vm.swapusage", 32))
    printed = parse.parse_sysctl_text(_text(run, "/usr/sbin/sysctl", "-i", "vm.swapusage"))
    theirs = parse.parse_swap_text(printed.get("vm.swapusage", ""))
    good = (
        not isinstance(ours, Unknown)
        and not isinstance(theirs, Unknown)
        and abs(ours.used - theirs.used) < 16 << 20  # swap moves between the two reads
    )
    return Check(
        "swap", Status.PASS if good else Status.FAIL, "the same within 16 MiB", f"{ours}; command: {theirs}"
    )


def _pages(calls: Calls) -> parse.PageCounts | Unknown:
    total = parse.decode_integer(calls.sysctl("hw.memsize", 8))
    memory = None if isinstance(total, Unknown) else total
    return parse.decode_vm_info64(calls.vm_info64(), calls.kernel_page_bytes(), memory)


def _rule_check(calls: Calls) -> Check:
    name, expected = "level against page counts", "the kernel's level allowed by the rule of page counts"
    counts = _pages(calls)
    decoded = parse.decode_pressure_level(calls.sysctl("kern.memorystatus_vm_pressure_level", 8))
    if isinstance(counts, Unknown) or isinstance(decoded, Unknown):
        return Check(name, Status.FAIL, expected, f"{counts}; {decoded}")
    raw, level = decoded
    uncompressed = (counts.free or 0) + (counts.active or 0) + (counts.inactive or 0)
    compressed = counts.compressed or 0
    allowed = {pressure.compressor_level(uncompressed, compressed, previous) for previous in PressureLevel}
    ratio = pressure.compressor_ratio(uncompressed, compressed)
    headroom = pressure.compressor_headroom(level, uncompressed, compressed)
    shown = "unknown" if ratio is None else f"{ratio:.3f}"
    return Check(
        name,
        Status.PASS if level in allowed else Status.FAIL,
        expected,
        f"level {raw} ({level}) at n/(n+c) = {shown}; the rule allows {', '.join(sorted(allowed))}; "
        f"headroom {'none' if headroom is None else f'{headroom / 1e9:.2f} GB'}",
        "critical may also come from the compressor's own limit, which page counts do not show",
    )


def _freshness_check(calls: Calls, rest: Callable[[float], None]) -> Check:
    answers = set()
    begun = time.perf_counter()
    for _ in range(_DISTINCT_CALLS):
        answers.add(calls.vm_info64())
        rest(1 / _DISTINCT_CALLS)
    seconds = time.perf_counter() - begun
    return Check(
        "fresh answers of host_statistics64",
        Status.READ,
        "2 to 11 distinct of 30 in a second (the kernel limits programs outside the system)",
        f"{len(answers)} distinct of {_DISTINCT_CALLS} in {seconds:.1f} s",
        "all 30 distinct means that no limit is at work here",
    )


def _gpu_check(calls: Calls) -> Check:
    calls.gpu_nodes()
    seconds = []
    for _ in range(20):
        begun = time.perf_counter()
        nodes = calls.gpu_nodes()
        seconds.append(time.perf_counter() - begun)
    found = parse.gpu_statistics(nodes)
    return Check(
        "GPU statistics",
        Status.FAIL if isinstance(found, Unknown) else Status.PASS,
        "statistics of one accelerator, well below 10 ms a read",
        f"{found}; {statistics.median(seconds) * 1e6:.0f} µs, longest {max(seconds) * 1e6:.0f} µs",
    )


def _thermal_check(calls: Calls, run: Callable[[Sequence[str]], bytes]) -> Check:
    raw = calls.notify_state(THERMAL_KEY)
    printed = parse.parse_notifyutil(_text(run, "/usr/bin/notifyutil", "-g", THERMAL_KEY), THERMAL_KEY)
    state = parse.thermal_state(raw)
    good = raw == printed and not isinstance(state, Unknown)
    return Check(
        "thermal level",
        Status.PASS if good else Status.FAIL,
        "0 to 4, as notifyutil says",
        f"{raw} ({state}); command: {printed}",
        "0 also when nothing posts it, so it does not prove that the machine is cool",
    )


def _power_check(calls: Calls, run: Callable[[Sequence[str]], bytes]) -> Check:
    raw = calls.notify_state(POWER_KEY)
    state = parse.power_state(raw)
    printed = parse.parse_pmset_batt(_text(run, "/usr/bin/pmset", "-g", "batt"))
    if state is None:
        agrees = not isinstance(printed, Unknown) and printed.battery_percent is None
    else:
        agrees = (
            not isinstance(state, Unknown)
            and not isinstance(printed, Unknown)
            and state.source is printed.source
        )
    return Check(
        "power source",
        Status.PASS if agrees else Status.FAIL,
        "as pmset says; bit 16 external, 19 valid (none without a battery)",
        f"{raw:#x} ({state}); command: {printed}",
    )


def _low_power_check(calls: Calls, run: Callable[[Sequence[str]], bytes]) -> Check:
    raw = calls.notify_state(LOW_POWER_KEY)
    printed = parse.parse_pmset_low_power(_text(run, "/usr/bin/pmset", "-g"))
    if isinstance(printed, Unknown):
        return Check("low-power mode", Status.READ, "as pmset says", f"{raw}; command: {printed.reason}")
    return Check(
        "low-power mode",
        Status.PASS if (raw != 0) == printed else Status.FAIL,
        "as pmset says",
        f"{raw}; command: {printed}",
    )


def _metal_buffer(nbytes: int) -> object:
    import mlx.core as mx

    if not mx.metal.is_available():
        raise RuntimeError("MLX has no Metal device here")
    buffer = mx.ones((nbytes // 4,), dtype=mx.float32)
    mx.eval(buffer)
    return buffer


def _allocation_check(
    calls: Calls, allocate: Callable[[int], object], rest: Callable[[float], None]
) -> Check:
    allocate(4096)  # the device and its own memory come first

    def read() -> parse.GpuStatistics:
        found = parse.gpu_statistics(calls.gpu_nodes())
        if isinstance(found, Unknown):
            raise RuntimeError(found.reason)
        return found

    rest(1.0)
    before = read()
    held = allocate(_PROBE_BYTES)
    rest(1.0)
    after = read()
    del held

    def rise(old: int | None, new: int | None) -> str:
        return "unknown" if old is None or new is None else f"{(new - old) / (1 << 20):+.0f} MiB"

    return Check(
        "GPU memory against an MLX buffer",
        Status.READ,
        f"allocated rises by about {_PROBE_BYTES >> 20} MiB; in use need not",
        f"allocated {rise(before.allocated_bytes, after.allocated_bytes)}, "
        f"in use {rise(before.in_use_bytes, after.in_use_bytes)}",
        "both counts are of the whole system",
    )


def _footprint_check(calls: Calls) -> Check:
    from lumina_cache.telemetry.common import mlx_counters

    decoded = parse.decode_rusage(calls.rusage())
    counters = mlx_counters()
    held = [counters[name].value for name in ("mlx_active_bytes", "mlx_pool_bytes")]
    if isinstance(decoded, Unknown):
        return Check("footprint", Status.FAIL, "a footprint", decoded.reason)
    mlx_bytes = sum(value for value in held if isinstance(value, int))
    return Check(
        "footprint against MLX",
        Status.PASS if decoded[0] >= mlx_bytes else Status.READ,
        "footprint at least MLX active plus pool",
        f"footprint {decoded[0] / 1e6:.0f} MB, resident {decoded[1] / 1e6:.0f} MB, "
        f"MLX {mlx_bytes / 1e6:.0f} MB",
    )


def _manual_checks() -> list[Check]:
    return [
        Check(
            "levels warn and critical",
            Status.MANUAL,
            "transitions at the ratios of the rule",
            "sudo memory_pressure -l warn (then -l critical) in another terminal, beside watch_levels",
        ),
        Check(
            "thermal level under load",
            Status.MANUAL,
            "the same level",
            "sudo powermetrics -s thermal -n1, beside the thermal level above, while the GPU is busy",
        ),
        Check(
            "low-power toggle",
            Status.MANUAL,
            "the read value follows within 5 s",
            "switch low-power mode in System Settings while `lumina-cache top` runs",
        ),
    ]


def watch_levels(
    seconds: float,
    *,
    reader: SnapshotReader | None = None,
    on_change: Callable[[Check], object] | None = None,
    rest: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Check]:
    """Watch for changes of level for `seconds`, and hold each against the rule of page counts where there
    is one.
    """
    source = reader or SnapshotReader(platform_readers(), fast_only=True)
    found: list[Check] = []
    before: Snapshot | None = None
    end = clock() + seconds
    while clock() < end:
        now = source.read()
        if before is not None and now.pressure_level is not before.pressure_level:
            found.append(_transition(before, now))
            if on_change is not None:
                on_change(found[-1])
        before = now
        rest(0.25)
    if reader is None:
        source.close()
    return found


def _transition(before: Snapshot, now: Snapshot) -> Check:
    name = f"level {before.pressure_level} to {now.pressure_level}"
    parts = (now.memory_free_bytes, now.memory_active_bytes, now.memory_inactive_bytes)
    compressed = now.memory_compressed_bytes
    if now.pressure_ratio is None or compressed is None or any(part is None for part in parts):
        return Check(
            name, Status.READ, "a transition", f"raw {now.pressure_raw}", "no page counts to hold it against"
        )
    uncompressed = sum(part for part in parts if part is not None)
    by_rule = pressure.compressor_level(uncompressed, compressed, before.pressure_level)
    return Check(
        name,
        Status.PASS if by_rule is now.pressure_level else Status.READ,
        f"{by_rule} by the rule",
        f"raw {now.pressure_raw} at ratio {now.pressure_ratio:.3f}",
        "page counts are up to a second older than the level",
    )
