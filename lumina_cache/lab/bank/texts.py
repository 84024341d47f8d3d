"""Texts to capture queries from that every installation has, and that the evaluation does not use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ..corpus import Document, python_module, python_reference

__all__ = ["own_texts"]

#: Chapters of the Python reference that are neither among those of the evaluation nor contained in one of them.
_CHAPTERS = (
    ("identifiers", "objects"),
    ("raise", "binary", "subscriptions"),
    ("dict", "id-classes", "slicings", "typesmethods", "global", "assert"),
)
_MODULES = ("zipfile", "pathlib", "ast")


def own_texts() -> list[Document]:
    """Prose and code by turns; no dialogue.

    Raises:
        LuminaError: this Python lacks its standard library.
    """
    return [make() for make in _makers()]


def _makers() -> Iterator[Callable[[], Document]]:
    for chapters, module in zip(_CHAPTERS, _MODULES, strict=True):
        yield partial(_joined, chapters)
        yield partial(python_module, module)


def _joined(names: tuple[str, ...]) -> Document:
    parts = [python_reference(name) for name in names]
    return Document(
        "+".join(p.name for p in parts),
        "prose",
        "\n\n".join(p.text for p in parts),
        "; ".join(p.source for p in parts),
        parts[0].licence,
    )
