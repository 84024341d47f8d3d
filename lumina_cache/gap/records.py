"""Observations: one action in one state, measured or refused, typed by how that came about.

- :class:`Real`: the action ran in the backend on a real forward and was measured there.
- :class:`Simulated`: the figures come from a forward that keeps the whole cache, or from a formula for bytes.
- :class:`BackendInfeasible`: the classifier or the backend refused. It has reasons and *no* figure.

The three never mix: whatever compares or pools observations takes one of the types and raises
:class:`~lumina_cache.errors.MixedExecutionStateError` for any other.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ..actions import Action
from ..backend.capabilities import Rung
from ..errors import LogFormatError, MixedExecutionStateError
from ..policy import quality_points, time_points

__all__ = [
    "BLOCK",
    "PHASES",
    "ROLES",
    "SCHEMA",
    "SOURCES",
    "BackendInfeasible",
    "Measured",
    "Observation",
    "Provenance",
    "Quality",
    "Real",
    "Scored",
    "Simulated",
    "State",
    "What",
    "from_row",
    "one_state",
    "quality_of",
]

SCHEMA = 1

#: Tokens of a block; even blocks make half 0, odd ones half 1.
BLOCK = 16

PHASES = ("decode", "prefill")
ROLES = ("candidate", "placebo", "ceiling", "reference")
SOURCES = ("campaign", "eval", "log", "calibrate")


@dataclass(frozen=True)
class State:
    """What an action is taken in. Two actions are compared only in the same state."""

    model: str  #: fingerprint
    document: str
    domain: str
    context: int  #: tokens held when the action is taken
    phase: str  #: one of PHASES
    seed: int
    horizon: int  #: tokens scored after it; 0 where nothing is

    def __post_init__(self) -> None:
        _known("phase", self.phase, PHASES)
        for name in ("context", "horizon"):
            if getattr(self, name) < 0:
                raise LogFormatError(f"{name}={getattr(self, name)} is a number of tokens, so at least 0")


@dataclass(frozen=True)
class What:
    """An action with the facts that an analysis needs of it."""

    action: str  #: text form; mlx-lm's own as ``mlx-lm:…``
    rung: int = 0  #: least rung that executes it, see :class:`~lumina_cache.backend.capabilities.Rung`
    requires: tuple[str, ...] = ()  #: names of capabilities above rung native, sorted
    role: str = "candidate"  #: one of ROLES

    def __post_init__(self) -> None:
        _known("role", self.role, ROLES)
        if self.rung not in list(Rung):
            raise LogFormatError(f"rung={self.rung!r}: rungs are {', '.join(f'{r} {r.name}' for r in Rung)}")
        object.__setattr__(self, "requires", tuple(sorted(set(self.requires))))

    @classmethod
    def of(cls, action: Action, role: str = "candidate") -> What:
        """The facts that the catalogue has of ``action``."""
        deep = [str(c) for c in action.requires if c.rung > Rung.NATIVE]
        return cls(str(action), int(action.rung), tuple(deep), role)


@dataclass(frozen=True)
class Provenance:
    """Where an observation comes from. Text and token hashes are empty where there is no text, as in a session's log."""

    source: str  #: one of SOURCES
    run: str  #: id of the campaign, evaluation or session
    made: str  #: ISO time
    model_name: str
    text_sha256: str
    tokens_sha256: str
    device: str  #: cpu, metal or cuda
    machine: str  #: name of the chip
    mlx: str
    mlx_lm: str
    lumina_cache: str
    git_commit: str | None = None
    log_line: str | None = None

    def __post_init__(self) -> None:
        _known("source", self.source, SOURCES)

    @property
    def condition(self) -> tuple[str, ...]:
        """What figures depend on besides state and action."""
        return (self.source, self.device, self.machine, self.mlx, self.mlx_lm, self.lumina_cache)


@dataclass(frozen=True)
class Quality:
    """Damage against the full cache over the horizon, KL in nats per token. None: not measured apart."""

    kl_mean: float
    kl_p95: float
    kl_half0: float | None = None  #: over even blocks of 16 tokens
    kl_half1: float | None = None  #: over odd ones
    p95_half0: float | None = None
    p95_half1: float | None = None
    kl_spans: tuple[float, ...] = ()  #: mean KL of each block
    top1: float | None = None  #: share of tokens whose most likely next token is the same
    nll_change: float | None = None  #: nats per token


