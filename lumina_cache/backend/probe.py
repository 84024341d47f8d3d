"""Find out what this installation can do with this model, by doing it on throw-away caches.

A forward of three tokens, one of two and one of one, dense; the same again with packed rows at each bit width, and once
with rows evicted. Reading the model's source or configuration would miss what only shows when it runs: attention sinks
and latent attention refuse packed rows, a layer that borrows another's K/V gets them without its cache, a mask of the
wrong width does not broadcast.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..actions import Evict, Quantize
from ..apply import execute, held
from ..codecs import Affine
from ..estimate import Held
from ..layers import KVCache, ManagedLayer, adopt, leaves
from ..steps import StepTracker
from .bench import Leaf
from .capabilities import (
    DENSE_REENCODE,
    KEYS,
    QUERIES,
    ROW_GATHER,
    VALUES,
    BackendProfile,
    Capability,
    Outcome,
    packed_attention,
)
from .examine import examine, examine_packed
from .interface import mlx_lm_version, mlx_version
from .store import configuration_fingerprint

__all__ = [
    "ROW_INDEX_IS_POSITION",
    "ModelProbe",
    "pick_group_size",
    "probe_model",
    "probe_packed",
    "remembered_probe",
]

#: Group sizes that ``mx.quantize`` accepts, best first for equal bytes of quality figures: those were measured at 64.
GROUP_SIZES = (64, 32)

#: mlx-lm modules whose attention takes the index of a row for its position, so that evicting rows is not the same as
#: masking them. Block patterns show only over prompts too long to probe; the test suite compares every module.
ROW_INDEX_IS_POSITION: Mapping[str, str] = MappingProxyType(
    {
        "afm7": "layers that borrow K/V rotate their queries by the number of rows",
        "minimax_m3_vl": "the indexer cuts its blocks by the index of a row",
        "phi3small": "the block-sparse pattern is laid over the index of a row",
    }
)

NOT_BUILT = "this version of lumina_cache has no code for it"


@dataclass(frozen=True)
class ModelProbe:
    """What throw-away forwards of one model showed: its capabilities, and the shape of each layer's storage."""

    profile: BackendProfile
    layers: tuple[Held, ...]  #: per leaf, as after the probe's own few tokens
    updated_per_step: (
        int  #: K/V leaves that the model updates in one step; some models never use some entries
    )
    group_size: (
        int | None
    )  #: group size that divides all head dims of layers that can be packed; None if there is none
    seconds: float
    #: What each cache object takes part in, and which layouts its rows can be packed in.
    leaves: tuple[Leaf, ...] = ()


_remembered: dict[int, tuple[weakref.ref[Any], str, ModelProbe]] = {}


def remembered_probe(model: Any) -> ModelProbe:
    """:func:`probe_model`, run once per live model object and device, and again if its parameters' dtypes change."""
    key = id(model)
    try:
        made_for = f"{mx.default_device()} {configuration_fingerprint(model)}"
        alive = weakref.ref(model, lambda _: _remembered.pop(key, None))
    except Exception:  # not a module of mlx: nothing tells when it changes or goes
        return probe_model(model)
    known = _remembered.get(key)
    if known is not None and known[0]() is model and known[1] == made_for:
        return known[2]
    found = probe_model(model)
    _remembered[key] = (alive, made_for, found)
    return found


def probe_model(model: Any, bits: Iterable[int] = (8, 4)) -> ModelProbe:
    """Probe ``model`` with a few throw-away forwards. Leaves no array, limit or state behind.

    A model that cannot be run on a few tokens by itself has none of the capabilities, and the reason says why.
    """
    start = time.perf_counter()
    bits = tuple(bits)
    dense: list[_Dense] = []
    ran = _try(lambda: dense.append(_run_dense(model)))
    if ran.present:
        found = dense.pop()
        outcomes = _outcomes(model, found, bits)
        examined = examine(model, outcomes)
        outcomes |= examined.outcomes
        layers = examined.leaves
    else:
        found, layers = _Dense((), 0, None, ()), ()
        every = (KEYS, VALUES, ROW_GATHER, QUERIES, DENSE_REENCODE, *(packed_attention(b, 64) for b in bits))
        outcomes = {c: Outcome(False, f"the model could not be probed: {ran.reason}") for c in every}
    profile = BackendProfile(
        device=mx.default_device().type.name,
        mlx=mlx_version(),
        mlx_lm=mlx_lm_version,
        model_type=str(getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1])),
        outcomes=outcomes,
    )
    return ModelProbe(
        profile, found.layers, found.updated_per_step, found.group_size, time.perf_counter() - start, layers
    )


@dataclass(frozen=True)
class _Dense:
    """What the dense forwards showed."""

    layers: tuple[Held, ...]
    updated_per_step: int
    group_size: int | None
    head_dims: tuple[int, ...]  #: of layers that hold rows which could be changed


