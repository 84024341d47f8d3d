"""Contract, item 7: ``trim`` is two-phase and clamped, and is_trimmable tells the truth."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from harness import assert_close, feed, held_of, pieces, quiet, same_bits, tokens
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from lumina_cache.layers import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    adopt,
    leaves,
)
from lumina_cache.steps import StepTracker

#: Architectures whose stock caches can be trimmed as long as no window has wrapped.
TRIMMABLE = (
    "llama",
    "gemma3",
    "llama4",
    "deepseek_v32",
    "longcat_flash",
    "gpt_oss",
    "gemma4_text",
    "mistral3",
)


def joined(*entries: Any) -> list[Any]:
    """Managed layers of one model that does not exist."""
    steps = StepTracker(name="model")
    return [adopt(entry, steps, f"layer {i}") for i, entry in enumerate(entries)]


def update(layers: list[Any], n: int) -> None:
    rows = mx.random.normal((1, 1, n, 32))
    for layer in layers:
        layer.update_and_fetch(rows, rows)


def offsets(cache: Any) -> list[int]:
    return [one.offset for one in held_of(cache)]


@pytest.mark.parametrize("n", [0, 1, 3, 8, 9])
@pytest.mark.parametrize("name", TRIMMABLE)
def test_trimming_is_as_if_the_tokens_had_never_been_fed(tiny: Any, name: str, n: int) -> None:
    model, ids = tiny(name), tokens(30)
    cache, fresh = quiet(model), make_prompt_cache(model)
    feed(model, cache, ids, [6, 1, 2])
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, n) == n
    assert set(offsets(cache)) == {9 - n}
    if n < 9:
        feed(model, fresh, ids, [9 - n])
    more = tokens(5, seed=3)
    assert_close(feed(model, cache, more, [1, 3, 1]), feed(model, fresh, more, [1, 3, 1]))


@pytest.mark.parametrize("name", TRIMMABLE)
def test_trim_takes_what_there_is_at_most_and_nothing_for_a_negative_number(tiny: Any, name: str) -> None:
    model = tiny(name)
    cache = quiet(model)
    feed(model, cache, tokens(9), [9])
    for n in (-5, -1, 0):
        assert trim_prompt_cache(cache, n) == 0
        assert set(offsets(cache)) == {9}
    assert trim_prompt_cache(cache, 1000) == 9
    assert set(offsets(cache)) == {0}
    assert trim_prompt_cache(cache, 1) == 0


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "ministral3", "exaone4"])
def test_a_window_that_has_wrapped_refuses_and_no_layer_is_changed(tiny: Any, name: str) -> None:
    """mlx-lm's own trim returns 6 here and leaves a negative write index."""
    model, ids = tiny(name), tokens(40)
    cache, twin = quiet(model), quiet(model)
    for one in (cache, twin):
        feed(model, one, ids, [20, 1])
    assert not can_trim_prompt_cache(cache)
    for entry in cache:
        assert entry.trim(6) == 0
    assert set(offsets(cache)) == {21}
    assert same_bits(feed(model, cache, ids, [1, 3], start=21), feed(model, twin, ids, [1, 3], start=21))


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "qwen3_next", "mamba"])
def test_a_model_with_recurrent_state_refuses_and_no_layer_is_changed(tiny: Any, name: str) -> None:
    model = tiny(name)
    cache = quiet(model)
    feed(model, cache, tokens(12), [12])
    assert not can_trim_prompt_cache(cache)
    assert [entry.trim(3) for entry in cache] == [0] * len(cache)
    assert set(offsets(cache)) <= {0, 12}
    for leaf in leaves(cache):
        assert leaf.trim(3) == 0


