"""Scorers that need queries, against NumPy written from the papers' formulas, query by query."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from harness import feed, pieces, quiet, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import trim_prompt_cache
from mlx_lm.models.rope_utils import YarnRoPE

from lumina_cache.backend.attention import attention_hook
from lumina_cache.backend.observing import ScorerObserver, rotations
from lumina_cache.errors import ObservationError
from lumina_cache.methods import METHODS
from lumina_cache.scorers.observed import (
    H2O,
    OBSERVED,
    TOVA,
    VATP,
    Attended,
    ExpectedAttention,
    H2OMean,
    ObservedScorer,
    SnapKV,
    Statistics,
)
from lumina_cache.scorers.observed.expected_attention import average_rotation, turned_back
from lumina_cache.scorers.observed.weights import attended_sums, window_sums

SCALE = 0.3
ROPE = nn.RoPE(8)
quick = settings(max_examples=30, deadline=None)
every = pytest.mark.parametrize("scorer", [one() for one in OBSERVED.values()], ids=lambda s: s.method.name)


@dataclass(frozen=True)
class Text:
    """What one layer is given for a text of T tokens: queries (B, Hq, T, D), keys and values (B, H, T, D)."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    @classmethod
    def random(cls, seed: int, n: int, group: int = 2, batch: int = 2, heads: int = 2, dim: int = 8) -> Text:
        rng = np.random.default_rng(seed)
        q, k, v = (
            rng.normal(size=(batch, h, n, dim)).astype(np.float32) for h in (heads * group, heads, heads)
        )
        return cls(2 * q, 2 * k, v)

    @property
    def n(self) -> int:
        return int(self.keys.shape[2])

    def step(self, first: int, end: int, held: np.ndarray, **other: Any) -> Attended:
        """The call for tokens ``first`` to ``end``, over the rows at the positions ``held`` and the new ones."""
        rows = np.concatenate([held, np.arange(first, end)])
        mask = None if end - first == 1 else "causal"
        options: dict[str, Any] = {"mask": mask, "rotation": ROPE} | other
        return Attended(
            queries=mx.array(self.queries[:, :, first:end]),
            keys=mx.array(self.keys[:, :, rows]),
            scale=SCALE,
            first_position=first,
            n_kv_heads=self.keys.shape[1],
            **options,
        )

    def feed(self, scorer: ObservedScorer, steps: Iterable[int]) -> Statistics:
        stats = None
        for first, end in pairwise(accumulate(steps, initial=0)):
            stats = scorer.update(stats, self.step(first, end, np.arange(first)))
        assert stats is not None
        return stats

    def scores(self, scorer: ObservedScorer, stats: Statistics, held: np.ndarray | None = None) -> np.ndarray:
        held = np.arange(self.n) if held is None else held
        keys, values = mx.array(self.keys[:, :, held]), mx.array(self.values[:, :, held])
        positions = mx.broadcast_to(mx.array(held.astype(np.int32)), keys.shape[:3])
        got = scorer.scores(stats, keys, values, positions, ROPE)
        assert got.dtype == mx.float32
        assert got.shape == positions.shape
        return np.array(got)

    def weights(self, query: int, held: np.ndarray) -> np.ndarray:
        """Softmax (B, Hq, len(held)) of one query over the rows at the positions ``held``."""
        group = self.queries.shape[1] // self.keys.shape[1]
        keys = np.repeat(self.keys[:, :, held], group, axis=1).astype(np.float64)
        s = SCALE * np.einsum("bhd,bhtd->bht", self.queries[:, :, query].astype(np.float64), keys)
        e = np.exp(s - s.max(-1, keepdims=True))
        return np.asarray(e / e.sum(-1, keepdims=True))

    def grouped(self, x: np.ndarray) -> np.ndarray:
        """(B, Hq, …) as (B, H, G, …)."""
        heads = self.keys.shape[1]
        return x.reshape(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:])


@st.composite
def texts(draw: st.DrawFn) -> Text:
    return Text.random(
        draw(st.integers(0, 2**32)),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
    )


@st.composite
def texts_in_steps(draw: st.DrawFn) -> tuple[Text, list[int]]:
    text = draw(texts())
    cuts = draw(st.sets(st.integers(1, max(1, text.n - 1)), max_size=6)) if text.n > 1 else set()
    ends = [0, *sorted(cuts), text.n]
    return text, [b - a for a, b in pairwise(ends)]


