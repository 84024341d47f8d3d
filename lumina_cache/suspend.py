"""A whole cache in a file, for the time between two turns: nothing of it stays in memory.

Works on every kind of layer, recurrent state included: what a layer holds is its ``state``, so its arrays are taken
out, written, and put back unchanged. Rows that were on disk stay where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from .disk import DiskBlock, DiskStore
from .layers import ManagedLayer
from .seen import Seen

__all__ = ["Suspended", "suspend"]


@dataclass(frozen=True)
class Suspended:
    """What was taken out of a cache: one file, and how the layers' states are put together from it.

    Layers are held weakly: they are the cache's, and the file goes with it.
    """

    store: DiskStore
    block: DiskBlock
    #: Flattened, and what was seen of the layer; _ARRAY for arrays.
    states: tuple[tuple[weakref.ref[ManagedLayer], list[tuple[str, Any]], Seen | None], ...]

    def resume(self) -> None:
        """Put everything back.

        Raises:
            DiskTierError: the file is gone, or is not what was written; the layers stay suspended.
        """
        arrays = iter(self.store.load(self.block))
        for ref, flat, seen in self.states:
            filled = [(key, next(arrays) if value is _ARRAY else value) for key, value in flat]
            seen = None if seen is None else seen.mapped(lambda _: next(arrays))
            layer = ref()
            if layer is not None:
                layer.state = tree_unflatten(filled)
                layer.seen = seen


class _Array:
    """Stands for an array that is in the file."""


_ARRAY = _Array()


def suspend(layers: Sequence[Any], store: DiskStore) -> Suspended | None:
    """Write the arrays of all layers to one file and let go of them; None if there are none.

    Objects of classes that mlx-lm's cache module does not define keep what they hold.

    Raises:
        DiskTierError: the file could not be written; the layers are as they were.
    """
    held = [layer for layer in layers if isinstance(layer, ManagedLayer) and layer.kind != "list"]
    states, arrays = [], []
    for layer in held:
        flat = tree_flatten(layer.state, is_leaf=_is_leaf)
        seen = layer.seen
        shell = None if seen is None else seen.mapped(lambda _: _ARRAY)
        kept = [(k, _ARRAY if isinstance(v, mx.array) else v) for k, v in flat]
        states.append((weakref.ref(layer), kept, shell))
        arrays += [v for _, v in flat if isinstance(v, mx.array)]
        arrays += () if seen is None else seen.arrays
    if not arrays:
        return None
    block = store.put(arrays)
    for layer in held:
        layer.let_go()
    return Suspended(store, block, tuple(states))


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, list | tuple | dict) or not value
