"""Which model was it: a short name for a model's architecture, precision and weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

__all__ = ["fingerprint", "remembered_fingerprint"]

_remembered: dict[int, tuple[weakref.ref[Any], str]] = {}


def remembered_fingerprint(model: Any) -> str:
    """:func:`fingerprint`, computed once per live model object: many caches may be made for one model."""
    known = _remembered.get(id(model))
    if known is not None and known[0]() is model:
        return known[1]
    found = fingerprint(model)
    key = id(model)
    _remembered[key] = (weakref.ref(model, lambda _: _remembered.pop(key, None)), found)
    return found


def fingerprint(model: Any) -> str:
    """16 hexadecimal digits that change with the architecture, the precision or the weights of `model`.

    Hashed are the configuration, the names, shapes and dtypes of all parameters, and up to 16 evenly spaced
    values of each. Loading the same weights in the same dtype on the same kind of device gives the same
    fingerprint. Copies a few kilobytes off the device, however large the model.
    """
    parameters = sorted(tree_flatten(model.parameters()), key=lambda item: item[0])
    header = [
        type(model).__module__ + "." + type(model).__qualname__,
        _configuration(model),
        [(name, list(array.shape), str(array.dtype)) for name, array in parameters],
    ]
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True, default=repr).encode(), digest_size=8)
    samples = [_sample(array) for _, array in parameters]
    mx.eval(samples)
    for sample in samples:
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()


def _configuration(model: Any) -> Any:
    args: Any = getattr(model, "args", None)
    return dataclasses.asdict(args) if dataclasses.is_dataclass(args) and not isinstance(args, type) else None


def _sample(array: mx.array, n_values: int = 16) -> mx.array:
    """Up to `n_values` values spread over `array`, as raw bytes (numpy has no bfloat16)."""
    flat = array.reshape(-1)
    stride = -(-flat.size // n_values) | 1  # odd, so as not to stay in one column of a matrix
    return mx.contiguous(flat[::stride]).view(mx.uint8)