def close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


# -- weights summed in blocks ---------------------------------------------------------------------------------------------


def reference_sums(
    text: Text, first: int, allowed: np.ndarray | None, added: np.ndarray | None, sinks: np.ndarray | None
) -> np.ndarray:
    group = text.queries.shape[1] // text.keys.shape[1]
    keys = np.repeat(text.keys, group, axis=1).astype(np.float64)
    s = SCALE * np.einsum("bhnd,bhtd->bhnt", text.queries[:, :, first:].astype(np.float64), keys)
    if added is not None:
        s = s + added
    if allowed is not None:
        s = np.where(allowed, s, -np.inf)
    extra = np.zeros_like(s[..., :1]) if sinks is None else np.exp(sinks)[None, :, None, None]
    e = np.exp(s)
    w = e / (e.sum(-1, keepdims=True) + (0 if sinks is None else extra))
    return np.asarray(text.grouped(w.sum(axis=2)).mean(axis=2))


@pytest.mark.parametrize("limit", [1, 2000, 1 << 20])
@pytest.mark.parametrize(
    "kind", ["none", "causal", "bool", "bool per head", "added", "added per head", "sinks"]
)
def test_sums_over_blocks_are_those_of_the_whole_matrix(kind: str, limit: int) -> None:
    text, rng = Text.random(3, 21), np.random.default_rng(5)
    new, heads = 13, text.queries.shape[1]
    causal = np.arange(21)[None] <= np.arange(8, 21)[:, None]
    mask: Any = None
    allowed = added = sinks = None
    match kind:
        case "causal":
            mask, allowed = "causal", causal
        case "bool" | "sinks":
            allowed = causal & (rng.random((new, 21)) < 0.7) | np.eye(new, 21, 8, dtype=bool)
            mask = mx.array(allowed)
        case "bool per head":
            allowed = causal & (rng.random((2, heads, new, 21)) < 0.7) | np.eye(new, 21, 8, dtype=bool)
            mask = mx.array(allowed)
        case "added":
            added = rng.normal(size=(1, 1, new, 21)).astype(np.float32)
            mask = mx.array(added)
        case "added per head":
            added, allowed = rng.normal(size=(2, heads, new, 21)).astype(np.float32), causal
            mask = mx.where(mx.array(causal), mx.array(added), mx.finfo(mx.float32).min)
    if kind == "sinks":
        sinks = rng.normal(size=heads)
    got, seen = attended_sums(
        mx.array(text.queries[:, :, 8:]),
        mx.array(text.keys),
        SCALE,
        mask,
        None if sinks is None else mx.array(sinks.astype(np.float32)),
        limit=limit,
    )
    close(np.array(got), reference_sums(text, 8, allowed, added, sinks))
    visible = np.broadcast_to(np.ones(1, bool) if allowed is None else allowed, (2, heads, new, 21))
    want = text.grouped(visible.sum(axis=2)).mean(axis=2)
    close(np.broadcast_to(np.array(seen), want.shape), want)


@pytest.mark.parametrize("limit", [1, 700, 1 << 20])
def test_a_mask_that_all_queries_share_counts_for_each_of_them(limit: int) -> None:
    text = Text.random(4, 9)
    allowed = np.arange(9)[None] % 3 > 0
    queries, keys = mx.array(text.queries[:, :, 4:]), mx.array(text.keys)
    got, seen = attended_sums(queries, keys, SCALE, mx.array(allowed), limit=limit)
    close(np.array(got), reference_sums(text, 4, allowed, None, None))
    assert np.array_equal(np.array(seen)[0, 0], 5.0 * allowed[0])
    _, seen = attended_sums(queries, keys, SCALE, mx.array(allowed), limit=limit, apart=2)
    far = np.arange(4, 9)[:, None] - np.arange(9)[None] >= 2
    assert np.array_equal(np.array(seen)[0, 0], (allowed & far).sum(axis=0))


