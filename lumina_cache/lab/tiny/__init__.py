"""Tiny random models, one for each architecture of the installed mlx-lm.

A cache that stands in for mlx-lm's has to be right for every architecture, and nobody can download them all.
These models have two to six layers of every kind their architecture knows and a vocabulary of 128 tokens;
they compute nonsense, but the same nonsense in the same process through any cache that is right.

>>> from lumina_cache.lab.tiny import SPECS, build
>>> model = build("gemma2")
>>> SPECS["gemma2"].cache
'K K'
"""

from __future__ import annotations

from lumina_cache.lab.tiny.build import build, cache_pattern, installed_modules
from lumina_cache.lab.tiny.spec import TinySpec
from lumina_cache.lab.tiny.table import CHUNKING_MOVES_LOGITS, NOT_MODELS, SPECS, UNBUILDABLE

__all__ = [
    "CHUNKING_MOVES_LOGITS",
    "NOT_MODELS",
    "SPECS",
    "UNBUILDABLE",
    "TinySpec",
    "build",
    "cache_pattern",
    "installed_modules",
]
