"""``LuminaCache``: what is passed as ``prompt_cache=`` to mlx-lm."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, SupportsIndex, overload

import mlx.core as mx
from mlx_lm.models import cache as stock

from .actions import Action, Plan, parse_action
from .agree import Agreement, agreement
from .apply import Applied, Footprint, held_all, opaque_nbytes
from .audit import AuditLog
from .backend.capabilities import Rung
from .backend.interface import check_interface
from .budget import budget_nbytes, format_bytes
from .codecs.guard import LIMIT
from .controller import Controller, smallest_budget
from .disk import DiskStore, Lease
from .errors import BudgetError, UnsupportedCacheError
from .estimate import after_append, emptied, merge_equal, nbytes_allocated
from .export import to_mlx
from .layers import ManagedLayer, adopt, leaves, managed
from .policy import POLICIES, Policy
from .profile import RECALL
from .reach import Reach
from .rows import Pinned
from .steps import StepTracker
from .telemetry import Sampler, Snapshot, read_once

__all__ = ["CacheView", "LayerView", "LuminaCache", "Telemetry"]

#: mlx-lm's default ``prefill_step_size``; a larger chunk is never recommended.
LARGEST_PREFILL_STEP = 2048


class Telemetry(Protocol):
    """Anything with the latest machine snapshot in an attribute, for example a telemetry ``Sampler``."""

    @property
    def latest(self) -> Snapshot | None: ...


@dataclass(frozen=True)
class LayerView:
    """One layer as it is now. ``rows`` and ``offset`` in tokens; ``bits`` is None while rows are dense."""

    name: str
    kind: str
    rows: int
    offset: int
    bits: int | None
    nbytes_live: int
    nbytes_allocated: int


@dataclass(frozen=True)
class CacheView:
    """A cache as it is now, read without synchronising with the device."""

    phase: (
        str | None
    )  #: ``"prefill"`` (last step had several tokens), ``"decode"``, or None before the first step
    step: int
    tokens_step: int
    layers: tuple[LayerView, ...]
    nbytes_live: int
    nbytes_allocated: int
    mlx_active: int
    mlx_pool: int
    mlx_peak: int
    limit: (
        int | None
    )  #: bytes that may be allocated: the budget, less while the machine is short of memory; None: any
    limit_why: str


class LuminaCache(list[Any]):
    """A KV cache for mlx-lm that can hold a memory budget and writes down what it does.

    It *is* a list of cache objects, one per entry of ``mlx_lm.models.cache.make_prompt_cache(model)``, each a subclass
    of the mlx-lm class it stands for. Until an action is taken, logits are bit-identical to the stock cache's.

    >>> cache = LuminaCache(model, budget="2GB", log="run.jsonl")          # doctest: +SKIP
    >>> mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)      # doctest: +SKIP

    Args:
        model: the mlx-lm model that the cache will be used with.
        budget: bytes that the cache stays under: a number, text such as ``"2GB"``, a share of what MLX may use on this
            machine such as ``"40%"``, or ``"auto"`` for half of what is free of it. None: watch, and act only when the
            machine is about to be in trouble (rows are re-encoded then, and none is dropped).
        policy: who chooses among feasible actions: a name of :data:`~lumina_cache.policy.POLICIES` (default
            ``"adaptive"``), ``"fixed"`` (with ``plan``), ``"off"`` for nobody, or an object of your own.
        telemetry: an object with a ``latest`` snapshot (a telemetry ``Sampler``), True for a sampler of the cache's own,
            whose changes are written to the log, False for none. Default: read at the start and at decisions.
        log: path of the audit log, True for a new file in the user's state directory, None to keep the last 1,000
            records in memory only (:attr:`log` ``.records``).
        draft_model: for speculative decoding, the draft model; the joint cache is then what mlx-lm expects.
        plan: an action (or its text) decided beforehand, instead of a budget: carried out when the prompt is over, and
            evictions to a number of rows again and again from then on; see :mod:`lumina_cache.standing`.
        protect: ranges of positions, such as ``range(0, 120)`` for a system prompt, whose rows are never evicted.
        disk: where rows may be moved to: True for the user's cache directory, a path, or a
            :class:`~lumina_cache.disk.DiskStore` (which can be given limits, and is the caller's to close). None:
            nothing is written.
        guard: whether layers whose rows a codec would spoil get more bits, or stay as they are; a number is the noise
            that is let through, see :mod:`lumina_cache.guarding`. False: every codec is used as asked.
        horizon: how many tokens the caller expects this cache to see in all (prompt, generated and drafted ones); None
            if not known. Decisions while a prompt is read look no further ahead than that; without it they expect as much
            again as they have seen. Also used to say early whether rows may have to be evicted (or a sliding window may
            wrap), which speculative decoding and prefix reuse need to know.
        recall: how much of what comes next will ask again for something that was said before, word by word: 0 for text
            that only goes on, 1 where everything is looked up. The more, the more dropping rows costs beside storing
            them coarsely.
        rung: how deep the cache reaches into mlx-lm. ``"native"``: its own layouts and packed attention only; ``"cache"``:
            what an own cache object can do; ``"hook"``: the model's attention calls too, for as long as the cache is
            open. They are watched, so that rows can be ranked by the attention they draw, and served from codes where
            rows are encoded. See docs/hook.md.
        observe: at rung hook, the scorers (such as ``"snapkv"``, ``"h2o"``) whose statistics are kept. Default: those
            that ``plan`` names, or else ``snapkv``, which costs next to nothing while the model runs.
        group: the ``mx.distributed`` group whose ranks hold parts of this cache (``model.shard(group)``). All of them then
            take the same action at the same step, on the tightest of what any of them sees; every rank has to make its
            cache with the same arguments, at the same point. See docs/ranks.md. None: there is one rank.

    Raises:
        ActionInfeasibleError: the plan can never be carried out with this model.
        BackendInterfaceError: the installed mlx-lm is not one whose interface is known.
        ProfileFormatError: the model's own profile does not say what ``recall`` needs.
        BudgetError: the budget cannot be read, or is smaller than the smallest that can be held for this model.
        UnsupportedCacheError: the model's cache cannot be managed (batched caches), or cannot be joined with a draft's.
    """

    # A list subclass with a plain __init__ would pickle and copy its items into the constructor: see __deepcopy__.

    def __init__(
        self,
        model: Any,
        *,
        budget: int | str | None = None,
        policy: Policy | str | None = None,
        telemetry: Telemetry | bool | None = None,
        log: str | os.PathLike[str] | bool | None = None,
        draft_model: Any | None = None,
        horizon: int | None = None,
        plan: Action | str | None = None,
        protect: range | Iterable[range] = (),
        disk: DiskStore | str | os.PathLike[str] | bool | None = None,
        guard: bool | float = True,
        recall: float = RECALL,
        rung: str | Rung = "cache",
        observe: Iterable[str] | str | None = None,
        group: Any | None = None,
    ) -> None:
        check_interface()
        super().__init__()
        standing = parse_action(plan) if isinstance(plan, str) else plan
        _check_standing(standing, budget, draft_model)
        audit = AuditLog(log)
        read_machine = _reader(telemetry, audit)
        nbytes = None if budget is None else budget_nbytes(budget, read_machine)
        models = [model] if draft_model is None else [model, draft_model]
        made = [stock.make_prompt_cache(m) for m in models]
        if draft_model is not None and len(made[0]) != len(model.layers):
            raise UnsupportedCacheError(
                f"speculative decoding splits the joint cache after {len(model.layers)} entries (one per layer), but "
                f"this model makes {len(made[0])}: mlx-lm cannot draft for it with a cache from outside. "
                "Leave draft_model out"
            )
        self._control = Controller(
            models,
            budget=nbytes,
            policy=policy_of(policy, standing),
            read_machine=read_machine,
            watch=telemetry is not None and telemetry is not False,
            log=audit,
            horizon=horizon,
            recall=_recall(recall),
            plan=standing,
            protect=_ranges(protect),
            disk=_disk(disk),
            guard=_guard(guard),
            reach=Reach.asked(rung, model, observe, standing),
            ranks=_ranks(group, draft_model),
        )
        for name, entries in zip(("model", "draft"), made, strict=False):
            steps = StepTracker(self._control, name)
            self._control.trackers.append(steps)
            prefix = "layer" if name == "model" else "draft layer"
            self.extend(adopt(entry, steps, f"{prefix} {i}") for i, entry in enumerate(entries))
        self._split = len(made[0])
        self._note_entries()
        if self._control.ranks is not None and self._control.decider is not None:
            # Probing runs the model, and with it collectives that every rank has to enter.
            self._control.fit(self._control.trackers[0], self._control.decider)
        if recall != RECALL and self._control.decider is not None:
            # Now, so that what the profile lacks is not found out during generation.
            self._control.decider.profile.with_recall(recall)
        if nbytes is not None and self._control.decider is not None:
            self._check_budget(nbytes)
        self._control.check_plan()
        self._control.log_start()

    # -- what the cache tells ---------------------------------------------------------------------------------------

    @property
    def log(self) -> AuditLog:
        """The audit log: ``.path`` and the last records in memory, ``.records``."""
        return self._control.log

    @property
    def budget(self) -> int | None:
        """The budget in bytes."""
        return self._control.budget

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all entries, growth slack included; 0 while suspended."""
        if self.suspended:
            return 0
        return sum(
            int(entry.nbytes) if isinstance(entry, ManagedLayer) else opaque_nbytes(entry) for entry in self
        )

    def observe(self) -> CacheView:
        """Phase, rows, offsets and bytes as they are now; no array is read and nothing is evaluated."""
        steps = self._control.trackers[0]
        layers = held_all(leaves(self))
        bytes_now = Footprint.of(leaves(self))
        limit = self._control.limit
        return CacheView(
            phase=steps.phase,
            step=steps.step,
            tokens_step=steps.tokens,
            layers=tuple(
                LayerView(
                    one.name,
                    one.kind,
                    one.rows,
                    one.offset,
                    one.bits,
                    _live(leaf),
                    nbytes_allocated([one]),
                )
                for one, leaf in zip(layers, leaves(self), strict=True)
            ),
            nbytes_live=bytes_now.nbytes_live,
            nbytes_allocated=bytes_now.nbytes_allocated,
            mlx_active=bytes_now.mlx_active,
            mlx_pool=bytes_now.mlx_pool,
            mlx_peak=mx.get_peak_memory(),
            limit=limit.nbytes,
            limit_why=limit.why,
        )

    def recommend_prefill_step(self) -> int:
        """The largest ``prefill_step_size`` (tokens) whose next chunk fits the budget as rows are stored now.

        mlx-lm hands a whole chunk over at once, so a chunk larger than this passes the budget until the chunk is done.
        """
        if self.budget is None:
            return LARGEST_PREFILL_STEP
        steps = self._control.trackers[0]
        layers = merge_equal(held_all(leaves(self)))
        if steps.step == 0:
            layers = tuple(
                one if one.fixed_nbytes else emptied(one) for one in self._control.probe(steps).layers
            )
        fits = [n for n in range(1, 257) if nbytes_allocated(after_append(layers, n * 8)) <= self.budget]
        return min(LARGEST_PREFILL_STEP, max(fits, default=1) * 8)

    # -- what the cache does ----------------------------------------------------------------------------------------

    def apply(self, action: Action | str) -> Applied | None:
        """Carry out an action on every layer it applies to, and prove from the arrays that it happened.

        Between two steps it is done at once. Inside a step (from a callback of the model) it is done at the next
        boundary, and None is returned.

        Raises:
            ActionSyntaxError: the text cannot be read.
            ActionInfeasibleError: with every reason; the cache is as it was.
            EngagementError: the action ran, but rows or bytes are not those asked for.
        """
        return self._control.apply(parse_action(action) if isinstance(action, str) else action)

    def spread(self, action: Action | str) -> Plan:
        """``action``, an eviction by attention, as a plan that gives each layer the rows it needs: in all no more bytes.

        Nothing is changed; hand the plan to :meth:`apply`. See :mod:`lumina_cache.spread` for what is minimised.

        Raises:
            ActionSyntaxError: the text cannot be read.
            ActionInfeasibleError: it cannot be executed, is not one eviction with codecs after it at most, or its scorer's
                scores are not shares of attention.
        """
        return self._control.spread(parse_action(action) if isinstance(action, str) else action)

    def protect(self, *positions: range) -> None:
        """Keep the rows of these positions from eviction, from now on, beside those protected already.

        Raises:
            ActionInfeasibleError: the plan could not be carried out any more.
            UnsupportedCacheError: something that is not a range of positions in steps of one.
        """
        self._control.protect_more(_ranges(positions))

    def suspend(self) -> int:
        """Move everything that the cache holds to a file, for the time between two turns; returns the bytes freed.

        Any use of the cache brings it back, as does :meth:`resume`.

        Raises:
            ActionInfeasibleError: the cache was given no disk, or the model is inside a step.
            DiskTierError: the file could not be written; the cache is as it was.
        """
        return self._control.suspend()

    def resume(self) -> None:
        """Bring back what :meth:`suspend` moved to a file.

        Raises:
            DiskTierError: the file is gone, or is not what was written; the cache stays suspended.
        """
        self._control.resume()

    @property
    def suspended(self) -> bool:
        """Whether everything is in a file."""
        return self._control.suspended is not None

    def to_mlx(self, *, decode: bool = False) -> list[Any]:
        """The same contents as plain mlx-lm cache objects, for ``save_prompt_cache`` or code that does not know us.

        Args:
            decode: decode packed rows where mlx-lm has no class for them (packed *and* evicted).

        Raises:
            UnsupportedCacheError: naming the layer that mlx-lm's classes cannot express, and the remedy.
        """
        return [to_mlx(entry, decode=decode) for entry in self]

    def close(self) -> None:
        """Write ``session.ended``, and close the attention hook of a cache at rung hook: mlx-lm's modules are as they
        were. Done by itself when the cache is collected or the interpreter exits.

        Files on disk are deleted, and rows in them are gone, unless a copy of the cache still uses them or the store
        was passed to the cache; the cache is of no use afterwards if it had rows there.
        """
        self._control.finalizer()

    def __enter__(self) -> LuminaCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what a list does -------------------------------------------------------------------------------------------

    def __add__(self, other: list[Any]) -> list[Any]:
        self._note_joined(other)
        return [*self, *other]

    def __iadd__(self, other: Iterable[Any]) -> LuminaCache:
        """Append a draft model's cache; its entries are used as they are, unmanaged and not counted in the budget."""
        other = other if isinstance(other, LuminaCache) else list(other)
        self._note_joined(other)
        self.extend(other)
        return self

    def _note_joined(self, other: list[Any]) -> None:
        """Two caches are joined for speculative decoding only, so tokens will be taken back in both.

        (Models with more layers than entries pad their cache with None.)
        """
        joined = [self] if any(entry is not None for entry in other) else []
        if isinstance(other, LuminaCache):
            joined.append(other)
        for cache in joined:
            plan = cache._control.plan
            if plan is not None:
                raise _plan_with_draft(plan.action)
        for cache in joined:
            cache._control.speculative = True

    @overload
    def __setitem__(self, index: SupportsIndex, value: Any) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[Any]) -> None: ...
    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            values = list(value)
            indices = range(*index.indices(len(self)))
            if len(values) != len(indices):
                raise UnsupportedCacheError(
                    f"{len(values)} entries cannot take the place of {len(indices)}: a cache has one entry per layer"
                )
            for i, one in zip(indices, values, strict=True):
                self[i] = one
            return
        index = range(len(self))[index]
        self.resume()
        old = self[index]
        if value is old:
            return
        draft = index >= self._split
        if draft and len(self._control.trackers) == 1:  # joined afterwards, and not managed
            super().__setitem__(index, value)
            return
        steps = self._control.trackers[draft]
        name = f"draft layer {index - self._split}" if draft else f"layer {index}"
        super().__setitem__(index, adopt(value, steps, name))
        if all(entry is not old for entry in self):
            for layer in managed(old):
                steps.detach(layer)
        self._note_entries()
        self._control.rows_replaced(steps)

    def __deepcopy__(self, memo: dict[int, Any]) -> LuminaCache:
        for steps in self._control.trackers:
            steps.on_touch()
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new._control = copy.deepcopy(self._control, memo)
        for steps in self._control.trackers:
            copy.deepcopy(steps, memo)
        new._split = self._split
        new.extend(copy.deepcopy(entry, memo) for entry in self)
        new._note_entries()
        return new

    def __copy__(self) -> LuminaCache:
        raise UnsupportedCacheError(
            "copy.copy would share rows between two caches and corrupt both; use copy.deepcopy"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise UnsupportedCacheError(
            "a LuminaCache cannot be pickled; save_prompt_cache(path, cache.to_mlx()) writes one"
        )

    # -- inside -----------------------------------------------------------------------------------------------------

    def _note_entries(self) -> None:
        split = self._split
        self._control.entries = [
            [weakref.ref(leaf) for leaf in leaves(part)]
            for part in (list(self[:split]), list(self[split:]))
            if part
        ]
        self._control.reach.attach(leaves(list(self[:split])))

    def _check_budget(self, nbytes: int) -> None:
        steps = self._control.trackers[0]
        steps.expect(self._control.probe(steps).updated_per_step)
        if self._control.speculative:
            # No row may go while tokens can be taken back, so nothing can be promised for every length.
            return
        decider = self._control.decider
        assert decider is not None
        self._control.fit(steps, decider)
        probe = replace(self._control.probe(steps), profile=self._control.profile(steps))
        pinned = sum(end - first for first, end in self._control.protect)
        smallest = smallest_budget(probe, pinned)
        decider.keeper = replace(decider.keeper, floor=smallest)
        if nbytes < smallest:
            raise BudgetError(
                f"a budget of {format_bytes(nbytes)} cannot be held: the smallest that works for this model is "
                f"{smallest} bytes ({format_bytes(smallest)})"
            )


def _check_standing(plan: Action | None, budget: object, draft_model: object) -> None:
    if plan is None:
        return
    if budget is not None:
        raise UnsupportedCacheError(f"plan {plan} beside a budget of {budget}: give one of them")
    if draft_model is not None:
        raise _plan_with_draft(plan)


def _plan_with_draft(plan: Action) -> UnsupportedCacheError:
    return UnsupportedCacheError(
        f"plan {plan} with a draft model: a plan acts when the prompt is over, which cannot be told from steps that "
        "try several tokens at once; call apply() yourself"
    )


def _ranks(group: Any | None, draft_model: object) -> Agreement | None:
    if group is not None and draft_model is not None:
        raise UnsupportedCacheError(
            "several ranks with a draft model: which step they are at cannot be told alike on all of them; leave "
            "draft_model out, or group (each rank then decides alone)"
        )
    return agreement(group)


def _ranges(protect: range | Iterable[range]) -> Pinned:
    ranges = [protect] if isinstance(protect, range) else list(protect)
    for one in ranges:
        if not isinstance(one, range) or one.step != 1 or one.start < 0:
            raise UnsupportedCacheError(
                f"protect: {one!r} is not a range of positions in steps of one, such as range(0, 120)"
            )
    return tuple((one.start, one.stop) for one in ranges if len(one))


def _disk(disk: DiskStore | str | os.PathLike[str] | bool | None) -> Lease | None:
    if disk is None or disk is False:
        return None
    if isinstance(disk, DiskStore):
        return Lease(disk, own=False)
    store = DiskStore(None if disk is True else disk, max_bytes=None, total_max_bytes=None)
    return Lease(store, own=True)


def _guard(guard: bool | float) -> float | None:
    if isinstance(guard, bool):
        return LIMIT if guard else None
    if not isinstance(guard, int | float) or not guard > 0:
        raise UnsupportedCacheError(
            f"guard={guard!r}: give True, False, or the noise let through, relative to the rows' variance ({LIMIT} "
            "by default)"
        )
    return float(guard)


def _recall(recall: float) -> float:
    if isinstance(recall, bool) or not isinstance(recall, int | float) or not 0.0 <= recall <= 1.0:
        raise UnsupportedCacheError(
            f"recall={recall!r}: give a share from 0 (the text only goes on) to 1 (everything is looked up); it is "
            f"{RECALL} by default"
        )
    return float(recall)


def policy_of(policy: Policy | str | None, plan: Action | None) -> Policy | None:
    """Who decides: ``policy``, or the one of that name; None for nobody.

    Raises:
        UnsupportedCacheError: there is no policy of that name.
    """
    if policy is None:
        return None if plan is not None else POLICIES["adaptive"]()
    if not isinstance(policy, str):
        return policy
    if policy == "off":
        return None
    if policy == "fixed":
        if plan is None:
            raise UnsupportedCacheError("policy 'fixed' carries out a plan: give plan=…")
        return None
    if policy not in POLICIES:
        raise UnsupportedCacheError(
            f"unknown policy {policy!r}: give {', '.join(map(repr, POLICIES))}, 'fixed' with plan=…, 'off', or an object "
            "with a name and decide(state, candidates)"
        )
    return POLICIES[policy]()


def _reader(telemetry: Telemetry | bool | None, log: AuditLog) -> Callable[[], Snapshot | None]:
    if telemetry is False:
        return lambda: None
    if telemetry is None:
        return read_once
    if telemetry is True:
        sampler = Sampler(on_change=lambda change: log.write("telemetry", change=change, snapshot=None))
        # The reader is the sampler's only owner: its threads end when the cache is gone, at the latest at exit.
        return lambda: sampler.latest
    if not hasattr(telemetry, "latest"):
        raise UnsupportedCacheError(
            f"telemetry={telemetry!r}: give True, False, or an object whose attribute 'latest' is a Snapshot"
        )
    return lambda: telemetry.latest


def _live(leaf: Any) -> int:
    if isinstance(leaf, ManagedLayer):
        return leaf.nbytes_live
    return opaque_nbytes(leaf)
