"""From what the bench measured to observations: one for what ran, one for every rung that refused."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...backend.capabilities import Rung
from ...gap.records import BackendInfeasible, Measured, Observation, Provenance, Real, State, quality_of
from ...telemetry import read_once
from ..evaluate.documents import EvalDocument
from .trial import Trial

__all__ = ["machine_name", "now", "observations_of", "state_of"]


def now() -> str:
    """ISO time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def machine_name() -> str:
    """The chip as its system names it; its architecture where none is told."""
    return read_once().chip or platform.machine()


def state_of(model: str, document: EvalDocument, seed: int, horizon: int) -> State:
    """The state that a document leaves behind: all of its context held, the next token to come."""
    return State(model, document.name, document.domain, document.context, "decode", seed, horizon)


def observations_of(
    trial: Trial, record: Mapping[str, Any], state: State, provenance: Provenance, rungs: Sequence[Rung]
) -> Iterator[Observation]:
    """What a record of :func:`~lumina_cache.lab.evaluate.run.measured` says; nothing for one of a fault.

    Args:
        rungs: those at which the action was tried, the least first.
    """
    if record["state"] == "real":
        for refusal in record["refused"]:
            at = Rung[refusal["rung"].upper()]
            yield BackendInfeasible(state, trial.what(), provenance, tuple(refusal["reasons"]), int(at))
        yield Real(state, trial.what(Rung[record["rung"].upper()]), provenance, _measured(record))
    elif record["state"] == "backend_infeasible":
        tried = [Rung(trial.rung)] if trial.action.startswith("mlx-") else rungs
        for at in tried:
            own = [r for r in record["reasons"] if r.get("rung", at.name.lower()) == at.name.lower()]
            reasons = tuple({k: v for k, v in r.items() if k != "rung"} for r in own)
            yield BackendInfeasible(state, trial.what(), provenance, reasons, int(at))


def _measured(record: Mapping[str, Any]) -> Measured:
    test = record["T1"]
    quality = quality_of(np.array(test["kl"]), top1=test["top1"], nll_change=test["nll_change"])
    return Measured.of_trial(quality, record)