@pytest.mark.parametrize("limit", [1, 1500, 1 << 20])
def test_a_window_of_queries_sees_rows_up_to_its_own_positions(limit: int) -> None:
    text, held = Text.random(6, 30), np.array([0, 1, 5, 6, 9, 20, 26, 27, 28, 29])
    keys = mx.array(text.keys[:, :, held])
    positions = mx.broadcast_to(mx.array(held), keys.shape[:3])
    got = window_sums(mx.array(text.queries[:, :, 25:]), 25, keys, positions, SCALE, limit=limit)
    want = np.zeros(got.shape)
    for query in range(25, 30):
        seen = held[held <= query]
        want[..., : len(seen)] += text.grouped(text.weights(query, seen))
    close(np.array(got), want)


def peak_above(run: Callable[[], mx.array]) -> int:
    mx.synchronize()
    mx.reset_peak_memory()
    start = mx.get_active_memory()
    mx.eval(run())
    return mx.get_peak_memory() - start


def test_the_bytes_taken_on_the_way_do_not_grow_with_the_queries() -> None:
    queries, keys = mx.ones((1, 4, 2048, 32)), mx.ones((1, 2, 2048, 32))
    mx.eval(queries, keys)
    limit = 1 << 19
    whole = 4 * 4 * 2048 * 2048
    peak = peak_above(lambda: attended_sums(queries, keys, 1.0, "causal", limit=limit)[0])
    assert peak < 8 * limit < whole / 8
    assert peak_above(lambda: attended_sums(queries, keys, 1.0, None, limit=whole)[0]) > whole


# -- accumulated attention ------------------------------------------------------------------------------------------------


