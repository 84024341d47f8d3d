"""The norm of the key: short keys stay.

Devoto et al., *A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression*, arXiv:2406.11430: in decoder-only
models a key of low norm usually draws much attention.

``score = −‖k‖₂``. Rotation leaves a norm as it is, so rotated keys serve as well as unrotated ones.

The authors' example (``l2_compress`` with ``skip_layers=[0, 1]``) leaves the first two layers whole; a scorer does not know
its layer, so that is up to the caller. NVIDIA's kvpress (``KnormPress``) takes all layers. Neither protects sinks or
recent rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..backend.capabilities import KEYS
from ..method import Method, evict_method
from .base import Scorer, given

__all__ = ["KeyNorm"]


@dataclass(frozen=True)
class KeyNorm(Scorer):
    """The shorter the key the better."""

    method: ClassVar[Method] = evict_method(
        "key_norm", "Devoto et al., arXiv:2406.11430", "score = −‖k‖₂", KEYS
    )

    copies: ClassVar[float] = 1.0

    def scores(self, keys: mx.array | None, values: mx.array | None, positions: mx.array) -> mx.array:
        return -mx.linalg.norm(given(keys).astype(mx.float32), axis=-1)
