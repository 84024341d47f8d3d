"""Where one model step ends and the next begins, seen from inside the cache.

A model step asks one or more caches for masks, then updates each K/V layer once, then attends over what the update
returned. Storage may be swapped only between the last attention of one step and the first mask of the next. The cache
is never told about either, so the boundary is inferred: after every K/V layer that this model updates has been
updated, and read again as often as in the step before (layers that borrow another's K/V read it after its update), the
*next touch from outside* (a mask, an update, ``state``, ``nbytes``, ``trim``) is past the last attention.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from .codecs.layout import Layout
from .errors import DiskTierError

if TYPE_CHECKING:
    from .codecs import Affine
    from .layers import KVCache, ManagedLayer

__all__ = ["StepListener", "StepTracker"]


class StepListener(Protocol):
    """Who is told about step boundaries."""

    def step_begins(self, steps: StepTracker, tokens: int) -> None:
        """The boundary before a step of ``tokens`` tokens; rows may be changed now."""

    def step_began(self, steps: StepTracker, tokens: int) -> None:
        """A step of ``tokens`` tokens has begun unnoticed: its mask exists already, so rows must stay as they are."""

    def touched(self, steps: StepTracker) -> None:
        """A touch from outside at a boundary; rows may be changed now."""

    def rows_may_go(self, steps: StepTracker, layer: ManagedLayer) -> bool:
        """Whether rows of ``layer`` may be dropped before the generation ends."""

    def quantize_for_caller(self, steps: StepTracker, layer: KVCache, codec: Affine) -> None:
        """mlx-lm's user gave ``kv_bits``: convert ``layer`` if this model can read packed rows, else say so once."""

    def refuse_for_caller(self, steps: StepTracker, layer: ManagedLayer, codec: Affine, why: str) -> None:
        """mlx-lm's user gave ``kv_bits`` and this layer cannot follow: say so once."""

    def rows_replaced(self, steps: StepTracker) -> None:
        """Rows were put in from outside; what was known of their number is void."""

    def tracker_copied(self, old: StepTracker, new: StepTracker) -> None:
        """``new`` is this listener's copy's tracker for what ``old`` follows here."""


