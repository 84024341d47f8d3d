"""Simpler policies, to compare with and to start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..actions import Evict, Keep
from .adaptive import nearest
from .table import Columns, columns_of
from .values import Candidate, Decision, State

__all__ = ["Greedy", "Window"]


def _fits(columns: Columns, state: State) -> NDArray[np.bool_]:
    """Which candidates are feasible and within the limit."""
    limit = state.limit.nbytes
    within: NDArray[np.bool_] = columns.feasible & (True if limit is None else columns.nbytes_next <= limit)
    return within


@dataclass(frozen=True)
class Greedy:
    """Least expected KL among feasible single actions and composites that fit; time, tails and risk are not weighed."""

    name: str = "greedy"

    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        x = columns_of(candidates)
        fitting = _fits(x, state) & ~np.isnan(x.kl)
        if not fitting.any():
            return nearest(state, candidates)
        least = np.flatnonzero(fitting & (x.kl == x.kl[fitting].min())).tolist()
        best = min((candidates[i] for i in least), key=lambda c: (c.action != Keep(), c.action.lossy))
        return Decision(best.action, f"least expected KL ({best.inputs.kl:.3g} nats per token) that fits")


@dataclass(frozen=True)
class Window:
    """Sinks and the newest rows, as many as fit: what mlx-lm's ``max_kv_size`` (RotatingKVCache) would do."""

    name: str = "window"

    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        fitting = _fits(columns_of(candidates), state)
        keep = next(i for i, c in enumerate(candidates) if c.action == Keep())
        if fitting[keep]:
            return Decision(candidates[keep].action, "it fits")
        windows = [
            c
            for c in (candidates[i] for i in np.flatnonzero(fitting).tolist())
            if isinstance(c.action, Evict) and c.action.scorer == "sinks_window"
        ]
        if not windows:
            return nearest(state, candidates)
        best = max(windows, key=lambda c: c.nbytes_next)
        return Decision(best.action, "the newest rows, as many as fit")
