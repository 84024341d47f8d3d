"""The query bank: what is captured is what the model asked, and rows are ranked by it as the formulas say."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from harness import feed, quiet, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as stock
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

import lumina_cache
from lumina_cache.actions import parse_action
from lumina_cache.apply import execute, held
from lumina_cache.backend.attention import attention_hook
from lumina_cache.backend.capabilities import QUERY_STATISTICS, Rung
from lumina_cache.bank import (
    Foreseen,
    LayerStatistics,
    QueryBank,
    bank_path,
    banks_of,
    find_bank,
    read_bank,
    write_bank,
)
from lumina_cache.bank.home import SHIPPED
from lumina_cache.cache import LuminaCache
from lumina_cache.errors import ActionInfeasibleError, ObservationError, QueryBankError
from lumina_cache.estimate import scoring_nbytes
from lumina_cache.fingerprint import fingerprint
from lumina_cache.lab.bank import CaptureSettings, capture, own_texts
from lumina_cache.lab.bank import command as command_module
from lumina_cache.lab.bank.command import calibrate_queries_command
from lumina_cache.lab.corpus import Document
from lumina_cache.lab.evaluate.documents import DOMAINS
from lumina_cache.lab.models import LoadedModel, load_smollm2
from lumina_cache.lab.tiny import SPECS, build
from lumina_cache.layers import KVCache, adopt, leaves
from lumina_cache.methods import METHODS
from lumina_cache.scorers.banked import BANKED, ExpectedBank, QFilters, QueryBankValues
from lumina_cache.scorers.banked import QueryBank as QueryBankScorer
from lumina_cache.scorers.banked.base import blocks
from lumina_cache.steps import StepTracker

LENGTH, SKIPPED, CHUNK = 48, 4, 20
#: Every query of one document but the first few.
ALL = CaptureSettings(
    queries=LENGTH - SKIPPED,
    directions=64,
    documents=1,
    length=LENGTH,
    shortest=40,
    skipped=SKIPPED,
    chunk=CHUNK,
)
WORDS = "The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. "
every = pytest.mark.parametrize("name", list(BANKED))


class Letters:
    """A tokenizer of bytes, without a token that begins a sequence."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [b % 96 for b in text.encode()]


def text(repeat: int = 4, name: str = "words") -> Document:
    return Document(name, "text", WORDS * repeat, "test", "CC0")


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(model, Letters(), "tiny", fingerprint(model), mx.float32, "built in the test")


@pytest.fixture(autouse=True)
def _own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def small_llama(**other: Any) -> Any:
    """A model of its own, so that no other test's cache knows it."""
    mx.random.seed(other.pop("seed", 3))
    args = llama.ModelArgs(
        model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=96, head_dim=32, tie_word_embeddings=True, **other,
    )  # fmt: skip
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


class Live:
    """The queries that attention is handed, all of one document."""

    def __init__(self) -> None:
        self.queries: dict[str, list[mx.array]] = {}

    def observe(self, layer: Any, queries: mx.array, *_: Any) -> tuple[mx.array, ...]:
        self.queries.setdefault(layer.name, []).append(mx.array(queries))
        return (self.queries[layer.name][-1],)


def live_queries(model: Any, ids: list[int]) -> dict[str, np.ndarray]:
    """(Hq, T, D) by layer."""
    live, steps = Live(), StepTracker(name="test")
    entries = [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))]
    with attention_hook(model) as hook:
        for layer in leaves(entries):
            hook.observe(layer, live)
        for first in range(0, len(ids), CHUNK):
            mx.eval(model(mx.array(ids[first : first + CHUNK])[None], cache=entries))
    return {name: np.array(mx.concatenate(q, axis=2)[0]) for name, q in live.queries.items()}


