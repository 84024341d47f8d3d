"""Which actions are measured on a model: values made from the catalogue; nothing here runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...actions import Action, Composite, Evict, Plan, Quantize
from ...backend.probe import remembered_probe
from ...codecs import CODECS
from ...errors import CalibrationError
from ...methods import METHODS
from ...scorers import SCORERS
from ...scorers.banked import BANKED
from ...scorers.observed import OBSERVED
from .settings import Settings

__all__ = ["Grid", "ModelShape", "grid_of", "shape_of"]

#: Equal bits of keys and values, those that decide most first.
_BITS = (4, 8, 3, 2, 6, 5)

#: Unequal bits (keys, values): keys are the more sensitive side in the literature (KIVI, arXiv:2402.02750; KVQuant,
#: arXiv:2401.18079), so few of the other kind are measured, to see whether that holds.
_UNEQUAL: dict[str, tuple[tuple[int, int], ...]] = {
    "affine_fetch": ((8, 4), (6, 4), (4, 2), (4, 8)),
    "hadamard": ((5, 4), (4, 3), (4, 2), (6, 4), (5, 3), (3, 2)),
    "kivi": ((4, 2),),
    "kivi_hadamard": ((4, 3), (4, 2), (3, 2), (2, 3)),
}

#: Bits, where all that a codec takes would be many.
_ONLY: dict[str, tuple[int, ...]] = dict.fromkeys(
    ("kivi", "kivi_hadamard", "kivi_packed", "hadamard_packed", "kivi_hadamard_packed"), (8, 4, 3, 2)
)

#: Groups (elements) in which a codec is measured, best first; the first that fits the model's heads is taken.
_GROUPS: dict[str, tuple[int, ...]] = dict.fromkeys(("kivi", "kivi_hadamard"), (32, 64))
_USUAL_GROUPS = (64, 32)

#: Codecs that are measured in larger groups as well: (codec, key bits, value bits, group).
_ALSO = (("kivi_hadamard", 4, 4, 64), ("kivi_hadamard", 4, 3, 64), ("kivi_hadamard", 3, 3, 64))

_QUICK_CODECS = (("hadamard", 4), ("affine", 4), ("kivi", 2), ("hadamard", 3), ("affine", 8))
_QUICK_SCORERS = ("sinks_window", "keydiff")


@dataclass(frozen=True)
class ModelShape:
    """What the grid depends on: head dims (keys, values) of layers that actions change, and those layers' numbers."""

    head_dims: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]  #: numbers of entries whose rows can be changed
    entries: int  #: of the model's cache


@dataclass(frozen=True)
class Grid:
    """Actions by what they are measured for, each in the order of importance."""

    codecs: tuple[Quantize, ...]
    evictions: tuple[Evict, ...]
    composites: tuple[Composite, ...]
    by_layer: tuple[Plan, ...]  #: only the layers of one group encoded; a group is one range
    groups: tuple[tuple[int, ...], ...]  #: numbers of the layers of each of ``by_layer``
    mixed: tuple[Plan, ...]

    @property
    def core(self) -> tuple[Action, ...]:
        """What is measured on every document, codecs and evictions in turn."""
        pairs = itertools.zip_longest(self.codecs, self.evictions)
        return tuple(action for pair in pairs for action in pair if action is not None)

    @property
    def observed(self) -> tuple[str, ...]:
        """Scorers that have to watch attention while the prompt is read."""
        return tuple(dict.fromkeys(e.scorer for e in self.evictions if e.scorer in OBSERVED))

    @property
    def checks(self) -> tuple[Action, ...]:
        return (*self.by_layer, *self.mixed, *self.composites)

    @property
    def layer_codec(self) -> Quantize | None:
        """The codec by which layers are compared."""
        return next(
            (a for plan in self.by_layer for _, a in plan.assignments if isinstance(a, Quantize)), None
        )


def shape_of(model: object) -> ModelShape:
    """Read from a probe of the model.

    Raises:
        CalibrationError: no layer holds rows that actions could change.
    """
    held = remembered_probe(model).layers
    layers = [one for one in held if one.changeable]
    if not layers:
        raise CalibrationError(
            "no layer of this model holds rows that actions could change: nothing to calibrate"
        )
    return ModelShape(
        tuple(sorted({(one.key_dim, one.value_dim) for one in layers})),
        tuple(sorted({one.index for one in layers})),
        1 + max(one.index for one in held),
    )


def grid_of(shape: ModelShape, settings: Settings) -> Grid:
    """What to measure on a model of this shape. Codecs whose groups do not fit its heads are left out."""
    codecs = tuple(_codecs(shape, settings))
    evictions = tuple(_evictions(settings))
    probe = _layer_codec(shape, settings)
    groups = tuple(_groups(shape.layers, settings.layer_groups)) if probe is not None else ()
    return Grid(
        codecs=codecs,
        evictions=evictions,
        composites=tuple(_composites(codecs, evictions, settings)),
        by_layer=tuple(Plan((((g[0], g[-1]), probe),)) for g in groups if probe is not None),
        groups=groups,
        mixed=tuple(_mixed(shape, codecs, settings)),
    )


