"""Scorers: which rows stay. Adding one is a file here, a line in :data:`SCORERS` and a row in the docs' table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .base import Scorer
from .key_distance import KeyDistance
from .key_norm import KeyNorm
from .keydiff import KeyDiff
from .lagkv import LagKV
from .leverage import Leverage
from .random import Random
from .select import protected_rows, select
from .sinks_window import SinksWindow

__all__ = [
    "SCORERS",
    "KeyDiff",
    "KeyDistance",
    "KeyNorm",
    "LagKV",
    "Leverage",
    "Random",
    "Scorer",
    "SinksWindow",
    "protected_rows",
    "select",
]

_ALL: tuple[type[Scorer], ...] = (SinksWindow, Random, KeyNorm, KeyDiff, KeyDistance, LagKV, Leverage)

#: Scorers by the name they have in an action's text form.
SCORERS: Mapping[str, type[Scorer]] = MappingProxyType({one.method.name: one for one in _ALL})
