"""What each layer of one model takes part in, and what may be done to its rows, found by doing it on copies.

One throw-away cache is filled with a few tokens; every trial takes a copy of it, changes some rows, and runs a step of
two tokens and a step of one. Where the change should not be felt (buffers allocated ahead, a mask given as an array)
or hardly (rows at eight bits), the logits are compared with those of the unchanged copy.
"""

from __future__ import annotations

import copy
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache

from ..codecs import Affine, Codec
from ..codecs.base import Encoded, cut_rows
from ..layers import KVCache, ManagedLayer, adopt, leaves
from ..steps import StepTracker
from .capabilities import (
    ARRAY_MASK,
    BORROWED_KV,
    DENSE_REENCODE,
    LATENT_WITH_PACKED,
    RAGGED_LAYERS,
    RESERVE,
    ROW_GATHER,
    SINKS_WITH_PACKED,
    Capability,
    Outcome,
    element_format,
    packed_attention,
    packed_some_layers,
)
from .isolate import first_line
from .matrix import FORMATS

__all__ = ["Examination", "Leaf", "MaskRequest", "NotPackable", "examine", "examine_packed", "why_not_packed"]

#: Tokens in the cache that trials start from, and rows that uneven layers are cut to.
FILLED = 12
UNEVEN = (8, 6)

#: Rows by which buffers are allocated ahead.
AHEAD = 300

#: Most extra runs spent on telling which layers can be packed when not all of them can.
MOST_RUNS = 12

#: KL divergence (nats per token) above which rows at eight bits, or the same rows read otherwise, are taken for wrong.
MOST_KL = 0.1
FINEST_BITS = 8
SAME_KL = 1e-3


@dataclass(frozen=True)
class MaskRequest:
    """A mask that a model asked of one layer's cache for a step of ``tokens`` tokens, and the form of what it got."""

    tokens: int
    window_size: int | None
    return_array: bool
    form: str  #: ``none``, ``string`` or ``array``


@dataclass(frozen=True)
class Leaf:
    """One cache object of the model, lists of caches taken apart. Dims in elements; None where it holds no rows."""

    name: str
    kind: str
    updated: bool | None  #: whether a step hands it keys and values; None for a layer that holds no rows
    masks: tuple[
        MaskRequest, ...
    ]  #: empty: it shares the mask that another layer was asked for, or needs none
    n_kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    packed: Mapping[Capability, Outcome] = field(default_factory=lambda: MappingProxyType({}))

    def to_record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "updated": self.updated,
            "masks": [vars(m) for m in self.masks],
            "n_kv_heads": self.n_kv_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "packed": {str(c): {"present": o.present, "reason": o.reason} for c, o in self.packed.items()},
        }


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
        bench = _Bench.of(model)
        found, outcomes = _examined(bench, known)
    except Exception as error:
        reason = f"the model could not be examined: {first_line(error)}"
        absent = Outcome(False, reason, time.perf_counter() - start)
        every = (RAGGED_LAYERS, DENSE_REENCODE, ARRAY_MASK, RESERVE)
        return Examination((), dict.fromkeys(every, absent), time.perf_counter() - start)
    return Examination(found, outcomes, time.perf_counter() - start)


