"""Which layers of a model can be packed, and why the others cannot, told with few runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..codecs import Affine, Layout
from ..layers import KVCache, leaves
from .bench import FILLED, Bench, Leaf, divergence, forward, in_mlx_lm
from .capabilities import (
    BORROWED_KV,
    LATENT_WITH_PACKED,
    SINKS_WITH_PACKED,
    Capability,
    Outcome,
    packed_some_layers,
)
from .isolate import first_line

__all__ = ["MOST_KL", "NotPackable", "PackedSearch", "why_not_packed"]

#: Most extra runs spent on telling which layers can be packed when not all of them can.
MOST_RUNS = 12

#: KL divergence (nats per token) above which rows at eight bits are not taken for the same rows.
MOST_KL = 0.1
FINEST_BITS = 8


@dataclass(frozen=True)
class NotPackable:
    """Why a step over packed rows failed. ``cause`` is for programs, ``text`` for people."""

    cause: str  #: ``sinks``, ``latent``, ``borrowed``, ``widths``, ``masks``, ``own_attention``, ``no_group`` or ``other``
    text: str


def why_not_packed(error: BaseException, latent: bool = False) -> NotPackable:
    """Read the traceback of a step that failed: who was handed packed rows and could not read them."""
    raw = first_line(error)
    where = in_mlx_lm(error)
    if where is None:
        return NotPackable("other", raw)
    module, function, its_locals = where
    if "sinks" in raw:
        return NotPackable("sinks", f"attention sinks, which mlx-lm's packed attention does not take ({raw})")
    if module == "mlx_lm.models.base":
        if function == "scaled_dot_product_attention" and not hasattr(its_locals.get("cache"), "bits"):
            return NotPackable(
                "borrowed", f"another layer borrows its rows and is not told that they are packed ({raw})"
            )
        if "reshape" in raw:
            return NotPackable(
                "widths",
                f"mlx-lm's packed attention wants keys and values of one width when heads share them ({raw})",
            )
        if "broadcast" in raw:
            return NotPackable(
                "masks",
                f"mlx-lm's packed attention takes no mask per head when heads share keys and values ({raw})",
            )
        return NotPackable("other", raw)
    whose = "latent attention" if latent else "the model's own code"
    return NotPackable(
        "latent" if latent else "own_attention",
        f"{whose} ({function} in {module}) reads fetched rows as one dense array ({raw})",
    )


@dataclass
class PackedSearch:
    """Tells which layers can be packed, with few runs: layers of one make mostly fail alike."""

    bench: Bench
    found: Sequence[Leaf]
    made: Mapping[int, set[tuple[Any, ...]]]  #: who hands each leaf its keys and values
    runs: int = 0
    causes: dict[str, list[int]] = field(default_factory=dict)  #: cause → leaves, over all layouts
    #: Leaves that no bit width would make a difference to.
    never: dict[int, Outcome] = field(default_factory=dict)

    def by_leaf(self, layout: Capability, whole: Outcome) -> dict[int, Outcome]:
        """The outcome of one layout for every changeable leaf, given that of packing all of them at once."""
        leaves_ = list(self.bench.changeable)
        bits, group_size = layout.params
        if whole.present:
            # It ran. At the finest codes, see whether it also computed what it should.
            wrong = (
                self._packed(Affine(bits, group_size), leaves_, single=False) if bits == FINEST_BITS else None
            )
            return dict.fromkeys(
                leaves_, whole if wrong is None else Outcome(False, wrong.text, whole.seconds)
            )
        outcomes: dict[int, Outcome] = {}
        makes: dict[tuple[Any, ...], list[int]] = {}
        for i in leaves_:
            leaf = self.found[i]
            if i in self.never:
                outcomes[i] = self.never[i]
            elif any(d % group_size for d in (leaf.key_dim or 0, leaf.value_dim or 0)):
                why = f"head dims {leaf.key_dim} and {leaf.value_dim} are not both divisible by {group_size}"
                outcomes[i] = Outcome(False, why)
                self.causes.setdefault("no_group", []).append(i)
            else:
                makes.setdefault(self._make(i), []).append(i)
        codec = Affine(bits, group_size)
        for same in makes.values():
            outcomes |= self._tell_apart(codec, same)
        return outcomes

    def outcomes(self, layout: Capability, by_leaf: Mapping[int, Outcome]) -> dict[Capability, Outcome]:
        """What to say of the model as a whole."""
        bits, group_size = layout.params
        good = [i for i, o in by_leaf.items() if o.present]
        bad = {i: o for i, o in by_leaf.items() if not o.present}
        said: dict[Capability, Outcome] = {}
        if not bad:
            return {packed_some_layers(bits, group_size): Outcome(True)}
        reasons: dict[str, list[str]] = {}
        for i, one in bad.items():
            reasons.setdefault(str(one.reason), []).append(self.found[i].name)
        why = "; ".join(f"{_listed(names)}: {reason}" for reason, names in reasons.items())
        if good:
            why += f"; {len(good)} of {len(by_leaf)} layers can be packed"
        said[layout] = Outcome(False, why)
        none = None if good else f"no layer can be packed: see {layout}"
        said[packed_some_layers(bits, group_size)] = Outcome(bool(good), none)
        for cause, capability in _SAID_OF.items():
            named = [self.found[i].name for i in self.causes.get(cause, ())]
            if named:
                said[capability] = Outcome(False, f"{_listed(list(dict.fromkeys(named)))}: {_CAUSES[cause]}")
        return said

    def _make(self, i: int) -> tuple[Any, ...]:
        """Leaves that agree in this run through the same code of the model."""
        leaf = self.found[i]
        inner = leaf.name.partition(".")[2]
        return (inner, leaf.n_kv_heads, leaf.key_dim, leaf.value_dim, *sorted(self.made.get(i, ())))

    def _tell_apart(self, codec: Affine, same: list[int]) -> dict[int, Outcome]:
        if self.runs >= MOST_RUNS:
            return dict.fromkeys(same, Outcome(False, f"not told apart from others within {MOST_RUNS} runs"))
        self.runs += 1
        start = time.perf_counter()
        why = self._packed(codec, same)
        seconds = time.perf_counter() - start
        if why is None:
            return dict.fromkeys(same, Outcome(True, None, seconds))
        if len(same) > 1:
            first = self._tell_apart(codec, same[:1])
            if first[same[0]].present:
                half = 1 + len(same[1:]) // 2
                first |= self._tell_apart(codec, same[1:half]) if half > 1 else {}
                return first | self._tell_apart(codec, same[half:])
            if self._cause_of(same[0]) != why.cause:
                return first | self._tell_apart(codec, same[1:])
        self.causes.setdefault(why.cause, []).extend(same)
        failed = dict.fromkeys(same, Outcome(False, why.text, seconds))
        if why.cause not in ("other", "wrong"):
            self.never |= failed
        return failed

    def _cause_of(self, i: int) -> str | None:
        return next((cause for cause, which in self.causes.items() if i in which), None)

    def _packed(self, codec: Affine, which: Iterable[int], single: bool = True) -> NotPackable | None:
        entries = self.bench.fresh()
        flat = list(leaves(entries))
        chosen = [flat[i] for i in which]
        latent = any(_is_latent(self.bench.model, leaf) for leaf in chosen)
        try:
            for leaf in chosen:
                leaf.reencode(Layout.both(codec))
            chunk = forward(self.bench.model, entries, 2, FILLED)
            if single:
                forward(self.bench.model, entries, 1, FILLED + 2)
        except Exception as error:
            return why_not_packed(error, latent)
        off = divergence(self.bench.chunk, chunk)
        if codec.bits == FINEST_BITS and not off <= MOST_KL:
            return NotPackable("wrong", f"it runs, but {codec.bits} bits move the logits by {off:.3g} nats")
        return None


#: Causes that have a capability of their own, and what is said of them.
_SAID_OF = {"sinks": SINKS_WITH_PACKED, "latent": LATENT_WITH_PACKED, "borrowed": BORROWED_KV}
_CAUSES = {
    "sinks": "mlx-lm's packed attention does not take attention sinks",
    "latent": "the model's latent attention reads fetched rows as one dense array",
    "borrowed": "layers that borrow these rows are not told that they are packed",
}


def _is_latent(model: Any, leaf: KVCache) -> bool:
    """Whether the layer holds a latent and its rotated part: the model names both widths, and they agree."""
    args = getattr(model, "args", None)
    dims = _setting(args, "kv_lora_rank"), _setting(args, "qk_rope_head_dim")
    return isinstance(leaf.keys, mx.array) and dims == (leaf.keys.shape[-1], leaf.values.shape[-1])


def _setting(args: Any, name: str, depth: int = 2) -> Any:
    """A setting of the model, or of the text model inside it."""
    if args is None or depth < 0:
        return None
    settings = args if isinstance(args, Mapping) else getattr(args, "__dict__", {})
    if settings.get(name) is not None:
        return settings[name]
    inner = (_setting(settings.get(k), name, depth - 1) for k in ("text_config", "language_config"))
    return next((v for v in inner if v is not None), None)


def _listed(names: Sequence[str]) -> str:
    """``layers 0, 1.1 and 3``; no more than six of them."""
    numbers = [n.removeprefix("layer ") for n in names]
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if len(numbers) > 6:
        return f"layers {', '.join(numbers[:5])} and {len(numbers) - 5} more"
    return f"layers {', '.join(numbers[:-1])} and {numbers[-1]}"
