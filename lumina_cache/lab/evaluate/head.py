"""A model's logits in two halves, so that tokens can go through in small blocks and meet the vocabulary together.

The product with the vocabulary's matrix knows nothing of the cache. Done for all scored tokens at once it costs a fraction
of what it costs block by block. mlx-lm has no interface for the halves, so they are looked for and tried: if hidden
states of a few tokens, put through the head, are not the model's own logits, there are no halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

__all__ = ["Halves", "halves"]

#: Relative difference of logits that rounding may make between a product of few rows and one of many.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Halves:
    """``head(body(tokens, cache=cache))`` is ``model(tokens, cache=cache)``."""

    body: Callable[..., mx.array]
    head: Callable[[mx.array], mx.array]


def halves(model: Any) -> Halves | None:
    """The two halves of ``model``; None if they could not be found. Runs a few tokens through it."""
    body = getattr(model, "model", None)
    embedding = getattr(body, "embed_tokens", None)
    for head in (getattr(model, "lm_head", None), getattr(embedding, "as_linear", None)):
        if callable(body) and callable(head) and _same(model, body, head):
            return Halves(body, head)
    return None


def _same(model: Any, body: Any, head: Any) -> bool:
    tokens = mx.array([[1, 2, 3]])
    try:
        whole, parts = model(tokens), head(body(tokens))
        if whole.shape != parts.shape:
            return False
        apart, largest = mx.abs(whole - parts).max(), mx.abs(whole).max()
        return bool((apart <= ROUNDING * largest).item())
    except Exception:  # a model of another make: it is run whole
        return False
