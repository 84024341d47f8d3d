"""``lumina-cache estimate``: bytes of a model's cache for contexts and actions, before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .actions import Action, Keep, Quantize, Reclaim, parse_action
from .budget import format_bytes, parse_bytes
from .errors import EstimateInputError, ModelShapeError
from .kernels import Device, device_named
from .shape import ModelShape, shape_from_config, shape_from_model
from .transient import Estimate, Wanted, estimate_run, longest_context

__all__ = ["caution", "estimate_command", "parse_context", "shape_of"]

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
    early = [
        None
        if one.wanted.action == Keep()
        else estimate_run(shape, replace(one.wanted, when="every_chunk"), target)
        for one in rows
    ]
    limit = None if fits is None else parse_bytes(fits)
    longest = [] if limit is None else [_longest(shape, limit, chunk, action, target) for action in plans]
    if as_json:
        return json.dumps(_record(shape, rows, early, limit, longest))
    return "\n".join(_text(shape, rows, early, limit, longest))


@dataclass(frozen=True)
class _Longest:
    """The longest contexts (tokens) within an amount of memory that the cache has to itself, or shares with the weights."""

    action: Action
    alone: int
    beside_weights: int | None  #: None where the weights' bytes are not known


def _longest(shape: ModelShape, nbytes: int, chunk: int, action: Action, device: Device) -> _Longest:
    wanted = Wanted(1, chunk=chunk, action=action)
    beside = None
    if shape.weights_nbytes is not None:
        beside = longest_context(shape, nbytes - shape.weights_nbytes, wanted, device)
    return _Longest(action, longest_context(shape, nbytes, wanted, device), beside)


def caution(shape: ModelShape, action: Action) -> str | None:
    """Why mlx-lm can probably not execute ``action`` on this model, as far as its shapes tell.

    None if nothing speaks against it. Trying is surer: :mod:`lumina_cache.backend.probe`.
    """
    dims = [
        pair
        for held, pair in zip(shape.layers, shape.head_dims, strict=True)
        if held.kind == "kv" and pair is not None
    ]
    if not dims and not isinstance(action, Keep | Reclaim):
        return "no layer holds one row per token, so there is nothing to change"
    for part in action.parts:
        if not isinstance(part, Quantize):
            continue
        odd = sorted({dim for pair in dims for dim in pair if dim % part.group_size})
        if odd:
            return f"groups of {part.group_size} do not divide head dim {', '.join(map(str, odd))}"
        if not part.read_packed or not shape.steps:
            continue
        # Every layer's attention is in a step whose logits are evaluated.
        whole = next(step for step in reversed(shape.steps) if step.logits)
        calls = [call for call, _ in whole.calls if call.window is None]
        if any(call.sinks for call in calls):
            return "attention sinks, which mlx-lm's packed attention refuses"
        if not calls:
            return "the model computes attention over all rows itself, without mlx-lm's packed attention"
        if not {(call.key_dim, call.value_dim) for call in calls} <= set(dims):
            return (
                "the model attends to something computed from the cached rows (latent attention), not to them"
            )
    return None


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
    shape: ModelShape,
    rows: Sequence[Estimate],
    early: Iterable[Estimate | None],
    limit: int | None,
    longest: Sequence[_Longest],
) -> dict[str, object]:
    return {
        "model_type": shape.model_type,
        "source": shape.source,
        "assumptions": list(shape.assumptions),
        "steps_unknown": shape.steps_unknown,
        "weights_nbytes": shape.weights_nbytes,
        "max_position": shape.max_position,
        "estimates": [one.to_record() for one in rows],
        "after_every_chunk": [one.to_record() for one in early if one is not None],
        "cautions": _cautions(shape, rows),
        "fits": limit,
        "longest_context": {str(one.action): one.alone for one in longest},
        "longest_context_beside_weights": {str(one.action): one.beside_weights for one in longest},
    }


def _cautions(shape: ModelShape, rows: Iterable[Estimate]) -> dict[str, str]:
    actions = dict.fromkeys(one.wanted.action for one in rows)
    return {str(action): why for action in actions if (why := caution(shape, action)) is not None}


def _text(
    shape: ModelShape,
    rows: Sequence[Estimate],
    early: Sequence[Estimate | None],
    limit: int | None,
    longest: Sequence[_Longest],
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
        weights = "" if shape.weights_nbytes is None else f" ({format_bytes(shape.weights_nbytes)})"
        yield f"device {rows[0].device} (attention's own memory: {measured}); weights not included{weights}"
        yield ""
        width = max(len("action"), *(len(str(one.wanted.action)) for one in rows))
        acts = any(one is not None for one in early)
        head = f"{'action':{width}}  {'context':>9}  {'resident':>9}  {'transient':>9}  {'peak':>9}"
        yield head + (f"  {'acting early':>12}" if acts else "") + "  peak at"
        for one, other in zip(rows, early, strict=True):
            soon = "–" if other is None else format_bytes(other.peak)
            yield (
                f"{one.wanted.action!s:{width}}  {one.wanted.context:>9,}  {format_bytes(one.resident):>9}  "
                f"{format_bytes(one.transient.together):>9}  {format_bytes(one.peak):>9}"
                + (f"  {soon:>12}" if acts else "")
                + f"  {one.peak_at}"
            )
        if acts:
            yield ""
            yield "acting early: the peak when the action is carried out after every chunk, not once after the prompt"
        for action, why in _cautions(shape, rows).items():
            yield f"mlx-lm can probably not do {action} on this model: {why}"
    if limit is not None:
        yield ""
        for found in longest:
            yield (
                f"longest context within {format_bytes(limit)} with {found.action}: {_tokens(found.alone, shape)}"
                f"; beside the weights: {_tokens(found.beside_weights, shape)}"
            )


def _tokens(tokens: int | None, shape: ModelShape) -> str:
    if tokens is None:
        return "unknown, as the bytes of the weights are"
    if tokens == 0:
        return "none"
    beyond = shape.max_position is not None and tokens > shape.max_position
    return f"{tokens:,} tokens" + (f" (the model is made for {shape.max_position:,})" if beyond else "")
