"""Campaigns: a plan that is read strictly, a store that holds everything once, and a run that survives being killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from test_evaluate import Words

from lumina_cache.actions import parse_action
from lumina_cache.backend.capabilities import Rung
from lumina_cache.errors import CampaignError
from lumina_cache.fingerprint import fingerprint
from lumina_cache.gap.records import BackendInfeasible, Real, Simulated
from lumina_cache.gap.store import Store
from lumina_cache.lab.campaign import CampaignPlan, campaign, needs, parse_plan, read_plan
from lumina_cache.lab.campaign.run import units_of
from lumina_cache.lab.campaign.unit import in_order
from lumina_cache.lab.models import LoadedModel

ACTIONS = [
    "mlx-lm:kv_bits=4,group=32",
    "mlx-lm:max_kv_size=50%",
    "evict:sinks_window@0.50",
    "quant:hadamard,bits=4,group=32",
    "evict:snapkv@0.50",
    "evict:random@0.50,seed=1",
    "evict:dms@0.50",
]
SIMULATED = ["evict:sinks_window@0.50", "evict:adakv@0.50", "oracle:future@0.50", "mlx-lm:max_kv_size=50%"]


def table(**changes: Any) -> dict[str, Any]:
    """A plan as TOML has it, for a tiny model and two short texts."""
    found: dict[str, Any] = {
        "name": "a-test",
        "models": ["tiny"],
        "contexts": [64],
        "documents": 2,
        "scored": 32,
        "block": 8,
        "chunk": 32,
        "warm_up": 1,
        "grid": [
            {"executions": ["real"], "actions": ACTIONS},
            {"executions": ["simulated"], "actions": SIMULATED},
        ],
    }
    return {**found, **changes}


@pytest.fixture
def loaded(tiny: Any) -> LoadedModel:
    return model_of(tiny("llama"))


def model_of(model: Any) -> LoadedModel:
    return LoadedModel(model, Words(), "tiny", fingerprint(model), mx.float32, "a test")


@pytest.fixture
def plan(tmp_path: Path) -> CampaignPlan:
    return plan_in(tmp_path)


def plan_in(folder: Path, **changes: Any) -> CampaignPlan:
    return replace(parse_plan(table(**changes)), texts=tuple(map(str, texts_in(folder))))


def texts_in(folder: Path) -> list[Path]:
    paths = []
    for i in range(2):
        paths.append(folder / f"text{i}.txt")
        paths[-1].write_text(" ".join(f"w{(k * k + 7 * i) % 501}" for k in range(130)), "utf-8")
    return paths


def everything(out: Path) -> list[Any]:
    store = Store(out)
    return [o for state in ("real", "simulated", "backend_infeasible") for o in store.observations(state)]


def figures(out: Path) -> dict[tuple[str, str, str, int | None], Any]:
    """What was found of each action, without what no two runs have in common."""
    found: dict[tuple[str, str, str, int | None], Any] = {}
    for one in everything(out):
        row = one.to_row()
        for name in ("made", "run", "take_seconds", "time_ratio", "time_low", "time_high"):
            row.pop(name, None)
        key = (one.execution_state, one.state.document, one.what.action, row.get("backend_rung"))
        assert key not in found, f"{key} is there twice"
        found[key] = row
    return found


# -- what a store holds -------------------------------------------------------------------------------------------------


def test_every_action_leaves_an_observation_of_the_execution_that_it_had(
    loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path
) -> None:
    outcome = campaign(plan, [loaded], tmp_path / "store")
    assert outcome.failures == []
    found = everything(tmp_path / "store")
    by_action = {(type(o), o.what.action): o.what for o in found if o.state.document == "text0.txt:0"}
    rungs = {action: what.rung for (kind, action), what in by_action.items() if kind is Real}
    assert rungs == {
        "mlx-lm:kv_bits=4,group=32": Rung.NATIVE,
        "mlx-lm:max_kv_size=50%": Rung.NATIVE,
        "evict:sinks_window@0.50": Rung.CACHE,
        "quant:hadamard,bits=4,group=32": Rung.CACHE,
        "evict:snapkv@0.50": Rung.HOOK,
        "evict:random@0.50,seed=1": Rung.CACHE,
    }
    assert {a for kind, a in by_action if kind is Simulated} == set(SIMULATED)
    roles = {what.action: what.role for what in by_action.values()}
    assert roles["evict:random@0.50,seed=1"] == "placebo"
    assert roles["oracle:future@0.50"] == "ceiling"
    assert roles["evict:snapkv@0.50"] == "candidate"
    assert outcome.observations == {"real": 12, "simulated": 8, "backend_infeasible": 2 * (4 + 1 + 3)}


def test_every_rung_that_refuses_says_why(loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path) -> None:
    campaign(plan, [loaded], tmp_path / "store")
    refused: dict[str, set[int]] = {}
    for one in Store(tmp_path / "store").observations("backend_infeasible"):
        assert isinstance(one, BackendInfeasible)
        assert all(r["code"] and r["text"] for r in one.reasons)
        refused.setdefault(one.what.action, set()).add(one.backend_rung)
    assert refused == {
        "evict:sinks_window@0.50": {0},
        "quant:hadamard,bits=4,group=32": {0},
        "evict:random@0.50,seed=1": {0},
        "evict:snapkv@0.50": {0, 1},
        "evict:dms@0.50": {0, 1, 2},
    }


def test_the_store_reads_without_a_problem(loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path) -> None:
    from lumina_cache.gap.store import open_tables

    campaign(plan, [loaded], tmp_path / "store")
    tables = open_tables(tmp_path / "store")
    assert tables.problems == ()
    assert (tables.real.rows, tables.simulated.rows, tables.refusals.rows) == (12, 8, 16)


def test_figures_are_those_of_an_evaluation_of_the_same_document(
    loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path
) -> None:
    from lumina_cache.lab.evaluate import evaluate, parse_subject, user_texts

    campaign(plan, [loaded], tmp_path / "store")
    action = "quant:hadamard,bits=4,group=32"
    result = evaluate(
        loaded, [parse_subject(action)], plan.bench_plan(64), texts=user_texts([Path(t) for t in plan.texts])
    )
    theirs = {r["document"]: r for r in result["records"] if r.get("action") == action}
    ours = [o for o in Store(tmp_path / "store").observations("real") if o.what.action == action]
    assert len(ours) == 2
    for one in ours:
        assert isinstance(one, Real)
        record = theirs[one.state.document]
        assert one.measured.quality.kl_mean == pytest.approx(record["T1"]["kl_mean"], rel=1e-9)
        assert one.measured.quality.kl_spans == pytest.approx(record["T1"]["kl_by_16"], rel=1e-9)
        assert one.measured.live == one.measured.predicted_live == record["bytes"]["live"]
        assert one.measured.share16 == record["bytes"]["share16"]
        assert one.state.horizon == 32
        assert one.state.context == 64


@pytest.mark.parametrize(
    "action", ["mlx-lm:max_kv_size=50%", "mlx-lm:max_kv_size=12", "mlx-lm:kv_bits=4,group=32"]
)
def test_mlx_lms_own_actions_are_simulated_as_they_run(
    loaded: LoadedModel, tmp_path: Path, action: str
) -> None:
    campaign(plan_in(tmp_path, grid=[{"actions": [action]}]), [loaded], tmp_path / "store")
    store = Store(tmp_path / "store")
    real, simulated = (
        {o.state.document: o for o in store.observations(state)} for state in ("real", "simulated")
    )
    assert len(real) == len(simulated) == 2
    for document, one in real.items():
        other = simulated[document]
        assert isinstance(one, Real)
        assert isinstance(other, Simulated)
        assert other.measured.quality.kl_spans == pytest.approx(
            one.measured.quality.kl_spans, rel=1e-3, abs=1e-6
        )
        assert other.measured.live == one.measured.live
        assert other.measured.share16 == one.measured.share16
        assert other.what == one.what
        assert other.what.rung == Rung.NATIVE


def test_what_a_backend_lacks_is_not_counted_twice() -> None:
    def of(text: str) -> tuple[str, ...]:
        return needs(parse_action(text).requires)

    assert of("evict:h2o_mean@0.50") == ("ATTENTION_WEIGHTS", "ROW_CHOICE", "ROW_GATHER")
    assert of("evict:snapkv@0.50") == ("QUERIES", "ROW_CHOICE", "ROW_GATHER")
    assert of("quant:affine,bits=4,group=64") == ()
    assert of("evict:sinks_window@0.50+quant:hadamard,bits=4") == ("DENSE_REENCODE", "ROW_GATHER")


def test_times_are_there_for_the_first_documents_only(loaded: LoadedModel, tmp_path: Path) -> None:
    grid = [{"executions": ["real"], "actions": ["evict:sinks_window@0.50"]}]
    plan = plan_in(tmp_path, grid=grid, timed_documents=1, timed_steps=4)
    campaign(plan, [loaded], tmp_path / "store")
    timed = {o.state.document: o.measured.time_ratio for o in Store(tmp_path / "store").observations("real")}
    assert timed["text0.txt:0"] > 0
    assert timed["text1.txt:0"] is None


def test_a_fault_is_told_and_the_rest_is_measured(
    loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lumina_cache.lab.evaluate.subjects import StockQuantized, Taken

    def idle(self: Any, full: Any, model: Any) -> Taken:
        from lumina_cache.lab.answer import detached_copy

        return Taken(detached_copy(full), 0.0, True)

    monkeypatch.setattr(StockQuantized, "take", idle)
    outcome = campaign(plan, [loaded], tmp_path / "store")
    assert {(f.action, f.document) for f in outcome.failures} == {
        ("mlx-lm:kv_bits=4,group=32", "text0.txt:0"),
        ("mlx-lm:kv_bits=4,group=32", "text1.txt:0"),
    }
    assert "EngagementError" in outcome.failures[0].error
    assert outcome.observations["real"] == 10


# -- order, and going on -----------------------------------------------------------------------------------------------


def test_the_order_is_drawn_for_each_document_and_is_the_same_again(
    loaded: LoadedModel, plan: CampaignPlan
) -> None:
    units, _, _ = units_of(plan, [loaded])
    orders = [in_order(u) for u in units]
    assert orders[0] != orders[1]
    assert orders == [in_order(u) for u in units]
    assert all(set(order) == set(plan.trials) for order in orders)
    assert in_order(replace(units[0], plan=replace(plan, order_seed=1))) != orders[0]


def test_a_finished_store_is_not_measured_again(
    loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path
) -> None:
    first = campaign(plan, [loaded], tmp_path / "store")
    files = sorted(p.name for p in (tmp_path / "store").rglob("*.parquet"))
    said: list[str] = []
    again = campaign(plan, [loaded], tmp_path / "store", on_progress=lambda p: said.append(p.what))
    assert said == ["done"]
    assert again.observations == first.observations
    assert sorted(p.name for p in (tmp_path / "store").rglob("*.parquet")) == files


def test_a_kill_between_two_files_of_a_document_leaves_nothing_twice(
    loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for out in (whole, cut):
        campaign(plan, [loaded], out)
    manifest = json.loads((cut / "manifest.json").read_text())
    manifest["units"].popitem()
    (cut / "manifest.json").write_text(json.dumps(manifest))
    last = sorted((cut / "simulated").iterdir())[-1]
    last.rename(last.with_name(last.name + ".unfinished"))
    campaign(plan, [loaded], cut)
    assert figures(cut) == figures(whole)
    assert not list(cut.rglob("*.unfinished"))


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from lumina_cache.lab.blas import preload_openblas
preload_openblas()
from pathlib import Path
from lumina_cache.lab.campaign import campaign
from lumina_cache.lab.tiny import build
from test_campaign import model_of, plan_in
units = 0
def progress(p):
    if p.done > {after}:
        os.kill(os.getpid(), signal.SIGKILL)
campaign(plan_in(Path({folder!r})), [model_of(build("llama"))], Path({out!r}), on_progress=progress)
"""


