"""What a cache held in a certain way costs, from a profile's figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..actions import Action, Evict, Offload, Quantize, Reclaim, singles
from ..estimate import LANE_KINDS, Held, nbytes_live
from ..profile import Profile

__all__ = ["Expected", "expected", "own_seconds"]


@dataclass(frozen=True)
class Expected:
    """Expected mean KL and its 95th percentile (nats per token), and the ratio of a decode step's time to the dense one's.

    None with the reason in ``source`` where the profile has no figure.
    """

    kl: float | None
    p95: float | None
    time_ratio: float | None
    source: str


def expected(layers: Iterable[Held], profile: Profile, scorer: str | None) -> Expected:
    """What layers held like this cost.

    Args:
        layers: as after the action; those with an index count with the sensitivity of their layer.
        scorer: by which rows are missing; None if none are.
    """
    rows_held = [one for one in layers if one.rows > 0 and (one.kind == "kv" or one.kind in LANE_KINDS)]
    total = sum(one.count for one in rows_held)
    if not total:
        return Expected(0.0, 0.0, 1.0, "exact: no rows were changed")
    kl = p95 = 0.0
    ratios: list[tuple[float, int]] | None = []
    source = "exact: dense and complete"
    for one in rows_held:
        if one.on_disk:
            return Expected(None, None, None, "no figure for rows that every step reads back from disk")
        if one.layout.dense:
            _note(ratios, 1.0, one.count)
            continue
        figure = profile.by_layout.get(one.layout)
        if figure is None:
            return Expected(None, None, None, f"no figure for {one.layout}")
        source = _source(profile)
        share = profile.weight(one.index, total) * one.count / total
        kl, p95 = kl + share * figure.kl, p95 + share * figure.p95
        time = figure.time_at(one.rows)
        ratios = None if time is None or ratios is None else [*ratios, (time, one.count)]
    kept = min((one.rows / one.offset for one in rows_held if one.kind == "kv" and one.evicted), default=1.0)
    if kept < 1.0:
        eviction = None if scorer is None else profile.evictor(scorer)
        if eviction is None:
            return Expected(None, None, None, f"no figure for evicting by {scorer}")
        lost, tail = eviction.at(kept)
        kl, p95, source = kl + lost, p95 + tail, _source(profile)
    time_ratio = None if ratios is None else sum(t * n for t, n in ratios) / total
    return Expected(kl, p95, time_ratio, source)


def _note(ratios: list[tuple[float, int]] | None, time: float, count: int) -> None:
    if ratios is not None:
        ratios.append((time, count))


def _source(profile: Profile) -> str:
    return f"borrowed: {profile.name}" if profile.borrowed else f"calibrated: {profile.name}"


def own_seconds(action: Action, layers: Iterable[Held], profile: Profile) -> float | None:
    """Seconds that carrying out ``action`` takes: measured seconds per byte times the bytes held before it."""
    touched = nbytes_live(layers)
    total = 0.0
    for part in singles(action):
        family = _FAMILY.get(type(part))
        if family is None:
            continue
        rate = profile.seconds_per_byte.get(family)
        if rate is None:
            return None
        total += rate * touched
    return total


_FAMILY: dict[type[Action], str] = {Evict: "evict", Quantize: "quant", Offload: "offload", Reclaim: "evict"}
