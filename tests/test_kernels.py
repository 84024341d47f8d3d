"""What one attention call takes: measured on the CPU, by MLX's dispatch conditions elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from lumina_cache.errors import EstimateInputError
from lumina_cache.kernels import DEVICES, AttentionCall, device_named, is_fused_here

CPU, METAL, CUDA = DEVICES["cpu"], DEVICES["metal"], DEVICES["cuda"]
CALL = AttentionCall(
    batch=1,
    q_heads=8,
    kv_heads=2,
    queries=64,
    key_dim=64,
    value_dim=64,
    itemsize=4,
    mask="causal",
    sinks=False,
    window=None,
)
ROWS = 4096


def measured(call: AttentionCall, rows: int, bits: int | None = None) -> int:
    """Peak bytes beside inputs and result."""
    q = mx.random.normal((1, call.q_heads, call.queries, call.key_dim))
    k, v = (mx.random.normal((1, call.kv_heads, rows, d)) for d in (call.key_dim, call.value_dim))
    mask: Any = None if call.mask == "none" else "causal"
    if call.mask == "bool":
        mask = mx.ones((call.queries, rows), dtype=mx.bool_)
    if call.mask == "additive":
        mask = mx.zeros((1, call.q_heads, call.queries, rows))
    sinks = mx.zeros((call.q_heads,)) if call.sinks else None
    packed = [tuple(mx.quantize(a, group_size=64, bits=bits)) for a in (k, v)] if bits else [k, v]
    mx.eval(q, packed, mask if isinstance(mask, mx.array) else [], sinks if sinks is not None else [])
    del k, v
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    if bits:
        out = quantized_scaled_dot_product_attention(
            q, *packed, scale=1.0, mask=mask, group_size=64, bits=bits
        )
    else:
        out = mx.fast.scaled_dot_product_attention(q, *packed, scale=1.0, mask=mask, sinks=sinks)
    mx.eval(out)
    return mx.get_peak_memory() - before - out.nbytes


on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the figures are those of the CPU")


@on_cpu
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive"])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_dense_attention_takes_one_score_matrix_and_its_causal_mask(mask: Any, kv_heads: int) -> None:
    call = replace(CALL, mask=mask, kv_heads=kv_heads)
    assert CPU.dense_nbytes(call, ROWS) == pytest.approx(measured(call, ROWS), rel=0.03)


@on_cpu
def test_sinks_take_three_score_matrices() -> None:
    call = replace(CALL, sinks=True)
    assert CPU.dense_nbytes(call, ROWS) == pytest.approx(measured(call, ROWS), rel=0.01)


@on_cpu
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("queries", [1, 64])
def test_packed_rows_are_copied_for_every_query_head(bits: int, queries: int) -> None:
    call = replace(CALL, queries=queries)
    layer = ROWS * 2 * CALL.kv_heads * (64 * bits // 8 + 8)
    assert CPU.packed_nbytes(call, ROWS, layer) == pytest.approx(measured(call, ROWS, bits), rel=0.04)


@on_cpu
def test_packed_rows_with_a_head_of_their_own_are_not_copied() -> None:
    call = replace(CALL, kv_heads=8)
    assert CPU.repeats_nbytes(call, 1000) == 0
    assert CPU.packed_nbytes(call, ROWS, 1000) == pytest.approx(measured(call, ROWS, 8), rel=0.04)


@on_cpu
def test_the_cpu_has_no_fused_attention_and_mlx_says_so() -> None:
    assert not CPU.is_fused(CALL)
    assert not is_fused_here(CALL, ROWS)
    assert not is_fused_here(replace(CALL, queries=1, mask="none", sinks=True, itemsize=2), ROWS)


@pytest.mark.parametrize(
    ("queries", "dim", "value_dim", "fused"),
    [
        (2048, 64, 64, True),
        (2048, 80, 80, True),
        (2048, 128, 128, True),
        (2048, 256, 256, False),
        (2048, 192, 128, False),
        (1, 256, 256, True),
        (1, 80, 80, False),
        (8, 128, 128, True),
        (9, 128, 128, True),
        (9, 96, 96, False),
    ],
)
def test_metal_fuses_by_head_dim_and_number_of_queries(
    queries: int, dim: int, value_dim: int, fused: bool
) -> None:
    call = replace(CALL, queries=queries, key_dim=dim, value_dim=value_dim)
    assert METAL.is_fused(call) is fused
    assert (METAL.dense_nbytes(call, ROWS) == 0) is fused


def test_metal_does_not_fuse_many_query_heads_times_queries() -> None:
    assert METAL.is_fused(replace(CALL, queries=8, q_heads=8, kv_heads=2))
    assert not METAL.is_fused(replace(CALL, queries=8, q_heads=16, kv_heads=2))


def test_cuda_fuses_single_queries_only() -> None:
    assert CUDA.is_fused(replace(CALL, queries=1))
    assert not CUDA.is_fused(CALL)


def test_what_mlx_was_asked_overrides_the_table() -> None:
    call = replace(CALL, queries=2048, key_dim=256, value_dim=256)
    assert METAL.dense_nbytes(call, ROWS, fused=True) == 0
    assert METAL.dense_nbytes(replace(call, key_dim=64, value_dim=64), ROWS, fused=False) > 0


def test_only_measured_devices_say_they_were_measured() -> None:
    assert [d.name for d in DEVICES.values() if d.measured] == ["cpu"]


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(EstimateInputError, match="'tpu' is not known; known are cpu, metal, cuda"):
        device_named("tpu")
