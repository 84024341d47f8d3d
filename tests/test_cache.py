"""``LuminaCache`` itself: a list of stable entries, its copies, what it tells and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from harness import (
    allocated,
    assert_close,
    feed,
    held_of,
    pieces,
    quiet,
    real_bytes,
    same_bits,
    settle,
    tokens,
)
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.actions import parse_action
from lumina_cache.audit import read_log, validate
from lumina_cache.cache import LuminaCache
from lumina_cache.errors import (
    ActionInfeasibleError,
    ActionSyntaxError,
    BudgetError,
    LuminaError,
    UnsupportedCacheError,
)
from lumina_cache.layers import ManagedLayer, leaves

KINDS = ("llama", "gemma3", "llama4", "falcon_h1", "deepseek_v32", "qwen3_next", "recurrent_gemma")

#: What can have happened to a cache before it is copied.
PASTS: dict[str, Callable[[LuminaCache], Any]] = {
    "nothing": lambda cache: None,
    "evicted": lambda cache: cache.apply("evict:sinks_window@rows=12"),
    "packed": lambda cache: cache.apply("quant:affine,bits=8,group=32"),
    "evicted and packed": lambda cache: cache.apply(
        "evict:sinks_window@rows=12+quant:affine,bits=4,group=32"
    ),
    "reclaimed": lambda cache: cache.apply("reclaim"),
}


# -- a list ---------------------------------------------------------------------------------------------------------


def test_it_is_a_list_of_one_entry_per_entry_of_the_stock_cache(tiny: Any) -> None:
    cache, theirs = quiet(tiny("falcon_h1")), make_prompt_cache(tiny("falcon_h1"))
    assert isinstance(cache, list)
    assert bool(cache)
    assert len(cache) == len(theirs)
    assert [i for i, _ in enumerate(cache)] == [0, 1]
    assert cache.index(cache[1]) == 1
    assert [type(c).__name__ for c in cache] == [type(c).__name__ for c in theirs]


def test_slices_and_sums_are_plain_lists_of_the_same_entries(tiny: Any) -> None:
    cache = quiet(tiny("gemma3"))
    assert cache[:2] == [cache[0], cache[1]]
    assert type(cache[:2]) is list
    padded = cache + [None] * 2
    assert type(padded) is list
    assert padded[:3] == list(cache)
    assert padded[3:] == [None, None]


def test_padding_with_none_does_not_count_as_joining_a_draft(tiny: Any) -> None:
    model = tiny("gemma4_text")
    cache = quiet(model)
    feed(model, cache, tokens(6), [4, 2])
    assert cache[0].is_trimmable()


def test_an_entry_may_be_assigned_and_is_adopted_with_its_contents(tiny: Any) -> None:
    model, ids = tiny("llama"), tokens(30)
    theirs, cache = make_prompt_cache(model), quiet(model)
    want = feed(model, theirs, ids, [20])
    feed(model, make_prompt_cache(model), ids, [20])
    for i, entry in enumerate(theirs):
        cache[i] = copy.deepcopy(entry)
        assert isinstance(cache[i], ManagedLayer)
    assert same_bits(feed(model, cache, ids, [1, 9], start=20), feed(model, theirs, ids, [1, 9], start=20))
    assert want.shape[1] == 20
    assert cache.observe().layers[0].name == "layer 0"


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "gemma3"])
def test_entries_of_another_lumina_cache_may_be_assigned_and_leave_it(tiny: Any, name: str) -> None:
    model, ids = tiny(name), tokens(40)
    source, cache = quiet(model), quiet(model)
    theirs = make_prompt_cache(model)
    feed(model, source, ids, [20, 1])
    feed(model, theirs, ids, [20, 1])
    feed(model, cache, tokens(9, seed=4), [8, 1])
    cache[:] = source[:]
    assert {leaf._steps for leaf in [*leaves(cache), *cache]} == {cache._control.trackers[0]}
    assert source._control.trackers[0].layers == []
    got = feed(model, cache, ids, [3, 1, 1], start=21)
    assert same_bits(got, feed(model, theirs, ids, [3, 1, 1], start=21))
    assert cache.apply("evict:sinks_window@rows=8") is not None


def test_a_cache_has_one_entry_per_layer_and_slice_assignment_cannot_change_that(tiny: Any) -> None:
    cache = quiet(tiny("llama"))
    with pytest.raises(UnsupportedCacheError, match="1 entries cannot take the place of 2"):
        cache[:] = [stock.KVCache()]


@pytest.mark.parametrize("batched", [stock.BatchKVCache([0]), stock.BatchRotatingKVCache(8, [0])])
def test_a_batched_entry_is_refused_and_the_cache_stays_as_it_was(tiny: Any, batched: Any) -> None:
    model = tiny("llama")
    cache = quiet(model)
    before = cache[0]
    with pytest.raises(UnsupportedCacheError, match=f"layer 0 is a {type(batched).__name__}"):
        cache[0] = batched
    assert cache[0] is before
    feed(model, cache, tokens(10), [9, 1])
    assert cache.apply("evict:sinks_window@rows=8") is not None


def test_a_model_that_makes_batched_caches_is_refused_at_construction(tiny: Any) -> None:
    class Batched:
        layers = (None,)

        def make_cache(self) -> list[Any]:
            return [stock.BatchKVCache([0])]

    with pytest.raises(UnsupportedCacheError, match="batched caches are not managed"):
        quiet(Batched())


def test_an_entry_given_for_a_draft_that_was_joined_later_is_used_as_it_is(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model)
    cache += make_prompt_cache(model)
    replacement = stock.KVCache()
    cache[3] = replacement
    assert cache[3] is replacement
    assert len(cache.observe().layers) == 4


class Opaque:
    """A cache object of no class that mlx-lm's cache module defines, and without any of its verbs."""

    offset = 0


