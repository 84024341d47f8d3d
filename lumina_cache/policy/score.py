"""Score of an action in a state, from its inputs, and nothing else: any logged decision can be recomputed.

``Score(a, s) = −(Q + λ_T·T + λ_R·R)`` in points; the full cache with room to spare scores 0.

- Q = D/0.02 + ½·max(0, p95 − 4·D)/0.02 with D the mean KL to the full cache (nats per token) and p95 its 95th
  percentile over tokens. One point is about the damage of plain 4-bit rows.
- T = ln(t_a/t_0)/ln 1.1 with t_a = the action's own seconds + what is still expected of the prompt + H decode steps after
  it, t_0 = the same of the dense, full cache. One point is 10 % slower.
- R = 100·P(overflow): of what is held after the action and the next step, which is predicted exactly, so that P is 0 or
  1; and of the peak while it is carried out, which is predicted with the errors of past predictions.

A term whose input is unknown is unknown, and is left out of the sum; the score says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "KL_PER_POINT",
    "OVERFLOW_POINTS",
    "TIME_PER_POINT",
    "Inputs",
    "Score",
    "Weights",
    "exceeds",
    "quality_points",
    "score",
    "time_of",
    "time_points",
]

KL_PER_POINT = 0.02
OVERFLOW_POINTS = 100.0
TIME_PER_POINT = math.log(1.1)


@dataclass(frozen=True)
class Weights:
    """λ of the score's terms."""

    time: float = 1.0
    risk: float = 1.0

    def to_record(self) -> dict[str, float]:
        return {"time": self.time, "risk": self.risk}


@dataclass(frozen=True)
class Inputs:
    """Everything that an action's score depends on."""

    nbytes_next: int  #: allocated bytes after the action, the next step and one token more
    nbytes_peak: int  #: most bytes allocated while it is carried out
    limit: int | None  #: bytes that may be allocated after it; None: no limit
    memory: int | None  #: bytes that may be allocated while it is carried out; None: not known
    kl: float | None  #: mean KL to the full cache, nats per token
    p95: float | None
    lost_kl: float | None  #: the part of ``kl`` that codes of earlier layouts have left behind; None: unknown
    lost_p95: float | None
    source: str  #: where the figures come from, or why there is none
    time_ratio: float | None = (
        None  #: of a decode step once the prompt has been read, over one of the dense, full cache
    )
    own_seconds: float | None = None  #: of the action itself
    step_seconds: float | None = None  #: of a decode step of the dense, full cache
    horizon: int = 1  #: decode steps that it is held for
    prompt_tokens: int = 0  #: of the prompt still expected, by how likely they are
    prompt_ratio: float | None = (
        None  #: of the time of a prompt's chunk after it, over that of the dense, full cache
    )
    prompt_seconds: float | None = (
        None  #: of one token of a prompt with the dense, full cache; None: left out of T
    )
    kept: float = (
        1.0  #: least share of the rows seen that a layer is expected to hold at the end of the prompt
    )
    then: str = ""  #: codec that is expected to follow until then; its damage is in ``kl``
    error_mean: float = 0.0  #: of ln(observed/predicted) peak bytes so far
    error_spread: float = 0.0

    def to_record(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Inputs:
        return cls(**record)


@dataclass(frozen=True)
class Score:
    """The terms in points, and their sum with its sign; None where a term is unknown."""

    quality: float | None
    time: float | None
    risk: float
    total: float | None  #: None while the quality is unknown

    def to_record(self) -> dict[str, Any]:
        return {"total": self.total, "Q": self.quality, "T": self.time, "R": self.risk}


def score(inputs: Inputs, weights: Weights = Weights()) -> Score:
    """The one place where the terms are put together."""
    quality, time, risk = _quality(inputs), _time(inputs), _risk(inputs)
    if quality is None:
        return Score(None, time, risk, None)
    return Score(quality, time, risk, -(quality + weights.time * (time or 0.0) + weights.risk * risk) + 0.0)


def quality_points(kl: Any, p95: Any = None, greatest: Callable[[Any, Any], Any] = max) -> Any:
    """Q in points of a mean KL and its 95th percentile (nats per token); without the tail's term where p95 is None.

    For numbers, and with another ``greatest`` for what is computed like numbers: arrays (``numpy.maximum``) and columns
    of a table (``ibis.greatest``).
    """
    tail = 0.0 if p95 is None else greatest(0.0, p95 - 4 * kl) / 2
    return (kl + tail) / KL_PER_POINT


def time_points(ratio: Any, log: Callable[[Any], Any] = math.log) -> Any:
    """T in points of a time over that of the dense, full cache; ``log`` for what is computed like numbers."""
    return log(ratio) / TIME_PER_POINT + 0.0


def _quality(x: Inputs) -> float | None:
    if x.kl is None:
        return None
    return float(quality_points(x.kl, x.p95))


def _time(x: Inputs) -> float | None:
    return time_of(
        x.time_ratio,
        x.prompt_ratio,
        step_seconds=x.step_seconds,
        horizon=x.horizon,
        prompt_seconds=x.prompt_tokens * (x.prompt_seconds or 0.0),
        own_seconds=x.own_seconds or 0.0,
    )


def time_of(
    step: float | None,
    chunk: float | None,
    *,
    step_seconds: float | None,
    horizon: int,
    prompt_seconds: float = 0.0,
    own_seconds: float = 0.0,
) -> float | None:
    """T in points; None where a ratio that counts is unknown.

    Args:
        step, chunk: ratios of the times of a decode step and of a prompt's chunk to those over dense, full rows.
        step_seconds: of one dense step; without it the ratio of steps is all there is.
        prompt_seconds: of all that is expected of the prompt, over dense rows.
        own_seconds: of carrying the action out.
    """
    if step is None:
        return None
    if not step_seconds:
        return float(time_points(step))
    if prompt_seconds and chunk is None:
        return None
    steps = step_seconds * max(1, horizon)
    seconds = own_seconds + prompt_seconds * (chunk or 0.0) + steps * step
    return float(time_points(seconds / (prompt_seconds + steps)))


def _risk(x: Inputs) -> float:
    held = x.limit is not None and x.nbytes_next > x.limit
    return OVERFLOW_POINTS * max(float(held), exceeds(x.nbytes_peak, x.memory, x.error_mean, x.error_spread))


def exceeds(predicted: int, memory: int | None, mean: float, spread: float) -> float:
    """P(observed > memory) with ln(observed/predicted) normal; a step where predictions have not been off yet."""
    if memory is None or predicted <= 0:
        return 0.0
    if memory <= 0:
        return 1.0
    margin = math.log(memory / predicted) - mean
    if spread <= 0:
        return float(margin < 0)
    return 0.5 * math.erfc(margin / spread / math.sqrt(2))
