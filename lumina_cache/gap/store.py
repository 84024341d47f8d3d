"""An append-only store of observations: three Parquet data sets that never share a file.

::

    STORE/manifest.json                      what whoever filled it wrote down to repeat it
    STORE/real/part-*.parquet
    STORE/simulated/part-*.parquet
    STORE/backend_infeasible/part-*.parquet

Adding writes a new part file under a temporary name, flushes it to the disk and renames it, so that a writer that is
killed leaves a file that nobody reads. Reading tells what it left out, and guesses nothing: files that are cut short or
come from elsewhere, rows that hold something odd, and observations that are there twice. Copies are read once; where
copies differ in their figures, no one of them is.

Tables come from an engine (DuckDB unless another is given) as ibis expressions, each wrapped in a type of its execution
state: :class:`RealTable`, :class:`SimulatedTable`, :class:`RefusalTable`.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from ..backend.capabilities import Rung
from ..errors import AnalysisError, AnalysisUnavailableError, MixedExecutionStateError
from .records import PHASES, ROLES, SCHEMA, SOURCES, BackendInfeasible, Observation, Real, Simulated

if TYPE_CHECKING:
    import ibis
    import pyarrow as pa

__all__ = [
    "DuckDB",
    "Engine",
    "Problem",
    "RealTable",
    "RefusalTable",
    "ScoredTable",
    "SimulatedTable",
    "Store",
    "Tables",
    "empty_file",
    "of_one_state",
    "open_tables",
    "schema_of",
]

_DATASETS = ("real", "simulated", "backend_infeasible")
_PART = re.compile(r"part-.*\.parquet$")
_UNFINISHED = ".unfinished"
_META_KIND, _META_STATE = b"lumina_cache.kind", b"lumina_cache.execution_state"
_KIND = b"observations"

_COMMON = {
    "schema": "int32",
    "id": "string",
    "model": "string",
    "document": "string",
    "domain": "string",
    "context": "int32",
    "phase": "string",
    "seed": "int32",
    "horizon": "int32",
    "action": "string",
    "rung": "int8",
    "requires": "list",
    "role": "string",
    "source": "string",
    "run": "string",
    "made": "string",
    "model_name": "string",
    "text_sha256": "string",
    "tokens_sha256": "string",
    "device": "string",
    "machine": "string",
    "mlx": "string",
    "mlx_lm": "string",
    "lumina_cache": "string",
    "git_commit": "string?",
    "log_line": "string?",
}
_FIGURES = {
    "kl_mean": "double",
    "kl_p95": "double",
    "kl_half0": "double?",
    "kl_half1": "double?",
    "p95_half0": "double?",
    "p95_half1": "double?",
    "kl_spans": "doubles",
    "top1": "double?",
    "nll_change": "double?",
    "share16": "double",
    "share16_allocated": "double",
    "live": "int64",
    "allocated": "int64",
    "predicted_live": "int64?",
    "time_ratio": "double?",
    "time_low": "double?",
    "time_high": "double?",
    "take_seconds": "double?",
}
_REFUSAL = {
    "backend_rung": "int8",
    "code": "string",
    "capability": "string?",
    "text": "string",
    "reasons": "string",
}


def _columns(execution_state: str) -> dict[str, str]:
    return _COMMON | (_REFUSAL if execution_state == "backend_infeasible" else _FIGURES)


def schema_of(execution_state: str) -> pa.Schema:
    """Arrow schema of a data set; its metadata say what the file holds.

    Raises:
        AnalysisUnavailableError: pyarrow is not installed.
    """
    pa = _pyarrow()
    types = {
        "string": pa.string(),
        "double": pa.float64(),
        "int8": pa.int8(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "list": pa.list_(pa.string()),
        "doubles": pa.list_(pa.float64()),
    }
    columns = [
        pa.field(name, types[kind.rstrip("?")], nullable=kind.endswith("?"))
        for name, kind in _columns(execution_state).items()
    ]
    return pa.schema(columns, {_META_KIND: _KIND, _META_STATE: execution_state.encode()})


@dataclass(frozen=True)
class Problem:
    """Something that was left out, counted and named."""

    #: unfinished, truncated, foreign, mixed_state, bad_row, duplicate, conflict or missing
    kind: str
    where: str  #: path, or what rows have in common
    count: int  #: files, or rows
    text: str

    def to_record(self) -> dict[str, Any]:
        return dict(vars(self))


class Store:
    """A folder of observations. Opening one that is not there makes it when the first observation is added.

    Args:
        path: the folder.

    Raises:
        AnalysisError: ``path`` is a file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise AnalysisError(f"{self.path} is a file; a store is a folder")

    # -- writing ----------------------------------------------------------------------------------------------------

    def append(self, observations: Iterable[Observation]) -> list[Path]:
        """Write a new part file per execution state that occurs, whole or not at all. Returns the files.

        Raises:
            AnalysisError: the folder cannot be written to.
            AnalysisUnavailableError: pyarrow is not installed.
            MixedExecutionStateError: something is none of the three kinds of observations.
        """
        rows: dict[str, list[dict[str, Any]]] = {}
        for one in observations:
            if not isinstance(one, Real | Simulated | BackendInfeasible):
                raise MixedExecutionStateError(
                    f"{type(one).__name__} has no execution state: give Real, Simulated or BackendInfeasible"
                )
            rows.setdefault(one.execution_state, []).append(one.to_row())
        return [self._write(name, rows[name]) for name in _DATASETS if name in rows]

    def _write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        pa = _pyarrow()
        return self.append_table(name, pa.Table.from_pylist(list(rows), schema=schema_of(name)))

    def append_table(self, execution_state: str, table: pa.Table) -> Path:
        """Write rows that are columns already as a new part file; the schema must be :func:`schema_of`'s.

        Raises:
            AnalysisError: columns are missing or of other types, or the folder cannot be written to.
            MixedExecutionStateError: the table says that it holds another execution state.
        """
        pa = _pyarrow()
        import pyarrow.parquet as pq

        told = (table.schema.metadata or {}).get(_META_STATE, execution_state.encode()).decode()
        if told != execution_state:
            raise MixedExecutionStateError(
                f"a table of {told} observations is none of {execution_state} ones"
            )
        try:
            table = table.cast(schema_of(execution_state))
        except (pa.ArrowException, ValueError) as error:
            raise AnalysisError(f"no table of {execution_state} observations: {_line(error)}") from None
        folder = self.path / execution_state
        part = folder / f"part-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.parquet"
        temporary = part.with_name(part.name + _UNFINISHED)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, part)
            _sync(folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise AnalysisError(f"cannot write {part}: {error.strerror or error}") from None
        return part

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Put ``manifest`` in place of the one that is there, at once."""
        temporary = self.path / ("manifest.json" + _UNFINISHED)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(manifest, indent=1, allow_nan=False) + "\n", "utf-8")
            os.replace(temporary, self.path / "manifest.json")
        except OSError as error:
            raise AnalysisError(f"cannot write {temporary}: {error.strerror or error}") from None

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def manifest(self) -> dict[str, Any] | None:
        """None if there is none.

        Raises:
            AnalysisError: it is there and cannot be read.
        """
        path = self.path / "manifest.json"
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise AnalysisError(f"cannot read {path}: {error}") from None
        if not isinstance(found, dict):
            raise AnalysisError(f"{path} holds no object")
        return found

    def parts(self, execution_state: str) -> tuple[list[Path], list[Problem]]:
        """The readable part files of a data set, oldest first, and what else lies in its folder."""
        folder = self.path / execution_state
        files: list[Path] = []
        problems: list[Problem] = []
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            problem = _against(path, execution_state)
            if problem is None:
                files.append(path)
            else:
                problems.append(problem)
        return files, problems

    def ids(self, execution_state: str) -> set[str]:
        """Ids of all observations of a data set, so that whoever was cut short knows what is there already."""
        _pyarrow()
        import pyarrow.parquet as pq

        found: set[str] = set()
        for path in self.parts(execution_state)[0]:
            found.update(pq.read_table(path, columns=["id"])["id"].to_pylist())
        return found

    def observations(self, execution_state: str) -> list[Real | Simulated | BackendInfeasible]:
        """All observations of a data set as they were added, copies included; for small ones.

        Raises:
            LogFormatError: a row holds something odd.
        """
        _pyarrow()
        import pyarrow.parquet as pq

        from .records import from_row

        files = self.parts(execution_state)[0]
        rows = (row for path in files for row in pq.read_table(path).to_pylist())
        return [from_row(row, execution_state) for row in rows]


def _sync(folder: Path) -> None:
    """A rename is on the disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _against(path: Path, execution_state: str) -> Problem | None:
    """Why a file is not read."""
    if path.name.endswith(_UNFINISHED):
        return Problem("unfinished", str(path), 1, "its writer was stopped before it was whole, or is at it")
    if not path.is_file() or not _PART.match(path.name):
        return Problem("foreign", str(path), 1, "not a part file of a store")
    pa = _pyarrow()
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow
    except (OSError, pa.ArrowException) as error:
        return Problem("truncated", str(path), 1, f"cannot be read: {_line(error)}")
    metadata = found.metadata or {}
    if metadata.get(_META_KIND) != _KIND:
        return Problem("foreign", str(path), 1, "not written as observations")
    state = metadata.get(_META_STATE, b"").decode(errors="replace")
    if state != execution_state:
        return Problem("mixed_state", str(path), 1, f"holds {state!r} observations among {execution_state!r}")
    wanted = schema_of(execution_state)
    if not found.remove_metadata().equals(wanted.remove_metadata()):
        names = {f.name for f in found} ^ {f.name for f in wanted}
        what = f"columns {', '.join(sorted(names))}" if names else "types of columns"
        return Problem("foreign", str(path), 1, f"another schema than version {SCHEMA}: {what} differ")
    return None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# -- tables -----------------------------------------------------------------------------------------------------------


class Engine(Protocol):
    """What computes on tables."""

    @property
    def name(self) -> str: ...

    def read(self, files: Sequence[Path], empty: pa.Schema) -> ibis.Table:
        """The rows of all files; a table without rows, of schema ``empty``, for no file."""
        ...


class DuckDB:
    """DuckDB in this process, with a bound on its memory; what does not fit goes to temporary files."""

    name = "duckdb"

    def __init__(self, memory: str = "1GB", threads: int | None = None) -> None:
        """``memory``: most of it that DuckDB may take, for example ``"512MB"``.

        Raises:
            AnalysisUnavailableError: ibis or duckdb is not installed.
        """
        import tempfile

        self._scratch = tempfile.TemporaryDirectory(prefix="lumina-gap-")
        settings: dict[str, Any] = {"memory_limit": memory, "temp_directory": self._scratch.name}
        if threads is not None:
            settings["threads"] = threads
        self.connection = _ibis().duckdb.connect(**settings)

    def read(self, files: Sequence[Path], empty: pa.Schema) -> ibis.Table:
        if not files:
            files = [empty_file(Path(self._scratch.name), empty)]
        return self.connection.read_parquet([str(f) for f in files])


def empty_file(folder: Path, schema: pa.Schema) -> Path:
    """A Parquet file in ``folder`` without rows, for engines that read nothing but files."""
    import pyarrow.parquet as pq

    path = folder / f"{uuid.uuid4().hex}.parquet"
    pq.write_table(schema.empty_table(), path)
    return path


@dataclass(frozen=True)
class _Table:
    """Observations of one execution state as an ibis table."""

    table: ibis.Table
    rows: int

    execution_state: ClassVar[str]


@dataclass(frozen=True)
class RealTable(_Table):
    """Measured as the backend ran them."""

    execution_state: ClassVar[str] = "real"


@dataclass(frozen=True)
class SimulatedTable(_Table):
    """Measured on forwards that keep the whole cache."""

    execution_state: ClassVar[str] = "simulated"


@dataclass(frozen=True)
class RefusalTable(_Table):
    """Refused, with reasons and without figures."""

    execution_state: ClassVar[str] = "backend_infeasible"


ScoredTable = RealTable | SimulatedTable
_T = TypeVar("_T")


def of_one_state(*tables: _T, allowed: tuple[type[Any], ...] = (RealTable, SimulatedTable)) -> type[_T]:
    """The type that all of ``tables`` are of.

    Raises:
        MixedExecutionStateError: they are of several types, or of one that is not ``allowed``.
    """
    kinds = {type(t) for t in tables}
    if len(kinds) != 1 or not kinds <= set(allowed):
        found = ", ".join(sorted(k.__name__ for k in kinds))
        wanted = " or ".join(k.__name__ for k in allowed)
        raise MixedExecutionStateError(
            f"{found}: give tables of one execution state, {wanted}; observations of different ones are never combined"
        )
    return kinds.pop()


@dataclass(frozen=True)
class Tables:
    """What was read of one or several stores."""

    real: RealTable
    simulated: SimulatedTable
    refusals: RefusalTable
    problems: tuple[Problem, ...]
    engine: Engine


def open_tables(
    stores: Store | str | os.PathLike[str] | Sequence[Store | str | os.PathLike[str]],
    engine: Engine | None = None,
) -> Tables:
    """Read one store, or several as one.

    Args:
        engine: what computes; DuckDB with 1 GB for None.

    Raises:
        AnalysisError: a store is not there.
        AnalysisUnavailableError: a package is missing.
    """
    several = [stores] if isinstance(stores, Store | str | os.PathLike) else list(stores)
    found = [s if isinstance(s, Store) else Store(s) for s in several]
    for store in found:
        if not store.path.is_dir():
            raise AnalysisError(f"there is no store at {store.path}")
    engine = engine or DuckDB()
    problems: list[Problem] = [p for store in found for p in _foreign(store)]
    read: dict[str, tuple[ibis.Table, int]] = {}
    for name in _DATASETS:
        files: list[Path] = []
        for store in found:
            more, against = store.parts(name)
            files += more
            problems += against
        table, rows, against = _clean(engine.read(files, schema_of(name)), name)
        read[name] = table, rows
        problems += against
    return Tables(
        RealTable(*read["real"]),
        SimulatedTable(*read["simulated"]),
        RefusalTable(*read["backend_infeasible"]),
        tuple(problems),
        engine,
    )


def _foreign(store: Store) -> list[Problem]:
    known = {"manifest.json", *_DATASETS}
    return [
        Problem("foreign", str(path), 1, "no part of a store")
        for path in sorted(store.path.iterdir())
        if path.name not in known
    ]


def _clean(table: ibis.Table, name: str) -> tuple[ibis.Table, int, list[Problem]]:
    """Rows that can be used, how many they are, and the others, counted and named."""
    problems: list[Problem] = []
    odd = _odd(table, name)
    counts = table.aggregate(
        rows=table.count(),
        ids=table.id.nunique(),
        **{f"odd_{i}": condition.sum() for i, (_, condition) in enumerate(odd)},
    ).to_pyarrow()
    row = counts.to_pylist()[0]
    rows = int(row["rows"])
    wrong = [(text, condition, int(row[f"odd_{i}"] or 0)) for i, (text, condition) in enumerate(odd)]
    wrong = [one for one in wrong if one[2]]
    for text, condition, count in wrong:
        problems.append(Problem("bad_row", f"{name}: {_example(table.filter(condition))}", count, text))
    if wrong:
        ibis = _ibis()
        table = table.filter(~ibis.or_(*(condition for _, condition, _ in wrong)))
        rows = int(table.count().to_pyarrow().as_py())
    if int(row["ids"]) < int(row["rows"]):
        table, rows, more = _once(table, name, rows)
        problems += more
    return table, rows, problems


def _odd(table: ibis.Table, name: str) -> list[tuple[str, Any]]:
    """What is wrong with a row → the condition that finds it; never null."""
    columns = _columns(name)
    needed = [c for c, kind in columns.items() if not kind.endswith("?")]
    ibis = _ibis()
    checks: list[tuple[str, Any]] = [
        ("a column that every row has is empty", ibis.or_(*(table[c].isnull() for c in needed))),
        (f"another schema than {SCHEMA}", table["schema"] != SCHEMA),
        (f"role is none of {', '.join(ROLES)}", ~table.role.isin(ROLES)),
        (f"phase is none of {', '.join(PHASES)}", ~table.phase.isin(PHASES)),
        (f"source is none of {', '.join(SOURCES)}", ~table.source.isin(SOURCES)),
        ("there is no such rung", ~table.rung.between(min(Rung), max(Rung))),
    ]
    if name != "backend_infeasible":
        figures = [c for c, kind in columns.items() if kind.startswith("double") and kind != "doubles"]
        # x − x is 0 for finite numbers only. DuckDB answers isnan() from a file's statistics, which leave NaN out.
        infinite = ibis.or_(*(((table[c] - table[c]) != 0).fill_null(False) for c in figures))
        checks += [
            ("a figure is not a finite number", infinite),
            ("share16 is not positive", table.share16 <= 0),
            ("time_ratio is not positive", (table.time_ratio <= 0).fill_null(False)),
        ]
    return [(text, condition.fill_null(False)) for text, condition in checks]


def _once(table: ibis.Table, name: str, rows: int) -> tuple[ibis.Table, int, list[Problem]]:
    """Copies of an observation once; none of those whose copies differ."""
    ibis = _ibis()
    # Times of two runs always differ; what is computed does not, on one machine with one set of versions.
    computed = ("code",) if name == "backend_infeasible" else ("kl_mean", "kl_p95", "share16")
    differ = ibis.or_(*(table[c].min() != table[c].max() for c in computed))
    counted = table.group_by("id").aggregate(copies=table.count(), differ=differ)
    several = counted.filter(counted.copies > 1)
    apart = several.filter(several.differ)
    total = several.aggregate(
        same=(~several.differ).sum(),
        same_rows=several.copies.sum(where=~several.differ),
        apart=several.differ.sum(),
        apart_rows=several.copies.sum(where=several.differ),
    )
    number = {k: int(v or 0) for k, v in total.to_pyarrow().to_pylist()[0].items()}
    copies = number["same_rows"] - number["same"]
    problems = []
    if copies:
        where = _example(table.semi_join(several.filter(~several.differ), "id"))
        text = "observations that are there more than once, each read once"
        problems.append(Problem("duplicate", f"{name}: {where}", copies, text))
    if number["apart"]:
        where = _example(table.semi_join(apart, "id"))
        text = (
            f"{number['apart']} observations whose copies differ in their figures: none of the copies is read"
        )
        problems.append(Problem("conflict", f"{name}: {where}", number["apart_rows"], text))
    if not problems:
        return table, rows, []
    place = ibis.row_number().over(ibis.window(group_by=table.id, order_by=[table.made, table.run]))
    once = table.mutate(_place=place)
    once = once.filter(once["_place"] == 0).drop("_place").anti_join(apart, "id")
    return once, rows - copies - number["apart_rows"], problems


def _example(table: ibis.Table) -> str:
    columns = ("action", "document", "context")
    found = table.select(*columns).order_by(*columns).limit(1).to_pyarrow().to_pylist()
    if not found:
        return "no row"
    return f"for example {found[0]['action']} on {found[0]['document']} at {found[0]['context']} tokens"


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise _unavailable(error) from None
    return pyarrow


def _ibis() -> Any:
    try:
        import ibis
    except ImportError as error:
        raise _unavailable(error) from None
    return ibis


def _unavailable(error: ImportError) -> AnalysisUnavailableError:
    return AnalysisUnavailableError(
        f"observations are kept and analysed with packages that are not installed ({error}): "
        'pip install "lumina-cache[analysis]"'
    )
