"""The shapes of a model's cache, from the model or from its ``config.json`` alone.

The model class of mlx-lm itself is built from the configuration, with weights that are never computed, and followed
for a few tokens (:mod:`lumina_cache.trace`). So the bytes come from the code that will run, not from a formula over
field names: latent attention, borrowed K/V, windows, recurrent state and nested configurations need no case of their
own, and a 60-layer model takes a second and no memory. What had to be assumed is listed in the result.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils
from mlx_lm.models import cache as stock
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.cache import make_prompt_cache

from .codecs.base import STEP
from .errors import ModelShapeError
from .estimate import Held
from .trace import StepTrace, leaves_of, trace_cache, trace_step

__all__ = ["ModelShape", "read_config", "shape_from_config", "shape_from_model"]

#: Steps that are followed for what they take besides the cache, as (tokens, whether logits are evaluated): a step of
#: one token, and two lengths to draw a line through, with logits and without.
STEPS = ((1, True), (16, False), (24, False), (16, True), (24, True))

#: The same where a recurrence is followed token by token, which takes long.
STEPS_BY_TOKEN = ((1, True), (8, False), (12, False), (8, True), (12, True))

#: Rows held while steps are followed, where no window is larger. Odd, so as not to meet a number of the
#: configuration by chance; equal remainders for every power of two up to their difference.
ROWS, ROWS_APART = 4999, 4096

_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "intermediate_size",
)


@dataclass(frozen=True)
class ModelShape:
    """What an estimate needs to know of a model. Widths are for a batch of one."""

    model_type: str
    module: str  #: of mlx-lm
    source: str  #: ``"config"`` or ``"model"``
    layers: tuple[Held, ...]  #: per cache leaf, with no rows yet
    head_dims: tuple[
        tuple[int, int] | None, ...
    ]  #: per leaf: last dims of keys and of values; None without K/V
    vocab_size: int
    logits_itemsize: int
    weights_nbytes: int | None
    max_position: int | None  #: longest context that the configuration names
    steps: tuple[
        StepTrace, ...
    ]  #: what steps take besides on the CPU, for :data:`STEPS`; empty if that is not known
    gpu_steps: tuple[StepTrace, ...]  #: the same where recurrences have a kernel
    steps_unknown: str | None  #: why ``steps`` is empty
    assumptions: tuple[str, ...]


def read_config(path: Path | str) -> dict[str, Any]:
    """The contents of a ``config.json``, or of the one in a folder.

    Raises:
        ModelShapeError: there is no such file, or it does not hold a JSON object.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelShapeError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelShapeError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelShapeError(f"{path} holds a {type(config).__name__}; a model's configuration is an object")
    return config


def shape_from_config(config: Mapping[str, Any] | Path | str) -> ModelShape:
    """The shapes of the model that an mlx-lm or Hugging Face configuration describes, without its weights.

    Raises:
        ModelShapeError: naming the field that is missing or does not fit and what was expected of it, or the module
            that cannot be followed.
    """
    given = read_config(config) if isinstance(config, Path | str) else config
    values = copy.deepcopy(dict(given))  # some ModelArgs write into what they are given
    assumptions: list[str] = []
    model_class, args_class = _classes(values)
    _check_counts(values)
    dtype = _dtype(values, assumptions)
    with _random_state_kept():
        model = _build(model_class, args_class, values)
        model.eval()
        _run_anywhere(model, assumptions)
        _set_dtype(model, dtype, assumptions)
        _pack(model, values, assumptions)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    entries, after, longer = _followed(model)
    return _shape(
        model, entries, after, longer, "config", weights, _max_position(values), assumptions, run=None
    )


def shape_from_model(model: Any) -> ModelShape:
    """The shapes of a model that is there. It is followed, not run, and is left as it was.

    Only a model that cannot be followed, because it evaluates arrays in its forward, is run, on four tokens.

    Not while the model is generating: its weights are placeholders for a moment.

    Raises:
        ModelShapeError: the model can neither be followed nor run.
    """
    assumptions: list[str] = []
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    args = getattr(model, "args", None)
    values = {f.name: getattr(args, f.name) for f in fields(args)} if is_dataclass(args) else {}
    run: Callable[[Sequence[int]], tuple[list[Any], mx.array]] | None = None
    try:
        entries, after, longer = _followed(model)
    except ModelShapeError as error:
        assumptions.append(
            f"shapes are from running four tokens, because the model cannot be followed: {error}"
        )

        def run(tokens: Sequence[int]) -> tuple[list[Any], mx.array]:
            return _run(model, tokens)

        (entries, after), (longer, _) = run([3]), run([3, 1])
    return _shape(model, entries, after, longer, "model", weights, _max_position(values), assumptions, run)


# -- from configuration to a model whose weights are never computed ----------------------------------------------------


