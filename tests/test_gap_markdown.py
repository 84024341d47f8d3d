"""Tables of an analysis for a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ibis")

from lumina_cache.gap.analysis import Analysis, Settings, analyse
from lumina_cache.gap.markdown import PART, as_markdown
from lumina_cache.pages import put_between

STORE = Path(__file__).parents[1] / "docs" / "data" / "campaign-smollm2" / "first"
PAGE = Path(__file__).parents[1] / "docs" / "gap.md"


@pytest.fixture(scope="module")
def found() -> Analysis:
    """Of the campaign that is published."""
    return analyse(STORE)


def test_the_published_tables_are_those_of_the_published_campaign(found: Analysis) -> None:
    page = PAGE.read_text("utf-8")
    assert put_between(page, PART, as_markdown(found)) == page


def test_real_and_simulated_figures_have_tables_of_their_own(found: Analysis) -> None:
    assert found.real is not None
    text = as_markdown(replace(found, simulated=None))
    assert "simulated" not in text
    assert "ceiling" not in text
    assert "native → hook" in text


def test_an_analysis_without_intervals_shows_none() -> None:
    # A single document in some domain gives no interval, and the tables do not make one up.
    few = analyse(STORE, settings=Settings(draws=100))
    assert few.real is not None
    [one] = few.real.strata
    bare = replace(one.bests[0], kl=replace(one.bests[0].kl, low=None, high=None))  # type: ignore[type-var]
    text = as_markdown(
        replace(
            few,
            simulated=None,
            real=replace(few.real, strata=(replace(one, bests=(bare,), gaps=(), goals=()),)),
        )
    )
    assert f"| 50 % | {bare.kl.value:.3g} |" in text  # type: ignore[union-attr]
