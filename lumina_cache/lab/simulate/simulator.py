"""The simulator: the score of any action on one document, from a forward that keeps the whole cache.

>>> bench = Bench(model, tokenizer, document, plan, 0, rung=Rung.HOOK)
>>> simulator = Simulator(bench)
>>> simulator.simulate("evict:adakv@0.25+quant:hadamard,bits=4").measured.quality.kl_mean
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..._version import __version__
from ...actions import Action, Evict, Keep, Offload, Page, Plan, Quantize, Reclaim, Reserve
from ...apply import held, not_built
from ...backend.installation import probe_installation
from ...codecs import Layout
from ...errors import SimulationError
from ...estimate import Held, after_action, nbytes_live
from ...evict import would_lose
from ...fingerprint import remembered_fingerprint
from ...gap.records import Measured, Provenance, Quality, Simulated, State, quality_of
from ...layers import KVCache, RowLayer
from ...profile import Profile
from ...telemetry import read_once
from ..compare import kl_and_agreement
from ..evaluate.measure import Bench, nll
from ..evaluate.provenance import provenance
from .choose import BORROWED, evicted, kept_by_ranking, kept_of_all_heads, pyramid, ranking, the_group
from .fetch import PAGE
from .foresight import Foresight, foresees, parse
from .forward import Forward, Left
from .held import Fetched, LayerRows, mixed, of_layer, reencoded
from .known import Known
from .nbytes import bytes_of
from .space import (
    MIXED_ROWS,
    RECONSTRUCTING,
    Offer,
    check,
    layout_of,
    mixed_layouts,
    observed_by,
    space,
    what_of,
)

__all__ = ["Simulator", "provenance_of"]

#: Share of the rows that ``mixed_rows`` stores as important ones.
_IMPORTANT = 0.2


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
        self._bench = bench
        self._forward = Forward(bench)
        self._known = Known(bench, self._forward)
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

    @staticmethod
    def space(**grid: Any) -> tuple[Offer, ...]:
        """See :func:`lumina_cache.lab.simulate.space`."""
        return space(**grid)

    def simulate(self, action: Action | str) -> Simulated:
        """What ``action`` costs in quality and bytes, taken when the context is held and before the scored tokens.

        Raises:
            ActionSyntaxError: the text cannot be read.
            SimulationError: there is no forward for this action, or for it on this model or in this state.
        """
        taken = parse(action) if isinstance(action, str) else action
        check(taken)
        left = [self.left_of(layer, taken) for layer in self._forward.full]
        nbytes = bytes_of(zip(self._forward.full, left, strict=True))
        measured = Measured(
            quality=self._quality(left),
            share16=nbytes.live16 / self._bench.dense.live16,
            share16_allocated=nbytes.allocated16 / self._bench.dense.live16,
            live=nbytes.live,
            allocated=nbytes.allocated,
            predicted_live=self._predicted(taken),
            time_ratio=self._time(taken),
        )
        return Simulated(self._state, what_of(taken), self._provenance, measured)

    def _quality(self, left: Sequence[Left]) -> Quality:
        task = self._bench.task
        if all(one is None or (isinstance(one, LayerRows) and one.whole) for one in left):
            return quality_of(np.zeros(len(task.fed)), top1=1.0, nll_change=0.0)
        self._known.check_one_forward()
        tried = self._forward.logprobs(left)
        kl, same = kl_and_agreement(self._bench.continued, tried)
        change = nll(tried, task.expected) - self._bench.reference["T1"]["nll"]
        return quality_of(kl, top1=float(same.mean()), nll_change=change)

    def _predicted(self, action: Action) -> int | None:
        """The estimator's own figure, for actions that the library has code for."""
        if foresees(action) or not_built(action) is not None:
            return None
        return nbytes_live(after_action([held(layer) for layer in self._forward.full], action))

    def _time(self, action: Action) -> float | None:
        if self._profile is None or not isinstance(action, Quantize):
            return None
        figure = self._profile.codec(action)
        return None if figure is None else figure.time_at(self._bench.document.context)

    # -- what is left of each layer ---------------------------------------------------------------------------------

    def left_of(self, layer: Any, action: Action) -> Left:
        """What ``action`` leaves of a layer of the full cache; None where it stays as it is.

        Raises:
            SimulationError: as :meth:`simulate`.
        """
        own = action.for_layer(layer.index) if isinstance(action, Plan) else action
        if not isinstance(layer, RowLayer) or layer.rows == 0:
            return None
        if not isinstance(layer, KVCache):
            return _lane(layer, own)
        _check_protected(layer, own)
        whole = now = of_layer(layer, self._known.seen(layer, observed_by(own)))
        for part in own.parts:
            now = self._after(layer, now, part)
        if not now.whole and (why := self._forward.why_not(layer)) is not None:
            raise SimulationError(
                f"{action}: nothing can be imposed on the attention of {layer.name} ({why}); "
                "this model cannot be simulated"
            )
        return None if now is whole else now

    def _after(self, layer: KVCache, now: LayerRows, part: Action) -> LayerRows:
        match part:
            case Keep():
                return now
            case Evict():
                return evicted(now, part, self._kept(layer, now, part), self._ranking(now, part))
            case Foresight():
                return self._foreseen(now, part)
            case Quantize() if part.codec == MIXED_ROWS:
                return _mixed(now, part)
            case Quantize():
                return _encoded(now, part)
            case Offload(how="quest"):
                return _paged(now, part)
            case Reclaim() | Reserve() | Page() | Offload():
                stored = (replace(g, storage=after_action([g.storage], part)[0]) for g in now.groups)
                return replace(now, groups=tuple(stored))
        raise SimulationError(f"there is no forward for {part}")

    def _kept(self, layer: KVCache, now: LayerRows, part: Evict) -> int:
        rows = the_group(now, part).rows
        kept = part.rows_kept(rows)
        if part.scorer != "pyramidkv":
            return kept
        return pyramid(rows, kept, len(self._forward.row_layers))[self._forward.row_layers.index(layer)]

    def _ranking(self, now: LayerRows, part: Evict) -> mx.array | None:
        """What is computed once for all evictions that begin with the layer's own rows; None for what is not."""
        group = the_group(now, part)
        if part.scorer == RECONSTRUCTING:
            return mx.take_along_axis(self._known.reconstruction[now.name], group.positions, axis=2)
        if group.encoded or group.storage.evicted:
            return None
        key = (now.name, BORROWED.get(part.scorer, part.scorer), part.seed)
        if key not in self._rankings:
            self._rankings[key] = ranking(now, part)
            mx.eval(self._rankings[key])
        return self._rankings[key]

    def _foreseen(self, now: LayerRows, part: Foresight) -> LayerRows:
        group = the_group(now, part)
        if part.how == "step":
            return replace(now, fetched=Fetched("step", part.rows_kept(group.storage.sealed)))
        kept = part.rows_kept(group.rows)
        mass = mx.take_along_axis(self._known.future[now.name], group.positions, axis=2)
        if part.how == "future":
            return kept_by_ranking(now, Evict("random", rows=kept, sinks=0), mass, kept)
        return kept_of_all_heads(now, part, mass, mx.zeros(mass.shape, mx.bool_), kept, floor=1)


