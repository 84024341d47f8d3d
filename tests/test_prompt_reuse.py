"""Prompt caches kept for later: mlx-lm's LRUPromptCache hands out what was put in, to the token, and nothing aliases."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from harness import assert_close, feed, greedy, held_of, quiet, same_bits, tokens
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from lumina_cache.cache import LuminaCache

KINDS = ("llama", "gemma3", "falcon_h1", "llama4", "mamba", "deepseek_v32")
IDS = tokens(60)
TOKENS = IDS[0].tolist()
KEY = "the model"


def kept(model: Any, n: int, action: str | None = None, **kwargs: Any) -> tuple[LRUPromptCache, LuminaCache]:
    """A store with one entry for the first ``n`` tokens."""
    store, cache = LRUPromptCache(), quiet(model, **kwargs)
    feed(model, cache, IDS, [n - 1, 1])
    if action is not None:
        cache.apply(action)
    store.insert_cache(KEY, TOKENS[:n], cache)
    return store, cache


def cold(model: Any, n: int, steps: list[int]) -> mx.array:
    """Logits of ``steps`` after a fresh prefill of the first ``n`` tokens."""
    fresh = make_prompt_cache(model)
    if n:
        feed(model, fresh, IDS, [n - 1, 1] if n > 1 else [1])
    return feed(model, fresh, IDS, steps, start=n)


@pytest.mark.parametrize("name", KINDS)
def test_an_exact_hit_is_the_prefix_and_continues_like_it(tiny: Any, name: str) -> None:
    model = tiny(name)
    store, _ = kept(model, 30)
    found, rest = store.fetch_nearest_cache(KEY, TOKENS[:30])
    assert rest == []
    assert type(found) is LuminaCache
    assert same_bits(feed(model, found, IDS, [1, 4, 1], start=30), cold(model, 30, [1, 4, 1]))


@pytest.mark.parametrize("name", KINDS)
def test_a_shorter_prefix_leaves_the_rest_of_the_prompt(tiny: Any, name: str) -> None:
    model = tiny(name)
    store, _ = kept(model, 30)
    found, rest = store.fetch_nearest_cache(KEY, TOKENS[:40])
    assert rest == TOKENS[30:40]
    assert same_bits(feed(model, found, IDS, [10, 1], start=30), cold(model, 30, [10, 1]))


@pytest.mark.parametrize("name", KINDS)
def test_a_longer_entry_is_trimmed_to_the_common_prefix_or_not_used_at_all(tiny: Any, name: str) -> None:
    """Windows that have wrapped and recurrent states cannot go back: a cold prefill is right, a wrong prefix is not."""
    model = tiny(name)
    store, _ = kept(model, 30)
    other = [*TOKENS[:25], 99, 98]
    found, rest = store.fetch_nearest_cache(KEY, other)
    if found is None:
        assert name in ("gemma3", "falcon_h1", "mamba")
        assert rest == other
        return
    n = len(other) - len(rest)
    assert n == 25 or (name == "llama4" and n == 25)
    assert {one.offset for one in held_of(found)} == {25}
    got = feed(model, found, mx.array([other]), [1, 1], start=25)
    fresh = make_prompt_cache(model)
    feed(model, fresh, mx.array([other]), [25])
    assert_close(got, feed(model, fresh, mx.array([other]), [1, 1], start=25))


def test_a_window_that_has_not_wrapped_is_trimmed(tiny: Any) -> None:
    model = tiny("gemma3")
    store, _ = kept(model, 12)
    found, rest = store.fetch_nearest_cache(KEY, TOKENS[:9])
    assert rest == TOKENS[8:9]
    assert {one.offset for one in held_of(found)} == {8}
    assert_close(feed(model, found, IDS, [1, 20, 1], start=8), cold(model, 8, [1, 20, 1]))


@pytest.mark.parametrize("name", KINDS)
def test_what_is_handed_out_and_what_is_kept_do_not_alias(tiny: Any, name: str) -> None:
    model = tiny(name)
    store, _ = kept(model, 30)
    first, _ = store.fetch_nearest_cache(KEY, TOKENS[:30])
    feed(model, first, tokens(20, seed=9), [3, 1, 1])
    if name in ("llama", "falcon_h1"):
        first.apply("evict:sinks_window@rows=8")
    second, _ = store.fetch_nearest_cache(KEY, TOKENS[:30])
    assert second is not first
    assert same_bits(feed(model, second, IDS, [1, 4], start=30), cold(model, 30, [1, 4]))


@pytest.mark.parametrize("action", ["evict:sinks_window@rows=12", "quant:affine,bits=8,group=32", "reclaim"])
def test_changed_rows_are_handed_out_changed_and_an_evicted_prefix_is_never_cut(
    tiny: Any, action: str
) -> None:
    model = tiny("llama")
    store, cache = kept(model, 30, action)
    found, rest = store.fetch_nearest_cache(KEY, TOKENS[:30])
    assert rest == []
    assert held_of(found) == held_of(cache)
    want = feed(model, copy.deepcopy(cache), IDS, [1, 4], start=30)
    assert same_bits(feed(model, found, IDS, [1, 4], start=30), want)
    found, rest = store.fetch_nearest_cache(KEY, TOKENS[:20])
    if action.startswith("evict"):
        assert (found, rest) == (None, TOKENS[:20])
    else:
        assert {one.offset for one in held_of(found)} == {19}
        assert {one.rows for one in held_of(found)} == {19}


def test_a_store_counts_the_bytes_that_the_entries_take(tiny: Any) -> None:
    store, cache = kept(tiny("gemma3"), 30)
    assert store.nbytes == cache.nbytes == cache.observe().nbytes_allocated
    store.trim_to(n_bytes=0)
    assert store.nbytes == 0
    assert store.fetch_nearest_cache(KEY, TOKENS[:30])[0] is None


def test_an_extension_takes_the_place_of_its_prefix_only_if_it_can_be_trimmed_back_to_it(tiny: Any) -> None:
    for name, action, trimmable in (
        ("llama", None, True),
        ("gemma3", None, False),
        ("llama", "evict:sinks_window@rows=12", False),
    ):
        model = tiny(name)
        store, _ = kept(model, 20)
        longer, _ = kept(model, 30, action)
        del longer
        more = quiet(model)
        feed(model, more, IDS, [30])
        if action:
            more.apply(action)
        store.insert_cache(KEY, TOKENS[:30], more)
        assert len(store) == (1 if trimmable else 2)
        found, rest = store.fetch_nearest_cache(KEY, TOKENS[:20])
        assert rest in ([], TOKENS[19:20])
        left = 20 - len(rest)
        assert {one.offset for one in held_of(found)} == {left}
        assert_close(feed(model, found, IDS, [1, 3], start=left), cold(model, left, [1, 3]))


def test_a_budget_goes_along_with_what_is_handed_out(tiny: Any) -> None:
    model = tiny("llama")
    store, cache = kept(model, 30, budget="300kB")
    found, _ = store.fetch_nearest_cache(KEY, TOKENS[:30])
    assert found.budget == cache.budget == 300_000
    feed(model, found, tokens(600), [100] * 6)
    assert found.observe().nbytes_allocated <= 300_000
    assert {one.rows for one in held_of(cache)} == {30}


def test_a_conversation_over_a_store_gives_the_tokens_of_one_without(tiny: Any) -> None:
    """Each turn fetches the longest known prefix, generates, and stores what the cache really holds."""
    model, store = tiny("llama"), LRUPromptCache()
    plain: list[int] = []
    history: list[int] = []
    for turn in range(4):
        prompt = history + tokens(6, seed=turn)[0].tolist()
        found, rest = store.fetch_nearest_cache(KEY, prompt)
        assert (found is None) == (turn == 0)
        cache = quiet(model) if found is None else found
        answer = [t for t, _ in greedy(model, rest, cache, 5)]
        want = [t for t, _ in greedy(model, prompt, make_prompt_cache(model), 5)]
        assert answer == want
        history = prompt + answer
        [offset] = {one.offset for one in held_of(cache)}
        store.insert_cache(KEY, history[:offset], cache)
        plain += want
    assert len(plain) == 20
