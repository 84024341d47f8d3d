"""The value that says how one tiny model is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["TinySpec"]


@dataclass(frozen=True)
class TinySpec:
    """One architecture in small.

    `cache` is what `mlx_lm.models.cache.make_prompt_cache` returns for it, one word per entry: K for
    KVCache, R for RotatingKVCache, C for ChunkedKVCache, A for ArraysCache, brackets for a CacheList of
    these, and the class's own name for any other class.
    """

    module: str
    """Name of the module below `mlx_lm.models`."""
    config: Mapping[str, Any]
    """What a checkpoint's config.json would hold."""
    own_keys: frozenset[str]
    """The keys of `config` written for this module alone: its ModelArgs must take each of them. The others
    come from fragments shared by many modules, of which ModelArgs takes what it knows."""
    cache: str
    """The expected prompt cache, see above."""
    vocab_size: int = 128
    """Token ids run from 0 to vocab_size - 1."""
    window: int | None = None
    """Tokens a sliding layer sees, its own included; None where no layer slides."""
    chunk: int | None = None
    """Tokens in one attention chunk of a chunked layer (Llama 4); None where no layer is chunked."""
    embedding_gain: float = 4.0
    """How wide the token embedding is drawn, as `weights.GAIN`; less where it is also the output matrix and
    would make the model repeat its last token."""
    notes: str = ""
    """What matters to a cache about this architecture."""
