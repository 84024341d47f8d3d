"""The one place where a campaign meets the simulator."""

from __future__ import annotations

from ...gap.records import Provenance
from ..evaluate.measure import Bench
from ..simulate import Simulator, parse
from ..simulate.foresight import foresees
from ..simulate.space import check, observed_by

__all__ = ["check", "foresees", "observed_by", "parse", "simulator"]


def simulator(bench: Bench, seed: int, provenance: Provenance) -> Simulator:
    """One for the bench's document: ``simulate(text)`` imposes an action on the full cache."""
    return Simulator(bench, seed=seed, provenance=provenance)