class WithOpaque:
    """A llama with one more entry, of an unknown class, that it does not use."""

    def __init__(self, model: Any) -> None:
        self.model, self.layers, self.model_type = model, model.layers, "with_opaque"

    def make_cache(self) -> list[Any]:
        return [*make_prompt_cache(self.model), Opaque()]

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        return self.model(ids, cache=cache[:2])


def test_entries_of_unknown_classes_are_passed_through_and_reported(tiny: Any) -> None:
    model = WithOpaque(tiny("llama"))
    cache = quiet(model)
    assert type(cache[2]) is Opaque
    mx.eval(model(tokens(9), cache=cache))
    view = cache.observe()
    assert [one.kind for one in view.layers] == ["kv", "kv", "opaque"]
    assert view.nbytes_allocated == cache.nbytes == real_bytes(cache)
    assert cache.apply("evict:sinks_window@rows=6") is not None
    assert type(cache.to_mlx()[2]) is Opaque
    assert type(copy.deepcopy(cache)[2]) is Opaque


# -- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1", "llama4"])
def test_a_deep_copy_and_its_original_go_on_independently(tiny: Any, name: str, past: str) -> None:
    model, ids = tiny(name), tokens(60)
    cache, twin = quiet(model), quiet(model)
    for one in (cache, twin):
        feed(model, one, ids, [29, 1])
        PASTS[past](one)
    new = copy.deepcopy(cache)
    assert type(new) is LuminaCache
    assert held_of(new) == held_of(cache)
    other = tokens(20, seed=8)
    feed(model, new, other, [7, 1, 1])
    want = feed(model, twin, ids, [1, 5, 1], start=30)
    assert same_bits(feed(model, cache, ids, [1, 5, 1], start=30), want)
    # … and the other way: what happens to the original does not reach the copy.
    again = copy.deepcopy(twin)
    with_change = copy.deepcopy(again)
    feed(model, twin, other, [5, 1])
    twin.apply("evict:sinks_window@rows=8")
    assert same_bits(feed(model, again, other, [3, 1]), feed(model, with_change, other, [3, 1]))


def test_a_copy_takes_actions_of_its_own_and_writes_its_own_records(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model)
    feed(model, cache, tokens(30), [30])
    new = copy.deepcopy(cache)
    new.apply("evict:sinks_window@rows=12")
    feed(model, new, tokens(3), [3])
    assert {one.rows for one in held_of(cache)} == {30}
    assert {one.rows for one in held_of(new)} == {15}
    assert not any(r["event"] == "action.applied" for r in cache.log.records)
    started = new.log.records[0]
    validate(started)
    assert started["copied_from"] == cache.log.cache_id != new.log.cache_id
    assert started["model"]["kinds"] == {"kv": 2}
    assert all(leaf._steps.listener is new._control for leaf in new)


