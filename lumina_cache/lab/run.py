"""``lumina-cache run``: one prompt through LuminaCache."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..actions import parse_action
from ..budget import budget_nbytes, format_bytes
from ..cache import LuminaCache, policy_of
from ..errors import UnsupportedCacheError
from ..report import describe
from ..telemetry import read_once
from .answer import Answer, arrays_nbytes, chat_tokens, generate_answer
from .models import load_model

__all__ = ["prefill_progress", "run_prompt"]


def prefill_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("  reading the prompt"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def run_prompt(
    *,
    model: str | None,
    prompt: str,
    budget: str | None,
    policy: str | None,
    plan: str | None,
    protect: Sequence[range],
    disk: str | bool | None,
    log: os.PathLike[str] | None,
    recall: float,
    max_tokens: int,
    raw: bool,
    as_json: bool,
) -> None:
    """Generate from ``prompt`` and print the answer, then what the cache did. Progress goes to standard error."""
    # Before a model is loaded for nothing:
    if budget is not None:
        budget_nbytes(budget, read_once)
    action = None if plan is None else parse_action(plan)
    policy_of(policy, action)
    if action is not None and budget is not None:
        raise UnsupportedCacheError(f"--plan {action} beside --budget {budget}: give one of them")
    console = Console(stderr=True)
    with console.status("loading the model"):
        loaded = load_model(model)
    tokens = chat_tokens(loaded.tokenizer, prompt, raw=raw)
    with LuminaCache(
        loaded.model,
        budget=budget,
        policy=policy,
        plan=action,
        protect=protect,
        disk=disk,
        log=log or True,
        recall=recall,
        horizon=len(tokens) + max_tokens,
    ) as cache:
        answer = stream(loaded, tokens, cache, max_tokens=max_tokens, console=console, show=not as_json)
        if as_json:
            print(json.dumps(_record(loaded.name, answer, cache)))
            return
        print()
        for line in _summary(answer, cache):
            console.print(line, highlight=False, markup=False)


def stream(
    loaded: Any,
    tokens: list[int],
    cache: Any,
    *,
    max_tokens: int,
    console: Console,
    show: bool = True,
    fork: bool = False,
    prefill_step_size: int | None = None,
) -> Answer:
    """:func:`generate_answer` with a progress bar while the prompt is read and the text as it comes."""
    with prefill_progress(console) as bar:
        task = bar.add_task("", total=len(tokens))

        def say(text: str) -> None:
            if bar.live.is_started:
                bar.stop()
            if show:
                sys.stdout.write(text)
                sys.stdout.flush()

        return generate_answer(
            loaded.model,
            loaded.tokenizer,
            tokens,
            cache,
            max_tokens=max_tokens,
            prefill_step_size=prefill_step_size or cache.recommend_prefill_step(),
            on_prefill=lambda done, total: bar.update(task, completed=done, total=total),
            on_text=say,
            fork=fork,
        )


def _summary(answer: Answer, cache: LuminaCache) -> list[str]:
    view = cache.observe()
    limit = "no budget" if cache.budget is None else f"budget {format_bytes(cache.budget)}"
    rows = max((one.rows for one in view.layers), default=0)
    offset = max((one.offset for one in view.layers), default=0)
    lines = [
        f"{answer.prompt_tokens} prompt tokens in {answer.prefill_seconds:.1f} s, "
        f"{len(answer.tokens)} tokens in {answer.decode_seconds:.1f} s",
        f"cache: {rows} rows at offset {offset}, {format_bytes(view.nbytes_live)} live in "
        f"{format_bytes(view.nbytes_allocated)} allocated ({limit}); the arrays hold {format_bytes(arrays_nbytes(cache))}",
    ]
    shown = ("decision", "action.applied", "action.refused", "warning")
    lines += [describe(r) for r in cache.log.records if r["event"] in shown]
    lines.append(f"log: {cache.log.path}")
    return lines


def _record(name: str, answer: Answer, cache: LuminaCache) -> dict[str, Any]:
    view = cache.observe()
    return {
        "model": name,
        "text": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": len(answer.tokens),
        "prefill_seconds": answer.prefill_seconds,
        "decode_seconds": answer.decode_seconds,
        "budget": cache.budget,
        "rows": max((one.rows for one in view.layers), default=0),
        "offset": max((one.offset for one in view.layers), default=0),
        "nbytes_live": view.nbytes_live,
        "nbytes_allocated": view.nbytes_allocated,
        "arrays_nbytes": arrays_nbytes(cache),
        "actions": [r["action"] for r in cache.log.records if r["event"] == "action.applied"],
        "log": str(cache.log.path),
    }