def _classes(config: dict[str, Any]) -> tuple[Any, Any]:
    name = config.get("model_type")
    if not isinstance(name, str):
        found = "missing" if name is None else repr(name)
        raise ModelShapeError(
            f"field model_type: {found}; expected the name of an architecture such as 'llama'"
        )
    if config.get("model_file") is not None:
        raise ModelShapeError(
            f"field model_file: {config['model_file']!r}; a model with code of its own is not built from its "
            "configuration. Load it and estimate from the model"
        )
    try:
        classes: tuple[Any, Any] = utils._get_classes(config)
    except ValueError:
        raise ModelShapeError(_unknown(name, config)) from None
    except AttributeError:
        raise ModelShapeError(
            f"field model_type: {name!r} is a helper module of mlx-lm, not a model"
        ) from None
    return classes


def _unknown(name: str, config: Mapping[str, Any]) -> str:
    known = {found.name for found in pkgutil.iter_modules(mlx_lm.models.__path__)} | set(
        utils.MODEL_REMAPPING
    )
    near = difflib.get_close_matches(name, sorted(known), n=4, cutoff=0.5)
    text = f"field model_type: {name!r} is not a model of the installed mlx-lm"
    if near:
        text += f"; near are {', '.join(near)}"
    inner = config.get("text_config")
    if isinstance(inner, dict) and inner.get("model_type") in known:
        text += f". Its text_config is a {inner['model_type']}, which is one: estimate from that part alone"
    return text


def _check_counts(config: Mapping[str, Any], within: str = "") -> None:
    for field, value in config.items():
        if field in _COUNTS and (
            isinstance(value, bool | str | float) or (isinstance(value, int) and value < 1)
        ):
            raise ModelShapeError(f"field {within}{field}: {value!r}; expected a whole number above zero")
        if isinstance(value, dict) and field in ("text_config", "llm_config", "language_config"):
            _check_counts(value, f"{within}{field}.")


def _dtype(config: Mapping[str, Any], assumptions: list[str]) -> mx.Dtype:
    for part, prefix in ((config, ""), (config.get("text_config"), "text_config.")):
        for field in ("dtype", "torch_dtype"):
            value = part.get(field) if isinstance(part, Mapping) else None
            if value is None:
                continue
            name = str(value).removeprefix("torch.").removeprefix("mlx.core.")
            if name not in _DTYPES:
                raise ModelShapeError(
                    f"field {prefix}{field}: {value!r}; expected one of {', '.join(_DTYPES)}"
                )
            return _DTYPES[name]
    assumptions.append(
        "fields dtype and torch_dtype are missing: weights, keys and values taken to be bfloat16"
    )
    return mx.bfloat16


class _random_state_kept:
    """Building a model draws weights; the caller's random numbers shall not depend on it."""

    def __enter__(self) -> None:
        state: Any = mx.random.state
        high, low = state[0].tolist()
        self._seed = high << 32 | low

    def __exit__(self, *_: object) -> None:
        mx.random.seed(self._seed)


def _build(model_class: Any, args_class: Any, config: dict[str, Any]) -> Any:
    module = model_class.__module__
    missing = _missing(args_class, config)
    if missing:
        raise ModelShapeError(f"field {missing[0]}: missing; {module} needs {', '.join(missing)} besides")
    try:
        return model_class(args_class.from_dict(config))
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        named = re.findall(r"'(\w+)'", str(error))
        what = f"field {named[0]}" if named and isinstance(error, TypeError | KeyError) else "its fields"
        raise ModelShapeError(f"{module} cannot be built from this configuration; {what}: {text}") from error


def _missing(args_class: Any, config: Mapping[str, Any]) -> list[str]:
    if getattr(args_class.from_dict, "__qualname__", "") != "BaseModelArgs.from_dict":
        return []
    parameters = inspect.signature(args_class).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.name not in config]


def _run_anywhere(model: Any, assumptions: list[str]) -> None:
    """Put a dense matrix of the same shape where a layer would call a kernel that exists for Metal alone."""
    ternary = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, BitLinear)]
    if ternary:
        assumptions.append(
            f"{len(ternary)} ternary matrices were followed as dense ones of their shape; weights are counted dense"
        )
        dense = [(p, nn.Linear(b.in_features, b.out_features, bias="bias" in b)) for p, b in ternary]
        model.update_modules(tree_unflatten(dense))


def _set_dtype(model: Any, dtype: mx.Dtype, assumptions: list[str]) -> None:
    converted = getattr(model, "cast_predicate", lambda _: True)
    flat = tree_flatten(model.parameters())
    floating = [(path, array) for path, array in flat if mx.issubdtype(array.dtype, mx.floating)]
    model.update(tree_unflatten([(path, array.astype(dtype)) for path, array in floating if converted(path)]))
    left = sum(not converted(path) for path, _ in floating)
    if left and dtype != mx.float32:
        assumptions.append(f"{left} weights that mlx-lm leaves unconverted are taken to be float32")


