"""The whole run on a real model: LuminaCache without a budget against the stock cache, taking turns."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache import LuminaCache
from lumina_cache.errors import ModelUnavailableError
from lumina_cache.lab.compare import interleaved_rates
from lumina_cache.lab.models import load_smollm2

CONTEXT = 256


@pytest.mark.real_model
@pytest.mark.parametrize(("chunk", "rounds"), [(1, 80), (64, 12)], ids=["decode", "prefill"])
def test_watching_costs_at_most_one_percent_of_a_whole_run(chunk, rounds):
    try:
        model, _ = load_smollm2()
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    full, ours = make_prompt_cache(model), LuminaCache(model)
    for cache in (full, ours):
        mx.eval(model(mx.arange(CONTEXT)[None], cache=cache))
    rates = interleaved_rates(model, full, ours, [i % 1000 for i in range(chunk * rounds)], chunk=chunk)
    print(
        f"\nchunks of {chunk}: stock {rates.full:.2f}, LuminaCache {rates.other:.2f} tokens per second; time ratio "
        f"{rates.ratio:.4f} [{rates.ratio_low:.3f}, {rates.ratio_high:.3f}] over {rates.rounds} paired rounds"
    )
    assert rates.ratio <= 1.01
