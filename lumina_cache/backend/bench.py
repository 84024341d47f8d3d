"""A throw-away cache, filled with a few tokens, to copy from and to try things on; and what is seen of its layers."""

from __future__ import annotations

import copy
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..layers import KVCache, ManagedLayer, adopt, leaves
from ..steps import StepTracker
from .capabilities import Capability, Outcome
from .isolate import first_line

__all__ = [
    "FILLED",
    "Bench",
    "Leaf",
    "MaskRequest",
    "attempt",
    "divergence",
    "forward",
    "in_mlx_lm",
    "leaf_of",
    "watched",
]

#: Tokens in the cache that trials start from.
FILLED = 12


@dataclass(frozen=True)
class MaskRequest:
    """A mask that a model asked of one layer's cache for a step of ``tokens`` tokens, and the form of what it got."""

    tokens: int
    window_size: int | None
    return_array: bool
    form: str  #: ``none``, ``string`` or ``array``


@dataclass(frozen=True)
class Leaf:
    """One cache object of the model, lists of caches taken apart. Dims in elements; None where it holds no rows."""

    name: str
    kind: str
    updated: bool | None  #: whether a step hands it keys and values; None for a layer that holds no rows
    masks: tuple[
        MaskRequest, ...
    ]  #: empty: it shares the mask that another layer was asked for, or needs none
    n_kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    packed: Mapping[Capability, Outcome] = field(default_factory=lambda: MappingProxyType({}))

    def to_record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "updated": self.updated,
            "masks": [vars(m) for m in self.masks],
            "n_kv_heads": self.n_kv_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "packed": {str(c): {"present": o.present, "reason": o.reason} for c, o in self.packed.items()},
        }


def leaf_of(layer: Any, updated: bool, masks: Sequence[MaskRequest]) -> Leaf:
    name = getattr(layer, "name", type(layer).__name__)
    if not isinstance(layer, ManagedLayer) or not layer.holds_rows:
        kind = layer.kind if isinstance(layer, ManagedLayer) else "opaque"
        return Leaf(name, kind, None, tuple(masks))
    kind = layer.kind
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array) or keys.ndim != 4:
        return Leaf(name, kind, updated, tuple(masks))
    return Leaf(name, kind, updated, tuple(masks), keys.shape[1], keys.shape[-1], values.shape[-1])


@dataclass
class Bench:
    """One filled cache of one model, and the logits that trials on its copies are compared with."""

    model: Any
    filled: list[Any]
    updated: frozenset[int]  #: numbers of leaves that a step updates
    changeable: tuple[int, ...]  #: numbers of leaves whose rows actions could change
    chunk: mx.array | None = None  #: logits (1, 2, vocabulary) of the unchanged cache for two tokens

    @classmethod
    def of(cls, model: Any) -> Bench:
        steps = StepTracker(name="probe")
        filled = [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))]
        forward(model, filled, FILLED, 0)
        flat = list(leaves(filled))
        updated = frozenset(
            i for i, leaf in enumerate(flat) if isinstance(leaf, ManagedLayer) and leaf._seen == steps.step
        )
        changeable = tuple(i for i, leaf in enumerate(flat) if isinstance(leaf, KVCache) and leaf.rows > 0)
        return cls(model, filled, updated, changeable)

    def fresh(self) -> list[Any]:
        """A copy of the filled cache, or one filled anew if some entry cannot be copied."""
        try:
            return copy.deepcopy(self.filled)
        except Exception:
            return Bench.of(self.model).filled

    def reference(self, entries: list[Any]) -> None:
        """A step of two tokens, whose logits changes are compared with, and one of one."""
        self.chunk = forward(self.model, entries, 2, FILLED)
        forward(self.model, entries, 1, FILLED + 2)

    def of_entries(self, entries: list[Any]) -> list[Any]:
        """The leaves whose rows may be changed, of a copy."""
        flat = list(leaves(entries))
        return [flat[i] for i in self.changeable]


