"""Looks at the machine, weighs what could be done, asks the policy, and writes the decision down."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .actions import ACTION_SPACE_VERSION, Action, Keep
from .agree import Stance
from .audit import AuditLog, Deferred
from .backend.capabilities import OWN_PACKED_ATTENTION, BackendProfile
from .backend.feasibility import Reason
from .policy import (
    Candidate,
    Decision,
    Limit,
    LimitKeeper,
    Policy,
    State,
    Weights,
    price_of_time,
)
from .policy.candidates import Weighing
from .policy.expected import Lost
from .policy.record import pack
from .policy.table import position_of
from .profile import Profile
from .telemetry import Snapshot

__all__ = ["Decider"]


@dataclass
class Decider:
    """The policy with everything it needs but the layers, which belong to the controller."""

    policy: Policy
    budget: int | None
    read_machine: Callable[[], Snapshot | None]
    log: AuditLog
    find_profile: Callable[[], Profile]
    weights: Weights = field(default=Weights())
    keeper: LimitKeeper = field(init=False)
    limit: Limit = field(init=False)
    machine: Snapshot | None = None
    number: int = 0  #: of the last decision
    chosen: Candidate | None = None  #: of the last decision
    lost: Lost | None = (0.0, 0.0)  #: what codes of earlier layouts have left in the rows
    _signs: tuple[object, ...] | None = None
    _profile: Profile | None = None
    _errors: list[float] = field(
        default_factory=list
    )  #: ln(observed/predicted) of peaks that could be observed

    def __post_init__(self) -> None:
        self.keeper = LimitKeeper(self.budget)
        self.limit = Limit(self.budget, "no budget" if self.budget is None else "the budget")

    def copy(self, log: AuditLog) -> Decider:
        """For a copy of the cache: the same limits, another log."""
        new = replace(self, log=log)
        new.keeper, new.limit, new._profile = self.keeper, self.limit, self._profile
        new._errors = list(self._errors)
        return new

    def news(self) -> bool:
        """Whether the machine has been read since the last look; only where reading costs nothing."""
        return self.read_machine() is not self.machine

    def done(self, observed_peak: int | None) -> None:
        """What was decided last has been carried out: take down what it lost for good, and how far off its peak was."""
        if self.chosen is None:
            return
        x = self.chosen.inputs
        self.lost = None if x.lost_kl is None or x.lost_p95 is None else (x.lost_kl, x.lost_p95)
        if observed_peak is not None and x.nbytes_peak > 0:
            self._errors.append(math.log(max(1, observed_peak) / x.nbytes_peak))

    @property
    def prediction_error(self) -> tuple[float, float]:
        """Mean and spread of ln(observed/predicted) peak bytes; zeros as long as too few were observed."""
        if len(self._errors) < 2:
            return 0.0, 0.0
        return statistics.fmean(self._errors), statistics.stdev(self._errors)

    @property
    def profile(self) -> Profile:
        if self._profile is None:
            self._profile = self.find_profile()
        return self._profile

    def fit(self, group_size: int | None) -> None:
        """Use codecs whose groups divide this model's head dims."""
        if group_size is not None:
            self._profile = self.profile.for_groups_of(group_size)

    def look(self, held: int) -> Limit:
        """See how the machine is; returns what ``held`` bytes may grow to, or must fall to."""
        self.machine = self.read_machine()
        signs = signs_of(self.machine)
        if self.machine is not None and signs != self._signs:
            self.log.write("telemetry", change=None, snapshot=self.machine.to_record())
        self._signs = signs
        self.keeper, self.limit = self.keeper.after(self.machine, held)
        return self.limit

    def stance(self, held: int, predicted: int) -> Stance:
        """What was seen at the last look, for other ranks to agree on.

        Args:
            held: bytes allocated now.
            predicted: bytes after the coming step.
        """
        machine = self.machine
        mean, spread = self.prediction_error
        return Stance(
            limit=self.limit.nbytes,
            held=held,
            predicted=predicted,
            available=None if machine is None else machine.memory_available_bytes,
            trouble=None if machine is None else self.keeper.lowered is not None,
            price_of_time=price_of_time(machine, self.weights).time,
            error_mean=mean,
            error_spread=spread,
        )

    def seen(self, machine: Snapshot | None) -> None:
        """``machine`` is in the log already."""
        self._signs = signs_of(machine)

    def decide(
        self,
        state: State,
        backend: BackendProfile,
        trigger: str,
        against: Callable[[Action], tuple[Reason, ...]] | None = None,
        agreed: Stance | None = None,
    ) -> Decision:
        """Ask the policy; what it may not do becomes keeping everything, with a warning.

        Args:
            against: more reasons against an action than the classifier knows of.
            agreed: what several ranks have agreed on, in place of what was seen here.
        """
        start = time.perf_counter()
        machine = self.machine
        seen = self.stance(0, 0) if agreed is None else agreed
        state = replace(
            state,
            lost=self.lost,
            prediction_error=(seen.error_mean or 0.0, seen.error_spread or 0.0),
            available=seen.available,
            weights=replace(self.weights, time=seen.price_of_time or 0.0),
            machine=None if machine is None else machine.to_record(),
        )
        candidates: Sequence[Candidate] = self._candidates(state, backend, against)
        if against is not None:
            candidates = tuple(
                replace(c, reasons=c.reasons + more) if (more := against(c.action)) else c for c in candidates
            )
        decision = self._ask(state, candidates)
        place = position_of(candidates, decision.action)
        chosen = None if place is None else candidates[place]
        if chosen is None or not chosen.feasible:
            self._warn(
                "policy_chose_infeasible",
                f"policy {self.policy.name} chose {decision.action}, which is not a feasible candidate; "
                "keeping everything",
            )
            decision = Decision(Keep(), "the policy's choice was not feasible")
        self.chosen = chosen
        self.number += 1
        self.log.write(
            "decision",
            decision=self.number,
            trigger=trigger,
            state=state.to_record(),
            candidates=Deferred(lambda: [c.to_record() for c in candidates], lambda: pack(candidates)),
            action_space=ACTION_SPACE_VERSION,
            profile=self.profile.name,
            recall=self.profile.recall,
            chosen=str(decision.action),
            why=decision.why,
            seconds=time.perf_counter() - start,
        )
        return decision

    def _candidates(
        self, state: State, backend: BackendProfile, against: Callable[[Action], tuple[Reason, ...]] | None
    ) -> Sequence[Candidate]:
        # How rows are read decides how long a step takes over them.
        profile = self.profile.where_served if backend.has(OWN_PACKED_ATTENTION) else self.profile
        return Weighing.of(state, backend, profile, against).everything()

    def _ask(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        try:
            decision = self.policy.decide(state, candidates)
            if not isinstance(decision, Decision):
                raise TypeError(f"decide() returned {decision!r}, not a Decision")
            return decision
        except Exception as error:  # a user's policy must not break generation
            self._warn(
                "policy_failed",
                f"policy {self.policy.name}: {type(error).__name__}: {error}; keeping everything",
            )
            return Decision(Keep(), "the policy raised an exception")

    def _warn(self, code: str, text: str) -> None:
        self.log.write("warning", code=code, text=text)


def signs_of(machine: Snapshot | None) -> tuple[Any, ...] | None:
    """What of a snapshot decisions turn on."""
    if machine is None:
        return None
    swapping = machine.swap_out_bytes_per_second
    return (
        machine.pressure_level,
        machine.thermal_state,
        machine.low_power_mode,
        swapping is not None and swapping > 0,
    )
