"""What MLX and mlx-lm can do with rows of every layout, tried on small arrays without a model.

Affine packing at each bit width, group size and head dimension: encode, decode, attend, append, gather; the element
formats of ``mx.quantize``; masks of every shape over dense and packed rows; rows of one layer under the mask of
another; arrays that change threads. All of it runs in a child process, so that what aborts is an outcome as well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from .interface import mlx_lm_version, mlx_version
from .isolate import Answer, ask
from .matrix_checks import (
    CHECKS,
    CHUNK,
    FORMATS,
    KV_HEADS,
    LAYOUT_CHECKS,
    MASKS,
    QUERY_HEADS,
    answer,
    dtype_name,
)

__all__ = ["BITS", "GROUP_SIZES", "HEAD_DIMS", "Matrix", "Trial", "probe_matrix", "questions"]

#: Bit widths tried; MLX takes all of them but 7.
BITS = (1, 2, 3, 4, 5, 6, 7, 8)
GROUP_SIZES = (32, 64, 128)
#: (key, value) head dims tried (elements).
HEAD_DIMS = (
    *((d, d) for d in (48, 64, 80, 96, 128, 192, 256)),
    (64, 32),
    (192, 128),
    (512, 64),
)

_TARGET = f"{answer.__module__}:{answer.__name__}"


@dataclass(frozen=True)
class Trial:
    """One thing tried.

    ``outcome`` is ``works``; ``wrong`` (it ran, and its result is further off than allowed: ``error`` over
    ``allowed``); ``raises`` or ``died`` (``reason`` is the exception's first line, or how the process ended); or
    ``skipped`` (``reason`` says because of what).
    """

    check: str
    params: Mapping[str, Any]
    outcome: str
    reason: str | None
    seconds: float
    error: float | None = None  #: largest deviation found, in the unit of ``allowed``
    allowed: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))

    @property
    def works(self) -> bool:
        return self.outcome == "works"

    def __str__(self) -> str:
        params = ",".join(f"{k}={v}" for k, v in self.params.items())
        return f"{self.check}({params}): {self.outcome}" + (f": {self.reason}" if self.reason else "")

    def to_record(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "params": dict(self.params),
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": round(self.seconds, 5),
            "error": self.error,
            "allowed": self.allowed,
        }


@dataclass(frozen=True)
class Matrix:
    """All trials on one installation."""

    device: str
    mlx: str
    mlx_lm: str
    dtype: str  #: of the dense rows
    trials: tuple[Trial, ...]
    seconds: float = field(compare=False, default=0.0)

    def of(self, check: str, **params: Any) -> tuple[Trial, ...]:
        """Trials of one check whose parameters are those given."""
        wanted = params.items()
        return tuple(t for t in self.trials if t.check == check and wanted <= t.params.items())

    def counts(self) -> dict[str, Counter[str]]:
        """Outcomes counted per check."""
        found: dict[str, Counter[str]] = {}
        for trial in self.trials:
            found.setdefault(trial.check, Counter())[trial.outcome] += 1
        return found

    def to_record(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "mlx": self.mlx,
            "mlx_lm": self.mlx_lm,
            "dtype": self.dtype,
            "seconds": self.seconds,
            "trials": [t.to_record() for t in self.trials],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Matrix:
        """Raises KeyError or TypeError for a record that :meth:`to_record` did not make."""
        trials = tuple(Trial(**t) for t in record["trials"])
        return cls(**{**record, "trials": trials})


def probe_matrix(
    *, timeout: float = 60.0, on_progress: Callable[[int, int], None] | None = None, only: Iterable[str] = ()
) -> Matrix:
    """Try everything in child processes. Never raises for what a trial does; takes some seconds.

    Args:
        timeout: seconds for the trials of one layout.
        on_progress: called with the number of questions answered and of all.
        only: names of checks from :data:`CHECKS`; all of them when empty.
    """
    start = time.perf_counter()
    asked = list(questions(only))
    trials: list[Trial] = []

    def answered(number: int, answer: Answer) -> None:
        trials.extend(_trials_of(asked[number], answer, timeout))
        if on_progress is not None:
            on_progress(number + 1, len(asked))

    ask(_TARGET, asked, timeout=timeout, on_answer=answered)
    return Matrix(
        mx.default_device().type.name,
        mlx_version(),
        mlx_lm_version,
        dtype_name(),
        tuple(trials),
        time.perf_counter() - start,
    )


def questions(only: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
    """One question per set of parameters, with the checks to run on it and the device to run them on."""
    wanted = frozenset(only) or CHECKS.keys()
    for params, names in _cases():
        checks = [name for name in names if name in wanted]
        if checks:
            yield {"params": params, "checks": checks, "device": mx.default_device().type.name}


def _cases() -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    for key_dim, value_dim in HEAD_DIMS:
        for group_size in GROUP_SIZES:
            for bits in BITS:
                layout = {"bits": bits, "group_size": group_size, "key_dim": key_dim, "value_dim": value_dim}
                yield layout, LAYOUT_CHECKS
    for key_dim, value_dim in HEAD_DIMS:
        for name in FORMATS:
            yield {"format": name, "key_dim": key_dim, "value_dim": value_dim}, ("format", "format_attention")
    for storage in ("dense", "packed"):
        for mask, tokens in MASKS:
            for batch in (1, 2):
                for query_heads in (KV_HEADS, QUERY_HEADS):
                    yield (
                        {
                            "storage": storage,
                            "mask": mask,
                            "tokens": tokens,
                            "batch": batch,
                            "query_heads": query_heads,
                        },
                        ("mask",),
                    )
        for mask, tokens in (("none", 1), ("causal", CHUNK), ("array", CHUNK)):
            yield {"storage": storage, "mask": mask, "tokens": tokens}, ("uneven_rows",)
    for what in ("evaluated", "unevaluated"):
        yield {"array": what}, ("other_thread",)


def _trials_of(question: Mapping[str, Any], answer: Answer, timeout: float) -> list[Trial]:
    params, checks = question["params"], question["checks"]
    if answer.died is None:
        return [Trial(params=params, **found) for found in answer.value]
    if len(checks) == 1:
        return [Trial(checks[0], params, "died", answer.died, answer.seconds)]
    # One of them ended the process: ask for each by itself to learn which.
    alone = [{**question, "checks": [check]} for check in checks]
    answers = ask(_TARGET, alone, timeout=timeout)
    return [t for q, a in zip(alone, answers, strict=True) for t in _trials_of(q, a, timeout)]
