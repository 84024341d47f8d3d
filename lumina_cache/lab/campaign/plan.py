"""The plan of a campaign: a TOML file, read into a value with every default filled in and every grid spelt out.

::

    name = "first"
    models = ["smollm2"]                      # what --model takes
    contexts = [1024]                         # tokens held when the action is taken
    documents = 30                            # for each context, domains taking turns
    rungs = ["native", "cache", "hook"]

    [[grid]]                                  # every combination of its lists
    executions = ["real", "simulated"]
    actions = ["evict:{scorer}@{keep}+quant:hadamard,bits={bits}"]
    scorer = ["keydiff", "sinks_window"]
    keep = [0.5, 0.25]
    bits = [4, 3]
"""

from __future__ import annotations

import difflib
import string
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ...backend.capabilities import Rung
from ...errors import ActionSyntaxError, CampaignError, EvaluationError, UnsupportedCacheError
from ...gap.records import BLOCK, ROLES
from ..evaluate.documents import DOMAINS
from ..evaluate.plan import Plan as BenchPlan
from ..evaluate.run import rungs_of
from .trial import EXECUTIONS, Trial, read_trial

__all__ = ["CampaignPlan", "parse_plan", "read_plan"]


@dataclass(frozen=True)
class CampaignPlan:
    """Settings of one campaign. Lengths are in tokens."""

    name: str
    models: tuple[str, ...]
    contexts: tuple[int, ...]
    documents: int  #: for each model, context and seed
    trials: tuple[Trial, ...]
    domains: tuple[str, ...] = tuple(DOMAINS)
    texts: tuple[str, ...] = ()  #: files that take the place of the domains
    rungs: tuple[str, ...] = ("native", "cache", "hook")
    seeds: tuple[int, ...] = (0,)  #: everything is measured once for each
    order_seed: int = 0
    scored: int = 96
    block: int = BLOCK
    chunk: int = 512
    warm_up: int = 1  #: trials that are carried out and thrown away before the first that counts
    idle_seconds: float = 0.0  #: after each trial
    timed_documents: int = 0
    timed_steps: int = 12

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if not values or min(values) < least:
                raise CampaignError(f"{name} = {value}: give at least {least}")
        for name in ("models", "contexts", "domains", "rungs", "seeds"):
            value = getattr(self, name)
            if not value or len(set(value)) < len(value):
                raise CampaignError(f"{name} = {list(value)}: give at least one, and none of them twice")
        for name in self.domains:
            _one_of("domains", name, tuple(DOMAINS))
        if not self.trials:
            raise CampaignError("the plan has no action: give at least one [[grid]] with actions")
        if self.scored % BLOCK:
            raise CampaignError(
                f"scored = {self.scored}: give a multiple of {BLOCK}, so that every token is in a whole block"
            )
        try:
            rungs_of(self.rungs)
            self.bench_plan(self.contexts[0])
        except (EvaluationError, UnsupportedCacheError) as error:
            raise CampaignError(f"the plan: {error}") from None

    @property
    def levels(self) -> tuple[Rung, ...]:
        return rungs_of(self.rungs)

    def bench_plan(self, context: int) -> BenchPlan:
        """What an evaluation of the same documents is told: the continuation alone, and times where asked."""
        return BenchPlan(
            contexts=((context, self.documents),),
            tests=("T1", "time") if self.timed_documents else ("T1",),
            scored=self.scored,
            block=self.block,
            chunk=self.chunk,
            depths=(),
            free_run_documents=0,
            timed_documents=self.timed_documents,
            timed_steps=self.timed_steps,
        )

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "trials": [t.to_record() for t in self.trials]}


_LEAST = {
    "contexts": 1, "documents": 1, "seeds": 0, "order_seed": 0, "scored": BLOCK, "block": 1, "chunk": 1, "warm_up": 0,
    "idle_seconds": 0, "timed_documents": 0, "timed_steps": 2,
}  # fmt: skip

#: Settings of a plan → the type of a value, or of the elements of a list.
_LISTS: Mapping[str, type] = {
    "models": str, "contexts": int, "domains": str, "texts": str, "rungs": str, "seeds": int,
}  # fmt: skip
_SINGLE: Mapping[str, type] = {
    "name": str, "documents": int, "order_seed": int, "scored": int, "block": int, "chunk": int, "warm_up": int,
    "idle_seconds": float, "timed_documents": int, "timed_steps": int,
}  # fmt: skip
_NEEDED = ("name", "models", "contexts", "documents")


