"""Simpler policies, to compare with and to start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..actions import Evict, Keep
from .adaptive import nearest
from .values import Candidate, Decision, State

__all__ = ["Greedy", "Window"]


def _fits(candidate: Candidate, state: State) -> bool:
    return candidate.feasible and (state.limit.nbytes is None or candidate.nbytes_next <= state.limit.nbytes)


@dataclass(frozen=True)
class Greedy:
    """Least expected KL among feasible single actions and composites that fit; time, tails and risk are not weighed."""

    name: str = "greedy"

    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        fitting = [c for c in candidates if _fits(c, state) and c.inputs.kl is not None]
        if not fitting:
            return nearest(state, candidates)
        best = min(fitting, key=lambda c: (c.inputs.kl or 0.0, c.action != Keep(), c.action.lossy))
        return Decision(best.action, f"least expected KL ({best.inputs.kl:.3g} nats per token) that fits")


@dataclass(frozen=True)
class Window:
    """Sinks and the newest rows, as many as fit: what mlx-lm's ``max_kv_size`` (RotatingKVCache) would do."""

    name: str = "window"

    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        keep = next(c for c in candidates if c.action == Keep())
        if _fits(keep, state):
            return Decision(keep.action, "it fits")
        windows = [
            c
            for c in candidates
            if isinstance(c.action, Evict) and c.action.scorer == "sinks_window" and _fits(c, state)
        ]
        if not windows:
            return nearest(state, candidates)
        best = max(windows, key=lambda c: c.nbytes_next)
        return Decision(best.action, "the newest rows, as many as fit")
