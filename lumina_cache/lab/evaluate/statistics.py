"""Intervals over documents. The document is the unit of resampling: its tokens share one context and are not independent.

Percentile bootstrap, stratified by domain: documents are drawn with replacement within each domain, and domains have
equal weights, fixed beforehand (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapters 13 and 6.6; Miller,
Adding Error Bars to Evals, arXiv:2411.00640, for resampling clusters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Estimate", "bootstrap_mean", "geometric_mean"]

#: Coverage of every interval.
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; None where a domain has a single document, from which no spread can be told."""

    mean: float
    low: float | None
    high: float | None
    documents: int


def bootstrap_mean(
    values: Mapping[str, Sequence[float]], *, draws: int = 10_000, seed: int = 0
) -> Estimate | None:
    """The mean over domains of the means over documents, with a percentile interval; None without a value.

    Args:
        values: domain → one value per document.
        draws: bootstrap draws.
        seed: of the draws; the same values and seed give the same interval.
    """
    strata = [np.asarray(v, dtype=np.float64) for v in values.values() if len(v)]
    if not strata:
        return None
    n = sum(map(len, strata))
    mean = float(np.mean([v.mean() for v in strata]))
    if min(map(len, strata)) == 1:
        return Estimate(mean, None, None, n)
    rng = np.random.default_rng(seed)
    drawn = np.mean([v[rng.integers(0, len(v), (draws, len(v)))].mean(axis=1) for v in strata], axis=0)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high), n)


def geometric_mean(
    ratios: Mapping[str, Sequence[float]], *, draws: int = 10_000, seed: int = 0
) -> Estimate | None:
    """As :func:`bootstrap_mean` of the logarithms, and back: for ratios, of which 2 and ½ should cancel."""
    found = bootstrap_mean({k: np.log(v).tolist() for k, v in ratios.items()}, draws=draws, seed=seed)
    if found is None:
        return None
    low, high = (None if x is None else float(np.exp(x)) for x in (found.low, found.high))
    return Estimate(float(np.exp(found.mean)), low, high, found.documents)
