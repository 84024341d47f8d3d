"""Building a tiny model from its spec."""

from __future__ import annotations

import copy
import difflib
import importlib
import pkgutil
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_unflatten
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from lumina_cache.errors import ModelUnavailableError
from lumina_cache.lab.tiny.table import NOT_MODELS, SPECS, UNBUILDABLE
from lumina_cache.lab.tiny.weights import randomise

__all__ = ["build", "cache_pattern", "installed_modules"]

_LETTERS = {KVCache: "K", RotatingKVCache: "R", ChunkedKVCache: "C", ArraysCache: "A"}


def installed_modules() -> list[str]:
    """Every module below the installed `mlx_lm.models`, models and helpers alike, sorted."""
    return sorted(found.name for found in pkgutil.iter_modules(mlx_lm.models.__path__))


def build(name: str, *, dtype: mx.Dtype = mx.float32, seed: int = 0) -> nn.Module:
    """The tiny model of the mlx-lm module `name`, evaluated and in evaluation mode.

    The weights depend on `seed` and the installed mlx-lm, not on what was built before; the global random
    state of mlx is left as it was. Raises ModelUnavailableError for a module without a spec, or one that the
    installed mlx-lm does not have.
    """
    spec = SPECS.get(name)
    if spec is None:
        raise ModelUnavailableError(_why_not(name))
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    except ImportError as error:
        raise ModelUnavailableError(
            f"mlx_lm.models.{name} cannot be imported: {error}; install the mlx-lm version in pyproject.toml"
        ) from error
    random_state = cast(list[mx.array], mx.random.state)
    high, low = cast(list[int], random_state[0].tolist())
    mx.random.seed(seed)
    try:
        # some ModelArgs write into the lists and dicts they are given
        model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(dict(spec.config))))
        _make_runnable(model)
        mx.eval(model.parameters())
    finally:
        mx.random.seed(high << 32 | low)
    randomise(model, seed, spec.embedding_gain)
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def cache_pattern(cache: list[Any]) -> str:
    """A prompt cache in the notation of `TinySpec.cache`."""
    return " ".join(_entry(entry) for entry in cache)


def _make_runnable(model: nn.Module) -> None:
    """Put a dense matrix where `bitnet` has a ternary one, which only a Metal kernel can multiply."""
    dense = [
        (path, nn.Linear(layer.in_features, layer.out_features, bias="bias" in layer))
        for path, layer in model.named_modules()
        if isinstance(layer, BitLinear)
    ]
    if dense:
        model.update_modules(tree_unflatten(dense))


def _entry(entry: Any) -> str:
    if type(entry) is CacheList:
        return "(" + "".join(_entry(part) for part in entry.caches) + ")"
    return _LETTERS.get(type(entry), type(entry).__name__)


def _why_not(name: str) -> str:
    if name in UNBUILDABLE:
        return f"mlx_lm.models.{name} cannot be built: {UNBUILDABLE[name]}"
    if name in NOT_MODELS:
        return f"mlx_lm.models.{name} is a helper of mlx-lm, not a model"
    near = difflib.get_close_matches(name, SPECS, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "lumina_cache.lab.tiny.SPECS lists what there is"
    return f"no tiny model named {name!r}; {hint}"
