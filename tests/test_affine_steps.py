"""Packed rows that are read packed by steps of one token, and decoded for chunks."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from harness import (
    NO_ROWS,
    UNDECODABLE,
    UNPACKABLE,
    architectures,
    assert_close,
    feed,
    greedy,
    quiet,
    same_bits,
    tokens,
)
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from lumina_cache import LuminaCache
from lumina_cache.actions import parse_action
from lumina_cache.backend.capabilities import DENSE_REENCODE
from lumina_cache.errors import ActionSyntaxError
from lumina_cache.layers import KVCache

STEPS = "quant:affine_steps,bits=8,group=32"


def stored(model: Any, text: str, rows: int = 70, **options: Any) -> LuminaCache:
    cache = quiet(model, guard=False, **options)
    feed(model, cache, tokens(rows), [rows])
    cache.apply(parse_action(text))
    return cache


def test_bits_are_there_for_a_step_of_one_token_and_gone_for_a_chunk(tiny: Any) -> None:
    model = tiny("llama")
    cache = stored(model, STEPS)
    seen: list[tuple[int, bool, bool]] = []
    original = KVCache.update_and_fetch

    def watched(self: Any, keys: Any, values: Any) -> Any:
        fetched = original(self, keys, values)
        seen.append((keys.shape[2], hasattr(self, "bits"), isinstance(fetched[0], tuple | list)))
        return fetched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "update_and_fetch", watched)
        feed(model, cache, tokens(12, seed=3), [1, 5, 1, 1, 4])
    assert {(n, bits, packed) for n, bits, packed in seen} == {
        (1, True, True),
        (5, False, False),
        (4, False, False),
    }


def test_a_step_of_one_token_is_what_mlx_lm_computes_of_packed_rows(tiny: Any) -> None:
    model = tiny("llama")
    ours, packed = stored(model, STEPS), stored(model, "quant:affine,bits=8,group=32")
    assert ours.nbytes == packed.nbytes
    for seed in range(3):
        assert same_bits(*(feed(model, one, tokens(1, seed=seed), [1]) for one in (ours, packed)))


def test_a_chunk_sees_what_the_codes_stand_for(tiny: Any) -> None:
    model = tiny("llama")
    ours, packed = stored(model, STEPS), stored(model, "quant:affine,bits=8,group=32")
    got, want = (feed(model, one, tokens(9, seed=1), [9]) for one in (ours, packed))
    assert_close(got, want, 1e-4)
    # And rows that came in a chunk are there for the next step.
    got, want = (feed(model, one, tokens(1, seed=2), [1]) for one in (ours, packed))
    assert_close(got, want, 1e-3)
    assert ours.nbytes == packed.nbytes


@pytest.mark.parametrize("name", architectures(but={*UNPACKABLE, *UNDECODABLE, *NO_ROWS}))
def test_wherever_packed_rows_can_be_read_this_runs(tiny: Any, name: str) -> None:
    model = tiny(name)
    cache = quiet(model, guard=False)
    feed(model, cache, tokens(40), [40])
    cache.apply(parse_action(STEPS))
    logits = feed(model, cache, tokens(10, seed=1), [4, 1, 1, 3, 1])
    assert not mx.isnan(logits).any().item()


def test_unequal_bits_and_dense_rows_beside_them_are_refused() -> None:
    with pytest.raises(ActionSyntaxError, match="equal bits; use affine_fetch"):
        parse_action("quant:affine_steps,kbits=8,vbits=4")
    with pytest.raises(ActionSyntaxError, match="use affine_fetch"):
        parse_action("quant:affine_steps,bits=8,residual=32")
    assert DENSE_REENCODE in parse_action(STEPS).requires


def test_a_copy_goes_on_as_the_original_would(tiny: Any) -> None:
    model = tiny("llama")
    cache = stored(model, STEPS)
    feed(model, cache, tokens(1, seed=1), [1])
    got, want = (
        [token for token, _ in greedy(model, [5, 6, 7], one, 5)] for one in (copy.deepcopy(cache), cache)
    )
    assert got == want


def test_mlx_lm_reads_what_is_exported_of_it(tiny: Any, tmp_path: Any) -> None:
    model = tiny("llama")
    cache = stored(model, STEPS)
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, cache.to_mlx())
    theirs = load_prompt_cache(path)
    assert type(theirs[0]).__name__ == "QuantizedKVCache"
    assert same_bits(*(feed(model, one, tokens(1, seed=2), [1]) for one in (theirs, cache)))


def test_with_the_attention_hooked_it_is_the_same(tiny: Any) -> None:
    model = tiny("llama")
    with stored(model, STEPS) as plain:
        want = [feed(model, plain, tokens(n, seed=n), [n]) for n in (1, 6, 1)]
    with stored(model, STEPS, rung="hook", observe="h2o") as hooked:
        got = [feed(model, hooked, tokens(n, seed=n), [n]) for n in (1, 6, 1)]
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs, 1e-4)


def test_the_guard_gives_keys_and_values_as_many_bits(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, guard=0.001)
    feed(model, cache, tokens(70), [70])
    applied = cache.apply(parse_action("quant:affine_steps,bits=2,group=32"))
    assert applied is not None
    raised = {str(one) for one in applied.guarded.values()}
    assert raised
    assert all("bits" in one and "kbits" not in one for one in raised if one != "keep"), raised