def _examined(
    bench: _Bench, known: Mapping[Capability, Outcome]
) -> tuple[tuple[Leaf, ...], dict[Capability, Outcome]]:
    entries = bench.fresh()
    masks, makes = _watched(entries, lambda: bench.reference(entries))
    kv = bench.changeable
    found = tuple(
        _leaf(leaf, i in bench.updated, masks.get(i, ())) for i, leaf in enumerate(leaves(bench.filled))
    )
    if not kv:
        absent = Outcome(False, "the model holds no K/V rows that could be changed")
        return found, dict.fromkeys((RAGGED_LAYERS, DENSE_REENCODE, ARRAY_MASK, RESERVE), absent)
    outcomes = {
        RAGGED_LAYERS: _ragged(bench, known.get(ROW_GATHER)),
        DENSE_REENCODE: _try(lambda: _reencoded(bench)),
        **_unfelt(bench),
    }
    dims = {d for i in kv for d in (found[i].key_dim, found[i].value_dim) if d}
    for name in FORMATS:
        outcomes[element_format(name)] = _try(lambda name=name: _in_format(name, dims))  # type: ignore[misc]
    packed: list[dict[Capability, Outcome]] = [{} for _ in found]
    search = _PackedSearch(bench, found, makes)
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
        bench = _Bench.of(model)
        entries = bench.fresh()
        masks, makes = _watched(entries, lambda: bench.reference(entries))
        found = [
            _leaf(leaf, i in bench.updated, masks.get(i, ())) for i, leaf in enumerate(leaves(bench.filled))
        ]
        search = _PackedSearch(bench, found, makes)
        return search.outcomes(layout, search.by_leaf(layout, whole))
    except Exception:
        return {layout: whole}


def _leaf(layer: Any, updated: bool, masks: Sequence[MaskRequest]) -> Leaf:
    name = getattr(layer, "name", type(layer).__name__)
    if not isinstance(layer, ManagedLayer) or not layer.holds_rows:
        kind = layer.kind if isinstance(layer, ManagedLayer) else "opaque"
        return Leaf(name, kind, None, tuple(masks))
    kind = layer.kind
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array) or keys.ndim != 4:
        return Leaf(name, kind, updated, tuple(masks))
    return Leaf(name, kind, updated, tuple(masks), keys.shape[1], keys.shape[-1], values.shape[-1])


# -- a filled cache to copy from -----------------------------------------------------------------------------


@dataclass
class _Bench:
    model: Any
    filled: list[Any]
    updated: frozenset[int]  #: numbers of leaves that a step updates
    changeable: tuple[int, ...]  #: numbers of leaves whose rows actions could change
    chunk: mx.array | None = None  #: logits (1, 2, vocabulary) of the unchanged cache for two tokens

    @classmethod
    def of(cls, model: Any) -> _Bench:
        steps = StepTracker(name="probe")
        filled = [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))]
        _forward(model, filled, FILLED, 0)
        flat = list(leaves(filled))
        updated = frozenset(
            i for i, leaf in enumerate(flat) if isinstance(leaf, ManagedLayer) and leaf._seen == steps.step
        )
        changeable = tuple(i for i, leaf in enumerate(flat) if isinstance(leaf, KVCache) and leaf.rows > 0)
        return cls(model, filled, updated, changeable)

    def fresh(self) -> list[Any]:
        """A copy of the filled cache, or one filled anew if some entry cannot be copied."""
        try:
            return copy.deepcopy(self.filled)
        except Exception:
            return _Bench.of(self.model).filled

    def reference(self, entries: list[Any]) -> None:
        """A step of two tokens, whose logits changes are compared with, and one of one."""
        self.chunk = _forward(self.model, entries, 2, FILLED)
        _forward(self.model, entries, 1, FILLED + 2)

    def of_entries(self, entries: list[Any]) -> list[Any]:
        """The leaves whose rows may be changed, of a copy."""
        flat = list(leaves(entries))
        return [flat[i] for i in self.changeable]


def _forward(model: Any, entries: list[Any], tokens: int, position: int) -> mx.array:
    """Logits (1, N, vocabulary) of tokens that differ from each other, so that a wrong row shows."""
    ids = 1 + (7 * mx.arange(position, position + tokens, dtype=mx.int32)) % 31
    logits: mx.array = model(ids[None], cache=entries)
    mx.eval(logits, [c.state for c in entries if isinstance(c, ManagedLayer)])
    if mx.isnan(logits).any().item():
        raise ValueError("the model's logits are not numbers")
    return logits


