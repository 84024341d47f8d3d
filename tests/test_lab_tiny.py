"""Every architecture of the installed mlx-lm has a tiny model, and mlx-lm's own cache serves it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import CacheList, ChunkedKVCache, RotatingKVCache, make_prompt_cache

from lumina_cache.errors import ModelUnavailableError
from lumina_cache.lab.tiny import (
    CHUNKING_MOVES_LOGITS,
    NOT_MODELS,
    SPECS,
    UNBUILDABLE,
    build,
    cache_pattern,
    installed_modules,
)

every_module = pytest.mark.parametrize("name", SPECS)
CHUNKS = (1, 16, 2048)
PROMPT_ROWS, DECODE_STEPS = 40, 12
# the largest change of a logit that the order of a float32 sum brings about in these models is 5e-5
#: Rounds keys and values to 8 bits itself, so that a difference in the last bit can move one by a whole step.
ROUNDED = {"afm7": 1e-2}

SAME = 1e-4


@functools.lru_cache(maxsize=2)
def model_of(name: str) -> nn.Module:
    return build(name)


def tokens(name: str, count: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(SPECS[name].vocab_size) for _ in range(count)]


def last_logits(name: str, model: nn.Module, prompt: list[int], cache: list[Any]) -> mx.array:
    """(vocab_size,) logits after the last token of `prompt`."""
    return model(mx.array(prompt)[None], cache=cache)[0, -1, : SPECS[name].vocab_size]


def run(name: str, model: nn.Module, chunk: int) -> mx.array:
    """(1 + DECODE_STEPS, vocab_size) logits: after a prompt read in chunks, then after each decoded token."""
    script = tokens(name, PROMPT_ROWS + DECODE_STEPS)
    cache = make_prompt_cache(model)
    logits = []
    for start in range(0, PROMPT_ROWS, chunk):
        logits = [last_logits(name, model, script[start : min(start + chunk, PROMPT_ROWS)], cache)]
        mx.eval(logits)
    for token in script[PROMPT_ROWS:]:
        logits.append(last_logits(name, model, [token], cache))
        mx.eval(logits[-1])
    return mx.stack(logits)


def largest_difference(left: mx.array, right: mx.array) -> float:
    return mx.abs(left - right).max().item()


def entries(cache: Any) -> Iterator[Any]:
    for entry in cache:
        if isinstance(entry, CacheList):
            yield from entries(entry.caches)
        else:
            yield entry


# --- the table ---------------------------------------------------------------------------------------------


def test_every_installed_module_is_in_exactly_one_table() -> None:
    specified, unbuildable = set(SPECS), set(UNBUILDABLE)
    assert not specified & unbuildable
    assert not (specified | unbuildable) & NOT_MODELS
    assert set(installed_modules()) == specified | unbuildable | NOT_MODELS


def test_what_the_table_calls_helpers_have_no_model_class() -> None:
    assert not [
        name for name in NOT_MODELS if hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "Model")
    ]


def test_chunk_dependent_modules_are_specified() -> None:
    assert set(CHUNKING_MOVES_LOGITS) <= set(SPECS)


@pytest.fixture
def accepted_keys(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Collects the config keys that any ModelArgs built meanwhile has a field for."""
    seen: set[str] = set()
    original = BaseModelArgs.from_dict.__func__

    def from_dict(cls: type, params: dict[str, Any]) -> Any:
        seen.update(field.name for field in dataclasses.fields(cls))
        return original(cls, params)

    monkeypatch.setattr(BaseModelArgs, "from_dict", classmethod(from_dict))
    return seen


def test_no_key_of_the_table_is_silently_ignored(accepted_keys: set[str]) -> None:
    ignored, used, accepted_by_any = {}, set(), set()
    for name, spec in SPECS.items():
        accepted_keys.clear()
        build(name)
        outermost = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs
        accepted = accepted_keys | {field.name for field in dataclasses.fields(outermost)}
        if own := spec.own_keys - accepted:
            ignored[name] = sorted(own)
        accepted_by_any |= accepted
        used |= spec.config.keys() | spec.config.get("text_config", {}).keys()
    assert ignored == {}
    assert used - accepted_by_any == set()


# --- building ----------------------------------------------------------------------------------------------


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ModelUnavailableError, match=r"'qwen33'.*qwen3"):
        build("qwen33")


def test_an_unbuildable_module_is_refused_with_its_reason() -> None:
    with pytest.raises(ModelUnavailableError, match="No Metal back-end"):
        build("muse_spark")


def test_a_helper_module_is_refused_as_no_model() -> None:
    with pytest.raises(ModelUnavailableError, match=r"rope_utils is a helper"):
        build("rope_utils")


def test_building_leaves_the_global_random_state_alone() -> None:
    mx.random.seed(2**40 + 7)
    mx.eval(mx.random.uniform(shape=(3,)))
    before = mx.random.state[0].tolist()
    build("kimi_linear")
    assert mx.random.state[0].tolist() == before


