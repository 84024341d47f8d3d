"""``lumina-cache estimate``: what it says of real configurations, and of questions it cannot answer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from lumina_cache.actions import parse_action
from lumina_cache.errors import (
    ActionSyntaxError,
    BudgetError,
    EstimateInputError,
    LuminaError,
    ModelShapeError,
)
from lumina_cache.estimate_report import caution, estimate_command, parse_context
from lumina_cache.shape import shape_from_config, shape_from_model

CONFIGS = Path(__file__).parent / "data" / "configs"


def report(config: str | Path | None = "llama-3.1-8b.json", **changes):
    asked = {
        "config": CONFIGS / config if isinstance(config, str) else config,
        "model": None,
        "contexts": ["8k"],
        "actions": [],
        "fits": None,
        "chunk": 2048,
        "device": "metal",
        "as_json": True,
        **changes,
    }
    text = estimate_command(**asked)
    return json.loads(text) if asked["as_json"] else text


#: Bytes at 8,192 tokens (16-bit rows), from the published architecture of each model.
PUBLISHED = {
    # 2 · 32 layers · 8 heads · 128 · 2 bytes, times 8,192
    "llama-3.1-8b.json": 2 * 32 * 8 * 128 * 2 * 8192,
    # 2 · 36 layers · 8 heads · 128 · 2 bytes, times 8,192
    "qwen3-8b.json": 2 * 36 * 8 * 128 * 2 * 8192,
    # 61 layers · (512 latent + 64 rotary) · 2 bytes, times 8,192
    "deepseek-v3.json": 61 * (512 + 64) * 2 * 8192,
}


@pytest.mark.parametrize(("config", "nbytes"), PUBLISHED.items())
def test_live_bytes_are_those_of_the_published_architecture(config, nbytes):
    assert report(config)["estimates"][0]["live"] == nbytes


def test_packing_shrinks_what_is_held_and_not_the_peak_of_a_dense_prefill():
    found = report(actions=["keep", "quant:affine,bits=4"])["estimates"]
    assert found[1]["resident"] * 32 == found[0]["resident"] * 9
    assert found[1]["peak"] == found[0]["peak"]


def test_packing_during_the_prompt_raises_the_peak_where_dense_attention_is_fused():
    found = report(contexts=["32k"], actions=["keep", "quant:affine,bits=4"])
    [early] = found["after_every_chunk"]
    assert early["when"] == "every_chunk"
    assert early["peak"] > found["estimates"][1]["peak"]
    assert "acting early" in report(actions=["reclaim"], as_json=False)
    assert "acting early" not in report(as_json=False)


def test_the_longest_context_beside_the_weights_is_shorter():
    found = report(fits="24GB")
    assert 0 < found["longest_context_beside_weights"]["keep"] < found["longest_context"]["keep"]
    assert found["weights_nbytes"] == 16_060_522_496
    assert "beside the weights: none" in report(fits="8GB", as_json=False)


@cache
def shape_of_config(config):
    return shape_from_config(CONFIGS / f"{config}.json")


PACK = "quant:affine,bits=4,group=64"


@pytest.mark.parametrize(
    ("config", "action", "why"),
    [
        ("llama-3.1-8b", PACK, None),
        ("llama-3.1-8b", "keep", None),
        ("gpt-oss-20b", PACK, "attention sinks"),
        ("deepseek-v3", PACK, "latent attention"),
        ("deepseek-v3", "evict:sinks_window@0.50", None),
        ("gpt-oss-20b", "quant:affine,bits=4,group=128", "groups of 128 do not divide head dim 64"),
    ],
)
def test_shapes_tell_what_mlx_lm_cannot_pack(config, action, why):
    found = caution(shape_of_config(config), parse_action(action))
    assert found is None if why is None else why in found


@pytest.mark.parametrize(
    ("name", "action", "why"),
    [
        ("mamba2", "evict:sinks_window@0.50", "nothing to change"),
        ("gemma2", "quant:affine,bits=4,group=32", "computes attention over all rows itself"),
        ("qwen3_next", "quant:affine,bits=4,group=32", None),
        ("lfm2", "quant:affine,bits=4,group=32", None),
    ],
)
def test_shapes_of_tiny_models_tell_it_too(name, action, why, tiny):
    found = caution(shape_from_model(tiny(name)), parse_action(action))
    assert found is None if why is None else why in found


def test_what_mlx_lm_cannot_pack_is_in_the_report():
    assert PACK in report("gpt-oss-20b.json", actions=[PACK])["cautions"]
    assert f"can probably not do {PACK}" in report("gpt-oss-20b.json", actions=[PACK], as_json=False)


def test_the_longest_context_that_fits_is_the_longest():
    found = report(fits="4GB")
    tokens = found["longest_context"]["keep"]
    within, beyond = report(contexts=[str(tokens), str(tokens + 1)])["estimates"]
    assert within["peak"] <= 4_000_000_000 < beyond["peak"]


def test_the_table_says_what_was_assumed_and_what_was_not_measured():
    text = report("deepseek-v3.json", as_json=False)
    assert "assumed: " in text
    assert "not measured" in text
    assert "weights not included" in text


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("4k", 4096), ("1.5k", 1536), ("1m", 1 << 20)])
def test_contexts_are_read_as_people_write_them(text, tokens):
    assert parse_context(text) == tokens


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"contexts": ["long"]}, EstimateInputError, "'long'"),
        ({"contexts": ["0"]}, EstimateInputError, "at least one token"),
        ({"config": Path("none.json")}, ModelShapeError, "cannot read none.json"),
        ({"config": None}, EstimateInputError, "either a config.json or a model"),
        ({"device": "abacus"}, EstimateInputError, "'abacus'"),
        ({"actions": ["squeeze"]}, ActionSyntaxError, "'squeeze'"),
        ({"fits": "much"}, BudgetError, "'much'"),
        ({"config": None, "model": "no/such/model"}, LuminaError, "no/such/model"),
    ],
)
def test_what_is_not_understood_is_named(changes, error, says, monkeypatch):
    def unreachable(repository: str, name: str) -> str:
        raise OSError(f"no such repository: {repository}")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    with pytest.raises(error, match=says):
        report(**changes)
