"""What can be simulated, with what a backend would need for it, and the actions offered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...actions import (
    COMPOSITE_RATIOS,
    DEFAULT_RATIOS,
    Action,
    Composite,
    Evict,
    Keep,
    Offload,
    Page,
    Plan,
    Quantize,
    Reclaim,
    Reserve,
    action_space,
    singles,
)
from ...backend.capabilities import Rung
from ...codecs import CODECS, AffineFetch, Layout
from ...errors import SimulationError
from ...gap.records import What
from ...scorers import SCORERS
from ...scorers.observed import OBSERVED
from .choose import BORROWED, RAGGED
from .codebook import CODEBOOKS
from .foresight import FORESIGHTS, Foresight, foresees

__all__ = [
    "MIXED_ROWS",
    "PLACEBO_SEEDS",
    "RECONSTRUCTING",
    "Offer",
    "check",
    "layout_of",
    "mixed_layouts",
    "observed_by",
    "space",
    "what_of",
]

#: Text form of the codec whose rows are stored at two precisions.
MIXED_ROWS = "mixed_rows"

#: Bits of its important rows.
_FINE_BITS = 8

#: Seeds of the random evictions that stand for mere choice.
PLACEBO_SEEDS = (0, 1, 2)

#: The scorer that ranks rows by another pass over the context.
RECONSTRUCTING = "kvzip"

_RANKED = (*SCORERS, *OBSERVED, *BORROWED, RECONSTRUCTING)
_QUEST = "quest"
_FAMILIES = "keep, reclaim, reserve, page, evict, quant, offload, plans and composites of them, and oracle"


@dataclass(frozen=True)
class Offer:
    """An action that the simulator offers."""

    action: Action
    what: What  #: text form, rung, what it requires, role

    @property
    def text(self) -> str:
        return self.what.action


def what_of(action: Action) -> What:
    """Text form, what a backend would need, and the role: a ``ceiling`` with an oracle in it, a ``placebo`` where rows are
    chosen at random, else a ``candidate``. No rung executes a ceiling; it has the deepest, since the value needs one.
    """
    if foresees(action):
        return replace(What.of(action, "ceiling"), rung=int(Rung.TRAINED))
    chosen = [part.scorer for part in singles(action) if isinstance(part, Evict)]
    return What.of(action, "placebo" if chosen and set(chosen) == {"random"} else "candidate")


def layout_of(action: Quantize) -> Layout:
    """How rows are stored afterwards, codecs that only the simulator has included."""
    if action.layout is not None:
        return action.layout
    family = CODEBOOKS[action.codec]
    keys, values = family.make(action.key_bits, action.value_bits, action.group_size)
    return Layout(keys, values, action.residual or 0, action.sinks or 0)


def mixed_layouts(action: Quantize) -> tuple[Layout, Layout]:
    """How the many and the important rows are stored by the codec of two precisions."""
    residual, sinks = action.residual or 0, action.sinks or 0
    fine = AffineFetch(_FINE_BITS, action.group_size)
    return (
        Layout(
            AffineFetch(action.key_bits, action.group_size),
            AffineFetch(action.value_bits, action.group_size),
            residual,
            sinks,
        ),
        Layout(fine, fine, residual, sinks),
    )


def observed_by(action: Action) -> tuple[str, ...]:
    """Scorers whose statistics of the prompt's attention ``action`` needs."""
    names = []
    for part in singles(action):
        if isinstance(part, Evict) and BORROWED.get(part.scorer, part.scorer) in OBSERVED:
            names.append(BORROWED.get(part.scorer, part.scorer))
        if isinstance(part, Quantize) and part.codec == MIXED_ROWS:
            names.append("h2o")
    return tuple(dict.fromkeys(names))


def check(action: Action) -> None:
    """
    Raises:
        SimulationError: the simulator has no forward for ``action``; says what there is.
    """
    for part in singles(action):
        _check_part(action, part)
    if isinstance(action, Plan):
        for _, assigned in action.assignments:
            _check_order(assigned)
    else:
        _check_order(action)


def _check_part(action: Action, part: Action) -> None:
    match part:
        case Evict() if part.scorer not in _RANKED:
            raise _unknown(action, f"the scorer {part.scorer}", _RANKED)
        case Quantize() if part.codec not in (*CODECS, *CODEBOOKS, MIXED_ROWS):
            raise _unknown(action, f"the codec {part.codec}", (*CODECS, *CODEBOOKS, MIXED_ROWS))
        case Offload() if part.how not in ("layers", "cold", _QUEST):
            raise _unknown(action, f"offload:{part.how}", ("layers", "cold", _QUEST))
        case Keep() | Reclaim() | Reserve() | Page() | Evict() | Quantize() | Offload() | Foresight():
            pass
        case _:
            raise SimulationError(f"{action}: there is no forward for {part}; simulated are {_FAMILIES}")


def _unknown(action: Action, what: str, known: Iterable[str]) -> SimulationError:
    return SimulationError(f"{action}: there is no forward for {what}; there is one for {', '.join(known)}")


def _check_order(action: Action) -> None:
    """Some parts leave rows that no other part can be applied to."""
    for before, after in zip(action.parts, action.parts[1:], strict=False):
        if _must_be_last(before):
            raise SimulationError(f"{action}: nothing can follow {before}; put it last")
        ragged = (isinstance(before, Evict) and before.scorer in RAGGED) or (
            isinstance(before, Foresight) and before.how == "future_ragged"
        )
        ranks = isinstance(after, Evict | Foresight) or (
            isinstance(after, Quantize) and after.codec == MIXED_ROWS
        )
        if ragged and ranks:
            raise SimulationError(
                f"{action}: {before} leaves heads with different numbers of rows, which {after} cannot rank; "
                "choose rows once"
            )


def _must_be_last(part: Action) -> bool:
    return (
        isinstance(part, Offload)
        or (isinstance(part, Quantize) and part.codec == MIXED_ROWS)
        or (isinstance(part, Foresight) and part.how == "step")
    )


def space(
    *,
    ratios: Iterable[float] = DEFAULT_RATIOS,
    composite_ratios: Iterable[float] = COMPOSITE_RATIOS,
    bits: Iterable[int] = (8, 4, 3, 2),
    group_size: int = 64,
    evictors: Iterable[str] | None = None,
    codecs: Iterable[str] | None = None,
) -> tuple[Offer, ...]:
    """The actions that are simulated, over a grid that can be narrowed: those of A, placebos, ceilings.

    Args:
        evictors, codecs: names from the catalogue; None for all that are simulated.
    """
    ratios, composite_ratios, bits = tuple(ratios), tuple(composite_ratios), tuple(bits)
    everything = action_space(
        ratios=ratios,
        composite_ratios=composite_ratios,
        bits=bits,
        group_size=group_size,
        evictors=evictors,
        codecs=codecs,
    )
    chosen = [a for a in everything if _simulated(a)]
    quantized = [a for a in chosen if isinstance(a, Quantize)]
    random = [Evict("random", ratio=r, seed=seed) for r in ratios for seed in PLACEBO_SEEDS if seed]
    ceilings: list[Action] = [Foresight(how, r) for how in FORESIGHTS for r in ratios]
    ceilings += [
        Composite((Foresight(how, r), q))
        for how in FORESIGHTS
        if how != "step"
        for r in composite_ratios
        for q in quantized
        if q.codec != MIXED_ROWS
    ]
    return tuple(Offer(a, what_of(a)) for a in (*chosen, *random, *ceilings))


def _simulated(action: Action) -> bool:
    try:
        check(action)
    except SimulationError:
        return False
    return True
