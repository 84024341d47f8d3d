"""Results of an evaluation become observations, and what gave none is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("ibis")
pytest.importorskip("pyarrow")

from lumina_cache.errors import EvaluationError
from lumina_cache.gap.analysis import Settings, analyse
from lumina_cache.gap.records import BackendInfeasible, Real
from lumina_cache.gap.sources import from_eval
from lumina_cache.gap.store import Store

RESULT = Path(__file__).parents[1] / "docs" / "data" / "eval-smollm2-1k.json"


@pytest.fixture
def result():
    return json.loads(RESULT.read_text("utf-8"))


def written(tmp_path, result) -> Path:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result), "utf-8")
    return path


def test_every_measurement_of_the_published_evaluation_is_an_observation(result):
    found = from_eval(RESULT)
    subjects = [r for r in result["records"] if r["kind"] == "subject" and r["state"] == "real"]
    assert found.problems == ()
    measured = [o for o in found.observations if isinstance(o, Real)]
    # What a rung refused before another one carried it out is an observation too.
    assert all(isinstance(o, Real | BackendInfeasible) for o in found.observations)
    assert len(found.observations) - len(measured) == sum(len(r["refused"]) for r in subjects)
    for one, record in zip(measured, subjects, strict=True):
        test = record["T1"]
        assert (one.what.action, one.state.document) == (record["action"], record["document"])
        assert one.measured.quality.kl_mean == test["kl_mean"]
        halves = one.measured.quality.kl_half0, one.measured.quality.kl_half1
        assert sum(halves) / 2 == pytest.approx(test["kl_mean"], rel=1e-4, abs=1e-9)
        assert one.measured.quality.p95_half0 is None


def test_a_published_evaluation_can_be_analysed(tmp_path):
    store = Store(tmp_path / "store")
    store.append(from_eval(RESULT).observations)
    found = analyse(store, settings=Settings(draws=200))
    assert (found.simulated, found.problems) == (None, ())
    (stratum,) = found.real.strata
    assert stratum.sides == ("native", "cache", "hook")
    assert any("Q is the mean's term alone" in n for n in stratum.notes)
    four = next(b for b in stratum.bests if (b.side, b.budget) == ("native", 0.28))
    assert set(four.actions) <= {"mlx-lm:kv_bits=4,group=64", "mlx-lm:max_kv_size=28%"}


def test_refusals_keep_their_reasons_and_faults_are_named(tmp_path, result):
    subjects = [r for r in result["records"] if r["kind"] == "subject"]
    result["header"]["rung"] = "cache"
    for one in subjects:
        one["refused"] = []
    reasons = [{"code": "head_dim", "text": "64 does not divide 80"}]
    subjects[1] |= {"state": "backend_infeasible", "reasons": reasons}
    subjects[2] |= {"state": "failed", "error": "EngagementError: bytes"}
    subjects[3].pop("T1")
    subjects[4]["action"] = "evict:nothing@0.50"
    subjects[5].pop("bytes")
    found = from_eval(written(tmp_path, result))
    (refusal,) = [o for o in found.observations if isinstance(o, BackendInfeasible)]
    assert (refusal.what.action, list(refusal.reasons)) == (subjects[1]["action"], reasons)
    assert len(found.observations) == len(subjects) - 4
    assert [
        next(
            t
            for t in ("failed: EngagementError", "T1 was not run", "no such method", "field 'bytes'")
            if t in p
        )
        for p in found.problems
    ] == ["failed: EngagementError", "T1 was not run", "no such method", "field 'bytes'"]


def test_a_file_that_is_no_evaluation_is_an_error(tmp_path):
    with pytest.raises(EvaluationError, match="not a result"):
        from_eval(written(tmp_path, {"kind": "other"}))
