"""Every codec against its formula in NumPy, its bytes against real arrays, and blocks moved without being decoded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache.codecs import CODECS, Affine, AffineFetch, Codec, ElementFormat, Hadamard, KiviKeys
from lumina_cache.codecs.base import append_rows, capacity_of, cut_rows, encoded_nbytes, gather_rows
from lumina_cache.codecs.formats import MXFP4, MXFP8, NVFP4
from lumina_cache.errors import ActionInfeasibleError
from lumina_cache.method import AFFINE_BITS, AFFINE_GROUPS
from lumina_cache.methods import METHODS
from lumina_cache.rows import drift
from tests.codec_reference import (
    E2M1,
    E4M3,
    affine_codes,
    affine_rows,
    hadamard_matrix,
    nearest_elements,
    unpacked,
)
from tests.harness import same_bits

AFFINE_LIKE = (Affine, AffineFetch, Hadamard, KiviKeys)
ELEMENT_FORMATS = (MXFP4, MXFP8, NVFP4)


def _codecs() -> Iterator[Codec]:
    for kind in (AffineFetch, Hadamard, KiviKeys):
        yield from (kind(bits, 32) for bits in AFFINE_BITS)
        yield from (kind(4, group) for group in (64, 128))
    yield from ELEMENT_FORMATS


EVERY_CODEC = pytest.mark.parametrize("codec", list(_codecs()), ids=str)


def _rows(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def _bits_equal(a: tuple[mx.array, ...], b: tuple[mx.array, ...]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def _grouped(codec: Codec, x: np.ndarray) -> np.ndarray:
    """What ``codec`` quantises of rows ``x``, by this test's own account."""
    if isinstance(codec, KiviKeys):
        return np.swapaxes(x, 2, 3)
    if isinstance(codec, Hadamard):
        return (x.astype(np.float64) @ hadamard_matrix(x.shape[-1])).astype(np.float32)
    return x


def _ungrouped(codec: Codec, x: np.ndarray) -> np.ndarray:
    if isinstance(codec, KiviKeys):
        return np.swapaxes(x, 2, 3)
    if isinstance(codec, Hadamard):
        return x.astype(np.float64) @ hadamard_matrix(x.shape[-1])
    return x


# -- the formulas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", AFFINE_GROUPS)
@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("kind", AFFINE_LIKE)
def test_codes_and_rows_are_those_of_the_formula(kind: type[Affine], bits: int, group: int) -> None:
    codec = kind(bits, group)
    rows = _rows(2, 3, 128, 128, seed=bits)
    codes, scales, biases = codec.encode(rows)
    quotients, want_scales, want_biases = affine_codes(_grouped(codec, np.array(rows)), bits, group)

    # A rotated row differs from ours in its last bits, and where a quotient is all but halfway that decides.
    got = unpacked(codes, bits)
    differs = got != np.rint(quotients)
    from_halfway = np.abs(quotients - np.floor(quotients) - 0.5)
    assert np.abs(got - quotients).max() <= 0.5 + 1e-4
    assert from_halfway[differs].size == 0 or from_halfway[differs].max() < 1e-4
    if kind is not Hadamard and mx.default_device().type == mx.DeviceType.cpu:
        assert not differs.any()
    np.testing.assert_allclose(np.array(scales), want_scales, rtol=2e-6)
    np.testing.assert_allclose(np.array(biases), want_biases, rtol=2e-6)

    want = _ungrouped(codec, affine_rows(got, np.array(scales), np.array(biases), group))
    np.testing.assert_allclose(
        np.array(codec.decode((codes, scales, biases), mx.float32)), want, rtol=0, atol=4e-6
    )


@pytest.mark.parametrize("codec", ELEMENT_FORMATS, ids=str)
def test_elements_are_the_nearest_of_their_format(codec: ElementFormat) -> None:
    rows = _rows(2, 3, 40, 96)
    codes, scales = codec.encode(rows)
    table = E2M1 if codec.bits == 4 else E4M3
    x = np.array(rows).reshape(2, 3, 40, -1, codec.group_size)
    wanted = np.abs(x).max(-1) / table[np.isfinite(table)].max()
    if codec is NVFP4:
        s = E4M3[np.array(scales)]
        np.testing.assert_allclose(np.abs(s - wanted), nearest_elements(wanted, E4M3), atol=1e-9)
    else:
        exponents = np.array(scales).astype(int) - 127
        # The CPU takes the nearest power of two, Metal the next one up.
        assert np.isin(exponents - np.floor(np.log2(wanted)), (0, 1)).all()
        s = 2.0**exponents
    elements = table[unpacked(codes, codec.bits)].reshape(x.shape)
    quotients = x / s[..., None]
    np.testing.assert_allclose(
        np.abs(elements - quotients), nearest_elements(quotients, table), rtol=1e-5, atol=1e-6
    )
    decoded = codec.decode((codes, scales), mx.float32)
    np.testing.assert_allclose(np.array(decoded), (elements * s[..., None]).reshape(rows.shape), rtol=1e-6)


