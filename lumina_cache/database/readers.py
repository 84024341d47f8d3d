"""From a file to rows: what kind of file it is, and what it says. Nothing is guessed; what it does not say is None.

A probe's JSON, a table of architectures, a calibration profile, the result of an evaluation, or a part file of a store
of observations (read by the database itself, because it may have millions of rows).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..actions import parse_action
from ..backend.architecture_table import Architecture, ArchitectureTable
from ..backend.capabilities import Rung
from ..errors import ActionSyntaxError, DatabaseError, ProfileFormatError, TableFormatError
from ..profile import Profile

__all__ = ["Reading", "read_json_file", "row_id", "sha256_of"]

Row = dict[str, Any]

#: ``QUERIES: why``, as the classifier words a capability that is missing.
_MISSING = re.compile(r"([A-Z][A-Z0-9_]*(?:\([0-9,]*\))?): ")


@dataclass(frozen=True)
class Reading:
    """A file's rows by table, without ``id`` and ``source``, and what the file says of itself."""

    kind: str  #: probe, architectures, profile, eval or campaign
    about: Row
    rows: Mapping[str, list[Row]] = field(default_factory=dict)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def row_id(table: str, row: Mapping[str, Any]) -> str:
    """The same for rows that say the same, whatever file they come from."""
    said = {k: v for k, v in row.items() if v is not None and k not in ("id", "source")}
    return hashlib.sha256(json.dumps([table, said], sort_keys=True).encode()).hexdigest()


