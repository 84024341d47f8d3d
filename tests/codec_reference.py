"""The codecs' formulas in NumPy, written from their definitions: what the tests compare codes and rows with."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np

__all__ = [
    "E2M1",
    "E4M3",
    "affine_codes",
    "affine_rows",
    "hadamard_matrix",
    "nearest_elements",
    "unpacked",
]

_EPSILON = np.float32(1e-7)

#: Values of the 4-bit and 8-bit elements by code.
E2M1 = np.array(
    [sign * v for sign in (1, -1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)],
    np.float32,
)


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


E4M3 = np.array([_e4m3(code) for code in range(256)], np.float32)


def unpacked(codes: mx.array, bits: int) -> np.ndarray:
    """Codes (..., n) of ``bits`` bits out of uint32 words: one stream of bits, lowest first."""
    words = np.ascontiguousarray(np.array(codes)).astype("<u4")
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    fields = stream.reshape(*words.shape[:-1], -1, bits)
    return fields @ (1 << np.arange(bits))


def affine_codes(x: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quotients before rounding (..., n), scales and biases (..., n/group) of float32 ``x`` (..., n).

    mlx's variant of the min-max grid: the step is stretched or shrunk so that zero lies on the grid, counted from the
    end of larger magnitude, which is exact.
    """
    groups = x.reshape(*x.shape[:-1], -1, group)
    low, high = groups.min(-1), groups.max(-1)
    top = np.float32(2**bits - 1)
    from_low = np.abs(low) > np.abs(high)
    step = np.maximum((high - low) / top, _EPSILON)
    scale = np.where(from_low, step, -step)
    edge = np.where(from_low, low, high)
    steps_to_zero = np.rint(edge / scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(steps_to_zero != 0, edge / steps_to_zero, scale)
    bias = np.where(steps_to_zero != 0, edge, np.float32(0))
    quotients = np.clip((groups - bias[..., None]) / scale[..., None], 0, top)
    return quotients.reshape(x.shape), scale, bias


def affine_rows(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, group: int) -> np.ndarray:
    """``scale·code + bias`` for each element."""
    groups = codes.reshape(*codes.shape[:-1], -1, group)
    return (scales[..., None] * groups + biases[..., None]).reshape(codes.shape).astype(np.float32)


def hadamard_matrix(width: int) -> np.ndarray:
    """The orthonormal matrix of a width that is a power of two, by Sylvester's doubling."""
    matrix = np.ones((1, 1))
    for _ in itertools.takewhile(lambda n: n < width, (2**k for k in range(30))):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(width)


def nearest_elements(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Distance from every element of ``x`` to the nearest value of ``table``."""
    values = np.unique(table[np.isfinite(table)])
    right = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    return np.minimum(np.abs(x - values[right - 1]), np.abs(x - values[right]))
