"""Scorers against NumPy written from the papers' formulas, and the choice of rows against a sort in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache.backend.capabilities import KEYS, VALUES
from lumina_cache.methods import METHODS
from lumina_cache.scorers import (
    SCORERS,
    KeyDiff,
    KeyDistance,
    KeyNorm,
    LagKV,
    Leverage,
    Random,
    Scorer,
    SinksWindow,
    protected_rows,
    select,
)

#: One of each, with blocks that fit into the rows drawn here, and as they come.
EVERY: tuple[Scorer, ...] = (
    *(one() for one in SCORERS.values()),
    LagKV(sinks=2, lag=8),
    LagKV(sinks=0, lag=1),
    Random(seed=7),
)
every = pytest.mark.parametrize("scorer", EVERY, ids=str)
quick = settings(max_examples=40, deadline=None)


@dataclass(frozen=True)
class Rows:
    """What one layer holds: keys (B, H, T, D), values (B, H, T, Dv), positions (B, H, T) with gaps."""

    keys: mx.array
    values: mx.array
    positions: mx.array

    def scored_by(self, scorer: Scorer) -> np.ndarray:
        return np.array(scorer.scores(self.keys, self.values, self.positions))


def _side(rng: np.random.Generator, shape: tuple[int, ...], kind: str, scale: float) -> np.ndarray:
    """Rows as models have them (a common direction, unequal channels), then spoilt as ``kind`` says."""
    channels = np.exp(rng.normal(size=shape[-1]))
    x = (rng.normal(size=shape) + rng.normal(size=(*shape[:2], 1, shape[-1]))) * channels * scale
    match kind:
        case "zero":
            x[:] = 0
        case "constant":
            x[:] = x[:, :, :1]
        case "some rows zero":
            x[rng.random(shape[:-1]) < 0.5] = 0
        case "equal rows":
            x[:, :, shape[2] // 2 :] = x[:, :, -1:]
        case "one channel constant":
            x[..., 0] = scale
    return x


@st.composite
def held_rows(draw: st.DrawFn, kinds: tuple[str, ...] | None = None) -> Rows:
    kind = st.sampled_from(
        kinds
        or ("plain", "plain", "zero", "constant", "some rows zero", "equal rows", "one channel constant")
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, heads, rows = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 80))
    widths = draw(st.integers(4, 64)), draw(st.integers(4, 64))
    dtype = draw(st.sampled_from([mx.float32, mx.float32, mx.float16, mx.bfloat16]))
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    positions = np.cumsum(rng.integers(1, 4, (batch, heads, rows)), axis=-1) - 1
    keys, values = (
        mx.array(_side(rng, (batch, heads, rows, width), draw(kind), scale).astype(np.float32)).astype(dtype)
        for width in widths
    )
    return Rows(keys, values, mx.array(positions.astype(np.int32)))


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def heads_of(*arrays: np.ndarray) -> Iterator[tuple[tuple[int, int], list[np.ndarray]]]:
    for at in np.ndindex(arrays[0].shape[:2]):
        yield at, [one[at] for one in arrays]


# -- every scorer -------------------------------------------------------------------------------------------------------


@every
@quick
@given(rows=held_rows())
def test_scores_are_finite_float32_one_for_each_row(scorer: Scorer, rows: Rows) -> None:
    scores = scorer.scores(rows.keys, rows.values, rows.positions)
    assert scores.dtype == mx.float32
    assert scores.shape == rows.positions.shape
    assert np.isfinite(np.array(scores)).all()


@every
@settings(max_examples=15, deadline=None)
@given(rows=held_rows())
def test_scoring_changes_nothing_and_gives_the_same_again(scorer: Scorer, rows: Rows) -> None:
    before = [np.array(one.astype(mx.float32)) for one in (rows.keys, rows.values, rows.positions)]
    first = rows.scored_by(scorer)
    mx.random.normal((3,))  # the global generator must not matter
    assert np.array_equal(first, rows.scored_by(scorer))
    after = [np.array(one.astype(mx.float32)) for one in (rows.keys, rows.values, rows.positions)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@every
@settings(max_examples=15, deadline=None)
@given(rows=held_rows(kinds=("plain",)))
def test_a_head_is_scored_by_what_it_holds_itself(scorer: Scorer, rows: Rows) -> None:
    """Changing the last head of the last sequence leaves the scores of every other head as they were."""
    keys, values = mx.array(rows.keys), mx.array(rows.values)
    keys[-1, -1] = keys[-1, -1, ::-1] * 2
    values[-1, -1] = values[-1, -1, ::-1] * 2
    other = Rows(keys, values, rows.positions).scored_by(scorer)
    mine = rows.scored_by(scorer)
    mine[-1, -1] = other[-1, -1] = 0
    np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scorer", [one for one in EVERY if not one.reads_rows], ids=str)
def test_scorers_that_read_no_rows_need_none(scorer: Scorer) -> None:
    positions = mx.broadcast_to(mx.arange(9, dtype=mx.int32), (1, 2, 9))
    with_rows = scorer.scores(mx.ones((1, 2, 9, 4)), mx.ones((1, 2, 9, 4)), positions)
    assert mx.array_equal(scorer.scores(None, None, positions), with_rows)


@every
def test_values_without_channels_are_scored_as_some_models_cache_them(scorer: Scorer) -> None:
    rng = np.random.default_rng(0)
    keys = mx.array(rng.normal(size=(1, 2, 40, 8)).astype(np.float32))
    positions = mx.broadcast_to(mx.arange(40, dtype=mx.int32), (1, 2, 40))
    scores = np.array(scorer.scores(keys, mx.zeros((1, 2, 40, 0)), positions))
    assert scores.shape == (1, 2, 40)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("scorer", SCORERS.values(), ids=list(SCORERS))
def test_the_catalogue_says_what_a_scorer_reads(scorer: type[Scorer]) -> None:
    method = METHODS["evict", scorer.method.name]
    assert method is scorer.method
    assert scorer.reads_rows == bool({KEYS, VALUES} & method.requires)
    assert method.source
    assert method.formula


@pytest.mark.parametrize("scorer", [KeyNorm(), KeyDiff(), KeyDistance()], ids=str)
def test_values_that_the_catalogue_does_not_ask_for_may_be_missing(scorer: Scorer) -> None:
    assert VALUES not in scorer.method.requires
    positions = mx.broadcast_to(mx.arange(9, dtype=mx.int32), (1, 2, 9))
    assert scorer.scores(mx.ones((1, 2, 9, 4)), None, positions).shape == (1, 2, 9)


@pytest.mark.parametrize("scorer", [one for one in EVERY if one.reads_rows], ids=str)
def test_a_scorer_that_reads_rows_says_so_when_it_gets_none(scorer: Scorer) -> None:
    with pytest.raises(TypeError, match="reads_rows"):
        scorer.scores(None, None, mx.broadcast_to(mx.arange(300, dtype=mx.int32), (1, 2, 300)))


# -- each scorer against its formula ------------------------------------------------------------------------------------


@quick
@given(rows=held_rows())
def test_sinks_window_prefers_the_newest(rows: Rows) -> None:
    assert np.array_equal(rows.scored_by(SinksWindow()), np.array(rows.positions))


@quick
@given(rows=held_rows())
def test_key_norm_is_the_negative_length_of_the_key(rows: Rows) -> None:
    want = [
        [[-math.sqrt(sum(x * x for x in row)) for row in head] for head in one] for one in wide(rows.keys)
    ]
    np.testing.assert_allclose(rows.scored_by(KeyNorm()), want, rtol=1e-5)


def reference_keydiff(keys: np.ndarray) -> np.ndarray:
    out = np.zeros(len(keys))
    lengths = [math.sqrt(k @ k) for k in keys]
    anchor = sum((k / n for k, n in zip(keys, lengths, strict=True) if n > 0), np.zeros(keys.shape[1]))
    size = math.sqrt(anchor @ anchor)
    for i, (k, n) in enumerate(zip(keys, lengths, strict=True)):
        out[i] = -(k @ anchor) / (n * size) if n > 0 and size > 0 else 0.0
    return out


@quick
@given(rows=held_rows())
def test_keydiff_is_the_negative_cosine_to_the_mean_direction(rows: Rows) -> None:
    got = rows.scored_by(KeyDiff())
    for at, (keys,) in heads_of(wide(rows.keys)):
        np.testing.assert_allclose(got[at], reference_keydiff(keys), atol=2e-5)


@quick
@given(rows=held_rows(), factors=st.integers(0, 2**32))
def test_keydiff_sees_no_lengths_key_norm_and_key_distance_scale_with_them(rows: Rows, factors: int) -> None:
    rows = Rows(rows.keys.astype(mx.float32), rows.values, rows.positions)
    each = mx.array(2.0 ** np.random.default_rng(factors).integers(-3, 4, (*rows.positions.shape, 1)))
    stretched = Rows(rows.keys * each.astype(mx.float32), rows.values, rows.positions)
    np.testing.assert_allclose(stretched.scored_by(KeyDiff()), rows.scored_by(KeyDiff()), atol=2e-5)
    tripled = Rows(rows.keys * 3, rows.values, rows.positions)
    np.testing.assert_allclose(tripled.scored_by(KeyNorm()), 3 * rows.scored_by(KeyNorm()), rtol=1e-5)
    size = float(np.abs(wide(rows.keys)).max())
    np.testing.assert_allclose(
        tripled.scored_by(KeyDistance()), 3 * rows.scored_by(KeyDistance()), rtol=1e-4, atol=1e-4 * size
    )


def test_keydiff_ranks_by_angle_only_and_key_distance_by_length_too() -> None:
    """A key along the mean but ten times as long: the most ordinary by angle, the least by distance."""
    keys = np.tile(np.array([1.0, 0.1]), (8, 1)) + np.array([[0.0, 0.01 * i] for i in range(8)])
    keys[3] = 10 * keys.mean(axis=0)
    rows = Rows(
        mx.array(keys.astype(np.float32))[None, None], mx.zeros((1, 1, 8, 2)), mx.zeros((1, 1, 8), mx.int32)
    )
    assert rows.scored_by(KeyDiff())[0, 0].argmin() in (3, 4)
    assert rows.scored_by(KeyDistance())[0, 0].argmax() == 3


@quick
@given(rows=held_rows())
def test_key_distance_is_the_distance_to_the_mean_key(rows: Rows) -> None:
    got = rows.scored_by(KeyDistance())
    for at, (keys,) in heads_of(wide(rows.keys)):
        mean = [math.fsum(channel) / len(keys) for channel in keys.T]
        want = [math.dist(k, mean) for k in keys]
        np.testing.assert_allclose(got[at], want, rtol=1e-4, atol=1e-5 * (1e-9 + np.abs(keys).max()))


def reference_spread(block: np.ndarray, following: np.ndarray) -> np.ndarray:
    """softmax of the deviation of each row of one block, relative to the range of the next one."""
    deviations = []
    for row in block:
        relative = []
        for value, channel in zip(row, following.T, strict=True):
            low, high = min(channel), max(channel)
            relative.append(min(max((value - low) / (high - low), -1e6), 1e6) if high > low else 0.0)
        mean = sum(relative) / len(relative)
        deviations.append(math.sqrt(sum((x - mean) ** 2 for x in relative) / (len(relative) - 1)))
    weights = [math.exp(x - max(deviations)) for x in deviations]
    return np.array(weights) / sum(weights)


@settings(max_examples=60, deadline=None)
@given(rows=held_rows(), sinks=st.integers(0, 5), lag=st.integers(1, 16))
def test_lagkv_ranks_each_block_by_its_spread_seen_from_the_next(rows: Rows, sinks: int, lag: int) -> None:
    got = rows.scored_by(LagKV(sinks=sinks, lag=lag))
    n_rows = got.shape[-1]
    blocks = (n_rows - sinks) // lag
    for at, (keys, values) in heads_of(wide(rows.keys), wide(rows.values)):
        assert (got[at][:sinks] == 2).all()
        if blocks < 2:
            assert (np.diff(got[at][sinks:]) > 0).all()
            continue
        assert (got[at][sinks + (blocks - 1) * lag :] == 1).all()
        for b in range(blocks - 1):
            here, there = (slice(sinks + i * lag, sinks + (i + 1) * lag) for i in (b, b + 1))
            spread = reference_spread(keys[here], keys[there]) + reference_spread(values[here], values[there])
            order = np.argsort(got[at][here])
            np.testing.assert_allclose(got[at][here][order], np.arange(lag) / lag, atol=1e-6)
            assert (np.diff(spread[order]) >= -1e-4 * spread.max()).all()


@quick
@given(rows=held_rows(kinds=("plain",)))
def test_lagkv_does_not_depend_on_the_scale_of_keys_or_values(rows: Rows) -> None:
    rows = Rows(rows.keys.astype(mx.float32), rows.values.astype(mx.float32), rows.positions)
    scaled = Rows(rows.keys * 4, rows.values / 8, rows.positions)
    scorer = LagKV(sinks=2, lag=8)
    assert np.array_equal(scaled.scored_by(scorer), rows.scored_by(scorer))


def test_lagkv_gives_up_the_same_share_of_every_block() -> None:
    rng = np.random.default_rng(3)
    keys, values = (mx.array(rng.normal(size=(1, 2, 4 + 5 * 16, 8)).astype(np.float32)) for _ in range(2))
    positions = mx.broadcast_to(mx.arange(84, dtype=mx.int32), (1, 2, 84))
    scores = LagKV(sinks=4, lag=16).scores(keys, values, positions)
    kept = np.array(select(scores, 4 + 16 + 4 * 6, protected_rows(positions, 0, 0, ())))
    for head in kept[0]:
        assert list(np.histogram(head, bins=[0, 4, 20, 36, 52, 68, 84])[0]) == [4, 6, 6, 6, 6, 16]


def reference_leverage(x: np.ndarray) -> np.ndarray:
    ridge = 1e-3 * (x**2).sum() / x.shape[1]
    if ridge == 0:
        return np.zeros(len(x))
    return np.diag(x @ np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T))


@quick
@given(rows=held_rows())
def test_leverage_is_the_product_of_ridge_leverage_scores(rows: Rows) -> None:
    got = rows.scored_by(Leverage())
    assert (got >= 0).all()
    assert (got <= 1 + 1e-3).all()
    for at, (keys, values) in heads_of(wide(rows.keys), wide(rows.values)):
        want = reference_leverage(keys) * reference_leverage(values)
        np.testing.assert_allclose(got[at], want, rtol=5e-3, atol=1e-5)


@quick
@given(rows=held_rows())
def test_leverage_does_not_depend_on_the_scale_of_keys_or_values(rows: Rows) -> None:
    rows = Rows(rows.keys.astype(mx.float32), rows.values.astype(mx.float32), rows.positions)
    scaled = Rows(rows.keys * 16, rows.values / 64, rows.positions)
    np.testing.assert_allclose(scaled.scored_by(Leverage()), rows.scored_by(Leverage()), rtol=1e-4, atol=1e-6)


def test_leverage_is_highest_for_the_row_that_no_other_can_stand_in_for() -> None:
    rng = np.random.default_rng(5)
    plane = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 8))
    plane[17] = rng.normal(size=8)
    x = mx.array(plane.astype(np.float32))[None, None]
    assert Rows(x, x, mx.zeros((1, 1, 60), mx.int32)).scored_by(Leverage())[0, 0].argmax() == 17


# -- the control --------------------------------------------------------------------------------------------------------


def reference_mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


@quick
@given(rows=held_rows(), seed=st.integers(-(2**40), 2**40))
def test_random_is_a_hash_of_seed_head_and_position(rows: Rows, seed: int) -> None:
    got = rows.scored_by(Random(seed))
    heads = got.shape[1]
    for (b, h), (positions,) in heads_of(np.array(rows.positions)):
        salt = reference_mix((1 + b * heads + h) ^ reference_mix(seed & 0xFFFFFFFF))
        want = [(reference_mix(int(p) ^ salt) >> 8) / 2**24 for p in positions]
        assert got[b, h].tolist() == want


def _positions(rows: int, heads: int = 3) -> mx.array:
    return mx.broadcast_to(mx.arange(rows, dtype=mx.int32), (1, heads, rows))


def test_random_chooses_otherwise_for_another_seed_or_head_and_the_same_again() -> None:
    rows, kept = 400, 100
    no = protected_rows(_positions(rows), 0, 0, ())

    def chosen(seed: int) -> list[set[int]]:
        picked = np.array(select(Random(seed).scores(None, None, _positions(rows)), kept, no))[0]
        return [set(head.tolist()) for head in picked]

    sets = [head for seed in range(6) for head in chosen(seed)]
    assert chosen(3) == chosen(3)
    # Two independent choices of 100 of 400 share 25 rows on average, with a standard deviation of 3.75.
    shared = [len(a & b) for i, a in enumerate(sets) for b in sets[:i]]
    assert max(shared) < 25 + 6 * 3.75
    assert abs(np.mean(shared) - 25) < 2


def test_random_is_even_over_positions() -> None:
    """Over many seeds every position is kept about equally often: mean 64 of 256 seeds, deviation below 7."""
    counts = np.zeros(200)
    for seed in range(256):
        scores = Random(seed).scores(None, None, _positions(200, 1))
        kept = np.array(select(scores, 50, mx.zeros((1, 1, 200), mx.bool_)))[0, 0]
        counts[kept] += 1
    assert counts.min() > 64 - 6 * 7
    assert counts.max() < 64 + 6 * 7
    assert abs(np.corrcoef(counts, np.arange(200))[0, 1]) < 0.25


def test_evicting_by_random_twice_keeps_what_once_would_have_kept() -> None:
    positions = _positions(300)
    at_once = select(Random(1).scores(None, None, positions), 40, mx.zeros(positions.shape, mx.bool_))
    half = select(Random(1).scores(None, None, positions), 150, mx.zeros(positions.shape, mx.bool_))
    left = mx.take_along_axis(positions, half, -1)
    again = select(Random(1).scores(None, None, left), 40, mx.zeros(left.shape, mx.bool_))
    assert mx.array_equal(mx.take_along_axis(left, again, -1), at_once)


# -- choosing rows ------------------------------------------------------------------------------------------------------

odd_scores = st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.5, -3.0, math.nan, math.inf, -math.inf, 3e38, -3e38])


@st.composite
def choices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Scores (B, H, T) with many ties, protected rows, and how many may stay."""
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 24)))
    size = math.prod(shape)
    scores = np.array(draw(st.lists(odd_scores, min_size=size, max_size=size)), np.float32).reshape(shape)
    protected = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size))).reshape(shape)
    return scores, protected, draw(st.integers(0, shape[-1]))


