"""What is tried on arrays, in a child process: each check compares with a computation that does not use the thing tried.

Bound for affine codes. With ``step = range/(2^bits − 1)`` per group, MLX moves the scale by at most half a step over
the larger edge so that zero becomes a code; what is cut off at the other edge is then at most one step and rounding
adds at most half of one: no element is off by more than 1.5 steps. Bounds for element formats follow from OCP
Microscaling (MX) 1.0: E2M1 saturates at 6 and E4M3 at 448, under a scale that is a power of two (mx) or E4M3 (nv).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models import cache as stock

from .isolate import first_line

__all__ = [
    "CHECKS",
    "CHUNK",
    "FORMATS",
    "KV_HEADS",
    "LAYOUT_CHECKS",
    "MASKS",
    "QUERY_HEADS",
    "Deviation",
    "answer",
    "dtype_name",
]

#: Element formats of ``mx.quantize``: group size, bits, and the largest error as a share of a group's largest element.
FORMATS: Mapping[str, tuple[int, int, float]] = MappingProxyType(
    {"mxfp4": (32, 4, 1 / 4), "mxfp8": (32, 8, 1 / 8), "nvfp4": (16, 4, 1 / 5)}
)

#: Shapes of the trials: rows held before, rows appended as a chunk, K/V heads, query heads.
ROWS, CHUNK, KV_HEADS, QUERY_HEADS = 20, 3, 2, 4

WORKS, WRONG, RAISES, SKIPPED = "works", "wrong", "raises", "skipped"


@dataclass(frozen=True)
class Deviation:
    """What a check found: how far its result is off, and how far it may be."""

    error: float
    allowed: float


def answer(question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run the checks of one question; each outcome as the fields of a :class:`Trial`."""
    mx.set_default_device(mx.Device(getattr(mx.DeviceType, question["device"])))
    found: list[dict[str, Any]] = []
    unusable: str | None = None
    for name in question["checks"]:
        if unusable is not None:
            found.append({"check": name, "outcome": SKIPPED, "reason": unusable, "seconds": 0.0})
            continue
        one = _run(name, dict(question["params"]))
        found.append(one)
        if name == "quantize" and one["outcome"] != WORKS:
            unusable = f"quantize {one['outcome']}"
    return found


