"""From A to F: which actions this backend can execute in this state, and for each of the others why not.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..actions import Action, Evict, Quantize
from ..apply import not_built
from ..estimate import Held, nbytes_allocated, peak_of_action
from .capabilities import BackendProfile

__all__ = ["Reason", "Verdict", "classify"]


@dataclass(frozen=True)
class Reason:
    """Why an action is outside F. ``code`` is for programs, ``text`` for people, with the numbers if any."""

    code: str  #: not_built, missing_capability, too_few_rows, nothing_to_change, exceeds_memory, rows_must_stay, already_coarser
    text: str
    wanted: int | None = None
    limit: int | None = None
    capability: str | None = None

    def to_record(self) -> dict[str, object]:
        record: dict[str, object] = {"code": self.code, "text": self.text}
        record |= {k: v for k in ("wanted", "limit", "capability") if (v := getattr(self, k)) is not None}
        return record


@dataclass(frozen=True)
class Verdict:
    """One action with the reasons against it; feasible when there are none."""

    action: Action
    reasons: tuple[Reason, ...] = ()

    @property
    def feasible(self) -> bool:
        return not self.reasons


def classify(
    actions: Iterable[Action],
    profile: BackendProfile,
    layers: Sequence[Held],
    *,
    available: int | None = None,
    rows_must_stay: bool = False,
) -> tuple[Verdict, ...]:
    """Judge every action.

    Args:
        layers: what is held now, per leaf.
        available: bytes that may still be allocated while an action is carried out; None when that is not known.
        rows_must_stay: whether the caller will take tokens back (speculative decoding), so that no row may go.
    """
    layers = tuple(layers)
    allocated = nbytes_allocated(layers)
    return tuple(
        Verdict(a, tuple(_reasons(a, profile, layers, allocated, available, rows_must_stay))) for a in actions
    )


def _reasons(
    action: Action,
    profile: BackendProfile,
    layers: tuple[Held, ...],
    allocated: int,
    available: int | None,
    rows_must_stay: bool,
) -> Iterable[Reason]:
    missing = not_built(action)
    if missing is not None:
        yield Reason("not_built", f"this version of lumina_cache has no code for {missing}")
    for capability in sorted(action.requires):
        outcome = profile.outcome(capability)
        if not outcome.present:
            yield Reason("missing_capability", f"{capability}: {outcome.reason}", capability=str(capability))
    rows = max((one.rows for one in layers if one.changeable), default=0)
    changes_rows = any(isinstance(p, Evict | Quantize) for p in action.parts)
    if changes_rows and rows == 0:
        yield Reason("nothing_to_change", "no layer holds rows that an action could change")
        return
    for part in action.parts:
        if isinstance(part, Evict):
            kept = part.rows_kept(rows)
            if rows_must_stay:
                yield Reason(
                    "rows_must_stay", "tokens may be taken back (speculative decoding), so rows must stay"
                )
            if kept >= rows:
                yield Reason("too_few_rows", f"{kept} rows asked, {rows} held: nothing to evict", kept, rows)
            elif kept <= part.sinks:
                yield Reason(
                    "too_few_rows",
                    f"{kept} rows would leave no window behind {part.sinks} sinks",
                    kept,
                    part.sinks,
                )
        if isinstance(part, Quantize):
            coarsest = min((one.bits for one in layers if one.changeable and one.bits), default=None)
            if coarsest is not None and part.key_bits >= coarsest:
                yield Reason(
                    "already_coarser",
                    f"rows are held at {coarsest} bits already; re-encoding at {part.key_bits} cannot bring detail back",
                    part.key_bits,
                    coarsest,
                )
    if available is not None and changes_rows:
        transient = peak_of_action(layers, action) - allocated
        if transient > available:
            yield Reason(
                "exceeds_memory",
                f"{transient} bytes are needed while converting one layer, {available} are available",
                transient,
                available,
            )
