"""Which actions work on which architecture: every model module of the installed mlx-lm, built small and put to the test.

Each module is built with random weights (:mod:`lumina_cache.lab.tiny`) and probed in a process of its own. Then every
action of the grid is judged by the feasibility classifier, and every action that this version has code for is carried
out on a copy of a filled cache, followed by a step of three tokens and steps of one. What ran has the execution state
``real``; what was refused has ``backend_infeasible`` and a reason. An action that was refused for a backend's reason is
carried out all the same: that it fails is the proof of the refusal.

The result is one JSON file per installation in ``lumina_cache/data/architectures``; adding a machine is adding a file.

    python -m lumina_cache.backend.architectures          classify, write the data file and docs/architectures.md
    python -m lumina_cache.backend.architectures --page   make the page from the data files that are there
"""

from __future__ import annotations

import copy
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from .._version import __version__
from ..actions import ACTION_SPACE_VERSION, Action, Evict, Quantize, action_space
from ..apply import execute, held_all
from ..codecs import Affine
from ..errors import ActionInfeasibleError, TableFormatError
from ..lab.tiny import (
    CHUNKING_MOVES_LOGITS,
    NOT_MODELS,
    SPECS,
    UNBUILDABLE,
    build,
    cache_pattern,
    installed_modules,
)
from ..layers import KVCache, adopt, leaves
from ..steps import StepTracker
from .feasibility import Verdict, classify
from .installation import device_kind
from .interface import mlx_lm_version, mlx_version
from .isolate import Answer, ask, first_line
from .probe import ModelProbe, probe_model, probe_packed

__all__ = [
    "Architecture",
    "ArchitectureTable",
    "Entry",
    "classify_all",
    "data_folder",
    "grid",
    "load_tables",
    "page",
    "write_table",
]

FORMAT = 1

#: Group size of the grid: it divides every head dim of the tiny models that any group size divides.
GROUP_SIZE = 32

#: Bit widths of plain affine packing in the grid; composites take the first two.
BITS = (8, 4, 6, 5, 3, 2)

#: Tokens that every cache is filled with, in chunks: past the tiny models' windows and attention chunks of 16 and
#: block patterns of 32, and so many that no ratio of the grid evicts whole blocks of four.
CHUNKS = (43, 24)

#: Tokens after the action: one step of so many, compared with as many steps of one.
AFTER = 3

#: Largest difference, in standard deviations of the logits, between two ways of computing the same.
SAME = 1e-2

#: Modules that index a mask by head and sequence where they are given one for a single token.
MASKS_OF_RANK_4 = frozenset({"deepseek_v32", "glm_moe_dsa"})

#: Seconds that one module may take.
TIMEOUT = 300.0

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


# -- files --------------------------------------------------------------------------------------------------------------


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


# -- classifying --------------------------------------------------------------------------------------------------------


def grid() -> tuple[Action, ...]:
    """The action space A over the grid of the table, with every bit width of plain affine packing."""
    actions = action_space(bits=BITS[:2], group_size=GROUP_SIZE)
    more = [Quantize("affine", b, b, GROUP_SIZE) for b in BITS]
    return (*actions, *(a for a in more if a not in actions))


def classify_all(
    progress: Callable[[int, int, str], None] | None = None,
    *,
    modules: Iterable[str] | None = None,
    timeout: float = TIMEOUT,
) -> ArchitectureTable:
    """Classify the whole grid for every model module of the installed mlx-lm, each in a child process.

    Args:
        progress: called with the number of modules done, of all, and the name of the last.
        modules: names of modules; None for all that are installed.
        timeout: seconds that one module may take.
    """
    names = [n for n in (installed_modules() if modules is None else modules) if n not in NOT_MODELS]
    actions = grid()
    there = [n for n in names if n in SPECS]
    found: dict[str, Architecture] = {
        n: Architecture(n, None, MappingProxyType({}), (), _why_not(n)) for n in names if n not in SPECS
    }

    def answered(number: int, answer: Answer) -> None:
        name = there[number]
        found[name] = _from_answer(name, answer, actions)
        if progress is not None:
            progress(number + 1, len(there), name)

    device = mx.default_device().type.name
    questions = [{"module": n, "device": device} for n in there]
    ask(
        f"{__spec__.name if __spec__ else __name__}:classify_module",
        questions,
        timeout=timeout,
        on_answer=answered,
    )
    return ArchitectureTable(
        device=device_kind(),
        system=f"{platform.system()} {platform.machine()}",
        mlx=mlx_version(),
        mlx_lm=mlx_lm_version,
        lumina_cache=__version__,
        action_space=ACTION_SPACE_VERSION,
        date=datetime.now(UTC).date().isoformat(),
        architectures=tuple(found[n] for n in sorted(found)),
    )


