"""Which rows an eviction keeps, of a simulated layer: uniform choices as the library makes them, and ragged ones.

Uniform evictions rank and choose with the very functions that real ones do (:mod:`lumina_cache.scorers`). Ragged ones are
the simulator's own:

- ``pyramidkv`` (Cai et al., arXiv:2406.02069): SnapKV's ranking with a budget that falls linearly from the first layer to
  the last. Beside the window of w rows, which all keep, layer l of L keeps ``b_max − (b_max − b_min)·l/(L−1)`` rows with
  ``b_min = b/20``, ``b_max = 2b − b_min`` for a mean of b, both moved together where b_max would exceed the rows held.
- ``adakv`` (Feng et al., arXiv:2407.11550): SnapKV's ranking over all heads of a layer at once, each head keeping a fifth of
  an even share in any case.
- oracles: see :mod:`.foresight`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...actions import Evict
from ...errors import SimulationError
from ...estimate import after_action, guarded_rows, split_kept
from ...evict import scorer_of
from ...scorers import protected_rows, select
from ...scorers.observed import SnapKV
from .held import Group, LayerRows, selected, split_heads

__all__ = ["BORROWED", "RAGGED", "evicted", "kept_by_ranking", "kept_of_all_heads", "pyramid", "ranking"]

#: Scorers of the catalogue that rank as another one does and share its budget out otherwise.
BORROWED = {"adakv": "snapkv", "pyramidkv": "snapkv"}
#: Those that leave heads with different numbers of rows.
RAGGED = ("adakv",)

#: Share of an even budget that each head keeps in any case.
_SAFE = 0.2
#: The deepest layer's budget is this part of the mean, the window not counted.
_STEEPNESS = 20


def ranking(rows: LayerRows, action: Evict) -> mx.array:
    """How much each row of the layer's one group is worth: (1, H, R), higher is better.

    Raises:
        SimulationError: heads hold different numbers of rows, which no scorer ranks.
    """
    group = the_group(rows, action)
    name = BORROWED.get(action.scorer, action.scorer)
    if rows.seen is not None and name in rows.seen.scorers:
        return rows.seen.scores(name, group.keys, group.values, group.positions)
    return scorer_of(replace(action, scorer=name)).scores(group.keys, group.values, group.positions)


def the_group(rows: LayerRows, action: Any) -> Group:
    """The one group of a layer whose heads all hold the same number of rows."""
    if len(rows.groups) > 1:
        raise SimulationError(
            f"{action}: the heads of {rows.name} hold different numbers of rows; choose rows before they do"
        )
    return rows.groups[0]


def evicted(rows: LayerRows, action: Evict, kept: int, scores: mx.array | None = None) -> LayerRows:
    """The layer with ``kept`` rows (tokens) of each head, or as many on average where the scorer is a ragged one.

    Args:
        scores: the :func:`ranking` of these rows, where it is known already.
    """
    group = the_group(rows, action)
    if kept >= group.rows:
        return rows
    if scores is None:
        scores = ranking(rows, action)
    if action.scorer in RAGGED:
        stay = protected_rows(group.positions, action.sinks, action.recent, ())
        return kept_of_all_heads(rows, action, scores, stay, kept, max(1, int(_SAFE * kept)))
    return kept_by_ranking(rows, action, scores, kept)


def kept_by_ranking(rows: LayerRows, action: Evict, scores: mx.array, kept: int) -> LayerRows:
    """As :func:`lumina_cache.evict.evict` does it: rows encoded together stay or go together, newest dense ones go last."""
    group = rows.groups[0]
    block, head, tail = group.layout.block, group.head, group.tail
    guarded = guarded_rows(action.sinks, (), group.storage.offset - tail, block, head)
    kept_tail, kept_sealed = split_kept(max(0, kept - head), group.rows - head, tail, block, guarded)
    stay = protected_rows(group.positions, action.sinks, action.recent, ())
    end = group.rows - tail
    blocks = select(
        _best(scores[..., head:end], block),
        kept_sealed // block,
        _best(stay[..., head:end].astype(mx.int32), block) > 0,
    )
    in_tail = select(scores[..., end:], kept_tail, stay[..., end:])
    sealed = blocks if block == 1 else _rows_of(blocks, block)
    first = mx.broadcast_to(mx.arange(head, dtype=mx.int32), (1, group.heads, head))
    index = mx.concatenate([first, sealed + head, in_tail + end], axis=2)
    [storage] = after_action([group.storage], replace(action, ratio=None, rows=kept))
    return _left_with(rows, index, selected(group, index, storage))


def _left_with(rows: LayerRows, index: mx.array, group: Group) -> LayerRows:
    if rows.seen is None:
        return replace(rows, groups=(group,))
    seen = rows.seen.gather(np.array(index), rows.groups[0].rows)
    return replace(rows, groups=(group,), seen=seen)


def kept_of_all_heads(
    rows: LayerRows, action: Any, scores: mx.array, stay: mx.array, kept: int, floor: int
) -> LayerRows:
    """``kept`` rows per head on average: the best of all heads together, and at least ``floor`` of each.

    Raises:
        SimulationError: rows are encoded several together or some are dense, so that heads cannot choose row by row.
    """
    group = rows.groups[0]
    if group.layout.block > 1 or group.tail or group.head:
        raise SimulationError(
            f"{action}: rows stored as {group.layout} are not chosen head by head; evict first and encode then"
        )
    index = _best_of_all(np.array(scores)[0], np.array(stay)[0], kept, floor)
    groups = []
    for one, chosen in zip(split_heads(group), index, strict=True):
        [storage] = after_action([one.storage], Evict("random", rows=chosen.size, sinks=0))
        groups.append(selected(one, mx.array(chosen[None, None], mx.int32), storage))
    # What was seen cannot follow rows that are not the same number for every head.
    return replace(rows, groups=tuple(groups), seen=None)


def _best_of_all(
    scores: npt.NDArray[np.float32], stay: npt.NDArray[np.bool_], kept: int, floor: int
) -> list[npt.NDArray[np.int64]]:
    """For each of (H, R) the rows that stay, ascending; of equal ones the newer."""
    heads, rows = scores.shape
    worth = np.where(np.isnan(scores), -np.inf, scores.astype(np.float64))
    worth = np.where(stay, np.inf, worth)
    newest = np.broadcast_to(np.arange(rows), worth.shape)
    for head in range(heads):
        safe = np.lexsort((newest[head], worth[head]))[rows - floor :]
        worth[head, safe] = np.inf
    best = np.lexsort((newest.ravel(), worth.ravel()))[heads * (rows - kept) :]
    chosen = np.zeros(worth.size, dtype=bool)
    chosen[best] = True
    return [np.flatnonzero(one) for one in chosen.reshape(heads, rows)]


def pyramid(rows: int, kept: int, layers: int) -> list[int]:
    """Rows that each of ``layers`` layers keeps of ``rows``, ``kept`` on average (rounded), falling with depth."""
    window = min(kept, SnapKV().window)
    mean = kept - window
    least = mean / _STEEPNESS
    most = 2 * mean - least
    if most > rows - window:
        most, least = float(rows - window), 2.0 * mean - (rows - window)
    falling = np.linspace(most, least, layers) if layers > 1 else np.array([mean])
    return [max(1, window + round(float(b))) for b in falling]


def _best(scores: mx.array, block: int) -> mx.array:
    return scores if block == 1 else scores.reshape(*scores.shape[:2], -1, block).max(axis=-1)


def _rows_of(blocks: mx.array, block: int) -> mx.array:
    rows = blocks[..., None] * block + mx.arange(block, dtype=blocks.dtype)
    return rows.reshape(*blocks.shape[:2], -1)
