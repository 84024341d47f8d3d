"""One layer list against a plain-Python model of its rows: appends, trims, actions, copies, restores in any order."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mlx_lm.models import cache as stock

from lumina_cache.apply import held
from lumina_cache.codecs import Affine, Dense, Layout
from lumina_cache.estimate import after_append, nbytes_allocated, nbytes_live
from lumina_cache.layers import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    ManagedLayer,
    QuantizedKVCache,
    RotatingKVCache,
    adopt,
    leaves,
)
from lumina_cache.steps import StepTracker

HEADS, DIM = 2, 32
WINDOW, CHUNK = 7, 6


def row_values(token: int) -> np.ndarray:
    """Keys (HEADS, DIM) of one token: a value that tells which token it was, and noise that packing has to keep apart."""
    noise = np.random.default_rng(token).uniform(-0.1, 0.1, (HEADS, DIM))
    return (token + noise).astype(np.float32)


def rows_of(tokens: list[int]) -> mx.array:
    return mx.array(np.stack([row_values(t) for t in tokens], axis=1)[None])


@dataclass(frozen=True)
class Model:
    """What a layer has to hold, in plain Python: the token of every row in order, with the positions that are gone."""

    kind: str
    held: tuple[tuple[int, int], ...] = ()  #: (position, token) of each row, ascending by position
    offset: int = 0
    evicted: bool = False
    bits: int | None = None
    lossy: frozenset[int] = field(default_factory=frozenset)  #: positions whose rows were packed once

    @property
    def trimmable(self) -> bool:
        if self.evicted:
            return False
        return self.kind != "rotating" or self.offset < WINDOW

    def can_trim(self, n: int) -> bool:
        return self.trimmable and n <= len(self.held)

    def append(self, tokens: list[int]) -> Model:
        if self.kind == "chunked" and len(self.held) > CHUNK:  # the model drops the front before each step
            held = self.held[-CHUNK:]
        elif self.kind == "rotating" and len(tokens) > 1:
            held = self.held[-(WINDOW - 1) :] if len(self.held) >= WINDOW else self.held
        elif self.kind == "rotating":
            held = self.held[-(WINDOW - 1) :]
        else:
            held = self.held
        new = tuple((self.offset + i, t) for i, t in enumerate(tokens))
        lossy = self.lossy | {p for p, _ in new} if self.bits else self.lossy
        return replace(self, held=held + new, offset=self.offset + len(tokens), lossy=lossy)

    def trim(self, n: int) -> Model:
        return replace(self, held=self.held[: len(self.held) - n], offset=self.offset - n)

    def keep(self, index: list[int]) -> Model:
        return replace(
            self, held=tuple(self.held[i] for i in index), evicted=self.evicted or len(index) < len(self.held)
        )

    def pack(self, bits: int) -> Model:
        return replace(self, bits=bits, lossy=self.lossy | {p for p, _ in self.held})


def decoded(layer: Any) -> np.ndarray:
    """The rows (T, HEADS, DIM) that the layer hands to attention, oldest first."""
    keys, values = layer.keys_and_values()
    if isinstance(keys, tuple | list):
        keys, values = (
            mx.dequantize(*one, group_size=layer.group_size, bits=layer.bits) for one in (keys, values)
        )
    if layer.kind == "rotating":
        keys, values = layer._temporal_order(layer.keys), layer._temporal_order(layer.values)
    assert mx.array_equal(keys * 2, values).item() or layer.layout.packed
    return np.array(keys)[0].transpose(1, 0, 2)


def check(layer: Any, model: Model) -> None:
    assert layer.offset == model.offset
    assert layer.rows == len(model.held)
    assert layer.empty() == (layer.keys is None)
    assert bool(layer)
    one = held(layer)
    assert one.capacity >= one.rows
    assert nbytes_allocated([one]) == layer.nbytes_allocated
    assert nbytes_live([one]) == layer.nbytes_live
    packed = model.bits is not None
    assert hasattr(layer, "bits") == (packed or layer.kind == "quantized")
    assert layer.evicted == model.evicted
    if layer.kind == "kv":
        assert layer.positions().tolist() == [p for p, _ in model.held]
    if not model.held:
        return
    got = decoded(layer)
    assert got.shape[0] == len(model.held)
    for row, (position, token) in zip(got, model.held, strict=True):
        # Packing at 4 bits errs by at most the range over 15, twice when packed again.
        tolerance = 0.03 if position in model.lossy or layer.kind == "quantized" else 0.0
        assert np.abs(row - row_values(token)).max() <= tolerance + 1e-6 * abs(token)


#: Layer lists: each kind alone, and kinds beside each other whose trims have to agree.
LISTS: dict[str, Any] = {
    "dense": lambda: [stock.KVCache()],
    "two dense": lambda: [stock.KVCache(), stock.KVCache()],
    "rotating": lambda: [stock.RotatingKVCache(WINDOW)],
    "chunked": lambda: [stock.ChunkedKVCache(CHUNK)],
    "concatenate": lambda: [stock.ConcatenateKVCache()],
    "quantized": lambda: [stock.QuantizedKVCache(32, 8)],
    "dense and rotating": lambda: [stock.KVCache(), stock.RotatingKVCache(WINDOW)],
    "dense and chunked": lambda: [stock.ChunkedKVCache(CHUNK), stock.KVCache()],
    "nested": lambda: [stock.CacheList(stock.KVCache(), stock.KVCache()), stock.KVCache()],
    "nested with a window": lambda: [stock.CacheList(stock.RotatingKVCache(WINDOW), stock.KVCache())],
}


class Rows(RuleBasedStateMachine):
    """Runs on real layers and on :class:`Model` side by side."""

    layers: list[Any]

    @initialize(which=st.sampled_from(sorted(LISTS)))
    def make(self, which: str) -> None:
        steps = StepTracker(name="model")
        self.layers = [adopt(entry, steps, f"layer {i}") for i, entry in enumerate(LISTS[which]())]
        self.models = [Model(leaf.kind) for leaf in self.leaves()]
        self.token = 0
        self.snapshot: tuple[list[Any], list[Model]] | None = None

    def leaves(self) -> list[Any]:
        return list(leaves(self.layers))

    def kv(self) -> list[int]:
        return [i for i, leaf in enumerate(self.leaves()) if leaf.kind == "kv" and leaf.rows]

    @rule(n=st.integers(1, 9))
    def append(self, n: int) -> None:
        tokens = list(range(self.token, self.token + n))
        self.token += n
        keys = rows_of(tokens)
        for leaf in self.leaves():
            if leaf.kind == "chunked":
                leaf.maybe_trim_front()
        self.leaves()[0].make_mask(n) if hasattr(self.leaves()[0], "make_mask") else None
        for i, leaf in enumerate(self.leaves()):
            before = held(leaf)
            leaf.update_and_fetch(keys, keys * 2)
            self.models[i] = self.models[i].append(tokens)
            if before.key_width:
                [predicted] = after_append([before], n)
                assert (predicted.rows, predicted.capacity) == (held(leaf).rows, held(leaf).capacity)

    @rule(n=st.integers(-3, 40))
    def trim(self, n: int) -> None:
        wanted = max(0, min(n, min((m.offset for m in self.models), default=0)))
        can = all(m.can_trim(wanted) for m in self.models)
        taken = [layer.trim(n) for layer in self.layers]
        # Once the first layer has been asked for more than there is, it takes what there is, and so do the others.
        assert set(taken) == {wanted if can else 0}
        if can:
            self.models = [m.trim(wanted) for m in self.models]

    @precondition(lambda self: self.kv())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        for i in self.kv():
            rows = len(self.models[i].held)
            keep = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1, max_size=rows)))
            self.leaves()[i].gather(np.array(keep, dtype=np.int32))
            self.models[i] = self.models[i].keep(keep)

    @precondition(lambda self: self.kv())
    @rule(bits=st.sampled_from([8, 4]))
    def quantize(self, bits: int) -> None:
        for i in self.kv():
            if self.models[i].bits is None or bits < self.models[i].bits:
                self.leaves()[i].reencode(Layout.both(Affine(bits, 32)))
                self.models[i] = self.models[i].pack(bits)

    @rule()
    def reclaim(self) -> None:
        for leaf in self.leaves():
            if isinstance(leaf, KVCache):
                leaf.compact()
                assert leaf.keys is None or leaf.capacity == leaf.rows

    @rule()
    def go_on_with_a_copy(self) -> None:
        memo: dict[int, Any] = {}
        before = self.layers
        self.layers = [copy.deepcopy(layer, memo) for layer in before]
        assert {leaf._steps for leaf in self.leaves()} & {leaf._steps for leaf in leaves(before)} == set()
        self.snapshot = before, list(self.models)

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def look_at_the_original(self) -> None:
        assert self.snapshot is not None
        originals, models = self.snapshot
        for leaf, model in zip(leaves(originals), models, strict=True):
            check(leaf, model)

    @rule()
    def save_and_restore(self) -> None:
        for layer in self.layers:
            state = copy.deepcopy(layer.state)
            if not layer.empty():
                mx.eval(state)
            layer.state = state

    @rule()
    def rebuild_from_state(self) -> None:
        if any(layer.empty() for layer in self.leaves()):
            return
        steps = StepTracker(name="model")
        self.layers = [
            adopt(type(layer).from_state(copy.deepcopy(layer.state)), steps, f"layer {i}")
            for i, layer in enumerate(self.layers)
        ]

    @rule()
    def touch(self) -> None:
        for layer in self.layers:
            assert layer.nbytes == layer.nbytes_allocated
        models = iter(self.models)
        for layer in self.layers:
            inside = [next(models).trimmable for _ in leaves([layer])]
            assert layer.is_trimmable() == all(inside)

    @invariant()
    def layers_hold_what_the_model_says(self) -> None:
        for leaf, model in zip(self.leaves(), self.models, strict=True):
            check(leaf, model)


TestRows = Rows.TestCase
TestRows.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_rows_over_long_histories() -> None:
    thorough = settings(
        max_examples=1500, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Rows, settings=thorough)


# -- single questions ------------------------------------------------------------------------------------------------


def filled(make: Any, n: int) -> Any:
    layer = make()
    rows = rows_of(list(range(n)))
    layer.update_and_fetch(rows, rows * 2)
    return layer


def test_positions_of_kept_rows_are_absolute_and_later_rows_follow_the_offset() -> None:
    layer = filled(KVCache, 10)
    layer.gather(np.array([0, 1, 7, 9], dtype=np.int32))
    new = rows_of([10, 11])
    layer.update_and_fetch(new, new * 2)
    assert layer.positions().tolist() == [0, 1, 7, 9, 10, 11]
    assert (layer.offset, layer.rows, layer.evicted) == (12, 6, True)
    layer.gather(np.array([1, 2, 4, 5], dtype=np.int32))
    assert layer.positions().tolist() == [1, 7, 10, 11]


def test_keeping_every_row_evicts_none() -> None:
    layer = filled(KVCache, 5)
    layer.gather(np.arange(5, dtype=np.int32))
    assert not layer.evicted
    assert layer.is_trimmable()
    assert layer.trim(2) == 2


def test_a_layer_packed_before_its_first_row_packs_from_there() -> None:
    layer = KVCache()
    layer.reencode(Layout.both(Affine(8, 32)))
    rows = rows_of([1, 2, 3])
    keys, _ = layer.update_and_fetch(rows, rows)
    assert len(keys) == 3
    assert layer.layout == Layout.both(Affine(8, 32))


def test_a_layer_trimmed_to_nothing_can_still_be_changed_and_filled_again() -> None:
    for change in (
        lambda layer: layer.reencode(Layout.both(Affine(8, 32))),
        lambda layer: layer.compact(),
        lambda layer: layer.to_quantized(32, 4),
        lambda layer: None,
    ):
        layer = filled(KVCache, 6)
        assert layer.trim(6) == 6
        change(layer)
        rows = rows_of([3, 4])
        layer.update_and_fetch(rows, rows * 2)
        check(
            layer,
            Model("kv", ((0, 3), (1, 4)), 2, bits=getattr(layer, "bits", None), lossy=frozenset({0, 1})),
        )


def test_going_back_to_dense_rows_returns_plain_arrays() -> None:
    layer = filled(KVCache, 6)
    layer.reencode(Layout.both(Affine(8, 32)))
    layer.reencode(Layout.both(Dense()))
    keys, values = layer.keys_and_values()
    assert isinstance(keys, mx.array)
    assert isinstance(values, mx.array)
    assert np.abs(np.array(keys) - np.array(rows_of(list(range(6))))).max() < 0.03


@pytest.mark.parametrize(
    "make",
    [
        KVCache,
        lambda: RotatingKVCache(8),
        lambda: ChunkedKVCache(8),
        ConcatenateKVCache,
        lambda: QuantizedKVCache(32, 8),
    ],
    ids=["kv", "rotating", "chunked", "concatenate", "quantized"],
)
def test_layers_work_without_a_cache_around_them(make: Any) -> None:
    layer = filled(make, 5)
    assert isinstance(layer, ManagedLayer)
    assert layer.rows == layer.offset == 5
    assert layer.nbytes > 0
    twin = copy.deepcopy(layer)
    assert twin.trim(2) == 2
    assert (twin.rows, layer.rows) == (3, 5)
    again = type(layer).from_state(layer.state)
    assert (again.rows, again.offset) == (5, 5)


def test_nested_entries_count_and_name_what_is_inside_them() -> None:
    steps = StepTracker(name="model")
    entry = adopt(stock.CacheList(stock.ArraysCache(2), stock.KVCache()), steps, "layer 4")
    assert isinstance(entry, CacheList)
    assert [child.name for child in entry.caches] == ["layer 4.0", "layer 4.1"]
    assert isinstance(entry[0], ArraysCache)
    rows = rows_of([1, 2, 3])
    entry[1].update_and_fetch(rows, rows)
    entry[0][0] = mx.zeros((1, 8))
    assert (entry.rows, entry.offset) == (3, 3)
    assert entry.nbytes == entry[0].nbytes + entry[1].nbytes
    assert entry.nbytes_live < entry.nbytes_allocated
    assert not entry.changed
    entry[1].reencode(Layout.both(Affine(8, 32)))
    assert entry.changed
    assert not entry.is_trimmable()
    assert entry.trim(1) == 0


def test_windows_with_kept_rows_are_stock_windows_with_kept_rows() -> None:
    mine, its = RotatingKVCache(8, keep=2), stock.RotatingKVCache(8, keep=2)
    for i, n in enumerate((5, 1, 1, 7, 1, 1, 1, 1, 1, 1, 1, 1, 3)):
        rows = rows_of(list(range(20 * i, 20 * i + n)))
        got, want = mine.update_and_fetch(rows, rows), its.update_and_fetch(rows, rows)
        assert all(mx.array_equal(a, b).item() for a, b in zip(got, want, strict=True))
        assert (mine.size(), mine.offset) == (its.size(), its.offset)
        for window in (None, 4, 8):
            for m in (1, 3):
                a, b = mine.make_mask(m, window_size=window), its.make_mask(m, window_size=window)
                assert a == b if not isinstance(b, mx.array) else mx.array_equal(a, b).item()
