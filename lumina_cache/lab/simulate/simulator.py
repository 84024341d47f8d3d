"""The simulator: the score of any action on one document, from a forward that keeps the whole cache.

>>> bench = Bench(model, tokenizer, document, plan, 0, rung=Rung.HOOK)
>>> simulator = Simulator(bench)
>>> simulator.simulate("evict:adakv@0.25+quant:hadamard,bits=4").measured.quality.kl_mean
"""

from __future__ import annotations

import datetime
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import cache as stock

from ..._version import __version__
from ...actions import Action, Evict, Keep, Offload, Page, Plan, Quantize, Reclaim, Reserve
from ...apply import held, not_built
from ...backend.attention import attention_hook
from ...backend.capabilities import Rung
from ...backend.hookable import Hookable, hookable
from ...backend.installation import probe_installation
from ...cache import LuminaCache
from ...codecs import AffineFetch, Layout
from ...errors import SimulationError
from ...estimate import Held, after_action, nbytes_live
from ...evict import would_lose
from ...export import to_mlx
from ...fingerprint import remembered_fingerprint
from ...gap.records import Measured, Provenance, Quality, Simulated, State, quality_of
from ...layers import KVCache, RowLayer, leaves
from ...profile import Profile
from ...scorers.observed import OBSERVED, Statistics
from ...scorers.observed.weights import attended_sums
from ...seen import Seen
from ...telemetry import read_once
from ..compare import kl_and_agreement, log_softmax
from ..evaluate.measure import Bench, nll, read_prompt
from ..evaluate.provenance import provenance
from .choose import BORROWED, evicted, kept_by_ranking, kept_of_all_heads, pyramid, ranking, the_group
from .fetch import PAGE
from .foresight import Foresight, parse
from .held import Fetched, LayerRows, mixed, of_layer, reencoded, round_trip
from .impose import ImposedChunk, ImposedLayer, ImposedServer, ImposedWindow
from .nbytes import Analytic, bytes_of
from .reconstruct import reconstruction
from .space import MIXED_ROWS, RECONSTRUCTING, Offer, check, layout_of, observed_by, space, what_of

__all__ = ["Simulator", "provenance_of"]

#: Mean KL (nats per token) up to which the same tokens fed at once and in blocks count as the same.
SAME = 1e-4

#: Of the rows that ``mixed_rows`` stores, this share is important and has so many bits.
_IMPORTANT, _FINE_BITS = 0.2, 8

_Left = LayerRows | Held | None


@dataclass(frozen=True)
class _Layers:
    """What is left of each layer of the full cache; None where it is as it was."""

    full: tuple[Any, ...]
    left: tuple[_Left, ...]

    @property
    def analytic(self) -> Analytic:
        return bytes_of(zip(self.full, self.left, strict=True))


