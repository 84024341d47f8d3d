"""Measure how far the byte estimates are off, on tiny models that run here: ``python -m lumina_cache.lab.estimate_error``.

Every run processes a prompt in chunks as ``mlx_lm.generate`` does, carries out one action, and decodes one token.
Predicted and measured are, for each run,

- *resident*: bytes of the arrays in the cache after the action; they have to agree exactly;
- *peak*: ``mx.get_peak_memory`` over what was active before the run. The bound of 5 % is for runs that the cache
  dominates: those whose held rows and state, before the action, are at least :data:`DOMINATED` of the measured peak.
  The errors of all others are reported beside it. MLX frees buffers from another thread than the one that allocates,
  so equal runs differ by up to half a layer; the second set is run twice and the larger peak counts.

Most tiny models are too small to be dominated by anything but activations, so a second set has wider rows, eight layers
and short chunks.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from ..actions import Action, Evict, Keep, Quantize, Reclaim
from ..apply import execute, held_all
from ..backend.capabilities import ROW_GATHER, packed_attention
from ..backend.interface import mlx_lm_version, mlx_version
from ..backend.probe import ModelProbe, probe_model
from ..estimate import chunk_schedule, nbytes_live
from ..kernels import device_named
from ..layers import adopt, leaves
from ..pages import update_page
from ..shape import ModelShape, shape_from_model
from ..steps import StepTracker
from ..transient import Estimate, Wanted, estimate_run
from .answer import arrays_nbytes
from .tiny import SPECS, build
from .tiny.spec import TinySpec

__all__ = [
    "DOMINATED",
    "LENGTHS",
    "Run",
    "Skipped",
    "Subject",
    "as_markdown",
    "main",
    "measure",
    "subjects",
    "summary",
]

#: Share of the measured peak that held rows and state have to take for a run to count as dominated by the cache.
DOMINATED = 0.75

LENGTHS = (1, 255, 256, 257, 600, 1500)
#: bfloat16 is slow on the CPU.
LENGTHS_16_BIT = (1, 257, 600)
QUICK_LENGTHS = (1, 257, 600)

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "gpt2",
    "phi3",
    "mixtral",
    "cohere2",
    "olmo3",
    "llama4",
    "nemotron-nas",
    "deepseek_v2",
    "deepseek_v3",
    "longcat_flash",
    "minimax_m3_vl",
    "qwen3_next",
    "kimi_linear",
    "falcon_h1",
    "lfm2",
    "jamba",
    "mamba2",
    "recurrent_gemma",
)
QUICK_ARCHITECTURES = ("llama", "gemma3_text", "deepseek_v3", "lfm2")

#: What the second set changes in a tiny model: eight layers of four K/V heads with 64 channels.
_WIDE = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
_LATENT = {"num_hidden_layers": 8, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "num_attention_heads": 2}
WIDENED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _WIDE,
        "qwen3": _WIDE,
        "mixtral": _WIDE,
        "olmo2": _WIDE,
        "gemma2": _WIDE,
        "gemma3_text": {**_WIDE, "sliding_window": 256, "sliding_window_pattern": 2},
        "gpt_oss": {
            **_WIDE,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
        "deepseek_v3": {**_LATENT, "num_key_value_heads": 2},
        "lfm2": {
            **_WIDE,
            "hidden_size": 256,
            "block_dim": 256,
            "layer_types": ["conv", "full_attention"] * 4,
        },
        "qwen3_next": {**_WIDE, "full_attention_interval": 2},
    }
)
#: In the second set: a buffer that has just grown, and one that is nearly full.
WIDENED_LENGTHS = (1025, 1790)
#: Chunks: 512 leaves a remainder for every length of the first set; 32 keeps scores small beside the cache.
CHUNK, WIDENED_CHUNK = 512, 32


@dataclass(frozen=True)
class Subject:
    """One model to measure on, and how."""

    architecture: str
    widened: bool
    dtype: str
    chunk: int
    lengths: tuple[int, ...]
    repeats: int = 1

    def build(self) -> Any:
        return _build(self)


@dataclass(frozen=True)
class Run:
    """One run, predicted and measured. Bytes."""

    architecture: str
    widened: bool
    dtype: str
    length: int
    chunk: int
    action: str
    resident: int
    resident_measured: int
    active_measured: int  #: what MLX counts as active beside the model after the action
    peak: int
    peak_measured: int
    share: float  #: of the measured peak that held rows and state take before the action
    peak_at: str

    @property
    def dominated(self) -> bool:
        return self.share >= DOMINATED

    @property
    def peak_error(self) -> float:
        """(predicted − measured) / measured."""
        return self.peak / self.peak_measured - 1


@dataclass(frozen=True)
class Skipped:
    """A model that could not be measured here, and why."""

    architecture: str
    dtype: str
    reason: str


def subjects(quick: bool = False) -> Iterator[Subject]:
    """The models to measure on; ``quick`` takes a few of them."""
    if quick:
        for name in QUICK_ARCHITECTURES:
            yield Subject(name, False, "float32", CHUNK, QUICK_LENGTHS)
        yield Subject("llama", True, "float32", WIDENED_CHUNK, WIDENED_LENGTHS[-1:], repeats=2)
        return
    for name in ARCHITECTURES:
        yield Subject(name, False, "float32", CHUNK, LENGTHS)
    for name in ARCHITECTURES:
        yield Subject(name, False, "bfloat16", CHUNK, LENGTHS_16_BIT)
    for name in WIDENED:
        yield Subject(name, True, "float32", WIDENED_CHUNK, WIDENED_LENGTHS, repeats=2)
    yield Subject("llama", True, "bfloat16", WIDENED_CHUNK, (600,), repeats=2)


def measure(subject: Subject) -> Iterator[Run]:
    """Every length of the subject with every action that its model can execute."""
    model = subject.build()
    shape, probe = shape_from_model(model), probe_model(model)
    actions = list(executable(probe))
    for length in subject.lengths:
        for action in actions:
            if _applies(action, length):
                again = (_measure(model, shape, subject, length, action) for _ in range(subject.repeats))
                yield max(again, key=lambda run: run.peak_measured)


def executable(probe: ModelProbe) -> Iterator[Action]:
    """The actions that this model can execute here, of those that the library has code for."""
    yield Keep()
    if not any(one.changeable for one in probe.layers):
        return
    yield Reclaim()
    if probe.profile.has(ROW_GATHER):
        yield Evict("sinks_window", ratio=0.5)
    group = probe.group_size
    for bits in (8, 4):
        if group is not None and probe.profile.has(packed_attention(bits, group)):
            yield Quantize("affine", bits, bits, group)


def _applies(action: Action, length: int) -> bool:
    """Half of one row is no row less."""
    return not isinstance(action, Evict) or action.rows_kept(length) < length


def _measure(model: Any, shape: ModelShape, subject: Subject, length: int, action: Action) -> Run:
    wanted = Wanted(length, subject.chunk, action)
    predicted: Estimate = estimate_run(shape, wanted, device_named("cpu"))
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    steps = StepTracker(name="measured")
    entries = [adopt(c, steps, f"layer {i}") for i, c in enumerate(model_cache(model))]
    for i, n in enumerate(sizes := list(chunk_schedule(length, subject.chunk))):
        _forward(model, entries, n, logits=i == len(sizes) - 1)
    held = nbytes_live(held_all(leaves(entries)))
    if action != Keep():
        execute(list(leaves(entries)), action)
    resident, active = _nbytes(entries), mx.get_active_memory() - before
    _forward(model, entries, 1, logits=True)
    peak = mx.get_peak_memory() - before
    return Run(
        architecture=subject.architecture,
        widened=subject.widened,
        dtype=subject.dtype,
        length=length,
        chunk=subject.chunk,
        action=str(action),
        resident=predicted.resident,
        resident_measured=resident,
        active_measured=active,
        peak=predicted.peak,
        peak_measured=peak,
        share=held / peak,
        peak_at=predicted.peak_at,
    )


def model_cache(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    made: list[Any] = make_prompt_cache(model)
    return made


def _forward(model: Any, entries: list[Any], n: int, *, logits: bool) -> None:
    """One step as mlx-lm takes it: the cache's arrays are evaluated, logits only where they are used."""
    out = model(mx.ones((1, n), dtype=mx.int32), cache=entries)
    states = [entry.state for entry in entries]
    mx.eval(out, states) if logits else mx.eval(states)
    del out, states
    mx.clear_cache()


