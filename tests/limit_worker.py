"""Generate under a limit on this process's memory, with mlx-lm's own cache or with LuminaCache. Prints one JSON object.

    limit_worker.py stock|lumina BYTES

BYTES is how much more than now the process may ever have (``RLIMIT_DATA``: heap and private mappings).
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from lumina_cache.lab.blas import preload_openblas

preload_openblas()

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from lumina_cache import LuminaCache  # noqa: E402

PROMPT, CHUNK, ANSWER = 2600, 128, 48

#: Of the K/V cache with LuminaCache.
BUDGET = 16 << 20


def model_with_wide_rows() -> Any:
    """32 KiB of K and V for a token, and little else: what runs out is the cache."""
    args = llama.ModelArgs(
        model_type="llama", hidden_size=256, num_hidden_layers=8, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-5, vocab_size=512, max_position_embeddings=32768,
        rope_theta=1e4, tie_word_embeddings=False,
    )  # fmt: skip
    mx.random.seed(0)
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def generate(model: Any, cache: Any, prompt: int, answer: int) -> int:
    ids = mx.arange(prompt) % 512
    steps = generate_step(ids, model, prompt_cache=cache, max_tokens=answer, prefill_step_size=CHUNK)
    return sum(1 for _ in steps)


def data_nbytes() -> int:
    """What the kernel holds against ``RLIMIT_DATA``."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def main(which: str, more: int) -> None:
    model = model_with_wide_rows()
    generate(model, make_prompt_cache(model), 300, 2)  # threads, kernels, imports
    lumina = LuminaCache(model, budget=BUDGET, telemetry=False) if which == "lumina" else None
    cache = make_prompt_cache(model) if lumina is None else lumina
    mx.clear_cache()
    mx.set_cache_limit(0)
    limit = data_nbytes() + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    made = generate(model, cache, PROMPT, ANSWER)
    print(json.dumps({"tokens": made, "nbytes": sum(int(entry.nbytes) for entry in cache)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