def accumulated(text: Text, stride: int = 1, apart: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Attention collected by each row (B, H, T) and queries that it was collected from (T,)."""
    total, exposure = np.zeros(text.keys.shape[:3]), np.zeros(text.n)
    for query in range(0, text.n, stride):
        counted = max(0, query + 1 - apart)
        weights = text.weights(query, np.arange(query + 1))[..., :counted]
        total[:, :, :counted] += text.grouped(weights).mean(axis=2)
        exposure[:counted] += 1
    return total, exposure


@quick
@given(texts_in_steps(), st.sampled_from([(1, 0), (1, 1), (1, 5), (2, 2), (4, 6)]))
def test_accumulated_attention_is_the_same_for_every_way_of_cutting_the_prompt(
    drawn: tuple[Text, list[int]], looks: tuple[int, int]
) -> None:
    text, steps = drawn
    total, exposure = accumulated(text, *looks)
    close(text.scores(H2O(*looks), text.feed(H2O(*looks), steps)), total)
    mean = text.feed(H2OMean(*looks), steps)
    close(text.scores(H2OMean(*looks), mean), total / np.maximum(exposure, 1))
    size = np.abs(text.values).sum(axis=-1)
    close(text.scores(VATP(*looks), text.feed(VATP(*looks), steps)), total * size)


@quick
@given(texts_in_steps())
def test_every_query_gives_away_one_in_all(drawn: tuple[Text, list[int]]) -> None:
    text, steps = drawn
    close(text.scores(H2O(), text.feed(H2O(), steps)).sum(axis=-1), np.full(text.keys.shape[:2], text.n))


@pytest.mark.parametrize("chunk", [1, 4])
def test_rows_evicted_take_their_attention_along_and_later_queries_do_not_see_them(chunk: int) -> None:
    text, scorer = Text.random(11, 24), H2O()
    stats = text.feed(scorer, [7, 5])
    kept = np.array([0, 1, 4, 8, 9, 11])
    index = mx.broadcast_to(mx.array(kept.astype(np.int32)), (*text.keys.shape[:2], len(kept)))
    stats, held = stats.gather(index), kept
    total = accumulated(Text(text.queries[:, :, :12], text.keys[:, :, :12], text.values))[0][:, :, kept]
    for first in range(12, 24, chunk):
        stats = scorer.update(stats, text.step(first, first + chunk, held))
        for query in range(first, first + chunk):
            held = np.append(held, query)
            total = np.concatenate([total, np.zeros((*total.shape[:2], 1))], axis=2)
            total += text.grouped(text.weights(query, held)).mean(axis=2)
    close(text.scores(scorer, stats, held), total)


def test_heads_may_keep_rows_of_their_own() -> None:
    text, scorer = Text.random(12, 10, batch=1), H2O()
    stats = text.feed(scorer, [10])
    index = np.array([[[0, 3, 9], [1, 2, 8]]])
    got = stats.gather(mx.array(index.astype(np.int32)))
    want = np.take_along_axis(accumulated(text)[0], index, axis=2)
    close(np.array(got.rows["attention"]), want)
    assert got.held == 3


# -- the newest queries ---------------------------------------------------------------------------------------------------


def pooled_reference(weights: np.ndarray, kernel: int, pool: str) -> np.ndarray:
    out, n = np.zeros_like(weights), weights.shape[-1]
    for j in range(n):
        near = [
            weights[..., i] if 0 <= i < n else 0 * weights[..., 0]
            for i in range(j - kernel // 2, j + kernel // 2 + 1)
        ]
        out[..., j] = np.mean(near, axis=0) if pool == "mean" else np.max(near, axis=0)
    return out


@quick
@given(
    texts_in_steps(), st.sampled_from([1, 4, 9]), st.sampled_from([1, 3, 5]), st.sampled_from(["mean", "max"])
)
def test_snapkv_pools_the_weights_of_the_window_and_keeps_the_window(
    drawn: tuple[Text, list[int]], window: int, kernel: int, pool: Any
) -> None:
    text, steps = drawn
    scorer = SnapKV(window, kernel, pool)
    got = text.scores(scorer, text.feed(scorer, steps))
    before = max(0, text.n - window)
    assert np.isinf(got[:, :, before:]).all()
    weights = np.zeros((*text.queries.shape[:2], before))
    for query in range(before, text.n):
        weights += text.weights(query, np.arange(query + 1))[..., :before] / (text.n - before)
    close(got[:, :, :before], text.grouped(pooled_reference(weights, kernel, pool)).mean(axis=2))


@quick
@given(texts_in_steps())
def test_tova_ranks_by_the_newest_query_and_alike_for_all_heads(drawn: tuple[Text, list[int]]) -> None:
    text, steps = drawn
    got = text.scores(TOVA(), text.feed(TOVA(), steps))
    want = text.weights(text.n - 1, np.arange(text.n)).mean(axis=1)
    close(got, np.broadcast_to(want[:, None], got.shape))


def test_the_newest_queries_rank_what_is_left_after_an_eviction() -> None:
    text, kept = Text.random(21, 20), np.array([0, 2, 3, 11, 15, 18, 19])
    index = mx.broadcast_to(mx.array(kept.astype(np.int32)), (*text.keys.shape[:2], len(kept)))
    stats = text.feed(TOVA(), [20]).gather(index)
    want = text.weights(19, kept).mean(axis=1)
    close(text.scores(TOVA(), stats, kept)[:, 0], want)


def test_the_queries_kept_do_not_hold_on_to_those_of_the_step() -> None:
    mx.synchronize()
    before = mx.get_active_memory()
    text = Text.random(22, 4000, batch=1)
    step = text.step(0, 4000, np.arange(0))
    whole = step.queries.nbytes
    stats = SnapKV(8).update(None, step)
    mx.eval(stats.arrays)
    del step
    assert stats.nbytes == stats.heads["queries"].nbytes == 4 * 4 * (8 + 16) * 8
    assert mx.get_active_memory() - before < whole / 4


# -- expected attention ---------------------------------------------------------------------------------------------------


def rope_matrix(rotation: Any, position: int, dim: int) -> np.ndarray:
    return np.array(rotation(mx.eye(dim)[None, :, None], offset=position))[0, :, 0].astype(np.float64)


ROTATIONS = {
    "halves": nn.RoPE(8),
    "pairs": nn.RoPE(8, traditional=True),
    "part": nn.RoPE(4, base=100.0),
    "yarn": YarnRoPE(8, original_max_position_embeddings=16, scaling_factor=8.0, mscale=2.0),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_queries_are_turned_back_to_before_their_rotation(name: str) -> None:
    x = mx.array(np.random.default_rng(1).normal(size=(2, 3, 7, 8)).astype(np.float32))
    for position in (0, 5, 1000):
        turned = ROTATIONS[name](x, offset=position)
        close(np.array(turned_back(turned, position, ROTATIONS[name])), np.array(x))


@pytest.mark.parametrize("name", ROTATIONS)
def test_the_average_rotation_is_that_of_the_positions_to_come(name: str) -> None:
    want = np.mean([rope_matrix(ROTATIONS[name], p, 8) for p in range(40, 60)], axis=0)
    close(np.array(average_rotation(ROTATIONS[name], 40, 20, 8)), want)


@pytest.mark.parametrize("covariance", [True, False])
@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("steps", [[30], [3, 9, 1, 1, 16], [1] * 30], ids=str)
def test_expected_attention_follows_the_papers_formula(steps: list[int], name: str, covariance: bool) -> None:
    rotation, text = ROTATIONS[name], Text.random(31, 30, dim=8)
    scorer = ExpectedAttention(future=20, skipped=4, covariance=covariance, epsilon=0.01)
    rotated = np.array(rotation(mx.array(text.queries), offset=0))
    turned = Text(rotated, text.keys, text.values)
    stats = None
    for first, end in pairwise(accumulate(steps, initial=0)):
        stats = scorer.update(stats, turned.step(first, end, np.arange(first), rotation=rotation))
    assert stats is not None
    keys, values = mx.array(text.keys), mx.array(text.values)
    positions = mx.broadcast_to(mx.arange(30), keys.shape[:3])
    got = np.array(scorer.scores(stats, keys, values, positions, rotation))

    turn = np.mean([rope_matrix(rotation, p, 8) for p in range(30, 50)], axis=0)
    want = np.zeros(got.shape)
    for b in range(2):
        for head in range(4):
            queries = text.queries[b, head, 4:].astype(np.float64)
            mean = queries.mean(axis=0) @ turn
            spread = turn.T @ np.cov(queries.T, bias=True) @ turn
            k = text.keys[b, head // 2].astype(np.float64)
            logs = SCALE * k @ mean
            if covariance:
                logs = logs + SCALE**2 / 2 * np.einsum("td,de,te->t", k, spread, k)
            e = np.exp(logs - logs.max())
            want[b, head // 2] += e / e.sum() / 2
    want = (want + 0.01) * np.linalg.norm(text.values.astype(np.float64), axis=-1)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5)


# -- every scorer ---------------------------------------------------------------------------------------------------------


@every
@quick
@given(drawn=texts_in_steps())
def test_scores_do_not_depend_on_how_the_prompt_was_cut(
    scorer: ObservedScorer, drawn: tuple[Text, list[int]]
) -> None:
    text, steps = drawn
    if text.n <= 4:  # expected attention leaves out the first four queries
        return
    close(text.scores(scorer, text.feed(scorer, steps)), text.scores(scorer, text.feed(scorer, [text.n])))


@every
def test_scorers_are_in_the_catalogue(scorer: ObservedScorer) -> None:
    assert METHODS["evict", scorer.method.name] is scorer.method
    assert {"QUERIES", "ATTENTION_WEIGHTS"} & {c.name for c in scorer.method.requires}


@every
def test_statistics_come_back_from_a_file(scorer: ObservedScorer, tmp_path: Path) -> None:
    text = Text.random(41, 20)
    stats = text.feed(scorer, [12])
    arrays, plain = stats.to_state()
    mx.save_safetensors(str(tmp_path / "stats.safetensors"), arrays)
    read = Statistics.from_state(mx.load(str(tmp_path / "stats.safetensors")), plain)
    step = text.step(12, 20, np.arange(12))
    assert np.array_equal(
        text.scores(scorer, scorer.update(read, step)), text.scores(scorer, scorer.update(stats, step))
    )


@every
def test_tokens_taken_back_take_their_rows_along(scorer: ObservedScorer) -> None:
    """The next step says by its position that tokens were taken back; nobody has to tell the statistics."""
    text, other = Text.random(42, 30), Text.random(43, 30)
    stats = text.feed(scorer, [20, 5])
    back = scorer.update(stats, other.step(22, 26, np.arange(22)))
    assert (back.held, back.end) == (26, 26)
    mixed = Text(
        *(
            np.concatenate([a[:, :, :22], b[:, :, 22:26]], axis=2)
            for a, b in ((text.queries, other.queries), (text.keys, other.keys), (text.values, other.values))
        )
    )
    stays = scorer.trim(stats, 3)
    assert (stays.held, stays.end) == (22, 22)
    if isinstance(scorer, SnapKV | TOVA):  # nothing of the queries taken back is left
        again = scorer.update(stats, mixed.step(22, 26, np.arange(22)))
        close(mixed.scores(scorer, again), mixed.scores(scorer, mixed.feed(scorer, [26])))


@every
def test_rows_that_the_statistics_do_not_stand_for_are_an_error(scorer: ObservedScorer) -> None:
    text = Text.random(44, 30)
    stats = text.feed(scorer, [20])
    with pytest.raises(
        ObservationError, match=rf"{scorer.method.name} stand for 20 rows, but the layer held 11"
    ):
        scorer.update(stats, text.step(20, 22, np.arange(11)))
    with pytest.raises(ObservationError, match="end at position 20, and this step starts at 25"):
        scorer.update(stats, text.step(25, 27, np.arange(20)))


@every
def test_what_came_before_the_first_call_is_said_not_to_be_known(scorer: ObservedScorer) -> None:
    text = Text.random(45, 30)
    stats = scorer.update(None, text.step(20, 30, np.arange(20)))
    assert (stats.since, stats.end, stats.held) == (20, 30, 30)
    assert np.isfinite(text.scores(scorer, stats)[:, :, :-32]).all()


def test_without_queries_there_is_no_ranking() -> None:
    text = Text.random(46, 20)
    gone = TOVA().trim(text.feed(TOVA(), [10]), 10)
    with pytest.raises(ObservationError, match="tova ranks rows by the newest queries"):
        text.scores(TOVA(), gone, np.arange(0))
    early = text.feed(ExpectedAttention(), [3])
    with pytest.raises(ObservationError, match="positions below 4 do not count"):
        text.scores(ExpectedAttention(), early, np.arange(3))
    with pytest.raises(ObservationError, match="how this layer rotates them is not known"):
        ExpectedAttention().update(None, text.step(0, 9, np.arange(0), rotation=None))


def test_parameters_out_of_range_are_named() -> None:
    for make in (
        lambda: H2O(stride=0),
        lambda: H2O(stride=4),
        lambda: H2O(apart=-1),
        lambda: SnapKV(kernel=4),
        lambda: SnapKV(window=0),
        lambda: ExpectedAttention(future=0),
    ):
        with pytest.raises(ValueError, match="give"):
            make()


# -- with models ----------------------------------------------------------------------------------------------------------


class Captured:
    """Keeps every call, to compute the same by hand."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def observe(self, layer: Any, queries: mx.array, keys: Any, values: Any, *_: Any) -> tuple[()]:
        self.calls.append((queries + 0, keys + 0, values + 0))
        return ()


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_a_models_attention_is_accumulated_as_it_runs(name: str, tiny: Any) -> None:
    model, cache, watch, captured = tiny(name), quiet(tiny(name)), ScorerObserver(H2O()), Captured()
    layer = cache[1]
    with attention_hook(model) as hook:
        hook.observe(layer, captured)
        hook.observe(layer, watch)
        feed(model, cache, tokens(19), pieces(16, 7, decode=3))
    queries = np.concatenate([np.array(q) for q, _, _ in captured.calls], axis=2)
    _, keys, values = (np.array(a) for a in captured.calls[-1])
    dim = queries.shape[-1]
    text = Text(queries * (dim**-0.5 / SCALE), keys, values)
    stats = watch.statistics(layer)
    assert stats is not None
    close(np.array(stats.rows["attention"]), accumulated(text)[0])


def test_latent_rows_have_one_head_whose_attention_is_the_mean_over_all(tiny: Any) -> None:
    model, cache, watch = tiny("deepseek_v3"), quiet(tiny("deepseek_v3")), ScorerObserver(H2O())
    with attention_hook(model) as hook:
        hook.observe(cache[0], watch)
        feed(model, cache, tokens(12), pieces(10, 4, decode=2))
    stats = watch.statistics(cache[0])
    assert stats is not None
    assert stats.rows["attention"].shape == (1, 1, 12)
    close(np.array(stats.rows["attention"].sum()), np.array(12.0))


@every
def test_a_scorer_ranks_the_rows_of_a_model(scorer: ObservedScorer, tiny: Any) -> None:
    model, cache = tiny("llama"), quiet(tiny("llama"))
    watch = ScorerObserver(scorer, rotations(model))
    with pytest.raises(ObservationError, match="nothing was seen of layer 0"):
        watch.scores(cache[0], mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1)))
    with attention_hook(model) as hook:
        for layer in cache:
            hook.observe(layer, watch)
        feed(model, cache, tokens(60), pieces(57, 32, decode=3))
    for layer in cache:
        keys, values = layer.keys[:, :, :60], layer.values[:, :, :60]
        positions = mx.broadcast_to(mx.arange(60), keys.shape[:3])
        got = watch.scores(layer, keys, values, positions)
        assert got.shape == keys.shape[:3]
        assert len(np.unique(np.array(got))) > 10
        with pytest.raises(ObservationError, match="layer . holds 59 rows, and the statistics stand for 60"):
            watch.scores(layer, keys[:, :, 1:], values[:, :, 1:], positions[:, :, 1:])


