"""Scorers: which rows stay. Adding one is a file here, a line in :data:`SCORERS` and a row in the docs' table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .base import Scorer
from .select import protected_rows, select
from .sinks_window import SinksWindow

__all__ = ["SCORERS", "Scorer", "SinksWindow", "protected_rows", "select"]

_ALL: tuple[type[Scorer], ...] = (SinksWindow,)

#: Scorers by the name they have in an action's text form.
SCORERS: Mapping[str, type[Scorer]] = MappingProxyType({one.method.name: one for one in _ALL})
