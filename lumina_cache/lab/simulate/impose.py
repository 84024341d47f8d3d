"""Attention that sees a full cache as if an action had been taken: the cache objects, and who answers their attention.

The cache stays full: an imposed layer counts every row, so positions, offsets and the model's own masks are those of the
full cache. What it hands to attention are the rows that each head would still hold, as they would be read: decoded
where they would be encoded. Padding, where heads hold different numbers of rows, is masked.

All scored tokens go through in one forward, although in a real run they come in steps, and a dense newest row is sealed
behind one of them: such a row is handed over twice, dense and decoded, and the mask shows each query the one that it
would have seen. Nothing of this is an approximation: attention does not mind where a row lies, only which rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models import cache as stock

from ...codecs import Layout
from ...layers import KVCache
from .fetch import shown
from .held import Group, LayerRows, round_trip
from .seal import NEVER, sealed_after, step_of

__all__ = ["ImposedChunk", "ImposedLayer", "ImposedServer", "ImposedWindow"]


@dataclass(frozen=True)
class _Sealing:
    """The dense newest rows of one group, and when each of them is sealed."""

    group: Group
    after: npt.NDArray[np.int32]  #: of the tail's rows, then of the new ones

    @property
    def count(self) -> int:
        """Rows that are sealed before the last token is in: the first so many."""
        return int((self.after != NEVER).sum())


class ImposedLayer(KVCache):
    """What an action leaves of a layer of ``offset`` rows. For one forward of ``tokens`` tokens."""

    def __init__(self, name: str, offset: int, effect: LayerRows, tokens: int, block: int) -> None:
        """
        Args:
            offset: rows (tokens) of the full cache.
            block: tokens that would come at a time.
        """
        super().__init__()
        self.name, self.offset = name, offset
        self.effect = effect
        self._full_rows = offset
        self._block = block
        self._widest = max(g.rows for g in effect.groups)
        seals = effect.layout.unit > 1
        self._sealing = tuple(
            _Sealing(g, sealed_after(effect.layout, g.tail, tokens, block)) for g in effect.groups if seals
        )
        self._again = max((one.count for one in self._sealing), default=0)

    # -- the rows: (1, H, R + N + P, D), those held, those that come, and those sealed meanwhile once more ----------------

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        layout, groups = self.effect.layout, self.effect.groups
        held_keys = _by_heads([_padded(g.keys, self._widest) for g in groups])
        held_values = _by_heads([_padded(g.values, self._widest) for g in groups])
        if layout.unit == 1 and not layout.dense:
            keys, values = round_trip(layout, keys, values)
        pieces_keys, pieces_values = [held_keys, keys], [held_values, values]
        if self._again:
            again = [self._sealed_again(one, keys, values) for one in self._sealing]
            pieces_keys.append(_by_heads([k for k, _ in again]))
            pieces_values.append(_by_heads([v for _, v in again]))
        return mx.concatenate(pieces_keys, axis=2), mx.concatenate(pieces_values, axis=2)

    def _sealed_again(self, one: _Sealing, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The rows of a group that are sealed on the way, decoded and padded: (1, h, P, D)."""
        group, n = one.group, one.count
        here, tail = slice(group.first, group.end), slice(group.rows - group.tail, None)
        sealed = (
            mx.concatenate([held[:, :, tail], new[:, here]], axis=2)[:, :, :n]
            for held, new in ((group.keys, keys), (group.values, values))
        )
        decoded = round_trip(group.layout, *sealed) if n else tuple(sealed)
        return _padded(decoded[0], self._again), _padded(decoded[1], self._again)

    # -- what each query sees ---------------------------------------------------------------------------------------

    def mask(self, queries: mx.array, scale: float, mask: Any) -> Any:
        """The model's ``mask`` of T + N columns as one of the columns that were handed over, added to the scores.

        ``"causal"`` and None stay what they are where every column is seen.
        """
        new, groups = queries.shape[2], self.effect.groups
        even = all(g.rows == self._widest for g in groups)
        plain = mask is None or isinstance(mask, str)
        if plain and even and not self._again and self.effect.fetched is None:
            return mask
        visible = mx.array(self._visible(new))
        if self.effect.fetched is not None:
            visible = visible & shown(self.effect, queries, scale, self._widest, visible.shape[-1])
        allowed = _four_axes(mask, new, self._full_rows + new)
        columns = _only_new(self._widest, new, self._again, self._full_rows) if plain else self._columns(new)
        allowed = _of_columns(allowed, columns, queries.shape[1])
        visible = _per_query_head(visible, queries.shape[1])
        lowest = mx.finfo(queries.dtype).min
        if allowed.dtype == mx.bool_:
            return mx.where(allowed & visible, 0.0, lowest).astype(queries.dtype)
        return mx.where(visible, allowed, lowest).astype(queries.dtype)

    def _visible(self, new: int) -> npt.NDArray[np.bool_]:
        """(1, H, N, R + N + P), or (1, 1, …) where all heads are alike; the order of tokens is the model's mask's."""
        groups, step = self.effect.groups, step_of(new, self._block)
        found = []
        for i, group in enumerate(groups):
            one = np.zeros((new, self._widest + new + self._again), dtype=bool)
            one[:, : group.rows] = True
            one[:, self._widest : self._widest + new] = True
            if self._sealing:
                after, tail, n = self._sealing[i].after, group.tail, self._sealing[i].count
                dense = step[:, None] <= after[None]
                one[:, group.rows - tail : group.rows] = dense[:, :tail]
                one[:, self._widest : self._widest + new] = dense[:, tail:]
                one[:, self._widest + new : self._widest + new + n] = ~dense[:, :n]
            found.append(one)
        if len(found) == 1:
            return found[0][None, None]
        return np.repeat(np.stack(found), [g.heads for g in groups], axis=0)[None]

    def _columns(self, new: int) -> npt.NDArray[np.int32]:
        """(H, R + N + P): which of the model's T + N columns each row stands for; any for padding."""
        found = []
        for i, group in enumerate(self.effect.groups):
            positions = np.array(group.positions)[0]
            fresh = np.broadcast_to(np.arange(self._full_rows, self._full_rows + new), (group.heads, new))
            columns = [_padded_numbers(positions, self._widest), fresh]
            if self._again:
                pending = np.concatenate([positions[:, group.rows - group.tail :], fresh], axis=1)
                columns.append(_padded_numbers(pending[:, : self._sealing[i].count], self._again))
            found.append(np.concatenate(columns, axis=1))
        return np.concatenate(found, axis=0).astype(np.int32)