def _codecs(shape: ModelShape, settings: Settings) -> Iterator[Quantize]:
    wanted: list[tuple[str, int, int]]
    if settings.quick:
        wanted = [(name, bits, bits) for name, bits in _QUICK_CODECS]
    else:
        wanted = [(name, b, b) for b in _BITS for name in CODECS if b in _bits_of(name)]
        wanted += [(name, k, v) for name, pairs in _UNEQUAL.items() for k, v in pairs]
    for name, keys, values in wanted:
        action = _fitting(name, keys, values, shape)
        if action is not None:
            yield action
    for name, keys, values, group in () if settings.quick else _ALSO:
        action = Quantize(name, keys, values, group)
        if _fits(action, shape):
            yield action


def _bits_of(name: str) -> tuple[int, ...]:
    return _ONLY.get(name, METHODS["quant", name].bits)


def _fitting(name: str, keys: int, values: int, shape: ModelShape) -> Quantize | None:
    """The codec with the first of its groups that fits all heads."""
    method = METHODS["quant", name]
    usual = [g for g in _GROUPS.get(name, _USUAL_GROUPS) if g in method.groups]
    for group in usual or method.groups:
        action = Quantize(name, keys, values, group)
        if _fits(action, shape):
            return action
    return None


def _fits(action: Quantize, shape: ModelShape) -> bool:
    layout = action.layout
    return layout is not None and all(layout.why_not(k, v) is None for k, v in shape.head_dims)


def _evictions(settings: Settings) -> Iterator[Evict]:
    scorers: Iterable[str] = _QUICK_SCORERS if settings.quick else (*SCORERS, *BANKED, *OBSERVED)
    for share in sorted(settings.shares, key=lambda s: abs(np.log2(s) + 1)):  # about a half first
        for scorer in scorers:
            yield Evict(scorer, ratio=share, recent=settings.recent)


#: Pairs whose damages are measured together, over weak and strong ones: (scorer, share), (codec, bits).
_PAIRS = (
    (("sinks_window", 0.5), ("affine", 4)),
    (("keydiff", 0.5), ("hadamard", 3)),
    (("key_norm", 0.25), ("hadamard", 4)),
    (("sinks_window", 0.25), ("kivi", 2)),
    (("lagkv", 0.75), ("affine_fetch", 3)),
    (("keydiff", 0.125), ("hadamard", 2)),
)


def _composites(
    codecs: Sequence[Quantize], evictions: Sequence[Evict], settings: Settings
) -> Iterator[Composite]:
    for (scorer, share), (codec, bits) in _PAIRS:
        evict = next((e for e in evictions if (e.scorer, e.ratio) == (scorer, share)), None)
        quant = next((q for q in codecs if (q.codec, q.key_bits, q.value_bits) == (codec, bits, bits)), None)
        if evict is not None and quant is not None:
            yield Composite((evict, quant))


def _layer_codec(shape: ModelShape, settings: Settings) -> Quantize | None:
    names = ("hadamard", "affine_fetch", "kivi")
    fitting = (_fitting(name, settings.layer_bits, settings.layer_bits, shape) for name in names)
    return next((action for action in fitting if action is not None), None)


def _groups(layers: Sequence[int], most: int | None) -> Iterator[tuple[int, ...]]:
    """Neighbouring layers in at most ``most`` groups of about the same size."""
    n = len(layers) if most is None else min(most, len(layers))
    for i in range(n):
        group = tuple(layers[i * len(layers) // n : (i + 1) * len(layers) // n])
        # A range that spans an entry without rows is harmless: the action passes it by.
        yield group


def _mixed(shape: ModelShape, codecs: Sequence[Quantize], settings: Settings) -> Iterator[Plan]:
    """Two plans with codecs drawn for runs of layers that are drawn as well."""
    choices = [c for c in codecs if c.codec in ("hadamard", "affine_fetch") and c.key_bits == c.value_bits]
    if len(shape.layers) < 2 or len(choices) < 2:
        return
    rng = np.random.default_rng(settings.seed)
    for pieces in (4, 8):
        pieces = min(pieces, len(shape.layers))
        cuts = sorted(rng.choice(np.arange(1, len(shape.layers)), pieces - 1, replace=False).tolist())
        bounds = [0, *cuts, len(shape.layers)]
        yield Plan(
            tuple(
                ((shape.layers[a], shape.layers[b - 1]), choices[int(rng.integers(len(choices)))])
                for a, b in itertools.pairwise(bounds)
            )
        )
