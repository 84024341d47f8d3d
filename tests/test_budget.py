"""A budget is held at every decode step, by whatever this model can do; one that cannot be held is refused at once."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import pytest
from harness import (
    UNPACKABLE,
    allocated,
    fast_first,
    feed,
    held_of,
    pieces,
    quiet,
    real_bytes,
    smallest,
    tokens,
)
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.actions import parse_action
from lumina_cache.audit import validate
from lumina_cache.budget import budget_nbytes, format_bytes, parse_bytes
from lumina_cache.cache import LuminaCache
from lumina_cache.errors import BudgetError
from lumina_cache.lab.tiny import build
from lumina_cache.layers import KVCache
from lumina_cache.policy import Candidate, Decision, State
from lumina_cache.telemetry import PressureLevel, Snapshot

#: Full, window, sinks, latent, chunked, nested, recurrent, borrowed K/V, window in the mask alone; packable and not.
GROWING = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4_text",
    "gpt_oss",
    "mistral3",
    "deepseek_v3",
    "deepseek_v32",
    "longcat_flash",
    "llama4",
    "falcon_h1",
    "jamba",
    "lfm2",
    "qwen3_next",
)

#: Models whose cache does not grow without bound.
BOUNDED = ("mamba", "rwkv7", "recurrent_gemma")


def check_log(cache: LuminaCache) -> list[str]:
    """Every action was decided, predicted to the byte, and feasible; returns the actions applied."""
    decisions = {r["decision"]: r for r in cache.log.records if r["event"] == "decision"}
    applied = [r for r in cache.log.records if r["event"] == "action.applied"]
    for record in [*decisions.values(), *applied]:
        validate(record)
    for record in applied:
        assert record["predicted_allocated"] == record["after"]["nbytes_allocated"]
        assert record["predicted_live"] == record["after"]["nbytes_live"]
        decision = decisions[record["decision"]]
        assert record["origin"] == "policy"
        assert record["action"] == decision["chosen"]
        [chosen] = [c for c in decision["candidates"] if c["action"] == decision["chosen"]]
        assert chosen["feasible"]
    assert not [r for r in cache.log.records if r.get("code") in ("action_failed", "policy_failed")]
    return [r["action"] for r in applied]


@pytest.mark.parametrize("times", [1.0, 1.7])
@pytest.mark.parametrize("name", fast_first(GROWING, set(GROWING) - {"qwen3", "gemma2", "jamba"}))
def test_a_budget_is_held_at_every_decode_step_and_every_action_was_predicted(
    tiny: Any, name: str, times: float
) -> None:
    model = tiny(name)
    budget = int(smallest(model) * times)
    dense = make_prompt_cache(model)
    feed(model, dense, tokens(900), pieces(898, 449, 2))
    assert real_bytes(dense) > budget, "the prompt has to be longer than the budget holds"
    cache = quiet(model, budget=budget)
    prompt = mx.array(tokens(900)[0].tolist())
    yields = 0
    for _, logprobs in generate_step(prompt, model, prompt_cache=cache, max_tokens=30, prefill_step_size=64):
        assert allocated(cache) == real_bytes(cache) <= budget, f"after {yields} tokens"
        assert mx.isfinite(logprobs).all().item()
        yields += 1
    assert yields == 30
    actions = check_log(cache)
    assert actions
    if name in UNPACKABLE:
        assert not any("quant:affine," in action for action in actions), "packed rows cannot be read here"


@pytest.mark.parametrize(
    "name", fast_first(GROWING, {"llama", "gemma3", "llama4", "falcon_h1", "gpt_oss", "lfm2"})
)
def test_a_budget_smaller_than_any_that_works_is_refused_and_the_one_named_instead_works(
    tiny: Any, name: str
) -> None:
    model = tiny(name)
    budget = smallest(model)
    with pytest.raises(BudgetError, match=str(budget)):
        quiet(model, budget=budget - 1)
    cache = quiet(model, budget=budget)
    ids = tokens(600)
    for i in range(600):
        logits = model(ids[:, i : i + 1], cache=cache)
        assert allocated(cache) <= budget, f"token {i}"
        if i % 50 == 0:
            mx.eval(logits)
    assert mx.isfinite(logits).all().item()
    check_log(cache)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_model_whose_cache_is_bounded_takes_any_budget_that_it_fits_in(tiny: Any, name: str) -> None:
    model = tiny(name)
    budget = smallest(model)
    cache = quiet(model, budget=budget)
    feed(model, cache, tokens(100), [1] * 100)
    assert allocated(cache) <= budget
    assert not [r for r in cache.log.records if r["event"] == "action.applied"]


def test_a_model_whose_rows_can_neither_be_evicted_nor_bounded_takes_no_budget(tiny: Any) -> None:
    from lumina_cache.lab.tiny import SPECS

    if "phi3small" not in SPECS:
        pytest.skip("no such tiny model")
    with pytest.raises(BudgetError, match="rows cannot be evicted: the block-sparse pattern"):
        quiet(build("phi3small"), budget="1GB")


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1", "llama4"])
@pytest.mark.parametrize("prompt", [[100] * 7, [700], [300, 5, 1, 395]], ids=str)
def test_a_budget_is_held_when_the_model_is_called_directly(tiny: Any, name: str, prompt: list[int]) -> None:
    """No chunk is followed by a look at the cache here: the next step settles it."""
    model, ids = tiny(name), tokens(sum(prompt) + 30)
    budget = int(1.5 * smallest(model))
    cache, at = quiet(model, budget=budget), 0
    for n in (*prompt, *[1] * 30):
        logits = model(ids[:, at : at + n], cache=cache)
        mx.eval(logits)
        at += n
        if n == 1:
            assert allocated(cache) <= budget
    assert mx.isfinite(logits).all().item()
    check_log(cache)


def test_after_a_chunk_too_large_the_next_touch_brings_the_bytes_back_and_the_log_says_so(tiny: Any) -> None:
    model = tiny("llama")
    budget = smallest(model) * 2
    cache = quiet(model, budget=budget)
    mx.eval(model(tokens(1000), cache=cache))
    assert allocated(cache) > budget
    [warning] = [r for r in cache.log.records if r["event"] == "warning"]
    assert warning["code"] == "budget_exceeded"
    assert "recommend_prefill_step" in warning["text"]
    _ = cache[0].state
    assert allocated(cache) <= budget
    check_log(cache)


def test_a_budget_that_is_never_reached_changes_nothing_and_decides_nothing(tiny: Any) -> None:
    model = tiny("gemma3")
    cache, plain = quiet(model, budget="100MB"), make_prompt_cache(model)
    ids = tokens(600)
    got, want = (feed(model, one, ids, pieces(500, 100, 100)) for one in (cache, plain))
    assert mx.array_equal(got, want).item()
    assert not [r for r in cache.log.records if r["event"] in ("decision", "action.applied")]


def test_a_policy_that_is_off_changes_nothing_whatever_the_budget(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model, budget=1000, policy="off")
    feed(model, cache, tokens(400), [400])
    assert {one.rows for one in held_of(cache)} == {400}
    assert cache.budget == 1000


@pytest.mark.parametrize("kv_bits", [2, 3, 5, 6, 8])
def test_a_budget_is_held_over_rows_that_the_caller_packed_at_any_width(tiny: Any, kv_bits: int) -> None:
    """There is no figure for what some widths cost in quality; bytes do not depend on it."""
    model = tiny("llama")
    budget = 2 * smallest(model)
    cache = quiet(model, budget=budget)
    prompt = mx.array(tokens(1500)[0].tolist())
    options = {"kv_bits": kv_bits, "kv_group_size": 32, "quantized_kv_start": 0, "prefill_step_size": 64}
    for _, logprobs in generate_step(prompt, model, prompt_cache=cache, max_tokens=20, **options):
        assert allocated(cache) <= budget
        assert mx.isfinite(logprobs).all().item()
    assert {entry.bits for entry in cache} <= set(range(2, kv_bits + 1))
    assert not [r for r in cache.log.records if r.get("code") == "policy_failed"]


@pytest.mark.parametrize("change", ["state", "assignment"])
def test_a_budget_is_held_over_rows_that_were_put_in_from_outside(tiny: Any, change: str) -> None:
    model = tiny("llama")
    budget = 2 * smallest(model)
    full = quiet(model)
    feed(model, full, tokens(900), [900])
    cache = quiet(model, budget=budget)
    feed(model, cache, tokens(3), [2, 1])
    for i, entry in enumerate(full):
        if change == "state":
            cache[i].state = entry.state
        else:
            cache[i] = entry
    assert allocated(cache) > budget
    feed(model, cache, tokens(5, seed=2), [1] * 5)
    assert allocated(cache) <= budget


def test_a_budget_is_held_in_batches(tiny: Any) -> None:
    model = tiny("llama")
    budget = 3 * 2 * smallest(model)
    cache = quiet(model, budget=budget)
    ids = tokens(800, batch=3)
    feed(model, cache, ids, [100] * 7)
    for i in range(700, 800):
        feed(model, cache, ids, [1], start=i)
        assert allocated(cache) <= budget
    assert check_log(cache)


def test_a_budget_survives_a_copy(tiny: Any) -> None:
    import copy

    model = tiny("llama")
    budget = 2 * smallest(model)
    cache = quiet(model, budget=budget)
    feed(model, cache, tokens(500), [100] * 5)
    new = copy.deepcopy(cache)
    assert new.budget == budget
    for i in range(400):
        feed(model, new, tokens(1, seed=i), [1])
        assert allocated(new) <= budget
    check_log(new)


class Stubborn:
    """A policy that does what it is told to test."""

    name = "stubborn"

    def __init__(self, action: str | None) -> None:
        self.action = action
        self.asked = 0

    def decide(self, state: State, candidates: Any) -> Decision:
        self.asked += 1
        if self.action is None:
            raise RuntimeError("no idea")
        return Decision(parse_action(self.action), "told so")


@pytest.mark.parametrize("action", [None, "evict:h2o@0.50", "evict:sinks_window@rows=3", "keep"])
def test_a_policy_that_fails_or_chooses_the_impossible_does_not_break_generation(
    tiny: Any, action: str | None
) -> None:
    model, policy = tiny("llama"), Stubborn(action)
    cache = quiet(model, budget=2 * smallest(model), policy=policy)
    logits = feed(model, cache, tokens(700), [100] * 7)
    assert mx.isfinite(logits).all().item()
    assert policy.asked > 0
    codes = {r.get("code") for r in cache.log.records}
    expected = {None: "policy_failed", "keep": "budget_exceeded"}.get(action, "policy_chose_infeasible")
    assert expected in codes
    assert all(one.rows == 700 for one in held_of(cache))


def test_candidates_hold_the_whole_of_a_with_reasons_for_what_is_not_feasible(tiny: Any) -> None:
    seen: list[tuple[Candidate, ...]] = []

    class Curious(Stubborn):
        def decide(self, state: State, candidates: Any) -> Decision:
            seen.append(tuple(candidates))
            return super().decide(state, candidates)

    model = tiny("gpt_oss")
    cache = quiet(model, budget=2 * smallest(model), policy=Curious("keep"))
    feed(model, cache, tokens(900), [300] * 3)
    assert seen
    for candidate in seen[-1]:
        assert candidate.feasible == (not candidate.reasons)
        if "quant:affine," in str(candidate.action):
            texts = [reason.text for reason in candidate.reasons]
            assert any("sinks" in text or "not probed" in text for text in texts), texts
    assert any(c.feasible and c.action.lossy for c in seen[-1])


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        ("1", 1),
        ("512MB", 512 * 10**6),
        ("2 GB", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        (" 3kib ", 3072),
        ("7 b", 7),
        ("1tb", 10**12),
    ],
)
def test_amounts_of_memory_are_read_as_people_write_them(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "2 PB", "-1", "1,5GB", "0", "0.0001kb", 0, -5, True, 2.0, None, "nan"]
)
def test_what_is_no_amount_of_memory_is_refused_by_value(text: Any) -> None:
    with pytest.raises(BudgetError, match=re.escape(repr(text))):
        parse_bytes(text)


def machine(**fields: Any) -> Snapshot:
    return Snapshot(
        monotonic_seconds=0.0,
        unix_seconds=0.0,
        platform="test",
        pressure_level=PressureLevel.NORMAL,
        **fields,
    )


@pytest.mark.parametrize(
    ("budget", "fields", "nbytes"),
    [
        ("40%", {"gpu_working_set_bytes": 1000, "memory_total_bytes": 5000}, 400),
        (" 12.5 % ", {"memory_total_bytes": 8000}, 1000),
        ("100%", {"memory_limit_bytes": 300, "memory_total_bytes": 8000}, 300),
        ("auto", {"gpu_working_set_bytes": 1000, "mlx_active_bytes": 400}, 300),
        ("AUTO", {"gpu_working_set_bytes": 1000, "memory_available_bytes": 100}, 50),
        ("auto", {"memory_total_bytes": 1000, "mlx_active_bytes": 2000}, 1),
        ("2 kB", {}, 2000),
        (77, {}, 77),
    ],
)
def test_shares_and_auto_are_of_what_mlx_may_use(
    budget: int | str, fields: dict[str, int], nbytes: int
) -> None:
    assert budget_nbytes(budget, lambda: machine(**fields)) == nbytes


@pytest.mark.parametrize(
    ("budget", "read", "says"),
    [
        ("40%", lambda: None, "telemetry, which is off"),
        ("auto", lambda: None, "telemetry, which is off"),
        ("40%", lambda: machine(unknown={"memory_total_bytes": "no /proc"}), "no /proc"),
        ("0%", lambda: machine(memory_total_bytes=10), "not between 0% and 100%"),
        ("101%", lambda: machine(memory_total_bytes=10), "not between 0% and 100%"),
        ("-5%", lambda: machine(memory_total_bytes=10), "cannot read '-5%'"),
    ],
)
def test_a_share_of_what_is_not_known_is_refused(budget: str, read: Any, says: str) -> None:
    with pytest.raises(BudgetError, match=re.escape(says)):
        budget_nbytes(budget, read)


def test_a_share_of_this_machine_becomes_a_number_of_bytes(tiny: Any) -> None:
    cache = LuminaCache(tiny("llama"), budget="1%")
    started = next(r for r in cache.log.records if r["event"] == "session.started")
    whole = started["telemetry"]["memory_limit_bytes"] or started["telemetry"]["memory_total_bytes"]
    if started["telemetry"]["gpu_working_set_bytes"] is None:
        assert cache.budget == started["budget"] == int(whole * 0.01)
    else:
        assert cache.budget == int(started["telemetry"]["gpu_working_set_bytes"] * 0.01)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (789, "789 B"),
        (1000, "1.00 kB"),
        (45_600_000, "45.6 MB"),
        (1_230_000_000, "1.23 GB"),
        (0, "0 B"),
        (-5000, "-5.00 kB"),
    ],
)
def test_amounts_are_printed_in_decimal_units(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_where_codecs_fail_when_they_are_carried_out_rows_are_dropped_instead(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong with what was chosen, the budget is held."""

    def broken(self: Any, layout: Any) -> Any:
        raise RuntimeError("a codec that does not work here")

    model = tiny("llama")
    with quiet(model, policy="off") as cache:
        feed(model, cache, tokens(1000), [1000])
        half = cache.nbytes // 2
    with quiet(model, budget=half, guard=False) as cache:
        feed(model, cache, tokens(100), [100])
        monkeypatch.setattr(KVCache, "reencode", broken)  # not before the model was probed
        for _ in range(10):
            feed(model, cache, tokens(100), [100])
            assert cache.nbytes <= half
        feed(model, cache, tokens(30), [1] * 30)
        assert cache.nbytes <= half
        tried = [r["chosen"] for r in cache.log.records if r["event"] == "decision"]
        warnings = [r["code"] for r in cache.log.records if r["event"] == "warning"]
    assert sum("quant:" in one for one in tried) >= 2, tried
    assert "action_failed" in warnings
    assert any(one.startswith("evict:") for one in tried)
