"""What every parser of this room shares: a result that is not there says why, and nothing is raised."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_BYTES", "Unknown", "complete_lines", "only_line", "unsigned"]

MAX_BYTES = 1 << 46
"""64 TiB. A count of bytes above it is garbage: no machine that this library runs on has as much."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """In place of a value: why there is none."""

    reason: str


def complete_lines(text: str) -> list[str]:
    """The lines that end in a newline; a cut-off last line could hold half a number and is dropped."""
    return [line.rstrip("\r") for line in text.split("\n")[:-1]]


def unsigned(text: str) -> int | None:
    """A plain ASCII decimal number without sign, or None. `int` would also take ``_``, blanks and other
    scripts.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def only_line(text: str) -> str | None:
    """The one line that `text` is, newline included; None when it is anything else."""
    return text[:-1] if text.endswith("\n") and text.count("\n") == 1 else None