def test_rows_that_change_places_cannot_be_ranked(tiny: Any) -> None:
    model, cache = tiny("gpt_oss"), quiet(tiny("gpt_oss"))
    ring = next(layer for layer in cache if layer.kind == "rotating")
    with attention_hook(model) as hook, pytest.raises(ObservationError, match="is a RotatingKVCache"):
        hook.observe(ring, ScorerObserver(TOVA()))
        model(tokens(4), cache=cache)


@every
def test_packed_rows_are_read_as_attention_reads_them(scorer: ObservedScorer, tiny: Any) -> None:
    model, caches = tiny("llama"), (quiet(tiny("llama")), quiet(tiny("llama")))
    watch = ScorerObserver(scorer, rotations(model))
    found = []
    for bits, cache in zip((None, 8), caches, strict=True):
        with attention_hook(model) as hook:
            for layer in cache:
                hook.observe(layer, watch)
            feed(model, cache, tokens(40), [30])
            for layer in cache if bits else ():
                layer.to_quantized(32, bits)
            assert hasattr(cache[0], "bits") is (bits is not None)
            feed(model, cache, tokens(40), [5, 1, 4], start=30)
        keys, values = cache[1].dense_rows()
        positions = mx.broadcast_to(mx.array(cache[1].positions()), keys.shape[:3])
        found.append(np.array(watch.scores(cache[1], keys, values, positions)))
    finite = np.isfinite(found[0])
    assert np.corrcoef(found[0][finite], found[1][finite])[0, 1] > 0.99


