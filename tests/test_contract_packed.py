"""Contract, item 3, and mlx-lm's ``kv_bits``: what can be packed is, the rest stays dense, and it is said once."""

from __future__ import annotations

import warnings
from typing import Any

import mlx.core as mx
import pytest
from harness import (
    UNPACKABLE,
    architectures,
    assert_close,
    feed,
    greedy,
    held_of,
    quiet,
    same_bits,
    tokens,
)
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.actions import parse_action
from lumina_cache.audit import validate
from lumina_cache.codecs import Affine, Dense, Layout
from lumina_cache.errors import LuminaWarning
from lumina_cache.lab.tiny import SPECS
from lumina_cache.layers import KVCache, leaves

OPTIONS = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}


def returns_triples(layer: Any, n: int = 1) -> bool:
    """Whether the next update returns packed triples for both keys and values."""
    shape = (1, 2, n, 32)
    fetched = layer.update_and_fetch(mx.ones(shape), mx.ones(shape))
    assert len({isinstance(one, tuple | list) for one in fetched}) == 1
    return isinstance(fetched[0], tuple | list)


def test_bits_exist_exactly_while_packed_triples_are_returned() -> None:
    layer = KVCache()
    for codec, packed in ((None, False), (Affine(8, 32), True), (Dense(), False), (Affine(4, 32), True)):
        if codec is not None:
            layer.reencode(Layout.both(codec))
        assert hasattr(layer, "bits") == hasattr(layer, "group_size") == packed
        assert returns_triples(layer) == packed
        assert (getattr(layer, "bits", None), getattr(layer, "group_size", None)) == (
            (codec.bits, codec.group_size) if packed else (None, None)
        )


def test_bits_follow_the_state_that_a_layer_is_given() -> None:
    packed, dense = KVCache(), KVCache()
    for layer in (packed, dense):
        returns_triples(layer, 5)
    packed.reencode(Layout.both(Affine(8, 32)))
    as_packed, as_dense = packed.state, dense.state
    other = KVCache()
    other.state = as_packed
    assert (other.bits, other.group_size) == (8, 32)
    assert returns_triples(other)
    other.state = as_dense
    assert not hasattr(other, "bits")
    assert not returns_triples(other)
    fresh = KVCache.from_state(as_packed)
    assert hasattr(fresh, "bits")
    assert returns_triples(fresh)


def test_bits_follow_eviction_and_reclaim_of_packed_rows() -> None:
    import numpy as np

    layer = KVCache()
    returns_triples(layer, 9)
    layer.gather(np.array([0, 5, 8], dtype=np.int32))
    assert not hasattr(layer, "bits")
    layer.reencode(Layout.both(Affine(4, 32)))
    layer.gather(np.array([0, 2], dtype=np.int32))
    layer.compact()
    assert hasattr(layer, "bits")
    assert returns_triples(layer)


@pytest.mark.parametrize(
    "name", [n for n in SPECS if n in ("gemma3", "llama4", "falcon_h1", "mamba", "llama")]
)
def test_no_entry_of_a_new_cache_has_bits_or_can_be_quantized_unless_its_stock_class_can(
    tiny: Any, name: str
) -> None:
    for mine, its in zip(leaves(quiet(tiny(name))), leaves(make_prompt_cache(tiny(name))), strict=True):
        assert not hasattr(mine, "bits")
        assert hasattr(mine, "to_quantized") == hasattr(its, "to_quantized")


