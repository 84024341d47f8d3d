"""The simulator: any action's cost, also of those that no backend executes, on a forward that keeps the whole cache."""

from __future__ import annotations

from .foresight import Foresight, parse
from .simulator import Simulator, provenance_of
from .space import Offer, space

__all__ = ["Foresight", "Offer", "Simulator", "parse", "provenance_of", "space"]
