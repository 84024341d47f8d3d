"""A result as a table for the terminal and for a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...brief import brief
from .plan import TESTS

__all__ = ["as_markdown", "as_table"]


#: Column → heading, the tests that fill it, and how a figure is written.
_COLUMNS: Mapping[str, tuple[str, str, str]] = {
    "kl_mean": ("T1 KL", "T1", "{:.4f}"),
    "kl_p95": ("p95", "T1", "{:.3f}"),
    "top1": ("top-1", "T1", "{:.3f}"),
    "nll_change": ("ΔNLL", "T1", "{:+.3f}"),
    "copy_kl": ("T2 KL", "T2", "{:.4f}"),
    "copy_accuracy": ("T2 acc.", "T2", "{:.3f}"),
    "lookup_accuracy": ("T3 acc.", "T3", "{:.3f}"),
    "agreed_tokens": ("T5 same", "T5", "{:.0f}"),
    "time_ratio": ("step time", "time", "×{:.2f}"),
}
#: Columns that show their interval.
_WITH_INTERVAL = ("kl_mean", "copy_kl", "time_ratio")


def as_table(result: Mapping[str, Any]) -> RenderableType:
    """One table per context, sorted by share, then refusals, gates and conditions."""
    parts: list[RenderableType] = []
    for context in _contexts(result):
        columns = _columns(result, context)
        table = Table(title=_title(result, context), title_justify="left", box=None, pad_edge=False)
        table.add_column("action", overflow="fold")
        table.add_column("share", justify="right", no_wrap=True)
        several = _several(result)
        if several:
            table.add_column("from rung", no_wrap=True)
        for name in columns:
            table.add_column(_COLUMNS[name][0], justify="right", no_wrap=True)
        for row in _measured(result, context):
            since = (row["rung"],) if several else ()
            table.add_row(
                brief(row["action"]), f"{row['share16']:.1%}", *since, *(_cell(row, c) for c in columns)
            )
        parts += [table, Text("")]
        if several:
            parts += [_best_table(result, context), Text("")]
    parts.append(Text("\n".join(_notes(result))))
    return Group(*parts)


def _best_table(result: Mapping[str, Any], context: int) -> Table:
    rungs = result["header"]["rung"].split(",")
    table = Table(title=_BEST, title_justify="left", box=None, pad_edge=False)
    table.add_column("share", justify="right", no_wrap=True)
    for rung in rungs:
        table.add_column(rung, overflow="fold")
    for share, cells in _best_rows(result, context, rungs):
        table.add_row(share, *cells)
    return table


_BEST = "Least KL of T1 by rung, within a share of the bytes"


def _best_rows(result: Mapping[str, Any], context: int, rungs: Sequence[str]) -> list[tuple[str, list[str]]]:
    """A line for each share: what each rung does best, or that it has nothing."""
    here = [b for b in result["best"] if b["context"] == context]
    found = []
    for share in dict.fromkeys(b["share"] for b in here):
        cells, before = [], None
        for rung in rungs:
            (one,) = [b for b in here if b["share"] == share and b["rung"] == rung]
            if one["action"] is None:
                cells.append("–")
            elif one["action"] == before:
                cells.append("the same")
            else:
                cells.append(f"{one['kl_mean']:.4f} {brief(one['action'])}")
            before = one["action"]
        found.append((f"≤ {100 * share:g} %", cells))
    return found


def _several(result: Mapping[str, Any]) -> bool:
    return "," in result["header"]["rung"]


def print_result(result: Mapping[str, Any], console: Console) -> None:
    console.print(as_table(result), highlight=False)


def as_markdown(result: Mapping[str, Any]) -> str:
    """The same as Markdown."""
    lines: list[str] = []
    for context in _contexts(result):
        columns = _columns(result, context)
        several = _several(result)
        heads = ["action", "share", *(["from rung"] if several else []), *(_COLUMNS[c][0] for c in columns)]
        lines += [f"**{_title(result, context)}**", "", f"| {' | '.join(heads)} |"]
        lines.append("| --- " + "| ---: " * (len(heads) - 1) + "|")
        for row in _measured(result, context):
            since = [row["rung"]] if several else []
            cells = [
                f"`{brief(row['action'])}`",
                f"{row['share16']:.1%}",
                *since,
                *(_cell(row, c) for c in columns),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        if several:
            rungs = result["header"]["rung"].split(",")
            lines += [
                f"{_BEST}:",
                "",
                f"| share | {' | '.join(rungs)} |",
                "| ---: " + "| --- " * len(rungs) + "|",
            ]
            lines += [
                f"| {share} | {' | '.join(cells)} |" for share, cells in _best_rows(result, context, rungs)
            ]
            lines.append("")
    lines += [f"- {note}" for note in _notes(result)]
    return "\n".join(lines) + "\n"


def as_json(result: Mapping[str, Any]) -> str:
    return json.dumps(result, allow_nan=False)


def _contexts(result: Mapping[str, Any]) -> list[int]:
    return [int(context) for context, _ in result["header"]["plan"]["contexts"]]


def _measured(result: Mapping[str, Any], context: int) -> list[Any]:
    here = [r for r in result["rows"] if r["context"] == context and r["state"] == "real"]
    return sorted(here, key=lambda r: (-r["share16"], r["action"]))


def _columns(result: Mapping[str, Any], context: int) -> list[str]:
    here = _measured(result, context)
    return [c for c in _COLUMNS if any(r["figures"][c] is not None for r in here)]


def _title(result: Mapping[str, Any], context: int) -> str:
    documents = [d for d in result["header"]["documents"] if d["context"] == context]
    each = {d["domain"]: sum(o["domain"] == d["domain"] for o in documents) for d in documents}
    spread = ", ".join(f"{n} {name}" for name, n in each.items())
    return f"{context:,} tokens of context, {len(documents)} documents ({spread})"


def _cell(row: Mapping[str, Any], column: str) -> str:
    figure = row["figures"][column]
    if figure is None:
        return "–"
    form = _COLUMNS[column][2]
    text = form.format(figure["mean"])
    if column in _WITH_INTERVAL and figure["low"] is not None:
        low, high = (form.format(figure[k]).lstrip("×") for k in ("low", "high"))
        text += f" [{low}, {high}]"
    return text


def _notes(result: Mapping[str, Any]) -> Sequence[str]:
    header, plan = result["header"], result["header"]["plan"]
    notes = []
    for row in result["rows"]:
        if row["state"] == "backend_infeasible":
            why = "; ".join(dict.fromkeys(str(r["text"]) for r in row["reasons"]))
            notes.append(f"backend_infeasible at {row['context']:,}: {row['action']}: {why}")
        elif row["state"] == "failed":
            notes.append(f"FAILED at {row['context']:,}: {row['action']}: {row['error']}")
        elif row["refused_documents"]:
            notes.append(f"{row['action']} was refused on {row['refused_documents']} documents")
    for gate in result["gates"]:
        state = "passed" if gate["passed"] else "NOT passed"
        notes.append(f"gate {gate['test']} at {gate['context']:,}: {state}: {gate['text']}")
    for name in (test for test in TESTS if test not in plan["tests"]):
        notes.append(f"{name} ({TESTS[name]}) was not run")
    notes += [f"lacking at {s['context']:,}, {s['domain']}: {s['text']}" for s in result["lacking"]]
    model = header["model"]
    exact = [
        r["bytes_exact"] for r in result["rows"] if r["state"] == "real" and r["bytes_exact"] is not None
    ]
    notes += [
        f"bytes predicted = bytes of the arrays in {sum(exact)} of {len(exact)} rows (T6)",
        "share: bytes of the rows held, as a 16-bit cache would store them, of dense rows; KL in nats per token to the "
        f"full cache, mean over documents; brackets: 95 % bootstrap over documents; {plan['block']} tokens per forward",
        f"{model['name']} ({model['fingerprint']}) in {model['dtype'].removeprefix('mlx.core.')}, "
        f"device={header['device']}, rung {header['rung']}, MLX {header['mlx']}, mlx-lm {header['mlx_lm']}, "
        f"lumina_cache {header['lumina_cache']}",
    ]
    return notes
