"""One layer list against a plain-Python model of its rows: appends, trims, actions, copies, restores in any order."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from harness import disk_in, real_bytes
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

from lumina_cache.actions import Action, Evict, Offload, Quantize, Reclaim, Reserve
from lumina_cache.apply import execute, held
from lumina_cache.codecs import Affine, AffineFetch, Codec, Dense, ElementFormat, Hadamard, Layout
from lumina_cache.disk import DiskStore
from lumina_cache.errors import ActionInfeasibleError, UnsupportedCacheError
from lumina_cache.estimate import (
    after_action,
    after_append,
    applies,
    nbytes_allocated,
    nbytes_live,
)
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
from lumina_cache.scorers import SCORERS
from lumina_cache.steps import StepTracker

HEADS, DIM = 2, 32
WINDOW, CHUNK = 7, 6

#: Widths (elements per head) of keys and of values.
Widths = tuple[int, int]


@cache
def row_values(token: int, side: int, width: int) -> np.ndarray:
    """What one token has as key (side 0) or value (side 1): (HEADS, width), like no other token's."""
    rng = np.random.default_rng((token, side))
    return rng.uniform(-1.0, 1.0, (HEADS, width)).astype(np.float32)


def rows_of(tokens: list[int], side: int = 0, width: int = DIM) -> mx.array:
    return mx.array(np.stack([row_values(t, side, width) for t in tokens], axis=1)[None])


def sides_of(tokens: list[int], widths: Widths = (DIM, DIM)) -> tuple[mx.array, mx.array]:
    return rows_of(tokens, 0, widths[0]), rows_of(tokens, 1, widths[1])


def error_of(codec: Codec) -> float:
    """Root-mean-square error per element that encoding once may add to a row of :func:`row_values`.

    Rows of different tokens lie 0.8 apart, so errors up to half of that tell them apart.
    """
    match codec:
        case Dense():
            return 0.0
        case ElementFormat(name="mxfp8"):
            return 0.05  # three bits of mantissa: at most 1/16 of the element
        case ElementFormat():
            return 0.25  # elements 0, ½, 1, 1½, 2, 3, 4, 6
        case Hadamard():
            return 0.6 * 6.0 / (2**codec.bits - 1)  # rotated elements are normal: ten deviations
        case Affine():
            return 0.6 * 2.4 / (2**codec.bits - 1)  # a step is the range over the codes less one
    raise AssertionError(codec)


#: Errors up to here leave rows recognisable.
RECOGNISABLE = 0.45


class Row(NamedTuple):
    """A row of one head as it has to be: whose it is, and how far its key and value may be off."""

    position: int
    token: int
    key_error: float = 0.0
    value_error: float = 0.0


