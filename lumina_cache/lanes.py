"""Encoded rows in the order that mlx-lm's sliding windows and attention chunks keep.

Each array of an encoded side is a row of its own kind (codes, scales, biases), and mlx-lm's cache classes move rows
without looking into them. So one plain mlx-lm cache per array, all fed alike, keeps them in step: the ring, its growth
and its trims are mlx-lm's own. Only codecs that encode row by row, decoded on fetch, can be stored like this.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .codecs.base import Encoded, own_rows
from .codecs.layout import Layout
from .rows import Parts, shapes_of

__all__ = ["Lanes"]


@dataclass
class Lanes:
    """One mlx-lm cache object for each array of the encoded rows."""

    layout: Layout
    dtype: mx.Dtype | None
    lanes: list[Any]
    #: (B·H, D) of keys and of values; None before the first row.
    shapes: tuple[tuple[int, int], tuple[int, int]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Lanes:
        return replace(self, lanes=copy.deepcopy(self.lanes, memo))

    @classmethod
    def holding(cls, layout: Layout, bare: Any, keys: mx.array | None, values: mx.array | None) -> Lanes:
        """Dense buffers, slack and order as they are, encoded and evaluated.

        Args:
            bare: a plain mlx-lm cache object at the position of the buffers, without rows.
        """
        if keys is None or values is None:
            return cls(layout, None, [copy.copy(bare) for _ in layout.keys.spans])
        encoded_keys = own_rows(layout.keys.encode(keys))
        mx.eval(encoded_keys)
        encoded_values = own_rows(layout.values.encode(values))
        mx.eval(encoded_values)
        return cls.of_arrays(layout, keys.dtype, bare, encoded_keys, encoded_values, shapes_of(keys, values))

    @classmethod
    def of_arrays(
        cls, layout: Layout, dtype: Any, bare: Any, keys: Encoded | None, values: Encoded | None, shapes: Any
    ) -> Lanes:
        """Buffers that are encoded already."""
        lanes = []
        for key, value in zip(keys or (), values or (), strict=True):
            lane = copy.copy(bare)
            lane.keys, lane.values = key, value
            lanes.append(lane)
        return cls(layout, dtype, lanes or [copy.copy(bare) for _ in layout.keys.spans], shapes)

    @property
    def first(self) -> Any:
        return self.lanes[0]

    @property
    def keys(self) -> Encoded | None:
        return None if self.first.keys is None else tuple(lane.keys for lane in self.lanes)

    @keys.setter
    def keys(self, arrays: Encoded) -> None:
        for lane, array in zip(self.lanes, arrays, strict=True):
            lane.keys = array

    @property
    def values(self) -> Encoded | None:
        return None if self.first.values is None else tuple(lane.values for lane in self.lanes)

    @values.setter
    def values(self, arrays: Encoded) -> None:
        for lane, array in zip(self.lanes, arrays, strict=True):
            lane.values = array

    def append(self, keys: mx.array, values: mx.array) -> None:
        self.dtype, self.shapes = keys.dtype, shapes_of(keys, values)
        encoded = zip(self.layout.keys.encode(keys), self.layout.values.encode(values), strict=True)
        for lane, (key, value) in zip(self.lanes, encoded, strict=True):
            lane.update_and_fetch(key, value)

    def fetch(self) -> tuple[mx.array, mx.array]:
        """Dense rows (B, H, T, D) in the order that mlx-lm would return them in."""
        return self.parts().dense()

    def parts(self) -> Parts:
        """The encoded rows in the order that mlx-lm would return them in."""
        assert self.dtype is not None, "no rows yet"
        pairs = [lane.keys_and_values() for lane in self.lanes]
        return Parts(self.layout, self.dtype, tuple(k for k, _ in pairs), tuple(v for _, v in pairs))

    def buffers(self) -> tuple[mx.array | None, mx.array | None]:
        """The whole buffers decoded, slack included."""
        if self.keys is None or self.values is None or self.dtype is None:
            return None, None
        return self.layout.keys.decode(self.keys, self.dtype), self.layout.values.decode(
            self.values, self.dtype
        )

    def trim(self, n: int) -> None:
        for lane in self.lanes:
            lane.trim(n)

    def trim_front(self) -> None:
        for lane in self.lanes:
            lane.maybe_trim_front()
