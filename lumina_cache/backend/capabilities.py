"""The words for what a backend lets a cache see or do, and how deep one must reach for each.

A backend's *profile* is a set of outcomes of probes, one per capability: it says present, absent or not probed, with the
reason. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType

__all__ = [
    "ATTENTION_WEIGHTS",
    "CODEBOOK_PACKING",
    "CROSS_LAYER",
    "DENSE_REENCODE",
    "DISK_TIER",
    "HIDDEN_STATES",
    "KEYS",
    "MIXED_ROWS",
    "OWN_PACKED_ATTENTION",
    "PAGED_ROWS",
    "PARTIAL_FETCH",
    "QUERIES",
    "QUERY_STATISTICS",
    "RAGGED_HEADS",
    "RAGGED_LAYERS",
    "RESERVE",
    "ROW_CHOICE",
    "ROW_GATHER",
    "TRAINED_MODEL",
    "TRAINED_SCORER",
    "VALUES",
    "BackendProfile",
    "Capability",
    "Outcome",
    "Rung",
    "element_format",
    "observed",
    "packed_attention",
]


class Rung(IntEnum):
    """How deep one must reach to execute an action; F grows with the rung."""

    NATIVE = 0  #: mlx-lm's own cache classes as shipped
    CACHE = 1  #: an own cache object behind mlx-lm's interface: keys and values only
    HOOK = 2  #: a Python wrapper around the model's attention call: queries visible, attention served by us
    KERNEL = 3  #: a new GPU kernel
    TRAINED = 4  #: weights must be trained


@dataclass(frozen=True, order=True)
class Capability:
    """One thing a backend lets a cache do or see, with its numbers (for example bits and group size)."""

    name: str
    params: tuple[int, ...] = ()
    rung: Rung = field(default=Rung.NATIVE, compare=False)

    def __str__(self) -> str:
        return f"{self.name}({','.join(map(str, self.params))})" if self.params else self.name


KEYS = Capability("KEYS", rung=Rung.CACHE)
VALUES = Capability("VALUES", rung=Rung.CACHE)
ROW_GATHER = Capability("ROW_GATHER", rung=Rung.CACHE)
#: Heads and layers may keep rows of different positions: no mask that several of them share is built from positions.
ROW_CHOICE = Capability("ROW_CHOICE", rung=Rung.CACHE)
#: Rows are stored in a codec of our own and decoded to dense arrays when they are fetched.
DENSE_REENCODE = Capability("DENSE_REENCODE", rung=Rung.CACHE)
#: Layers that share a mask may hold different numbers of rows.
RAGGED_LAYERS = Capability("RAGGED_LAYERS", rung=Rung.CACHE)
#: One cache object sees the rows of several layers.
CROSS_LAYER = Capability("CROSS_LAYER", rung=Rung.CACHE)
#: Buffers are allocated ahead of the rows that will fill them.
RESERVE = Capability("RESERVE", rung=Rung.CACHE)
#: Rows live in a file and are read back when they are fetched.
DISK_TIER = Capability("DISK_TIER", rung=Rung.CACHE)
#: Statistics of a model's queries, captured once beforehand and stored.
QUERY_STATISTICS = Capability("QUERY_STATISTICS", rung=Rung.CACHE)
QUERIES = Capability("QUERIES", rung=Rung.HOOK)
ATTENTION_WEIGHTS = Capability("ATTENTION_WEIGHTS", rung=Rung.HOOK)
HIDDEN_STATES = Capability("HIDDEN_STATES", rung=Rung.HOOK)
#: Only some rows are fetched, chosen by the query of the step.
PARTIAL_FETCH = Capability("PARTIAL_FETCH", rung=Rung.HOOK)
#: Attention reads rows packed in a layout of our own, given the queries.
OWN_PACKED_ATTENTION = Capability("OWN_PACKED_ATTENTION", rung=Rung.HOOK)
#: Heads of one layer may hold different numbers of rows.
RAGGED_HEADS = Capability("RAGGED_HEADS", rung=Rung.KERNEL)
#: Rows of one layer may be stored at different precisions.
MIXED_ROWS = Capability("MIXED_ROWS", rung=Rung.KERNEL)
#: Rows are addressed through a table of pages.
PAGED_ROWS = Capability("PAGED_ROWS", rung=Rung.KERNEL)
#: Codes other than affine ones are unpacked inside the attention kernel.
CODEBOOK_PACKING = Capability("CODEBOOK_PACKING", rung=Rung.KERNEL)
#: A scorer, or the model itself, has been trained for the method.
TRAINED_SCORER = Capability("TRAINED_SCORER", rung=Rung.TRAINED)
TRAINED_MODEL = Capability("TRAINED_MODEL", rung=Rung.TRAINED)


def packed_attention(bits: int, group_size: int) -> Capability:
    """mlx-lm's attention over affine-packed rows of ``bits`` bits in groups of ``group_size`` elements."""
    return Capability("PACKED_ATTENTION", (bits, group_size), Rung.NATIVE)


