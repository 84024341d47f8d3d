"""One model module, built small and put to the test: every action of the grid carried out where there is code for it.

The actions work on copies of a filled cache, which the attention hook reaches if the action needs it. Afterwards three
tokens in one step must give what they give one by one (unless rows are encoded in between, which the one step does not
see), and evicted rows what masked rows give (where all heads and layers keep the same); what is lossy must be felt, and
what is not must not. An action that the classifier refuses for the backend's sake is carried out all the same: that it
fails is the proof of the refusal.
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
from ..reach import Reach
from ..scorers.observed import OBSERVED
from ..steps import StepTracker
from .capabilities import ROW_CHOICE, ROW_GATHER, BackendProfile, Rung
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
            str(c): None if o.present else o.reason for c, o in sorted(trial.profile().outcomes.items())
        },
        "verdicts": [trial.judge(verdict) for verdict in trial.verdicts()],
    }


class Trial:
    """One tiny model with a filled cache to copy from."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._compared = (
            False  # whether the rows that were left of the last action were compared with masked ones
        )
        self.model = build(module)
        self.probe = _probe(self.model)
        steps = StepTracker(name="trial")
        made = make_prompt_cache(self.model)
        self.filled = [adopt(c, steps, f"layer {i}") for i, c in enumerate(made)]
        self.reach = Reach(Rung.HOOK, self.model, OBSERVED)
        self.reach.attach(leaves(self.filled))
        if (pattern := cache_pattern(made)) != SPECS[module].cache:
            raise ValueError(f"the cache is {pattern}, {SPECS[module].cache} was expected")
        position = 0
        for tokens in CHUNKS:
            self._forward(self.filled, position, tokens)
            position += tokens
        self.chunk, self.single = self._after(*self._copies(self.filled, self.filled))

    def profile(self) -> BackendProfile:
        """What the model can do with the filled cache at rung hook."""
        return self.reach.profile(self.probe.profile, list(leaves(self.filled)))

    def verdicts(self) -> tuple[Verdict, ...]:
        return classify(grid(), self.profile(), held_all(leaves(self.filled)))

    def _copies(self, *each: list[Any], reach: bool = False) -> list[list[Any]]:
        """Copies, which the hook reaches like the ones that they were made of, or not."""
        copies = [copy.deepcopy(entries) for entries in each]
        if reach:
            self.reach.attach(leaf for entries in (*each, *copies) for leaf in leaves(entries))
        return copies

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
            proven = self._carry_out(verdict.action, _reaches(verdict))
        except ActionInfeasibleError as error:
            return "refused", reasons or [_PREFIX.sub("", str(error))]
        except Exception as error:
            return ("refused", reasons) if backend else ("fails", [first_line(error)])
        if backend:
            # That rows were dropped wrongly shows in no exception, only beside masked rows.
            about_rows = {str(ROW_CHOICE), str(ROW_GATHER)} & {str(r.capability) for r in verdict.reasons}
            proven = proven and (self._compared or not about_rows)
            return "works_when_forced" if proven else "refused", reasons
        return "works", []

    def _carry_out(self, action: Action, reach: bool) -> bool:
        """Raises unless ``action`` took hold and the model goes on rightly; ``reach``: whether the hook is there.

        Returns whether all of it was felt: where eviction left so few rows that a codec keeps them dense, it was not.
        """
        [entries] = self._copies(self.filled, reach=reach)
        execute(list(leaves(entries)), action)
        encoded = any(one.bits and one.sealed for one in held_all(leaves(entries)))
        before = _sealed(entries)
        [again] = self._copies(entries, reach=reach)
        chunk, single = self._after(entries, again)
        unchanged = bool(mx.array_equal(chunk, self.chunk, equal_nan=True).item())
        if action.lossy and unchanged:
            raise ValueError("a lossy action moved no logit")
        if not action.lossy and not unchanged:
            raise ValueError("an action that loses nothing moved the logits")
        # Rows that are encoded during the steps after are so sooner or later by the length of the steps.
        if self.module not in CHUNKING_MOVES_LOGITS and _sealed(entries) == before:
            _require_same(chunk, single, f"{AFTER} tokens at once and one by one")
        # One mask for all heads and layers stands only for rows that all of them have lost.
        self._compared = all(isinstance(part, Evict) for part in action.parts) and _alike(entries)
        if action.lossy and self._compared:
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


def _reaches(verdict: Verdict) -> bool:
    """Whether an action is carried out with the hook: one that fails without it must not be helped by it."""
    missing = {reason.capability for reason in verdict.reasons}
    deepest = [c.rung for c in verdict.action.requires if str(c) in missing]
    return verdict.action.rung == Rung.HOOK and min(deepest, default=Rung.HOOK) == Rung.HOOK


def _sealed(entries: list[Any]) -> list[int]:
    """Encoded rows of every layer whose newest ones stay dense for a while."""
    stores = (leaf.store for leaf in leaves(entries) if isinstance(leaf, KVCache) and leaf.store is not None)
    return [store.sealed for store in stores if store.layout.unit > 1]


def _alike(entries: list[Any]) -> bool:
    """Whether all heads of all layers hold rows of the same positions: models make one mask for several layers."""
    kv = (leaf for leaf in leaves(entries) if isinstance(leaf, KVCache) and leaf.rows > 0)
    heads = [rows for leaf in kv for rows in leaf.positions().reshape(-1, leaf.rows)]
    return all(np.array_equal(rows, heads[0]) for rows in heads)


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
