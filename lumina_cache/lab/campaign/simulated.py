"""The one place where a campaign meets the simulator, which is part of the laboratory and may be left out of it."""

from __future__ import annotations

import importlib
from typing import Any

from ...actions import Action
from ...errors import CampaignError

__all__ = ["check", "foresees", "observed_by", "parse", "simulator"]

_PACKAGE = "lumina_cache.lab.simulate"


def _there(module: str = "") -> Any:
    try:
        return importlib.import_module(_PACKAGE + module)
    except ModuleNotFoundError as error:
        raise CampaignError(
            f'this installation has no simulator ({error.name}): leave "simulated" out of executions'
        ) from None


def parse(text: str) -> Action:
    """An action, or one with oracles in it.

    Raises:
        ActionSyntaxError: naming the part that was not understood.
        CampaignError: there is no simulator.
    """
    found: Action = _there().parse(text)
    return found


def check(action: Action) -> None:
    """
    Raises:
        SimulationError: the simulator has no forward for it.
    """
    _there(".space").check(action)


def foresees(action: Action) -> bool:
    """Whether it looks at tokens that are not there yet."""
    return bool(_there(".foresight").foresees(action))


def observed_by(action: Action) -> tuple[str, ...]:
    """Scorers whose statistics of the prompt's attention it needs."""
    found: tuple[str, ...] = _there(".space").observed_by(action)
    return found


def simulator(bench: Any, seed: int, provenance: Any) -> Any:
    """A simulator on the bench's document: ``simulate(text)`` gives an observation of type ``Simulated``."""
    return _there().Simulator(bench, seed=seed, provenance=provenance)
