"""The outlier guard: what an affine codec's rounding would cost, predicted from the rows before anything is encoded.

A group of range r rounded to 2ᵇ levels gets an error of variance ``r²/(12·(2ᵇ − 1)²)`` (Bennett, Bell Syst. Tech. J. 27,
1948). What attention can use of a channel is how it varies over the tokens: a part that all keys share moves every score
alike. So the noise of a layer is the mean of that variance over its groups, and its signal the mean over the channels
(B, H, D) of the variance along T. One channel with a large offset, such as a bias of the key projection, widens every
group that it is in and adds no signal: that is what the quotient finds and a mean square error hides. It does not find a
channel that *varies* much more than the others: that one is counted as signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx

from ..method import AFFINE_BITS
from .affine import Affine

__all__ = ["LIMIT", "guarded_bits", "noise_to_signal"]

#: Largest quotient that is let through. Keys of SmolLM2-135M, 1,024 tokens, groups of 64, median and largest of 30 layers:
#: affine at 4 bits 0.042 and 0.065, at 3 bits 0.19 and 0.30; rotated at 4 bits 0.019 and 0.026, at 3 bits 0.087 and 0.12.
#: Storing keys and values like this costs 0.02, 0.12, 0.01 and 0.05 nats per token, in the same order.
LIMIT = 0.15


def noise_to_signal(rows: mx.array, codec: Affine) -> float:
    """Predicted noise over signal of storing ``rows`` (B, H, T, D), keys or values of one layer, with ``codec``.

    0 where nothing would be rounded; infinite where rounding meets rows that do not vary along T at all. Above about ½
    it says "lost" rather than by how much: an error cannot exceed the rows' own spread by the whole of the prediction.
    Reads its result back from the device, so it belongs where rows are re-encoded, not in a step.
    """
    return _range_to_signal(rows, codec) / _levels_factor(codec.bits)


def guarded_bits(
    rows: mx.array, codec: Affine, limit: float = LIMIT, ladder: Iterable[int] = AFFINE_BITS
) -> int | None:
    """The fewest bits of ``ladder``, from those of ``codec`` up, that keep :func:`noise_to_signal` within ``limit``.

    None if not even the most bits do: these rows should stay as they are.
    """
    quotient = _range_to_signal(rows, codec)
    for bits in sorted(ladder):
        if bits >= codec.bits and quotient / _levels_factor(bits) <= limit:
            return bits
    return None


def _levels_factor(bits: int) -> float:
    return 12.0 * float(2**bits - 1) ** 2


def _range_to_signal(rows: mx.array, codec: Affine) -> float:
    """Mean squared range of the groups over the mean variance of the channels along T."""
    mean = sum(_evaluated(part.sum(axis=2, keepdims=True)) for part in _parts(rows, codec)) / rows.shape[2]
    squares = deviations = 0.0
    groups = 0
    for part in _parts(rows, codec):
        grouped = mx.unflatten(codec.to_grouped(part), -1, (-1, codec.group_size))
        ranges = grouped.max(axis=-1) - grouped.min(axis=-1)
        groups += ranges.size
        squares += _number(mx.square(ranges).sum())
        deviations += _number(mx.square(part - mean).sum())
    if squares == 0.0:
        return 0.0
    return math.inf if deviations == 0.0 else (squares / groups) / (deviations / rows.size)


#: Rows are looked at in so many parts, of so many rows at least: float32 arrays of all of them would take more than the
#: codes whose price is asked for.
_PARTS, _FEWEST_ROWS = 8, 256


def _parts(rows: mx.array, codec: Affine) -> Iterator[mx.array]:
    """Rows (B, H, T, D) as float32, a run of whole blocks at a time."""
    wanted = max(_FEWEST_ROWS, -(-rows.shape[2] // _PARTS))
    step = -(-wanted // codec.block) * codec.block
    for start in range(0, rows.shape[2], step):
        yield rows[:, :, start : start + step].astype(mx.float32)


def _evaluated(x: mx.array) -> mx.array:
    mx.eval(x)
    return x


def _number(x: mx.array) -> float:
    value: Any = x.item()
    return float(value)
