"""Generate with a given cache, streaming, and measure the run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm import stream_generate

from ..layers import leaves

__all__ = ["Answer", "arrays_nbytes", "arrays_of", "chat_tokens", "detached_copy", "generate_answer"]


@dataclass(frozen=True)
class Answer:
    """One generation. Rates are in tokens per second; the fork is the cache as it was before the last prompt token."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    stopped: bool  #: whether the model ended by itself
    fork: Any | None


def chat_tokens(tokenizer: Any, prompt: str, *, raw: bool = False) -> list[int]:
    """Token ids of ``prompt`` as one user turn of the model's chat template, or as it is if it has none or ``raw``."""
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(prompt))
    return list(
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    )


def generate_answer(
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    cache: Any,
    *,
    max_tokens: int,
    prefill_step_size: int = 2048,
    on_prefill: Callable[[int, int], None] = lambda done, total: None,
    on_text: Callable[[str], None] = lambda text: None,
    fork: bool = False,
) -> Answer:
    """Run ``mlx_lm.stream_generate`` greedily with ``cache`` as its ``prompt_cache``.

    With ``fork`` a copy of the cache with buffers of its own is kept from the moment before the last prompt token, so
    that other continuations can be scored from the same state; the time it takes is not counted.
    """
    kept: list[Any] = []
    copying = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal copying
        on_prefill(done, total)
        if fork and done == total - 1 and not kept:
            start = time.perf_counter()
            kept.append(detached_copy(cache))
            copying += time.perf_counter() - start

    pieces: list[str] = []
    tokens: list[int] = []
    start = first = last = time.perf_counter()
    reason = None
    for response in stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=max_tokens,
        prompt_cache=cache,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=progress,
    ):
        last = time.perf_counter()
        if not tokens:
            first = last
        reason = response.finish_reason
        if reason != "stop":
            tokens.append(int(response.token))
        if response.text:
            pieces.append(response.text)
            on_text(response.text)
    return Answer(
        text="".join(pieces),
        tokens=tuple(tokens),
        prompt_tokens=len(prompt),
        prefill_seconds=first - start - copying,
        decode_seconds=last - first,
        stopped=reason == "stop",
        fork=kept[0] if kept else None,
    )


def detached_copy(cache: Any) -> Any:
    """A deep copy whose arrays have buffers of their own, so that neither cache's next write has to copy."""
    new = copy.deepcopy(cache)
    for leaf in leaves(new):
        for owner in _owners(leaf):
            for name, value in _held(owner).items():
                setattr(owner, name, tree_map(_fresh, value))
    return new


def _fresh(value: Any) -> Any:
    if not isinstance(value, mx.array):
        return value
    copied = mx.zeros_like(value) + value
    mx.eval(copied)
    return copied


def arrays_of(leaf: Any) -> Iterator[mx.array]:
    """Every array reachable from a cache object's fields, those of the stores it holds included."""
    for owner in _owners(leaf):
        yield from (a for _, a in tree_flatten(_held(owner)) if isinstance(a, mx.array))


def arrays_nbytes(cache: Any) -> int:
    """Bytes of every array reachable from the cache objects' fields, counted without their own bookkeeping."""
    return sum(a.nbytes for leaf in leaves(cache) for a in arrays_of(leaf))


def _owners(leaf: Any) -> Iterator[Any]:
    """The cache object, and the objects in its fields that may hold arrays."""
    yield leaf
    yield from (value for name, value in vars(leaf).items() if name != "_steps" and is_dataclass(value))


def _held(owner: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(owner).items() if k != "_steps" and isinstance(v, mx.array | list | tuple)}
