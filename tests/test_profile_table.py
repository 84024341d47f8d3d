"""The table of times in the documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from figures import FIGURES

from lumina_cache.pages import put_between
from lumina_cache.profile import default_profile
from lumina_cache.profile_table import PART, as_markdown

PAGE = Path(__file__).parents[1] / "docs" / "calibrate.md"


def test_the_published_times_are_those_of_the_shipped_profile() -> None:
    page = PAGE.read_text("utf-8")
    assert put_between(page, PART, as_markdown(default_profile())) == page


def test_what_was_not_timed_is_a_dash() -> None:
    first, *others = FIGURES.codecs
    timed = replace(FIGURES, codecs=(replace(first, chunk_times=((1024, 5.0),)), *others))
    rows = {line.split("`")[1]: line for line in as_markdown(timed).splitlines()[4:]}
    assert rows["quant:affine,bits=8,group=64"].endswith("| 1.20 | 5.00 | 1.00 |")
    assert rows["quant:affine,bits=4,group=64"].endswith("| 1.20 | – | 1.00 |")
    assert rows["quant:hadamard,bits=4,group=64"].endswith("| 1.40 | – | 1.17 |")
    assert rows["quant:kivi,bits=4,group=32"].endswith("| – | – | – |")
