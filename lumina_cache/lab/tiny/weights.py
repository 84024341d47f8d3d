"""Weights that make a tiny model listen to its context.

With mlx's default initialisation a small random transformer hardly attends to anything: its attention is
almost uniform and its output is the embedding of the last token. Matrices are therefore drawn four times as
wide as `mlx.nn.Linear` draws them, and what a module leaves at zero until a checkpoint is loaded (expert
gates, token-shift mixes, attention sinks, convolutions) is drawn too. Norm weights and the parameters that
set how fast a recurrence decays keep their initial values, which are stable.
"""

from __future__ import annotations

import zlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

__all__ = ["GAIN", "randomise"]

GAIN = 4.0
"""Standard deviation of a matrix, relative to that of `mlx.nn.Linear`'s uniform(-1/√fan_in, 1/√fan_in)."""

# softplus or sigmoid of these is how fast a recurrence forgets; -3 keeps some tens of tokens
_FORGETTING = ("dt_bias", "dt_proj.bias", "w_lora.lora.2.bias", "recurrent_param")
_EMBEDDING = ("embed_tokens.weight", "wte.weight")
_SMALL_WHEN_ZERO = ("sink", "correction_bias", "expert_bias", "router_bias")


def randomise(model: nn.Module, seed: int, embedding_gain: float = GAIN) -> None:
    """Replace the parameters of `model` in place by draws that depend on `seed` and their path alone."""
    drawn = []
    for path, value in tree_flatten(model.parameters()):
        gain = embedding_gain if path.endswith(_EMBEDDING) else GAIN
        drawn.append((path, _draw(path, value, seed, gain)))
    model.update(tree_unflatten(drawn))


def _draw(path: str, value: mx.array, seed: int, gain: float) -> mx.array:
    name = path.rsplit(".", 1)[-1]
    if not mx.issubdtype(value.dtype, mx.floating) or name == "A_log" or value.size == 0:
        return value
    lowest, highest = value.min().item(), value.max().item()
    zeros = lowest == highest == 0.0
    key = mx.random.key(zlib.crc32(path.encode()) ^ seed)
    if path.endswith(_FORGETTING):
        return mx.random.normal(value.shape, dtype=value.dtype, key=key) * 0.5 - 3.0
    if lowest == highest and not zeros:
        return value
    if value.ndim == 1:
        if zeros and any(word in name for word in _SMALL_WHEN_ZERO):
            return mx.random.normal(value.shape, dtype=value.dtype, key=key) * 0.2
        if zeros and "scale" in name:
            return mx.ones_like(value)
        return value if zeros else mx.random.normal(value.shape, dtype=value.dtype, key=key) * 0.1
    if zeros and "norm" in path:
        return mx.zeros_like(value) if name == "bias" else mx.ones_like(value)
    if "conv" in path:
        taps = max(value.shape[1:])
        return mx.random.normal(value.shape, dtype=value.dtype, key=key) * taps**-0.5
    std = gain * (3 * value.shape[-1]) ** -0.5
    return mx.random.normal(value.shape, dtype=value.dtype, key=key) * std
