"""Score, the weighing of candidates, and the choice among them.

``Score(a, s) = −(Q + λ_T·T + λ_R·R)`` in points; the full cache with room to spare scores 0.

- Q = D/0.02 with D the expected mean KL (nats per token) to the full cache. One point is about the damage of plain
  4-bit rows. The tail term ½·max(0, p95 − 4·D)/0.02 needs a calibrated p95 and is left out while there is none.
- T = ln(t_a/t_0)/ln 1.1 needs measured times. While there are none T is unknown, is left out of every candidate's
  total alike, and the decision says so.
- R = 100·P(bytes after the action and the next step > budget). Bytes are predicted exactly, so P is 0 or 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .actions import Action, Composite, Evict, Keep, Quantize, action_space
from .backend.capabilities import BackendProfile
from .backend.feasibility import Reason, classify
from .estimate import Held, after_action, after_append, most_rows_within, nbytes_allocated, peak_of_action
from .priors import SCORED_CODECS, SCORED_EVICTORS, Quality, expected_kl

__all__ = [
    "KL_PER_POINT",
    "OVERFLOW_POINTS",
    "Candidate",
    "Decision",
    "LeastLoss",
    "Policy",
    "Score",
    "State",
    "Weights",
    "weigh",
]

KL_PER_POINT = 0.02
OVERFLOW_POINTS = 100.0


@dataclass(frozen=True)
class Weights:
    """λ of the score's terms; fixed before anything is measured."""

    time: float = 1.0
    risk: float = 1.0


@dataclass(frozen=True)
class State:
    """What a decision is made on."""

    phase: str | None
    tokens: int  #: of the step that is about to begin
    layers: tuple[Held, ...]
    budget: int  #: bytes for all layers
    available: int | None = None  #: bytes that may still be allocated on this machine; None when unknown
    rows_must_stay: bool = False  #: tokens may be taken back (speculative decoding)
    pinned: int = 0  #: rows that the caller protects from eviction
    evicted_by: str | None = None  #: scorer by which rows are missing already
    weights: Weights = field(default=Weights())
    machine: dict[str, Any] | None = None  #: telemetry record

    def to_record(self) -> dict[str, Any]:
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
                    "nbytes_allocated": nbytes_allocated([one]),
                }
                for one in self.layers
            ],
            "nbytes_allocated": nbytes_allocated(self.layers),
            "nbytes_next": nbytes_allocated(next_layers(self.layers, self.tokens)),
            "budget": self.budget,
            "available": self.available,
            "rows_must_stay": self.rows_must_stay,
            "pinned": self.pinned,
            "weights": {"time": self.weights.time, "risk": self.weights.risk},
            "machine": self.machine,
        }


@dataclass(frozen=True)
class Score:
    """The terms of Score in points, and their sum with its sign; None where a term cannot be known yet."""

    quality: float | None
    time: float | None
    risk: float
    total: float | None
    kl: float | None
    kl_source: str

    def to_record(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "Q": self.quality,
            "T": self.time,
            "R": self.risk,
            "kl": self.kl,
            "kl_source": self.kl_source,
        }


