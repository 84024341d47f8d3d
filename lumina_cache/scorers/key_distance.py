"""ManifoldKV: keys far from the mean key stay.

Datta et al., *ManifoldKV: Training-Free KV Cache Compression via Euclidean Outlier Detection*, arXiv:2602.08343: as KeyDiff,
but the distance also sees how long a key is.

``score = ‖k − m‖₂``, m = mean over the rows of k.

The paper measures against the mean of a window of rows where the context is very long (it reports 64 k tokens, where one
mean for all collapses); this is the form with one mean for all rows held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..backend.capabilities import KEYS
from ..method import Method, evict_method
from .base import Scorer, given

__all__ = ["KeyDistance"]


@dataclass(frozen=True)
class KeyDistance(Scorer):
    """The further from the mean key the better."""

    method: ClassVar[Method] = evict_method(
        "key_distance", "ManifoldKV, arXiv:2602.08343", "score = ‖k − mean of k‖₂", KEYS
    )

    copies: ClassVar[float] = 1.0

    def scores(self, keys: mx.array | None, values: mx.array | None, positions: mx.array) -> mx.array:
        wide = given(keys).astype(mx.float32)
        return mx.linalg.norm(wide - mx.mean(wide, axis=-2, keepdims=True), axis=-1)
