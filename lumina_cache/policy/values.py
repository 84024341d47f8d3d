"""The values that a decision is made of: what is known, what is weighed, what is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..actions import Action
from ..backend.feasibility import Reason
from ..estimate import Held, nbytes_allocated
from ..rows import Pinned
from .limits import Limit
from .score import Inputs, Score, Weights

__all__ = ["Candidate", "Decision", "Group", "Policy", "State"]

#: Decode steps that an action is expected to be held for, where the caller said nothing.
DEFAULT_HORIZON = 256


@dataclass(frozen=True)
class Group:
    """Equal layers, counted, with what they weigh together in the damage of a codec (their number where all mind alike)."""

    held: Held
    weight: float


@dataclass(frozen=True)
class State:
    """What a decision is made on.

    ``limit`` is what the layers may take (bytes, allocated): the budget, or less while the machine is short of memory.
    """

    phase: str | None
    tokens: int  #: of the step that is about to begin
    layers: tuple[Held, ...]  #: equal ones counted
    budget: int | None  #: bytes that the caller gave; None if none were given
    limit: Limit
    each: tuple[Held, ...] = ()  #: every layer by itself, for plans; empty: no plan is made
    horizon: int = DEFAULT_HORIZON  #: decode steps still to come, as far as is known
    available: int | None = None  #: bytes that may still be allocated on this machine; None when unknown
    remaining: int | None = None  #: tokens still to come at most, prompt and answer; None: nobody said
    last_chunk: bool = (
        False  #: the chunk in hand is shorter than one before it: nothing of the prompt follows
    )
    within_prompt: bool = (
        False  #: a chunk of a prompt has just been read, and nobody says whether it was the last
    )
    rows_must_stay: bool = False  #: tokens may be taken back (speculative decoding)
    protect: Pinned = ()  #: ranges of positions (first, end) that the caller protects from eviction
    evicted_by: str | None = None  #: scorer by which rows are missing already
    lost: tuple[float, float] | None = (
        0.0,
        0.0,
    )  #: mean KL and p95 that codes of earlier layouts have left in the rows; None: unknown
    prediction_error: tuple[float, float] = (
        0.0,
        0.0,
    )  #: mean and spread of ln(observed/predicted) peak bytes
    weights: Weights = field(default=Weights())
    machine: dict[str, Any] | None = None  #: telemetry record

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt that are still expected: none while decoding; within a prompt, whose length nobody says,
        as many again as were seen, and at least the coming chunk; no more than half of what the caller says is still to
        come, as the answer is part of that; and nothing behind a chunk that is shorter than one before it."""
        if self.last_chunk:
            return self.tokens if self.tokens > 1 else 0
        if self.tokens <= 1 and not self.within_prompt:
            return 0
        expected = max(self.tokens, *(one.offset for one in self.layers)) if self.layers else self.tokens
        return expected if self.remaining is None else max(self.tokens, min(expected, self.remaining // 2))

    @property
    def prompt_likely(self) -> int:
        """The same, by how likely they are: what chunks are expected to take."""
        return round(self.likelihood * self.prompt_tokens)

    @property
    def steps(self) -> int:
        """Decode steps still to come."""
        return self.horizon if self.remaining is None else max(1, self.remaining - self.prompt_tokens)

    @property
    def likelihood(self) -> float:
        """Probability of what is expected: one where it is known, a half where as much again is expected as was seen.

        That is the median of a length that is as likely to be doubled at any length.
        """
        return 1.0 if self.remaining is not None or self.last_chunk or not self.prompt_tokens else 0.5

    @property
    def to_come(self) -> int:
        """Tokens for which actions are judged ahead: prompt and answer; while decoding none, unless the caller said."""
        if self.remaining is not None:
            return max(self.tokens, self.remaining)
        return self.prompt_tokens + self.horizon if self.prompt_tokens else 0

    def to_record(self) -> dict[str, Any]:
        from .candidates import next_layers

        return {
            "phase": self.phase,
            "tokens_step": self.tokens,
            "layers": [
                {
                    "kind": one.kind,
                    "count": one.count,
                    "rows": one.rows,
                    "capacity": one.capacity,
                    "offset": one.offset,
                    "bits": one.bits,
                    "on_disk": one.on_disk,
                    "nbytes_allocated": nbytes_allocated([one]),
                }
                for one in self.layers
            ],
            "nbytes_allocated": nbytes_allocated(self.layers),
            "nbytes_next": nbytes_allocated(next_layers(self.layers, self.tokens)),
            "budget": self.budget,
            "limit": self.limit.to_record(),
            "horizon": self.horizon,
            "remaining": self.remaining,
            "last_chunk": self.last_chunk,
            "within_prompt": self.within_prompt,
            "available": self.available,
            "rows_must_stay": self.rows_must_stay,
            "protect": [list(one) for one in self.protect],
            "evicted_by": self.evicted_by,
            "lost": None if self.lost is None else list(self.lost),
            "prediction_error": list(self.prediction_error),
            "weights": self.weights.to_record(),
            "machine": self.machine,
        }


@dataclass(frozen=True)
class Candidate:
    """One action of A, weighed: what it would leave, at what price, and why it cannot be done if it cannot."""

    action: Action
    reasons: tuple[Reason, ...]
    inputs: Inputs
    score: Score

    @property
    def feasible(self) -> bool:
        return not self.reasons

    @property
    def nbytes_next(self) -> int:
        """Allocated bytes after the action, the next step and one token more."""
        return self.inputs.nbytes_next

    @property
    def nbytes_peak(self) -> int:
        """Most bytes allocated while it is carried out."""
        return self.inputs.nbytes_peak

    def to_record(self) -> dict[str, Any]:
        return {
            "action": str(self.action),
            "feasible": self.feasible,
            "reasons": [r.to_record() for r in self.reasons],
            "inputs": self.inputs.to_record(),
            "score": self.score.to_record(),
        }


@dataclass(frozen=True)
class Decision:
    """What a policy chose, and one sentence why."""

    action: Action
    why: str


class Policy(Protocol):
    """Who decides. ``candidates`` holds the whole of A; only feasible ones may be chosen."""

    @property
    def name(self) -> str: ...

    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision: ...