class Simulator:
    """Scores actions on the document of a bench, against the bench's own answers of the full cache.

    Real and simulated figures of one bench are paired: the same rows, the same fed tokens, the same block.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        seed: int = 0,
        provenance: Provenance | None = None,
        profile: Profile | None = None,
    ) -> None:
        """
        Args:
            bench: with the continuation (T1) among its tests; any rung. At rung hook, statistics that it kept of the
                prompt's attention are used; others are gathered by reading the prompt once more when they are needed.
            profile: calibrated on this model and machine, for the time of codecs; a borrowed one is not used.

        Raises:
            SimulationError: no continuation was measured, or the full cache was changed.
        """
        if "T1" not in bench.plan.tests:
            raise SimulationError("the bench has no continuation to compare with: let its plan test T1")
        self.bench = bench
        self._model = bench.model
        self._full = tuple(leaves(list(bench.full)))
        if any(getattr(layer, "changed", False) for layer in self._full):
            raise SimulationError(
                "the bench's full cache was changed by an action; simulate on an unchanged one"
            )
        self._provenance = provenance or provenance_of(bench)
        self._profile = None if profile is None or profile.borrowed else profile
        self._state = State(
            model=remembered_fingerprint(bench.model),
            document=bench.document.name,
            domain=bench.document.domain,
            context=bench.document.context,
            phase="decode",
            seed=seed,
            horizon=len(bench.task.fed),
        )
        self._rankings: dict[tuple[str, str, int], mx.array] = {}
        self._read_again: Mapping[str, Seen] | None = None

    @staticmethod
    def space(**grid: Any) -> tuple[Offer, ...]:
        """See :func:`lumina_cache.lab.simulate.space`."""
        return space(**grid)

    # -- one action -------------------------------------------------------------------------------------------------

    def simulate(self, action: Action | str) -> Simulated:
        """
        Raises:
            ActionSyntaxError: the text cannot be read.
            SimulationError: there is no forward for this action, or for it on this model or in this state.
        """
        taken = parse(action) if isinstance(action, str) else action
        check(taken)
        layers = _Layers(self._full, tuple(self._left_of(layer, taken) for layer in self._full))
        found = layers.analytic
        measured = Measured(
            quality=self._quality(layers),
            share16=found.live16 / self.bench.dense.live16,
            share16_allocated=found.allocated16 / self.bench.dense.live16,
            live=found.live,
            allocated=found.allocated,
            predicted_live=self._predicted(taken),
            time_ratio=self._time(taken),
        )
        return Simulated(self._state, what_of(taken), self._provenance, measured)

    def _predicted(self, action: Action) -> int | None:
        """The estimator's own figure, for actions that the library has code for."""
        if any(isinstance(part, Foresight) for part in action.parts) or not_built(action) is not None:
            return None
        return nbytes_live(after_action([held(layer) for layer in self._full], action))

    def _time(self, action: Action) -> float | None:
        if self._profile is None or not isinstance(action, Quantize) or action.layout is None:
            return None
        figure = self._profile.by_layout.get(action.layout)
        return None if figure is None else figure.time_at(self.bench.document.context)

    # -- what is left of each layer ---------------------------------------------------------------------------------

    def _left_of(self, layer: Any, action: Action) -> _Left:
        parts = action.for_layer(layer.index).parts if isinstance(action, Plan) else action.parts
        if not isinstance(layer, RowLayer) or layer.rows == 0:
            return None
        if not isinstance(layer, KVCache):
            return self._lane(layer, parts)
        self._check_protected(layer, parts)
        seen = self._seen_of(layer, action)
        whole = now = of_layer(layer, seen)
        for part in parts:
            now = self._after(layer, now, part)
        if now is whole:
            return None
        if not now.whole:
            self._check_reached(layer, action)
        return now

    def _lane(self, layer: RowLayer, parts: Sequence[Action]) -> Held | None:
        """A sliding window or attention chunk, which nothing but codecs that encode row by row apply to."""
        now = held(layer)
        for part in parts:
            if not isinstance(part, Quantize) or part.codec == MIXED_ROWS:
                continue
            layout = layout_of(part)
            if layout.row_by_row and layout != now.layout:
                _check_dims(part, layout, now)
                now = replace(now, layout=layout)
        return None if now == held(layer) else now

    def _after(self, layer: KVCache, now: LayerRows, part: Action) -> LayerRows:
        match part:
            case Keep():
                return now
            case Evict():
                rows = now.groups[0].rows
                kept = part.rows_kept(rows)
                if part.scorer == "pyramidkv":
                    which = [one for one in self._full if isinstance(one, KVCache) and one.rows].index(layer)
                    kept = pyramid(rows, kept, self._changeable)[which]
                return evicted(now, part, kept, self._ranking(now, part))
            case Foresight():
                return self._foreseen(now, part)
            case Quantize() if part.codec == MIXED_ROWS:
                return self._mixed(now, part)
            case Quantize():
                layout = layout_of(part)
                if layout == now.layout:
                    return now
                _check_dims(part, layout, now.groups[0].storage)
                return replace(now, groups=tuple(reencoded(g, layout) for g in now.groups))
            case Offload(how="quest"):
                storage = now.groups[0].storage
                if any(g.storage.sealed < PAGE for g in now.groups):
                    raise SimulationError(
                        f"{part}: {now.name} holds {storage.rows} rows, and a page is {PAGE}"
                    )
                pages = storage.sealed // PAGE
                return replace(now, fetched=Fetched("quest", max(1, round((part.ratio or 0) * pages)), PAGE))
            case Reclaim() | Reserve() | Page() | Offload():
                return replace(
                    now,
                    groups=tuple(replace(g, storage=after_action([g.storage], part)[0]) for g in now.groups),
                )
        raise SimulationError(f"there is no forward for {part}")

    def _ranking(self, now: LayerRows, part: Evict) -> mx.array | None:
        """What is computed once for all evictions that begin with the layer's own rows; None for what is not."""
        if part.scorer == RECONSTRUCTING:
            group = the_group(now, part)
            return mx.take_along_axis(self._reconstruction[now.name], group.positions, axis=2)
        if (
            now.fetched is not None
            or len(now.groups) > 1
            or now.groups[0].encoded
            or now.groups[0].storage.evicted
        ):
            return None
        key = (now.name, BORROWED.get(part.scorer, part.scorer), part.seed)
        if key not in self._rankings:
            self._rankings[key] = ranking(now, part)
            mx.eval(self._rankings[key])
        return self._rankings[key]

    @property
    def _changeable(self) -> int:
        return sum(isinstance(one, KVCache) and one.rows > 0 for one in self._full)

    def _foreseen(self, now: LayerRows, part: Foresight) -> LayerRows:
        group = the_group(now, part)
        kept = part.rows_kept(group.rows)
        if part.how == "step":
            sealed = group.storage.sealed
            return replace(now, fetched=Fetched("step", min(sealed, max(1, part.rows_kept(sealed)))))
        mass = mx.take_along_axis(self._future[now.name], group.positions, axis=2)
        stay = mx.zeros(mass.shape, mx.bool_)
        if part.how == "future":
            return kept_by_ranking(now, Evict("random", rows=kept, sinks=0), mass, kept)
        return kept_of_all_heads(now, part, mass, stay, kept, 1)

    def _mixed(self, now: LayerRows, part: Quantize) -> LayerRows:
        """The rows that drew most attention at many bits, the others at those of ``part``; rows to come at many."""
        group = the_group(now, part)
        fine = _fine(part)
        coarse = Layout(
            AffineFetch(part.key_bits, part.group_size),
            AffineFetch(part.value_bits, part.group_size),
            fine.residual,
            fine.sinks,
        )
        _check_dims(part, fine, group.storage)
        assert now.seen is not None
        scores = now.seen.scores("h2o", group.keys, group.values, group.positions)
        head = min(fine.sinks, group.rows)
        sealed = fine.sealable(group.rows - head)
        best = mx.argsort(scores[..., head : head + sealed], axis=-1)[
            ..., sealed - round(_IMPORTANT * sealed) :
        ]
        return replace(now, groups=(mixed(group, coarse, fine, mx.sort(best, axis=-1)),))

    def _check_protected(self, layer: KVCache, parts: Sequence[Action]) -> None:
        known = [p for p in parts if isinstance(p, Evict | Quantize)]
        why = would_lose(layer, held(layer), known, ())
        if why is not None:
            raise SimulationError(f"{why}; keep more rows, or protect fewer")

    # -- what is known of the attention -----------------------------------------------------------------------------

    def _seen_of(self, layer: KVCache, action: Action) -> Seen | None:
        """Statistics for the scorers that ``action`` names; None if it names none."""
        needed = observed_by(action)
        if not needed:
            return None
        seen = layer.seen
        if seen is None or any(name not in seen.stats for name in needed):
            seen = self._watched.get(layer.name)
        for name in needed:
            why = (
                "its attention is not seen"
                if seen is None
                else seen.why_not(name, int(layer.offset), layer.rows)
            )
            if why is not None:
                raise SimulationError(f"{action}: {layer.name}: {why}; choose a scorer that needs no queries")
        return seen

    @property
    def _watched(self) -> Mapping[str, Seen]:
        """Statistics of every scorer, by layer, from reading the prompt once more."""
        if self._read_again is None:
            plan = self.bench.plan
            with LuminaCache(
                self._model, telemetry=False, log=None, guard=False, rung=Rung.HOOK, observe=tuple(_GATHERED)
            ) as cache:
                read_prompt(self._model, cache, self.bench.task.context, plan.chunk)
                seen = [(leaf.name, leaf.seen) for leaf in leaves(list(cache)) if isinstance(leaf, KVCache)]
                mx.eval([one.arrays for _, one in seen if one is not None])
            self._read_again = {name: _shared(one) for name, one in seen if one is not None}
        return self._read_again

    @cached_property
    def _future(self) -> Mapping[str, mx.array]:
        """Attention (1, H, T) that each row draws from the scored tokens, by layer."""
        self._check_watched()
        return self._reference[1]

    def _check_watched(self) -> None:
        unseen = [one for one in self._reached.layers if one.kind == "kv" and one.reason is not None]
        if unseen or not self._reached.sites:
            which = unseen[0].name if unseen else "this model"
            raise SimulationError(
                f"the attention of {which} is not seen, so neither an oracle nor {RECONSTRUCTING} can rank its rows"
            )

    @cached_property
    def _reconstruction(self) -> Mapping[str, mx.array]:
        self._check_watched()
        return reconstruction(self.bench)

    @cached_property
    def _reference(self) -> tuple[mx.array, Mapping[str, mx.array]]:
        """Log-probabilities of the full cache with all tokens fed at once, and the attention seen meanwhile.

        Raises:
            SimulationError: they are not those of the same tokens fed in blocks.
        """
        layers = _Layers(self._full, tuple(None for _ in self._full))
        watch = _Sums({layer.name: layer.rows for layer in self._full if isinstance(layer, KVCache)})
        logprobs = self._forward(layers, watch)
        mx.eval(logprobs, list(watch.sums.values()))
        kl, _ = kl_and_agreement(self.bench.continued, logprobs)
        if abs(float(kl.mean())) > SAME:
            raise SimulationError(
                f"the model gives other logits for the same tokens fed at once than in blocks of {self.bench.plan.block} "
                f"({float(kl.mean()):.2g} nats per token): it cannot be simulated in one forward"
            )
        return logprobs, watch.sums

    # -- the forward ------------------------------------------------------------------------------------------------

    @cached_property
    def _reached(self) -> Hookable:
        return _reached(self._model)

    def _check_reached(self, layer: KVCache, action: Action) -> None:
        one = next((o for o in self._reached.layers if o.name == layer.name), None)
        if one is None or one.reason is not None or not one.direct:
            why = "its attention is not seen" if one is None else one.reason or "attention reads other arrays"
            raise SimulationError(
                f"{action}: nothing can be imposed on the attention of {layer.name} ({why}); this model cannot be simulated"
            )

    def _quality(self, layers: _Layers) -> Quality:
        task = self.bench.task
        whole = all(left is None or (isinstance(left, LayerRows) and left.whole) for left in layers.left)
        if whole:
            return quality_of(np.zeros(len(task.fed)), top1=1.0, nll_change=0.0)
        _ = self._reference  # the model has to be one that can be fed at once
        tried = self._forward(layers)
        kl, same = kl_and_agreement(self.bench.continued, tried)
        change = nll(tried, task.expected) - self.bench.reference["T1"]["nll"]
        return quality_of(kl, top1=float(same.mean()), nll_change=change)

    def _forward(self, layers: _Layers, watch: _Sums | None = None) -> mx.array:
        """Log-probabilities (N, V) after each fed token."""
        fed = self.bench.task.fed
        left = {id(layer): one for layer, one in zip(layers.full, layers.left, strict=True)}
        cache = [_rebuilt(one, lambda leaf: self._entry(leaf, left[id(leaf)])) for one in self.bench.full]
        with attention_hook(self._model) as hook:
            for leaf in leaves(cache):
                if isinstance(leaf, ImposedLayer):
                    hook.serve(leaf, _SERVER)
                    if watch is not None:
                        hook.observe(leaf, watch)
            logits = self._model(mx.array(fed)[None], cache=cache)
            found = log_softmax(logits[0])
            mx.eval(found)
        return found

    def _entry(self, leaf: Any, left: _Left) -> Any:
        """A cache object for one forward: the same rows, with what is left of them imposed."""
        if isinstance(left, Held):
            return _lane_entry(leaf, left.layout)
        if isinstance(leaf, KVCache) and leaf.rows > 0 and self._reached.sites:
            reached = next((o for o in self._reached.layers if o.name == leaf.name), None)
            if reached is not None and reached.reason is None and reached.direct:
                rows = of_layer(leaf, None) if left is None or left.whole else left
                return ImposedLayer(
                    leaf.name, leaf.rows, rows, len(self.bench.task.fed), self.bench.plan.block
                )
        return tree_copy(to_mlx(leaf))


