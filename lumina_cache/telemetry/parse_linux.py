"""Pure parsers of what Linux prints under ``/proc`` and ``/sys/fs/cgroup``.

Formats: ``proc(5)``, kernel documentation ``accounting/psi``, ``admin-guide/cgroup-v2``,
``admin-guide/cgroup-v1/memory``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lumina_cache.telemetry.parse import MAX_BYTES, Unknown, complete_lines, only_line, unsigned

__all__ = [
    "CgroupMembership",
    "Stall",
    "parse_cgroup_limit",
    "parse_cgroup_membership",
    "parse_counter",
    "parse_kib_table",
    "parse_psi",
    "parse_table",
]

_KIB = re.compile(r"([A-Za-z_()0-9]+):[ \t]+([0-9]{1,14}) kB")
_PSI = re.compile(
    r"(some|full) avg10=([0-9]{1,3}\.[0-9]{2}) avg60=([0-9]{1,3}\.[0-9]{2})"
    r" avg300=([0-9]{1,3}\.[0-9]{2}) total=([0-9]{1,20})"
)
_V1_UNLIMITED = 1 << 62
"""cgroup v1 prints the largest page-aligned 63-bit number for "no limit"."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Averages over ten seconds, in percent, from ``/proc/pressure/memory`` or a group's
    ``memory.pressure``.
    """

    some_percent: float
    full_percent: float


@dataclass(frozen=True, slots=True)
class CgroupMembership:
    """Paths of this process inside the v2 hierarchy and inside v1's memory hierarchy; None when not in
    one.
    """

    v2: str | None
    v1_memory: str | None


def parse_kib_table(text: str) -> dict[str, int]:
    """Bytes by name from ``/proc/meminfo`` or ``/proc/self/status``; malformed lines are left out."""
    found: dict[str, int] = {}
    for line in complete_lines(text):
        match = _KIB.fullmatch(line)
        if match and int(match[2]) * 1024 <= MAX_BYTES:
            found[match[1]] = int(match[2]) * 1024
    return found


def parse_table(text: str) -> dict[str, int]:
    """Numbers by name from ``name number`` lines (``/proc/vmstat``, ``memory.stat``); others are left out."""
    found: dict[str, int] = {}
    for line in complete_lines(text):
        name, _, digits = line.partition(" ")
        number = unsigned(digits)
        if name.isascii() and name.isidentifier() and number is not None:
            found[name] = number
    return found


def parse_psi(text: str) -> Stall | Unknown:
    """Both lines of a PSI file. Kernels without PSI have no such file or refuse to read it."""
    averages: dict[str, float] = {}
    for line in complete_lines(text):
        match = _PSI.fullmatch(line)
        if match and float(match[2]) <= 100.0:
            averages[match[1]] = float(match[2])
    if averages.keys() != {"some", "full"}:
        return Unknown("not in the format of a PSI memory file")
    return Stall(averages["some"], averages["full"])


def parse_counter(text: str) -> int | Unknown:
    """One non-negative number of bytes on a line of its own."""
    number = unsigned(only_line(text) or "")
    return Unknown("not one number on one line") if number is None or number > MAX_BYTES else number


def parse_cgroup_limit(text: str) -> int | Unknown | None:
    """Bytes, or None when the group has no limit (v2 prints ``max``, v1 a number near 2**63)."""
    if text == "max\n":
        return None
    number = unsigned(only_line(text) or "")
    if number is not None and _V1_UNLIMITED <= number < 1 << 63:
        return None
    return parse_counter(text)


def parse_cgroup_membership(text: str) -> CgroupMembership | Unknown:
    """``/proc/self/cgroup``: lines ``id:controllers:path``; v2 is the line with id 0 and no controllers."""
    v2 = v1_memory = None
    seen = False
    for line in complete_lines(text):
        parts = line.split(":", 2)
        if len(parts) != 3 or unsigned(parts[0]) is None or not parts[2].startswith("/"):
            continue
        seen = True
        if parts[0] == "0" and parts[1] == "":
            v2 = parts[2]
        elif "memory" in parts[1].split(","):
            v1_memory = parts[2]
    return CgroupMembership(v2, v1_memory) if seen else Unknown("no line of the form id:controllers:path")
