"""``lumina-cache db``: what is printed, as tables for people or one JSON document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DatabaseError
from .database import Added, Database, Merged
from .query import Answer, Selection

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_command", "export_command", "merge_command", "query_command"]


def add_command(files: Sequence[Path], db: Path | None, *, as_json: bool) -> tuple[str, bool]:
    """Take in files and stores; the report, and whether all of them were good."""
    with Database(db, write=True) as database:
        added = [one for file in files for one in database.add(file)]
        path = database.path
    good = all(one.problem is None for one in added)
    if as_json:
        return json.dumps({"database": str(path), "files": [a.to_record() for a in added]}), good
    return "\n".join([*_added(added), f"database  {path}"]), good


def _added(added: Sequence[Added]) -> Iterable[str]:
    for one in added:
        yield (
            f"{one.path}: {_counted(one.kind, one)}" if one.problem is None else f"{one.path}: {one.problem}"
        )
    bad = sum(one.problem is not None for one in added)
    yield f"{len(added) - bad} of {len(added)} files taken, {sum(a.new for a in added)} rows new"


def _counted(kind: str | None, one: Added | Merged) -> str:
    text = f"{one.new} rows new, {one.known} there already"
    if one.conflicting:
        text += f", {one.conflicting} of them say something else than what is there, which stays"
    return text if kind is None else f"{kind}, {text}"


def merge_command(files: Sequence[Path], db: Path | None, *, as_json: bool) -> tuple[str, bool]:
    """Take in other databases; the report, and whether all of them were good."""
    with Database(db, write=True) as database:
        merged = [database.merge(file) for file in files]
        path = database.path
    good = all(one.problem is None for one in merged)
    if as_json:
        return json.dumps({"database": str(path), "databases": [m.to_record() for m in merged]}), good
    lines = [f"{m.path}: {_counted(None, m) if m.problem is None else m.problem}" for m in merged]
    return "\n".join([*lines, f"database  {path}"]), good


def export_command(folder: Path, format: str, db: Path | None, *, as_json: bool) -> str:
    """Write every table into a folder; the files."""
    with Database(db) as database:
        written = database.export(folder, format)  # type: ignore[arg-type]  # checked there
        counts = database.counts()
    if as_json:
        return json.dumps({str(path): counts[path.stem] for path in written})
    return "\n".join(f"{path}: {counts[path.stem]} rows" for path in written)


def query_command(
    selection: Selection, db: Path | None, *, about: str, limit: int, as_json: bool, console: Console
) -> str:
    """Answer a question.

    Args:
        about: ``actions``, ``capabilities`` or ``sources``.
        limit: most rows of a table; 0 for all. JSON has all of them.

    Raises:
        DatabaseError: ``about`` is none of these, or there is no database.
    """
    with Database(db) as database:
        if about == "actions":
            found: list[Any] = database.query(selection)
        elif about == "capabilities":
            found = database.capabilities(selection)
        elif about == "sources":
            found = database.sources()
        else:
            raise DatabaseError(f"--about {about}: there are actions, capabilities, sources")
        counts = database.counts()
        unknown = database.of_unknown_chip(selection) if about == "actions" else 0
    if as_json:
        return json.dumps([one.to_record() if isinstance(one, Answer) else one for one in found])
    note = (
        f"\n{unknown} more answers are from files that do not say their chip: leave out --chip"
        if unknown
        else ""
    )
    if not found:
        held = ", ".join(f"{n} {table}" for table, n in counts.items())
        return f"Nothing is known of that. The database holds {held}.{note}"
    if about == "actions":
        return _actions(found, limit, console) + note
    return _plain(found, limit, console)


_GROUP = ("machine", "device", "mlx", "mlx_lm", "lumina_cache", "model")
_HEADS = {"machine": "chip", "mlx": "MLX", "mlx_lm": "mlx-lm"}


def _actions(found: Sequence[Answer], limit: int, console: Console) -> str:
    """Columns that are the same in all rows are said once, above."""
    same = {c: getattr(found[0], c) for c in _GROUP if len({getattr(a, c) for a in found}) == 1}
    several = [c for c in _GROUP if c not in same]
    counts = Counter(a.verdict for a in found)
    lines = ["  ".join(f"{_HEADS.get(c, c)}: {_said(v)}" for c, v in same.items())] if same else []
    lines.append(f"{len(found)} answers: " + ", ".join(f"{v} {n}" for v, n in counts.most_common()))
    with_figures = any(a.real is not None and _has_figures(a.real) for a in found)
    simulated = any(a.simulated is not None for a in found)
    heads = [*(_HEADS.get(c, c) for c in several), "action", "verdict"]
    heads += ["real KL", "real bytes", "real time"] if with_figures else []
    heads += ["simulated KL", "simulated bytes"] if simulated else []
    why = any(_reason(a) for a in found)
    heads += ["why not"] if why else []
    rows = [
        [
            *(_said(getattr(a, c)) for c in several),
            a.action,
            a.verdict,
            *(_figures(a.real) if with_figures else ()),
            *(_figures(a.simulated)[:2] if simulated else ()),
            *((_reason(a),) if why else ()),
        ]
        for a in (found[:limit] if limit else found)
    ]
    lines.append(_table(heads, rows, console))
    if limit and len(found) > limit:
        lines.append(f"{len(found) - limit} more: --limit 0 shows all, --json has all")
    if with_figures or simulated:
        lines.append(
            "KL in nats per token against the full cache, bytes as a share of 16-bit dense rows, time of a"
        )
        lines.append(
            "decode step over the full cache's; –: not measured. Real and simulated figures do not compare."
        )
    return "\n".join(lines)


def _has_figures(real: Any) -> bool:
    return any(v is not None for v in (real.kl_mean, real.share16, real.time_ratio))


def _figures(one: Any) -> tuple[str, str, str]:
    if one is None:
        return "–", "–", "–"
    return (
        "–" if one.kl_mean is None else f"{one.kl_mean:.4g}",
        "–" if one.share16 is None else f"{100 * one.share16:.1f}%",
        "–" if one.time_ratio is None else f"×{one.time_ratio:.2f}",
    )


def _reason(answer: Answer) -> str:
    reasons = [
        *(answer.real.reasons if answer.real else ()),
        *(answer.refused.reasons if answer.refused else ()),
    ]
    return reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "") if reasons else ""


def _said(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _plain(found: Sequence[dict[str, Any]], limit: int, console: Console) -> str:
    hidden = {"id", "details", "nbytes", "git_commit", "lumina_cache", "system", "command"}
    heads = [c for c in found[0] if c not in hidden]
    shown = [[_cell(one[c]) for c in heads] for one in (found[:limit] if limit else found)]
    text = _table([_HEADS.get(h, h) for h in heads], shown, console)
    more = len(found) - len(shown)
    return text + (f"\n{more} more: --limit 0 shows all, --json has all" if more > 0 else "")


def _cell(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