def assert_captured_as_asked(model: Any, bank: QueryBank) -> None:
    """Every stored query, turned to where it came from, is one that the model asked there."""
    ids = Letters().encode(WORDS * 4)[:LENGTH]
    asked, modules = live_queries(model, ids), dict(model.named_modules())
    for name, one in bank.layers.items():
        wanted, rotation = asked[name][:, SKIPPED:], modules[one.rotation]
        scale = np.abs(wanted).max()
        found = set()
        for i in range(one.queries.shape[1]):
            # Which of the document's positions it is from is not stored: it fits one of them.
            plain = mx.broadcast_to(one.queries[None, :, i : i + 1], (1, one.n_heads, LENGTH, one.dim))
            turned = np.array(rotation(plain, 0)[0, :, SKIPPED:])
            apart = np.abs(turned - wanted).max(axis=(0, 2)) / scale
            assert apart.min() < 3e-3, name  # stored in 11 bits
            found |= set(np.flatnonzero(apart < 3e-3).tolist())
        assert found == set(range(LENGTH - SKIPPED)), name


ROPES = {
    "plain": {},
    "traditional": {"rope_traditional": True},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "max_position_embeddings": 256,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_stored_queries_turned_back_to_their_place_are_those_that_were_asked(rope: str) -> None:
    model = small_llama(**ROPES[rope])
    bank = capture(loaded(model), [text()], ALL)
    assert set(bank.layers) == {"layer 0", "layer 1"}
    assert not bank.refused
    assert_captured_as_asked(model, bank)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "phi3"])
def test_other_architectures_are_captured_as_asked(tiny: Any, name: str) -> None:
    model = tiny(name)
    bank = capture(loaded(model), [text()], ALL)
    assert bank.layers
    assert_captured_as_asked(model, bank)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_architecture_is_captured_or_says_why_not(name: str) -> None:
    model = build(name)
    steps = StepTracker(name="test")
    entries = [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))]
    rows = {x.name for x in leaves(entries) if isinstance(x, KVCache)}
    try:
        bank = capture(loaded(model), [text()], ALL)
    except QueryBankError as error:
        assert str(error).startswith("no layer's queries can be captured: ")  # noqa: PT017
        return
    assert set(bank.layers) | set(bank.refused) >= rows - _unused(model)
    assert all(bank.refused.values())
    assert_captured_as_asked(model, bank)


def _unused(model: Any) -> set[str]:
    """Entries that the model makes and never fills."""
    steps = StepTracker(name="test")
    entries = [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))]
    mx.eval(model(mx.array([[1, 2, 3]]), cache=entries))
    return {x.name for x in leaves(entries) if isinstance(x, KVCache) and not x.rows}


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_attention_that_cannot_be_seen_or_reads_other_keys_is_refused(tiny: Any, name: str) -> None:
    with pytest.raises(QueryBankError, match=r"no layer's queries can be captured: \S+"):
        capture(loaded(tiny(name)), [text()], ALL)


# -- statistics -----------------------------------------------------------------------------------------------------------


def test_directions_and_moments_are_those_of_all_queries_of_all_documents() -> None:
    model = small_llama()
    two = replace(ALL, documents=2, queries=6)
    bank = capture(loaded(model), [text(4), Document("b", "text", WORDS[20:] * 4, "", "")], two)
    rope = model.model.layers[0].self_attn.rope
    live = [
        live_queries(model, Letters().encode(t)[:LENGTH])["layer 0"][:, SKIPPED:]
        for t in (WORDS * 4, WORDS[20:] * 4)
    ]
    rotated = np.concatenate(live, axis=1).astype(np.float64)
    wanted = []
    for head in rotated:
        direction = np.linalg.svd(head, full_matrices=False)[2][0]
        wanted.append(direction * np.sign((head @ direction).mean()))
    one = bank.layers["layer 0"]
    np.testing.assert_allclose(
        np.array(one.filters), np.mean(np.reshape(wanted, (2, 2, -1)), axis=1), atol=2e-4
    )
    plain = []
    for x in live:
        angles = rope(mx.zeros((1, 1, 1, 32)), 0)  # the module is the model's own
        assert angles.shape == (1, 1, 1, 32)
        turned = [
            np.array(rope(mx.array(x[None, :, i : i + 1]), -(SKIPPED + i)))[0] for i in range(x.shape[1])
        ]
        plain.append(np.concatenate(turned, axis=1))
    queries = np.concatenate(plain, axis=1).astype(np.float64)
    assert one.mean is not None
    assert one.spread is not None
    np.testing.assert_allclose(np.array(one.mean), queries.mean(axis=1), atol=1e-4)
    spread = np.array(one.spread).astype(np.float64)
    for head, s in zip(queries, spread, strict=True):
        np.testing.assert_allclose(s.T @ s, np.cov(head.T, bias=True), atol=2e-3 * np.abs(head).max() ** 2)


