"""What steps and actions take for a while: each cause against a measurement of that cause alone, and the peak."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.actions import parse_action
from lumina_cache.apply import execute, held_all
from lumina_cache.errors import EstimateInputError
from lumina_cache.estimate import (
    Held,
    after_action,
    after_append,
    chunk_schedule,
    growth_nbytes,
    nbytes_allocated,
    peak_of_action,
)
from lumina_cache.kernels import DEVICES
from lumina_cache.layers import adopt
from lumina_cache.shape import ModelShape, shape_from_config, shape_from_model
from lumina_cache.steps import StepTracker
from lumina_cache.transient import Transient, Wanted, estimate_run, longest_context, of_action, of_step

CPU, METAL = DEVICES["cpu"], DEVICES["metal"]
CONFIGS = Path(__file__).parent / "data" / "configs"

on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the figures are those of the CPU")


@pytest.fixture(scope="module")
def llama(tiny: Any) -> ModelShape:
    return shape_from_model(tiny("llama"))


@pytest.fixture(scope="module")
def llama_8b() -> ModelShape:
    return shape_from_config(CONFIGS / "llama-3.1-8b.json")


def full_layers(count: int, rows: int, capacity: int, heads: int = 4, dim: int = 64) -> list[Any]:
    """Managed layers with ``rows`` rows in buffers of ``capacity``."""
    steps, made = StepTracker(name="test"), []
    for i in range(count):
        layer = stock.KVCache()
        layer.keys, layer.values = (mx.random.normal((1, heads, capacity, dim)) for _ in range(2))
        layer.offset = rows
        mx.eval(layer.keys, layer.values)
        made.append(adopt(layer, steps, f"layer {i}"))
    return made


# -- one cause at a time ------------------------------------------------------------------------------------------------


@on_cpu
def test_growing_keeps_the_old_rows_and_zeros_of_one_layer_beside_the_new_ones() -> None:
    layers = full_layers(4, rows=2048, capacity=2048)
    held = held_all(layers)
    new = mx.ones((1, 4, 1, 64))
    mx.eval(new)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for layer in layers:
        mx.eval(layer.update_and_fetch(new, new))
    beside = (
        mx.get_peak_memory() - before - (nbytes_allocated(after_append(held, 1)) - nbytes_allocated(held))
    )
    # Keys and values grow one after the other; whether the old keys are gone by then is a matter of timing.
    assert growth_nbytes(held, 1) / 2 <= beside <= 1.01 * growth_nbytes(held, 1)


def test_what_does_not_grow_copies_nothing() -> None:
    room = Held("layer 0", "kv", rows=100, capacity=256, offset=100, key_width=64, value_width=64, itemsize=4)
    assert growth_nbytes([room], 156) == 0
    assert growth_nbytes([room], 157) > 0
    assert growth_nbytes([replace(room, rows=0, capacity=0, offset=0)], 5) == 0
    assert growth_nbytes([Held("layer 1", "not_kv", fixed_nbytes=100)], 5) == 0


@on_cpu
@pytest.mark.parametrize("rows", [2048, 2000])
@pytest.mark.parametrize(
    "action",
    [
        "reclaim",
        "evict:sinks_window@0.50",
        "quant:affine,bits=8,group=64",
        "quant:affine,bits=4,group=64",
        "evict:sinks_window@0.50+quant:affine,bits=4,group=64",
    ],
)
def test_an_action_takes_one_layers_new_buffers_and_dense_rows_cut_from_a_longer_one(
    action: str, rows: int
) -> None:
    layers = full_layers(4, rows=rows, capacity=2048)
    held, what = held_all(layers), parse_action(action)
    predicted = peak_of_action(held, what)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    execute(layers, what)
    measured = nbytes_allocated(held) + mx.get_peak_memory() - before
    if predicted == nbytes_allocated(held):
        # Nothing was allocated at all, so the peak since then is what remained.
        assert measured <= predicted
    else:
        assert measured == pytest.approx(predicted, rel=0.001)


@on_cpu
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3", "gemma2", "qwen3_next"])
def test_what_a_step_takes_is_near_what_was_measured(name: str, tiny: Any) -> None:
    model, n = tiny(name), 64
    layers = shape_from_model(model).layers
    cache = make_prompt_cache(model)
    for chunk in (512, 512, 512, 512, n):
        mx.eval(model(mx.ones((1, chunk), dtype=mx.int32), cache=cache), [c.state for c in cache])
        layers = after_append(layers, chunk)
    predicted = of_step(shape_from_model(model), layers, n, CPU)
    mx.clear_cache()
    mx.reset_peak_memory()
    mx.eval(model(mx.ones((1, n), dtype=mx.int32), cache=cache), [c.state for c in cache])
    measured = mx.get_peak_memory() - mx.get_active_memory()
    assert predicted.together == pytest.approx(measured, rel=0.25)


# -- causes that exist together ----------------------------------------------------------------------------------------


def test_growth_meets_scores_but_neither_meets_logits_or_conversion() -> None:
    step = Transient(growth=10, scores=20, row_arrays=3, activations=4, logits=30)
    assert step.together == 37
    assert replace(step, logits=50).together == 50
    assert Transient(conversion=7).together == 7


def test_a_smaller_chunk_saves_at_least_the_difference_in_scores(llama: ModelShape) -> None:
    large, small = (estimate_run(llama, Wanted(2048, chunk), CPU) for chunk in (1024, 256))
    assert large.peak - small.peak >= large.transient.scores - small.transient.scores
    assert large.transient.scores > 3 * small.transient.scores


@on_cpu
def test_a_smaller_chunk_saves_as_much_when_measured(llama: ModelShape, tiny: Any) -> None:
    model, peaks = tiny("llama"), {}
    for chunk in (1024, 256):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        cache = make_prompt_cache(model)
        for n in chunk_schedule(2048, chunk):
            mx.eval(model(mx.ones((1, n), dtype=mx.int32), cache=cache), [c.state for c in cache])
            mx.clear_cache()
        peaks[chunk] = mx.get_peak_memory() - before
    predicted = {chunk: estimate_run(llama, Wanted(2048, chunk), CPU).peak for chunk in peaks}
    assert predicted[1024] - predicted[256] == pytest.approx(peaks[1024] - peaks[256], rel=0.25)


def test_packing_before_the_prompt_is_over_raises_the_peak_where_dense_attention_is_fused(
    llama_8b: ModelShape,
) -> None:
    pack = parse_action("quant:affine,bits=4,group=64")
    dense = estimate_run(llama_8b, Wanted(32_768), METAL)
    early = estimate_run(llama_8b, Wanted(32_768, action=pack, when="every_chunk"), METAL)
    late = estimate_run(llama_8b, Wanted(32_768, action=pack), METAL)
    assert early.peak > dense.peak
    assert early.transient.scores > early.held_at_peak
    assert late.peak == dense.peak
    assert late.resident == early.resident < dense.resident / 3


def test_packed_rows_are_packed_once(llama: ModelShape) -> None:
    pack = parse_action("quant:affine,bits=4,group=32")
    once, always = (
        estimate_run(llama, Wanted(1500, 512, pack, when), CPU)  # type: ignore[arg-type]
        for when in ("end", "every_chunk")
    )
    assert once.live == always.live
    packed = after_append(llama.layers, 600)
    assert of_action(packed, pack).conversion > 0
    assert of_action(after_action(packed, pack), pack).conversion == 0


def test_evicting_after_every_chunk_bounds_rows_and_peak(llama_8b: ModelShape) -> None:
    evict = parse_action("evict:sinks_window@rows=4096")
    short, long = (
        estimate_run(llama_8b, Wanted(context, action=evict, when="every_chunk"), METAL)
        for context in (16_384, 1_000_000)
    )
    assert long.peak == short.peak
    assert long.live == 4096 * 131_072


def test_a_codec_that_decodes_on_fetch_takes_one_layers_dense_rows(llama_8b: ModelShape) -> None:
    rotate = parse_action("quant:hadamard,bits=4,group=64")
    one = estimate_run(llama_8b, Wanted(65_536, action=rotate, when="every_chunk"), METAL)
    assert one.transient.dequantise == 65_535 * 131_072 // 32
    assert one.transient.scores == 0


def test_a_window_holds_its_size_and_a_chunk_less_one_until_decode() -> None:
    shape = shape_from_config(CONFIGS / "gemma-3-4b.json")
    one = estimate_run(shape, Wanted(32_768), METAL)
    rows = 20_480 * 32_768 + 29 * 4096 * (1024 + 2047 - 1)
    assert one.held_at_peak == pytest.approx(rows, rel=0.01)
    assert one.resident == 20_480 * 32_768 + 29 * 4096 * 1024


def test_scores_are_counted_where_no_kernel_covers_the_head_dim(llama_8b: ModelShape) -> None:
    gemma = shape_from_config(CONFIGS / "gemma-3-4b.json")
    assert estimate_run(gemma, Wanted(32_768), METAL).transient.scores > 0
    assert estimate_run(llama_8b, Wanted(32_768), METAL).transient.scores == 0
    assert estimate_run(llama_8b, Wanted(32_768), CPU).transient.scores > 32 * 2047 * 30_000 * 2


def test_where_steps_are_not_known_only_growth_is_counted_and_that_is_said(tiny: Any) -> None:
    shape = shape_from_model(tiny("dbrx"))
    one = estimate_run(shape, Wanted(600, 512), CPU)
    assert not one.complete
    assert one.transient.activations == one.transient.scores == 0
    assert one.resident > 0


# -- the run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 8), (2, 8), (8, 8), (9, 8), (10, 8), (30, 8), (30, 2048)])
def test_chunks_are_those_that_mlx_lm_makes(tokens: int, chunk: int, tiny: Any) -> None:
    model, seen = tiny("llama"), []

    def counting(inputs: mx.array, **given: Any) -> mx.array:
        seen.append(inputs.shape[1])
        return model(inputs, **given)

    generated = importlib.import_module("mlx_lm.generate").generate_step(
        mx.ones((tokens,), dtype=mx.int32),
        counting,
        max_tokens=0,
        prompt_cache=make_prompt_cache(model),
        prefill_step_size=chunk,
    )
    list(generated)
    assert seen == list(chunk_schedule(tokens, chunk))


SHAPES = {name: CONFIGS / f"{name}.json" for name in ("qwen3-4b", "gemma-3-4b")}


@pytest.fixture(scope="module")
def shapes() -> dict[str, ModelShape]:
    return {name: shape_from_config(path) for name, path in SHAPES.items()}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    shorter=st.integers(1, 20_000),
    more=st.integers(1, 5_000),
    chunk=st.sampled_from([64, 500, 2048]),
    device=st.sampled_from(sorted(DEVICES)),
)
def test_a_longer_context_never_has_a_lower_peak(
    shapes: dict[str, ModelShape], name: str, shorter: int, more: int, chunk: int, device: str
) -> None:
    few, many = (
        estimate_run(shapes[name], Wanted(context, chunk), DEVICES[device])
        for context in (shorter, shorter + more)
    )
    assert few.peak <= many.peak


@pytest.mark.parametrize("nbytes", [100_000_000, 1_000_000_000, 8_000_000_000])
def test_the_longest_context_fits_and_one_token_more_does_not(
    nbytes: int, shapes: dict[str, ModelShape]
) -> None:
    shape = shapes["qwen3-4b"]
    longest = longest_context(shape, nbytes, Wanted(1), METAL)
    if longest > 0:
        assert estimate_run(shape, Wanted(longest), METAL).peak <= nbytes
    assert estimate_run(shape, Wanted(longest + 1), METAL).peak > nbytes


def test_where_nothing_fits_the_longest_context_is_none(shapes: dict[str, ModelShape]) -> None:
    assert longest_context(shapes["qwen3-4b"], 1000, Wanted(1), METAL) == 0


def test_a_search_ends_at_its_limit(shapes: dict[str, ModelShape]) -> None:
    assert longest_context(shapes["qwen3-4b"], 10**15, Wanted(1), METAL, limit=10_000) == 10_000


@pytest.mark.parametrize(("field", "value"), [("context", 0), ("chunk", 0), ("context", -3)])
def test_a_context_or_chunk_of_no_token_is_refused(field: str, value: int) -> None:
    with pytest.raises(EstimateInputError, match=f"{field} = {value}: expected at least one token"):
        Wanted(**{"context": 1, field: value})


def test_the_record_of_an_estimate_adds_up(llama: ModelShape) -> None:
    record = estimate_run(llama, Wanted(600, 512), CPU).to_record()
    transient = record["transient"]
    assert isinstance(transient, dict)
    assert record["peak"] == record["held_at_peak"] + transient["together"]  # type: ignore[operator]
