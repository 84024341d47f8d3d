"""From the attention hook to the scorers that need queries: what is seen of each layer, kept as statistics.

>>> watch = ScorerObserver(SnapKV())
>>> with attention_hook(model) as hook:
...     for layer in cache:
...         hook.observe(layer, watch)
...     model(tokens, cache=cache)
...     scores = watch.scores(layer, keys, values, positions)
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..errors import ObservationError
from ..layers import ManagedLayer, adopt, managed
from ..scorers.observed import Attended, ObservedScorer, Rotation, Statistics
from ..scorers.observed.expected_attention import turned_back
from ..steps import StepTracker
from .attention import attention_hook
from .bench import FILLED, forward

__all__ = ["ScorerObserver", "attended", "rotations"]

#: Largest difference, as a share of the largest element, between queries and the same ones turned and turned back.
SAME = 1e-3


#: Kinds of layers that add new rows behind those they hold.
_GROWING = ("kv", "concatenate", "quantized")


class ScorerObserver:
    """Keeps one scorer's statistics of every layer it observes; holds the layers weakly."""

    def __init__(self, scorer: ObservedScorer, rotations: Mapping[str, Rotation] | None = None) -> None:
        """``rotations``: by the layer's name, for scorers that need them (:func:`rotations`)."""
        self.scorer = scorer
        self._rotations = dict(rotations or {})
        self._stats: weakref.WeakKeyDictionary[ManagedLayer, Statistics] = weakref.WeakKeyDictionary()

    def observe(
        self,
        layer: Any,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> tuple[mx.array, ...]:
        if layer.kind not in _GROWING:
            raise ObservationError(
                f"{layer.name} is a {type(layer).__name__}, whose rows change places as it runs; observe only layers of "
                f"the kinds {', '.join(_GROWING)}"
            )
        rotation = self._rotations.get(layer.name)
        seen = attended(layer, queries, keys, scale, mask, sinks, rotation)
        stats = self._stats[layer] = self.scorer.update(self._stats.get(layer), seen)
        return stats.arrays

    def statistics(self, layer: ManagedLayer) -> Statistics | None:
        """What was seen of ``layer``; None if nothing was."""
        return self._stats.get(layer)

    def restore(self, layer: ManagedLayer, stats: Statistics | None) -> None:
        """Let ``stats`` be what was seen of ``layer``: of a copy, or of rows read from a file; None forgets."""
        if stats is None:
            self._stats.pop(layer, None)
        else:
            self._stats[layer] = stats

    def gather(self, layer: ManagedLayer, index: mx.array) -> None:
        """Follow an eviction that keeps the rows at ``index`` (B, H, T') int32; evaluates what is left."""
        stats = self._stats.get(layer)
        if stats is not None:
            self._stats[layer] = stats = stats.gather(index)
            mx.eval(stats.arrays)

    def scores(self, layer: ManagedLayer, keys: mx.array, values: mx.array, positions: mx.array) -> mx.array:
        """The scorer's ranking (B, H, T) of the rows of ``layer``, passed in as :meth:`ObservedScorer.scores` has them.

        Raises:
            ObservationError: if nothing was seen of the layer, or not of these rows.
        """
        stats = self._stats.get(layer)
        if stats is None:
            raise ObservationError(
                f"nothing was seen of {layer.name}: open an attention hook and observe it while it runs"
            )
        rows = positions.shape[-1]
        # Tokens taken back since the last step have no rows any more.
        back = stats.end - int(layer.offset)
        if back > 0:
            stats = self.scorer.trim(stats, back)
        if stats.held != rows:
            raise ObservationError(
                f"{layer.name} holds {rows} rows, and the statistics stand for {stats.held}: gather both alike"
            )
        return self.scorer.scores(stats, keys, values, positions, self._rotations.get(layer.name))


def attended(
    layer: Any,
    queries: mx.array,
    keys: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
    rotation: Rotation | None,
) -> Attended:
    """One call, as an observer is shown it, for the scorers; ``layer`` holds the new rows already."""
    (heads, _), _ = layer.shapes
    return Attended(
        queries,
        _dense(layer, keys),
        scale,
        mask,
        int(layer.offset) - queries.shape[2],
        heads // queries.shape[0],
        sinks,
        rotation,
    )


def _dense(layer: Any, rows: Any) -> mx.array:
    """Rows as attention reads them: a layer that hands out packed triples says their layout, as mlx-lm requires."""
    if isinstance(rows, mx.array):
        return rows
    codes, scales, biases = rows
    return mx.dequantize(codes, scales, biases, group_size=layer.group_size, bits=layer.bits)


@dataclass
class _Turned:
    """Finds, for each layer, the module whose return value was handed to attention as queries."""

    called: dict[int, Any] = field(default_factory=dict)  #: x as it was handed in, by the number of the frame
    results: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)  # module, x, offset, result
    found: dict[str, Rotation] = field(default_factory=dict)

    def profile(self, frame: FrameType, event: str, result: Any) -> None:
        if event not in ("call", "return"):
            return
        names = frame.f_locals
        if "offset" in names and isinstance(names.get("self"), nn.Module):
            if event == "call":
                # A rotation that scales as well (YaRN) gives its x another value on the way.
                self.called[id(frame)] = names.get("x")
            else:
                x = self.called.pop(id(frame), None)
                self.results.append((names["self"], x, names["offset"], result))

    def observe(self, layer: ManagedLayer, queries: mx.array, *_: Any) -> tuple[mx.array, ...]:
        for module, x, offset, result in self.results:
            if result is queries and isinstance(x, mx.array) and isinstance(offset, int):
                back = turned_back(queries, offset, module)
                if (mx.abs(back - x).max() <= SAME * mx.abs(x).max()).item():
                    self.found[layer.name] = module
        self.results.clear()
        return ()


def rotations(model: Any) -> dict[str, Rotation]:
    """How each layer of ``model`` rotates its queries, by the layer's name, found by running it on a few tokens.

    Only layers whose queries come straight out of a module that can be seen to turn them, and to turn them back; others
    are left out, and scorers that need a rotation cannot be used on them. Must run in a thread without a profiler.
    """
    turned = _Turned()
    steps = StepTracker(name="probe")
    entries = [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))]
    forward(model, entries, FILLED, 0)
    with attention_hook(model) as hook:
        for layer in (layer for entry in entries for layer in managed(entry)) if hook.sites else ():
            hook.observe(layer, turned)
        before = sys.getprofile()
        sys.setprofile(turned.profile)
        try:
            forward(model, entries, 2, FILLED)
        finally:
            sys.setprofile(before)
            for layer in (layer for entry in entries for layer in managed(entry)):
                hook.release(layer)
    return turned.found