@pytest.mark.parametrize("kind", AFFINE_LIKE)
@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_no_element_is_off_by_more_than_half_a_step_inside_its_grid(kind: type[Affine], bits: int) -> None:
    codec = kind(bits, 64)
    x = np.random.default_rng(bits).standard_t(3, size=(1, 2, 256, 64)).astype(np.float32)
    encoded = codec.encode(mx.array(x))
    want = _grouped(codec, x)
    got = _grouped(codec, np.array(codec.decode(encoded, mx.float32)))
    shape = (*want.shape[:-1], -1, 64)
    want, got = want.reshape(shape), got.reshape(shape)
    step = np.abs(np.array(encoded[1]))[..., None]
    ends = np.array(encoded[2])[..., None] + np.array(encoded[1])[..., None] * np.array([0, 2**bits - 1])
    beyond = np.maximum(0, np.maximum(ends.min(-1)[..., None] - want, want - ends.max(-1)[..., None]))
    error = np.abs(got - want)
    assert (error <= step / 2 + beyond + 1e-5 * np.abs(want).max()).all()
    # The grid is moved so that zero is on it; what that cuts off the far end is less than one step.
    whole = (want.max(-1) - want.min(-1))[..., None] / (2**bits - 1)
    assert (error <= whole * (1 + 1e-4) + 1e-6).all()


@pytest.mark.parametrize("width", [32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448])
def test_a_rotation_is_undone_whatever_the_order_of_its_matrix(width: int) -> None:
    codec = Hadamard(8, 32)
    assert codec.why_not(width) is None
    rows = _rows(1, 2, 3, width)
    back = codec.from_grouped(codec.to_grouped(rows))
    np.testing.assert_allclose(np.array(back), np.array(rows), atol=1e-5)
    lengths = mx.linalg.norm(codec.to_grouped(rows), axis=-1)
    np.testing.assert_allclose(np.array(lengths), np.linalg.norm(np.array(rows), axis=-1), rtol=1e-5)


def test_a_rotation_or_a_group_per_channel_saves_the_neighbours_of_an_outlier() -> None:
    x = np.random.default_rng(1).normal(size=(1, 1, 64, 64)).astype(np.float32)
    x[..., 5] *= 50
    rows = mx.array(x)

    def error_of_the_others(codec: Codec) -> float:
        decoded = np.array(codec.decode(codec.encode(rows), mx.float32))
        return float(np.sqrt(np.mean(np.delete(decoded - x, 5, axis=-1) ** 2)))

    plain = error_of_the_others(AffineFetch(4, 64))
    assert plain > 0.5  # of a deviation of 1
    assert error_of_the_others(Hadamard(4, 64)) < plain / 2
    assert error_of_the_others(KiviKeys(4, 64)) < plain / 5


@pytest.mark.parametrize("width", [36, 60, 72, 240, 288, 576, 1152])
def test_widths_that_no_matrix_exists_for_are_refused_before_mlx_sees_them(width: int) -> None:
    """mlx 0.32 does not refuse these: it writes outside its buffers."""
    codec = Hadamard(4, 32)
    assert codec.why_not(width) is not None
    with pytest.raises(ActionInfeasibleError, match=str(width)):
        codec.encode(mx.zeros((1, 1, 1, width)))


@pytest.mark.parametrize(
    ("codec", "head_dim", "why"),
    [
        (AffineFetch(4, 64), 80, "groups of 64"),
        (Hadamard(4, 64), 96, "groups of 64"),
        (KiviKeys(4, 128), 16, "bytes per row"),
        (KiviKeys(3, 32), 12, "bytes per row"),
        (MXFP4, 80, "groups of 32"),
        (NVFP4, 72, "groups of 16"),
    ],
)
def test_a_head_dim_that_does_not_fit_is_refused_with_the_reason(
    codec: Codec, head_dim: int, why: str
) -> None:
    assert why in (codec.why_not(head_dim) or "")


