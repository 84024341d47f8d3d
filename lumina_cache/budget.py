"""Amounts of memory as people write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import BudgetError

if TYPE_CHECKING:
    from .telemetry import Snapshot

__all__ = ["budget_nbytes", "format_bytes", "parse_bytes"]

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")


def parse_bytes(amount: int | str) -> int:
    """Bytes in ``amount``: a whole number of bytes, or text such as ``"512MB"``, ``"2 GB"``, ``"1.5GiB"``.

    Raises:
        BudgetError: naming the text and the units that are read.
    """
    if isinstance(amount, bool) or not isinstance(amount, int | str):
        raise BudgetError(f"a budget is a number of bytes or text such as '2GB', not {amount!r}")
    if isinstance(amount, int):
        found = amount
    else:
        match = _AMOUNT.match(amount)
        if match is None or match[2].lower() not in _UNITS:
            raise BudgetError(
                f"cannot read {amount!r} as an amount of memory; write for example 512MB, 2GB or 1.5GiB"
            )
        found = int(float(match[1]) * _UNITS[match[2].lower()])
    if found <= 0:
        raise BudgetError(f"a budget of {amount!r} is not more than nothing; leave it out to hold everything")
    return found


_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*$")

#: Share of the memory that is left which ``"auto"`` takes.
AUTO_SHARE = 0.5


def budget_nbytes(budget: int | str, read_machine: Callable[[], Snapshot | None]) -> int:
    """Bytes in ``budget``: an amount as :func:`parse_bytes` reads it, a share of the working set, or ``"auto"``.

    ``"40%"`` is that share of what MLX may use on this machine: the GPU's recommended working set, elsewhere the memory
    that this process is limited to or that there is. ``"auto"`` is half of what of it is still free.

    Raises:
        BudgetError: naming what cannot be read, or what the telemetry does not know.
    """
    share = _SHARE.match(budget) if isinstance(budget, str) else None
    auto = isinstance(budget, str) and budget.strip().lower() == "auto"
    if share is None and not auto:
        return parse_bytes(budget)
    machine = read_machine()
    if machine is None:
        raise BudgetError(f"a budget of {budget!r} needs telemetry, which is off; give a number of bytes")
    whole = machine.gpu_working_set_bytes or machine.memory_limit_bytes or machine.memory_total_bytes
    if whole is None:
        why = machine.unknown.get("memory_total_bytes", "no reason given")
        raise BudgetError(f"a budget of {budget!r}: how much memory there is, is unknown ({why}); give bytes")
    if share is not None:
        percent = float(share[1])
        if not 0 < percent <= 100:
            raise BudgetError(f"a budget of {budget!r} is not between 0% and 100%")
        return int(whole * percent / 100)
    free = whole - (machine.mlx_active_bytes or 0)
    if machine.memory_available_bytes is not None:
        free = min(free, machine.memory_available_bytes)
    return max(1, int(AUTO_SHARE * free))


def format_bytes(n: int) -> str:
    """``n`` bytes for people, in decimal units: ``1.23 GB``, ``45.6 MB``, ``789 B``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}" if abs(n) < 10 * size else f"{n / size:.1f} {unit}"
    return f"{n} B"