def quality_of(
    kl: npt.NDArray[np.float64], *, top1: float | None = None, nll_change: float | None = None
) -> Quality:
    """Quality from the KL of every scored token, shape (H,) in nats.

    Raises:
        LogFormatError: there is no token, or a KL is not a finite number.
    """
    kl = np.asarray(kl, dtype=np.float64)
    if kl.ndim != 1 or not kl.size or not np.isfinite(kl).all():
        raise LogFormatError(f"KL of shape {kl.shape}: give finite numbers, one per scored token")
    halves = [kl[(np.arange(kl.size) // BLOCK) % 2 == half] for half in (0, 1)]
    means = [float(h.mean()) if h.size else None for h in halves]
    tails = [_percentile95(h) if h.size else None for h in halves]
    spans = tuple(float(kl[i : i + BLOCK].mean()) for i in range(0, kl.size, BLOCK))
    return Quality(
        float(kl.mean()), _percentile95(kl), means[0], means[1], tails[0], tails[1], spans, top1, nll_change
    )


def _percentile95(values: npt.NDArray[np.float64]) -> float:
    """The value at or nearest to 95 % of the sorted ones, as evaluations take it."""
    return float(np.sort(values)[round(0.95 * (values.size - 1))])


@dataclass(frozen=True)
class Measured:
    """The figures of an action that was carried out, or simulated."""

    quality: Quality
    share16: float  #: live bytes over 16-bit dense rows, floats as 2 bytes each and codes as they are
    share16_allocated: float
    live: int  #: bytes
    allocated: int  #: bytes
    predicted_live: int | None = None
    time_ratio: float | None = None  #: decode step over that of the dense, full cache, paired
    time_low: float | None = None
    time_high: float | None = None
    take_seconds: float | None = None  #: of carrying the action out

    @classmethod
    def of_trial(cls, quality: Quality, record: Mapping[str, Any]) -> Measured:
        """With the bytes and times of a record of ``lumina-cache eval``'s kind."""
        nbytes, times = record["bytes"], record.get("time", {})
        return cls(
            quality,
            share16=nbytes["share16"],
            share16_allocated=nbytes["share16_allocated"],
            live=nbytes["live"],
            allocated=nbytes["allocated"],
            predicted_live=nbytes["predicted_live"],
            time_ratio=times.get("ratio"),
            time_low=times.get("low"),
            time_high=times.get("high"),
            take_seconds=record["take_seconds"],
        )

    def __post_init__(self) -> None:
        for name, value in _flat(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise LogFormatError(f"{name}={value}: figures are finite numbers; an unknown one is None")
        if self.share16 <= 0 or (self.time_ratio is not None and self.time_ratio <= 0):
            raise LogFormatError(
                f"share16={self.share16}, time_ratio={self.time_ratio}: both must be positive"
            )

    @property
    def q(self) -> float:
        """Q of the score, in points."""
        return float(quality_points(self.quality.kl_mean, self.quality.kl_p95))

    @property
    def t(self) -> float | None:
        """T of the score, in points; None where no time was measured."""
        return None if self.time_ratio is None else float(time_points(self.time_ratio))

    def score(self, time_weight: float = 0.0) -> float | None:
        """−(Q + λ_T·T); None where λ_T asks for a time that is not there.

        No risk of an overflow: budgets are applied to ``share16`` before scores are compared.
        """
        if time_weight == 0.0:
            return -self.q + 0.0
        return None if self.t is None else -(self.q + time_weight * self.t) + 0.0


def _flat(measured: Measured) -> dict[str, Any]:
    own = {f.name: getattr(measured, f.name) for f in fields(measured) if f.name != "quality"}
    return {**vars(measured.quality), **own}


@dataclass(frozen=True)
class Observation:
    """One action in one state. Use one of the three below, which say how it came about."""

    state: State
    what: What
    provenance: Provenance

    execution_state: ClassVar[str]

    @property
    def id(self) -> str:
        """The same for two observations of one action in one state under the same conditions."""
        parts = [
            SCHEMA,
            self.execution_state,
            self.what.action,
            *vars(self.state).values(),
            self.provenance.tokens_sha256,
            *self.provenance.condition,
            *self._apart(),
        ]
        text = json.dumps(parts, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _apart(self) -> tuple[int, ...]:
        """What else tells two observations of one action in one state apart."""
        return ()

    def to_row(self) -> dict[str, Any]:
        """Flat, a value per column of its data set."""
        about = {**vars(self.state), **vars(self.what), **vars(self.provenance)}
        row = {"schema": SCHEMA, "id": self.id, **about, **self._figures()}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in row.items()}

    def _figures(self) -> dict[str, Any]:
        raise NotImplementedError("an observation is Real, Simulated or BackendInfeasible")


@dataclass(frozen=True)
class Real(Observation):
    """Measured as the backend ran it."""

    measured: Measured

    execution_state: ClassVar[str] = "real"

    def _figures(self) -> dict[str, Any]:
        return _flat(self.measured)


@dataclass(frozen=True)
class Simulated(Observation):
    """Measured on a forward that keeps the whole cache, with the action's effect imposed on it."""

    measured: Measured

    execution_state: ClassVar[str] = "simulated"

    def _figures(self) -> dict[str, Any]:
        return _flat(self.measured)


@dataclass(frozen=True)
class BackendInfeasible(Observation):
    """A refusal: reasons as :meth:`~lumina_cache.backend.feasibility.Reason.to_record` has them, and no figure."""

    reasons: tuple[Mapping[str, Any], ...]
    backend_rung: int = field(default=int(Rung.CACHE))  #: rung whose profile refused

    execution_state: ClassVar[str] = "backend_infeasible"

    def __post_init__(self) -> None:
        if not self.reasons or not all("code" in r and "text" in r for r in self.reasons):
            raise LogFormatError(f"{self.what.action}: a refusal needs a reason, with a code and a text")

    def _apart(self) -> tuple[int, ...]:
        # Every rung refuses for reasons of its own.
        return (int(self.backend_rung),)

    def _figures(self) -> dict[str, Any]:
        first = self.reasons[0]
        return {
            "backend_rung": int(self.backend_rung),
            "code": str(first["code"]),
            "capability": next((str(r["capability"]) for r in self.reasons if r.get("capability")), None),
            "text": "; ".join(str(r["text"]) for r in self.reasons),
            "reasons": json.dumps([dict(r) for r in self.reasons]),
        }


Scored: TypeAlias = Real | Simulated
_Kind = TypeVar("_Kind", Real, Simulated, BackendInfeasible)
_KINDS: Mapping[str, type[Observation]] = {k.execution_state: k for k in (Real, Simulated, BackendInfeasible)}


def one_state(observations: Iterable[_Kind]) -> list[_Kind]:
    """The observations, all of one execution state.

    Raises:
        MixedExecutionStateError: they are of several, or something else is among them.
    """
    found = list(observations)
    kinds = {type(o) for o in found}
    if len(kinds) > 1 or not kinds <= set(_KINDS.values()):
        names = ", ".join(sorted(k.__name__ for k in kinds))
        raise MixedExecutionStateError(
            f"observations of different execution states cannot be put together: {names}. "
            "Compute one figure per state"
        )
    return found


def from_row(row: Mapping[str, Any], execution_state: str) -> Real | Simulated | BackendInfeasible:
    """The observation that :meth:`Observation.to_row` made the row from.

    Raises:
        LogFormatError: a column is missing or holds something odd, or the id is not that of the row.
    """
    try:
        if row["schema"] != SCHEMA:
            raise LogFormatError(f"schema {row['schema']!r}: this version reads schema {SCHEMA}")
        about = (_taken(State, row), _taken(What, row), _taken(Provenance, row))
        found: Real | Simulated | BackendInfeasible
        if execution_state == "backend_infeasible":
            found = BackendInfeasible(*about, tuple(json.loads(row["reasons"])), row["backend_rung"])
        elif execution_state in _KINDS:
            measured = Measured(_taken(Quality, row), **_columns(Measured, row, without="quality"))
            found = (Real if execution_state == "real" else Simulated)(*about, measured)
        else:
            raise LogFormatError(f"execution state {execution_state!r}: known are {', '.join(_KINDS)}")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, LogFormatError):
            raise
        what = f"column {error} is missing" if isinstance(error, KeyError) else str(error)
        raise LogFormatError(f"observation {row.get('id')}: {what}") from None
    if found.id != row["id"]:
        raise LogFormatError(
            f"observation {row['id']}: its columns make {found.id}, so one of them was changed"
        )
    return found


_Part = TypeVar("_Part", State, What, Provenance, Quality)


def _taken(kind: type[_Part], row: Mapping[str, Any]) -> _Part:
    return kind(**_columns(kind, row))


def _columns(kind: type[Any], row: Mapping[str, Any], without: str = "") -> dict[str, Any]:
    names: Sequence[str] = [f.name for f in fields(kind) if f.name != without]
    return {n: tuple(row[n]) if isinstance(row[n], list) else row[n] for n in names}


def _known(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise LogFormatError(f"{name}={value!r}: known are {', '.join(known)}")
