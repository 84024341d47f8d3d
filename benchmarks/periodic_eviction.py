"""What an eviction that is repeated every so many tokens costs per decoded token.

    python benchmarks/periodic_eviction.py [--model tiny|smollm2] [--rows 512] [--rounds 15] [--json FILE]

Two caches hold the same number of rows and take turns in one process: one under ``evict:…@rows=N,slack=1``, which
evicts before every token, and one without a plan, whose newest row is taken back after each step. The ratio of a pair of
steps is what an eviction and the growth behind it cost, in steps. With slack s that is paid once in s tokens, so a token
takes 1 + (ratio − 1)/s steps: median and quartiles over the pairs. For the tiny model whole cycles are timed as well.
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


def cycles(model: Any, scorer: str, rows: int, slack: int, rounds: int) -> Iterator[float]:
    """Time of a whole cycle of ``slack`` tokens, relative to as many tokens over the same numbers of rows."""
    evicting = filled(model, rows, f"evict:{scorer}@rows={rows},slack={slack}")
    plain = filled(model, rows - 1, None)
    timed(model, evicting, slack), timed(model, plain, slack)
    for i in range(rounds):
        take_back(plain, rows)
        both = (evicting, plain)
        first, second = (timed(model, cache, slack) for cache in (both if i % 2 else both[::-1]))
        yield first / second if i % 2 else second / first


def spread(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


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
    print(
        f"{given.model}, {given.rows} rows, {given.rounds} pairs; {mx.default_device()}, {platform.machine()}"
    )
    print(f"BLAS {BLAS}")
    found: dict[str, Any] = {"model": given.model, "rows": given.rows, "rounds": given.rounds}
    for scorer in SCORERS:
        times = list(pairs(model, scorer, given.rows, given.rounds))
        ratios = [a / b for a, b in times]
        step = statistics.median(b for _, b in times)
        print(f"{scorer}: a step takes {step * 1e3:.2f} ms")
        found[scorer] = {"step_ms": step * 1e3}
        for slack in SLACKS:
            per_token = spread([1 + (r - 1) / slack for r in ratios])
            line = f"  slack {slack:>3}: {per_token['median']:.3f} [{per_token['low']:.3f}, {per_token['high']:.3f}]"
            found[scorer][slack] = {"per_token": per_token}
            if given.model == "tiny":
                whole = spread(list(cycles(model, scorer, given.rows, slack, given.rounds)))
                line += f"   whole cycles: {whole['median']:.3f} [{whole['low']:.3f}, {whole['high']:.3f}]"
                found[scorer][slack]["cycle"] = whole
            print(line, flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
