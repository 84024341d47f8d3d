"""Attention over packed rows, read as codes, followed by dense ones.

``softmax(q·[K̂; K]ᵀ·scale + mask)·[V̂; V]``, with K̂, V̂ the packed rows and K, V a dense tail, as one softmax. The codes are
never decoded into a whole side of a layer:

- *affine*, a row at a time: ``q·K̂ᵀ`` is a product with the codes, transposed.
- *per channel*, keys packed along tokens (KIVI, Liu et al. 2024, arXiv:2402.02750): the codes are those of ``K̂ᵀ`` already.
- *rotated*, rows packed as ``x·M``, M orthonormal (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456): q·x is ``(q·M)·(x·M)``,
  so the query is rotated instead of the keys; of the values ``Σ w·x = (Σ w·(x·M))·Mᵀ``, rotated back once.

Query heads that share a K/V head are rows of one product, so packed rows are not copied for each of them as in
``mlx_lm.models.base.quantized_scaled_dot_product_attention``. Scores are bounded: where they would be too many, rows are
walked through in tiles and their softmax is put together from a running maximum and sum (Milakov & Gimelshein 2018,
arXiv:1805.02867), so that packing does not raise the peak of a long prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx

from ..codecs.affine import Affine, AffineFetch, AffineSteps
from ..codecs.base import STEP, Codec, Encoded
from ..codecs.formats import ElementFormat
from ..codecs.hadamard import Hadamard, rotate, rotate_back
from ..codecs.kivi import KiviKeys
from ..errors import AttentionInputError

__all__ = ["MAX_SCORE_BYTES", "PackedLayout", "attend"]

#: Bytes that scores may take at once, counted in float32.
MAX_SCORE_BYTES = 16 << 20

#: Rows of the smallest tile: whole groups and whole words of every layout that is packed along tokens.
TILE = STEP

#: Rows of the largest tile that is decoded: its dense rows stay in the caches of the processor.
DECODED_TILE = 1024

# MLX's product with codes goes through them once per row of the left side on a CPU. From so many rows on, decoding a
# tile once and multiplying it as dense rows takes less time there; GPUs have kernels for both, and read codes.
_DECODE_FROM_ROWS = 12
_DECODE_FROM_ROWS_TRANSPOSED = 4

Mask = mx.array | Literal["causal"] | None


@dataclass(frozen=True)
class PackedLayout:
    """How codes are to be read.

    ``per_channel``: groups run along tokens; ``rotated``: the rows are in Hadamard's basis; ``mode``: that of
    ``mlx.core.quantize``, without biases unless it is "affine".
    """

    bits: int
    group_size: int
    per_channel: bool = False
    rotated: bool = False
    mode: str = "affine"

    @classmethod
    def of(cls, codec: Codec) -> PackedLayout | None:
        """The layout of a codec's rows; None if they cannot be attended to as codes."""
        if isinstance(codec, ElementFormat):
            return cls(codec.bits, codec.group_size, mode=codec.name)
        if type(codec) not in (Affine, AffineFetch, AffineSteps, Hadamard, KiviKeys):
            return None
        assert isinstance(codec, Affine)
        return cls(codec.bits, codec.group_size, isinstance(codec, KiviKeys), isinstance(codec, Hadamard))


