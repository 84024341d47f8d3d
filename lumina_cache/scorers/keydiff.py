"""KeyDiff: keys unlike the others stay.

Park et al., *KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments*, arXiv:2504.15364: a key that points elsewhere than most tends to draw much attention.

``score = −cos(k, m)``, m = mean over the rows of k/‖k‖₂. A row or a mean of length zero has a cosine of zero.

The mean is that of the rows held, so rows evicted earlier no longer count. The paper evicts after every block of the
prompt; NVIDIA's kvpress (``KeyDiffPress``) scores once and takes the keys as they are cached, rotated, as here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..backend.capabilities import KEYS
from ..method import Method, evict_method
from .base import Scorer, given

__all__ = ["KeyDiff"]

#: Below this a vector counts as zero and has no direction.
_SHORTEST = 1e-12


def _unit(x: mx.array) -> mx.array:
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), _SHORTEST)


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """The further from the mean direction the better."""

    method: ClassVar[Method] = evict_method(
        "keydiff", "KeyDiff, arXiv:2504.15364", "score = −cos(k, mean of k/‖k‖)", KEYS
    )

    copies: ClassVar[float] = 3.0

    def scores(self, keys: mx.array | None, values: mx.array | None, positions: mx.array) -> mx.array:
        directions = _unit(given(keys).astype(mx.float32))
        anchor = _unit(mx.mean(directions, axis=-2, keepdims=True))
        return -mx.sum(directions * anchor, axis=-1)
