"""An audit log for people: one line per event."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from .audit import LogContents
from .brief import brief
from .budget import format_bytes

__all__ = ["describe", "log_as_json", "log_as_text"]


def log_as_text(contents: LogContents) -> str:
    lines = [f"{_clock(r)} {r['cache']} {r['seq']:>5}  {describe(r)}" for r in contents.records]
    lines += [f"problem: {p}" for p in contents.problems]
    lines.append(f"{len(contents.records)} records, {len(contents.problems)} problems")
    return "\n".join(lines)


def log_as_json(contents: LogContents) -> str:
    return json.dumps({"records": contents.records, "problems": contents.problems})


def _clock(record: Mapping[str, Any]) -> str:
    return datetime.fromtimestamp(record["time"], UTC).strftime("%H:%M:%S.%f")[:-3]


def describe(record: Mapping[str, Any]) -> str:
    """One readable line for a record."""
    r = record
    match r["event"]:
        case "session.started":
            budget = "no budget" if r["budget"] is None else f"budget {format_bytes(r['budget'])}"
            kinds = ", ".join(f"{n} {kind}" for kind, n in r["model"].get("kinds", {}).items())
            plan = "" if r["plan"] is None else f", plan {r['plan']}"
            spans = ", ".join(f"{first}-{end - 1}" for first, end in r["protect"])
            kept = f", positions {spans} protected" if spans else ""
            return (
                f"session started: {r['model']['model_type']} ({kinds}), {budget}, policy {r['policy'] or 'none'}"
                f"{plan}{kept}"
            )
        case "step":
            return (
                f"step {r['step']} ({r['phase']}, {r['tokens_step']} tokens): {r['rows']} rows, offset {r['offset']}, "
                f"{format_bytes(r['nbytes_live'])} live in {format_bytes(r['nbytes_allocated'])}"
            )
        case "decision":
            feasible = sum(c["feasible"] for c in r["candidates"])
            return (
                f"decision {r['decision']} ({r['trigger']}): {brief(r['chosen'])}; {feasible} of {len(r['candidates'])} "
                f"candidates feasible; {r['why']}"
            )
        case "action.applied":
            before, after = r["before"]["nbytes_allocated"], r["after"]["nbytes_allocated"]
            return (
                f"applied {brief(r['action'])} ({r['origin']}): {r['rows_before']} → {r['rows_after']} rows, "
                f"{format_bytes(before)} → {format_bytes(after)} allocated, {len(r['layers_changed'])} layers, "
                f"{r['seconds']:.2f} s{_more(r)}"
            )
        case "action.refused":
            return f"refused {brief(r['action'])} ({r['origin']}): " + "; ".join(
                x["text"] for x in r["reasons"]
            )
        case "session.suspended":
            return f"suspended: {format_bytes(r['nbytes'])} moved to a file, {r['seconds']:.2f} s"
        case "session.resumed":
            return f"resumed: {format_bytes(r['nbytes'])} read back, {r['seconds']:.2f} s"
        case "warning":
            return f"warning {r['code']}: {r['text']}"
        case "telemetry":
            change = r["change"]
            what = "machine" if change is None else f"{change['field']}: {change['old']} → {change['new']}"
            return f"telemetry changed: {what}"
        case "session.ended":
            return (
                f"session ended: {r['steps_total']} steps, {r['tokens_total']} tokens, {r['decisions_total']} decisions, "
                f"{r['actions_total']} actions, {r['refusals_total']} refusals"
                + (
                    ""
                    if (w := r["disk_bytes_written_total"]) is None
                    else f", {format_bytes(w)} written to disk"
                )
            )
    return str(r["event"])


def _more(applied: Mapping[str, Any]) -> str:
    """What is not the same of every action."""
    written, guarded = applied["disk_bytes_written"], applied["guarded"]
    more = f", {format_bytes(written)} written to disk" if written else ""
    for done in dict.fromkeys(guarded.values()):
        names = [name for name, what in guarded.items() if what == done]
        more += f"; guarded, {done}: {', '.join(names)}"
    return more