def attend(
    queries: mx.array,
    keys: Encoded | None,
    values: Encoded | None,
    key_layout: PackedLayout,
    value_layout: PackedLayout,
    tail_keys: mx.array | None = None,
    tail_values: mx.array | None = None,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    max_score_bytes: int = MAX_SCORE_BYTES,
) -> mx.array:
    """Attention of ``queries`` (B, Hq, N, D) to packed rows and a dense tail; (B, Hq, N, Dv), of the queries' type.

    Args:
        queries: (B, Hq, N, D), Hq a multiple of the number H of K/V heads.
        keys: P packed rows as their codec gives them: (B, H, P, ·), or (B, H, D, ·) per channel; None for no rows.
        values: the same of the values, of Dv elements each, never per channel.
        tail_keys: (B, H, R, D), the dense rows behind the packed ones; None for none.
        tail_values: (B, H, R, Dv).
        scale: factor of the products of queries and keys.
        mask: None; ``"causal"``, the last query seeing all T = P + R rows and each one before it one row less; or an
            array that broadcasts to (B, Hq, N, T): bool, False where a row is hidden, or a number to be added.
        sinks: (Hq,) a further score of each query head that takes part in the softmax and has no value, as in
            ``mx.fast.scaled_dot_product_attention``.
        softcap: c in ``c·tanh(score/c)``, before the mask (Gemma 2, arXiv:2408.00118).
        max_score_bytes: most bytes of scores under way at once, counted as float32; their weights take as much again.
            256 rows for one query are the least that is computed at once. Where all scores take more, or tiles of
            rows are decoded, they are evaluated tile by tile, which no function transformation allows.

    Raises:
        AttentionInputError: shapes that do not go together, or a mask that no attention knows.
    """
    rows = _Rows.of(keys, values, key_layout, value_layout, tail_keys, tail_values)
    call = _Call.of(queries, rows, mask, sinks, softcap)
    if rows.packed == 0 and softcap is None:
        dense_keys, dense_values = rows.tail
        return mx.fast.scaled_dot_product_attention(
            queries, dense_keys, dense_values, scale=scale, mask=mask, sinks=sinks
        ).astype(queries.dtype)
    scaled = queries * scale
    plan = _Plan.of(call, rows, max_score_bytes)
    out = [
        _attend_block(scaled[:, :, start : start + plan.queries], call, rows, start, plan)
        for start in range(0, call.n, plan.queries)
    ]
    return (out[0] if len(out) == 1 else mx.concatenate(out, axis=2)).astype(queries.dtype)


# -- what is attended to -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """P packed rows and R dense ones behind them, of H heads."""

    heads: int
    packed: int
    dense: int
    width: int
    value_width: int
    keys: Encoded
    values: Encoded
    key_layout: PackedLayout
    value_layout: PackedLayout
    tail: Encoded  #: dense keys and values; nothing if there are none

    @property
    def total(self) -> int:
        return self.packed + self.dense

    def in_tail(self, tile: _Tile) -> tuple[int, int, int]:
        """Where the dense rows of a tile begin and end, and how many there are in all."""
        return tile.packed_end - self.packed, tile.end - self.packed, self.dense

    @classmethod
    def of(
        cls,
        keys: Encoded | None,
        values: Encoded | None,
        key_layout: PackedLayout,
        value_layout: PackedLayout,
        tail_keys: mx.array | None,
        tail_values: mx.array | None,
    ) -> _Rows:
        if value_layout.per_channel:
            raise AttentionInputError(
                "values packed along tokens cannot be weighted as codes; pack them per row"
            )
        if (keys is None) != (values is None) or (tail_keys is None) != (tail_values is None):
            raise AttentionInputError("keys without values, or the reverse; pass both or neither")
        packed = dense = 0
        found: list[tuple[int, int, int]] = []
        if keys is not None and values is not None:
            k, v = _packed_shape(keys, key_layout), _packed_shape(values, value_layout)
            if k[:2] != v[:2]:
                raise AttentionInputError(
                    f"packed keys have (H, P) = {k[:2]}, values {v[:2]}; they must agree"
                )
            packed = k[1]
            found.append((k[0], k[2], v[2]))
        tail: Encoded = ()
        if tail_keys is not None and tail_values is not None:
            if tail_keys.shape[:3] != tail_values.shape[:3]:
                raise AttentionInputError(
                    f"dense keys {tail_keys.shape} and values {tail_values.shape} must agree up to their width"
                )
            dense, tail = tail_keys.shape[2], (tail_keys, tail_values)
            found.append((tail_keys.shape[1], tail_keys.shape[3], tail_values.shape[3]))
        if packed + dense == 0:
            raise AttentionInputError("there are no rows to attend to")
        if len(set(found)) > 1:
            raise AttentionInputError(f"packed rows have (H, D, Dv) = {found[0]}, dense ones {found[1]}")
        heads, width, value_width = found[0]
        return cls(
            heads,
            packed,
            dense,
            width,
            value_width,
            keys or (),
            values or (),
            key_layout,
            value_layout,
            tail,
        )


