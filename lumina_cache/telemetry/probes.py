"""Probes: what is read, how often, in which thread; how several sources of one field are merged; and when
a source that failed is asked again.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from lumina_cache.telemetry.snapshot import FIELD_GROUPS, Reading

__all__ = [
    "NEEDS_TWO_READINGS",
    "NOT_READ_YET",
    "PENDING_REASONS",
    "RETRY_SECONDS",
    "Probe",
    "ProbeRunner",
    "ReaderSet",
    "Readings",
    "Tier",
    "merge",
    "settled_fields",
]

RETRY_SECONDS = 60.0
"""A probe that raised is asked again after this long."""

NOT_READ_YET = "not read yet"
NEEDS_TWO_READINGS = "needs two readings"
PENDING_REASONS = frozenset({NOT_READ_YET, NEEDS_TWO_READINGS})
"""Reasons that pass by themselves shortly after the start."""

Readings = dict[str, Reading]


class Tier(Enum):
    """FAST never waits on another process or on a device; SLOW may."""

    FAST = "fast"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Probe:
    """One source of one or more snapshot fields.

    `read` returns readings by field name. It may raise anything: then all of `fields` are unknown with
    the error as reason, until it is tried again after `RETRY_SECONDS`.
    """

    name: str
    fields: tuple[str, ...]
    read: Callable[[], Readings]
    tier: Tier = Tier.FAST
    period_seconds: float = 0.0
    fallback: bool = False
    """Asked only while the probes before it leave some of `fields` open; see `settled_fields`."""

    def __post_init__(self) -> None:
        strangers = [name for name in self.fields if name not in FIELD_GROUPS]
        if strangers:
            raise ValueError(f"probe {self.name} names fields that a snapshot does not have: {strangers}")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ReaderSet:
    """The probes of one platform, in order of preference, and how to let go of what they hold open."""

    platform: str
    probes: tuple[Probe, ...]
    forget: Callable[[], None] = lambda: None
    """After a fork: drop handles that belong to the parent without closing them; they are reopened on use."""
    close: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        _READER_SETS.add(self)


_READER_SETS: weakref.WeakSet[ReaderSet] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for readers in list(_READER_SETS):
        readers.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def merge(parts: Sequence[Mapping[str, Reading]]) -> Readings:
    """For each field the first known reading; when none is known, all the reasons in order."""
    merged: Readings = {}
    for part in parts:
        for name, reading in part.items():
            held = merged.get(name)
            if held is None or (not held.known and reading.known):
                merged[name] = reading
            elif not held.known and reading.reason and held.reason and reading.reason not in held.reason:
                merged[name] = Reading.unknown(
                    f"{held.reason}; {reading.source}: {reading.reason}", held.source
                )
    return merged


def settled_fields(parts: Iterable[Mapping[str, Reading]]) -> frozenset[str]:
    """Fields for which no other source needs to be asked: known ones, those beside a known one in the
    same answer (that source works, and does not have them or not yet), and those that are settled as
    having no value.
    """
    settled: set[str] = set()
    for part in parts:
        answered = any(reading.known for reading in part.values())
        settled.update(name for name, reading in part.items() if answered or reading.settled)
    return frozenset(settled)


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


class ProbeRunner:
    """Runs the probes of one tier when they are due, and remembers what each said last.

    Not thread-safe: each thread has its own. A probe that raises or leaves a field out gives unknown with
    a reason.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        *,
        clock: Callable[[], float] = time.monotonic,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._probes = tuple(probes)
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._due = dict.fromkeys((probe.name for probe in self._probes), float("-inf"))
        self.parts: dict[str, Readings] = {}
        """Last readings by probe name."""
        self.answered_at: dict[str, float] = {}
        """When each probe last answered, with values or without."""
        self.read_at: dict[str, float] = {}
        """When each group last got at least one value."""

    def run_due(
        self,
        settled_elsewhere: Callable[[str], bool] = lambda name: False,
        after_each: Callable[[], None] = lambda: None,
    ) -> bool:
        """Run what is due; True if anything ran.

        `settled_elsewhere(field)` tells whether another runner's preferred source has the field, so that a
        fallback can rest. `after_each` is called when a probe has answered, so that a later one that
        hangs holds nothing back.
        """
        ran = False
        for probe in self._probes:
            now = self._clock()
            if now < self._due[probe.name]:
                continue
            # A hair early is on time: the threads wake on a grid of their own.
            self._due[probe.name] = now + 0.9 * probe.period_seconds
            if probe.fallback and self._can_rest(probe, settled_elsewhere):
                self.parts.pop(probe.name, None)
                continue
            ran = True
            self._run(probe)
            after_each()
        return ran

    def _run(self, probe: Probe) -> None:
        try:
            readings = dict(probe.read())
        except Exception as error:
            self._due[probe.name] = self._clock() + self._retry_seconds
            reason = _said(error)
            readings = {name: Reading.unknown(reason, probe.name) for name in probe.fields}
        for name in probe.fields:
            if name not in readings:
                readings[name] = Reading.unknown("the source did not give it", probe.name)
        now = self._clock()
        if probe.fallback and not any(reading.known for reading in readings.values()):
            self._due[probe.name] = (
                now + self._retry_seconds
            )  # a command that says nothing is not worth repeating
        self.parts[probe.name] = readings
        self.answered_at[probe.name] = now
        for name, reading in readings.items():
            if reading.value is not None:
                self.read_at[FIELD_GROUPS[name]] = now

    def _can_rest(self, probe: Probe, settled_elsewhere: Callable[[str], bool]) -> bool:
        settled = settled_fields(self.parts.get(name, {}) for name in self._names_before(probe))
        return all(field in settled or settled_elsewhere(field) for field in probe.fields)

    def _names_before(self, probe: Probe) -> list[str]:
        names = [each.name for each in self._probes]
        return names[: names.index(probe.name)]