def forward(model: Any, entries: list[Any], tokens: int, position: int) -> mx.array:
    """Logits (1, N, vocabulary) of tokens that differ from each other, so that a wrong row shows."""
    ids = 1 + (7 * mx.arange(position, position + tokens, dtype=mx.int32)) % 31
    logits: mx.array = model(ids[None], cache=entries)
    mx.eval(logits, [c.state for c in entries if isinstance(c, ManagedLayer)])
    if mx.isnan(logits).any().item():
        raise ValueError("the model's logits are not numbers")
    return logits


def divergence(wanted: mx.array | None, got: mx.array) -> float:
    """Largest KL(wanted ‖ got) over the tokens of a step, in nats."""
    assert wanted is not None
    p, q = (
        x.astype(mx.float32) - mx.logsumexp(x.astype(mx.float32), axis=-1, keepdims=True)
        for x in (wanted, got)
    )
    # Logits of minus infinity stand for tokens that are never given: they carry no weight on either side.
    terms = mx.where(mx.isinf(p), 0.0, mx.exp(p) * (p - q))
    found: Any = terms.sum(-1).max().item()
    return float(found)


def attempt(trial: Callable[[], None]) -> Outcome:
    start = time.perf_counter()
    try:
        trial()
    except Exception as error:
        where = in_mlx_lm(error)
        reason = first_line(error) if where is None else f"in {where[1]} of {where[0]}: {first_line(error)}"
        return Outcome(False, reason, time.perf_counter() - start)
    return Outcome(True, None, time.perf_counter() - start)


def watched(
    entries: list[Any], run: Callable[[], None]
) -> tuple[dict[int, list[MaskRequest]], dict[int, set[tuple[Any, ...]]]]:
    """What was asked of each leaf, by its number, while ``run`` ran: masks, and by whom its rows were updated."""
    masks: dict[int, list[MaskRequest]] = {}
    makes: dict[int, set[tuple[Any, ...]]] = {}
    ours = {i: leaf for i, leaf in enumerate(leaves(entries)) if isinstance(leaf, ManagedLayer)}
    for i, leaf in ours.items():
        if hasattr(leaf, "make_mask"):
            leaf.make_mask = _recording(leaf.make_mask, masks.setdefault(i, []))
        if isinstance(leaf, KVCache):
            leaf.__dict__["update_and_fetch"] = _naming(leaf.update_and_fetch, makes.setdefault(i, set()))
    try:
        run()
    finally:
        for leaf in ours.values():
            # The recorders refer to the leaf, and would keep its arrays until the next collection.
            leaf.__dict__.pop("make_mask", None)
            leaf.__dict__.pop("update_and_fetch", None)
    return masks, makes


def _recording(make_mask: Callable[..., Any], asked: list[MaskRequest]) -> Callable[..., Any]:
    def recorded(N: int, *args: Any, **options: Any) -> Any:
        mask = make_mask(N, *args, **options)
        form = "none" if mask is None else "string" if isinstance(mask, str) else "array"
        asked.append(MaskRequest(N, options.get("window_size"), bool(options.get("return_array")), form))
        return mask

    return recorded


def _naming(update: Callable[..., Any], makes: set[tuple[Any, ...]]) -> Callable[..., Any]:
    """Notes the function that hands over keys and values, and the switches of the module it belongs to."""

    def named(*args: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        module = vars(caller.f_locals["self"]) if hasattr(caller.f_locals.get("self"), "__dict__") else {}
        switches = sorted(name for name, value in module.items() if value is True)
        makes.add((caller.f_code.co_qualname, *switches))
        return update(*args, **options)

    return named


def in_mlx_lm(error: BaseException) -> tuple[str, str, Mapping[str, Any]] | None:
    """Module, function and local names of the innermost frame of mlx-lm's models that an exception went through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("mlx_lm.models."):
            return module, frame.f_code.co_qualname, frame.f_locals
    return None