@dataclass(frozen=True)
class Model:
    """What a layer has to hold, in plain Python: the rows of every head in order."""

    kind: str
    heads: tuple[tuple[Row, ...], ...] = ((),) * HEADS  #: as many rows in each head
    offset: int = 0
    evicted: bool = False
    layout: Layout = Layout()
    sealed: int = 0  #: rows from the front that are stored in the layout's codecs

    @property
    def rows(self) -> int:
        return len(self.heads[0])

    @property
    def tail(self) -> int:
        return self.rows - self.sealed

    @property
    def sealable(self) -> int:
        """Rows of the tail that are to be encoded; windows and chunks have no tail."""
        return self.layout.sealable(self.tail) if self.kind == "kv" else self.tail

    @property
    def worst(self) -> float:
        return max((max(r.key_error, r.value_error) for head in self.heads for r in head), default=0.0)

    @property
    def trimmable(self) -> bool:
        if self.evicted:
            return False
        return self.kind != "rotating" or self.offset < WINDOW

    def can_trim(self, n: int) -> bool:
        return self.trimmable and n <= self.rows

    def append(self, tokens: list[int]) -> Model:
        keep = self.rows
        if self.kind == "chunked" and keep > CHUNK:  # the model drops the front before each step
            keep = CHUNK
        elif self.kind == "rotating" and (len(tokens) == 1 or keep >= WINDOW):
            keep = min(keep, WINDOW - 1)
        gone = self.rows - keep
        new = tuple(Row(self.offset + i, t) for i, t in enumerate(tokens))
        longer = replace(
            self,
            heads=tuple(head[gone:] + new for head in self.heads),
            offset=self.offset + len(tokens),
            sealed=self.sealed - gone if self.kind != "kv" else self.sealed,
        )
        return longer.seal(longer.sealable)

    def seal(self, n: int) -> Model:
        """Store ``n`` rows more in the layout's codecs."""
        key, value = error_of(self.layout.keys), error_of(self.layout.values)

        def coded(head: tuple[Row, ...]) -> tuple[Row, ...]:
            first, end = self.sealed, self.sealed + n
            off = (
                r._replace(key_error=r.key_error + key, value_error=r.value_error + value)
                for r in head[first:end]
            )
            return head[:first] + tuple(off) + head[end:]

        return replace(self, heads=tuple(map(coded, self.heads)), sealed=self.sealed + n)

    def trim(self, n: int) -> Model:
        rows = self.rows - n
        sealed = self.sealed if rows >= self.sealed else rows // self.layout.block * self.layout.block
        return replace(
            self, heads=tuple(head[:rows] for head in self.heads), offset=self.offset - n, sealed=sealed
        )

    def keep(self, index: np.ndarray, sealed: int) -> Model:
        """Keep rows ``index`` (HEADS, n), of which ``sealed`` are in the layout's codecs."""
        heads = tuple(tuple(head[i] for i in which) for head, which in zip(self.heads, index, strict=True))
        return replace(self, heads=heads, sealed=sealed, evicted=self.evicted or index.shape[1] < self.rows)

    def reencode(self, layout: Layout) -> Model:
        again = replace(self, layout=layout, sealed=0)
        return again.seal(again.sealable)

    def positions(self) -> np.ndarray:
        return np.array([[r.position for r in head] for head in self.heads], dtype=np.int32)


def in_order(layer: Any, arrays: Any) -> Any:
    """The arrays of one side of a sliding window or of one of its lanes, oldest row first."""
    return layer._temporal_order(arrays) if layer.kind == "rotating" else arrays


