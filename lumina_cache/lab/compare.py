"""How far one cache's predictions are from another's, teacher-forced, and how fast each goes, side by side."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..errors import EngagementError

__all__ = ["Drift", "Rates", "drift", "interleaved_rates", "kl_and_agreement", "log_softmax", "percentile"]


@dataclass(frozen=True)
class Drift:
    """KL(full ‖ other) in nats per token and the share of positions where both prefer the same token.

    Execution state: real; both caches ran a real forward.
    """

    kl_mean: float
    kl_p95: float
    top1_agreement: float
    positions: int


def drift(model: Any, full: Any, other: Any, tokens: list[int], *, lossy: bool) -> Drift:
    """Feed the same ``tokens`` to both caches (which are advanced by them) and compare the logits position by position.

    Raises:
        EngagementError: if a lossy action was taken and there is no drift at all: then it did not happen.
    """
    ids = mx.array(tokens)[None]
    reference, tried = log_softmax(model(ids, cache=full)[0]), log_softmax(model(ids, cache=other)[0])
    kl, same = kl_and_agreement(reference, tried)
    if lossy and mx.array_equal(reference, tried).item():
        raise EngagementError(
            "a lossy action was taken, yet the logits are those of the full cache to the last bit"
        )
    return Drift(
        kl_mean=statistics.fmean(kl.tolist()),
        kl_p95=percentile(kl, 0.95),
        top1_agreement=float(same.mean()),
        positions=kl.size,
    )


def kl_and_agreement(
    reference: mx.array, tried: mx.array
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Per position: KL(reference ‖ tried) in nats, and whether both prefer the same token.

    Args:
        reference, tried: log-probabilities (T, V), as :func:`log_softmax` gives them.
    """
    kl = mx.sum(mx.exp(reference) * (reference - tried), axis=-1)
    same = mx.argmax(reference, -1) == mx.argmax(tried, -1)
    mx.eval(kl, same)
    return np.array(kl).astype(np.float64), np.array(same)


def percentile(values: npt.NDArray[np.float64], share: float) -> float:
    """The value at or nearest to ``share`` of the sorted values."""
    found = np.sort(values)
    return float(found[min(found.size - 1, round(share * (found.size - 1)))])


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities of ``logits`` (…, V) in float32."""
    x = logits.astype(mx.float32)
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


@dataclass(frozen=True)
class Rates:
    """Median tokens per second of each side, and median and quartiles of the paired time ratios (other over full)."""

    full: float
    other: float
    ratio: float
    ratio_low: float  #: lower quartile
    ratio_high: float  #: upper quartile
    rounds: int


def interleaved_rates(model: Any, full: Any, other: Any, tokens: list[int], *, chunk: int) -> Rates:
    """Time forwards of ``chunk`` tokens at a time on both caches, taking turns, so that both see the same noise."""
    seconds: dict[str, list[float]] = {"full": [], "other": []}
    rounds = len(tokens) // chunk
    for i in range(rounds):
        ids = mx.array(tokens[i * chunk : (i + 1) * chunk])[None]
        order = (("full", full), ("other", other))
        for name, cache in order if i % 2 == 0 else order[::-1]:
            start = time.perf_counter()
            # As in generation, only the last position's logits are needed.
            mx.eval(model(ids, cache=cache)[:, -1])
            seconds[name].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(seconds["full"], seconds["other"], strict=True)]
    lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Rates(
        full=chunk / statistics.median(seconds["full"]),
        other=chunk / statistics.median(seconds["other"]),
        ratio=middle,
        ratio_low=lower,
        ratio_high=upper,
        rounds=rounds,
    )
