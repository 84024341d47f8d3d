"""Bytes, before they are spent: what a cache holds, and what it would hold after an action and the next tokens.

Everything here is arithmetic on values. A layer is described by :class:`Held`, taken from real arrays or from a probe
of the model (never from ``2·layers·heads·dim``: latent attention, borrowed K/V and windows break that formula). The
growth rules are those of mlx-lm's cache classes, followed exactly: buffers grow in steps of 256 rows, a sliding window
holds ``max_size + chunk − 1`` rows after a chunk, packed rows carry their scales and biases. What a step or an action
takes for a while beside what is held is in :mod:`lumina_cache.transient`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .actions import (
    Action,
    Evict,
    Keep,
    Merge,
    Offload,
    Page,
    Plan,
    Quantize,
    Reclaim,
    Reserve,
)
from .backend.capabilities import KEYS, VALUES
from .codecs import AffineFetch, Codec, Layout
from .codecs.base import STEP, grown_capacity
from .evolve import evolve
from .rows import DRIFT_ROWS, Pinned
from .scorers import SCORERS
from .scorers.banked import BANKED

__all__ = [
    "Held",
    "after_action",
    "after_append",
    "applies",
    "carried_out",
    "chunk_schedule",
    "covered",
    "decoding_nbytes",
    "dense_row_nbytes",
    "drift_nbytes",
    "emptied",
    "growth_nbytes",
    "guarded_rows",
    "held_within",
    "kept_of",
    "layout_of",
    "merge_equal",
    "nbytes_allocated",
    "nbytes_live",
    "parts_carried_out",
    "peak_of_action",
    "row_nbytes",
    "rows_left",
    "rows_to_disk",
    "scoring_nbytes",
    "split_kept",
    "tokens_without_growth",
    "transient_of_action",
    "uneven",
    "whole_blocks",
]


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
    layout: Layout = Layout()  #: how the rows are stored
    heads: int = 1  #: B·H
    tail: int = 0  #: rows at the end that are not sealed yet and stay dense; part of ``rows``
    tail_capacity: int = 0  #: rows allocated for them
    on_disk: int = 0  #: rows at the front whose only copy is in a file; part of ``rows``
    head: int = 0  #: first rows that stay dense; part of ``rows``
    evicted: bool = False  #: whether rows were dropped by an action
    max_size: int = 0  #: sliding window, or attention chunk of a chunked layer (rows)
    keep: int = 0  #: rows a sliding window never drops
    fixed_nbytes: int = 0  #: recurrent and convolution state
    count: int = 1  #: how many equal layers this value stands for
    index: int = -1  #: number of the layer in its model; −1 where equal layers were merged
    token_nbytes: float = 0.0  #: of an ``opaque`` layer: bytes that it was seen to grow by per token

    @property
    def changeable(self) -> bool:
        """Whether every action applies: one row per token in a buffer of our own making, and something in it."""
        return self.kind == "kv" and self.rows > 0

    @property
    def bits(self) -> int | None:
        """Fewest bits per element of keys or values; None while both are dense."""
        return self.layout.bits

    @property
    def sealed(self) -> int:
        """Rows in memory that are neither in the dense head nor in the dense tail."""
        return self.rows - self.head - self.tail - self.on_disk

    @property
    def key_dim(self) -> int:
        """Elements per row and head of the keys."""
        return self.key_width // self.heads

    @property
    def value_dim(self) -> int:
        """Elements per row and head of the values."""
        return self.value_width // self.heads


#: Kinds of layers in mlx-lm's own order of rows; they can be encoded row by row, without a dense tail, and nothing else.
LANE_KINDS = ("rotating", "chunked")


def applies(held: Held, part: Action) -> bool:
    """Whether a single action changes the storage of a layer like this."""
    if held.rows == 0 or isinstance(part, Keep):
        return False
    if not isinstance(part, Quantize):
        return held.changeable
    if part.layout is not None and part.layout == held.layout:
        return False  # decoding codes and encoding them again would only add an error
    if held.kind in LANE_KINDS:
        return part.layout is not None and part.layout.row_by_row
    return held.changeable


def emptied(held: Held) -> Held:
    """The same layer before its first token; recurrent state is there from the first token on and stays counted."""
    return evolve(
        held, rows=0, capacity=0, offset=0, tail=0, tail_capacity=0, on_disk=0, head=0, evicted=False
    )


def merge_equal(layers: Iterable[Held]) -> tuple[Held, ...]:
    """The same layers with equal ones counted instead of repeated; a model has few kinds, so sums get cheap."""
    counts: dict[Held, list[Held]] = {}
    for one in layers:
        counts.setdefault(evolve(one, name="", count=1, index=-1), []).append(one)
    return tuple(
        evolve(key, name=same[0].name, count=sum(one.count for one in same)) for key, same in counts.items()
    )


def row_nbytes(held: Held) -> int:
    """Exact bytes of one sealed row (keys and values, all heads) as stored."""
    return held.layout.row_nbytes(held.key_width, held.value_width, held.itemsize)


def dense_row_nbytes(held: Held) -> int:
    """Exact bytes of one dense row (keys and values, all heads)."""
    return (held.key_width + held.value_width) * held.itemsize


def nbytes_allocated(layers: Iterable[Held]) -> int:
    """Bytes of the arrays as allocated, slack included; rows on disk are not in memory and count nothing."""
    return sum(
        one.count
        * (
            one.capacity * row_nbytes(one)
            + (one.head + one.tail_capacity) * dense_row_nbytes(one)
            + _other_nbytes(one)
        )
        for one in layers
    )


def nbytes_live(layers: Iterable[Held]) -> int:
    """Bytes of the rows held in memory, without slack."""
    return sum(
        one.count
        * (one.sealed * row_nbytes(one) + (one.head + one.tail) * dense_row_nbytes(one) + _other_nbytes(one))
        for one in layers
    )


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
        return evolve(held, offset=offset) if held.token_nbytes else held
    if held.kind == "concatenate":
        return evolve(held, rows=held.rows + n, capacity=held.rows + n, offset=offset)
    if held.kind == "chunked" and held.rows > held.max_size > 0:
        # The model drops the front before each step, by a slice without slack.
        held = evolve(held, rows=held.max_size, capacity=held.max_size)
    if held.kind == "chunked":
        capacity = grown_capacity(held.rows, held.capacity, n)
        return evolve(held, rows=held.rows + n, capacity=capacity, offset=offset)
    if held.kind != "rotating":
        first = min(n, held.layout.sinks - held.head) if held.rows == held.head < held.layout.sinks else 0
        tail = held.tail + n - first
        sealed = held.layout.sealable(tail)
        capacity = grown_capacity(held.sealed, held.capacity, sealed)
        return evolve(
            held,
            rows=held.rows + n,
            capacity=capacity,
            offset=offset,
            tail=tail - sealed,
            tail_capacity=held.layout.tail_capacity,
            head=held.head + first,
        )
    if n > 1:
        dropped = max(0, held.rows - held.max_size + 1)
        rows = held.rows - dropped + n
        return evolve(held, rows=rows, capacity=rows, offset=offset)
    capacity = held.capacity
    if held.offset >= capacity and capacity < held.max_size:
        capacity += min(STEP, held.max_size - held.offset)
    capacity = min(capacity, held.max_size)
    return evolve(held, rows=min(offset, capacity), capacity=capacity, offset=offset)


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
    if held.layout.unit > 1:
        # Rows go to the tail, which does not grow, until a whole unit is sealed behind the sealed ones.
        units = (held.capacity - held.sealed) // held.layout.unit
        return (units + 1) * held.layout.unit + held.layout.residual - 1 - held.tail
    return held.capacity - held.sealed


def after_action(layers: Iterable[Held], action: Action, pinned: Pinned = ()) -> tuple[Held, ...]:
    """The same layers after ``action``, before the next token. Layers that actions do not apply to stay as they are.

    Args:
        pinned: ranges of absolute positions (first, end), end excluded, whose rows are not evicted.
    """
    layers = tuple(layers)
    if isinstance(action, Plan):
        _require_numbers(layers, action)
        return tuple(
            one for layer in layers for one in after_action([layer], action.for_layer(layer.index), pinned)
        )
    for part in action.parts:
        layers = tuple(_acted(one, part, pinned) if applies(one, part) else one for one in layers)
    return layers


def _require_numbers(layers: Iterable[Held], plan: Plan) -> None:
    if any(one.index < 0 for one in layers):
        raise ValueError(f"{plan} names layers, so layers must not be merged: pass one Held per layer")


def _acted(held: Held, action: Action, pinned: Pinned) -> Held:
    match action:
        case Keep():
            return held
        case Reclaim():
            return evolve(held, capacity=held.sealed)
        case Reserve():
            return evolve(held, capacity=max(held.capacity, whole_blocks(action.rows, held.layout.block)))
        case Page():
            return evolve(held, capacity=-(-held.rows // action.rows) * action.rows)
        case Merge():
            # Two layers share one direction per row; their norms, one element per head, are left out.
            return evolve(
                held, capacity=held.rows, key_width=held.key_width // 2, value_width=held.value_width // 2
            )
        case Offload():
            return _offloaded(held, action)
        case Evict():
            return _evicted(held, action, pinned)
        case Quantize():
            return _reencoded(held, layout_of(action))
    raise TypeError(f"no byte formula for {action!r}")


def layout_of(action: Quantize) -> Layout:
    """How rows are stored after ``action``; of a codec that there is no code for, as many affine bits."""
    return action.layout or Layout(
        AffineFetch(action.key_bits, action.group_size), AffineFetch(action.value_bits, action.group_size)
    )


def _offloaded(held: Held, action: Offload) -> Held:
    if action.layers is not None and held.index < 0:
        raise ValueError(f"{action} names layers, so layers must not be merged: pass one Held per layer")
    if action.layers is not None and not action.layers[0] <= held.index <= action.layers[1]:
        return held
    rows = rows_to_disk(action, held.on_disk + held.sealed, held.layout.block)
    return held if rows <= held.on_disk else _on_disk(held, rows)


def rows_to_disk(action: Offload, sealed: int, block: int) -> int:
    """How many of a layer's sealed rows ``action`` leaves in a file: whole blocks, the oldest ones."""
    stay = 0 if action.ratio is None else round(action.ratio * sealed)
    return (sealed - stay) // block * block


