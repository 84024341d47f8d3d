"""Which actions work on which architecture: every model module of the installed mlx-lm, built small and put to the test.

Each module is built with random weights (:mod:`lumina_cache.lab.tiny`) and tried in a child process, so that one that
ends its process is an outcome (:mod:`.architecture_trial` says how). What ran has the execution state ``real``, what
was refused ``backend_infeasible`` and a reason. The result is a data file (:mod:`.architecture_table`) and a page of
the docs (:mod:`.architecture_page`).

    python -m lumina_cache.backend.architectures          classify, write the data file and docs/architectures.md
    python -m lumina_cache.backend.architectures --page   make the page from the data files that are there
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

import mlx.core as mx

from .._version import __version__
from ..actions import ACTION_SPACE_VERSION, Action
from ..lab.tiny import NOT_MODELS, SPECS, UNBUILDABLE, installed_modules
from .architecture_page import page
from .architecture_table import Architecture, ArchitectureTable, Entry, load_tables, write_table
from .architecture_trial import classify_module, grid
from .installation import device_kind, probe_installation
from .interface import mlx_lm_version, mlx_version
from .isolate import Answer, ask

__all__ = ["Architecture", "ArchitectureTable", "Entry", "classify_all", "load_tables"]

#: The docs of a source tree; an installed package has none beside it.
DOCS = Path(__file__).parents[2] / "docs"

#: Seconds that one module may take.
TIMEOUT = 300.0


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
        f"{classify_module.__module__}:{classify_module.__name__}",
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
        machine=_machine(),
    )


def _machine() -> str | None:
    name = probe_installation().device_info.get("device_name")
    return None if name is None else str(name)


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


def main(argv: Sequence[str]) -> int:
    """Classify this installation (unless ``--page`` is given), and make the page of the docs."""
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
    if DOCS.is_dir():
        (DOCS / "architectures.md").write_text(page(load_tables()), "utf-8")
        print(DOCS / "architectures.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
