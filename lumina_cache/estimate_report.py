"""``lumina-cache estimate``: bytes of a model's cache for contexts and actions, before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .actions import Action, Keep, parse_action
from .budget import format_bytes, parse_bytes
from .errors import EstimateInputError, ModelShapeError
from .kernels import device_named
from .shape import ModelShape, shape_from_config, shape_from_model
from .transient import Estimate, Wanted, estimate_run, longest_context

__all__ = ["estimate_command", "parse_context", "shape_of"]

_CONTEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmM]?)$")
_FACTORS = {"": 1, "k": 1024, "m": 1024 * 1024}


def estimate_command(
    *,
    config: Path | None,
    model: str | None,
    contexts: Sequence[str],
    actions: Sequence[str],
    fits: str | None,
    chunk: int,
    device: str | None,
    as_json: bool,
) -> str:
    """The report as text or JSON.

    Args:
        config: a ``config.json`` or a folder with one.
        model: a folder, a repository, or ``smollm2``; weights are not read except for the embedded model.
        contexts: tokens, such as ``4k`` or ``32768``; several may stand in one, with commas.
        actions: text forms; none for ``keep`` alone.
        fits: an amount of memory: adds the longest context whose peak stays within it.
        chunk: tokens per prefill step.
        device: cpu, metal or cuda; None for the one MLX uses here.

    Raises:
        ModelShapeError, EstimateInputError: naming the field or the argument that was not understood.
        ActionSyntaxError, BudgetError: likewise for an action and an amount.
    """
    shape = shape_of(config, model)
    target = device_named(device)
    plans: list[Action] = [parse_action(text) for text in actions] or [Keep()]
    wanted = [parse_context(one) for text in contexts for one in text.split(",") if one.strip()]
    rows = [
        estimate_run(shape, Wanted(context, chunk=min(chunk, context), action=action), target)
        for action in plans
        for context in wanted
    ]
    limit = None if fits is None else parse_bytes(fits)
    longest = [
        (action, longest_context(shape, limit, Wanted(1, chunk=chunk, action=action), target))
        for action in (plans if limit is not None else [])
        if limit is not None
    ]
    if as_json:
        return json.dumps(_record(shape, rows, limit, longest))
    return "\n".join(_text(shape, rows, limit, longest))


def shape_of(config: Path | None, model: str | None) -> ModelShape:
    """The shape of the model that ``config`` or ``model`` names; exactly one of them is given."""
    if (config is None) == (model is None):
        raise EstimateInputError("give either a config.json or a model")
    if config is not None:
        return shape_from_config(config)
    assert model is not None
    if model == "smollm2":
        from .lab.models import load_smollm2

        return shape_from_model(load_smollm2()[0])
    folder = Path(model).expanduser()
    return shape_from_config(folder if folder.exists() else _downloaded_config(model))


def _downloaded_config(repository: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, "config.json"))
    except Exception as error:  # no network, no such repository, not allowed: all end here
        first = str(error).strip().split("\n", 1)[0]
        raise ModelShapeError(
            f"model {repository!r} is no folder here, and its config.json could not be fetched "
            f"({type(error).__name__}: {first}). Download it and give --config"
        ) from None


def parse_context(text: str) -> int:
    """Tokens in ``text``: ``8192``, ``32k`` (of 1,024) or ``1m``."""
    match = _CONTEXT.match(text.strip())
    if match is None:
        raise EstimateInputError(f"context {text!r}: give a number of tokens such as 8192 or 32k")
    tokens = int(float(match[1]) * _FACTORS[match[2].lower()])
    if tokens < 1:
        raise EstimateInputError(f"context {text!r}: expected at least one token")
    return tokens


def _record(
    shape: ModelShape, rows: Iterable[Estimate], limit: int | None, longest: Sequence[tuple[Action, int]]
) -> dict[str, object]:
    return {
        "model_type": shape.model_type,
        "source": shape.source,
        "assumptions": list(shape.assumptions),
        "steps_unknown": shape.steps_unknown,
        "weights_nbytes": shape.weights_nbytes,
        "max_position": shape.max_position,
        "estimates": [one.to_record() for one in rows],
        "fits": limit,
        "longest_context": {str(action): tokens for action, tokens in longest},
    }


def _text(
    shape: ModelShape, rows: Sequence[Estimate], limit: int | None, longest: Sequence[tuple[Action, int]]
) -> Iterable[str]:
    kinds: dict[str, int] = {}
    for layer in shape.layers:
        kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    yield f"{shape.model_type}: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}"
    for assumption in shape.assumptions:
        yield f"assumed: {assumption}"
    if shape.steps_unknown is not None:
        yield f"what a step takes besides is not known, so peaks are too low: {shape.steps_unknown}"
    if rows:
        measured = "measured" if rows[0].measured_device else "not measured: from MLX's source"
        yield f"device {rows[0].device} (attention's own memory: {measured}); weights not included"
        yield ""
        width = max(len("action"), *(len(str(one.wanted.action)) for one in rows))
        yield f"{'action':{width}}  {'context':>9}  {'resident':>9}  {'transient':>9}  {'peak':>9}  peak at"
        for one in rows:
            yield (
                f"{one.wanted.action!s:{width}}  {one.wanted.context:>9,}  {format_bytes(one.resident):>9}  "
                f"{format_bytes(one.transient.together):>9}  {format_bytes(one.peak):>9}  {one.peak_at}"
            )
    if limit is not None:
        yield ""
        for action, tokens in longest:
            beyond = shape.max_position is not None and tokens > shape.max_position
            note = f"; the model is made for {shape.max_position:,}" if beyond else ""
            yield f"longest context within {format_bytes(limit)} with {action}: {tokens:,} tokens{note}"