def read_json_file(path: Path) -> Reading:
    """What a JSON file says.

    Raises:
        DatabaseError: it cannot be read, or is none of the kinds; says why.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DatabaseError(f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DatabaseError(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DatabaseError("holds no JSON object")
    try:
        if {"installation", "matrix"} <= found.keys():
            return _probe(found)
        if {"action_space", "modules", "verdicts"} <= found.keys():
            return _architectures(ArchitectureTable.from_record(found, "it"))
        if {"codecs", "evictors", "provenance"} <= found.keys():
            return _profile(Profile.from_record(found, borrowed=False))
        if found.get("kind") == "lumina-cache eval":
            return _evaluation(found)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, DatabaseError | TableFormatError | ProfileFormatError):
            raise DatabaseError(str(error)) from None
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DatabaseError(f"cannot be understood: {what}") from None
    raise DatabaseError(
        "is neither the output of probe --json, nor a table of architectures, a calibration profile or an eval result"
    )


# -- probe --------------------------------------------------------------------------------------------------------------


def _probe(found: Mapping[str, Any]) -> Reading:
    installation, matrix = found["installation"], found["matrix"]
    where = {
        "made": found.get("made"),
        "device": str(installation["device"]),
        "machine": installation["device_info"].get("device_name"),
        "mlx": str(installation["mlx"]),
        "mlx_lm": str(installation["mlx_lm"]),
        "lumina_cache": found.get("lumina_cache"),
    }
    rows: dict[str, list[Row]] = {
        "array_trials": [
            {
                "kind": "probe",
                **where,
                "check_name": str(t["check"]),
                "params": json.dumps(t["params"], sort_keys=True),
                "outcome": str(t["outcome"]),
                "reason": t["reason"],
                "error": t["error"],
                "allowed": t["allowed"],
            }
            for t in matrix["trials"]
        ],
        "capabilities": [],
    }
    model = found.get("model")
    if model is not None:
        who = {"model_name": str(model["name"]), "model_type": str(model["model_type"])}
        rows["capabilities"] += [
            {
                "kind": "probe",
                **where,
                **who,
                "capability": name,
                "present": bool(outcome["present"]),
                "reason": outcome["reason"],
            }
            for name, outcome in model["capabilities"].items()
        ]
    if found.get("architectures") is not None:
        table = ArchitectureTable.from_record(found["architectures"], "its table of architectures")
        for name, more in _of_architectures(table, where["machine"]).items():
            rows.setdefault(name, []).extend(more)
    details = {k: installation.get(k) for k in ("python", "device_info", "memory_limit", "unknown")}
    about = {
        **where,
        "system": installation["system"],
        "details": json.dumps({**details, "disk": found.get("disk")}),
    }
    return Reading("probe", about, rows)


# -- architectures ------------------------------------------------------------------------------------------------------


def _architectures(table: ArchitectureTable) -> Reading:
    about = {**_installed(table, table.machine), "system": table.system}
    about["details"] = json.dumps({"action_space": table.action_space})
    return Reading("architectures", about, _of_architectures(table, table.machine))


def _installed(table: ArchitectureTable, machine: str | None) -> Row:
    return {
        "made": table.date,
        "device": table.device,
        "machine": machine,
        "mlx": table.mlx,
        "mlx_lm": table.mlx_lm,
        "lumina_cache": table.lumina_cache,
    }


def _of_architectures(table: ArchitectureTable, machine: str | None) -> dict[str, list[Row]]:
    where = {"kind": "architectures", **_installed(table, machine)}
    facts = _facts({e.action for a in table.built for e in a.entries})
    rows: dict[str, list[Row]] = {"real": [], "backend_infeasible": [], "capabilities": [], "not_tried": []}
    for one in table.architectures:
        who = {**where, "model_type": one.module}
        if one.unbuildable is not None:
            rows["not_tried"].append({**who, "reason": one.unbuildable})
            continue
        rows["capabilities"] += [
            {**who, "capability": name, "present": why is None, "reason": why}
            for name, why in one.capabilities.items()
        ]
        for table_name, row in _entries(one, facts):
            rows[table_name].append({**who, **row})
    return rows


def _entries(one: Architecture, facts: Mapping[str, Row]) -> Iterator[tuple[str, Row]]:
    for entry in one.entries:
        base = {"action": entry.action, **facts[entry.action]}
        if entry.state == "real":
            reason = "; ".join(entry.reasons) or None
            yield "real", {**base, "state": "real", "outcome": entry.outcome, "reason": reason}
        else:
            reasons: list[Row] = [{"text": t, "capability": _missing(t)} for t in entry.reasons]
            yield "backend_infeasible", {**base, **_refusal(reasons)}


def _missing(text: str) -> str | None:
    found = _MISSING.match(text)
    return found.group(1) if found else None


def _refusal(reasons: Iterable[Mapping[str, Any]]) -> Row:
    """Columns of a refusal with one or several reasons."""
    found = [dict(r) for r in reasons]
    if not found:
        raise DatabaseError("holds a refusal without a reason")
    return {
        "state": "backend_infeasible",
        "code": found[0].get("code"),
        "capability": next((r["capability"] for r in found if r.get("capability")), None),
        "text": "; ".join(str(r["text"]) for r in found),
        "reasons": json.dumps(found, sort_keys=True),
    }


def _facts(actions: Iterable[str]) -> dict[str, Row]:
    """Rung and requirements of actions that this version can read; unknown for others, such as mlx-lm's own."""
    found: dict[str, Row] = {}
    for text in actions:
        try:
            action = parse_action(text)
        except ActionSyntaxError:
            found[text] = {}
            continue
        deep = sorted(str(c) for c in action.requires if c.rung > Rung.NATIVE)
        found[text] = {"rung": int(action.rung), "requires": deep}
    return found


# -- profile ------------------------------------------------------------------------------------------------------------


