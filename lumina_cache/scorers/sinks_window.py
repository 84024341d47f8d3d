"""Attention sinks and the most recent rows.

Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, arXiv:2309.17453: the first few rows draw a
large share of every head's attention, so they stay; of the rest the newest stay. Unlike the paper's cache, the rows
keep their absolute positions.

``score = position``: the sinks are protected by the action itself, so ranking by age is all there is left to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..method import Method, evict_method
from .base import Scorer

__all__ = ["SinksWindow"]


@dataclass(frozen=True)
class SinksWindow(Scorer):
    """The newer the better."""

    method: ClassVar[Method] = evict_method(
        "sinks_window",
        "StreamingLLM, arXiv:2309.17453",
        "first s rows and the newest k − s",
        uniform=True,
    )
    reads_rows: ClassVar[bool] = False

    def scores(self, keys: mx.array | None, values: mx.array | None, positions: mx.array) -> mx.array:
        return positions.astype(mx.float32)
