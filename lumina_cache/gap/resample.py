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

__all__ = ["LEVEL", "Array", "Documents", "Estimate"]

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
        names = sorted(set(self.domains))
        self.of_domain = {name: np.flatnonzero(np.array(self.domains) == name) for name in names}
        #: Weight of each document in a mean, shape (documents,).
        self.weights: Array = np.zeros(self.count)
        for index in self.of_domain.values():
            self.weights[index] = 1 / (len(names) * index.size)
        self._draws, self._seed = draws, seed
        self._drawn: Array | None = None

    @property
    def spread(self) -> bool:
        """Whether every domain has at least two documents."""
        return self.count > 0 and min(i.size for i in self.of_domain.values()) > 1

    @property
    def drawn(self) -> Array:
        """Weights of the documents in each draw, shape (draws, documents)."""
        if self._drawn is None:
            rng = np.random.default_rng(self._seed)
            self._drawn = np.zeros((self._draws, self.count))
            for index in self.of_domain.values():
                n = index.size
                some = rng.multinomial(n - 1, np.full(n, 1 / n), self._draws)
                self._drawn[:, index] = some / ((n - 1) * len(self.of_domain))
        return self._drawn

    def mean(self, values: Array) -> Any:
        """Mean over documents, the last axis."""
        return values @ self.weights

    def estimate(self, values: Array) -> Estimate:
        """Mean of one value per document, shape (documents,), with its interval."""
        value = float(self.mean(values))
        if not self.spread:
            return Estimate(value, None, None, self.count)
        low, high = np.quantile(self.drawn @ values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(value, float(low), float(high), self.count)

    def ratio(self, over: Array, under: Array) -> Estimate | None:
        """Ratio of two means over the same documents with its interval; None for a denominator of 0."""
        denominator = float(self.mean(under))
        if denominator == 0:
            return None
        value = float(self.mean(over)) / denominator
        if not self.spread:
            return Estimate(value, None, None, self.count)
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = (self.drawn @ over) / (self.drawn @ under)
        return self.of_draws(value, drawn)

    def of_draws(self, value: float, drawn: Array) -> Estimate:
        """A figure whose draws were worked out by the caller, shape (draws,). No interval if some are no numbers."""
        if not self.spread or not np.isfinite(drawn).all():
            return Estimate(value, None, None, self.count)
        low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(value, float(low), float(high), self.count)

    def only(self, domain: str) -> Documents:
        """The documents of one domain, with draws of their own."""
        return Documents([domain] * self.of_domain[domain].size, draws=self._draws, seed=self._seed)
