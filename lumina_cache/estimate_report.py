"""What a model's cache would take at some contexts under some actions, and how long a context fits: text and JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .actions import Action, Keep, Quantize, parse_action
from .budget import format_bytes, parse_bytes
from .errors import EstimateInputError, ModelUnavailableError
from .estimate import Held, after_append, nbytes_live
from .kernels import Device, device_named
from .shape import ModelShape, shape_from_config, shape_from_model
from .transient import Estimate, Wanted, estimate_run, longest_context

__all__ = [
    "Fit",
    "Report",
    "as_json",
    "as_text",
    "caution",
    "estimate_command",
    "make_report",
    "parse_tokens",
]

DEFAULT_CONTEXTS = ("4k", "32k", "128k")

#: Longest context that is searched for (tokens).
LIMIT = 1 << 22

_TOKENS = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([km]?)\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Fit:
    """The longest context (tokens) whose peak stays within an amount of memory; None where that cannot be said."""

    action: str
    when: str
    nbytes: int
    beside_weights: int | None  #: when the weights are in that memory, too
    cache_alone: int  #: when they are not
    longest_searched: int


@dataclass(frozen=True)
class Report:
    """Estimates for one model, with what has to be known to read them."""

    source: str
    shape: ModelShape
    device: Device
    estimates: tuple[Estimate, ...]
    fits: tuple[Fit, ...]
    cautions: tuple[tuple[str, str], ...]  #: (action, why mlx-lm can probably not execute it on this model)


def estimate_command(
    config: Path | None,
    model: str | None,
    contexts: list[str],
    actions: list[str],
    fits: str | None,
    chunk: int,
    as_json: bool,
    device: str | None = None,
) -> str:
    """What ``lumina-cache estimate`` prints.

    Args:
        config: a ``config.json`` or a folder with one.
        model: instead, the folder or the name of a Hugging Face repository, of which only ``config.json`` is read.
            Neither: the embedded model.
        contexts: tokens, such as ``4096``, ``4k`` (4,096) or ``1m`` (1,048,576); one text may hold several, by commas.
        actions: in the text form of :mod:`lumina_cache.actions`; ``keep`` is always estimated.
        fits: an amount of memory, such as ``8GB``, to find the longest context for.
        chunk: tokens per prefill step.
        as_json: one JSON document instead of text.
        device: ``cpu``, ``metal`` or ``cuda``; None: where MLX runs here.

    Raises:
        LuminaError: naming what cannot be read, and the remedy.
    """
    source, shape = _shape(config, model)
    report = make_report(
        source,
        shape,
        [parse_tokens(t) for text in contexts or DEFAULT_CONTEXTS for t in text.split(",") if t.strip()],
        [parse_action(text) for text in actions],
        None if fits is None else parse_bytes(fits),
        chunk,
        device_named(device),
    )
    return _json(report) if as_json else as_text(report)


def make_report(
    source: str,
    shape: ModelShape,
    contexts: Sequence[int],
    actions: Sequence[Action],
    fits: int | None,
    chunk: int,
    device: Device,
) -> Report:
    """Estimates of every context × action, once after the prompt and after every chunk of it; ``fits`` in bytes."""
    different = list(dict.fromkeys((Keep(), *actions)))
    questions = [Wanted(1, chunk)]
    for action in different[1:]:
        questions += [Wanted(1, chunk, action), Wanted(1, chunk, action, "every_chunk")]
    return Report(
        source=source,
        shape=shape,
        device=device,
        estimates=tuple(
            estimate_run(shape, replace(one, context=context), device)
            for context in contexts
            for one in questions
        ),
        fits=() if fits is None else tuple(_fit(shape, fits, one, device) for one in questions),
        cautions=tuple((str(a), why) for a in different if (why := caution(shape, a)) is not None),
    )


def parse_tokens(text: str) -> int:
    """A number of tokens: ``4096``, ``4k`` (4 · 1,024), ``1.5m`` (1.5 · 1,048,576).

    Raises:
        EstimateInputError: naming the text and what is read.
    """
    match = _TOKENS.match(text)
    if match is None:
        raise EstimateInputError(
            f"cannot read {text!r} as a number of tokens; write for example 4096, 32k or 1m"
        )
    tokens = int(float(match[1].replace("_", "")) * {"": 1, "k": 1024, "m": 1 << 20}[match[2].lower()])
    if not 0 < tokens <= LIMIT:
        raise EstimateInputError(f"{text!r} is {tokens} tokens; expected between 1 and {LIMIT}")
    return tokens


def caution(shape: ModelShape, action: Action) -> str | None:
    """Why mlx-lm can probably not execute ``action`` on this model, as far as shapes tell; None if nothing speaks
    against it. Trying is surer: :mod:`lumina_cache.backend.probe`."""
    dims = [
        pair
        for held, pair in zip(shape.layers, shape.head_dims, strict=True)
        if held.kind == "kv" and pair is not None
    ]
    changes = action != Keep() and str(action) != "reclaim"
    if changes and not dims:
        return "no layer holds one row per token, so there is nothing to change"
    for part in action.parts:
        if not isinstance(part, Quantize):
            continue
        odd = sorted({d for pair in dims for d in pair if d % part.group_size})
        if odd:
            return f"groups of {part.group_size} do not divide head dim {', '.join(map(str, odd))}"
        if part.codec != "affine" or part.key_bits != part.value_bits or not shape.steps:
            continue
        calls = [call for call, _ in shape.steps[-1].calls if call.window is None]
        if any(call.sinks for call in calls):
            return "attention sinks: mlx-lm's packed attention refuses them"
        if not calls:
            return "the model computes attention over all rows itself, without mlx-lm's packed attention"
        if not {(c.key_dim, c.value_dim) for c in calls} <= set(dims):
            return (
                "the model attends to something computed from cached rows (latent attention), not to the rows"
            )
    return None


def _fit(shape: ModelShape, nbytes: int, wanted: Wanted, device: Device) -> Fit:
    beside = None
    if shape.weights_nbytes is not None:
        left = nbytes - shape.weights_nbytes
        beside = longest_context(shape, left, wanted, device, LIMIT) if left > 0 else 0
    alone = longest_context(shape, nbytes, wanted, device, LIMIT)
    return Fit(str(wanted.action), wanted.when, nbytes, beside, alone, LIMIT)


def _shape(config: Path | None, model: str | None) -> tuple[str, ModelShape]:
    if config is not None and model is not None:
        raise EstimateInputError("give either a configuration or a model, not both")
    if config is not None:
        return str(config), shape_from_config(config)
    if model is None:
        from .lab.models import load_model

        loaded = load_model()
        return loaded.name, shape_from_model(loaded.model)
    folder = Path(model).expanduser()
    if folder.exists():
        return model, shape_from_config(folder)
    return model, shape_from_config(_fetched(model))


def _fetched(repository: str) -> Path:
    """The ``config.json`` of a Hugging Face repository, and nothing else of it."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, "config.json"))
    except Exception as error:  # hub, network, name: all mean "not available"
        text = " ".join(str(error).split()) or type(error).__name__
        raise ModelUnavailableError(
            f"the configuration of {repository!r} could not be had from the Hugging Face Hub ({text}). "
            "Check the name and the network, or give the path of a local config.json"
        ) from error


