"""Speculative decoding takes tokens back: the result is that of plain greedy decoding, or a refusal at the start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from harness import allocated, assert_close, disk_in, feed, greedy, held_of, quiet, tokens
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.cache import LuminaCache
from lumina_cache.errors import ActionInfeasibleError, UnsupportedCacheError
from lumina_cache.lab.tiny import build
from lumina_cache.layers import leaves

PROMPT = tokens(14)[0].tolist()


@pytest.fixture(scope="module")
def draft() -> Any:
    return build("llama", seed=7)


def speculate(
    model: Any, draft: Any, cache: Any, n: int, prompt: Sequence[int] = PROMPT, **kwargs: Any
) -> list[int]:
    kwargs = {"num_draft_tokens": 3, "max_tokens": n, **kwargs}
    steps = speculative_generate_step(mx.array(prompt), model, draft, prompt_cache=cache, **kwargs)
    return [int(token) for token, _, _ in steps]


def offsets(cache: Any) -> set[int]:
    return {one.offset for one in held_of(cache)}


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 6])
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", "longcat_flash", "gpt2", "mistral3"])
def test_tokens_are_those_of_plain_greedy_decoding_and_the_callers_cache_holds_what_was_kept(
    tiny: Any, draft: Any, name: str, num_draft_tokens: int
) -> None:
    model = tiny(name)
    want = [t for t, _ in greedy(model, PROMPT, make_prompt_cache(model), 30)]
    cache = quiet(model, draft_model=draft)
    n_entries = len(make_prompt_cache(model))
    assert speculate(model, draft, cache, 30, num_draft_tokens=num_draft_tokens) == want
    known = PROMPT + want
    [offset] = offsets(cache[:n_entries])
    assert len(known) - 1 <= offset <= len(known)
    assert all(one.rows == one.offset for one in held_of(cache))
    # The rows are those of the tokens kept, of none that were taken back.
    more = tokens(4, seed=3)
    fresh = make_prompt_cache(model)
    feed(model, fresh, mx.array([known[:offset]]), [offset])
    assert_close(feed(model, cache[:n_entries], more, [1, 3]), feed(model, fresh, more, [1, 3]))


def test_a_draft_that_is_always_right_is_followed(tiny: Any) -> None:
    model = tiny("llama")
    want = [t for t, _ in greedy(model, PROMPT, make_prompt_cache(model), 20)]
    assert speculate(model, model, quiet(model, draft_model=model), 20) == want


def test_further_turns_continue_from_what_was_kept(tiny: Any, draft: Any) -> None:
    model = tiny("llama")
    stock_cache = make_prompt_cache(model)
    cache = quiet(model, draft_model=draft)
    for turn in range(3):
        prompt = tokens(7, seed=turn)[0].tolist()
        want = [t for t, _ in greedy(model, prompt, stock_cache, 9)]
        got = speculate(model, draft, cache, 9, prompt)
        assert got == want
        # The last token is in the stock cache, and in the other only if it was a draft's: even that out.
        known = int(stock_cache[0].offset)
        for one, entries in ((model, cache[:2]), (draft, cache[2:])):
            behind = known - int(entries[0].offset)
            if behind:
                feed(one, entries, mx.array([got[-behind:]]), [behind])


@pytest.mark.parametrize("name", ["gemma3", "ministral3", "gpt_oss", "lfm2", "falcon_h1", "mamba"])
def test_models_that_cannot_take_tokens_back_are_refused_by_mlx_lm_before_anything_is_computed(
    tiny: Any, draft: Any, name: str
) -> None:
    model = tiny(name)
    cache = quiet(model, draft_model=draft)
    # mlx-lm checks when the generator is started, before its first model call.
    with pytest.raises(ValueError, match="trimmable"):
        speculate(model, draft, cache, 5)
    assert offsets(cache) == {0}


@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n"])
def test_models_whose_layers_borrow_rows_are_refused_when_the_joint_cache_is_made(
    tiny: Any, draft: Any, name: str
) -> None:
    """mlx-lm splits the joint cache after one entry per layer, and these models make fewer."""
    with pytest.raises(UnsupportedCacheError, match=r"6 entries .* makes 3.* draft_model"):
        quiet(tiny(name), draft_model=draft)


def test_a_window_that_cannot_wrap_within_the_horizon_allows_speculation(tiny: Any, draft: Any) -> None:
    model, prompt = tiny("gemma3"), PROMPT[:5]
    want = [t for t, _ in greedy(model, prompt, make_prompt_cache(model), 7)]
    cache = quiet(model, draft_model=draft, horizon=15)
    assert speculate(model, draft, cache, 7, prompt) == want
    assert max(offsets(cache[:3])) <= 12


def test_a_window_that_can_wrap_within_the_horizon_does_not(tiny: Any, draft: Any) -> None:
    model = tiny("gemma3")
    cache = quiet(model, draft_model=draft, horizon=16)
    with pytest.raises(ValueError, match="trimmable"):
        speculate(model, draft, cache, 5, PROMPT[:5])


@pytest.mark.parametrize(
    "join",
    [
        lambda ours, ours_too, stock: ours + ours_too,
        lambda ours, ours_too, stock: ours + stock,
        lambda ours, ours_too, stock: ours.__iadd__(stock),
    ],
    ids=["two of ours", "ours and a stock cache", "in place"],
)
def test_a_cache_joined_with_a_drafts_afterwards_knows_that_tokens_will_be_taken_back(
    tiny: Any, draft: Any, join: Any
) -> None:
    model = tiny("gemma3")
    cache = join(quiet(model), quiet(draft), make_prompt_cache(draft))
    with pytest.raises(ValueError, match="trimmable"):
        speculate(model, draft, cache, 5)
    model = tiny("llama")
    want = [t for t, _ in greedy(model, PROMPT, make_prompt_cache(model), 20)]
    cache = join(quiet(model, budget="40MB"), quiet(draft), make_prompt_cache(draft))
    assert speculate(model, draft, cache, 20) == want


@pytest.mark.parametrize("fails_at_call", range(1, 7))
def test_an_abort_during_speculation_never_leaves_more_rows_than_were_written(
    tiny: Any, draft: Any, fails_at_call: int
) -> None:
    """mlx-lm takes back by the counts of the round before, which may be negative."""

    class Failing:
        """The target; raises at one of its calls."""

        def __init__(self, model: Any) -> None:
            self.model, self.layers, self.calls = model, model.layers, 0

        def __call__(self, ids: mx.array, cache: Any) -> mx.array:
            if self.calls == fails_at_call:
                raise KeyboardInterrupt
            self.calls += 1
            out = self.model(ids, cache=cache)
            self.written = int(cache[0].offset)
            return out

    model = Failing(tiny("llama"))
    cache = quiet(tiny("llama"), draft_model=draft)
    with pytest.raises(KeyboardInterrupt):
        speculate(model, draft, cache, 9)
    for entry in cache[:2]:
        assert entry.offset <= model.written
        assert entry.offset <= entry.keys.shape[2]


def test_kv_bits_pack_both_caches_and_each_is_written_down_on_its_own(tiny: Any, draft: Any) -> None:
    model = tiny("llama")
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    want = speculate(model, draft, make_prompt_cache(model) + make_prompt_cache(draft), 20, **options)
    cache = quiet(model, draft_model=draft)
    assert speculate(model, draft, cache, 20, **options) == want
    _ = cache.nbytes  # a touch: conversions of the last step are written down
    assert {leaf.bits for leaf in leaves(cache)} == {8}
    records = [r for r in cache.log.records if r["event"] == "action.applied"]
    assert sorted(name for r in records for name in r["layers_changed"]) == [
        "draft layer 0",
        "draft layer 1",
        "layer 0",
        "layer 1",
    ]
    for record in records:
        assert record["predicted_allocated"] == record["after"]["nbytes_allocated"]
        assert record["predicted_live"] == record["after"]["nbytes_live"]


def test_a_budget_counts_both_caches_packs_and_never_evicts(tiny: Any, draft: Any) -> None:
    """Both together would take 768 rows × 4 layers dense; the target's are packed before that happens."""
    model = tiny("llama")
    row = 2 * 2 * 32 * 4  # bytes of one dense row: K and V, 2 heads of 32, float32
    budget = 2500 * row
    cache = quiet(model, draft_model=draft, budget=budget)
    ids = tokens(600)
    most = 0
    for i in range(0, 600, 4):
        for one, entries in ((draft, cache[2:]), (model, cache[:2])):
            mx.eval(one(ids[:, i : i + 4], cache=entries))
            most = max(most, allocated(cache))
            assert allocated(cache) <= budget, f"{i + 4} tokens"
    assert most > budget // 2
    decisions = [r for r in cache.log.records if r["event"] == "decision"]
    assert decisions
    assert all("evict" not in r["chosen"] for r in decisions)
    assert all(one.rows == one.offset for one in held_of(cache))


