"""Questions to the database. An answer keeps what is known in each execution state apart, as values of different types."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import DatabaseError
from .schema import STATES

if TYPE_CHECKING:
    import duckdb

__all__ = [
    "Answer",
    "RealEvidence",
    "RefusedEvidence",
    "Selection",
    "SimulatedEvidence",
    "answers",
    "capabilities",
    "of_unknown_chip",
]


@dataclass(frozen=True)
class Selection:
    """What to look for; None is anything. Case does not matter.

    Attributes:
        chip: part of the chip's name: ``M3`` finds ``Apple M3 Max``.
        device: ``cpu``, ``metal`` or ``cuda``.
        mlx, mlx_lm, lumina_cache: a version or its beginning: ``0.32`` finds 0.32 and 0.32.4, not 0.320.
        model: part of the model's name, its module in mlx-lm (``llama``), or its fingerprint.
        action: an action's text form, with ``*`` and ``?`` as in file names.
        kind: ``probe``, ``architectures``, ``profile``, ``eval``, ``campaign`` or ``log``.
        state: one execution state.
    """

    chip: str | None = None
    device: str | None = None
    mlx: str | None = None
    mlx_lm: str | None = None
    lumina_cache: str | None = None
    model: str | None = None
    action: str | None = None
    kind: str | None = None
    state: str | None = None

    def __post_init__(self) -> None:
        if self.state is not None and self.state not in STATES:
            raise DatabaseError(f"{self.state!r} is no execution state; there are {', '.join(STATES)}")

    def where(self, *, actions: bool = True) -> tuple[str, list[str]]:
        """The condition in SQL, and its parameters."""
        said: list[tuple[str, list[str]]] = []
        if self.chip is not None:
            said.append(("contains(lower(machine), lower(?))", [self.chip]))
        if self.device is not None:
            said.append(("lower(device) = lower(?)", [self.device]))
        for column in ("mlx", "mlx_lm", "lumina_cache"):
            version = getattr(self, column)
            if version is not None:
                said.append(
                    (f"({column} = ? OR starts_with({column}, ?))", [version, version.rstrip(".") + "."])
                )
        if self.model is not None:
            said.append(
                (
                    "(contains(lower(model_name), lower(?)) OR lower(model_type) = lower(?) OR model = ?)",
                    [self.model] * 3,
                )
            )
        if self.kind is not None:
            said.append(("kind = ?", [self.kind]))
        if self.action is not None and actions:
            said.append(("action GLOB ?", [self.action]))
        return " AND ".join(f"coalesce({c}, false)" for c, _ in said) or "true", [
            p for _, ps in said for p in ps
        ]


@dataclass(frozen=True)
class _Figures:
    """Means over documents; None: nobody measured it. KL in nats per token, bytes as a share of 16-bit dense rows."""

    documents: int  #: that KL is a mean over
    kl_mean: float | None
    share16: float | None
    time_ratio: float | None  #: decode step over that of the dense, full cache: geometric mean


@dataclass(frozen=True)
class RealEvidence(_Figures):
    """The action ran in the backend."""

    works: int  #: times that it ran
    fails: int  #: times that it was carried out and went wrong
    wrongly_refused: int  #: times that it was refused and worked when forced
    reasons: tuple[str, ...] = ()  #: why it failed

    execution_state: str = "real"


@dataclass(frozen=True)
class SimulatedEvidence(_Figures):
    """The action's effect was imposed on a forward that keeps the whole cache. Says nothing of whether it runs."""

    observations: int

    execution_state: str = "simulated"


@dataclass(frozen=True)
class RefusedEvidence:
    """The backend, or the classifier before it, refused."""

    refusals: int
    reasons: tuple[str, ...]

    execution_state: str = "backend_infeasible"


@dataclass(frozen=True)
class Answer:
    """One action on one machine, versions and model."""

    machine: str | None  #: None: the file does not say
    device: str | None
    mlx: str | None
    mlx_lm: str | None
    lumina_cache: str | None
    model: str | None  #: name, or module of mlx-lm
    action: str
    real: RealEvidence | None
    simulated: SimulatedEvidence | None
    refused: RefusedEvidence | None

    @property
    def verdict(self) -> str:
        """``runs``, ``fails``, ``runs, sometimes refused``, ``runs, sometimes fails``, ``refused``, ``refused wrongly``
        or ``not tried``."""
        if self.real is not None:
            if self.real.fails and self.real.works:
                return "runs, sometimes fails"
            if self.real.fails:
                return "fails"
            if self.real.works:
                return "runs, sometimes refused" if self.refused is not None else "runs"
            return "refused wrongly"
        return "refused" if self.refused is not None else "not tried"

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


