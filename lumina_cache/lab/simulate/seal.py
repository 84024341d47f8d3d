"""When dense rows are sealed while tokens come: what :meth:`lumina_cache.rows.RowStore.append` does, as numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...codecs import Layout

__all__ = ["NEVER", "sealed_after", "step_of"]

#: Of rows that are still dense when the last token is in.
NEVER = np.iinfo(np.int32).max


def step_of(tokens: int, block: int) -> npt.NDArray[np.int32]:
    """The step (from 0) that each of ``tokens`` tokens comes in, ``block`` at a time."""
    return (np.arange(tokens) // block).astype(np.int32)


def sealed_after(layout: Layout, tail: int, tokens: int, block: int) -> npt.NDArray[np.int32]:
    """For each row of the tail and then each new one: the step behind which it is sealed, or :data:`NEVER`.

    Queries of that step and of those before see it dense, later ones decoded. Not for layouts whose rows are sealed as
    they come (``unit`` 1).
    """
    found = np.full(tail + tokens, NEVER, dtype=np.int32)
    done = 0
    for step, first in enumerate(range(0, tokens, block)):
        there = tail + min(first + block, tokens) - done
        if there >= layout.tail_capacity:
            more = layout.sealable(there)
            found[done : done + more] = step
            done += more
    return found
