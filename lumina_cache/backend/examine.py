"""What each layer of one model takes part in, and what may be done to its rows, found by doing it on copies.

One throw-away cache is filled with a few tokens; every trial takes a copy of it, changes some rows, and runs a step of
two tokens (and of one, where that could differ). Where the change should not be felt (buffers allocated ahead, a mask
given as an array) or hardly (rows at eight bits), the logits are compared with those of the unchanged copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask

from ..codecs import Codec, Layout
from ..codecs.base import Encoded
from ..estimate import LANE_KINDS
from ..layers import ChunkedKVCache, KVCache, RotatingKVCache, leaves
from .bench import FILLED, Bench, Leaf, attempt, divergence, forward, leaf_of, watched
from .capabilities import (
    ARRAY_MASK,
    DENSE_REENCODE,
    RAGGED_LAYERS,
    RESERVE,
    ROW_CHOICE,
    ROW_GATHER,
    Capability,
    Outcome,
    element_format,
    packed_attention,
)
from .isolate import first_line
from .matrix_checks import FORMATS
from .packable import MOST_KL, PackedSearch

__all__ = ["ROWS_CHOSEN_TOGETHER", "Examination", "examine", "examine_packed"]

#: Rows that uneven layers are cut to.
UNEVEN = (8, 6)

#: Rows by which buffers are allocated ahead.
AHEAD = 300

#: mlx-lm modules in which one cache of a layer says by number which rows of another one are attended to: both have to keep
#: rows of the same tokens, which no exception would tell. The test suite compares every other module with masked rows.
ROWS_CHOSEN_TOGETHER: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"), "the indexer picks rows of the layer's other cache by their number"
    )
)

#: KL divergence (nats per token) above which a change that must not be felt was felt.
SAME_KL = 1e-3


@dataclass(frozen=True)
class Examination:
    """What was found: facts per leaf, and outcomes to add to the profile (or to say better what is in it)."""

    leaves: tuple[Leaf, ...]
    outcomes: Mapping[Capability, Outcome]
    seconds: float


def examine(model: Any, known: Mapping[Capability, Outcome]) -> Examination:
    """Examine ``model`` layer by layer. Never raises; leaves no array, limit or state behind.

    Args:
        known: outcomes of the model as a whole; those for packed rows say which layouts to look into.
    """
    start = time.perf_counter()
    try:
        bench = Bench.of(model)
        found, outcomes = _examined(bench, known)
    except Exception as error:
        reason = f"the model could not be examined: {first_line(error)}"
        absent = Outcome(False, reason, time.perf_counter() - start)
        every = (RAGGED_LAYERS, ROW_CHOICE, DENSE_REENCODE, ARRAY_MASK, RESERVE)
        return Examination((), dict.fromkeys(every, absent), time.perf_counter() - start)
    return Examination(found, outcomes, time.perf_counter() - start)


def _examined(
    bench: Bench, known: Mapping[Capability, Outcome]
) -> tuple[tuple[Leaf, ...], dict[Capability, Outcome]]:
    entries = bench.fresh()
    masks, makes = watched(entries, lambda: bench.reference(entries))
    kv = bench.changeable
    found = tuple(
        leaf_of(leaf, i in bench.updated, masks.get(i, ())) for i, leaf in enumerate(leaves(bench.filled))
    )
    if not kv:
        absent = Outcome(False, "the model holds no K/V rows that could be changed")
        outcomes = dict.fromkeys((RAGGED_LAYERS, ROW_CHOICE, DENSE_REENCODE, ARRAY_MASK, RESERVE), absent)
        windows = [leaf for leaf in found if leaf.kind in LANE_KINDS and leaf.updated]
        if windows:
            outcomes |= {DENSE_REENCODE: attempt(lambda: _reencoded(bench)), **_formats(windows)}
        return found, outcomes
    outcomes = {
        RAGGED_LAYERS: _ragged(bench, known.get(ROW_GATHER)),
        ROW_CHOICE: _chosen(bench, known.get(ROW_GATHER)),
        DENSE_REENCODE: attempt(lambda: _reencoded(bench)),
        **_unfelt(bench),
    }
    outcomes |= _formats([found[i] for i in kv])
    packed: list[dict[Capability, Outcome]] = [{} for _ in found]
    search = PackedSearch(bench, found, makes)
    for capability, outcome in known.items():
        if capability.name != packed_attention(0, 0).name:
            continue
        for i, one in search.by_leaf(capability, outcome).items():
            packed[i][capability] = one
        outcomes |= search.outcomes(
            capability, {i: p[capability] for i, p in enumerate(packed) if capability in p}
        )
    return tuple(
        replace(leaf, packed=MappingProxyType(p)) for leaf, p in zip(found, packed, strict=True)
    ), outcomes


def examine_packed(model: Any, layout: Capability, whole: Outcome) -> dict[Capability, Outcome]:
    """What to say of one packed layout that the model as a whole could not be given. Never raises."""
    try:
        bench = Bench.of(model)
        entries = bench.fresh()
        masks, makes = watched(entries, lambda: bench.reference(entries))
        found = [
            leaf_of(leaf, i in bench.updated, masks.get(i, ())) for i, leaf in enumerate(leaves(bench.filled))
        ]
        search = PackedSearch(bench, found, makes)
        return search.outcomes(layout, search.by_leaf(layout, whole))
    except Exception:
        return {layout: whole}


def _run(bench: Bench, entries: list[Any], tokens: int) -> None:
    forward(bench.model, entries, tokens, FILLED)


def _ragged(bench: Bench, gather: Outcome | None) -> Outcome:
    """Different rows in neighbouring layers: in a step of one token, and in one of two."""
    if gather is not None and not gather.present:
        return gather
    layers = [leaf.name.partition(".")[0] for leaf in bench.of_entries(bench.filled)]
    number = {name: i for i, name in enumerate(dict.fromkeys(layers))}
    if len(number) == 1:
        return Outcome(True, "one layer holds rows, so there is none to differ from")
    start = time.perf_counter()

    def uneven() -> list[Any]:
        entries = bench.fresh()
        for layer, leaf in zip(layers, bench.of_entries(entries), strict=True):
            # Several caches of one layer stay equal: they stand for the same tokens.
            kept = UNEVEN[number[layer] % 2]
            leaf.gather(np.r_[0:2, FILLED - kept + 2 : FILLED].astype(np.int32))
        return entries

    one, more = (attempt(lambda n=n: _run(bench, uneven(), n)) for n in (1, 2))  # type: ignore[misc]
    seconds = time.perf_counter() - start
    if one.present and more.present:
        return Outcome(True, None, seconds)
    if one.present:
        return Outcome(
            False,
            f"one token at a time works, but several get one array mask for all layers ({more.reason})",
            seconds,
        )
    return Outcome(False, f"layers share one array mask ({one.reason})", seconds)


def _chosen(bench: Bench, gather: Outcome | None) -> Outcome:
    """Other rows in every head and layer, as many in each: in a step of two tokens, and in one of one."""
    if gather is not None and not gather.present:
        return gather
    together = ROWS_CHOSEN_TOGETHER.get(type(bench.model).__module__.rsplit(".", 1)[-1])
    if together is not None:
        return Outcome(False, together)

    def run(tokens: int) -> None:
        entries = bench.fresh()
        for number, leaf in enumerate(bench.of_entries(entries)):
            batch, heads = leaf.keys.shape[:2]
            rng = np.random.default_rng(number)
            rows = [np.sort(rng.choice(FILLED, UNEVEN[0], replace=False)) for _ in range(batch * heads)]
            leaf.gather(np.stack(rows).reshape(batch, heads, -1).astype(np.int32))
        _run(bench, entries, tokens)

    more = attempt(lambda: run(2))
    return more if not more.present else attempt(lambda: run(1))


@dataclass(frozen=True)
class _RowwiseInt8(Codec):
    """int8 codes and one scale per row and head: a codec that takes any head dim.

    It names no bits, so that rows are encoded one by one as they come and none of the few in the trial stays dense.
    """

    @property
    def spans(self) -> tuple[int, ...]:
        return (1, 1)

    def encode(self, rows: mx.array) -> Encoded:
        if rows.shape[-1] == 0:
            return rows, mx.zeros((*rows.shape[:-1], 1), rows.dtype)
        scale = mx.maximum(mx.abs(rows).max(axis=-1, keepdims=True), 1e-6) / 127
        return mx.round(rows / scale).astype(mx.int8), scale.astype(rows.dtype)

    def decode(self, encoded: Encoded, dtype: mx.Dtype) -> mx.array:
        codes, scale = encoded
        return (codes.astype(scale.dtype) * scale).astype(dtype)

    def row_nbytes(self, width: int, itemsize: int) -> int:
        raise NotImplementedError("only the probe stores rows like this, and it counts no bytes")


def _reencoded(bench: Bench) -> None:
    """Rows held as int8 and decoded when they are fetched, sliding windows and attention chunks included."""
    entries = bench.fresh()
    codec = _RowwiseInt8()
    for leaf in leaves(entries):
        if isinstance(leaf, KVCache | RotatingKVCache | ChunkedKVCache) and leaf.rows > 0:
            leaf.reencode(Layout.both(codec))
            assert isinstance(leaf.keys, tuple), "no row was encoded"
    off = divergence(bench.chunk, forward(bench.model, entries, 2, FILLED))
    if not off <= MOST_KL:
        raise ValueError(f"rows decoded on fetch from 8 bits move the logits by {off:.3g} nats")


def _unfelt(bench: Bench) -> dict[Capability, Outcome]:
    """Two changes that must not be felt: both in one run, and each by itself only if that fails."""
    both = attempt(lambda: _run_unfelt(bench, arrays=True, ahead=True))
    if both.present:
        return {ARRAY_MASK: both, RESERVE: both}
    return {
        ARRAY_MASK: attempt(lambda: _run_unfelt(bench, arrays=True, ahead=False)),
        RESERVE: attempt(lambda: _run_unfelt(bench, arrays=False, ahead=True)),
    }


def _run_unfelt(bench: Bench, *, arrays: bool, ahead: bool) -> None:
    """``arrays``: an array of our own wherever the model would be given a string; ``ahead``: spare rows allocated."""
    entries = bench.fresh()
    ours = bench.of_entries(entries)
    for leaf in ours:
        if ahead:
            leaf.keys, leaf.values = (
                mx.concatenate([a, mx.zeros((*a.shape[:2], AHEAD, a.shape[3]), a.dtype)], axis=2)
                for a in (leaf.keys, leaf.values)
            )
        if arrays:
            leaf.make_mask = _as_array(leaf, leaf.make_mask)
    try:
        chunk = forward(bench.model, entries, 2, FILLED)
    finally:
        for leaf in ours if arrays else ():
            del leaf.make_mask
    off = divergence(bench.chunk, chunk)
    if not off <= SAME_KL:
        raise ValueError(f"a change that must not be felt moves the logits by {off:.3g} nats")


def _as_array(leaf: KVCache, make_mask: Callable[..., Any]) -> Callable[..., Any]:
    def made(N: int, *args: Any, **options: Any) -> Any:
        mask = make_mask(N, *args, **options)
        return create_causal_mask(N, leaf.rows) if isinstance(mask, str) else mask

    return made


def _formats(found: Iterable[Leaf]) -> dict[Capability, Outcome]:
    dims = {d for leaf in found for d in (leaf.key_dim, leaf.value_dim) if d}
    return {
        element_format(name): attempt(lambda name=name: _in_format(name, dims))  # type: ignore[misc]
        for name in FORMATS
    }


def _in_format(name: str, dims: Iterable[int]) -> None:
    group_size, bits, _ = FORMATS[name]
    for dim in dims:
        mx.eval(mx.quantize(mx.ones((1, dim)), group_size=group_size, bits=bits, mode=name))
