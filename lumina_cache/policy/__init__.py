"""Score, the weighing of candidates, and the choice among them.

A policy is a small object with a ``name`` and ``decide(state, candidates) -> Decision``. Adding one is a file here and a
line in :data:`POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .adaptive import Adaptive
from .candidates import candidates_for, next_layers, plans_for, weigh
from .limits import Limit, LimitKeeper, price_of_time
from .others import Greedy, Window
from .score import KL_PER_POINT, OVERFLOW_POINTS, Inputs, Score, Weights, quality_points, score, time_points
from .values import DEFAULT_HORIZON, Candidate, Decision, Policy, State

__all__ = [
    "DEFAULT_HORIZON",
    "KL_PER_POINT",
    "OVERFLOW_POINTS",
    "POLICIES",
    "Adaptive",
    "Candidate",
    "Decision",
    "Greedy",
    "Inputs",
    "Limit",
    "LimitKeeper",
    "Policy",
    "Score",
    "State",
    "Weights",
    "Window",
    "candidates_for",
    "next_layers",
    "plans_for",
    "price_of_time",
    "quality_points",
    "score",
    "time_points",
    "weigh",
]

#: Policies by the name that ``LuminaCache(policy=…)`` takes; ``"off"`` is for nobody deciding.
POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {"adaptive": Adaptive, "greedy": Greedy, "window": Window}
)
