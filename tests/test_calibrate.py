"""Calibrating tiny models: a whole profile, going on after an interruption, and files that are not what they should be."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.base
import mlx_lm.models.llama
import pytest

from lumina_cache import profile_home
from lumina_cache.actions import Composite, Evict, Quantize, parse_action
from lumina_cache.codecs import CODECS
from lumina_cache.errors import CalibrationError, LuminaWarning, ProfileFormatError
from lumina_cache.fingerprint import fingerprint
from lumina_cache.lab.calibrate import QUICK, Progress, calibrate, find_profile, profile_for
from lumina_cache.lab.calibrate import command as commands
from lumina_cache.lab.calibrate import run as runs
from lumina_cache.lab.calibrate.assemble import Measured, assemble
from lumina_cache.lab.calibrate.grid import Grid, ModelShape, grid_of, shape_of
from lumina_cache.lab.calibrate.render import as_text
from lumina_cache.lab.calibrate.settings import FULL, plan_of
from lumina_cache.lab.models import LoadedModel
from lumina_cache.profile import Profile, read_profile
from lumina_cache.scorers import SCORERS
from lumina_cache.scorers.banked import BANKED
from lumina_cache.scorers.observed import OBSERVED

#: Two documents, so that a run can be cut short between and within them.
SETTINGS = replace(QUICK, documents=2)


class Letters:
    """A tokenizer of bytes, for models of 96 tokens."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [b % 96 for b in text.encode()]


def loaded(model: Any, name: str = "tiny") -> LoadedModel:
    return LoadedModel(model, Letters(), name, fingerprint(model), mx.float32, "built in the test")


@pytest.fixture(autouse=True)
def _own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def uninterrupted(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """What a run gives that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "profile.json"
    found = calibrate(loaded(tiny("llama")), SETTINGS, out=out)
    assert found.complete
    return found.profile


def figures(profile: Profile) -> dict[str, Any]:
    """What does not depend on the machine's mood."""
    record = profile.to_record()
    for codec in record["codecs"]:
        codec["times"], codec["chunk_times"] = len(codec["times"]), len(codec["chunk_times"])
    about = record["provenance"]
    return {
        "codecs": record["codecs"],
        "evictors": record["evictors"],
        "sensitivity": record["sensitivity"],
        **{k: about[k] for k in ("points", "layers", "assumptions", "documents", "unmeasured", "untimed")},
    }


# -- a whole run ----------------------------------------------------------------------------------------------------------


def test_a_run_measures_everything_that_it_set_out_to(tiny: Any) -> None:
    model = tiny("llama")
    found = calibrate(loaded(model), SETTINGS)
    grid, profile = grid_of(shape_of(model), SETTINGS), found.profile
    assert found.complete
    assert found.documents == 2
    assert [c.action for c in profile.codecs] == list(grid.codecs)
    assert all([rows for rows, _ in c.times] == [256] for c in profile.codecs)
    assert all([rows for rows, _ in c.chunk_times] == [256] for c in profile.codecs)
    assert profile.prompt_seconds is not None
    assert {(e.scorer, s) for e in profile.evictors for s, _, _ in e.points} == {
        (e.scorer, e.ratio) for e in grid.evictions
    }
    assert len(profile.sensitivity) == len(model.layers)
    assert sum(profile.sensitivity) / len(model.layers) == pytest.approx(1.0, abs=1e-3)
    assert set(profile.seconds_per_byte) == {"evict", "quant", "offload", "offload_step"}
    assert all(s > 0 for f, s in profile.seconds_per_byte.items() if f != "offload_step")
    assert profile.step_seconds is not None
    assert profile.provenance["unmeasured"] == {}
    assert len(profile.provenance["assumptions"]["damages_add_up"]) == len(grid.composites) > 0
    assert len(profile.provenance["assumptions"]["layers_add_up"]) == len(grid.mixed) > 0
    by_bits = {c.action.key_bits: c.kl for c in profile.codecs if c.action.codec == "affine"}
    assert 0 < by_bits[8] < by_bits[4]
    assert not profile.borrowed


def test_a_profile_is_found_again_and_only_its_user_can_read_it(tiny: Any) -> None:
    model = tiny("llama")
    assert find_profile(model) is None
    found = calibrate(loaded(model), SETTINGS)
    assert find_profile(model) == profile_for(model) == found.profile
    for path in (found.path, found.records):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(found.path.parent).st_mode) == 0o700
    assert [p.suffix for p in sorted(found.path.parent.iterdir())] == [".records", ".json"]


