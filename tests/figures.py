"""A made-up profile with round numbers, so that tests can say what a decision has to be."""

from __future__ import annotations

from typing import Any

from lumina_cache.actions import Quantize, parse_action
from lumina_cache.backend.capabilities import (
    DENSE_REENCODE,
    KEYS,
    RAGGED_LAYERS,
    ROW_CHOICE,
    ROW_GATHER,
    VALUES,
    BackendProfile,
    Outcome,
    packed_attention,
)
from lumina_cache.estimate import Held, merge_equal
from lumina_cache.policy import Limit, State
from lumina_cache.profile import CodecFigure, EvictionFigure, Profile

__all__ = ["ABLE", "FIGURES", "able", "dense_layers", "state_of"]


def _codec(text: str, kl: float, p95: float, time: float | None = 1.2) -> CodecFigure:
    action = parse_action(text)
    assert isinstance(action, Quantize)
    return CodecFigure(action, kl, p95, () if time is None else ((1024, time),))


FIGURES = Profile(
    name="made up",
    borrowed=True,
    codecs=(
        _codec("quant:affine,bits=8,group=64", 0.0002, 0.0008),
        _codec("quant:affine,bits=4,group=64", 0.1, 0.4),
        _codec("quant:hadamard,bits=4,group=64", 0.02, 0.08, 1.4),
        _codec("quant:hadamard,bits=2,group=64", 0.6, 2.4, 1.4),
        _codec("quant:kivi,bits=4,group=32", 0.018, 0.072, None),
    ),
    evictors=(
        EvictionFigure("keydiff", 32, ((0.125, 1.2, 4.0), (0.25, 0.9, 3.0), (0.5, 0.5, 2.0))),
        EvictionFigure("sinks_window", 0, ((0.125, 1.3, 4.0), (0.25, 1.0, 3.0), (0.5, 0.8, 2.0))),
    ),
    sensitivity=(4.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0),
    seconds_per_byte={"evict": 1e-9, "quant": 3e-9},
    step_seconds=0.1,
)


def able(*capabilities: Any) -> BackendProfile:
    """A backend that can do just this."""
    return BackendProfile("cpu", "0", "0", "test", {c: Outcome(True) for c in capabilities})


#: A backend that can do everything that tests ask of one.
ABLE = able(
    KEYS,
    VALUES,
    ROW_GATHER,
    ROW_CHOICE,
    DENSE_REENCODE,
    RAGGED_LAYERS,
    packed_attention(8, 64),
    packed_attention(4, 64),
)


def dense_layers(n: int = 8, rows: int = 1024, **fields: Any) -> tuple[Held, ...]:
    """``n`` dense layers with ``rows`` rows of 2·3·64 elements each."""
    shape = {"key_width": 192, "value_width": 192, "itemsize": 4, "heads": 3}
    return tuple(
        Held(f"layer {i}", "kv", rows=rows, capacity=rows, offset=rows, index=i, **{**shape, **fields})
        for i in range(n)
    )


def state_of(each: tuple[Held, ...], limit: int | None, *, tokens: int = 1, **fields: Any) -> State:
    """What a decision on these layers under ``limit`` bytes is made on."""
    return State(
        phase="decode",
        tokens=tokens,
        layers=merge_equal(each),
        each=each,
        budget=limit,
        limit=Limit(limit, "the budget"),
        **fields,
    )