def test_after_a_kill_the_same_command_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """In processes of their own: the same seeds build the same tiny model."""

    def run(out: Path, after: float) -> int:
        code = KILLED.format(
            tests=str(Path(__file__).parent), after=after, folder=str(tmp_path), out=str(out)
        )
        root = str(Path(__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        return subprocess.run([sys.executable, "-c", code], env=env, timeout=300).returncode

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(whole, 1e9) == 0
    assert run(cut, 24.0) == -signal.SIGKILL
    done = json.loads((cut / "manifest.json").read_text())["units"]
    assert len(done) == 1
    assert run(cut, 1e9) == 0
    assert figures(cut) == figures(whole)


def test_ctrl_c_leaves_whole_documents(loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.what.startswith("text1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        campaign(plan, [loaded], tmp_path / "store", on_progress=stop)
    assert {o.state.document for o in everything(tmp_path / "store")} == {"text0.txt:0"}
    campaign(plan, [loaded], tmp_path / "store")
    assert {o.state.document for o in everything(tmp_path / "store")} == {"text0.txt:0", "text1.txt:0"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scored": 16}, r"plan\.scored: 32 there, 16 here"),
        ({"order_seed": 3}, r"plan\.order_seed: 0 there, 3 here"),
        (
            {"grid": [{"executions": ["real"], "actions": ["keep"]}]},
            r"plan\.trials: 11 entries there, 1 here",
        ),
    ],
)
def test_another_plan_is_not_mixed_in(
    loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    campaign(plan, [loaded], tmp_path / "store")
    with pytest.raises(CampaignError, match=says):
        campaign(plan_in(tmp_path, **changes), [loaded], tmp_path / "store")


def test_another_model_or_version_is_not_mixed_in(
    loaded: LoadedModel, tiny: Any, plan: CampaignPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign(plan, [loaded], tmp_path / "store")
    with pytest.raises(CampaignError, match=r"models\[0\]\.fingerprint"):
        campaign(plan, [model_of(tiny("qwen2"))], tmp_path / "store")
    monkeypatch.setattr("lumina_cache.lab.campaign.manifest.code_fingerprint", lambda: "other")
    with pytest.raises(CampaignError, match='code: .* there, "other" here'):
        campaign(plan, [loaded], tmp_path / "store")


def test_two_campaigns_do_not_fill_one_store_at_a_time(
    loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path
) -> None:
    from lumina_cache.lab.campaign.manifest import locked

    with locked(tmp_path / "store"):
        with pytest.raises(CampaignError, match="another campaign is filling"):
            campaign(plan, [loaded], tmp_path / "store")


def test_a_folder_of_something_else_is_left_alone(
    loaded: LoadedModel, plan: CampaignPlan, tmp_path: Path
) -> None:
    Store(tmp_path / "store").write_manifest({"kind": "something else"})
    with pytest.raises(CampaignError, match="not filled by a campaign"):
        campaign(plan, [loaded], tmp_path / "store")


# -- plans --------------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_of_the_lists_that_its_actions_name() -> None:
    grid = {
        "executions": ["real"],
        "actions": ["evict:{scorer}@{keep}+quant:hadamard,bits={bits}", "quant:hadamard,bits={bits}"],
        "scorer": ["keydiff", "lagkv"],
        "keep": [0.5, 0.25],
        "bits": [4],
    }
    found = [t.action for t in parse_plan(table(grid=[grid])).trials]
    assert found == [
        "evict:keydiff@0.50+quant:hadamard,bits=4,group=64",
        "evict:keydiff@0.25+quant:hadamard,bits=4,group=64",
        "evict:lagkv@0.50+quant:hadamard,bits=4,group=64",
        "evict:lagkv@0.25+quant:hadamard,bits=4,group=64",
        "quant:hadamard,bits=4,group=64",
    ]


def one_grid(**changes: Any) -> dict[str, Any]:
    return {"grid": [{"executions": ["real"], "actions": ["keep"], **changes}]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"contxts": [64]}, "there is no 'contxts'; did you mean 'contexts'"),
        ({"documents": "two"}, "documents = 'two': give a whole number"),
        ({"documents": 0}, "documents = 0: give at least 1"),
        ({"contexts": 64}, r"contexts = 64: give a list, such as \[64\]"),
        ({"contexts": [64, 64]}, "none of them twice"),
        ({"domains": ["verse"]}, "domains: there is no 'verse'; did you mean 'prose'"),
        ({"rungs": ["attic"]}, "'attic'"),
        ({"scored": 40}, "scored = 40: give a multiple of 16"),
        ({"idle_seconds": True}, "idle_seconds = True: give a number"),
        ({"grid": []}, r"no action: give at least one \[\[grid\]\]"),
        ({"grid": ["keep"]}, r"under \[\[grid\]\]"),
        (one_grid(actions=["evict:keydif@0.5"]), "did you mean 'keydiff'"),
        (one_grid(actions=["evict:keydiff@{keep}"]), "{keep}.*no list keep"),
        (one_grid(kep=[0.5]), "grid 1: there is no 'kep'"),
        (one_grid(executions=["imagined"]), "there is no 'imagined'; known: real, simulated"),
        (one_grid(role="hero"), "there is no 'hero'"),
        (one_grid(role="ceiling"), "is no ceiling"),
        (
            one_grid(actions=["evict:random@0.50"], role="candidate"),
            "is a placebo, so it cannot be a candidate",
        ),
        (one_grid(actions=["keep", 4]), "actions = 4: give text"),
        (one_grid(actions=["evict:{scorer"]), "cannot read 'evict:{scorer'"),
        (one_grid(executions=["simulated"], actions=["merge:minicache"]), "no forward for merge:minicache"),
        (one_grid(executions=["simulated"], actions=["mlx-turboquant:bits=4"]), "cannot be simulated"),
        (
            one_grid(executions=["simulated"], actions=["mlx-lm:max_kv_size=9,kv_bits=4"]),
            "cannot be simulated",
        ),
    ],
)
def test_a_plan_that_cannot_be_read_names_what_is_wrong(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CampaignError, match=says):
        parse_plan(table(**changes))


@pytest.mark.parametrize("missing", ["name", "models", "contexts", "documents"])
def test_a_plan_says_what_it_needs(missing: str) -> None:
    found = table()
    del found[missing]
    with pytest.raises(CampaignError, match=f"does not say {missing}"):
        parse_plan(found)


def test_a_file_that_is_no_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match=r"cannot read the plan .*nowhere\.toml"):
        read_plan(tmp_path / "nowhere.toml")
    (tmp_path / "plan.toml").write_text("name = ")
    with pytest.raises(CampaignError, match="is no TOML"):
        read_plan(tmp_path / "plan.toml")