def _encoded(now: LayerRows, part: Quantize) -> LayerRows:
    layout = layout_of(part)
    if layout == now.layout:
        return now
    _check_dims(part, layout, now.groups[0].storage)
    return replace(now, groups=tuple(reencoded(g, layout) for g in now.groups))


def _mixed(now: LayerRows, part: Quantize) -> LayerRows:
    """The rows that drew most attention at many bits, the others at those of ``part``; rows to come at many."""
    group = the_group(now, part)
    coarse, fine = mixed_layouts(part)
    _check_dims(part, fine, group.storage)
    assert now.seen is not None, "observed_by() names the scorer"
    scores = now.seen.scores("h2o", group.keys, group.values, group.positions)
    head = min(fine.sinks, group.rows)
    sealed = fine.sealable(group.rows - head)
    ranked = mx.argsort(scores[..., head : head + sealed], axis=-1)
    important = mx.sort(ranked[..., sealed - round(_IMPORTANT * sealed) :], axis=-1)
    return replace(now, groups=(mixed(group, coarse, fine, important),))


def _paged(now: LayerRows, part: Offload) -> LayerRows:
    storage = the_group(now, part).storage
    pages = storage.sealed // PAGE
    if pages == 0:
        raise SimulationError(
            f"{part}: {now.name} has {storage.sealed} rows to fetch, and a page is {PAGE}; take a longer context"
        )
    return replace(now, fetched=Fetched("quest", max(1, round((part.ratio or 0.0) * pages)), PAGE))


def _lane(layer: RowLayer, action: Action) -> Held | None:
    """A sliding window or attention chunk, which nothing but codecs that encode row by row apply to."""
    before = now = held(layer)
    for part in action.parts:
        if not isinstance(part, Quantize) or part.codec == MIXED_ROWS:
            continue
        layout = layout_of(part)
        if layout.row_by_row and layout != now.layout:
            _check_dims(part, layout, now)
            now = replace(now, layout=layout)
    return None if now == before else now


def _check_protected(layer: KVCache, action: Action) -> None:
    known = [part for part in action.parts if isinstance(part, Evict | Quantize)]
    why = would_lose(layer, held(layer), known, ())
    if why is not None:
        raise SimulationError(f"{why}; keep more rows, or protect fewer")


def _check_dims(part: Action, layout: Layout, storage: Held) -> None:
    why = layout.why_not(storage.key_dim, storage.value_dim)
    if why is not None:
        raise SimulationError(f"{part}: {storage.name}: {why}; choose another group size or codec")
    if storage.rows < layout.sinks:
        raise SimulationError(
            f"{part}: {storage.name} holds {storage.rows} rows, of which {layout.sinks} are to stay dense"
        )


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
