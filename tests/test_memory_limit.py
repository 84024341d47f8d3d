"""Under a hard limit on memory generation with mlx-lm's own cache dies, and with a budget it comes to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Bytes beyond what the process has when generation begins: less than all rows dense (85 MiB), more than the budget
#: (16 MiB) and one step's work.
TIGHT = 56 << 20
WIDE = 400 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")


def run(which: str, more: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tests" / "limit_worker.py"), which, str(more)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_limit_that_kills_mlx_lms_own_cache_is_survived_with_a_budget() -> None:
    wide = run("stock", WIDE)
    assert wide.returncode == 0, wide.stderr
    said = json.loads(wide.stdout)
    assert said["tokens"] == 48
    assert said["nbytes"] > TIGHT, "all rows would fit the tight limit: it shows nothing"
    assert run("stock", TIGHT).returncode != 0
    ours = run("lumina", TIGHT)
    assert ours.returncode == 0, ours.stderr
    said = json.loads(ours.stdout)
    assert said["tokens"] == 48
    assert said["nbytes"] <= 16 << 20
