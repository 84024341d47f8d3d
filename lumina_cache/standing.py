"""A fixed plan: what the caller wants done to the rows, decided once, carried out while tokens come.

The plan acts when the prompt is over: at the boundary before the first step of one token. So its result does not depend
on the size of the prompt's chunks. Re-encoded rows are encoded on from there by the layer itself. Evictions to a number
of rows are repeated: when ``slack`` more tokens have come, so that the copy is paid once in as many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from .actions import Action, Composite, Evict, Plan, singles

__all__ = ["DEFAULT_SLACK", "StandingPlan", "repeated"]

#: Tokens between two evictions where the action names no slack of its own.
DEFAULT_SLACK = 64


@dataclass
class StandingPlan:
    """The caller's plan and where it stands."""

    action: Action
    done: bool = False  #: whether it has acted for the first time
    wait: int = 0  #: tokens until it acts again

    def due(self, tokens: int) -> Action | None:
        """What is to be done before a step of ``tokens`` tokens; None if nothing is."""
        if not self.done:
            return self.action if tokens == 1 else None
        self.wait -= tokens
        again = repeated(self.action)
        return again if again is not None and self.wait < 0 else None

    def acted(self) -> None:
        """What was due has been done, or there was nothing to do yet."""
        self.done = True
        self.wait = slack_of(self.action)


def repeated(action: Action) -> Action | None:
    """The part of ``action`` that is repeated while tokens come: evictions to a number of rows."""
    if isinstance(action, Plan):
        pairs = [(layers, again) for layers, a in action.assignments if (again := repeated(a)) is not None]
        return Plan(tuple(pairs)) if pairs else None
    parts = tuple(p for p in action.parts if isinstance(p, Evict) and p.rows is not None)
    if len(parts) > 1:
        return Composite(parts)
    return parts[0] if parts else None


def slack_of(action: Action) -> int:
    """Tokens between two repetitions: the least that any part asks for."""
    return min(
        (p.slack or DEFAULT_SLACK for p in singles(action) if isinstance(p, Evict)), default=DEFAULT_SLACK
    )
