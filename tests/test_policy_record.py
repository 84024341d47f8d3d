"""Candidates are written once over, not each in full, and are read as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from figures import ABLE, FIGURES, dense_layers, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policy_table import BACKENDS, PROFILES, states

from lumina_cache.actions import Keep
from lumina_cache.audit import AuditLog, read_log
from lumina_cache.backend.capabilities import BackendProfile
from lumina_cache.decider import Decider
from lumina_cache.errors import LogFormatError
from lumina_cache.estimate import after_action, nbytes_allocated
from lumina_cache.policy import Adaptive, Candidate, State, weigh
from lumina_cache.policy.candidates import Weighing
from lumina_cache.policy.record import pack, unpack
from lumina_cache.profile import Profile, default_profile


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


@settings(max_examples=40, deadline=None)
@given(state=states(), backend=st.sampled_from(BACKENDS), profile=st.sampled_from(PROFILES))
def test_candidates_are_read_as_they_were_written(
    state: State, backend: BackendProfile, profile: Profile
) -> None:
    candidates = Weighing.of(state, backend, profile).everything()
    read = unpack(through_json(pack(candidates)), state.weights.to_record())
    assert read == [one.to_record() for one in candidates]


def test_one_candidate_and_none_at_all_are_written_too() -> None:
    state = state_of(dense_layers(), 10**6)
    for candidates in (weigh(state, [Keep()], ABLE, FIGURES), tuple[Candidate, ...]()):
        packed = through_json(pack(candidates))
        assert unpack(packed, state.weights.to_record()) == [one.to_record() for one in candidates]


def decided(log: AuditLog) -> None:
    each = after_action(dense_layers(30, 1536), default_profile().codecs[11].action)
    state = replace(state_of(each, nbytes_allocated(each)), tokens=512)
    Decider(Adaptive(), None, lambda: None, log, default_profile).decide(state, ABLE, "test")


def test_a_line_takes_a_fifth_of_what_its_candidates_would_in_full(tmp_path: Any) -> None:
    path = tmp_path / "run.jsonl"
    log = AuditLog(path)
    decided(log)
    [line] = path.read_text("utf-8").splitlines()
    [record] = read_log(path).records
    assert record == log.records[-1]
    assert len(record["candidates"]) > 150
    assert len(line) * 5 < len(json.dumps(record, separators=(",", ":")))


def test_a_record_in_memory_is_made_when_it_is_looked_at_and_stays_the_same(monkeypatch: Any) -> None:
    asked: list[str] = []
    whole = Candidate.to_record
    monkeypatch.setattr(Candidate, "to_record", lambda one: asked.append(str(one.action)) or whole(one))
    log = AuditLog()
    decided(log)
    assert len(log.records) == 1
    assert not asked
    first = log.records[-1]["candidates"]
    assert asked == [one["action"] for one in first]
    assert log.records[0]["candidates"] is first
    assert [r["candidates"] for r in log.records] == [r["candidates"] for r in log.records[:]] == [first]
    assert len(asked) == len(first)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda c: c.pop("each"), "each"),
        (lambda c: c["each"]["rows"][0].pop(), "shorter"),
        (lambda c: c["each"]["rows"][0].__setitem__(0, 10_000), "out of range"),
        (lambda c: c["each"]["rows"][2].__setitem__(2, [10_000]), "out of range"),
        (lambda c: c["same"].pop("horizon"), "horizon"),
        (lambda c: c["stored"]["rows"].__setitem__(0, None), "NoneType"),
    ],
)
def test_a_line_whose_candidates_cannot_be_read_is_named(
    tmp_path: Any, spoil: Callable[[Any], Any], says: str
) -> None:
    path = tmp_path / "run.jsonl"
    decided(AuditLog(path))
    record = json.loads(path.read_text("utf-8"))
    spoil(record["candidates"])
    path.write_text(json.dumps(record) + "\n", "utf-8")
    contents = read_log(path)
    assert contents.records == ()
    [problem] = contents.problems
    assert problem.startswith("line 1: decision: field 'candidates' cannot be read")
    assert says in problem
    with pytest.raises(LogFormatError, match="candidates"):
        unpack(record["candidates"], record["state"]["weights"])
