"""Text between the marks of a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from lumina_cache.errors import PageError
from lumina_cache.gap import markdown
from lumina_cache.lab import estimate_error
from lumina_cache.lab.simulate import validate
from lumina_cache.pages import marks, put_between, update_page
from lumina_cache.profile_table import PART

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = marks("times")


def test_what_stands_outside_the_marks_stays() -> None:
    page = f"a\n{BEGIN}\nold\nlines\n{END}\nb\n"
    assert put_between(page, "times", "new") == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    assert put_between(f"a {BEGIN}{END} b", "times", "new") == f"a {BEGIN}\nnew\n{END} b"


def test_each_part_of_a_page_is_found_by_its_name() -> None:
    first, second = marks("first")
    page = f"{BEGIN}\none\n{END}\n{first}\ntwo\n{second}\n"
    assert put_between(page, "first", "new") == f"{BEGIN}\none\n{END}\n{first}\nnew\n{second}\n"


@pytest.mark.parametrize("page", ["nothing here", f"only {BEGIN}", f"only {END}", f"{END} backwards {BEGIN}"])
def test_a_page_without_a_place_is_refused_and_the_marks_are_named(page: str) -> None:
    with pytest.raises(
        PageError, match="no place for the text: put <!-- times: begin -->.*<!-- times: end -->"
    ):
        put_between(page, "times", "table")


@pytest.mark.parametrize("page", [f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}", f"{END}{BEGIN}{END}"])
def test_a_page_with_two_places_is_refused(page: str) -> None:
    with pytest.raises(PageError, match="more than once"):
        put_between(page, "times", "table")


def test_a_file_is_changed_or_as_it_was(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"µ {BEGIN}{END}", "utf-8")
    update_page(page, "times", "×")
    assert page.read_text("utf-8") == f"µ {BEGIN}\n×\n{END}"
    with pytest.raises(PageError, match=r"page\.md: .*no place"):
        update_page(page, "other", "table")
    assert page.read_text("utf-8") == f"µ {BEGIN}\n×\n{END}"
    with pytest.raises(PageError, match=r"missing\.md: No such file"):
        update_page(tmp_path / "missing.md", "times", "table")
    page.write_bytes(b"\xff\xfe")
    with pytest.raises(PageError, match="not UTF-8"):
        update_page(page, "times", "table")


@pytest.mark.parametrize(
    ("page", "part"),
    [
        ("calibrate.md", PART),
        ("estimator.md", estimate_error.PART),
        ("eval.md", "eval"),
        ("eval.md", "eval-4k"),
        ("eval.md", "layers"),
        ("hook.md", "spread"),
        ("budgets.md", "budgets"),
        ("gap.md", markdown.PART),
        ("simulate.md", validate.PART),
    ],
)
def test_the_documents_have_a_place_for_every_table(page: str, part: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    assert "new table" in put_between(text, part, "new table")
