"""Codecs that a profile lacks are measured later, on the same documents, and put beside the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_calibrate import SETTINGS, figures, loaded
from typer.testing import CliRunner

from lumina_cache.cli import app
from lumina_cache.errors import CalibrationError
from lumina_cache.lab.calibrate import calibrate
from lumina_cache.lab.calibrate import command as commands
from lumina_cache.profile import Profile, read_profile


@pytest.fixture(autouse=True)
def _own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def whole(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return calibrate(loaded(tiny("llama")), SETTINGS, out=tmp_path_factory.mktemp("whole") / "p.json").profile


def without_last(profile: Profile) -> Profile:
    """As a version without the last codec would have made it, and without what is new in the format."""
    last = str(profile.codecs[-1].action)
    about = dict(profile.provenance)
    for name in ("points", "time_spread", "chunk_time_spread"):
        about[name] = {action: one for action, one in about[name].items() if action != last}
    return replace(
        profile,
        codecs=tuple(replace(one, parts=None) for one in profile.codecs[:-1]),
        evictors=tuple(replace(one, parts=None) for one in profile.evictors),
        dense_steps=(),
        dense_chunks=(),
        provenance=about,
    )


def add(model: Any, base: Profile, out: Path, **more: Any) -> Profile:
    found = calibrate(loaded(model), SETTINGS, out=out, base=base, **more)
    assert found.complete
    return read_profile(out)


def test_what_is_lacking_is_measured_and_the_rest_stays(tiny: Any, tmp_path: Path, whole: Profile) -> None:
    base = without_last(whole)
    found = add(tiny("llama"), base, tmp_path / "new.json")
    ours, theirs = figures(found), figures(whole)
    for name in ("codecs", "evictors", "sensitivity", "points", "documents"):
        assert ours[name] == theirs[name], name
    assert [one.times for one in found.codecs[:-1]] == [one.times for one in base.codecs]
    assert found.provenance["added"]["codecs"] == [str(whole.codecs[-1].action)]
    assert found.provenance["added"]["times"] == "of these codecs"
    assert len(found.dense_steps) == len(SETTINGS.timed_rows)
    lines = [json.loads(line) for path in tmp_path.glob("*.records") for line in [path.read_text()]]
    taken = {r["action"] for r in lines[0]["records"] if r["kind"] == "subject"}
    assert taken == {str(whole.codecs[-1].action)}


def test_on_another_machine_all_times_are_measured_anew(tiny: Any, tmp_path: Path, whole: Profile) -> None:
    base = without_last(whole)
    elsewhere = {**base.provenance, "key": {**base.provenance["key"], "device_name": "another machine"}}
    slow = tuple(replace(one, times=((1, 99.0),), chunk_times=((1, 99.0),)) for one in base.codecs)
    base = replace(base, codecs=slow, provenance=elsewhere, step_seconds=99.0)
    found = add(tiny("llama"), base, tmp_path / "new.json")
    assert figures(found)["codecs"] == figures(whole)["codecs"]
    assert all(ratio < 99.0 for one in found.codecs for _, ratio in (*one.times, *one.chunk_times))
    assert found.step_seconds is not None
    assert found.step_seconds < 99.0
    assert set(found.seconds_per_byte) == {"evict", "quant", "offload", "offload_step"}
    assert found.provenance["key"] == whole.provenance["key"]
    assert found.provenance["added"]["times"] == "of all codecs"
    assert found.provenance["added"]["quality_measured_on"] == "another machine"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"key": {"fingerprint": "of other weights"}}, "never mixed"),
        ({"settings": {"recent": 7, "documents": 2, "checked": 1}}, "calibrate anew"),
    ],
)
def test_figures_that_cannot_be_compared_are_not_put_together(
    tiny: Any, tmp_path: Path, whole: Profile, change: dict[str, Any], match: str
) -> None:
    base = without_last(whole)
    about = {name: {**base.provenance[name], **new} for name, new in change.items()}
    base = replace(base, provenance={**base.provenance, **about})
    with pytest.raises(CalibrationError, match=match):
        calibrate(loaded(tiny("llama")), SETTINGS, out=tmp_path / "new.json", base=base)
    assert not (tmp_path / "new.json").exists()


def test_other_documents_are_not_put_beside_them(tiny: Any, tmp_path: Path, whole: Profile) -> None:
    base = without_last(whole)
    texts = [{**one, "sha256": "another text"} for one in base.provenance["texts"]]
    base = replace(base, provenance={**base.provenance, "texts": texts})
    with pytest.raises(CalibrationError, match="documents"):
        calibrate(loaded(tiny("llama")), SETTINGS, out=tmp_path / "new.json", base=base)


@pytest.mark.parametrize("options", [[], ["--quick"], ["--documents", "3"]])
def test_options_that_do_not_go_with_it_are_refused_before_a_model_is_loaded(
    tmp_path: Path, whole: Profile, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "load_model", lambda model: pytest.fail("a model was loaded"))
    path = tmp_path / "old.json"
    path.write_text(json.dumps(whole.to_record()))
    out = ["--out", str(tmp_path / "new.json")] if options else []
    found = CliRunner().invoke(app, ["calibrate", "--add-to", str(path), *out, *options])
    assert found.exit_code != 0
    assert "--add-to" in str(found.exception) + found.output
