"""The file of an evaluation: lines as they are measured, one JSON document at the end; a run that was cut short goes on.

Beside ``result.json`` stands ``result.json.partial`` while the run lasts: a header line with everything that figures
depend on, then one line per document and per subject on a document, each written whole and flushed. A line cut short by
a crash is dropped. When all is measured, ``result.json`` is put in place at once and the partial file goes. A later run
with the same header takes what is there and measures only what is missing, for example actions added since.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import EvaluationError

__all__ = ["KIND", "SCHEMA", "Store", "read_result"]

KIND, SCHEMA = "lumina-cache eval", 1


class Store:
    """Records of one evaluation, in memory and, given a path, in its partial file.

    Raises:
        EvaluationError: the file holds something else, or figures made under another header; names the difference.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any], kind: str = KIND) -> None:
        self.path = path
        self.kind = kind
        self.header = json.loads(json.dumps(header))
        self._records: dict[tuple[str, int, str | None], dict[str, Any]] = {}
        self._file: Any = None
        if path is None:
            return
        self.partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for record in [*self._finished(path), *self._unfinished(self.partial)]:
                self._records[_key(record)] = record
            self._file = self._start()
        except OSError as error:
            raise EvaluationError(f"cannot write {self.partial}: {error.strerror or error}") from None

    @property
    def resumed(self) -> int:
        """Records that were there before."""
        return len(self._records)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All of them, in the order in which they were measured."""
        return list(self._records.values())

    def get(self, context: int, document: str, action: str | None) -> dict[str, Any] | None:
        """The record of a subject on a document; of the document itself for None."""
        return self._records.get((document, context, action))

    def add(self, record: dict[str, Any]) -> None:
        self._records[_key(record)] = json.loads(json.dumps(record))
        if self._file is not None:
            self._file.write(_line(record))
            self._file.flush()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Put the final document in place and remove the partial file. Does nothing without a path."""
        if self.path is None:
            return
        self.close()
        temporary = self.path.with_name(self.path.name + ".new")
        try:
            temporary.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")
            os.replace(temporary, self.path)
            self.partial.unlink(missing_ok=True)
        except OSError as error:
            raise EvaluationError(f"cannot write {self.path}: {error.strerror or error}") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finished(self, path: Path) -> list[dict[str, Any]]:
        if not path.exists():
            return []
        result = read_result(path, self.kind)
        self._check(path, result["header"])
        return list(result["records"])

    def _unfinished(self, path: Path) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = path.read_text("utf-8", errors="replace").split("\n")
            whole = [one for one in map(_parsed, lines) if one is not None]
            if whole:
                self._check(path, whole[0].get("header", {}))
            return whole[1:]
        return []

    def _check(self, path: Path, header: Mapping[str, Any]) -> None:
        differing = sorted(k for k in {*header, *self.header} if header.get(k) != self.header.get(k))
        if differing:
            raise EvaluationError(
                f"{path} was measured under other conditions ({', '.join(differing)} differ): give another --out, "
                "or remove it"
            )

    def _start(self) -> Any:
        """The partial file written anew with what is known, open for more."""
        temporary = self.partial.with_name(self.partial.name + ".new")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(_line({"kind": self.kind, "schema": SCHEMA, "header": self.header}))
            file.writelines(map(_line, self._records.values()))
        os.replace(temporary, self.partial)
        return self.partial.open("a", encoding="utf-8")


def _key(record: Mapping[str, Any]) -> tuple[str, int, str | None]:
    return record["document"], record["context"], record.get("action")


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def read_result(path: Path, kind: str = KIND) -> dict[str, Any]:
    """A finished result of this ``kind``.

    Raises:
        EvaluationError: it cannot be read or is something else.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(f"cannot read the result {path}: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != kind or found.get("schema") != SCHEMA:
        raise EvaluationError(f"{path} is not a result of {kind!r}, schema {SCHEMA}")
    return found
