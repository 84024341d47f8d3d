"""What was found by probing, as a table for people or one JSON document. Tables need rich (the ``cli`` extra)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..budget import format_bytes
from .architecture_table import ArchitectureTable
from .architectures import classify_all
from .disk import DiskProbe, probe_disk
from .installation import Installation, probe_installation
from .matrix import BITS, GROUP_SIZES, HEAD_DIMS, Matrix, Trial, probe_matrix
from .matrix_checks import FORMATS
from .probe import ModelProbe, probe_model
from .store import ProbeStore, configuration_fingerprint

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["model_record", "probe_command"]


def probe_command(
    model: str | None = None,
    all_architectures: bool = False,
    as_json: bool = False,
    console: Console | None = None,
    *,
    directory: str | Path | None = None,
    again: bool = False,
    store: ProbeStore | None = None,
) -> str:
    """Probe this installation, and a model or all architectures if asked; the report as text or JSON.

    Args:
        model: a folder or repository that ``mlx_lm.load`` reads, ``"smollm2"``, or None for no model.
        all_architectures: also classify the action grid on every model module of mlx-lm (about half a minute).
        as_json: one JSON document instead of tables.
        console: where progress is shown and whose width and colours the text has; None for neither.
        directory: where a disk tier would write; None for the user's cache directory.
        again: probe anew what is stored.
        store: where results are kept between processes; None for the user's cache directory.

    Raises:
        ModelUnavailableError: the model is not there.
    """
    store = ProbeStore() if store is None else store
    installation = probe_installation()
    matrix, _ = store.remembered(
        "matrix",
        lambda: probe_matrix(on_progress=_progress(console, "arrays")),
        to_record=Matrix.to_record,
        from_record=Matrix.from_record,
        again=again,
    )
    disk = probe_disk(directory)
    probed = None if model is None else _probe_named(model, store, again)
    table = None
    if all_architectures:
        shown = _progress(console, "architectures")
        table = classify_all(None if shown is None else lambda done, of, _name: shown(done, of))
    if as_json:
        return json.dumps(
            {
                "made": datetime.now(UTC).isoformat(timespec="seconds"),
                "lumina_cache": __version__,
                "installation": installation.to_record(),
                "matrix": matrix.to_record(),
                "disk": disk.to_record(),
                "model": probed,
                "architectures": None if table is None else table.to_record(),
            },
            ensure_ascii=False,
        )
    return _rendered(console, list(_sections(installation, matrix, disk, probed, table)))


def model_record(probe: ModelProbe, name: str) -> dict[str, Any]:
    """A model's probe as values that JSON can carry."""
    return {
        "name": name,
        **probe.profile.to_record(),
        "group_size": probe.group_size,
        "updated_per_step": probe.updated_per_step,
        "seconds": probe.seconds,
        "leaves": [leaf.to_record() for leaf in probe.leaves],
    }


def _probe_named(name: str, store: ProbeStore, again: bool) -> dict[str, Any]:
    from ..lab.models import load_model

    loaded = load_model(name)
    record, stored = store.remembered(
        f"model {loaded.name}",
        lambda: model_record(probe_model(loaded.model), loaded.name),
        to_record=dict,
        from_record=_checked_record,
        configuration=configuration_fingerprint(loaded.model),
        again=again,
    )
    return {**record, "stored": stored}