def test_queries_come_from_all_documents_alike_and_the_seed_says_which() -> None:
    model = small_llama()
    docs = [Document(str(i), "text", WORDS[i:] * 3, "", "") for i in range(4)]
    few = replace(ALL, documents=4, queries=6, length=64, directions=0)
    one, same, other = (capture(loaded(model), docs, replace(few, seed=s)) for s in (1, 1, 2))
    for name, layer in one.layers.items():
        assert layer.queries.shape == (4, 6, 32)
        assert mx.array_equal(layer.queries, same.layers[name].queries)
        assert not mx.array_equal(layer.queries, other.layers[name].queries)
        assert layer.mean is None
    assert [d["name"] for d in one.provenance["documents"]] == ["0:0", "1:0", "2:0", "3:0"]
    a, b = one.layers.values()
    assert not mx.allclose(a.queries, b.queries)


def test_texts_that_are_too_short_are_refused() -> None:
    with pytest.raises(QueryBankError, match="128 tokens"):
        capture(loaded(small_llama()), [Document("a", "text", "short", "", "")])


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"queries": 0}, {"skipped": 200}, {"length": 100}):
        with pytest.raises(QueryBankError, match=next(iter(wrong))):
            CaptureSettings(**wrong)


def test_the_texts_at_hand_are_none_that_the_evaluation_uses() -> None:
    evaluated = {maker().text for makers in DOMAINS.values() for maker in makers()}
    own = own_texts()
    assert {t.domain for t in own} == {"prose", "code"}
    for one in own:
        for part in one.text.split("\n\n"):
            if len(part) > 200:
                assert not any(part in other for other in evaluated), one.name


# -- scores ---------------------------------------------------------------------------------------------------------------

ROPE = nn.RoPE(8)


