"""The one place where a campaign meets the simulator; and mlx-lm's own actions, simulated.

The simulator takes actions of this library and oracles. A simulated staircase of rungs needs its first step as well:
``mlx-lm:kv_bits=…`` makes the codes of ``quant:affine``, and ``mlx-lm:max_kv_size=…`` is a mask over the full cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as stock

from ...actions import parse_action
from ...errors import CampaignError, SimulationError
from ...gap.records import Measured, Provenance, quality_of
from ..answer import detached_copy
from ..evaluate.measure import Bench
from ..evaluate.rotating import KEEP
from ..evaluate.subjects import OwnAction, StockQuantized, StockRotating, Subject, is_placebo, parse_subject
from ..simulate import Simulator, parse
from ..simulate.foresight import foresees
from ..simulate.space import check, observed_by

__all__ = ["Imposed", "observers", "read"]


def read(text: str) -> tuple[OwnAction | StockQuantized | StockRotating, str | None]:
    """What a text form means to the simulator, and the role that it has by its nature.

    Raises:
        ActionSyntaxError: naming the part that was not understood.
        CampaignError: it cannot be simulated; says why.
    """
    if not text.strip().startswith("mlx-"):
        action = parse(text)
        _check(action)
        subject = OwnAction(action)
        return subject, "ceiling" if foresees(action) else "placebo" if is_placebo(subject) else None
    found: Subject = parse_subject(text)
    if isinstance(found, StockQuantized) or (isinstance(found, StockRotating) and found.bits is None):
        if isinstance(found, StockQuantized):
            _check(parse_action(_as_own(found)))
        return found, None
    raise CampaignError(f"{found.text} cannot be simulated; leave it to real executions")


def _check(action: Any) -> None:
    try:
        check(action)
    except SimulationError as error:
        raise CampaignError(f"{error}; or leave it to real executions") from None


def _as_own(subject: StockQuantized) -> str:
    return f"quant:affine,bits={subject.bits},group={subject.group_size}"


def observers(texts: Iterable[str]) -> tuple[str, ...]:
    """Scorers whose statistics of the prompt's attention simulated actions need."""
    found = (read(text)[0] for text in texts)
    names = (n for s in found if isinstance(s, OwnAction) for n in observed_by(s.action))
    return tuple(dict.fromkeys(names))


class Imposed:
    """Simulates actions on one bench's document. Reads the bench's caches and changes none of them."""

    def __init__(self, bench: Bench, seed: int, provenance: Provenance) -> None:
        self._bench = bench
        self._simulator = Simulator(bench, seed=seed, provenance=provenance)

    def measured(self, text: str) -> Measured:
        """
        Raises:
            SimulationError: there is no forward for it on this model or in this state.
        """
        subject, _ = read(text)
        if isinstance(subject, StockRotating):
            return _rotating(self._bench, subject)
        return self._simulator.simulate(
            _as_own(subject) if isinstance(subject, StockQuantized) else subject.action
        ).measured


class _Window(stock.KVCache):  # type: ignore[misc]
    """All rows, behind a mask that shows what a rotating cache of ``size`` rows would hold for each token."""

    size = 0

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        row = mx.arange(self.offset + N)[None]
        token = mx.arange(self.offset, self.offset + N)[:, None]
        return (row <= token) & ((token - row < self.size - KEEP) | (row < KEEP))


def _rotating(bench: Bench, subject: StockRotating) -> Measured:
    fork = detached_copy(bench.full)
    try:
        plain = fork.to_mlx()
    finally:
        fork.close()
    held = max((int(e.offset) for e in plain if type(e) is stock.KVCache), default=0)
    size = subject.size(held)
    if not KEEP < size <= held:
        raise SimulationError(f"{subject.text}: {size} of {held} rows, of which {KEEP} are always kept")
    live = 0
    live16 = 0.0
    cache = []
    for entry in plain:
        if type(entry) is not stock.KVCache:
            raise SimulationError(f"{subject.text}: this model has {type(entry).__name__} beside full caches")
        keys, values = entry.keys_and_values()
        window = _Window()
        window.keys, window.values, window.offset, window.size = keys, values, int(entry.offset), size
        cache.append(window)
        for rows in (keys, values):
            live += rows.nbytes * size // rows.shape[2]
            live16 += 2.0 * rows.size * size / rows.shape[2]
    found = bench.continuation(cache)
    share = live16 / bench.dense.live16
    quality = quality_of(np.array(found["kl"]), top1=found["top1"], nll_change=found["nll_change"])
    return Measured(quality, share, share, live, live)
