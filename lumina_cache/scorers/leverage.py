"""Statistical leverage: rows that others cannot stand in for, by key and by value, stay.

Sengupta et al., *Value-Guided KV Compression for LLMs via Approximated CUR Decomposition* (CurDKV), arXiv:2509.15038: a CUR
decomposition of softmax(QKᵀ)V keeps the rows with the highest leverage scores in K and in V, so that what attention puts
out is spanned by the rows that stay. With X = K or V of one head, T rows by D channels::

    ℓ(x) = xᵀ (XᵀX + λI)⁻¹ x,   λ = 10⁻³ · ‖X‖²_F / D                0 … 1
    score = ℓ(k) · ℓ(v)

The paper approximates ℓ with a Gaussian projection. This is exact but for the ridge λ (Alaoui and Mahoney,
arXiv:1411.0306), which keeps it defined for fewer rows than channels, for constant and for zero rows. The score does not
change with the scale of K or V. It costs T·D² multiplications per head instead of T·D, and one D × D factorisation, which
MLX does on the CPU.

NVIDIA's kvpress differs. ``CURPress``, whose default product is the one used here, takes ‖k‖²·‖v‖², normalised over 16
neighbours, which is leverage only where channels are uncorrelated and alike. ``LeverageScorePress`` (Compactor,
arXiv:2507.08143) uses keys alone, centred and before rotation; here keys are as they are cached, rotated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..backend.capabilities import KEYS, VALUES
from ..method import Method, evict_method
from .base import Scorer, given

__all__ = ["Leverage"]

_RIDGE = 1e-3


@dataclass(frozen=True)
class Leverage(Scorer):
    """The product of the leverage scores of key and value."""

    method: ClassVar[Method] = evict_method(
        "leverage", "CurDKV, arXiv:2509.15038", "score = ℓ(k)·ℓ(v), ℓ(x) = xᵀ(XᵀX + λI)⁻¹x", KEYS, VALUES
    )

    copies: ClassVar[float] = 6.0

    def scores(self, keys: mx.array | None, values: mx.array | None, positions: mx.array) -> mx.array:
        return _leverage(given(keys)) * _leverage(given(values))


def _leverage(x: mx.array) -> mx.array:
    """Ridge leverage scores (B, H, T) of the rows of ``x`` (B, H, T, D)."""
    rows, width = x.shape[-2:]
    if width == 0:  # some models cache values without channels: every row is as good as any other
        return mx.ones(x.shape[:-1])
    x = x.astype(mx.float32)
    size = mx.sqrt(mx.mean(x * x, axis=(-2, -1), keepdims=True))
    x = x / mx.where(size > 0, size, 1.0)  # now ‖X‖²_F / D = T, or X = 0
    gram = x.swapaxes(-1, -2) @ x + _RIDGE * rows * mx.eye(width)
    # gram = LLᵀ, so ℓ(x) = ‖L⁻¹x‖²: never negative, and the large product stays on the default device.
    root = mx.linalg.tri_inv(mx.linalg.cholesky(gram, stream=mx.cpu), stream=mx.cpu)
    return mx.sum(mx.square(x @ root.swapaxes(-1, -2)), axis=-1)
