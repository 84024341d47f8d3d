"""Carrying out actions: what was asked, what happened, and proof from the arrays that they are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from harness import disk_in, feed, held_of, quiet, real_bytes, tokens

from lumina_cache.actions import Evict, Keep, Quantize, Reclaim, parse_action
from lumina_cache.apply import Footprint, execute, held, not_built
from lumina_cache.codecs import Affine, AffineFetch, Layout
from lumina_cache.errors import ActionInfeasibleError, EngagementError
from lumina_cache.layers import KVCache, leaves


def filled(model: Any, n: int = 40) -> list[Any]:
    cache = quiet(model)
    feed(model, cache, tokens(n), [n - 1, 1])
    return list(leaves(cache))


def test_what_is_reported_is_what_was_asked_and_what_was_seen(tiny: Any) -> None:
    layers = filled(tiny("gemma3"))
    before = held_of(layers)
    applied = execute(layers, Evict("sinks_window", rows=12))
    assert applied.action == Evict("sinks_window", rows=12)
    assert applied.layers_changed == ("layer 2",)
    assert (applied.rows_before, applied.rows_after) == (40, 12)
    assert applied.before.nbytes_allocated - applied.after.nbytes_allocated == sum(
        b.capacity * 2 * 64 * 4 - 12 * 2 * 64 * 4 for b in before if b.kind == "kv"
    )
    assert applied.predicted_live == applied.after.nbytes_live
    assert applied.seconds > 0


def test_rows_that_stay_are_those_of_the_sinks_and_the_recent_window(tiny: Any) -> None:
    layers = filled(tiny("llama"))
    was = [np.array(layer.keys_and_values()[0]) for layer in layers]
    execute(layers, Evict("sinks_window", rows=10, sinks=3))
    index = [0, 1, 2, *range(33, 40)]
    for layer, keys in zip(layers, was, strict=True):
        assert layer.positions().tolist() == index
        assert np.array_equal(np.array(layer.keys_and_values()[0]), keys[:, :, index])


def test_parts_of_a_composite_are_carried_out_left_to_right(tiny: Any) -> None:
    layers = filled(tiny("llama"))
    applied = execute(layers, parse_action("evict:sinks_window@rows=20+quant:affine,bits=8,group=32+reclaim"))
    assert {(layer.rows, layer.capacity, layer.bits) for layer in layers} == {(20, 20, 8)}
    assert applied.rows_after == 20


def test_keeping_changes_no_layer_and_still_says_what_is_held(tiny: Any) -> None:
    layers = filled(tiny("llama"))
    before = held_of(layers)
    applied = execute(layers, Keep())
    assert held_of(layers) == before
    assert applied.layers_changed == ()
    assert applied.before.nbytes_allocated == applied.after.nbytes_allocated == real_bytes(layers)


def test_reclaiming_cuts_slack_and_empties_the_pool(tiny: Any) -> None:
    layers = filled(tiny("llama"))
    waste = mx.zeros((1 << 18,))
    mx.eval(waste)
    del waste
    assert mx.get_cache_memory() > 0
    applied = execute(layers, Reclaim())
    assert {layer.capacity for layer in layers} == {40}
    assert applied.after.mlx_pool == 0
    assert all(not layer.changed for layer in layers)


def test_what_the_model_still_owes_is_computed_before_the_action_and_not_in_its_time(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model)
    logits = model(tokens(200), cache=cache)
    applied = execute(list(leaves(cache)), Evict("sinks_window", rows=12))
    assert applied.before.mlx_active >= applied.before.nbytes_allocated
    assert mx.isfinite(logits).all().item()
    assert {layer.rows for layer in cache} == {12}


@pytest.mark.parametrize(
    "text",
    [
        "evict:kvzip@0.50",
        "quant:gear,bits=4,group=32",
        "quant:kvquant,kbits=4,vbits=2,group=32",
        "evict:sinks_window@0.50+quant:turboquant,bits=4,group=32",
        "quant:affine,bits=8,group=32+offload:quest@0.50",
        "0-1:evict:sinks_window@0.50;2:evict:kvzip@0.50",
        "merge:minicache",
        "offload:shadowkv@0.50",
        "page:64",
    ],
)
def test_what_there_is_no_code_for_is_refused_before_anything_is_changed(tiny: Any, text: str) -> None:
    layers = filled(tiny("llama"))
    before = held_of(layers)
    action = parse_action(text)
    why = not_built(action)
    assert why
    with pytest.raises(ActionInfeasibleError, match="no code for"):
        execute(layers, action)
    assert held_of(layers) == before


#: One action of every kind that there is code for.
BUILT = (
    "keep",
    "reclaim",
    "reserve:512",
    "evict:sinks_window@0.50",
    "evict:keydiff@rows=20",
    "quant:affine,bits=8,group=32",
    "quant:affine,bits=5,group=32",
    "quant:affine,kbits=8,vbits=4,group=32",
    "quant:affine_fetch,bits=4,group=32",
    "quant:kivi,bits=4,group=32",
    "quant:hadamard,bits=4,group=32,residual=8",
    "quant:mxfp8,bits=8,group=32",
    "offload:cold@0.50",
    "offload:layers=0-1",
    "0-1:evict:sinks_window@0.50",
    "evict:sinks_window@0.50+quant:hadamard,bits=4,group=32+offload:cold@0.50+reserve:300",
)


@pytest.mark.parametrize("text", BUILT)
def test_what_there_is_code_for_is_carried_out_and_the_bytes_are_those_of_the_arrays(
    tiny: Any, text: str, tmp_path: Path
) -> None:
    action = parse_action(text)
    assert not_built(action) is None
    layers = filled(tiny("llama"), 100)
    before = held_of(layers)
    with disk_in(tmp_path) as disk:
        applied = execute(layers, action, disk=disk)
        assert applied.predicted_allocated == applied.after.nbytes_allocated == real_bytes(layers)
        assert bool(applied.layers_changed) == (text != "keep")
        assert (held_of(layers) != before) == (text != "keep")


@pytest.mark.parametrize("text", ["offload:cold@0.50", "reclaim+offload:cold@0.50", "0:offload:layers=0-7"])
def test_without_a_disk_nothing_is_changed_before_rows_fail_to_go_there(tiny: Any, text: str) -> None:
    layers = filled(tiny("llama"))
    before = held_of(layers)
    with pytest.raises(ActionInfeasibleError, match="no disk tier"):
        execute(layers, parse_action(text))
    assert held_of(layers) == before


class Cheating(KVCache):
    """A layer that does not do what it is told."""

    cheats = ""

    def gather(self, index: np.ndarray, tail: np.ndarray | None = None) -> None:
        if self.cheats == "not at all":
            return
        super().gather(index[1:] if self.cheats == "one row short" else index, tail)
        store = self.own_store()
        assert store.keys is not None
        assert store.values is not None
        if self.cheats == "slack":
            store.keys, store.values = (
                tuple(mx.concatenate([a, a], axis=2) for a in side) for side in (store.keys, store.values)
            )
        if self.cheats == "wider":
            store.keys = tuple(mx.concatenate([a, a], axis=3) for a in store.keys)

    def reencode(self, layout: Layout) -> tuple[float | None, float | None]:
        if self.cheats == "not at all":
            return None, None
        drifts = super().reencode(layout)
        if self.cheats == "lossless":
            return drifts[0], 0.0
        if self.cheats == "tail twice":
            store = self.own_store()
            assert store.tail_keys is not None
            store.tail_keys = mx.concatenate([store.tail_keys, store.tail_keys], axis=2)
        return drifts

    def compact(self) -> None:
        assert self.cheats == "not at all"

    reserve = offload = lambda self, *_: self.compact()


def cheater(cheats: str, n: int = 20) -> Cheating:
    layer = Cheating()
    rows = mx.random.normal((1, 1, n, 32), key=mx.random.key(1))
    layer.update_and_fetch(rows, rows)
    layer.cheats = cheats
    return layer


@pytest.mark.parametrize("cheats", ["not at all", "one row short", "slack", "wider"])
def test_an_action_that_did_not_take_hold_is_an_error_and_never_a_success(cheats: str) -> None:
    with pytest.raises(EngagementError, match=r"layer \? should"):
        execute([cheater(cheats)], Evict("sinks_window", rows=8))


@pytest.mark.parametrize("text", ["reclaim", "reserve:512", "offload:cold@0.50"])
def test_room_or_rows_that_stayed_as_they_were_are_an_error(text: str, tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk, pytest.raises(EngagementError, match=r"layer \? should hold"):
        execute([cheater("not at all")], parse_action(text), disk=disk)


def test_packing_that_did_not_happen_is_an_error() -> None:
    with pytest.raises(EngagementError, match=r"should hold .*Affine\(bits=8.* but holds .*Dense"):
        execute([cheater("not at all")], Quantize("affine", 8, 8, 32))


def test_packing_that_loses_nothing_at_all_is_an_error() -> None:
    with pytest.raises(EngagementError, match="nothing was encoded"):
        execute([cheater("lossless")], Quantize("affine", 8, 8, 32))


def test_a_side_that_is_encoded_as_it_was_before_may_come_back_as_it_was() -> None:
    layer = cheater("")
    execute([layer], Quantize("affine", 8, 4, 32))
    execute([layer], Quantize("affine_fetch", 4, 4, 32))
    assert held(layer).layout == Layout.both(AffineFetch(4, 32))


def test_rows_that_were_coarser_before_they_stayed_dense_for_a_while_may_come_back_as_they_were() -> None:
    layer = cheater("")
    for action in (
        Quantize("affine", 4, 4, 32),
        Quantize("affine_fetch", 4, 8, 32, 32),
        Quantize("affine", 4, 4, 32),
    ):
        execute([layer], action)
    assert held(layer).layout == Layout.both(Affine(4, 32))


def test_dense_rows_that_take_more_than_they_should_are_an_error() -> None:
    with pytest.raises(EngagementError, match=r"layer \? should take"):
        execute([cheater("tail twice", 40)], Quantize("affine_fetch", 8, 8, 32, residual=4))


def test_an_empty_cache_has_no_footprint_and_nothing_to_change(tiny: Any) -> None:
    cache = quiet(tiny("falcon_h1"))
    now = Footprint.of(leaves(cache))
    assert (now.nbytes_live, now.nbytes_allocated) == (0, 0)
    applied = execute(list(leaves(cache)), Evict("sinks_window", rows=8))
    assert applied.layers_changed == ()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("dim", "group"), [(32, 32), (64, 32), (96, 32), (128, 64), (128, 128), (192, 64)])
def test_widths_are_read_back_from_packed_rows_exactly(bits: int, dim: int, group: int) -> None:
    layer = KVCache()
    rows = mx.random.normal((2, 3, 5, 2 * dim), key=mx.random.key(0))
    layer.update_and_fetch(rows[..., :dim], rows)
    dense = held(layer)
    execute([layer], Quantize("affine", bits, bits, group))
    packed = held(layer)
    assert (
        (packed.key_width, packed.value_width) == (dense.key_width, dense.value_width) == (6 * dim, 12 * dim)
    )
    assert packed.layout == Layout.both(Affine(bits, group))
    assert packed.itemsize == 4
