"""Tables that a program puts into a Markdown page, between two marks, so that no figure in the documents is typed."""

from __future__ import annotations

from pathlib import Path

from .errors import PageError

__all__ = ["marks", "put_between", "update_page"]


def marks(name: str) -> tuple[str, str]:
    """What stands before and behind the part of a page called ``name``: HTML comments, which no reader shows."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def put_between(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` in the place of what stands between the marks of ``name``.

    Raises:
        PageError: the page does not have each mark once, the first before the second.
    """
    begin, end = marks(name)
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise PageError(
            f"the page has no place for the text: put {begin} and, behind it, {end} where it should stand"
        )
    if begin in rest or end in head + tail:
        raise PageError(f"the page has {begin} or {end} more than once: leave one place for the text")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def update_page(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of ``name`` in the file at ``path``, which is UTF-8.

    Raises:
        PageError: the marks are not there, or the file cannot be read or written; it is as it was.
    """
    try:
        path.write_text(put_between(path.read_text("utf-8"), name, text), "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PageError(f"cannot put the text into the page {path}: {why or error}") from None
    except PageError as error:
        raise PageError(f"{path}: {error}") from None
