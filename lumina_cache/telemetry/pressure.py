"""How scarce memory is, and how far the next level is: the kernels' own rules, as pure functions.

macOS (xnu ``osfmk/vm/vm_pageout.c``, ``vm_compressor.c``; the divisors are those of Macs with more than 3
GB): with n the active, inactive and free pages and c the pages that the compressor occupies,

=====================  ==================  ===========
transition             kernel's test       same thing
=====================  ==================  ===========
normal to warn         n < 1/2 (n + c)     n < c
warn to normal         n > 3/5 (n + c)     n > 3/2 c
any to critical        n < 12/35 (n + c)   n < 12/23 c
critical to warn       n > 2/5 (n + c)     n > 2/3 c
=====================  ==================  ===========

The kernel also goes critical when the compressor nears its own limit, which these counts do not show. The
level says nothing of swap.

Linux has no level: the rule here is ours, from PSI stall times and the share of memory still available.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from lumina_cache.telemetry.snapshot import PressureLevel

__all__ = [
    "Debounce",
    "LinuxRule",
    "PressureDebouncer",
    "compressor_headroom",
    "compressor_level",
    "compressor_ratio",
]

ENTER_WARN = Fraction(1, 2)
LEAVE_WARN = Fraction(3, 5)
ENTER_CRITICAL = Fraction(12, 35)
LEAVE_CRITICAL = Fraction(2, 5)


def compressor_ratio(uncompressed_bytes: int, compressed_bytes: int) -> float | None:
    """n / (n + c), or None when both are 0."""
    total = uncompressed_bytes + compressed_bytes
    return uncompressed_bytes / total if total > 0 else None


def compressor_level(
    uncompressed_bytes: int, compressed_bytes: int, previous: PressureLevel = PressureLevel.UNKNOWN
) -> PressureLevel:
    """The level that macOS's rule gives, with its hysteresis from `previous`; UNKNOWN when both counts
    are 0.
    """
    total = uncompressed_bytes + compressed_bytes
    if total <= 0:
        return PressureLevel.UNKNOWN
    ratio = Fraction(uncompressed_bytes, total)
    if ratio < ENTER_CRITICAL or (previous is PressureLevel.CRITICAL and ratio <= LEAVE_CRITICAL):
        return PressureLevel.CRITICAL
    if ratio < ENTER_WARN:
        return PressureLevel.WARN
    if previous in (PressureLevel.WARN, PressureLevel.CRITICAL) and ratio <= LEAVE_WARN:
        return PressureLevel.WARN
    return PressureLevel.NORMAL


def compressor_headroom(level: PressureLevel, uncompressed_bytes: int, compressed_bytes: int) -> int | None:
    """First-order bytes that can be wired before the level after `level`; None when there is none after it.

    Wiring B bytes lowers n by B for good, while c grows only as the kernel reclaims: with c held still,
    normal ends at n = c and warn at n = 12/23 c. The true distance is shorter once the compressor is at
    work.
    """
    if level is PressureLevel.NORMAL:
        return max(0, uncompressed_bytes - compressed_bytes)
    if level is PressureLevel.WARN:
        return max(0, uncompressed_bytes - compressed_bytes * 12 // 23)
    return None


@dataclass(frozen=True, slots=True)
class LinuxRule:
    """When Linux counts as warn or critical. Shares are of the effective total; stalls are PSI averages
    in percent.

    A level is left only when every sign is better than its threshold by `relief` (a factor on stalls, its
    inverse on shares).
    """

    warn_available_share: float = 0.10
    critical_available_share: float = 0.05
    warn_some_percent: float = 10.0
    critical_full_percent: float = 10.0
    relief: float = 0.8

    def level(
        self,
        *,
        available_bytes: int | None,
        total_bytes: int | None,
        some_percent: float | None,
        full_percent: float | None,
        previous: PressureLevel = PressureLevel.UNKNOWN,
    ) -> PressureLevel:
        """The worst that the known signs say; UNKNOWN when neither availability nor stalls are known."""
        share = available_bytes / total_bytes if available_bytes is not None and total_bytes else None
        if share is None and (some_percent is None or full_percent is None):
            return PressureLevel.UNKNOWN

        def beyond(share_limit: float, stall: float | None, stall_limit: float, held: bool) -> bool:
            if held:
                share_limit, stall_limit = share_limit / self.relief, stall_limit * self.relief
            return (share is not None and share < share_limit) or (stall is not None and stall >= stall_limit)

        was = previous.severity or 0
        if beyond(self.critical_available_share, full_percent, self.critical_full_percent, was == 2):
            return PressureLevel.CRITICAL
        if beyond(self.warn_available_share, some_percent, self.warn_some_percent, was >= 1):
            return PressureLevel.WARN
        return PressureLevel.NORMAL

    def headroom(
        self, level: PressureLevel, available_bytes: int | None, total_bytes: int | None
    ) -> int | None:
        """Bytes until the share that the next level starts at; None when unknown or already critical."""
        share = {
            PressureLevel.NORMAL: self.warn_available_share,
            PressureLevel.WARN: self.critical_available_share,
        }.get(level)
        if share is None or available_bytes is None or not total_bytes:
            return None
        return max(0, available_bytes - int(share * total_bytes))


@dataclass(frozen=True, slots=True)
class Debounce:
    """How many readings in a row move the level: up to critical at once, up to warn, and down."""

    warn_readings: int = 2
    lower_readings: int = 8
    """At 4 Hz two seconds, on top of the hysteresis that the reading itself has."""


class PressureDebouncer:
    """Turns readings into the level to act on: critical at once, warn after two, lower after several in a
    row.

    An unknown reading is passed on at once: an old level must not stand for a new one. After it, the next
    known reading is taken as it is.
    """

    def __init__(self, rule: Debounce | None = None) -> None:
        self._rule = rule or Debounce()
        self._level = PressureLevel.UNKNOWN
        self._candidate = PressureLevel.UNKNOWN
        self._streak = 0

    @property
    def level(self) -> PressureLevel:
        return self._level

    def observe(self, reading: PressureLevel) -> PressureLevel:
        """Take one reading and return the level to act on."""
        new, old = reading.severity, self._level.severity
        if new is None or old is None or new == old:
            return self._settle(reading)
        if new > old:
            if reading is PressureLevel.CRITICAL:
                return self._settle(reading)
            needed, same_side = self._rule.warn_readings, (self._candidate.severity or 0) > old
        else:
            needed, same_side = self._rule.lower_readings, (self._candidate.severity or 0) < old
        self._streak = self._streak + 1 if same_side and self._streak else 1
        # A fall from critical by way of both warn and normal readings ends at the worst of them.
        falling = new < old and same_side and self._streak > 1
        worst = max((reading, self._candidate), key=lambda level: level.severity or 0)
        self._candidate = worst if falling else reading
        return self._settle(self._candidate) if self._streak >= needed else self._level

    def _settle(self, level: PressureLevel) -> PressureLevel:
        self._level, self._candidate, self._streak = level, level, 0
        return level
