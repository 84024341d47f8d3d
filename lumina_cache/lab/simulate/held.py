"""What an action leaves of one layer's rows: a value, while the layer's own rows stay whole.

The rows of a layer's K/V heads are kept in *groups* of neighbouring heads that hold the same number of rows, one group
until something leaves heads with different numbers. A group says which rows are left, and what attention would read for
them: decoded codes for the rows that are encoded, the rows themselves for the dense first and newest ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from ...apply import held
from ...codecs import Layout
from ...estimate import Held
from ...evolve import evolve
from ...layers import KVCache
from ...seen import Seen

__all__ = [
    "Coarse",
    "Fetched",
    "Group",
    "LayerRows",
    "mixed",
    "of_layer",
    "reencoded",
    "round_trip",
    "selected",
    "split_heads",
]


@dataclass(frozen=True)
class Coarse:
    """Some of the sealed rows are stored in another layout than those to come: how many of each head, and which."""

    rows: int
    layout: Layout


@dataclass(frozen=True)
class Group:
    """Rows of the K/V heads [first, end) of a layer; each head holds the same number."""

    first: int
    end: int
    positions: mx.array  #: (1, h, R) int32, ascending
    keys: mx.array  #: (1, h, R, D) as attention reads them
    values: mx.array  #: (1, h, R, Dv)
    storage: Held  #: the same as numbers; its layout is that of rows to come
    encoded: bool = False  #: whether keys or values differ from the layer's own anywhere
    coarse: Coarse | None = None

    @property
    def heads(self) -> int:
        return self.end - self.first

    @property
    def rows(self) -> int:
        return int(self.positions.shape[2])

    @property
    def layout(self) -> Layout:
        return self.storage.layout

    @property
    def tail(self) -> int:
        """Newest rows that are dense and will be sealed when more come."""
        return self.storage.tail

    @property
    def head(self) -> int:
        """First rows that stay dense."""
        return self.storage.head


@dataclass(frozen=True)
class Fetched:
    """Only some of the sealed rows are read per step: ``how`` they are chosen, and how many (pages or rows)."""

    how: str  #: ``quest`` or ``step``
    count: int
    page: int = 1


@dataclass(frozen=True)
class LayerRows:
    """All groups of one layer."""

    name: str
    groups: tuple[Group, ...]
    seen: Seen | None = None  #: what was seen of the attention over these rows
    fetched: Fetched | None = None

    @property
    def whole(self) -> bool:
        """Whether attention reads what it would read of the full cache."""
        return self.fetched is None and not any(
            g.encoded or g.storage.evicted or not g.layout.dense for g in self.groups
        )

    @property
    def layout(self) -> Layout:
        return self.groups[0].layout


def of_layer(layer: KVCache, seen: Seen | None) -> LayerRows:
    """The rows of an unchanged layer that holds some."""
    keys, values = layer.dense_rows()
    heads, rows = keys.shape[1:3]
    positions = mx.broadcast_to(mx.arange(rows, dtype=mx.int32), (1, heads, rows))
    return LayerRows(layer.name, (Group(0, heads, positions, keys, values, held(layer)),), seen)


def selected(group: Group, index: mx.array, storage: Held) -> Group:
    """Only the rows at ``index`` (1, h, R') int32, ascending; ``storage`` says what is then stored."""
    where = index[..., None]
    return replace(
        group,
        positions=mx.take_along_axis(group.positions, index, axis=2),
        keys=mx.take_along_axis(group.keys, where, axis=2),
        values=mx.take_along_axis(group.values, where, axis=2),
        storage=storage,
    )


def split_heads(group: Group) -> list[Group]:
    """One group for each head, with its share of the storage."""
    one = group.storage
    share = evolve(
        one,
        heads=one.heads // group.heads,
        key_width=one.key_width // group.heads,
        value_width=one.value_width // group.heads,
    )
    return [
        replace(
            group,
            first=group.first + i,
            end=group.first + i + 1,
            positions=group.positions[:, i : i + 1],
            keys=group.keys[:, i : i + 1],
            values=group.values[:, i : i + 1],
            storage=share,
        )
        for i in range(group.heads)
    ]


def round_trip(layout: Layout, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Rows (B, H, T, D), T a multiple of the layout's block, as they come back from being stored."""
    return (
        layout.keys.decode(layout.keys.encode(keys), keys.dtype),
        layout.values.decode(layout.values.encode(values), values.dtype),
    )


def reencoded(group: Group, layout: Layout) -> Group:
    """All rows stored in ``layout``: sealed ones in whole units, the first and the newest dense."""
    head = min(layout.sinks, group.rows)
    sealed = layout.sealable(group.rows - head)
    storage = evolve(
        group.storage,
        layout=layout,
        capacity=sealed,
        head=head,
        tail=group.rows - head - sealed,
        tail_capacity=layout.tail_capacity,
    )
    if not sealed:
        return replace(group, storage=storage)
    middle = slice(head, head + sealed)
    keys, values = round_trip(layout, group.keys[:, :, middle], group.values[:, :, middle])
    return replace(
        group,
        keys=_with_middle(group.keys, keys, middle),
        values=_with_middle(group.values, values, middle),
        storage=storage,
        encoded=group.encoded or not layout.dense,
    )


def mixed(group: Group, coarse: Layout, fine: Layout, important: mx.array) -> Group:
    """Sealed rows stored in ``coarse``, but those at ``important`` (1, h, n) int32 in ``fine``, as rows to come are.

    Args:
        important: numbers of rows, counted among the sealed ones; both layouts encode row by row and seal alike.
    """
    whole = reencoded(group, fine)
    rough = reencoded(group, coarse)
    sealed = group.rows - whole.head - whole.tail
    chosen = mx.put_along_axis(
        mx.zeros((1, group.heads, group.rows), mx.bool_), important + whole.head, mx.array(True), axis=2
    )[..., None]
    return replace(
        whole,
        keys=mx.where(chosen, whole.keys, rough.keys),
        values=mx.where(chosen, whole.values, rough.values),
        coarse=Coarse(sealed - int(important.shape[2]), coarse),
    )


def _with_middle(rows: mx.array, middle: mx.array, where: slice) -> mx.array:
    pieces = [rows[:, :, : where.start], middle, rows[:, :, where.stop :]]
    return mx.concatenate([p for p in pieces if p.shape[2]], axis=2)
