"""A plan instead of a budget: say beforehand what is done to the rows, and watch it happen."""

from __future__ import annotations

import tempfile

from lumina_cache.lab.blas import preload_openblas

preload_openblas()

import mlx.core as mx
from mlx_lm.generate import generate_step

from lumina_cache import LuminaCache
from lumina_cache.lab.tiny import build
from lumina_cache.report import describe

model = build("llama")  # a tiny random one; any mlx-lm model will do
prompt = mx.arange(300) % 97 + 1
plan = "evict:keydiff@rows=128,slack=32+quant:affine_fetch,bits=8,group=32"

with tempfile.TemporaryDirectory() as directory:
    # The first 40 positions, a system prompt say, are never evicted.
    with LuminaCache(model, plan=plan, protect=range(0, 40), disk=directory) as cache:
        for token, _ in generate_step(prompt, model, prompt_cache=cache, max_tokens=100):
            pass
        print(f"{cache[0].rows} of {cache[0].offset} rows held, {cache.nbytes:,} bytes")

        freed = cache.suspend()  # between two turns nothing of it needs to stay in memory
        print(f"{freed:,} bytes moved to a file, {cache.nbytes} held")
        model(mx.array([[5]]), cache=cache)  # any use brings it back

    for record in cache.log.records:
        if record["event"] not in ("step", "telemetry"):
            print(describe(record))
