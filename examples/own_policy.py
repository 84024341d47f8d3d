"""A policy of your own: ten lines, asked whenever the next step would pass the limit."""

from __future__ import annotations

from collections.abc import Sequence

from lumina_cache.lab.blas import preload_openblas

preload_openblas()

import mlx.core as mx

from lumina_cache import Candidate, Decision, LuminaCache, State
from lumina_cache.lab.tiny import build


class NeverPack:
    """Drop old rows rather than pack any."""

    name = "never_pack"

    def decide(self, state: State, candidates: Sequence[Candidate]) -> Decision:
        limit = state.limit.nbytes
        fitting = [c for c in candidates if c.feasible and c.nbytes_next <= limit and "quant" not in str(c.action)]
        best = max(fitting, key=lambda c: c.nbytes_next, default=candidates[0])
        return Decision(best.action, "the most rows that fit, dense")


model = build("llama")
cache = LuminaCache(model, budget="600kB", policy=NeverPack())
for _ in range(8):
    mx.eval(model(mx.arange(1, 100)[None], cache=cache), [c.state for c in cache])
view = cache.observe()
print(f"{view.layers[0].rows} of {view.layers[0].offset} rows held, {view.nbytes_allocated:,} bytes")
print([r["action"] for r in cache.log.records if r["event"] == "action.applied"])
