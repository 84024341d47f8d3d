"""What a cache takes, asked of its arrays, in bytes as they are and as a 16-bit cache would take.

The CPU computes in float32, and no cache on a GPU does. So that shares can be compared between machines, arrays of codes
count as they are and floating arrays (dense rows, scales, biases) two bytes per element. Packed rows of b bits in groups
of g then take (b + 32/g)/16 of dense rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...layers import ManagedLayer, leaves

__all__ = ["Stored", "stored"]


@dataclass(frozen=True)
class Stored:
    """Bytes of a cache's arrays: for the rows held (live), and with the slack of growth (allocated)."""

    live: int
    allocated: int
    live16: float  #: floating elements at two bytes
    allocated16: int


def stored(cache: Any) -> Stored:
    """Measure ``cache``: a list of cache objects, ours, mlx-lm's or another package's."""
    live = allocated = allocated16 = 0
    live16 = 0.0
    for leaf in leaves(cache):
        nbytes = sum(a.nbytes for a in _arrays(leaf))
        nbytes16 = sum(2 * a.size if mx.issubdtype(a.dtype, mx.floating) else a.nbytes for a in _arrays(leaf))
        used, of = _share_in_use(leaf)
        allocated += nbytes
        allocated16 += nbytes16
        live += nbytes * used // of
        live16 += nbytes16 * used / of
    return Stored(live, allocated, live16, allocated16)


def _arrays(leaf: Any) -> Iterator[mx.array]:
    held = {k: v for k, v in vars(leaf).items() if isinstance(v, mx.array | list | tuple)}
    return (a for _, a in tree_flatten(held) if isinstance(a, mx.array))


def _share_in_use(leaf: Any) -> tuple[int, int]:
    """Live over allocated, as a fraction; (1, 1) for classes that do not tell their capacity."""
    if isinstance(leaf, ManagedLayer):
        return (leaf.nbytes_live, leaf.nbytes_allocated) if leaf.nbytes_allocated else (1, 1)
    keys = getattr(leaf, "keys", None)
    first = keys[0] if isinstance(keys, list | tuple) and keys else keys
    if isinstance(first, mx.array) and first.ndim == 4 and hasattr(leaf, "offset"):
        return min(int(leaf.offset), first.shape[2]), first.shape[2]
    return 1, 1
