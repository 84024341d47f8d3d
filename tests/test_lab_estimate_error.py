"""The table of errors: made by running, and summarised from the runs alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from lumina_cache.lab.estimate_error import (
    DOMINATED,
    LENGTHS,
    Run,
    Skipped,
    as_markdown,
    main,
    subjects,
    summary,
    summary_text,
)

RUN = Run(
    architecture="llama",
    widened=False,
    dtype="float32",
    length=600,
    chunk=512,
    action="keep",
    resident=100,
    resident_measured=100,
    active_measured=120,
    peak=102,
    peak_measured=100,
    share=0.9,
    peak_at="decode",
)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the figures are those of the CPU")
def test_the_quick_form_finds_resident_exact_and_dominated_peaks_within_five_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "page.md", tmp_path / "data" / "error.json"
    page.write_text(
        "head\n<!-- estimate-error: begin -->\nold\n<!-- estimate-error: end -->\ntail\n", "utf-8"
    )
    assert main(["--quick", "--json", str(data), "--page", str(page)]) == 0
    record = json.loads(data.read_text("utf-8"))
    figures = record["summary"]
    assert figures["runs"] == figures["resident_exact"] == len(record["runs"]) > 40
    assert figures["dominated"]["runs"] > 0
    assert figures["dominated"]["within_5_percent"] == figures["dominated"]["runs"]
    assert "| llama | float32 | wide |" in page.read_text("utf-8")
    assert "old" not in page.read_text("utf-8")
    assert "resident exact in" in capsys.readouterr().out


def test_the_whole_form_covers_what_it_says() -> None:
    planned = list(subjects())
    tiny = [s for s in planned if not s.widened and s.dtype == "float32"]
    assert len({s.architecture for s in tiny}) >= 20
    assert all(s.lengths == LENGTHS == (1, 255, 256, 257, 600, 1500) for s in tiny)
    assert {s.dtype for s in planned} == {"float32", "bfloat16"}


def test_the_bound_is_for_runs_that_the_cache_dominates() -> None:
    far = replace(RUN, share=DOMINATED - 0.01, peak=200)
    figures = summary([RUN, far])
    assert figures["dominated"]["within_5_percent"] == figures["dominated"]["runs"] == 1
    assert figures["others"]["greatest_error"] == 1.0
    assert "dominated by the cache: 1 runs, peak within 5 % in 1" in summary_text(figures).lower()


def test_no_run_of_a_kind_is_said_and_not_zero() -> None:
    assert "why_no_figures" in summary([RUN])["others"]


def test_one_inexact_run_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from lumina_cache.lab import estimate_error

    monkeypatch.setattr(estimate_error, "measure", lambda _: iter([replace(RUN, resident=101)]))
    assert main(["--quick"]) == 1


def test_a_model_that_cannot_run_here_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from lumina_cache.lab import estimate_error

    def fails(_: object) -> object:
        raise RuntimeError("only float32\nand more")

    monkeypatch.setattr(estimate_error, "measure", fails)
    assert main(["--quick"]) == 1  # nothing was measured, so nothing was exact
    text = summary_text(summary([RUN]), [Skipped("mixtral", "bfloat16", "RuntimeError: only float32")])
    assert "Not measured: mixtral in bfloat16 (RuntimeError: only float32)." in text


def test_the_table_has_one_line_per_model() -> None:
    lines = as_markdown(
        [RUN, replace(RUN, peak=99), replace(RUN, architecture="qwen3", share=0.1)]
    ).splitlines()
    assert len(lines) == 2 + 2
    assert "-1.0 … +2.0 %" in lines[2]
