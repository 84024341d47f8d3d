"""The value that says how one tiny model is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lumina_cache.lab.tiny.weights import GAIN

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
    """Feed token ids from 0 to vocab_size - 1, and look at their logits; phi3small has more."""
    window: int | None = None
    """Tokens a sliding layer sees, its own included; None where no layer slides."""
    chunk: int | None = None
    """Tokens in one attention chunk of a chunked layer (Llama 4); None where no layer is chunked."""
    embedding_gain: float = GAIN
    """How wide the token embedding is drawn, as `weights.GAIN`; less where it is also the output matrix and
    would make the model repeat its last token."""
    greedy_ok: bool = True
    """False where greedy decoding repeats one token whatever the prompt, and so proves nothing."""
    notes: str = ""
    """What matters to a cache about this architecture."""