@dataclass(frozen=True)
class Case:
    """A layer's rows and what is known of its queries, as NumPy has them."""

    queries: np.ndarray  # (Hq, N, D)
    keys: np.ndarray  # (B, H, T, D)
    values: np.ndarray
    sinks: np.ndarray | None
    offset: int
    scale: float = 0.4

    @property
    def foreseen(self) -> Foreseen:
        rng = np.random.default_rng(5)
        heads, _, dim = self.queries.shape
        kv = self.keys.shape[1]
        return Foreseen(
            LayerStatistics(
                queries=mx.array(self.queries),
                filters=mx.array(rng.normal(size=(kv, dim)).astype(np.float32)),
                scale=self.scale,
                rotation="rope",
                turned_at=9,
                turned=mx.zeros(dim),
                mean=mx.array(rng.normal(size=(heads, dim)).astype(np.float32)),
                spread=mx.array(0.5 * rng.normal(size=(heads, 3, dim)).astype(np.float32)),
                sinks=None if self.sinks is None else mx.array(self.sinks),
            ),
            ROPE,
        )

    def turned(self, width: int) -> np.ndarray:
        """(Hq, N, D): query i of a round of n goes to ⌊(i of the round)·width/n⌋ positions behind the rows."""
        n = self.queries.shape[1]
        rounds = -(-n // width)
        each = -(-n // rounds)
        out = [
            np.array(
                ROPE(mx.array(self.queries[None, :, i : i + 1]), self.offset + i // rounds * width // each)
            )[0]
            for i in range(n)
        ]
        return np.concatenate(out, axis=1).astype(np.float64)

    def weights(self, width: int) -> np.ndarray:
        """(B, H, G·N, T)."""
        batch, kv, rows, _ = self.keys.shape
        group = self.queries.shape[0] // kv
        logits = np.einsum(
            "hnd,bhtd->bhnt", self.scale * self.turned(width), np.repeat(self.keys, group, axis=1)
        )
        if self.sinks is not None:
            extra = np.broadcast_to(self.sinks[None, :, None, None], (*logits.shape[:3], 1))
            logits = np.concatenate([logits, extra], axis=-1)
        e = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return (e / e.sum(axis=-1, keepdims=True))[..., :rows].reshape(batch, kv, -1, rows)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n, rows = draw(st.integers(1, 20)), draw(st.integers(1, 30))

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    sinks = normal(kv * group) if draw(st.booleans()) else None
    return Case(
        2 * normal(kv * group, n, 8), 2 * normal(batch, kv, rows, 8), normal(batch, kv, rows, 5), sinks,
        draw(st.integers(30, 2000)),
    )  # fmt: skip


def scored(scorer: Any, case: Case) -> np.ndarray:
    got = scorer.scores(case.foreseen, mx.array(case.keys), mx.array(case.values), case.offset)
    assert got.dtype == mx.float32
    assert got.shape == case.keys.shape[:3]
    return np.array(got)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 12))
def test_queries_are_turned_to_positions_spread_behind_the_rows(case: Case, width: int) -> None:
    got = case.foreseen.ahead(case.offset, width)
    assert got.shape == (1, *case.queries.shape)
    np.testing.assert_allclose(np.array(got[0]), case.turned(width), atol=2e-4)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 12))
def test_the_bank_ranks_rows_by_the_mean_weight_of_its_queries(case: Case, width: int) -> None:
    got = scored(QueryBankScorer(ahead=width), case)
    weights = case.weights(width)
    np.testing.assert_allclose(got, weights.mean(axis=2), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 12))
