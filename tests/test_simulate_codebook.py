"""The codec that nothing but the simulator has, against numbers that are known."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lumina_cache.codecs import Hadamard
from lumina_cache.lab.simulate.codebook import Codebook, levels


def rows(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def error(codec: Codebook | Hadamard, x: mx.array) -> float:
    back = codec.decode(codec.encode(x), x.dtype)
    return float((mx.square(back - x).mean() / mx.square(x).mean()).item())


def test_in_many_dimensions_the_levels_are_those_of_a_normal_variable() -> None:
    # J. Max, IRE Trans. Inf. Theory 6, 1960, table I.
    assert levels(1, 4096).tolist() == pytest.approx([-0.798, 0.798], abs=2e-3)
    assert levels(2, 4096).tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=3e-3)
    assert levels(3, 4096)[4:].tolist() == pytest.approx([0.2451, 0.7560, 1.344, 2.152], abs=5e-3)


@pytest.mark.parametrize(("bits", "expected"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_the_error_is_that_of_the_best_quantiser_of_its_bits(bits: int, expected: float) -> None:
    # Max's table again; in 128 dimensions a little less.
    assert error(Codebook(bits, 128), rows(1, 2, 500, 128)) == pytest.approx(expected, rel=0.05)


def test_a_codebook_loses_less_than_steps_of_equal_width() -> None:
    x = rows(1, 2, 300, 64)
    for bits in (
        2,
        3,
    ):  # at 4 bits the smallest and largest element of each group, stored twice as exactly, win
        assert error(Codebook(bits, 64), x) < error(Hadamard(bits, 64), x)


def test_a_row_keeps_its_direction_whatever_its_length_and_zero_stays_zero() -> None:
    x = rows(1, 1, 4, 64)
    codec = Codebook(4, 64)
    back = codec.decode(codec.encode(1000 * x), x.dtype) / 1000
    assert mx.allclose(back, codec.decode(codec.encode(x), x.dtype), rtol=1e-3, atol=1e-4)
    assert not mx.abs(codec.decode(codec.encode(mx.zeros((1, 1, 2, 64))), mx.float32)).max().item()


def test_an_outlier_channel_is_spread() -> None:
    x = rows(1, 1, 200, 64) * mx.where(mx.arange(64) == 5, 50.0, 1.0)
    assert error(Codebook(3, 64), x) < 0.06


def test_bytes_are_those_of_codes_and_one_scale_per_group() -> None:
    assert Codebook(3, 64).row_nbytes(192, 2) == 192 * 3 // 8 + 3 * 2
    assert Codebook(4, 32).row_nbytes(128, 2) == 64 + 4 * 2


def test_dims_that_cannot_be_rotated_or_grouped_are_named() -> None:
    assert "do not divide" in str(Codebook(4, 64).why_not(96))
    assert "hadamard_transform" in str(Codebook(4, 36).why_not(36))
    assert Codebook(4, 64).why_not(128) is None
