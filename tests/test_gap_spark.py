"""The same analysis on DuckDB and on Spark gives the same figures."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("ibis")
pytest.importorskip("pyspark")

from benchmarks.gap_engines import compared, fill
from lumina_cache.gap.analysis import Settings, analyse
from lumina_cache.gap.spark import Spark
from lumina_cache.gap.store import DuckDB, Store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java, which is not there"),
]


def test_both_engines_agree_and_leave_out_the_same(tmp_path):
    fill(Store(tmp_path), 1000, contexts=(1024,))
    settings = Settings(budgets=(0.28, 0.125), draws=200)
    one, two = (analyse(tmp_path, engine=e, settings=settings).to_record() for e in (DuckDB(), Spark()))
    found = compared(one, two)
    assert found["others_that_differ"] == []
    assert found["numbers"] > 1000
    assert found["largest_relative_difference"] < 1e-9 or found["largest_difference"] < 1e-12
    assert sorted(p["kind"] for p in one["problems"]) == ["bad_row", "conflict", "duplicate"]


def test_a_figure_that_differs_is_found():
    found = compared({"a": 1.0, "b": "x", "seconds": 1.0}, {"a": 1.5, "b": "y", "seconds": 2.0})
    assert (found["largest_difference"], found["others_that_differ"]) == (0.5, ["/b"])
