"""Find out what this installation can do with this model, by doing it on throw-away caches.

A forward of three tokens, one of two and one of one, dense; the same again with packed rows at each bit width, and once
with rows evicted. Reading the model's source or configuration would miss what only shows when it runs: attention sinks
and latent attention refuse packed rows, a layer that borrows another's K/V gets them without its cache, a mask of the
wrong width does not broadcast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..actions import Evict, Quantize
from ..apply import execute, held
from ..codecs import Affine
from ..estimate import Held
from ..layers import KVCache, ManagedLayer, adopt, leaves
from ..steps import StepTracker
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
from .interface import mlx_lm_version, mlx_version

__all__ = ["ModelProbe", "pick_group_size", "probe_model", "probe_packed"]

#: Group sizes that ``mx.quantize`` accepts, best first for equal bytes of quality figures: those were measured at 64.
GROUP_SIZES = (64, 32)

NOT_BUILT = "this version of lumina_cache has no code for it"


@dataclass(frozen=True)
class ModelProbe:
    """What throw-away forwards of one model showed: its capabilities, and the shape of each layer's storage."""

    profile: BackendProfile
    layers: tuple[Held, ...]  #: per leaf, as after the probe's own few tokens
    updated_per_step: int  #: K/V leaves that the model updates in one step; some models never use some entries
    group_size: int | None  #: group size that divides all head dims of layers that can be packed; None if there is none
    seconds: float


def probe_model(model: Any, bits: Iterable[int] = (8, 4)) -> ModelProbe:
    """Probe ``model`` with a few throw-away forwards. Leaves no array, limit or state behind."""
    start = time.perf_counter()
    entries, steps = _fresh(model)
    _forward(model, entries, 3)
    updated = sum(layer._seen == steps.step for layer in steps.layers if layer.holds_rows)
    _forward(model, entries, 2)
    _forward(model, entries, 1)
    shapes = tuple(held(leaf) for leaf in leaves(entries))
    kv = [leaf for leaf in leaves(entries) if isinstance(leaf, KVCache) and leaf.rows > 0]
    group = pick_group_size(kv)
    outcomes: dict[Capability, Outcome] = {
        KEYS: Outcome(bool(kv), None if kv else "the model holds no K/V rows that could be changed"),
        VALUES: Outcome(bool(kv), None if kv else "the model holds no K/V rows that could be changed"),
        QUERIES: Outcome(False, "mlx-lm's cache interface passes keys and values only"),
        DENSE_REENCODE: Outcome(False, NOT_BUILT),
    }
    outcomes[ROW_GATHER] = _try(lambda: _with_evicted_rows(model)) if kv else outcomes[KEYS]
    for width in bits:
        if not kv:
            outcomes[packed_attention(width, 64)] = outcomes[KEYS]
        elif group is None:
            dims = sorted({d for leaf in kv for d in (leaf.keys.shape[-1], leaf.values.shape[-1])})
            why = f"head dims {dims}: no group size of {sorted(GROUP_SIZES)} divides them all"
            outcomes[packed_attention(width, 64)] = Outcome(False, why)
        else:
            codec = Affine(width, group)
            outcomes[packed_attention(width, group)] = _try(lambda codec=codec: _with_packed_rows(model, codec))
    profile = BackendProfile(
        device=mx.default_device().type.name,
        mlx=mlx_version(),
        mlx_lm=mlx_lm_version,
        model_type=str(getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1])),
        outcomes=outcomes,
    )
    return ModelProbe(profile, shapes, updated, group, time.perf_counter() - start)


def probe_packed(model: Any, probe: ModelProbe, codec: Affine) -> ModelProbe:
    """The same probe with the outcome for one more packed layout."""
    keys = probe.profile.outcome(KEYS)
    outcome = _try(lambda: _with_packed_rows(model, codec)) if keys.present else keys
    capability = packed_attention(codec.bits, codec.group_size)
    profile = replace(probe.profile, outcomes={**probe.profile.outcomes, capability: outcome})
    return replace(probe, profile=profile)


def pick_group_size(layers: Sequence[KVCache]) -> int | None:
    """The first of :data:`GROUP_SIZES` that divides the key and value head dims of all ``layers``."""
    dims = {d for layer in layers for d in (layer.keys.shape[-1], layer.values.shape[-1])}
    return next((g for g in GROUP_SIZES if dims and all(d % g == 0 for d in dims)), None)


def _fresh(model: Any) -> tuple[list[Any], StepTracker]:
    steps = StepTracker(name="probe")
    return [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))], steps


def _forward(model: Any, entries: list[Any], n: int) -> None:
    logits = model(mx.ones((1, n), dtype=mx.int32), cache=entries)
    states = [c.state for c in entries if isinstance(c, ManagedLayer)]
    mx.eval(logits, states)
    if not mx.isfinite(logits).all().item():
        raise ValueError("the model's logits are not finite")


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
