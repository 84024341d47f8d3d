"""The choice among candidates, by every policy that ships, and by one of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from figures import ABLE, FIGURES, able, dense_layers, state_of
from harness import feed, held_of, quiet, smallest, tokens

from lumina_cache import LuminaCache, parse_action, read_log
from lumina_cache.actions import Evict, Keep, Quantize, singles
from lumina_cache.backend.capabilities import KEYS, ROW_CHOICE, ROW_GATHER, VALUES, BackendProfile
from lumina_cache.backend.feasibility import Reason
from lumina_cache.errors import UnsupportedCacheError
from lumina_cache.estimate import Held, nbytes_allocated
from lumina_cache.policy import (
    POLICIES,
    Adaptive,
    Candidate,
    Decision,
    Greedy,
    Inputs,
    Policy,
    State,
    Weights,
    Window,
    candidates_for,
    next_layers,
    score,
    weigh,
)
from lumina_cache.profile import Profile

LAYERS = dense_layers()
NEXT = nbytes_allocated(next_layers(LAYERS, 1))
ADAPTIVE = Adaptive()


def decide(
    limit: int,
    *,
    policy: Policy = ADAPTIVE,
    each: tuple[Held, ...] = LAYERS,
    backend: BackendProfile = ABLE,
    profile: Profile = FIGURES,
    **state: Any,
) -> tuple[Decision, dict[str, Candidate]]:
    at = state_of(each, limit, **state)
    candidates = weigh(at, candidates_for(at, profile), backend, profile)
    return policy.decide(at, candidates), {str(c.action): c for c in candidates}


def test_what_fits_is_kept() -> None:
    decision, candidates = decide(10**9)
    assert decision.action == Keep()
    assert candidates["keep"].score.total == 0.0


def test_what_just_fits_is_kept_even_where_another_action_would_be_faster() -> None:
    faster = replace(FIGURES, codecs=tuple(replace(c, times=((1024, 0.5),)) for c in FIGURES.codecs))
    decision, candidates = decide(NEXT, profile=faster)
    assert max(candidates.values(), key=lambda c: c.score.total or -1e9).action != Keep()
    assert decision.action == Keep()
    decision, _ = decide(NEXT - 1, profile=faster)
    assert decision.action != Keep()


def test_within_a_prompt_a_codec_that_slows_its_chunks_gives_way() -> None:
    packed, other = FIGURES.codecs[0], parse_action("quant:affine_fetch,bits=8,group=64")
    assert isinstance(other, Quantize)
    figures = replace(
        FIGURES,
        codecs=(
            replace(packed, chunk_times=((1024, 5.0),)),
            replace(packed, action=other, kl=packed.kl * 2, chunk_times=((1024, 1.0),)),
        ),
        prompt_seconds=0.01,
    )
    limit = nbytes_allocated(next_layers(LAYERS, 128)) * 2 // 3
    for coming, best in ((1, packed.action), (128, other)):
        decision, _ = decide(limit, tokens=coming, profile=figures)
        assert decision.action == best


def served() -> Profile:
    """Two codecs that store alike: one is decoded at every fetch, the other is read by attention as it is."""
    decoded, packed = (
        parse_action(f"quant:{name},bits=8,group=64") for name in ("hadamard", "hadamard_packed")
    )
    assert isinstance(decoded, Quantize)
    assert isinstance(packed, Quantize)
    one = replace(FIGURES.codecs[0], action=decoded, times=((1024, 2.0),))
    return replace(FIGURES, codecs=(one, replace(one, action=packed, times=((1024, 0.9),))))


def test_codecs_that_store_alike_have_the_times_of_the_way_they_are_read() -> None:
    profile = served()
    _, candidates = decide(NEXT // 2, profile=profile)
    ratios = {
        name: candidates[f"quant:{name},bits=8,group=64"].inputs.time_ratio
        for name in ("hadamard", "hadamard_packed")
    }
    assert ratios == {"hadamard": 2.0, "hadamard_packed": 0.9}


def test_rows_that_are_stored_already_take_the_time_of_how_this_backend_reads_them() -> None:
    profile = served()
    layout = profile.codecs[0].action.layout
    assert layout is not None
    each = tuple(replace(one, layout=layout, tail=0, tail_capacity=layout.tail_capacity) for one in LAYERS)
    for figures, ratio in ((profile, 2.0), (profile.where_served, 0.9)):
        _, candidates = decide(10**9, each=each, profile=figures)
        assert candidates["keep"].inputs.time_ratio == ratio


def test_what_is_still_expected_of_a_prompt_is_what_was_seen_of_it() -> None:
    assert state_of(LAYERS, None, tokens=1).prompt_tokens == 0
    assert state_of(LAYERS, None, tokens=128).prompt_tokens == 1024
    assert state_of(LAYERS, None, tokens=2048).prompt_tokens == 2048


def test_eight_bits_are_preferred_while_they_fit() -> None:
    decision, _ = decide(NEXT // 2)
    assert decision.action == parse_action("quant:affine,bits=8,group=64")


def test_four_bits_are_preferred_to_losing_a_share_of_the_rows() -> None:
    decision, candidates = decide(NEXT // 5)
    assert isinstance(decision.action, Quantize)
    assert decision.action.key_bits == 4
    assert any(isinstance(p, Evict) for c in candidates.values() if c.feasible for p in singles(c.action))


def test_dear_time_buys_speed_with_quality() -> None:
    """At 4 bits, affine rows lose five times as much as rotated ones, and are read faster."""
    cheap, candidates = decide(NEXT // 5)
    dear, _ = decide(NEXT // 5, weights=Weights(time=10.0))
    assert cheap.action != dear.action
    assert candidates[str(cheap.action)].inputs.kl < candidates[str(dear.action)].inputs.kl
    assert dear.action == parse_action("quant:affine,bits=4,group=64")


def test_where_nothing_can_be_encoded_just_as_many_rows_go_as_must() -> None:
    backend = able(KEYS, VALUES, ROW_GATHER, ROW_CHOICE)
    decision, candidates = decide(NEXT * 4 // 5, backend=backend)
    assert isinstance(decision.action, Evict)
    assert candidates[str(decision.action)].nbytes_next <= NEXT * 4 // 5
    state = state_of(LAYERS, NEXT * 4 // 5)
    [more] = weigh(state, [replace(decision.action, rows=decision.action.rows + 1)], backend, FIGURES)
    assert more.nbytes_next > NEXT * 4 // 5


def test_rows_stay_while_tokens_may_be_taken_back() -> None:
    decision, candidates = decide(NEXT // 2, rows_must_stay=True)
    assert isinstance(decision.action, Quantize)
    evictions = [c for c in candidates.values() if any(isinstance(p, Evict) for p in singles(c.action))]
    assert evictions
    assert all("rows_must_stay" in {r.code for r in c.reasons} for c in evictions)


@pytest.mark.parametrize("policy", [Adaptive(), Greedy(), Window()], ids=lambda p: p.name)
@pytest.mark.parametrize("part", [2, 3, 5, 9, 30, 1000])
@pytest.mark.parametrize(
    "backend", [ABLE, able(), able(KEYS, ROW_GATHER)], ids=["able", "unable", "evicts only"]
)
def test_no_policy_ever_chooses_what_is_not_feasible(
    policy: Policy, part: int, backend: BackendProfile
) -> None:
    decision, candidates = decide(NEXT // part, policy=policy, backend=backend)
    assert candidates[str(decision.action)].feasible


def test_an_infeasible_action_is_left_however_well_it_scores() -> None:
    decision, candidates = decide(NEXT // 2, backend=able(KEYS, VALUES, ROW_GATHER, ROW_CHOICE))
    best = max(candidates.values(), key=lambda c: c.score.total or -1e9)
    assert not best.feasible
    assert decision.action != best.action


def test_memory_that_is_not_there_while_converting_makes_an_action_infeasible() -> None:
    _, candidates = decide(NEXT // 2, available=10)
    reason = next(r for r in candidates["quant:affine,bits=8,group=64"].reasons if r.code == "exceeds_memory")
    assert reason.limit == 10


def test_when_nothing_fits_the_nearest_is_taken_and_said() -> None:
    decision, candidates = decide(1000)
    assert "nothing feasible holds" in decision.why
    feasible = [c for c in candidates.values() if c.feasible]
    assert candidates[str(decision.action)] == min(feasible, key=lambda c: c.nbytes_next)


def test_rows_are_not_thrown_away_before_a_chunk_that_passes_the_limit_anyway() -> None:
    decision, _ = decide(NEXT, tokens=40_000)
    assert decision.action == Keep()
    assert "after it" in decision.why


# -- ties, and figures that are not there -------------------------------------------------------------------------------


def candidate(text: str, nbytes: int = 50, peak: int = 100, **inputs: Any) -> Candidate:
    x = Inputs(
        nbytes_next=nbytes,
        nbytes_peak=peak,
        limit=100,
        memory=None,
        kl=0.0,
        p95=0.0,
        lost_kl=0.0,
        lost_p95=0.0,
        source="x",
    )
    x = replace(x, **inputs)
    return Candidate(parse_action(text), (), x, score(x))


FULL = candidate("keep", nbytes=200)


def choose(*candidates: Candidate) -> str:
    return str(Adaptive().decide(state_of(LAYERS, 100), (FULL, *candidates)).action)


def both_ways(check: Callable[[Sequence[Candidate]], str], *candidates: Candidate) -> str:
    first, second = check(candidates), check(candidates[::-1])
    assert first == second, "the order of the candidates decided"
    return first


def test_of_equal_scores_the_lossless_action_is_taken() -> None:
    lossy = candidate("quant:affine,bits=8,group=64", nbytes=10, peak=10)
    assert both_ways(lambda c: choose(*c), lossy, candidate("reclaim")) == "reclaim"


def test_of_equal_scores_fewer_parts_are_taken_and_then_the_lower_peak() -> None:
    two = candidate("evict:keydiff@0.50+quant:affine,bits=8,group=64", peak=10)
    one = candidate("quant:affine,bits=8,group=64")
    lower = candidate("quant:affine,bits=4,group=64", peak=99)
    assert both_ways(lambda c: choose(*c), two, one) == str(one.action)
    assert both_ways(lambda c: choose(*c), one, lower) == str(lower.action)


def test_time_that_nobody_measured_counts_as_that_of_the_slowest() -> None:
    untimed = candidate("quant:kivi,bits=4,group=32", kl=0.01, p95=0.04)
    quick = candidate("quant:affine,bits=8,group=64", kl=0.02, p95=0.08, time_ratio=1.1)
    slow = candidate("quant:hadamard,bits=4,group=64", kl=0.02, p95=0.08, time_ratio=2.0)
    assert both_ways(lambda c: choose(*c), untimed, quick, slow) == str(quick.action)
    assert both_ways(lambda c: choose(*c), untimed, slow) == str(untimed.action)


def test_an_action_without_a_figure_is_taken_only_where_none_with_one_fits() -> None:
    unknown = candidate("quant:hadamard,bits=8,group=64", nbytes=99, kl=None, p95=None)
    less = candidate("quant:hadamard,bits=4,group=64", nbytes=60, kl=None, p95=None)
    known = candidate("quant:hadamard,bits=2,group=64", kl=9.0)
    assert both_ways(lambda c: choose(*c), unknown, known) == str(known.action)
    assert both_ways(lambda c: choose(*c), unknown, less) == str(unknown.action)
    why = Adaptive().decide(state_of(LAYERS, 100), (FULL, unknown, less)).why
    assert "no action with a figure of quality" in why


# -- the others ---------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_least_expected_damage_whatever_it_costs_in_time() -> None:
    slow = replace(
        FIGURES,
        codecs=tuple(
            replace(c, times=((1024, 50.0),)) if c.action.key_bits == 8 else c for c in FIGURES.codecs
        ),
    )
    greedy, candidates = decide(NEXT // 3, policy=Greedy(), profile=slow)
    adaptive, _ = decide(NEXT // 3, profile=slow)
    assert greedy.action == parse_action("quant:affine,bits=8,group=64")
    assert adaptive.action != greedy.action
    assert candidates[str(greedy.action)].inputs.kl < candidates[str(adaptive.action)].inputs.kl


def test_the_window_keeps_the_newest_rows_as_many_as_fit_and_encodes_none() -> None:
    decision, candidates = decide(NEXT // 2, policy=Window())
    assert isinstance(decision.action, Evict)
    assert decision.action.scorer == "sinks_window"
    assert candidates[str(decision.action)].nbytes_next <= NEXT // 2
    assert decide(NEXT, policy=Window())[0].action == Keep()


@pytest.mark.parametrize("name", [*POLICIES, "off"])
def test_a_policy_is_asked_for_by_name(tiny: Any, name: str) -> None:
    model = tiny("llama")
    cache = quiet(model, budget=300_000, policy=name)
    feed(model, cache, tokens(600), [100] * 6)
    actions = [r["action"] for r in cache.log.records if r["event"] == "action.applied"]
    started = next(r for r in cache.log.records if r["event"] == "session.started")
    if name == "off":
        assert (started["policy"], actions) == (None, [])
    else:
        assert started["policy"] == name
        assert actions
    if name == "window":
        assert all(action.startswith("evict:sinks_window") and "quant" not in action for action in actions)


def test_the_fixed_policy_carries_out_a_plan_and_nothing_else(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, policy="fixed", plan="quant:affine,bits=8,group=32")
    feed(model, cache, tokens(103), [100, 1, 1, 1])
    assert {entry.bits for entry in cache} == {8}
    assert not [r for r in cache.log.records if r["event"] == "decision"]
    with pytest.raises(UnsupportedCacheError, match="give plan="):
        quiet(model, policy="fixed")


def test_an_unknown_policy_is_refused_by_name_with_those_that_there_are(tiny: Any) -> None:
    with pytest.raises(UnsupportedCacheError, match="unknown policy 'best'.*'adaptive', 'greedy', 'window'"):
        quiet(tiny("llama"), policy="best")


# -- one of the user's own ----------------------------------------------------------------------------------------------


class Always:
    """Ten lines."""

    name = "always"

    def __init__(self, text: str) -> None:
        self.action = parse_action(text)

    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        return Decision(self.action, "because")


class Broken(Always):
    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        raise ZeroDivisionError("oops")


class Speechless(Always):
    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        return None  # type: ignore[return-value]


def under(model: Any, policy: Policy) -> LuminaCache:
    cache = quiet(model, budget=300_000, policy=policy)
    for seed in range(4):
        logits = feed(model, cache, tokens(99, seed=seed), [99])
        assert mx.isfinite(logits).all().item()
    return cache


def test_a_users_policy_is_followed_when_what_it_chooses_is_a_feasible_candidate(tiny: Any) -> None:
    cache = under(tiny("llama"), Always("quant:affine,bits=8,group=32"))
    applied = [r["action"] for r in cache.log.records if r["event"] == "action.applied"]
    assert "quant:affine,bits=8,group=32" in applied


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        (Always("evict:h2o@0.50"), "policy_chose_infeasible"),
        (Always("evict:sinks_window@0.50"), "policy_chose_infeasible"),
        (Broken("keep"), "policy_failed"),
        (Speechless("keep"), "policy_failed"),
    ],
    ids=["infeasible", "not a candidate", "raises", "returns nothing"],
)
def test_a_users_mistakes_are_logged_and_everything_is_kept(tiny: Any, policy: Policy, code: str) -> None:
    cache = under(tiny("llama"), policy)
    assert {one.rows for one in held_of(cache)} == {396}
    assert code in {r["code"] for r in cache.log.records if r["event"] == "warning"}
    decisions = [r for r in cache.log.records if r["event"] == "decision"]
    assert {r["chosen"] for r in decisions} == {"keep"}


# -- a decision is its log line -----------------------------------------------------------------------------------------


def reread(line: dict[str, Any]) -> tuple[State, tuple[Candidate, ...]]:
    """The state as far as policies read it, and the candidates, from a line of the log alone."""
    state, weights = line["state"], Weights(**line["state"]["weights"])
    candidates = []
    for one in line["candidates"]:
        x = Inputs.from_record(one["inputs"])
        again = score(x, weights)
        assert again.to_record() == one["score"], one["action"]
        reasons = tuple(Reason(**reason) for reason in one["reasons"])
        assert one["feasible"] == (not reasons)
        candidates.append(Candidate(parse_action(one["action"]), reasons, x, again))
    at = state_of((), state["limit"]["nbytes"], tokens=state["tokens_step"], weights=weights)
    return replace(at, limit=replace(at.limit, why=state["limit"]["why"])), tuple(candidates)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("model_name", ["llama", "gemma3", "gpt_oss"])
def test_every_decision_of_a_run_can_be_made_again_from_its_log_line(
    tiny: Any, name: str, model_name: str, tmp_path: Path
) -> None:
    model, path = tiny(model_name), tmp_path / "run.jsonl"
    cache = quiet(model, budget=int(1.1 * smallest(model)), policy=name, log=path)
    feed(model, cache, tokens(1200), [150, 1, 1, 300, 1, *[50] * 14, *[1] * 40])
    written = read_log(path)
    assert written.problems == ()
    decisions = written.of("decision")
    assert len(decisions) >= 2
    assert list(decisions) == [r for r in cache.log.records if r["event"] == "decision"]
    for record in decisions:
        state, candidates = reread(record)
        decision = POLICIES[name]().decide(state, candidates)
        assert str(decision.action) == record["chosen"]
        assert decision.why == record["why"]
    assert any(r["chosen"] != "keep" for r in decisions)


def test_what_was_applied_is_what_was_decided_and_takes_the_bytes_that_were_weighed(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, budget=290_000)
    feed(model, cache, tokens(1100), [100] * 10 + [1] * 100)
    decisions = {r["decision"]: r for r in cache.log.records if r["event"] == "decision"}
    applied = [r for r in cache.log.records if r["event"] == "action.applied"]
    assert applied
    for record in applied:
        decision = decisions[record["decision"]]
        [chosen] = [c for c in decision["candidates"] if c["action"] == record["action"]]
        assert chosen["inputs"]["nbytes_peak"] >= record["after"]["nbytes_allocated"]
        assert record["predicted_allocated"] == record["after"]["nbytes_allocated"]


def test_a_lossy_action_is_never_undone(tiny: Any) -> None:
    """Bits only fall and positions that are gone stay gone, however much room there is later."""
    model = tiny("llama")
    cache = quiet(model, budget=290_000)
    lowest: int | None = None
    for seed in range(30):
        feed(model, cache, tokens(60, seed=seed), [59, 1])
        bits = min((one.bits for one in held_of(cache) if one.bits is not None), default=None)
        if lowest is not None:
            assert bits is not None
            assert bits <= lowest
        lowest = bits
    offsets = {one.offset for one in held_of(cache)}
    assert offsets == {1800}
    assert lowest is not None
