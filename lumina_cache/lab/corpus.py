"""Texts for the demonstration and the laboratory, from sources that every installation has.

Three domains: prose, dialogue and code. A text is either the project's own and ships in the package, or part
of the Python installation that runs; the latter differs between Python versions, so its `source` names the
version.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
from dataclasses import dataclass
from importlib.resources import files

from lumina_cache.errors import LuminaError

__all__ = [
    "Document",
    "Question",
    "demo_document",
    "documents",
    "own_text",
    "python_module",
    "python_reference",
]

_OWN_LICENCE = "Apache-2.0"
_PYTHON_LICENCE = "PSF-2.0"


@dataclass(frozen=True, slots=True)
class Question:
    """A question that a document answers in so many words; `expected` is a part of every right answer."""

    text: str
    expected: str

    def is_answered_by(self, answer: str) -> bool:
        """True when `answer` contains what was expected, in upper or lower case."""
        return self.expected.casefold() in answer.casefold()


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its origin, and the questions about it, the most dependable first."""

    name: str
    domain: str
    text: str
    source: str
    licence: str
    questions: tuple[Question, ...] = ()

    @property
    def question(self) -> str | None:
        """The first question, None when there is none."""
        return self.questions[0].text if self.questions else None

    @property
    def expected_answer(self) -> str | None:
        """What a right answer to the first question contains."""
        return self.questions[0].expected if self.questions else None

    def prompt(self, question: str | None = None) -> str:
        """The content of a user's message: the text, a rule, the question (by default the first one)."""
        question = question or self.question
        return f"{self.text.rstrip()}\n\n---\n\n{question}" if question else self.text

    def __str__(self) -> str:
        return f"{self.name} ({self.domain}, {len(self.text)} characters, {self.source}, {self.licence})"


# SmolLM2-135M answers all of them from a full cache, greedily and with its chat template, and none without
# the text. A model this small is easily put off: the first four it answers however the question is set apart
# from the text, the last not. Their facts lie at about 43, 58, 81, 32 and 15 percent of the text.
_DEMO_QUESTIONS = (
    Question("From which company did the idea of latent attention come?", "DeepSeek"),
    Question("What are the first four tokens of the text called?", "attention sinks"),
    Question("What colours does the memory graph of Activity Monitor show?", "yellow"),
    Question("In what year was grouped-query attention proposed?", "2023"),
    Question("What are the keys and values of one token in one layer called?", "a row"),
)


def demo_document() -> Document:
    """The essay on KV-cache memory that the demonstration reads: about 2,100 tokens for SmolLM2."""
    return own_text("kv-cache-memory", "prose", _DEMO_QUESTIONS)


def documents() -> list[Document]:
    """All texts, at least one of each domain, in a fixed order.

    Raises LuminaError when this Python installation lacks a part of its standard library that is read here.
    """
    return [
        demo_document(),
        python_reference("execmodel"),
        own_text("ferry-dialogue", "dialogue"),
        python_module("textwrap"),
        python_module("heapq"),
    ]


def own_text(name: str, domain: str, questions: tuple[Question, ...] = ()) -> Document:
    """A text that ships with the project, by the name of its file in ``lab/texts``."""
    path = files("lumina_cache.lab").joinpath("texts", f"{name}.md")
    return Document(name, domain, path.read_text("utf-8"), "lumina_cache", _OWN_LICENCE, questions)


def python_reference(topic: str) -> Document:
    """A chapter of the Python language reference, as the interactive ``help()`` shows it."""
    try:
        text = importlib.import_module("pydoc_data.topics").topics[topic]
    except (ImportError, KeyError) as error:
        raise _missing(f"pydoc_data.topics[{topic!r}]") from error
    return Document(
        f"python-{topic}", "prose", text, _python(f"language reference, {topic}"), _PYTHON_LICENCE
    )


def python_module(module: str) -> Document:
    """The source text of a module of the standard library written in Python; the module is not imported."""
    spec = importlib.util.find_spec(module)
    get_source = getattr(spec and spec.loader, "get_source", None)
    text = get_source(module) if get_source is not None else None
    if not text:
        raise _missing(f"the source of the module {module!r}")
    return Document(f"python-{module}", "code", text, _python(f"Lib/{module}.py"), _PYTHON_LICENCE)


def _python(part: str) -> str:
    return f"{platform.python_implementation()} {platform.python_version()}, {part}"


def _missing(part: str) -> LuminaError:
    return LuminaError(f"this Python lacks {part}: install its full standard library")