# -- bytes --------------------------------------------------------------------------------------------------------------


SHAPES = ((1, 1, 128), (1, 3, 64), (2, 2, 96), (1, 8, 160), (1, 2, 80), (3, 1, 16))


@EVERY_CODEC
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_a_row_takes_exactly_the_bytes_it_is_said_to(codec: Codec, dtype: mx.Dtype) -> None:
    fitting = [shape for shape in SHAPES if codec.why_not(shape[2]) is None]
    assert len(fitting) >= 1
    for (batch, heads, dim), blocks in itertools.product(fitting, (1, 3)):
        n = blocks * codec.block
        encoded = codec.encode(mx.zeros((batch, heads, n, dim), dtype))
        assert sum(a.nbytes for a in encoded) == n * codec.row_nbytes(batch * heads * dim, dtype.size)
        assert capacity_of(encoded, codec) == n
        for a, span in zip(encoded, codec.spans, strict=True):
            assert a.shape[codec.axis] == blocks * span


@EVERY_CODEC
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_rows_come_back_in_their_shape_and_in_the_dtype_that_was_asked_for(
    codec: Codec, dtype: mx.Dtype
) -> None:
    rows = _rows(2, 3, 128, 128, dtype=dtype)
    encoded = codec.encode(rows)
    for wanted in (mx.float32, dtype):
        decoded = codec.decode(encoded, wanted)
        assert decoded.dtype == wanted
        assert decoded.shape == rows.shape
    error = mx.sqrt(mx.mean(mx.square(decoded - rows).astype(mx.float32))).item()
    bits = (
        5 if codec is MXFP8 else codec.code_bits or 0
    )  # E4M3 has a sign and three bits of mantissa, plus one implied
    assert 0 < error < 4 * 2.0**-bits


@pytest.mark.parametrize("codec", [codec for codec in _codecs() if codec.block == 1], ids=str)
def test_values_without_a_channel_take_no_byte_or_are_refused(codec: Codec) -> None:
    """An index cache may keep keys alone."""
    rows = _rows(1, 1, 128, 0)
    if codec.why_not(0) is not None:
        with pytest.raises(ActionInfeasibleError, match="not 0"):
            codec.encode(rows)
        return
    encoded = codec.encode(rows)
    assert encoded_nbytes(encoded) == codec.row_nbytes(0, 4) == 0
    assert capacity_of(append_rows(None, 0, encoded, codec), codec) >= 128
    assert codec.decode(encoded, mx.float32).shape == rows.shape
    # No error can be told from none at all.
    assert drift(codec, encoded, rows) is None


def test_an_odd_number_of_groups_is_encoded_like_an_even_one() -> None:
    rows = _rows(1, 1, 2, 80)
    both = NVFP4.encode(rows)
    for i in range(2):
        assert _bits_equal(NVFP4.encode(rows[:, :, i : i + 1]), tuple(a[:, :, i : i + 1] for a in both))


# -- blocks moved as codes ----------------------------------------------------------------------------------------------


@EVERY_CODEC
def test_rows_appended_across_growth_are_those_encoded_at_once(codec: Codec) -> None:
    rows = _rows(1, 2, 640, 128)
    pieces = [128, 128, 256, 128] if codec.block > 1 else [100, 1, 1, 153, 3, 254, 128]
    assert sum(pieces) == rows.shape[2]
    held, n = None, 0
    for size in pieces:
        held = append_rows(held, n, codec.encode(rows[:, :, n : n + size]), codec)
        n += size
        assert _bits_equal(cut_rows(held, n, codec), codec.encode(rows[:, :, :n]))
    assert capacity_of(held, codec) >= n


@EVERY_CODEC
def test_a_cut_and_another_branch_hold_what_was_encoded(codec: Codec) -> None:
    rows, other = _rows(1, 2, 512, 128), _rows(1, 2, 128, 128, seed=9)
    held = append_rows(None, 0, codec.encode(rows), codec)
    held = append_rows(held, 256, codec.encode(other), codec)
    want = mx.concatenate([rows[:, :, :256], other], axis=2)
    assert _bits_equal(cut_rows(held, 384, codec), codec.encode(want))


