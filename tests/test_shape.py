"""Cache shapes known without computing: equal to what a real run holds, at no cost in memory, or a typed error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.errors import ModelShapeError
from lumina_cache.estimate import after_append, merge_equal, nbytes_allocated
from lumina_cache.lab.tiny import SPECS, build
from lumina_cache.shape import ModelShape, read_config, shape_from_config, shape_from_model

CONFIGS = Path(__file__).parent / "data" / "configs"

#: One of each kind of cache: full, windows, chunks, state, lists, latent, borrowed rows, sinks, heads that differ.
KINDS = (
    "llama",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "llama4",
    "deepseek_v3",
    "qwen3_next",
    "falcon_h1",
    "longcat_flash_ngram",
    "mamba2",
    "nemotron-nas",
    "minimax_m3_vl",
)

#: Cannot be followed, or hold a cache object of their own; each has its own test.
APART = ("dbrx", "deepseek_v41")

#: Tokens per step: one, several, across a growth step, and back to one.
STEPS = (5, 1, 300, 1, 256, 17, 1)


def tiny_config(name: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": name, "dtype": "float32", **SPECS[name].config, **changes}


def held_in_a_real_run(model: Any, steps: Sequence[int]) -> list[int]:
    cache = make_prompt_cache(model)
    sizes = []
    for n in steps:
        mx.eval(model(mx.ones((1, n), dtype=mx.int32), cache=cache), [c.state for c in cache])
        sizes.append(sum(c.nbytes for c in cache))
    return sizes


def held_by_the_shape(shape: ModelShape, steps: Sequence[int]) -> list[int]:
    layers, sizes = shape.layers, []
    for n in steps:
        layers = after_append(layers, n)
        sizes.append(nbytes_allocated(layers))
    return sizes


@pytest.mark.parametrize("name", KINDS)
def test_bytes_from_a_configuration_equal_those_of_a_real_run_after_every_step(name: str, tiny: Any) -> None:
    shape = shape_from_config(tiny_config(name))
    assert held_by_the_shape(shape, STEPS) == held_in_a_real_run(tiny(name), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SPECS if n not in (*KINDS, *APART)])
def test_bytes_from_a_configuration_are_exact_for_every_architecture(name: str) -> None:
    shape = shape_from_config(tiny_config(name))
    assert held_by_the_shape(shape, STEPS) == held_in_a_real_run(build(name), STEPS)


@pytest.mark.parametrize("name", KINDS)
def test_a_model_that_is_there_has_the_shapes_of_its_configuration(name: str, tiny: Any) -> None:
    from_model, from_config = shape_from_model(tiny(name)), shape_from_config(tiny_config(name))
    assert from_model.layers == from_config.layers
    assert from_model.vocab_size == from_config.vocab_size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_keys_and_values_have_the_dtype_of_the_configuration(dtype: str) -> None:
    shape = shape_from_config(tiny_config("llama", dtype=dtype))
    assert {one.itemsize for one in shape.layers} == {4 if dtype == "float32" else 2}


def test_recurrent_state_may_keep_a_dtype_of_its_own(tiny: Any) -> None:
    shape = shape_from_config(tiny_config("qwen3_next", dtype="bfloat16"))
    model = build("qwen3_next", dtype=mx.bfloat16)
    followed = [one.fixed_nbytes for one in shape_from_model(model).layers]
    assert [one.fixed_nbytes for one in shape.layers] == followed
    assert max(followed) > 0


def test_sixteen_gigabytes_of_weights_take_no_memory_to_follow() -> None:
    shape_from_config(CONFIGS / "llama-3.1-8b.json")  # what is imported and cached for good is not counted
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    shape = shape_from_config(CONFIGS / "llama-3.1-8b.json")
    assert shape.weights_nbytes == 16_060_522_496
    assert mx.get_peak_memory() - before < 100_000
    assert mx.get_active_memory() - before < 10_000


def test_following_leaves_a_model_as_it_was() -> None:
    model = build("gemma3_text")
    tokens = mx.array([[3, 1, 4, 1, 5]])
    before = model(tokens, cache=make_prompt_cache(model))
    mx.eval(before)
    weights = [id(layer.weight) for _, layer in model.named_modules() if "weight" in layer]
    shape_from_model(model)
    assert [id(layer.weight) for _, layer in model.named_modules() if "weight" in layer] == weights
    assert mx.array_equal(model(tokens, cache=make_prompt_cache(model)), before)


def test_following_leaves_mlx_as_it_was() -> None:
    attention, contiguous = mx.fast.scaled_dot_product_attention, mx.contiguous
    shape_from_config(tiny_config("qwen3_next"))
    assert mx.fast.scaled_dot_product_attention is attention
    assert mx.contiguous is contiguous


def test_the_callers_random_numbers_do_not_depend_on_estimates() -> None:
    mx.random.seed(7)
    expected = mx.random.normal((3,)).tolist()
    mx.random.seed(7)
    shape_from_config(tiny_config("llama"))
    assert mx.random.normal((3,)).tolist() == expected


# -- models that cannot be followed ------------------------------------------------------------------------------------


def test_a_module_that_evaluates_arrays_is_named_with_the_line_that_does() -> None:
    with pytest.raises(ModelShapeError, match=r"mlx_lm\.models\.dbrx evaluates arrays .*tolist"):
        shape_from_config(tiny_config("dbrx"))


def test_a_model_that_evaluates_arrays_is_run_on_a_few_tokens_instead(tiny: Any) -> None:
    shape = shape_from_model(tiny("dbrx"))
    assert held_by_the_shape(shape, STEPS) == held_in_a_real_run(tiny("dbrx"), STEPS)
    assert shape.steps == ()
    assert shape.steps_unknown is not None
    assert any("running four tokens" in text for text in shape.assumptions)


def test_a_layer_that_needs_metal_is_followed_as_a_dense_one_and_that_is_said() -> None:
    shape = shape_from_config(tiny_config("bitnet"))
    assert any("ternary" in text for text in shape.assumptions)
    assert held_by_the_shape(shape, STEPS) == held_in_a_real_run(build("bitnet"), STEPS)


def test_a_cache_object_of_unknown_kind_gets_a_line_through_two_lengths() -> None:
    shape = shape_from_config(tiny_config("deepseek_v41"))
    assert {one.kind for one in shape.layers} == {"opaque"}
    assert any("follows no rule of mlx-lm's cache module" in text for text in shape.assumptions)
    real = held_in_a_real_run(build("deepseek_v41"), (600,))[-1]
    assert held_by_the_shape(shape, (600,))[-1] == pytest.approx(real, rel=0.1)


# -- configurations that do not say what is needed ---------------------------------------------------------------------


def test_a_missing_dtype_is_an_assumption_that_is_listed() -> None:
    config = tiny_config("llama")
    del config["dtype"]
    shape = shape_from_config(config)
    assert {one.itemsize for one in shape.layers} == {2}
    assert any("dtype" in text and "bfloat16" in text for text in shape.assumptions)


def test_a_full_configuration_needs_no_assumption() -> None:
    assert shape_from_config(tiny_config("llama")).assumptions == ()


def test_torch_dtype_inside_a_wrapper_is_read() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {**SPECS["gemma3_text"].config, "torch_dtype": "float16"},
    }
    shape = shape_from_config({**SPECS["gemma3"].config, **config})
    assert {one.itemsize for one in shape.layers} == {2}
    assert shape.assumptions == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "field model_type: missing"),
        ({"model_type": 7}, "field model_type: 7"),
        ({"model_type": "lama"}, "not a model of the installed mlx-lm; near are .*llama"),
        ({"model_type": "switch_layers"}, "helper module"),
        ({"model_file": "mine.py"}, "field model_file: 'mine.py'"),
        ({"dtype": "int4"}, "field dtype: 'int4'; expected one of bfloat16, float16, float32"),
        ({"num_hidden_layers": "32"}, "field num_hidden_layers: '32'; expected a whole number"),
        ({"vocab_size": 0}, "field vocab_size: 0"),
        ({"text_config": {"head_dim": 1.5}}, r"field text_config\.head_dim: 1\.5"),
        ({"quantization": {"bits": 4}}, "field quantization: .* group_size and bits"),
        ({"num_attention_heads": 3}, r"mlx_lm\.models\.llama"),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_what_was_expected(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelShapeError, match=message):
        shape_from_config(tiny_config("llama", **changes))


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "rms_norm_eps"])
def test_a_missing_field_is_named(field: str) -> None:
    config = tiny_config("llama")
    del config[field]
    with pytest.raises(ModelShapeError, match=f"field {field}: missing; mlx_lm.models.llama needs {field}"):
        shape_from_config(config)


def test_an_unknown_wrapper_of_a_known_model_points_to_its_part() -> None:
    with pytest.raises(ModelShapeError, match="text_config is a llama, which is one"):
        shape_from_config({"model_type": "seeing_llama_9", "text_config": tiny_config("llama")})


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[1, 2]", "holds a list"), (None, "cannot read")],
)
def test_a_file_that_holds_no_configuration_is_refused(
    content: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content, "utf-8")
    with pytest.raises(ModelShapeError, match=message):
        read_config(path)


def test_a_folder_is_read_by_its_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")), "utf-8")
    assert shape_from_config(tmp_path).layers == shape_from_config(tiny_config("llama")).layers


def test_the_callers_configuration_is_not_changed() -> None:
    config = tiny_config("gemma3", text_config=dict(SPECS["gemma3_text"].config))
    before = json.dumps(config, default=str)
    shape_from_config(config)
    assert json.dumps(config, default=str) == before


# -- published models --------------------------------------------------------------------------------------------------

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "fixed"),
    [
        # 32 layers · 8 heads · (128 + 128) · 2 bytes
        ("llama-3.1-8b", 131_072, 0),
        # 36 · 8 · 256 · 2
        ("qwen3-8b", 147_456, 0),
        ("qwen3-4b", 147_456, 0),
        # 5 of 34 layers hold everything: 5 · 4 · 512 · 2; the others 1,024 rows of 4 · 512 · 2
        ("gemma-3-4b", 20_480, 29 * 1024 * 4096),
        # 12 of 24 layers: 12 · 8 · 128 · 2; the others 128 rows
        ("gpt-oss-20b", 24_576, 12 * 128 * 2048),
        # 61 · (512 + 64) · 2: the 70.272 KB of Table 1 in arXiv:2505.09343
        ("deepseek-v3", 70_272, 0),
        # 12 of 48 layers: 12 · 2 · 512 · 2; the others 32 · 128 · 128 · 4 bytes and 3 · 8,192 · 2 of convolution
        ("qwen3-next-80b-a3b", 24_576, 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)),
    ],
)
def test_published_models_take_the_published_bytes(name: str, bytes_per_token: int, fixed: int) -> None:
    shape = shape_from_config(CONFIGS / f"{name}.json")
    # Decoded token by token from a full window on, so that windows hold what they show.
    layers = after_append(after_append(merge_equal(shape.layers), 32_767), 1)
    assert nbytes_allocated(layers) == 32_768 * bytes_per_token + fixed


def test_packed_weights_leave_keys_and_values_at_the_dtype_of_the_scales() -> None:
    config = read_config(CONFIGS / "qwen3-4b.json") | {"quantization": {"group_size": 64, "bits": 4}}
    packed, dense = shape_from_config(config), shape_from_config(CONFIGS / "qwen3-4b.json")
    assert packed.layers == dense.layers
    assert packed.weights_nbytes is not None
    assert dense.weights_nbytes is not None
    # 4 bits and two 16-bit numbers per group of 64; norms stay dense.
    assert packed.weights_nbytes / dense.weights_nbytes == pytest.approx(4.5 / 16, rel=1e-3)
    assert any("packed to 4 bits" in text for text in packed.assumptions)


def test_foreign_packing_that_is_undone_at_loading_is_counted_dense_and_said() -> None:
    shape = shape_from_config(CONFIGS / "deepseek-v3.json")
    assert any("'fp8' are counted dense" in text for text in shape.assumptions)