def _run_dense(model: Any) -> _Dense:
    entries, steps = _fresh(model)
    _forward(model, entries, 3)
    updated = sum(layer._seen == steps.step for layer in steps.layers if layer.holds_rows)
    _forward(model, entries, 2)
    _forward(model, entries, 1)
    kv = [leaf for leaf in leaves(entries) if isinstance(leaf, KVCache) and leaf.rows > 0]
    dims = {d for leaf in kv for d in (leaf.keys.shape[-1], leaf.values.shape[-1])}
    return _Dense(
        tuple(held(leaf) for leaf in leaves(entries)), updated, pick_group_size(dims), tuple(sorted(dims))
    )


def _outcomes(model: Any, dense: _Dense, bits: Iterable[int]) -> dict[Capability, Outcome]:
    rows = bool(dense.head_dims)
    kv = Outcome(rows, None if rows else "the model holds no K/V rows that could be changed")
    outcomes = {
        KEYS: kv,
        VALUES: kv,
        QUERIES: Outcome(False, "mlx-lm's cache interface passes keys and values only"),
        DENSE_REENCODE: Outcome(False, NOT_BUILT),
        ROW_GATHER: _row_gather(model) if rows else kv,
    }
    for width in bits:
        if not rows:
            outcomes[packed_attention(width, 64)] = kv
        elif dense.group_size is None:
            why = (
                f"head dims {list(dense.head_dims)}: no group size of {sorted(GROUP_SIZES)} divides them all"
            )
            outcomes[packed_attention(width, 64)] = Outcome(False, why)
        else:
            codec = Affine(width, dense.group_size)
            outcomes[packed_attention(width, codec.group_size)] = _try(_packed_attempt(model, codec))
    return outcomes


def _row_gather(model: Any) -> Outcome:
    why = ROW_INDEX_IS_POSITION.get(type(model).__module__.rsplit(".", 1)[-1])
    return _try(lambda: _with_evicted_rows(model)) if why is None else Outcome(False, why)


def _packed_attempt(model: Any, codec: Affine) -> Callable[[], None]:
    return lambda: _with_packed_rows(model, codec)


def probe_packed(model: Any, probe: ModelProbe, codec: Affine) -> ModelProbe:
    """The same probe with the outcome for one more packed layout, remembered where the probe is."""
    keys = probe.profile.outcome(KEYS)
    outcome = _try(_packed_attempt(model, codec)) if keys.present else keys
    capability = packed_attention(codec.bits, codec.group_size)
    more = {capability: outcome}
    if keys.present and not outcome.present:
        more |= examine_packed(model, capability, outcome)
    profile = replace(probe.profile, outcomes={**probe.profile.outcomes, **more})
    found = replace(probe, profile=profile)
    known = _remembered.get(id(model))
    if known is not None and known[2] is probe:
        _remembered[id(model)] = (known[0], known[1], found)
    return found


def pick_group_size(head_dims: Iterable[int]) -> int | None:
    """The first of :data:`GROUP_SIZES` that divides the key and value head dims of all layers; None without layers."""
    dims = set(head_dims)
    return next((g for g in GROUP_SIZES if dims and all(d % g == 0 for d in dims)), None)


def _fresh(model: Any) -> tuple[list[Any], StepTracker]:
    steps = StepTracker(name="probe")
    return [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))], steps


def _forward(model: Any, entries: list[Any], n: int) -> None:
    logits = model(mx.ones((1, n), dtype=mx.int32), cache=entries)
    states = [c.state for c in entries if isinstance(c, ManagedLayer)]
    mx.eval(logits, states)
    # Some models set the logits of tokens that they never give to minus infinity.
    if mx.isnan(logits).any().item():
        raise ValueError("the model's logits are not numbers")


def _with_packed_rows(model: Any, codec: Affine) -> None:
    entries, _ = _fresh(model)
    _forward(model, entries, 3)
    execute(list(leaves(entries)), Quantize("affine", codec.bits, codec.bits, codec.group_size))
    _forward(model, entries, 2)
    _forward(model, entries, 1)


def _with_evicted_rows(model: Any) -> None:
    entries, _ = _fresh(model)
    _forward(model, entries, 12)
    execute(list(leaves(entries)), Evict("sinks_window", rows=8))
    _forward(model, entries, 2)
    _forward(model, entries, 1)


def _try(attempt: Callable[[], None]) -> Outcome:
    start = time.perf_counter()
    try:
        attempt()
    except Exception as error:
        first_line = str(error).strip().split("\n", 1)[0]
        return Outcome(False, f"{type(error).__name__}: {first_line}", time.perf_counter() - start)
    return Outcome(True, None, time.perf_counter() - start)
