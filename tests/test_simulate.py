"""The simulator against what really runs, and where nothing runs against references made otherwise."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache.actions import Evict, parse_action
from lumina_cache.backend.attention import attention_hook
from lumina_cache.backend.capabilities import Rung
from lumina_cache.codecs import AffineFetch, Layout
from lumina_cache.errors import ActionSyntaxError, SimulationError
from lumina_cache.gap.records import Simulated
from lumina_cache.lab.compare import kl_and_agreement, log_softmax
from lumina_cache.lab.evaluate import Plan, parse_subject
from lumina_cache.lab.evaluate.documents import EvalDocument
from lumina_cache.lab.evaluate.measure import Bench, log_probabilities
from lumina_cache.lab.simulate import Simulator, parse, space
from lumina_cache.lab.simulate.choose import evicted, pyramid
from lumina_cache.lab.simulate.fetch import PAGE, shown
from lumina_cache.lab.simulate.held import LayerRows, mixed, of_layer
from lumina_cache.lab.simulate.seal import NEVER, sealed_after
from lumina_cache.lab.tiny import SPECS, build
from lumina_cache.layers import KVCache, leaves
from lumina_cache.profile import default_profile
from lumina_cache.rows import RowStore
from lumina_cache.scorers.observed import OBSERVED

CONTEXT = 200

PLAN = Plan(
    contexts=((CONTEXT, 1),),
    tests=("T1",),
    scored=80,
    block=8,
    chunk=64,
    short_context=8,
    depths=(0.2,),
    cue=4,
    copied=8,
)

CODECS = (
    "quant:affine,bits=8,group=32",
    "quant:affine,bits=4,group=32",
    "quant:affine,bits=3,group=32",
    "quant:affine,bits=2,group=32",
    "quant:affine,kbits=4,vbits=2,group=32",
    "quant:affine_fetch,bits=4,group=32",
    "quant:affine_fetch,bits=3,group=32,residual=20,sinks=5",
    "quant:hadamard,bits=3,group=32",
    "quant:hadamard_packed,bits=3,group=32",
    "quant:kivi,bits=2,group=32",
    "quant:kivi,bits=4,group=32,residual=0",
    "quant:kivi_packed,bits=4,group=32",
    "quant:kivi_hadamard,bits=3,group=32",
    "quant:mxfp4,bits=4,group=32",
)

EVICTIONS = (
    "evict:sinks_window@0.50",
    "evict:keydiff@0.25",
    "evict:key_norm@0.50",
    "evict:leverage@0.50",
    "evict:random@0.50",
    "evict:random@0.50,seed=2",
    "evict:h2o@0.25",
    "evict:h2o_mean@0.50",
    "evict:vatp@0.50",
    "evict:snapkv@0.50",
    "evict:tova@0.25",
    "evict:expected_attention@0.50",
    "evict:keydiff@0.50,recent=16",
    "evict:snapkv@rows=77,sinks=0",
)

TOGETHER = (
    "evict:keydiff@0.50+quant:hadamard,bits=4,group=32",
    "evict:snapkv@0.50+quant:kivi,bits=4,group=32",
    "evict:h2o_mean@0.25+quant:affine,bits=4,group=32",
    "quant:kivi,bits=4,group=32+evict:keydiff@0.50",
    "quant:hadamard,bits=4,group=32+evict:snapkv@0.50",
    "evict:keydiff@0.75+evict:snapkv@0.50",
    "quant:affine,bits=8,group=32+quant:affine,bits=4,group=32",
    "0:evict:keydiff@0.50;1:quant:affine,bits=4,group=32",
    "0:quant:kivi,bits=2,group=32",
)

FREE = ("keep", "reclaim", "reserve:512", "reserve:512+evict:random@0.50", "evict:random@0.50+reclaim")

RUNNABLE = (*CODECS, *EVICTIONS, *TOGETHER, *FREE)

#: What is tried on every architecture: one of each kind of rows.
SOME = (
    "quant:affine,bits=4,group=32",
    "quant:hadamard,bits=3,group=32",
    "quant:kivi,bits=4,group=32",
    "quant:mxfp4,bits=4,group=32",
    "evict:sinks_window@0.50",
    "evict:random@0.50",
    "evict:keydiff@0.50+quant:kivi_hadamard,bits=4,group=32",
    "evict:h2o@0.25",
    "evict:snapkv@0.50",
)


class _NoWords:
    """Stands for a tokenizer where nothing is read from text."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1]


