"""The default policy: the feasible action with the highest score that keeps within the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..actions import Keep
from .table import columns_of
from .values import Candidate, Decision, State

__all__ = ["Adaptive", "nearest"]


@dataclass(frozen=True)
class Adaptive:
    """Highest score; of scores that tie, lossless before lossy, fewer parts before more, lower peak before higher.

    While everything fits nothing lossy is done, however fast it would make the next steps: rows given up are gone. A
    time that nobody measured counts as that of the slowest candidate, or not measuring would pay.
    """

    name: str = "adaptive"

    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        keep = next(c for c in candidates if c.action == Keep())
        if keep.score.risk == 0:
            return Decision(
                keep.action, f"{keep.nbytes_next} bytes after the next step are within {_limit(state)}"
            )
        x = columns_of(candidates)
        fitting = x.feasible & (x.nbytes_next <= (state.limit.nbytes or 0))
        scored = fitting & ~np.isnan(x.total)
        if scored.any():
            known = x.time[~np.isnan(x.time)]
            slowest = state.weights.time * max(0.0, known.max() if known.size else 0.0)
            points = np.where(scored, np.where(np.isnan(x.time), x.total - slowest, x.total), -np.inf)
            # Looked at one by one: all whose points may be equal to the highest once they are rounded.
            highest = np.flatnonzero(points >= points.max() - 2e-9).tolist()
            _, best = max(((float(points[i]), candidates[i]) for i in highest), key=_merit)
            return Decision(best.action, _why(best, state))
        if fitting.any():
            most = max(
                (candidates[i] for i in np.flatnonzero(fitting).tolist()),
                key=lambda c: (c.nbytes_next, not c.action.lossy),
            )
            return Decision(
                most.action,
                f"no action with a figure of quality holds {_limit(state)}; of the others this one keeps most "
                f"({most.nbytes_next} bytes)",
            )
        return nearest(state, candidates)


def _merit(one: tuple[float, Candidate]) -> tuple[float, bool, int, int]:
    points, candidate = one
    action = candidate.action
    return round(points, 9), not action.lossy, -len(action.parts), -candidate.nbytes_peak


def nearest(state: State, candidates: Sequence[Candidate]) -> Decision:
    """What to do when nothing feasible holds the limit."""
    if state.tokens > 1:
        # The chunk passes the limit whatever is done before it, and rows are weighed again as soon as it is done.
        return Decision(
            Keep(),
            f"a chunk of {state.tokens} tokens passes {_limit(state)} by itself; acting after it loses less",
        )
    x = columns_of(candidates)
    smallest = candidates[int(np.where(x.feasible, x.nbytes_next, np.iinfo(np.int64).max).argmin())]
    return Decision(
        smallest.action,
        f"nothing feasible holds {_limit(state)}; this comes nearest with {smallest.nbytes_next}",
    )


def _limit(state: State) -> str:
    return f"{state.limit.nbytes} bytes ({state.limit.why})"


def _why(best: Candidate, state: State) -> str:
    x = best.inputs
    time = "time unknown" if x.time_ratio is None else f"{x.time_ratio:.2f}× the time per token"
    return (
        f"best score ({best.score.total:.2f}: {x.kl:.3g} nats per token, {time}) among feasible actions that leave at "
        f"most {_limit(state)} after the next step"
    )
