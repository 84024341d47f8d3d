"""Peaks of memory as they are published: on a tiny model, and the published figures themselves."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.llama import Model, ModelArgs

from lumina_cache.lab.tiny import SPECS
from lumina_cache.pages import put_between

ROOT = Path(__file__).parents[1]
PATH = ROOT / "benchmarks" / "peaks.py"
SHAPE = (2, 64)


@pytest.fixture(scope="module")
def peaks() -> Any:
    spec = importlib.util.spec_from_file_location("peaks", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peaks"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["peaks"]


@pytest.fixture(scope="module")
def model() -> Any:
    """Four layers whose heads are as wide as the groups."""
    config = {**SPECS["llama"].config, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = Model(ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def test_what_is_done_to_rows_is_measured_and_bounded(peaks: Any, model: Any) -> None:
    rows = 1024
    found = {(one.what, one.how): one for one in peaks.operations(model, [rows], SHAPE, 1)}
    dense = 4 * 2 * rows * 2 * 64 * 4
    assert all(one.before >= dense // 8 for one in found.values())
    # Sealing a tail takes a few times the rows sealed for a while, in no estimate: 64 of them at most, of one layer.
    sealing = 6 * 2 * 64 * 2 * 64 * 4
    for one in found.values():
        if one.predicted is not None:
            assert one.peak <= one.predicted + (sealing if one.tokens > 1 else dense // 50), one
    stock = found["convert", "mlx-lm"]
    affine = found["convert", peaks.CONVERSIONS[0]]
    assert stock.before == affine.before == dense
    assert stock.after == affine.after < dense // 4
    assert affine.peak < dense // 8, "beside the rows of one layer, not of all"
    # Both sides of one layer are copied when it grows, and rows of the step are added in every layer.
    assert dense // 8 < found["grow", "mlx-lm"].peak <= dense
    # The same code; how many layers are copied at once depends on how far MLX runs ahead.
    assert 0.5 < found["grow", "keep"].peak / found["grow", "mlx-lm"].peak < 2.0
    assert found["grow", "reserve"].peak < dense // 100
    assert found["grow", "reserve"].after == found["grow", "reserve"].before
    assert found["grow", f"{peaks.CONVERSIONS[1]}"].tokens == 32
    assert found["grow", f"{peaks.CONVERSIONS[1]}+reserve"].tokens == 32


@pytest.mark.parametrize("way", range(6))
def test_the_last_chunk_behind_random_rows_takes_what_the_prompt_takes(
    peaks: Any, model: Any, way: int
) -> None:
    ids, chunk, context = list(range(100)) * 8, 128, 768
    last, whole = (
        peaks.read_prompt(model, ids, peaks.WAYS[way], context, chunk, SHAPE, whole=whole)
        for whole in (False, True)
    )
    assert (last.filled, whole.filled) == (640, 0)
    # A tail is as full as the rows before it made it.
    assert last.held == pytest.approx(whole.held, rel=0.1)
    assert last.peak == pytest.approx(whole.peak, rel=0.1)
    assert last.peak > last.held


def test_a_way_that_takes_less_is_told_from_one_that_takes_more(peaks: Any, model: Any) -> None:
    ids, context = list(range(100)) * 21, 2048
    dense, packed = (
        peaks.read_prompt(model, ids, peaks.WAYS[way], context, 128, SHAPE, whole=False) for way in (0, 2)
    )
    assert packed.held < dense.held // 3
    assert packed.peak < dense.peak


def test_the_published_tables_are_those_of_the_published_record(peaks: Any) -> None:
    record = json.loads((ROOT / "docs" / "data" / "peaks.json").read_text("utf-8"))
    page = (ROOT / "docs" / "memory.md").read_text("utf-8")
    assert put_between(page, peaks.PART, peaks.tables(record)) == page


def test_a_record_without_prompts_has_tables_of_the_rest(peaks: Any) -> None:
    sizes = {"rows": 8, "tokens": 0, "before": 9, "after": 4}
    operation = {"what": "evict", "how": "evict:keydiff@0.50", **sizes, "peak": 2_500_000, "least": 2_490_000}
    record = {
        "conditions": {
            "model": {"name": "m", "dtype": "mlx.core.float32"},
            "device": "cpu",
            "mlx": "1",
            "mlx_lm": "2",
        },
        "chunk": 512,
        "operations": [{**operation, "predicted": None}],
        "prompts": [],
    }
    text = peaks.tables(record)
    assert "| `evict:keydiff@0.50` | 2.50 | – |" in text
    assert "Reading" not in text
