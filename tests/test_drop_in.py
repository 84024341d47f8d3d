"""With no action taken a LuminaCache is the stock cache: the same logits, bit for bit, in every architecture."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from harness import architectures, feed, greedy, held_of, pieces, quiet, real_bytes, same_bits, tokens
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.lab.tiny import CHUNKING_MOVES_LOGITS, SPECS, build
from lumina_cache.layers import leaves

PROMPT, DECODE = 40, 40

#: What generate_step is tried on: full, window, chunked, nested, latent, recurrent, borrowed K/V.
KINDS = (
    "llama",
    "gemma3",
    "llama4",
    "falcon_h1",
    "deepseek_v32",
    "mamba",
    "qwen3_next",
    "gemma4_text",
    "recurrent_gemma",
)


@pytest.mark.parametrize("chunk", [1, 16, 2048])
@pytest.mark.parametrize("name", architectures())
def test_logits_are_bit_identical_to_the_stock_cache(tiny: Any, name: str, chunk: int) -> None:
    model, ids, steps = tiny(name), tokens(PROMPT + DECODE), pieces(PROMPT, chunk, DECODE)
    limit = max(SPECS[name].window or 0, SPECS[name].chunk or 0)
    assert limit < PROMPT, "the window or chunk has to be passed on the way"
    want = feed(model, make_prompt_cache(model), ids, steps)
    cache = quiet(model)
    assert same_bits(feed(model, cache, ids, steps), want)
    assert not any(r["event"].startswith("action") for r in cache.log.records)


@pytest.mark.parametrize("name", architectures())
def test_two_equal_stock_runs_are_bit_identical_and_chunk_sizes_move_them_only_where_the_table_says(
    tiny: Any, name: str
) -> None:
    """The control of the test above: what differs between two *stock* runs is not ours to keep equal."""
    model, ids = tiny(name), tokens(PROMPT)
    runs = [feed(model, make_prompt_cache(model), ids, pieces(PROMPT, chunk)) for chunk in (16, 16, 2048)]
    assert same_bits(runs[0], runs[1]), "bit equality with a stock run would prove nothing"
    worst = float((mx.abs(runs[0] - runs[2]).max() / mx.abs(runs[2]).max()).item())
    assert worst <= 1e-4 or name in CHUNKING_MOVES_LOGITS


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "falcon_h1"])
def test_logits_stay_bit_identical_while_buffers_grow_past_their_256_row_steps(tiny: Any, name: str) -> None:
    model, ids, steps = tiny(name), tokens(560), [250, 3, 1, 1, 1, 1, 5, 247, 1, 1, 1, 1, 30, 17]
    caches = make_prompt_cache(model), quiet(model)
    want, got = (feed(model, cache, ids, steps) for cache in caches)
    assert same_bits(got, want)
    assert real_bytes(caches[0]) == real_bytes(caches[1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_batches_of_equal_length_are_bit_identical_too(tiny: Any, name: str) -> None:
    model, ids, steps = tiny(name), tokens(40, batch=3), pieces(30, 16, 10)
    want = feed(model, make_prompt_cache(model), ids, steps)
    assert same_bits(feed(model, quiet(model), ids, steps), want)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1", "lfm2"])
def test_logits_are_bit_identical_in_sixteen_bits(name: str, dtype: mx.Dtype) -> None:
    model, ids, steps = build(name, dtype=dtype), tokens(30), pieces(20, 16, 10)
    want = feed(model, make_prompt_cache(model), ids, steps)
    assert same_bits(feed(model, quiet(model), ids, steps), want)


@pytest.mark.parametrize("prefill_step_size", [1, 3, 16, 2048])
@pytest.mark.parametrize("name", KINDS)
def test_generate_step_yields_what_it_yields_with_the_stock_cache(
    tiny: Any, name: str, prefill_step_size: int
) -> None:
    model, prompt = tiny(name), tokens(33)[0].tolist()
    caches = make_prompt_cache(model), quiet(model)
    want, got = (greedy(model, prompt, c, 12, prefill_step_size=prefill_step_size) for c in caches)
    assert [t for t, _ in got] == [t for t, _ in want]
    assert all(same_bits(a, b) for (_, a), (_, b) in zip(got, want, strict=True))


@pytest.mark.parametrize("yields", [1, 4])
@pytest.mark.parametrize("name", KINDS)
def test_a_generation_closed_early_goes_on_as_a_prefill_of_exactly_offset_tokens(
    tiny: Any, name: str, yields: int
) -> None:
    """mlx-lm looks one token ahead, so the cache knows more tokens than were yielded; ``offset`` tells how many."""
    model, prompt = tiny(name), tokens(20)[0].tolist()
    cache = quiet(model)
    generation = generate_step(mx.array(prompt), model, prompt_cache=cache, max_tokens=50)
    known = prompt + [next(generation)[0] for _ in range(yields)]
    generation.close()
    offsets = {one.offset for one in held_of(cache) if one.kind != "not_kv"}
    assert offsets <= {len(known)}
    assert offsets or name == "mamba"
    more = tokens(6, seed=5)
    got = feed(model, cache, more, [3, 1, 2])
    # The prefill has to take the same steps: chunk sizes move the last bits of stock logits, too.
    stock_cache = make_prompt_cache(model)
    feed(model, stock_cache, mx.array([known]), [len(prompt) - 1, *[1] * (yields + 1)])
    assert same_bits(got, feed(model, stock_cache, more, [3, 1, 2]))


@pytest.mark.parametrize("name", KINDS)
def test_further_turns_on_the_same_cache_equal_the_stock_cache(tiny: Any, name: str) -> None:
    model = tiny(name)
    caches = make_prompt_cache(model), quiet(model)
    for turn in range(3):
        prompt = tokens(11 + turn, seed=turn)[0].tolist()
        want, got = (greedy(model, prompt, c, 5) for c in caches)
        assert [t for t, _ in got] == [t for t, _ in want]
        assert all(same_bits(a, b) for (_, a), (_, b) in zip(got, want, strict=True))


@pytest.mark.parametrize("name", architectures())
def test_every_entry_is_a_truthy_subclass_of_the_class_it_stands_for_and_keeps_its_name(
    tiny: Any, name: str
) -> None:
    model = tiny(name)
    cache = quiet(model)
    assert isinstance(cache, list)
    ours, theirs = list(leaves(cache)), list(leaves(make_prompt_cache(model)))
    for mine, its in zip(ours, theirs, strict=True):
        assert isinstance(mine, type(its))
        assert type(mine).__name__ == type(its).__name__
        assert bool(mine)
        assert mine.empty() == its.empty()


def test_every_public_attribute_of_an_entry_can_be_set_and_is_read_back(tiny: Any) -> None:
    model = tiny("gemma3")
    cache = quiet(model)
    feed(model, cache, tokens(5), [5])
    for layer in cache:
        its = stock.RotatingKVCache if isinstance(layer, stock.RotatingKVCache) else stock.KVCache
        fields = vars(its(8) if its is stock.RotatingKVCache else its())
        for field in fields:
            value = getattr(layer, field)
            marker = value + 1
            setattr(layer, field, marker)
            assert getattr(layer, field) is marker, field
            setattr(layer, field, value)