@functools.cache
def bench(name: str = "llama", rung: Rung = Rung.HOOK, block: int = 8) -> Bench:
    ids = np.random.default_rng(3).integers(0, SPECS[name].vocab_size, PLAN.length(CONTEXT))
    document = EvalDocument("made", "noise", "a test", "none", "0", 0, CONTEXT, tuple(int(i) for i in ids))
    observe = tuple(OBSERVED) if rung == Rung.HOOK else ()
    made = Bench(build(name), _NoWords(), document, replace(PLAN, block=block), 0, rung=rung, observe=observe)
    _made.append(made)
    return made


_made: list[Bench] = []


@pytest.fixture(scope="module", autouse=True)
def hooks_closed_afterwards() -> Iterator[None]:
    """Benches are shared by the tests of this file, and no hook of theirs is to be seen in any other."""
    yield
    for made in _made:
        made.close()
    _made.clear()
    bench.cache_clear()
    simulator.cache_clear()


@functools.cache
def simulator(name: str = "llama", rung: Rung = Rung.HOOK, block: int = 8) -> Simulator:
    return Simulator(bench(name, rung, block))


def assert_same(simulated: Simulated, real: dict[str, Any]) -> None:
    """KL of every block and bytes of every kind are those that were measured."""
    got, spans = simulated.measured, real["T1"]["kl_by_16"]
    assert got.quality.kl_spans == pytest.approx(spans, rel=2e-3, abs=1e-5)
    assert got.quality.kl_mean == pytest.approx(real["T1"]["kl_mean"], rel=2e-3, abs=1e-5)
    assert got.quality.kl_p95 == pytest.approx(real["T1"]["kl_p95"], rel=5e-3, abs=1e-5)
    assert got.quality.nll_change == pytest.approx(real["T1"]["nll_change"], rel=2e-3, abs=1e-5)
    assert (got.live, got.allocated) == (real["bytes"]["live"], real["bytes"]["allocated"])
    assert got.share16 == pytest.approx(real["bytes"]["share16"], abs=1e-12)
    assert got.share16_allocated == pytest.approx(real["bytes"]["share16_allocated"], abs=1e-12)


# -- against what really runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", RUNNABLE)
def test_an_action_that_runs_costs_in_simulation_what_it_really_costs(text: str) -> None:
    found = simulator().simulate(text)
    assert_same(found, bench().measure(parse_subject(text)))
    assert found.what.action == str(parse_action(text))
    assert found.measured.predicted_live == found.measured.live


def on(*names: str) -> list[tuple[str, str]]:
    """Each architecture with each of SOME, but for what it cannot execute.

    Packed rows beside attention sinks; a window over rows of which every head has its own.
    """
    left_out = {("gpt_oss", "quant:affine,bits=4,group=32")}
    left_out |= {("mistral3", t) for t in SOME if t.startswith("evict") and "sinks_window" not in t}
    return [(n, t) for n in names for t in SOME if (n, t) not in left_out]


