"""The default policy: the feasible action with the highest score that keeps within the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..actions import Keep
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
        fitting = [c for c in candidates if c.feasible and c.nbytes_next <= (state.limit.nbytes or 0)]
        scored = [c for c in fitting if c.score.total is not None]
        if scored:
            slowest = max((c.score.time for c in candidates if c.score.time is not None), default=0.0)
            best = max(
                scored,
                key=lambda c: (
                    round(_points(c, state.weights.time * max(0.0, slowest)), 9),
                    not c.action.lossy,
                    -len(c.action.parts),
                    -c.nbytes_peak,
                ),
            )
            return Decision(best.action, _why(best, state))
        if fitting:
            most = max(fitting, key=lambda c: (c.nbytes_next, not c.action.lossy))
            return Decision(
                most.action,
                f"no action with a figure of quality holds {_limit(state)}; of the others this one keeps most "
                f"({most.nbytes_next} bytes)",
            )
        return nearest(state, candidates)


def _points(candidate: Candidate, slowest: float) -> float:
    total = candidate.score.total or 0.0
    return total - slowest if candidate.score.time is None else total


def nearest(state: State, candidates: Sequence[Candidate]) -> Decision:
    """What to do when nothing feasible holds the limit."""
    if state.tokens > 1:
        # The chunk passes the limit whatever is done before it, and rows are weighed again as soon as it is done.
        return Decision(
            Keep(),
            f"a chunk of {state.tokens} tokens passes {_limit(state)} by itself; acting after it loses less",
        )
    smallest = min((c for c in candidates if c.feasible), key=lambda c: c.nbytes_next)
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
