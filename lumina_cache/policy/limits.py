"""How much the cache may take right now: the caller's budget, or less while the machine is short of memory.

The rules follow what the operating system would do next. At *warn* it asks processes to give memory back; at *critical* it
swaps and kills. So the limit falls at once to a share of what is held, and it rises again only step by step, when the
machine has been calm for a while: giving way twice costs more than giving way once.

Unknown is handled on the safe side: no credit is given for headroom that nobody measured, and the reason says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..telemetry import PressureLevel, Snapshot, ThermalState
from .score import Weights

__all__ = ["Limit", "LimitKeeper", "price_of_time"]

#: Share of the bytes held now that may stay at a pressure level, and while the machine swaps out.
SHARE_AT = {PressureLevel.WARN: 0.75, PressureLevel.CRITICAL: 0.5}
SHARE_SWAPPING = 0.75

#: Share of the room that the machine has left which the cache may grow into; others need memory too.
SHARE_OF_ROOM = 0.5

#: Seconds after which a level that has not passed is given way to once more.
AGAIN_SECONDS = 10.0

#: Seconds of calm before a lowered limit rises, and by what factor it rises each time.
CALM_SECONDS = 30.0
RISE = 1.25


@dataclass(frozen=True)
class Limit:
    """Bytes that may be allocated for the cache, and why. None: no limit."""

    nbytes: int | None
    why: str

    def to_record(self) -> dict[str, Any]:
        return {"nbytes": self.nbytes, "why": self.why}


@dataclass(frozen=True)
class LimitKeeper:
    """The limit over time: falls at once, rises slowly. A value; :meth:`after` gives the next one."""

    budget: int | None  #: bytes; None: only the machine sets limits
    floor: int = 0  #: bytes that no pressure takes away, because nothing feasible holds less
    lowered: int | None = None  #: bytes that pressure has lowered the limit to; None while it has not
    share: float = 1.0  #: share that it was lowered by last
    lowered_at: float = 0.0  #: monotonic seconds
    calm_since: float | None = (
        None  #: monotonic seconds, of the calm or of the last rise in it; None in trouble
    )

    def after(self, machine: Snapshot | None, held: int) -> tuple[LimitKeeper, Limit]:
        """The keeper and the limit once ``machine`` has been seen with ``held`` bytes in the cache."""
        if machine is None:
            return self, Limit(self.budget, "the budget; telemetry is off")
        keeper = self._pressed(machine, held)
        limits = [
            (keeper.budget, "the budget"),
            (
                keeper.lowered,
                _trouble(machine) or "the machine was short of memory and has not been calm for long",
            ),
            _room(machine, held),
        ]
        known = [(nbytes, why) for nbytes, why in limits if nbytes is not None]
        if not known:
            return keeper, Limit(None, f"no budget, and {_not_known(machine)}")
        nbytes, why = min(known, key=lambda one: one[0])
        return keeper, Limit(max(nbytes, min(keeper.floor, keeper.budget or keeper.floor)), why)

    def _pressed(self, machine: Snapshot, held: int) -> LimitKeeper:
        now, share = machine.monotonic_seconds, _share(machine)
        if share < 1.0:
            if share >= self.share and now - self.lowered_at < AGAIN_SECONDS:
                return replace(self, calm_since=None)
            lowered = max(self.floor, int(share * held))
            lowered = lowered if self.lowered is None else min(lowered, self.lowered)
            return replace(self, lowered=lowered, share=share, lowered_at=now, calm_since=None)
        if self.lowered is None:
            return self
        if self.calm_since is None:
            return replace(self, calm_since=now)
        if now - self.calm_since < CALM_SECONDS:
            return self
        risen = int(self.lowered * RISE)
        if risen >= (self.budget if self.budget is not None else 2 * held):
            return replace(self, lowered=None, share=1.0, calm_since=None)
        return replace(self, lowered=risen, calm_since=now)


def _share(machine: Snapshot) -> float:
    share = SHARE_AT.get(machine.pressure_level, 1.0)
    return min(share, SHARE_SWAPPING) if (machine.swap_out_bytes_per_second or 0.0) > 0.0 else share


def _trouble(machine: Snapshot) -> str | None:
    if machine.pressure_level in SHARE_AT:
        return f"memory pressure is {machine.pressure_level.value}"
    return "the machine is swapping out" if _share(machine) < 1.0 else None


def _room(machine: Snapshot, held: int) -> tuple[int | None, str]:
    """What may be held when the cache takes its share of the room that is left."""
    for nbytes, name in (
        (machine.headroom_bytes, "headroom to the next pressure level"),
        (machine.memory_available_bytes, "memory available"),
    ):
        if nbytes is not None:
            return held + int(SHARE_OF_ROOM * max(0, nbytes)), f"{SHARE_OF_ROOM:.0%} of the {name}"
    return None, ""


def _not_known(machine: Snapshot) -> str:
    reason = (
        machine.unknown.get("headroom_bytes")
        or machine.unknown.get("memory_available_bytes")
        or "no reason given"
    )
    return f"how much room the machine has is unknown ({reason})"


def price_of_time(machine: Snapshot | None, weights: Weights) -> Weights:
    """λ_T rises where time costs more than usual: a hot or throttled machine gets slower still, a battery runs down."""
    if machine is None:
        return weights
    factor = {ThermalState.SERIOUS: 2.0, ThermalState.CRITICAL: 4.0}.get(machine.thermal_state, 1.0)
    if machine.low_power_mode:
        factor *= 2.0
    return replace(weights, time=weights.time * factor)
