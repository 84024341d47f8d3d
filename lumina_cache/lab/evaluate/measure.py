"""Measure one document: the full cache once, then every subject on copies of it.

The prompt is read once per context. Each subject changes a copy, and copies of that answer each test, so that no test
sees what another fed. Logits of the full cache are computed once, over the same blocks.

With several rungs the prompt is read at the deepest, and its rows are handed to caches of the others: each subject is
measured once, at the least rung that carries it out, and the refusals of those before it are kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ...backend.capabilities import Rung
from ...cache import LuminaCache
from ...errors import EngagementError
from ..answer import detached_copy
from ..compare import interleaved_rates, kl_and_agreement, log_softmax, percentile
from .documents import EvalDocument
from .head import Halves, halves
from .plan import Plan
from .storage import Stored, stored
from .subjects import Reasons, Refused, Subject, Taken
from .tasks import Continuation, Copy, Lookup, Planted, continuation, planted

__all__ = ["Bench", "log_probabilities", "read_prompt"]

#: Tokens over which KL is averaged for whoever wants to choose on some and judge on others.
SPAN = 16


def read_prompt(model: Any, cache: Any, tokens: tuple[int, ...], chunk: int) -> None:
    """Fill ``cache`` with ``tokens`` in steps of ``chunk``. Logits are never asked for, so never computed."""
    for i in range(0, len(tokens), chunk):
        model(mx.array(tokens[i : i + chunk])[None], cache=cache)
        mx.eval([entry.state for entry in cache])


def log_probabilities(
    model: Any,
    cache: Any,
    tokens: tuple[int, ...],
    block: int,
    *,
    scored: int | None = None,
    split: Halves | None = None,
) -> mx.array:
    """Log-probabilities (T, V) after each of the last ``scored`` ``tokens`` (default: all); advances ``cache``.

    Tokens are fed ``block`` at a time; with ``split``, they meet the vocabulary together.
    """
    body = model if split is None else split.body
    out = []
    for i in range(0, len(tokens), block):
        out.append(body(mx.array(tokens[i : i + block])[None], cache=cache)[0])
        mx.eval(out[-1])
    found = (out[0] if len(out) == 1 else mx.concatenate(out, axis=0))[-(scored or len(tokens)) :]
    logprobs = log_softmax(found if split is None else split.head(found[None])[0])
    mx.eval(logprobs)
    return logprobs


def nll(logprobs: mx.array, expected: tuple[int, ...]) -> float:
    """Mean negative log-likelihood of ``expected`` in nats per token."""
    picked: Any = mx.take_along_axis(logprobs, mx.array(expected)[:, None], axis=-1)
    return -float(np.array(picked).astype(np.float64).mean())


def hits(logprobs: mx.array, expected: tuple[int, ...]) -> float:
    """Share of positions whose most probable token is the expected one."""
    return float(np.mean(np.array(mx.argmax(logprobs, axis=-1)) == np.array(expected)))


@dataclass
class Bench:
    """One document with the full cache's answers. Everything a subject is compared with."""

    model: Any
    tokenizer: Any
    document: EvalDocument
    plan: Plan
    index: int  #: of the document within its context
    disk: bool = False  #: whether caches may write rows to files
    rung: Rung = Rung.CACHE  #: at which the prompt is read
    rungs: tuple[
        Rung, ...
    ] = ()  #: at which subjects are tried; default: that of the prompt, which is the deepest
    observe: tuple[str, ...] = ()  #: scorers that watch the prompt's attention, at rung hook
    by_token: bool = False  #: whether records hold T1's KL of every token
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan, free = self.plan, self.index < self.plan.free_run_documents
        self.free = "T5" in plan.tests and free
        self.timed = "time" in plan.tests and self.index < plan.timed_documents
        self.task: Continuation = continuation(self.document, plan)
        self.asks: Planted = planted(self.document, self.tokenizer, plan, self.index)
        self.needs_planted = bool({"T2", "T3"} & set(plan.tests))
        self.rungs = tuple(sorted(self.rungs)) or (self.rung,)
        self.rung = self.rungs[-1]
        self.split = halves(self.model)
        self._lower: dict[tuple[Rung, bool], LuminaCache] = {}
        with self._clock("prefill"):
            self.full = self._filled(self.task.context)
            self.full_planted = self._filled(self.asks.context) if self.needs_planted else None
        self.dense = stored(self.full)
        with self._clock("reference"):
            self._answer()

    def _filled(self, context: tuple[int, ...]) -> LuminaCache:
        cache = self._empty(self.rung)
        read_prompt(self.model, cache, context, self.plan.chunk)
        return cache

    def _empty(self, rung: Rung) -> LuminaCache:
        return LuminaCache(
            self.model,
            telemetry=False,
            log=None,
            disk=self.disk,
            guard=False,
            rung=rung,
            observe=self.observe if rung == Rung.HOOK else None,
        )

    def _at(self, rung: Rung, planted: bool) -> LuminaCache:
        """A full cache opened at ``rung`` with the rows that the prompt left."""
        full = self.full_planted if planted else self.full
        assert full is not None
        if rung == self.rung:
            return full
        if (rung, planted) not in self._lower:
            new = self._empty(rung)
            for i, entry in enumerate(detached_copy(full).to_mlx()):
                new[i] = entry
            self._lower[rung, planted] = new
        return self._lower[rung, planted]

    def close(self) -> None:
        """Close the full caches, and with them what they hold on to (hooks, files)."""
        for cache in (self.full, self.full_planted, *self._lower.values()):
            if cache is not None:
                cache.close()

    @contextmanager
    def _clock(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start

    # What follows leaves the cache that it is given as it is, and feeds a copy.

    def _log_probabilities(
        self, cache: Any, fed: tuple[int, ...], scored: int, last: bool = False
    ) -> mx.array:
        """``last``: nobody asks ``cache`` after this, so that it may be fed itself."""
        with nullcontext(cache) if last else _copied(cache) as own:
            return log_probabilities(self.model, own, fed, self.plan.block, scored=scored, split=self.split)

    def _answer(self) -> None:
        """What the full cache says, and what is said without most of the context."""
        plan, task = self.plan, self.task
        self.reference: dict[str, Any] = {}
        if "T1" in plan.tests:
            self.continued = self._continue(self.full)
            short = make_prompt_cache(self.model)
            read_prompt(self.model, short, task.context[-plan.short_context :], plan.chunk)
            self.reference["T1"] = {
                "nll": nll(self.continued, task.expected),
                "nll_short_context": nll(self._continue(short, last=True), task.expected),
            }
        if "T2" in plan.tests:
            self.copied = [self._copy(self.full_planted, c) for c in self.asks.copies]
            alone = [self._copy(make_prompt_cache(self.model), c) for c in self.asks.copies]
            expected = [c.expected for c in self.asks.copies]
            self.reference["T2"] = {
                "accuracy": _mean(map(hits, self.copied, expected)),
                "accuracy_no_context": _mean(map(hits, alone, expected)),
            }
        if "T3" in plan.tests and self.asks.lookups:
            self.looked_up = [self._lookup(self.full_planted, q) for q in self.asks.lookups]
            right = [c == q.answer for c, q in zip(self.looked_up, self.asks.lookups, strict=True)]
            self.reference["T3"] = {"accuracy": _mean(right), "questions": len(right)}
        elif "T3" in plan.tests:
            self.reference["T3"] = {"reason": self.asks.lookup_reason}
        if self.free:
            self.run = self._greedy(self.full, None)
            self.reference["T5"] = {"tokens": len(self.run)}

    def _continue(self, cache: Any, last: bool = False) -> mx.array:
        return self._log_probabilities(cache, self.task.fed, len(self.task.fed), last)

    def _copy(self, cache: Any, copy: Copy) -> mx.array:
        return self._log_probabilities(cache, copy.fed, len(copy.expected))

    def _lookup(self, cache: Any, question: Lookup) -> int:
        last = self._log_probabilities(cache, question.fed, 1)[0]
        return _index_of_greatest(last[mx.array(question.candidates)])

    def _greedy(self, cache: Any, follow: list[int] | None) -> list[int]:
        """Greedy tokens after the first fed one; with ``follow``, only until they differ from it."""
        token, out = self.task.fed[0], list[int]()
        with _copied(cache) as own:
            for i in range(self.plan.free_run):
                token = _index_of_greatest(self.model(mx.array([[token]]), cache=own)[0, -1])
                if follow is not None and token != follow[i]:
                    break
                out.append(token)
        return out

    def document_record(self) -> dict[str, Any]:
        """The full cache's own figures, by which the gates go."""
        return {
            "kind": "document",
            "document": self.document.name,
            "context": self.document.context,
            "dense": {
                "live": self.dense.live,
                "allocated": self.dense.allocated,
                "live16": self.dense.live16,
            },
            **self.reference,
            "seconds": dict(self.seconds),
        }

    def measure(self, subject: Subject) -> dict[str, Any]:
        """One subject on this document, at the least rung that carries it out.

        Raises:
            Refused: it cannot be carried out in this state, at none of the rungs.
            EngagementError: it was carried out, and nothing changed or bytes are not those predicted.
        """
        self.seconds = {}
        refused: list[tuple[Rung, Reasons]] = []
        for rung in self.rungs if subject.rung is None else self.rungs[-1:]:
            try:
                record = self._measure_at(rung, subject)
            except Refused as refusal:
                refused.append((rung if subject.rung is None else subject.rung, refusal.reasons))
                continue
            return {
                **record,
                "rung": (rung if subject.rung is None else subject.rung).name.lower(),
                "refused": [
                    {"rung": at.name.lower(), "reasons": [dict(r) for r in why]} for at, why in refused
                ],
            }
        raise Refused(_all_reasons(refused))

    def _measure_at(self, rung: Rung, subject: Subject) -> dict[str, Any]:
        with ExitStack() as stack:
            with self._clock("take"):
                taken = subject.take(self._at(rung, False), self.model)
                stack.callback(_close, taken.cache)
                other = None
                if self.needs_planted:
                    other = subject.take(self._at(rung, True), self.model).cache
                    stack.callback(_close, other)
            return self._measured(subject, taken, other)

    def _measured(self, subject: Subject, taken: Taken, other: Any) -> dict[str, Any]:
        """The record of a changed cache; ``other`` is the one of the planted context, changed alike."""
        plan = self.plan
        held = stored(taken.cache)
        self._check_bytes(subject, taken, held)
        record: dict[str, Any] = {
            "kind": "subject",
            "document": self.document.name,
            "context": self.document.context,
            "action": subject.text,
            "state": "real",
            "bytes": {
                "live": held.live,
                "allocated": held.allocated,
                "predicted_live": taken.predicted_live,
                "predicted_allocated": taken.predicted_allocated,
                "share16": held.live16 / self.dense.live16,
                "share16_allocated": held.allocated16 / self.dense.live16,
                "seen": held.seen,
            },
            "take_seconds": taken.seconds,
        }
        moved = []
        if "T1" in plan.tests:
            with self._clock("T1"):
                record["T1"] = self.continuation(taken.cache, last=not (self.free or self.timed))
            moved.append(record["T1"]["kl_max"])
        if "T2" in plan.tests:
            with self._clock("T2"):
                record["T2"] = self._copies(other)
            moved += [c["kl"] for c in record["T2"]["by_depth"]]
        if taken.changed and moved and not any(moved):
            raise EngagementError(
                f"{subject.text}: rows were changed, yet the logits are those of the full cache to the last bit"
            )
        if "T3" in plan.tests and self.asks.lookups:
            with self._clock("T3"):
                record["T3"] = self._lookups(other)
        if self.free:
            with self._clock("T5"):
                agreed = self._greedy(taken.cache, self.run)
            record["T5"] = {"agreed": len(agreed), "of": len(self.run)}
        if self.timed:
            with self._clock("time"):
                record["time"] = self._time(taken.cache)
        record["seconds"] = dict(self.seconds)
        return record

    def _check_bytes(self, subject: Subject, taken: Taken, held: Stored) -> None:
        for what, predicted, found in (
            ("live", taken.predicted_live, held.live),
            ("allocated", taken.predicted_allocated, held.allocated),
        ):
            if predicted is not None and predicted != found:
                raise EngagementError(
                    f"{subject.text}: {predicted} bytes {what} were predicted, but the arrays hold {found}"
                )

    def continuation(self, cache: Any, last: bool = True) -> dict[str, Any]:
        """T1 of a changed cache, which ``last`` allows to be fed itself."""
        tried = self._continue(cache, last)
        kl, same = kl_and_agreement(self.continued, tried)
        loss = nll(tried, self.task.expected)
        found = {
            "kl_mean": float(kl.mean()),
            "kl_p95": percentile(kl, 0.95),
            "kl_max": float(np.abs(kl).max()),
            "kl_by_16": [float(kl[i : i + SPAN].mean()) for i in range(0, kl.size, SPAN)],
            "top1": float(same.mean()),
            "nll": loss,
            "nll_change": loss - self.reference["T1"]["nll"],
        }
        return {**found, "kl": kl.tolist()} if self.by_token else found

    def _copies(self, cache: Any) -> dict[str, Any]:
        by_depth = []
        for copy, reference in zip(self.asks.copies, self.copied, strict=True):
            tried = self._copy(cache, copy)
            kl, _ = kl_and_agreement(reference, tried)
            by_depth.append(
                {"depth": copy.depth, "kl": float(kl.mean()), "accuracy": hits(tried, copy.expected)}
            )
        return {
            "kl_mean": _mean(d["kl"] for d in by_depth),
            "accuracy": _mean(d["accuracy"] for d in by_depth),
            "by_depth": by_depth,
        }

    def _lookups(self, cache: Any) -> dict[str, Any]:
        chosen = [self._lookup(cache, q) for q in self.asks.lookups]
        return {
            "accuracy": _mean(c == q.answer for c, q in zip(chosen, self.asks.lookups, strict=True)),
            "flips": _mean(c != f for c, f in zip(chosen, self.looked_up, strict=True)),
        }

    def _time(self, cache: Any) -> dict[str, Any]:
        tokens = list(self.task.fed[: self.plan.timed_steps])
        with _copied(self.full) as full, _copied(cache) as changed:
            rates = interleaved_rates(self.model, full, changed, tokens, chunk=1)
        return {"ratio": rates.ratio, "low": rates.ratio_low, "high": rates.ratio_high, "steps": rates.rounds}


@contextmanager
def _copied(cache: Any) -> Iterator[Any]:
    own = detached_copy(cache)
    try:
        yield own
    finally:
        _close(own)


def _all_reasons(refused: Sequence[tuple[Rung, Reasons]]) -> Reasons:
    """Reasons of every rung; where there are several, each says of which."""
    if len(refused) == 1:
        return refused[0][1]
    return tuple({**reason, "rung": rung.name.lower()} for rung, reasons in refused for reason in reasons)


def _close(cache: Any) -> None:
    """Let go of what a cache holds on to; caches of others hold on to nothing."""
    if isinstance(cache, LuminaCache):
        cache.close()


def _index_of_greatest(values: mx.array) -> int:
    return int(np.array(mx.argmax(values)))


def _mean(values: Any) -> float:
    found = list(values)
    return math.fsum(found) / len(found)
