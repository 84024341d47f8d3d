"""What is added to a store is what is read; whatever else lies there is counted, named and left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("ibis")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

from lumina_cache.actions import parse_action  # noqa: E402
from lumina_cache.errors import AnalysisError, LogFormatError, MixedExecutionStateError  # noqa: E402
from lumina_cache.gap.records import (  # noqa: E402
    BackendInfeasible,
    Measured,
    Observation,
    Provenance,
    Real,
    Simulated,
    State,
    What,
    from_row,
    one_state,
    quality_of,
)
from lumina_cache.gap.store import (  # noqa: E402
    RealTable,
    RefusalTable,
    SimulatedTable,
    Store,
    of_one_state,
    open_tables,
    schema_of,
)
from lumina_cache.policy import Inputs, Weights, score  # noqa: E402

STATE = State("m0", "doc", "prose", 1024, "decode", 0, 128)
ORIGIN = Provenance(
    "campaign", "r1", "2026-01-01T00:00:00Z", "tiny", "t" * 64, "k" * 64, "cpu", "x86", "1", "2", "3"
)


def measured(kl: float = 0.02, **more: float) -> Measured:
    return Measured(quality_of(np.full(128, kl), top1=1.0, nll_change=0.0), 0.25, 0.3, 100, 120, **more)


def real(action: str = "evict:sinks_window@0.50", kl: float = 0.02, **state: object) -> Real:
    return Real(replace(STATE, **state), What.of(parse_action(action)), ORIGIN, measured(kl))


def simulated(action: str = "evict:sinks_window@0.50", kl: float = 0.02, **state: object) -> Simulated:
    return Simulated(replace(STATE, **state), What.of(parse_action(action)), ORIGIN, measured(kl))


REASON = {"code": "missing_capability", "text": "QUERIES: absent", "capability": "QUERIES"}


def refused(action: str = "evict:snapkv@0.50", **state: object) -> BackendInfeasible:
    return BackendInfeasible(replace(STATE, **state), What.of(parse_action(action)), ORIGIN, (REASON,))


def kinds(problems) -> list[tuple[str, int]]:
    return sorted((p.kind, p.count) for p in problems)


@pytest.mark.parametrize("one", [real(), simulated(), refused()])
def test_an_observation_comes_back_from_its_row_as_it_was(one):
    assert from_row(one.to_row(), one.execution_state) == one


@pytest.mark.parametrize("one", [real(), simulated(), refused()])
def test_an_observation_comes_back_from_a_store_as_it_was(one, tmp_path):
    store = Store(tmp_path / "s")
    store.append([one])
    assert store.observations(one.execution_state) == [one]
    assert store.ids(one.execution_state) == {one.id}


def test_a_row_of_which_a_column_was_changed_is_not_read():
    with pytest.raises(LogFormatError, match="one of them was changed"):
        from_row({**real().to_row(), "document": "another"}, "real")
    with pytest.raises(LogFormatError, match="'kl_p95' is missing"):
        from_row({k: v for k, v in real().to_row().items() if k != "kl_p95"}, "real")


def test_the_execution_state_is_part_of_what_an_observation_is():
    assert len({real().id, simulated().id, refused("evict:sinks_window@0.50").id}) == 3


def test_points_are_those_of_the_policy():
    kl, p95, ratio = 0.031, 0.4, 1.3
    one = Measured(
        replace(quality_of(np.full(32, kl)), kl_mean=kl, kl_p95=p95), 0.3, 0.3, 1, 1, time_ratio=ratio
    )
    for weight in (0.25, 1.0, 4.0):
        wanted = score(Inputs(0, 0, None, None, kl, p95, None, None, "t", ratio), Weights(time=weight))
        assert one.score(weight) == wanted.total
    assert measured().score(1.0) is None
    assert measured().score() == -measured().q


def test_halves_are_alternating_blocks_of_sixteen_tokens():
    kl = np.where((np.arange(70) // 16) % 2 == 0, 1.0, 3.0)
    found = quality_of(kl)
    assert (found.kl_half0, found.kl_half1, found.kl_spans) == (1.0, 3.0, (1.0, 3.0, 1.0, 3.0, 1.0))
    assert quality_of(np.ones(16)).kl_half1 is None


def test_figures_are_finite_numbers():
    with pytest.raises(LogFormatError):
        quality_of(np.array([0.1, np.nan]))
    with pytest.raises(LogFormatError, match="share16"):
        replace(measured(), share16=float("inf"))


def test_a_refusal_has_no_figure_and_needs_a_reason():
    assert not {"kl_mean", "share16", "time_ratio"} & set(refused().to_row())
    with pytest.raises(LogFormatError, match="needs a reason"):
        replace(refused(), reasons=())


def test_observations_of_several_execution_states_are_not_put_together():
    assert one_state([real(), real("keep")]) == [real(), real("keep")]
    with pytest.raises(MixedExecutionStateError, match="Real, Simulated"):
        one_state([real(), simulated()])


def test_each_execution_state_has_its_own_table(tmp_path):
    store = Store(tmp_path)
    assert {p.parent.name for p in store.append([real(), simulated(), refused(), real("keep", 0.0)])} == {
        "real",
        "simulated",
        "backend_infeasible",
    }
    tables = open_tables(store)
    assert (tables.real.rows, tables.simulated.rows, tables.refusals.rows) == (2, 1, 1)
    assert tables.problems == ()
    assert of_one_state(tables.real, tables.real) is RealTable
    for mixed in ([tables.real, tables.simulated], [tables.refusals], [tables.real, tables.refusals]):
        with pytest.raises(MixedExecutionStateError):
            of_one_state(*mixed)
    assert of_one_state(tables.refusals, allowed=(RefusalTable,)) is RefusalTable
    assert isinstance(tables.simulated, SimulatedTable)


def test_copies_are_read_once_and_stores_can_be_merged(tmp_path):
    one, two = Store(tmp_path / "1"), Store(tmp_path / "2")
    one.append([real(), real("keep", 0.0)])
    one.append([real()])
    two.append([real(), real(document="other")])
    tables = open_tables([one, two])
    assert tables.real.rows == tables.real.table.count().to_pyarrow().as_py() == 3
    assert kinds(tables.problems) == [("duplicate", 2)]
    assert "evict:sinks_window@0.50 on doc at 1024" in tables.problems[0].where


def test_copies_that_differ_are_all_left_out(tmp_path):
    store = Store(tmp_path)
    store.append([real(), real("keep", 0.0)])
    store.append([real(kl=0.5)])
    tables = open_tables(store)
    assert tables.real.table.action.to_pyarrow().to_pylist() == ["keep"]
    assert tables.real.rows == 1
    assert kinds(tables.problems) == [("conflict", 2)]


def test_a_file_that_was_cut_short_is_named_and_left_out(tmp_path):
    store = Store(tmp_path)
    store.append([real("keep", 0.0)])
    (part,) = store.append([real()])
    part.write_bytes(part.read_bytes()[:-40])
    tables = open_tables(store)
    assert tables.real.rows == 1
    assert [(p.kind, p.where) for p in tables.problems] == [("truncated", str(part))]


def test_files_from_elsewhere_are_named_and_left_out(tmp_path):
    store = Store(tmp_path)
    (part,) = store.append([real()])
    pq.write_table(pa.table({"id": ["x"]}), part.with_name("part-1.parquet"))
    (part.with_name("notes.txt")).write_text("hello")
    (tmp_path / "more").mkdir()
    tables = open_tables(store)
    assert tables.real.rows == 1
    assert kinds(tables.problems) == [("foreign", 1)] * 3


def test_a_file_among_those_of_another_execution_state_is_not_read_as_one(tmp_path):
    store = Store(tmp_path)
    (part,) = store.append([simulated()])
    (tmp_path / "real").mkdir()
    shutil.copy(part, tmp_path / "real" / part.name)
    tables = open_tables(store)
    assert (tables.real.rows, tables.simulated.rows) == (0, 1)
    assert kinds(tables.problems) == [("mixed_state", 1)]


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("role", "winner", "role"),
        ("phase", "later", "phase"),
        ("source", "hearsay", "source"),
        ("rung", 9, "rung"),
        ("schema", 7, "schema"),
        ("kl_mean", float("nan"), "finite"),
        ("kl_p95", float("inf"), "finite"),
        ("p95_half1", float("nan"), "finite"),
        ("share16", 0.0, "positive"),
        ("time_ratio", -1.0, "positive"),
    ],
)
def test_a_row_that_holds_something_odd_is_counted_and_left_out(tmp_path, column, value, text):
    store = Store(tmp_path)
    good = real("keep", 0.0).to_row()
    store.append_table(
        "real", pa.Table.from_pylist([good, {**real().to_row(), column: value}], schema=schema_of("real"))
    )
    tables = open_tables(store)
    assert tables.real.table.action.to_pyarrow().to_pylist() == ["keep"]
    assert tables.real.rows == 1
    assert kinds(tables.problems) == [("bad_row", 1)]
    assert text in tables.problems[0].text


_WRITER = """
import sys, os
import pyarrow.parquet as pq
from tests.test_gap_store import real
from lumina_cache.gap.store import Store
store = Store(sys.argv[1])
store.append([real("keep", 0.0)])
whole = pq.write_table
def slowly(table, file, **more):
    whole(table, file, **more)
    file.truncate(file.tell() // 2)
    file.flush()
    print("half", flush=True)
    sys.stdin.read()
pq.write_table = slowly
store.append([real()])
"""


def test_a_writer_that_is_killed_half_way_leaves_a_store_that_can_be_read(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["."])},
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    tables = open_tables(Store(tmp_path))
    assert tables.real.table.action.to_pyarrow().to_pylist() == ["keep"]
    assert kinds(tables.problems) == [("unfinished", 1)]
    Store(tmp_path).append([real()])
    assert open_tables(tmp_path).real.rows == 2


def test_a_table_of_another_execution_state_is_not_added(tmp_path):
    rows = pa.Table.from_pylist([simulated().to_row()], schema=schema_of("simulated"))
    with pytest.raises(MixedExecutionStateError, match="simulated observations is none of real"):
        Store(tmp_path).append_table("real", rows)
    with pytest.raises(AnalysisError, match="no table of simulated observations"):
        Store(tmp_path).append_table("simulated", rows.drop_columns(["kl_mean"]))
    with pytest.raises(MixedExecutionStateError, match="Observation has no execution state"):
        Store(tmp_path).append([Observation(STATE, What("keep"), ORIGIN)])
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_comes_back(tmp_path):
    store = Store(tmp_path / "s")
    assert store.manifest is None
    store.write_manifest({"seed": 1})
    assert store.manifest == {"seed": 1}
    store.append([real()])
    assert open_tables(store).problems == ()


def test_a_store_that_is_not_there_or_is_a_file_is_an_error(tmp_path):
    with pytest.raises(AnalysisError, match="no store"):
        open_tables(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(AnalysisError, match="is a file"):
        Store(tmp_path / "file")
