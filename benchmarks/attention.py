"""Attention alone, over packed rows: this library, mlx-lm's packed path, and dense rows, taking turns in one process.

    python benchmarks/attention.py [--json FILE] [--rounds 31] [--rows 512 2048 4096] [--bits 4] [--group-size 64]
    python benchmarks/attention.py --from docs/data/attention.json --page docs/hook.md

For one query and for a chunk of 512, per model's heads and number of rows: milliseconds of wall clock (median and fastest)
and of processor time of the whole process (median), how many times as fast as mlx-lm's packed path and as dense attention
(by either clock; ratios of the same round, median and quartiles), and the peak of a call beyond what its arguments take.
Weights play no part: rows are normal random numbers, float32, on the default device. Of a chunk, the new rows are dense
where mlx-lm packs them at once. On a CPU that others use as well, processor time is the clock to go by.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lumina_cache.lab.blas import preload_openblas

BLAS = preload_openblas()

import mlx.core as mx  # noqa: E402
from mlx_lm.models.base import quantized_scaled_dot_product_attention  # noqa: E402

from lumina_cache.backend.packed import PackedLayout, attend  # noqa: E402
from lumina_cache.pages import update_page  # noqa: E402

Attention = Callable[[], mx.array]

NATIVE, DENSE = "mlx-lm packed", "dense"
CHUNK = 512
TAIL = 32


@dataclass(frozen=True)
class Heads:
    model: str
    q_heads: int
    kv_heads: int
    dim: int


MODELS = (Heads("SmolLM2-135M", 9, 3, 64), Heads("Llama-3-8B", 32, 8, 128))


@dataclass(frozen=True)
class Ratio:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, over: Sequence[float], under: Sequence[float]) -> Ratio:
        low, median, high = statistics.quantiles(
            [a / b for a, b in zip(over, under, strict=True)], n=4, method="inclusive"
        )
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:5.2f} [{self.low:4.2f}, {self.high:4.2f}]"


@dataclass(frozen=True)
class Row:
    model: str
    queries: int
    rows: int
    path: str
    milliseconds: float  #: median
    fastest_milliseconds: float
    speed_over_native: Ratio
    speed_over_dense: Ratio
    processor_milliseconds: float  #: median
    processor_speed_over_native: Ratio
    processor_speed_over_dense: Ratio
    peak_bytes: int
    rows_bytes: int


def paths(heads: Heads, n: int, rows: int, bits: int, group_size: int) -> dict[str, tuple[Attention, int]]:
    """Each way to attend to ``rows`` rows, and the bytes that the rows take in it."""
    packing = {"group_size": group_size, "bits": bits}
    scale = heads.dim**-0.5
    mask = None if n == 1 else "causal"
    queries = mx.random.normal((1, heads.q_heads, n, heads.dim))
    keys, values = (mx.random.normal((1, heads.kv_heads, rows, heads.dim)) for _ in range(2))
    affine = PackedLayout(bits, group_size)
    rotated = PackedLayout(bits, group_size, rotated=True)
    per_channel = PackedLayout(bits, group_size, per_channel=True)

    def pack(x: mx.array, layout: PackedLayout, until: int) -> tuple[mx.array, ...]:
        x = x[:, :, :until]
        x = mx.hadamard_transform(x) if layout.rotated else x
        return tuple(mx.quantize(mx.contiguous(x.swapaxes(-1, -2)) if layout.per_channel else x, **packing))

    def ours(key_layout: PackedLayout, value_layout: PackedLayout, tail: int) -> tuple[Attention, int]:
        sealed = rows - tail
        k, v = pack(keys, key_layout, sealed), pack(values, value_layout, sealed)
        dense = [mx.contiguous(x[:, :, sealed:]) for x in (keys, values)] if tail else [None, None]
        held = [a for a in (*k, *v, *dense) if a is not None]
        mx.eval(held)
        return (
            lambda: attend(queries, k, v, key_layout, value_layout, *dense, scale=scale, mask=mask),
            sum(a.nbytes for a in held),
        )

    native = pack(keys, affine, rows), pack(values, affine, rows)
    mx.eval(queries, keys, values, native)
    native_bytes = sum(a.nbytes for side in native for a in side)

    def through_mlx_lm() -> mx.array:
        # It scales its queries in place.
        return quantized_scaled_dot_product_attention(queries + 0, *native, scale, mask, group_size, bits)

    def dense() -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    def fetch() -> mx.array:
        k, v = (mx.dequantize(*side, **packing) for side in native)
        return mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale, mask=mask)

    whole = 0 if n == 1 else n  # new rows of a chunk are dense
    found = {
        NATIVE: (through_mlx_lm, native_bytes),
        DENSE: (dense, keys.nbytes + values.nbytes),
        "decode, then dense": (fetch, native_bytes),
        "affine": ours(affine, affine, whole),
        "rotated": ours(rotated, rotated, whole),
        "per channel": ours(per_channel, affine, whole),
    }
    if n == 1:
        block = max(TAIL, group_size)
        found[f"per channel, {block} dense"] = ours(per_channel, affine, block)
    return found


def peak(call: Attention) -> int:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call())
    return mx.get_peak_memory() - before


def measure(heads: Heads, n: int, rows: int, bits: int, group_size: int, rounds: int) -> list[Row]:
    calls = paths(heads, n, rows, bits, group_size)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    processor: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, busy = time.perf_counter(), time.process_time()
            mx.eval(calls[name][0]())
            if turn:  # the first is for warming up
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - busy)
    return [
        Row(
            heads.model,
            n,
            rows,
            name,
            statistics.median(seconds[name]) * 1e3,
            min(seconds[name]) * 1e3,
            Ratio.of(seconds[NATIVE], seconds[name]),
            Ratio.of(seconds[DENSE], seconds[name]),
            statistics.median(processor[name]) * 1e3,
            Ratio.of(processor[NATIVE], processor[name]),
            Ratio.of(processor[DENSE], processor[name]),
            peak(call),
            held,
        )
        for name, (call, held) in calls.items()
    ]


PART = "attention"

#: What is quoted of the paths, and what they were meant to reach (times as fast): over mlx-lm's packed path, over dense.
QUOTED: Mapping[str, tuple[str, float | None, float | None]] = {
    "affine": ("affine", None, None),
    "rotated": ("hadamard", 1.0, None),
    f"per channel, {max(TAIL, 64)} dense": ("kivi", 1.3, 0.95),
}


def table(record: Mapping[str, Any]) -> str:
    """Steps of one token of a written record, by processor time."""
    rows = [row for row in record["rows"] if row["queries"] == 1]
    lengths = list(dict.fromkeys(row["rows"] for row in rows))
    lines = [
        f"{record['bits']} bits in groups of {record['group_size']}, {record['device']}, mlx {record['mlx']}, "
        f"{record['rounds']} rounds.",
        "",
        f"| heads of | rows stored as | goal | {' | '.join(f'{n:,} rows' for n in lengths)} |",
        f"| --- | --- | --- |{' --- |' * len(lengths)}",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        for over, key in ((NATIVE, "processor_speed_over_native"), (DENSE, "processor_speed_over_dense")):
            for path, (name, *goals) in QUOTED.items():
                found = {r["rows"]: r[key] for r in rows if r["model"] == model and r["path"] == path}
                goal = goals[over == DENSE]
                cells = [_cell(found.get(n)) for n in lengths]
                asked = "" if goal is None else f"{goal:g}"
                lines.append(f"| {model} | {name}, over {over} | {asked} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(ratio: Mapping[str, float] | None) -> str:
    return "–" if ratio is None else f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, CHUNK])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--page", type=Path, help="put a table between the marks of this Markdown page")
    parser.add_argument("--from", dest="record", type=Path, help="a file written before: nothing is run")
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text("utf-8")) if options.record else run(options)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.page:
        update_page(options.page, PART, table(record))


def run(options: argparse.Namespace) -> dict[str, Any]:
    print(f"{mx.default_device()}, MLX {mx.__version__}, {platform.machine()}; BLAS: {BLAS}")
    print(f"{options.bits} bits in groups of {options.group_size}; ratios are of speed: median [quartiles]")
    header = (
        f"{'path':24s} {'ms':>8s} {'fastest':>8s} {'× mlx-lm packed':>18s} {'× dense':>18s} "
        f"{'CPU ms':>8s} {'× mlx-lm packed':>18s} {'× dense':>18s} {'peak MB':>8s} {'rows MB':>8s}"
    )
    measured = []
    for heads in MODELS:
        for n in options.queries:
            for rows in options.rows:
                rounds = options.rounds if n == 1 else max(3, options.rounds // 8)
                total = rows if n == 1 else rows + n
                print(f"\n{heads.model}, {n} queries, {total} rows, {rounds} rounds\n{header}")
                for row in measure(heads, n, total, options.bits, options.group_size, rounds):
                    measured.append(row)
                    print(
                        f"{row.path:24s} {row.milliseconds:8.2f} {row.fastest_milliseconds:8.2f} "
                        f"{row.speed_over_native!s:>18s} {row.speed_over_dense!s:>18s} "
                        f"{row.processor_milliseconds:8.2f} {row.processor_speed_over_native!s:>18s} "
                        f"{row.processor_speed_over_dense!s:>18s} "
                        f"{row.peak_bytes / 1e6:8.2f} {row.rows_bytes / 1e6:8.2f}",
                        flush=True,
                    )
    return {
        "device": str(mx.default_device().type).removeprefix("DeviceType."),
        "mlx": mx.__version__,
        "machine": platform.machine(),
        "blas": str(BLAS),
        "bits": options.bits,
        "group_size": options.group_size,
        "rounds": options.rounds,
        "rows": [asdict(row) for row in measured],
    }


if __name__ == "__main__":
    main()
