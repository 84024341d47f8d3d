"""The table of architectures as values, and the data files that keep it.

One JSON file per installation in ``lumina_cache/data/architectures``; adding a machine is adding a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import TableFormatError
from .isolate import first_line

__all__ = [
    "STATES",
    "Architecture",
    "ArchitectureTable",
    "Entry",
    "data_folder",
    "load_tables",
    "write_table",
]

FORMAT = 1

#: Outcome → execution state. ``works_when_forced`` was refused, and the refusal was wrong.
STATES: Mapping[str, str] = MappingProxyType(
    {"works": "real", "fails": "real", "works_when_forced": "real", "refused": "backend_infeasible"}
)


@dataclass(frozen=True)
class Entry:
    """One action on one architecture."""

    action: str
    outcome: str  #: ``works``, ``fails``, ``refused`` or ``works_when_forced``
    reasons: tuple[str, ...]

    @property
    def state(self) -> str:
        """``real`` or ``backend_infeasible``."""
        return STATES[self.outcome]


@dataclass(frozen=True)
class Architecture:
    """One model module of mlx-lm."""

    module: str
    cache: str | None  #: K for KVCache, R rotating, C chunked, A recurrent state, brackets for nested caches
    capabilities: Mapping[str, str | None]  #: capability → None when present, the reason when absent
    entries: tuple[Entry, ...]
    unbuildable: str | None = None  #: why there is no model of it here
    seconds: float = field(default=0.0, compare=False)

    def of(self, outcome: str) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.outcome == outcome)


@dataclass(frozen=True)
class ArchitectureTable:
    """All modules on one installation."""

    device: str
    system: str
    mlx: str
    mlx_lm: str
    lumina_cache: str
    action_space: str
    date: str  #: of the run, ISO 8601
    architectures: tuple[Architecture, ...]
    machine: str | None = None  #: name of the chip; None in files that do not say it

    @property
    def built(self) -> tuple[Architecture, ...]:
        return tuple(a for a in self.architectures if a.unbuildable is None)

    @property
    def file_name(self) -> str:
        return f"{self.device}-mlx{self.mlx}-mlxlm{self.mlx_lm}.json"

    def to_record(self) -> dict[str, Any]:
        """Compact: every text, every verdict and every list of verdicts once; modules refer to them by number.

        A list of verdicts is in the order of ``actions``, in runs: number of the verdict, how many in a row.
        """
        texts, kinds = _Numbers(), _Numbers()
        verdicts, profiles = _Numbers(), _Numbers()
        modules: dict[str, Any] = {}
        for one in self.architectures:
            if one.unbuildable is not None:
                modules[one.module] = {"unbuildable": one.unbuildable}
                continue
            numbers = [
                kinds.of(json.dumps([e.outcome, [texts.of(r) for r in e.reasons]])) for e in one.entries
            ]
            runs = [n for kind, same in groupby(numbers) for n in (kind, len(list(same)))]
            found = {name: None if why is None else texts.of(why) for name, why in one.capabilities.items()}
            modules[one.module] = {
                "cache": one.cache,
                "seconds": round(one.seconds, 2),
                "capabilities": profiles.of(json.dumps(found)),
                "runs": verdicts.of(json.dumps(runs)),
            }
        return {
            "format": FORMAT,
            "device": self.device,
            "system": self.system,
            "machine": self.machine,
            "mlx": self.mlx,
            "mlx_lm": self.mlx_lm,
            "lumina_cache": self.lumina_cache,
            "action_space": self.action_space,
            "date": self.date,
            "states": dict(STATES),
            "actions": [e.action for e in self.built[0].entries] if self.built else [],
            "texts": texts.values,
            "verdicts": [json.loads(k) for k in kinds.values],
            "capabilities": [json.loads(p) for p in profiles.values],
            "runs": [json.loads(v) for v in verdicts.values],
            "modules": modules,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], source: str = "table") -> ArchitectureTable:
        """Raises TableFormatError, naming ``source``, for a record that :meth:`to_record` did not make."""
        try:
            if record["format"] != FORMAT:
                raise TableFormatError(f"{source}: format {record['format']}, this version reads {FORMAT}")
            return cls(
                architectures=tuple(_architecture(record, *item) for item in record["modules"].items()),
                machine=record.get("machine"),
                **{
                    k: record[k]
                    for k in ("device", "system", "mlx", "mlx_lm", "lumina_cache", "action_space", "date")
                },
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            if isinstance(error, TableFormatError):
                raise
            raise TableFormatError(
                f"{source}: not a table of architectures ({first_line(error)}); make it anew with "
                "python -m lumina_cache.backend.architectures"
            ) from error


class _Numbers:
    """Numbers texts in the order of their first appearance."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    @property
    def values(self) -> list[str]:
        return list(self._number)

    def of(self, text: str) -> int:
        return self._number.setdefault(text, len(self._number))


def _architecture(record: Mapping[str, Any], module: str, row: Mapping[str, Any]) -> Architecture:
    if "unbuildable" in row:
        return Architecture(module, None, MappingProxyType({}), (), str(row["unbuildable"]))
    texts, actions = record["texts"], record["actions"]
    capabilities = {
        name: None if why is None else texts[why]
        for name, why in record["capabilities"][row["capabilities"]].items()
    }
    verdicts = [(outcome, tuple(texts[r] for r in reasons)) for outcome, reasons in record["verdicts"]]
    runs = record["runs"][row["runs"]]
    spread = [verdicts[kind] for kind, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]
    entries = tuple(
        Entry(action, outcome, reasons) for action, (outcome, reasons) in zip(actions, spread, strict=True)
    )
    if any(e.outcome not in STATES for e in entries):
        raise ValueError(f"{module}: unknown outcome")
    return Architecture(
        module, row["cache"], MappingProxyType(capabilities), entries, seconds=float(row["seconds"])
    )


def data_folder() -> Path:
    """The folder of data files inside the package."""
    return Path(__file__).parents[1] / "data" / "architectures"


def load_tables(folder: str | os.PathLike[str] | None = None) -> list[ArchitectureTable]:
    """Every table in ``folder`` (default: the package's own), in the order of file names.

    Raises:
        TableFormatError: naming a file that cannot be read, and the remedy.
    """
    files = sorted((data_folder() if folder is None else Path(folder)).glob("*.json"))
    tables = []
    for file in files:
        try:
            record = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise TableFormatError(
                f"{file}: {first_line(error)}; remove it, or make it anew with "
                "python -m lumina_cache.backend.architectures"
            ) from error
        tables.append(ArchitectureTable.from_record(record, str(file)))
    return tables


def write_table(table: ArchitectureTable, folder: str | os.PathLike[str] | None = None) -> Path:
    """Write one table as a data file; replaces the file of the same installation."""
    path = (data_folder() if folder is None else Path(folder)) / table.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    record = table.to_record()
    lines = [
        f'"{key}": {json.dumps(value, ensure_ascii=False, separators=(",", ":"))}'
        for key, value in record.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    return path