def test_the_bank_ranks_rows_by_how_far_the_output_would_move(case: Case, width: int) -> None:
    got = scored(QueryBankValues(ahead=width), case)
    weights = case.weights(width)
    output = weights @ case.values.astype(np.float64)
    far = np.linalg.norm(case.values[:, :, None] - output[:, :, :, None], axis=-1)
    wanted = (weights * far / np.linalg.norm(output, axis=-1)[..., None]).mean(axis=2)
    # Of a row that is all of the output nothing but the rounding of squares is left.
    longest = np.linalg.norm(case.values, axis=-1).max() / np.linalg.norm(output, axis=-1).min()
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3 * longest)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 12))
def test_the_bank_ranks_rows_by_the_attention_that_normal_queries_are_expected_to_pay(
    case: Case, width: int
) -> None:
    got, known = scored(ExpectedBank(ahead=width), case), case.foreseen.statistics
    turn = np.mean(
        [np.array(ROPE(mx.eye(8)[None, :, None], case.offset + i))[0, :, 0] for i in range(width)], axis=0
    )
    batch, kv, rows, _ = case.keys.shape
    wanted = np.zeros((batch, kv, rows))
    for head, (mean, spread) in enumerate(zip(np.array(known.mean), np.array(known.spread), strict=True)):
        k = case.keys[:, head * kv // known.n_heads].astype(np.float64)
        along = spread @ turn
        logs = case.scale * k @ (mean @ turn) + 0.5 * case.scale**2 * ((k @ along.T) ** 2).sum(-1)
        e = np.exp(logs - logs.max(-1, keepdims=True))
        wanted[:, head * kv // known.n_heads] += e / e.sum(-1, keepdims=True) * kv / known.n_heads
    np.testing.assert_allclose(got, wanted, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_q_filters_rank_rows_by_how_far_along_they_point(case: Case) -> None:
    wanted = np.einsum("bhtd,hd->bht", case.keys, np.array(case.foreseen.statistics.filters))
    np.testing.assert_allclose(scored(QFilters(), case), wanted, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(cases(), st.integers(1, 4000))
def test_weights_do_not_depend_on_how_many_queries_are_taken_at_a_time(case: Case, limit: int) -> None:
    queries, keys = case.foreseen.ahead(case.offset, 8), mx.array(case.keys)
    sinks = None if case.sinks is None else mx.array(case.sinks)
    total = sum(np.array(w).sum(axis=2) for w in blocks(queries, keys, case.scale, sinks, limit))
    np.testing.assert_allclose(total, case.weights(8).sum(axis=2), atol=1e-4)


def test_values_without_channels_can_be_ranked() -> None:
    case = Case(
        np.ones((2, 3, 8), np.float32), np.ones((1, 2, 5, 8), np.float32), np.zeros((1, 2, 5, 0)), None, 7
    )
    for scorer in BANKED.values():
        assert np.isfinite(scored(scorer(), case)).all()


def test_a_bank_without_covariance_says_so() -> None:
    case = Case(
        np.ones((2, 3, 8), np.float32), np.ones((1, 2, 5, 8), np.float32), np.ones((1, 2, 5, 4)), None, 7
    )
    known = case.foreseen
    bare = replace(known, statistics=replace(known.statistics, spread=None))
    with pytest.raises(ObservationError, match="no mean and no covariance"):
        ExpectedBank().scores(bare, mx.array(case.keys), mx.array(case.values), 7)


@every
def test_the_catalogue_says_that_a_bank_is_needed(name: str) -> None:
    method = METHODS["evict", name]
    assert method is BANKED[name].method
    assert QUERY_STATISTICS in method.requires
    assert parse_action(f"evict:{name}@0.50").rung == Rung.CACHE


# -- files ----------------------------------------------------------------------------------------------------------------


def some_bank(model: Any) -> QueryBank:
    return capture(loaded(model), [text()], replace(ALL, queries=6, directions=4))


def test_a_bank_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    bank = some_bank(small_llama())
    path = tmp_path / "deep" / "bank.safetensors"
    write_bank(bank, path)
    got = read_bank(path)
    assert (got.fingerprints, got.refused, got.provenance) == (bank.fingerprints, {}, bank.provenance)
    assert got.nbytes == bank.nbytes
    assert path.stat().st_mode & 0o077 == 0
    assert [p.name for p in path.parent.iterdir()] == ["bank.safetensors"]
    for name, one in bank.layers.items():
        other = got.layers[name]
        assert (other.scale, other.rotation, other.turned_at) == (one.scale, one.rotation, one.turned_at)
        for what in ("queries", "filters", "turned", "mean", "spread"):
            mine, theirs = getattr(one, what), getattr(other, what)
            # Captured queries are what float16 holds already.
            np.testing.assert_allclose(
                np.array(mine), np.array(theirs), rtol=0 if what == "queries" else 1e-3
            )


@pytest.mark.parametrize("damage", ["cut", "nothing", "other kind", "other schema", "no layer", "misfit"])
def test_a_file_that_is_no_bank_is_refused_with_a_remedy(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "bank.safetensors"
    write_bank(some_bank(small_llama()), path)
    arrays, metadata = mx.load(str(path), return_metadata=True)
    plain = json.loads(metadata["lumina_cache"])
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:200])
        case "nothing":
            path.write_bytes(b"")
        case "other kind":
            plain["kind"] = "something"
        case "other schema":
            plain["schema"] = 99
        case "no layer":
            del arrays["layer 1/queries"]
        case "misfit":
            arrays["layer 1/filters"] = mx.zeros((3, 5))
    if damage not in ("cut", "nothing"):
        mx.save_safetensors(str(path), arrays, {"lumina_cache": json.dumps(plain)})
    with pytest.raises(QueryBankError, match="calibrate-queries again, or remove the file"):
        read_bank(path)


def test_a_bank_is_found_by_the_models_fingerprint_and_never_used_for_another() -> None:
    mine, other = small_llama(seed=1), small_llama(seed=2)
    print_of = fingerprint(mine)
    assert find_bank(print_of) is None
    bank = some_bank(mine)
    write_bank(bank, bank_path(print_of))
    found = find_bank(print_of)
    assert found is not None
    assert found.fingerprints == (print_of,)
    assert find_bank(fingerprint(other)) is None
    shutil.copy(bank_path(print_of), bank_path(fingerprint(other)))
    with pytest.raises(QueryBankError, match="another model"):
        find_bank(fingerprint(other))
    banks = banks_of(other)
    assert banks is not None
    with pytest.raises(QueryBankError, match="another model"):
        banks.give(bank)
    cache = quiet(other)
    feed(other, cache, tokens(40), [40])
    with pytest.raises(ActionInfeasibleError, match="another model"):
        cache.apply("evict:query_bank@0.50")


def test_a_rotation_that_changed_since_is_noticed() -> None:
    model = small_llama()
    write_bank(some_bank(model), bank_path(fingerprint(model)))
    model.model.layers[1].self_attn.rope = nn.RoPE(32, base=77.0)
    cache = quiet(model)
    feed(model, cache, tokens(40), [40])
    with pytest.raises(
        ActionInfeasibleError, match=r"layer 1: model\.layers\.1\.self_attn\.rope rotates otherwise"
    ):
        cache.apply("evict:query_bank@0.50")


# -- caches ---------------------------------------------------------------------------------------------------------------


@every
def test_without_a_bank_the_action_is_refused_and_says_how_to_get_one(name: str) -> None:
    model = small_llama()
    cache = quiet(model)
    feed(model, cache, tokens(40), [40])
    with pytest.raises(ActionInfeasibleError, match=r"QUERY_STATISTICS: .*lumina-cache calibrate-queries"):
        cache.apply(f"evict:{name}@0.50")
    assert cache[0].rows == 40
    with pytest.raises(ActionInfeasibleError, match="calibrate-queries"):
        LuminaCache(model, plan=f"evict:{name}@0.50", telemetry=False)
    with pytest.raises(ActionInfeasibleError, match="calibrate-queries"):
        execute([copy.deepcopy(cache[0])], parse_action(f"evict:{name}@0.50"))


@every
@pytest.mark.parametrize("rung", ["cache", "hook"])
def test_with_a_bank_the_rows_of_best_score_stay(name: str, rung: str) -> None:
    model = small_llama()
    write_bank(some_bank(model), bank_path(fingerprint(model)))
    with LuminaCache(model, policy="off", telemetry=False, rung=rung) as cache:
        feed(model, cache, tokens(60), [40, 20])
        banks = banks_of(model)
        assert banks is not None
        wanted = []
        for layer in cache:
            scores = np.array(BANKED[name]().scores(banks.of(layer.name), *layer.keys_and_values(), 60))
            scores[..., :4] = np.inf
            scores[..., -5:] = np.inf
            wanted.append(np.sort(np.argsort(scores, axis=-1)[..., -20:], axis=-1))
        done = cache.apply(f"evict:{name}@rows=20,recent=5")
        assert done is not None
        assert done.after.nbytes_allocated == done.predicted_allocated
        for layer, kept in zip(cache, wanted, strict=True):
            assert np.array_equal(layer.positions(), kept)
        assert not np.array_equal(wanted[0], wanted[1])
        fork = copy.deepcopy(cache)
        fork.apply(f"evict:{name}@rows=12+quant:hadamard,bits=4,group=32")
        assert {layer.rows for layer in fork} == {12}
        assert {layer.rows for layer in cache} == {20}
        fork.close()


def test_at_rung_native_there_is_no_bank() -> None:
    model = small_llama()
    write_bank(some_bank(model), bank_path(fingerprint(model)))
    cache = LuminaCache(model, policy="off", telemetry=False, rung="native")
    feed(model, cache, tokens(40), [40])
    with pytest.raises(ActionInfeasibleError, match="QUERY_STATISTICS: this cache was opened at rung native"):
        cache.apply("evict:query_bank@0.50")


def test_rows_are_ranked_for_where_the_text_is_now_when_an_eviction_is_repeated() -> None:
    model = small_llama()
    write_bank(some_bank(model), bank_path(fingerprint(model)))
    cache = LuminaCache(model, plan="evict:query_bank@rows=16,slack=4", telemetry=False)
    feed(model, cache, tokens(60), [40] + [1] * 20)
    assert all(16 <= layer.rows <= 20 for layer in cache)
    applied = [r for r in cache.log.records if r["event"] == "action.applied"]
    assert len(applied) > 2


# -- the command ----------------------------------------------------------------------------------------------------------


def test_the_command_puts_a_bank_where_caches_find_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = small_llama()
    monkeypatch.setattr(command_module, "load_model", lambda spec: loaded(model))
    cache = quiet(model)
    feed(model, cache, tokens(40), [40])
    with pytest.raises(ActionInfeasibleError, match="calibrate-queries"):
        cache.apply("evict:query_bank@0.50")
    mine = tmp_path / "mine.txt"
    mine.write_text(WORDS * 4)
    calibrate_queries_command(
        model=None, texts=[mine], settings=replace(ALL, queries=5, directions=0), out=None, as_json=True
    )
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(bank_path(fingerprint(model)))
    assert said["layers"]["layer 1"] == {
        "heads": 4,
        "queries": 5,
        "rotation": "model.layers.1.self_attn.rope",
    }
    assert cache.apply("evict:query_bank@0.50") is not None
    with pytest.raises(QueryBankError, match="cannot write"):
        calibrate_queries_command(
            model=None, texts=[mine], settings=replace(ALL, queries=5), out=mine / "bank", as_json=False
        )


@pytest.mark.slow
def test_the_embedded_model_has_a_bank_that_ships_with_the_library() -> None:
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        model, _ = load_smollm2(dtype)
        banks = banks_of(model)
        assert banks is not None
        assert banks.lacking is None
        assert all(banks.why_not(f"layer {i}") is None for i in range(30))


def test_what_ships_is_small_and_says_where_it_is_from() -> None:
    path = Path(lumina_cache.__file__).parent / "data" / "queries" / SHIPPED
    assert path.stat().st_size < 1_000_000
    bank = read_bank(path)
    assert len(bank.layers) == 30
    evaluated = {maker().name for makers in DOMAINS.values() for maker in makers()}
    texts = bank.provenance["texts"]
    assert not evaluated & {name for one in texts for name in one["name"].split("+")}
    assert all(one["sha256"] for one in texts)


@every
@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="measured on the CPU's allocator")
def test_ranking_takes_no_more_memory_than_is_predicted(name: str) -> None:
    rng = np.random.default_rng(0)
    steps = StepTracker(name="test")
    layer = adopt(stock.KVCache(), steps, "layer 0")
    rows = 6000
    layer.update_and_fetch(
        *(mx.array(rng.normal(size=(1, 2, rows, 64)).astype(np.float32)) for _ in range(2))
    )
    known = LayerStatistics(
        queries=mx.array(rng.normal(size=(8, 64, 64)).astype(np.float32)),
        filters=mx.ones((2, 64)),
        scale=0.125,
        rotation="rope",
        turned_at=1,
        turned=mx.zeros(64),
        mean=mx.zeros((8, 64)),
        spread=mx.array(rng.normal(size=(8, 8, 64)).astype(np.float32)),
    )
    foreseen = Foreseen(known, nn.RoPE(64))
    keys, values = layer.keys_and_values()
    mx.eval(keys, values, known.queries, known.spread, layer.state)
    predicted = scoring_nbytes(held(layer), parse_action(f"evict:{name}@0.50"))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(BANKED[name]().scores(foreseen, keys, values, rows))
    measured = mx.get_peak_memory() - before
    assert 0 < measured <= predicted
    assert predicted < 6 * measured + 2**20