# -- kv_bits, as mlx-lm's users give it ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("prompt", "start", "n"),
    [(20, 0, 12), (20, 24, 12), (20, 20, 6), (250, 0, 12), (250, 252, 12), (500, 0, 14), (1, 0, 5)],
    ids=[
        "from the start",
        "mid-way",
        "after the prompt",
        "growing",
        "growing mid-way",
        "growing twice",
        "one token",
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_kv_bits_give_the_logits_of_the_stock_cache_bit_for_bit(
    tiny: Any, name: str, prompt: int, start: int, n: int, bits: int
) -> None:
    model, ids = tiny(name), tokens(prompt)[0].tolist()
    options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start, "prefill_step_size": 64}
    caches = make_prompt_cache(model), quiet(model)
    want, got = (greedy(model, ids, cache, n, **options) for cache in caches)
    assert [t for t, _ in got] == [t for t, _ in want]
    assert all(same_bits(a, b) for (_, a), (_, b) in zip(got, want, strict=True))
    assert all(isinstance(entry, stock.QuantizedKVCache) for entry in caches[0])
    assert all(type(entry) is KVCache and entry.bits == bits for entry in caches[1])


def test_kv_bits_are_written_down_as_asked_and_as_observed(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model)
    greedy(model, tokens(20)[0].tolist(), cache, 12, kv_bits=4, kv_group_size=32, quantized_kv_start=26)
    records = [r for r in cache.log.records if r["event"] == "action.applied"]
    assert len(records) == 1
    [record] = records
    validate(record)
    assert (record["origin"], record["action"]) == ("kv_bits", "quant:affine,bits=4,group=32")
    assert record["layers_changed"] == ["layer 0", "layer 1"]
    assert record["before"]["nbytes_allocated"] > record["after"]["nbytes_allocated"]
    assert record["predicted_allocated"] == record["after"]["nbytes_allocated"]
    assert record["predicted_live"] == record["after"]["nbytes_live"]


