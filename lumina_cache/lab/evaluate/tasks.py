"""What the model is asked after the action: continue, copy, look up. Token lists; nothing here runs a model.

- *Continuation* (T1): the text goes on.
- *Copying* (T2): passages stand at four depths of another context made of the same document; after the action the first
  words of one come again, and the rest of it is to be predicted. What the question will be is not known to the action.
- *Lookup* (T3): names with one value each stand in that context, too; after the action a name comes, and its value has
  to be the most probable of all values in the context. Cf. RULER, arXiv:2404.06654, whose questions also come last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .documents import EvalDocument, encode
from .plan import Plan

__all__ = ["Continuation", "Copy", "Lookup", "Planted", "continuation", "planted"]

_NAMES = (
    "Mara", "Otto", "Lena", "Hugo", "Nora", "Felix", "Clara", "Oscar", "Alice", "Simon", "Emma", "Peter", "Julia",
    "Martin", "Laura", "David",
)  # fmt: skip
_VALUES = (
    "copper", "garden", "winter", "silver", "mountain", "paper", "river", "bread", "window", "horse", "music", "stone",
    "forest", "engine", "lemon", "island", "candle", "cotton", "market", "planet",
)  # fmt: skip


@dataclass(frozen=True)
class Continuation:
    """Tokens of the context; tokens fed after the action; what each of those should predict."""

    context: tuple[int, ...]
    fed: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """A cue and the passage that follows it; the last ``len(expected)`` positions of ``fed`` are scored."""

    depth: float
    fed: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Lookup:
    """A question whose last position should prefer ``candidates[answer]`` to the other candidates."""

    name: str
    fed: tuple[int, ...]
    candidates: tuple[int, ...]
    answer: int


@dataclass(frozen=True)
class Planted:
    """A context with passages and pairs planted in it, and what is asked about it. ``lookup_reason`` says why T3 is not."""

    context: tuple[int, ...]
    copies: tuple[Copy, ...]
    lookups: tuple[Lookup, ...]
    lookup_reason: str | None


def continuation(document: EvalDocument, plan: Plan) -> Continuation:
    n = document.context
    return Continuation(
        document.tokens[:n],
        document.tokens[n : n + plan.scored],
        document.tokens[n + 1 : n + plan.scored + 1],
    )


def planted(document: EvalDocument, tokenizer: Any, plan: Plan, index: int) -> Planted:
    """The document's own context with its reserved passages planted at the plan's depths, cut to the same length.

    Args:
        index: number of the document; changes which names and values are planted.
    """
    n, width = document.context, plan.cue + plan.copied
    reserve = document.tokens[n + plan.scored + 1 :]
    passages = [reserve[i * width : (i + 1) * width] for i in range(len(plan.depths))]
    gap = tuple(encode(tokenizer, "\n\n"))
    items = [(depth, (*gap, *p, *gap)) for depth, p in zip(plan.depths, passages, strict=True)]
    reason = None
    lookups: tuple[Lookup, ...] = ()
    if "T3" in plan.tests:
        pairs, reason = _pairs(tokenizer, plan, index)
        spread = [(i + 0.5) / plan.candidates for i in range(plan.candidates)]
        for depth, (name, value, _) in zip(spread, pairs, strict=False):
            items.append((depth, (*gap, *encode(tokenizer, f"The secret word of {name} is {value}."), *gap)))
        lookups = tuple(_lookups(tokenizer, plan, pairs, index, gap))
    copies = tuple(
        Copy(depth, (*gap, *passage[:-1]), passage[plan.cue :])
        for depth, passage in zip(plan.depths, passages, strict=True)
    )
    return Planted(_plant(document.tokens[:n], items), copies, lookups, reason)


def _plant(filler: tuple[int, ...], items: Iterable[tuple[float, tuple[int, ...]]]) -> tuple[int, ...]:
    """``filler`` with each item beginning at its depth (share of the length), or behind the one before; same length."""
    n = len(filler)
    out: list[int] = []
    taken = 0
    for depth, item in sorted(items):
        more = max(0, int(depth * n) - len(out))
        out += [*filler[taken : taken + more], *item]
        taken += more
    out += filler[taken:]
    return tuple(out[:n])


def _pairs(tokenizer: Any, plan: Plan, index: int) -> tuple[list[tuple[str, str, int]], str | None]:
    """Names with values whose first tokens all differ, so that the first token alone decides; or why there are none."""
    rng = np.random.default_rng([plan.seed, index])
    values: dict[int, str] = {}
    for i in rng.permutation(len(_VALUES)):
        values.setdefault(_first_token(tokenizer, _VALUES[i]), _VALUES[i])
    if len(values) < plan.candidates:
        return [], f"the tokenizer tells only {len(values)} of the values apart by their first token"
    names = [_NAMES[i] for i in rng.permutation(len(_NAMES))[: plan.candidates]]
    return [(n, v, t) for n, (t, v) in zip(names, values.items(), strict=False)], None


def _first_token(tokenizer: Any, word: str) -> int:
    before = encode(tokenizer, "is")
    return encode(tokenizer, f"is {word}")[len(before)]


def _lookups(
    tokenizer: Any, plan: Plan, pairs: list[tuple[str, str, int]], index: int, gap: tuple[int, ...]
) -> Iterable[Lookup]:
    """Questions spread over the depths; which pairs are asked for moves on with the document."""
    if not pairs:
        return
    step = max(1, len(pairs) // plan.asked)
    tokens = tuple(t for _, _, t in pairs)
    for k in range(plan.asked):
        i = (k * step + index) % len(pairs)
        question = encode(tokenizer, f"The secret word of {pairs[i][0]} is")
        yield Lookup(pairs[i][0], (*gap, *question), tokens, i)
