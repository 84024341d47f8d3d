"""Execution states never mix, and the gap of a decision is the one that was planted."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumina_cache import LuminaCache, read_log
from lumina_cache.audit import LogContents
from lumina_cache.errors import LogFormatError, MixedExecutionStateError
from lumina_cache.gap.decisions import (
    EstimatedScore,
    RealScore,
    RefusedAction,
    best,
    decision_gap,
    gap_of_log,
    weighed_decision,
)
from lumina_cache.gap.report import as_json, as_text


def candidate(action: str, total: float | None, *missing: str) -> dict:
    return {
        "action": action,
        "feasible": not missing,
        "reasons": [{"code": "missing_capability", "text": f"{m}: absent", "capability": m} for m in missing],
        "inputs": {"source": "borrowed: test"},
        "score": {"total": total},
    }


def decision(*candidates: dict, chosen: str = "keep") -> dict:
    state = {"phase": "decode", "layers": [{"rows": 7}], "limit": {"nbytes": 9, "why": "the budget"}}
    return {"cache": "ab", "decision": 1, "state": state, "candidates": list(candidates), "chosen": chosen}


def gap_of(*candidates: dict, chosen: str = "keep"):
    return decision_gap(weighed_decision(decision(*candidates, chosen=chosen)))


def test_the_gap_is_exactly_zero_when_everything_is_feasible():
    found = gap_of(candidate("keep", -100.0), candidate("a", -2.0), candidate("b", -3.0), chosen="a")
    assert (found.backend, found.controller, found.causes) == (0.0, 0.0, ())


def test_one_missing_capability_gives_the_planted_gap_and_cause():
    found = gap_of(
        candidate("keep", -100.0), candidate("a", -2.0, "QUERIES"), candidate("b", -3.5), chosen="b"
    )
    assert found.backend == 1.5
    assert found.causes == ("QUERIES: absent",)
    assert found.relaxations == (("QUERIES", 1.5),)


def test_an_action_that_lacks_two_things_is_not_gained_by_giving_one():
    found = gap_of(
        candidate("keep", -9.0), candidate("a", -2.0, "QUERIES", "RAGGED"), candidate("b", -5.0, "QUERIES")
    )
    assert found.backend == 7.0
    assert found.relaxations == (("QUERIES", 4.0),)


def test_what_the_policy_left_lying_is_told_apart_from_what_the_backend_cannot_do():
    found = gap_of(
        candidate("keep", -4.0), candidate("a", -1.0, "QUERIES"), candidate("b", -2.0), chosen="keep"
    )
    assert (found.backend, found.controller) == (1.0, 2.0)


def test_code_that_is_not_there_yet_is_not_blamed_on_the_backend():
    unbuilt = candidate("a", -2.0, "x")
    unbuilt["reasons"] = [{"code": "not_built", "text": "no code for a"}]
    found = gap_of(candidate("keep", -9.0), unbuilt, candidate("b", -1.0, "QUERIES"))
    assert (found.gap, found.backend, found.library) == (8.0, 1.0, 7.0)


def test_a_candidate_without_a_figure_is_counted_and_not_compared():
    found = gap_of(candidate("keep", -1.0), candidate("a", None, "QUERIES"))
    assert (found.backend, found.unscored, found.refused) == (0.0, 1, 1)


def test_every_gap_of_a_log_says_that_it_is_simulated():
    report = gap_of_log(LogContents(({"event": "decision", **decision(candidate("keep", 0.0))},), ()))
    assert report.execution_state == "simulated"
    assert {g.execution_state for g in report.gaps} == {"simulated"}
    assert "[execution state: simulated]" in as_text(report)
    assert "borrowed: test" in as_text(report)
    assert json.loads(as_json(report))["execution_state"] == "simulated"


@pytest.mark.parametrize("field", ["candidates", "state", "cache"])
def test_a_decision_with_a_missing_field_is_named_and_skipped(field):
    record = decision(candidate("keep", 0.0))
    del record[field]
    with pytest.raises(LogFormatError, match=field):
        weighed_decision(record)
    report = gap_of_log(LogContents(({"event": "decision", **record},), ()))
    assert (report.gaps, len(report.problems)) == ((), 1)


def test_a_log_without_decisions_has_no_gap_rather_than_a_gap_of_zero():
    report = gap_of_log(LogContents((), ()))
    assert report.mean is None
    assert "no gap to report" in as_text(report)


REAL, SIMULATED = RealScore("a", -1.0), EstimatedScore("b", -2.0, "test")
REFUSED = RefusedAction("c", ({"code": "x"},))


@given(st.lists(st.sampled_from([REAL, SIMULATED, REFUSED]), min_size=1, max_size=8))
def test_observations_of_different_execution_states_cannot_be_compared(observations):
    kinds = {type(o) for o in observations}
    if kinds in ({RealScore}, {EstimatedScore}):
        assert best(observations) == max(observations, key=lambda o: o.score)
    else:
        with pytest.raises(MixedExecutionStateError):
            best(observations)


def test_a_refusal_carries_no_figure_to_be_compared():
    assert not hasattr(REFUSED, "score")


def test_a_real_run_gives_a_gap_with_causes_from_the_backend(tiny, tmp_path):
    model, path = tiny("gpt_oss"), tmp_path / "run.jsonl"
    with LuminaCache(model, budget=270_000, log=path) as cache:
        for _ in range(9):
            mx.eval(model(mx.arange(1, 100)[None], cache=cache), [c.state for c in cache])
    report = gap_of_log(read_log(path))
    assert report.gaps
    assert all(g.backend >= 0 for g in report.gaps)
    assert "PACKED_ATTENTION(8,32)" in {name for name, _ in report.refusals}
    assert max(g.backend for g in report.gaps) > 0
    assert "because" in as_text(report)
