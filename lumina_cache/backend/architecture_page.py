"""The page of the docs that the data files of the table of architectures make."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

from ..actions import parse_action
from ..errors import ActionSyntaxError
from .architecture_table import STATES, Architecture, ArchitectureTable, Entry
from .architecture_trial import BITS, GROUP_SIZE
from .capabilities import Rung

__all__ = ["page"]

_INTRODUCTION = """\
# What works on which architecture

One row per model module of mlx-lm. Each module was built small with random weights and filled with a prompt in two
chunks. Every action that this version has code for was then carried out on a copy of the cache and the model ran on:
three tokens in one step had to give what they give one by one (unless rows are encoded in between, which the one step does
not see), evicted rows what masked rows give (where all heads and layers keep the same), and what loses something had to be
felt. *Works* means that it ran (execution state `real`). What the feasibility classifier refuses has
the state `backend_infeasible`; it was carried out all the same where there is code for it, and had to fail.

The columns *native*, *cache* and *hook* say how many actions of the whole grid work at each rung of a cache, see
[the hook](hook.md); a cache without `rung="hook"` is at rung cache.

Random weights say nothing about quality, and head dims of a real model may allow other group sizes than those of a small
one: `lumina-cache probe --model M` asks a model itself.

This page is made from the data files in `lumina_cache/data/architectures` by
`python -m lumina_cache.backend.architectures --page`. The same command without `--page` classifies the installation it
runs on, adds its file, and makes the page anew.
"""

_CACHES = (
    "Caches: K one row per token, R a sliding window, C attention chunks, A recurrent or convolution state, brackets "
    "for several caches of one layer; LayerCache is a class of the module's own."
)

_RUNGS = (Rung.NATIVE, Rung.CACHE, Rung.HOOK)

#: Capabilities with a column of their own, and its heading.
_COLUMNS = (
    ("RAGGED_LAYERS", "uneven rows"),
    ("DENSE_REENCODE", "decoded on fetch"),
    ("ARRAY_MASK", "array masks"),
)


def page(tables: Sequence[ArchitectureTable]) -> str:
    """The page of the docs that the data files make (Markdown)."""
    return "\n".join([_INTRODUCTION, *(_section(t) for t in tables)])


def _section(table: ArchitectureTable) -> str:
    built = table.built
    counts = Counter(e.outcome for a in built for e in a.entries)
    ran = sum(n for outcome, n in counts.items() if STATES[outcome] == "real")
    n_actions = len(built[0].entries) if built else 0
    lines = [
        f"## {table.device}, MLX {table.mlx}, mlx-lm {table.mlx_lm}",
        "",
        f"{table.date}, {table.system}, lumina_cache {table.lumina_cache}, action space {table.action_space}: "
        f"{len(built)} of {len(table.architectures)} modules built, {n_actions} actions each. "
        f"{counts['works']} of {ran} actions that ran work; {counts['refused']} were refused.",
        "",
        _CACHES,
        "",
        *_modules_table(built),
        "",
        *_mismatches(built),
        "### Actions that run on no module here",
        "",
        *_never_table(built),
        "",
        "### Modules that were not built",
        "",
        *[f"- `{a.module}`: {a.unbuildable}." for a in table.architectures if a.unbuildable is not None],
        "",
    ]
    return "\n".join(lines)


def _modules_table(built: Sequence[Architecture]) -> list[str]:
    ran = {e.action for a in built for e in a.entries if e.state == "real"}
    groups: dict[str, set[str]] = {}
    for entry in built[0].entries if built else ():
        if entry.action in ran:
            groups.setdefault(_group(entry.action), set()).add(entry.action)
    heads = ["module", "caches", *(f"{g} ({len(actions)})" for g, actions in groups.items())]
    heads += [*(rung.name.lower() for rung in _RUNGS), *(heading for _, heading in _COLUMNS), "why not"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for one in built:
        cells = [f"`{one.module}`", str(one.cache)]
        for actions in groups.values():
            works = sum(e.outcome == "works" for e in one.entries if e.action in actions)
            cells.append("–" if works == 0 else "yes" if works == len(actions) else str(works))
        cells += [str(sum(_rung(e.action) <= rung for e in one.of("works"))) for rung in _RUNGS]
        cells += [_capability_cell(one, name) for name, _ in _COLUMNS]
        lines.append(_row([*cells, _why_refused(one)]))
    return lines


def _capability_cell(one: Architecture, name: str) -> str:
    if one.capabilities.get(name, "") is not None:
        return "–"
    layers = (one.cache or "").split()
    if name == "RAGGED_LAYERS" and sum("K" in layer for layer in layers) == 1:
        return "one layer"
    return "yes"


def _why_refused(one: Architecture) -> str:
    keys = one.capabilities.get("KEYS")
    if keys is not None:
        return keys
    absent = [
        (name, one.capabilities.get(name))
        for name in ("ROW_GATHER", f"PACKED_ATTENTION({BITS[0]},{GROUP_SIZE})", *(c for c, _ in _COLUMNS))
    ]
    said = [f"{name}: {_without_exception(why)}" for name, why in absent if why is not None]
    return "; ".join(dict.fromkeys(said)).replace("|", "\\|")


def _mismatches(built: Sequence[Architecture]) -> list[str]:
    wrong = [(a, e) for a in built for e in a.entries if e.outcome in ("fails", "works_when_forced")]
    if not wrong:
        return [
            "Every action called feasible ran, and every one refused for the backend's sake failed when forced.",
            "",
        ]
    lines = ["### Where the classifier was wrong", ""]
    lines += [f"- `{a.module}`, `{e.action}`: {e.outcome} ({'; '.join(e.reasons)})" for a, e in wrong]
    return [*lines, ""]


def _never_table(built: Sequence[Architecture]) -> list[str]:
    ran = {_method(e.action) for a in built for e in a.entries if e.state == "real"}
    refused: dict[str, list[Entry]] = {}
    for one in built:
        for entry in one.entries:
            if _method(entry.action) not in ran:
                refused.setdefault(_method(entry.action), []).append(entry)
    lines = [_row(["method", "actions", "most common reasons"]), _row(["---"] * 3)]
    for method, entries in refused.items():
        if "+" not in method:
            reasons, _ = Counter(e.reasons for e in entries).most_common(1)[0]
            said = "; ".join(dict.fromkeys(_without_exception(r) for r in reasons)).replace("|", "\\|")
            lines.append(_row([f"`{method}`", str(len(entries) // len(built)), said]))
    composites = sum(len(entries) for method, entries in refused.items() if "+" in method) // max(
        1, len(built)
    )
    if composites:
        lines.append(_row(["composites", str(composites), "one of their parts is among the above"]))
    return lines


def _group(action: str) -> str:
    """The column that an action is counted in: composites, evictions and codecs by what they need, others by name."""
    method = _method(action)
    if "+" in method:
        return "composites"
    if method.startswith("evict:"):
        return "`evict`, watched" if _rung(action) == Rung.HOOK else "`evict`"
    if method.startswith("quant:") and method != "quant:affine":
        return "`quant`, served" if _rung(action) == Rung.HOOK else "`quant`, decoded"
    return f"`{method}`"


@cache
def _rung(action: str) -> Rung:
    """How deep one must reach for an action; one of another version of the library is taken for the cache's own."""
    try:
        return parse_action(action).rung
    except ActionSyntaxError:
        return Rung.CACHE


@cache
def _method(action: str) -> str:
    """``evict:sinks_window+quant:affine`` of ``evict:sinks_window@0.50+quant:affine,bits=8,group=32``."""
    return "+".join(m[0] for term in action.split("+") if (m := _TERM.match(term)))


#: A family and, where a name follows rather than a number or a range, the method.
_TERM = re.compile(r"[a-z]+(?::[a-z][a-z0-9_]*)?")

#: What an exception said, behind the words for people.
_EXCEPTION = re.compile(r" \((?:in [^()]*: )?\w+: .*?\)(?=; |$)")


def _without_exception(reason: str) -> str:
    return _EXCEPTION.sub("", reason)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
