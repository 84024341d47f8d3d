"""What a cache takes, asked of its arrays, in bytes as they are and as a 16-bit cache would take.

The CPU computes in float32, and no cache on a GPU does. So that shares can be compared between machines, arrays of codes
count as they are and floating arrays (dense rows, scales, biases) two bytes per element. Packed rows of b bits in groups
of g then take (b + 32/g)/16 of dense rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mlx.core as mx

from ...lanes import Lanes
from ...layers import ManagedLayer, leaves
from ...rows import RowStore
from ..answer import arrays_of

__all__ = ["Stored", "stored"]


@dataclass(frozen=True)
class Stored:
    """Bytes of a cache's arrays: for the rows held (live), and with the slack of growth (allocated)."""

    live: int
    allocated: int
    live16: float  #: floating elements at two bytes
    allocated16: int
    seen: int  #: statistics of the attention, kept beside the rows; not in the others


def stored(cache: Any) -> Stored:
    """Measure ``cache``: a list of cache objects, ours, mlx-lm's or another package's."""
    allocated = allocated16 = 0
    live = live16 = Fraction(0)
    for leaf in leaves(cache):
        for array, in_use in _arrays(leaf):
            nbytes16 = 2 * array.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes
            allocated += array.nbytes
            allocated16 += nbytes16
            live += array.nbytes * in_use
            live16 += nbytes16 * in_use
    seen = sum(leaf.seen.nbytes for leaf in leaves(cache) if getattr(leaf, "seen", None) is not None)
    return Stored(int(live), allocated, float(live16), allocated16, seen)


def _arrays(leaf: Any) -> Iterator[tuple[mx.array, Fraction]]:
    """Every array of a cache object with the share of it that rows held take."""
    store = getattr(leaf, "store", None)
    if isinstance(store, RowStore):
        for array in (*(store.keys or ()), *(store.values or ())):
            yield array, Fraction(store.sealed, store.capacity)
        for head in (store.head_keys, store.head_values):
            if head is not None:
                yield head, Fraction(1)
        for tail in (store.tail_keys, store.tail_values):
            if tail is not None:
                yield tail, Fraction(store.tail, store.layout.tail_capacity)
        return
    in_use, lanes = _in_use(leaf), getattr(leaf, "lanes", None)
    held = (*(lanes.keys or ()), *(lanes.values or ())) if isinstance(lanes, Lanes) else arrays_of(leaf)
    for array in held:
        yield array, in_use


def _in_use(leaf: Any) -> Fraction:
    """Rows held over rows allocated; 1 for classes that do not tell."""
    if isinstance(leaf, ManagedLayer):
        return Fraction(leaf.nbytes_live, leaf.nbytes_allocated or 1)
    keys = getattr(leaf, "keys", None)
    first = keys[0] if isinstance(keys, list | tuple) and keys else keys
    if isinstance(first, mx.array) and first.ndim == 4 and hasattr(leaf, "offset"):
        return Fraction(min(int(leaf.offset), first.shape[2]), first.shape[2])
    return Fraction(1)