class _Sums:
    """Keeps how much attention each row of the full cache draws, by layer."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        self.sums: dict[str, mx.array] = {}
        self._rows = rows

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
        sums, _ = attended_sums(queries, keys, scale, mask, sinks)
        self.sums[layer.name] = sums[..., : self._rows[layer.name]]
        return (self.sums[layer.name],)


_SERVER = ImposedServer()

#: Scorers watched when the prompt is read again, and whose statistics serve others.
_GATHERED: Mapping[str, tuple[str, ...]] = {
    "h2o": ("h2o", "h2o_mean", "vatp"),
    "snapkv": ("snapkv", "tova"),
    "expected_attention": ("expected_attention",),
}


def _shared(seen: Seen) -> Seen:
    """With the same statistics under the name of every scorer that they serve."""
    stats: dict[str, Statistics] = {}
    for name, served in _GATHERED.items():
        if name in seen.stats:
            stats |= dict.fromkeys(served, seen.stats[name])
    return replace(seen, scorers={name: OBSERVED[name]() for name in stats}, stats=stats)


def _fine(part: Quantize) -> Layout:
    codec = AffineFetch(_FINE_BITS, part.group_size)
    return Layout(codec, codec, part.residual or 0, part.sinks or 0)


def _check_dims(part: Action, layout: Layout, storage: Held) -> None:
    why = layout.why_not(storage.key_dim, storage.value_dim)
    if why is not None:
        raise SimulationError(f"{part}: {storage.name}: {why}; choose another group size or codec")
    if storage.rows < layout.sinks:
        raise SimulationError(
            f"{part}: {storage.name} holds {storage.rows} rows, of which {layout.sinks} are to stay dense"
        )


def _rebuilt(entry: Any, make: Callable[[Any], Any]) -> Any:
    if isinstance(entry, stock.CacheList):
        return stock.CacheList(*(_rebuilt(child, make) for child in entry.caches))
    return make(entry)


def _lane_entry(leaf: Any, layout: Layout) -> Any:
    plain = tree_copy(to_mlx(leaf))
    new: Any = ImposedWindow if isinstance(plain, stock.RotatingKVCache) else ImposedChunk
    made = new.__new__(new)
    made.__dict__.update(plain.__dict__)
    made.layout = layout
    made.keys, made.values = round_trip(layout, plain.keys, plain.values)
    return made


def tree_copy(entry: Any) -> Any:
    """``entry`` with arrays of its own."""
    for name, value in vars(entry).items():
        if isinstance(value, mx.array | list | tuple):
            setattr(entry, name, tree_map(lambda a: a + 0 if isinstance(a, mx.array) else a, value))
    return entry


_remembered: dict[int, tuple[weakref.ref[Any], Hookable]] = {}


def _reached(model: Any) -> Hookable:
    """What a hook reaches of ``model``, found once per live model."""
    alive, known = _remembered.get(id(model), (None, None))
    if known is None or alive is None or alive() is not model:
        known = hookable(model)
        key = id(model)
        _remembered[key] = (weakref.ref(model, lambda _: _remembered.pop(key, None)), known)
    return known


def provenance_of(
    bench: Bench, *, source: str = "campaign", run: str = "", model_name: str = ""
) -> Provenance:
    """Where figures on this bench come from."""
    installation = probe_installation()
    return Provenance(
        source=source,
        run=run,
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model_name=model_name or type(bench.model).__module__.rsplit(".", 1)[-1],
        text_sha256=bench.document.text_sha256,
        tokens_sha256=bench.document.tokens_sha256,
        device=installation.device,
        machine=read_once().chip or platform.machine(),
        mlx=installation.mlx,
        mlx_lm=installation.mlx_lm,
        lumina_cache=__version__,
        git_commit=provenance()["commit"],
    )
