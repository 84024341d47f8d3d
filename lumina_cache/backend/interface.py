"""Is the installed mlx-lm one whose cache interface this library knows? Looked up by signature, not by version alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

from mlx_lm._version import __version__ as mlx_lm_version
from mlx_lm.models import base
from mlx_lm.models import cache as stock

from ..codecs.base import STEP
from ..errors import BackendInterfaceError

__all__ = ["TESTED_MLX_LM", "check_interface", "mlx_lm_version", "mlx_version"]

#: The mlx-lm versions that the test suite has run on.
TESTED_MLX_LM = ("0.32.2",)

#: Callables that the library overrides or relies on, with the parameters it passes or accepts.
_SIGNATURES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "make_prompt_cache": (lambda: stock.make_prompt_cache, ("model", "max_kv_size")),
    "KVCache.update_and_fetch": (lambda: stock.KVCache.update_and_fetch, ("self", "keys", "values")),
    "KVCache.to_quantized": (lambda: stock.KVCache.to_quantized, ("self", "group_size", "bits")),
    "KVCache.trim": (lambda: stock.KVCache.trim, ("self", "n")),
    "KVCache.merge": (lambda: stock.KVCache.merge, ("caches",)),
    "KVCache.from_state": (lambda: stock.KVCache.from_state, ("state",)),
    "RotatingKVCache.update_and_fetch": (
        lambda: stock.RotatingKVCache.update_and_fetch,
        ("self", "keys", "values"),
    ),
    "RotatingKVCache.make_mask": (
        lambda: stock.RotatingKVCache.make_mask,
        ("self", "N", "window_size", "return_array"),
    ),
    "ArraysCache.make_mask": (lambda: stock.ArraysCache.make_mask, ("self", "N")),
    "create_causal_mask": (
        lambda: base.create_causal_mask,
        ("N", "offset", "window_size", "right_padding", "left_padding"),
    ),
    "scaled_dot_product_attention": (
        lambda: base.scaled_dot_product_attention,
        ("queries", "keys", "values", "cache", "scale", "mask", "sinks"),
    ),
}

#: Fields that a fresh object of each class must have, because layers share them with mlx-lm's own code.
_FIELDS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "KVCache": (lambda: stock.KVCache(), ("keys", "values", "offset")),
    "RotatingKVCache": (
        lambda: stock.RotatingKVCache(8),
        ("keys", "values", "offset", "keep", "max_size", "_idx"),
    ),
    "ChunkedKVCache": (
        lambda: stock.ChunkedKVCache(8),
        ("keys", "values", "offset", "chunk_size", "start_position"),
    ),
    "QuantizedKVCache": (
        lambda: stock.QuantizedKVCache(),
        ("keys", "values", "offset", "group_size", "bits"),
    ),
    "ArraysCache": (lambda: stock.ArraysCache(1), ("cache", "left_padding", "lengths")),
    "CacheList": (lambda: stock.CacheList(), ("caches",)),
}


def mlx_version() -> str:
    return version("mlx")


@cache
def check_interface() -> None:
    """Compare the installed mlx-lm with the interface that the layers are written for.

    Raises:
        BackendInterfaceError: naming each difference and the versions that are known to work.
    """
    differences = [*_signature_differences(), *_field_differences(), *_step_differences()]
    if differences:
        raise BackendInterfaceError(
            f"mlx-lm {mlx_lm_version} is not one that lumina_cache knows: {'; '.join(differences)}. "
            f"Install a version it was tested on: pip install 'mlx-lm=={TESTED_MLX_LM[-1]}'"
        )


def _signature_differences() -> list[str]:
    found = []
    for name, (find, wanted) in _SIGNATURES.items():
        try:
            got = tuple(inspect.signature(find()).parameters)
        except AttributeError:
            found.append(f"{name} is missing")
            continue
        # ``create_attention_mask``-style *args are as good as the names they forward.
        if got != wanted and "args" not in got and not _same_but_receiver(got, wanted):
            found.append(f"{name}{got} was expected to take {wanted}")
    return found


def _same_but_receiver(got: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """A method may name its receiver as it likes."""
    return wanted[0] == "self" and len(got) == len(wanted) and got[1:] == wanted[1:]


def _field_differences() -> list[str]:
    found = []
    for name, (make, wanted) in _FIELDS.items():
        try:
            fields = vars(make())
        except (AttributeError, TypeError) as error:
            found.append(f"{name} cannot be made: {error}")
            continue
        missing = [f for f in wanted if f not in fields]
        if missing:
            found.append(f"{name} has no field {', '.join(missing)}")
    return found


def _step_differences() -> list[str]:
    """Bytes are predicted from the rows by which buffers grow."""
    found = []
    for name in ("KVCache", "RotatingKVCache", "QuantizedKVCache", "ChunkedKVCache"):
        step = getattr(getattr(stock, name, None), "step", None)
        if step is None:
            found.append(f"{name}.step is missing")
        elif step != STEP:
            found.append(f"{name}.step is {step}, not {STEP}")
    return found
