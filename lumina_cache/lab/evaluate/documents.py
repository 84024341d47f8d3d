"""The documents of an evaluation: stretches of texts that every installation has, or that the user names.

Three domains: prose (the project's essay and chapters of the Python language reference), code (modules of the standard
library) and dialogue (stories that ship with the project). A document is a run of tokens of one text. Documents of one
length do not overlap, and texts that contain one another (chapters of the reference do) are not both in the list. The
same Python, model and plan give the same documents; ``sha256`` of text and tokens tells whether they were the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import EvaluationError, LuminaError
from ..corpus import Document, demo_document, own_text, python_module, python_reference

__all__ = ["DOMAINS", "EvalDocument", "Shortage", "cut", "encode", "select", "user_texts"]

#: Texts by domain, in order of preference. Chapters of the reference that contain one another are not both named.
_CHAPTERS = (
    "execmodel", "import", "assignment", "calls", "comparisons", "types", "specialnames", "compound", "debugger",
    "string-methods", "formatstrings", "typesmapping", "strings", "typesseq",
)  # fmt: skip
_MODULES = (
    "heapq", "textwrap", "shlex", "configparser", "fractions", "difflib", "queue", "argparse", "csv", "calendar",
    "statistics", "tarfile", "random", "contextlib", "dataclasses", "threading",
)  # fmt: skip
_STORIES = ("night-train", "seed-library", "clock-repair", "lift-and-stairs", "ferry-dialogue")


def _prose() -> Iterator[Callable[[], Document]]:
    yield demo_document
    yield from (partial(python_reference, name) for name in _CHAPTERS)


def _code() -> Iterator[Callable[[], Document]]:
    yield from (partial(python_module, name) for name in _MODULES)


def _dialogue() -> Iterator[Callable[[], Document]]:
    yield from (partial(own_text, name, "dialogue") for name in _STORIES)


DOMAINS = {"prose": _prose, "code": _code, "dialogue": _dialogue}


@dataclass(frozen=True)
class EvalDocument:
    """A stretch of a text: ``tokens`` are the context, its continuation, and what is planted in other contexts."""

    name: str
    domain: str
    source: str
    licence: str
    text_sha256: str
    start: int  #: first token within the text
    context: int  #: tokens of the context
    tokens: tuple[int, ...]

    @property
    def tokens_sha256(self) -> str:
        return hashlib.sha256(np.array(self.tokens, dtype="<i8").tobytes()).hexdigest()

    def to_record(self) -> dict[str, Any]:
        """Everything but the tokens."""
        return {
            "name": self.name,
            "domain": self.domain,
            "context": self.context,
            "source": self.source,
            "licence": self.licence,
            "start": self.start,
            "tokens": len(self.tokens),
            "text_sha256": self.text_sha256,
            "tokens_sha256": self.tokens_sha256,
        }


@dataclass(frozen=True)
class Shortage:
    """Fewer documents than asked for, or a text that this Python lacks."""

    context: int
    domain: str
    text: str


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of ``text`` alone, without a token that would begin or end a sequence."""
    return [int(t) for t in tokenizer.encode(text, add_special_tokens=False, verbose=False)]


def cut(texts: Sequence[Document], tokenizer: Any, context: int, length: int) -> Iterator[EvalDocument]:
    """Stretches of ``length`` tokens that do not overlap: the first of every text, then the second of every text …

    Sequences begin with the tokenizer's beginning-of-sequence token where it uses one.
    """
    lead = [int(t) for t in tokenizer.encode("")][:1]
    size = length - len(lead)

    def stretches(text: Document) -> Iterator[EvalDocument]:
        ids = encode(tokenizer, text.text)
        digest = hashlib.sha256(text.text.encode()).hexdigest()
        for i in range(len(ids) // size):
            yield EvalDocument(
                name=f"{text.name}:{i}",
                domain=text.domain,
                source=text.source,
                licence=text.licence,
                text_sha256=digest,
                start=i * size,
                context=context,
                tokens=(*lead, *ids[i * size : (i + 1) * size]),
            )

    for turn in zip_longest(*map(stretches, texts)):
        yield from (one for one in turn if one is not None)


def select(
    tokenizer: Any,
    context: int,
    count: int,
    length: int,
    texts: Sequence[Document] | None = None,
    domains: Sequence[str] | None = None,
) -> tuple[list[EvalDocument], list[Shortage]]:
    """``count`` documents, domains taking turns, and what was lacking.

    Args:
        texts: the user's own; None for those of ``domains``.
        domains: names of some of :data:`DOMAINS`; None for all.

    Raises:
        EvaluationError: if there is not one document of that length.
    """
    if texts is not None:
        groups = {
            name: [t for t in texts if t.domain == name] for name in dict.fromkeys(t.domain for t in texts)
        }
        lacking: list[Shortage] = []
    else:
        groups, lacking = _own_groups(context, DOMAINS if domains is None else domains)
    each = {name: -(-(count - i) // len(groups)) for i, name in enumerate(groups)}
    found: dict[str, list[EvalDocument]] = {}
    for name, group in groups.items():
        found[name] = [
            one for one, _ in zip(cut(group, tokenizer, context, length), range(each[name]), strict=False)
        ]
        if len(found[name]) < each[name]:
            lacking.append(
                Shortage(
                    context,
                    name,
                    f"{len(found[name])} documents of {length} tokens, {each[name]} were asked for",
                )
            )
    chosen = [one for turn in zip_longest(*found.values()) for one in turn if one is not None]
    if not chosen:
        raise EvaluationError(
            f"no text has {length} tokens, which a context of {context} needs with its continuation and passages: "
            "give longer texts or a shorter --context"
        )
    return chosen, lacking


def _own_groups(context: int, domains: Iterable[str]) -> tuple[dict[str, list[Document]], list[Shortage]]:
    groups: dict[str, list[Document]] = {}
    lacking = []
    for name in domains:
        groups[name] = []
        for make in DOMAINS[name]():
            try:
                groups[name].append(make())
            except LuminaError as error:
                lacking.append(Shortage(context, name, str(error)))
    return groups, lacking


def user_texts(paths: Sequence[Path]) -> list[Document]:
    """The user's files as documents of one domain, ``text``.

    Raises:
        EvaluationError: naming the file that cannot be read, or is empty.
    """
    found = []
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(f"cannot read the text {path}: {error}") from None
        if not text.strip():
            raise EvaluationError(f"the text {path} is empty")
        found.append(Document(path.name, "text", text, str(path), "unknown"))
    return found
