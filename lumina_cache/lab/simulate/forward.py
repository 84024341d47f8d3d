"""One forward of the scored tokens over a full cache, with what an action leaves of each layer imposed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import cache as stock

from ...backend.attention import Observer, attention_hook
from ...backend.hookable import Hookable, hookable
from ...codecs import Layout
from ...errors import SimulationError
from ...estimate import Held
from ...export import to_mlx
from ...layers import KVCache, leaves
from ..compare import log_softmax
from ..evaluate.measure import Bench
from .held import LayerRows, of_layer, round_trip
from .impose import ImposedChunk, ImposedLayer, ImposedServer, ImposedWindow

__all__ = ["Forward", "Left"]

#: What is left of a layer: of one that holds a row per token, of a sliding window; None where it is as it was.
Left = LayerRows | Held | None

_SERVER = ImposedServer()


class Forward:
    """The full cache of a bench, fed all scored tokens at once. Its layers are only read."""

    def __init__(self, bench: Bench) -> None:
        """
        Raises:
            SimulationError: the full cache was changed by an action.
        """
        self._bench = bench
        self.full = tuple(leaves(list(bench.full)))
        if any(getattr(layer, "changed", False) for layer in self.full):
            raise SimulationError(
                "the bench's full cache was changed by an action; simulate on an unchanged one"
            )

    @cached_property
    def row_layers(self) -> tuple[KVCache, ...]:
        """The layers that hold a row for each token."""
        return tuple(layer for layer in self.full if isinstance(layer, KVCache) and layer.rows > 0)

    def why_not(self, layer: KVCache) -> str | None:
        """Why nothing can be imposed on the attention of ``layer``; None if it can."""
        reached = _reached(self._bench.model)
        one = next((one for one in reached.layers if one.name == layer.name), None)
        if one is None or not reached.sites:
            return "its attention is not seen"
        return one.reason or (None if one.direct else "attention reads other arrays than the layer's own")

    def logprobs(self, left: Sequence[Left], watch: Observer | None = None) -> mx.array:
        """Log-probabilities (N, V) after each fed token, evaluated; ``watch`` is shown the attention meanwhile.

        Args:
            left: one for each of :attr:`full`.
        """
        of = {id(layer): one for layer, one in zip(self.full, left, strict=True)}
        cache = [_rebuilt(one, lambda leaf: self._entry(leaf, of[id(leaf)])) for one in self._bench.full]
        with attention_hook(self._bench.model) as hook:
            for leaf in leaves(cache):
                if isinstance(leaf, ImposedLayer):
                    hook.serve(leaf, _SERVER)
                    if watch is not None:
                        hook.observe(leaf, watch)
            logits = self._bench.model(mx.array(self._bench.task.fed)[None], cache=cache)
            found = log_softmax(logits[0])
            mx.eval(found)
        return found

    def _entry(self, leaf: Any, left: Left) -> Any:
        """A cache object for one forward."""
        if isinstance(left, Held):
            return _lane(leaf, left.layout)
        if isinstance(leaf, KVCache) and leaf.rows > 0 and self.why_not(leaf) is None:
            rows = of_layer(leaf, None) if left is None or left.whole else left
            return ImposedLayer(leaf.name, leaf.rows, rows, len(self._bench.task.fed), self._bench.plan.block)
        return _copy(leaf)


def _rebuilt(entry: Any, make: Callable[[Any], Any]) -> Any:
    """``entry`` with each cache object in it made anew."""
    if isinstance(entry, stock.CacheList):
        return stock.CacheList(*(_rebuilt(child, make) for child in entry.caches))
    return make(entry)


def _copy(leaf: Any) -> Any:
    """A plain mlx-lm object with the contents of ``leaf`` in arrays of its own."""
    plain = to_mlx(leaf)
    for name, value in vars(plain).items():
        if isinstance(value, mx.array | list | tuple):
            setattr(plain, name, tree_map(lambda a: a + 0 if isinstance(a, mx.array) else a, value))
    return plain


def _lane(leaf: Any, layout: Layout) -> Any:
    """The same, of a sliding window or attention chunk whose rows are stored in ``layout``."""
    plain = _copy(leaf)
    kind: Any = ImposedWindow if isinstance(plain, stock.RotatingKVCache) else ImposedChunk
    made = kind.__new__(kind)
    made.__dict__.update(plain.__dict__)
    made.layout = layout
    made.keys, made.values = round_trip(layout, plain.keys, plain.values)
    return made


_remembered: dict[int, tuple[weakref.ref[Any], Hookable]] = {}


def _reached(model: Any) -> Hookable:
    """What a hook reaches of ``model``, found once per live model."""
    alive, known = _remembered.get(id(model), (None, None))
    if known is None or alive is None or alive() is not model:
        known = hookable(model)
        key = id(model)
        _remembered[key] = (weakref.ref(model, lambda _: _remembered.pop(key, None)), known)
    return known
