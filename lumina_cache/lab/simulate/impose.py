"""Attention that sees a full cache as if an action had been taken: the cache objects, and who answers their attention.

An imposed layer keeps every row of the full cache. Rows that the action encodes are replaced by what comes back from the
codec, rows that it drops are masked for the heads that drop them. All scored tokens go through in one forward, although
in a real run they come in steps, and a dense newest row is sealed behind one of them: such a row is there twice, dense
and as decoded, and the mask shows each query the one that it would have seen. Both are exact: attention does not mind
where a row lies, only which rows there are.
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
    """The full rows of one layer with an action imposed on them. For one forward of ``tokens`` tokens."""

    def __init__(
        self, name: str, keys: mx.array, values: mx.array, effect: LayerRows, tokens: int, block: int
    ) -> None:
        """
        Args:
            keys, values: (1, H, T, D), all of the layer's rows; they are not written to.
            block: tokens that would come at a time.
        """
        super().__init__()
        self.name, self.offset = name, keys.shape[2]
        self.effect = effect
        self.full_rows = keys.shape[2]
        self._full = keys, values
        self._block = block
        self._sealing: tuple[_Sealing, ...] = ()
        if effect.layout.unit > 1:
            self._sealing = tuple(
                _Sealing(g, sealed_after(effect.layout, g.tail, tokens, block)) for g in effect.groups
            )

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        held_keys, held_values = (self._scattered(side) for side in (0, 1))
        layout = self.effect.layout
        if layout.unit == 1 and not layout.dense:
            new_keys, new_values = round_trip(layout, keys, values)
            return _joined(held_keys, new_keys), _joined(held_values, new_values)
        more_keys, more_values = self._sealed_again(keys, values)
        return _joined(held_keys, keys, more_keys), _joined(held_values, values, more_values)

    def _scattered(self, side: int) -> mx.array:
        """All rows of the full cache, those held by a group as they are held there."""
        full = self._full[side]
        if not any(g.encoded for g in self.effect.groups):
            return full
        pieces = []
        for group in self.effect.groups:
            rows = (group.keys, group.values)[side]
            own = full[:, group.first : group.end]
            if group.rows < own.shape[2]:
                where = mx.broadcast_to(group.positions[..., None], rows.shape)
                rows = mx.put_along_axis(own, where, rows, axis=2)
            pieces.append(rows)
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)

    def _sealed_again(self, keys: mx.array, values: mx.array) -> tuple[mx.array | None, mx.array | None]:
        """The rows that are sealed on the way, decoded: (1, H, P, D), padded where heads seal different numbers."""
        widest = max((one.count for one in self._sealing), default=0)
        if widest == 0:
            return None, None
        pieces: list[tuple[mx.array, mx.array]] = []
        for one in self._sealing:
            group, n = one.group, one.count
            here = slice(group.first, group.end)
            pending = (
                mx.concatenate([rows[:, :, group.rows - group.tail :], new[:, here]], axis=2)[:, :, :n]
                for rows, new in ((group.keys, keys), (group.values, values))
            )
            decoded = round_trip(group.layout, *pending) if n else (keys[:, here, :0], values[:, here, :0])
            pad = [(0, 0), (0, 0), (0, widest - n), (0, 0)]
            pieces.append((mx.pad(decoded[0], pad), mx.pad(decoded[1], pad)))
        if len(pieces) == 1:
            return pieces[0]
        return mx.concatenate([k for k, _ in pieces], axis=1), mx.concatenate([v for _, v in pieces], axis=1)

    # -- what each query sees ---------------------------------------------------------------------------------------

    def mask(self, queries: mx.array, scale: float, mask: Any) -> Any:
        """The model's ``mask`` of T + N columns with the action's effect in it, for the rows that were returned.

        ``"causal"`` and None stay what they are where no row is hidden or there twice.
        """
        new = queries.shape[2]
        hidden, widest = self._hidden(), max((one.count for one in self._sealing), default=0)
        if not hidden and widest == 0 and self.effect.fetched is None:
            return mask
        n_heads = self._full[0].shape[1]
        given = _four_axes(mask, new, self.full_rows + new)
        visible = mx.array(self._visible(new, widest))
        if widest:
            columns = mx.array(self._columns(widest))
            given = _with_columns(given, columns, n_heads, queries.shape[1])
        if self.effect.fetched is not None:
            visible = visible & shown(self.effect, queries, scale, self.full_rows, visible.shape[-1])
        per_query_head = visible
        if visible.shape[1] > 1:
            per_query_head = mx.repeat(visible, queries.shape[1] // n_heads, axis=1)
        if given.dtype == mx.bool_:
            return given & per_query_head
        return mx.where(per_query_head, given, mx.array(mx.finfo(given.dtype).min, given.dtype))

    def _hidden(self) -> bool:
        return any(g.rows < self.full_rows for g in self.effect.groups)

    def _visible(self, new: int, widest: int) -> npt.NDArray[np.bool_]:
        """(1, H, N, T + N + P), or (1, 1, …) where all heads are alike."""
        groups, step = self.effect.groups, step_of(new, self._block)
        found = []
        for i, group in enumerate(groups):
            positions = np.array(group.positions)[0]
            one = np.zeros((group.heads, new, self.full_rows + new + widest), dtype=bool)
            held = np.zeros((group.heads, self.full_rows), dtype=bool)
            np.put_along_axis(held, positions, True, axis=1)
            one[:, :, : self.full_rows] = held[:, None]
            one[:, :, self.full_rows : self.full_rows + new] = True
            if self._sealing:
                after, tail, n = self._sealing[i].after, group.tail, self._sealing[i].count
                dense = step[:, None] <= after[None]
                one[:, :, self.full_rows : self.full_rows + new] = dense[:, tail:]
                for head in range(group.heads):
                    where = positions[head, group.rows - tail :]
                    one[head][:, where] = dense[:, :tail]
                one[:, :, self.full_rows + new : self.full_rows + new + n] = ~dense[:, :n]
            found.append(one)
        joined = np.concatenate(found, axis=0)
        return joined[None, :1] if (joined == joined[:1]).all() else joined[None]

    def _columns(self, widest: int) -> npt.NDArray[np.int32]:
        """(H, P): which of the T + N columns each row that is there again stands for; padding stands for the last."""
        found = []
        for one in self._sealing:
            group, n = one.group, one.count
            columns = np.full((group.heads, widest), self.full_rows, dtype=np.int32)
            tail = np.array(group.positions)[0][:, group.rows - group.tail :]
            new = np.arange(self.full_rows, self.full_rows + one.after.size - group.tail)
            pending = np.concatenate([tail, np.broadcast_to(new, (group.heads, new.size))], axis=1)
            columns[:, :n] = pending[:, :n]
            found.append(columns)
        return np.concatenate(found, axis=0)


def _joined(*pieces: mx.array | None) -> mx.array:
    return mx.concatenate([p for p in pieces if p is not None], axis=2)


def _four_axes(mask: Any, new: int, rows: int) -> mx.array:
    """(1|B, 1|Hq, N, T + N)."""
    if mask is None or isinstance(mask, str):
        causal = np.tri(new, rows, rows - new, dtype=bool)
        return mx.array(causal)[None, None]
    return mx.broadcast_to(
        mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)),
        (*((1,) * (4 - mask.ndim) + tuple(mask.shape))[:2], new, rows),
    )


def _with_columns(mask: mx.array, columns: mx.array, n_kv_heads: int, n_heads: int) -> mx.array:
    """``mask`` with columns (H, P) of it again behind the others, each head's own."""
    if bool(mx.all(columns == columns[:1]).item()):
        return mx.concatenate([mask, mx.take(mask, columns[0], axis=3)], axis=3)
    wide = mx.broadcast_to(mask, (mask.shape[0], n_heads, *mask.shape[2:]))
    where = mx.repeat(columns, n_heads // n_kv_heads, axis=0)[None, :, None]
    where = mx.broadcast_to(where, (*wide.shape[:3], columns.shape[1]))
    return mx.concatenate([wide, mx.take_along_axis(wide, where, axis=3)], axis=3)


class ImposedServer:
    """Answers the attention of imposed layers; of any other it leaves to mlx-lm."""

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