@pytest.mark.parametrize(
    ("name", "text"),
    [*on("qwen3", "gemma3", "gpt_oss", "falcon_h1"), ("mistral3", "quant:hadamard,bits=2,group=32")],
)
def test_simulation_is_right_on_other_architectures(name: str, text: str) -> None:
    assert_same(simulator(name).simulate(text), bench(name).measure(parse_subject(text)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"), on("cohere2", "ministral3", "llama4", "lfm2", "mistral3", "phi3", "qwen3_next")
)
def test_simulation_is_right_on_more_architectures(name: str, text: str) -> None:
    assert_same(simulator(name).simulate(text), bench(name).measure(parse_subject(text)))


@pytest.mark.parametrize("block", [1, 5, 80])
@pytest.mark.parametrize("text", ["quant:kivi,bits=2,group=32", "quant:hadamard,bits=2,group=32,residual=7"])
def test_rows_are_sealed_when_tokens_come_in_other_blocks(text: str, block: int) -> None:
    real = bench("llama", Rung.CACHE, block).measure(parse_subject(text))
    assert_same(simulator("llama", Rung.CACHE, block).simulate(text), real)


@pytest.mark.parametrize("scorer", OBSERVED)
def test_statistics_gathered_afterwards_are_those_of_a_bench_that_watched(scorer: str) -> None:
    text = f"evict:{scorer}@0.50"
    watched = simulator().simulate(text)
    gathered = simulator("llama", Rung.CACHE).simulate(text)
    assert gathered.measured.quality.kl_mean == pytest.approx(watched.measured.quality.kl_mean, rel=1e-3)


# -- against references made otherwise ------------------------------------------------------------------------------


class PerHead(KVCache):
    """One real row store for each K/V head, which may hold other rows than its neighbours."""

    def __init__(self, name: str, stores: list[RowStore], offset: int) -> None:
        super().__init__()
        self.name, self.stores, self.offset = name, stores, offset

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        self.now = [
            store.append(keys[:, h : h + 1], values[:, h : h + 1]).dense()
            for h, store in enumerate(self.stores)
        ]
        return keys, values

    def serve(self, layer: Any, queries: mx.array, *args: Any) -> mx.array:
        scale, per_head = args[2], queries.shape[1] // len(self.stores)
        return mx.concatenate(
            [
                mx.fast.scaled_dot_product_attention(
                    queries[:, h * per_head : (h + 1) * per_head], keys, values, scale=scale, mask="causal"
                )
                for h, (keys, values) in enumerate(self.now)
            ],
            axis=1,
        )


def per_head_kl(kept: list[list[np.ndarray]], layout: Layout) -> np.ndarray:
    """KL of every token if each head of each layer of the tiny llama kept these rows, stored in ``layout``."""
    made = bench()
    cache = []
    for layer, rows in zip(leaves(list(made.full)), kept, strict=True):
        keys, values = layer.dense_rows()
        stores = [
            RowStore.holding(layout, keys[:, h : h + 1, mx.array(i)], values[:, h : h + 1, mx.array(i)])
            for h, i in enumerate(rows)
        ]
        cache.append(PerHead(layer.name, stores, layer.rows))
    fed, found = made.task.fed, []
    with attention_hook(made.model) as hook:
        for layer in cache:
            hook.serve(layer, layer)
        for i in range(0, len(fed), made.plan.block):
            found.append(
                log_softmax(made.model(mx.array(fed[i : i + made.plan.block])[None], cache=cache)[0])
            )
            mx.eval(found[-1])
    return kl_and_agreement(made.continued, mx.concatenate(found))[0]


def kept_by(text: str, name: str = "llama") -> list[list[np.ndarray]]:
    """Positions that each head of each layer is left with, by the simulator's choice."""
    action, made = parse(text), simulator(name)
    left = [made.left_of(layer, action) for layer in made._forward.full]
    return [
        [np.array(g.positions)[0, h] for g in rows.groups for h in range(g.heads)]
        for rows in left
        if isinstance(rows, LayerRows)
    ]


@pytest.mark.parametrize(
    ("codec", "layout"),
    [
        (None, Layout()),
        ("quant:hadamard,bits=3,group=32", parse_action("quant:hadamard,bits=3,group=32").layout),
        ("quant:kivi,bits=2,group=32", parse_action("quant:kivi,bits=2,group=32").layout),
        ("quant:affine_fetch,bits=3,group=32,residual=9", Layout(*[AffineFetch(3, 32)] * 2, 9)),
    ],
)
@pytest.mark.parametrize("chosen", ["evict:adakv@0.50", "oracle:future_ragged@0.30"])
def test_heads_with_different_numbers_of_rows_see_what_a_store_per_head_holds(
    chosen: str, codec: str | None, layout: Layout
) -> None:
    kept = kept_by(chosen)
    assert len({len(rows) for layer in kept for rows in layer}) > 1
    found = simulator().simulate(chosen if codec is None else f"{chosen}+{codec}").measured
    expected = per_head_kl(kept, layout)
    assert found.quality.kl_mean == pytest.approx(float(expected.mean()), rel=1e-3, abs=1e-6)
    assert found.quality.kl_p95 == pytest.approx(
        float(np.sort(expected)[round(0.95 * (expected.size - 1))]), rel=1e-2
    )


class Hidden(KVCache):
    """A complete layer that hides rows of its own from each head, whatever the model's mask is."""

    def __init__(self, full: KVCache, kept: list[np.ndarray]) -> None:
        super().__init__()
        self.name = full.name
        self.update_and_fetch(*full.dense_rows())
        self.visible = np.zeros((len(kept), full.rows), dtype=bool)
        for head, rows in enumerate(kept):
            self.visible[head, rows] = True

    def serve(self, layer: Any, queries: mx.array, keys: mx.array, values: mx.array, *args: Any) -> mx.array:
        scale, mask, _ = args
        n, rows = queries.shape[2], keys.shape[2]
        allowed = np.tri(n, rows, rows - n, dtype=bool) if isinstance(mask, str) else np.array(mask)
        seen = np.ones((len(self.visible), rows), dtype=bool)
        seen[:, : self.visible.shape[1]] = self.visible
        seen = np.repeat(seen, queries.shape[1] // len(seen), axis=0)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mx.array((allowed & seen[:, None])[None])
        )


@pytest.mark.parametrize("text", ["evict:random@0.50", "evict:snapkv@0.25", "evict:adakv@0.50"])
def test_a_window_lies_over_positions_whichever_rows_are_left(text: str) -> None:
    made = bench("mistral3")
    full = [one for one in leaves(list(made.full)) if isinstance(one, KVCache)]
    cache = [Hidden(*pair) for pair in zip(full, kept_by(text, "mistral3"), strict=True)]
    with attention_hook(made.model) as hook:
        for layer in cache:
            hook.serve(layer, layer)
        tried = log_probabilities(made.model, cache, made.task.fed, made.plan.block)
    expected, _ = kl_and_agreement(made.continued, tried)
    found = simulator("mistral3").simulate(text).measured.quality
    assert found.kl_mean == pytest.approx(float(expected.mean()), rel=1e-3)


def test_a_fifth_of_an_even_share_stays_with_a_head_whose_rows_are_all_worse() -> None:
    group = of_layer(next(leaves(list(bench().full))), None)
    scores = mx.stack([mx.arange(CONTEXT), mx.arange(CONTEXT) + 1000.0])[None]
    found = evicted(group, Evict("adakv", ratio=0.25, sinks=1), 50, scores)
    kept = [np.array(g.positions)[0, 0].tolist() for g in found.groups]
    assert kept == [[0, *range(CONTEXT - 9, CONTEXT)], [0, *range(CONTEXT - 89, CONTEXT)]]


def test_adakv_shares_out_what_snapkv_would_keep() -> None:
    for rows in kept_by("evict:adakv@0.25"):
        assert sum(len(one) for one in rows) == len(rows) * CONTEXT // 4
        # The first rows and SnapKV's window stay.
        assert all({0, 1, 2, 3, *range(CONTEXT - 32, CONTEXT)} <= set(one.tolist()) for one in rows)


def test_pyramidkv_is_snapkv_with_a_budget_of_its_own_for_each_layer() -> None:
    first, last = pyramid(CONTEXT, CONTEXT // 2, 2)
    assert first > last
    assert first + last == pytest.approx(CONTEXT, abs=1)
    real = bench().measure(parse_subject(f"0:evict:snapkv@rows={first};1:evict:snapkv@rows={last}"))
    assert_same(simulator().simulate("evict:pyramidkv@0.50"), real)


def test_kvzip_keeps_the_rows_with_the_largest_weight_when_the_context_comes_again() -> None:
    made = bench()
    full = [one for one in leaves(list(made.full)) if isinstance(one, KVCache)]
    again = (1, *made.task.context)  # the tokenizer here reads any request as one token
    everything = [np.arange(CONTEXT)] * 2
    cache, weights = [Hidden(layer, everything) for layer in full], {}

    def watch(layer: Any, queries: mx.array, keys: mx.array, *args: Any) -> mx.array:
        scores = (
            np.einsum("hnd,htd->hnt", np.array(queries)[0], np.repeat(np.array(keys)[0], 2, axis=0)) * args[1]
        )
        scores[:, ~np.tri(len(again), CONTEXT + len(again), CONTEXT, dtype=bool)] = -np.inf
        weights[layer.name] = np.exp(scores - scores.max(-1, keepdims=True))
        weights[layer.name] /= weights[layer.name].sum(-1, keepdims=True)
        return Hidden.serve(layer, layer, queries, keys, *args)

    with attention_hook(made.model) as hook:
        for layer in cache:
            layer.serve = watch
            hook.serve(layer, layer)
        mx.eval(made.model(mx.array(again)[None], cache=cache))
    for layer, rows in zip(full, kept_by("evict:kvzip@0.25"), strict=True):
        worth = weights[layer.name][:, :, :CONTEXT].reshape(2, -1, CONTEXT).max(axis=1)
        for head, kept in enumerate(rows):
            assert {0, 1, 2, 3} <= set(kept.tolist())
            rest = [i for i in np.argsort(-worth[head]) if i >= 4][: CONTEXT // 4 - 4]
            assert (
                len(set(kept.tolist()) - {0, 1, 2, 3} - set(rest)) <= 1
            )  # two may be equal but for rounding


@given(rows=st.integers(64, 5000), share=st.floats(0.05, 0.95), layers=st.integers(1, 60))
def test_a_pyramid_falls_and_keeps_the_mean(rows: int, share: float, layers: int) -> None:
    kept = max(1, round(share * rows))
    budgets = pyramid(rows, kept, layers)
    assert len(budgets) == layers
    assert budgets == sorted(budgets, reverse=True)
    assert max(budgets) <= rows
    assert sum(budgets) / layers == pytest.approx(kept, abs=1)


@settings(deadline=None, max_examples=60)
@given(
    residual=st.integers(0, 40),
    context=st.integers(0, 150),
    tokens=st.integers(1, 120),
    block=st.integers(1, 120),
)
def test_rows_are_sealed_behind_the_step_that_a_real_store_seals_them_behind(
    residual: int, context: int, tokens: int, block: int
) -> None:
    layout = Layout(AffineFetch(4, 32), AffineFetch(4, 32), residual)
    rows = mx.zeros((1, 1, context, 32))
    store = RowStore.holding(layout, rows, rows)
    sealed, tail = store.sealed, store.tail
    expected = np.full(tail + tokens, NEVER)
    for step, first in enumerate(range(0, tokens, block)):
        n = min(block, tokens - first)
        before = store.sealed
        store.append(mx.zeros((1, 1, n, 32)), mx.zeros((1, 1, n, 32)))
        expected[before - sealed : store.sealed - sealed] = step
    assert sealed_after(layout, tail, tokens, block).tolist() == expected.tolist()


# -- rows of two precisions -----------------------------------------------------------------------------------------


def test_important_rows_come_back_finer_than_the_others() -> None:
    [layer, *_] = [one for one in leaves(list(bench().full)) if isinstance(one, KVCache)]
    group = of_layer(layer, None).groups[0]
    coarse, fine = (Layout(AffineFetch(b, 32), AffineFetch(b, 32)) for b in (2, 8))
    important = mx.broadcast_to(mx.arange(0, 192, 5, dtype=mx.int32), (1, 2, 39))
    found = mixed(group, coarse, fine, important)
    for own, side, codecs in (
        (group.keys, found.keys, ("keys", "keys")),
        (group.values, found.values, ("values", "values")),
    ):
        rough, close = (
            getattr(layout, which).decode(getattr(layout, which).encode(own), mx.float32)
            for layout, which in zip((coarse, fine), codecs, strict=True)
        )
        for row in range(CONTEXT):
            expected = own if row >= 192 else close if row % 5 == 0 else rough
            assert mx.array_equal(side[:, :, row], expected[:, :, row]), row


def test_rows_of_two_precisions_take_the_bytes_of_both() -> None:
    found = simulator().simulate("quant:mixed_rows,bits=2,group=32").measured
    # Per row of 2 heads of 32, keys and values: 128 elements; 192 rows are sealed, 38 of them in 8 bits; 8 are dense.
    row = lambda bits: 128 * bits // 8 + 2 * (128 // 32) * 2  # noqa: E731
    expected = 2 * (38 * row(8) + 154 * row(2) + 8 * 128 * 2)
    assert found.share16 * bench().dense.live16 == pytest.approx(expected)
    worse = simulator().simulate("quant:affine_fetch,bits=2,group=32").measured
    assert found.quality.kl_mean < worse.quality.kl_mean


# -- rows fetched by query ------------------------------------------------------------------------------------------


def quest_reference(queries: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """Pages that each query fetches, by hand: bool (N, P)."""
    pages = keys.reshape(-1, PAGE, keys.shape[-1])
    found = np.zeros((queries.shape[1], pages.shape[0]), dtype=bool)
    for n in range(queries.shape[1]):
        bound = [
            np.mean([np.maximum(q[n] * page.min(0), q[n] * page.max(0)).sum() for q in queries])
            for page in pages
        ]
        found[n, np.argsort(bound)[-count:]] = True
    return found


def test_quest_shows_each_query_the_pages_with_the_greatest_bounds() -> None:
    made, rng = simulator(), np.random.default_rng(1)
    layer = made._forward.full[0]
    rows = made.left_of(layer, parse("offload:quest@0.30"))
    assert isinstance(rows, LayerRows)
    assert rows.fetched is not None
    queries = rng.normal(size=(1, 4, 3, 32)).astype(np.float32)
    visible = np.array(shown(rows, mx.array(queries), 0.1, CONTEXT, CONTEXT + 3))
    assert visible[..., CONTEXT:].all()
    pages = CONTEXT // PAGE
    for head in range(2):
        keys = np.array(layer.dense_rows()[0])[0, head, : pages * PAGE]
        expected = quest_reference(queries[0, 2 * head : 2 * head + 2], keys, rows.fetched.count)
        assert (visible[0, head][:, : pages * PAGE].reshape(3, pages, PAGE) == expected[..., None]).all()
        assert visible[0, head][:, pages * PAGE : CONTEXT].all()


def test_what_is_fetched_is_what_counts_as_memory() -> None:
    found = simulator().simulate("offload:quest@0.50").measured
    pages = CONTEXT // PAGE
    rows = round(0.5 * pages) * PAGE + CONTEXT % PAGE
    bounds = 2 * pages / 2  # two keys for each page; a row is a key and a value
    assert found.share16 == pytest.approx((rows + bounds) / CONTEXT)


def test_fetching_everything_changes_nothing() -> None:
    for text in ("offload:quest@0.99", "oracle:step@0.999"):
        assert abs(simulator().simulate(text).measured.quality.kl_mean) < 1e-6


# -- ceilings -------------------------------------------------------------------------------------------------------


def test_the_oracle_keeps_the_rows_that_the_scored_tokens_attend_to_most() -> None:
    made = simulator()
    sums = made._known.future["layer 0"]
    assert np.array(sums).sum(axis=-1).max() <= 80.0 + 1e-3
    kept = kept_by("oracle:future@0.25")[0]
    for head, rows in enumerate(kept):
        mass = np.array(sums)[0, head]
        assert set(rows.tolist()) == set(np.argsort(mass)[-CONTEXT // 4 :].tolist())


def test_oracles_are_above_chance_and_choosing_per_query_is_above_choosing_once() -> None:
    cost = {
        t: simulator().simulate(t).measured.quality.kl_mean
        for t in ("evict:random@0.25", "oracle:future@0.25", "oracle:step@0.25")
    }
    assert cost["oracle:step@0.25"] < cost["oracle:future@0.25"] < cost["evict:random@0.25"]


def test_a_ceiling_says_that_it_is_one() -> None:
    found = simulator().simulate("oracle:future@0.50+quant:affine,bits=4,group=32")
    assert (found.what.role, found.what.rung) == ("ceiling", Rung.TRAINED)
    assert str(parse(found.what.action)) == found.what.action


# -- what comes back, and what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["keep", "reclaim", "reserve:4096", "page:64", "offload:cold@0.50"])
def test_what_attention_does_not_notice_costs_exactly_nothing(text: str) -> None:
    found = simulator().simulate(text).measured.quality
    assert (found.kl_mean, found.kl_p95, found.top1, found.nll_change) == (0.0, 0.0, 1.0, 0.0)


def test_an_observation_is_a_simulated_one_in_the_state_of_its_bench() -> None:
    found = simulator().simulate("evict:random@0.50,seed=1")
    assert isinstance(found, Simulated)
    assert (found.state.context, found.state.horizon, found.state.document) == (CONTEXT, 80, "made")
    assert found.what.role == "placebo"
    assert found.measured.time_ratio is None
    assert found.measured.quality.kl_half0 is not None
    assert len(found.measured.quality.kl_spans) == 5


def test_time_comes_from_a_profile_of_this_model_only_and_else_is_unknown() -> None:
    borrowed = default_profile().for_groups_of(32)
    own = replace(borrowed, borrowed=False)
    text = "quant:affine,bits=4,group=32"
    figure = own.codec(parse_action(text))
    assert Simulator(bench(), profile=own).simulate(text).measured.time_ratio == figure.time_at(CONTEXT)
    assert Simulator(bench(), profile=borrowed).simulate(text).measured.time_ratio is None
    assert Simulator(bench(), profile=own).simulate("evict:random@0.50").measured.time_ratio is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("merge:minicache", "no forward for merge:minicache; simulated are"),
        ("evict:fastgen@0.50", "no forward for the scorer fastgen; there is one for sinks_window"),
        ("quant:gear,bits=4,group=32", "no forward for the codec gear; there is one for affine"),
        ("offload:shadowkv@0.50", "no forward for offload:shadowkv"),
        ("offload:quest@0.50+evict:random@0.50", "nothing can follow offload:quest@0.50"),
        ("evict:adakv@0.50+evict:random@0.50", "leaves heads with different numbers of rows"),
        ("quant:kivi,bits=4,group=32+evict:adakv@0.50", "evict first and encode then"),
        ("quant:affine,bits=4,group=64", "groups of 64 do not divide a head dim of 32"),
        ("evict:random@0.25,recent=60", "keeps 50 of 200 rows"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_what_can(text: str, says: str) -> None:
    with pytest.raises(SimulationError, match=says):
        simulator().simulate(text)


@pytest.mark.parametrize(
    "text", ["oracle:past@0.5", "oracle:future", "oracle:future@2", "oracle:future@half"]
)
def test_an_oracle_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ActionSyntaxError, match="oracle"):
        parse(text)


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_a_model_whose_attention_cannot_be_answered_is_refused(name: str) -> None:
    with pytest.raises(SimulationError, match="nothing can be imposed on the attention of layer 0"):
        simulator(name).simulate("evict:random@0.50")


def test_a_bench_without_a_continuation_is_refused() -> None:
    made = replace_plan(bench(), tests=("T2",))
    with pytest.raises(SimulationError, match="let its plan test T1"):
        Simulator(made)


def replace_plan(made: Bench, **changes: Any) -> Any:
    class Other:
        plan = replace(made.plan, **changes)

    return Other()


# -- the space ------------------------------------------------------------------------------------------------------


def test_the_space_has_actions_for_every_rung_placebos_and_ceilings() -> None:
    offers = space()
    assert len({o.text for o in offers}) == len(offers)
    assert {o.what.rung for o in offers if o.what.role == "candidate"} == {0, 1, 2, 3}
    assert {o.what.role for o in offers} == {"candidate", "placebo", "ceiling"}
    seeds = {o.action.seed for o in offers if isinstance(o.action, Evict) and o.action.scorer == "random"}
    assert seeds == {0, 1, 2}
    assert all(str(parse(o.text)) == o.text for o in offers)
    kernel = {str(o.action).split("@")[0].split(",")[0] for o in offers if o.what.rung == Rung.KERNEL}
    assert {"evict:adakv", "quant:mixed_rows", "quant:turboquant_packed"} <= kernel


@pytest.mark.slow
def test_everything_that_is_offered_is_simulated() -> None:
    made = simulator()
    for offer in made.space(ratios=(0.5,), composite_ratios=(0.5,), bits=(4, 2), group_size=32):
        if offer.what.requires and "FORMAT_NVFP4" in offer.what.requires:
            continue
        found = made.simulate(offer.action).measured
        assert found.share16 > 0, offer.text
        assert found.quality.kl_mean > 0 or not offer.action.lossy or "offload" in offer.text, offer.text
