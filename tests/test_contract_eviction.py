"""Contract, item 4: evicting rows is the same as masking them in a cache that keeps everything.

The reference is mlx-lm's own complete cache with the evicted positions hidden from every query. Float32; differences are
at most 1e-5 of the largest logit.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from harness import (
    NO_ROWS,
    UNDECODABLE,
    UNEVICTABLE,
    UNPACKABLE,
    Hiding,
    architectures,
    assert_close,
    attend_around_hidden,
    fast_first,
    feed,
    hide,
    hiding_reference,
    masked_reference,
    pack_reference,
    quiet,
    same_bits,
    settle,
    tokens,
)
from mlx_lm.models.base import create_attention_mask

from lumina_cache.actions import parse_action
from lumina_cache.apply import execute
from lumina_cache.backend.capabilities import ROW_CHOICE
from lumina_cache.backend.examine import ROWS_CHOSEN_TOGETHER
from lumina_cache.backend.probe import probe_model
from lumina_cache.errors import ActionInfeasibleError
from lumina_cache.lab.tiny import SPECS
from lumina_cache.layers import KVCache, leaves
from lumina_cache.scorers import SCORERS

PROMPT = 30
#: Single tokens and several at once, in the order in which masks of both kinds follow each other.
STEPS = [1, 1, 3, 1, 5, 2, 1]
TAIL = sum(STEPS)


def gone(rows: int, kept: int, sinks: int = 4) -> np.ndarray:
    """Indices among ``rows`` that sinks and recent window leave out."""
    return np.arange(sinks, rows - (kept - sinks))


class Pair:
    """A cache and its reference, fed alike."""

    def __init__(self, model: Any, seed: int = 1) -> None:
        self.model, self.ids = model, tokens(200, seed=seed)
        self.cache, self.reference = quiet(model), masked_reference(model)
        self.at = 0
        #: Positions held, as the reference has them.
        self.held = np.array([], dtype=np.int64)

    def feed(self, steps: list[int]) -> None:
        """Feed both; their logits agree."""
        want = feed(self.model, self.reference, self.ids, steps, start=self.at)
        got = feed(self.model, self.cache, self.ids, steps, start=self.at)
        self.held = np.concatenate([self.held, np.arange(self.at, self.at + sum(steps))])
        self.at += sum(steps)
        assert_close(got, want)

    def evict(self, kept: int, sinks: int = 4) -> None:
        applied = self.cache.apply(f"evict:sinks_window@rows={kept},sinks={sinks}")
        assert applied is not None
        lost = gone(self.held.size, kept, sinks)
        hide(self.reference, self.held[lost])
        self.held = np.delete(self.held, lost)
        assert (applied.rows_before, applied.rows_after) == (kept + lost.size, kept)
        for layer in self.layers():
            assert layer.positions().tolist() == self.held.tolist()
            assert layer.offset == self.at

    def pack(self, bits: int, group: int) -> None:
        self.cache.apply(f"quant:affine,bits={bits},group={group}")
        self.reference = pack_reference(self.reference, bits, group)

    def layers(self) -> list[KVCache]:
        return [leaf for leaf in leaves(self.cache) if isinstance(leaf, KVCache)]


@pytest.mark.parametrize("name", architectures(but=NO_ROWS | UNEVICTABLE))
def test_evicting_rows_equals_masking_them(tiny: Any, name: str) -> None:
    pair = Pair(tiny(name))
    pair.feed([PROMPT])
    pair.evict(12)
    pair.feed(STEPS)
    assert {layer.rows for layer in pair.layers()} == {12 + TAIL}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(UNEVICTABLE))
def test_where_the_probe_forbids_eviction_it_would_not_equal_masking(tiny: Any, name: str) -> None:
    """Forced past the probe, these models' logits differ: the table of them is not longer than it must be."""
    model, ids = tiny(name), tokens(80)
    cache, reference = quiet(model), masked_reference(model)
    for one in (cache, reference):
        feed(model, one, ids, [70])
    execute(list(leaves(cache)), parse_action("evict:sinks_window@rows=40"))
    hide(reference, gone(70, 40))
    got, want = (feed(model, one, ids, [1], start=70)[..., :128] for one in (cache, reference))
    assert not mx.allclose(got, want, rtol=0.01, atol=0.01).item()


