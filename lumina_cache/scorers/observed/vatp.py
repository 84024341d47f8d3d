"""VATP: accumulated attention times the size of the value.

Guo et al., *Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction: Value Also
Matters*, arXiv:2406.12335: a row with a small value adds little however much attention it draws.

``score_j = Σ_t a_{t,j} · ‖v_j‖₁``. The paper keeps the first 20 rows besides, because sinks have small values; here the
action protects its sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ...backend.capabilities import ATTENTION_WEIGHTS, VALUES
from ...method import Method, observed_method
from .base import Rotation, Statistics
from .h2o import H2O

__all__ = ["VATP"]


@dataclass(frozen=True)
class VATP(H2O):
    """The more value moved by the attention collected the better."""

    method: ClassVar[Method] = observed_method(
        "vatp", "VATP, arXiv:2406.12335", "accumulated attention weights · ‖v‖₁", ATTENTION_WEIGHTS, VALUES
    )

    def scores(
        self,
        stats: Statistics,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        rotation: Rotation | None = None,
    ) -> mx.array:
        return stats.rows["attention"] * mx.abs(values.astype(mx.float32)).sum(axis=-1)
