"""What actions cost on one model and machine, as measured: quality, time, and which layers mind most.

A profile is a value with provenance, read from a JSON file. ``lumina-cache calibrate`` writes one per model, device and
versions. Without one, the figures shipped with the library are used; they were measured on another model, so whatever is
computed from them says *borrowed*. Figures of two profiles are never mixed.

Quality is the mean KL divergence to the full cache, teacher-forced (nats per token), and its 95th percentile. Two
assumptions carry a figure from where it was measured to where it is used, and ``calibrate`` reports how far off they are:

- damages of a codec and of an eviction add up;
- the damage of a codec is the mean of the layers' own damages, weighted by their sensitivity, so that a plan with
  another codec in every layer costs ``Σ wₗ·KL(codecₗ)/L`` with ``Σ wₗ = L``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from .actions import Quantize, parse_action
from .backend.capabilities import OWN_PACKED_ATTENTION
from .codecs import Layout
from .errors import ProfileFormatError
from .figure_columns import CodecColumns, EvictionColumns

__all__ = [
    "RECALL",
    "SCHEMA",
    "CodecFigure",
    "EvictionFigure",
    "Figure",
    "Parts",
    "Profile",
    "default_profile",
    "read_profile",
]

#: Version of the file format.
SCHEMA = 1


#: Mean KL of continuing a text, and of copying from it (None: the model copies nothing), that ``kl`` is put together of.
Parts = tuple[float, float | None]

#: Share of what comes next that is taken to ask for something again, word by word, where nobody says anything else.
RECALL = 0.5


@dataclass(frozen=True)
class Figure:
    """What holding the cache like this costs. ``time`` is a decode step's time over that of the dense, full cache."""

    kl: float
    p95: float
    time: float | None = None

    def to_record(self) -> dict[str, float | None]:
        return {"kl": self.kl, "p95": self.p95, "time": self.time}


@dataclass(frozen=True)
class CodecFigure:
    """A codec with all rows held.

    ``times`` are (rows, decode-step ratio) pairs, ascending; ``chunk_times`` the same for chunks of a prompt. Both are over
    the dense cache of as many rows.
    """

    action: Quantize
    kl: float
    p95: float
    times: tuple[tuple[int, float], ...] = ()
    chunk_times: tuple[tuple[int, float], ...] = ()
    parts: Parts | None = None

    def time_at(self, rows: int) -> float | None:
        """Decode-step ratio at ``rows`` rows, interpolated; that of the nearest measurement outside of them."""
        return interpolate(self.times, rows) if self.times else None

    def chunk_time_at(self, rows: int) -> float | None:
        """Ratio of a prompt's chunk at ``rows`` rows, interpolated like :meth:`time_at`."""
        return interpolate(self.chunk_times, rows) if self.chunk_times else None


@dataclass(frozen=True)
class EvictionFigure:
    """A scorer: (share of the rows kept, KL, p95) triples, ascending by share; with ``recent`` newest rows protected."""

    scorer: str
    recent: int
    points: tuple[tuple[float, float, float], ...]
    parts: tuple[Parts, ...] | None = None  #: of each point

    def at(self, share: float) -> tuple[float, float]:
        """(KL, p95) at a share of rows kept: linear between measurements and to (1, 0), continued below the smallest."""
        kls, tails = self.curves
        return max(0.0, interpolate(kls, share, beyond=True)), max(
            0.0, interpolate(tails, share, beyond=True)
        )

    @cached_property
    def curves(self) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]:
        """The two curves that :meth:`at` interpolates."""
        return (
            (*((s, kl) for s, kl, _ in self.points), (1.0, 0.0)),
            (*((s, p95) for s, _, p95 in self.points), (1.0, 0.0)),
        )