@pytest.mark.parametrize("name", architectures(but=NO_ROWS | UNEVICTABLE))
def test_evicting_twice_equals_masking_both_times(tiny: Any, name: str) -> None:
    pair = Pair(tiny(name), seed=2)
    pair.feed([20, 1])
    pair.evict(15, sinks=2)
    pair.feed([4, 1])
    pair.evict(9, sinks=5)
    pair.feed([1, 3, 1])


def test_rows_lose_their_place_but_not_their_rope_position(tiny: Any) -> None:
    """The control: with the number of rows as position the same rows give other logits."""
    pair = Pair(tiny("llama"))
    pair.feed([PROMPT])
    pair.evict(12)
    for layer in pair.layers():
        layer.offset, layer._dropped = 12, 0
    want = feed(pair.model, pair.reference, pair.ids, [1], start=PROMPT)
    got = feed(pair.model, pair.cache, pair.ids, [1], start=PROMPT)
    assert float(mx.abs(got - want).max() / mx.abs(want).max()) > 0.01


@pytest.mark.parametrize("name", ["mistral3", "ministral3", "gemma3", "gpt_oss", "llama4", "baichuan_m1"])
def test_windows_are_measured_in_positions_and_not_in_rows(tiny: Any, name: str) -> None:
    """Rows that a window has left behind do not come back into it because rows between were evicted."""
    pair = Pair(tiny(name), seed=3)
    pair.feed([50, 1])
    pair.evict(30, sinks=8)
    pair.feed([1, 3, 1, 20, 1, 1, 5])


def test_evicting_while_everything_is_within_the_window_and_going_on_past_it(tiny: Any) -> None:
    pair = Pair(tiny("mistral3"), seed=4)
    pair.feed([12])
    pair.evict(8, sinks=3)
    pair.feed([1, 4, 1, 17, 1])


# -- every scorer, every head for itself -------------------------------------------------------------------------------

#: Architectures of the normal run: grouped heads, windows beside full layers, attention sinks, latents, states, lists.
SIX = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "falcon_h1", "longcat_flash")

#: Attention that is not mlx-lm's own function cannot be told which rows to hide, nor can an indexer before it. The
#: masks of the tests above do both, and an indexer's models refuse a choice of rows per head.
BY_HAND = {name for name, why in UNPACKABLE.items() if why == "attention by hand"} | UNDECODABLE


@pytest.mark.parametrize("scorer", sorted(SCORERS))
@pytest.mark.parametrize(
    "name", fast_first([n for n in SPECS if n not in NO_ROWS | UNEVICTABLE | BY_HAND], SIX)
)
def test_evicting_by_any_scorer_equals_hiding_those_rows_from_each_head(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, name: str, scorer: str
) -> None:
    model, ids, at = tiny(name), tokens(200, seed=7), 0
    cache, reference = quiet(model), hiding_reference(model)
    served = attend_around_hidden(monkeypatch, reference)
    choice = ROW_CHOICE in SCORERS[scorer].method.requires
    if choice and not cache._control.profile(cache._control.trackers[0]).has(ROW_CHOICE):
        for one in (cache, reference):
            feed(model, one, ids, [40])
        with pytest.raises(ActionInfeasibleError, match="ROW_CHOICE"):
            cache.apply(f"evict:{scorer}@0.50")
        return
    for first, kept in (([40], 24), (STEPS, 20)):
        got, want = (feed(model, one, ids, first, start=at) for one in (cache, reference))
        assert_close(got, want)
        at += sum(first)
        rows = next(layer.rows for layer in leaves(cache) if isinstance(layer, KVCache) and layer.rows)
        kept = min(kept, rows - 1)
        scores = {id(layer): score(layer, scorer) for layer in leaves(cache) if isinstance(layer, KVCache)}
        was = {id(layer): of_heads(layer) for layer in leaves(cache) if isinstance(layer, KVCache)}
        cache.apply(f"evict:{scorer}@rows={kept},sinks=2,recent=3")
        for layer, whole in zip(leaves(cache), leaves(reference), strict=True):
            if not isinstance(whole, Hiding) or whole.keys is None:
                continue
            assert (layer.rows, layer.offset) == (kept, at)
            stay, held = of_heads(layer), was[id(layer)]
            whole.hidden = np.ones((*stay.shape[:2], at), dtype=bool)
            np.put_along_axis(whole.hidden, stay, False, axis=-1)
            best(scores[id(layer)], held, stay)
    got, want = (feed(model, one, ids, STEPS, start=at) for one in (cache, reference))
    assert_close(got, want)
    assert served, "the reference hid nothing"