def test_a_layer_that_cannot_do_all_of_it_keeps_the_others_from_doing_any(tiny: Any) -> None:
    """Stock: KVCache and ChunkedKVCache report 11 trimmed tokens and end at offsets 1 and 4."""
    model, ids = tiny("llama4"), tokens(40)
    cache, twin = quiet(model), quiet(model)
    for one in (cache, twin):
        feed(model, one, ids, [20, 1])
    rows = {one.kind: one.rows for one in held_of(cache)}
    assert rows["chunked"] < rows["kv"] == 21
    too_many = rows["chunked"] + 1
    assert [entry.trim(too_many) for entry in cache] == [0] * 4
    assert set(offsets(cache)) == {21}
    assert same_bits(feed(model, cache, ids, [1, 3], start=21), feed(model, twin, ids, [1, 3], start=21))
    assert trim_prompt_cache(cache, 3) == 3
    assert set(offsets(cache)) == {22}


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_whichever_layer_is_asked_first_the_answer_is_the_same(first: int) -> None:
    layers = joined(
        stock.KVCache(), stock.RotatingKVCache(16), stock.ChunkedKVCache(64), stock.QuantizedKVCache(32, 8)
    )
    update(layers, 10)
    order = layers[first:] + layers[:first]
    assert [layer.trim(4) for layer in order] == [4] * 4
    assert {layer.offset for layer in layers} == {6}
    update(layers, 10)
    assert [layer.trim(1) for layer in order] == [0] * 4, "the window is full"
    assert {layer.offset for layer in layers} == {16}


def test_rows_that_were_trimmed_do_not_come_back() -> None:
    """mlx-lm's ConcatenateKVCache moves the offset alone: the next append brings the rows back."""
    [layer] = joined(stock.ConcatenateKVCache())
    update([layer], 8)
    kept = mx.array(layer.keys[..., :5, :])
    assert layer.trim(3) == 3
    new = mx.ones((1, 1, 2, 32))
    keys, _ = layer.update_and_fetch(new, new)
    assert layer.offset == layer.rows == keys.shape[2] == 7
    assert same_bits(keys[..., :5, :], kept)
    assert layer.trim(7) == 7
    keys, _ = layer.update_and_fetch(new, new)
    assert keys.shape[2] == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVCache(),
        lambda: RotatingKVCache(8),
        lambda: ChunkedKVCache(8),
        lambda: ConcatenateKVCache(),
        lambda: QuantizedKVCache(32, 8),
    ],
    ids=["kv", "rotating", "chunked", "concatenate", "quantized"],
)
@pytest.mark.parametrize("filled", [0, 5, 8, 13])
def test_trim_never_increases_the_offset_and_returns_what_it_took(make: Any, filled: int) -> None:
    for n in range(-5, filled + 6):
        layer = make()
        if filled:
            update([layer], filled)
        before = layer.offset, layer.rows
        taken = layer.trim(n)
        assert 0 <= taken <= max(n, 0)
        assert (layer.offset, layer.rows) == (before[0] - taken, before[1] - taken)
        assert layer.rows >= 0


def test_is_trimmable_is_false_as_soon_as_a_budget_could_evict(tiny: Any) -> None:
    model = tiny("llama")
    ids = tokens(20)
    for kwargs, trimmable in (
        ({}, True),
        ({"budget": "1MB"}, False),
        ({"budget": "1MB", "policy": "off"}, True),
        ({"budget": "1MB", "horizon": 500}, True),
        ({"budget": "1MB", "horizon": 5000}, False),
    ):
        cache = quiet(model, **kwargs)
        assert can_trim_prompt_cache(cache) == trimmable, kwargs
        feed(model, cache, ids, [20])
        assert can_trim_prompt_cache(cache) == trimmable, kwargs
        assert trim_prompt_cache(cache, 2) == (2 if trimmable else 0)


def test_beyond_its_horizon_a_budget_could_evict_at_any_time(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, budget="1MB", horizon=100)
    feed(model, cache, tokens(99), [99])
    assert can_trim_prompt_cache(cache)
    feed(model, cache, tokens(1), [1])
    assert not can_trim_prompt_cache(cache)


def test_a_model_that_cannot_evict_stays_trimmable_under_a_budget(tiny: Any) -> None:
    model = tiny("recurrent_gemma")
    cache = quiet(model, budget="10MB")
    assert cache[2].is_trimmable()


def test_packed_rows_can_be_taken_back(tiny: Any) -> None:
    model, ids = tiny("llama"), tokens(40)
    cache, twin = quiet(model), quiet(model)
    for one in (cache, twin):
        feed(model, one, ids, [20])
        one.apply("quant:affine,bits=8,group=32")
    feed(model, cache, tokens(7, seed=2), [3, 1, 3])
    assert trim_prompt_cache(cache, 7) == 7
    steps = pieces(12, 4, 3)
    assert same_bits(feed(model, cache, ids, steps, start=20), feed(model, twin, ids, steps, start=20))