def _packed_shape(encoded: Encoded, layout: PackedLayout) -> tuple[int, int, int]:
    """Heads, rows and width of packed rows."""
    codes = encoded[0]
    along = codes.shape[3] * 32 // layout.bits
    across = codes.shape[2]
    return (codes.shape[1], along, across) if layout.per_channel else (codes.shape[1], across, along)


@dataclass(frozen=True)
class _Call:
    """The other arguments of a call, checked; ``mask`` has four axes if it is an array."""

    batch: int
    q_heads: int
    n: int
    repeats: int  #: query heads per K/V head
    offset: int  #: rows that the first query sees besides its own, if the mask is causal
    mask: Mask
    sinks: mx.array | None
    softcap: float | None

    @classmethod
    def of(
        cls, queries: mx.array, rows: _Rows, mask: Mask, sinks: mx.array | None, softcap: float | None
    ) -> _Call:
        batch, q_heads, n, width = queries.shape
        if q_heads % rows.heads or width != rows.width:
            raise AttentionInputError(
                f"{q_heads} query heads of width {width} do not go with {rows.heads} K/V heads of width {rows.width}"
            )
        if isinstance(mask, str):
            if mask != "causal":
                raise AttentionInputError(f"mask {mask!r} is not known; pass 'causal', an array or None")
            if n > rows.total:
                raise AttentionInputError(
                    f"a causal mask of {n} queries needs as many rows; there are {rows.total}"
                )
        elif mask is not None:
            wanted = (batch, q_heads, n, rows.total)
            shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
            if any(m not in (1, w) for m, w in zip(shape, wanted, strict=False)) or len(shape) != 4:
                raise AttentionInputError(f"a mask of shape {mask.shape} does not broadcast to {wanted}")
            mask = mask.reshape(shape)
        if sinks is not None and sinks.shape != (q_heads,):
            raise AttentionInputError(
                f"sinks of shape {sinks.shape}; expected one per query head, ({q_heads},)"
            )
        repeats = q_heads // rows.heads
        return cls(batch, q_heads, n, repeats, rows.total - n, mask, sinks, softcap)

    def masked(self, scores: mx.array, start: int, first: int) -> mx.array:
        """Scores (B, H, G, n, t) of queries from ``start`` and rows from ``first`` on, with what is hidden made so."""
        n, t = scores.shape[-2:]
        mask = self.mask
        if mask is None:
            return scores
        if isinstance(mask, str):
            if first + t - 1 <= start + self.offset:
                return scores
            mask = mx.arange(start, start + n)[:, None] + self.offset >= mx.arange(first, first + t)[None]
        else:
            if mask.shape[2] > 1:
                mask = mask[:, :, start : start + n]
            if mask.shape[3] > 1:
                mask = mask[..., first : first + t]
            heads = mask.shape[1]
            mask = (
                mask[:, :, None]
                if heads == 1
                else mask.reshape(mask.shape[0], -1, self.repeats, *mask.shape[2:])
            )
        if mask.dtype == mx.bool_:
            return mx.where(mask, scores, mx.finfo(scores.dtype).min)
        return scores + mask


# -- how much at once --------------------------------------------------------------------------------------------------


def _decodes(products: int, transposed: bool) -> bool:
    """Whether tiles are decoded for ``products`` rows on the left side of the product with them."""
    least = _DECODE_FROM_ROWS_TRANSPOSED if transposed else _DECODE_FROM_ROWS
    return products >= least and mx.default_device() == mx.cpu