def _profile(profile: Profile) -> Reading:
    said = profile.provenance
    key = said.get("key", {})
    where = {
        "made": said.get("finished"),
        "device": key.get("device"),
        "machine": key.get("device_name"),
        "mlx": key.get("mlx"),
        "mlx_lm": key.get("mlx_lm"),
        "lumina_cache": said.get("lumina_cache"),
        "git_commit": said.get("commit"),
    }
    who = {"model": key.get("fingerprint"), "model_name": profile.name}
    points: Mapping[str, Mapping[str, Any]] = said.get("points", {})
    plan = said.get("settings", {}).get("plan", {})
    contexts = [context for context, _ in plan.get("contexts", [])]
    state = {
        "context": contexts[0] if len(contexts) == 1 else None,
        "horizon": plan.get("scored"),
        "seed": plan.get("seed"),
    }
    facts = _facts({*points, *(str(c.action) for c in profile.codecs)})
    base = {"kind": "profile", **where, **who, "state": "real", "outcome": "works"}
    rows = [
        {
            **base,
            **state,
            **facts[action],
            "action": action,
            "documents": point["documents"],
            "kl_mean": point["continuation"],
            "kl_p95": point["p95"],
        }
        for action, point in points.items()
    ]
    rows += [
        {**base, **facts[str(c.action)], "action": str(c.action), "context": rows_held, "time_ratio": ratio}
        for c in profile.codecs
        for rows_held, ratio in c.times
    ]
    about = {
        **where,
        "system": said.get("system"),
        "command": said.get("command"),
        "details": json.dumps({k: v for k, v in said.items() if k not in ("points", "key")}),
    }
    return Reading("profile", about, {"real": rows})


# -- evaluation ---------------------------------------------------------------------------------------------------------


def _evaluation(found: Mapping[str, Any]) -> Reading:
    header, said = found["header"], found["provenance"]
    installation, plan = said["installation"], header["plan"]
    where = {
        "made": said.get("finished"),
        "device": header["device"],
        "machine": installation["device_info"].get("device_name"),
        "mlx": header["mlx"],
        "mlx_lm": header["mlx_lm"],
        "lumina_cache": header["lumina_cache"],
        "git_commit": said.get("commit"),
    }
    documents = {(d["name"], d["context"]): d for d in header["documents"]}
    subjects = [r for r in found["records"] if r["kind"] == "subject"]
    facts = _facts({r["action"] for r in subjects})
    rows: dict[str, list[Row]] = {"real": [], "backend_infeasible": []}
    for record in subjects:
        document = documents[record["document"], record["context"]]
        base = {
            "kind": "eval",
            **where,
            "model": header["model"]["fingerprint"],
            "model_name": header["model"]["name"],
            **facts[record["action"]],
            "action": record["action"],
            "document": record["document"],
            "domain": document["domain"],
            "context": record["context"],
            "seed": plan["seed"],
            "horizon": plan["scored"],
            "text_sha256": document["text_sha256"],
            "tokens_sha256": document["tokens_sha256"],
        }
        if record["state"] == "real":
            rows["real"].append({**base, "state": "real", "outcome": "works", **_measured(record)})
        elif record["state"] == "failed":
            rows["real"].append({**base, "state": "real", "outcome": "fails", "reason": str(record["error"])})
        elif record["state"] == "backend_infeasible":
            rows["backend_infeasible"].append({**base, **_refusal(record["reasons"])})
        else:
            raise DatabaseError(f"holds a record of the unknown state {record['state']!r}")
    about = {
        **where,
        "system": installation["system"],
        "details": json.dumps({"model": header["model"], "plan": plan}),
    }
    return Reading("eval", about, rows)


def _measured(record: Mapping[str, Any]) -> Row:
    row: Row = {"documents": 1, "take_seconds": record.get("take_seconds")}
    if (quality := record.get("T1")) is not None:
        spans = [float(v) for v in quality.get("kl_by_16", [])]
        row |= {k: quality[k] for k in ("kl_mean", "kl_p95", "top1", "nll_change")}
        row |= {"kl_spans": spans, "kl_half0": _mean(spans[0::2]), "kl_half1": _mean(spans[1::2])}
    if (held := record.get("bytes")) is not None:
        row |= {k: held[k] for k in ("share16", "share16_allocated", "live", "allocated", "predicted_live")}
    if (time := record.get("time")) is not None:
        row |= {f"time_{k}": time[k] for k in ("ratio", "low", "high")}
    return row


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
