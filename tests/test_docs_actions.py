"""docs/actions.md is current, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from harness import tokens

from lumina_cache.lab.tiny import build
from lumina_cache.method_tables import replaced, tables

PAGE = Path(__file__).parents[1] / "docs" / "actions.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def test_the_tables_are_those_of_the_registries() -> None:
    page = PAGE.read_text("utf-8")
    assert tables() in page, "run python -m lumina_cache.method_tables docs/actions.md"
    assert replaced(page) == page


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_runs(number: int, tmp_path: Path) -> None:
    model = build("llama")
    ids = tokens(140)
    steps = [ids[:, :100], *(ids[:, i : i + 1] for i in range(100, 140))]
    from lumina_cache import LuminaCache

    names: dict[str, Any] = {
        "model": model, "prompt": ids, "steps": steps, "directory": tmp_path, "LuminaCache": LuminaCache,
    }  # fmt: skip
    exec(EXAMPLES[number], names)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 5


def test_examples_in_the_folder_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runpy.run_path(str(PAGE.parents[1] / "examples" / "plan.py"))
