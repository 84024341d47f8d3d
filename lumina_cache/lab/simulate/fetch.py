"""Rows chosen anew for each query, all of them being somewhere: which ones a step would fetch.

Quest (Tang et al., arXiv:2406.10774) keeps the elementwise least and greatest key of each page of rows; with q a query,
``Σ_d max(q_d·min_d, q_d·max_d)`` is an upper bound of q·k for every key of the page. The pages with the highest bounds are
fetched. Here a page is 16 rows, bounds are averaged over the query heads that share a K/V head (which fetches once for all
of them), every layer does it, and the dense first and newest rows and those that come later are always there.

The oracle chooses rows one by one, by the weights that the query really gives them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from .held import Group, LayerRows

__all__ = ["PAGE", "page_bounds", "shown"]

#: Rows of a page.
PAGE = 16


def shown(effect: LayerRows, queries: mx.array, scale: float, rows: int, width: int) -> mx.array:
    """(1, H, N, width) bool: of the first ``rows`` columns those that each query's step has fetched, and all others.

    Args:
        queries: (1, Hq, N, D).
        rows: columns of the rows held; groups with fewer are padded behind theirs.
    """
    assert effect.fetched is not None
    n_heads, n_kv_heads = queries.shape[1], effect.groups[-1].end
    per_head = n_heads // n_kv_heads
    found = []
    for group in effect.groups:
        own = queries[:, group.first * per_head : group.end * per_head]
        own = own.reshape(1, group.heads, per_head, *queries.shape[2:])
        chosen = _chosen(group, own, scale, effect.fetched.how, effect.fetched.count, effect.fetched.page)
        found.append(mx.pad(chosen, [(0, 0), (0, 0), (0, 0), (0, rows - group.rows)]))
    joined = found[0] if len(found) == 1 else mx.concatenate(found, axis=1)
    there = mx.ones((*joined.shape[:3], width - rows), mx.bool_)
    return mx.concatenate([joined, there], axis=3)


def _chosen(group: Group, queries: mx.array, scale: float, how: str, count: int, page: int) -> mx.array:
    """(1, h, N, R) bool: the rows of the group that each query, of (1, h, G, N, D), sees."""
    first, sealed = group.head, group.rows - group.head - group.tail
    pages = sealed // page
    keys = group.keys[:, :, first : first + pages * page]
    if how == "quest":
        low, high = page_bounds(keys, page)
        up, down = mx.maximum(queries, 0), mx.minimum(queries, 0)
        bounds = up @ high[:, :, None].swapaxes(-1, -2) + down @ low[:, :, None].swapaxes(-1, -2)
        worth = bounds.mean(axis=2)
    else:
        scores = scale * (queries @ group.keys[:, :, None].swapaxes(-1, -2))
        weights = mx.softmax(scores.astype(mx.float32), axis=-1).mean(axis=2)
        worth = weights[..., first : first + pages * page]
    chosen = _greatest(worth, count)
    inside = mx.repeat(chosen, page, axis=3) if page > 1 else chosen
    before = mx.ones((*inside.shape[:3], first), mx.bool_)
    behind = mx.ones((*inside.shape[:3], group.rows - first - pages * page), mx.bool_)
    return mx.concatenate([before, inside, behind], axis=3)


def _greatest(worth: mx.array, count: int) -> mx.array:
    """bool, of the shape of ``worth``: the ``count`` greatest along the last axis. Computed at once, by numpy."""
    found = np.array(worth)
    if count >= found.shape[-1]:
        return mx.ones(worth.shape, mx.bool_)
    chosen = np.zeros(found.shape, dtype=bool)
    np.put_along_axis(chosen, np.argpartition(found, -count, axis=-1)[..., -count:], True, axis=-1)
    return mx.array(chosen)


def page_bounds(keys: mx.array, page: int) -> tuple[mx.array, mx.array]:
    """The least and greatest elements (1, h, P, D) of each page of ``keys`` (1, h, P·page, D)."""
    paged = keys.reshape(*keys.shape[:2], -1, page, keys.shape[3])
    return paged.min(axis=3), paged.max(axis=3)
