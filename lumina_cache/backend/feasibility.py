"""From A to F: which actions this backend can execute in this state, and for each of the others why not.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..actions import Action, Composite, Evict, Keep, Offload, Plan, Quantize, Reclaim
from ..apply import not_built
from ..codecs import Layout
from ..estimate import LANE_KINDS, Held, applies, rows_left, transient_of_action, uneven, whole_blocks
from ..rows import Pinned
from .capabilities import DISK_TIER, RAGGED_LAYERS, BackendProfile, Capability

__all__ = ["Facts", "Reason", "Verdict", "classify", "coarsest", "facts_of", "numbered", "reasons_against"]


@dataclass(frozen=True)
class Reason:
    """Why an action is outside F. ``code`` is for programs, ``text`` for people, with the numbers if any."""

    #: not_built, missing_capability, head_dim, too_few_rows, nothing_to_change, exceeds_memory, rows_must_stay,
    #: unequal_rows, already_coarser, protected_rows, outliers or disk
    code: str
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
    pinned: int = 0,
    protect: Pinned = (),
) -> tuple[Verdict, ...]:
    """Judge every action.

    Args:
        layers: what is held now, per leaf; with their numbers if plans are to be judged by the layers that they name.
        available: bytes that may still be allocated while an action is carried out; None when that is not known.
        pinned: rows that the caller protects from eviction.
        protect: the ranges of positions (first, end) that they lie in.
        rows_must_stay: whether the caller will take tokens back (speculative decoding), so that no row may go.
    """
    facts = facts_of(
        profile,
        layers,
        available=available,
        rows_must_stay=rows_must_stay,
        pinned=pinned,
        protect=protect,
    )
    return tuple(Verdict(action, reasons_against(action, facts)) for action in actions)


def facts_of(
    profile: BackendProfile,
    layers: Sequence[Held],
    *,
    available: int | None = None,
    rows_must_stay: bool = False,
    pinned: int = 0,
    protect: Pinned = (),
) -> Facts:
    """What :func:`classify` works out of its arguments before it looks at any action."""
    changeable = [one for one in layers if one.changeable]
    lanes = [one for one in layers if one.kind in LANE_KINDS and one.rows > 0]
    return Facts(
        profile=profile,
        rows=max((one.rows for one in changeable), default=0),
        lanes=tuple(lanes),
        block=max((one.layout.block for one in changeable), default=1),
        coarsest=coarsest([one.layout for one in (*changeable, *lanes)]),
        numbered=numbered(layers),
        dims=tuple(dict.fromkeys((one.kind, one.key_dim, one.value_dim) for one in (*changeable, *lanes))),
        largest=_largest([*changeable, *lanes]),
        available=available,
        rows_must_stay=rows_must_stay,
        pinned=pinned,
        protect=protect,
        uneven=uneven(changeable),
        missing={},
    )


def numbered(layers: Iterable[Held]) -> tuple[Held, ...]:
    """Those that an action could change and that still have their numbers."""
    return tuple(
        one
        for one in layers
        if one.index >= 0 and (one.changeable or (one.kind in LANE_KINDS and one.rows > 0))
    )


@dataclass(frozen=True)
class Facts:
    """What is the same for all actions, worked out once."""

    profile: BackendProfile
    rows: int
    lanes: tuple[Held, ...]  #: sliding windows and attention chunks
    block: int  #: most rows that any layer encodes together
    coarsest: tuple[int, int]  #: bits of keys and of values
    numbered: tuple[Held, ...]  #: layers that plans can tell apart
    dims: tuple[tuple[str, int, int], ...]  #: kinds of layers with their head dims
    largest: tuple[Held, ...]
    available: int | None
    rows_must_stay: bool
    pinned: int
    protect: Pinned
    uneven: tuple[Held, ...]  #: layers that one eviction may leave with different numbers of rows
    missing: dict[frozenset[Capability], tuple[Reason, ...]]  #: filled as sets of requirements come up


def _largest(layers: Sequence[Held]) -> tuple[Held, ...]:
    """Layers that no other one exceeds in rows and width; one of them needs most memory whatever the action."""
    best: dict[tuple[int, Layout, int, int, int], list[Held]] = {}
    for one in sorted(layers, key=lambda h: (h.rows, h.key_width + h.value_width), reverse=True):
        front = best.setdefault((one.itemsize, one.layout, one.tail, one.on_disk, one.head), [])
        if not front or one.key_width + one.value_width > front[-1].key_width + front[-1].value_width:
            front.append(replace(one, count=1, index=max(0, one.index)))
    return tuple(one for front in best.values() for one in front)


def _missing(requires: frozenset[Capability], facts: Facts) -> tuple[Reason, ...]:
    if requires not in facts.missing:
        facts.missing[requires] = tuple(
            Reason("missing_capability", f"{c}: {facts.profile.outcome(c).reason}", capability=str(c))
            for c in sorted(requires)
            if not facts.profile.has(c)
        )
    return facts.missing[requires]


#: Bits of rows that nothing has encoded yet.
_DENSE_BITS = 1 << 10


def coarsest(layouts: Sequence[Layout]) -> tuple[int, int]:
    """Fewest bits of keys and of values in any of the layouts; more than any codec has where nothing is encoded."""
    keys = min((x.keys.code_bits or _DENSE_BITS for x in layouts), default=_DENSE_BITS)
    values = min((x.values.code_bits or _DENSE_BITS for x in layouts), default=_DENSE_BITS)
    return keys, values


def _coarsest_within(bounds: tuple[int, int], facts: Facts) -> tuple[int, int]:
    """Of the layers that a range names; of all of them where they were merged and have lost their numbers."""
    if not facts.numbered:
        return facts.coarsest
    first, last = bounds
    return coarsest([one.layout for one in facts.numbered if first <= one.index <= last])


def reasons_against(action: Action, facts: Facts) -> tuple[Reason, ...]:
    """Why this backend cannot execute ``action`` in this state; none if it can."""
    if isinstance(action, Plan):
        return _against_plan(action, facts)
    found = [*_against_unbuilt(action), *_missing(action.requires, facts)]
    if _changes_rows(action) and not _touches(action, facts):
        found.append(_NOTHING)
        return tuple(found)
    rows, coarsest, block = facts.rows, facts.coarsest, facts.block  # as the parts so far leave them
    for part in action.parts:
        if isinstance(part, Evict):
            found += _against_eviction(part, rows, block, facts)
            if part is action.parts[0]:
                found += _against_unequal(part, facts)
            rows = part.rows_kept(rows)
        elif isinstance(part, Quantize):
            found += _against_codec(part, coarsest, facts)
            coarsest = part.key_bits, part.value_bits
            block = 1 if part.layout is None else part.layout.block
    if not found and _changes_rows(action) and facts.available is not None:
        found += _against_memory(action, facts, facts.available)
    return tuple(found)


def _against_unbuilt(action: Action) -> Iterable[Reason]:
    unbuilt = not_built(action)
    if unbuilt is not None:
        yield Reason("not_built", f"this version of lumina_cache has no code for {unbuilt}")


def _against_plan(plan: Plan, facts: Facts) -> tuple[Reason, ...]:
    acting = _acting(plan, facts)
    needs = frozenset() if acting is None else acting.requires
    # A missing disk is an error before any layer is looked at.
    found = [*_against_unbuilt(plan), *_missing(needs | (plan.requires & {DISK_TIER}), facts)]
    if acting is None:
        return (*found, _NOTHING)
    each = {(id(part), _coarsest_within(bounds, facts)): part for bounds, part in acting.assignments}
    more = [
        reason
        for (_, coarsest), part in each.items()
        for reason in reasons_against(part, replace(facts, coarsest=coarsest))
        if reason.code not in _SAID_OF_THE_WHOLE
    ]
    return tuple(dict.fromkeys([*found, *more]))


#: Reasons that a plan gives for itself, so that its parts need not.
_SAID_OF_THE_WHOLE = ("not_built", "missing_capability")


def _acting(plan: Plan, facts: Facts) -> Plan | None:
    """``plan`` without what is assigned to layers that hold no rows for it, which changes nothing; None if that is all.

    Whole where layers have lost their numbers, and where it needs no rows.
    """
    if not facts.numbered or not any(map(_changes_rows, plan.distinct)):
        return plan
    left = tuple((bounds, part) for bounds, part in plan.assignments if _reaches(bounds, part, facts))
    if len(left) == len(plan.assignments):
        return plan
    return Plan(left) if left else None


def _reaches(bounds: tuple[int, int], action: Action, facts: Facts) -> bool:
    """Whether a layer of the range holds rows that ``action`` applies to."""
    first, last = bounds
    return any(
        applies(one, part) or (one.changeable and not isinstance(part, Keep))
        for one in facts.numbered
        if first <= one.index <= last
        for part in action.parts
    )


def _changes_rows(action: Action) -> bool:
    return not isinstance(action, Keep | Reclaim)


def _touches(action: Action, facts: Facts) -> bool:
    """Whether any layer holds rows that the action applies to."""
    return facts.rows > 0 or any(applies(one, part) for part in action.parts for one in facts.lanes)


def _against_codec(action: Quantize, coarsest: tuple[int, int], facts: Facts) -> Iterable[Reason]:
    keys, values = action.key_bits, action.value_bits
    if keys > coarsest[0] or values > coarsest[1] or (keys, values) == coarsest:
        now = coarsest[0] if keys >= coarsest[0] else coarsest[1]
        text = f"rows are held at {now} bits already; re-encoding at {max(keys, values)} cannot bring detail back"
        yield Reason("already_coarser", text, max(keys, values), now)
    layout = action.layout
    if layout is None:
        return
    if facts.rows_must_stay and layout.unit > 1:
        yield Reason(
            "rows_must_stay",
            f"tokens may be taken back (speculative decoding), and rows that were encoded {layout.unit} at a time "
            "would come back with an error",
        )
    for kind, key_dim, value_dim in facts.dims:
        if kind in LANE_KINDS and not layout.row_by_row:
            continue  # such layers are left as they are
        misfit = layout.why_not(key_dim, value_dim)
        if misfit is not None:
            yield Reason("head_dim", misfit)
            return


_NOTHING = Reason("nothing_to_change", "no layer holds rows that an action could change")
_MUST_STAY = Reason(
    "rows_must_stay",
    "rows must stay: tokens may be taken back (speculative decoding, or a cache that was given no budget)",
)


def _against_eviction(action: Evict, rows: int, block: int, facts: Facts) -> Iterable[Reason]:
    if facts.rows_must_stay:
        yield _MUST_STAY
    kept, guarded = action.rows_kept(rows), whole_blocks(action.sinks + facts.pinned, block) + action.recent
    if kept >= rows:
        text = f"{kept} rows asked, {rows} held: nothing to evict"
        yield Reason("too_few_rows", text, kept, rows)
    elif kept <= guarded:
        together = f", as rows are encoded {block} at a time" if block > 1 else ""
        text = f"{kept} rows would leave no choice beside {guarded} protected ones{together}"
        yield Reason("too_few_rows", text, kept, guarded)


def _against_unequal(action: Evict, facts: Facts) -> Iterable[Reason]:
    """Layers that encode different numbers of rows together may not all be left with the same number of rows."""
    left = rows_left(facts.uneven, action, facts.protect)
    if len(left) > 1 and not facts.profile.has(RAGGED_LAYERS):
        text = (
            f"layers would be left with {min(left)} to {max(left)} rows, as some encode several together; "
            f"{RAGGED_LAYERS}: {facts.profile.outcome(RAGGED_LAYERS).reason}"
        )
        yield Reason("unequal_rows", text, min(left), max(left), str(RAGGED_LAYERS))


def _against_memory(action: Action, facts: Facts, available: int) -> Iterable[Reason]:
    """Conversion goes layer by layer."""
    parts = [_of_all_layers(part) for part in action.parts]
    everywhere = parts[0] if len(parts) == 1 else Composite(tuple(parts))
    transient = max((transient_of_action(one, everywhere) for one in facts.largest), default=0)
    if transient > available:
        text = f"{transient} bytes are needed while converting one layer, {available} are available"
        yield Reason("exceeds_memory", text, transient, available)


def _of_all_layers(part: Action) -> Action:
    """The same for whichever layer is the largest: it stands for equal ones, and has lost its number."""
    return Offload(part.how, layers=(0, 1 << 20)) if isinstance(part, Offload) and part.layers else part
