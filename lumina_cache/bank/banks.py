"""The query bank of a live model, looked up when it is first asked for and shared by all caches of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import QueryBankError
from ..fingerprint import remembered_fingerprint
from ..scorers.observed import Rotation
from .home import find_bank, required_for
from .statistics import LayerStatistics, QueryBank

__all__ = ["NO_BANK", "Banks", "Foreseen", "banks_of"]

#: Why rows cannot be ranked by what queries are usually like.
NO_BANK = "no query bank of this model was found; lumina-cache calibrate-queries --model … captures one"

#: Largest difference, as a share of the largest element, between queries turned when captured and now.
SAME = 1e-3


@dataclass(frozen=True)
class Foreseen:
    """The queries of one layer, and the model's own way to rotate them to where they are expected."""

    statistics: LayerStatistics
    rotation: Rotation

    def ahead(self, position: int, width: int) -> mx.array:
        """The bank's queries (1, Hq, N, D) float32, turned to positions spread evenly over ``width`` from ``position`` on.

        More queries than positions are as many at each.
        """
        queries = self.statistics.queries
        heads, n, dim = queries.shape
        rounds = -(-n // width)
        each = -(-n // rounds)  # queries in a round, no more than positions
        padded = mx.pad(queries, [(0, 0), (0, rounds * each - n), (0, 0)])
        # (rounds, Hq, each, D): neighbours in the bank go to different rounds, so that each is a sample of all.
        apart = padded.reshape(heads, each, rounds, dim).transpose(2, 0, 1, 3)
        places = mx.arange(each) * width // each
        rows = mx.zeros((rounds, heads, width, dim))
        rows[:, :, places] = apart
        turned = self.rotation(rows, position)[:, :, places].transpose(1, 2, 0, 3)
        return turned.reshape(1, heads, rounds * each, dim)[:, :, :n]


class Banks:
    """What is known of one model's queries. Not a value: it looks for the bank once, when it is first needed."""

    def __init__(self, model: Any) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)
        self._found: dict[str, Foreseen] | None = None
        self._refused: dict[str, str] = {}
        self._none: str = NO_BANK

    def __deepcopy__(self, memo: dict[int, Any]) -> Banks:
        return self

    def of(self, name: str) -> Foreseen | None:
        """What is known of the layer of that name; None where :meth:`why_not` says why."""
        return self._layers().get(name)

    @property
    def lacking(self) -> str | None:
        """Why there is nothing of any layer; None if there is."""
        return None if self._layers() or self._refused else self._none

    def why_not(self, name: str) -> str | None:
        """Why nothing is known of the queries of the layer ``name``; None if they are known."""
        if name in self._layers():
            return None
        return self._refused.get(name, self._none)

    def give(self, bank: QueryBank) -> None:
        """Use ``bank`` from now on, instead of what would be found.

        Raises:
            QueryBankError: it was captured from another model.
        """
        model = self._model()
        self._take(model, required_for(bank, remembered_fingerprint(model), "this query bank"))

    def forget(self) -> None:
        """Look again when next asked: a bank was captured since."""
        self._found, self._refused, self._none = None, {}, NO_BANK

    def _layers(self) -> dict[str, Foreseen]:
        if self._found is None:
            self._found = {}
            model = self._model()
            try:
                bank = find_bank(remembered_fingerprint(model))
            except QueryBankError as error:
                self._none = str(error)
            except (AttributeError, TypeError, ValueError):
                self._none = "nothing tells which model this is, so no query bank can be its own"
            else:
                if bank is not None:
                    self._take(model, bank)
        return self._found

    def _take(self, model: Any, bank: QueryBank) -> None:
        self._found, self._refused = {}, dict(bank.refused)
        self._none = "the query bank of this model holds nothing of it"
        modules = dict(model.named_modules())
        for name, one in bank.layers.items():
            rotation = modules.get(one.rotation)
            why = _why_another(one, rotation)
            if why is None:
                assert rotation is not None
                self._found[name] = Foreseen(one, rotation)
            else:
                self._refused[name] = why


def _why_another(one: LayerStatistics, rotation: Rotation | None) -> str | None:
    """Why ``rotation`` is not what turned the queries when they were captured; None if it does the same."""
    if rotation is None:
        return f"the model has no module {one.rotation!r}, which rotated its queries when they were captured"
    now = rotation(one.queries[None, :1, :1], one.turned_at)[0, 0, 0]
    if (mx.abs(now - one.turned).max() <= SAME * mx.abs(one.turned).max()).item():
        return None
    return f"{one.rotation} rotates otherwise than when the queries were captured: capture them again"


_remembered: dict[int, tuple[weakref.ref[Any], Banks]] = {}


def banks_of(model: Any) -> Banks | None:
    """The one object for ``model``, as long as it lives; None for what cannot be referred to weakly."""
    key = id(model)
    alive, banks = _remembered.get(key, (None, None))
    if banks is None or alive is None or alive() is not model:
        try:
            alive = weakref.ref(model, lambda _: _remembered.pop(key, None))
        except TypeError:
            return None
        banks = Banks(model)
        _remembered[key] = alive, banks
    return banks