# -- text --------------------------------------------------------------------------------------------------------------

_CAUSES = (
    ("growth", "growing a buffer"),
    ("conversion", "converting a layer"),
    ("dequantise", "decoding a layer"),
    ("repeats", "packed rows per query head"),
    ("scores", "attention scores"),
    ("row_arrays", "the model's own arrays over rows"),
    ("activations", "activations"),
    ("logits", "logits"),
)


def as_text(report: Report) -> str:
    """A table for people."""
    shape, device = report.shape, report.device
    weights = "unknown" if shape.weights_nbytes is None else format_bytes(shape.weights_nbytes)
    chunk = report.estimates[0].wanted.chunk if report.estimates else 0
    lines = [
        f"{report.source}: {shape.module}, weights {weights}",
        f"device {device.name}, prefill in chunks of {chunk:,} tokens; weights are in no figure below",
        "",
        *_layer_lines(shape.layers),
        "",
    ]
    rows = [("context", "action", "resident", "peak", "of it transient", "mostly")]
    for one in report.estimates:
        rows.append(
            (
                f"{one.wanted.context:,}",
                _action(str(one.wanted.action), one.wanted.when),
                format_bytes(one.resident),
                format_bytes(one.peak),
                format_bytes(one.peak - one.held_at_peak),
                _mostly(one),
            )
        )
    lines += _columns(rows, right=(0, 2, 3, 4))
    lines += _fit_lines(report)
    notes = _notes(report)
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines)


