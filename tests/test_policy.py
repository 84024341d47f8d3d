"""Score, candidates, and the choice among them."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from lumina_cache import LuminaCache, parse_action
from lumina_cache.actions import Evict, Keep, Quantize
from lumina_cache.backend.capabilities import KEYS, ROW_GATHER, BackendProfile, Outcome, packed_attention
from lumina_cache.estimate import Held, nbytes_allocated
from lumina_cache.policy import Decision, LeastLoss, State, candidates_for, next_layers, score, weigh
from lumina_cache.priors import Quality, expected_kl

LAYERS = (
    Held(
        "layer 0",
        "kv",
        rows=1024,
        capacity=1024,
        offset=1024,
        key_width=192,
        value_width=192,
        itemsize=4,
        count=30,
    ),
)


def profile(*present) -> BackendProfile:
    return BackendProfile("cpu", "0", "0", "test", {c: Outcome(True) for c in present})


EVERYTHING_NATIVE = profile(KEYS, ROW_GATHER, packed_attention(8, 64), packed_attention(4, 64))


def decide(budget: int, known: BackendProfile = EVERYTHING_NATIVE, **state) -> tuple[Decision, dict]:
    at = State(phase="decode", tokens=1, layers=LAYERS, budget=budget, **state)
    candidates = weigh(at, candidates_for(at, 64), known)
    return LeastLoss().decide(at, candidates), {str(c.action): c for c in candidates}


def test_the_full_cache_with_room_to_spare_scores_zero_and_is_kept():
    decision, candidates = decide(10**9)
    assert decision.action == Keep()
    assert candidates["keep"].score.total == 0.0


def test_eight_bits_are_preferred_while_they_fit():
    decision, _ = decide(nbytes_allocated(LAYERS) // 2)
    assert decision.action == Quantize("affine", 8, 8, 64)


def test_four_bits_are_preferred_to_losing_a_quarter_of_the_rows():
    eight = nbytes_allocated(next_layers(LAYERS, 1)) * 9 // 32
    decision, _ = decide(eight * 8 // 10)
    assert decision.action == Quantize("affine", 4, 4, 64)


def test_without_packed_attention_just_as_many_rows_are_dropped_as_needed():
    budget = nbytes_allocated(LAYERS) * 4 // 5
    decision, candidates = decide(budget, profile(KEYS, ROW_GATHER))
    assert isinstance(decision.action, Evict)
    chosen = candidates[str(decision.action)]
    assert chosen.nbytes_next <= budget
    one_more = Evict("sinks_window", rows=decision.action.rows + 1)
    at = State(phase="decode", tokens=1, layers=LAYERS, budget=budget)
    assert weigh(at, [one_more], profile(KEYS, ROW_GATHER))[0].nbytes_next > budget


def test_rows_stay_while_tokens_may_be_taken_back():
    decision, candidates = decide(nbytes_allocated(LAYERS) // 2, rows_must_stay=True)
    assert isinstance(decision.action, Quantize)
    codes = {r.code for c in candidates.values() if isinstance(c.action, Evict) for r in c.reasons}
    assert "rows_must_stay" in codes


def test_when_nothing_fits_the_nearest_is_taken_and_said():
    decision, _ = decide(1000)
    assert "nothing feasible holds" in decision.why


def test_rows_are_not_thrown_away_before_a_chunk_that_passes_the_budget_anyway():
    at = State(phase="prefill", tokens=40_000, layers=LAYERS, budget=nbytes_allocated(LAYERS))
    decision = LeastLoss().decide(at, weigh(at, candidates_for(at, 64), EVERYTHING_NATIVE))
    assert decision.action == Keep()
    assert "after it" in decision.why


def test_an_infeasible_action_is_never_chosen_however_well_it_scores():
    decision, candidates = decide(nbytes_allocated(LAYERS) // 4)
    hadamard = candidates["quant:hadamard,bits=4,group=64"]
    assert not hadamard.feasible
    assert hadamard.score.total > candidates[str(decision.action)].score.total


def test_memory_that_is_not_there_while_converting_makes_an_action_infeasible():
    _, candidates = decide(nbytes_allocated(LAYERS) // 2, available=10)
    reason = next(r for r in candidates["quant:affine,bits=8,group=64"].reasons if r.code == "exceeds_memory")
    assert (reason.wanted, reason.limit) == (1024 * 384 * 9 // 8, 10)


def test_score_adds_its_terms_in_points():
    quality = Quality(0.04, "test")
    at = State(phase=None, tokens=1, layers=LAYERS, budget=1)
    fits, over = (score(quality, overflow=o, weights=at.weights) for o in (False, True))
    assert (fits.quality, fits.risk, fits.total) == (2.0, 0.0, -2.0)
    assert over.total == -102.0
    assert fits.time is None


def test_no_figure_means_no_score():
    unknown = score(Quality(None, "no figure"), overflow=False, weights=State(None, 1, LAYERS, 1).weights)
    assert unknown.total is None


@pytest.mark.parametrize(
    ("share", "more", "less"), [(0.9, 0.0, 0.3), (0.5, 0.7, 0.8), (0.25, 1.0, 1.1), (0.1, 1.1, 2.0)]
)
def test_expected_loss_grows_with_the_share_of_rows_dropped(share, more, less):
    layers = (
        Held("x", "kv", rows=int(1000 * share), capacity=1000, offset=1000, key_width=1, value_width=1),
    )
    kl = expected_kl(layers, None, "sinks_window").kl
    assert more < kl < less


def test_a_decision_can_be_recomputed_from_its_log_line(tiny):
    model = tiny("llama")
    cache = LuminaCache(model, budget=300_000, log=None)
    mx.eval(model(mx.arange(300)[None] % 100, cache=cache))
    cache.nbytes
    record = next(r for r in json.loads(json.dumps(list(cache.log.records))) if r["event"] == "decision")
    weights = record["state"]["weights"]
    scored = {}
    for candidate in record["candidates"]:
        terms = candidate["score"]
        risk = 100.0 * (candidate["nbytes_next"] > record["state"]["budget"])
        assert terms["R"] == risk
        if terms["kl"] is not None:
            assert terms["total"] == -(terms["kl"] / 0.02 + weights["risk"] * risk)
            if candidate["feasible"]:
                scored[candidate["action"]] = terms["total"]
    assert scored[record["chosen"]] == max(scored.values())


class TestAUsersOwnPolicy:
    """Ten lines, and its mistakes do not break generation."""

    class Always:
        name = "always"

        def __init__(self, text: str) -> None:
            self.action = parse_action(text)

        def decide(self, state, candidates):
            return Decision(self.action, "because")

    class Broken:
        name = "broken"

        def decide(self, state, candidates):
            raise ZeroDivisionError("oops")

    def run(self, model, policy) -> LuminaCache:
        cache = LuminaCache(model, budget=300_000, policy=policy)
        for _ in range(3):
            mx.eval(model(mx.arange(1, 100)[None], cache=cache))
        return cache

    def test_is_followed_when_feasible(self, tiny):
        cache = self.run(tiny("llama"), self.Always("evict:sinks_window@0.50"))
        assert "evict:sinks_window@0.50" in [
            r["action"] for r in cache.log.records if r["event"] == "action.applied"
        ]

    @pytest.mark.parametrize("policy", [Always("evict:h2o@0.50"), Broken()], ids=["infeasible", "raises"])
    def test_mistakes_are_logged_and_everything_is_kept(self, tiny, policy):
        cache = self.run(tiny("llama"), policy)
        assert cache.observe().layers[0].rows == 297
        codes = {r["code"] for r in cache.log.records if r["event"] == "warning"}
        assert codes & {"policy_chose_infeasible", "policy_failed"}