@EVERY_CODEC
def test_blocks_gathered_per_head_are_those_encoded_from_the_gathered_rows(codec: Codec) -> None:
    rows = _rows(2, 3, 1024, 128)
    blocks = rows.shape[2] // codec.block
    rng = np.random.default_rng(3)
    index = np.stack([np.sort(rng.permutation(blocks)[:5]) for _ in range(6)]).reshape(2, 3, 5)
    got = gather_rows(codec.encode(rows), mx.array(index.astype(np.int32)), codec)
    of_rows = (index[..., None] * codec.block + np.arange(codec.block)).reshape(2, 3, -1, 1)
    kept = mx.take_along_axis(rows, mx.array(of_rows.astype(np.int32)), axis=2)
    assert _bits_equal(got, codec.encode(kept))


def test_packed_keys_are_read_by_a_quantised_product_as_they_are() -> None:
    codec = KiviKeys(4, 32)
    keys, queries = _rows(1, 2, 96, 64), _rows(1, 2, 5, 64, seed=1)
    encoded = codec.encode(keys)
    got = mx.quantized_matmul(queries, *encoded, transpose=False, group_size=32, bits=4)
    want = queries @ codec.decode(encoded, mx.float32).swapaxes(-1, -2)
    np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-4)


# -- rows of any kind ---------------------------------------------------------------------------------------------------


@EVERY_CODEC
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e4, -3e4, 1e-4, 1e-8, 1e-30, 1e30])
def test_constant_rows_stay_finite_and_near_their_value(codec: Codec, value: float) -> None:
    decoded = np.array(codec.decode(codec.encode(mx.full((1, 2, 128, 128), value)), mx.float32))
    assert np.isfinite(decoded).all()
    if codec is NVFP4 and not 6 * 2.0**-10 < abs(value) < 2688:
        return  # outside its reach: zero or clipped, as its page says
    allowed = {4: 0.2, 8: 0.07}[codec.bits] if isinstance(codec, ElementFormat) else 2.0**-9
    if isinstance(codec, Hadamard):
        # All of a constant row falls on one element, and the grid of the group spans it.
        allowed = 0.5 / (2**codec.bits - 1)
    assert np.abs(decoded - value).max() <= allowed * abs(value) + 1.1e-7 * np.sqrt(128)


@EVERY_CODEC
@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    power=st.integers(-30, 30),
    offset=st.sampled_from([0.0, 1.0, -50.0, 1e3]),
    zeros=st.sampled_from(["none", "rows", "channels"]),
)
def test_rows_of_any_size_come_back_finite_and_no_further_off_than_their_range(
    codec: Codec, seed: int, power: int, offset: float, zeros: str
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_t(2, size=(1, 2, 128, 128)) + offset) * 10.0**power
    if zeros == "rows":
        x[:, :, ::3] = 0
    if zeros == "channels":
        x[..., ::5] = 0
    x = x.astype(np.float32)
    decoded = np.array(codec.decode(codec.encode(mx.array(x)), mx.float32))
    assert decoded.shape == x.shape
    assert np.isfinite(decoded).all()
    grouped = _grouped(codec, x)
    span = grouped.max() - grouped.min()
    error = np.abs(_grouped(codec, decoded) - grouped).max()
    if isinstance(codec, Affine):
        # One step, the smallest that mlx takes, and what float32 leaves of rows far from zero.
        assert error <= span / (2**codec.bits - 1) * 1.001 + 1.1e-7 + 1e-5 * np.abs(grouped).max()
    else:
        assert error <= np.abs(x).max()


# -- the registry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_family_makes_both_sides_as_asked(name: str) -> None:
    family = CODECS[name]
    assert METHODS["quant", name] is family.method
    for key_bits in family.method.bits:
        for value_bits in family.method.bits:
            for group in family.method.groups:
                sides = family.make(key_bits, value_bits, group)
                assert sides == family.make(key_bits, value_bits, group)
                assert (sides.keys.code_bits, sides.values.code_bits) == (key_bits, value_bits)
                assert sides.values.block == 1
                assert hash(sides) == hash(family.make(key_bits, value_bits, group))


def test_kivi_keeps_its_newest_rows_dense_and_its_values_row_by_row() -> None:
    family = CODECS["kivi"]
    assert family.residual == 32
    assert family.make(2, 4, 128) == (KiviKeys(2, 128), AffineFetch(4, 64))
    assert all(CODECS[name].residual == 0 for name in ("affine", "affine_fetch", "hadamard", "mxfp8"))
