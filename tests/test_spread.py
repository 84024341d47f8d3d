"""Rows handed out over layers: what is minimised, that bytes are kept to, and that the plan is carried out."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from harness import feed, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache import LuminaCache
from lumina_cache.actions import Evict, Plan, parse_action, singles
from lumina_cache.errors import ActionInfeasibleError
from lumina_cache.spread import Losses, block_of, hand_out, losses_of, spread


def losses(index: int, drawn: list[float], least: int = 1, row_nbytes: int = 8) -> Losses:
    scores = np.array([drawn], np.float32)
    stay = np.zeros_like(scores, bool)
    stay[:, :least] = True
    return losses_of(index, scores, stay, row_nbytes)


def test_what_is_lost_is_the_square_of_the_share_of_attention_that_goes() -> None:
    found = losses(0, [1.0, 4.0, 2.0, 3.0], least=1)
    assert found.least == 1
    assert found.rows == 4
    # The first row stays; of the others 4, 3 and 2 come in this order.
    np.testing.assert_allclose(found.lost, [0.81, 0.25, 0.04, 0.0], atol=1e-12)


def test_heads_are_averaged_after_the_square() -> None:
    scores = np.array([[1.0, 1.0], [3.0, 1.0]], np.float32)
    found = losses_of(0, scores, np.zeros((2, 2), bool), 8)
    assert found.lost[1] == pytest.approx((0.5**2 + 0.25**2) / 2)


def test_scores_that_are_no_numbers_count_as_nothing() -> None:
    found = losses(0, [1.0, float("inf"), float("nan"), 1.0], least=1)
    assert found.lost[-1] == 0
    assert np.isfinite(found.lost).all()


@settings(max_examples=60, deadline=None)
@given(
    drawn=st.lists(st.lists(st.integers(0, 50), min_size=8, max_size=8), min_size=1, max_size=4),
    rows=st.integers(2, 8),
    block=st.sampled_from([1, 2]),
)
def test_no_way_of_handing_out_whole_blocks_beats_it_where_each_step_gains_less(
    drawn: list[list[int]], rows: int, block: int
) -> None:
    layers = []
    for i, one in enumerate(drawn):
        found = losses(i, [1.0 + x for x in one], least=1)
        # The lower hull, so that steps gain less and less.
        steps = np.sort(-np.diff(found.lost))[::-1]
        layers.append(Losses(i, 8, 1, 8, np.concatenate([[found.lost[0]], found.lost[0] - np.cumsum(steps)])))
    given = hand_out(layers, rows, block)
    assert sum(given) <= rows * len(layers)
    assert all(max(1, rows // 2) <= n + block - 1 and n <= 8 and (n - rows) % block == 0 for n in given)

    def cost(all_rows: tuple[int, ...]) -> float:
        return sum(one.at(n) for one, n in zip(layers, all_rows, strict=True))

    lowest = [rows - max(0, (rows - max(1, rows // 2)) // block) * block for _ in layers]
    ways = itertools.product(*(range(low, 9, block) for low in lowest))
    best = min(cost(way) for way in ways if sum(way) <= rows * len(layers))
    assert cost(given) == pytest.approx(best, abs=1e-9)


def test_a_layer_that_attends_to_many_rows_gets_more_of_them() -> None:
    narrow = losses(0, [1.0] + [1000.0] * 10 + [0.001] * 85)
    wide = losses(1, [1.0] * 96)
    few, many = hand_out([narrow, wide], 48, 16)
    assert few == 32
    assert many == 64


@pytest.mark.parametrize("codec", ["", "+quant:hadamard,bits=4,group=32"])
def test_a_spread_eviction_is_carried_out_in_no_more_bytes(tiny, codec: str) -> None:
    model = tiny("llama")
    with LuminaCache(model, rung="hook", observe=("h2o_mean",), telemetry=False, guard=False) as cache:
        feed(model, cache, tokens(512), [128] * 4)
        text = f"evict:h2o_mean@rows=192,recent=32{codec}"
        plan = cache.spread(text)
        assert isinstance(plan, Plan)
        applied = cache.apply(plan)
        assert applied is not None
        rows = [layer.rows for layer in cache]
        assert sum(rows) <= 192 * len(rows)
        assert all(n >= 96 for n in rows)
    with LuminaCache(model, rung="hook", observe=("h2o_mean",), telemetry=False, guard=False) as even:
        feed(model, even, tokens(512), [128] * 4)
        even.apply(text)
        assert applied.after.nbytes_live <= even.nbytes


@pytest.mark.parametrize(
    ("codec", "block"),
    [
        ("quant:hadamard,bits=4,group=64", 32),
        ("quant:kivi_hadamard,bits=4,group=64", 64),
        ("quant:affine,bits=4,group=64", 16),
    ],
)
def test_rows_are_handed_out_as_they_are_sealed(codec: str, block: int) -> None:
    assert block_of([parse_action(codec)]) == block
    layers = [losses(i, [1.0 + (i + 1) * j % 7 for j in range(512)]) for i in range(4)]
    plan = spread(parse_action(f"evict:h2o_mean@rows=256,recent=32+{codec}"), layers)
    rows = [part.rows for part in singles(plan) if isinstance(part, Evict)]
    assert all(n is not None and (n - 256) % block == 0 for n in rows)


def test_every_layer_is_named_with_its_own_rows() -> None:
    layers = [losses(i, [1.0 + i * j for j in range(64)]) for i in range(3)]
    plan = spread(parse_action("evict:h2o_mean@0.50+quant:hadamard,bits=4"), layers)
    assert [str(part).startswith(("evict:h2o_mean@rows=", "quant:hadamard")) for part in singles(plan)]
    assert all(plan.for_layer(i).parts[1] == parse_action("quant:hadamard,bits=4") for i in range(3))
    assert parse_action(str(plan)) == plan


@pytest.mark.parametrize(
    "text",
    ["quant:affine,bits=4,group=32", "evict:keydiff@0.5", "quant:affine,bits=8,group=32+evict:h2o_mean@0.5"],
)
def test_what_is_no_eviction_by_attention_is_refused_with_those_that_are(tiny, text: str) -> None:
    model = tiny("llama")
    with LuminaCache(model, rung="hook", observe=("h2o_mean",), telemetry=False) as cache:
        feed(model, cache, tokens(256), [128] * 2)
        before = [mx.array(layer.keys) for layer in cache]
        with pytest.raises(ActionInfeasibleError):
            cache.spread(text)
        assert all(bool(mx.array_equal(a, layer.keys)) for a, layer in zip(before, cache, strict=True))