def weights(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


# one dense, one whose constructor draws, one whose ModelArgs writes into its config
@pytest.mark.parametrize("name", ["llama", "kimi_linear", "mistral3"])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(name: str) -> None:
    first, again, other = (weights(build(name, seed=seed)) for seed in (3, 3, 4))
    assert first.keys() == again.keys() == other.keys()
    assert all(mx.array_equal(first[path], again[path]).item() for path in first)
    matrices = [path for path in first if path.endswith("proj.weight")]
    assert matrices
    assert not any(mx.array_equal(first[path], other[path]).item() for path in matrices)


def test_a_model_can_be_built_in_half_precision() -> None:
    model = build("llama", dtype=mx.float16)
    assert {value.dtype for value in weights(model).values()} == {mx.float16}
    logits = last_logits("llama", model, tokens("llama", 20), make_prompt_cache(model))
    assert logits.dtype == mx.float16
    assert mx.isfinite(logits).all().item()


# --- every architecture ------------------------------------------------------------------------------------


@every_module
def test_the_prompt_cache_is_the_expected_one(name: str) -> None:
    model, spec = model_of(name), SPECS[name]
    assert not model.training
    cache = make_prompt_cache(model)
    assert cache_pattern(cache) == spec.cache
    windows = {entry.max_size for entry in entries(cache) if isinstance(entry, RotatingKVCache)}
    chunks = {entry.chunk_size for entry in entries(cache) if isinstance(entry, ChunkedKVCache)}
    assert windows <= {spec.window}
    assert chunks == {spec.chunk} - {None}


@every_module
def test_the_stock_cache_gives_finite_repeatable_logits_for_every_chunk_size(name: str) -> None:
    model = model_of(name)
    logits = {chunk: run(name, model, chunk) for chunk in CHUNKS}
    for chunk in CHUNKS:
        assert mx.isfinite(logits[chunk]).all().item(), f"chunk {chunk}"
        if chunk > 1:  # for single tokens see the slow test
            assert mx.array_equal(logits[chunk], run(name, model, chunk)).item(), f"chunk {chunk}"
    moved = max(largest_difference(logits[chunk], logits[2048]) for chunk in (1, 16))
    if name in CHUNKING_MOVES_LOGITS:
        assert moved > 100 * SAME, "chunk sizes agree: take it out of CHUNKING_MOVES_LOGITS"
    else:
        assert moved < SAME


@every_module
def test_the_last_logits_depend_on_earlier_tokens(name: str) -> None:
    model = model_of(name)
    prompt = tokens(name, PROMPT_ROWS)
    plain = last_logits(name, model, prompt, make_prompt_cache(model))
    # 1 is the token before, 11 still inside the window of sixteen
    for back in (1, 5, 11):
        changed = list(prompt)
        changed[-1 - back] = (changed[-1 - back] + 1) % SPECS[name].vocab_size
        moved = largest_difference(plain, last_logits(name, model, changed, make_prompt_cache(model)))
        assert moved > 1e-3 * plain.std().item(), f"{back} tokens back"


@pytest.mark.slow
@every_module
def test_single_token_prefill_is_bit_reproducible(name: str) -> None:
    model = model_of(name)
    assert mx.array_equal(run(name, model, 1), run(name, model, 1)).item()


@pytest.mark.slow
@every_module
def test_greedy_decoding_does_not_repeat_one_token(name: str) -> None:
    model = model_of(name)
    cache = make_prompt_cache(model)
    chosen = [last_logits(name, model, tokens(name, PROMPT_ROWS), cache).argmax().item()]
    while len(chosen) < 16:
        chosen.append(last_logits(name, model, [chosen[-1]], cache).argmax().item())
    assert (len(set(chosen)) > 3) == SPECS[name].greedy_ok


@pytest.mark.slow
@every_module
def test_chunk_sizes_agree_when_the_buffers_have_grown(name: str) -> None:
    """300 tokens: past the 256 rows that mlx-lm's caches allocate at a time."""
    model = model_of(name)
    prompt = tokens(name, 300)
    whole = last_logits(name, model, prompt, make_prompt_cache(model))
    cache = make_prompt_cache(model)
    for start in range(0, 300, 64):
        chunked = last_logits(name, model, prompt[start : start + 64], cache)
        mx.eval(chunked)
    limit = ROUNDED.get(name, SAME)
    assert (largest_difference(whole, chunked) < limit) == (name not in CHUNKING_MOVES_LOGITS)


@pytest.mark.slow
@every_module
def test_every_row_can_be_packed_in_groups_of_32(name: str) -> None:
    model = model_of(name)
    cache = make_prompt_cache(model)
    mx.eval(last_logits(name, model, tokens(name, 20), cache))
    for entry in entries(cache):
        if hasattr(entry, "keys"):
            assert entry.keys.shape[-1] % 32 == 0
            assert entry.values.shape[-1] % 32 == 0


# --- the reasons of the unbuildable still hold -------------------------------------------------------------


def test_olmo_still_fails_for_more_than_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hf_olmo", types.ModuleType("hf_olmo"))  # imported, never used
    monkeypatch.delitem(sys.modules, "mlx_lm.models.olmo", raising=False)
    olmo = importlib.import_module("mlx_lm.models.olmo")
    config = {"d_model": 64, "n_layers": 2, "mlp_hidden_size": 128, "n_heads": 2, "embedding_size": 128}
    model = olmo.Model(olmo.ModelArgs.from_dict({"model_type": "olmo", "vocab_size": 128, **config}))
    mx.eval(model(mx.array([[3]]), cache=make_prompt_cache(model)))
    with pytest.raises(ValueError, match="inplace addition"):
        model(mx.array([[3, 4]]), cache=make_prompt_cache(model))


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal is there, so its kernels run")
def test_muse_spark_still_needs_metal() -> None:
    from mlx_lm.models import muse_spark

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "layer_rope_theta": [1e4]}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_hidden_size": 32}
    rest = {"vocab_size": 128, "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8, "moe_intermediate_size": 32}
    heads = {"sliding_window": 16, "final_logit_softcapping": 20.0, "output_multiplier": 1.0}
    text = {**sizes, **layers, **experts, **rest, **heads, "rope_parameters": {"rope_theta": 1e4}}
    model = muse_spark.Model(
        muse_spark.ModelArgs.from_dict({"model_type": "muse_spark", "text_config": text})
    )
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        mx.eval(model(mx.array([[3]]), cache=make_prompt_cache(model)))
