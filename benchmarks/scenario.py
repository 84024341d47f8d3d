"""A machine that runs short of memory, recovers and runs hot, played to a cache: its bytes, its limit, its decisions.

    python benchmarks/scenario.py --plot scenario.png
    python benchmarks/scenario.py --no-budget --json > scenario.json

The model is real (a tiny one with random weights, or ``--model smollm2``), and so is everything the cache does; the
machine's state and the clock are a script: every token takes a quarter of a second. Needs the ``analysis`` extra to plot.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lumina_cache.lab.blas import preload_openblas

preload_openblas()

import mlx.core as mx  # noqa: E402

from lumina_cache import LuminaCache  # noqa: E402
from lumina_cache.backend.probe import remembered_probe  # noqa: E402
from lumina_cache.budget import format_bytes  # noqa: E402
from lumina_cache.controller import smallest_budget  # noqa: E402
from lumina_cache.lab.tiny import build  # noqa: E402
from lumina_cache.report import describe  # noqa: E402
from lumina_cache.telemetry import PressureLevel, Snapshot, ThermalState  # noqa: E402

SECONDS_PER_TOKEN = 0.25
PROMPT, CHUNK = 512, 64
SEED = 0
PLENTY = 1 << 40

#: (from second, what the machine says from then on)
SCRIPT: tuple[tuple[float, dict[str, Any]], ...] = (
    (0, {"pressure_level": PressureLevel.NORMAL}),
    (160, {"pressure_level": PressureLevel.WARN}),
    (185, {"pressure_level": PressureLevel.CRITICAL, "swap_out_bytes_per_second": 2e6}),
    (200, {"pressure_level": PressureLevel.NORMAL}),
    (330, {"pressure_level": PressureLevel.NORMAL, "thermal_state": ThermalState.SERIOUS}),
)
END = 480.0


@dataclass(frozen=True)
class Moment:
    """The cache after one step. Bytes are allocated ones."""

    seconds: float
    offset: int
    rows: int
    nbytes: int
    limit: int | None
    pressure: str
    thermal: str
    actions: tuple[str, ...]  #: carried out before or right after this step


class Machine:
    """Telemetry by the script: what the cache reads as ``telemetry.latest``."""

    def __init__(self) -> None:
        self.at(0.0)

    def at(self, seconds: float) -> None:
        says = [fields for start, fields in SCRIPT if start <= seconds][-1]
        self.latest = Snapshot(
            monotonic_seconds=seconds,
            unix_seconds=seconds,
            platform="scripted",
            memory_available_bytes=PLENTY,
            **says,
        )


def play(
    model: Any, budget: int | None, log: Path | None, vocabulary: int
) -> tuple[list[Moment], LuminaCache]:
    """Feed the prompt in chunks and decode one token after the other until the script ends."""
    machine = Machine()
    cache = LuminaCache(model, budget=budget, telemetry=machine, log=log)
    mx.random.seed(SEED)
    moments: list[Moment] = []
    seconds, seen = 0.0, 0
    while seconds < END:
        n = CHUNK if moments == [] or moments[-1].offset < PROMPT else 1
        seconds += n * SECONDS_PER_TOKEN
        machine.at(seconds)
        logits = model(mx.random.randint(0, vocabulary, (1, n)), cache=cache)
        mx.eval(logits, [entry.state for entry in cache] if n > 1 else [])
        assert mx.isfinite(logits).all().item()
        view = cache.observe()
        applied = [r for r in cache.log.records if r["event"] == "action.applied" and r["seq"] > seen]
        seen = max((r["seq"] for r in applied), default=seen)
        moments.append(
            Moment(
                seconds,
                max(one.offset for one in view.layers),
                max(one.rows for one in view.layers),
                view.nbytes_allocated,
                view.limit,
                machine.latest.pressure_level.value,
                machine.latest.thermal_state.value,
                tuple(r["action"] for r in applied),
            )
        )
    return moments, cache


def plot(moments: list[Moment], budget: int | None, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x = [m.seconds for m in moments]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(11, 7), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    colours = {"warn": "#f6c344", "critical": "#d9534f"}
    for start, end in itertools.pairwise(moments):
        colour = colours.get(end.pressure)
        if colour is not None:
            above.axvspan(start.seconds, end.seconds, color=colour, alpha=0.35, linewidth=0)
        if end.thermal in ("serious", "critical"):
            above.axvspan(start.seconds, end.seconds, ymax=0.03, color="#7a3db8", alpha=0.6, linewidth=0)
    limits = [(m.seconds, m.limit / 1e6) for m in moments if m.limit is not None]
    if limits:
        above.step(*zip(*limits, strict=True), where="post", color="#333333", linestyle="--", label="limit")
    above.step(x, [m.nbytes / 1e6 for m in moments], where="post", color="#1f6fb2", label="allocated")
    if budget is not None:
        above.axhline(budget / 1e6, color="#999999", linewidth=0.8, label="budget")
    names: dict[str, int] = {}
    for m in moments:
        for action in m.actions:
            number = names.setdefault(action, len(names) + 1)
            above.plot(m.seconds, m.nbytes / 1e6, "o", color="#1f6fb2", markersize=5)
            above.annotate(
                str(number),
                (m.seconds, m.nbytes / 1e6),
                textcoords="offset points",
                xytext=(3, -12),
                fontsize=8,
            )
    above.set_ylabel("MB")
    above.set_ylim(bottom=0)
    above.set_title(
        "Shaded: memory pressure warn (yellow), critical (red); violet foot: the machine is hot", fontsize=9
    )
    above.legend(loc="lower right", bbox_to_anchor=(1.0, 0.05), fontsize=8)
    below.plot(x, [m.offset for m in moments], color="#999999", label="tokens seen")
    below.plot(x, [m.rows for m in moments], color="#1f6fb2", label="rows held")
    below.set_ylabel("rows")
    below.set_xlabel("seconds of the script")
    below.legend(loc="upper left", fontsize=8)
    figure.text(
        0.01,
        -0.01,
        "\n".join(f"{n}  {_short(a)}" for a, n in names.items()),
        fontsize=7,
        va="top",
        family="monospace",
    )
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _short(action: str) -> str:
    return action if len(action) < 120 else action[:117] + "…"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama", help="a tiny architecture, or smollm2")
    parser.add_argument("--times", type=float, default=1.0, help="budget as a multiple of the smallest one")
    parser.add_argument("--no-budget", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.model == "smollm2":
        from lumina_cache.lab.models import load_model

        model, vocabulary = load_model(None).model, 49_000
    else:
        model, vocabulary = build(asked.model), 96
    budget = None if asked.no_budget else int(asked.times * smallest_budget(remembered_probe(model)))
    moments, cache = play(model, budget, asked.log, vocabulary)
    if asked.plot is not None:
        plot(moments, budget, asked.plot)
    if asked.json:
        print(json.dumps([asdict(m) for m in moments]))
        return
    for record in cache.log.records:
        if record["event"] in ("decision", "action.applied", "warning"):
            print(describe(record))
    over = [m for m in moments if m.limit is not None and m.nbytes > m.limit and m.offset > PROMPT]
    last = moments[-1]
    print(
        f"{len(moments)} steps; at the end {last.rows} of {last.offset} rows in {format_bytes(last.nbytes)}; "
        f"{len(over)} single tokens left more than the limit"
    )


if __name__ == "__main__":
    main()
