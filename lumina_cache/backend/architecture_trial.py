"""One model module, built small and put to the test: every action of the grid carried out where there is code for it.

The actions work on copies of a filled cache. Afterwards three tokens in one step must give what they give one by one,
evicted rows what masked rows give; what is lossy must be felt, and what is not must not. An action that the classifier
refuses for the backend's sake is carried out all the same: that it fails is the proof of the refusal.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..actions import Action, Evict, Quantize, action_space
from ..apply import execute, held_all
from ..codecs import Affine
from ..errors import ActionInfeasibleError
from ..lab.tiny import CHUNKING_MOVES_LOGITS, SPECS, build, cache_pattern
from ..layers import KVCache, adopt, leaves
from ..steps import StepTracker
from .capabilities import ROW_CHOICE
from .examine import ROWS_CHOSEN_TOGETHER
from .feasibility import Verdict, classify
from .isolate import first_line
from .probe import ModelProbe, probe_model, probe_packed

__all__ = ["BITS", "GROUP_SIZE", "Trial", "classify_module", "grid"]

#: Group size of the grid: it divides every head dim of the tiny models that any group size divides.
GROUP_SIZE = 32

#: Bit widths of plain affine packing in the grid; composites take the first two.
BITS = (8, 4, 6, 5, 3, 2)

#: Tokens that every cache is filled with, in chunks: past the tiny models' windows and attention chunks of 16 and
#: block patterns of 32, and so many that no ratio of the grid evicts whole blocks of four.
CHUNKS = (43, 24)

#: Tokens after the action: one step of so many, compared with as many steps of one.
AFTER = 3

#: Largest difference, in standard deviations of the logits, between two ways of computing the same.
SAME = 1e-2

#: Modules that index a mask by head and sequence where they are given one for a single token.
MASKS_OF_RANK_4 = frozenset({"deepseek_v32", "glm_moe_dsa"})

#: The action or its part, in front of what is said of it.
_PREFIX = re.compile(r"^\S+: ")


def grid() -> tuple[Action, ...]:
    """The action space A over the grid of the table, with every bit width of plain affine packing."""
    actions = action_space(bits=BITS[:2], group_size=GROUP_SIZE)
    more = [Quantize("affine", b, b, GROUP_SIZE) for b in BITS]
    return (*actions, *(a for a in more if a not in actions))


def classify_module(question: Mapping[str, Any]) -> dict[str, Any]:
    """Build one module small, probe it, and put every action of the grid to the test."""
    mx.set_default_device(mx.Device(getattr(mx.DeviceType, question["device"])))
    name = question["module"]
    trial = Trial(name)
    return {
        "cache": SPECS[name].cache,
        "capabilities": {
            str(c): None if o.present else o.reason for c, o in sorted(trial.probe.profile.outcomes.items())
        },
        "verdicts": [trial.judge(verdict) for verdict in trial.verdicts()],
    }


class Trial:
    """One tiny model with a filled cache to copy from."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.model = build(module)
        self.probe = _probe(self.model)
        steps = StepTracker(name="trial")
        made = make_prompt_cache(self.model)
        self.filled = [adopt(c, steps, f"layer {i}") for i, c in enumerate(made)]
        if (pattern := cache_pattern(made)) != SPECS[module].cache:
            raise ValueError(f"the cache is {pattern}, {SPECS[module].cache} was expected")
        position = 0
        for tokens in CHUNKS:
            self._forward(self.filled, position, tokens)
            position += tokens
        self.chunk, self.single = self._after(copy.deepcopy(self.filled), copy.deepcopy(self.filled))

    def verdicts(self) -> tuple[Verdict, ...]:
        return classify(grid(), self.probe.profile, held_all(leaves(self.filled)))

    def judge(self, verdict: Verdict) -> tuple[str, list[str]]:
        """Outcome and reasons of one action, by carrying it out where there is code for it."""
        reasons = [r.text for r in verdict.reasons]
        backend = bool(reasons) and all(r.code == "missing_capability" for r in verdict.reasons)
        if reasons and not backend:
            return "refused", reasons
        if self.module in ROWS_CHOSEN_TOGETHER and str(ROW_CHOICE) in {r.capability for r in verdict.reasons}:
            # No exception tells, and some choices are the same in both caches of a layer by chance.
            return "refused", reasons
        try:
            proven = self._carry_out(verdict.action)
        except ActionInfeasibleError as error:
            return "refused", reasons or [_PREFIX.sub("", str(error))]
        except Exception as error:
            return ("refused", reasons) if backend else ("fails", [first_line(error)])
        if backend:
            return "works_when_forced" if proven else "refused", reasons
        return "works", []

    def _carry_out(self, action: Action) -> bool:
        """Raises unless ``action`` took hold and the model goes on rightly.

        Returns whether all of it was felt: where eviction left so few rows that a codec keeps them dense, it was not.
        """
        entries = copy.deepcopy(self.filled)
        execute(list(leaves(entries)), action)
        encoded = any(one.bits and one.sealed for one in held_all(leaves(entries)))
        sealed = _sealed(entries)
        chunk, single = self._after(entries, copy.deepcopy(entries))
        unchanged = bool(mx.array_equal(chunk, self.chunk, equal_nan=True).item())
        if action.lossy and unchanged:
            raise ValueError("a lossy action moved no logit")
        if not action.lossy and not unchanged:
            raise ValueError("an action that loses nothing moved the logits")
        # Rows that are encoded during the steps after are so sooner or later by the length of the steps.
        if self.module not in CHUNKING_MOVES_LOGITS and _sealed(entries) == sealed:
            _require_same(chunk, single, f"{AFTER} tokens at once and one by one")
        # One mask for all heads and layers stands only for rows that all of them have lost.
        ours = [leaf for leaf in leaves(entries) if isinstance(leaf, KVCache) and leaf.rows > 0]
        kept = [head for leaf in ours for head in leaf.positions().reshape(-1, leaf.rows)]
        alike = all(np.array_equal(head, kept[0]) for head in kept)
        if alike and action.lossy and all(isinstance(part, Evict) for part in action.parts):
            masked_chunk, masked_single = self._masked(entries)
            _require_same(chunk, masked_chunk, "evicted rows and masked rows")
            _require_same(single, masked_single, "evicted rows and masked rows, one token at a time,")
        return encoded or not any(isinstance(part, Quantize) for part in action.parts)

    def _masked(self, evicted: list[Any]) -> tuple[mx.array, mx.array]:
        """The unchanged cache with a mask over the rows that ``evicted`` has lost."""
        filled = sum(CHUNKS)
        pair = [copy.deepcopy(self.filled) for _ in range(2)]
        for entries in pair:
            for leaf, lost in zip(leaves(entries), leaves(evicted), strict=True):
                if isinstance(leaf, KVCache) and leaf.rows > 0:
                    hidden = np.setdiff1d(np.arange(filled), lost.positions())
                    leaf.__dict__["make_mask"] = _hiding(leaf, hidden, self.module in MASKS_OF_RANK_4)
        try:
            return self._after(*pair)
        finally:
            for entries in pair:
                for leaf in leaves(entries):
                    leaf.__dict__.pop("make_mask", None)

    def _after(self, entries: list[Any], again: list[Any]) -> tuple[mx.array, mx.array]:
        """Logits (1, N, vocabulary) of a step of several tokens, and of as many steps of one on a copy."""
        start = sum(CHUNKS)
        chunk = self._forward(entries, start, AFTER)
        singles = [self._forward(again, start + i, 1) for i in range(AFTER)]
        self._forward(entries, start + AFTER, 1)
        return chunk, mx.concatenate(singles, axis=1)

    def _forward(self, entries: list[Any], position: int, tokens: int) -> mx.array:
        ids = 1 + (11 * mx.arange(position, position + tokens, dtype=mx.int32)) % 97
        logits: mx.array = self.model(ids[None], cache=entries)
        mx.eval(logits, [c.state for c in entries])
        if mx.isnan(logits).any().item():
            raise ValueError("the model's logits are not numbers")
        return logits


