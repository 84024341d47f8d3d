"""Attention sinks and the most recent rows.

Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, arXiv:2309.17453: the first few rows draw a
large share of every head's attention, so they stay; of the rest the newest stay. Unlike the paper's cache, the rows
keep their absolute positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import Scorer

__all__ = ["SinksWindow"]


@dataclass(frozen=True)
class SinksWindow(Scorer):
    """Keep rows [0, sinks) and the last ``kept − sinks`` rows."""

    def keep(self, rows: int, kept: int, sinks: int) -> np.ndarray:
        sinks = min(sinks, kept)
        return np.concatenate([np.arange(sinks), np.arange(rows - (kept - sinks), rows)]).astype(np.int32)
