"""A fixed plan acts once, when the prompt is over, and again as far as it is to be repeated; the log says so."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from harness import assert_close, feed, greedy, held_of, quiet, real_bytes, same_bits, settle, tokens
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from lumina_cache.actions import parse_action, singles
from lumina_cache.cache import LuminaCache
from lumina_cache.errors import ActionInfeasibleError, ActionSyntaxError, UnsupportedCacheError
from lumina_cache.lab.tiny import build
from lumina_cache.standing import DEFAULT_SLACK, StandingPlan, only

PROMPT = 100


def applied(cache: LuminaCache) -> list[dict[str, Any]]:
    return [r for r in cache.log.records if r["event"] == "action.applied"]


def refused(cache: LuminaCache) -> list[dict[str, Any]]:
    return [r for r in cache.log.records if r["event"] == "action.refused"]


def after_prompt(model: Any, plan: str, chunk: int, n: int = PROMPT, **kwargs: Any) -> LuminaCache:
    """A cache that was fed ``n`` tokens as mlx-lm feeds a prompt: chunks, each evaluated, and the last token alone."""
    cache = quiet(model, plan=plan, **kwargs)
    for start in range(0, n - 1, chunk):
        model(tokens(n)[:, start : min(start + chunk, n - 1)], cache=cache)
        settle(cache)
    mx.eval(model(tokens(n)[:, n - 1 :], cache=cache))
    return cache


# -- when it acts --------------------------------------------------------------------------------------------------------

# Not key_norm: the same token has keys of the same norm wherever it stands, so rounding would decide.
PLANS = [
    "evict:sinks_window@0.50",
    "evict:keydiff@rows=40",
    "quant:affine,bits=8,group=32",
    "quant:kivi,bits=4,group=32",
    "evict:keydiff@0.50+quant:affine,bits=4,group=32",
]


@pytest.mark.parametrize("plan", PLANS)
def test_the_result_does_not_depend_on_the_chunks_of_the_prompt(tiny: Any, plan: str) -> None:
    model, more = tiny("llama"), tokens(6, seed=5)
    want, rows = None, None
    # 99 tokens come before the last: in chunks of 49 the last chunk has one token, which looks like the end.
    for chunk in (99, 16, 49, 64):
        cache = after_prompt(model, plan, chunk)
        assert applied(cache) == []
        got = feed(model, cache, more, [1] * 6)
        assert [r["origin"] for r in applied(cache)] == ["plan"]
        if want is None:
            want, rows = got, held_of(cache)
        assert_close(got, want)
        assert held_of(cache) == rows


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("n", [34, 50])
def test_mlx_lm_generates_the_same_tokens_whatever_its_prefill_step(tiny: Any, plan: str, n: int) -> None:
    model, prompt = tiny("qwen3"), tokens(n)[0].tolist()
    plan = plan.replace("rows=40", "rows=20")
    want = None
    for size in (2048, 16, 7, 2):
        cache = quiet(model, plan=plan)
        got = [t for t, _ in greedy(model, prompt, cache, 12, prefill_step_size=size)]
        assert len(applied(cache)) == 1
        assert want is None or got == want
        want = got


def test_the_first_token_comes_from_the_whole_prompt(tiny: Any) -> None:
    model = tiny("llama")
    cache, plain = quiet(model, plan="evict:sinks_window@rows=20"), make_prompt_cache(model)
    got, want = (feed(model, c, tokens(60), [59, 1]) for c in (cache, plain))
    assert same_bits(got, want)
    feed(model, cache, tokens(1), [1])
    assert {one.rows for one in held_of(cache)} == {21}


def test_a_plan_is_what_apply_does_at_the_same_place(tiny: Any) -> None:
    model, plan = tiny("llama"), "evict:keydiff@rows=30+quant:affine,bits=8,group=32"
    planned, by_hand = quiet(model, plan=plan), quiet(model)
    for cache in (planned, by_hand):
        feed(model, cache, tokens(60), [59, 1])
    by_hand.apply(plan)
    more = tokens(5, seed=2)
    assert same_bits(feed(model, planned, more, [1] * 5), feed(model, by_hand, more, [1] * 5))


def test_who_looks_at_the_cache_after_every_token_does_not_stop_the_plan(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, plan="evict:sinks_window@rows=20")
    for n in (59, 1, 1, 1):
        model(tokens(n), cache=cache)
        settle(cache)
    assert len(applied(cache)) == 1


def test_a_plan_without_rows_to_act_on_waits_for_them(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, plan="evict:sinks_window@rows=40,slack=8+quant:affine,bits=8,group=32")
    feed(model, cache, tokens(12), [11, 1, *[1] * 60][:2])
    feed(model, cache, tokens(60), [1] * 60)
    first, *others = applied(cache)
    assert first["action"] == "quant:affine,bits=8,group=32"
    assert others
    assert {r["action"] for r in others} == {"evict:sinks_window@rows=40,slack=8"}
    assert all(40 <= one.rows <= 48 for one in held_of(cache))
    assert {one.bits for one in held_of(cache)} == {8}
    assert refused(cache) == []


def test_a_prompt_of_one_token_is_no_reason_to_forget_the_plan(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, plan="quant:affine,bits=8,group=32")
    greedy(model, [5], cache, 4)
    assert [r["action"] for r in applied(cache)] == ["quant:affine,bits=8,group=32"]


# -- repetition ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [1, 5, 16])
@pytest.mark.parametrize("scorer", ["sinks_window", "keydiff"])
def test_rows_stay_between_the_number_asked_and_the_slack(tiny: Any, scorer: str, slack: int) -> None:
    model, steps = tiny("llama"), 60
    cache = after_prompt(model, f"evict:{scorer}@rows=30,slack={slack}", 64)
    seen = []
    for i in range(steps):
        feed(model, cache, tokens(1, seed=i), [1])
        seen += [one.rows for one in held_of(cache)]
        assert {one.offset for one in held_of(cache)} == {PROMPT + i + 1}
    assert min(seen) == 31
    assert max(seen) == 30 + slack
    assert len(applied(cache)) == -(-steps // slack)
    assert all(r["rows_after"] == 30 for r in applied(cache))


def test_slack_that_is_not_named_is_the_default(tiny: Any) -> None:
    model = tiny("llama")
    cache = after_prompt(model, "evict:sinks_window@rows=30", 64)
    feed(model, cache, tokens(DEFAULT_SLACK + 1), [1] * (DEFAULT_SLACK + 1))
    assert len(applied(cache)) == 2


def test_a_ratio_is_not_repeated(tiny: Any) -> None:
    model = tiny("llama")
    cache = after_prompt(model, "evict:sinks_window@0.50,slack=2", 64)
    feed(model, cache, tokens(20), [1] * 20)
    assert len(applied(cache)) == 1


def test_a_further_prompt_is_read_whole_before_rows_go_again(tiny: Any) -> None:
    model, want = tiny("llama"), None
    for chunk in (80, 16, 79):
        cache = after_prompt(model, "evict:sinks_window@rows=30,slack=4", 64)
        feed(model, cache, tokens(3), [1] * 3)
        for start in range(0, 80, chunk):
            model(tokens(80, seed=1)[:, start : start + chunk], cache=cache)
            settle(cache)
        assert {one.rows for one in held_of(cache)} == {113}
        got = feed(model, cache, tokens(4, seed=2), [1] * 4)
        assert {one.rows for one in held_of(cache)} == {33}
        assert want is None or float(mx.abs(got - want).max()) < 1e-5 * float(mx.abs(want).max())
        want = got


@pytest.mark.parametrize(("slack", "copies"), [(1, 40), (20, 2)])
def test_the_copy_is_paid_once_in_slack_tokens(tiny: Any, slack: int, copies: int) -> None:
    model = tiny("llama")
    cache = after_prompt(model, f"evict:sinks_window@rows=30,slack={slack}", 64)
    feed(model, cache, tokens(40), [1] * 40)
    assert len(applied(cache)) == copies


# -- what can be planned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "jamba", "deepseek_v3"])
def test_layers_may_hold_different_numbers_of_rows_where_the_probe_said_so(tiny: Any, name: str) -> None:
    model = tiny(name)
    probe = quiet(model)
    plan = "0-0:evict:sinks_window@rows=20;1-9:evict:sinks_window@rows=40"
    steps = probe._control.trackers[0]
    ragged = all(probe._control.profile(steps).has(c) for c in parse_action(plan).requires)
    if not ragged:
        with pytest.raises(ActionInfeasibleError, match="RAGGED_LAYERS"):
            quiet(model, plan=plan)
        return
    cache = after_prompt(model, plan, 64)
    logits = feed(model, cache, tokens(3), [1] * 3)
    assert mx.isfinite(logits).all().item()
    kv = {one.index: one.rows for one in held_of(cache) if one.kind == "kv" and one.rows}
    assert kv == {i: (20 if i == 0 else 40) + 3 for i in kv}


def test_a_plan_that_can_never_run_is_refused_when_the_cache_is_made(tiny: Any) -> None:
    with pytest.raises(ActionInfeasibleError, match="latent attention"):
        quiet(tiny("deepseek_v3"), plan="quant:affine,bits=4,group=32")
    with pytest.raises(ActionInfeasibleError, match="head dim"):
        quiet(tiny("llama"), plan="quant:affine_fetch,bits=4,group=128")
    with pytest.raises(ActionInfeasibleError, match="no code for"):
        quiet(tiny("llama"), plan="merge:minicache")
    with pytest.raises(ActionInfeasibleError, match=r"disk=True"):
        quiet(tiny("llama"), plan="offload:cold@0.50")
    with pytest.raises(ActionSyntaxError):
        quiet(tiny("llama"), plan="evict:nonsense@0.5")


def test_a_plan_beside_a_budget_or_a_draft_is_refused_with_a_remedy(tiny: Any) -> None:
    model, plan = tiny("llama"), "evict:sinks_window@0.50"
    with pytest.raises(UnsupportedCacheError, match="give one of them"):
        quiet(model, plan=plan, budget="1GB")
    with pytest.raises(UnsupportedCacheError, match=r"call apply\(\) yourself"):
        quiet(model, plan=plan, draft_model=model)
    for join in (lambda a, b: a + b, lambda a, b: a.__iadd__(b)):
        cache = quiet(model, plan=plan)
        with pytest.raises(UnsupportedCacheError, match=r"call apply\(\) yourself"):
            join(cache, make_prompt_cache(model))
        with pytest.raises(UnsupportedCacheError, match=r"call apply\(\) yourself"):
            join(quiet(model), cache)
        assert not cache._control.speculative


def test_a_part_that_became_impossible_is_refused_once_and_the_others_run(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, plan="evict:sinks_window@rows=30,slack=2+quant:affine,bits=8,group=32")
    feed(model, cache, tokens(59), [59])
    cache.apply("quant:affine,bits=4,group=32")
    feed(model, cache, tokens(12), [1] * 12)
    assert [r["action"] for r in refused(cache)] == ["quant:affine,bits=8,group=32"]
    assert refused(cache)[0]["reasons"][0]["code"] == "already_coarser"
    assert len(applied(cache)) > 2
    assert {one.bits for one in held_of(cache)} == {4}


@pytest.mark.parametrize(
    "plan", ["evict:sinks_window@rows=30", "evict:sinks_window@0.5+quant:affine,bits=8,group=32"]
)
def test_nothing_can_be_taken_back_under_a_plan_that_evicts(tiny: Any, plan: str) -> None:
    model = tiny("llama")
    cache = quiet(model, plan=plan)
    feed(model, cache, tokens(60), [60])
    assert not any(layer.is_trimmable() for layer in cache)
    assert [layer.trim(3) for layer in cache] == [0] * len(cache)
    assert {one.offset for one in held_of(cache)} == {60}


def test_tokens_can_be_taken_back_under_a_plan_that_only_packs(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, plan="quant:affine,bits=8,group=32")
    feed(model, cache, tokens(62), [60, 1, 1])
    assert {one.bits for one in held_of(cache)} == {8}
    assert [layer.trim(3) for layer in cache] == [3] * len(cache)


# -- copies and exports ----------------------------------------------------------------------------------------------


def test_a_copy_goes_on_by_itself_where_the_plan_stood(tiny: Any) -> None:
    model = tiny("llama")
    cache = after_prompt(model, "evict:sinks_window@rows=30,slack=4", 64)
    feed(model, cache, tokens(2), [1, 1])
    fork = copy.deepcopy(cache)
    before = held_of(cache)
    want = feed(model, fork, tokens(9, seed=3), [1] * 9)
    assert held_of(cache) == before
    assert len(applied(cache)) == 1
    assert same_bits(feed(model, cache, tokens(9, seed=3), [1] * 9), want)
    assert [r["action"] for r in applied(fork)] == [r["action"] for r in applied(cache)[1:]]
    assert held_of(fork) == held_of(cache)


def test_a_copy_taken_before_the_plan_acted_acts_for_itself(tiny: Any) -> None:
    model = tiny("llama")
    cache = after_prompt(model, "evict:sinks_window@rows=30", 64)
    fork = copy.deepcopy(cache)
    feed(model, fork, tokens(3), [1] * 3)
    assert (len(applied(fork)), len(applied(cache))) == (1, 0)
    feed(model, cache, tokens(3), [1] * 3)
    assert held_of(cache) == held_of(fork)


@pytest.mark.parametrize(
    "plan",
    [
        "evict:keydiff@rows=30",
        "quant:kivi,bits=4,group=32",
        "evict:sinks_window@0.5+quant:affine,bits=8,group=32",
    ],
)
def test_what_a_plan_left_can_be_exported_saved_and_loaded(tiny: Any, tmp_path: Path, plan: str) -> None:
    model = tiny("llama")
    cache = after_prompt(model, plan, 64)
    feed(model, cache, tokens(1), [1])
    plain = cache.to_mlx(decode=True)
    save_prompt_cache(str(tmp_path / "saved.safetensors"), plain)
    loaded = load_prompt_cache(str(tmp_path / "saved.safetensors"))
    more = tokens(4, seed=8)
    want = feed(model, plain, more, [1] * 4)
    assert same_bits(feed(model, loaded, more, [1] * 4), want)
    assert_close(
        feed(model, cache, more[:, :1], [1]), want[:, :1], 1e-2
    )  # the new row is packed here, dense there


def test_the_log_names_the_plan_and_what_it_did(tiny: Any) -> None:
    cache = after_prompt(tiny("llama"), "evict:keydiff@rows=30", 64, protect=range(4, 9))
    feed(tiny("llama"), cache, tokens(1), [1])
    [start] = [r for r in cache.log.records if r["event"] == "session.started"]
    assert (start["plan"], start["protect"]) == ("evict:keydiff@rows=30", [[4, 9]])
    [did] = applied(cache)
    assert (did["origin"], did["lossy"], did["lowest_bits"], did["rows_evicted"]) == (
        "plan",
        True,
        None,
        PROMPT - 30,
    )
    assert did["after"]["nbytes_allocated"] == did["predicted_allocated"]
    assert cache.observe().nbytes_allocated == real_bytes(cache)


# -- the value itself ------------------------------------------------------------------------------------------------


def test_parts_can_be_left_out_of_composites_and_of_plans_by_layer() -> None:
    plan = parse_action(
        "0-1:evict:sinks_window@rows=9+quant:affine,bits=8,group=64;2-3:quant:affine,bits=4,group=64;4:keep"
    )
    assert str(only(plan, lambda p: "evict" in str(p))) == "0-1:evict:sinks_window@rows=9"
    assert str(only(plan, lambda p: "bits=4" in str(p))) == "2-3:quant:affine,bits=4,group=64"
    assert only(plan, lambda p: False) is None
    both = parse_action("evict:sinks_window@rows=9+reclaim+quant:affine,bits=8,group=64")
    assert only(both, lambda p: True) == both
    assert str(only(both, lambda p: p != parse_action("reclaim"))) == str(both).replace("+reclaim", "")


@pytest.mark.parametrize("chunks", [(9,), (4, 4, 1), (8, 1), (2,) * 4 + (1,)])
def test_the_end_of_a_prompt_is_told_from_a_chunk_of_one_token(chunks: tuple[int, ...]) -> None:
    plan = StandingPlan(parse_action("evict:sinks_window@0.5"))
    assert [plan.due(n, True) for n in chunks] == [None] * len(chunks)  # mlx-lm reads states after each chunk
    assert plan.due(1, True) is None  # the last token
    assert plan.due(1, False) is not None


def test_a_plan_that_has_nothing_left_to_do_is_never_due_again() -> None:
    plan = StandingPlan(parse_action("quant:affine,bits=8,group=64"))
    plan.due(5, False), plan.due(1, True)
    due = plan.due(1, False)
    assert due is not None
    plan.tried(singles(due))
    assert all(plan.due(1, False) is None for _ in range(1000))


def test_positions_that_survive_are_those_of_a_hand_made_eviction(tiny: Any) -> None:
    model = tiny("llama")
    cache = after_prompt(model, "evict:sinks_window@rows=12,slack=3", 50)
    feed(model, cache, tokens(7), [1] * 7)
    for layer in cache:
        # Evicted to 12 rows at 100, 103 and 106 tokens, and one more token since.
        assert layer.positions().tolist() == [0, 1, 2, 3, *range(98, 107)]


# -- speculative decoding with rows that were packed before ----------------------------------------------------------


def speculate(model: Any, draft: Any, cache: Any, prompt: list[int], n: int) -> list[int]:
    steps = speculative_generate_step(
        mx.array(prompt), model, draft, prompt_cache=cache, num_draft_tokens=3, max_tokens=n
    )
    return [int(token) for token, _, _ in steps]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_speculating_over_packed_rows_is_greedy_decoding_over_them(tiny: Any, name: str, bits: int) -> None:
    model, draft = tiny(name), build("llama", seed=7)
    ids = tokens(70)[0].tolist()
    plain, joint = quiet(model), quiet(model, draft_model=draft)
    entries = len(plain)
    for one, cache in ((model, plain), (model, joint[:entries]), (draft, joint[entries:])):
        feed(one, cache, mx.array([ids[:60]]), [60])
    for cache in (plain, joint):
        cache.apply(f"quant:affine,bits={bits},group=32")
    assert {one.bits for one in held_of(joint[:entries])} == {bits}
    want = [t for t, _ in greedy(model, ids[60:], plain, 25)]
    assert speculate(model, draft, joint, ids[60:], 25) == want


@pytest.mark.parametrize(
    "codec", ["kivi,bits=4,group=32", "hadamard,bits=4,group=32", "affine_fetch,bits=8,group=32"]
)
def test_rows_encoded_several_at_a_time_are_refused_when_tokens_may_be_taken_back(
    tiny: Any, codec: str
) -> None:
    model, draft = tiny("llama"), build("llama", seed=7)
    joint = quiet(model, draft_model=draft)
    feed(model, joint[:2], tokens(60), [60])
    with pytest.raises(ActionInfeasibleError, match="taken back"):
        joint.apply(f"quant:{codec}")
    [said] = refused(joint)
    assert said["reasons"][0]["code"] == "rows_must_stay"
    # Encoded first and joined afterwards: mlx-lm is told before it computes anything.
    cache = quiet(model)
    feed(model, cache, tokens(60), [60])
    cache.apply(f"quant:{codec}")
    assert all(layer.is_trimmable() for layer in cache)
    with pytest.raises(ValueError, match="trimmable"):
        speculate(model, draft, cache + make_prompt_cache(draft), tokens(4)[0].tolist(), 5)