def reference_select(scores: np.ndarray, protected: np.ndarray, kept: int) -> list[int]:
    def worth(i: int) -> tuple[bool, bool, float, int]:
        if protected[i]:
            return (True, True, 0.0, i)
        known = not math.isnan(scores[i])
        return (False, known, float(scores[i]) if known else 0.0, i)

    return sorted(sorted(range(len(scores)), key=worth)[len(scores) - kept :])


@settings(max_examples=300, deadline=None)
@given(choice=choices())
def test_select_keeps_the_protected_then_the_best_then_the_newest(
    choice: tuple[np.ndarray, np.ndarray, int],
) -> None:
    scores, protected, kept = choice
    got = select(mx.array(scores), kept, mx.array(protected))
    assert got.dtype == mx.int32
    assert got.shape == (*scores.shape[:2], kept)
    for at, (head, stay) in heads_of(scores, protected):
        rows = np.array(got)[at].tolist()
        assert rows == sorted(set(rows))
        assert rows == reference_select(head, stay, kept)
        if stay.sum() <= kept:
            assert set(np.flatnonzero(stay)) <= set(rows)


@pytest.mark.parametrize(("worse", "better"), [(math.nan, -math.inf), (math.nan, -3e38), (-3e38, 0.0)])
def test_a_score_that_is_not_a_number_ranks_below_every_number(worse: float, better: float) -> None:
    for order in ([worse, better], [better, worse]):
        kept = select(mx.array([[order]]), 1, mx.zeros((1, 1, 2), mx.bool_)).item()
        assert order[kept] is better


