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
from lumina_cache.estimate import after_append, most_rows_within, nbytes_allocated  # noqa: E402
from lumina_cache.lab.tiny import build  # noqa: E402
from tests.harness import greedy, held_of, tokens  # noqa: E402

PROMPT, CHUNK, DECODE = 600, 200, 90


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
        if self.rank == 0 or step < 20:
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
        rows = most_rows_within(held_of(self.cache), stance.limit, then=lambda one: after_append(one, 2))
        return Evict("sinks_window", rows=rows)

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


def main(scenario: str) -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    run = Run(scenario, group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LuminaWarning)
        try:
            {"generate": run.generate, "bench": run.bench}.get(scenario, run.go)()
        except LuminaError as error:
            say(error=type(error).__name__, text=str(error), step_seconds=time.perf_counter() - run.entered)
            start = time.perf_counter()
            try:
                run.ranks.agree(Stance())
            except LuminaError as second:
                say(second=type(second).__name__, seconds=time.perf_counter() - start)
    say(warnings=[str(one.message) for one in caught if issubclass(one.category, LuminaWarning)])


if __name__ == "__main__":
    main(sys.argv[1])
