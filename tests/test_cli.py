"""The command line as a user meets it: messages instead of tracebacks, exit codes, JSON where a script reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from lumina_cache import LuminaCache, __version__


def cli(
    *args: str, env: dict[str, str] | None = None, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lumina_cache.cli", *args],
        capture_output=True,
        text=True,
        input=text,
        timeout=300,
        check=False,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture
def log(tiny, tmp_path) -> Path:
    path, model = tmp_path / "run.jsonl", tiny("llama")
    with LuminaCache(model, budget=270_000, log=path) as cache:
        for _ in range(9):
            mx.eval(model(mx.arange(1, 100)[None], cache=cache), [c.state for c in cache])
    return path


@pytest.mark.parametrize("command", ["demo", "run", "gap", "log"])
def test_every_command_explains_itself_with_examples(command):
    done = cli(command, "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert f"lumina-cache {command}" in done.stdout


def test_version_is_printed():
    assert cli("--version").stdout.strip() == __version__


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["gap", "none.jsonl"], "cannot read the log"),
        (["run"], "give either --prompt or --prompt-file"),
        (["run", "--prompt", "a", "--prompt-file", "b"], "give either --prompt or --prompt-file"),
        (["run", "--prompt-file", "none.txt"], "cannot read the prompt from none.txt"),
        (["run", "--prompt", "  "], "the prompt is empty"),
        (["run", "--prompt", "a", "--plan", "evict:nonsense@0.5"], "no such method"),
        (["run", "--prompt", "a", "--plan", "reclaim", "--budget", "1GB"], "give one of them"),
        (["run", "--prompt", "a", "--protect", "9-3"], "such as 0-120"),
        (["run", "--prompt", "a", "--budget", "lots"], "cannot read 'lots' as an amount of memory"),
        (["run", "--prompt", "a", "--budget", "400%"], "not between 0% and 100%"),
        (["run", "--prompt", "a", "--policy", "best"], "unknown policy 'best'"),
        (["run", "--prompt", "a", "--policy", "fixed"], "give plan="),
        (["demo", "--budget", "0MB"], "is not more than nothing"),
        (["run", "--prompt", "a", "--model", "./no/such/model"], "no/such/model"),
        (["nonsense"], "No such command"),
    ],
)
def test_a_users_mistake_gets_a_message_and_exit_code_2(args, says):
    done = cli(*args)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_gap_prints_both_sides_and_says_simulated(log):
    done = cli("gap", str(log))
    assert done.returncode == 0
    for part in (
        "[execution state: simulated]",
        "best of A",
        "best of F",
        "policy's choice",
        "mean gap over",
    ):
        assert part in done.stdout


def test_gap_as_json_is_one_document(log):
    found = json.loads(cli("gap", str(log), "--json").stdout)
    assert found["execution_state"] == "simulated"
    assert found["mean"] == pytest.approx(sum(g["gap"] for g in found["gaps"]) / len(found["gaps"]))


def test_log_is_printed_a_line_per_event_and_checked(log):
    done = cli("log", str(log))
    assert done.returncode == 0
    assert "session started" in done.stdout
    assert "applied quant:affine" in done.stdout
    with log.open("a") as file:
        file.write("{broken\n")
    done = cli("log", str(log))
    assert done.returncode == 1
    assert "not JSON" in done.stdout
    assert json.loads(cli("log", str(log), "--json").stdout)["problems"]


@pytest.mark.slow
@pytest.mark.real_model
def test_run_answers_a_prompt_from_a_pipe_as_json(tmp_path):
    done = cli(
        "run", "--prompt-file", "-", "--json", "--max-tokens", "12", "--budget", "40MB",
        text="What is the capital of France?",
        env={"XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "Paris" in found["text"]
    assert found["nbytes_allocated"] == found["arrays_nbytes"]
    assert Path(found["log"]).is_relative_to(tmp_path)


@pytest.mark.slow
@pytest.mark.real_model
def test_run_carries_out_a_plan_and_says_so(tmp_path):
    done = cli(
        "run", "--prompt", "Say what the capital of France is, and why it is known. " * 8, "--max-tokens", "12",
        "--plan", "evict:keydiff@rows=64+quant:affine,bits=8+offload:cold@0.5", "--protect", "0-20",
        "--disk", str(tmp_path / "rows"), "--log", str(tmp_path / "run.jsonl"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "applied evict:keydiff@rows=64+quant:affine,bits=8,group=64+offload:cold@0.50 (plan)" in said
    assert "written to disk" in said
    shown = cli("log", str(tmp_path / "run.jsonl")).stdout
    assert "positions 0-20 protected" in shown
    assert "plan evict:keydiff@rows=64" in shown
    assert not list((tmp_path / "rows").glob("cache-*"))
