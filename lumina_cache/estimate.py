"""Bytes, before they are spent: what a cache holds, and what it would hold after an action and the next tokens.

Everything here is arithmetic on values. A layer is described by :class:`Held`, taken from real arrays or from a probe
of the model (never from ``2·layers·heads·dim``: latent attention, borrowed K/V and windows break that formula). The
growth rules are those of mlx-lm's cache classes, followed exactly: buffers grow in steps of 256 rows, a sliding window
holds ``max_size + chunk − 1`` rows after a chunk, packed rows carry their scales and biases. What a step or an action
takes for a while beside what is held is in :mod:`lumina_cache.transient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .actions import Action, Evict, Keep, Merge, Offload, Page, Plan, Quantize, Reclaim, Reserve
from .codecs.base import STEP, grown_capacity

__all__ = [
    "Held",
    "after_action",
    "after_append",
    "chunk_schedule",
    "emptied",
    "growth_nbytes",
    "merge_equal",
    "most_rows_within",
    "nbytes_allocated",
    "nbytes_live",
    "peak_of_action",
    "row_nbytes",
    "tokens_without_growth",
    "transient_of_action",
]

#: Rows that KIVI keeps dense at the end (its residual window), counted when an action that no backend executes is sized.
KIVI_RESIDUAL = 32


@dataclass(frozen=True)
class Held:
    """One layer's storage as numbers. Widths are per row over all heads and the batch, in elements."""

    name: str
    kind: str  #: ``kv``, ``rotating``, ``chunked``, ``concatenate``, ``quantized``, ``not_kv`` or ``opaque``
    rows: int = 0
    capacity: int = 0
    offset: int = 0
    key_width: int = 0  #: B·H·D_k elements per row
    value_width: int = 0  #: B·H·D_v elements per row
    itemsize: int = 0  #: bytes per element of the dense dtype
    bits: int | None = None  #: None while dense
    group_size: int = 0
    dense_tail: int = 0  #: rows that stay dense behind packed ones
    max_size: int = 0  #: sliding window, or attention chunk of a chunked layer (rows)
    keep: int = 0  #: rows a sliding window never drops
    fixed_nbytes: int = 0  #: recurrent and convolution state
    count: int = 1  #: how many equal layers this value stands for
    index: int = -1  #: number of the layer in its model; −1 where equal layers were merged
    token_nbytes: float = 0.0  #: of an ``opaque`` layer: bytes that it was seen to grow by per token

    @property
    def changeable(self) -> bool:
        """Whether actions apply: one row per token in a buffer of our own making, and something in it."""
        return self.kind == "kv" and self.rows > 0


def emptied(held: Held) -> Held:
    """The same layer before its first token; recurrent state is there from the first token on and stays counted."""
    return replace(held, rows=0, capacity=0, offset=0)


def merge_equal(layers: Iterable[Held]) -> tuple[Held, ...]:
    """The same layers with equal ones counted instead of repeated; a model has few kinds, so sums get cheap."""
    counts: dict[Held, list[Held]] = {}
    for one in layers:
        counts.setdefault(replace(one, name="", count=1, index=-1), []).append(one)
    return tuple(
        replace(key, name=same[0].name, count=sum(one.count for one in same)) for key, same in counts.items()
    )


def row_nbytes(held: Held) -> int:
    """Exact bytes of one row (keys and values, all heads) as stored."""
    width = held.key_width + held.value_width
    if held.bits is None:
        return width * held.itemsize
    return width * held.bits // 8 + 2 * (width // held.group_size) * held.itemsize


def nbytes_allocated(layers: Iterable[Held]) -> int:
    """Bytes of the arrays as allocated, slack included."""
    return sum(
        one.count * (one.capacity * row_nbytes(one) + _tail_nbytes(one) + _other_nbytes(one))
        for one in layers
    )


def nbytes_live(layers: Iterable[Held]) -> int:
    """Bytes of the rows held, without slack."""
    return sum(
        one.count * (one.rows * row_nbytes(one) + _tail_nbytes(one) + _other_nbytes(one)) for one in layers
    )