def element_format(name: str) -> Capability:
    """An element format of ``mx.quantize`` other than affine: ``mxfp4``, ``mxfp8`` or ``nvfp4``."""
    return Capability(f"FORMAT_{name.upper()}", rung=Rung.CACHE)


def observed(scorer: str) -> Capability:
    """The statistics that one scorer ranks rows by are kept while the model runs, and nothing is missing from them."""
    return Capability(f"OBSERVED_{scorer.upper()}", rung=Rung.HOOK)


@dataclass(frozen=True)
class Outcome:
    """What a probe of one capability found. ``reason`` says why when it is not there (exception text, or a limit)."""

    present: bool
    reason: str | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return "present" if self.present else f"absent: {self.reason}"


@dataclass(frozen=True)
class BackendProfile:
    """What one installation (device × mlx × mlx-lm × model) can do, found by running it."""

    device: str
    mlx: str
    mlx_lm: str
    model_type: str
    outcomes: Mapping[Capability, Outcome]

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcomes", MappingProxyType(dict(self.outcomes)))

    def outcome(self, capability: Capability) -> Outcome:
        """The probe's outcome; a capability that nobody probed is absent, and says that it was not probed."""
        return self.outcomes.get(capability, Outcome(False, "not probed on this backend"))

    def has(self, capability: Capability) -> bool:
        return self.outcome(capability).present

    @cached_property
    def present(self) -> frozenset[Capability]:
        """Everything that it has."""
        return frozenset(one for one, outcome in self.outcomes.items() if outcome.present)

    def to_record(self) -> dict[str, object]:
        return {
            "device": self.device,
            "mlx": self.mlx,
            "mlx_lm": self.mlx_lm,
            "model_type": self.model_type,
            "capabilities": {
                str(c): {"present": o.present, "reason": o.reason} for c, o in sorted(self.outcomes.items())
            },
        }


#: Attention takes an array of our making as its mask, also where the model asked for none of its own.
ARRAY_MASK = Capability("ARRAY_MASK", rung=Rung.CACHE)
#: mlx-lm's attention over packed rows takes attention sinks. Only in the profile of a model that has them.
SINKS_WITH_PACKED = Capability("SINKS_WITH_PACKED", rung=Rung.HOOK)
#: Latent (low-rank) attention reads packed rows. Only in the profile of a model that has it.
LATENT_WITH_PACKED = Capability("LATENT_WITH_PACKED", rung=Rung.HOOK)
#: Rows that several layers read may be stored packed. Only in the profile of a model that has such rows.
BORROWED_KV = Capability("BORROWED_KV", rung=Rung.HOOK)


def packed_some_layers(bits: int, group_size: int) -> Capability:
    """:func:`packed_attention` on at least one layer; which ones, ``ModelProbe.leaves`` says."""
    return Capability("PACKED_SOME_LAYERS", (bits, group_size), Rung.NATIVE)
