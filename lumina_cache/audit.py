"""The audit log: JSON lines, one per event, flushed one by one, that say what was seen, weighed, done and refused.

Every line carries ``schema`` (:data:`SCHEMA`), ``seq`` (1, 2, 3 … per cache), ``time`` (Unix seconds), ``cache`` (an id
of the cache object) and ``event``. :data:`EVENTS` is the table of events and their fields, and what :func:`read_log`
checks lines against. Unknown is ``null`` with a reason beside it. No key, value, token or text is ever written.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO, overload

import structlog

from .errors import LogFormatError, LuminaWarning

__all__ = [
    "EVENTS",
    "SCHEMA",
    "AuditLog",
    "Deferred",
    "Field",
    "LogContents",
    "Records",
    "default_log_path",
    "read_log",
    "validate",
]

#: Version of the event table. A reader refuses lines of any other.
SCHEMA = 3

#: Records kept in memory per cache.
KEPT_IN_MEMORY = 1000


@dataclass(frozen=True)
class Field:
    """One field of an event: what types it may have (``None`` among them if it can be unknown), and what it means."""

    types: tuple[type, ...]
    meaning: str


def _field(meaning: str, *types: type, unknown: bool = False) -> Field:
    return Field((*types, type(None)) if unknown else types, meaning)


_NUMBER = (int, float)
_COMMON = {
    "schema": _field("version of this table", int),
    "event": _field("which event", str),
    "seq": _field("number of the record within its cache, from 1", int),
    "time": _field("Unix seconds", *_NUMBER),
    "cache": _field("id of the cache object", str),
}
_BYTES = {
    "nbytes_live": _field("bytes of the rows held", int),
    "nbytes_allocated": _field("bytes allocated for them, growth slack included", int),
    "mlx_active": _field("bytes MLX counts as in use, whole process", int),
    "mlx_pool": _field("bytes MLX keeps of freed buffers", int),
    "mlx_peak": _field("highest mlx_active so far; never reset here", int),
}

#: Event → field → types and meaning. Common fields (schema, event, seq, time, cache) are in every record.
EVENTS: Mapping[str, Mapping[str, Field]] = MappingProxyType(
    {
        "session.started": {
            "lumina_cache": _field("version of this library", str),
            "profile": _field(
                "backend profile: device, versions, capabilities found by probing", dict, unknown=True
            ),
            "model": _field(
                "model type, fingerprint, number of entries of each cache kind, shape of each kind of layer",
                dict,
            ),
            "budget": _field("budget in bytes", int, unknown=True),
            "policy": _field("who decides", str, unknown=True),
            "plan": _field("text form of the fixed plan", str, unknown=True),
            "protect": _field("ranges of positions that are not evicted, end excluded", list),
            "copied_from": _field("id of the cache that this one is a copy of", str, unknown=True),
            "telemetry": _field("machine snapshot", dict, unknown=True),
            "unknown": _field("why each null above is null", dict),
        },
        "step": {
            "model_part": _field("model or draft", str),
            "step": _field("number of the step", int),
            "phase": _field("prefill or decode", str),
            "tokens_step": _field("tokens of this step", int),
            "rows": _field("most rows that any layer holds", int),
            "offset": _field("position of the next token", int),
            **_BYTES,
        },
        "decision": {
            "decision": _field("number of the decision", int),
            "trigger": _field("why a decision was due", str),
            "state": _field(
                "phase, tokens, layers, bytes, budget, weights and machine that it was made on", dict
            ),
            "candidates": _field("every action weighed: bytes, score terms, reasons if infeasible", list),
            "action_space": _field("version of the list of actions", str),
            "profile": _field("name of the profile that the figures of quality and time come from", str),
            "recall": _field("share of what comes next that is taken to be copied, in every KL", *_NUMBER),
            "chosen": _field("text form of the action", str),
            "why": _field("one sentence", str),
            "seconds": _field("time the decision took", *_NUMBER),
        },
        "action.applied": {
            "action": _field("text form", str),
            "origin": _field("policy, caller, plan, or kv_bits", str),
            "decision": _field("number of the decision behind it", int, unknown=True),
            "execution_state": _field("always real: it ran and was checked", str),
            "layers_changed": _field("names of the layers whose storage changed", list),
            "rows_before": _field("most rows per layer before", int),
            "rows_after": _field("most rows per layer after", int),
            "lossy": _field("whether attention may see something else than the full cache from now on", bool),
            "lowest_bits": _field(
                "fewest bits per element that any row was ever stored with; null: none was encoded",
                int,
                unknown=True,
            ),
            "rows_evicted": _field("most rows that any layer has lost so far", int),
            "disk_bytes_written": _field("bytes that this action wrote to disk", int),
            "guarded": _field(
                "layers that the outlier guard did something else to: name → the action as done, or keep",
                dict,
            ),
            "predicted_live": _field("live bytes asked for", int),
            "predicted_allocated": _field("allocated bytes asked for", int),
            "observed_peak": _field(
                "most bytes allocated on the way; null: MLX's highest mark stood above it already",
                int,
                unknown=True,
            ),
            "before": _field("bytes before: live, allocated, active, pool", dict),
            "after": _field("bytes after", dict),
            "seconds": _field("time it took", *_NUMBER),
        },
        "action.refused": {
            "action": _field("text form", str),
            "origin": _field("policy, caller, plan, or kv_bits", str),
            "execution_state": _field("always backend_infeasible: no measurement", str),
            "layers": _field("names of the layers concerned; empty for all", list),
            "reasons": _field("why", list),
        },
        "telemetry": {
            "change": _field("one field with its old and new value, source and reason", dict, unknown=True),
            "snapshot": _field(
                "the machine, when pressure, heat, power or swapping changed", dict, unknown=True
            ),
        },
        "session.suspended": {
            "nbytes": _field("bytes of the arrays that were moved to the file", int),
            "disk_bytes_written": _field("bytes written", int),
            "seconds": _field("time it took", *_NUMBER),
        },
        "session.resumed": {
            "nbytes": _field("bytes of the arrays that were read back", int),
            "seconds": _field("time it took", *_NUMBER),
        },
        "warning": {
            "code": _field("for programs", str),
            "text": _field("for people", str),
        },
        "session.ended": {
            "steps_total": _field("steps seen", int),
            "tokens_total": _field("tokens seen", int),
            "decisions_total": _field("decisions made", int),
            "actions_total": _field("actions applied", int),
            "refusals_total": _field("actions refused", int),
            "records_dropped_total": _field("records that could not be written", int),
            "disk_bytes_written_total": _field("bytes written to disk", int, unknown=True),
            "unknown": _field("why each null above is null", dict),
        },
    }
)

_COUNTED = {
    "step": None,
    "decision": "decisions_total",
    "action.applied": "actions_total",
    "action.refused": "refusals_total",
}


@dataclass(frozen=True)
class Deferred:
    """A field whose value is made when it is asked for: most records of a log in memory are never read."""

    read: Callable[[], Any]  #: the value, for readers of :attr:`AuditLog.records`
    write: Callable[[], Any]  #: what stands for it in the file


class Records(Sequence[dict[str, Any]]):
    """The last records, oldest first; what was deferred of one is made when it is looked at first."""

    def __init__(self, records: deque[dict[str, Any]]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [_made(one) for one in list(self._records)[index]]
        return _made(self._records[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(_made, tuple(self._records))


def _made(record: dict[str, Any]) -> dict[str, Any]:
    for name, value in record.items():
        if isinstance(value, Deferred):
            record[name] = value.read()  # the same keys: the dictionary may be walked meanwhile
    return record


class AuditLog:
    """Writes one cache's records to a file and keeps the last :data:`KEPT_IN_MEMORY` of them.

    Args:
        target: path of the file (created with mode 0600, appended to if it exists), True for a new file in the user's
            state directory, or None to keep records in memory only.

    If the file cannot be written, one :class:`LuminaWarning` says so and records are kept in memory only.
    """

    def __init__(self, target: str | os.PathLike[str] | bool | None = None) -> None:
        self.cache_id = secrets.token_hex(4)
        self._records: deque[dict[str, Any]] = deque(maxlen=KEPT_IN_MEMORY)
        self.path: Path | None = None
        self._totals = {
            "steps_total": 0,
            "tokens_total": 0,
            "decisions_total": 0,
            "actions_total": 0,
            "refusals_total": 0,
            "records_dropped_total": 0,
        }
        self._disk_written: int | None = None
        self._seq = 0
        self._lock = threading.RLock()  # a telemetry thread may write beside the generating one
        self._ended = False
        self._logger: Any = None
        if target is None or target is False:
            return
        self.path = default_log_path(self.cache_id) if target is True else Path(os.fspath(target))
        try:
            self._logger = _logger(_open_private(self.path))
        except OSError as error:
            self._give_up(error)

    def copy(self) -> AuditLog:
        """A log of its own for a copy of the cache: another id, another sequence, the same file."""
        new = AuditLog()
        new.path, new._logger = self.path, self._logger
        return new

    def detach(self) -> None:
        """Write no more to the file; records stay in memory."""
        self.path, self._logger = None, None

    def count_step(self, tokens: int) -> None:
        """Count a step without writing a record; on the hot path."""
        self._totals["steps_total"] += 1
        self._totals["tokens_total"] += tokens

    def count_disk(self, nbytes: int) -> None:
        """Count bytes written to a disk; 0 says that there is one."""
        self._disk_written = (self._disk_written or 0) + nbytes

    @property
    def records(self) -> Records:
        """The last :data:`KEPT_IN_MEMORY` records, as :func:`read_log` would give them."""
        return Records(self._records)

    @property
    def totals(self) -> Mapping[str, int]:
        return MappingProxyType(self._totals)

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one record now. Never raises: what cannot be written is counted and stays in memory."""
        with self._lock:
            return self._write(event, fields)

    def _write(self, event: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        self._seq += 1
        record = {
            "schema": SCHEMA,
            "event": event,
            "seq": self._seq,
            "time": time.time(),
            "cache": self.cache_id,
            **fields,
        }
        total = _COUNTED.get(event)
        if total is not None:
            self._totals[total] += 1
        self._records.append(record)
        if self._logger is not None:
            try:
                self._logger.info(**record)
            except (OSError, ValueError) as error:
                self._give_up(error)
        elif self.path is not None:
            self._totals["records_dropped_total"] += 1
        return record

    def end(self) -> None:
        """Write ``session.ended`` once."""
        if not self._ended:
            self._ended = True
            unknown = (
                {} if self._disk_written is not None else {"disk_bytes_written_total": "there was no disk"}
            )
            self.write(
                "session.ended",
                **self._totals,
                disk_bytes_written_total=self._disk_written,
                unknown=unknown,
            )

    def _give_up(self, error: Exception) -> None:
        self._logger = None
        self._totals["records_dropped_total"] += 1
        warnings.warn(
            f"the audit log {self.path} cannot be written ({error}); generation goes on, and the last "
            f"{KEPT_IN_MEMORY} records stay in memory. Give log= a path that can be written, or log=None",
            LuminaWarning,
            stacklevel=3,
        )


def default_log_path(cache_id: str) -> Path:
    """A new file in ``$XDG_STATE_HOME/lumina_cache`` (by default ``~/.local/state/lumina_cache``)."""
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return base / "lumina_cache" / f"{stamp}-{os.getpid()}-{cache_id}.jsonl"


def _open_private(path: Path) -> TextIO:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return open(fd, "a", encoding="utf-8")


def _logger(file: TextIO) -> Any:
    """A structlog logger of our own: nothing of structlog's or logging's global configuration is read or changed."""
    return structlog.wrap_logger(
        structlog.WriteLogger(file),
        processors=[structlog.processors.JSONRenderer(serializer=_to_json)],
        wrapper_class=structlog.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )


def _to_json(record: Mapping[str, Any], **_: Any) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":"), default=_written)