def _action(action: str, when: str) -> str:
    return f"{action}, after every chunk" if when == "every_chunk" else action


def _layer_lines(layers: Sequence[Held]) -> list[str]:
    kinds = Counter(replace(one, name="", index=-1) for one in layers)
    lines = []
    for held, count in kinds.items():
        per_token = nbytes_live(after_append([held], 2)) - nbytes_live(after_append([held], 1))
        what = {
            "kv": "full attention",
            "rotating": f"sliding window of {held.max_size:,}",
            "chunked": f"chunks of {held.max_size:,}",
            "not_kv": "recurrent or convolution state",
            "opaque": "of a kind of their own",
        }.get(held.kind, held.kind)
        if held.kind == "not_kv":
            amount = f"{format_bytes(count * held.fixed_nbytes)} whatever the context"
        elif held.kind == "opaque":
            amount = f"about {count * held.token_nbytes:,.0f} bytes per token"
        else:
            amount = f"{count * per_token:,} bytes per token held"
        lines.append(f"  {count} layers, {what}: {amount}")
    return lines


def _mostly(one: Estimate) -> str:
    record = one.transient.to_record()
    parts = sorted(((record[name], words) for name, words in _CAUSES if record[name]), reverse=True)
    if not parts:
        return "–"
    return ", ".join(f"{words} {format_bytes(n)}" for n, words in parts[:2])


def _fit_lines(report: Report) -> list[str]:
    if not report.fits:
        return []
    longest = report.shape.max_position
    rows = [("action", "beside the weights", "cache alone")]
    rows += [
        (f.action, _tokens(f.beside_weights, longest), _tokens(f.cache_alone, longest)) for f in report.fits
    ]
    title = f"longest context that fits in {format_bytes(report.fits[0].nbytes)} (tokens):"
    return ["", title, *_columns(rows, right=(1, 2))]


def _tokens(n: int | None, longest: int | None) -> str:
    if n is None:
        return "unknown"
    if n == 0:
        return "none"
    text = f"{n:,}" if n < LIMIT else f"{n:,} and more"
    return f"{text} (> {longest:,} positions)" if longest is not None and n > longest else text


def _notes(report: Report) -> list[str]:
    notes = [f"assumed: {text}" for text in report.shape.assumptions]
    notes += [f"{action}: {why}" for action, why in report.cautions]
    if not report.device.measured:
        notes.append(f"attention on {report.device.name} was not measured: {report.device.source}")
    if report.estimates and not report.estimates[0].complete:
        notes.append("transient and peak hold growth and conversion only")
    return notes


def _columns(rows: Sequence[Sequence[str]], right: Iterable[int]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = set(right)
    return [
        "  ".join(
            c.rjust(w) if i in aligned else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# -- JSON --------------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """One JSON document; bytes and tokens are whole numbers."""
    shape = report.shape
    record = {
        "source": report.source,
        "model": {
            "model_type": shape.model_type,
            "module": shape.module,
            "weights_nbytes": shape.weights_nbytes,
            "vocab_size": shape.vocab_size,
            "max_position": shape.max_position,
            "assumptions": list(shape.assumptions),
            "steps_unknown": shape.steps_unknown,
            "layers": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "key_width": one.key_width,
                    "value_width": one.value_width,
                    "itemsize": one.itemsize,
                    "max_size": one.max_size,
                    "fixed_nbytes": one.fixed_nbytes,
                }
                for one in shape.layers
            ],
        },
        "device": {
            "name": report.device.name,
            "measured": report.device.measured,
            "source": report.device.source,
        },
        "estimates": [one.to_record() for one in report.estimates],
        "fits": [asdict(one) for one in report.fits],
        "cautions": [{"action": action, "why": why} for action, why in report.cautions],
    }
    return json.dumps(record, indent=2)


_json = as_json