def _tail_nbytes(held: Held) -> int:
    dense = (held.key_width + held.value_width) * held.itemsize
    return min(held.dense_tail, held.rows) * (dense - row_nbytes(held)) if held.dense_tail else 0


def _other_nbytes(held: Held) -> int:
    return held.fixed_nbytes + (round(held.token_nbytes * held.offset) if held.token_nbytes else 0)


def chunk_schedule(tokens: int, chunk: int) -> Iterator[int]:
    """Tokens per step in which ``mlx_lm.generate`` processes a prompt: chunks up to the last token, then that token."""
    for start in range(0, tokens - 1, chunk):
        yield min(chunk, tokens - 1 - start)
    if tokens > 0:
        yield 1


def after_append(layers: Iterable[Held], n: int) -> tuple[Held, ...]:
    """The same layers after one step of ``n`` tokens."""
    return tuple(_appended(one, n) for one in layers)


def _appended(held: Held, n: int) -> Held:
    if held.kind == "not_kv" or n == 0:
        return held
    offset = held.offset + n
    if held.kind == "opaque":
        return replace(held, offset=offset) if held.token_nbytes else held
    if held.kind == "concatenate":
        return replace(held, rows=held.rows + n, capacity=held.rows + n, offset=offset)
    if held.kind == "chunked" and held.rows > held.max_size > 0:
        # The model drops the front before each step, by a slice without slack.
        held = replace(held, rows=held.max_size, capacity=held.max_size)
    if held.kind != "rotating":
        capacity = grown_capacity(held.rows, held.capacity, n)
        return replace(held, rows=held.rows + n, capacity=capacity, offset=offset)
    if n > 1:
        dropped = max(0, held.rows - held.max_size + 1)
        rows = held.rows - dropped + n
        return replace(held, rows=rows, capacity=rows, offset=offset)
    capacity = held.capacity
    if held.offset >= capacity and capacity < held.max_size:
        capacity += min(STEP, held.max_size - held.offset)
    capacity = min(capacity, held.max_size)
    return replace(held, rows=min(offset, capacity), capacity=capacity, offset=offset)


def tokens_without_growth(layers: Iterable[Held]) -> int | None:
    """Single tokens that can be appended before the bytes of any layer can change; None if they never will."""
    return min((room for one in layers if (room := _room(one)) is not None), default=None)


def _room(held: Held) -> int | None:
    if held.kind in ("not_kv", "opaque"):
        return None
    if held.kind == "rotating" and held.capacity == held.max_size:
        return None
    if held.kind == "rotating" and held.capacity > held.max_size:
        return 0
    if held.kind == "chunked" and held.max_size:
        if held.rows > held.max_size:
            # The front is dropped and the rest allocated anew at each step from here on, always as much.
            return None if _appended(held, 1).capacity == held.capacity else 0
        return min(held.capacity, held.max_size) - held.rows
    return held.capacity - held.rows


def after_action(layers: Iterable[Held], action: Action) -> tuple[Held, ...]:
    """The same layers after ``action``, before the next token. Layers that actions do not apply to stay as they are."""
    layers = tuple(layers)
    if isinstance(action, Plan):
        if any(one.index < 0 for one in layers):
            raise ValueError(f"{action} names layers, so layers must not be merged: pass one Held per layer")
        return tuple(one for layer in layers for one in after_action([layer], action.for_layer(layer.index)))
    for part in action.parts:
        layers = tuple(_acted(one, part) if one.changeable else one for one in layers)
    return layers