def _written(value: Any) -> Any:
    """What is written for a value that JSON has no form of."""
    return value.write() if isinstance(value, Deferred) else str(value)


@dataclass(frozen=True)
class LogContents:
    """The records of a log in file order, and one sentence for each line that was not one."""

    records: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]

    def of(self, event: str) -> tuple[dict[str, Any], ...]:
        return tuple(r for r in self.records if r["event"] == event)


def validate(record: Any) -> dict[str, Any]:
    """Check one record against the event table.

    Raises:
        LogFormatError: naming the field, its value and what was expected.
    """
    if not isinstance(record, dict):
        raise LogFormatError(f"a record is a JSON object, not {type(record).__name__}")
    if record.get("schema") != SCHEMA:
        raise LogFormatError(
            f"field 'schema' is {record.get('schema')!r}; this version reads schema {SCHEMA}"
        )
    event = record.get("event")
    if not isinstance(event, str) or event not in EVENTS:
        raise LogFormatError(f"field 'event' is {event!r}; known events: {', '.join(EVENTS)}")
    for name, field in {**_COMMON, **EVENTS[event]}.items():
        if name not in record:
            raise LogFormatError(f"{event}: field {name!r} is missing ({field.meaning})")
        value = record[name]
        if not isinstance(value, field.types) or (isinstance(value, bool) and bool not in field.types):
            expected = " or ".join("null" if t is type(None) else t.__name__ for t in field.types)
            raise LogFormatError(
                f"{event}: field {name!r} is {value!r}; expected {expected} ({field.meaning})"
            )
    return record