def test_the_drafts_growth_alone_can_make_the_target_pack(tiny: Any, draft: Any) -> None:
    model = tiny("llama")
    row = 2 * 2 * 32 * 4
    budget = 1200 * row
    cache = quiet(model, draft_model=draft, budget=budget)
    feed(model, cache[:2], tokens(200), [200])
    feed(draft, cache[2:], tokens(200), [200])
    assert allocated(cache) <= budget
    for i in range(200, 400):
        feed(draft, cache[2:], tokens(1, seed=i), [1])
        assert allocated(cache) <= budget
    assert {leaf.layout.packed for leaf in leaves(cache[:2])} == {True}


def test_a_stock_cache_and_ours_may_be_given_apart(tiny: Any, draft: Any) -> None:
    model = tiny("llama")
    want = [t for t, _ in greedy(model, PROMPT, make_prompt_cache(model), 12)]
    joint = [*quiet(model), *make_prompt_cache(draft)]
    assert speculate(model, draft, joint, 12) == want
    assert isinstance(quiet(model), LuminaCache)


#: Whatever may be done to rows while tokens are taken back, and what may not.
DURING = {
    "reserve:300": True,
    "reclaim": True,
    "offload:cold@0.25": True,
    "offload:layers=0-0": True,
    "quant:affine,bits=8,group=32": True,
    "0:quant:affine,bits=8,group=32;1:offload:cold@0.50": True,
    "evict:sinks_window@0.50": False,
    "evict:keydiff@0.50": False,
    "0:evict:sinks_window@0.50": False,
    "quant:affine_fetch,bits=8,group=32": False,
    "quant:kivi,bits=4,group=32": False,
    "quant:hadamard,bits=8,group=32+offload:cold@0.50": False,
}


@pytest.mark.parametrize("action", DURING)
def test_an_action_during_speculation_gives_greedy_tokens_or_is_refused_before_anything_changes(
    tiny: Any, draft: Any, tmp_path: Path, action: str
) -> None:
    """The reference: the same action on a cache that no draft takes part in."""
    model, prompt = tiny("llama"), tokens(70)[0].tolist()
    with disk_in(tmp_path) as disk:
        cache, plain = quiet(model, draft_model=draft, disk=disk), quiet(model, disk=disk)
        for one, entries in ((model, cache[:2]), (draft, cache[2:]), (model, plain)):
            feed(one, entries, mx.array([prompt]), [len(prompt)])
        before = held_of(cache)
        if not DURING[action]:
            with pytest.raises(ActionInfeasibleError, match="taken back"):
                cache.apply(action)
            assert held_of(cache) == before
            return
        cache.apply(action)
        plain.apply(action)
        assert held_of(cache[:2]) == held_of(plain)
        want = [t for t, _ in greedy(model, [5, 6, 7], plain, 20)]
        assert speculate(model, draft, cache, 20, [5, 6, 7]) == want
        assert all(one.rows == one.offset for one in held_of(cache))