def test_a_profile_says_everything_in_words(uninterrupted: Profile) -> None:
    text = as_text(uninterrupted)
    for codec in uninterrupted.codecs:
        assert str(codec.action) in text
    for scorer in uninterrupted.evictors:
        assert f"\n{scorer.scorer} " in text
    assert "sensitivity by layer (mean 1): 0:" in text
    assert "damages of eviction and codec add up" in text


def test_a_second_call_measures_nothing_again(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = loaded(tiny("llama"))
    first = calibrate(subject, SETTINGS, out=tmp_path / "p.json")

    def refuse(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(runs, "ObservedBench", refuse)
    monkeypatch.setattr(runs.Clock, "step", refuse)
    second = calibrate(subject, SETTINGS, out=tmp_path / "p.json")
    assert second.profile == first.profile


def test_more_documents_go_on_from_fewer(tiny: Any, tmp_path: Path, uninterrupted: Profile) -> None:
    subject, out = loaded(tiny("llama")), tmp_path / "p.json"
    one = calibrate(subject, replace(SETTINGS, documents=1), out=out)
    records = one.records
    two = calibrate(subject, SETTINGS, out=out)
    assert (one.documents, two.documents, two.records) == (1, 2, records)
    assert figures(two.profile) == figures(uninterrupted)


# -- cut short ------------------------------------------------------------------------------------------------------------


def interrupt_after(n: int) -> Callable[[Progress], None]:
    calls = itertools.count()

    def step(_: Progress) -> None:
        if next(calls) == n:
            raise KeyboardInterrupt

    return step


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("after", [1, 5, 14, 30])
def test_an_interrupted_run_goes_on_to_the_same_profile(
    tiny: Any, tmp_path: Path, uninterrupted: Profile, after: int
) -> None:
    subject, out = loaded(tiny("llama")), tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        calibrate(subject, SETTINGS, out=out, on_progress=interrupt_after(after))
    (partial,) = tmp_path.glob("*.partial")
    assert lines_of(partial)[0]["kind"] == runs.KIND
    assert out.exists() is (after == 30)  # a document is through by then, and its profile in place
    if out.exists():
        read_profile(out)
    found = calibrate(subject, SETTINGS, out=out)
    assert found.complete
    assert figures(found.profile) == figures(uninterrupted)
    assert not list(tmp_path.glob("*.partial"))


def test_a_line_that_was_cut_off_is_measured_again(tiny: Any, tmp_path: Path, uninterrupted: Profile) -> None:
    subject, out = loaded(tiny("llama")), tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        calibrate(subject, SETTINGS, out=out, on_progress=interrupt_after(12))
    (partial,) = tmp_path.glob("*.partial")
    text = partial.read_text("utf-8")
    partial.write_text(text[: -len(text.splitlines()[-1]) // 2], "utf-8")
    assert figures(calibrate(subject, SETTINGS, out=out).profile) == figures(uninterrupted)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_profile(tiny: Any, tmp_path: Path, uninterrupted: Profile) -> None:
    out = tmp_path / "p.json"
    script = textwrap.dedent(
        f"""
        from lumina_cache.lab.blas import preload_openblas
        preload_openblas()
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_calibrate import SETTINGS, loaded
        from lumina_cache.lab.calibrate import calibrate
        from lumina_cache.lab.tiny import build
        calibrate(loaded(build("llama")), SETTINGS, out=Path({str(out)!r}))
        """
    )
    run = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        partial = next(tmp_path.glob("*.partial"), None)
        if partial is not None and partial.read_text("utf-8").count("\n") > 6:
            break
        time.sleep(0.02)
    assert run.poll() is None, "the run was over before it could be killed"
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert figures(calibrate(loaded(tiny("llama")), SETTINGS, out=out).profile) == figures(uninterrupted)


def test_the_end_of_the_time_leaves_a_profile_of_what_was_measured(tiny: Any, tmp_path: Path) -> None:
    now = [0.0]

    def tick(_: Progress) -> None:
        now[0] += 1.0

    subject, out = loaded(tiny("llama")), tmp_path / "p.json"
    found = calibrate(subject, SETTINGS, out=out, minutes=4.5 / 60, on_progress=tick, clock=lambda: now[0])
    assert not found.complete
    assert 0 < len(found.profile.codecs) + len(found.profile.evictors) < 7
    assert found.profile.sensitivity == ()
    assert found.profile.step_seconds is None
    assert read_profile(out) == found.profile


def test_no_time_at_all_is_an_error_that_says_so(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="--minutes"):
        calibrate(loaded(tiny("llama")), SETTINGS, out=tmp_path / "p.json", minutes=0.0)
    assert not (tmp_path / "p.json").exists()


def test_ctrl_c_says_how_to_go_on(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    really, calls = runs.measured, itertools.count()

    def measured(*args: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return really(*args)

    monkeypatch.setattr(runs, "measured", measured)
    monkeypatch.setattr(commands, "load_model", lambda spec: loaded(tiny("llama")))
    options: dict[str, Any] = {
        "model": None, "texts": [], "quick": True, "minutes": None, "documents": None,
        "out": tmp_path / "my profile.json", "as_json": True,
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        commands.calibrate_command(**options)
    said = capsys.readouterr()
    assert said.out == ""
    assert "to go on:  lumina-cache calibrate --quick --minutes 1.25 --out '" in said.err
    commands.calibrate_command(**options)
    record = json.loads(capsys.readouterr().out)
    assert record["complete"]
    assert Profile.from_record(record["profile"], borrowed=False) == read_profile(options["out"])


# -- files that are something else ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("contents", ["{}", "[1, 2]", "notes of mine", '{"schema": 99}', ""])
def test_a_file_that_is_no_profile_is_not_written_over(tiny: Any, tmp_path: Path, contents: str) -> None:
    out = tmp_path / "p.json"
    out.write_text(contents)
    with pytest.raises(CalibrationError, match=r"p\.json.*another --out"):
        calibrate(loaded(tiny("llama")), SETTINGS, out=out)
    assert out.read_text() == contents


def test_records_that_are_something_else_are_an_error(tiny: Any, tmp_path: Path) -> None:
    subject, out = loaded(tiny("llama")), tmp_path / "p.json"
    found = calibrate(subject, replace(SETTINGS, documents=1), out=out)
    found.records.write_text('{"kind": "something else"}')
    with pytest.raises(CalibrationError, match="records"):
        calibrate(subject, SETTINGS, out=out)


def test_a_place_that_cannot_be_written_is_an_error(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match="file"):
        calibrate(loaded(tiny("llama")), SETTINGS, out=tmp_path / "file" / "p.json")


def test_a_quick_look_does_not_take_the_place_of_a_full_profile(
    tiny: Any, tmp_path: Path, uninterrupted: Profile
) -> None:
    out = tmp_path / "p.json"
    settings = {**uninterrupted.provenance["settings"], "quick": False}
    full = replace(uninterrupted, provenance={**uninterrupted.provenance, "settings": settings})
    profile_home.write_profile(full, out)
    found = calibrate(loaded(tiny("llama")), replace(SETTINGS, documents=1), out=out)
    assert found.kept
    assert read_profile(out) == full


# -- which profile belongs to a model -------------------------------------------------------------------------------------


def test_figures_of_other_weights_devices_or_versions_are_not_used(
    tiny: Any, uninterrupted: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = tiny("llama"), tiny("qwen3")
    path = profile_home.profile_path(profile_home.profile_key(model))
    profile_home.write_profile(uninterrupted, path)
    assert find_profile(model) == uninterrupted
    assert find_profile(other) is None
    # The file's name is not what counts.
    moved = profile_home.profile_path(profile_home.profile_key(other))
    path.rename(moved)
    assert find_profile(other) is None
    moved.rename(path)
    for what in ("mlx_version", "device_kind", "_device_name"):
        with monkeypatch.context() as changed:
            changed.setattr(profile_home, what, lambda: "other")
            assert find_profile(model) is None
    assert find_profile(model) == uninterrupted


def test_without_figures_of_its_own_a_model_borrows_the_shipped_ones(tiny: Any) -> None:
    found = profile_for(tiny("llama"))
    assert found.borrowed
    assert "SmolLM2" in found.name


def test_the_shipped_figures_are_the_own_ones_of_the_model_they_were_made_on(
    tiny: Any, uninterrupted: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_home, "default_profile", lambda: replace(uninterrupted, borrowed=True))
    assert not profile_for(tiny("llama")).borrowed
    assert profile_for(tiny("qwen3")).borrowed


def test_a_damaged_profile_is_said_and_not_used(tiny: Any, uninterrupted: Profile) -> None:
    model = tiny("llama")
    path = profile_home.profile_path(profile_home.profile_key(model))
    profile_home.write_profile(uninterrupted, path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ProfileFormatError, match="not JSON"):
        find_profile(model)
    with pytest.warns(LuminaWarning, match="calibrate again"):
        assert profile_for(model).borrowed


def test_a_profile_that_cannot_be_put_in_place_leaves_what_was_there(
    uninterrupted: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.json"
    profile_home.write_profile(uninterrupted, path)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(profile_home.os, "replace", full)
        with pytest.raises(OSError, match="no space"):
            profile_home.write_profile(replace(uninterrupted, name="new"), path)
    assert read_profile(path) == uninterrupted
    assert list(tmp_path.iterdir()) == [path]


# -- models of other makes ------------------------------------------------------------------------------------------------


def test_a_model_without_rows_has_nothing_to_calibrate(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="nothing to calibrate"):
        calibrate(loaded(tiny("mamba")), SETTINGS, out=tmp_path / "p.json")


def test_where_packed_rows_cannot_be_read_fetched_ones_are_measured(tiny: Any, tmp_path: Path) -> None:
    model = tiny("gemma2")
    settings = replace(FULL, documents=1, checked=1, timed_rows=(64,), timed_steps=2, shares=(0.5,))
    settings = replace(settings, plan=replace(QUICK.plan, scored=16), layer_groups=2)
    profile = calibrate(loaded(model), settings, out=tmp_path / "p.json").profile
    measured = {c.action.codec for c in profile.codecs}
    assert "affine" not in measured
    assert "affine_fetch" in measured
    refused = [a for a in profile.provenance["unmeasured"] if a.startswith("quant:affine,")]
    assert len(refused) == 6


def test_what_reaches_the_attention_is_measured_and_leaves_no_hook_behind(tiny: Any, tmp_path: Path) -> None:
    gc.collect()  # caches of other tests may still hold a hook
    model = tiny("llama")
    call = mlx_lm.models.llama.scaled_dot_product_attention
    settings = replace(FULL, documents=1, checked=0, timed_rows=(64,), timed_steps=2, shares=(0.5,))
    settings = replace(settings, plan=replace(QUICK.plan, scored=16))
    profile = calibrate(loaded(model), settings, out=tmp_path / "p.json").profile
    kl = {e.scorer: e.at(0.5)[0] for e in profile.evictors}
    assert set(kl) == {*SCORERS, *OBSERVED}
    timed = {c.action.codec for c in profile.codecs if c.times}
    assert timed == set(CODECS), profile.provenance["untimed"]
    # On a model of random weights nothing foretells attention better than attention itself.
    assert max(kl["h2o"], kl["snapkv"]) < min(kl["random"], kl["keydiff"])
    gc.collect()
    own = mlx_lm.models.base.scaled_dot_product_attention
    assert mlx_lm.models.llama.scaled_dot_product_attention in (call, own)


# -- the grid -------------------------------------------------------------------------------------------------------------

SMOL = ModelShape(((64, 64),), tuple(range(30)), 30)


def test_the_full_grid_holds_every_built_codec_and_scorer() -> None:
    grid = grid_of(SMOL, FULL)
    assert {c.codec for c in grid.codecs} == set(CODECS)
    assert {e.scorer for e in grid.evictions} == {*SCORERS, *BANKED, *OBSERVED}
    assert set(grid.observed) == set(OBSERVED)
    assert {e.ratio for e in grid.evictions} == set(FULL.shares)
    assert {(e.sinks, e.recent) for e in grid.evictions} == {(4, 32)}
    assert len(grid.composites) == 6
    assert len(grid.by_layer) == 30
    assert len(grid.mixed) == 2
    every = [*grid.core, *grid.checks]
    assert all(parse_action(str(action)) == action for action in every)


def test_the_parts_of_every_composite_are_measured_by_themselves() -> None:
    grid = grid_of(SMOL, FULL)
    for composite in grid.composites:
        assert isinstance(composite, Composite)
        assert set(composite.parts) <= set(grid.core)
    for plan in grid.mixed:
        assert {action for _, action in plan.assignments} <= set(grid.codecs)
        assert all(plan.for_layer(i) in grid.codecs for i in range(30))


def test_groups_fit_the_heads_and_codecs_without_one_are_left_out() -> None:
    narrow = grid_of(ModelShape(((96, 96),), (0, 1), 2), FULL)
    assert {c.group_size for c in narrow.codecs if c.codec == "affine"} == {32}
    odd = grid_of(ModelShape(((80, 80),), (0, 1), 2), FULL)
    assert {c.codec for c in odd.codecs} <= {"kivi", "nvfp4"}


def test_neighbouring_layers_are_grouped_when_all_are_too_many() -> None:
    grid = grid_of(ModelShape(((64, 64),), (0, 2, 3, 5, 6), 7), replace(FULL, layer_groups=2))
    assert grid.groups == ((0, 2), (3, 5, 6))
    assert [plan.assignments[0][0] for plan in grid.by_layer] == [(0, 2), (3, 6)]


def test_depths_fill_the_context_evenly() -> None:
    plan = replace(FULL.plan, depths=(0.0, 0.0))
    settings = replace(FULL, plan=plan)
    found = [plan_of(settings, i).depths for i in range(4)]
    assert found == [
        pytest.approx((0.225, 0.675)),
        pytest.approx((0.1125, 0.5625)),
        pytest.approx((0.3375, 0.7875)),
        pytest.approx((0.05625, 0.50625)),
    ]


# -- known answers --------------------------------------------------------------------------------------------------------

Q4 = Quantize("affine", 4, 4, 64)
H3 = Quantize("hadamard", 3, 3, 64)
HALF = Evict("keydiff", ratio=0.5, recent=32)


def quality_record(document: str, action: str, going: float, copying: float) -> dict[str, Any]:
    return {
        "kind": "subject", "document": document, "context": 1024, "action": action, "state": "real",
        "T1": {"kl_mean": going, "kl_p95": 3 * going}, "T2": {"kl_mean": copying}, "take_seconds": 2.0,
    }  # fmt: skip


def document_record(document: str, accuracy: float) -> dict[str, Any]:
    return {
        "kind": "document", "document": document, "context": 1024, "dense": {"live": 1000},
        "T1": {"nll": 2.0, "nll_short_context": 3.0},
        "T2": {"accuracy": accuracy, "accuracy_no_context": 0.1},
    }  # fmt: skip


@pytest.fixture
def grid() -> Grid:
    by_layer = tuple(parse_action(f"{i}-{i}:{H3}") for i in range(2))
    mixed = (parse_action(f"0-0:{H3};1-1:{Q4}"),)
    return Grid((Q4, H3), (HALF,), (Composite((HALF, Q4)),), by_layer, ((0,), (1,)), mixed)  # type: ignore[arg-type]


def known(grid: Grid) -> Iterator[dict[str, Any]]:
    """Two documents of two domains; ``b`` is of no use for copying."""
    layers, mixed, composite = grid.by_layer, grid.mixed[0], grid.composites[0]
    for name, accuracy in (("a", 1.0), ("b", 0.2)):
        yield document_record(name, accuracy)
    for action, going, copying in (
        (Q4, 0.02, 0.06),
        (H3, 0.04, 0.10),
        (HALF, 0.10, 0.90),
        (layers[0], 0.03, 0.09),
        (layers[1], 0.01, 0.03),
        (mixed, 0.03, 0.09),
        (composite, 0.10, 0.86),
    ):
        yield quality_record("a", str(action), going, copying)
    yield quality_record("b", str(Q4), 0.04, 9.0)
    yield quality_record("b", str(H3), 0.08, 9.0)
    yield quality_record("b", str(HALF), 0.30, 9.0)


def assembled(grid: Grid, records: list[dict[str, Any]], steps: list[dict[str, Any]]) -> Profile:
    measured = Measured({"a": "prose", "b": "code"}, records, steps)
    return assemble(measured, grid, ModelShape(((64, 64),), (0, 1), 2), FULL, {"name": "known"})


def test_figures_are_means_over_documents_that_copy_where_copying_counts(grid: Grid) -> None:
    profile = assembled(grid, list(known(grid)), [])
    by_action = {c.action: c for c in profile.codecs}
    assert by_action[Q4].kl == pytest.approx((0.03 + 0.06) / 2)
    assert by_action[Q4].p95 == pytest.approx(0.09)
    assert by_action[H3].kl == pytest.approx((0.06 + 0.10) / 2)
    assert profile.evictors[0].points == ((0.5, pytest.approx((0.2 + 0.9) / 2), pytest.approx(0.6)),)
    assert profile.provenance["documents"] == 2


def test_sensitivity_is_each_layers_share_of_the_damage(grid: Grid) -> None:
    # (0.03 + 0.09)/2 and (0.01 + 0.03)/2, over their mean
    assert assembled(grid, list(known(grid)), []).sensitivity == pytest.approx((1.5, 0.5))


def test_assumptions_are_held_against_measurements_of_the_same_documents(grid: Grid) -> None:
    found = assembled(grid, list(known(grid)), []).provenance["assumptions"]
    (composite,) = found["damages_add_up"]
    assert composite["predicted"] == pytest.approx(0.50 + 0.04)
    assert composite["measured"] == pytest.approx(0.48)
    assert composite["relative_error"] == pytest.approx(0.54 / 0.48 - 1, rel=1e-3)
    (plan,) = found["layers_add_up"]
    assert plan["predicted"] == pytest.approx((1.5 * 0.07 + 0.5 * 0.04) / 2)
    assert plan["all_alike"] == pytest.approx((0.07 + 0.04) / 2)
    assert plan["measured"] == pytest.approx(0.06)
    assert found["sum_of_layers"]["predicted"] == pytest.approx(0.06 + 0.02)
    assert found["sum_of_layers"]["measured"] == pytest.approx(0.07)


def test_a_layer_that_was_not_measured_leaves_all_alike(grid: Grid) -> None:
    records = [r for r in known(grid) if r.get("action") != str(grid.by_layer[1])]
    assert assembled(grid, records, []).sensitivity == ()


def test_own_work_is_seconds_over_the_bytes_that_were_there(grid: Grid) -> None:
    step = {
        "kind": "step",
        "document": "times",
        "context": 1024,
        "state": "real",
        "low": 1.0,
        "high": 1.3,
        "steps": 9,
    }
    steps = [
        {**step, "action": str(Q4), "ratio": 1.2, "dense_seconds": 0.5, "dense_live": 100, "take_seconds": 9.0},
        {**step, "action": "offload:layers=0-1", "ratio": 1.5, "dense_seconds": 0.5, "dense_live": 100, "take_seconds": 4.0},
    ]  # fmt: skip
    profile = assembled(grid, list(known(grid)), steps)
    assert profile.seconds_per_byte == {
        "quant": pytest.approx(0.002),
        "evict": pytest.approx(0.002),
        "offload": pytest.approx(0.04),
        "offload_step": pytest.approx(0.0025),
    }
    assert profile.step_seconds == 0.5
    assert profile.codecs[0].times == ((1024, 1.2),)


def test_where_the_model_cannot_copy_continuation_counts_alone(grid: Grid) -> None:
    records = [
        {**r, "T2": {**r["T2"], "accuracy": 0.1}} if r["kind"] == "document" else r for r in known(grid)
    ]
    profile = assembled(grid, records, [])
    assert profile.codecs[0].kl == pytest.approx(0.03)
    assert "cannot copy" in profile.provenance["kl_is"]


def test_refusals_and_faults_have_a_reason_and_no_figure(grid: Grid) -> None:
    records = [r for r in known(grid) if r.get("action") not in (str(H3), str(HALF))]
    base = {"kind": "subject", "document": "a", "context": 1024}
    records += [
        {**base, "action": str(H3), "state": "backend_infeasible", "reasons": [{"text": "no room"}]},
        {**base, "action": str(HALF), "state": "failed", "error": "EngagementError: nothing happened"},
    ]
    profile = assembled(grid, records, [])
    assert H3 not in [c.action for c in profile.codecs]
    assert profile.evictors == ()
    assert profile.provenance["unmeasured"] == {
        str(H3): "no room",
        str(HALF): "failed: EngagementError: nothing happened",
    }


def test_a_number_of_documents_that_there_are_not_is_refused() -> None:
    options: dict[str, Any] = {"model": None, "texts": [], "quick": False, "minutes": None, "out": None}
    for documents in (0, 31):
        with pytest.raises(CalibrationError, match=f"--documents {documents}"):
            commands.calibrate_command(**options, documents=documents, as_json=False)