def _unpacked(record: Any) -> Any:
    """A record of this schema with its candidates as a list, however they were written.

    Raises:
        LogFormatError: they cannot be read.
    """
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        return record
    candidates, state = record.get("candidates"), record.get("state")
    if not isinstance(candidates, dict) or not isinstance(state, dict):
        return record
    from .policy.record import unpack  # scoring needs the rest of the library; most logs of mere steps do not

    return {**record, "candidates": unpack(candidates, state.get("weights", {}))}


def read_log(path: str | os.PathLike[str]) -> LogContents:
    """Read a log; lines that do not follow the event table are named, not guessed at.

    Raises:
        LogFormatError: if the file cannot be read at all.
    """
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    last_seq: dict[str, int] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = validate(_unpacked(json.loads(line)))
                except json.JSONDecodeError as error:
                    cut = "" if line.endswith("\n") else " (the line was cut short)"
                    problems.append(f"line {number}: not JSON: {error.msg}{cut}")
                except LogFormatError as error:
                    problems.append(f"line {number}: {error}")
                else:
                    expected = last_seq.get(record["cache"], 0) + 1
                    if record["seq"] != expected:
                        problems.append(
                            f"line {number}: cache {record['cache']}: field 'seq' is {record['seq']}, "
                            f"expected {expected}: records are missing or repeated"
                        )
                    last_seq[record["cache"]] = record["seq"]
                    records.append(record)
    except OSError as error:
        raise LogFormatError(f"cannot read the log {os.fspath(path)}: {error.strerror or error}") from None
    return LogContents(tuple(records), tuple(problems))
