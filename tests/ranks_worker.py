"""One rank of the runs in test_agree.py: a tiny llama, a LuminaCache, made-up telemetry, and an agreement.

Run by ``launch`` in two processes with ring's environment. Prints one JSON object per line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from typing import Any

from lumina_cache.lab.blas import preload_openblas

preload_openblas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from lumina_cache import LuminaCache  # noqa: E402
from lumina_cache.actions import Action, Evict, Keep, Quantize  # noqa: E402
from lumina_cache.agree import Agreement, Stance, agreement  # noqa: E402
from lumina_cache.errors import LuminaError, LuminaWarning  # noqa: E402
from lumina_cache.estimate import after_action, after_append, nbytes_allocated  # noqa: E402
from lumina_cache.lab.tiny import build  # noqa: E402
from lumina_cache.policy import Decision  # noqa: E402
from lumina_cache.telemetry import PressureLevel, Snapshot  # noqa: E402
from tests.harness import greedy, greedy_steps, held_of, tokens  # noqa: E402

PROMPT, CHUNK, DECODE = 600, 200, 90

#: For caches that agree by themselves: rows of all tokens fit at 8 bits; some hundred dense ones fit.
BUDGET = {"whole": 150_000, "whole_dies": 150_000, "whole_differs": 300_000}


def say(**record: Any) -> None:
    print(json.dumps(record), flush=True)


class Run:
    """What is done before every step; scenarios replace parts of it."""

    def __init__(self, scenario: str, group: Any) -> None:
        self.scenario, self.group, self.rank = scenario, group, group.rank()
        made = agreement(group, every=16, timeout=4.0 if scenario == "hangs" else 60.0)
        assert made is not None
        self.ranks: Agreement = made
        model = build("llama")
        if scenario in ("sharded", "generate"):
            model.shard(group)
        self.model = model
        self.cache = LuminaCache(model, telemetry=False, policy="off")
        self.entered = 0.0  # the last agreement, in seconds
        self.full = 0  # bytes of the whole prompt, dense

    # -- made-up telemetry: rank 0 never has anything to report

    def stance(self, step: int, predicted: int) -> Stance:
        held = self.cache.observe().nbytes_allocated
        if self.rank == 0 or step < 21:
            return Stance(held=held, predicted=predicted)
        # Rank 1 gets short of memory while decoding, in between two points, and shorter still towards the end.
        share = 0.5 if step < 60 else 0.45
        return Stance(
            limit=int(share * self.full), held=held, predicted=predicted, available=10**9, trouble=True
        )

    def decide(self, stance: Stance) -> Action:
        if self.scenario == "differs" and self.rank == 1:
            return Quantize("affine", 4, 4, 32)
        if self.scenario == "fails" and self.rank == 1:
            raise KeyError("no such profile")
        assert stance.limit is not None
        held, limit = held_of(self.cache), stance.limit

        def fits(rows: int) -> bool:
            after = after_action(held, Evict("sinks_window", rows=rows))
            return nbytes_allocated(after_append(after, 2)) <= limit

        return Evict("sinks_window", rows=max(filter(fits, range(8, PROMPT + DECODE))))

    # -- the run

    def before_step(self, step: int, count: int) -> None:
        predicted = nbytes_allocated(after_append(held_of(self.cache), count))
        if count == 1 and not self.full:
            self.full = self.cache.observe().nbytes_allocated
        if not self.ranks.due(step, count, self.ranks.over(predicted)):
            return
        start = time.perf_counter()
        self.entered = start
        settled = self.ranks.settle(self.stance(step, predicted), self.decide)
        seconds = time.perf_counter() - start
        failing = self.scenario == "action_fails" and self.rank == 1
        if settled.action != Keep() and not failing:
            self.cache.apply(settled.action)
        say(
            step=step,
            tokens=count,
            action=str(settled.action),
            agreed=settled.agreed,
            limit=settled.stance.limit,
            nbytes=self.cache.observe().nbytes_allocated,
            even=self.ranks.even,
            limited_by=self.ranks.limited_by,
            why=settled.why,
            seconds=seconds,
        )

    def generate(self) -> None:
        """Tensor parallel, by mlx-lm: the next step is built while the last one is still under way in its own stream."""
        control = self.cache._control
        begins = control.step_begins

        def step_begins(steps: Any, count: int) -> None:
            self.before_step(
                steps.step, count
            )  # what it applies waits for the boundary, which is the next line
            begins(steps, count)

        control.step_begins = step_begins
        prompt = tokens(PROMPT)[0].tolist()
        out = []
        for token, _ in greedy(self.model, prompt, self.cache, DECODE, prefill_step_size=CHUNK):
            out.append(token)
        say(done=True, nbytes=self.cache.observe().nbytes_allocated, tokens=out)

    def bench(self) -> None:
        """One agreement, and one with a decision, both ranks arriving together."""
        mine = Stance(limit=10, held=20, predicted=20, available=1, trouble=True, price_of_time=1.0)
        took: dict[str, list[float]] = {"agree": [], "settle": []}
        for _ in range(500):
            start = time.perf_counter()
            self.ranks.agree(mine)
            middle = time.perf_counter()
            self.ranks.settle(mine, lambda _: Keep())
            took["agree"].append(middle - start)
            took["settle"].append(time.perf_counter() - middle)
        for name, seconds in took.items():
            say(
                what=name,
                milliseconds=[round(1e3 * float(q), 3) for q in np.quantile(seconds, [0.1, 0.5, 0.9])],
            )

    def go(self) -> None:
        ids = tokens(PROMPT + DECODE)
        at, pending = 0, None
        for step, count in enumerate([CHUNK] * (PROMPT // CHUNK) + [1] * DECODE, start=1):
            if self.rank == 1 and step == 40:
                if self.scenario == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.scenario == "hangs":
                    time.sleep(600)
            self.before_step(step, count)
            if pending is not None:
                assert abs(pending[0, 0].item() - 1.5) < 1e-4, (
                    "numbers of the model's own collectives are wrong"
                )
            logits = self.model(ids[:, at : at + count], cache=self.cache)
            mx.eval(logits)
            at += count
            if (
                self.scenario == "pending"
            ):  # as a sharded model whose step is still under way at the next boundary
                pending = mx.ones((200, 200)) * (self.rank + 1)
                for _ in range(6):
                    pending = mx.distributed.all_sum(pending, group=self.group) * 0.5 @ mx.eye(200)
                mx.async_eval(pending)
        say(done=True, nbytes=self.cache.observe().nbytes_allocated, last=logits[0, -1, :8].tolist())


class Machine:
    """Made-up telemetry: rank 0 knows nothing of its memory; rank 1's gets short while decoding."""

    def __init__(self, rank: int) -> None:
        self.rank, self.looked, self.short = rank, 0, False

    @property
    def latest(self) -> Snapshot:
        self.looked += 1
        known = PressureLevel.WARN if self.short else PressureLevel.NORMAL
        return Snapshot(
            monotonic_seconds=float(self.looked),
            unix_seconds=0.0,
            platform="test",
            pressure_level=PressureLevel.UNKNOWN if self.rank == 0 else known,
            unknown={"memory_available_bytes": "not measured"},
        )