def test_of_equal_rows_the_newest_stay() -> None:
    kept = select(mx.zeros((2, 3, 50)), 7, mx.zeros((2, 3, 50), mx.bool_))
    assert (np.array(kept) == np.arange(43, 50)).all()


def test_of_too_many_protected_rows_the_newest_stay() -> None:
    scores = -mx.arange(20, dtype=mx.float32).reshape(1, 1, 20)
    kept = select(scores, 4, mx.arange(20).reshape(1, 1, 20) < 10)
    assert kept.tolist() == [[[6, 7, 8, 9]]]


def test_more_rows_than_there_are_cannot_be_kept() -> None:
    kept = select(mx.zeros((1, 1, 5)), 7, mx.zeros((1, 1, 5), mx.bool_))
    assert kept.tolist() == [[[0, 1, 2, 3, 4]]]


def test_heads_choose_for_themselves() -> None:
    scores = mx.array([[[3.0, 2, 1, 0], [0, 1, 2, 3]], [[0, 9, 9, 0], [9, 0, 0, 9]]])
    kept = select(scores, 2, mx.zeros(scores.shape, mx.bool_))
    assert kept.tolist() == [[[0, 1], [2, 3]], [[1, 2], [0, 3]]]


spans = st.tuples(st.integers(-5, 60), st.integers(-5, 60))