@dataclass(frozen=True)
class Profile:
    """Everything that was measured, with where and when."""

    name: str
    borrowed: bool  #: measured on another model than the one it is used for
    codecs: tuple[CodecFigure, ...]
    evictors: tuple[EvictionFigure, ...]
    sensitivity: tuple[float, ...] = ()  #: of each layer to being encoded, mean 1; empty: all alike
    seconds_per_byte: Mapping[str, float] = field(
        default_factory=dict
    )  #: of an action's own work: evict, quant, offload
    step_seconds: float | None = None  #: of one dense decode step at 1,024 rows
    prompt_seconds: float | None = None  #: of one token of a prompt's chunk over dense rows, at 1,024 rows
    dense_steps: tuple[tuple[int, float], ...] = ()  #: (rows, seconds of a dense decode step), ascending
    dense_chunks: tuple[
        tuple[int, float], ...
    ] = ()  #: (rows, seconds of one token of a prompt's chunk), ascending
    provenance: Mapping[str, Any] = field(default_factory=dict)
    recall: float = RECALL  #: share of copying in every ``kl``
    serves: bool = (
        False  #: whether attention reads codes of our own layouts, or they are decoded at every fetch
    )

    @cached_property
    def by_layout(self) -> Mapping[Layout, CodecFigure]:
        """Figures by how rows are stored; of codecs that store alike, that of the one read as ``serves`` says."""
        order = sorted(
            self.codecs, key=lambda one: (OWN_PACKED_ATTENTION in one.action.requires) == self.serves
        )
        return {layout: one for one in order if (layout := one.action.layout) is not None}

    @cached_property
    def where_served(self) -> Profile:
        """The same figures where attention reads codes of our own layouts."""
        return self if self.serves else replace(self, serves=True)

    def for_groups_of(self, group_size: int) -> Profile:
        """The same figures for a model whose head dims need smaller groups; smaller groups lose less, so they are bounds."""
        smaller = tuple(
            replace(one, action=replace(one.action, group_size=group_size))
            if one.action.group_size > group_size and group_size in one.action.method.groups
            else one
            for one in self.codecs
        )
        return self if smaller == self.codecs else replace(self, codecs=smaller)

    def step_at(self, rows: float) -> float | None:
        """Seconds of a decode step over so many dense rows: a line through two measurements, as attention's work is."""
        return _seconds_at(self.dense_steps, self.step_seconds, rows)

    def chunk_at(self, rows: float) -> float | None:
        """Seconds of one token of a prompt's chunk over so many dense rows."""
        return _seconds_at(self.dense_chunks, self.prompt_seconds, rows)

    def with_recall(self, recall: float) -> Profile:
        """The same figures for a text of which the share ``recall`` asks for something again, word by word.

        ``KL = (1 − recall)·KL(continuing) + recall·KL(copying)``; that of continuing alone where the model copies nothing.

        Raises:
            ValueError: ``recall`` is not a share.
            ProfileFormatError: the profile has not both.
        """
        if not 0.0 <= recall <= 1.0:
            raise ValueError(f"recall is a share from 0 to 1, not {recall!r}")
        if recall == RECALL:
            return self
        return replace(
            self,
            recall=recall,
            codecs=tuple(replace(one, kl=_mixed(one.parts, recall, self.name)) for one in self.codecs),
            evictors=tuple(
                replace(
                    one,
                    points=tuple(
                        (share, _mixed(parts, recall, self.name), p95)
                        for (share, _, p95), parts in zip(
                            one.points, one.parts or (None,) * len(one.points), strict=True
                        )
                    ),
                )
                for one in self.evictors
            ),
        )

    def codec(self, action: Quantize) -> CodecFigure | None:
        """The figure of exactly this codec, bits, group and residual window."""
        return self._by_action.get(action)

    @cached_property
    def _by_action(self) -> Mapping[Quantize, CodecFigure]:
        return {one.action: one for one in self.codecs}

    @cached_property
    def codec_columns(self) -> CodecColumns:
        """The codecs as arrays, for weighing all of them together."""
        return CodecColumns(self)

    @cached_property
    def eviction_columns(self) -> EvictionColumns:
        """The scorers as arrays."""
        return EvictionColumns(self.evictors)

    def evictor(self, scorer: str) -> EvictionFigure | None:
        return next((one for one in self.evictors if one.scorer == scorer), None)

    def weight(self, layer: int, layers: int) -> float:
        """Sensitivity of one of ``layers`` layers; that of the layer at the same depth if the model has another number."""
        if not self.sensitivity or not 0 <= layer < layers:
            return 1.0
        return self.sensitivity[layer * len(self.sensitivity) // layers]

    def to_record(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "name": self.name,
            "codecs": [
                {
                    "action": str(c.action),
                    "kl": c.kl,
                    "p95": c.p95,
                    "times": [list(t) for t in c.times],
                    "chunk_times": [list(t) for t in c.chunk_times],
                    "parts": None if c.parts is None else list(c.parts),
                }
                for c in self.codecs
            ],
            "evictors": [
                {
                    "scorer": e.scorer,
                    "recent": e.recent,
                    "points": [list(p) for p in e.points],
                    "parts": None if e.parts is None else [list(p) for p in e.parts],
                }
                for e in self.evictors
            ],
            "sensitivity": list(self.sensitivity),
            "seconds_per_byte": dict(self.seconds_per_byte),
            "step_seconds": self.step_seconds,
            "prompt_seconds": self.prompt_seconds,
            "dense_steps": [list(t) for t in self.dense_steps],
            "dense_chunks": [list(t) for t in self.dense_chunks],
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], *, borrowed: bool) -> Profile:
        """
        Raises:
            ProfileFormatError: naming what is missing or cannot be read.
        """
        if record.get("schema") != SCHEMA:
            raise ProfileFormatError(
                f"a profile of schema {record.get('schema')!r}, expected {SCHEMA}; run lumina-cache calibrate again"
            )
        try:
            return cls(
                name=str(record["name"]),
                borrowed=borrowed,
                codecs=tuple(_codec(c) for c in record["codecs"]),
                evictors=tuple(_evictor(e) for e in record["evictors"]),
                sensitivity=tuple(_figure(w, "a sensitivity") for w in record["sensitivity"]),
                seconds_per_byte={
                    str(family): _figure(seconds, f"seconds_per_byte of {family}")
                    for family, seconds in dict(record["seconds_per_byte"]).items()
                },
                step_seconds=_seconds(record["step_seconds"], "step_seconds"),
                prompt_seconds=_seconds(record.get("prompt_seconds"), "prompt_seconds"),
                dense_steps=_dense(record.get("dense_steps", ()), "dense_steps"),
                dense_chunks=_dense(record.get("dense_chunks", ()), "dense_chunks"),
                provenance=dict(record["provenance"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileFormatError(
                f"a profile that cannot be read ({type(error).__name__}: {error}); run lumina-cache calibrate again"
            ) from error


def _codec(record: Mapping[str, Any]) -> CodecFigure:
    action = parse_action(record["action"])
    if not isinstance(action, Quantize):
        raise ValueError(f"{action} is not a codec")
    times, chunk_times = (
        _ascending(((int(rows), _figure(ratio, f"a time of {action}")) for rows, ratio in pairs), action)
        for pairs in (record["times"], record.get("chunk_times", ()))
    )
    return CodecFigure(
        action,
        _figure(record["kl"], f"kl of {action}"),
        _figure(record["p95"], f"p95 of {action}"),
        times,
        chunk_times,
        _parts(record.get("parts"), action),
    )


def _parts(record: Any, what: object) -> Parts | None:
    if record is None:
        return None
    going, copying = record
    what = f"a part of {what}"
    return _figure(going, what), None if copying is None else _figure(copying, what)


def _dense(pairs: Iterable[tuple[Any, Any]], what: str) -> tuple[tuple[int, float], ...]:
    return _ascending(((int(rows), _figure(seconds, what)) for rows, seconds in pairs), what)


def _seconds_at(known: tuple[tuple[int, float], ...], otherwise: float | None, rows: float) -> float | None:
    if not known:
        return otherwise
    # Below what was measured the line may not fall to nothing: the weights are read in any case.
    return max(interpolate(known, rows, beyond=True), min(seconds for _, seconds in known) / 2)


def _mixed(parts: Parts | None, recall: float, name: str) -> float:
    if parts is None:
        raise ProfileFormatError(
            f"profile {name} does not say what continuing and copying cost apart: run lumina-cache calibrate again, or "
            f"leave recall at {RECALL}"
        )
    going, copying = parts
    return going if copying is None else (1.0 - recall) * going + recall * copying


def _seconds(value: Any, what: str) -> float | None:
    return None if value is None else _figure(value, what)


def _evictor(record: Mapping[str, Any]) -> EvictionFigure:
    scorer = str(record["scorer"])
    what = f"a point of {scorer}"
    points = _ascending(
        ((_figure(s, what), _figure(kl, what), _figure(p95, what)) for s, kl, p95 in record["points"]), scorer
    )
    # Without a point every eviction would seem to cost nothing.
    if not points or not 0.0 < points[0][0] <= points[-1][0] < 1.0:
        raise ValueError(f"{scorer}: at least one point, with shares between 0 and 1, is needed")
    parts = record.get("parts")
    if parts is not None and len(parts) != len(points):
        raise ValueError(f"{scorer}: {len(parts)} parts of {len(points)} points")
    return EvictionFigure(
        scorer,
        int(record["recent"]),
        points,
        # In the order of the points, which need not have been ascending.
        None
        if parts is None
        else tuple(
            found
            for _, one in sorted(zip((p[0] for p in record["points"]), parts, strict=True))
            if (found := _parts(one, scorer)) is not None
        ),
    )


P = TypeVar("P", bound=tuple[float, ...])


def _ascending(points: Iterable[P], what: object) -> tuple[P, ...]:
    """``points`` sorted by their first number, which no two may share."""
    found = tuple(sorted(points))
    if len({point[0] for point in found}) < len(found):
        raise ValueError(f"{what}: two figures for the same point")
    return found


def _figure(value: Any, what: str) -> float:
    """A finite number that is not negative; JSON as Python reads it also has NaN and booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{what} is {value!r}, not a number from 0 on")
    return float(value)


def interpolate(points: Iterable[tuple[float, float]], x: float, *, beyond: bool = False) -> float:
    """Piecewise linear through ``points`` (ascending); outside of them constant, or with ``beyond`` the last slope."""
    known: Sequence[tuple[float, float]] = tuple(points)
    if len(known) == 1 or (not beyond and x <= known[0][0]):
        return known[0][1]
    if not beyond and x >= known[-1][0]:
        return known[-1][1]
    upper = next((i for i in range(1, len(known)) if x <= known[i][0]), len(known) - 1)
    (x0, y0), (x1, y1) = known[upper - 1], known[upper]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def read_profile(path: Path, *, borrowed: bool = False) -> Profile:
    """
    Raises:
        ProfileFormatError: the file is no profile, or one of another version.
        OSError: it cannot be read at all.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ProfileFormatError(f"{path}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ProfileFormatError(f"{path}: not a profile")
    return Profile.from_record(record, borrowed=borrowed)


def default_profile() -> Profile:
    """The figures that ship with the library: measured on SmolLM2-135M-Instruct, borrowed for any other model."""
    path = files("lumina_cache").joinpath("data", "profiles", "smollm2-135m.json")
    return read_profile(Path(str(path)), borrowed=True)