@pytest.mark.parametrize("name", sorted(ROWS_CHOSEN_TOGETHER))
def test_where_one_cache_numbers_the_rows_of_another_a_choice_of_its_own_is_refused_and_would_be_wrong(
    tiny: Any, name: str
) -> None:
    model, ids = tiny(name), tokens(80, seed=7)
    cache, reference = quiet(model), masked_reference(model)
    for one in (cache, reference):
        feed(model, one, ids, [70])
    with pytest.raises(ActionInfeasibleError, match="picks rows of the layer's other cache by their number"):
        cache.apply("evict:keydiff@rows=40")
    # Forced, with the first cache's rows hidden from the reference, the logits are others.
    execute(list(leaves(cache)), parse_action("evict:keydiff@rows=40"))
    kept = [leaf.positions() for leaf in leaves(cache)]
    assert any(not np.array_equal(one, kept[0]) for one in kept)
    hide(reference, set(range(70)) - set(kept[0].ravel().tolist()))
    got, want = (feed(model, one, ids, [1], start=70) for one in (cache, reference))
    assert not mx.allclose(got, want, rtol=0.01, atol=0.01).item()


def test_the_reference_that_hides_nothing_is_far_off(tiny: Any) -> None:
    """The control: the tolerance tells a row that is hidden from one that is not."""
    model, ids = tiny("llama"), tokens(60, seed=8)
    cache, reference = quiet(model), hiding_reference(model)
    for one in (cache, reference):
        feed(model, one, ids, [40])
    cache.apply("evict:keydiff@rows=39,sinks=0")
    with pytest.raises(AssertionError, match="largest difference"):
        assert_close(*(feed(model, one, ids, [1, 3], start=40) for one in (cache, reference)))


def of_heads(layer: KVCache) -> np.ndarray:
    """Positions (B, H, T) of the rows held."""
    positions = layer.positions()
    return np.broadcast_to(positions, (*layer.heads, positions.shape[-1])) if layer.rows else positions


def score(layer: KVCache, scorer: str) -> np.ndarray | None:
    if layer.rows == 0:
        return None
    keys, values = layer.keys_and_values()
    scores = SCORERS[scorer]().scores(keys, values, mx.array(of_heads(layer)))
    return np.array(mx.broadcast_to(scores, keys.shape[:3]))


def best(scores: np.ndarray | None, held: np.ndarray, stay: np.ndarray) -> None:
    """Sinks and recent rows stay, and of the others none that goes is better than one that stays."""
    assert scores is not None
    for per_row, before, after in zip(
        scores.reshape(-1, scores.shape[-1]),
        held.reshape(-1, held.shape[-1]),
        stay.reshape(-1, stay.shape[-1]),
        strict=True,
    ):
        stays = np.isin(before, after)
        assert stays[:2].all()
        assert stays[-3:].all()
        assert per_row[2:-3][stays[2:-3]].min() >= per_row[2:-3][~stays[2:-3]].max()


