"""A fixed plan: what the caller wants done to the rows, decided once, carried out while tokens come.

The plan acts when the prompt is over, at the boundary behind the step of its last token: all of the prompt is there, and
the first new token comes from all of it. So the result does not depend on the size of the prompt's chunks. Re-encoded
rows are encoded on from there by the layer itself. Evictions to a number of rows are repeated: when ``slack`` more
tokens have come, so that the copy is paid once in as many tokens; while a further prompt is read they wait for its end.

mlx-lm feeds a prompt in chunks and its last token alone, and reads the caches' states after each chunk. A chunk can be
one token long too, so a single token is the prompt's last one only if nobody looked at the cache before the next; two
in a row are taken for decoding whoever looks. (A prompt that is fed token by token cannot be told from decoding.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .actions import Action, Composite, Evict, Keep, Plan, singles

__all__ = ["DEFAULT_SLACK", "StandingPlan", "only"]

#: Tokens between two evictions where the action names no slack of its own.
DEFAULT_SLACK = 64

_NEVER = 1 << 60


@dataclass
class StandingPlan:
    """The caller's plan and where it stands."""

    action: Action
    done: frozenset[Action] = (
        frozenset()
    )  #: single actions that need not be tried again, unless they are repeated
    wait: int = 0  #: tokens until it may act again
    alone: int = 0  #: steps of one token in a row, this side of the last chunk

    def due(self, tokens: int, looked: bool) -> Action | None:
        """What is to be tried before a step of ``tokens`` tokens; None if nothing is.

        Args:
            looked: whether anything but the model has read the cache since the last step.
        """
        self.wait -= tokens
        if tokens > 1:
            self.alone = 0
            return None
        over = self.alone > 1 or (self.alone == 1 and not looked)
        self.alone += 1
        if not over or self.wait > 0:
            return None
        return only(self.action, self._open)

    def tried(self, done: Iterable[Action]) -> None:
        """``done`` of what was due is settled; the rest had too few rows and is tried again."""
        self.done |= frozenset(done)
        self.wait = _slack(self.action) if only(self.action, self._open) is not None else _NEVER

    def _open(self, part: Action) -> bool:
        return part not in self.done or (isinstance(part, Evict) and part.rows is not None)


def only(action: Action, wanted: Callable[[Action], bool]) -> Action | None:
    """``action`` without the single actions that are not ``wanted``; None if nothing is left."""
    if isinstance(action, Plan):
        pairs = [(layers, left) for layers, a in action.assignments if (left := only(a, wanted)) is not None]
        return Plan(tuple(pairs)) if pairs else None
    parts = tuple(p for p in action.parts if not isinstance(p, Keep) and wanted(p))
    if len(parts) > 1:
        return Composite(parts)
    return parts[0] if parts else None


def _slack(action: Action) -> int:
    """Tokens between two repetitions: the least that any part asks for."""
    return min(
        (p.slack or DEFAULT_SLACK for p in singles(action) if isinstance(p, Evict)), default=DEFAULT_SLACK
    )
