"""The file itself: adding what was found, merging the files of other machines, and getting everything out again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ..errors import AnalysisUnavailableError, DatabaseError, MixedExecutionStateError
from .query import Answer, Selection, answers, capabilities, of_unknown_chip
from .readers import Reading, read_json_file, row_id, sha256_of
from .schema import KEYS, SCHEMA, STATES, TABLES, arrow_schema, ddl, values

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

__all__ = ["EXPORTS", "Added", "Database", "Merged", "default_path"]

#: Formats that a database can be written out in.
EXPORTS = ("parquet", "csv", "json")

#: Written into every part file of a store of observations.
_OBSERVATIONS, _META_KIND, _META_STATE = (
    b"observations",
    b"lumina_cache.kind",
    b"lumina_cache.execution_state",
)

#: Columns that a store has under another name or that are the database's own.
_NOT_IN_STORES = {
    "id",
    "source",
    "kind",
    "state",
    "model_type",
    "outcome",
    "reason",
    "documents",
}


def default_path() -> Path:
    """``$XDG_DATA_HOME/lumina_cache/feasibility.duckdb``, by default in ``~/.local/share``."""
    data = os.environ.get("XDG_DATA_HOME")
    base = Path(data) if data else Path.home() / ".local" / "share"
    return base / "lumina_cache" / "feasibility.duckdb"


@dataclass(frozen=True)
class Added:
    """What became of one file."""

    path: str
    kind: str | None  #: probe, architectures, profile, eval or campaign; None for a file that was not taken
    new: int = 0  #: rows that were not there
    known: int = 0  #: rows that were there already
    conflicting: int = 0  #: of these, rows that say something else than what was there, which stays
    problem: str | None = None  #: why nothing of it was taken

    def to_record(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Merged:
    """What came of another database."""

    path: str
    new: int = 0
    known: int = 0
    conflicting: int = 0
    problem: str | None = None

    def to_record(self) -> dict[str, Any]:
        return dict(vars(self))


class Database:
    """A DuckDB file with a table per execution state. A context manager.

    Args:
        path: the file; None for :func:`default_path`.
        write: make it if it is not there, and let rows be added. One process at a time may write.

    Raises:
        AnalysisUnavailableError: duckdb or pyarrow is not installed.
        DatabaseError: the file is not there, is something else, or another process is writing to it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, write: bool = False) -> None:
        self.path = default_path() if path is None else Path(path)
        duckdb = _duckdb()
        new = not self.path.exists()
        if new and not write:
            raise DatabaseError(
                f"there is no database at {self.path}; make one with: lumina-cache db add FILE…"
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A name that no file has by chance: a file's own name would be one that other tables go by.
            self._connection = duckdb.connect()
            self._attach(self.path, "own", write)
            self._run("USE own")
            if new:
                self._connection.execute(ddl()).fetchall()
        except (duckdb.Error, OSError) as error:
            raise DatabaseError(f"cannot open {self.path}: {_line(error)}") from None
        try:
            _checked(self._connection, "own.lumina_cache_schema", str(self.path))
        except DatabaseError:
            self.close()
            raise

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    # -- adding -----------------------------------------------------------------------------------------------------

    def add(self, path: str | os.PathLike[str]) -> list[Added]:
        """Take in a file, or a store of observations file by file; adding again what is there changes nothing.

        A file is taken whole or not at all: one that cannot be read, or is of another kind, is returned with its
        ``problem`` and leaves the database as it was.
        """
        given = Path(path)
        if not given.is_dir():
            return [self._add_file(given)]
        parts = [
            part
            for state in STATES
            for part in sorted((given / state).glob("*"))
            if (given / state).is_dir() and not part.name.endswith(".unfinished")
        ]
        if not parts:
            return [Added(str(given), None, problem="is a folder without part files of observations")]
        return [self._add_file(part) for part in parts]

    def _add_file(self, path: Path) -> Added:
        duckdb = _duckdb()
        try:
            with self._transaction():
                if path.suffix == ".parquet":
                    return self._add_part(path)
                return self._add_reading(path, read_json_file(path))
        except DatabaseError as error:
            return Added(str(path), None, problem=str(error))
        except (duckdb.Error, OSError) as error:
            return Added(str(path), None, problem=f"cannot be read: {_line(error)}")

    def _add_reading(self, path: Path, reading: Reading) -> Added:
        import pyarrow as pa

        source = self._add_source(path, reading.kind, reading.about)
        new = known = conflicting = 0
        for table, rows in reading.rows.items():
            found = {row_id(table, row): row for row in rows}
            listed = [values(table, {"id": key, "source": source, **row}) for key, row in found.items()]
            try:
                made = pa.Table.from_pylist(listed, schema=arrow_schema(table))
            except pa.ArrowException as error:
                raise DatabaseError(f"holds something odd: {_line(error)}") from None
            counts = self._insert(table, made)
            new, known, conflicting = new + counts[0], known + counts[1], conflicting + counts[2]
        return Added(str(path), reading.kind, new, known, conflicting)

    def _add_part(self, path: Path) -> Added:
        """A part file of a store, which says itself what it holds; never read into Python."""
        if not path.is_file():
            raise DatabaseError("cannot be read: no such file")
        said = dict(self._run("SELECT key, value FROM parquet_kv_metadata(?)", str(path)))
        state = said.get(_META_STATE, b"").decode(errors="replace")
        if said.get(_META_KIND) != _OBSERVATIONS or state not in STATES:
            raise DatabaseError("is a Parquet file of something else than observations")
        if path.parent.name in STATES and path.parent.name != state:
            raise DatabaseError(f"holds {state} observations in the folder of {path.parent.name} ones")
        wanted = [c for c in TABLES[state] if c not in _NOT_IN_STORES]
        held = {row[0] for row in self._run("DESCRIBE FROM read_parquet(?)", str(path))}
        if missing := [c for c in (*wanted, "id") if c not in held]:
            raise DatabaseError(f"has no column {', '.join(missing)}")
        source = self._add_source(path, "campaign", self._about_part(path))
        own: dict[str, str] = {
            "id": "id",
            "source": f"'{source}'",
            "kind": "CASE \"source\" WHEN 'calibrate' THEN 'profile' ELSE \"source\" END",
            "state": f"'{state}'",
            "outcome": "'works'",
            "documents": "1",
        }
        chosen = [
            f'{own.get(c, "NULL" if c in _NOT_IN_STORES else chr(34) + c + chr(34))} AS "{c}"'
            for c in TABLES[state]
        ]
        self._run(f"CREATE TEMP TABLE part AS SELECT {', '.join(chosen)} FROM read_parquet(?)", str(path))
        counts = self._insert_from(state, "temp.part")
        self._run("DROP TABLE temp.part")
        return Added(str(path), "campaign", *counts)

    def _about_part(self, path: Path) -> dict[str, Any]:
        """What all rows of a part file agree on."""
        columns = ("made", "device", "machine", "mlx", "mlx_lm", "lumina_cache", "git_commit")
        asked = ", ".join(
            f"CASE WHEN count(DISTINCT {c}) = 1 THEN any_value({c}) END" for c in columns if c != "made"
        )
        found = self._run(f"SELECT max(made), {asked} FROM read_parquet(?)", str(path))
        return dict(zip(columns, found[0], strict=True))

    def _add_source(self, path: Path, kind: str, about: Mapping[str, Any]) -> str:
        digest = sha256_of(path)
        row = {
            **about,
            "id": digest,
            "kind": kind,
            "name": path.name,
            "nbytes": path.stat().st_size,
            "added": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        import pyarrow as pa

        self._insert(
            "sources", pa.Table.from_pylist([values("sources", row)], schema=arrow_schema("sources"))
        )
        return digest

    def _insert(self, table: str, rows: pa.Table) -> tuple[int, int, int]:
        self._connection.register("incoming", rows)
        try:
            return self._insert_from(table, "incoming")
        finally:
            self._connection.unregister("incoming")

    def _insert_from(self, table: str, origin: str) -> tuple[int, int, int]:
        """Rows of ``origin`` that were new, that were there, and of these the ones that say something else."""
        conflicting = 0
        if table in KEYS:
            differ = " OR ".join(f"a.{c} IS DISTINCT FROM b.{c}" for c in KEYS[table])
            conflicting = self._count(f"FROM {origin} a JOIN own.{table} b USING (id) WHERE {differ}")
        before, offered = self._count(f"FROM own.{table}"), self._count(f"FROM {origin}")
        columns = ", ".join(f'"{c}"' for c in TABLES[table])
        self._run(
            f"INSERT INTO own.{table} ({columns}) SELECT {columns} FROM {origin} ON CONFLICT DO NOTHING"
        )
        new = self._count(f"FROM own.{table}") - before
        return new, offered - new, conflicting

    def _attach(self, path: Path, name: str, write: bool) -> None:
        quoted = str(path).replace("'", "''")
        self._run(f"ATTACH '{quoted}' AS {name} ({'READ_WRITE' if write else 'READ_ONLY'})")

    def _count(self, rest: str) -> int:
        return int(self._run(f"SELECT count(*) {rest}")[0][0])

    def _run(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Carry out one statement to its end: a connection takes the next one only then."""
        rows: list[tuple[Any, ...]] = self._connection.execute(sql, list(parameters)).fetchall()
        return rows

    # -- merging ----------------------------------------------------------------------------------------------------

    def merge(self, path: str | os.PathLike[str]) -> Merged:
        """Take in all of another database; what is there already stays as it is. Whole or not at all."""
        duckdb = _duckdb()
        other = Path(path)
        if not other.is_file():
            return Merged(str(other), problem="cannot be read: no such file")
        if other.resolve() == self.path.resolve():
            return Merged(str(other), problem="is this very database")
        try:
            self._attach(other, "other", write=False)
        except duckdb.Error as error:
            return Merged(str(other), problem=f"is not a database: {_line(error)}")
        try:
            with self._transaction():
                _checked(self._connection, "other.lumina_cache_schema", "it")
                counts = [self._insert_from(table, f"other.{table}") for table in TABLES]
            totals = [sum(c) for c in zip(*counts, strict=True)]
            return Merged(str(other), *totals)
        except (DatabaseError, duckdb.Error) as error:
            return Merged(str(other), problem=_line(error))
        finally:
            self._run("DETACH other")

    # -- reading ----------------------------------------------------------------------------------------------------

    def observations(self, *state: str) -> pa.Table:
        """All rows of one execution state, with everything that is known of each.

        Raises:
            MixedExecutionStateError: several states were asked for; figures of different ones are never put together.
            DatabaseError: there is no such state.
        """
        if len(state) != 1:
            raise MixedExecutionStateError(
                f"{', '.join(state) or 'none'}: ask for one execution state at a time, of {', '.join(STATES)}"
            )
        if state[0] not in STATES:
            raise DatabaseError(f"{state[0]!r} is no execution state; there are {', '.join(STATES)}")
        return self._connection.sql(f"FROM {state[0]} ORDER BY id").to_arrow_table()

    def query(self, selection: Selection) -> list[Answer]:
        """Which actions run, which do not and why, per machine, versions, model and action."""
        return answers(self._connection, selection)

    def of_unknown_chip(self, selection: Selection) -> int:
        """How many answers a question for a chip leaves out because their files do not say which chip it was."""
        return of_unknown_chip(self._connection, selection)

    def capabilities(self, selection: Selection) -> list[dict[str, Any]]:
        """What probes found of capabilities, with the reason of each that is absent."""
        return capabilities(self._connection, selection)

    def sources(self) -> list[dict[str, Any]]:
        """The files that were added, with what they say of themselves, in the order in which they came."""
        rows: list[dict[str, Any]] = (
            self._connection.sql("FROM sources ORDER BY added, name, id").to_arrow_table().to_pylist()
        )
        return rows

    def counts(self) -> dict[str, int]:
        """Rows per table."""
        return {table: self._count(f"FROM {table}") for table in TABLES}

    def export(
        self, folder: str | os.PathLike[str], format: Literal["parquet", "csv", "json"] = "parquet"
    ) -> list[Path]:
        """Write every table as a file of its own into ``folder``; execution states never share one.

        Raises:
            DatabaseError: there is no such format, or the folder cannot be written to.
        """
        duckdb = _duckdb()
        if format not in EXPORTS:
            raise DatabaseError(f"no format {format!r}; there are {', '.join(EXPORTS)}")
        target = Path(folder)
        options = {
            "parquet": "FORMAT parquet, COMPRESSION zstd",
            "csv": "FORMAT csv, HEADER",
            "json": "FORMAT json",
        }
        written = []
        try:
            target.mkdir(parents=True, exist_ok=True)
            for table in TABLES:
                path = target / f"{table}.{format}"
                quoted = str(path).replace("'", "''")
                self._run(f"COPY (FROM {table} ORDER BY id) TO '{quoted}' ({options[format]})")
                written.append(path)
        except (duckdb.Error, OSError) as error:
            raise DatabaseError(f"cannot write into {target}: {_line(error)}") from None
        return written

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._run("BEGIN")
        try:
            yield
        except BaseException:
            self._run("ROLLBACK")
            raise
        self._run("COMMIT")


def _checked(connection: duckdb.DuckDBPyConnection, table: str, name: str) -> None:
    duckdb = _duckdb()
    try:
        found = connection.execute(f"SELECT version FROM {table}").fetchall()
    except duckdb.Error:
        raise DatabaseError(f"{name} is a DuckDB file, but not a feasibility database") from None
    if found != [(SCHEMA,)]:
        versions = ", ".join(str(row[0]) for row in found) or "none"
        raise DatabaseError(
            f"{name} is of schema {versions}; this version of lumina_cache reads schema {SCHEMA}"
        )


def _duckdb() -> Any:
    try:
        import duckdb
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise AnalysisUnavailableError(
            f"the feasibility database needs {error.name}; install it with: pip install 'lumina-cache[analysis]'"
        ) from None
    return duckdb


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
