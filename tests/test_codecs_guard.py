"""The outlier guard predicts what rounding costs and raises bits until it is small."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from lumina_cache.codecs import Affine, AffineFetch, Hadamard, KiviKeys
from lumina_cache.codecs.guard import LIMIT, guarded_bits, noise_to_signal

KINDS = pytest.mark.parametrize("kind", [Affine, AffineFetch, Hadamard, KiviKeys])


def _rows(*, heads: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(1, heads, 256, 64)).astype(np.float32)


def _with_bias(size: float) -> np.ndarray:
    """One channel of every head with a large offset, as a bias of the key projection makes it."""
    rows = _rows()
    rows[..., 17] += size
    return rows


def _really_lost(rows: np.ndarray, codec: Affine) -> float:
    """What rounding does cost: mean squared error over the mean variance of the channels."""
    decoded = np.array(codec.decode(codec.encode(mx.array(rows)), mx.float32))
    return float(np.square(decoded - rows).mean() / rows.var(axis=2).mean())


@KINDS
@pytest.mark.parametrize("bits", [3, 4, 6, 8])
@pytest.mark.parametrize("bias", [0.0, 50.0])
def test_the_prediction_is_what_rounding_costs(kind: type[Affine], bits: int, bias: float) -> None:
    codec, rows = kind(bits, 64), _with_bias(bias)
    predicted, lost = noise_to_signal(mx.array(rows), codec), _really_lost(rows, codec)
    if lost < 0.5:
        # The grid is moved to hold zero, which the prediction leaves out.
        assert predicted == pytest.approx(lost, rel=0.35)
    else:
        assert predicted > 0.5


@KINDS
def test_the_prediction_is_the_formula(kind: type[Affine]) -> None:
    codec, rows = kind(3, 32), _rows()
    if kind is KiviKeys:
        grouped = np.swapaxes(rows, 2, 3)
    else:
        grouped = np.array(mx.hadamard_transform(mx.array(rows))) if kind is Hadamard else rows
    groups = grouped.reshape(1, 2, grouped.shape[2], -1, 32)
    noise = np.mean((groups.max(-1) - groups.min(-1)) ** 2) / (12 * 7**2)
    signal = np.mean([rows[0, h, :, d].var() for h in range(2) for d in range(64)])
    assert noise_to_signal(mx.array(rows), codec) == pytest.approx(noise / signal, rel=1e-4)


@KINDS
def test_ordinary_rows_are_left_alone_at_four_bits(kind: type[Affine]) -> None:
    assert guarded_bits(mx.array(_rows()), kind(4, 64)) == 4


def test_a_biased_channel_raises_the_bits_of_codecs_that_it_spoils_and_of_no_other() -> None:
    rows = mx.array(_with_bias(50.0))
    raised = guarded_bits(rows, AffineFetch(4, 64))
    assert raised is not None
    assert raised > 4
    assert noise_to_signal(rows, AffineFetch(raised, 64)) <= LIMIT < noise_to_signal(rows, AffineFetch(4, 64))
    assert guarded_bits(rows, KiviKeys(4, 64)) == 4


def test_the_ladder_ends_in_a_refusal() -> None:
    rows = mx.array(_with_bias(1e4))
    assert guarded_bits(rows, AffineFetch(4, 64)) is None
    assert guarded_bits(mx.array(_with_bias(50.0)), AffineFetch(4, 64), ladder=(2, 3, 4)) is None


def test_bits_are_never_lowered_and_a_codec_with_more_is_kept() -> None:
    rows = mx.array(_rows())
    assert guarded_bits(rows, AffineFetch(8, 64)) == 8
    assert guarded_bits(rows, AffineFetch(2, 64), limit=math.inf) == 2


@KINDS
def test_rows_that_do_not_vary_lose_nothing_or_everything(kind: type[Affine]) -> None:
    same = mx.broadcast_to(mx.array(_rows())[:, :, :1], (1, 2, 64, 64))
    zero = mx.zeros((1, 2, 64, 64))
    assert noise_to_signal(zero, kind(4, 64)) == 0.0
    assert guarded_bits(zero, kind(2, 64)) == 2
    lost = noise_to_signal(same, kind(4, 64))
    assert lost == 0.0 if kind is KiviKeys else lost > 1e6


def test_half_precision_rows_are_judged_in_float32() -> None:
    rows = mx.array(_rows() * 300)
    full = noise_to_signal(rows, AffineFetch(4, 64))
    assert noise_to_signal(rows.astype(mx.float16), AffineFetch(4, 64)) == pytest.approx(full, rel=1e-2)
