"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from .errors import BudgetError

__all__ = ["format_bytes", "parse_bytes"]

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


def format_bytes(n: int) -> str:
    """``n`` bytes for people, in decimal units: ``1.23 GB``, ``45.6 MB``, ``789 B``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}" if abs(n) < 10 * size else f"{n / size:.1f} {unit}"
    return f"{n} B"
