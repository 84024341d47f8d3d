"""Which rows of one layer stay when rows are evicted."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from .actions import Evict
from .estimate import guarded_rows, split_kept
from .layers import KVCache
from .rows import Pinned
from .scorers import SCORERS, Scorer, protected_rows, select

__all__ = ["Pinned", "evict", "scorer_of"]


def scorer_of(action: Evict) -> Scorer:
    """The scorer that ``action`` names, with its seed where it draws."""
    scorer = SCORERS[action.scorer]()
    drawn = {"seed": action.seed} if "seed" in scorer.__dataclass_fields__ else {}
    return replace(scorer, **drawn)


def evict(layer: KVCache, action: Evict, pinned: Pinned = ()) -> None:
    """Drop rows of ``layer`` down to what ``action`` keeps.

    Rows that are encoded together stay or go together, ranked by the best row among them. Rows of the dense tail are
    newer than all others and go last, except for the protected ones, so that every head keeps the same number of either.
    """
    kept = action.rows_kept(layer.rows)
    if kept < layer.rows:
        # The scores and what they were made of are gone before the rows are copied.
        layer.gather(*_chosen(layer, action, kept, pinned))


def _chosen(layer: KVCache, action: Evict, kept: int, pinned: Pinned) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of sealed rows and rows of the tail that stay, as :meth:`KVCache.gather` takes them."""
    store = layer.own_store()
    block, tail = store.layout.block, store.tail
    guarded = guarded_rows(action.sinks, pinned, int(layer.offset) - tail, block)
    kept_tail, kept_sealed = split_kept(kept, layer.rows, tail, block, guarded)
    scorer = scorer_of(action)
    keys, values = store.dense() if scorer.reads_rows else (None, None)
    positions = _positions(layer, keys)
    scores = scorer.scores(keys, values, positions)
    stay = protected_rows(positions, action.sinks, action.recent, pinned)
    sealed = layer.rows - tail
    # As sealed rows are kept in whole blocks, a block that is protected in part stays whole if there is room for it.
    blocks = select(
        _best(scores[..., :sealed], block),
        kept_sealed // block,
        _best(stay[..., :sealed].astype(mx.int32), block) > 0,
    )
    in_tail = select(scores[..., sealed:], kept_tail, stay[..., sealed:])
    mx.eval(blocks, in_tail)
    return _as_index(blocks), _as_index(in_tail)


def _positions(layer: KVCache, keys: mx.array | None) -> mx.array:
    """(B, H, T), or (1, 1, T) where all heads hold the same positions and no row is looked at."""
    positions = mx.array(layer.positions())
    if positions.ndim == 3:
        return positions
    heads = (1, 1) if keys is None else keys.shape[:2]
    return mx.broadcast_to(positions, (*heads, positions.shape[0]))


def _best(scores: mx.array, block: int) -> mx.array:
    return scores if block == 1 else scores.reshape(*scores.shape[:2], -1, block).max(axis=-1)


def _as_index(chosen: mx.array) -> np.ndarray:
    """(n,) where every head keeps the same, else (B, H, n)."""
    index = np.array(chosen)
    return index[0, 0] if index.shape[:2] == (1, 1) else index