def _divergence(wanted: mx.array | None, got: mx.array) -> float:
    """Largest KL(wanted ‖ got) over the tokens of a step, in nats."""
    assert wanted is not None
    p, q = (
        x.astype(mx.float32) - mx.logsumexp(x.astype(mx.float32), axis=-1, keepdims=True)
        for x in (wanted, got)
    )
    # Logits of minus infinity stand for tokens that are never given: they carry no weight on either side.
    terms = mx.where(mx.isinf(p), 0.0, mx.exp(p) * (p - q))
    found: Any = terms.sum(-1).max().item()
    return float(found)


def _try(attempt: Callable[[], None]) -> Outcome:
    start = time.perf_counter()
    try:
        attempt()
    except Exception as error:
        where = _in_mlx_lm(error)
        reason = first_line(error) if where is None else f"in {where[1]} of {where[0]}: {first_line(error)}"
        return Outcome(False, reason, time.perf_counter() - start)
    return Outcome(True, None, time.perf_counter() - start)


def _run(bench: _Bench, entries: list[Any], tokens: int) -> None:
    _forward(bench.model, entries, tokens, FILLED)


def _watched(
    entries: list[Any], run: Callable[[], None]
) -> tuple[dict[int, list[MaskRequest]], dict[int, set[tuple[Any, ...]]]]:
    """What was asked of each leaf, by its number, while ``run`` ran: masks, and by whom its rows were updated."""
    flat = list(leaves(entries))
    masks: dict[int, list[MaskRequest]] = {}
    makes: dict[int, set[tuple[Any, ...]]] = {}
    for i, leaf in enumerate(flat):
        if hasattr(leaf, "make_mask"):
            leaf.make_mask = _recording(leaf.make_mask, masks.setdefault(i, []))
        if isinstance(leaf, KVCache):
            leaf.__dict__["update_and_fetch"] = _naming(leaf.update_and_fetch, makes.setdefault(i, set()))
    try:
        run()
    finally:
        for leaf in flat:
            # The recorders refer to the leaf, and would keep its arrays until the next collection.
            leaf.__dict__.pop("make_mask", None)
            leaf.__dict__.pop("update_and_fetch", None)
    return masks, makes


def _recording(make_mask: Callable[..., Any], asked: list[MaskRequest]) -> Callable[..., Any]:
    def recorded(N: int, *args: Any, **options: Any) -> Any:
        mask = make_mask(N, *args, **options)
        form = "none" if mask is None else "string" if isinstance(mask, str) else "array"
        asked.append(MaskRequest(N, options.get("window_size"), bool(options.get("return_array")), form))
        return mask

    return recorded


