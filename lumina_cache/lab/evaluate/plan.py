"""What is measured: lengths, tests and constants. A value, written into every result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import EvaluationError

__all__ = ["QUICK", "TESTS", "Plan", "parse_contexts"]

#: Tests by the name they have in a result.
TESTS = {
    "T1": "continuation of the text, teacher-forced",
    "T2": "copying a planted passage, cued after the action",
    "T3": "looking up a planted value, forced choice",
    "T5": "greedy generation until it leaves that of the full cache",
    "time": "decode steps beside the full cache, taking turns",
}


@dataclass(frozen=True)
class Plan:
    """Settings of one evaluation. Lengths are in tokens.

    ``contexts`` are pairs (tokens in the cache when the action is taken, documents). ``block`` is how many tokens each
    forward after the action takes: rows that come then are stored as the action says, block by block.
    ``chunk`` is the prefill step, the same for every document. ``free_run_documents`` and ``timed_documents`` count per
    context: those tests decode token by token, so they are run on the first documents only.
    """

    contexts: tuple[tuple[int, int], ...] = ((1024, 30),)
    tests: tuple[str, ...] = tuple(TESTS)
    scored: int = 128
    block: int = 16
    chunk: int = 512
    short_context: int = 64  #: what T1's gate compares the whole context with
    depths: tuple[float, ...] = (0.15, 0.35, 0.60, 0.85)
    cue: int = 16
    copied: int = 32
    candidates: int = 8
    asked: int = 4
    free_run: int = 64
    free_run_documents: int = 6
    timed_steps: int = 12
    timed_documents: int = 6
    gates: dict[str, float] = field(
        default_factory=lambda: {"T2_full": 0.85, "T2_no_context": 0.60, "T3_full": 0.60}
    )
    draws: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = set(self.tests) - set(TESTS)
        if unknown:
            raise EvaluationError(f"unknown tests {', '.join(sorted(unknown))}; known: {', '.join(TESTS)}")
        for context, documents in self.contexts:
            if documents < 1:
                raise EvaluationError(f"{documents} documents of {context} tokens: ask for at least one")
            least = 2 * self.planted
            if context < least:
                raise EvaluationError(
                    f"a context of {context} tokens is too short: what is planted takes {self.planted}, "
                    f"so at least {least} are needed"
                )
        for name in ("scored", "block", "chunk", "copied", "cue"):
            if getattr(self, name) < 1:
                raise EvaluationError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def planted(self) -> int:
        """Tokens of all passages that T2 plants."""
        return len(self.depths) * (self.cue + self.copied)

    def length(self, context: int) -> int:
        """Tokens that a document must have: context, continuation, and the passages to plant."""
        return context + self.scored + 1 + self.planted

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


#: Two documents of 400 tokens, continuation and copying at two depths: a look, not a result.
QUICK = Plan(
    contexts=((400, 2),),
    tests=("T1", "T2"),
    scored=48,
    depths=(0.15, 0.60),
    free_run_documents=0,
    timed_documents=0,
)


def parse_contexts(contexts: str, documents: str) -> tuple[tuple[int, int], ...]:
    """``"1k,4k"`` and ``"30,10"`` → ((1024, 30), (4096, 10)).

    Raises:
        EvaluationError: naming the part that cannot be read.
    """
    lengths = [_tokens(part.strip()) for part in contexts.split(",")]
    try:
        counts = [int(part) for part in documents.split(",")]
    except ValueError:
        raise EvaluationError(
            f"cannot read {documents!r} as numbers of documents; give one for each context, such as 30,10"
        ) from None
    if len(counts) == 1:
        counts *= len(lengths)
    if len(counts) != len(lengths) or len(set(lengths)) != len(lengths):
        raise EvaluationError(
            f"{contexts!r} and {documents!r}: give each context once, and one number of documents for each"
        )
    return tuple(zip(lengths, counts, strict=True))


def _tokens(text: str) -> int:
    factor = 1024 if text.lower().endswith("k") else 1
    try:
        return int(float(text[:-1]) * factor) if factor > 1 else int(text)
    except ValueError:
        raise EvaluationError(f"cannot read {text!r} as a number of tokens; write 400, 1k or 4k") from None
