"""Scorers: which rows stay. Adding one is a file here, a line in :data:`SCORERS` and a row in the docs' table."""

from __future__ import annotations

from .base import Scorer
from .sinks_window import SinksWindow

__all__ = ["SCORERS", "Scorer", "SinksWindow"]

#: Scorers by the name they have in an action's text form.
SCORERS: dict[str, Scorer] = {"sinks_window": SinksWindow()}