def _naming(update: Callable[..., Any], makes: set[tuple[Any, ...]]) -> Callable[..., Any]:
    """Notes the function that hands over keys and values, and the switches of the module it belongs to."""

    def named(*args: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        module = vars(caller.f_locals["self"]) if hasattr(caller.f_locals.get("self"), "__dict__") else {}
        switches = sorted(name for name, value in module.items() if value is True)
        makes.add((caller.f_code.co_qualname, *switches))
        return update(*args, **options)

    return named


# -- trials -------------------------------------------------------------------------------------------------------------


def _ragged(bench: _Bench, gather: Outcome | None) -> Outcome:
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

    one, more = (_try(lambda n=n: _run(bench, uneven(), n)) for n in (1, 2))  # type: ignore[misc]
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


@dataclass(frozen=True)
class _RowwiseInt8(Codec):
    """int8 codes and one scale per row and head: a codec that takes any head dim."""

    packed: ClassVar[bool] = False

    def encode(self, rows: mx.array) -> Encoded:
        if rows.shape[-1] == 0:
            return rows, mx.zeros((*rows.shape[:-1], 1), rows.dtype)
        scale = mx.maximum(mx.abs(rows).max(axis=-1, keepdims=True), 1e-6) / 127
        return mx.round(rows / scale).astype(mx.int8), scale.astype(rows.dtype)

    def decode(self, encoded: Encoded) -> mx.array:
        codes, scale = encoded
        return codes.astype(scale.dtype) * scale

    def row_nbytes(self, head_dim: int, itemsize: int) -> int:
        return head_dim + itemsize


class _DecodedOnFetch(KVCache):
    """A layer that stores rows in any codec and hands out dense ones."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        super().update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        return (
            self.codec.decode(cut_rows(tuple(self.keys), self.rows)),
            self.codec.decode(cut_rows(tuple(self.values), self.rows)),
        )


def _reencoded(bench: _Bench) -> None:
    """Rows held as int8 and decoded when they are fetched."""
    entries = bench.fresh()
    for leaf in bench.of_entries(entries):
        leaf.__class__ = _DecodedOnFetch
        leaf.reencode(_RowwiseInt8())
    off = _divergence(bench.chunk, _forward(bench.model, entries, 2, FILLED))
    if not off <= MOST_KL:
        raise ValueError(f"rows decoded on fetch from 8 bits move the logits by {off:.3g} nats")


def _unfelt(bench: _Bench) -> dict[Capability, Outcome]:
    """Two changes that must not be felt: both in one run, and each by itself only if that fails."""
    both = _try(lambda: _run_unfelt(bench, arrays=True, ahead=True))
    if both.present:
        return {ARRAY_MASK: both, RESERVE: both}
    return {
        ARRAY_MASK: _try(lambda: _run_unfelt(bench, arrays=True, ahead=False)),
        RESERVE: _try(lambda: _run_unfelt(bench, arrays=False, ahead=True)),
    }


def _run_unfelt(bench: _Bench, *, arrays: bool, ahead: bool) -> None:
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
        chunk = _forward(bench.model, entries, 2, FILLED)
    finally:
        for leaf in ours if arrays else ():
            del leaf.make_mask
    off = _divergence(bench.chunk, chunk)
    if not off <= SAME_KL:
        raise ValueError(f"a change that must not be felt moves the logits by {off:.3g} nats")


def _as_array(leaf: KVCache, make_mask: Callable[..., Any]) -> Callable[..., Any]:
    def made(N: int, *args: Any, **options: Any) -> Any:
        mask = make_mask(N, *args, **options)
        return create_causal_mask(N, leaf.rows) if isinstance(mask, str) else mask

    return made


def _in_format(name: str, dims: Iterable[int]) -> None:
    group_size, bits, _ = FORMATS[name]
    for dim in dims:
        mx.eval(mx.quantize(mx.ones((1, dim)), group_size=group_size, bits=bits, mode=name))


# -- which layers can be packed -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NotPackable:
    """Why a step over packed rows failed. ``cause`` is for programs, ``text`` for people."""

    cause: str  #: ``sinks``, ``latent``, ``borrowed``, ``widths``, ``masks``, ``own_attention``, ``no_group`` or ``other``
    text: str


def why_not_packed(error: BaseException, latent: bool = False) -> NotPackable:
    """Read the traceback of a step that failed: who was handed packed rows and could not read them."""
    raw = first_line(error)
    where = _in_mlx_lm(error)
    if where is None:
        return NotPackable("other", raw)
    module, function, its_locals = where
    if "sinks" in raw:
        return NotPackable("sinks", f"attention sinks, which mlx-lm's packed attention does not take ({raw})")
    if module == "mlx_lm.models.base":
        if function == "scaled_dot_product_attention" and not hasattr(its_locals.get("cache"), "bits"):
            return NotPackable(
                "borrowed", f"another layer borrows its rows and is not told that they are packed ({raw})"
            )
        if "reshape" in raw:
            return NotPackable(
                "widths",
                f"mlx-lm's packed attention wants keys and values of one width when heads share them ({raw})",
            )
        if "broadcast" in raw:
            return NotPackable(
                "masks",
                f"mlx-lm's packed attention takes no mask per head when heads share keys and values ({raw})",
            )
        return NotPackable("other", raw)
    whose = "latent attention" if latent else "the model's own code"
    return NotPackable(
        "latent" if latent else "own_attention",
        f"{whose} ({function} in {module}) reads fetched rows as one dense array ({raw})",
    )


def _in_mlx_lm(error: BaseException) -> tuple[str, str, Mapping[str, Any]] | None:
    """Module, function and local names of the innermost frame of mlx-lm's models that an exception went through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("mlx_lm.models."):
            return module, frame.f_code.co_qualname, frame.f_locals
    return None


@dataclass
class _PackedSearch:
    """Tells which layers can be packed, with few runs: layers of one make mostly fail alike."""

    bench: _Bench
    found: Sequence[Leaf]
    made: Mapping[int, set[tuple[Any, ...]]]  #: who hands each leaf its keys and values
    runs: int = 0
    causes: dict[str, list[int]] = field(default_factory=dict)  #: cause → leaves, over all layouts
    #: Leaves that no bit width would make a difference to.
    never: dict[int, Outcome] = field(default_factory=dict)

    def by_leaf(self, layout: Capability, whole: Outcome) -> dict[int, Outcome]:
        """The outcome of one layout for every changeable leaf, given that of packing all of them at once."""
        leaves_ = list(self.bench.changeable)
        bits, group_size = layout.params
        if whole.present:
            # It ran. At the finest codes, see whether it also computed what it should.
            wrong = (
                self._packed(Affine(bits, group_size), leaves_, single=False) if bits == FINEST_BITS else None
            )
            return dict.fromkeys(
                leaves_, whole if wrong is None else Outcome(False, wrong.text, whole.seconds)
            )
        outcomes: dict[int, Outcome] = {}
        makes: dict[tuple[Any, ...], list[int]] = {}
        for i in leaves_:
            leaf = self.found[i]
            if i in self.never:
                outcomes[i] = self.never[i]
            elif any(d % group_size for d in (leaf.key_dim or 0, leaf.value_dim or 0)):
                why = f"head dims {leaf.key_dim} and {leaf.value_dim} are not both divisible by {group_size}"
                outcomes[i] = Outcome(False, why)
                self.causes.setdefault("no_group", []).append(i)
            else:
                makes.setdefault(self._make(i), []).append(i)
        codec = Affine(bits, group_size)
        for same in makes.values():
            outcomes |= self._tell_apart(codec, same)
        return outcomes

    def outcomes(self, layout: Capability, by_leaf: Mapping[int, Outcome]) -> dict[Capability, Outcome]:
        """What to say of the model as a whole."""
        bits, group_size = layout.params
        good = [i for i, o in by_leaf.items() if o.present]
        bad = {i: o for i, o in by_leaf.items() if not o.present}
        said: dict[Capability, Outcome] = {}
        if not bad:
            return {packed_some_layers(bits, group_size): Outcome(True)}
        reasons: dict[str, list[str]] = {}
        for i, one in bad.items():
            reasons.setdefault(str(one.reason), []).append(self.found[i].name)
        why = "; ".join(f"{_listed(names)}: {reason}" for reason, names in reasons.items())
        if good:
            why += f"; {len(good)} of {len(by_leaf)} layers can be packed"
        said[layout] = Outcome(False, why)
        none = None if good else f"none of {len(by_leaf)} layers can be packed: see {layout}"
        said[packed_some_layers(bits, group_size)] = Outcome(bool(good), none)
        for cause, capability in _SAID_OF.items():
            named = [self.found[i].name for i in self.causes.get(cause, ())]
            if named:
                said[capability] = Outcome(False, f"{_listed(list(dict.fromkeys(named)))}: {_CAUSES[cause]}")
        return said

    def _make(self, i: int) -> tuple[Any, ...]:
        """Leaves that agree in this run through the same code of the model."""
        leaf = self.found[i]
        inner = leaf.name.partition(".")[2]
        return (inner, leaf.n_kv_heads, leaf.key_dim, leaf.value_dim, *sorted(self.made.get(i, ())))

    def _tell_apart(self, codec: Affine, same: list[int]) -> dict[int, Outcome]:
        if self.runs >= MOST_RUNS:
            return dict.fromkeys(same, Outcome(False, f"not told apart from others within {MOST_RUNS} runs"))
        self.runs += 1
        start = time.perf_counter()
        why = self._packed(codec, same)
        seconds = time.perf_counter() - start
        if why is None:
            return dict.fromkeys(same, Outcome(True, None, seconds))
        if len(same) > 1:
            first = self._tell_apart(codec, same[:1])
            if first[same[0]].present:
                half = 1 + len(same[1:]) // 2
                first |= self._tell_apart(codec, same[1:half]) if half > 1 else {}
                return first | self._tell_apart(codec, same[half:])
            if self._cause_of(same[0]) != why.cause:
                return first | self._tell_apart(codec, same[1:])
        self.causes.setdefault(why.cause, []).extend(same)
        failed = dict.fromkeys(same, Outcome(False, why.text, seconds))
        if why.cause not in ("other", "wrong"):
            self.never |= failed
        return failed

    def _cause_of(self, i: int) -> str | None:
        return next((cause for cause, which in self.causes.items() if i in which), None)

    def _packed(self, codec: Affine, which: Iterable[int], single: bool = True) -> NotPackable | None:
        entries = self.bench.fresh()
        flat = list(leaves(entries))
        chosen = [flat[i] for i in which]
        latent = any(_is_latent(self.bench.model, leaf) for leaf in chosen)
        try:
            for leaf in chosen:
                leaf.reencode(codec)
            chunk = _forward(self.bench.model, entries, 2, FILLED)
            if single:
                _forward(self.bench.model, entries, 1, FILLED + 2)
        except Exception as error:
            return why_not_packed(error, latent)
        off = _divergence(self.bench.chunk, chunk)
        if codec.bits == FINEST_BITS and not off <= MOST_KL:
            return NotPackable("wrong", f"it runs, but {codec.bits} bits move the logits by {off:.3g} nats")
        return None


#: Causes that have a capability of their own, and what is said of them.
_SAID_OF = {"sinks": SINKS_WITH_PACKED, "latent": LATENT_WITH_PACKED, "borrowed": BORROWED_KV}
_CAUSES = {
    "sinks": "mlx-lm's packed attention does not take attention sinks",
    "latent": "the model's latent attention reads fetched rows as one dense array",
    "borrowed": "layers that borrow these rows are not told that they are packed",
}


def _is_latent(model: Any, leaf: KVCache) -> bool:
    """Whether the layer holds a latent and its rotated part: the model names both widths, and they agree."""
    args = getattr(model, "args", None)
    dims = _setting(args, "kv_lora_rank"), _setting(args, "qk_rope_head_dim")
    return isinstance(leaf.keys, mx.array) and dims == (leaf.keys.shape[-1], leaf.values.shape[-1])


def _setting(args: Any, name: str, depth: int = 2) -> Any:
    """A setting of the model, or of the text model inside it."""
    if args is None or depth < 0:
        return None
    settings = args if isinstance(args, Mapping) else getattr(args, "__dict__", {})
    if settings.get(name) is not None:
        return settings[name]
    inner = (_setting(settings.get(k), name, depth - 1) for k in ("text_config", "language_config"))
    return next((v for v in inner if v is not None), None)


def _listed(names: Sequence[str]) -> str:
    """``layers 0, 1.1 and 3``; no more than six of them."""
    numbers = [n.removeprefix("layer ") for n in names]
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if len(numbers) > 6:
        return f"layers {', '.join(numbers[:5])} and {len(numbers) - 5} more"
    return f"layers {', '.join(numbers[:-1])} and {numbers[-1]}"