def test_an_action_pending_in_the_original_is_settled_before_it_is_copied(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, budget="1MB")
    feed(model, cache, tokens(30), [30])
    cache._control._pending.append(parse_action("evict:sinks_window@rows=9"))
    new = copy.deepcopy(cache)
    assert {one.rows for one in held_of(new)} == {one.rows for one in held_of(cache)} == {9}
    assert new._control.evicted_by == "sinks_window"


@pytest.mark.parametrize("past", ["nothing", "evicted", "packed"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1"])
def test_a_copied_slice_is_independent_and_goes_on_alike(tiny: Any, name: str, past: str) -> None:
    """What a prompt cache store that keeps ``cache[:n]`` does."""
    model, ids = tiny(name), tokens(40)
    cache = quiet(model)
    feed(model, cache, ids, [30])
    PASTS[past](cache)
    part = copy.deepcopy(cache[:])
    assert type(part) is list
    want = feed(model, cache, ids, [1, 4, 1], start=30)
    assert same_bits(feed(model, part, ids, [1, 4, 1], start=30), want)


@pytest.mark.parametrize("past", ["nothing", "evicted", "packed"])
def test_a_single_copied_layer_is_independent(tiny: Any, past: str) -> None:
    model, ids = tiny("llama"), tokens(40)
    cache = quiet(model, draft_model=tiny("llama")) if past == "packed" else quiet(model)
    feed(model, cache[:2], ids, [30])
    PASTS[past](cache)
    for layer in (cache[0], cache[-1]):
        before = layer.state
        mx.eval(before)
        twin = copy.deepcopy(layer)
        shape = (1, 2, 3, 32)
        twin.update_and_fetch(mx.ones(shape), mx.ones(shape))
        assert twin.offset == layer.offset + 3
        assert twin.rows == layer.rows + 3
        assert layer.state[2] == before[2]
        assert twin._steps is not layer._steps
        assert twin._steps.layers == [twin]
        twin.trim(1)
        _ = twin.nbytes, twin.is_trimmable(), twin.state


def test_copies_keep_the_point_within_the_step(tiny: Any) -> None:
    model, ids = tiny("gemma3"), tokens(30)
    cache = quiet(model)
    feed(model, cache, ids, [20, 1])
    new = copy.deepcopy(cache)
    assert (new.observe().step, new.observe().phase) == (2, "decode")
    feed(model, new, ids, [1, 1, 1], start=21)
    assert new.observe().step == 5
    assert new.apply("evict:sinks_window@rows=8") is not None


def test_a_shallow_copy_is_refused_because_it_would_share_rows(tiny: Any) -> None:
    with pytest.raises(UnsupportedCacheError, match=r"copy\.deepcopy"):
        copy.copy(quiet(tiny("llama")))


def test_pickling_is_refused_and_names_what_to_do_instead(tiny: Any) -> None:
    with pytest.raises(UnsupportedCacheError, match="save_prompt_cache"):
        pickle.dumps(quiet(tiny("llama")))


def test_a_dropped_cache_frees_its_arrays_without_the_garbage_collector(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model)
    feed(model, cache, tokens(300), [300])
    gone = [weakref.ref(leaf) for leaf in cache]
    before = mx.get_active_memory()
    nbytes = real_bytes(cache)
    gc.disable()
    try:
        del cache
        assert [ref() for ref in gone] == [None, None]
        assert before - mx.get_active_memory() >= nbytes
    finally:
        gc.enable()


# -- what it tells -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_what_is_observed_is_what_the_arrays_are(tiny: Any, name: str) -> None:
    model = tiny(name)
    cache = quiet(model)
    assert cache.observe().nbytes_allocated == 0
    for n in (20, 1, 4, 260):
        feed(model, cache, tokens(n, seed=n), [n])
        view = cache.observe()
        assert view.nbytes_allocated == cache.nbytes == real_bytes(cache)
        assert 0 < view.nbytes_live <= view.nbytes_allocated
        assert [one.kind for one in view.layers if one.kind != "not_kv"]
    assert (view.phase, view.tokens_step) == ("prefill", 260)
    assert view.mlx_active >= view.nbytes_allocated
    offsets = {one.offset for one in view.layers if one.kind != "not_kv"}
    assert offsets == {285}


def test_state_that_is_not_rows_is_counted_and_called_not_kv(tiny: Any) -> None:
    model = tiny("jamba")
    cache = quiet(model)
    feed(model, cache, tokens(12), [11, 1])
    states = [
        (one, leaf)
        for one, leaf in zip(cache.observe().layers, leaves(cache), strict=True)
        if one.kind == "not_kv"
    ]
    assert len(states) == 2
    for one, leaf in states:
        assert one.nbytes_live == one.nbytes_allocated == sum(a.nbytes for a in leaf.cache) > 0
        assert (one.rows, one.bits) == (0, None)
    started = cache.log.records[0]
    assert started["model"]["kinds"] == {"not_kv": 2, "kv": 2}


@pytest.mark.parametrize("action", ["evict:sinks_window@rows=8", "quant:affine,bits=8,group=32", "reclaim"])
def test_state_that_is_not_rows_passes_through_actions_untouched(tiny: Any, action: str) -> None:
    model = tiny("falcon_h1")
    cache = quiet(model)
    feed(model, cache, tokens(20), [19, 1])
    states = [leaf for leaf in leaves(cache) if leaf.kind == "not_kv"]
    before = [list(leaf.cache) for leaf in states]
    applied = cache.apply(action)
    assert applied is not None
    assert all(
        a is b for leaf, was in zip(states, before, strict=True) for a, b in zip(leaf.cache, was, strict=True)
    )
    assert set(applied.layers_changed) == {"layer 0.1", "layer 1.1"}


def test_a_prefill_step_is_recommended_whose_chunk_fits_the_budget(tiny: Any) -> None:
    model = tiny("gemma3")
    for budget in ("400kB", "700kB", "2MB"):
        cache = quiet(model, budget=budget)
        assert cache.budget is not None
        n = cache.recommend_prefill_step()
        assert n % 8 == 0
        feed(model, cache, tokens(n), [n])
        assert allocated(cache) <= cache.budget
        assert not [r for r in cache.log.records if r.get("code") == "budget_exceeded"]
        if n < 2048:
            too_many = quiet(model, budget=budget)
            logits = model(tokens(n + 8), cache=too_many)
            mx.eval(logits)
            assert too_many.observe().nbytes_allocated > cache.budget
            assert [r for r in too_many.log.records if r.get("code") == "budget_exceeded"]
    assert quiet(model).recommend_prefill_step() == 2048


def test_steps_and_phases_are_counted_and_written_down(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model)
    feed(model, cache, tokens(20), pieces(12, 6, 8))
    assert cache.log.totals["steps_total"] == 10
    assert cache.log.totals["tokens_total"] == 20
    phases = [(r["phase"], r["step"]) for r in cache.log.records if r["event"] == "step"]
    assert phases == [("prefill", 1), ("decode", 3)]
    cache.close()
    assert cache.log.records[-1]["event"] == "session.ended"
    cache.close()
    assert [r["event"] for r in cache.log.records].count("session.ended") == 1


def test_the_log_of_a_run_with_actions_follows_the_event_table(tiny: Any, tmp_path: Any) -> None:
    model = tiny("gemma3")
    with quiet(model, log=tmp_path / "run.jsonl", budget="350kB") as cache:
        feed(model, cache, tokens(700), [*pieces(680, 100), *[1] * 20])
        with pytest.raises(ActionInfeasibleError):
            cache.apply("evict:h2o@0.50")
    contents = read_log(tmp_path / "run.jsonl")
    assert contents.problems == ()
    events = [r["event"] for r in contents.records]
    assert events[0] == "session.started"
    assert events[-1] == "session.ended"
    assert {"step", "decision", "action.applied", "action.refused"} <= set(events)


# -- threads ----------------------------------------------------------------------------------------------------------


def in_thread(job: Callable[[], Any]) -> Any:
    """Run ``job`` in another thread; its result, or its exception raised here."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((job(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    value, error = result[0]
    if error is not None:
        raise error
    return value


@pytest.mark.parametrize("past", PASTS)
def test_an_evaluated_cache_can_be_used_and_changed_from_another_thread(tiny: Any, past: str) -> None:
    model, ids = tiny("gemma3"), tokens(50)
    here, there = quiet(model), quiet(model)
    for cache in (here, there):
        feed(model, cache, ids, [30])
    PASTS[past](here)
    in_thread(lambda: PASTS[past](there))
    want = feed(model, here, ids, [1, 3, 1], start=30)
    got = in_thread(lambda: feed(model, there, ids, [1, 3, 1], start=30))
    assert same_bits(got, want)
    in_thread(lambda: settle(there))
    assert same_bits(feed(model, there, ids, [2], start=35), feed(model, here, ids, [2], start=35))


def test_a_cache_filled_in_a_worker_is_used_here(tiny: Any) -> None:
    model, ids = tiny("llama"), tokens(40)
    cache = quiet(model)
    in_thread(lambda: feed(model, cache, ids, [30, 1]))
    in_thread(lambda: settle(cache))
    cache.apply("evict:sinks_window@rows=20")
    assert mx.isfinite(feed(model, cache, ids, [1, 3], start=31)).all().item()


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"budget": "lots"}, BudgetError, "'lots'"),
        ({"budget": 0}, BudgetError, "0"),
        ({"budget": True}, BudgetError, "True"),
        ({"budget": 1.5}, BudgetError, "1.5"),
        ({"policy": "fastest"}, UnsupportedCacheError, "'fastest'"),
        ({"telemetry": 3}, UnsupportedCacheError, "telemetry=3"),
    ],
)
def test_bad_arguments_are_refused_by_value(
    tiny: Any, kwargs: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        LuminaCache(tiny("llama"), **kwargs)
    assert isinstance(caught.value, LuminaError)


def test_an_unreadable_action_is_refused_and_changes_nothing(tiny: Any) -> None:
    cache = quiet(tiny("llama"))
    with pytest.raises(ActionSyntaxError, match="shrink"):
        cache.apply("shrink")


def test_an_infeasible_action_is_refused_with_every_reason_and_the_cache_is_as_it_was(tiny: Any) -> None:
    model, ids = tiny("gpt_oss"), tokens(40)
    cache = quiet(model)
    feed(model, cache, ids, [30])
    before = held_of(cache)
    with pytest.raises(ActionInfeasibleError, match=r"(?s)sinks.*nothing to evict"):
        cache.apply("evict:sinks_window@rows=64+quant:affine,bits=4,group=32")
    assert held_of(cache) == before
    theirs = make_prompt_cache(model)
    feed(model, theirs, ids, [30])
    assert same_bits(feed(model, cache, ids, [3, 1], start=30), feed(model, theirs, ids, [3, 1], start=30))
    record = [r for r in cache.log.records if r["event"] == "action.refused"][-1]
    assert len(record["reasons"]) == 2
    assert record["execution_state"] == "backend_infeasible"


def test_a_group_size_nobody_probed_yet_is_probed_when_asked_for(tiny: Any) -> None:
    model = tiny("deepseek_v2")
    cache = quiet(model)
    ids = tokens(30)
    feed(model, cache, ids, [20])
    want = feed(model, copy.deepcopy(cache), ids, [1, 3], start=20)
    applied = cache.apply("quant:affine,bits=6,group=32")
    assert applied is not None
    assert_close(feed(model, cache, ids, [1, 3], start=20), want, 0.2)


def test_changed_layers_cannot_join_a_batch_and_plain_ones_can(tiny: Any) -> None:
    model = tiny("llama")
    caches = [quiet(model), quiet(model)]
    for seed, cache in enumerate(caches):
        feed(model, cache, tokens(10 + seed, seed=seed), [10 + seed])
    merged = caches[0][0].merge([c[0] for c in caches])
    assert type(merged) is stock.BatchKVCache
    caches[1].apply("evict:sinks_window@rows=8")
    with pytest.raises(UnsupportedCacheError, match=r"layer 0 was changed .*to_mlx"):
        caches[0][0].merge([c[0] for c in caches])


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1", "recurrent_gemma"])
def test_a_batch_of_plain_entries_is_the_batch_that_stock_entries_make(tiny: Any, name: str) -> None:
    """Also right after a prefill chunk, when a sliding window still holds more rows than it may."""
    model = tiny(name)
    merged = []
    for make in (quiet, make_prompt_cache):
        caches = [make(model), make(model)]
        for seed, cache in enumerate(caches):
            feed(model, cache, tokens(30 + seed, seed=seed), [30 + seed])
        merged.append([caches[0][i].merge([c[i] for c in caches]) for i in range(len(caches[0]))])
    ours, theirs = merged
    ids = tokens(3, batch=2, seed=9)
    assert same_bits(feed(model, ours, ids, [1, 1, 1]), feed(model, theirs, ids, [1, 1, 1]))