_GROUP = (
    "machine, device, mlx, mlx_lm, lumina_cache, coalesce(model_name, model_type, model) AS named, action"
)
_NAMES = ("machine", "device", "mlx", "mlx_lm", "lumina_cache", "model", "action")
_FIGURES = """
    coalesce(sum(documents) FILTER (kl_mean IS NOT NULL), 0)::INTEGER AS documents,
    sum(kl_mean * documents) / nullif(sum(documents) FILTER (kl_mean IS NOT NULL), 0) AS kl_mean,
    avg(share16) AS share16,
    exp(avg(ln(time_ratio))) AS time_ratio"""
_SQL = {
    "real": f"""
    SELECT {_GROUP}, {_FIGURES},
    count(*) FILTER (outcome = 'works'), count(*) FILTER (outcome = 'fails'),
    count(*) FILTER (outcome = 'works_when_forced'),
    list_sort(list_distinct(list(reason) FILTER (reason IS NOT NULL)))""",
    "simulated": f"SELECT {_GROUP}, {_FIGURES}, count(*)",
    "backend_infeasible": f'SELECT {_GROUP}, count(*), list_sort(list_distinct(list("text")))',
}
_Key = tuple[Any, ...]


def answers(connection: duckdb.DuckDBPyConnection, selection: Selection) -> list[Answer]:
    """Everything that is known of the actions selected; one query per execution state, put side by side here."""
    condition, parameters = selection.where()
    found: dict[str, dict[_Key, _Key]] = {}
    for state in STATES:
        if selection.state not in (None, state):
            found[state] = {}
            continue
        sql = f"{_SQL[state]} FROM {state} WHERE {condition} GROUP BY ALL"
        rows = connection.execute(sql, parameters).fetchall()
        found[state] = {row[:7]: row[7:] for row in rows}
    keys = sorted({k for rows in found.values() for k in rows}, key=lambda k: tuple(str(v or "") for v in k))
    return [
        Answer(
            **dict(zip(_NAMES, key, strict=True)),
            real=_real(found["real"].get(key)),
            simulated=_simulated(found["simulated"].get(key)),
            refused=_refused(found["backend_infeasible"].get(key)),
        )
        for key in keys
    ]


def of_unknown_chip(connection: duckdb.DuckDBPyConnection, selection: Selection) -> int:
    """How many answers there would be besides if files that do not say their chip were of the chip asked for."""
    if selection.chip is None:
        return 0
    return sum(a.machine is None for a in answers(connection, replace(selection, chip=None)))


def _real(row: _Key | None) -> RealEvidence | None:
    if row is None:
        return None
    documents, kl_mean, share16, time_ratio, works, fails, wrongly_refused, reasons = row
    return RealEvidence(
        documents, kl_mean, share16, time_ratio, works, fails, wrongly_refused, tuple(reasons or ())
    )


def _simulated(row: _Key | None) -> SimulatedEvidence | None:
    return None if row is None else SimulatedEvidence(*row)


def _refused(row: _Key | None) -> RefusedEvidence | None:
    return None if row is None else RefusedEvidence(row[0], tuple(row[1]))


def capabilities(connection: duckdb.DuckDBPyConnection, selection: Selection) -> list[dict[str, Any]]:
    """Capabilities by machine, versions and model; ``present`` counts rows that found it, ``absent`` ones that did not."""
    condition, parameters = selection.where(actions=False)
    sql = f"""
    SELECT machine, device, mlx, mlx_lm, coalesce(model_name, model_type, model) AS model, capability,
    count(*) FILTER (present) AS present, count(*) FILTER (NOT present) AS absent,
    list_sort(list_distinct(list(reason) FILTER (reason IS NOT NULL))) AS reasons
    FROM capabilities WHERE {condition} GROUP BY ALL ORDER BY ALL"""
    rows: list[dict[str, Any]] = connection.sql(sql, params=parameters).to_arrow_table().to_pylist()
    return rows
