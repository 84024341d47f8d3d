"""Bytes of a simulated cache, by the estimator's arithmetic over what each layer would hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...estimate import Held, nbytes_allocated, nbytes_live
from ...evolve import evolve
from ..evaluate.storage import stored
from .fetch import PAGE
from .held import Group, LayerRows

__all__ = ["Analytic", "bytes_of"]

_SIXTEEN_BITS = 2


@dataclass(frozen=True)
class Analytic:
    """Bytes for the rows held (live) and with the slack of growth (allocated); ``…16`` with floats at two bytes."""

    live: int
    allocated: int
    live16: float
    allocated16: int


def bytes_of(layers: Iterable[tuple[Any, LayerRows | Held | None]]) -> Analytic:
    """Of pairs of a layer of the full cache and what is left of it; None where it stays as it is, and is measured."""
    live = allocated = allocated16 = 0
    live16 = 0.0
    for layer, left in layers:
        if left is None:
            now = stored([layer])
            live, allocated = live + now.live, allocated + now.allocated
            live16, allocated16 = live16 + now.live16, allocated16 + now.allocated16
            continue
        for one in (left,) if isinstance(left, Held) else _parts(left):
            in_16_bits = evolve(one, itemsize=_SIXTEEN_BITS)
            live, allocated = live + nbytes_live([one]), allocated + nbytes_allocated([one])
            live16, allocated16 = (
                live16 + nbytes_live([in_16_bits]),
                allocated16 + nbytes_allocated([in_16_bits]),
            )
    return Analytic(live, allocated, live16, allocated16)


def _parts(rows: LayerRows) -> Iterator[Held]:
    for group in rows.groups:
        yield from _of_group(group, rows)


def _of_group(group: Group, rows: LayerRows) -> Iterator[Held]:
    storage = group.storage
    if group.coarse is not None:
        n = group.coarse.rows
        yield evolve(
            storage,
            layout=group.coarse.layout,
            rows=n,
            capacity=n,
            head=0,
            tail=0,
            tail_capacity=0,
            fixed_nbytes=0,
        )
        storage = evolve(storage, rows=storage.rows - n, capacity=storage.capacity - n)
    if rows.fetched is None:
        yield storage
        return
    # Rows that are not fetched are in a file, as far as memory goes.
    pages = storage.sealed // rows.fetched.page
    away = max(0, pages - rows.fetched.count) * rows.fetched.page
    yield evolve(storage, on_disk=away, capacity=storage.sealed - away)
    if rows.fetched.how == "quest":
        # Two keys per page, as dense rows without values.
        bounds = 2 * (storage.sealed // PAGE)
        dense = type(storage.layout)()
        yield evolve(
            storage,
            layout=dense,
            rows=bounds,
            capacity=bounds,
            value_width=0,
            head=0,
            tail=0,
            tail_capacity=0,
        )
