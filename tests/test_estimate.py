"""Bytes are predicted exactly: after every step, after every action, for every kind of layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from harness import (
    NO_ROWS,
    UNEVICTABLE,
    UNPACKABLE,
    architectures,
    fast_first,
    feed,
    held_of,
    quiet,
    real_bytes,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache.actions import (
    Action,
    Composite,
    Evict,
    Keep,
    Plan,
    Quantize,
    Reclaim,
    action_space,
    parse_action,
)
from lumina_cache.apply import held
from lumina_cache.backend.probe import probe_model
from lumina_cache.codecs import Affine, Dense, Layout
from lumina_cache.codecs.base import grown_capacity
from lumina_cache.estimate import (
    Held,
    after_action,
    after_append,
    emptied,
    merge_equal,
    nbytes_allocated,
    nbytes_live,
    peak_of_action,
    row_nbytes,
    tokens_without_growth,
    transient_of_action,
)
from lumina_cache.lab.tiny import SPECS, build
from lumina_cache.layers import KVCache, RotatingKVCache, leaves

#: One architecture of each kind of storage.
KINDS = (
    "llama",
    "gemma3",
    "gemma4_text",
    "llama4",
    "falcon_h1",
    "deepseek_v32",
    "longcat_flash",
    "qwen3_next",
    "recurrent_gemma",
    "mimo_v2_flash" if "mimo_v2_flash" in SPECS else "mistral3",
)

LENGTHS = (1, 255, 256, 257, 600, 1500)


def exact(cache: Any, predicted: tuple[Held, ...]) -> None:
    """What was predicted is what the arrays take."""
    now = held_of(cache)
    assert [(one.rows, one.capacity, one.offset) for one in predicted] == [
        (one.rows, one.capacity, one.offset) for one in now
    ]
    assert nbytes_allocated(predicted) == nbytes_allocated(now) == real_bytes(cache)
    assert nbytes_live(predicted) == nbytes_live(now)


def run(model: Any, steps: list[int], group: int | None = None, dtype: mx.Dtype = mx.float32) -> None:
    """Feed ``steps`` and predict each; with ``group``, pack at 8 and then at 4 bits on the way."""
    cache = quiet(model)
    probe = probe_model(model)
    now = tuple(emptied(one) for one in probe.layers)
    ids, at = tokens(max(steps)), 0
    for i, n in enumerate(steps):
        predicted = after_append(now, n)
        logits = model(ids[:, :n], cache=cache)
        mx.eval(logits)
        assert logits.dtype == dtype
        exact(cache, predicted)
        now, at = predicted, at + n
        if group is not None and i in (1, 3):
            action = Quantize("affine", *((8, 8) if i == 1 else (4, 4)), group)
            predicted = after_action(now, action)
            cache.apply(action)
            exact(cache, predicted)
            now = predicted


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", fast_first(KINDS, set(KINDS) - {"longcat_flash", "qwen3_next"}))
def test_bytes_after_every_step_are_predicted_exactly(tiny: Any, name: str, length: int) -> None:
    """In one chunk, in several, and token by token; a window wraps, a chunk limit and growth steps are crossed."""
    model = tiny(name)
    run(model, [length, 1, 1, 1])
    run(model, [*[64] * (length // 64), length % 64 or 1, 1, 5, 1, 1])


@pytest.mark.parametrize("name", fast_first(KINDS, {"llama", "gemma3", "llama4", "falcon_h1"}))
def test_bytes_after_every_single_append_are_predicted_exactly(tiny: Any, name: str) -> None:
    run(tiny(name), [1] * 300)
    run(tiny(name), [30, *[1] * 20, 9, *[1] * 3])


@pytest.mark.parametrize("name", architectures(but=NO_ROWS | UNPACKABLE.keys()))
def test_bytes_of_packed_rows_are_predicted_exactly(tiny: Any, name: str) -> None:
    group = probe_model(tiny(name)).group_size
    run(tiny(name), [20, 1, 1, 5, 1, 1, 270, 1, 3], group)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1"])
def test_bytes_in_bfloat16_are_predicted_exactly(name: str) -> None:
    model = build(name, dtype=mx.bfloat16)
    run(model, [20, 1, 1, 5, 1, 1], 32, mx.bfloat16)
    run(model, [255, 1, 1, 1], None, mx.bfloat16)


@pytest.mark.parametrize(
    "action",
    [
        "keep",
        "reclaim",
        "evict:sinks_window@0.50",
        "evict:sinks_window@rows=7,sinks=2",
        "quant:affine,bits=8,group=32",
        "quant:affine,bits=3,group=32",
        "evict:sinks_window@0.25+quant:affine,bits=4,group=32",
        "quant:affine,bits=4,group=32+evict:sinks_window@0.25+reclaim",
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1", "jamba", "mistral3", "deepseek_v2"])
def test_bytes_after_every_action_are_predicted_exactly(tiny: Any, name: str, action: str) -> None:
    model = tiny(name)
    cache = quiet(model)
    ids = tokens(400)
    for at, n in ((0, 300), (300, 1), (301, 4)):
        feed(model, cache, ids, [n], start=at)
    predicted = after_action(held_of(cache), parse_action(action))
    applied = cache.apply(action)
    assert applied is not None
    exact(cache, predicted)
    assert applied.predicted_allocated == applied.after.nbytes_allocated == nbytes_allocated(predicted)
    predicted = after_append(predicted, 2)
    feed(model, cache, ids, [2], start=305)
    exact(cache, predicted)


@pytest.mark.parametrize("chunk", [1, 4, 16, 30])
def test_a_window_holds_its_overhang_after_a_chunk_and_loses_it_in_decode(chunk: int) -> None:
    """min(offset, max_size + chunk − 1) rows; a first chunk is stored whole."""
    layer = RotatingKVCache(8)
    now = held(layer)
    rows = mx.zeros((1, 2, chunk, 32))
    for i in range(6):
        layer.update_and_fetch(rows, rows)
        now = after_append([held(layer) if i == 0 else now], chunk)[0] if i else held(layer)
        assert (held(layer).rows, held(layer).capacity) == (now.rows, now.capacity)
        expected = (i + 1) * chunk if chunk == 1 or i == 0 else 8 + chunk - 1
        assert layer.rows == min((i + 1) * chunk, expected, 8 if chunk == 1 else 10**9)
    one = mx.zeros((1, 2, 1, 32))
    layer.update_and_fetch(one, one)
    assert layer.rows == 8 or chunk * 6 + 1 < 8


@settings(deadline=None)
@given(
    rows=st.integers(0, 3000),
    slack=st.integers(0, 600),
    n=st.integers(1, 3000),
)
def test_the_growth_rule_is_mlx_lms(rows: int, slack: int, n: int) -> None:
    grown = grown_capacity(rows, rows + slack, n)
    assert grown >= rows + n
    if rows + n <= rows + slack:
        assert grown == rows + slack
    else:
        kept = rows + slack if rows % 256 == 0 else rows
        assert grown - kept == -(-n // 256) * 256


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_the_growth_rule_is_that_of_the_arrays(steps: list[int]) -> None:
    layer, packed = KVCache(), KVCache()
    packed.reencode(Layout.both(Affine(8, 32)))
    now = None
    for n in steps:
        rows = mx.zeros((1, 1, n, 32))
        for one in (layer, packed):
            one.update_and_fetch(rows, rows)
        now = held(layer) if now is None else after_append([now], n)[0]
        assert layer.capacity == packed.capacity == now.capacity


@pytest.mark.parametrize("name", KINDS)
def test_bytes_stay_as_they_are_for_as_many_tokens_as_said(tiny: Any, name: str) -> None:
    model = tiny(name)
    for first in (1, 20, 250):
        cache = quiet(model)
        feed(model, cache, tokens(first), [first])
        feed(model, cache, tokens(1), [1])
        before, room = real_bytes(cache), tokens_without_growth(held_of(cache))
        for _ in range(min(20, 20 if room is None else room)):
            feed(model, cache, tokens(1), [1])
            assert real_bytes(cache) == before


def test_equal_layers_are_counted_and_not_repeated(tiny: Any) -> None:
    model = tiny("gemma3")
    cache = quiet(model)
    feed(model, cache, tokens(40), [40])
    layers = held_of(cache)
    merged = merge_equal(layers)
    assert [(one.kind, one.count) for one in merged] == [("rotating", 2), ("kv", 1)]
    for f in (
        lambda x: x,
        lambda x: after_append(x, 9),
        lambda x: after_action(x, Evict("sinks_window", ratio=0.5)),
    ):
        assert nbytes_allocated(f(merged)) == nbytes_allocated(f(layers))
        assert nbytes_live(f(merged)) == nbytes_live(f(layers))
    assert merge_equal(merged) == merged


KV = Held(
    "layer 0", "kv", rows=600, capacity=768, offset=600, key_width=128, value_width=64, itemsize=2, index=0
)


def test_bytes_of_packed_rows_count_scales_and_biases() -> None:
    assert row_nbytes(KV) == 192 * 2
    for bits, share in ((8, 0.53125), (4, 0.28125)):
        [packed] = after_action([KV], Quantize("affine", bits, bits, 64))
        assert row_nbytes(packed) == share * row_nbytes(KV)


@pytest.mark.parametrize("codec", [Dense(), Affine(8, 64), Affine(4, 32), Affine(3, 32), Affine(6, 128)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_codecs_own_figure_is_what_its_arrays_take(codec: Any, itemsize: int) -> None:
    dtype = mx.float32 if itemsize == 4 else mx.bfloat16
    encoded = codec.encode(mx.ones((1, 3, 5, 256), dtype))
    assert sum(a.nbytes for a in encoded) == 3 * 5 * codec.row_nbytes(256, itemsize)


def test_state_is_counted_whatever_happens_to_rows() -> None:
    state = Held("layer 1", "not_kv", fixed_nbytes=1000, count=3)
    for action in (Keep(), Evict("sinks_window", ratio=0.5), Quantize("affine", 4, 4, 64), Reclaim()):
        assert nbytes_allocated(after_append(after_action([state], action), 10)) == 3000
    assert nbytes_allocated([emptied(state)]) == 3000


@pytest.mark.parametrize("kind", ["rotating", "chunked", "concatenate", "quantized", "not_kv", "opaque"])
def test_only_rows_in_buffers_of_our_own_making_are_changed(kind: str) -> None:
    one = Held(
        "x", kind, rows=20, capacity=20, offset=20, key_width=32, value_width=32, itemsize=4, max_size=64
    )
    for action in (Evict("sinks_window", ratio=0.5), Quantize("affine", 4, 4, 32), Reclaim()):
        assert after_action([one], action) == (one,)


@pytest.mark.parametrize(
    "action", ["keep", "reclaim", "evict:sinks_window@0.90", "quant:affine,bits=8,group=64"]
)
def test_the_peak_of_an_action_is_never_less_than_before_or_after_it(action: str) -> None:
    layers = [KV, KV]
    parsed = parse_action(action)
    peak = peak_of_action(layers, parsed)
    assert peak >= nbytes_allocated(layers)
    assert peak >= nbytes_allocated(after_action(layers, parsed))
    assert peak == nbytes_allocated(layers) + transient_of_action(KV, parsed)


def test_the_peak_of_a_composite_is_that_of_its_most_expensive_part() -> None:
    both = Composite((Evict("sinks_window", ratio=0.9), Quantize("affine", 4, 4, 64)))
    assert peak_of_action([KV], both) == peak_of_action([KV], both.actions[0])


def test_every_action_of_the_space_has_a_size_whether_or_not_a_backend_executes_it() -> None:
    for action in action_space(rows=(100,)):
        [after] = after_action([KV], action)
        assert 0 <= nbytes_allocated([after]) <= max(2 * nbytes_allocated([KV]), 8192 * row_nbytes(KV)), (
            action
        )
        assert peak_of_action([KV], action) >= nbytes_allocated([KV])


def test_a_plan_needs_layers_by_number() -> None:
    plan = Plan((((0, 0), Quantize("affine", 4, 4, 64)),))
    first, second = after_action([KV, Held("layer 1", "kv", 9, 9, 9, 64, 64, 2, index=1)], plan)
    assert first.bits == 4
    assert second.bits is None
    with pytest.raises(ValueError, match="must not be merged"):
        after_action(merge_equal([KV, KV]), plan)


class Unknown(Action):
    pass


def test_an_action_without_a_byte_formula_is_refused() -> None:
    with pytest.raises(TypeError, match="no byte formula"):
        after_action([KV], Unknown())


def test_entries_that_were_never_used_take_nothing(tiny: Any) -> None:
    for leaf in leaves(quiet(tiny("gemma3"))):
        one = held(leaf)
        assert nbytes_allocated([one]) == nbytes_live([one]) == 0
    assert UNEVICTABLE.isdisjoint(KINDS)
