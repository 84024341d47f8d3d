"""How long decode steps take with each codec, beside those of the dense cache, and what actions cost by themselves.

Steps of the two caches take turns in one process, so that both see the same noise; a figure is the median of the paired
ratios, with quartiles. Rows are those of a text, but any would do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from ...actions import Action, Keep, Offload
from ...backend.capabilities import Rung
from ...cache import LuminaCache
from ...disk import DiskStore
from ...errors import ActionInfeasibleError, BackendInterfaceError, LuminaError, UnsupportedCacheError
from ..answer import detached_copy
from ..compare import interleaved_rates
from ..evaluate.measure import read_prompt
from .settings import Settings

__all__ = ["CHUNK", "CHUNKS", "CHUNK_TIMES", "DENSE_TIMES", "TIMES", "Clock", "timings"]

#: Stands where records of documents have the document's name.
TIMES = "times"
CHUNK_TIMES = "times of chunks"
DENSE_TIMES = "times of dense rows"

#: Tokens of a timed chunk of a prompt, and how many of them: long enough that a layout's work per chunk shows.
CHUNK, CHUNKS = 64, 3

#: Rows at which actions' own work is measured, and a dense step's seconds: the nearest that is timed.
OWN_WORK_ROWS = 1024


class Clock:
    """One filled cache that grows from one number of rows to the next, and copies of it that are timed.

    Actions that reach the model's attention are carried out in a second one, at rung hook, which watches nothing; they
    are timed beside the dense cache without a hook like all others.
    """

    def __init__(
        self, model: Any, tokens: Sequence[int], settings: Settings, actions: Iterable[Action]
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.settings = settings
        self.disk = DiskStore(None, max_bytes=None, total_max_bytes=None)
        self.full = LuminaCache(model, telemetry=False, disk=self.disk, guard=False)
        self.hooked = self._hooked() if any(a.rung >= Rung.HOOK for a in actions) else None
        self._filled = 0

    def _hooked(self) -> LuminaCache | None:
        try:
            return LuminaCache(self.model, telemetry=False, guard=False, rung="hook", observe=())
        except (BackendInterfaceError, UnsupportedCacheError):
            return None  # actions that need it are then refused, with the reason

    def close(self) -> None:
        for cache in (self.full, self.hooked):
            if cache is not None:
                cache.close()
        self.disk.close()

    def fill(self, rows: int) -> None:
        more = [self.tokens[i % len(self.tokens)] for i in range(self._filled, rows)]
        for cache in (self.full, self.hooked):
            if cache is not None:
                read_prompt(self.model, cache, tuple(more), self.settings.plan.chunk)
        self._filled = rows

    def step(self, action: Action) -> dict[str, Any]:
        """Record of decode steps after ``action``, beside the dense cache. Refusals have a reason and no figure."""
        return self._record(action, TIMES, self.settings.timed_steps, 1)

    def chunk(self, action: Action) -> dict[str, Any]:
        """The same of chunks of a prompt; ``dense_seconds`` is that of one token."""
        return self._record(action, CHUNK_TIMES, CHUNKS, CHUNK)

    def dense(self) -> dict[str, Any]:
        """Record of the dense cache's own steps and chunks at each number of rows: seconds per token.

        Caches of all lengths take turns, so that a machine that gets slower meanwhile does not look like more rows.
        """
        base = {"kind": "step", "document": DENSE_TIMES, "context": self._filled, "action": str(Keep())}
        if not can_trim_prompt_cache(self.full):
            reasons = [{"code": "refused", "text": "rows of this model's cache cannot be taken back"}]
            return {**base, "state": "backend_infeasible", "reasons": reasons}
        caches = {rows: detached_copy(self.full) for rows in sorted(self.settings.timed_rows)}
        try:
            for rows, cache in caches.items():
                trim_prompt_cache(cache, self._filled - rows)
            steps = self._turns(caches, self.settings.timed_steps, 1)
            chunks = self._turns(caches, CHUNKS, CHUNK)
        finally:
            for cache in caches.values():
                cache.close()
        return {**base, "state": "real", "steps": steps, "chunks": chunks}

    def _turns(self, caches: Mapping[int, LuminaCache], rounds: int, chunk: int) -> dict[str, float]:
        """Median seconds per token by rows; the first round allocates and is not counted."""
        spent: dict[int, list[float]] = {rows: [] for rows in caches}
        ids = mx.array([self.tokens[i % len(self.tokens)] for i in range(chunk)])[None]
        for i in range(rounds + 1):
            for rows in list(caches) if i % 2 == 0 else list(caches)[::-1]:
                start = time.perf_counter()
                mx.eval(self.model(ids, cache=caches[rows])[:, -1])
                spent[rows].append((time.perf_counter() - start) / chunk)
        return {str(rows): statistics.median(seconds[1:]) for rows, seconds in spent.items()}

    def _record(self, action: Action, document: str, rounds: int, chunk: int) -> dict[str, Any]:
        reaches = self.hooked is not None and action.rung >= Rung.HOOK
        dense, other = detached_copy(self.full), detached_copy(self.hooked if reaches else self.full)
        base = {"kind": "step", "document": document, "context": self._filled, "action": str(action)}
        try:
            return {**base, "state": "real", **self._timed(dense, other, action, rounds, chunk)}
        except ActionInfeasibleError as error:
            reasons = [{"code": "refused", "text": str(error)}]
            return {**base, "state": "backend_infeasible", "reasons": reasons}
        except LuminaError as error:
            return {**base, "state": "failed", "error": f"{type(error).__name__}: {error}"}
        finally:
            for cache in (dense, other):
                cache.close()

    def _timed(
        self, dense: LuminaCache, other: LuminaCache, action: Action, rounds: int, chunk: int
    ) -> dict[str, Any]:
        live = other.observe().nbytes_live
        applied = other.apply(action)
        # The first step of each side allocates and is not counted.
        tokens = [self.tokens[i % len(self.tokens)] for i in range(rounds * chunk + 1)]
        for cache in (dense, other):
            read_prompt(self.model, cache, (tokens[0],), 1)
        rates = interleaved_rates(self.model, dense, other, tokens[1:], chunk=chunk)
        return {
            "ratio": rates.ratio,
            "low": rates.ratio_low,
            "high": rates.ratio_high,
            "steps": rates.rounds,
            "dense_seconds": 1.0 / rates.full,
            "dense_live": live,
            "take_seconds": None if applied is None else applied.seconds,
        }


def timings(
    clock: Clock, actions: Sequence[Action], layers: int, known: Callable[[int, str, str], bool]
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Records of every action at every number of rows, as they are measured; None before each, for whoever waits.

    Args:
        layers: entries of the model's cache, all of which are moved to disk once.
        known: whether (rows, document, action) need not be measured again.
    """
    rows = sorted(clock.settings.timed_rows)
    own = min(rows, key=lambda n: abs(n - OWN_WORK_ROWS))
    for n in rows:
        wanted = [*actions, *([Offload("layers", layers=(0, layers - 1))] if n == own else [])]
        due: list[tuple[Action, Callable[[Action], dict[str, Any]]]] = [
            (action, clock.step) for action in wanted if not known(n, TIMES, str(action))
        ]
        due += [(action, clock.chunk) for action in actions if not known(n, CHUNK_TIMES, str(action))]
        if n == rows[-1] and not known(n, DENSE_TIMES, str(Keep())):
            due.insert(0, (Keep(), lambda keep: clock.dense()))
        if not due:
            continue
        yield f"{n} rows", None
        clock.fill(n)
        for action, measure in due:
            what = f"{n} rows  {action}"
            yield what, None
            yield what, measure(action)


def median_and_quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile; one value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return middle, lower, upper