#: ``quant_method`` of Hugging Face configurations that mlx-lm keeps packed, with the layout it packs them in.
_PACKED_METHODS = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}


def _pack(model: Any, config: Mapping[str, Any], assumptions: list[str]) -> None:
    """Pack weights as the configuration says. Keys and values get the type of the scales."""
    packing: Any = config.get("quantization")
    left: Sequence[str] = ()
    if packing is None:
        foreign = config.get("quantization_config") or _inner(config).get("quantization_config")
        if not foreign:
            return
        method = foreign.get("quant_method") if isinstance(foreign, Mapping) else None
        packing, left = _PACKED_METHODS.get(str(method)), foreign.get("modules_to_not_convert") or ()
        if packing is None:
            assumptions.append(
                f"field quantization_config: weights packed by {method!r} are counted dense; keys and values are not "
                "affected"
            )
            return
    try:
        group_size, bits = int(packing["group_size"]), int(packing["bits"])
    except (KeyError, TypeError, ValueError):
        raise ModelShapeError(
            f"field quantization: {packing!r}; expected at least the whole numbers group_size and bits"
        ) from None

    def packed(path: str, layer: Any) -> Any:
        if path in packing:
            return packing[path]
        if not hasattr(layer, "to_quantized") or any(fnmatch.fnmatch(path, f"{p}*") for p in left):
            return False
        return layer.weight.shape[-1] % group_size == 0

    nn.quantize(model, group_size, bits, mode=packing.get("mode", "affine"), class_predicate=packed)
    where = "every layer that can be" if not left else "every layer that can be and is not left out by name"
    assumptions.append(
        f"weights are packed to {bits} bits in groups of {group_size} in {where}; keys and values have the type of "
        "the activations, taken to be the configuration's dtype"
    )


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


def _max_position(config: Mapping[str, Any]) -> int | None:
    for part in (config, _inner(config)):
        value = part.get("max_position_embeddings")
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


# -- from a model to its shapes ----------------------------------------------------------------------------------------


def _followed(model: Any) -> tuple[Sequence[Any], mx.array, Sequence[Any]]:
    first = trace_cache(model, [3])
    return first.entries, first.logits, trace_cache(model, [3, 1]).entries


def _run(model: Any, tokens: Sequence[int]) -> tuple[list[Any], mx.array]:
    entries = make_prompt_cache(model)
    logits = mx.zeros((1,))
    try:
        for n in tokens:
            logits = model(mx.zeros((1, n), dtype=mx.int32), cache=entries)
            mx.eval(logits, [entry.state for entry in entries])
    except Exception as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise ModelShapeError(
            f"{type(model).__module__} cannot run {n} tokens: {type(error).__name__}: {first_line}"
        ) from error
    return entries, logits


def _shape(
    model: Any,
    entries: Sequence[Any],
    logits: mx.array,
    longer: Sequence[Any],
    source: str,
    weights_nbytes: int,
    max_position: int | None,
    assumptions: list[str],
    run: Callable[[Sequence[int]], tuple[list[Any], mx.array]] | None,
) -> ModelShape:
    def entries_after(tokens: Sequence[int]) -> Sequence[Any]:
        return trace_cache(model, tokens).entries if run is None else run(tokens)[0]

    named = list(leaves_of(entries))
    after = [leaf for _, leaf in leaves_of(longer)]
    indices = list(_indices(entries))
    layers: list[Held] = []
    for position, (name, leaf) in enumerate(named):

        def sized(tokens: Sequence[int], position: int = position) -> int:
            return _nbytes([leaf for _, leaf in leaves_of(entries_after(tokens))][position])

        layers.append(_held(name, indices[position], leaf, after[position], sized, assumptions))
    steps, gpu_steps, unknown = _steps(model, layers)
    if unknown is not None:
        assumptions.append(f"what a step takes besides the cache is not known: {unknown}")
    return ModelShape(
        model_type=str(getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1])),
        module=type(model).__module__,
        source=source,
        layers=tuple(layers),
        head_dims=tuple(_head_dims(leaf) for _, leaf in named),
        vocab_size=int(logits.shape[-1]),
        logits_itemsize=logits.dtype.size,
        weights_nbytes=weights_nbytes,
        max_position=max_position,
        steps=steps,
        gpu_steps=gpu_steps,
        steps_unknown=unknown,
        assumptions=tuple(assumptions),
    )


def _indices(entries: Sequence[Any]) -> Iterator[int]:
    for i, entry in enumerate(entries):
        for _ in leaves_of([entry]):
            yield i