@pytest.mark.parametrize("name", architectures())
def test_kv_bits_break_no_architecture_and_logits_stay_right(tiny: Any, name: str) -> None:
    """Stock mlx-lm raises for many of these, some only when a window wraps or after thousands of tokens."""
    model, ids = tiny(name), tokens(24)[0].tolist()
    dense = greedy(model, ids, make_prompt_cache(model), 12)
    forced = iter([t for t, _ in dense])
    cache = quiet(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = greedy(model, ids, cache, 12, sampler=lambda _: mx.array([next(forced, 0)]), **OPTIONS)
    said = [w for w in caught if issubclass(w.category, LuminaWarning)]
    kinds = {one.kind for one in held_of(cache)}
    can = {leaf.name for leaf in leaves(cache) if isinstance(leaf, KVCache) and leaf.rows > 0}
    packed = {leaf.name for leaf in leaves(cache) if hasattr(leaf, "bits")}
    refused = [r for r in cache.log.records if r["event"] == "action.refused"]
    assert packed == (set() if name in UNPACKABLE else can)
    assert bool(refused) == ("rotating" in kinds or (name in UNPACKABLE and bool(can)))
    assert len(said) == min(1, len(refused))
    for record in refused:
        validate(record)
        parse_action(record["action"])
        assert record["reasons"][0]["text"]
    if not packed:
        for (_, a), (_, b) in zip(got, dense, strict=True):
            assert same_bits(a, b)
    else:
        for (_, a), (_, b) in zip(got, dense, strict=True):
            assert_close(a, b, 0.2)


@pytest.mark.parametrize(
    ("name", "packed", "why"),
    [
        ("gemma3", {"layer 2"}, "sliding window"),
        ("gpt_oss", set(), "sinks"),
        ("deepseek_v3", set(), "swapaxes"),
        ("gemma4_text", set(), "scaled_dot_product_attention"),
        ("falcon_h1", {"layer 0.1", "layer 1.1"}, None),
        ("baichuan_m1", {"layer 1.1"}, "sliding window"),
        ("deepseek_v32", set(), "zeros_like"),
        ("recurrent_gemma", set(), "sliding window"),
        ("qwen3_next", {"layer 3"}, None),
    ],
)
def test_what_can_be_packed_is_and_the_rest_is_named_once_with_its_reason(
    tiny: Any, name: str, packed: set[str], why: str | None
) -> None:
    model, ids = tiny(name), tokens(24)[0].tolist()
    cache = quiet(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            greedy(model, ids, cache, 10, **OPTIONS)
    said = [str(w.message) for w in caught if issubclass(w.category, LuminaWarning)]
    assert {leaf.name for leaf in leaves(cache) if hasattr(leaf, "bits")} == packed
    refused = [r for r in cache.log.records if r["event"] == "action.refused"]
    if why is None:
        assert (said, refused) == ([], [])
    else:
        assert len(said) == 1
        assert f"{refused[0]['layers'][0]} (" in said[0]
        assert f"stays dense: {refused[0]['reasons'][0]['text']}" in said[0]
        assert len({name for r in refused for name in r["layers"]}) == len(refused)
        assert any(why in r["reasons"][0]["text"] for r in refused)


def test_nested_rows_can_be_packed_by_an_action_too(tiny: Any) -> None:
    model, ids = tiny("falcon_h1"), tokens(40)
    cache, dense = quiet(model), quiet(model)
    for one in (cache, dense):
        feed(model, one, ids, [30])
    assert cache.apply("quant:affine,bits=8,group=32") is not None
    assert [leaf.name for leaf in leaves(cache) if hasattr(leaf, "bits")] == ["layer 0.1", "layer 1.1"]
    assert_close(
        feed(model, cache, ids, [1, 5, 1], start=30), feed(model, dense, ids, [1, 5, 1], start=30), 0.05
    )


def test_a_layer_without_a_cache_packs_itself_and_a_window_without_one_says_that_it_cannot() -> None:
    layer = KVCache()
    returns_triples(layer, 4)
    assert layer.to_quantized(32, 8) is layer
    assert layer.to_quantized(32, 4) is layer, "once: the second call changes nothing"
    assert layer.bits == 8
    from lumina_cache.layers import RotatingKVCache

    with pytest.raises(NotImplementedError, match="sliding window"):
        RotatingKVCache(8).to_quantized(32, 8)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_packed_rows_are_those_of_mlx_lms_own_packed_cache_at_every_width(bits: int, group: int) -> None:
    """Appending to packed rows packs the new ones alone: codes held already never change."""
    mx.random.seed(3)
    layer, theirs = KVCache(), stock.KVCache()
    codes: list[mx.array] = []
    for i, n in enumerate((5, 1, 300, 1, 1)):
        keys, values = mx.random.normal((1, 2, n, 64)), mx.random.normal((1, 2, n, 64))
        got, want = layer.update_and_fetch(keys, values), theirs.update_and_fetch(keys, values)
        if i == 0:
            layer.reencode(Layout.both(Affine(bits, group)))
            theirs = theirs.to_quantized(group, bits)
            continue
        for mine, its in zip(got, want, strict=True):
            assert all(same_bits(a, b) for a, b in zip(mine, its, strict=True))
        for before, now in zip(codes, got[0], strict=False):
            assert same_bits(before, now[..., : before.shape[2], :])
        codes = [mx.array(a) for a in got[0]]
    assert held_of([layer])[0].key_width == 2 * 64


def test_mlx_lm_goes_on_with_kv_bits_after_rows_were_evicted(tiny: Any) -> None:
    model, ids = tiny("llama"), tokens(40)
    cache, twin = quiet(model), quiet(model)
    for one in (cache, twin):
        feed(model, one, ids, [30])
        one.apply("evict:sinks_window@rows=12")
    twin.apply("quant:affine,bits=8,group=32")
    prompt = ids[0, 30:].tolist()
    got = list(
        generate_step(
            mx.array(prompt), model, prompt_cache=cache, max_tokens=5, prefill_step_size=1, **OPTIONS
        )
    )
    want = list(generate_step(mx.array(prompt), model, prompt_cache=twin, max_tokens=5, prefill_step_size=1))
    assert [one.bits for one in cache] == [8, 8]
    # The first step of the one ran on dense rows: close, not equal.
    for (_, a), (_, b) in zip(got, want, strict=True):
        assert_close(a, b, 0.05)
