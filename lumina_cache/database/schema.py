"""Tables of the feasibility database. Each execution state has a table of its own, and a check that keeps others out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FIGURES", "KEYS", "SCHEMA", "STATES", "TABLES", "arrow_schema", "ddl", "values"]

#: Version of the tables; a file of another one is refused.
SCHEMA = 1

#: The tables that hold actions, named as their execution state is.
STATES = ("real", "simulated", "backend_infeasible")

#: Where something was found. NULL: the file does not say.
_WHERE = {
    "made": "VARCHAR",
    "device": "VARCHAR",
    "machine": "VARCHAR",
    "mlx": "VARCHAR",
    "mlx_lm": "VARCHAR",
    "lumina_cache": "VARCHAR",
    "git_commit": "VARCHAR",
}
_MODEL = {"model": "VARCHAR", "model_name": "VARCHAR", "model_type": "VARCHAR"}
_ACTION = {
    "state": "VARCHAR",
    "action": "VARCHAR",
    "rung": "TINYINT",
    "requires": "VARCHAR[]",
    "role": "VARCHAR",
    "document": "VARCHAR",
    "domain": "VARCHAR",
    "context": "INTEGER",
    "phase": "VARCHAR",
    "seed": "INTEGER",
    "horizon": "INTEGER",
    "run": "VARCHAR",
    "text_sha256": "VARCHAR",
    "tokens_sha256": "VARCHAR",
    "log_line": "VARCHAR",
}

#: What only an action that was carried out or simulated has. KL in nats per token, bytes, seconds.
FIGURES: Mapping[str, str] = MappingProxyType(
    {
        "documents": "INTEGER",  # that the figures are means over
        "kl_mean": "DOUBLE",
        "kl_p95": "DOUBLE",
        "kl_half0": "DOUBLE",
        "kl_half1": "DOUBLE",
        "p95_half0": "DOUBLE",
        "p95_half1": "DOUBLE",
        "kl_spans": "DOUBLE[]",
        "top1": "DOUBLE",
        "nll_change": "DOUBLE",
        "share16": "DOUBLE",
        "share16_allocated": "DOUBLE",
        "live": "BIGINT",
        "allocated": "BIGINT",
        "predicted_live": "BIGINT",
        "time_ratio": "DOUBLE",
        "time_low": "DOUBLE",
        "time_high": "DOUBLE",
        "take_seconds": "DOUBLE",
    }
)
_OWN = {"id": "VARCHAR", "source": "VARCHAR", "kind": "VARCHAR"}

#: Table → column → type of DuckDB.
TABLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "sources": {
            "id": "VARCHAR",
            "kind": "VARCHAR",
            "name": "VARCHAR",
            "nbytes": "BIGINT",
            "added": "VARCHAR",
            **_WHERE,
            "system": "VARCHAR",
            "command": "VARCHAR",
            "details": "VARCHAR",
        },
        "capabilities": {
            **_OWN,
            **_WHERE,
            **_MODEL,
            "capability": "VARCHAR",
            "present": "BOOLEAN",
            "reason": "VARCHAR",
        },
        "array_trials": {
            **_OWN,
            **_WHERE,
            "check_name": "VARCHAR",
            "params": "VARCHAR",
            "outcome": "VARCHAR",
            "reason": "VARCHAR",
            "error": "DOUBLE",
            "allowed": "DOUBLE",
        },
        "not_tried": {**_OWN, **_WHERE, **_MODEL, "reason": "VARCHAR"},
        "real": {
            **_OWN,
            **_WHERE,
            **_MODEL,
            **_ACTION,
            "outcome": "VARCHAR",  # works, fails, or works_when_forced: it was refused, and wrongly
            "reason": "VARCHAR",  # why it failed, or was refused
            **FIGURES,
        },
        "simulated": {**_OWN, **_WHERE, **_MODEL, **_ACTION, **FIGURES},
        "backend_infeasible": {
            **_OWN,
            **_WHERE,
            **_MODEL,
            **_ACTION,
            "backend_rung": "TINYINT",
            "code": "VARCHAR",
            "capability": "VARCHAR",
            "text": "VARCHAR",
            "reasons": "VARCHAR",  # all of them, as JSON
        },
    }
)

#: What makes a row the same as another one, for telling a copy from a contradiction.
KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "real": ("outcome", "kl_mean", "kl_p95", "share16", "time_ratio"),
        "simulated": ("kl_mean", "kl_p95", "share16", "time_ratio"),
        "backend_infeasible": ("code", "capability", "text"),
    }
)


def ddl() -> str:
    """The statements that make an empty database."""
    made = [
        "CREATE TABLE lumina_cache_schema (version INTEGER)",
        f"INSERT INTO lumina_cache_schema VALUES ({SCHEMA})",
    ]
    for table, columns in TABLES.items():
        parts = [f'"{name}" {kind}' for name, kind in columns.items()]
        parts[0] += " PRIMARY KEY"
        if table in STATES:
            parts.append(f"CHECK (state = '{table}')")
        made.append(f"CREATE TABLE {table} ({', '.join(parts)})")
    return ";\n".join(made)


def arrow_schema(table: str) -> pa.Schema:
    """The table's columns as pyarrow has them."""
    import pyarrow as pa

    types = {
        "VARCHAR": pa.string(),
        "VARCHAR[]": pa.list_(pa.string()),
        "DOUBLE": pa.float64(),
        "DOUBLE[]": pa.list_(pa.float64()),
        "TINYINT": pa.int8(),
        "INTEGER": pa.int32(),
        "BIGINT": pa.int64(),
        "BOOLEAN": pa.bool_(),
    }
    return pa.schema([(name, types[kind]) for name, kind in TABLES[table].items()])


def values(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with every column of the table, NULL where it has none.

    Raises:
        KeyError: it has a column that the table has not.
    """
    if unknown := set(row) - set(TABLES[table]):
        raise KeyError(f"{table} has no column {', '.join(sorted(unknown))}")
    return {name: row.get(name) for name in TABLES[table]}