@pytest.mark.parametrize("packed_first", [True, False], ids=["packed then evicted", "evicted then packed"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", architectures(but=NO_ROWS | UNEVICTABLE | UNPACKABLE.keys()))
def test_packed_and_evicted_rows_equal_masked_packed_rows_in_either_order(
    tiny: Any, name: str, bits: int, packed_first: bool
) -> None:
    group = probe_model(tiny(name)).group_size
    assert group is not None
    pair = Pair(tiny(name), seed=5)
    pair.feed([PROMPT])
    for pack in (packed_first, not packed_first):
        if pack:
            pair.pack(bits, group)
        else:
            pair.evict(12)
    pair.feed(STEPS)


def test_evicting_packed_rows_twice_equals_masking_them(tiny: Any) -> None:
    pair = Pair(tiny("llama"), seed=6)
    pair.feed([PROMPT])
    pair.evict(20)
    pair.pack(8, 32)
    pair.feed([3, 1])
    pair.evict(10, sinks=0)
    pair.feed(STEPS)


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "phi3"])
def test_codes_of_kept_rows_do_not_change_when_others_are_evicted(tiny: Any, name: str) -> None:
    model = tiny(name)
    cache = quiet(model)
    feed(model, cache, tokens(PROMPT), [PROMPT])
    cache.apply("quant:affine,bits=4,group=32")
    settle(cache)
    layers = [leaf for leaf in leaves(cache) if isinstance(leaf, KVCache)]
    before = [[mx.array(a) for a in (*leaf.keys, *leaf.values)] for leaf in layers]
    cache.apply("evict:sinks_window@rows=11,sinks=3")
    kept = mx.array([i for i in range(PROMPT) if i not in gone(PROMPT, 11, 3)])
    for leaf, was in zip(layers, before, strict=True):
        for a, b in zip((*leaf.keys, *leaf.values), was, strict=True):
            assert same_bits(a, b[:, :, kept])


@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("window", [None, 5, 16, 100])
@pytest.mark.parametrize("n", [1, 3, 5, 40])
def test_masks_of_evicted_rows_are_the_columns_that_are_left_of_the_full_mask(
    n: int, window: int | None, return_array: bool
) -> None:
    """N = 1 and N > 1, the string form and the array form, with and without a window."""
    layer = KVCache()
    rows = mx.zeros((1, 1, 30, 32))
    layer.update_and_fetch(rows, rows)
    index = np.array([0, 1, 2, 17, 22, 28, 29], dtype=np.int32)
    layer.gather(index)
    mask = create_attention_mask(mx.zeros((1, n, 8)), layer, window_size=window, return_array=return_array)
    key, query = np.concatenate([index, np.arange(30, 30 + n)]), np.arange(30, 30 + n)
    full = query[:, None] >= key[None]
    if window is not None:
        full &= query[:, None] - key[None] < window
    if mask is None:
        assert n == 1
        assert window is None
        assert full.all()
    elif isinstance(mask, str):
        assert (mask, window, return_array) == ("causal", None, False)
        # "causal" aligns the last query with the last row; no row lies between, so it is the same mask.
        assert np.array_equal(full, np.tri(n, key.size, key.size - n, dtype=bool))
    else:
        assert np.array_equal(np.array(mask), full)
        # … and it fits the rows that the next update returns.
        new = mx.zeros((1, 1, n, 32))
        assert layer.update_and_fetch(new, new)[0].shape[2] == mask.shape[-1]


def test_layers_that_share_a_mask_hold_the_same_number_of_rows(tiny: Any) -> None:
    for name in ("llama", "longcat_flash", "deepseek_v32", "mistral3"):
        pair = Pair(tiny(name))
        pair.feed([PROMPT])
        pair.cache.apply("evict:sinks_window@0.37")
        assert len({layer.rows for layer in pair.layers()}) == 1


def test_an_evicted_cache_cannot_be_trimmed_and_says_so(tiny: Any) -> None:
    pair = Pair(tiny("llama"))
    pair.feed([PROMPT])
    assert pair.cache[0].is_trimmable()
    pair.evict(12)
    assert not pair.cache[0].is_trimmable()
    assert pair.cache[0].trim(3) == 0
    assert pair.cache[0].offset == PROMPT
