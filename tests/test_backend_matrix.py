"""What MLX and mlx-lm can do with arrays is found by trying, and a trial that goes wrong is an outcome."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base

from lumina_cache.backend import matrix as tried
from lumina_cache.backend.isolate import Answer
from lumina_cache.backend.matrix import BITS, GROUP_SIZES, HEAD_DIMS, Matrix, probe_matrix
from lumina_cache.backend.matrix_checks import CHECKS, FORMATS, KV_HEADS, answer

LAYOUT = {"bits": 4, "group_size": 32, "key_dim": 64, "value_dim": 64}


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return probe_matrix()


def layouts() -> list[dict[str, int]]:
    return [
        {"bits": b, "group_size": g, "key_dim": k, "value_dim": v}
        for k, v in HEAD_DIMS
        for g in GROUP_SIZES
        for b in BITS
    ]


def test_every_check_is_tried_on_every_layout(matrix: Matrix) -> None:
    asked = sum(len(q["checks"]) for q in tried.questions())
    assert len(matrix.trials) == asked
    assert {t.check for t in matrix.trials} == set(CHECKS)
    for layout in layouts():
        assert len(matrix.of("quantize", **layout)) == 1
    assert {(48, 48), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256)} <= set(HEAD_DIMS)
    assert any(k != v for k, v in HEAD_DIMS)


def test_nothing_ran_and_gave_a_wrong_result(matrix: Matrix) -> None:
    assert [str(t) for t in matrix.trials if t.outcome in ("wrong", "died")] == []


def test_codes_exist_where_the_group_divides_both_dims_and_for_all_bits_but_seven(matrix: Matrix) -> None:
    for layout in layouts():
        (found,) = matrix.of("quantize", **layout)
        divides = layout["key_dim"] % layout["group_size"] == layout["value_dim"] % layout["group_size"] == 0
        assert found.works == (divides and layout["bits"] != 7), str(found)
        assert found.works == (found.reason is None)


def test_where_there_are_codes_they_decode_within_the_bound_of_their_width(matrix: Matrix) -> None:
    for trial in matrix.of("dequantize"):
        assert trial.outcome in ("works", "skipped")
        if trial.works:
            assert trial.error is not None
            assert 0 < trial.error <= 1.5


def test_decoding_by_more_bits_is_closer(matrix: Matrix) -> None:
    rows = mx.random.normal((64, 64), key=mx.random.key(0))
    off = []
    for bits in (2, 3, 4, 5, 6, 8):
        codes = mx.quantize(rows, group_size=32, bits=bits)
        off.append(mx.abs(rows - mx.dequantize(*codes, group_size=32, bits=bits)).mean().item())
    assert off == sorted(off, reverse=True)


def test_mlx_lms_packed_cache_fails_cold_where_its_words_do_not_hold_whole_codes(matrix: Matrix) -> None:
    """It allocates dim // (32 // bits) words for a row that takes dim·bits/32 of them."""
    for trial in matrix.of("stock_cold_append"):
        if trial.outcome == "skipped":
            continue
        bits, dims = trial.params["bits"], (trial.params["key_dim"], trial.params["value_dim"])
        assert trial.works == all(d // (32 // bits) == d * bits // 32 for d in dims), str(trial)
    assert all(t.outcome in ("works", "skipped") for t in matrix.of("stock_convert"))
    crashes = {
        (t.params["bits"], t.params["key_dim"])
        for t in matrix.of("stock_cold_append")
        if t.outcome == "raises"
    }
    assert {(5, 96), (6, 96), (5, 128), (6, 128), (3, 256), (5, 256), (6, 256)} <= crashes


def test_packed_attention_with_shared_heads_needs_keys_and_values_of_one_width(matrix: Matrix) -> None:
    for trial in matrix.of("packed_attention_gqa"):
        if trial.outcome != "skipped":
            assert trial.works == (trial.params["key_dim"] == trial.params["value_dim"]), str(trial)
    assert all(t.outcome in ("works", "skipped") for t in matrix.of("packed_attention"))


@pytest.mark.parametrize("check", ["dense_fetch", "row_gather"])
def test_rows_decoded_on_fetch_and_gathered_codes_work_for_every_layout_with_codes(
    matrix: Matrix, check: str
) -> None:
    assert {t.outcome for t in matrix.of(check)} == {"works", "skipped"}
    for trial in matrix.of(check):
        (codes,) = matrix.of("quantize", **trial.params)
        assert trial.works == codes.works


def test_formats_work_where_their_group_divides_both_dims(matrix: Matrix) -> None:
    for name, (group_size, _, _) in FORMATS.items():
        for check in ("format", "format_attention"):
            for trial in matrix.of(check, format=name):
                divides = trial.params["key_dim"] % group_size == trial.params["value_dim"] % group_size == 0
                assert trial.works == divides, str(trial)


def test_masks_of_all_shapes_work_but_one_per_head_over_packed_rows_with_shared_heads(matrix: Matrix) -> None:
    failing = {tuple(t.params.items()) for t in matrix.of("mask") if not t.works}
    assert all(dict(p)["storage"] == "packed" and dict(p)["mask"] == "per_head" for p in failing)
    assert all(dict(p)["query_heads"] > KV_HEADS for p in failing)
    assert len(failing) == 2


def test_uneven_rows_pass_under_no_mask_and_a_string_but_not_under_an_array(matrix: Matrix) -> None:
    for trial in matrix.of("uneven_rows"):
        assert trial.works == (trial.params["mask"] != "array"), str(trial)


def test_only_evaluated_arrays_may_change_threads(matrix: Matrix) -> None:
    assert [t.works for t in matrix.of("other_thread", array="evaluated")] == [True]
    (unevaluated,) = matrix.of("other_thread", array="unevaluated")
    assert unevaluated.outcome == "raises"
    assert "Stream" in str(unevaluated.reason)


def test_a_matrix_survives_its_record(matrix: Matrix) -> None:
    assert Matrix.from_record(json.loads(json.dumps(matrix.to_record()))).counts() == matrix.counts()
    again = Matrix.from_record(matrix.to_record())
    assert [str(t) for t in again.trials] == [str(t) for t in matrix.trials]
    with pytest.raises((KeyError, TypeError)):
        Matrix.from_record({"trials": [{"check": "quantize"}]})


def run(checks: Sequence[str], **params: Any) -> list[dict[str, Any]]:
    return answer({"params": params, "checks": list(checks), "device": mx.default_device().type.name})


def test_a_decoder_that_is_off_by_two_steps_is_wrong_and_says_by_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = mx.dequantize

    def off(codes: mx.array, scales: mx.array, *rest: Any, **options: Any) -> mx.array:
        return real(codes, scales, *rest, **options) + 2 * mx.abs(scales).max()

    monkeypatch.setattr(mx, "dequantize", off)
    (found,) = run(["dequantize"], **LAYOUT)
    assert found["outcome"] == "wrong"
    assert found["error"] > found["allowed"] == 1.5
    assert "off by" in found["reason"]


def test_an_attention_that_gives_no_numbers_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = base.quantized_scaled_dot_product_attention
    monkeypatch.setattr(
        base, "quantized_scaled_dot_product_attention", lambda *a, **k: real(*a, **k) * mx.array(float("nan"))
    )
    (found,) = run(["packed_attention"], **LAYOUT)
    assert found["outcome"] == "wrong"


def test_a_mask_that_is_not_applied_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = base.scaled_dot_product_attention
    monkeypatch.setattr(base, "scaled_dot_product_attention", lambda *a, mask, **k: real(*a, mask=None, **k))
    for mask in ("causal", "array", "per_head"):
        (found,) = run(["mask"], storage="dense", mask=mask, tokens=3, batch=1, query_heads=4)
        assert found["outcome"] == "wrong", mask


def test_a_gather_that_takes_other_rows_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = mx.take, []

    def shifted(a: mx.array, index: mx.array, axis: int) -> mx.array:
        calls.append(1)
        return real(a, (index + (len(calls) == 1)) % a.shape[axis], axis)

    monkeypatch.setattr(mx, "take", shifted)
    (found,) = run(["row_gather"], **LAYOUT)
    assert found["outcome"] == "wrong"


def test_an_exception_is_an_outcome_and_what_follows_from_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel\nof that name")

    monkeypatch.setattr(mx, "quantize", refuse)
    first, second = run(["quantize", "dequantize"], **LAYOUT)
    assert (first["outcome"], first["reason"]) == ("raises", "RuntimeError: no kernel")
    assert (second["outcome"], second["reason"]) == ("skipped", "quantize raises")


def test_of_the_checks_of_a_layout_the_one_that_ends_the_process_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(_target: str, questions: Sequence[Any], **_: Any) -> list[Answer]:
        return [
            Answer(None, "the process ended: SIGABRT", 0.1)
            if "row_gather" in q["checks"]
            else Answer(
                [{"check": q["checks"][0], "outcome": "works", "reason": None, "seconds": 0.0}], None, 0.1
            )
            for q in questions
        ]

    monkeypatch.setattr(tried, "ask", asked)
    question = {"params": LAYOUT, "checks": ["quantize", "row_gather"], "device": "cpu"}
    works, died = tried._trials_of(question, Answer(None, "the process ended: SIGABRT", 0.1), 1.0)
    assert (works.check, works.outcome) == ("quantize", "works")
    assert (died.check, died.outcome, died.reason) == ("row_gather", "died", "the process ended: SIGABRT")


def test_probing_does_not_touch_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    active, peak, limit = mx.get_active_memory(), mx.get_peak_memory(), mx.get_memory_limit()
    state = [mx.array(s) for s in mx.random.state]
    seen: list[tuple[int, int]] = []
    found = probe_matrix(only=["other_thread"], on_progress=lambda done, of: seen.append((done, of)))
    assert len(found.trials) == 2
    assert seen == [(1, 2), (2, 2)]
    assert (mx.get_active_memory(), mx.get_peak_memory(), mx.get_memory_limit()) == (active, peak, limit)
    assert all(mx.array_equal(a, b).item() for a, b in zip(state, mx.random.state, strict=True))
    assert list(tmp_path.iterdir()) == []


def test_a_trial_prints_as_one_line(matrix: Matrix) -> None:
    trial = replace(matrix.trials[0], outcome="raises", reason="ValueError: so")
    assert str(trial).startswith("quantize(bits=1,group_size=32,")
    assert str(trial).endswith("raises: ValueError: so")