@settings(max_examples=100, deadline=None)
@given(
    rows=held_rows(kinds=("plain",)),
    sinks=st.integers(0, 90),
    recent=st.integers(0, 90),
    pinned=st.lists(spans, max_size=3).map(tuple),
)
def test_protected_rows_are_the_first_the_last_and_the_pinned_positions(
    rows: Rows, sinks: int, recent: int, pinned: tuple[tuple[int, int], ...]
) -> None:
    got = protected_rows(rows.positions, sinks, recent, pinned)
    assert got.dtype == mx.bool_
    for at, (positions,) in heads_of(np.array(rows.positions)):
        want = [
            i < sinks or len(positions) - i <= recent or any(a <= p < b for a, b in pinned)
            for i, p in enumerate(positions.tolist())
        ]
        assert np.array(got)[at].tolist() == want


def test_a_range_pinned_by_position_is_kept_wherever_the_rows_now_lie() -> None:
    positions = mx.array([[[0, 3, 7, 8, 20], [1, 2, 4, 9, 20]]], dtype=mx.int32)
    stay = protected_rows(positions, 1, 1, ((7, 9),))
    assert stay.tolist() == [[[True, False, True, True, True], [True, False, False, False, True]]]


@every
@settings(max_examples=15, deadline=None)
@given(rows=held_rows(), share=st.floats(0, 1), sinks=st.integers(0, 4), recent=st.integers(0, 8))
def test_every_scorer_keeps_exactly_as_many_rows_as_asked(
    scorer: Scorer, rows: Rows, share: float, sinks: int, recent: int
) -> None:
    n_rows = rows.positions.shape[-1]
    kept = min(max(1, round(share * n_rows), sinks + recent), n_rows)
    stay = protected_rows(rows.positions, sinks, recent, ())
    chosen = np.array(select(scorer.scores(rows.keys, rows.values, rows.positions), kept, stay))
    assert chosen.shape[-1] == kept
    assert (np.diff(chosen, axis=-1) > 0).all()
    for at, (head, protected) in heads_of(chosen, np.array(stay)):
        assert set(np.flatnonzero(protected)) <= set(head.tolist()), at
