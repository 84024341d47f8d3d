"""Keeps a fresh snapshot at hand: two threads read, everyone else loads an attribute.

The fast thread (4 Hz) does what never waits on another process; the slow one (at most 1 Hz) does the
rest: IOKit, messages to system daemons, and commands where everything else failed. The fast thread picks
up whatever the slow one published last, so a command that hangs delays nothing; what it should have
delivered turns unknown when it is overdue.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType, TracebackType
from typing import Self

from lumina_cache.errors import LuminaError
from lumina_cache.telemetry.assemble import derive, platform_readers
from lumina_cache.telemetry.pressure import Debounce, LinuxRule, PressureDebouncer
from lumina_cache.telemetry.probes import (
    NOT_READ_YET,
    PENDING_REASONS,
    Probe,
    ProbeRunner,
    ReaderSet,
    Readings,
    Tier,
    merge,
    settled_fields,
)
from lumina_cache.telemetry.snapshot import FIELD_GROUPS, PressureLevel, Reading, Snapshot

__all__ = ["FAST_SECONDS", "SLOW_SECONDS", "WATCHED_FIELDS", "Sampler", "TelemetryError", "changes"]

FAST_SECONDS = 0.25
SLOW_SECONDS = 1.0
_OVERDUE_PERIODS = 5.0
_OVERDUE_FLOOR_SECONDS = 10.0
_JOIN_SECONDS = 0.5
_SWAPPING_ENDS_SECONDS = 30.0
"""Swapping counts as over after this long without a page swapped out: it comes in bursts."""

WATCHED_FIELDS = (
    "pressure_level",
    "thermal_state",
    "power_source",
    "low_power_mode",
    "memory_limit_bytes",
    "wired_limit_bytes",
    "gpu_recoveries_total",
)
"""Fields of which every change is an event. For the others, only becoming unknown and known again is."""


class TelemetryError(LuminaError, ValueError):
    """Telemetry was asked for something that it cannot do."""


def changes(before: Snapshot, after: Snapshot) -> list[dict[str, object]]:
    """The events between two snapshots, one per changed field, in plain JSON types.

    A field that was merely not read yet becomes known without an event, except the watched ones.
    """
    events: list[dict[str, object]] = []
    for name in FIELD_GROUPS:
        old, new = getattr(before, name), getattr(after, name)
        was_unknown, is_unknown = name in before.unknown, name in after.unknown
        if name in WATCHED_FIELDS:
            changed = old != new
        else:
            changed = was_unknown != is_unknown and before.unknown.get(name) not in PENDING_REASONS
        if not changed:
            continue
        events.append(
            {
                "event": "telemetry",
                "field": name,
                "old": None if was_unknown else _plain(old),
                "new": None if is_unknown else _plain(new),
                "reason": after.unknown.get(name),
                "source": after.sources.get(name),
                "raw": after.pressure_raw if name == "pressure_level" else None,
                "monotonic_seconds": after.monotonic_seconds,
                "unix_seconds": after.unix_seconds,
            }
        )
    return events


class _SwapWatch:
    """Whether pages are being swapped out, as one state that does not flicker with every burst."""

    def __init__(self) -> None:
        self._swapping: bool | None = None
        self._last_seen_at = 0.0

    def observe(self, snapshot: Snapshot) -> list[dict[str, object]]:
        """The event of a change, or none. An unknown rate changes nothing."""
        rate, now = snapshot.swap_out_bytes_per_second, snapshot.monotonic_seconds
        if rate is None:
            return []
        if rate > 0:
            self._last_seen_at = now
        over = not self._swapping or now - self._last_seen_at >= _SWAPPING_ENDS_SECONDS
        swapping = rate > 0 or not over
        before, self._swapping = self._swapping, swapping
        if swapping == bool(before):
            return []
        return [
            {
                "event": "telemetry",
                "field": "swapping",
                "old": before,
                "new": swapping,
                "reason": None,
                "source": snapshot.sources.get("swap_out_bytes_per_second"),
                "raw": rate,
                "monotonic_seconds": now,
                "unix_seconds": snapshot.unix_seconds,
            }
        ]


def _plain(value: object) -> object:
    return str(value) if isinstance(value, str) else value


class _Core:
    """What the threads hold. It knows nothing of the `Sampler`, so that dropping that one ends the
    threads.
    """

    def __init__(
        self,
        readers: ReaderSet,
        on_change: Callable[[], Callable[[dict[str, object]], object] | None],
        fast_seconds: float,
        slow_seconds: float,
        debounce: Debounce | None,
        rule: LinuxRule | None,
        clock: Callable[[], float],
    ) -> None:
        self.readers = readers
        self.fast_seconds = fast_seconds
        self.slow_seconds = slow_seconds
        self.latest: Snapshot | None = None
        self.last_callback_error: str | None = None
        self.threads: tuple[threading.Thread, ...] = ()
        self.stopping = False
        self._on_change = on_change
        self._debounce, self._rule, self._clock = debounce, rule, clock
        self._slow_probes = {p.name: p for p in readers.probes if p.tier is Tier.SLOW}
        self._fast_probes = tuple(p for p in readers.probes if p.tier is Tier.FAST)
        self._reset()

    def _reset(self) -> None:
        self._debouncer = PressureDebouncer(self._debounce)
        self._swap_watch = _SwapWatch()
        self._fast = ProbeRunner(self._fast_probes, clock=self._clock)
        self._slow = ProbeRunner(tuple(self._slow_probes.values()), clock=self._clock)
        self._fast_settled: frozenset[str] = frozenset()
        self._started_at = self._clock()
        # One reference, replaced as a whole by the slow thread and read by the fast one: it needs no lock.
        self._published: tuple[dict[str, Readings], dict[str, float], dict[str, float]] = ({}, {}, {})
        # Raw locks as bells: unlike an Event, one may be rung inside a garbage collection that interrupts the
        # very thread that waits on it.
        self._bells = (threading.Lock(), threading.Lock())
        for bell in self._bells:
            bell.acquire()
        self._ended = 0
        self._ending = threading.Lock()
        self._reviving = threading.Lock()

    # --- one step of each thread ---

    def fast_step(self) -> Snapshot:
        """Read the fast probes, join what the slow thread published, and make it the latest snapshot."""
        self._fast.run_due()
        parts = self._fast.parts
        self._fast_settled = settled_fields(parts.values())
        slow_parts, answered_at, slow_read_at = self._published
        now = self._clock()
        ordered: list[Mapping[str, Reading]] = []
        for probe in self.readers.probes:
            if probe.tier is Tier.FAST:
                ordered.append(parts.get(probe.name, {}))
            elif probe.name in slow_parts:
                ordered.append(_unless_overdue(probe, slow_parts[probe.name], answered_at[probe.name], now))
            elif not probe.fallback:
                ordered.append(_not_answered(probe, self._started_at, now))
        readings = derive(self.readers.platform, merge(ordered), self._debouncer.level, self._rule)
        level = readings.get("pressure_level")
        seen = level.value if level is not None else None
        acted = self._debouncer.observe(
            seen if isinstance(seen, PressureLevel) else PressureLevel.UNKNOWN,
        )
        if level is not None and level.known and acted is not PressureLevel.UNKNOWN:
            readings["pressure_level"] = Reading(acted, level.source)
        snapshot = Snapshot.from_readings(
            readings,
            platform=self.readers.platform,
            read_at=slow_read_at | self._fast.read_at,
            monotonic_seconds=now,
        )
        before, self.latest = self.latest, snapshot
        if before is not None:
            self._report(before, snapshot)
        return snapshot

    def slow_step(self) -> None:
        """Read the slow probes that are due, publishing after each."""
        self._slow.run_due(lambda name: name in self._fast_settled, self._publish)

    def _publish(self) -> None:
        slow = self._slow
        self._published = (dict(slow.parts), dict(slow.answered_at), dict(slow.read_at))

    def _report(self, before: Snapshot, after: Snapshot) -> None:
        tell = self._on_change()
        if tell is None:
            return
        for event in changes(before, after) + self._swap_watch.observe(after):
            try:
                tell(event)
            except Exception as error:
                self.last_callback_error = f"{type(error).__name__}: {error}"

    def broke(self, error: Exception) -> None:
        """A fault of this file must not leave an old snapshot standing as if it were fresh."""
        fault = Reading.unknown(f"telemetry failed: {type(error).__name__}: {error}", "sampler")
        self.latest = Snapshot.from_readings(
            dict.fromkeys(FIELD_GROUPS, fault), platform=self.readers.platform
        )

    # --- threads ---

    def start(self) -> None:
        self.threads = (
            threading.Thread(target=_run, args=(self, 0), name="lumina-telemetry-fast", daemon=True),
            threading.Thread(target=_run, args=(self, 1), name="lumina-telemetry-slow", daemon=True),
        )
        for thread in self.threads:
            thread.start()

    def wait(self, which: int, seconds: float) -> bool:
        """Sleep; True when it is time to end."""
        return self._bells[which].acquire(timeout=max(0.0, seconds)) or self.stopping

    def ended(self) -> None:
        with self._ending:
            self._ended += 1
            last = self._ended == len(self.threads)
        if last:
            self.readers.close()

    def stop(self) -> None:
        """Ring both bells and give the threads a moment. One that hangs in a call is left to end with the
        process.
        """
        self.stopping = True
        for bell in self._bells:
            with contextlib.suppress(RuntimeError):  # already rung
                bell.release()
        for thread in self.threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(_JOIN_SECONDS)

    def after_fork(self) -> None:
        """In the child there are no threads. (The readers drop the parent's handles themselves.)"""
        if not self.stopping:
            self._reset()
            self.threads = ()
            self.latest = None

    def revive(self) -> Snapshot:
        """First read of `latest` in a forked child."""
        with self._reviving:
            if self.latest is None:
                self.fast_step()
                self.start()
            assert self.latest is not None
            return self.latest


def _run(core: _Core, which: int) -> None:
    step: Callable[[], object] = (core.fast_step, core.slow_step)[which]
    period = (core.fast_seconds, core.slow_seconds)[which]
    due = time.monotonic() + (period if which == 0 else 0.0)
    try:
        while not core.wait(which, due - time.monotonic()):
            try:
                step()
            except Exception as error:
                core.broke(error)
            # After a sleep of the machine or a long call, go on from now: missed beats are not made up.
            due = max(due + period, time.monotonic() + 0.1 * period)
    finally:
        core.ended()


def _unless_overdue(
    probe: Probe, readings: Readings, answered_at: float, now: float
) -> Mapping[str, Reading]:
    overdue = now - answered_at
    if overdue <= max(_OVERDUE_FLOOR_SECONDS, _OVERDUE_PERIODS * probe.period_seconds):
        return readings
    if all(not reading.known for reading in readings.values()):
        return readings  # it failed and waits for its next try
    reason = f"the reader has not answered for {overdue:.0f} s"
    return {name: Reading.unknown(reason, probe.name) for name in probe.fields}


def _not_answered(probe: Probe, started_at: float, now: float) -> Mapping[str, Reading]:
    reason = NOT_READ_YET
    if now - started_at > _OVERDUE_FLOOR_SECONDS:
        reason = f"the reader has not answered for {now - started_at:.0f} s"
    return {name: Reading.unknown(reason, probe.name) for name in probe.fields}


_CORES: weakref.WeakSet[_Core] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for core in list(_CORES):
        core.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Sampler:
    """Two background threads that keep `latest` fresh until `close`, exit or garbage collection.

    `on_change` is called from the fast thread with one plain dict per change (see `changes`). A bound
    method is held weakly, so that an owner that passes its own can be collected; what it raises is kept
    in `last_callback_error`. With ``enabled=False`` there is no thread and every field is unknown. After
    a fork the child's sampler starts anew when `latest` is first read there. Raises `TelemetryError` for
    a period that is not positive.
    """

    def __init__(
        self,
        *,
        on_change: Callable[[dict[str, object]], object] | None = None,
        enabled: bool = True,
        readers: ReaderSet | None = None,
        fast_seconds: float = FAST_SECONDS,
        slow_seconds: float = SLOW_SECONDS,
        debounce: Debounce | None = None,
        rule: LinuxRule | None = None,
        disk_directory: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not fast_seconds > 0:
            raise TelemetryError(f"fast_seconds is {fast_seconds!r}: give a positive number, such as 0.25")
        if not slow_seconds >= SLOW_SECONDS:
            raise TelemetryError(f"slow_seconds is {slow_seconds!r}: give 1 or more; its sources are costly")
        own = readers if readers is not None else platform_readers(disk_directory)
        self._core = _Core(own, _callback(on_change), fast_seconds, slow_seconds, debounce, rule, clock)
        if not enabled:
            off = Reading.unknown("telemetry is off", "sampler")
            self._core.latest = Snapshot.from_readings(
                dict.fromkeys(FIELD_GROUPS, off), platform=own.platform
            )
            self._core.stopping = True
            self._finalizer = weakref.finalize(self, lambda: None)
            return
        self._core.fast_step()
        _CORES.add(self._core)
        self._core.start()
        self._finalizer = weakref.finalize(self, self._core.stop)

    @property
    def latest(self) -> Snapshot:
        """The last snapshot. Loads attributes only: no system call, no lock."""
        snapshot = self._core.latest
        return snapshot if snapshot is not None else self._core.revive()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._core.threads)

    @property
    def last_callback_error(self) -> str | None:
        """What `on_change` last raised, or None."""
        return self._core.last_callback_error

    def close(self) -> None:
        """End both threads; `latest` stays as it is. Closing twice is allowed."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _callback(
    on_change: Callable[[dict[str, object]], object] | None,
) -> Callable[[], Callable[[dict[str, object]], object] | None]:
    if isinstance(on_change, MethodType):
        return weakref.WeakMethod(on_change)
    return lambda: on_change