@dataclass(frozen=True)
class Candidate:
    """One action of A, weighed: what it would leave, at what price, and why it cannot be done if it cannot."""

    action: Action
    reasons: tuple[Reason, ...]
    nbytes_next: int  #: allocated bytes after the action, the next step and one token more
    nbytes_peak: int  #: most bytes allocated while it is carried out
    score: Score

    @property
    def feasible(self) -> bool:
        return not self.reasons

    def to_record(self) -> dict[str, Any]:
        return {
            "action": str(self.action),
            "feasible": self.feasible,
            "reasons": [r.to_record() for r in self.reasons],
            "nbytes_next": self.nbytes_next,
            "nbytes_peak": self.nbytes_peak,
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


@dataclass(frozen=True)
class LeastLoss:
    """The feasible action with the highest score; of equals the one that changes least."""

    name: str = "least_loss"

    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        scored = [c for c in candidates if c.feasible and c.score.total is not None]
        if not any(c.score.risk == 0 for c in scored):
            unknown = [c for c in candidates if c.feasible and c.score.total is None and c.score.risk == 0]
            if unknown:
                most = max(unknown, key=lambda c: (c.nbytes_next, not c.action.lossy))
                return Decision(
                    most.action,
                    f"no action with a figure of quality holds {state.budget} bytes; of the others this one keeps most "
                    f"({most.nbytes_next} bytes)",
                )
            return self._nearest(state, [c for c in candidates if c.feasible])
        best = max(
            scored, key=lambda c: (c.score.total, not c.action.lossy, -len(c.action.parts), -c.nbytes_peak)
        )
        if best.action == Keep():
            return Decision(
                best.action, f"{best.nbytes_next} bytes after the next step are within the budget"
            )
        return Decision(
            best.action,
            f"least expected loss ({best.score.kl:.3g} nats per token) among feasible actions that leave at most "
            f"{state.budget} bytes after the next step",
        )

    @staticmethod
    def _nearest(state: State, feasible: Sequence[Candidate]) -> Decision:
        if state.tokens > 1:
            # The chunk passes the budget whatever is done before it, and rows are weighed again as soon as it is done.
            return Decision(
                Keep(),
                f"a chunk of {state.tokens} tokens passes {state.budget} bytes by itself; acting after it loses less",
            )
        smallest = min(feasible, key=lambda c: c.nbytes_next)
        return Decision(
            smallest.action,
            f"nothing feasible holds {state.budget} bytes; this comes nearest with {smallest.nbytes_next}",
        )


def next_layers(layers: Iterable[Held], tokens: int) -> tuple[Held, ...]:
    """The layers after the coming step and one token more, so that an action's room outlasts a chunk."""
    return after_append(after_append(layers, tokens), 1)


def candidates_for(state: State, group_size: int, bits: Iterable[int] = (8, 4)) -> tuple[Action, ...]:
    """The action space A for a state, plus evictions to just as many rows as the budget holds.

    Narrowed to methods for which there is a figure of quality: one without could never be chosen or compared.

    One row count is solved for rows as they are stored now and one for each bit width, leaving room for the next
    step; without them a coarse grid would throw away rows that fit.
    """
    bits = tuple(bits)
    plans: list[Quantize | None] = [None, *(Quantize("affine", b, b, group_size) for b in bits)]
    solved = {
        most_rows_within(
            state.layers, state.budget, then=lambda held: next_layers(held, state.tokens), quantize=q
        )
        for q in plans
    }
    held = max((one.rows for one in state.layers if one.changeable), default=0)
    rows = sorted(n for n in solved if 0 < n < held)
    return action_space(
        ratios=(0.5,),
        composite_ratios=(0.5,),
        rows=rows,
        bits=bits,
        group_size=group_size,
        evictors=SCORED_EVICTORS,
        codecs=SCORED_CODECS,
        others=False,
    )


def weigh(state: State, actions: Iterable[Action], profile: BackendProfile) -> tuple[Candidate, ...]:
    """Bytes, score terms and reasons for every action."""
    verdicts = classify(
        actions,
        profile,
        state.layers,
        available=state.available,
        rows_must_stay=state.rows_must_stay,
        pinned=state.pinned,
    )
    return tuple(_weighed(state, v.action, v.reasons) for v in verdicts)


def _weighed(state: State, action: Action, reasons: tuple[Reason, ...]) -> Candidate:
    after = after_action(state.layers, action)
    nbytes_next = nbytes_allocated(next_layers(after, state.tokens))
    quality = _quality(state, action, after)
    return Candidate(
        action=action,
        reasons=reasons,
        nbytes_next=nbytes_next,
        nbytes_peak=peak_of_action(state.layers, action),
        score=score(quality, overflow=nbytes_next > state.budget, weights=state.weights),
    )


def score(quality: Quality, *, overflow: bool, weights: Weights) -> Score:
    """Score from its inputs; the one place where the terms are put together."""
    risk = OVERFLOW_POINTS * overflow
    points = None if quality.kl is None else quality.kl / KL_PER_POINT
    total = None if points is None else -(points + weights.risk * risk) + 0.0
    return Score(points, None, risk, total, quality.kl, quality.source)


def _quality(state: State, action: Action, after: tuple[Held, ...]) -> Quality:
    codec, scorer = _methods(action)
    if not action.lossy:
        return expected_kl(state.layers, None, state.evicted_by)
    if scorer is not None and state.evicted_by not in (None, scorer):
        return Quality(None, f"no figure for evicting by {scorer} after {state.evicted_by}")
    return expected_kl(after, codec, scorer or state.evicted_by)


def _methods(action: Action) -> tuple[str | None, str | None]:
    parts = action.actions if isinstance(action, Composite) else (action,)
    codec = next((p.codec for p in parts if isinstance(p, Quantize)), None)
    scorer = next((p.scorer for p in parts if isinstance(p, Evict)), None)
    return codec, scorer