class StepTracker:
    """Follows the steps of one model through one list of cache layers.

    Holds its layers weakly: the layers hold the tracker, and a cycle would keep gigabytes alive until the garbage
    collector runs.
    """

    __slots__ = (
        "_expected",
        "_expected_reads",
        "_layers",
        "_open",
        "_reads",
        "_refused",
        "_short",
        "_updated",
        "listener",
        "name",
        "step",
        "tokens",
    )

    def __init__(self, listener: StepListener | None = None, name: str = "model") -> None:
        self.listener = listener
        self.name = name
        self.step = 0  #: number of the current or last step; 0 before the first
        self.tokens = 0  #: tokens (N) of the current or last step
        self._layers: list[weakref.ref[ManagedLayer]] = []
        self._expected = 0
        self._updated = 0
        self._expected_reads = 0  # of rows, after the last update of a step
        self._reads = 0
        self._short: int | None = None  # updates of the last step that ended before all that were expected
        self._open = True
        self._refused: str | None = None  # why no further step can be right

    @property
    def layers(self) -> list[ManagedLayer]:
        """Every managed layer of this model, leaves of nested caches included, in order."""
        return [layer for ref in self._layers if (layer := ref()) is not None]

    @property
    def at_boundary(self) -> bool:
        """Whether rows may be changed now."""
        return self._open

    @property
    def phase(self) -> str | None:
        """``"prefill"`` for a step of several tokens, ``"decode"`` for one of one, None before the first step."""
        if self.step == 0:
            return None
        return "prefill" if self.tokens > 1 else "decode"

    def attach(self, layer: ManagedLayer) -> None:
        """Follow ``layer`` from now on."""
        layer._steps = self
        self._layers.append(weakref.ref(layer))
        if layer.holds_rows:
            self._expected += 1

    def detach(self, layer: ManagedLayer) -> None:
        """Forget a layer that was replaced in its list."""
        if layer._steps is not self:
            return
        layer._steps = None
        self._layers = [ref for ref in self._layers if ref() is not layer]
        self._expected -= layer.holds_rows

    def expect(self, updated: int) -> None:
        """Say how many K/V layers this model updates in one step (some models never use some of their entries)."""
        self._expected = updated

    def rows_may_go(self, layer: ManagedLayer) -> bool:
        return self.listener is not None and self.listener.rows_may_go(self, layer)

    def quantize_for_caller(self, layer: KVCache, codec: Affine) -> None:
        if self.listener is None:
            layer.reencode(Layout.both(codec))
        else:
            self.listener.quantize_for_caller(self, layer, codec)

    def refuse_for_caller(self, layer: ManagedLayer, codec: Affine, why: str) -> None:
        if self.listener is not None:
            self.listener.refuse_for_caller(self, layer, codec, why)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepTracker:
        """A tracker at the same point of the same step without layers: each copied layer attaches itself."""
        new = StepTracker(copy.deepcopy(self.listener, memo), self.name)
        memo[id(self)] = new
        new.step, new.tokens = self.step, self.tokens
        new._updated, new._open, new._short = self._updated, self._open, self._short
        new._reads, new._expected_reads, new._refused = self._reads, self._expected_reads, self._refused
        # Attaching the copies counts up to the number of layers; what was learned of the model stays known.
        new._expected = self._expected - sum(layer.holds_rows for layer in self.layers)
        if new.listener is not None:
            new.listener.tracker_copied(self, new)
        return new

    # -- events, in the order in which a step makes them; all of them on the hot path -----------------------------

    def on_mask(self, tokens: int) -> None:
        """A K/V layer is asked for a mask for ``tokens`` new tokens."""
        if self._open:
            self._begin(tokens)
            if self.listener is not None:
                self.listener.step_begins(self, tokens)

    def on_update(self, layer: ManagedLayer, tokens: int) -> None:
        """A K/V layer is handed the keys and values of ``tokens`` new tokens."""
        seen = layer._seen == self.step
        if self._open and (seen or self.step == 0):
            self._begin(tokens)
            # No mask was asked of this cache. One token needs none; for more, the model has built its own already,
            # and changing rows now could pull them from under it.
            if self.listener is not None:
                if tokens == 1:
                    self.listener.step_begins(self, tokens)
                else:
                    self.listener.step_began(self, tokens)
        elif seen:
            # The layer comes round again although the step never completed. The mask of this step exists.
            self._learn_from_short_step()
            self._begin(tokens)
            if self.listener is not None:
                self.listener.step_began(self, tokens)
        elif self._open:
            # Fewer layers were expected than this model updates: the step goes on.
            self._expected = self._updated + 1
            self._open = False
        layer._seen = self.step

    def on_updated(self) -> None:
        """The layer that :meth:`on_update` named holds the new tokens."""
        self._updated += 1
        if self._updated >= self._expected and self._reads >= self._expected_reads:
            self._open = True

    def on_read(self) -> None:
        """A layer's rows are read without an update (or from within one, which comes before :meth:`on_updated`)."""
        if self._updated < self._expected:
            return
        self._reads += 1
        if self._open:
            self._expected_reads = self._reads
        elif self._reads >= self._expected_reads:
            self._open = True

    def on_state_mask(self, tokens: int) -> None:
        """A recurrent layer is asked for a mask; the only sign of a step in a model that holds no rows at all."""
        if self._expected == 0:
            self._begin(tokens)
            self._open = True
            if self.listener is not None:
                self.listener.touched(self)

    def on_failed(self, layer: ManagedLayer | None, tokens: int, error: Exception) -> None:
        """Rows could not be read within a step: layers that have its tokens give them back.

        ``layer``, which is about to take them in, has none; None if all that were reached have them.

        Where one cannot (recurrent state, a window that has wrapped, rows that were encoded together), the tokens of
        this step are in some layers only, and every further step is refused.
        """
        for peer in self.layers:
            if peer is layer or peer._seen != self.step:
                continue
            if peer.takes_back(tokens):
                peer._trim_rows(tokens)
            else:
                self._refused = f"{peer.name} holds tokens of a step that could not be done ({error})"
        if any(not peer.holds_rows and peer.kind != "list" for peer in self.layers):
            self._refused = f"recurrent state may hold tokens of a step that could not be done ({error})"
        self.abandon()

    def abandon(self) -> None:
        """The step that has begun did not take place."""
        for peer in self.layers:
            if peer._seen == self.step:
                peer._seen = self.step - 1
        self.step -= 1
        self._updated, self._open = self._expected, True

    def on_replaced(self) -> None:
        """A layer's state was set from outside."""
        if self.listener is not None:
            self.listener.rows_replaced(self)

    def on_touch(self) -> None:
        """Something outside the model reads or changes the cache."""
        if self._open and self.listener is not None:
            self.listener.touched(self)

    def _begin(self, tokens: int) -> None:
        if self._refused is not None:
            raise DiskTierError(f"{self._refused}; its rows have to be computed anew, in a new cache")
        self._open = False
        self.step += 1
        self.tokens = tokens
        self._updated = 0
        self._reads = 0

    def _learn_from_short_step(self) -> None:
        """The last step ended early: it was cut short by an exception, or this model never uses some of its entries.

        Only layers that were never updated at all are given up, and only when two steps ended at the same point.
        """
        if self._updated >= self._expected:
            self._expected_reads = self._reads
        elif self._short == self._updated:
            self._expected = sum(layer.holds_rows and layer._seen > 0 for layer in self.layers)
        self._short = self._updated
