"""What a cache held in a certain way costs, from a profile's figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..actions import Action, Evict, Offload, Plan, Quantize, Reclaim
from ..codecs import Layout
from ..estimate import LANE_KINDS, Held
from ..profile import CodecFigure, Profile
from .ahead import Ahead
from .values import Group

__all__ = ["Expected", "Lost", "Stored", "is_ours", "lost_by", "own_seconds", "stored"]


@dataclass(frozen=True)
class Expected:
    """Expected mean KL and its 95th percentile (nats per token), and ratios of times to those of the dense cache.

    None with the reason in ``source`` where the profile has no figure.
    """

    kl: float | None
    p95: float | None
    time_ratio: float | None  #: of a decode step
    source: str
    prompt_ratio: float | None = None  #: of a chunk of the prompt


@dataclass(frozen=True)
class Stored:
    """The part that depends on how rows are stored, not on which of them are left."""

    expected: Expected
    kept: float  #: least share of the tokens seen whose rows a layer holds when the prompt ends; 1 where none is missing
    kept_now: float = 1.0  #: the same after the action


#: What codes of earlier layouts have left in rows that were decoded from them: mean KL and p95 (nats per token).
Lost = tuple[float, float]


def lost_by(before: Sequence[Group], after: Iterable[Held], profile: Profile) -> Lost | None:
    """What is added to that when layers are stored as in ``after``; None if there is no figure for how they were stored.

    Encoding rows anew cannot undo what their codes have lost already: the damages of both codecs add up.
    """
    total = sum(g.held.count for g in before if is_ours(g.held))
    kl = p95 = 0.0
    for group, held in zip(before, after, strict=True):
        was = group.held.layout
        if not is_ours(group.held) or was.dense or held.layout is was or held.layout == was:
            continue
        figure = profile.by_layout.get(was)
        if figure is None:
            return None
        kl, p95 = kl + figure.kl * group.weight / total, p95 + figure.p95 * group.weight / total
    return kl, p95


def is_ours(held: Held) -> bool:
    """Whether a layer holds rows that can be stored in another way."""
    return held.rows > 0 and (held.kind == "kv" or held.kind in LANE_KINDS)


def stored(
    groups: Sequence[Group],
    profile: Profile,
    ahead: Ahead,
    grown: int,
    lost: Lost | None = (0.0, 0.0),
    own: Mapping[Layout, CodecFigure] = MappingProxyType({}),
) -> Stored:
    """What storing layers like this costs, apart from missing rows.

    ``KL = lost + Σ weight·KL(codec) / layers``: the damages of the layers' codecs add up, weighted by their sensitivity.
    ``ratio = Σ count·ratio(codec, rows)·dense(rows)/dense(seen) / layers``, with the rows that are left and the tokens seen
    when the prompt ends, or half way there for its chunks.

    Args:
        grown: rows that layers gain until then.
        own: figures of the very codecs that the action names, which may be read in another way than others that store
            rows alike.
    """
    ours = [g for g in groups if is_ours(g.held)]
    total = sum(g.held.count for g in ours)
    if not total:
        return Stored(Expected(0.0, 0.0, 1.0, "exact: no rows were changed", 1.0), 1.0)
    kv = [g.held for g in ours if g.held.kind == "kv"]
    now = min((one.rows / one.offset for one in kv if one.evicted), default=1.0)
    short = grown < ahead.tokens
    kept = min(
        (
            int(ahead.left(one.rows, grown, ahead.tokens)) / (one.offset + ahead.tokens)
            for one in kv
            if one.evicted or (short and one.changeable)
        ),
        default=1.0,
    )
    if lost is None:
        return Stored(Expected(None, None, None, "no figure for how rows were stored before"), kept, now)
    kl, p95 = lost
    time: float | None = 0.0
    prompt: float | None = 0.0
    source = source_of(profile) if kl else "exact: dense and complete"
    for group in ours:
        one = group.held
        if one.on_disk:
            return Stored(
                Expected(None, None, None, "no figure for rows that every step reads back from disk"),
                kept,
                now,
            )
        at_end, half_way = (ahead.rows_of(one, grown, n) for n in (ahead.tokens, ahead.half))
        ratio: float | None = 1.0
        chunk: float | None = 1.0
        if not one.layout.dense:
            figure = own.get(one.layout) or profile.by_layout.get(one.layout)
            if figure is None:
                return Stored(Expected(None, None, None, f"no figure for {one.layout}"), kept, now)
            source, ratio, chunk = (
                source_of(profile),
                figure.time_at(at_end),
                figure.chunk_time_at(half_way),
            )
            kl, p95 = kl + figure.kl * group.weight / total, p95 + figure.p95 * group.weight / total
        fewer = ahead.dense_ratio(one, at_end, ahead.tokens, profile.step_at)
        fewer_half_way = ahead.dense_ratio(one, half_way, ahead.half, profile.chunk_at)
        time = None if time is None or ratio is None else time + ratio * fewer * one.count / total
        prompt = (
            None if prompt is None or chunk is None else prompt + chunk * fewer_half_way * one.count / total
        )
    return Stored(Expected(kl, p95, time, source, prompt), kept, now)


def source_of(profile: Profile) -> str:
    return f"borrowed: {profile.name}" if profile.borrowed else f"calibrated: {profile.name}"


def own_seconds(action: Action, touched: int, profile: Profile, layers: int = 1) -> float | None:
    """Seconds that carrying out ``action`` takes: measured seconds per byte times the ``touched`` bytes held before it.

    Args:
        layers: how many the model has; a plan touches its share of them.
    """
    if isinstance(action, Plan):
        total = 0.0
        of_each = {id(own): own_seconds(own, touched, profile) for own in action.distinct}
        for (first, last), own in action.assignments:
            seconds = of_each[id(own)] if id(own) in of_each else own_seconds(own, touched, profile)
            if seconds is None:
                return None
            total += seconds * (last - first + 1) / max(1, layers)
        return total
    rates = [
        profile.seconds_per_byte.get(family)
        for part in action.parts
        if (family := _FAMILY.get(type(part))) is not None
    ]
    return None if None in rates else touched * sum(rate for rate in rates if rate is not None)


_FAMILY: dict[type[Action], str] = {Evict: "evict", Quantize: "quant", Offload: "offload", Reclaim: "evict"}
