"""The catalogue: every method of the action space, what it needs of a backend, and where it was published.

It also holds methods that no MLX-LM cache can execute today (ragged budgets per head, rows of mixed precision, retrieval
by query, merging across layers, paged rows, trained evictors). They are part of A, and the difference between A and the
feasible set F is what the project measures. None looks at tokens that are not there yet: those would be a ceiling, not
an action.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from .backend.capabilities import (
    ATTENTION_WEIGHTS,
    CODEBOOK_PACKING,
    CROSS_LAYER,
    DENSE_REENCODE,
    DISK_TIER,
    HIDDEN_STATES,
    KEYS,
    MIXED_ROWS,
    PAGED_ROWS,
    PARTIAL_FETCH,
    QUERIES,
    RAGGED_HEADS,
    RAGGED_LAYERS,
    RESERVE,
    TRAINED_MODEL,
    TRAINED_SCORER,
    VALUES,
)
from .codecs import CODECS
from .method import Method
from .method import evict_method as _evict
from .method import quant_method as _quant
from .scorers import SCORERS
from .scorers.banked import BANKED
from .scorers.observed import OBSERVED

__all__ = ["METHODS", "Method", "methods_of"]

_FETCH = (KEYS, VALUES, DENSE_REENCODE)


def _catalogue() -> Iterator[Method]:
    # -- allocate -----------------------------------------------------------------------------------------------
    yield Method(
        "reserve",
        "ahead",
        frozenset({RESERVE}),
        "mlx-lm PR 1038",
        "capacity = max(capacity, rows)",
        False,
        True,
        "memory",
    )
    yield Method(
        "page", "table", frozenset({PAGED_ROWS}), "PagedAttention, arXiv:2309.06180", "⌈rows/page⌉ pages per layer",
        False, True, "memory",
    )  # fmt: skip

    # -- reclaim: evict rows ------------------------------------------------------------------------------------
    yield from (scorer.method for scorer in SCORERS.values())
    yield from (scorer.method for scorer in BANKED.values())
    yield from (scorer.method for scorer in OBSERVED.values())
    yield _evict(
        "kvzip",
        "KVzip, arXiv:2505.23416",
        "largest weight in a reconstruction pass",
        QUERIES,
        ATTENTION_WEIGHTS,
    )
    yield _evict(
        "pyramidkv",
        "PyramidKV, arXiv:2406.02069",
        "snapkv, fewer rows in deeper layers",
        QUERIES,
        RAGGED_LAYERS,
    )
    yield _evict(
        "adakv",
        "Ada-KV, arXiv:2407.11550",
        "snapkv, top rows over all heads of a layer",
        QUERIES,
        RAGGED_HEADS,
    )
    yield _evict(
        "fastgen",
        "FastGen, arXiv:2310.01801",
        "a policy per head from one profiling pass",
        ATTENTION_WEIGHTS,
        RAGGED_HEADS,
    )
    yield _evict(
        "kvzap",
        "KVzap, arXiv:2601.07891",
        "surrogate of kvzip from hidden states",
        HIDDEN_STATES,
        RAGGED_HEADS,
        TRAINED_SCORER,
    )
    yield _evict(
        "kvp", "KV Policy, arXiv:2602.10238", "a trained ranking per head", KEYS, VALUES, TRAINED_SCORER
    )
    yield _evict(
        "dms",
        "Dynamic Memory Sparsification, arXiv:2506.05345",
        "delayed eviction learned by the model",
        TRAINED_MODEL,
    )

    # -- compress: re-encode rows -------------------------------------------------------------------------------
    yield from (family.method for family in CODECS.values())
    yield _quant(
        "turboquant", "TurboQuant, arXiv:2504.19874", "rotation and Lloyd–Max codes", *_FETCH, bits=(2, 3, 4)
    )
    yield _quant(
        "turboquant_packed", "TurboQuant, arXiv:2504.19874", "as turboquant, unpacked in the kernel", CODEBOOK_PACKING,
        bits=(2, 3, 4),
    )  # fmt: skip
    yield _quant(
        "kvquant", "KVQuant, arXiv:2401.18079", "keys before RoPE, calibrated codes, sparse outliers", CODEBOOK_PACKING,
        bits=(2, 3, 4),
    )  # fmt: skip
    yield _quant(
        "gear", "GEAR, arXiv:2403.05527", "affine, low-rank and sparse residual", *_FETCH, bits=(2, 4)
    )
    yield _quant(
        "mixed_rows",
        "MiKV, arXiv:2402.18096",
        "important rows at more bits",
        QUERIES,
        MIXED_ROWS,
        bits=(2, 4),
    )
    yield Method(
        "merge", "minicache", frozenset({KEYS, VALUES, CROSS_LAYER, DENSE_REENCODE}), "MiniCache, arXiv:2405.14366",
        "one direction and two norms for each pair of layers", True, False, "layers",
    )  # fmt: skip

    # -- offload: rows in a file --------------------------------------------------------------------------------
    yield Method(
        "offload", "layers", frozenset({DISK_TIER}), "FlexGen, arXiv:2303.06865", "whole layers, streamed at fetch",
        False, True, "disk",
    )  # fmt: skip
    yield Method(
        "offload", "cold", frozenset({DISK_TIER}), "FlexGen, arXiv:2303.06865", "the oldest rows, streamed at fetch",
        False, True, "disk",
    )  # fmt: skip
    yield Method(
        "offload", "quest", frozenset({QUERIES, PARTIAL_FETCH, DISK_TIER}), "Quest, arXiv:2406.10774",
        "pages ranked by an upper bound of q·k", True, True, "disk",
    )  # fmt: skip
    yield Method(
        "offload", "shadowkv", frozenset({QUERIES, PARTIAL_FETCH, DISK_TIER}), "ShadowKV, arXiv:2410.21465",
        "low-rank keys held, values retrieved by landmarks", True, True, "disk",
    )  # fmt: skip


#: (family, name) → method.
METHODS: Mapping[tuple[str, str], Method] = MappingProxyType({(m.family, m.name): m for m in _catalogue()})


def methods_of(family: str) -> tuple[Method, ...]:
    return tuple(m for m in METHODS.values() if m.family == family)
