"""Weights that make a tiny model listen to its context.

With mlx's default initialisation a small random transformer hardly attends to anything: its attention is
almost uniform and its output is the embedding of the last token. Four times as wide, attention falls on one
or two tokens and the others could be lost unnoticed. At two and a half times, changing any one of the last
fourteen tokens moves the logits of most architectures by a tenth of their standard deviation or more.

What a module leaves at zero until a checkpoint is loaded (expert gates, token-shift mixes, attention sinks,
convolutions) is drawn too. Norm weights keep their initial values, and the parameters that set how fast a
recurrence forgets are drawn where it is stable and remembers some tens of tokens.
"""

from __future__ import annotations

import zlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

__all__ = ["GAIN", "randomise"]

GAIN = 2.5
"""Standard deviation of a matrix, relative to that of `mlx.nn.Linear`'s uniform(-1/√fan_in, 1/√fan_in)."""

# softplus or sigmoid of these is how fast a recurrence forgets; -3 keeps some tens of tokens
_FORGETTING = ("dt_bias", "dt_proj.bias", "w_lora.lora.2.bias", "recurrent_param")
_EMBEDDING = ("embed_tokens.weight", "wte.weight")
# three wide matrices in a row would make the MLP's output drown that of attention
_MLP_OUTPUT = "down_proj.weight"
_SMALL_WHEN_ZERO = ("sink", "correction_bias", "expert_bias", "router_bias")


def randomise(model: nn.Module, seed: int, embedding_gain: float = GAIN) -> None:
    """Replace the parameters of `model` in place by draws that depend on `seed` and their path alone."""
    drawn = []
    for path, value in tree_flatten(model.parameters()):
        gain = GAIN
        if path.endswith(_EMBEDDING):
            gain = embedding_gain
        elif path.endswith(_MLP_OUTPUT):
            gain = 1.0
        drawn.append((path, _draw(path, value, seed, gain)))
    model.update(tree_unflatten(drawn))


def _draw(path: str, value: mx.array, seed: int, gain: float) -> mx.array:
    name = path.rsplit(".", 1)[-1]
    key = mx.random.key(zlib.crc32(path.encode()) ^ seed)
    if value.dtype == mx.uint32:  # packed two-bit codes
        return mx.random.randint(0, 2**32 - 1, value.shape, dtype=mx.uint32, key=key)
    if name == "biases":  # of a packed matrix: the codes 0 to 3 centred
        return -1.5 * _draw(path.removesuffix("biases") + "scales", value, seed, gain)
    if not mx.issubdtype(value.dtype, mx.floating) or name == "A_log" or value.size == 0:
        return value

    def normal(mean: float, std: float) -> mx.array:
        return mx.random.normal(value.shape, dtype=value.dtype, loc=mean, scale=std, key=key)

    lowest, highest = value.min().item(), value.max().item()
    zeros = lowest == highest == 0.0
    if path.endswith(_FORGETTING):
        return normal(-3.0, 0.5)
    if lowest == highest and not zeros:
        return value
    if value.ndim == 1:
        if zeros and any(word in name for word in _SMALL_WHEN_ZERO):
            return normal(0.0, 0.2)
        if zeros and "scale" in name:
            return mx.ones_like(value)
        return value if zeros else normal(0.0, 0.1)
    if zeros and "norm" in path:
        return mx.zeros_like(value) if name == "bias" else mx.ones_like(value)
    if "conv" in path:
        taps = max(value.shape[1:])
        return normal(0.0, taps**-0.5)
    return normal(0.0, gain * (3 * value.shape[-1]) ** -0.5)
