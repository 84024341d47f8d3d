"""What one attention call takes besides its inputs and its result, by device.

``mx.fast.scaled_dot_product_attention`` has fused kernels for some head dims on some devices; everywhere else it writes
the whole score matrix (B, Hq, n, T), silently. Packed rows never meet a fused kernel in mlx-lm. The CPU figures were
measured (``docs/estimator.md``); those for Metal and CUDA follow the dispatch conditions in MLX's source
(``mlx/backend/{metal,cuda}/scaled_dot_product_attention.cpp``, 0.32) and are not measured.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import mlx.core as mx

from .errors import EstimateInputError

__all__ = ["DEVICES", "AttentionCall", "Device", "MaskKind", "device_named", "is_fused_here"]

MaskKind = Literal["none", "causal", "bool", "additive"]


@dataclass(frozen=True)
class AttentionCall:
    """One call of scaled dot-product attention, without its number of rows: that is what an estimate varies."""

    batch: int
    q_heads: int
    kv_heads: int
    queries: int  #: n, tokens in the step
    key_dim: int
    value_dim: int
    itemsize: int  #: bytes per element of the queries
    mask: MaskKind
    sinks: bool
    window: int | None  #: rows attended to when they are bounded by the layer; None: all that are held

    def scores_nbytes(self, rows: int) -> int:
        """Bytes of one score matrix (B, Hq, n, rows)."""
        return self.batch * self.q_heads * self.queries * rows * self.itemsize


@dataclass(frozen=True)
class Device:
    """What MLX does on one kind of device. ``measured`` says whether the figures were."""

    name: str
    measured: bool
    vector_dims: frozenset[tuple[int, int]]  #: (key dim, value dim) with a fused kernel for few queries
    vector_queries: int  #: most queries of that kernel
    vector_products: int  #: most queries × query heads per K/V head of that kernel
    full_dims: frozenset[tuple[int, int]]  #: (key dim, value dim) with a fused kernel for many queries
    packed_scores: float  #: score matrices alive at once when rows are packed
    packed_repeats: bool  #: whether packed rows are copied for every query head
    source: str

    def is_fused(self, call: AttentionCall) -> bool:
        """Whether dense attention of this shape has a kernel that writes no score matrix."""
        dims = (call.key_dim, call.value_dim)
        if call.queries <= self.vector_queries:
            products = call.queries * (call.q_heads // call.kv_heads)
            return dims in self.vector_dims and products <= self.vector_products
        return dims in self.full_dims

    def dense_nbytes(self, call: AttentionCall, rows: int, fused: bool | None = None) -> int:
        """Bytes of scores and masks of a call on dense rows; ``fused`` overrides the table where MLX was asked."""
        if self.is_fused(call) if fused is None else fused:
            return 0
        # Sinks are a column joined to the scores, and cut off again after the softmax: two more copies.
        matrices = 3 if call.sinks else 1
        return matrices * call.scores_nbytes(rows) + _causal_mask_nbytes(call, rows)

    def packed_nbytes(self, call: AttentionCall, rows: int, layer_nbytes: int) -> int:
        """Bytes of a call on packed rows; ``layer_nbytes`` is what the layer's packed rows take."""
        scores = round(self.packed_scores * call.scores_nbytes(rows)) + _causal_mask_nbytes(call, rows)
        return scores + self.repeats_nbytes(call, layer_nbytes)

    def repeats_nbytes(self, call: AttentionCall, layer_nbytes: int) -> int:
        """Bytes of packed rows copied for every query head of their group."""
        repeats = call.q_heads // call.kv_heads
        return repeats * layer_nbytes if self.packed_repeats and repeats > 1 else 0


def _causal_mask_nbytes(call: AttentionCall, rows: int) -> int:
    return call.queries * rows if call.mask == "causal" and call.queries > 1 else 0


def _square(*dims: int) -> frozenset[tuple[int, int]]:
    return frozenset((d, d) for d in dims)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "cpu": Device(
            name="cpu",
            measured=True,
            vector_dims=frozenset(),
            vector_queries=0,
            vector_products=0,
            full_dims=frozenset(),
            packed_scores=1.0,
            packed_repeats=True,
            source="measured with mx.get_peak_memory, MLX 0.32.4, Linux",
        ),
        "metal": Device(
            name="metal",
            measured=False,
            vector_dims=_square(64, 96, 128, 256),
            vector_queries=8,
            vector_products=32,
            full_dims=_square(64, 80, 128),
            # 1.7 to 2.0 score matrices fit the peaks of unslothai/unsloth-zoo#1151.
            packed_scores=2.0,
            packed_repeats=False,
            source="dispatch conditions of MLX's Metal backend; packed scores from unslothai/unsloth-zoo#1151",
        ),
        "cuda": Device(
            name="cuda",
            measured=False,
            vector_dims=_square(64, 96, 128, 256),
            vector_queries=1,
            vector_products=1 << 30,
            full_dims=frozenset(),
            packed_scores=2.0,
            packed_repeats=False,
            source="dispatch conditions of MLX's CUDA backend without cuDNN",
        ),
    }
)


def device_named(name: str | None) -> Device:
    """The device of that name; None: the one that MLX uses here.

    Raises:
        EstimateInputError: there is no such device.
    """
    if name is None:
        name = "cpu" if mx.default_device() == mx.cpu else "metal" if mx.metal.is_available() else "cuda"
    if name not in DEVICES:
        raise EstimateInputError(f"device {name!r} is not known; known are {', '.join(DEVICES)}")
    return DEVICES[name]


def is_fused_here(call: AttentionCall, rows: int) -> bool:
    """Ask MLX itself: whether the graph of this call on the default device holds the fused operation.

    Nothing is computed. On a machine with the device in question this is surer than the table.
    """
    dtype = mx.float32 if call.itemsize == 4 else mx.bfloat16
    q = mx.zeros((call.batch, call.q_heads, call.queries, call.key_dim), dtype)
    k = mx.zeros((call.batch, call.kv_heads, rows, call.key_dim), dtype)
    v = mx.zeros((call.batch, call.kv_heads, rows, call.value_dim), dtype)
    mask: mx.array | str | None = None if call.mask == "none" else "causal"
    if call.mask in ("bool", "additive"):
        mask = mx.zeros((call.queries, rows), mx.bool_ if call.mask == "bool" else dtype)
    sinks = mx.zeros((call.q_heads,), dtype) if call.sinks else None
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask, sinks=sinks)
    drawing = io.StringIO()
    mx.export_to_dot(drawing, out)
    return "ScaledDotProductAttention" in re.findall(r'label ="(\w+)"', drawing.getvalue())
