"""Which rows of one layer stay when rows are evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from .actions import Action, Evict
from .backend.capabilities import ROW_CHOICE
from .bank import NO_BANK
from .estimate import Held, after_action, guarded_rows, kept_of, split_kept
from .layers import KVCache
from .rows import Pinned
from .scorers import SCORERS, Scorer, protected_rows, select
from .scorers.banked import BANKED
from .scorers.observed import OBSERVED
from .seen import UNHOOKED

__all__ = ["Pinned", "evict", "scorer_of", "scores_of", "why_unforeseen", "why_unseen", "would_lose"]


def scorer_of(action: Evict) -> Scorer:
    """The scorer that ``action`` names, with its seed where it draws."""
    scorer = SCORERS[action.scorer]()
    drawn = {"seed": action.seed} if "seed" in scorer.__dataclass_fields__ else {}
    return replace(scorer, **drawn)


def would_lose(layer: KVCache, held: Held, parts: Sequence[Action], pinned: Pinned) -> str | None:
    """Why ``parts``, carried out one after the other, would evict a row that must stay; None if they do not.

    Looks as far as the first eviction: a second one has its own positions, known only when it is its turn.

    Args:
        held: ``layer`` in numbers.
        pinned: ranges whose rows stay, beside the action's own first and last ones.
    """
    for part in parts:
        if isinstance(part, Evict):
            return _too_many(layer, held, part, pinned)
        [held] = after_action([held], part, pinned)
    return None


def _too_many(layer: KVCache, held: Held, action: Evict, pinned: Pinned) -> str | None:
    kept = action.rows_kept(held.rows)
    if kept == held.rows:
        return None
    kept_tail, kept_sealed = kept_of(held, kept, action.sinks, pinned)
    stay = np.array(protected_rows(mx.array(layer.positions()), action.sinks, action.recent, pinned))
    head, sealed, block = held.head, held.rows - held.tail, held.layout.block
    cut = stay[..., head:sealed].reshape(*stay.shape[:-1], (sealed - head) // block, block)
    blocks = int(cut.any(axis=-1).sum(axis=-1).max(initial=0))
    in_tail = int(stay[..., sealed:].sum(axis=-1).max(initial=0))
    if blocks * block <= kept_sealed and in_tail <= kept_tail:
        return None
    protected = int(stay.sum(axis=-1).max())
    text = f"{action} keeps {kept} of {held.rows} rows in {layer.name}, where {protected} are protected"
    if block > 1:
        text += f" in {blocks} blocks of {block} rows, {kept_sealed // block} of which would stay"
    return text


def why_unseen(layer: KVCache, action: Evict) -> str | None:
    """Why the scorer of ``action`` would have to guess for the rows of ``layer``; None if it need not."""
    if action.scorer not in OBSERVED:
        return None
    if layer.seen is None:
        return UNHOOKED
    why = layer.seen.why_not(action.scorer, int(layer.offset), layer.rows)
    return None if why is None else f"{layer.name}: {why}"


def why_unforeseen(layer: KVCache, action: Evict) -> str | None:
    """Why the scorer of ``action`` has no query bank to rank the rows of ``layer`` by; None if it has, or needs none."""
    if action.scorer not in BANKED or layer.rows == 0:
        return None
    lacking = NO_BANK if layer.banks is None else layer.banks.lacking
    if lacking is not None or layer.banks is None:
        return lacking
    why = layer.banks.why_not(layer.name)
    return None if why is None else f"{layer.name}: {why}"


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
    block, head, tail = store.layout.block, store.head, store.tail
    guarded = guarded_rows(action.sinks, pinned, int(layer.offset) - tail, block, head)
    kept_tail, kept_sealed = split_kept(max(0, kept - head), layer.rows - head, tail, block, guarded)
    scores, positions = scores_of(layer, action)
    stay = protected_rows(positions, action.sinks, action.recent, pinned)
    sealed = layer.rows - tail
    # As sealed rows are kept in whole blocks, a block that is protected in part stays whole if there is room for it.
    blocks = select(
        _best(scores[..., head:sealed], block),
        kept_sealed // block,
        _best(stay[..., head:sealed].astype(mx.int32), block) > 0,
    )
    in_tail = select(scores[..., sealed:], kept_tail, stay[..., sealed:])
    mx.eval(blocks, in_tail)
    return _as_index(blocks), _as_index(in_tail)


def scores_of(layer: KVCache, action: Evict) -> tuple[mx.array, mx.array]:
    """The scorer's ranking of all rows, and their positions: (B, H, T) each, or (1, 1, T) where all heads keep the same."""
    store = layer.own_store()
    if action.scorer in OBSERVED:
        assert layer.seen is not None, "execute() looks before it acts"
        some_keys, some_values = store.dense()
        positions = _positions(layer, chooses=True)
        return layer.seen.scores(action.scorer, some_keys, some_values, positions), positions
    if action.scorer in BANKED:
        foreseen = None if layer.banks is None else layer.banks.of(layer.name)
        assert foreseen is not None, "execute() looks before it acts"
        positions = _positions(layer, chooses=True)
        return BANKED[action.scorer]().scores(foreseen, *store.dense(), int(layer.offset)), positions
    scorer = scorer_of(action)
    keys, values = store.dense() if scorer.reads_rows else (None, None)
    positions = _positions(layer, chooses=ROW_CHOICE in scorer.method.requires)
    return scorer.scores(keys, values, positions), positions


def _positions(layer: KVCache, *, chooses: bool) -> mx.array:
    """(B, H, T), or (1, 1, T) where all heads hold the same positions and, unless each ``chooses``, keep the same."""
    positions = mx.array(layer.positions())
    if positions.ndim == 3:
        return positions
    heads = layer.heads if chooses else (1, 1)
    return mx.broadcast_to(positions, (*heads, positions.shape[0]))


def _best(scores: mx.array, block: int) -> mx.array:
    return scores if block == 1 else scores.reshape(*scores.shape[:2], -1, block).max(axis=-1)


def _as_index(chosen: mx.array) -> np.ndarray:
    """(n,) where every head keeps the same, else (B, H, n)."""
    index = np.array(chosen)
    return index[0, 0] if index.shape[:2] == (1, 1) else index