def test_evictions_and_tokens_taken_back_are_followed_in_a_model(tiny: Any) -> None:
    model, cache, watch = tiny("llama"), quiet(tiny("llama")), ScorerObserver(H2O())
    twin = ScorerObserver(TOVA())
    with attention_hook(model) as hook:
        for layer in cache:
            hook.observe(layer, watch)
            hook.observe(layer, twin)
        feed(model, cache, tokens(20), [20])
        assert trim_prompt_cache(cache, 4) == 4
        for observer in (watch, twin):
            layer = cache[0]
            keys, values = layer.keys[:, :, :16], layer.values[:, :, :16]
            positions = mx.broadcast_to(mx.arange(16), keys.shape[:3])
            assert observer.scores(layer, keys, values, positions).shape == keys.shape[:3]
        feed(model, cache, tokens(22, seed=1), [3], start=19)
        stats = watch.statistics(cache[0])
        assert stats is not None
        assert (stats.held, stats.end) == (19, 19)
        index = mx.broadcast_to(mx.array([0, 5, 18]), (1, keys.shape[1], 3)).astype(mx.int32)
        watch.gather(cache[0], index)
        after = watch.statistics(cache[0])
        assert after is not None
        assert np.array_equal(
            np.array(after.rows["attention"]), np.array(stats.rows["attention"])[:, :, [0, 5, 18]]
        )
        watch.restore(cache[1], None)
        assert watch.statistics(cache[1]) is None
        watch.restore(cache[1], stats)
        assert watch.statistics(cache[1]) is stats


def test_a_models_rotation_is_found_where_it_can_be_undone(tiny: Any) -> None:
    assert set(rotations(tiny("llama"))) == {"layer 0", "layer 1"}
    assert rotations(tiny("deepseek_v3")) == {}
    assert rotations(tiny("rwkv7")) == {}
