"""The feasibility database: many machines' findings in one file, each execution state for itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from lumina_cache.backend.architecture_table import Architecture, ArchitectureTable, Entry
from lumina_cache.database import Database, Selection, default_path
from lumina_cache.errors import AnalysisUnavailableError, DatabaseError, MixedExecutionStateError

duckdb = pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TABLE = ArchitectureTable(
    device="metal",
    system="Darwin arm64",
    mlx="0.32.4",
    mlx_lm="0.32.2",
    lumina_cache="0.1",
    action_space="3",
    date="2026-01-02",
    machine="Apple M3 Max",
    architectures=(
        Architecture(
            "llama",
            "K K",
            MappingProxyType({"KEYS": None, "QUERIES": "keys and values only"}),
            (
                Entry("keep", "works", ()),
                Entry("quant:affine,bits=4,group=32", "works", ()),
                Entry("quant:affine,bits=3,group=32", "fails", ("wrong logits",)),
                Entry("evict:snapkv@0.50", "refused", ("no code", "QUERIES: keys and values only")),
            ),
        ),
        Architecture("odd", None, MappingProxyType({}), (), "no tiny model"),
    ),
)

PROFILE: dict[str, Any] = {
    "schema": 1,
    "name": "Some-Llama-1B",
    "codecs": [{"action": "quant:affine,bits=4,group=64", "kl": 0.1, "p95": 0.2, "times": [[512, 1.5]]}],
    "evictors": [],
    "sensitivity": [],
    "seconds_per_byte": {},
    "step_seconds": None,
    "provenance": {
        "key": {
            "fingerprint": "aa" * 8,
            "device": "metal",
            "device_name": "Apple M1",
            "mlx": "0.31.0",
            "mlx_lm": "0.31.1",
        },
        "points": {"quant:affine,bits=4,group=64": {"continuation": 0.08, "p95": 0.2, "documents": 3}},
        "settings": {"plan": {"contexts": [[1024, 3]], "scored": 32, "seed": 0}},
    },
}


TEXTS = (
    *("id", "model", "document", "domain", "phase", "action", "role", "source", "run", "made", "model_name"),
    *("text_sha256", "tokens_sha256", "device", "machine", "mlx", "mlx_lm", "lumina_cache", "git_commit"),
    "log_line",
)
NUMBERS = (
    *("kl_p95", "kl_half0", "kl_half1", "p95_half0", "p95_half1", "top1", "nll_change", "share16"),
    *("share16_allocated", "time_ratio", "time_low", "time_high", "take_seconds"),
)


def written(folder: Path, name: str, record: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(record), "utf-8")
    return path


def part(
    folder: Path, state: str, *, said: str | None = None, kl: float = 0.25, action: str = "quant:new"
) -> Path:
    """A part file of a store as the contract has it, of one observation."""
    row: dict[str, Any] = {name: name for name in TEXTS} | {
        "schema": 1,
        "id": f"id of {action}",
        "action": action,
        "context": 1024,
        "seed": 0,
        "horizon": 128,
        "rung": 1,
        "requires": ["DENSE_REENCODE"],
        "machine": "Apple M3",
        "source": "calibrate",
        "mlx_lm": "0.32.2",
    }
    if state == "backend_infeasible":
        row |= {"backend_rung": 0, "code": "c", "capability": "QUERIES", "text": "why", "reasons": "[]"}
    else:
        row |= dict.fromkeys(NUMBERS, 0.5)
        row |= {"kl_mean": kl, "kl_spans": [kl], "live": 1, "allocated": 2, "predicted_live": 1}
    table = pa.Table.from_pylist([row]).replace_schema_metadata(
        {"lumina_cache.kind": "observations", "lumina_cache.execution_state": said or state}
    )
    path = folder / state / f"part-{action.replace(':', '-')}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


@pytest.fixture
def files(tmp_path) -> list[Path]:
    store = tmp_path / "campaign"
    for state in ("real", "simulated", "backend_infeasible"):
        part(store, state)
    return [
        written(tmp_path, "table.json", TABLE.to_record()),
        written(tmp_path, "profile.json", PROFILE),
        Path(__file__).parents[1] / "docs" / "data" / "eval-smollm2-1k.json",
        store,
    ]


@pytest.fixture
def database(tmp_path, files):
    with Database(tmp_path / "db.duckdb", write=True) as made:
        for file in files:
            assert all(one.problem is None for one in made.add(file)), made.add(file)
        yield made


def test_adding_twice_adds_nothing(database, files):
    before = database.counts()
    again = [one for file in files for one in database.add(file)]
    assert database.counts() == before
    assert sum(one.new for one in again) == 0
    assert sum(one.known for one in again) > 0
    assert before["real"] > 0
    assert before["simulated"] == 1


def test_a_copy_of_a_file_in_another_layout_adds_a_source_and_no_row(database, tmp_path):
    copy = tmp_path / "again.json"
    copy.write_text(json.dumps(TABLE.to_record(), indent=3), "utf-8")
    before = database.counts()
    (one,) = database.add(copy)
    after = database.counts()
    assert one.new == 0
    assert after.pop("sources") == before.pop("sources") + 1
    assert after == before


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "holds no JSON object"),
        (b'{"a": 1}', "is neither the output of probe"),
        (b"\xff\xfe", "is not JSON"),
        (json.dumps({**TABLE.to_record(), "format": 99}).encode(), "format 99"),
        (json.dumps({**PROFILE, "codecs": [{"action": "quant:affine,bits=4"}]}).encode(), "cannot be read"),
        (json.dumps({**PROFILE, "schema": 9}).encode(), "schema 9"),
        (b'{"kind": "lumina-cache eval"}', "'header' is missing"),
    ],
)
def test_a_bad_file_is_named_and_nothing_of_it_is_taken(database, tmp_path, content, says):
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    before = database.counts()
    (one,) = database.add(bad)
    assert one.path == str(bad)
    assert says in (one.problem or "")
    assert database.counts() == before


def test_a_file_that_is_good_at_its_beginning_only_leaves_nothing_behind(database, tmp_path):
    record = json.loads((Path(__file__).parents[1] / "docs/data/eval-smollm2-1k.json").read_text("utf-8"))
    record["header"]["mlx"] = "9.9"
    record["records"][-1]["bytes"]["live"] = "many"
    before = database.counts()
    (one,) = database.add(written(tmp_path, "half.json", record))
    assert one.problem is not None
    assert database.counts() == before


def test_part_files_are_refused_in_the_wrong_folder_or_when_cut_short_or_foreign(database, tmp_path):
    store = tmp_path / "odd"
    wrong = part(store, "real", said="simulated", action="quant:wrong")
    cut = part(store, "simulated", action="quant:cut")
    cut.write_bytes(cut.read_bytes()[:-40])
    foreign = store / "backend_infeasible" / "part-1.parquet"
    foreign.parent.mkdir()
    pq.write_table(pa.table({"id": ["x"]}), foreign)
    before = database.counts()
    problems = {one.path: one.problem for one in database.add(store)}
    assert "holds simulated observations in the folder of real ones" in problems[str(wrong)]
    assert "cannot be read" in problems[str(cut)]
    assert "something else than observations" in problems[str(foreign)]
    assert database.counts() == before


def test_a_store_of_a_campaign_is_taken_column_by_column(tmp_path):
    pytest.importorskip("ibis")
    from lumina_cache.gap.records import BackendInfeasible, Provenance, State, What
    from lumina_cache.gap.store import Store
    from lumina_cache.gap.synthetic import Setting, action_space, observations, write

    store, setting = Store(tmp_path / "store"), Setting(documents=2)
    space = action_space(30)
    write(store, space, setting, "simulated", parts=2)
    origin = Provenance("campaign", "r", "2026", "m", "", "", "cpu", "chip", "0", "0", "0")
    reason = {"code": "missing_capability", "text": "why", "capability": "QUERIES"}
    state = State("m", "d", "prose", 8, "decode", 0, 0)
    store.append([BackendInfeasible(state, What("quant:x", 2, ("QUERIES",)), origin, (reason,))])
    with Database(tmp_path / "db.duckdb", write=True) as database:
        added = database.add(store.path)
        assert [one.problem for one in added] == [None] * 3
        assert len(database.sources()) == 3
        rows = {r["id"]: r for r in database.observations("simulated").to_pylist()}
        wanted = [one.to_row() for one in observations(space, setting)]
        assert len(rows) == len(wanted)
        for row in wanted:
            kept = rows[row["id"]]
            differing = {k for k in row if k in kept and k not in ("source", "kind") and kept[k] != row[k]}
            assert not differing
        (refusal,) = database.observations("backend_infeasible").to_pylist()
        assert (refusal["capability"], refusal["text"], refusal["requires"]) == (
            "QUERIES",
            "why",
            ["QUERIES"],
        )
        write(store, space, Setting(documents=2, domains=("other",)), "simulated")
        grown = database.add(store.path)
        assert (sum(a.new for a in grown), sum(a.known for a in grown)) == (60, len(wanted) + 1)


def test_a_row_that_contradicts_one_that_is_there_is_counted_and_not_taken(database, tmp_path):
    part(tmp_path / "other", "simulated", kl=0.75)
    (one,) = database.add(tmp_path / "other")
    assert (one.new, one.known, one.conflicting) == (0, 1, 1)
    assert database.observations("simulated")["kl_mean"].to_pylist() == [0.25]


def test_states_are_asked_for_one_at_a_time_and_never_share_a_table(database):
    for state in ("real", "simulated", "backend_infeasible"):
        table = database.observations(state)
        assert set(table["state"].to_pylist()) == {state}
    assert "kl_mean" not in database.observations("backend_infeasible").column_names
    with pytest.raises(MixedExecutionStateError):
        database.observations("real", "simulated")
    with pytest.raises(DatabaseError, match="no execution state"):
        database.observations("sources")


def test_a_table_takes_no_row_of_another_state(database):
    with pytest.raises(duckdb.ConstraintException):
        database._connection.execute(
            "INSERT INTO real (id, state, action) VALUES ('x', 'simulated', 'keep')"
        ).fetchall()


def test_a_query_says_what_runs_on_a_chip_with_versions_and_a_model(database):
    found = {
        a.action: a
        for a in database.query(Selection(chip="m3", mlx_lm="0.32", model="llama", action="*bits=*"))
    }
    assert {k: a.verdict for k, a in found.items()} == {
        "quant:affine,bits=4,group=32": "runs",
        "quant:affine,bits=3,group=32": "fails",
    }
    assert found["quant:affine,bits=3,group=32"].real.reasons == ("wrong logits",)
    (refused,) = database.query(Selection(model="llama", action="evict:*", chip="M3"))
    assert refused.verdict == "refused"
    assert refused.real is None
    assert refused.refused.reasons == ("no code; QUERIES: keys and values only",)
    assert database.observations("backend_infeasible").filter(pa.compute.field("model_type") == "llama")[
        "capability"
    ].to_pylist() == ["QUERIES"]


@pytest.mark.parametrize(
    ("selection", "machines"),
    [
        (Selection(mlx_lm="0.31"), {"Apple M1"}),
        (Selection(mlx_lm="0.3"), set()),
        (Selection(model="aa" * 8), {"Apple M1"}),
        (Selection(chip="M1", state="backend_infeasible"), set()),
        (Selection(device="METAL", kind="architectures"), {"Apple M3 Max"}),
    ],
)
def test_selections(database, selection, machines):
    assert {a.machine for a in database.query(selection)} == machines


def test_figures_of_the_two_scored_states_come_apart_and_unknown_ones_are_none(database):
    (one,) = database.query(Selection(action="quant:new"))
    assert one.verdict == "runs, sometimes refused"
    assert database.query(Selection(action="quant:new", kind="profile")) == [one]
    assert type(one.real) is not type(one.simulated)
    assert one.simulated.kl_mean == 0.25
    (known,) = database.query(Selection(chip="M1", state="real"))
    assert (known.real.documents, known.real.kl_mean, known.real.share16) == (3, 0.08, None)
    assert known.real.time_ratio == pytest.approx(1.5)
    assert known.simulated is None


def test_only_simulated_is_no_claim_that_it_runs(tmp_path):
    part(tmp_path / "store", "simulated")
    with Database(tmp_path / "db.duckdb", write=True) as database:
        database.add(tmp_path / "store")
        assert [a.verdict for a in database.query(Selection())] == ["not tried"]


def test_answers_without_a_chip_are_counted_when_a_chip_is_asked_for(database, tmp_path):
    old = {k: v for k, v in TABLE.to_record().items() if k != "machine"}
    database.add(written(tmp_path, "old.json", old))
    assert database.of_unknown_chip(Selection(chip="M3", model="llama")) == 4
    assert database.of_unknown_chip(Selection(model="llama")) == 0


def test_kl_of_an_evaluation_is_the_mean_over_its_documents(database):
    record = json.loads((Path(__file__).parents[1] / "docs/data/eval-smollm2-1k.json").read_text("utf-8"))
    action = "quant:hadamard,bits=4,group=64"
    of = [r["T1"]["kl_mean"] for r in record["records"] if r.get("action") == action]
    (one,) = database.query(Selection(kind="eval", action=action))
    assert one.real.documents == len(of)
    assert one.real.kl_mean == pytest.approx(sum(of) / len(of))


def test_merging_is_idempotent_and_takes_sources_along(database, tmp_path, files):
    with Database(tmp_path / "b.duckdb", write=True) as other:
        first = other.merge(database.path) if database.close() is None else None
        assert first is not None
        assert first.problem is None
        counts = other.counts()
        again = other.merge(database.path)
        assert (again.new, again.conflicting) == (0, 0)
        assert other.counts() == counts
        assert {s["name"] for s in other.sources()} >= {"table.json", "profile.json"}
        assert len({s["id"] for s in other.sources()}) == counts["sources"]
        assert sum(one.new for file in files for one in other.add(file)) == 0


def test_merging_something_else_changes_nothing(database, tmp_path):
    foreign = tmp_path / "foreign.duckdb"
    duckdb.connect(str(foreign)).close()
    text = written(tmp_path, "text.duckdb", {})
    before = database.counts()
    assert "not a feasibility database" in database.merge(foreign).problem
    assert "is not a database" in database.merge(text).problem
    assert "no such file" in database.merge(tmp_path / "none").problem
    assert "this very database" in database.merge(database.path).problem
    assert database.counts() == before


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
def test_everything_can_be_written_out_with_a_file_per_state(database, tmp_path, format):
    paths = database.export(tmp_path / "out", format)
    counts = database.counts()
    assert {p.stem for p in paths} == set(counts)
    for path in paths:
        read = {"parquet": "read_parquet", "csv": "read_csv", "json": "read_json"}[format]
        if counts[path.stem]:
            rows = duckdb.sql(f"SELECT count(*) FROM {read}('{path}')").fetchall()
            assert rows == [(counts[path.stem],)]
    with pytest.raises(DatabaseError, match="there are parquet, csv, json"):
        database.export(tmp_path, "xlsx")


def test_a_database_of_another_schema_or_kind_is_refused(database, tmp_path):
    database._connection.execute("UPDATE lumina_cache_schema SET version = 99").fetchall()
    database.close()
    with pytest.raises(DatabaseError, match="schema 99"):
        Database(database.path)
    with pytest.raises(DatabaseError, match="make one with"):
        Database(tmp_path / "none.duckdb")
    with pytest.raises(DatabaseError, match="cannot open"):
        Database(written(tmp_path, "text.duckdb", {}), write=True)


def test_without_duckdb_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(AnalysisUnavailableError, match=r"lumina-cache\[analysis\]"):
        Database(tmp_path / "db.duckdb", write=True)


def test_the_file_lies_in_the_data_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_path() == tmp_path / "lumina_cache" / "feasibility.duckdb"


def test_rows_tell_their_source(database, files):
    sources = {s["id"]: s for s in database.sources()}
    for state in ("real", "backend_infeasible", "simulated"):
        assert set(database.observations(state)["source"].to_pylist()) <= set(sources)
    table = next(s for s in sources.values() if s["name"] == "table.json")
    assert (table["machine"], table["mlx"], table["made"]) == ("Apple M3 Max", "0.32.4", "2026-01-02")
    assert table["nbytes"] == files[0].stat().st_size


def test_two_machines_with_the_same_findings_are_two_answers(database, tmp_path):
    other = replace(TABLE, machine="Apple M4")
    database.add(written(tmp_path, "m4.json", other.to_record()))
    found = database.query(Selection(model="llama", action="keep", kind="architectures"))
    assert [a.machine for a in found] == ["Apple M3 Max", "Apple M4"]


def cli(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lumina_cache.cli", "db", *map(str, args)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "140"},
    )


def test_the_command_adds_asks_merges_and_exports(tmp_path):
    table, bad = written(tmp_path, "t.json", TABLE.to_record()), written(tmp_path, "bad.json", {})
    path = tmp_path / "db.duckdb"
    done = cli("add", table, bad, "--db", path)
    assert done.returncode == 1
    assert "1 of 2 files taken" in done.stdout
    assert f"{bad}: is neither" in done.stdout
    asked = cli("query", "--chip", "M3", "--model", "llama", "--action", "quant:*", "--db", path)
    assert asked.returncode == 0, asked.stderr
    assert "chip: Apple M3 Max" in asked.stdout
    assert "wrong logits" in asked.stdout
    found = json.loads(cli("query", "--state", "backend_infeasible", "--db", path, "--json").stdout)
    assert [(a["verdict"], a["real"], a["refused"]["refusals"]) for a in found] == [("refused", None, 1)]
    other = tmp_path / "other.duckdb"
    assert cli("merge", path, "--db", other).returncode == 0
    assert cli("merge", bad, "--db", other).returncode == 1
    assert cli("export", tmp_path / "out", "--format", "csv", "--db", other).returncode == 0
    assert (tmp_path / "out" / "real.csv").read_text("utf-8").count("\n") == 4
    nothing = cli("query", "--db", tmp_path / "none.duckdb")
    assert nothing.returncode == 2
    assert "make one with" in nothing.stderr
    assert "Examples:" in cli("query", "--help").stdout