def _checked_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Raises KeyError or TypeError for what :func:`model_record` did not make."""
    for field in (
        "name",
        "model_type",
        "capabilities",
        "group_size",
        "updated_per_step",
        "seconds",
        "leaves",
    ):
        record[field]
    return dict(record)


# -- text ---------------------------------------------------------------------------------------------------------------


def _progress(console: Console | None, what: str) -> Any:
    """A callback (done, of) that keeps one line on a terminal up to date; None where there is no terminal."""
    if console is None or not console.is_terminal:
        return None

    def show(done: int, of: int) -> None:
        console.print(f"{what}: {done} of {of}", end="\n" if done == of else "\r", highlight=False)

    return show


def _rendered(console: Console | None, parts: Sequence[RenderableType]) -> str:
    from rich.console import Console as RichConsole

    out = RichConsole(width=100, no_color=True) if console is None else console
    with out.capture() as captured:
        for part in parts:
            out.print(part, highlight=False)
    return captured.get().rstrip()


def _sections(
    installation: Installation,
    matrix: Matrix,
    disk: DiskProbe,
    probed: Mapping[str, Any] | None,
    table: ArchitectureTable | None,
) -> Iterator[RenderableType]:
    yield _installation_table(installation, disk)
    yield _layouts_table(matrix)
    yield _arrays_table(matrix)
    if probed is not None:
        yield _model_table(probed)
        yield _leaves_table(probed)
    if table is not None:
        yield _architectures_table(table)


def _table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None
) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        show_edge=False,
        pad_edge=False,
    )
    for head in heads:
        made.add_column(head, overflow="fold")
    for row in rows:
        made.add_row(
            *map(Text, row)
        )  # what MLX says of shapes is in brackets, and must not be taken for markup
    return made


def _installation_table(installation: Installation, disk: DiskProbe) -> RenderableType:
    rows = [
        ("device", f"{installation.device}, {installation.system}"),
        (
            "versions",
            f"MLX {installation.mlx}, mlx-lm {installation.mlx_lm}, Python {installation.python}",
        ),
        *((f"device_info.{name}", str(value)) for name, value in installation.device_info.items()),
    ]
    if installation.memory_limit is not None:
        rows.append(("memory limit", format_bytes(installation.memory_limit)))
    home = str(Path.home())
    where = f"~{disk.path.removeprefix(home)}" if disk.path.startswith(f"{home}/") else disk.path
    rows.append(("disk tier", f"{where}: {disk.reason or 'rows can be written and read back'}"))
    if disk.free is not None:
        rows.append(("disk free", format_bytes(disk.free)))
    if disk.write_rate is not None and disk.read_rate is not None:
        source = {
            True: "past the page cache",
            False: "from the page cache",
            None: "perhaps from the page cache",
        }
        rates = (
            f"write {format_bytes(round(disk.write_rate))}/s, read {format_bytes(round(disk.read_rate))}/s"
        )
        bypass = f"{source[disk.page_cache_bypassed]} ({disk.how})"
        rows.append(("disk rates", f"{rates} {bypass}, {format_bytes(disk.nbytes_written)} written"))
    rows += [(name, f"not known: {why}") for name, why in installation.unknown.items()]
    return _table("Installation", ("what", "found"), rows)


#: Columns of the table of layouts, and the checks that must work for a bit width to be in them.
_LAYOUT_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "codes": ("quantize", "dequantize"),
        "packed attention": ("packed_attention",),
        "with shared heads": ("packed_attention_gqa",),
        "mlx-lm's packed cache": ("stock_cold_append",),
        "decoded on fetch": ("dense_fetch",),
        "row gather": ("row_gather",),
    }
)


def _layouts_table(matrix: Matrix) -> RenderableType:
    """Bit widths that work, per head dims and group size; groups that do not divide both are left out."""
    rows: list[list[str]] = []
    without: list[str] = []
    for key_dim, value_dim in HEAD_DIMS:
        groups = [g for g in GROUP_SIZES if key_dim % g == value_dim % g == 0]
        if not groups:
            without.append(f"{key_dim} × {value_dim}")
        for group in groups:
            layout = {"key_dim": key_dim, "value_dim": value_dim, "group_size": group}
            cells = [_bits_that_work(matrix, checks, layout) for checks in _LAYOUT_COLUMNS.values()]
            rows.append([f"{key_dim} × {value_dim}", str(group), *cells])
    caption = f"No group size divides {', '.join(without)}." if without else None
    return _table("Affine layouts: bits that work", ("K × V", "group", *_LAYOUT_COLUMNS), rows, caption)


def _bits_that_work(matrix: Matrix, checks: Sequence[str], layout: Mapping[str, int]) -> str:
    """``1-6, 8``: runs of bit widths."""
    works = [b for b in BITS if all(t.works for c in checks for t in matrix.of(c, bits=b, **layout))]
    runs: list[list[int]] = []
    for bits in works:
        if runs and runs[-1][-1] == bits - 1:
            runs[-1].append(bits)
        else:
            runs.append([bits])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) or "–"


def _arrays_table(matrix: Matrix) -> RenderableType:
    found = {
        f"format {name}": (*matrix.of("format", format=name), *matrix.of("format_attention", format=name))
        for name in FORMATS
    }
    for check, what in (("mask", "masks"), ("uneven_rows", "rows of one layer under another's mask")):
        for storage in ("dense", "packed"):
            found[f"{what}, {storage}"] = matrix.of(check, storage=storage)
    for array in ("evaluated", "unevaluated"):
        found[f"{array} rows from another thread"] = matrix.of("other_thread", array=array)
    converted = matrix.of("stock_convert")
    found["mlx-lm's packed cache, converted"] = tuple(t for t in converted if t.outcome != "skipped")
    rows = [(what, _summary(trials)) for what, trials in found.items()]
    return _table("Formats, masks, rows, threads", ("what", "found"), rows)


def _summary(trials: Sequence[Trial]) -> str:
    """``works``, or how many do and what does not, by the parameters that the failures have in common."""
    bad = [t for t in trials if not t.works]
    if not bad:
        return f"works ({len(trials)} of {len(trials)})"
    alike: dict[str, list[Trial]] = {}
    for one in bad:
        alike.setdefault(re.sub(r"\d+", "#", f"{one.outcome}: {one.reason}"), []).append(one)
    said = [
        f"{_in_common(same, trials)} {same[0].outcome}: {same[0].reason}".strip() for same in alike.values()
    ]
    works = len(trials) - len(bad)
    return "; ".join([f"works ({works} of {len(trials)})"] * (works > 0) + said)


def _in_common(same: Sequence[Trial], trials: Sequence[Trial]) -> str:
    """Parameters, varied among all trials, whose few values tell these from the others."""
    told = []
    for name in same[0].params:
        here = list(dict.fromkeys(t.params[name] for t in same))
        if len(here) < len({t.params[name] for t in trials}):
            told.append(f"{name} {' or '.join(map(str, here))}")
    return ", ".join(told)


def _model_table(probed: Mapping[str, Any]) -> RenderableType:
    title = f"{probed['name']} ({probed['model_type']}), probed in {probed['seconds']:.2f} s"
    rows = [
        (name, "yes" if outcome["present"] else "no", outcome["reason"] or "")
        for name, outcome in probed["capabilities"].items()
    ]
    return _table(title + (", stored" if probed["stored"] else ""), ("capability", "there", "reason"), rows)


def _leaves_table(probed: Mapping[str, Any]) -> RenderableType:
    """Layers that agree in everything but their name are one row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for leaf in probed["leaves"]:
        masks = ", ".join(
            f"{m['tokens']}: {m['form']}" + (f" of window {m['window_size']}" if m["window_size"] else "")
            for m in leaf["masks"]
        )
        row = (
            leaf["kind"] + (", never updated" if leaf["updated"] is False else ""),
            "" if leaf["n_kv_heads"] is None else str(leaf["n_kv_heads"]),
            "" if leaf["key_dim"] is None else f"{leaf['key_dim']} × {leaf['value_dim']}",
            masks,
            " ".join(n.removeprefix("PACKED_ATTENTION") for n, o in leaf["packed"].items() if o["present"])
            or "–",
        )
        groups.setdefault(row, []).append(leaf["name"].removeprefix("layer "))
    rows = [(_named(names), *row) for row, names in groups.items()]
    heads = ("layers", "kind", "K/V heads", "K × V", "masks asked (tokens: form)", "packed (bits,group)")
    return _table("Layers", heads, rows)


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]}, … {names[-1]} ({len(names)})"


def _architectures_table(table: ArchitectureTable) -> RenderableType:
    rows: list[tuple[str, ...]] = []
    for one in table.architectures:
        if one.unbuildable is not None:
            rows.append((one.module, f"not built: {one.unbuildable}", "", "", ""))
            continue
        wrong = len(one.of("fails")) + len(one.of("works_when_forced"))
        counts = (len(one.of("works")), len(one.of("refused")), wrong)
        rows.append((one.module, str(one.cache), *map(str, counts)))
    title = f"Architectures: {len(table.built)} of {len(table.architectures)} modules built"
    return _table(title, ("module", "caches", "work", "refused", "classifier wrong"), rows)
