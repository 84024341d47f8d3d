"""What watching attention costs, as it is published: the ratio, its interval, and a run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import attention, observing
from lumina_cache.pages import put_between

DOCS = Path(__file__).parents[1] / "docs"


def test_the_interval_covers_a_ratio_that_is_there_and_leaves_out_one_that_is_not() -> None:
    random = np.random.default_rng(3)
    load = random.uniform(1.0, 1.6, 41)  # what slows both sides of a round alike
    stock, watched = load * random.normal(1.0, 0.02, 41), load * random.normal(1.1, 0.02, 41)
    found = observing.Ratio.of(watched.tolist(), stock.tolist())
    assert found.low < 1.1 < found.high
    assert found.low > 1.0
    assert found.high - found.low < 0.15
    same = observing.Ratio.of(stock.tolist(), stock.tolist())
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)


def test_every_side_reads_the_prompt_in_every_round_and_leaves_no_hook_behind(tiny: Any) -> None:
    import sys

    model = tiny("llama")
    module = sys.modules[type(model).__module__]
    before = module.scaled_dot_product_attention
    seconds = observing.measure(model, list(range(100)), rounds=2, chunk=40)
    assert set(seconds) == {observing.STOCK, *observing.SIDES}
    assert {"snapkv", "h2o", "expected_attention"} < set(seconds)
    assert all(len(took) == 2 and min(took) > 0 for took in seconds.values())
    assert module.scaled_dot_product_attention is before


def test_the_side_of_a_scorer_watches_with_it(tiny: Any) -> None:
    model = tiny("llama")
    cache, close = observing.SIDES["tova"](model)
    assert set(cache[0].seen.scorers) == {"tova"}
    close()
    cache, close = observing.SIDES["rung hook, nothing watched"](model)
    assert cache[0].seen is None
    close()


@pytest.mark.parametrize(
    ("over", "verdict"), [((1.02, 1.03), "yes"), ((1.3, 1.31), "no"), ((1.0, 1.4), "cannot be told")]
)
def test_the_table_tells_what_is_within_the_limit(over: tuple[float, float], verdict: str) -> None:
    record = {
        "conditions": {"model": {"name": "m", "dtype": "mlx.core.float32"}, "device": "cpu", "mlx": "1"},
        "layers": 4,
        "prompt": 1024,
        "chunk": 256,
        "seconds": {observing.STOCK: [1.0] * 8, "snapkv": list(over) * 4},
    }
    assert observing.table(record).splitlines()[-1].endswith(f"| {verdict} |")


def test_the_published_table_is_that_of_the_published_record() -> None:
    record = json.loads((DOCS / "data" / "observing.json").read_text("utf-8"))
    page = (DOCS / "hook.md").read_text("utf-8")
    assert put_between(page, observing.PART, observing.table(record)) == page


def test_the_published_table_of_attention_is_that_of_the_published_record() -> None:
    record = json.loads((DOCS / "data" / "attention.json").read_text("utf-8"))
    page = (DOCS / "hook.md").read_text("utf-8")
    text = attention.table(record)
    assert put_between(page, attention.PART, text) == page
    assert "–" not in text, "every path and length was measured"
