"""Attention over a layer's codes, in the place of mlx-lm's: what a server at an attention hook does.

The rule is one: a call is served where attention is handed the very rows that the layer returned, both of its sides are
stored in a layout that can be read as codes (:func:`servable`), and some rows are encoded. Otherwise attention is mlx-lm's,
over the rows that the layer returned. (Latent attention is handed them in steps of one token, its latents on both sides.)

What a layer returns stays what mlx-lm can read: packed triples, or decoded rows, which MLX does not compute unless
somebody uses them. So a call that reaches no server gets the right numbers as well.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..codecs.layout import Layout
from ..layers import ManagedLayer, RowLayer
from ..rows import Parts
from .packed import Mask, PackedLayout, attend

__all__ = ["PackedServer", "servable"]


def servable(layout: Layout) -> tuple[PackedLayout, PackedLayout] | None:
    """How keys and values of a layout are read as codes; None if they cannot be attended to as such."""
    keys, values = PackedLayout.of(layout.keys), PackedLayout.of(layout.values)
    if keys is None or values is None or values.per_channel:
        return None
    return keys, values


class PackedServer:
    """Serves every layer it is attached to from the codes of its rows; holds none of them."""

    def serve(
        self,
        layer: ManagedLayer,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array | None:
        if not isinstance(layer, RowLayer):
            return None
        parts = _parts_of(layer, keys, values)
        if parts is None or parts.keys is None:
            return None
        layouts = servable(parts.layout)
        if layouts is None:
            return None
        dense = [pair for pair in (parts.head, parts.tail) if pair is not None]
        tail_keys, tail_values = (_joined([pair[i] for pair in dense]) for i in (0, 1))
        head = 0 if parts.head is None else parts.head[0].shape[2]
        return attend(
            queries,
            parts.keys,
            parts.values,
            *layouts,
            tail_keys,
            tail_values,
            scale=scale,
            mask=_behind_codes(mask, head, 0 if tail_keys is None else tail_keys.shape[2]),
            sinks=sinks,
        )


def _parts_of(layer: RowLayer, keys: Any, values: Any) -> Parts | None:
    if isinstance(keys, mx.array):
        return layer.take_handed(keys, values)
    # Packed rows are handed out as they lie.
    return Parts(layer.layout, keys[1].dtype, tuple(keys), tuple(values))


def _joined(pieces: list[mx.array]) -> mx.array | None:
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    return mx.concatenate(pieces, axis=2)


def _behind_codes(mask: Any, head: int, dense: int) -> Mask:
    """``mask`` with the columns of the ``head`` first rows behind those of the codes, where the other dense rows are.

    A causal one stays what it is: it hides new rows only, and those are last in either order.
    """
    if not isinstance(mask, mx.array) or head == 0 or mask.shape[-1] == 1:
        return mask  # type: ignore[no-any-return]
    end = mask.shape[-1] - (dense - head)
    return mx.concatenate([mask[..., head:end], mask[..., :head], mask[..., end:]], axis=-1)