def decoded(layer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values (HEADS, T, D) that the layer hands to attention, oldest row first."""
    layout = layer.layout
    if layer.kind == "rotating":
        sides = (as_tuple(layer.keys), as_tuple(layer.values))
        keys, values = (tuple(layer._temporal_order(a) for a in side) for side in sides)
        keys, values = layout.keys.decode(keys, mx.float32), layout.values.decode(values, mx.float32)
    else:
        keys, values = layer.keys_and_values()
        if layout.packed:
            keys, values = layout.keys.decode(keys, mx.float32), layout.values.decode(values, mx.float32)
    return np.array(keys)[0], np.array(values)[0]


def as_tuple(arrays: Any) -> tuple[mx.array, ...]:
    return (arrays,) if isinstance(arrays, mx.array) else tuple(arrays)


Codes = dict[tuple[int, int, tuple[int, ...]], bytes]


def codes_of(layer: Any, model: Model) -> Codes:
    """(head, side, positions of the rows encoded together) → the codes themselves."""
    if layer.kind == "kv" and layer.store is not None and model.sealed:
        sides, codecs = layer.store.encoded(), (layer.layout.keys, layer.layout.values)
    elif layer.kind in ("rotating", "chunked") and layer.lanes is not None and model.rows:
        sides, codecs = _lane_codes(layer, model), (layer.layout.keys, layer.layout.values)
    else:
        return {}
    found: Codes = {}
    for side, (arrays, codec) in enumerate(zip(sides, codecs, strict=True)):
        units = [_units(np.array(a)[0], codec, i) for i, a in enumerate(arrays)]
        for head in range(HEADS):
            rows = [r.position for r in model.heads[head][: model.sealed]]
            for n in range(len(rows) // codec.block):
                at = tuple(rows[n * codec.block : (n + 1) * codec.block])
                found[head, side, at] = b"".join(u[head][n].tobytes() for u in units)
    return found


def _units(a: np.ndarray, codec: Codec, which: int) -> np.ndarray:
    """(HEADS, blocks, …): the entries of one encoded array, block by block."""
    by_row = np.moveaxis(a, codec.axis - 1, 1)
    span = codec.spans[which]
    return np.ascontiguousarray(by_row.reshape(by_row.shape[0], by_row.shape[1] // span, span, -1))


def _lane_codes(layer: Any, model: Model) -> tuple[Any, Any]:
    lanes = layer.lanes.lanes
    keys, values = (tuple(in_order(layer, getattr(lane, s)) for lane in lanes) for s in ("keys", "values"))
    return tuple(a[:, :, : model.rows] for a in keys), tuple(a[:, :, : model.rows] for a in values)


def check(layer: Any, model: Model, widths: Widths = (DIM, DIM)) -> None:
    assert layer.offset == model.offset
    assert layer.rows == model.rows
    on_disk = layer.on_disk if isinstance(layer, KVCache) else 0
    assert layer.empty() == (layer.keys is None and on_disk == 0)
    assert bool(layer)
    one = held(layer)
    assert one.capacity >= one.sealed
    assert nbytes_allocated([one]) == layer.nbytes_allocated == real_bytes([layer])
    assert nbytes_live([one]) == layer.nbytes_live
    assert hasattr(layer, "bits") == (model.layout.packed or layer.kind == "quantized")
    assert layer.evicted == model.evicted
    if layer.kind in ("kv", "rotating", "chunked"):
        assert layer.layout == model.layout
    if layer.kind == "kv":
        assert (one.tail, one.sealed + one.on_disk) == (model.tail, model.sealed)
        assert np.array_equal(
            np.broadcast_to(layer.positions(), (1, HEADS, model.rows))[0], model.positions()
        )
    if model.rows == 0:
        return
    for side, (got, width) in enumerate(zip(decoded(layer), widths, strict=True)):
        want = [[row_values(r.token, side, width)[h] for r in head] for h, head in enumerate(model.heads)]
        allowed = np.array([[r.value_error if side else r.key_error for r in head] for head in model.heads])
        if layer.kind == "quantized":
            allowed += error_of(Affine(8, 32))
        assert got.shape == (HEADS, model.rows, width)
        off = np.sqrt(np.square(got - np.array(want)).mean(axis=-1))
        assert (off <= allowed).all(), (off.max(), allowed[off > allowed])


#: Layer lists: each kind alone, and kinds beside each other whose trims have to agree.
LISTS: dict[str, Any] = {
    "dense": lambda: [stock.KVCache()],
    "two dense": lambda: [stock.KVCache(), stock.KVCache()],
    "latent": lambda: [stock.KVCache()],
    "rotating": lambda: [stock.RotatingKVCache(WINDOW)],
    "chunked": lambda: [stock.ChunkedKVCache(CHUNK)],
    "concatenate": lambda: [stock.ConcatenateKVCache()],
    "quantized": lambda: [stock.QuantizedKVCache(32, 8)],
    "dense and rotating": lambda: [stock.KVCache(), stock.RotatingKVCache(WINDOW)],
    "dense and chunked": lambda: [stock.ChunkedKVCache(CHUNK), stock.KVCache()],
    "nested": lambda: [stock.CacheList(stock.KVCache(), stock.KVCache()), stock.KVCache()],
    "nested latent": lambda: [stock.CacheList(stock.KVCache(), stock.KVCache())],
    "nested with a window": lambda: [stock.CacheList(stock.RotatingKVCache(WINDOW), stock.KVCache())],
}
LATENT: Widths = (64, 32)

#: Ways to store rows: packed; decoded on fetch, also with unequal bits; rows encoded together; windows of dense rows.
QUANTIZE = (
    Quantize("affine", 8, 8, 32),
    Quantize("affine", 4, 4, 32),
    Quantize("affine", 8, 4, 32),
    Quantize("affine_fetch", 8, 8, 32),
    Quantize("affine_fetch", 4, 8, 32, residual=32),
    Quantize("affine_fetch", 6, 6, 32, residual=40),
    Quantize("kivi", 4, 4, 32),
    Quantize("kivi", 8, 4, 32, residual=0),
    Quantize("kivi", 5, 5, 32, residual=40),
    Quantize("hadamard", 8, 8, 32),
    Quantize("hadamard", 4, 8, 32, residual=40),
    Quantize("mxfp8", 8, 8, 32),
    Quantize("mxfp4", 4, 4, 32, residual=32),
    Quantize("nvfp4", 4, 4, 16),
)

lengths = st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 64, 70, 200]))


class Rows(RuleBasedStateMachine):
    """Runs on real layers and on :class:`Model` side by side."""

    layers: list[Any]
    disk: DiskStore

    @initialize(
        which=st.sampled_from(sorted(LISTS)),
        rows=st.sampled_from([3, 0, 40, 100, 150]),
        stored=st.sampled_from([None, *QUANTIZE]),
    )
    def make(self, which: str, rows: int, stored: Quantize | None) -> None:
        steps = StepTracker(name="model")
        self.layers = [adopt(entry, steps, f"layer {i}") for i, entry in enumerate(LISTS[which]())]
        self.models = [Model(leaf.kind) for leaf in self.leaves()]
        self.codes: list[Codes] = [{} for _ in self.models]
        self.widths = LATENT if "latent" in which else (DIM, DIM)
        self.token = 0
        self.others: tuple[list[Any], list[Model], list[Codes]] | None = None
        if rows:
            self.append(rows)
            if stored is not None:
                self.quantize(stored)

    def leaves(self) -> list[Any]:
        return list(leaves(self.layers))

    def kv(self) -> list[int]:
        return [i for i, leaf in enumerate(self.leaves()) if leaf.kind == "kv" and leaf.rows]

    def act(self, action: Action, pinned: tuple[tuple[int, int], ...] = ()) -> None:
        """Carry it out on all layers; what was predicted is what is there."""
        before = [held(leaf) for leaf in self.leaves()]
        execute(self.leaves(), action, pinned=pinned, disk=self.disk)
        want = after_action(before, action, pinned)
        assert [held(leaf) for leaf in self.leaves()] == list(want)

    @rule(n=lengths)
    def appends(self, n: int) -> None:
        self.append(n)

    def append(self, n: int) -> None:
        tokens = list(range(self.token, self.token + n))
        self.token += n
        keys, values = sides_of(tokens, self.widths)
        for leaf in self.leaves():
            if leaf.kind == "chunked":
                leaf.maybe_trim_front()
        self.leaves()[0].make_mask(n) if hasattr(self.leaves()[0], "make_mask") else None
        for i, leaf in enumerate(self.leaves()):
            before = held(leaf)
            leaf.update_and_fetch(keys, values)
            self.models[i] = self.models[i].append(tokens)
            if before.key_width:
                assert after_append([before], n) == (held(leaf),)
            if leaf.kind == "kv":
                assert self.codes[i].keys() <= codes_of(leaf, self.models[i]).keys()

    @rule(n=st.one_of(st.integers(-3, 90), st.just(10_000)))
    def trim(self, n: int) -> None:
        wanted = max(0, min(n, min((m.offset for m in self.models), default=0)))
        can = all(m.can_trim(wanted) for m in self.models)
        taken = [layer.trim(n) for layer in self.layers]
        # Once the first layer has been asked for more than there is, it takes what there is, and so do the others.
        assert set(taken) == {wanted if can else 0}
        if can:
            self.models = [m.trim(wanted) for m in self.models]
            self.only_old_codes()

    def only_old_codes(self) -> None:
        """No row that is stored was encoded since the last look."""
        for leaf, model, before in zip(self.leaves(), self.models, self.codes, strict=True):
            assert codes_of(leaf, model).keys() <= before.keys() or not before

    @precondition(lambda self: self.kv())
    @rule(data=st.data())
    def gather(self, data: st.DataObject) -> None:
        """Keep any rows, the same in every head or others in each."""
        for i in self.kv():
            model, leaf = self.models[i], self.leaves()[i]
            block = model.layout.block
            parts = []
            for n in (model.sealed // block, model.tail):
                heads = data.draw(st.sampled_from([1, HEADS]))
                kept = data.draw(st.integers(0, n))
                each = [
                    sorted(data.draw(st.permutations(range(n)))[:kept] if n < 40 else range(n - kept, n))
                    for _ in range(heads)
                ]
                parts.append(np.array(each, dtype=np.int32).reshape(heads, kept))
            if sum(p.shape[1] for p in parts) == 0:
                continue
            index, tail = (p[0] if p.shape[0] == 1 else p[None] for p in parts)
            leaf.gather(index, tail)
            rows = (parts[0][..., None] * block + np.arange(block)).reshape(parts[0].shape[0], -1)
            both = [np.broadcast_to(p, (HEADS, p.shape[1])) for p in (rows, parts[1] + model.sealed)]
            self.models[i] = model.keep(np.concatenate(both, axis=1), rows.shape[1])
        self.only_old_codes()

    @precondition(lambda self: self.kv())
    @rule(
        scorer=st.sampled_from(sorted(SCORERS)),
        kept=st.one_of(st.floats(0.1, 0.95), st.integers(1, 80)),
        sinks=st.integers(0, 5),
        recent=st.integers(0, 40),
        pinned=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=2),
    )
    def evict(self, scorer: str, kept: float, sinks: int, recent: int, pinned: list[tuple[int, int]]) -> None:
        ranges = tuple((first, first + n) for first, n in pinned)
        how = {"rows": kept} if isinstance(kept, int) else {"ratio": kept}
        action = Evict(scorer, **how, sinks=sinks, recent=recent)  # type: ignore[arg-type]
        before = {i: held(self.leaves()[i]) for i in self.kv()}
        try:
            self.act(action, ranges)
        except ActionInfeasibleError:
            assert before == {i: held(self.leaves()[i]) for i in self.kv()}
            # Refused only where a row that must stay had no room; whole blocks may need more of it.
            assert any(
                len(one) > action.rows_kept(was.rows) or ((was.layout.block > 1 or was.evicted) and one)
                for i, was in before.items()
                for one in self.protected(i, action, ranges)
            )
            return
        for i, was in before.items():
            model, leaf, block = self.models[i], self.leaves()[i], was.layout.block
            kept_rows = leaf.rows
            assert 0 < kept_rows <= max(block, action.rows_kept(was.rows))
            assert kept_rows >= action.rows_kept(was.rows) - block + 1
            stay = np.broadcast_to(leaf.positions(), (1, HEADS, kept_rows))[0]
            index = [np.flatnonzero(np.isin(p, s)) for p, s in zip(model.positions(), stay, strict=True)]
            assert {len(one) for one in index} == {kept_rows}
            now = held(leaf)
            for protected, one in zip(self.protected(i, action, ranges), index, strict=True):
                assert protected <= set(one.tolist())
            self.models[i] = model.keep(np.array(index), now.sealed + now.on_disk)
        self.only_old_codes()

    def protected(self, i: int, action: Evict, ranges: tuple[tuple[int, int], ...]) -> list[set[int]]:
        """Numbers of the rows that must stay, for each head."""
        rows, found = self.models[i].rows, []
        for head in self.models[i].positions():
            pinned = {n for n, p in enumerate(head) if any(first <= p < end for first, end in ranges)}
            edges = {*range(action.sinks), *range(rows - action.recent, rows)} & {*range(rows)}
            found.append(pinned | edges)
        return found

    @precondition(lambda self: any(leaf.rows for leaf in self.leaves()))
    @rule(action=st.sampled_from(QUANTIZE))
    def quantizes(self, action: Quantize) -> None:
        self.quantize(action)

    def quantize(self, action: Quantize) -> None:
        layout = action.layout
        assert layout is not None
        error = max(error_of(layout.keys), error_of(layout.values))
        if any(m.worst + error > RECOGNISABLE for m in self.models):
            return
        touched = [applies(held(leaf), action) for leaf in self.leaves()]
        same = [m.layout == layout for m in self.models]
        self.act(action)
        for i, applied in enumerate(touched):
            if applied and not same[i]:
                self.models[i] = self.models[i].reencode(layout)
                self.codes[i] = {}

    @precondition(lambda self: self.kv())
    @rule(
        how=st.one_of(
            st.just(Reclaim()),
            st.sampled_from([1, 33, 100, 300, 513]).map(Reserve),
            st.sampled_from([0.01, 0.3, 0.7, 0.99]).map(lambda ratio: Offload("cold", ratio=ratio)),
            st.just(Offload("layers", layers=(0, 9))),
        )
    )
    def moves(self, how: Action) -> None:
        """Room and place of the rows change, and nothing else."""
        self.act(how)
        for i in self.kv():
            now = held(self.leaves()[i])
            assert not isinstance(how, Reclaim) or now.capacity == now.sealed
            assert not isinstance(how, Reserve) or now.capacity >= how.rows
            assert getattr(how, "layers", None) is None or now.sealed == 0
        self.only_old_codes()

    @precondition(lambda self: any(getattr(leaf, "on_disk", 0) for leaf in self.leaves()))
    @rule()
    def restore(self) -> None:
        for leaf in self.leaves():
            if isinstance(leaf, KVCache):
                leaf.restore()
                assert leaf.on_disk == 0
        self.only_old_codes()

    @rule()
    def go_on_with_a_copy_or_the_other(self) -> None:
        """The two are changed in turn, and neither feels what is done to the other."""
        if self.others is not None:
            mine = self.layers, self.models, self.codes
            self.layers, self.models, self.codes = self.others
            self.others = mine
            return
        memo: dict[int, Any] = {}
        before = self.layers
        self.layers = [copy.deepcopy(layer, memo) for layer in before]
        assert {leaf._steps for leaf in self.leaves()} & {leaf._steps for leaf in leaves(before)} == set()
        self.others = before, list(self.models), list(self.codes)

    @rule(rebuild=st.booleans())
    def pass_through_the_state(self, rebuild: bool) -> None:
        """As mlx-lm saves and restores layers, into the same objects or into new ones."""
        if not rebuild:
            for layer in self.layers:
                state = copy.deepcopy(layer.state)
                if not layer.empty():
                    mx.eval(state)
                layer.state = state
        elif not any(layer.empty() for layer in self.leaves()):
            steps = StepTracker(name="model")
            self.layers = [
                adopt(type(layer).from_state(copy.deepcopy(layer.state)), steps, f"layer {i}")
                for i, layer in enumerate(self.layers)
            ]

    def touched_from_outside(self) -> None:
        for layer in self.layers:
            assert layer.nbytes == layer.nbytes_allocated
        models = iter(self.models)
        for layer in self.layers:
            inside = [next(models).trimmable for _ in leaves([layer])]
            assert layer.is_trimmable() == all(inside)

    @invariant()
    def layers_hold_what_the_model_says(self) -> None:
        for i, (leaf, model) in enumerate(zip(self.leaves(), self.models, strict=True)):
            check(leaf, model, self.widths)
            codes = codes_of(leaf, model)
            before = self.codes[i]
            assert all(codes[unit] == before[unit] for unit in codes.keys() & before.keys())
            self.codes[i] = codes
        self.touched_from_outside()

    def teardown(self) -> None:
        """Nothing that was done to these layers was done to the ones they were copied from."""
        if getattr(self, "others", None) is None:
            return
        assert self.others is not None
        self.layers, self.models, self.codes = self.others
        self.layers_hold_what_the_model_says()


@pytest.fixture(autouse=True, scope="module")
def _disk() -> Any:
    with tempfile.TemporaryDirectory() as directory, disk_in(Path(directory)) as disk:
        Rows.disk = disk
        yield


TestRows = Rows.TestCase
TestRows.settings = settings(
    max_examples=100, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_rows_over_long_histories() -> None:
    thorough = settings(
        max_examples=1000, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Rows, settings=thorough)


# -- single questions ------------------------------------------------------------------------------------------------


def filled(make: Any, n: int) -> Any:
    layer = make()
    layer.update_and_fetch(*sides_of(list(range(n))))
    return layer


def test_positions_of_kept_rows_are_absolute_and_later_rows_follow_the_offset() -> None:
    layer = filled(KVCache, 10)
    layer.gather(np.array([0, 1, 7, 9], dtype=np.int32))
    layer.update_and_fetch(*sides_of([10, 11]))
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
        layer.update_and_fetch(*sides_of([3, 4]))
        check(layer, Model("kv", layout=layer.layout).append([3, 4]))


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


@pytest.mark.parametrize("layout", [Layout(), Layout.both(Affine(8, 32)), Layout.both(AffineFetch(8, 32))])
@pytest.mark.parametrize("make", [KVCache, lambda: RotatingKVCache(WINDOW)], ids=["kv", "rotating"])
def test_models_may_tie_the_arrays_of_a_changed_layer_to_others(make: Any, layout: Layout) -> None:
    """mlx-lm's pipelined models set ``cache.keys = mx.depends(cache.keys, …)`` in every step."""
    layer = filled(make, 40)
    if isinstance(layer, KVCache):
        layer.gather(np.arange(3, 38, dtype=np.int32))
        layer.reencode(layout)
    elif layout.row_by_row and layout.bits:
        layer.reencode(layout)
    before = decoded(layer)
    was = as_tuple(layer.keys)
    tied = mx.depends(layer.keys, mx.ones(3))
    layer.keys = tied
    assert all(a is b for a, b in zip(as_tuple(layer.keys), as_tuple(tied), strict=True))
    assert all(a is not b for a, b in zip(as_tuple(layer.keys), was, strict=True))
    layer.values = mx.depends(layer.values, mx.ones(3))
    assert all(np.array_equal(a, b) for a, b in zip(decoded(layer), before, strict=True))
    layer.update_and_fetch(*sides_of([40]))
    if layer.changed:
        with pytest.raises(UnsupportedCacheError, match="changed by an action"):
            layer.values = mx.zeros((1, HEADS, 3, DIM))


def test_a_uniform_choice_after_one_per_head_keeps_rows_of_each() -> None:
    layer = filled(KVCache, 6)
    layer.gather(np.array([[[0, 1, 2, 5], [1, 3, 4, 5]]], dtype=np.int32))
    layer.gather(np.array([1, 3], dtype=np.int32))
    assert layer.positions().tolist() == [[[1, 5], [3, 5]]]


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_are_drawn_anew_for_each_head_wherever_they_are(on_disk: bool) -> None:
    layer = filled(KVCache, 40)
    if on_disk:
        layer.offload(Rows.disk, 40)
    execute([layer], Evict("random", rows=12))
    assert layer.heads == (1, HEADS)
    first, second = layer.positions()[0].tolist()
    assert first != second
    assert first[:4] == second[:4] == [0, 1, 2, 3]


def test_room_for_protected_rows_comes_before_the_tails() -> None:
    layer = filled(KVCache, 40)
    execute([layer], Quantize("affine_fetch", 8, 8, 32, residual=4))
    assert held(layer).tail == 8
    execute([layer], Evict("sinks_window", rows=10, sinks=4, recent=2), pinned=((20, 23),))
    assert layer.positions().tolist() == [0, 1, 2, 3, 20, 21, 22, 37, 38, 39]


def test_at_least_one_block_stays() -> None:
    layer = filled(KVCache, 64)
    execute([layer], Quantize("kivi", 8, 8, 32, residual=0))
    execute([layer], Evict("sinks_window", rows=5, sinks=0))
    assert layer.positions().tolist() == list(range(32, 64))


@pytest.mark.parametrize("n", [1, 5, 31, 32, 33, 60, 96, 100])
@pytest.mark.parametrize("action", QUANTIZE, ids=str)
def test_rows_taken_back_leave_the_others_as_they_were_also_within_a_block(action: Quantize, n: int) -> None:
    layout = action.layout
    assert layout is not None
    layer, model = filled(KVCache, 100), Model("kv").append(list(range(100))).reencode(layout)
    execute([layer], action)
    before = codes_of(layer, model)
    assert layer.trim(n) == n
    model = model.trim(n)
    check(layer, model)
    after = codes_of(layer, model)
    assert all(after[unit] == before[unit] for unit in after)
    tokens = list(range(200, 250))
    layer.update_and_fetch(*sides_of(tokens))
    check(layer, model.append(tokens))
