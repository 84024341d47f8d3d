"""What an eviction that is repeated every so many tokens costs per decoded token.

    python benchmarks/periodic_eviction.py [--model tiny|smollm2] [--rows 512] [--rounds 15] [--json FILE]

Two caches hold the same number of rows and take turns in one process: one under ``evict:…@rows=N`` and one without a
plan. A pair of steps with an eviction before one of them gives e, what such a step takes relative to one without; a pair
between two evictions gives b. With slack s, e is paid once and b for the rest: a token takes (e + (s − 1)·b)/s steps.
Median and quartiles over the pairs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lumina_cache.lab.blas import preload_openblas

BLAS = preload_openblas()

import mlx.core as mx  # noqa: E402

from lumina_cache import LuminaCache  # noqa: E402
from lumina_cache.lab.models import load_smollm2  # noqa: E402
from lumina_cache.lab.tiny import build  # noqa: E402

SLACKS = (1, 16, 64, 256)
SCORERS = ("sinks_window", "keydiff")


def filled(model: Any, rows: int, plan: str | None) -> LuminaCache:
    """A cache at the end of a prompt of ``rows`` + 1 tokens; its next step is where a plan acts."""
    cache = LuminaCache(model, telemetry=False, plan=plan)
    ids = mx.random.randint(1, 100, (1, rows + 1))
    for start in range(0, rows, 128):
        mx.eval(model(ids[:, start : min(start + 128, rows)], cache=cache), [c.state for c in cache])
    mx.eval(model(ids[:, rows:], cache=cache))
    return cache


def timed(model: Any, cache: LuminaCache, tokens: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(tokens):
        mx.eval(model(mx.array([[7]]), cache=cache))
    return time.perf_counter() - start


def take_back(cache: LuminaCache, rows: int) -> None:
    for layer in cache:
        layer.trim(max(0, layer.rows - rows))


def pairs(model: Any, scorer: str, rows: int, rounds: int) -> Iterator[tuple[float, float]]:
    """Seconds of a step with an eviction and of one without, from ``rows`` rows each."""
    evicting = filled(model, rows, f"evict:{scorer}@rows={rows},slack=1")
    plain = filled(model, rows - 1, None)
    timed(model, evicting), timed(model, plain)
    for i in range(rounds):
        take_back(plain, rows)
        both = (evicting, plain)
        first, second = (timed(model, cache) for cache in (both if i % 2 else both[::-1]))
        yield (first, second) if i % 2 else (second, first)


def between(model: Any, scorer: str, rows: int, rounds: int) -> Iterator[tuple[float, float]]:
    """Seconds of a step between two evictions and of one in a cache without a plan, over the same number of rows."""
    evicted = filled(model, rows, f"evict:{scorer}@rows={rows},slack={10 * rounds}")
    plain = filled(model, rows - 1, None)
    timed(model, evicted, 2), timed(model, plain, 2)
    for i in range(rounds):
        both = (evicted, plain)
        first, second = (timed(model, cache) for cache in (both if i % 2 else both[::-1]))
        yield (first, second) if i % 2 else (second, first)


def spread(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


def _text(values: dict[str, float]) -> str:
    return f"{values['median']:.3f} [{values['low']:.3f}, {values['high']:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model = build("llama") if given.model == "tiny" else load_smollm2(mx.float32)[0]
    where = f"{mx.default_device()}, {platform.machine()}, BLAS {BLAS}"
    print(f"{given.model}, {given.rows} rows, {given.rounds} pairs; {where}")
    found: dict[str, Any] = {"model": given.model, "rows": given.rows, "rounds": given.rounds}
    for scorer in SCORERS:
        times = list(pairs(model, scorer, given.rows, given.rounds))
        evicting = [a / b for a, b in times]
        others = [a / b for a, b in between(model, scorer, given.rows, given.rounds)]
        step = statistics.median(b for _, b in times)
        print(
            f"{scorer}: a step takes {step * 1e3:.2f} ms; with an eviction {_text(spread(evicting))} times as long, "
        )
        print(f"  between two {_text(spread(others))}")
        found[scorer] = {"step_ms": step * 1e3, "evicting": spread(evicting), "between": spread(others)}
        for slack in SLACKS:
            per_token = [(e + (slack - 1) * b) / slack for e, b in zip(evicting, others, strict=True)]
            found[scorer][slack] = spread(per_token)
            print(f"  slack {slack:>3}: {_text(found[scorer][slack])}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
