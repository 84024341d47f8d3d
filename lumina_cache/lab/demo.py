"""``lumina-cache demo``: one question about one long document, with the stock cache and under a memory budget."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.table import Table

from ..apply import Footprint
from ..audit import read_log
from ..backend.probe import remembered_probe
from ..budget import budget_nbytes, format_bytes
from ..cache import CacheView, LuminaCache, policy_of
from ..controller import smallest_budget
from ..gap.decisions import gap_of_log
from ..gap.report import as_text
from ..layers import leaves
from ..report import describe
from ..telemetry import read_once
from .answer import Answer, arrays_nbytes, chat_tokens
from .blas import preload_openblas
from .compare import Drift, Rates, drift, interleaved_rates
from .corpus import Document, demo_document
from .models import LoadedModel, load_model
from .run import stream

__all__ = ["run_demo"]

#: Share of the stock cache's bytes that the budget is set to when none is given.
BUDGET_SHARE = 0.25

#: Document tokens used when MLX runs on its reference BLAS, some 25 times slower.
SHORT_DOCUMENT_TOKENS = 600

RATE_ROUNDS = 6
PREFILL_CHUNK = 64


@dataclass(frozen=True)
class _Run:
    """One of the two runs with what was measured around it."""

    answer: Answer
    cache: Any
    rows: int
    offset: int
    live: int
    allocated: int
    arrays: int
    active: int  #: growth of MLX's active memory over the run, the fork's buffers taken off


def run_demo(
    *,
    model: str | None,
    budget: str | None,
    policy: str | None = None,
    log: os.PathLike[str] | None,
    max_tokens: int,
) -> None:
    """Run the demonstration and print it. Everything shown was measured in this run, or says that it is simulated."""
    console = Console(highlight=False)
    asked = None if budget is None else budget_nbytes(budget, read_once)
    policy_of(policy, None)
    blas = preload_openblas()
    with console.status("loading the model"):
        loaded = load_model(model)
    document = demo_document()
    device = mx.default_device().type.name
    slow = mx.default_device() == mx.Device(mx.cpu) and not blas.engaged
    if slow:
        document = _shortened(loaded, document)
    question = document.questions[0]
    prompt = chat_tokens(loaded.tokenizer, document.prompt())
    console.print(
        f"model      {loaded.name}, {str(loaded.dtype).rpartition('.')[2]} on {device} ({loaded.source})",
        markup=False,
    )
    console.print(
        f"document   {document.name}, {len(prompt)} tokens with the question ({document.source})",
        markup=False,
        soft_wrap=True,
    )
    if slow:
        console.print(
            "OpenBLAS was not found, so the document is shortened: MLX's own BLAS on Linux is some 25 times slower. "
            "On Debian: apt-get install libopenblas0-pthread",
            style="yellow",
        )
    console.print(f"question   {question.text}\n", markup=False, soft_wrap=True)

    console.print("[bold]1. The stock cache[/bold]  prompt_cache=make_prompt_cache(model)")
    stock = _measure(loaded, prompt, lambda: make_prompt_cache(loaded.model), 512, max_tokens, console)
    budget_bytes = _default_budget(loaded, stock) if asked is None else asked
    # Whoever has tokenized the prompt knows how long the text gets; decisions look no further ahead then.
    horizon = len(prompt) + max_tokens

    console.print(
        f"\n[bold]2. Under a budget[/bold]  prompt_cache=LuminaCache(model, budget={budget_bytes}, horizon={horizon}, log=…)"
        f"  ({budget_bytes / stock.allocated:.0%} of what the stock cache took)"
    )
    kept: list[LuminaCache] = []

    def make() -> LuminaCache:
        kept.append(
            LuminaCache(loaded.model, budget=budget_bytes, policy=policy, horizon=horizon, log=log or True)
        )
        return kept[0]

    lumina = _measure(loaded, prompt, make, None, max_tokens, console)
    cache = kept[0]
    lossy = any(leaf.changed for leaf in leaves(cache) if hasattr(leaf, "changed"))
    fork: Any = lumina.answer.fork
    fork.log.detach()

    with console.status("scoring both caches on the same tokens"):
        forced = [prompt[-1], *stock.answer.tokens]
        apart = drift(loaded.model, stock.answer.fork, lumina.answer.fork, forced, lossy=lossy)
    with console.status("timing both caches in turns"):
        decode = _rates(loaded, prompt, stock, lumina, 1)
        prefill = _rates(loaded, prompt, stock, lumina, PREFILL_CHUNK)
    cache.close()

    console.print()
    console.print(_table(stock, lumina, cache.budget or 0))
    for line in _budget_lines(cache, lumina):
        console.print(line, markup=False, soft_wrap=True)
    console.print("\n[bold]What it decided, and why[/bold]  (from the log)")
    for record in cache.log.records:
        if record["event"] in ("decision", "action.applied", "action.refused", "warning"):
            console.print("  " + describe(record), markup=False, soft_wrap=True)
    console.print(
        "\n[bold]What it cost[/bold]  [execution state: real; both caches ran]".replace(
            "[execution", r"\[execution"
        )
    )
    for line in _cost(document, stock, lumina, apart, prefill, decode):
        console.print("  " + line, markup=False, soft_wrap=True)
    console.print()
    assert cache.log.path is not None
    console.print(as_text(gap_of_log(read_log(cache.log.path))), markup=False, soft_wrap=True)
    console.print(f"\nlog  {cache.log.path}", markup=False, soft_wrap=True)
    console.print(f"     lumina-cache log {cache.log.path}", markup=False, soft_wrap=True)


def _shortened(loaded: LoadedModel, document: Document) -> Document:
    """The beginning of the document, with a question that it still answers."""
    ids = loaded.tokenizer.encode(document.text)[:SHORT_DOCUMENT_TOKENS]
    text = loaded.tokenizer.decode(ids)
    questions = tuple(q for q in document.questions if q.is_answered_by(text))
    return replace(document, text=text, questions=questions or document.questions)


def _default_budget(loaded: LoadedModel, stock: _Run) -> int:
    """A share of what the stock cache took, or the least that can be held if that is more."""
    return max(int(stock.allocated * BUDGET_SHARE), smallest_budget(remembered_probe(loaded.model)))


def _measure(
    loaded: LoadedModel, prompt: list[int], make: Any, chunk: int | None, max_tokens: int, console: Console
) -> _Run:
    mx.clear_cache()
    before = mx.get_active_memory()
    cache = make()
    console.print("   ", end="")
    answer = stream(
        loaded, prompt, cache, max_tokens=max_tokens, console=console, fork=True, prefill_step_size=chunk
    )
    console.print()
    mx.eval([entry.state for entry in cache])
    bytes_now = Footprint.of(leaves(cache)) if isinstance(cache, LuminaCache) else None
    arrays = arrays_nbytes(cache)
    rows, offset, live = _rows(cache)
    return _Run(
        answer=answer,
        cache=cache,
        rows=rows,
        offset=offset,
        live=bytes_now.nbytes_live if bytes_now else live,
        allocated=bytes_now.nbytes_allocated if bytes_now else sum(c.nbytes for c in cache),
        arrays=arrays,
        active=mx.get_active_memory() - before - arrays_nbytes(answer.fork),
    )


def _rows(cache: Any) -> tuple[int, int, int]:
    """Most rows, the offset, and live bytes of a cache, stock or ours."""
    if isinstance(cache, LuminaCache):
        view: CacheView = cache.observe()
        rows = max((one.rows for one in view.layers), default=0)
        return rows, max((one.offset for one in view.layers), default=0), view.nbytes_live
    offset = max((int(getattr(c, "offset", 0)) for c in leaves(cache)), default=0)
    live = sum(_stock_live(c) for c in leaves(cache))
    return max((c.size() for c in leaves(cache)), default=0), offset, live


def _stock_live(entry: Any) -> int:
    keys = getattr(entry, "keys", None)
    if not isinstance(keys, mx.array):
        return int(entry.nbytes)
    return int(entry.nbytes) * int(entry.size()) // int(keys.shape[2])


def _rates(loaded: LoadedModel, prompt: list[int], stock: _Run, lumina: _Run, chunk: int) -> Rates:
    tokens = prompt[: chunk * RATE_ROUNDS]
    return interleaved_rates(loaded.model, stock.answer.fork, lumina.answer.fork, tokens, chunk=chunk)


def _table(stock: _Run, lumina: _Run, budget: int) -> Table:
    table = Table(title="After the answer", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("stock cache", "LuminaCache", "ratio"):
        table.add_column(name, justify="right")
    for label, a, b in (
        ("rows per layer", stock.rows, lumina.rows),
        ("offset (position of the next token)", stock.offset, lumina.offset),
    ):
        table.add_row(label, f"{a:,}", f"{b:,}", f"{b / a:.2f}" if a else "")
    for label, a, b in (
        ("live bytes", stock.live, lumina.live),
        ("allocated bytes", stock.allocated, lumina.allocated),
        ("bytes the arrays really hold", stock.arrays, lumina.arrays),
        ("growth of MLX's active memory", stock.active, lumina.active),
    ):
        table.add_row(label, format_bytes(a), format_bytes(b), f"{b / a:.2f}" if a else "")
    return table


def _budget_lines(cache: LuminaCache, lumina: _Run) -> list[str]:
    budget = cache.budget or 0
    held = lumina.allocated <= budget
    over = [r for r in cache.log.records if r["event"] == "warning" and r["code"] == "budget_exceeded"]
    width = 40
    filled = min(width, round(width * lumina.allocated / budget))
    bar = "█" * filled + "░" * (width - filled)
    lines = [
        f"budget {format_bytes(budget)}  {bar}  {format_bytes(lumina.allocated)} "
        f"({lumina.allocated / budget:.0%}) {'held' if held else 'NOT HELD'}"
    ]
    if over:
        lines.append(f"the budget was passed {len(over)} times on the way: {over[0]['text']}")
    return lines


def _cost(
    document: Document, stock: _Run, lumina: _Run, apart: Drift, prefill: Rates, decode: Rates
) -> list[str]:
    question = document.questions[0]
    found = [question.is_answered_by(run.answer.text) for run in (stock, lumina)]
    return [
        f"KL to the full cache {apart.kl_mean:.4f} nats per token (p95 {apart.kl_p95:.4f}), the same first choice at "
        f"{apart.top1_agreement:.0%} of {apart.positions} positions (teacher-forced on the stock cache's answer)",
        f"the expected answer ({question.expected!r}) is in the stock cache's answer: {_yes(found[0])}; "
        f"in LuminaCache's: {_yes(found[1])}",
        f"decode  {decode.full:.2f} against {decode.other:.2f} tokens per second; a step takes {_times(decode)} as long",
        f"prefill {prefill.full:.1f} against {prefill.other:.1f} tokens per second in chunks of {PREFILL_CHUNK}; a chunk "
        f"takes {_times(prefill)} as long",
        f"(medians of {decode.rounds} paired rounds taking turns; quartiles of the paired ratios in brackets)",
    ]


def _times(rates: Rates) -> str:
    return f"{rates.ratio:.2f} times [{rates.ratio_low:.2f}, {rates.ratio_high:.2f}]"


def _yes(found: bool) -> str:
    return "yes" if found else "no"
