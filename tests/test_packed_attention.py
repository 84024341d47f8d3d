"""Attention over packed rows is attention over the rows that the codes stand for, whatever the layout and the mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from lumina_cache.backend import packed as module
from lumina_cache.backend.packed import PackedLayout, attend
from lumina_cache.codecs import CODECS, Affine, AffineFetch, Codec, Dense, Hadamard, KiviKeys
from lumina_cache.codecs.formats import MXFP4, MXFP8, NVFP4
from lumina_cache.errors import AttentionInputError

MASKS = (
    "none",
    "causal",
    "bool",
    "bool per head",
    "additive",
    "additive per head",
    "-inf",
    "window",
    "padding",
)


@dataclass(frozen=True)
class Case:
    """One call. Widths and counts as in ``attend``; ``packed`` and ``dense`` are rows."""

    kind: str = "affine"
    bits: int = 4
    group: int = 32
    heads: int = 2
    repeats: int = 3
    n: int = 1
    packed: int = 128
    dense: int = 5
    mask: str = "none"
    sinks: bool = False
    softcap: float | None = None
    batch: int = 1
    width: int = 128
    value_width: int = 128
    dtype: Any = mx.float32
    max_score_bytes: int = module.MAX_SCORE_BYTES

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        formats = {"mxfp4": MXFP4, "mxfp8": MXFP8, "nvfp4": NVFP4}
        if self.kind in formats:
            return formats[self.kind], formats[self.kind]
        keys = {"affine": Affine, "kivi": KiviKeys, "rotated": Hadamard}[self.kind]
        values = Hadamard if self.kind == "rotated" else AffineFetch
        return keys(self.bits, self.group), values(self.bits, self.group)


def layout_of(codec: Codec) -> PackedLayout:
    layout = PackedLayout.of(codec)
    assert layout is not None
    return layout


def _mask(case: Case, rng: np.random.Generator) -> Any:
    total = case.packed + case.dense
    shape: tuple[int, ...] = (case.n, total)
    if case.mask == "none":
        return None
    if case.mask == "causal":
        return "causal"
    if case.mask.endswith("per head"):
        shape = (case.batch, case.heads * case.repeats, *shape)
    if case.mask.startswith("bool"):
        seen = rng.random(shape) < 0.7
        seen[..., 0] = True
        return mx.array(seen)
    if case.mask.startswith("additive"):
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(case.dtype)
    query, row = np.arange(case.n)[:, None] + total - case.n, np.arange(total)[None]
    if case.mask == "padding":
        hidden = rng.integers(0, total, size=(case.batch, 1, 1, 1))
        return mx.array(row[None, None] >= hidden)
    # Whole tiles are hidden: no row but the newest few is seen.
    seen = (row <= query) & (row > query - 3)
    return (
        mx.array(seen) if case.mask == "window" else mx.array(np.where(seen, 0, -np.inf).astype(np.float32))
    )


def _inputs(case: Case, seed: int) -> tuple[list[Any], dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(case.dtype)

    key_codec, value_codec = case.codecs

    def sealed(width: int, codec: Codec) -> Any:
        return codec.encode(normal(case.batch, case.heads, case.packed, width)) if case.packed else None

    queries = normal(case.batch, case.heads * case.repeats, case.n, case.width)
    keys, values = sealed(case.width, key_codec), sealed(case.value_width, value_codec)
    tails = (
        (None, None)
        if case.dense == 0
        else (
            normal(case.batch, case.heads, case.dense, case.width),
            normal(case.batch, case.heads, case.dense, case.value_width),
        )
    )
    options = {
        "scale": case.width**-0.5,
        "mask": _mask(case, rng),
        "sinks": normal(case.heads * case.repeats) if case.sinks else None,
    }
    return [queries, keys, values, layout_of(key_codec), layout_of(value_codec), *tails], options


def _rows(case: Case, positional: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """All keys and values, decoded; float64."""
    _, keys, values, _, _, tail_keys, tail_values = positional
    sides = []
    for encoded, codec, tail in zip((keys, values), case.codecs, (tail_keys, tail_values), strict=True):
        parts = [] if encoded is None else [codec.decode(encoded, case.dtype)]
        parts += [] if tail is None else [tail]
        sides.append(
            np.concatenate([np.array(a.astype(mx.float32), dtype=np.float64) for a in parts], axis=2)
        )
    return sides[0], sides[1]


def _by_numpy(case: Case, positional: list[Any], options: dict[str, Any]) -> np.ndarray:
    keys, values = _rows(case, positional)
    queries = np.array(positional[0].astype(mx.float32), dtype=np.float64)
    keys, values = (np.repeat(side, case.repeats, axis=1) for side in (keys, values))
    scores = options["scale"] * queries @ keys.swapaxes(-1, -2)
    if case.softcap is not None:
        scores = case.softcap * np.tanh(scores / case.softcap)
    mask, total = options["mask"], keys.shape[2]
    if isinstance(mask, str):
        mask = mx.array(np.arange(case.n)[:, None] + total - case.n >= np.arange(total)[None])
    if mask is not None and mask.dtype == mx.bool_:
        scores = np.where(np.array(mask), scores, -np.inf)
    elif mask is not None:
        scores = scores + np.array(mask.astype(mx.float32))
    if options["sinks"] is not None:
        column = np.array(options["sinks"].astype(mx.float32))[None, :, None, None]
        scores = np.concatenate([np.broadcast_to(column, (*scores.shape[:-1], 1)), scores], axis=-1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights[..., weights.shape[-1] - total :] @ values


def _by_mlx(case: Case, positional: list[Any], options: dict[str, Any]) -> np.ndarray:
    keys, values = (mx.array(side.astype(np.float32)).astype(case.dtype) for side in _rows(case, positional))
    return np.array(
        mx.fast.scaled_dot_product_attention(positional[0], keys, values, **options).astype(mx.float32)
    )


def check(case: Case, seed: int = 0, tolerance: float = 1e-4) -> None:
    positional, options = _inputs(case, seed)
    got = attend(*positional, softcap=case.softcap, max_score_bytes=case.max_score_bytes, **options)
    assert got.dtype == case.dtype
    assert got.shape == (case.batch, case.heads * case.repeats, case.n, case.value_width)
    got = np.array(got.astype(mx.float32))
    np.testing.assert_allclose(got, _by_numpy(case, positional, options), atol=tolerance, rtol=0)
    if case.softcap is None:
        np.testing.assert_allclose(got, _by_mlx(case, positional, options), atol=tolerance, rtol=0)


KINDS = ("affine", "kivi", "rotated")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.parametrize("mask", MASKS)
def test_it_is_attention_over_the_decoded_rows_under_every_mask(kind, n, mask):
    check(Case(kind=kind, n=n, mask=mask, batch=2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_it_is_attention_over_the_decoded_rows_for_every_packing(kind, bits, group):
    check(Case(kind=kind, bits=bits, group=group, n=1))
    check(Case(kind=kind, bits=bits, group=group, n=7, mask="causal"))


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("n", [1, 7])
def test_formats_with_a_shared_scale_are_read_as_well(kind, n):
    check(Case(kind=kind, n=n, mask="causal"))
    check(Case(kind=kind, n=n, mask="causal", repeats=16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("repeats", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [1, 2, 17])
def test_query_heads_may_share_rows_in_any_ratio(kind, repeats, n):
    check(Case(kind=kind, repeats=repeats, n=n, mask="causal"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "dense"), [(128, 0), (0, 5), (0, 1), (128, 40)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_either_part_may_be_empty(kind, rows, dense, softcap, sinks):
    check(Case(kind=kind, packed=rows, dense=dense, softcap=softcap, sinks=sinks, mask="bool"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_rows_taken_in_tiles_give_the_same(kind, mask, sinks, softcap, monkeypatch):
    monkeypatch.setattr(module, "TILE", 128)
    case = Case(kind=kind, n=6, packed=384, dense=150, mask=mask, sinks=sinks, softcap=softcap, width=64)
    # A byte per score matrix: one query and 128 rows at a time.
    check(replace(case, max_score_bytes=1))
    # All queries, 128 rows at a time.
    check(replace(case, max_score_bytes=6 * 6 * 130 * 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoded", [False, True])
def test_reading_codes_and_decoding_tiles_of_them_give_the_same(kind, decoded, monkeypatch):
    monkeypatch.setattr(module, "_decodes", lambda products, transposed: decoded)
    monkeypatch.setattr(module, "DECODED_TILE", 256)
    for n in (1, 5):
        check(Case(kind=kind, n=n, packed=512, mask="causal"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "value_width"), [(64, 128), (128, 64), (512, 64)])
def test_keys_and_values_may_differ_in_width_as_in_latent_attention(kind, width, value_width):
    # mlx-lm's latent attention hands the positional part of the scores over as an additive mask.
    case = Case(kind=kind, heads=1, repeats=4, width=width, value_width=value_width, mask="additive per head")
    check(case)
    check(replace(case, n=5))


@pytest.mark.parametrize(("width", "group"), [(96, 32), (160, 32), (224, 32)])
def test_rotations_of_widths_whose_hadamard_matrix_is_not_its_own_inverse_are_undone(width, group):
    check(Case(kind="rotated", width=width, value_width=width, group=group, packed=64))


def test_sides_may_have_packings_of_their_own():
    class Own(Case):
        codecs = (KiviKeys(8, 64), Hadamard(2, 32))

    check(Own())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float16, 4e-3), (mx.bfloat16, 4e-2)])
@pytest.mark.parametrize("n", [1, 6])
def test_half_precision_stays_within_its_rounding(kind, dtype, tolerance, n):
    check(Case(kind=kind, dtype=dtype, packed=64, n=n, width=64, value_width=64, mask="causal"), 0, tolerance)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group = draw(st.sampled_from([32, 64, 128]))
    rows = group * draw(st.integers(0, 4)) if draw(st.booleans()) else 128 * draw(st.integers(0, 2))
    dense = draw(st.integers(0 if rows else 1, 40))
    widths = st.sampled_from([w for w in (32, 64, 128, 256) if w % group == 0])
    heads, repeats = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    total = rows + dense
    n = draw(st.integers(1, min(total, 12)))
    return Case(
        kind=draw(st.sampled_from(KINDS)),
        bits=draw(st.sampled_from([2, 3, 4, 6, 8])),
        group=group,
        heads=heads,
        repeats=repeats,
        n=n,
        packed=rows,
        dense=dense,
        mask=draw(st.sampled_from(MASKS)),
        sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from([None, 1.0, 30.0])),
        batch=draw(st.integers(1, 2)),
        width=draw(widths),
        value_width=draw(widths),
        max_score_bytes=draw(st.sampled_from([1, 4096, 1 << 16, 1 << 30])),
    )


@given(case=cases(), seed=st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_any_call_is_attention_over_the_decoded_rows(case, seed):
    check(case, seed)


@pytest.mark.parametrize("family", CODECS.values(), ids=CODECS)
def test_every_codec_has_a_layout(family):
    for bits in family.method.bits:
        for codec in family.make(bits, bits, family.method.groups[0]):
            assert PackedLayout.of(codec) is not None


def test_rows_of_an_unknown_codec_have_no_layout():
    @dataclass(frozen=True)
    class Shifted(Affine):
        """Codes of something else than the rows."""

    assert PackedLayout.of(Dense()) is None
    assert PackedLayout.of(Shifted(4, 64)) is None


def _call(**changes: Any) -> mx.array:
    positional, options = _inputs(Case(n=2, **changes), 0)
    return attend(*positional, **options)


def _with(index: int, value: Any, **options: Any) -> mx.array:
    positional, given = _inputs(Case(n=2), 0)
    positional[index] = value
    return attend(*positional, **(given | options))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _with(0, mx.zeros((1, 5, 2, 128))), "5 query heads of width 128 do not go with 2 K/V heads"),
        (lambda: _with(0, mx.zeros((1, 6, 2, 64))), "6 query heads of width 64 do not go with 2 K/V heads"),
        (lambda: _with(1, None), "keys without values"),
        (lambda: _with(6, None), "keys without values"),
        (lambda: _with(4, PackedLayout(4, 32, per_channel=True)), "values packed along tokens"),
        (lambda: _with(3, PackedLayout(8, 32)), "packed rows have"),
        (lambda: _with(2, tuple(a[:, :, :64] for a in _inputs(Case(), 0)[0][2])), "packed keys have"),
        (lambda: _with(6, mx.zeros((1, 2, 4, 128))), "must agree up to their width"),
        (lambda: _with(0, mx.zeros((1, 6, 140, 128)), mask="causal"), "causal mask of 140 queries"),
        (lambda: _with(0, mx.zeros((1, 6, 2, 128)), mask="banded"), "'banded' is not known"),
        (lambda: _with(0, mx.zeros((1, 6, 2, 128)), mask=mx.zeros((2, 128))), "does not broadcast"),
        (lambda: _with(0, mx.zeros((1, 6, 2, 128)), mask=mx.zeros((1, 1, 1, 2, 133))), "does not broadcast"),
        (lambda: _with(0, mx.zeros((1, 6, 2, 128)), sinks=mx.zeros((2,))), "one per query head"),
        (lambda: _with(0, mx.zeros((1, 6, 2, 128)), max_score_bytes=0), "must be positive"),
        (lambda: _call(packed=0, dense=0), "no rows"),
    ],
)
def test_shapes_that_do_not_go_together_are_named(call, message):
    with pytest.raises(AttentionInputError, match=message):
        call()


def test_a_query_that_sees_no_row_of_a_tile_is_not_disturbed_by_it(monkeypatch):
    monkeypatch.setattr(module, "TILE", 128)
    # The first 128 rows are hidden by minus infinity: alone, they would give a softmax of nothing.
    check(Case(n=2, packed=256, dense=8, mask="-inf", max_score_bytes=1))


def _peak(call: Any) -> int:
    mx.eval(call())
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(call())
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_takes_a_few_times_the_bound_and_not_the_whole_matrix_of_scores(kind):
    case = Case(kind=kind, n=512, packed=4096, dense=512, mask="causal", width=64, value_width=64, heads=1)
    positional, options = _inputs(case, 0)
    mx.eval(positional[0], positional[1:3], positional[5:])
    matrix = 3 * 512 * (4096 + 512) * 4
    bound = matrix // 16
    # Two tiles are under way, each with scores and weights; besides them decoded rows, sums and the result.
    assert _peak(lambda: attend(*positional, max_score_bytes=bound, **options)) <= 3.5 * bound


def test_what_mlx_lm_does_takes_the_whole_matrix_of_scores():
    # What the test above would see if the bound did nothing: a peak can be measured, and is not always small.
    case = Case(n=512, packed=4096, dense=0, width=64, value_width=64, heads=1)
    positional, options = _inputs(case, 0)
    mx.eval(positional[:3])
    q, k, v = positional[:3]
    native = _peak(lambda: quantized_scaled_dot_product_attention(q * 1, k, v, options["scale"], None, 32, 4))
    assert native >= 3 * 512 * 4096 * 4