class Whole:
    """A sharded llama whose cache agrees with the other rank's by itself, run by mlx-lm's ``generate_step``."""

    def __init__(self, scenario: str, group: Any) -> None:
        self.scenario, self.rank, self.entered = scenario, group.rank(), 0.0
        self.model = build("llama")
        self.model.shard(group)
        policy = Stubborn(self.rank) if scenario == "whole_differs" else None
        self.machine = Machine(self.rank)
        self.cache = LuminaCache(
            self.model, budget=BUDGET[scenario], group=group, telemetry=self.machine, policy=policy
        )
        ranks = self.cache._control.ranks
        assert ranks is not None
        self.ranks: Agreement = ranks

    def go(self) -> None:
        prompt = tokens(PROMPT)[0].tolist()
        out: list[int] = []
        for token, _ in greedy_steps(self.model, prompt, self.cache, DECODE, prefill_step_size=CHUNK):
            out.append(token)
            if self.scenario == "whole_dies" and self.rank == 1 and len(out) == 30:
                os.kill(os.getpid(), signal.SIGKILL)
            self.machine.short = self.rank == 1 and len(out) >= 20
            if self.rank == 0 and len(out) % 7 == 0:
                self.cache.observe()  # what only one rank does must not matter
                _ = self.cache.nbytes
            self.entered = time.perf_counter()
        for record in self.cache.log.records:
            if record["event"] == "action.applied":
                say(
                    applied=record["action"],
                    rows=[record["rows_before"], record["rows_after"]],
                    after=record["after"]["nbytes_allocated"],
                )
            if record["event"] == "warning":
                say(warned=record["code"])
        say(done=True, nbytes=self.cache.observe().nbytes_allocated, tokens=out, points=self.ranks._number)


class Stubborn:
    """A policy that differs between ranks, for as long as it may."""

    name = "stubborn"

    def __init__(self, rank: int) -> None:
        self.bits = (8, 4)[rank]

    def decide(self, state: Any, candidates: Any) -> Decision:
        own = [c for c in candidates if c.feasible and c.nbytes_next <= state.limit.nbytes]
        coded = [c for c in own if isinstance(c.action, Quantize) and c.action.key_bits == self.bits]
        fewest = min(candidates, key=lambda c: (not c.feasible, c.nbytes_next))
        return Decision((coded or own or [fewest])[0].action, "stubborn")


def main(scenario: str) -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    run: Any = Whole(scenario, group) if scenario.startswith("whole") else Run(scenario, group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LuminaWarning)
        try:
            # A sharded model's own collective may be the first to find out, in mlx's words.
            (run.generate if scenario == "generate" else run.bench if scenario == "bench" else run.go)()
        except (LuminaError, RuntimeError) as error:
            say(error=type(error).__name__, text=str(error), step_seconds=time.perf_counter() - run.entered)
            if not isinstance(error, LuminaError):
                return
            start = time.perf_counter()
            try:
                run.ranks.agree(Stance())
            except LuminaError as second:
                say(second=type(second).__name__, seconds=time.perf_counter() - start)
    say(warnings=[str(one.message) for one in caught if issubclass(one.category, LuminaWarning)])


if __name__ == "__main__":
    main(sys.argv[1])