def read_plan(path: Path) -> CampaignPlan:
    """The plan in a TOML file; texts are looked for from the file's folder.

    Raises:
        CampaignError: naming the file, key, value or action at fault, and what would be right.
    """
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CampaignError(f"cannot read the plan {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise CampaignError(f"{path} is no TOML: {error}") from None
    plan = parse_plan(found)
    return replace(plan, texts=tuple(str((path.parent / text).resolve()) for text in plan.texts))


def parse_plan(found: Mapping[str, Any]) -> CampaignPlan:
    """The plan in a table that a TOML file holds.

    Raises:
        CampaignError: naming the key, value or action at fault, and what would be right.
    """
    settings = {key: value for key, value in found.items() if key != "grid"}
    for key in settings:
        _one_of("the plan", key, (*_SINGLE, *_LISTS, "grid"))
    for key in _NEEDED:
        if key not in settings:
            raise CampaignError(f"the plan does not say {key}; it needs {', '.join(_NEEDED)} and a [[grid]]")
    values: dict[str, Any] = {
        key: tuple(_typed(key, one, _LISTS[key]) for one in _listed(key, value))
        if key in _LISTS
        else _typed(key, value, _SINGLE[key])
        for key, value in settings.items()
    }
    grids = found.get("grid", [])
    if not isinstance(grids, list) or not all(isinstance(g, dict) for g in grids):
        raise CampaignError("grid: write each grid as a table of its own, under [[grid]]")
    trials = [trial for i, grid in enumerate(grids) for trial in _grid(grid, f"grid {i + 1}")]
    return CampaignPlan(**values, trials=_without_repetitions(trials))


def _grid(grid: Mapping[str, Any], where: str) -> Iterator[Trial]:
    """Every combination of a grid's lists, for every execution."""
    actions = [_typed(f"{where}: actions", a, str) for a in _listed(f"{where}: actions", grid.get("actions"))]
    executions = _listed(f"{where}: executions", grid.get("executions", list(EXECUTIONS)))
    role = grid.get("role")
    if role is not None:
        _one_of(f"{where}: role", role, ROLES)
    for execution in executions:
        _one_of(f"{where}: executions", execution, EXECUTIONS)
    wanted = {name: _fields(action, where) for action in actions for name in [action]}
    known = {name for names in wanted.values() for name in names}
    lists = {key: value for key, value in grid.items() if key not in ("actions", "executions", "role")}
    for key in lists:
        _one_of(where, key, ("actions", "executions", "role", *sorted(known)))
    for action in actions:
        names = wanted[action]
        missing = [name for name in names if name not in lists]
        if missing:
            raise CampaignError(
                f"{where}: {action!r} has {{{missing[0]}}}, but the grid has no list {missing[0]}"
            )
        for values in product(*(_listed(f"{where}: {name}", lists[name]) for name in names)):
            text = action.format(**dict(zip(names, values, strict=True)))
            for execution in executions:
                try:
                    yield read_trial(text, execution, role)
                except ActionSyntaxError as error:
                    raise CampaignError(f"{where}: {error}") from None


def _fields(action: str, where: str) -> list[str]:
    try:
        parsed = list(string.Formatter().parse(action))
    except ValueError as error:
        raise CampaignError(f"{where}: cannot read {action!r}: {error}") from None
    return list(dict.fromkeys(name for _, name, _, _ in parsed if name is not None))


def _without_repetitions(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Each action once per execution; two roles for one action are a contradiction."""
    found: dict[tuple[str, str], Trial] = {}
    for trial in trials:
        before = found.setdefault((trial.execution, trial.action), trial)
        if before.role != trial.role:
            raise CampaignError(
                f"{trial.action} is a {before.role} in one grid and a {trial.role} in another"
            )
    return tuple(found.values())


def _listed(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CampaignError(f"{key} = {value!r}: give a list, such as [{value!r}]" if value is not None else
                            f"{key}: give a list")  # fmt: skip
    return value


def _typed(key: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {str: "text", int: "a whole number", float: "a number"}
        raise CampaignError(f"{key} = {value!r}: give {names[kind]}")
    return value


def _one_of(where: str, name: Any, known: Sequence[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise CampaignError(f"{where}: there is no {name!r}; {hint}")