def _why_not(module: str) -> str:
    return UNBUILDABLE.get(module, "this version of lumina_cache has no tiny model for it")


def _from_answer(module: str, answer: Answer, actions: Sequence[Action]) -> Architecture:
    if answer.died is not None:
        return Architecture(module, None, MappingProxyType({}), (), answer.died)
    value = answer.value
    entries = tuple(
        Entry(str(action), outcome, tuple(reasons))
        for action, (outcome, reasons) in zip(actions, value["verdicts"], strict=True)
    )
    return Architecture(
        module, value["cache"], MappingProxyType(value["capabilities"]), entries, seconds=answer.seconds
    )


# -- in the child process -----------------------------------------------------------------------------------------------


def classify_module(question: Mapping[str, Any]) -> dict[str, Any]:
    """Build one module small, probe it, and put every action of the grid to the test."""
    mx.set_default_device(mx.Device(getattr(mx.DeviceType, question["device"])))
    name = question["module"]
    trial = _Trial(name)
    return {
        "cache": SPECS[name].cache,
        "capabilities": {
            str(c): None if o.present else o.reason for c, o in sorted(trial.probe.profile.outcomes.items())
        },
        "verdicts": [trial.judge(verdict) for verdict in trial.verdicts()],
    }


class _Trial:
    """One tiny model with a filled cache to copy from."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.model = build(module)
        self.probe = _probe(self.model)
        steps = StepTracker(name="trial")
        made = make_prompt_cache(self.model)
        self.filled = [adopt(c, steps, f"layer {i}") for i, c in enumerate(made)]
        if (pattern := cache_pattern(made)) != SPECS[module].cache:
            raise ValueError(f"the cache is {pattern}, {SPECS[module].cache} was expected")
        position = 0
        for tokens in CHUNKS:
            self._forward(self.filled, position, tokens)
            position += tokens
        self.chunk, self.single = self._after(copy.deepcopy(self.filled), copy.deepcopy(self.filled))

    def verdicts(self) -> tuple[Verdict, ...]:
        return classify(grid(), self.probe.profile, held_all(leaves(self.filled)))

    def judge(self, verdict: Verdict) -> tuple[str, list[str]]:
        """Outcome and reasons of one action, by carrying it out where there is code for it."""
        reasons = [r.text for r in verdict.reasons]
        backend = bool(reasons) and all(r.code == "missing_capability" for r in verdict.reasons)
        if reasons and not backend:
            return "refused", reasons
        try:
            self._carry_out(verdict.action)
        except ActionInfeasibleError as error:
            return "refused", reasons or [_PREFIX.sub("", str(error))]
        except Exception as error:
            return ("refused", reasons) if backend else ("fails", [first_line(error)])
        return ("works_when_forced", reasons) if backend else ("works", [])

    def _carry_out(self, action: Action) -> None:
        """Raises unless ``action`` took hold and the model goes on rightly."""
        entries = copy.deepcopy(self.filled)
        execute(list(leaves(entries)), action)
        chunk, single = self._after(entries, copy.deepcopy(entries))
        unchanged = bool(mx.array_equal(chunk, self.chunk, equal_nan=True).item())
        if action.lossy and unchanged:
            raise ValueError("a lossy action moved no logit")
        if not action.lossy and not unchanged:
            raise ValueError("an action that loses nothing moved the logits")
        if self.module not in CHUNKING_MOVES_LOGITS:
            _require_same(chunk, single, f"{AFTER} tokens at once and one by one")
        if action.lossy and all(isinstance(part, Evict) for part in action.parts):
            masked_chunk, masked_single = self._masked(entries)
            _require_same(chunk, masked_chunk, "evicted rows and masked rows")
            _require_same(single, masked_single, "evicted rows and masked rows, one token at a time,")

    def _masked(self, evicted: list[Any]) -> tuple[mx.array, mx.array]:
        """The unchanged cache with a mask over the rows that ``evicted`` has lost."""
        filled = sum(CHUNKS)
        pair = [copy.deepcopy(self.filled) for _ in range(2)]
        for entries in pair:
            for leaf, lost in zip(leaves(entries), leaves(evicted), strict=True):
                if isinstance(leaf, KVCache) and leaf.rows > 0:
                    hidden = np.setdiff1d(np.arange(filled), lost.positions())
                    leaf.__dict__["make_mask"] = _hiding(leaf, hidden, self.module in MASKS_OF_RANK_4)
        try:
            return self._after(*pair)
        finally:
            for entries in pair:
                for leaf in leaves(entries):
                    leaf.__dict__.pop("make_mask", None)

    def _after(self, entries: list[Any], again: list[Any]) -> tuple[mx.array, mx.array]:
        """Logits (1, N, vocabulary) of a step of several tokens, and of as many steps of one on a copy."""
        start = sum(CHUNKS)
        chunk = self._forward(entries, start, AFTER)
        singles = [self._forward(again, start + i, 1) for i in range(AFTER)]
        self._forward(entries, start + AFTER, 1)
        return chunk, mx.concatenate(singles, axis=1)

    def _forward(self, entries: list[Any], position: int, tokens: int) -> mx.array:
        ids = 1 + (11 * mx.arange(position, position + tokens, dtype=mx.int32)) % 97
        logits: mx.array = self.model(ids[None], cache=entries)
        mx.eval(logits, [c.state for c in entries])
        if mx.isnan(logits).any().item():
            raise ValueError("the model's logits are not numbers")
        return logits


def _hiding(leaf: KVCache, hidden: np.ndarray, rank_4: bool) -> Callable[..., mx.array]:
    """A ``make_mask`` that always gives an array, with the rows ``hidden`` out of everyone's sight."""

    def make_mask(N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        query = np.arange(leaf.offset, leaf.offset + N)[:, None]
        key = np.arange(leaf.offset + N)[None]
        seen = (query >= key) & ~np.isin(key, hidden)
        if window_size is not None:
            seen &= query - key < window_size
        return mx.array(seen[None, None] if rank_4 else seen)

    return make_mask


def _require_same(a: mx.array, b: mx.array, what: str) -> None:
    off = _distance(a, b)
    if not off <= SAME:
        raise ValueError(f"{what} differ by {off:.3g} standard deviations of the logits")


def _distance(a: mx.array, b: mx.array) -> float:
    """Largest difference in standard deviations of the logits, over those that are finite on both sides."""
    finite = mx.isfinite(a) & mx.isfinite(b)
    a, b = mx.where(finite, a, 0.0), mx.where(finite, b, 0.0)
    found: Any = (mx.abs(a - b).max() / mx.maximum(a.std(), 1e-6)).item()
    return float(found)


def _probe(model: Any) -> ModelProbe:
    """The model's probe with an outcome for every affine layout of the grid."""
    probe = probe_model(model, bits=BITS)
    if probe.group_size != GROUP_SIZE:
        for bits in BITS:
            probe = probe_packed(model, probe, Affine(bits, GROUP_SIZE))
    return probe


# -- the page -----------------------------------------------------------------------------------------------------------

_INTRODUCTION = """\
# What works on which architecture

One row per model module of mlx-lm. Each module was built small with random weights and filled with a prompt in two
chunks. Every action that this version has code for was then carried out on a copy of the cache and the model ran on:
three tokens in one step had to give what they give one by one, evicted rows what masked rows give, and what loses
something had to be felt. *Works* means that it ran (execution state `real`). What the feasibility classifier refuses has
the state `backend_infeasible`; it was carried out all the same where there is code for it, and had to fail.

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
    heads += [*(heading for _, heading in _COLUMNS), "why not"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for one in built:
        cells = [f"`{one.module}`", str(one.cache)]
        for actions in groups.values():
            works = sum(e.outcome == "works" for e in one.entries if e.action in actions)
            cells.append("–" if works == 0 else "yes" if works == len(actions) else str(works))
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
    """The column that an action is counted in: one for all evictions, one per codec, one for all composites."""
    method = _method(action)
    if "+" in method:
        return "composites"
    return "`evict`" if method.startswith("evict:") else f"`{method}`"


@cache
def _method(action: str) -> str:
    """``evict:sinks_window+quant:affine`` of ``evict:sinks_window@0.50+quant:affine,bits=8,group=32``."""
    return "+".join(m[0] for term in action.split("+") if (m := _TERM.match(term)))


#: A family and, where a name follows rather than a number or a range, the method.
_TERM = re.compile(r"[a-z]+(?::[a-z][a-z0-9_]*)?")

#: What an exception said, behind the words for people.
_EXCEPTION = re.compile(r" \((?:in [^()]*: )?\w+: .*?\)(?=; |$)")


#: The action or its part, in front of what is said of it.
_PREFIX = re.compile(r"^\S+: ")


def _without_exception(reason: str) -> str:
    return _EXCEPTION.sub("", reason)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    """Classify this installation (unless ``--page`` is given), and make the page of the docs."""
    docs = Path(__file__).parents[2] / "docs"
    if unknown := [a for a in argv if a != "--page"]:
        print(f"unknown argument {unknown[0]!r}; known: --page", file=sys.stderr)
        return 2
    if "--page" not in argv:
        start = time.perf_counter()
        table = classify_all(
            lambda done, of, name: print(f"{done:>4}/{of} {name}", file=sys.stderr, flush=True)
        )
        path = write_table(table)
        print(f"{path}: {len(table.built)} modules in {time.perf_counter() - start:.0f} s")
    if docs.is_dir():
        (docs / "architectures.md").write_text(page(load_tables()), "utf-8")
        print(docs / "architectures.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