def _run(name: str, params: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    record: dict[str, Any] = {"check": name, "outcome": WORKS, "reason": None}
    try:
        deviation = CHECKS[name](**params)
    except Exception as error:
        record |= {"outcome": RAISES, "reason": first_line(error)}
    else:
        record |= {"error": deviation.error, "allowed": deviation.allowed}
        if not deviation.error <= deviation.allowed:  # also when it is not a number
            record["outcome"] = WRONG
            record["reason"] = f"off by {deviation.error:.3g}, where {deviation.allowed:.3g} is allowed"
    record["seconds"] = time.perf_counter() - start
    return record


def _dtype() -> mx.Dtype:
    """16-bit products do not reach a BLAS on the CPU; a GPU is used with 16-bit rows."""
    return mx.float32 if mx.default_device().type == mx.DeviceType.cpu else mx.float16


def dtype_name() -> str:
    return str(_dtype()).removeprefix("mlx.core.")


def _tolerance() -> float:
    """Largest deviation of an attention output of order one: rounding of the dtype, with room for sums."""
    return 2e-5 if _dtype() == mx.float32 else 2e-2


def _rows(
    head_dim: int, *, tokens: int = ROWS, heads: int = KV_HEADS, batch: int = 1, seed: int = 0
) -> mx.array:
    """Random rows (B, H, T, D)."""
    key = mx.random.key(1009 * seed + head_dim)
    return mx.random.normal((batch, heads, tokens, head_dim), key=key).astype(_dtype())


def _encode(rows: mx.array, bits: int, group_size: int, mode: str = "affine") -> tuple[mx.array, ...]:
    return tuple(mx.quantize(rows, group_size=group_size, bits=bits, mode=mode))


def _decode(codes: tuple[mx.array, ...], bits: int, group_size: int, mode: str = "affine") -> mx.array:
    biases = codes[2] if len(codes) > 2 else None
    return mx.dequantize(codes[0], codes[1], biases, group_size=group_size, bits=bits, mode=mode)


def _product(x: mx.array, codes: tuple[mx.array, ...], transpose: bool, format: str) -> mx.array:
    group_size, bits, _ = FORMATS[format]
    return mx.quantized_matmul(
        x, codes[0], codes[1], transpose=transpose, group_size=group_size, bits=bits, mode=format
    )


def _number(x: mx.array) -> float:
    found: Any = x.item()
    return float(found)


def _largest(x: mx.array) -> float:
    """Largest magnitude; not a number as soon as one element is none."""
    if not x.size:
        return 0.0
    return math.nan if mx.isnan(x).any().item() else _number(mx.abs(x.astype(mx.float32)).max())


def _worse(a: float, b: float) -> float:
    """The larger; not a number if either is none, which ``max`` would hide."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _joined(first: mx.array, then: mx.array) -> mx.array:
    return mx.concatenate([first, then], axis=2)


def _attention(queries: mx.array, keys: mx.array, values: mx.array, allowed: mx.array | None) -> mx.array:
    """Attention written out, in float32. ``allowed`` broadcasts to (B, Hq, N, T)."""
    q, k, v = (a.astype(mx.float32) for a in (queries, keys, values))
    groups = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)
    scores = (q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)
    if allowed is not None:
        scores = mx.where(allowed, scores, -mx.inf)
    return mx.softmax(scores, axis=-1) @ v


def _causal(tokens: int, rows: int) -> mx.array:
    """(N, T): query i is the token at position T − N + i."""
    return mx.arange(rows - tokens, rows)[:, None] >= mx.arange(rows)[None]


def _quantize(bits: int, group_size: int, key_dim: int, value_dim: int) -> Deviation:
    """Encode rows and count the bytes of what comes out."""
    off = 0
    for dim in (key_dim, value_dim):
        codes, scales, biases = _encode(_rows(dim), bits, group_size)
        mx.eval(codes, scales, biases)
        rows = KV_HEADS * ROWS
        off += abs(codes.nbytes - rows * dim * bits // 8)
        off += abs(scales.nbytes + biases.nbytes - 2 * rows * (dim // group_size) * _dtype().size)
    return Deviation(off, 0)


def _dequantize(bits: int, group_size: int, key_dim: int, value_dim: int) -> Deviation:
    """Decode again; the deviation is in steps of a group's own range."""
    worst = 0.0
    for dim in (key_dim, value_dim):
        rows = _rows(dim)
        codes = _encode(rows, bits, group_size)
        decoded = _decode(codes, bits, group_size)
        shape = (*rows.shape[:-1], dim // group_size, group_size)
        groups, back = rows.reshape(shape).astype(mx.float32), decoded.reshape(shape).astype(mx.float32)
        step = (groups.max(-1) - groups.min(-1)) / (2**bits - 1)
        # Scales and biases are rounded to the dtype of the rows.
        rounding = 4 * mx.finfo(_dtype()).eps * mx.abs(groups).max(-1)
        worst = _worse(worst, _number(((mx.abs(groups - back).max(-1) - rounding) / step).max()))
    return Deviation(worst, 1.5)


def _packed_attention(bits: int, group_size: int, key_dim: int, value_dim: int) -> Deviation:
    """mlx-lm's attention over packed rows, one K/V head per query head, against attention over the rows decoded."""
    return _attended(KV_HEADS, bits, group_size, key_dim, value_dim)


def _packed_attention_gqa(bits: int, group_size: int, key_dim: int, value_dim: int) -> Deviation:
    """The same with K/V heads shared by several query heads."""
    return _attended(QUERY_HEADS, bits, group_size, key_dim, value_dim)


def _attended(query_heads: int, bits: int, group_size: int, key_dim: int, value_dim: int) -> Deviation:
    worst = 0.0
    keys, values = _rows(key_dim), _rows(value_dim, seed=1)
    packed = [_encode(a, bits, group_size) for a in (keys, values)]
    decoded = [_decode(a, bits, group_size) for a in packed]
    for tokens, mask in ((1, None), (CHUNK, "causal"), (CHUNK, _causal(CHUNK, ROWS))):
        queries = _rows(key_dim, tokens=tokens, heads=query_heads, seed=2)
        wanted = _attention(queries, decoded[0], decoded[1], _causal(tokens, ROWS))
        got = base.quantized_scaled_dot_product_attention(
            queries + 0,  # it scales its argument in place
            *packed,
            scale=key_dim**-0.5,
            mask=mask,
            group_size=group_size,
            bits=bits,
        )
        worst = _worse(worst, _largest(got - wanted))
    return Deviation(worst, _tolerance() * max(1.0, _largest(decoded[1])))


def _stock_cold_append(bits: int, group_size: int, key_dim: int, value_dim: int) -> Deviation:
    """mlx-lm's QuantizedKVCache filled from its first row."""
    cache = stock.QuantizedKVCache(group_size=group_size, bits=bits)
    return _appended(cache, bits, group_size, key_dim, value_dim, start=0)


def _stock_convert(bits: int, group_size: int, key_dim: int, value_dim: int) -> Deviation:
    """A dense KVCache filled, converted by mlx-lm's own method, then appended to."""
    dense = stock.KVCache()
    dense.update_and_fetch(_rows(key_dim), _rows(value_dim, seed=1))
    cache = dense.to_quantized(group_size=group_size, bits=bits)
    return _appended(cache, bits, group_size, key_dim, value_dim, start=ROWS)


def _appended(cache: Any, bits: int, group_size: int, key_dim: int, value_dim: int, start: int) -> Deviation:
    """Append the rows from ``start`` on and one chunk; codes fetched against codes of the same rows encoded at once."""
    all_rows = [
        mx.concatenate([_rows(dim, seed=seed), _rows(dim, tokens=CHUNK, seed=seed + 10)], axis=2)
        for dim, seed in ((key_dim, 0), (value_dim, 1))
    ]
    fetched: Any = None
    for first, last in ((start, ROWS), (ROWS, ROWS + CHUNK)):
        if first < last:
            fetched = cache.update_and_fetch(*(a[..., first:last, :] for a in all_rows))
    wanted = [_encode(a, bits, group_size) for a in all_rows]
    same = [
        a.shape == b.shape and bool(mx.array_equal(a, b).item())
        for got, want in zip(fetched, wanted, strict=True)
        for a, b in zip(got, want, strict=True)
    ]
    return Deviation(same.count(False), 0)


class _PackedDenseOut(stock.KVCache):  # type: ignore[misc]
    """A cache that holds packed rows and hands out dense ones; it has no ``bits``, so attention stays dense."""

    def __init__(self, key_bits: int, value_bits: int, group_size: int) -> None:
        super().__init__()
        self._layouts = ((key_bits, group_size), (value_bits, group_size))
        self._held: list[tuple[mx.array, ...]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        new = [_encode(a, *layout) for a, layout in zip((keys, values), self._layouts, strict=True)]
        if self._held:
            new = [tuple(map(_joined, old, more)) for old, more in zip(self._held, new, strict=True)]
        self._held = new
        self.offset += keys.shape[2]
        out = [_decode(a, *layout) for a, layout in zip(new, self._layouts, strict=True)]
        return out[0], out[1]


def _dense_fetch(bits: int, group_size: int, key_dim: int, value_dim: int) -> Deviation:
    """Attention over rows stored packed and decoded on fetch, with equal and with other bits for values."""
    worst, largest = 0.0, 1.0
    for value_bits in {bits, 4}:
        cache = _PackedDenseOut(bits, value_bits, group_size)
        rows = [_rows(key_dim), _rows(value_dim, seed=1)]
        cache.update_and_fetch(*rows)
        for tokens, mask in ((CHUNK, "causal"), (1, None)):
            new = [
                _rows(key_dim, tokens=tokens, seed=3),
                _rows(value_dim, tokens=tokens, seed=4),
            ]
            rows = list(map(_joined, rows, new))
            decoded = [
                _decode(_encode(a, b, group_size), b, group_size)
                for a, b in zip(rows, (bits, value_bits), strict=True)
            ]
            queries = _rows(key_dim, tokens=tokens, heads=QUERY_HEADS, seed=2)
            got = base.scaled_dot_product_attention(
                queries, *cache.update_and_fetch(*new), cache=cache, scale=key_dim**-0.5, mask=mask
            )
            wanted = _attention(queries, decoded[0], decoded[1], _causal(tokens, rows[0].shape[2]))
            worst, largest = _worse(worst, _largest(got - wanted)), max(largest, _largest(decoded[1]))
    return Deviation(worst, _tolerance() * largest)


def _row_gather(bits: int, group_size: int, key_dim: int, value_dim: int) -> Deviation:
    """Codes of gathered rows against gathered codes, bit for bit."""
    where = mx.array([0, 1, 5, 11, ROWS - 1])
    different = 0
    for dim in (key_dim, value_dim):
        rows = _rows(dim)
        taken = [mx.take(a, where, axis=2) for a in _encode(rows, bits, group_size)]
        again = _encode(mx.take(rows, where, axis=2), bits, group_size)
        different += sum(not mx.array_equal(a, b).item() for a, b in zip(taken, again, strict=True))
    return Deviation(different, 0)


def _format(format: str, key_dim: int, value_dim: int) -> Deviation:
    """An element format, encoded and decoded; the deviation is a share of each group's largest element."""
    group_size, bits, allowed = FORMATS[format]
    worst = 0.0
    for dim in (key_dim, value_dim):
        rows = _rows(dim)
        codes = _encode(rows, bits, group_size, format)
        back = _decode(codes, bits, group_size, format)
        shape = (*rows.shape[:-1], dim // group_size, group_size)
        groups = rows.reshape(shape).astype(mx.float32)
        off = mx.abs(groups - back.reshape(shape).astype(mx.float32)).max(-1)
        worst = _worse(worst, _number((off / mx.abs(groups).max(-1)).max()))
    # Decoded elements are rounded once more, to bfloat16.
    return Deviation(worst, allowed + mx.finfo(mx.bfloat16).eps)


def _format_attention(format: str, key_dim: int, value_dim: int) -> Deviation:
    """Both products of attention over codes of an element format, against the same over decoded rows."""
    group_size, bits, _ = FORMATS[format]
    keys, values = _rows(key_dim), _rows(value_dim, seed=1)
    packed = [_encode(a, bits, group_size, format) for a in (keys, values)]
    decoded = [_decode(a, bits, group_size, format).astype(_dtype()) for a in packed]
    queries = _rows(key_dim, tokens=CHUNK, seed=2)
    scores = _product(queries * key_dim**-0.5, packed[0], True, format)
    scores = mx.where(_causal(CHUNK, ROWS), scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    got = _product(weights, packed[1], False, format)
    wanted = _attention(queries, decoded[0], decoded[1], _causal(CHUNK, ROWS))
    return Deviation(_largest(got - wanted), _tolerance() * max(1.0, _largest(decoded[1])))


#: Masks tried, with the number of new tokens: a string, arrays of each rank, per head, and added to the scores.
MASKS = (
    ("none", 1),
    ("causal", 1),
    ("causal", CHUNK),
    ("array", 1),
    ("array", CHUNK),
    ("array_4d", CHUNK),
    ("per_sequence", CHUNK),
    ("per_head", CHUNK),
    ("added", CHUNK),
)


def _mask(storage: str, mask: str, tokens: int, batch: int, query_heads: int) -> Deviation:
    """Attention through mlx-lm's dispatch under one kind of mask, against attention written out."""
    dim, group_size, bits = 64, 32, 8
    keys, values = _rows(dim, batch=batch), _rows(dim, batch=batch, seed=1)
    queries = _rows(dim, tokens=tokens, heads=query_heads, batch=batch, seed=2)
    cache, held, seen = _stored(storage, keys, values, group_size, bits)
    causal = _causal(tokens, ROWS)
    head = mx.arange(query_heads)[None, :, None, None]
    sequence = mx.arange(batch)[:, None, None, None]
    first = mx.arange(ROWS)[None, None, None, :]
    allowed: mx.array | None = causal
    given: Any
    match mask:
        case "none":
            given, allowed = None, None
        case "causal":
            given = "causal"
        case "array":
            given = causal
        case "array_4d":
            given = causal[None, None]
        case "per_sequence":
            given = allowed = causal[None, None] & (first >= 2 * sequence)
        case "per_head":
            given = allowed = causal[None, None] & (first >= head)
        case "added":
            given = mx.where(causal, 0.0, -1e9 if _dtype() == mx.float32 else -1e4).astype(_dtype())
    wanted = _attention(queries, seen[0], seen[1], allowed)
    got = base.scaled_dot_product_attention(queries + 0, *held, cache=cache, scale=dim**-0.5, mask=given)
    if got.shape != wanted.shape:
        raise ValueError(f"the output has shape {got.shape}, not {wanted.shape}")
    return Deviation(_largest(got - wanted), _tolerance() * max(1.0, _largest(values)))


def _uneven_rows(storage: str, mask: str, tokens: int) -> Deviation:
    """A layer with fewer rows than the one that the mask was made for."""
    dim, fewer = 64, ROWS - 6
    keys, values = _rows(dim, tokens=fewer), _rows(dim, tokens=fewer, seed=1)
    queries = _rows(dim, tokens=tokens, heads=QUERY_HEADS, seed=2)
    cache, held, seen = _stored(storage, keys, values, 32, 8)
    given = {"none": None, "causal": "causal", "array": _causal(tokens, ROWS)}[mask]
    got = base.scaled_dot_product_attention(queries + 0, *held, cache=cache, scale=dim**-0.5, mask=given)
    wanted = _attention(queries, seen[0], seen[1], _causal(tokens, fewer))
    return Deviation(_largest(got - wanted), _tolerance() * max(1.0, _largest(values)))


def _stored(
    storage: str, keys: mx.array, values: mx.array, group_size: int, bits: int
) -> tuple[Any, tuple[Any, Any], tuple[mx.array, mx.array]]:
    """A cache object for the dispatch, what attention is handed, and the rows that it stands for."""
    if storage == "dense":
        return stock.KVCache(), (keys, values), (keys, values)
    packed = [_encode(a, bits, group_size) for a in (keys, values)]
    decoded = [_decode(a, bits, group_size) for a in packed]
    cache = stock.QuantizedKVCache(group_size=group_size, bits=bits)
    return cache, (packed[0], packed[1]), (decoded[0], decoded[1])


def _other_thread(array: str) -> Deviation:
    """Rows made in another thread, evaluated there or not, used here."""
    made: list[mx.array] = []
    raised: list[Exception] = []

    def make() -> None:
        try:
            rows = _rows(64) * 2
            if array == "evaluated":
                mx.eval(rows)
            made.append(rows)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    here = _rows(64) * 2
    return Deviation(_largest(made[0] - here), 0.0)


LAYOUT_CHECKS = (
    "quantize",
    "dequantize",
    "packed_attention",
    "packed_attention_gqa",
    "stock_cold_append",
    "stock_convert",
    "dense_fetch",
    "row_gather",
)

#: What is tried, by name.
CHECKS: Mapping[str, Callable[..., Deviation]] = MappingProxyType(
    {
        "quantize": _quantize,
        "dequantize": _dequantize,
        "packed_attention": _packed_attention,
        "packed_attention_gqa": _packed_attention_gqa,
        "stock_cold_append": _stock_cold_append,
        "stock_convert": _stock_convert,
        "dense_fetch": _dense_fetch,
        "row_gather": _row_gather,
        "format": _format,
        "format_attention": _format_attention,
        "mask": _mask,
        "uneven_rows": _uneven_rows,
        "other_thread": _other_thread,
    }
)
