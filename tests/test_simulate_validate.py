"""The comparison of simulated with real figures, and what it says of itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from test_evaluate import Words

from lumina_cache.fingerprint import fingerprint
from lumina_cache.lab.evaluate import Plan
from lumina_cache.lab.models import LoadedModel
from lumina_cache.lab.simulate import validate as module
from lumina_cache.lab.simulate.validate import (
    Pair,
    as_markdown,
    main,
    summary,
    validate,
)
from lumina_cache.pages import marks

PAIR = Pair(
    "d",
    "prose",
    "evict:random@0.50",
    0.2,
    0.2001,
    0.0002,
    (10, 20),
    (10, 20),
    (0.5, 0.6),
    (0.5, 0.6),
    2.0,
    1.0,
)

ACTIONS = (
    "quant:affine,bits=4,group=32",
    "quant:kivi,bits=4,group=32",
    "evict:snapkv@0.50",
    "evict:adakv@0.50",
)


@pytest.fixture(scope="module")
def loaded(tiny: Any) -> LoadedModel:
    model = tiny("llama")
    return LoadedModel(model, Words(), "tiny", fingerprint(model), mx.float32, "a test")


def test_a_pair_agrees_within_either_limit_and_with_equal_bytes_only() -> None:
    assert PAIR.agrees
    assert replace(PAIR, simulated_kl=0.203).agrees  # 1.5 %
    assert not replace(PAIR, simulated_kl=0.205).agrees
    assert replace(PAIR, real_kl=0.0001, simulated_kl=0.0009).agrees
    assert not replace(PAIR, simulated_bytes=(10, 21)).agrees
    assert not replace(PAIR, simulated_share16=(0.5, 0.6001)).agrees


def test_validation_pairs_actions_on_documents_of_every_domain(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = Plan(
        contexts=((160, 3),), tests=("T1",), scored=48, block=16, chunk=64, depths=(0.2,), cue=4, copied=8, short_context=8
    )  # fmt: skip
    pairs, refused = validate(loaded, plan, ACTIONS)
    assert {p.domain for p in pairs} == {"prose", "code", "dialogue"}
    assert len(pairs) == 9
    assert all(p.agrees for p in pairs)
    assert list(refused) == ["evict:adakv@0.50"]
    assert {p.action for p in pairs if p.again_kl is not None} == {"quant:affine,bits=4,group=32"}
    assert all(p.agrees_with_itself is not False for p in pairs)
    record = json.loads(json.dumps(module._record(loaded, plan, pairs, refused)))
    table = as_markdown(record)
    assert "9 agree, bytes are equal in 9" in table
    assert "of 3 pairs of real runs 3 agree with each other" in table
    assert "| `evict:adakv@0.50` | refused: " in table
    begin, end = marks(module.PART)
    page, kept = tmp_path / "page.md", tmp_path / "record.json"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter")
    kept.write_text(json.dumps(record))
    assert main(["--from", str(kept), "--page", str(page)]) == 0
    assert page.read_text() == f"before\n{begin}\n{table}\n{end}\nafter"
    record["summary"]["agreeing"] = 8
    kept.write_text(json.dumps(record))
    assert main(["--from", str(kept)]) == 1


def test_two_real_runs_are_held_to_the_same_limits() -> None:
    assert PAIR.agrees_with_itself is None
    assert replace(PAIR, again_kl=0.203).agrees_with_itself
    assert not replace(PAIR, again_kl=0.21).agrees_with_itself
    found = summary([PAIR, replace(PAIR, again_kl=0.21)])
    assert (found["real_twice"], found["real_twice_agreeing"]) == (1, 0)
    assert found["real_twice_worst_nats"] == pytest.approx(0.01)


def test_the_summary_tells_the_largest_error() -> None:
    found = summary([PAIR, replace(PAIR, document="e", simulated_kl=0.19, worst_span=0.5)])
    assert (found["pairs"], found["agreeing"], found["documents"]) == (2, 1, 2)
    assert found["worst_nats"] == pytest.approx(0.01)
    assert found["worst_relative"] == pytest.approx(0.05)
    assert found["worst_span_nats"] == 0.5
