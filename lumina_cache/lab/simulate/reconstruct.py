"""How much each row is needed to say the context once more: KVzip's ranking.

Kim et al., *KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction*, arXiv:2505.23416: behind the context
comes a request to repeat it, and then the context itself, teacher-forced. ``score_j = max over the queries of that pass, and
over the query heads of a group, of a_{i,j}``. Every head keeps as many rows here (the paper's uniform budgets), and a
context is one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...backend.attention import attention_hook
from ...export import to_mlx
from ...layers import KVCache, adopt, leaves
from ...steps import StepTracker
from ..evaluate.documents import encode
from ..evaluate.measure import Bench

__all__ = ["REQUEST", "largest_weights", "reconstruction"]

#: What stands between the context and its repetition.
REQUEST = "\n\nRepeat the previous context exactly.\n\n"

#: Queries whose weights are in memory at once.
_AT_ONCE = 128


def reconstruction(bench: Bench) -> Mapping[str, mx.array]:
    """The largest weight (1, H, T) that each row of the full cache draws while the context is repeated, by layer."""
    steps = StepTracker()
    cache = [adopt(to_mlx(entry), steps, f"layer {i}") for i, entry in enumerate(bench.full)]
    layers = [leaf for leaf in leaves(cache) if isinstance(leaf, KVCache)]
    watch = _Largest({layer.name: layer.rows for layer in layers})
    tokens = (*encode(bench.tokenizer, REQUEST), *bench.task.context)
    with attention_hook(bench.model) as hook:
        for layer in layers:
            hook.observe(layer, watch)
        for i in range(0, len(tokens), _AT_ONCE):
            bench.model(mx.array(tokens[i : i + _AT_ONCE])[None], cache=cache)
            mx.eval(list(watch.found.values()), [entry.state for entry in cache])
    return watch.found


class _Largest:
    def __init__(self, rows: Mapping[str, int]) -> None:
        self.found: dict[str, mx.array] = {}
        self._rows = rows

    def observe(
        self,
        layer: Any,
        queries: mx.array,
        keys: mx.array,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> tuple[mx.array, ...]:
        weights = largest_weights(queries, keys, scale, mask, sinks)[..., : self._rows[layer.name]]
        had = self.found.get(layer.name)
        self.found[layer.name] = weights if had is None else mx.maximum(had, weights)
        return (self.found[layer.name],)


def largest_weights(
    queries: mx.array, keys: mx.array, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    """(B, H, T): the largest weight that any of the queries (B, Hq, N, D) gives each row of ``keys`` (B, H, T, D).

    Args:
        mask: None, ``"causal"``, or an array that broadcasts to (B, Hq, N, T): bool, or added to the scores.
    """
    batch, heads, new, dim = queries.shape
    n_kv_heads, rows = keys.shape[1:3]
    scores = (scale * queries).reshape(batch, n_kv_heads, -1, dim) @ keys.swapaxes(-1, -2)
    scores = scores.reshape(batch, heads, new, rows).astype(mx.float32)
    if isinstance(mask, str):
        mask = mx.arange(rows) <= mx.arange(rows - new, rows)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (batch, heads, new, 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., :rows]
    return weights.reshape(batch, n_kv_heads, -1, rows).max(axis=2)
