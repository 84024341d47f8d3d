"""Means over documents with intervals: documents are what is drawn, within each domain, and domains weigh the same.

Tokens and actions of one document share its text and are not independent of each other, so documents are drawn as a whole
(cluster bootstrap; Miller, Adding Error Bars to Evals, arXiv:2411.00640). Of the n documents of a domain n − 1 are drawn
with replacement: with n draws the variance would come out (n − 1)/n of what it is, which matters when a domain has a
handful (Rao & Wu, Resampling inference with complex survey data, JASA 83, 1988). Intervals are percentiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LEVEL", "Array", "Documents", "Drawn", "Estimate"]

#: Coverage of every interval.
LEVEL = 0.95

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; None where some domain has a single document, so that no spread can be told."""

    value: float
    low: float | None
    high: float | None
    documents: int

    @property
    def sure(self) -> bool:
        """Whether there is an interval and it leaves 0 out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def to_record(self) -> dict[str, Any]:
        return dict(vars(self))


class Documents:
    """Documents by domain, and the draws that all intervals of a stratum share, so that they are paired.

    Args:
        domains: the domain of each document, in the order of every array of values.
    """

    def __init__(self, domains: Sequence[str], *, draws: int = 10_000, seed: int = 0) -> None:
        self.domains = tuple(domains)
        self.count = len(self.domains)
        self.draws = draws
        names = sorted(set(self.domains))
        self.of_domain = {name: np.flatnonzero(np.array(self.domains) == name) for name in names}
        #: Weight of each document in a mean, shape (documents,).
        self.weights: Array = np.zeros(self.count)
        for index in self.of_domain.values():
            self.weights[index] = 1 / (len(names) * index.size)
        self._seed = seed
        self._drawn: Array | None = None
        self._waiting: list[Drawn] = []

    @property
    def spread(self) -> bool:
        """Whether every domain has at least two documents."""
        return self.count > 0 and min(i.size for i in self.of_domain.values()) > 1

    @property
    def drawn(self) -> Array:
        """Weights of the documents in each draw, shape (documents, draws)."""
        if self._drawn is None:
            self._drawn = np.zeros((self.count, self.draws))
            for number, index in enumerate(self.of_domain.values()):
                times = _times_drawn(index.size, self.draws, (self._seed, number))
                self._drawn[index] = times / ((index.size - 1) * len(self.of_domain))
        return self._drawn

    def mean(self, values: Array) -> Any:
        """Mean over documents, the last axis."""
        return values @ self.weights

    def estimate(self, values: Array) -> Estimate:
        """Mean of one value per document, shape (documents,), with its interval."""
        return self.estimates(values[None])[0]

    def estimates(self, values: Array) -> list[Estimate]:
        """Means of several values per document, shape (n, documents), with their intervals."""
        return self.later(values).estimates

    def draw(self, values: Array) -> Array:
        """The means of each draw, shape (n, draws) for values of shape (n, documents); NaN if there are no intervals."""
        if not self.spread:
            return np.full((len(values), 1), np.nan)
        found: Array = values @ self.drawn
        return found

    def later(self, values: Array) -> Drawn:
        """As :meth:`draw`, put off until somebody asks: whatever waits then is drawn at once, which is much faster."""
        drawn = Drawn(self, values)
        self._waiting.append(drawn)
        return drawn

    def draw_waiting(self) -> None:
        """Draw all that waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            found = self.draw(np.concatenate([one.values for one in waiting]))
            ends = np.cumsum([len(one.values) for one in waiting])[:-1]
            for one, rows in zip(waiting, np.split(found, ends), strict=True):
                one.rows = rows

    def of_draws(self, value: float, drawn: Array) -> Estimate:
        """A figure whose draws were worked out by the caller, shape (draws,). No interval if some are no numbers."""
        if not self.spread or not np.isfinite(drawn).all():
            return Estimate(value, None, None, self.count)
        low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(value, float(low), float(high), self.count)

    def only(self, domain: str) -> Documents:
        """The documents of one domain, drawn as they are among all."""
        index = self.of_domain[domain]
        found = Documents([domain] * index.size, draws=self.draws, seed=self._seed)
        if self.spread:
            found._drawn = self.drawn[index] * len(self.of_domain)
        return found


class Drawn:
    """Means of several values in every draw, worked out when they are asked for."""

    def __init__(self, documents: Documents, values: Array) -> None:
        self.documents = documents
        self.values = values  #: shape (n, documents)
        self.rows: Array | None = None

    @property
    def drawn(self) -> Array:
        """Shape (n, draws)."""
        if self.rows is None:
            self.documents.draw_waiting()
        assert self.rows is not None
        return self.rows

    @property
    def estimates(self) -> list[Estimate]:
        """One for each of the values."""
        means = self.documents.mean(self.values)
        return [self.documents.of_draws(float(v), d) for v, d in zip(means, self.drawn, strict=True)]


def _times_drawn(n: int, draws: int, seed: tuple[int, int]) -> Array:
    """How often each of n documents is among n − 1 that are drawn with replacement, shape (n, draws)."""
    rng = np.random.default_rng(seed)
    picked = rng.integers(0, n, (n - 1, draws)) * draws + np.arange(draws)
    return np.bincount(picked.ravel(), minlength=n * draws).reshape(n, draws).astype(np.float64)