@dataclass(frozen=True)
class _Plan:
    """Queries and rows that are computed at once, and whether each tile of rows waits for the last but one."""

    queries: int
    rows: int
    waits: bool

    @classmethod
    def of(cls, call: _Call, rows: _Rows, max_score_bytes: int) -> _Plan:
        if max_score_bytes <= 0:
            raise AttentionInputError(f"max_score_bytes is {max_score_bytes}; it must be positive")
        pair = call.batch * call.q_heads * 4
        if pair * call.n * rows.total <= max_score_bytes:
            n, size = call.n, rows.total
        else:
            each = max_score_bytes // 2  # two tiles are under way
            n = min(call.n, max(1, each // (pair * min(rows.total, TILE))))
            size = max(TILE, each // (pair * n) // TILE * TILE)
        products = call.repeats * n
        decodes = rows.packed > 0 and (
            _decodes(products, not rows.key_layout.per_channel) or _decodes(products, False)
        )
        if decodes:
            size = min(size, DECODED_TILE)
        return cls(n, size, decodes or size < rows.total)


# -- a block of queries ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tile:
    """Packed rows from ``start`` to ``packed_end``, then dense ones to ``end``; numbers among all rows."""

    start: int
    packed_end: int
    end: int

    @property
    def packed(self) -> int:
        return self.packed_end - self.start

    @property
    def dense(self) -> int:
        return self.end - self.packed_end


class _Queries(NamedTuple):
    """Scaled queries (B, H, G·n, D), as they are and in the basis that the packed keys are in."""

    plain: mx.array
    rotated: mx.array


def _tiles(rows: _Rows, plan: _Plan) -> Iterator[_Tile]:
    if not plan.waits:
        yield _Tile(0, rows.packed, rows.total)
        return
    for start in range(0, rows.packed, plan.rows):
        end = min(start + plan.rows, rows.packed)
        yield _Tile(start, end, end)
    for start in range(rows.packed, rows.total, plan.rows):
        yield _Tile(start, start, min(start + plan.rows, rows.total))


def _attend_block(scaled: mx.array, call: _Call, rows: _Rows, start: int, plan: _Plan) -> mx.array:
    """(B, Hq, n, Dv) of n scaled queries, the first of which is number ``start``."""
    n = scaled.shape[2]
    grouped = (call.batch, rows.heads, call.repeats, n)
    plain = scaled.reshape(call.batch, rows.heads, call.repeats * n, rows.width)
    rotates = rows.packed > 0 and rows.key_layout.rotated
    queries = _Queries(plain, rotate(plain) if rotates else plain)
    sinks = None if call.sinks is None else call.sinks.reshape(1, rows.heads, call.repeats, 1, 1)
    tiles = list(_tiles(rows, plan))
    if call.mask is not None and isinstance(call.mask, str):
        tiles = [tile for tile in tiles if tile.start < start + n + call.offset]

    def scores_of(queries: _Queries, tile: _Tile) -> mx.array:
        scores = _scores(queries, rows, tile).reshape(*grouped, tile.end - tile.start)
        if call.softcap is not None:
            scores = mx.tanh(scores / call.softcap) * call.softcap
        return call.masked(scores, start, tile.start)

    def weighted(weights: mx.array, tile: _Tile) -> mx.array:
        flat = weights.astype(scaled.dtype).reshape(*plain.shape[:3], tile.end - tile.start)
        return _weighted(flat, rows, tile).reshape(*grouped, rows.value_width)

    if len(tiles) == 1:
        out = weighted(_softmax(scores_of(queries, tiles[0]), sinks), tiles[0])
    else:
        state = _Running.starting(sinks)
        for tile in tiles:
            peak, weights = state.weigh(scores_of(queries, tile))
            before, state = state, state.joined(peak, weights, weighted(weights, tile))
            # In one graph, MLX would make room for many tiles before the first is done. Two keep the device busy.
            mx.async_eval(*state.arrays)  # type: ignore[no-untyped-call]
            mx.eval(*before.arrays)
        out = state.finished()
    return out.reshape(call.batch, call.q_heads, n, rows.value_width)


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    column = mx.broadcast_to(sinks.astype(scores.dtype), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([column, scores], axis=-1), axis=-1, precise=True)[..., 1:]


@dataclass(frozen=True)
class _Running:
    """A softmax over tiles, so far: its maximum, the sum of its weights, and the values so weighted; float32."""

    peak: mx.array
    total: mx.array
    out: mx.array

    @classmethod
    def starting(cls, sinks: mx.array | None) -> _Running:
        nothing = mx.zeros((1,) * 5)
        if sinks is None:
            return cls(nothing + mx.finfo(mx.float32).min, nothing, nothing)
        return cls(sinks.astype(mx.float32), nothing + 1, nothing)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.peak, self.total, self.out

    def weigh(self, scores: mx.array) -> tuple[mx.array, mx.array]:
        """The maximum with these scores, and their weights relative to it."""
        scores = scores.astype(mx.float32)
        # Rows hidden by minus infinity may fill a tile. The first maximum is a number, so that they weigh nothing.
        peak = mx.maximum(scores.max(axis=-1, keepdims=True), self.peak)
        return peak, _exp(scores - peak)

    def joined(self, peak: mx.array, weights: mx.array, out: mx.array) -> _Running:
        shrunk = _exp(self.peak - peak)
        return _Running(
            peak, weights.sum(axis=-1, keepdims=True) + shrunk * self.total, out + shrunk * self.out
        )

    def finished(self) -> mx.array:
        return self.out / self.total


def _exp(x: mx.array) -> mx.array:
    # MLX's exp on a CPU without Accelerate takes 2.6 times as long as its power, and is most of a softmax.
    return mx.power(math.e, x) if mx.default_device() == mx.cpu else mx.exp(x)


# -- products ----------------------------------------------------------------------------------------------------------


def _scores(queries: _Queries, rows: _Rows, tile: _Tile) -> mx.array:
    """Products (B, H, G·n, t) of queries and the keys of a tile."""
    parts = []
    if tile.packed:
        layout = rows.key_layout
        keys = _part(rows.keys, tile.start, tile.packed_end, rows.packed, 3 if layout.per_channel else 2)
        parts.append(_product(queries.rotated, keys, layout, transposed=not layout.per_channel))
    if tile.dense:
        (dense,) = _part(rows.tail[:1], *rows.in_tail(tile), 2)
        parts.append(queries.plain @ dense.swapaxes(-1, -2))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _weighted(weights: mx.array, rows: _Rows, tile: _Tile) -> mx.array:
    """Sums (B, H, G·n, Dv) of the values of a tile, weighted by (B, H, G·n, t)."""
    parts = []
    if tile.packed:
        values = _part(rows.values, tile.start, tile.packed_end, rows.packed, 2)
        of_packed = weights[..., : tile.packed] if tile.dense else weights
        out = _product(of_packed, values, rows.value_layout, transposed=False)
        parts.append(rotate_back(out) if rows.value_layout.rotated else out)
    if tile.dense:
        (dense,) = _part(rows.tail[1:], *rows.in_tail(tile), 2)
        parts.append(weights[..., tile.packed :] @ dense)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _product(x: mx.array, encoded: Encoded, layout: PackedLayout, transposed: bool) -> mx.array:
    """``x·w``, or ``x·wᵀ`` if ``transposed``, with w the matrix that is packed."""
    codes, scales = encoded[:2]
    biases = encoded[2] if len(encoded) > 2 else None
    group_size, bits, mode = layout.group_size, layout.bits, layout.mode
    if _decodes(x.shape[-2], transposed):
        w = mx.dequantize(codes, scales, biases, group_size, bits, mode, dtype=x.dtype)
        return x @ (w.swapaxes(-1, -2) if transposed else w)
    return mx.quantized_matmul(x, codes, scales, biases, transposed, group_size, bits, mode)


def _part(arrays: Encoded, start: int, end: int, rows: int, axis: int) -> Encoded:
    """Rows from ``start`` to ``end`` of arrays that hold ``rows`` rows along ``axis``."""
    if start == 0 and end == rows:
        return arrays
    ends = [(a.shape[axis] * start // rows, a.shape[axis] * end // rows) for a in arrays]
    if axis == 2:
        return tuple(a[:, :, i:j] for a, (i, j) in zip(arrays, ends, strict=True))
    return tuple(a[..., i:j] for a, (i, j) in zip(arrays, ends, strict=True))