def _on_disk(held: Held, rows: int) -> Held:
    """The same sealed rows with the oldest ``rows`` of them in a file, and no slack."""
    return evolve(held, on_disk=rows, capacity=held.rows - held.head - held.tail - rows)


def _evicted(held: Held, action: Evict, pinned: Pinned) -> Held:
    kept = action.rows_kept(held.rows)
    if kept == held.rows:
        return held
    tail, sealed = kept_of(held, kept, action.sinks, pinned)
    rows = held.head + sealed + tail
    if rows == held.rows:
        return held
    after = evolve(held, rows=rows, tail=tail, on_disk=0, capacity=sealed, evicted=True)
    if held.on_disk == 0:
        return after
    share = held.on_disk / (held.on_disk + held.sealed)
    return _on_disk(after, round(share * sealed) // held.layout.block * held.layout.block)


def split_kept(kept: int, rows: int, tail: int, block: int, guarded: int = 0) -> tuple[int, int]:
    """Of ``kept`` rows, how many are of the dense tail and how many sealed ones.

    The newest rows stay, and sealed ones in whole blocks; but room for the ``guarded`` sealed rows comes before the
    tail's. At least one block stays where there is no tail.
    """
    in_tail = min(kept, tail)
    sealed = (kept - in_tail) // block * block
    wanted = min(guarded, rows - tail)
    if sealed < wanted <= kept:
        in_tail = min(tail, kept - wanted)
        sealed = (kept - in_tail) // block * block
    return (in_tail, sealed) if in_tail + sealed else (0, block)


def guarded_rows(sinks: int, pinned: Pinned, sealed_to: int, block: int, head: int = 0) -> int:
    """Sealed rows that must not be evicted: whole blocks that sinks or pinned positions below ``sealed_to`` lie in.

    Blocks are counted from position ``head`` on, where sealed rows begin.
    """
    sealed_to -= head
    spans = []
    for first, end in ((0, sinks), *pinned):
        first, end = max(0, first - head), min(end - head, sealed_to)
        if first < end:
            spans.append((first // block, -(-end // block)))
    return covered(spans) * block


def covered(ranges: Iterable[tuple[int, int]]) -> int:
    """How many numbers lie in at least one of the ranges (first, end), end excluded."""
    total = reached = 0
    for first, end in sorted(ranges):
        total += max(0, end - max(first, reached))
        reached = max(reached, end)
    return total


def held_within(pinned: Pinned, layers: Iterable[Held]) -> int:
    """Rows that ``pinned`` keeps from eviction, of those seen so far."""
    seen = max((one.offset for one in layers if one.changeable), default=0)
    return covered((first, min(end, seen)) for first, end in pinned)


def whole_blocks(rows: int, block: int) -> int:
    """``rows`` rounded up to whole blocks."""
    return -(-rows // block) * block


def kept_of(held: Held, kept: int, sinks: int, pinned: Pinned) -> tuple[int, int]:
    """:func:`split_kept` for what a layer holds, with its blocks of sinks and pinned rows guarded; the head stays."""
    block, head = held.layout.block, held.head
    guarded = guarded_rows(sinks, pinned, held.offset - held.tail, block, head)
    return split_kept(max(0, kept - head), held.rows - head, held.tail, block, guarded)


def uneven(layers: Iterable[Held]) -> tuple[Held, ...]:
    """The layers, if one eviction may leave them with different numbers of rows; none if it cannot.

    Rows that are encoded several together go in whole blocks, and those of other layers one by one.
    """
    changeable = [one for one in layers if one.changeable]
    if len({(one.layout.block, one.rows, one.head, one.tail) for one in changeable}) < 2:
        return ()
    return tuple(changeable) if any(one.layout.block > 1 for one in changeable) else ()


def rows_left(layers: Iterable[Held], action: Evict, pinned: Pinned = ()) -> set[int]:
    """The numbers of rows that an eviction leaves layers with."""
    return {after_action([one], action, pinned)[0].rows for one in layers}


def _reencoded(held: Held, layout: Layout) -> Held:
    if held.kind in LANE_KINDS:
        return evolve(held, layout=layout)
    head = min(layout.sinks, held.rows)
    sealed = layout.sealable(held.rows - head)
    after = evolve(
        held,
        layout=layout,
        on_disk=0,
        capacity=sealed,
        head=head,
        tail=held.rows - head - sealed,
        tail_capacity=layout.tail_capacity,
    )
    if held.on_disk == 0:
        return after
    return _on_disk(after, round(held.on_disk / held.rows * sealed) // layout.block * layout.block)


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
    kept = held.capacity if held.sealed % STEP == 0 else held.sealed
    return (held.capacity + after.capacity - kept) * row_nbytes(held)


def peak_of_action(layers: Sequence[Held], action: Action, pinned: Pinned = ()) -> int:
    """Most bytes allocated at any moment while ``action`` is carried out, an upper bound."""
    return carried_out(layers, action, pinned)[1]


def carried_out(layers: Sequence[Held], action: Action, pinned: Pinned = ()) -> tuple[tuple[Held, ...], int]:
    """The layers after ``action``, and the most bytes allocated on the way there, an upper bound.

    Part by part and layer by layer: all layers before the part, plus what converting the largest one needs. A plan goes
    layer by layer, and within a layer part by part.
    """
    now = tuple(layers)
    if isinstance(action, Plan):
        after = after_action(now, action, pinned)
        beside = [transient_of_action(one, action.for_layer(one.index), pinned) for one in now]
        return after, _worst(now, after, beside)
    return parts_carried_out(now, action.parts, pinned)


def parts_carried_out(
    layers: tuple[Held, ...], parts: Iterable[Action], pinned: Pinned = ()
) -> tuple[tuple[Held, ...], int]:
    """:func:`carried_out` for single actions, one after the other."""
    now, peak = layers, nbytes_allocated(layers)
    for part in parts:
        after = after_action(now, part, pinned)
        beside = [_transient(a, b, part) for a, b in zip(now, after, strict=True)]
        peak = max(peak, _worst(now, after, beside))
        now = after
    return now, peak


def _worst(before: Sequence[Held], after: Sequence[Held], beside: Sequence[int]) -> int:
    """The largest transient while all other layers are as before, or, where they grow, as afterwards.

    Args:
        beside: bytes that one of the layers needs beside it meanwhile.
    """
    sizes = [(nbytes_allocated([a]), nbytes_allocated([b])) for a, b in zip(before, after, strict=True)]
    first, last = sum(a for a, _ in sizes), sum(b for _, b in sizes)
    most = max(first, last)
    for one, (was, now), transient in zip(before, sizes, beside, strict=True):
        own = was // one.count
        others = max(first - own, last - now // one.count)
        most = max(most, others + own + transient)
    return most


def transient_of_action(held: Held, action: Action, pinned: Pinned = ()) -> int:
    """Bytes needed beside one layer while ``action`` is carried out on it, an upper bound."""
    most = 0
    for part in action.parts:
        [after] = after_action([held], part, pinned)
        most, held = max(most, _transient(held, after, part)), after
    return most


def _transient(before: Held, after: Held, action: Action) -> int:
    """Bytes that exist at the worst moment beside one layer as it was."""
    if before == after:
        return 0
    scoring = scoring_nbytes(before, action) if isinstance(action, Evict) else 0
    return max(scoring, _moving(before, after))


#: Arrays of one number per row and head that choosing takes: positions, scores, ranks, what is protected.
_RANKING = 12


def scoring_nbytes(held: Held, action: Evict) -> int:
    """What a scorer makes of the rows before any is copied."""
    ranking = _RANKING * held.heads * held.rows * 4
    banked = BANKED.get(action.scorer)
    scorer = SCORERS.get(action.scorer) or banked
    if scorer is None or not scorer.reads_rows:
        return ranking
    copies = scorer.copies + (len({KEYS, VALUES} & scorer.method.requires) if held.itemsize != 4 else 0)
    side = max(held.key_width, held.value_width) * held.rows * 4
    scratch = 0 if banked is None else banked.scratch
    nbytes: int = decoding_nbytes(held, held.rows) + ranking + round(copies * side) + scratch
    return nbytes


def decoding_nbytes(held: Held, rows: Any) -> Any:
    """All ``rows`` rows dense, where they do not lie there as they are: read, decoded, and a decoded side joined to the
    tail. Also of arrays of row counts."""
    if held.layout.dense and not held.on_disk:
        return 0
    read = (2 * held.on_disk + held.sealed) * row_nbytes(held) if held.on_disk else 0
    side = max(held.key_width, held.value_width) * rows
    # mlx decodes affine codes on the CPU by a multiplication and an addition in float32.
    scratch = side * 4 * (1 if held.itemsize == 4 else 2)
    return dense_row_nbytes(held) * rows + read + scratch


def _moving(before: Held, after: Held) -> int:
    """New buffers, and what they are made by way of."""
    if after.layout != before.layout and after.kind == "kv":
        return _conversion(before, after)
    if after.layout != before.layout:
        return _lane_conversion(before, after)
    one = row_nbytes(before)
    # Rows read from their file are joined to those in memory before any is chosen or moved.
    read = (2 * before.on_disk + before.sealed) * one if before.on_disk else 0
    new = nbytes_allocated([_in_memory(after)])
    if after.on_disk <= before.on_disk and not after.evicted:
        return new + read
    # Writing copies one array at a time, and what stays is copied out of the buffers that held everything.
    rest = nbytes_allocated([evolve(after, count=1)])
    if after.on_disk and after.rows == before.rows:
        return read + max(rest, after.on_disk * one)
    return max(read + new, new + rest + after.on_disk * one if after.on_disk else 0)


def _in_memory(held: Held) -> Held:
    """One such layer with the rows in its file brought back."""
    return evolve(held, on_disk=0, capacity=held.capacity + held.on_disk, count=1)


def _conversion(before: Held, after: Held) -> int:
    """Keys first, then values: new codes beside the dense rows that they are made of, and then the drift of both."""
    whole = _in_memory(after)
    size, rows = before.itemsize, whole.sealed
    keys, values = before.key_width * size * rows, before.value_width * size * rows
    new_keys = rows * whole.layout.keys.row_nbytes(whole.key_width, size)
    new = nbytes_allocated([whole])
    if before.layout.dense and not before.on_disk:
        # Dense rows are only copied where they are cut from a longer buffer.
        cut = int(before.capacity > rows)
        first = new_keys + cut * keys + _scratch(after.layout.keys, before.key_width * rows)
        second = new + cut * values + _scratch(after.layout.values, before.value_width * rows)
        worst = max(first, second)
    else:
        # All rows are decoded before the first is encoded.
        side = max(before.key_width, before.value_width) * before.rows
        copies = max(after.layout.keys.copies, after.layout.values.copies)
        worst = new + decoding_nbytes(before, before.rows) + round(copies * side * 4)
    worst = max(worst, new + drift_nbytes(before, rows))
    if after.on_disk:
        rest = nbytes_allocated([evolve(after, count=1)])
        worst = max(worst, new + rest + after.on_disk * row_nbytes(after))
    return worst


def _lane_conversion(before: Held, after: Held) -> int:
    """The whole buffers are encoded as they are, slack included."""
    new = nbytes_allocated([evolve(after, count=1)])
    side = max(before.key_width, before.value_width) * before.capacity
    decoded = 0 if before.layout.dense else dense_row_nbytes(before) * before.capacity
    return new + decoded + _scratch(after.layout.keys, side) + drift_nbytes(before, before.capacity)


def _scratch(codec: Codec, elements: int) -> int:
    """Bytes of float32 copies that encoding ``elements`` elements makes beside them."""
    return round(codec.copies * elements * 4)


def drift_nbytes(held: Held, rows: int) -> int:
    """Four float32 arrays of the rows that are compared, and one in the rows' own type if that is another."""
    width = max(held.key_width, held.value_width)
    return min(rows, DRIFT_ROWS) * width * (16 + (held.itemsize if held.itemsize != 4 else 0))
