"""Ceilings: rows chosen by what no cache can know. Their text forms begin with ``oracle:``; none is an action of A.

==================================  ==================================================================================
``oracle:future@0.25``              every head keeps the quarter of its rows that the scored tokens will attend to most
``oracle:future_ragged@0.25``       as many rows in each layer, the most attended to of all its heads
``oracle:step@0.25``                all rows are there; each query sees the quarter that it gives most weight to
==================================  ==================================================================================

The first two are what Belady's rule (IBM Syst. J. 5, 1966) is to paging: they look at the very tokens that they are
judged on. The third looks at nothing but its own query, so it bounds whatever fetches some rows per step.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...actions import Action, Composite, parse_action
from ...errors import ActionSyntaxError

__all__ = ["FORESIGHTS", "Foresight", "foresees", "parse"]

_PREFIX = "oracle:"

#: What there is, with what it is.
FORESIGHTS = {
    "future": "each head's rows with the most attention from the scored tokens",
    "future_ragged": "a layer's rows with the most attention from the scored tokens, over all its heads",
    "step": "each query's own rows with the most weight, all rows being there",
}


@dataclass(frozen=True)
class Foresight(Action):
    """Keep a share (``ratio``) of the rows, chosen by an oracle."""

    how: str
    ratio: float

    def __post_init__(self) -> None:
        if self.how not in FORESIGHTS:
            raise ActionSyntaxError(f"{_PREFIX}{self.how}: no such oracle; known: {', '.join(FORESIGHTS)}")
        if not 0.0 < self.ratio < 1.0:
            raise ActionSyntaxError(f"{self}: the ratio kept must lie between 0 and 1")

    @property
    def lossy(self) -> bool:
        return True

    @property
    def bounded_by(self) -> str:
        return "rows"

    def rows_kept(self, rows_held: int) -> int:
        """How many of ``rows_held`` rows remain."""
        return min(rows_held, max(1, round(self.ratio * rows_held)))

    def __str__(self) -> str:
        ratio = f"{self.ratio:.2f}" if round(self.ratio, 2) == self.ratio else repr(self.ratio)
        return f"{_PREFIX}{self.how}@{ratio}"


def parse(text: str) -> Action:
    """An action's text form, or one with oracles in it.

    Raises:
        ActionSyntaxError: naming the part that was not understood.
    """
    if _PREFIX not in text:
        return parse_action(text)
    parts = tuple(_term(part.strip(), text) for part in text.strip().split("+"))
    return parts[0] if len(parts) == 1 else Composite(parts)


def _term(term: str, whole: str) -> Action:
    if not term.startswith(_PREFIX):
        return parse_action(term)
    how, at, ratio = term.removeprefix(_PREFIX).partition("@")
    try:
        return Foresight(how, float(ratio) if at else 0.0)
    except ValueError as error:
        if isinstance(error, ActionSyntaxError):
            raise
        raise ActionSyntaxError(f"{whole!r}: cannot read the ratio {ratio!r}") from None


def foresees(action: Action) -> bool:
    """Whether an oracle is part of ``action``."""
    return any(isinstance(part, Foresight) for part in action.parts)
