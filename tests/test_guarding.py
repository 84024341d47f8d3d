"""The outlier guard at work: spoiled layers get more bits or none, the log says so, bytes are those of what was done."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from harness import feed, held_of, pieces, quiet, real_bytes, settle, tokens

from lumina_cache.actions import Quantize, parse_action
from lumina_cache.audit import validate
from lumina_cache.cache import LuminaCache
from lumina_cache.codecs.guard import LIMIT
from lumina_cache.errors import ActionInfeasibleError, UnsupportedCacheError
from lumina_cache.guarding import Guard, guarded
from lumina_cache.lab.models import load_smollm2
from lumina_cache.lab.tiny import build
from lumina_cache.layers import leaves
from lumina_cache.report import describe

#: How far a channel is moved so that no bits, or more than four, are enough.
HOPELESS, OUTLYING = 1e4, 60.0


def filled(model: Any, n: int = 160, **kwargs: Any) -> LuminaCache:
    cache = quiet(model, **kwargs)
    feed(model, cache, tokens(n), pieces(n, 64))
    settle(cache)
    return cache


def spoil(cache: LuminaCache, layer: int, offset: float, *, values: bool = False) -> None:
    """Move one channel of every head of a layer, as a bias of the key projection does."""
    one = cache[layer]
    name = "values" if values else "keys"
    rows = getattr(one, name)
    setattr(one, name, rows + mx.where(mx.arange(rows.shape[-1]) == 5, offset, 0.0))
    mx.eval(getattr(one, name))


def applied(cache: LuminaCache) -> list[dict[str, Any]]:
    return [r for r in cache.log.records if r["event"] == "action.applied"]


@pytest.mark.parametrize("codec", ["affine", "affine_fetch"])
def test_a_layer_with_an_outlier_gets_more_bits_and_the_others_what_was_asked(tiny: Any, codec: str) -> None:
    cache = filled(tiny("llama"))
    spoil(cache, 1, OUTLYING)
    done = cache.apply(f"quant:{codec},bits=4,group=32")
    assert done is not None
    assert cache[0].layout.keys.code_bits == 4
    assert cache[1].layout.keys.code_bits > 4
    # Packed rows of both sides are read alike; decoded ones each for itself.
    assert (cache[1].layout.values.code_bits > 4) is (codec == "affine")
    assert list(done.guarded) == ["layer 1"]
    raised = parse_action(done.guarded["layer 1"])
    assert isinstance(raised, Quantize)
    assert raised.key_bits == cache[1].layout.keys.code_bits
    assert done.predicted_allocated == done.after.nbytes_allocated == real_bytes(cache)
    [record] = applied(cache)
    assert record["guarded"] == done.guarded
    validate(record)
    assert f"guarded, {done.guarded['layer 1']}: layer 1" in describe(record)
    assert mx.isfinite(feed(tiny("llama"), cache, tokens(3), [1, 2])).all().item()


def test_a_layer_that_no_bits_would_save_stays_as_it_is(tiny: Any) -> None:
    cache = filled(tiny("llama"))
    spoil(cache, 0, HOPELESS)
    done = cache.apply("quant:affine,bits=4,group=32")
    assert done is not None
    assert dict(done.guarded) == {"layer 0": "keep"}
    assert [leaf.bits if hasattr(leaf, "bits") else None for leaf in leaves(cache)] == [None, 4]
    assert done.layers_changed == ("layer 1",)
    assert done.predicted_allocated == real_bytes(cache)


def test_keys_and_values_are_judged_each_for_itself(tiny: Any) -> None:
    cache = filled(tiny("llama"))
    spoil(cache, 1, OUTLYING, values=True)
    cache.apply("quant:kivi,bits=4,group=32")
    assert cache[1].layout.keys.code_bits == 4
    assert cache[1].layout.values.code_bits > 4
    assert cache[0].layout.values.code_bits == 4


def test_a_codec_that_bears_the_outlier_is_used_as_asked(tiny: Any) -> None:
    cache = filled(tiny("llama"))
    spoil(cache, 1, OUTLYING)
    done = cache.apply("quant:kivi,bits=4,group=32")
    assert done is not None
    assert dict(done.guarded) == {}


@pytest.mark.parametrize("codec", ["mxfp4,bits=4,group=32", "mxfp8,bits=8,group=32"])
def test_codecs_without_equal_steps_are_not_judged(tiny: Any, codec: str) -> None:
    cache = filled(tiny("llama"))
    spoil(cache, 1, HOPELESS)
    done = cache.apply(f"quant:{codec}")
    assert done is not None
    assert dict(done.guarded) == {}


def test_what_the_guard_leaves_nothing_of_is_refused_with_a_remedy_and_not_chosen_again(tiny: Any) -> None:
    cache = filled(tiny("llama"))
    for layer in (0, 1):
        spoil(cache, layer, HOPELESS)
    before = held_of(cache)
    with pytest.raises(ActionInfeasibleError, match=r"kivi or hadamard, or LuminaCache\(guard=False\)"):
        cache.apply("quant:affine,bits=4,group=32")
    assert held_of(cache) == before
    [said] = [r for r in cache.log.records if r["event"] == "action.refused"]
    assert said["reasons"][0]["code"] == "outliers"
    assert applied(cache) == []


def test_under_a_budget_rows_that_cannot_be_packed_are_evicted_instead() -> None:
    model = build("qwen2")
    for layer in model.layers:
        layer.self_attn.v_proj.bias = mx.where(
            mx.arange(layer.self_attn.v_proj.bias.size) == 5, HOPELESS, 0.0
        )
    cache = quiet(model, budget=400_000)
    feed(model, cache, tokens(600), pieces(200, 64, 400))
    assert cache.observe().nbytes_allocated <= 400_000
    assert not any("quant:affine" in r["action"] for r in applied(cache))
    refused = [r["action"] for r in cache.log.records if r["event"] == "action.refused"]
    assert any("quant:affine_steps,bits=8,group=32" in action for action in refused)
    assert len(refused) == len(set(refused)) <= 6
    last = [r for r in cache.log.records if r["event"] == "decision"][-1]
    codes = {x["code"] for c in last["candidates"] for x in c["reasons"]}
    assert "outliers" in codes


def test_the_guard_can_be_switched_off_and_set(tiny: Any) -> None:
    model = tiny("llama")
    for guard, want in ((False, 4), (1e9, 4), (True, None), (LIMIT, None)):
        cache = filled(model, guard=guard)
        spoil(cache, 1, OUTLYING)
        cache.apply("quant:affine,bits=4,group=32")
        assert (cache[1].layout.keys.code_bits == want) is (want == 4)


@pytest.mark.parametrize("bad", ["yes", -1, 0.0, None])
def test_a_guard_that_is_no_limit_is_refused(tiny: Any, bad: Any) -> None:
    with pytest.raises(UnsupportedCacheError, match="guard="):
        quiet(tiny("llama"), guard=bad)


def test_bits_are_not_raised_to_what_rows_were_coarser_than_before(tiny: Any) -> None:
    cache = filled(tiny("llama"))
    spoil(cache, 1, 150.0)
    asked = Quantize("affine_fetch", 5, 8, 32)
    assert guarded(cache[1], asked, Guard()) == Quantize("affine_fetch", 8, 8, 32)
    cache.apply("quant:affine_fetch,bits=8,group=32")
    eight = cache[1].layout
    done = cache.apply(asked)
    assert done is not None
    assert dict(done.guarded) == {"layer 1": "keep"}
    assert cache[1].layout == eight
    assert cache[0].layout.keys.code_bits == 5


def test_few_rows_say_nothing(tiny: Any) -> None:
    cache = filled(tiny("llama"), 9)
    spoil(cache, 1, HOPELESS)
    done = cache.apply("quant:affine,bits=4,group=32")
    assert done is not None
    assert dict(done.guarded) == {}


def test_a_plan_is_guarded_too(tiny: Any) -> None:
    model = tiny("llama")
    cache = filled(model, plan="evict:sinks_window@0.50+quant:affine,bits=4,group=32")
    spoil(cache, 0, HOPELESS)
    feed(model, cache, tokens(4), [1] * 4)
    [record] = applied(cache)
    assert list(record["guarded"]) == ["layer 0"]
    assert held_of(cache)[1].bits == 4 != held_of(cache)[0].bits


def test_windows_are_judged_in_their_own_order_of_rows(tiny: Any) -> None:
    model = tiny("gemma3")
    cache = filled(model)
    windows = [i for i, layer in enumerate(cache) if layer.kind == "rotating"]
    spoil(cache, windows[0], HOPELESS)
    done = cache.apply("quant:affine_fetch,bits=4,group=32")
    assert done is not None
    assert dict(done.guarded) == {f"layer {windows[0]}": "keep"}
    assert done.predicted_allocated == real_bytes(cache)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("codec", ["affine", "hadamard", "kivi"])
def test_a_real_model_is_left_alone_at_four_bits(codec: str) -> None:
    model, tokenizer = load_smollm2(mx.float32)
    from lumina_cache.lab.corpus import demo_document

    ids = tokenizer.encode(demo_document().text)[:512]
    cache = quiet(model)
    for start in range(0, len(ids), 128):
        model(mx.array([ids[start : start + 128]]), cache=cache)
        settle(cache)
    done = cache.apply(f"quant:{codec},bits=4,group=32")
    assert done is not None
    assert dict(done.guarded) == {}
    assert {one.bits for one in held_of(cache)} == {4}