def _by_heads(pieces: list[mx.array]) -> mx.array:
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)


def _padded(rows: mx.array, to: int) -> mx.array:
    more = to - rows.shape[2]
    return mx.pad(rows, [(0, 0), (0, 0), (0, more), (0, 0)]) if more else rows


def _padded_numbers(numbers: npt.NDArray[Any], to: int) -> npt.NDArray[Any]:
    return np.pad(numbers, [(0, 0), (0, to - numbers.shape[1])])


def _four_axes(mask: Any, new: int, rows: int) -> mx.array:
    """The model's mask as (1|B, 1|Hq, N, T + N)."""
    if mask is None or isinstance(mask, str):
        return mx.array(np.tri(new, rows, rows - new, dtype=bool))[None, None]
    four: mx.array = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    return mx.broadcast_to(four, (*four.shape[:2], new, rows))


def _only_new(widest: int, new: int, again: int, full_rows: int) -> npt.NDArray[np.int32]:
    """As :meth:`ImposedLayer._columns`, for a causal mask: no row but the new ones can come after a query that sees it."""
    old = full_rows - 1
    columns = [np.full(widest, old), np.arange(full_rows, full_rows + new), np.full(again, old)]
    return np.concatenate(columns)[None].astype(np.int32)


def _of_columns(mask: mx.array, columns: npt.NDArray[np.int32], n_heads: int) -> mx.array:
    """Columns (H, W) of ``mask`` (1, 1|Hq, N, T + N): (1, 1|Hq, N, W)."""
    if (columns == columns[:1]).all():
        return mx.take(mask, mx.array(columns[0]), axis=3)
    wide = mx.broadcast_to(mask, (mask.shape[0], n_heads, *mask.shape[2:]))
    where = mx.array(np.repeat(columns, n_heads // columns.shape[0], axis=0))[None, :, None]
    return mx.take_along_axis(wide, mx.broadcast_to(where, (*wide.shape[:3], columns.shape[1])), axis=3)


def _per_query_head(visible: mx.array, n_heads: int) -> mx.array:
    return visible if visible.shape[1] == 1 else mx.repeat(visible, n_heads // visible.shape[1], axis=1)


class ImposedServer:
    """Answers the attention of imposed layers; that of any other it leaves to mlx-lm."""

    def serve(
        self,
        layer: Any,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array | None:
        if not isinstance(layer, ImposedLayer):
            return None
        own = layer.mask(queries, scale, mask)
        found: mx.array = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=own, sinks=sinks
        )
        return found


class ImposedWindow(stock.RotatingKVCache):  # type: ignore[misc]
    """A sliding window whose rows are all encoded, one by one and as they come, and decoded when they are read."""

    layout: Layout

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(*round_trip(self.layout, keys, values))


class ImposedChunk(stock.ChunkedKVCache):  # type: ignore[misc]
    """As :class:`ImposedWindow`, for an attention chunk."""

    layout: Layout

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(*round_trip(self.layout, keys, values))
