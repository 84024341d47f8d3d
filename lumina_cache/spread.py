"""Rows where they are needed: one eviction, with a number of rows of its own for each layer.

Some layers attend to a few rows and others to many. With the attention that rows drew (or are expected to draw) as
scores, d_l,h(n) is the share of it that head h of layer l loses if its n best rows stay. Rows are handed out, a block at a
time, where they lower

``Σ_l mean_h d_l,h(n_l)²``   subject to   ``Σ_l n_l · bytes of a row ≤ those of the same number in every layer``

the most per byte. For equal layers that is the optimum if every step of a layer gains less than the one before.
PyramidKV (Cai et al., arXiv:2406.02069) fixes the shape beforehand, AdaKV (Feng et al., arXiv:2407.11550) moves rows between
the heads of one layer, CAKE (Qin et al., arXiv:2503.12491) between layers by the entropy and the shift of attention. Heads
of one layer hold equally many rows here, because they share a buffer. The square is ours: losses of many layers add up to
less harm than the same loss in one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .actions import Action, Composite, Evict, Plan, Quantize, in_ranges
from .apply import held
from .errors import ActionInfeasibleError
from .estimate import dense_row_nbytes, layout_of
from .evict import scores_of
from .layers import KVCache
from .rows import Pinned
from .scorers import protected_rows
from .scorers.banked import BANKED
from .scorers.observed import OBSERVED

__all__ = ["Losses", "hand_out", "losses_of", "losses_of_layers", "spread"]


@dataclass(frozen=True)
class Losses:
    """What a layer loses, by how many rows it keeps."""

    index: int  #: of the layer
    rows: int  #: held now
    least: int  #: rows that stay in any case
    row_nbytes: int
    lost: npt.NDArray[
        np.float64
    ]  #: (rows - least + 1,): mean over heads of d², where ``least`` + i rows stay

    def at(self, rows: int) -> float:
        return float(self.lost[min(max(rows - self.least, 0), len(self.lost) - 1)])


def losses_of(
    index: int,
    scores: npt.NDArray[np.float32],
    stay: npt.NDArray[np.bool_],
    row_nbytes: int,
) -> Losses:
    """Losses of a layer from its scores.

    Args:
        scores: (H, T), attention that each row drew: not negative, in any unit.
        stay: (H, T), rows that are kept whatever they drew.
        row_nbytes: bytes of one row of all heads.
    """
    heads, rows = scores.shape
    least = int(stay.sum(axis=-1).max(initial=0))
    drawn = np.maximum(np.where(np.isfinite(scores), scores, 0.0).astype(np.float64), 0.0)
    total = np.maximum(drawn.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    # Rows that stay come first, then the others from the highest score down.
    order = np.argsort(np.where(stay, np.inf, drawn), axis=-1)[:, ::-1]
    kept = np.cumsum(np.take_along_axis(drawn, order, axis=-1), axis=-1) / total
    kept = np.concatenate([np.zeros((heads, 1)), kept], axis=-1)[:, least:]
    return Losses(index, rows, least, row_nbytes, (np.maximum(0.0, 1.0 - kept) ** 2).mean(axis=0))


def losses_of_layers(layers: Sequence[Any], action: Action, pinned: Pinned = ()) -> tuple[Losses, ...]:
    """Losses of all layers that ``action``, an eviction with what follows it, takes rows from; one layer at a time.

    Args:
        layers: cache objects; others than those that evictions apply to have no losses.
        pinned: ranges of positions that are not evicted.

    Raises:
        ActionInfeasibleError: its scorer's scores are not amounts of attention, so that layers could not be compared.
    """
    evict = action.parts[0]
    if not isinstance(evict, Evict) or evict.scorer not in _AMOUNTS:
        raise ActionInfeasibleError(
            f"{action}: rows are spread over layers by the attention that they draw; "
            f"scorers that say how much: {', '.join(sorted(_AMOUNTS))}"
        )
    found = []
    for layer in layers:
        now = held(layer)
        if not isinstance(layer, KVCache) or now.index < 0 or evict.rows_kept(layer.rows) >= layer.rows:
            continue
        scores, positions = scores_of(layer, evict)
        stay = protected_rows(positions, evict.sinks, evict.recent, pinned)
        amounts = np.array(scores.astype(mx.float32))
        rows = amounts.shape[-1]
        layouts = [layout_of(part) for part in action.parts if isinstance(part, Quantize)] or [now.layout]
        row = layouts[-1].row_nbytes(now.key_width, now.value_width, now.itemsize)
        found.append(
            losses_of(
                now.index,
                amounts.reshape(-1, rows),
                np.array(stay).reshape(-1, rows),
                row or dense_row_nbytes(now),
            )
        )
    return tuple(found)


#: Scorers whose scores are amounts of attention.
_AMOUNTS = {name for name, one in OBSERVED.items() if one.in_amounts} | {
    name for name, one in BANKED.items() if one.in_amounts
}


def hand_out(layers: Sequence[Losses], rows: int, block: int) -> tuple[int, ...]:
    """Rows for each layer, ``rows`` plus or minus whole blocks, that take no more bytes than ``rows`` in every layer.

    Every layer keeps at least what stays in any case, and half of ``rows``: of what a layer has lost nothing can be
    learnt any more.
    """
    room = rows * sum(one.row_nbytes for one in layers)
    given = []
    for one in layers:
        down = max(0, (rows - max(one.least, rows // 2)) // block)
        given.append(min(one.rows, rows - down * block))
    room -= sum(n * one.row_nbytes for n, one in zip(given, layers, strict=True))

    def gain(i: int) -> float:
        one = layers[i]
        return (one.at(given[i]) - one.at(given[i] + block)) / one.row_nbytes

    best = [(-gain(i), i) for i, one in enumerate(layers) if given[i] + block <= one.rows]
    heapq.heapify(best)
    while best:
        _, i = heapq.heappop(best)
        cost = block * layers[i].row_nbytes
        if cost > room:
            continue
        room -= cost
        given[i] += block
        if given[i] + block <= layers[i].rows:
            heapq.heappush(best, (-gain(i), i))
    return tuple(given)


def spread(action: Action, layers: Sequence[Losses]) -> Plan:
    """``action`` with the rows of its eviction handed out over ``layers``.

    Raises:
        ActionInfeasibleError: it is not one eviction, alone or with codecs after it.
    """
    evict, *rest = action.parts
    if (
        isinstance(action, Plan)
        or not isinstance(evict, Evict)
        or not all(isinstance(p, Quantize) for p in rest)
    ):
        raise ActionInfeasibleError(
            f"{action}: rows can be spread over layers for one eviction, alone or with a codec after it, such as "
            "evict:h2o_mean@0.25+quant:hadamard,bits=4"
        )
    rows = max((evict.rows_kept(one.rows) for one in layers), default=0)
    given = hand_out(layers, rows, block_of(rest))
    chosen: list[tuple[int, Action]] = []
    for one, n in zip(layers, given, strict=True):
        first: Action = replace(evict, rows=n, ratio=None)
        chosen.append((one.index, first if not rest else Composite((first, *rest))))
    return Plan(in_ranges(chosen))


#: Rows handed out at a time where no codec encodes or seals several together.
STEP = 16


def block_of(codecs: Sequence[Action]) -> int:
    """Rows handed out at a time: as many as the codecs that follow encode or seal together, so that none is left dense."""
    layouts = [layout_of(one) for one in codecs if isinstance(one, Quantize)]
    several = [n for one in layouts for n in (one.block, one.unit) if n > 1]
    return max(several, default=STEP)
