"""Codecs for the layers that can still take them, and codecs that are fast for their bytes.

A codec cannot be carried out on a cache of which some layers have as few bits already: encoding them anew would only lose
more. What is meant then is a plan that leaves those layers alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..actions import Plan, Quantize, in_ranges
from ..estimate import Held
from ..profile import Profile
from .score import time_of
from .values import State

__all__ = ["coarser_already", "on_the_rest", "quick"]

#: Points of T that make no difference: 10 % of the time, less than times measured twice differ.
NEARLY = 1.0


def coarser_already(held: Held, codec: Quantize) -> bool:
    """Whether a layer has as few bits as ``codec`` would give it, or fewer on one side."""
    keys, values = held.layout.keys.code_bits, held.layout.values.code_bits
    now = (keys if keys is not None else 99, values if values is not None else 99)
    wanted = (codec.key_bits, codec.value_bits)
    return wanted == now or wanted[0] > now[0] or wanted[1] > now[1]


def on_the_rest(state: State, codecs: Iterable[Quantize]) -> tuple[Plan, ...]:
    """Each codec for the layers that can take it, where others have as few bits already; none where all layers are alike."""
    layers: dict[int, list[Held]] = {}
    for one in state.each:
        if one.changeable and one.index >= 0:
            layers.setdefault(one.index, []).append(one)
    found = []
    for codec in codecs:
        able = [i for i, unit in sorted(layers.items()) if not any(coarser_already(o, codec) for o in unit)]
        if 0 < len(able) < len(layers):
            found.append(Plan(in_ranges((i, codec) for i in able)))
    return tuple(found)


def quick(state: State, profile: Profile, feasible: Iterable[Quantize]) -> tuple[Quantize, ...]:
    """Codecs that are nearly as fast as the fastest, for plans that would otherwise be as slow as they are good."""
    ours = next((one for one in state.layers if one.changeable and one.rows > 0), None)
    if ours is None:
        return ()
    rated = []
    for codec in feasible:
        figure = profile.codec(codec)
        if figure is None:
            continue
        points = time_of(
            figure.time_at(ours.rows),
            figure.chunk_time_at(ours.rows),
            step_seconds=profile.step_seconds,
            horizon=state.steps,
            prompt_seconds=state.prompt_likely * (profile.prompt_seconds or 0.0),
        )
        if points is not None:
            rated.append((points, codec))
    fastest = min((points for points, _ in rated), default=math.inf)
    return tuple(codec for points, codec in rated if points <= fastest + NEARLY)
