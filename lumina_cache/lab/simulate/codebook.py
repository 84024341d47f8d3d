"""Codes of a codebook: rotated rows, each coordinate the nearest of 2ᵇ levels. No backend unpacks them; the simulator does.

TurboQuant, arXiv:2504.19874 (its mean-square-error form): a row x (D) is rotated at random, here by signs drawn once and a
Walsh–Hadamard transform, after which each coordinate of a vector of length √D follows ``f(y) ∝ (1 − y²/D)^((D−3)/2)``. The
levels are those of Lloyd and Max (IEEE Trans. Inf. Theory 28, 1982) for that density: each the mean of what is nearest
to it. Stored are b bits per element and one scale ``‖group‖/√g`` per ``group_size`` elements (in the paper, per row).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...codecs.base import Codec, CodecFamily, Encoded, Sides
from ...codecs.hadamard import rotate, rotate_back, why_not_rotated
from ...methods import METHODS

__all__ = ["CODEBOOKS", "Codebook", "levels"]

_STEPS = 300
_GRID = 20_000  #: even, so that no point lies on the border between two levels
_FARTHEST = 9.0  #: standard deviations; of a normal variable nothing to speak of lies beyond


@lru_cache(maxsize=32)
def levels(bits: int, dim: int) -> npt.NDArray[np.float64]:
    """The 2ᵇ levels, ascending, for a coordinate of a random vector of length √dim in ``dim`` dimensions."""
    farthest = min(np.sqrt(dim), _FARTHEST)
    y = np.linspace(-farthest, farthest, _GRID)[1:-1]
    density = np.exp((dim - 3) / 2 * np.log1p(-(y**2) / dim))
    # From the quantiles on, so that every level has something nearest to it.
    mass = np.cumsum(density) / density.sum()
    found: npt.NDArray[np.float64] = np.interp((np.arange(2**bits) + 0.5) / 2**bits, mass, y)
    for _ in range(_STEPS):
        cell = np.searchsorted((found[1:] + found[:-1]) / 2, y)
        weight = np.bincount(cell, density, found.size)
        found = np.bincount(cell, density * y, found.size) / weight
    return found


@dataclass(frozen=True)
class Codebook(Codec):
    """``bits`` per element and a scale per group; encoded are one byte per code, since nothing reads them packed."""

    bits: int
    group_size: int
    seed: int = 0

    @property
    def spans(self) -> tuple[int, ...]:
        return (1, 1)

    @property
    def code_bits(self) -> int:
        return self.bits

    def encode(self, rows: mx.array) -> Encoded:
        dim = rows.shape[-1]
        turned = rotate(rows.astype(mx.float32) * self._signs(dim))
        groups = mx.unflatten(turned, -1, (-1, self.group_size))
        scales = mx.sqrt(mx.square(groups).mean(axis=-1))
        unit = groups / mx.maximum(scales, mx.finfo(mx.float32).smallest_normal)[..., None]
        book = levels(self.bits, dim)
        codes = mx.zeros(unit.shape, mx.uint8)
        for edge in (book[1:] + book[:-1]) / 2:
            codes = codes + (unit > float(edge)).astype(mx.uint8)
        return mx.flatten(codes, -2), scales.astype(rows.dtype)

    def decode(self, encoded: Encoded, dtype: mx.Dtype) -> mx.array:
        codes, scales = encoded
        dim = codes.shape[-1]
        book = mx.array(levels(self.bits, dim).astype(np.float32))
        groups = mx.unflatten(book[codes], -1, (-1, self.group_size)) * scales.astype(mx.float32)[..., None]
        return (rotate_back(mx.flatten(groups, -2)) * self._signs(dim)).astype(dtype)

    def row_nbytes(self, width: int, itemsize: int) -> int:
        return width * self.bits // 8 + width // self.group_size * itemsize

    def why_not(self, head_dim: int) -> str | None:
        if head_dim % self.group_size:
            return f"groups of {self.group_size} do not divide a head dim of {head_dim}"
        return why_not_rotated(head_dim)

    def _signs(self, dim: int) -> mx.array:
        drawn = np.random.default_rng([self.seed, dim]).integers(0, 2, dim)
        return mx.array((2 * drawn - 1).astype(np.float32))


def _family(name: str) -> CodecFamily:
    return CodecFamily(
        METHODS["quant", name],
        lambda key_bits, value_bits, group_size: Sides(
            Codebook(key_bits, group_size), Codebook(value_bits, group_size)
        ),
    )


#: Codecs of the catalogue that only the simulator has.
CODEBOOKS = {name: _family(name) for name in ("turboquant", "turboquant_packed")}
