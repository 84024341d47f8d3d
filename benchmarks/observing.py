"""What watching attention costs while a prompt is read: processor time over that of mlx-lm's own cache, with intervals.

    OPENBLAS_NUM_THREADS=1 python benchmarks/observing.py [--rounds 41] [--json FILE] [--page docs/hook.md]
    python benchmarks/observing.py --from docs/data/observing.json --page docs/hook.md

A prompt of 1,024 tokens is read in chunks of 256 through the first layers of SmolLM2-135M in float32, with a fresh cache
each time. In every round each side reads it once, in an order that rotates. What counts is the processor time of the whole
process, which other processes do not stretch as they do the wall clock; BLAS has one thread, so that none spins. A figure
is the median over rounds over mlx-lm's own median; its 95 % interval is a percentile bootstrap of rounds, both sides drawn
together, which takes out what changes from round to round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from lumina_cache.lab.blas import preload_openblas

BLAS = preload_openblas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from lumina_cache import LuminaCache  # noqa: E402
from lumina_cache.backend.attention import AttentionHook, attention_hook  # noqa: E402
from lumina_cache.backend.observing import ScorerObserver  # noqa: E402
from lumina_cache.lab.corpus import demo_document  # noqa: E402
from lumina_cache.lab.evaluate.provenance import conditions, provenance  # noqa: E402
from lumina_cache.lab.models import load_model  # noqa: E402
from lumina_cache.pages import update_page  # noqa: E402
from lumina_cache.scorers.observed import OBSERVED, H2OMean  # noqa: E402

STOCK = "mlx-lm"
PROMPT, CHUNK, LAYERS = 1024, 256, 4
#: Largest ratio that watching may cost.
LIMIT = 1.15
PART = "observing"

#: Makes a cache, and says how to be done with it.
Side = Callable[[Any], tuple[Any, Callable[[], None]]]


def _stock(model: Any) -> tuple[Any, Callable[[], None]]:
    return make_prompt_cache(model), lambda: None


def _ours(**arguments: Any) -> Side:
    def make(model: Any) -> tuple[Any, Callable[[], None]]:
        cache = LuminaCache(model, policy="off", telemetry=False, **arguments)
        return cache, cache.close

    return make


def _every_fourth(model: Any) -> tuple[Any, Callable[[], None]]:
    cache = LuminaCache(model, policy="off", telemetry=False)
    hook: AttentionHook = attention_hook(model)
    watch = ScorerObserver(H2OMean(stride=4, apart=4))
    for layer in cache:
        hook.observe(layer, watch)
    return cache, hook.close


#: Every scorer that watches, by itself; and what the cache and its hook cost without any.
SIDES: Mapping[str, Side] = {
    STOCK: _stock,
    "rung cache": _ours(),
    "rung hook, nothing watched": _ours(rung="hook", observe=()),
    **{name: _ours(rung="hook", observe=name) for name in OBSERVED},
    "h2o_mean, every 4th query": _every_fourth,
}


@dataclass(frozen=True)
class Ratio:
    """Processor time over mlx-lm's: ratio of medians and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, over: Sequence[float], under: Sequence[float], draws: int = 10_000, seed: int = 0) -> Ratio:
        a, b = np.array(over), np.array(under)
        drawn = np.random.default_rng(seed).integers(0, a.size, (draws, a.size))
        ratios = np.median(a[drawn], axis=1) / np.median(b[drawn], axis=1)
        low, high = np.quantile(ratios, [0.025, 0.975])
        return cls(float(np.median(a) / np.median(b)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def read(model: Any, ids: Sequence[int], side: Side, chunk: int) -> float:
    """Processor seconds of reading the prompt; making the cache and closing it are not in it."""
    cache, close = side(model)
    gc.collect()
    start = time.process_time()
    for i in range(0, len(ids), chunk):
        mx.eval(model.model(mx.array(ids[i : i + chunk])[None], cache=cache))
    seconds = time.process_time() - start
    close()
    return seconds


def measure(
    model: Any,
    ids: Sequence[int],
    rounds: int,
    chunk: int = CHUNK,
    sides: Mapping[str, Side] = SIDES,
    on_round: Callable[[int, dict[str, list[float]]], None] = lambda _i, _seconds: None,
) -> dict[str, list[float]]:
    """Processor seconds by side, one per round."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            took = read(model, ids, sides[name], chunk)
            if turn:  # the first is for warming up, and for what is found out once per model
                seconds[name].append(took)
        if turn:
            on_round(turn, seconds)
    return seconds


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, Ratio]:
    return {name: Ratio.of(took, seconds[STOCK]) for name, took in seconds.items() if name != STOCK}


def table(record: Mapping[str, Any]) -> str:
    """The table of a written record."""
    header, found = record["conditions"], ratios(record["seconds"])
    rounds = len(record["seconds"][STOCK])
    median = float(np.median(record["seconds"][STOCK]))
    lines = [
        f"{record['layers']} layers of {header['model']['name']}, a prompt of {record['prompt']:,} tokens in chunks of "
        f"{record['chunk']}, {header['model']['dtype'].removeprefix('mlx.core.')}, {header['device']}, mlx "
        f"{header['mlx']}, one thread of BLAS; {rounds} rounds, of {median:.2f} seconds with mlx-lm's own cache.",
        "",
        f"| watched | processor time over mlx-lm's | at most {LIMIT} |",
        "| --- | --- | --- |",
    ]
    for name, ratio in found.items():
        met = "yes" if ratio.high <= LIMIT else "no" if ratio.low > LIMIT else "cannot be told"
        lines.append(f"| {name} | {ratio} | {met} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--json", type=Path, help="write what was measured to this file, after every round")
    parser.add_argument("--page", type=Path, help="put the table between the marks of this Markdown page")
    parser.add_argument("--from", dest="record", type=Path, help="a file written before: nothing is run")
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text("utf-8")) if options.record else run(options)
    text = table(record)
    if options.page:
        update_page(options.page, PART, text)
    print(text)


def run(options: argparse.Namespace) -> dict[str, Any]:
    loaded = load_model()
    loaded.model.model.layers = loaded.model.model.layers[: options.layers]
    ids = loaded.tokenizer.encode(demo_document().text)[: options.prompt]
    record: dict[str, Any] = {
        "kind": "lumina-cache cost of watching attention",
        "conditions": conditions(loaded),
        "provenance": provenance(),
        "threads": os.environ["OPENBLAS_NUM_THREADS"],
        "layers": options.layers,
        "prompt": len(ids),
        "chunk": options.chunk,
    }

    def note(turn: int, seconds: dict[str, list[float]]) -> None:
        record["seconds"] = seconds
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        if turn % 5 == 0:
            print(
                f"{turn} rounds", *(f"{n}: {r}" for n, r in ratios(seconds).items()), sep="\n  ", flush=True
            )

    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    measure(loaded.model, ids, options.rounds, options.chunk, on_round=note)
    return record


if __name__ == "__main__":
    main()