def _held(
    name: str,
    index: int,
    leaf: Any,
    longer: Any,
    sized: Callable[[Sequence[int]], int],
    assumptions: list[str],
) -> Held:
    """One leaf as numbers, empty, from what it holds after three tokens and after one more."""
    if isinstance(leaf, stock.ArraysCache):
        return _state(name, index, leaf, longer, sized, assumptions)
    kind = next((kind for of, kind in _KINDS if isinstance(leaf, of)), None)
    if kind is None:
        return _unknown_leaf(name, index, leaf, sized, assumptions)
    if leaf.keys is None:
        assumptions.append(f"{name} ({type(leaf).__name__}) is never written by the model: 0 bytes")
        return Held(name, kind, index=index)
    if kind == "quantized":
        raise ModelShapeError(
            f"{name} is packed from its first row; estimate with a cache that the model makes itself"
        )
    keys, values = leaf.keys, leaf.values
    rows = 3 if kind in ("rotating", "concatenate") else STEP
    if keys.shape[2] != rows or values.shape[2] != rows or int(leaf.offset) != 3:
        return _unknown_leaf(name, index, leaf, sized, assumptions)
    if keys.dtype != values.dtype:
        raise ModelShapeError(
            f"{name} holds {keys.dtype} keys and {values.dtype} values; one type was expected"
        )
    return Held(
        name,
        kind,
        key_width=keys.shape[0] * keys.shape[1] * keys.shape[3],
        value_width=values.shape[0] * values.shape[1] * values.shape[3],
        itemsize=keys.dtype.size,
        max_size=int(getattr(leaf, "max_size", 0) or getattr(leaf, "chunk_size", 0)),
        keep=int(getattr(leaf, "keep", 0)),
        index=index,
    )


_KINDS: tuple[tuple[type, str], ...] = (
    (stock.KVCache, "kv"),
    (stock.RotatingKVCache, "rotating"),
    (stock.ChunkedKVCache, "chunked"),
    (stock.ConcatenateKVCache, "concatenate"),
    (stock.QuantizedKVCache, "quantized"),
)


def _state(
    name: str,
    index: int,
    leaf: Any,
    longer: Any,
    sized: Callable[[Sequence[int]], int],
    assumptions: list[str],
) -> Held:
    nbytes = _nbytes(longer)
    if nbytes != _nbytes(leaf):
        nbytes = sized([64])
        if nbytes != sized([64, 1]):
            return _unknown_leaf(name, index, leaf, sized, assumptions)
        assumptions.append(f"{name} ({type(leaf).__name__}) grows at first; counted as after 64 tokens")
    return Held(name, "not_kv", fixed_nbytes=nbytes, index=index)


def _unknown_leaf(
    name: str, index: int, leaf: Any, sized: Callable[[Sequence[int]], int], assumptions: list[str]
) -> Held:
    """A cache object that follows no known rule: a line through what it takes after two prompts."""
    short, long = sized([ROWS_APART]), sized([2 * ROWS_APART])
    slope = (long - short) / ROWS_APART
    fixed = round(short - slope * ROWS_APART)
    assumptions.append(
        f"{name} ({type(leaf).__name__}) follows no rule of mlx-lm's cache module; a line through {ROWS_APART} and "
        f"{2 * ROWS_APART} tokens is used: {fixed} bytes and {slope:g} per token"
    )
    return Held(name, "opaque", fixed_nbytes=fixed, token_nbytes=slope, index=index)


def _nbytes(leaf: Any) -> int:
    if isinstance(leaf, stock.ArraysCache):
        return sum(a.nbytes for a in leaf.cache if a is not None)
    return sum(a.nbytes for a in vars(leaf).values() if isinstance(a, mx.array))


def _head_dims(leaf: Any) -> tuple[int, int] | None:
    if (
        isinstance(leaf, stock.KVCache | stock.RotatingKVCache | stock.ChunkedKVCache)
        and leaf.keys is not None
    ):
        return leaf.keys.shape[3], leaf.values.shape[3]
    return None


def _steps(
    model: Any, layers: Sequence[Held]
) -> tuple[tuple[StepTrace, ...], tuple[StepTrace, ...], str | None]:
    """What steps take on the CPU and on a GPU, or why that is not known."""
    widest = max((one.max_size for one in layers), default=0)
    rows = ROWS + -(-widest // ROWS_APART) * ROWS_APART
    try:
        shapes = trace_cache(model, [1])

        def followed(steps: Iterable[tuple[int, bool]], kernels: bool) -> tuple[StepTrace, ...]:
            apart = (rows, rows + ROWS_APART)
            return tuple(
                trace_step(model, apart, n, logits=logits, kernels=kernels, shapes=shapes)
                for n, logits in steps
            )

        with_kernels = followed(STEPS, True)
        if with_kernels[0].recurrences == 0:
            return with_kernels, with_kernels, None
        return followed(STEPS_BY_TOKEN, False), with_kernels, None
    except ModelShapeError as error:
        return (), (), str(error)