def _nbytes(entries: Iterable[Any]) -> int:
    return arrays_nbytes(list(entries))


def _build(subject: Subject) -> Any:
    dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16}[subject.dtype]
    if not subject.widened:
        return build(subject.architecture, dtype=dtype)
    return _built_from(widened(subject.architecture), dtype)


def widened(architecture: str) -> TinySpec:
    """The tiny model's spec with more layers and wider rows."""
    spec = SPECS[architecture]
    return replace(spec, config=MappingProxyType({**spec.config, **WIDENED[architecture]}))


def _built_from(spec: TinySpec, dtype: mx.Dtype) -> Any:
    import copy
    import importlib

    module = importlib.import_module(f"mlx_lm.models.{spec.module}")
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(dict(spec.config))))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


# -- the table ---------------------------------------------------------------------------------------------------------


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures that are quoted, from the runs alone."""
    dominated = [r for r in runs if r.dominated]
    others = [r for r in runs if not r.dominated]
    return {
        "runs": len(runs),
        "architectures": len({r.architecture for r in runs}),
        "resident_exact": sum(r.resident == r.resident_measured for r in runs),
        "dominated": _spread(dominated),
        "others": _spread(others),
    }


def _spread(runs: Sequence[Run]) -> dict[str, Any]:
    if not runs:
        return {"runs": 0, "why_no_figures": "no run of this kind was made"}
    errors = sorted(r.peak_error for r in runs)
    worst = max(runs, key=lambda r: abs(r.peak_error))
    return {
        "runs": len(runs),
        "within_5_percent": sum(abs(e) <= 0.05 for e in errors),
        "median_error": statistics.median(errors),
        "least_error": errors[0],
        "greatest_error": errors[-1],
        "worst": {"architecture": worst.architecture, "length": worst.length, "action": worst.action},
    }


def as_markdown(runs: Sequence[Run]) -> str:
    """One line per model: how many runs, how many exact, and the span of peak errors."""
    lines = [
        "| model | dtype | set | runs | resident exact | dominated by the cache | peak error there | peak error elsewhere |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    groups: dict[tuple[str, str, bool], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.architecture, run.dtype, run.widened), []).append(run)
    for (architecture, dtype, wide), group in groups.items():
        exact = sum(r.resident == r.resident_measured for r in group)
        inside = [r for r in group if r.dominated]
        lines.append(
            f"| {architecture} | {dtype} | {'wide' if wide else 'tiny'} | {len(group)} | {exact} | {len(inside)} "
            f"| {_span(inside)} | {_span([r for r in group if not r.dominated])} |"
        )
    return "\n".join(lines)


def _span(runs: Sequence[Run]) -> str:
    if not runs:
        return "–"
    errors = [100 * r.peak_error for r in runs]
    return f"{min(errors):+.1f} … {max(errors):+.1f} %"


def summary_text(figures: Mapping[str, Any], skipped: Sequence[Skipped] = ()) -> str:
    """The summary as sentences."""
    inside, others = figures["dominated"], figures["others"]
    text = (
        f"{figures['runs']} runs on {figures['architectures']} architectures: resident bytes exact in "
        f"{figures['resident_exact']}."
    )
    for name, part in (("dominated by the cache", inside), ("all others", others)):
        if part["runs"]:
            text += (
                f" {name[0].upper()}{name[1:]}: {part['runs']} runs, peak within 5 % in {part['within_5_percent']}, median "
                f"error {100 * part['median_error']:+.1f} %, from {100 * part['least_error']:+.1f} to "
                f"{100 * part['greatest_error']:+.1f} %."
            )
    reasons: dict[str, list[str]] = {}
    for one in skipped:
        reasons.setdefault(one.reason, []).append(f"{one.architecture} in {one.dtype}")
    for reason, who in reasons.items():
        text += f" Not measured: {', '.join(who)} ({reason})."
    return text


#: The part of the page that is made.
PART = "estimate-error"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print progress, and write the table. Exit code 1 if resident bytes were not exact everywhere."""
    parser = argparse.ArgumentParser(prog="python -m lumina_cache.lab.estimate_error", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a few models and lengths, in less than a minute"
    )
    parser.add_argument("--json", type=Path, help="write runs and summary to this file")
    parser.add_argument("--page", type=Path, help="put the table between the marks of this Markdown page")
    options = parser.parse_args(argv)
    start, runs, skipped = time.perf_counter(), list[Run](), list[Skipped]()
    for subject in subjects(options.quick):
        began = time.perf_counter()
        try:
            new = list(measure(subject))
        except Exception as error:  # what MLX cannot run on this device is not an error of the estimate
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            skipped.append(Skipped(subject.architecture, subject.dtype, reason))
            print(f"{subject.architecture:16s} {subject.dtype:9s} skipped: {reason}", flush=True)
            continue
        runs += new
        exact = sum(r.resident == r.resident_measured for r in new)
        print(
            f"{subject.architecture:16s} {subject.dtype:9s} {'wide' if subject.widened else 'tiny'} {len(new):3d} runs, "
            f"resident exact in {exact}, peak error {_span(new)}, {time.perf_counter() - began:.1f} s",
            flush=True,
        )
    figures = summary(runs)
    text = summary_text(figures, skipped)
    print(f"{text} {time.perf_counter() - start:.0f} s")
    if options.json:
        record = {
            "device": "cpu",
            "mlx": mlx_version(),
            "mlx_lm": mlx_lm_version,
            "dominated_share": DOMINATED,
            "summary": figures,
            "runs": [
                asdict(r) | {"dominated": r.dominated, "peak_error": round(r.peak_error, 4)} for r in runs
            ],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    if options.page:
        update_page(options.page, PART, f"{text}\n\n{as_markdown(runs)}")
    return 0 if figures["resident_exact"] == figures["runs"] > 0 else 1


if __name__ == "__main__":
    from .blas import preload_openblas

    preload_openblas()
    raise SystemExit(main())
