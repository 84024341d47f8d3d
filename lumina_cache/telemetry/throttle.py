"""Throttling seen without a sensor: step time against the session's own baseline at equal context.

Thermal states have stayed nominal while clocks fell by 15 to 65 %. What cannot hide is the time of a
decode step. It grows with context by itself, so a step is only compared with earlier steps at about the
same context, or with the straight line through several such baselines (a decode step reads all weights
and all held rows once: its time is affine in context).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from lumina_cache.errors import LuminaError

__all__ = ["ThrottleDetector", "ThrottleEstimate", "ThrottleRule"]


@dataclass(frozen=True, slots=True)
class ThrottleRule:
    """Steps are counted, ratios are measured over expected step time. Raises ValueError when inconsistent."""

    warmup_steps: int = 8
    """Left out after the start and after a change of key: they compile and fill caches."""
    baseline_steps: int = 24
    window_steps: int = 16
    raise_ratio: float = 1.25
    clear_ratio: float = 1.10
    better_ratio: float = 0.90
    """A whole window below this means that the baseline itself was taken under load; it is lowered."""

    def __post_init__(self) -> None:
        if not 0 < self.better_ratio < 1 < self.clear_ratio < self.raise_ratio:
            raise ValueError(f"needs better < 1 < clear < raise: {self}")
        if self.warmup_steps < 0 or self.baseline_steps < 3 or self.window_steps < 3:
            raise ValueError(f"needs warmup >= 0, baseline >= 3, window >= 3 steps: {self}")


@dataclass(frozen=True, slots=True)
class ThrottleEstimate:
    """`throttled` and `slowdown` are None with a `reason` while there is nothing to compare with."""

    throttled: bool | None
    slowdown: float | None
    """Median of the last steps' time over their expected time; 1.0 is as fast as the session's baseline."""
    basis: str | None = None
    """``equal context`` or ``line through baselines``."""
    reason: str | None = None


@dataclass(slots=True)
class _Baselines:
    """Median step seconds by context bucket, for one key."""

    medians: dict[int, float] = field(default_factory=dict)
    learning: dict[int, list[float]] = field(default_factory=dict)


class ThrottleDetector:
    """Feed it every decode step; it answers whether the machine has become slower than it was.

    `key` names whatever else changes step time (model, storage of the cache, batch): each key has
    baselines of its own, and changing it is not taken for throttling. Pure arithmetic, a few microseconds
    a step, no thread.
    """

    def __init__(self, rule: ThrottleRule | None = None) -> None:
        self._rule = rule or ThrottleRule()
        self._tables: dict[str, _Baselines] = {}
        self._key: str | None = None
        self._skip = 0
        self._ratios: deque[float] = deque(maxlen=self._rule.window_steps)
        self._throttled = False
        self._last = ThrottleEstimate(None, None, reason="no step was seen")

    @property
    def estimate(self) -> ThrottleEstimate:
        return self._last

    def observe(self, step_seconds: float, context_tokens: int, key: str = "") -> ThrottleEstimate:
        """Take one decode step of `step_seconds` at `context_tokens` held or attended; return the estimate.

        Raises ThrottleInputError for a time that is not a positive finite number or a negative context.
        """
        if not (math.isfinite(step_seconds) and step_seconds > 0):
            raise ThrottleInputError(f"step_seconds is {step_seconds!r}: give a positive number of seconds")
        if context_tokens < 0:
            raise ThrottleInputError(f"context_tokens is {context_tokens!r}: give 0 or more")
        if key != self._key:
            self._key, self._skip = key, self._rule.warmup_steps
            self._ratios.clear()
            self._throttled = False
        if self._skip > 0:
            self._skip -= 1
            return self._answer(None, "warming up")
        table = self._tables.setdefault(key, _Baselines())
        expected, basis = self._expected(table, context_tokens)
        self._learn(table, context_tokens, step_seconds, expected)
        if expected is None:
            return self._answer(None, "no baseline at this context yet")
        self._ratios.append(step_seconds / expected)
        if len(self._ratios) < self._rule.window_steps:
            return self._answer(basis, "fewer steps than the window")
        slowdown = statistics.median(self._ratios)
        if slowdown <= self._rule.better_ratio:
            self._lower(table, slowdown)
            slowdown = 1.0
        if slowdown >= self._rule.raise_ratio:
            self._throttled = True
        elif slowdown <= self._rule.clear_ratio:
            self._throttled = False
        self._last = ThrottleEstimate(self._throttled, slowdown, basis)
        return self._last

    def _answer(self, basis: str | None, reason: str) -> ThrottleEstimate:
        self._last = ThrottleEstimate(None, None, basis, reason)
        return self._last

    def _expected(self, table: _Baselines, context_tokens: int) -> tuple[float | None, str | None]:
        own = table.medians.get(_bucket(context_tokens))
        if own is not None:
            return own, "equal context"
        contexts = sorted(table.medians)
        if len(contexts) < 3:
            return None, None
        lowest, highest = _centre(contexts[0]), _centre(contexts[-1])
        if highest < 1.5 * lowest or not lowest / 2 <= context_tokens + 1 <= 2 * highest:
            return None, None
        slope, intercept = statistics.linear_regression(
            [_centre(bucket) for bucket in contexts], [table.medians[bucket] for bucket in contexts]
        )
        if slope < 0:
            slope, intercept = 0.0, statistics.median(table.medians.values())
        expected = intercept + slope * (context_tokens + 1)
        return (expected, "line through baselines") if expected > 0 else (None, None)

    def _learn(
        self, table: _Baselines, context_tokens: int, step_seconds: float, expected: float | None
    ) -> None:
        bucket = _bucket(context_tokens)
        if bucket in table.medians or self._throttled:
            return
        seen = table.learning.setdefault(bucket, [])
        seen.append(step_seconds)
        if len(seen) < self._rule.baseline_steps:
            return
        del table.learning[bucket]
        median = statistics.median(seen)
        # Slow steps must not become the norm: where the line already says what to expect, it stands.
        if expected is None or median <= expected * self._rule.clear_ratio:
            table.medians[bucket] = median

    def _lower(self, table: _Baselines, slowdown: float) -> None:
        table.medians = {bucket: median * slowdown for bucket, median in table.medians.items()}
        table.learning.clear()
        self._ratios.clear()


class ThrottleInputError(LuminaError, ValueError):
    """A step that cannot have been."""


def _bucket(context_tokens: int) -> int:
    """Quarter octaves from 64 tokens on: contexts in one bucket differ by less than a fifth."""
    return max(0, math.floor(4 * math.log2((context_tokens + 1) / 64)) + 1)


def _centre(bucket: int) -> float:
    return 32.0 if bucket == 0 else 64 * 2 ** ((bucket - 0.5) / 4)