def _sealed(entries: list[Any]) -> list[int]:
    """Rows that each layer with a dense tail has encoded."""
    return [one.sealed for one in held_all(leaves(entries)) if one.tail_capacity]


def _hiding(leaf: KVCache, hidden: np.ndarray, rank_4: bool) -> Callable[..., mx.array]:
    """A ``make_mask`` that always gives an array, with the rows ``hidden`` out of everyone's sight."""

    def make_mask(N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        query = np.arange(leaf.offset, leaf.offset + N)[:, None]
        key = np.arange(leaf.offset + N)[None]
        seen = (query >= key) & ~np.isin(key, hidden)
        if window_size is not None:
            seen &= query - key < window_size
        return mx.array(seen[None, None] if rank_4 else seen)

    return make_mask


def _require_same(a: mx.array, b: mx.array, what: str) -> None:
    off = _distance(a, b)
    if not off <= SAME:
        raise ValueError(f"{what} differ by {off:.3g} standard deviations of the logits")


def _distance(a: mx.array, b: mx.array) -> float:
    """Largest difference in standard deviations of the logits, over those that are finite on both sides."""
    finite = mx.isfinite(a) & mx.isfinite(b)
    a, b = mx.where(finite, a, 0.0), mx.where(finite, b, 0.0)
    found: Any = (mx.abs(a - b).max() / mx.maximum(a.std(), 1e-6)).item()
    return float(found)


def _probe(model: Any) -> ModelProbe:
    """The model's probe with an outcome for every affine layout of the grid."""
    probe = probe_model(model, bits=BITS)
    if probe.group_size != GROUP_SIZE:
        for bits in BITS:
            probe = probe_packed(model, probe, Affine(bits, GROUP_SIZE))
    return probe