def _acted(held: Held, action: Action) -> Held:
    match action:
        case Keep():
            return held
        case Reclaim():
            return replace(held, capacity=held.rows)
        case Reserve():
            return replace(held, capacity=max(held.capacity, action.rows))
        case Page():
            return replace(held, capacity=-(-held.rows // action.rows) * action.rows)
        case Merge():
            # Two layers share one direction per row; their norms, one element per head, are left out.
            return replace(
                held, capacity=held.rows, key_width=held.key_width // 2, value_width=held.value_width // 2
            )
        case Offload():
            if action.layers is not None:
                if held.index < 0:
                    raise ValueError(
                        f"{action} names layers, so layers must not be merged: pass one Held per layer"
                    )
                gone = action.layers[0] <= held.index <= action.layers[1]
                return replace(held, capacity=0) if gone else held
            return replace(held, capacity=round((action.ratio or 0.0) * held.rows))
        case Evict():
            rows = action.rows_kept(held.rows)
            return held if rows == held.rows else replace(held, rows=rows, capacity=rows)
        case Quantize():
            # One width for both: an action with unequal bits is sized by their mean, exact when the widths are equal.
            bits = (action.key_bits + action.value_bits) // 2
            tail = KIVI_RESIDUAL if action.codec == "kivi" else 0
            return replace(held, capacity=held.rows, bits=bits, group_size=action.group_size, dense_tail=tail)
    raise TypeError(f"no byte formula for {action!r}")


def growth_nbytes(layers: Iterable[Held], n: int) -> int:
    """Bytes alive beside the grown buffers while a step of ``n`` tokens enlarges them: those of one layer.

    A full buffer is joined to a block of zeros: old rows, zeros and the new buffer exist together, one layer after
    the other. Sliding windows are copied in every step and are counted with what a step takes.
    """
    return max((_growth(one, n) for one in layers), default=0)


def _growth(held: Held, n: int) -> int:
    if held.kind in ("not_kv", "opaque", "rotating") or held.capacity == 0:
        return 0
    after = _appended(held, n)
    if held.kind == "concatenate":
        return held.capacity * row_nbytes(held)
    if held.kind == "chunked" and 0 < held.max_size < held.rows:
        return (held.capacity + after.capacity - held.max_size) * row_nbytes(held)
    if after.capacity == held.capacity:
        return 0
    kept = held.capacity if held.rows % STEP == 0 else held.rows
    return (held.capacity + after.capacity - kept) * row_nbytes(held)


def peak_of_action(layers: Sequence[Held], action: Action) -> int:
    """Most bytes allocated at any moment while ``action`` is carried out, an upper bound.

    Part by part and layer by layer: all layers before the part, plus what converting the largest one needs.
    """
    now, peak = tuple(layers), nbytes_allocated(layers)
    for part in action.parts:
        after = after_action(now, part)
        transient = max((_transient(a, b) for a, b in zip(now, after, strict=True)), default=0)
        peak = max(peak, nbytes_allocated(now) + transient)
        now = after
    return peak


def transient_of_action(held: Held, action: Action) -> int:
    """Bytes needed beside one layer while ``action`` is carried out on it, an upper bound."""
    most = 0
    for part in action.parts:
        [after] = after_action([held], part)
        most, held = max(most, _transient(held, after)), after
    return most


def _transient(before: Held, after: Held) -> int:
    """The new buffers, and all rows decoded or cut free of slack where they are packed."""
    if before == after:
        return 0
    one = replace(after, count=1)
    cut = before.bits is not None or before.capacity > before.rows
    dense = (before.key_width + before.value_width) * before.itemsize * before.rows
    return nbytes_allocated([one]) + (dense if cut and after.bits != before.bits else 0)


def most_rows_within(
    layers: Sequence[Held],
    nbytes: int,
    *,
    then: Callable[[tuple[Held, ...]], tuple[Held, ...]],
    quantize: Quantize | None = None,
) -> int:
    """The most rows per layer that, after ``then`` (for example the next step), stay within ``nbytes`` allocated bytes.

    With ``quantize`` the rows are re-encoded as well. 0 when not even one row fits.
    """
    low, high = 0, max((one.rows for one in layers if one.changeable), default=0)
    while low < high:
        rows = (low + high + 1) // 2
        cut = tuple(
            replace(one, rows=min(rows, one.rows), capacity=min(rows, one.rows)) if one.changeable else one
            for one in layers
        )
        if quantize is not None:
            cut = after_action(cut, quantize)
        if nbytes_allocated(then(cut)) <= nbytes:
            low = rows
        else:
            high = rows - 1
    return low
