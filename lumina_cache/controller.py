"""What stands behind the layers of one cache: it hears of step boundaries, decides, acts, and writes down."""

from __future__ import annotations

import copy
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx

from ._version import __version__
from .actions import DEFAULT_SINKS, Action, Evict, Keep, Plan, Quantize, evicts, singles
from .agree import Agreement, Stance
from .apply import Applied, Footprint, execute, first_guarded, held_all, why_not_protected
from .audit import AuditLog
from .backend.capabilities import DISK_TIER, ROW_GATHER, BackendProfile, Outcome, packed_attention
from .backend.feasibility import Reason, Verdict, classify
from .backend.interface import mlx_lm_version, mlx_version
from .backend.probe import ModelProbe, probe_packed, remembered_probe
from .budget import format_bytes
from .codecs import Affine, Layout
from .decider import Decider
from .disk import DiskStore, Lease
from .errors import ActionInfeasibleError, BudgetError, DiskTierError, LuminaError, LuminaWarning
from .estimate import (
    Held,
    after_action,
    after_append,
    covered,
    emptied,
    merge_equal,
    nbytes_allocated,
    nbytes_live,
    tokens_without_growth,
)
from .fingerprint import remembered_fingerprint
from .guarding import Guard
from .layers import KVCache, ManagedLayer, RotatingKVCache
from .policy import DEFAULT_HORIZON, Limit, Policy, State
from .profile import RECALL, Profile
from .profile_home import profile_for
from .reach import Reach
from .rows import Pinned
from .spread import losses_of_layers, spread
from .standing import StandingPlan, only
from .steps import StepTracker
from .suspend import Suspended, suspend
from .telemetry import Snapshot

__all__ = ["Controller", "smallest_budget"]

#: Every how many steps a ``step`` record is written (and at each change of phase).
STEP_RECORD_EVERY = 64

#: Tokens after which the machine is looked at again even if nothing grows.
LOOK_EVERY = 256

#: Most times that a decision is made because what was chosen could not be carried out.
MOST_TRIES = 8
#: The last of them, which are left to evictions.
TRIES_WITHOUT_CODECS = 2

_ENOUGH_TRIED = Reason("failed", "too many codecs were tried in vain; only dropping rows is left")

#: Fewest rows per layer that eviction to a budget goes down to, attention sinks included.
FEWEST_ROWS = 64


@dataclass
class _CallerConversion:
    """kv_bits conversions of one step, gathered into one record."""

    action: Quantize
    before: Footprint
    asked: tuple[Held, ...]
    layers: list[str]
    seconds: float = 0.0
    written: int = 0


class Controller:
    """Implements :class:`~lumina_cache.steps.StepListener` for one cache (a model and, if drafting, a second one)."""

    def __init__(
        self,
        models: list[Any],
        *,
        budget: int | None,
        policy: Policy | None,
        read_machine: Callable[[], Snapshot | None],
        watch: bool,
        log: AuditLog,
        horizon: int | None,
        recall: float = RECALL,
        plan: Action | None = None,
        protect: Pinned = (),
        disk: Lease | None = None,
        guard: float | None = None,
        reach: Reach | None = None,
        ranks: Agreement | None = None,
    ) -> None:
        self.models = models
        self.budget = budget
        self.read_machine = read_machine
        self.watch = watch  # whether reading the machine costs nothing, so that it can be done at every step
        self.log = log
        self.decider = (
            None if policy is None else Decider(policy, budget, read_machine, log, self._find_profile)
        )
        self.horizon = horizon
        self.recall = recall
        self.plan = None if plan is None else StandingPlan(plan)
        self.protect = protect
        self.lease = disk
        self.guard = guard
        self.reach = Reach() if reach is None else reach
        self.ranks = ranks  # others that hold parts of the same cache; None: there are none
        self._after_step = 0  # bytes predicted last, for as long as nothing grows
        self._apart = False  # whether the ranks have chosen differently once
        self.suspended: Suspended | None = None
        self.trackers: list[StepTracker] = []
        self.speculative = len(models) > 1
        self.probes: dict[int, ModelProbe] = {}
        self.evicted_by: str | None = None
        #: All cache objects of each model, unmanaged ones included; set by the cache once it is built.
        self.entries: list[list[weakref.ref[Any]]] = []
        self._slack = -1
        self._unchecked = False
        self._chunk = 0  # tokens of the longest chunk of this prompt so far
        self._last_chunk = (
            False  # whether the chunk in hand is shorter than one before: nothing of the prompt follows
        )
        self._looked = False  # whether anything but the model has read the cache since the last step
        self._said: set[Action] = set()  # parts of the plan that were refused but are tried again
        self._guarded: dict[Quantize, Reason] = {}  # what the outlier guard let nothing be done of
        self._pending: list[Action] = []
        self._acting = False
        self._decision = 0
        self._phase: str | None = None
        self._callers: dict[StepTracker, _CallerConversion] = {}
        self._refused: set[tuple[str, str]] = set()
        self._over_budget_said = False
        self._until_look = 0
        if disk is not None:
            disk.take()
            log.count_disk(0)
        self.finalizer = weakref.finalize(self, _end, log, disk, self.reach)

    @property
    def disk(self) -> DiskStore | None:
        """Where rows may be moved to."""
        return None if self.lease is None else self.lease.store

    @property
    def limit(self) -> Limit:
        """Bytes that may be allocated now, and why."""
        return Limit(None, "nobody decides") if self.decider is None else self.decider.limit

    # -- StepListener: the hot path ---------------------------------------------------------------------------------

    def step_begins(self, steps: StepTracker, tokens: int) -> None:
        if self.suspended is not None:
            self._wake(steps)
        self.log.count_step(tokens)
        if self._pending or self._callers:
            self._settle(steps)
        if self.plan is not None and steps is self.trackers[0]:
            self._follow_plan(steps, self.plan, tokens)
        if self.decider is not None:
            self._note_chunk(tokens)
            self._slack -= tokens
            self._until_look -= tokens
            if steps.phase != self._phase and not self.speculative:
                self._until_look = -1
            grows = tokens > 1 or self._slack < 0 or self._unchecked
            if self.ranks is not None:
                self._hold_together(steps, self.ranks, tokens, grows)
                self._unchecked = tokens > 1
            elif grows or self._until_look < 0 or (self.watch and self.decider.news()):
                self._hold_budget(steps, tokens, "predicted_overflow", grows)
                self._unchecked = tokens > 1
        self._note_step(steps)

    def _note_chunk(self, tokens: int) -> None:
        self._last_chunk = 1 < tokens < self._chunk
        self._chunk = max(tokens, self._chunk) if tokens > 1 else 0

    def step_began(self, steps: StepTracker, tokens: int) -> None:
        if self.suspended is not None:
            self._wake(steps)
        self.log.count_step(tokens)
        if self.plan is not None and steps is self.trackers[0]:
            self.plan.due(tokens, self._looked)  # too late for this step, but it counts
            self._looked = False
        if self.decider is not None:
            self._note_chunk(tokens)
            self._slack -= tokens
            self._unchecked = True
        self._note_step(steps)

    def _wake(self, steps: StepTracker) -> None:
        """Resume for a step that has begun; if that fails, it has not."""
        try:
            self.resume()
        except DiskTierError:
            steps.abandon()
            raise

    def _note_step(self, steps: StepTracker) -> None:
        if steps.step % STEP_RECORD_EVERY == 1 or steps.phase != self._phase:
            self._phase = steps.phase
            self._record_step(steps)

    def touched(self, steps: StepTracker) -> None:
        if self._acting:
            return
        self._looked = True
        if self.suspended is not None:
            self.resume()
        if self._pending or self._callers:
            self._settle(steps)
        # What touches one rank's cache between two steps need not touch another's.
        if self._unchecked and self.ranks is None:
            self._unchecked = False
            self._hold_budget(steps, 1, "after_chunk", True, within_prompt=steps.phase == "prefill")

    # -- other questions of the layers ------------------------------------------------------------------------------

    def rows_may_go(self, steps: StepTracker, layer: ManagedLayer) -> bool:
        if isinstance(layer, RotatingKVCache):
            # Speculation takes rows back, and a window that has wrapped cannot give back what it overwrote. The answer
            # may not change on the way: mlx-lm asks at the start and goes on when a later attempt is refused.
            return self.speculative and (self.horizon is None or self.horizon >= layer.max_size)
        if self.plan is not None and layer.kind == "kv" and evicts(self.plan.action):
            return True
        if self.speculative and layer.kind == "kv" and layer.layout is not None and layer.layout.unit > 1:
            return True  # rows that were encoded several at a time do not come back as they were
        if self.decider is None or self.budget is None or self.speculative or layer.kind != "kv":
            return False
        if not self.profile(steps).has(ROW_GATHER):
            return False
        remaining = 0 if self.horizon is None else self.horizon - int(layer.offset)
        if remaining <= 0:
            return True
        return nbytes_allocated(after_append(self._layers(steps), remaining)) > self.budget

    def quantize_for_caller(self, steps: StepTracker, layer: KVCache, codec: Affine) -> None:
        action = Quantize("affine", codec.bits, codec.bits, codec.group_size)
        self._probe_codec(steps, codec)
        outcome = self.profile(steps).outcome(packed_attention(codec.bits, codec.group_size))
        if not outcome.present:
            self.refuse_for_caller(steps, layer, codec, str(outcome.reason))
            return
        done = self._callers.get(steps)
        if done is None:
            done = _CallerConversion(action, Footprint.of(self._objects(steps)), self._unmerged(steps), [])
            self._callers[steps] = done
        start, written = time.perf_counter(), self._written()
        layer.reencode(Layout.both(codec))
        done.layers.append(layer.name)
        done.seconds += time.perf_counter() - start
        done.written += self._written() - written

    def refuse_for_caller(self, steps: StepTracker, layer: ManagedLayer, codec: Affine, why: str) -> None:
        if (layer.name, why) in self._refused:
            return
        first = not self._refused
        self._refused.add((layer.name, why))
        reason = Reason("missing_capability", why)
        self.log.write(
            "action.refused",
            action=str(Quantize("affine", codec.bits, codec.bits, codec.group_size)),
            origin="kv_bits",
            execution_state="backend_infeasible",
            layers=[layer.name],
            reasons=[reason.to_record()],
        )
        if first:
            warnings.warn(
                f"kv_bits: {layer.name} ({type(layer).__name__}) stays dense: {why}. "
                "Other layers that stay dense are in the log. "
                "Drop kv_bits and give LuminaCache a budget to let it choose what this model can do",
                LuminaWarning,
                stacklevel=6,
            )

    def rows_replaced(self, steps: StepTracker) -> None:
        self._slack = -1
        self._unchecked = self.decider is not None

    def tracker_copied(self, old: StepTracker, new: StepTracker) -> None:
        self.trackers.append(new)
        self.trackers.sort(key=self._index)

    def __deepcopy__(self, memo: dict[int, Any]) -> Controller:
        new = Controller(
            self.models,
            budget=self.budget,
            policy=None,
            read_machine=self.read_machine,
            watch=self.watch,
            log=self.log.copy(),
            horizon=self.horizon,
            protect=self.protect,
            disk=self.lease,
            guard=self.guard,
            reach=self.reach.copy(self.models[0]),
            ranks=None if self.ranks is None else self.ranks.copy(),
        )
        new.plan = copy.copy(self.plan)
        memo[id(self)] = new
        new.decider = None if self.decider is None else self.decider.copy(new.log)
        new.speculative = self.speculative
        new.probes = dict(self.probes)
        new.evicted_by = self.evicted_by
        new._phase, new._looked = self._phase, self._looked
        new._guarded = dict(self._guarded)
        new._apart = self._apart
        new.log_start(parent=self)
        return new

    # -- asked for by the cache -------------------------------------------------------------------------------------

    def probe(self, steps: StepTracker) -> ModelProbe:
        """What this model can do, found by running it once."""
        index = self._index(steps)
        if index not in self.probes:
            with self._busy():
                self.probes[index] = remembered_probe(self.models[index])
        return self.probes[index]

    def _probe_codec(self, steps: StepTracker, codec: Affine) -> None:
        """Make sure that the profile says whether the model reads rows packed like this."""
        probe = self.probe(steps)
        if packed_attention(codec.bits, codec.group_size) not in probe.profile.outcomes:
            index = self._index(steps)
            with self._busy():
                self.probes[index] = probe_packed(self.models[index], probe, codec)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """While the model or its layers are used from here; what is asked for meanwhile waits."""
        before, self._acting = self._acting, True
        try:
            yield
        finally:
            self._acting = before

    def profile(self, steps: StepTracker) -> BackendProfile:
        """What the model can do with this cache: what its probe found, as far as the cache reaches, and its disk."""
        profile = self.probe(steps).profile
        here = Outcome(True) if self.disk is not None else _NO_DISK
        profile = replace(profile, outcomes={**profile.outcomes, DISK_TIER: here})
        return self.reach.profile(profile, self._objects(steps))

    def apply(self, action: Action) -> Applied | None:
        """Carry out ``action`` on the model's layers now, or at the next step boundary (then None is returned).

        Raises:
            ActionInfeasibleError: with every reason; the cache is as it was.
        """
        steps = self.trackers[0]
        if self._acting or not steps.at_boundary:
            self._pending.append(action)
            return None
        self.resume()
        self._settle(steps)
        self._require_feasible(steps, action)
        return self._execute(steps, action, "caller", None)

    def spread(self, action: Action) -> Plan:
        """``action`` with rows for each layer by what its scorer says of them now; nothing is changed.

        Raises:
            ActionInfeasibleError: with every reason.
        """
        steps = self.trackers[0]
        if self._acting or not steps.at_boundary:
            raise ActionInfeasibleError(
                f"{action}: rows are spread over layers between two steps, not inside one"
            )
        self.resume()
        self._settle(steps)
        self._require_feasible(steps, action)
        return spread(action, losses_of_layers(self._objects(steps), action, self.protect))

    def check_plan(self) -> None:
        """Refuse a plan that can never be carried out, before the first token.

        Raises:
            ActionInfeasibleError: with every reason.
        """
        if self.plan is None:
            return
        _require_room(self.plan.action, self.protect)
        steps = self.trackers[0]
        self._probe_codecs(steps, self.plan.action)
        verdict = classify([self.plan.action], self.profile(steps), self.probe(steps).layers)[0]
        against = [r for r in verdict.reasons if r.code not in _ABOUT_ROWS]
        if against:
            raise ActionInfeasibleError(
                f"plan {self.plan.action} cannot be executed: " + "; ".join(r.text for r in against)
            )

    def protect_more(self, pinned: Pinned) -> None:
        """Keep these positions too.

        Raises:
            ActionInfeasibleError: the plan could not be carried out any more; nothing has changed.
        """
        if self.plan is not None:
            _require_room(self.plan.action, (*self.protect, *pinned))
        self.protect = (*self.protect, *pinned)

    def suspend(self) -> int:
        """Move everything that the layers hold to one file; returns the bytes that this freed.

        Raises:
            ActionInfeasibleError: there is no disk, or a step is under way.
            DiskTierError: the file could not be written; everything is as it was.
        """
        steps = self.trackers[0]
        if self.suspended is not None:
            return 0
        if self.disk is None:
            raise ActionInfeasibleError(f"suspend: {_NO_DISK.reason}")
        if not all(t.at_boundary for t in self.trackers):
            raise ActionInfeasibleError("suspend: the model is inside a step; call it between two steps")
        self._settle(steps)
        start, written = time.perf_counter(), self._written()
        with self._busy():
            self.suspended = suspend([e for t in self.trackers for e in self._objects(t)], self.disk)
        if self.suspended is None:
            return 0
        mx.clear_cache()
        written = self._count_written(written)
        self.log.write(
            "session.suspended",
            nbytes=self.suspended.block.nbytes,
            disk_bytes_written=written,
            seconds=time.perf_counter() - start,
        )
        return self.suspended.block.nbytes

    def resume(self) -> None:
        """Put back what :meth:`suspend` took out. Any use of the cache does so by itself.

        Raises:
            DiskTierError: the file is gone, or is not what was written; the cache stays suspended.
        """
        suspended = self.suspended
        if suspended is None:
            return
        start = time.perf_counter()
        try:
            with self._busy():
                suspended.resume()
        except DiskTierError as error:
            self._warn("resume_failed", str(error))
            raise
        self.suspended = None
        self.log.write("session.resumed", nbytes=suspended.block.nbytes, seconds=time.perf_counter() - start)

    def log_start(self, parent: Controller | None = None) -> None:
        """Write ``session.started``; a copy, whose layers are not there yet, describes its parent's."""
        described = self if parent is None else parent
        layers = described._unmerged(described.trackers[0])
        machine = self.read_machine()
        if self.decider is not None:
            self.decider.seen(machine)
        unknown: dict[str, str] = {}
        probe = self.probes.get(0)
        if probe is None:
            unknown["profile"] = "not probed: nothing has needed it yet"
        if machine is None:
            unknown["telemetry"] = "telemetry is off"
        if self.budget is None:
            unknown["budget"] = "none was given: the cache watches and changes nothing"
        self.log.write(
            "session.started",
            lumina_cache=__version__,
            profile=None if probe is None else probe.profile.to_record(),
            model={
                "model_type": str(getattr(self.models[0], "model_type", "unknown")),
                "fingerprint": self._fingerprint(unknown),
                "layers": _shapes(layers if probe is None else probe.layers),
                "mlx": mlx_version(),
                "mlx_lm": mlx_lm_version,
                "kinds": dict(Counter(one.kind for one in layers)),
                "draft": self.speculative,
            },
            budget=self.budget,
            policy=None if self.decider is None else self.decider.policy.name,
            plan=None if self.plan is None else str(self.plan.action),
            protect=[list(one) for one in self.protect],
            copied_from=None if parent is None else parent.log.cache_id,
            telemetry=None if machine is None else machine.to_record(),
            unknown=unknown,
        )

    def _fingerprint(self, unknown: dict[str, str]) -> str | None:
        """Only for a log that outlives the process: it evaluates a few values of every weight."""
        if self.log.path is None:
            unknown["model.fingerprint"] = "the log is in memory only"
            return None
        try:
            return remembered_fingerprint(self.models[0])
        except (AttributeError, TypeError, ValueError) as error:
            unknown["model.fingerprint"] = f"{type(error).__name__}: {error}"
            return None

    # -- off the hot path -------------------------------------------------------------------------------------------

    def _settle(self, touched: StepTracker) -> None:
        """Write down what the caller converted, and do what was asked for inside a step; ``touched`` is at a boundary."""
        callers, self._callers = self._callers, {}
        for steps, done in callers.items():
            self._record_caller(steps, done)
        steps = self.trackers[0]
        if touched is not steps and not steps.at_boundary:
            return
        pending, self._pending = self._pending, []
        for action in pending:
            try:
                self._require_feasible(steps, action)
                self._execute(steps, action, "caller", None)
            except LuminaError as error:
                self._warn("pending_action_failed", f"{action}: {error}")
            except Exception as error:  # whoever asked is long gone, and generation must not break
                self._warn("pending_action_failed", f"{action}: {type(error).__name__}: {error}")

    def _written(self) -> int:
        return 0 if self.disk is None else self.disk.bytes_written_total

    def _count_written(self, before: int) -> int:
        """Bytes written since there were ``before``, counted for the log."""
        written = self._written() - before
        if self.disk is not None:
            self.log.count_disk(written)
        return written

    def _follow_plan(self, steps: StepTracker, plan: StandingPlan, tokens: int) -> None:
        looked, self._looked = self._looked, False
        due = plan.due(tokens, looked)
        if due is None:
            return
        self._probe_codecs(steps, due)
        settled: list[Action] = []
        action = only(due, lambda part: self._now(steps, part, settled))
        if action is not None:
            settled += singles(action)
            with suppress(Exception):  # it is in the log; generation must not break because an action did
                self._execute(steps, action, "plan", None)
        plan.tried(settled)

    def _now(self, steps: StepTracker, part: Action, settled: list[Action]) -> bool:
        """Whether a part of the plan can be carried out. One that never will is refused and added to ``settled``."""
        reasons = self._judge(steps, part).reasons
        against = [r for r in reasons if r.code not in _ABOUT_ROWS]
        if against and part not in settled:
            settled.append(part)
            self._refuse(part, "plan", against)
        elif reasons and part not in self._said and self._would_evict(steps, part):
            self._said.add(part)
            self._refuse(part, "plan", reasons)
        return not reasons

    def _would_evict(self, steps: StepTracker, part: Action) -> bool:
        rows = max((one.rows for one in self._layers(steps) if one.changeable), default=0)
        return isinstance(part, Evict) and part.rows_kept(rows) < rows

    def _hold_budget(
        self, beginning: StepTracker, tokens: int, trigger: str, grows: bool, *, within_prompt: bool = False
    ) -> None:
        """Predict the bytes after a step of ``tokens`` tokens of one of the models; if they pass the limit, decide.

        Only the first model's rows are acted upon, whichever model grows. Where none ``grows`` and the limit is the one
        that was decided under before, another decision would be the same.
        """
        steps, decider = self.trackers[0], self.decider
        if decider is None or (beginning is not steps and not steps.at_boundary):
            return
        predicted = self._predicted(beginning, tokens)
        limit, before = decider.limit, decider.limit.nbytes
        if not grows or self._until_look < 0 or predicted > (limit.nbytes or predicted):
            limit = decider.look(sum(nbytes_allocated(self._layers(t)) for t in self.trackers))
            self._until_look = LOOK_EVERY
        if limit.nbytes is not None and predicted > limit.nbytes and (grows or limit.nbytes != before):
            if limit.nbytes != self.budget:
                trigger = "telemetry"
            with self._busy():
                left = self._left_by_others(limit, beginning, tokens)
                known = -1
                while known != len(
                    self._guarded
                ):  # again if the guard let nothing be done of what was chosen
                    known = len(self._guarded)
                    due = tokens if beginning is steps else 0
                    self._decide(
                        steps,
                        decider,
                        replace(self._state(steps, left, due), within_prompt=within_prompt),
                        trigger,
                    )
            self._say_if_over(beginning, tokens, limit.nbytes)
        self._renew_slack(beginning, tokens)

    def _hold_together(self, steps: StepTracker, ranks: Agreement, tokens: int, grows: bool) -> None:
        """The same for one of several ranks: what is seen is agreed on, and what is done is done by all or by none.

        Raises:
            RankLostError: another rank is gone; the step has not begun.
            RanksApartError: the ranks are at different points of the generation; the step has not begun.
        """
        decider = self.decider
        assert decider is not None
        if grows:
            self._after_step = self._predicted(steps, tokens)
        if ranks.due(steps.step, tokens, ranks.over(self._after_step)):
            held = sum(nbytes_allocated(self._layers(t)) for t in self.trackers)
            decider.look(held)
            mine = decider.stance(held, self._after_step)
            try:
                with self._busy():
                    settled = ranks.settle(mine, lambda agreed: self._choose(steps, decider, agreed, tokens))
            except LuminaError:
                steps.abandon()
                raise
            if not settled.agreed:
                self._apart = True
                self._warn("ranks_apart", settled.why)
            elif settled.action != Keep():
                with suppress(Exception):  # it is in the log, and the ranks meet before the next step
                    applied = self._execute(steps, settled.action, "policy", decider.number, guarded=True)
                    decider.done(applied.observed_peak)
            if settled.stance.limit is not None:
                self._after_step = self._predicted(steps, tokens)
                self._say_if_over(steps, tokens, settled.stance.limit)
            grows = True
        if grows:
            self._renew_slack(steps, tokens)

    def _choose(self, steps: StepTracker, decider: Decider, agreed: Stance, tokens: int) -> Action:
        """What this rank would do under what all have agreed on. The outlier guard sees this rank's heads only."""
        limit = Limit(agreed.limit, "the smallest limit of the ranks")
        state = self._state(steps, self._left_by_others(limit, steps, tokens), tokens)
        decider.fit(self.probe(steps).group_size)
        for _ in range(MOST_TRIES):
            against = self._against_together if self._guarded or self._apart else None
            action = decider.decide(state, self.profile(steps), "agreed", against, agreed).action
            guard = self._guard_of(steps)
            try:
                if action != Keep() and guard is not None:
                    self._require_as_weighed(steps, action, guard)
            except ActionInfeasibleError as error:
                self._refuse(action, "policy", [Reason("outliers", str(error))])
                continue
            return action
        return Keep()

    def _against_together(self, action: Action) -> tuple[Reason, ...]:
        """After ranks have chosen differently, only what all of them choose alike is left."""
        if self._apart and not all(isinstance(p, Keep) or _plain_window(p) for p in singles(action)):
            return (Reason("ranks_apart", "the ranks chose differently: only evicting by position is left"),)
        return self._against(action)

    def _predicted(self, beginning: StepTracker, tokens: int) -> int:
        """Allocated bytes of all models after ``beginning`` has done a step of ``tokens`` tokens."""
        rows = sum(nbytes_allocated(self._after(t, beginning, tokens)) for t in self.trackers)
        return rows + self._observed(beginning, tokens)

    def _observed(self, beginning: StepTracker, tokens: int) -> int:
        """Bytes of what is kept of the attention after a step of ``tokens`` tokens of one of the models."""
        return self.reach.nbytes_after(tokens if beginning is self.trackers[0] else 0)

    def _left_by_others(self, limit: Limit, beginning: StepTracker, tokens: int) -> Limit:
        """The limit less what the draft model, and what is kept of the attention, will take by then."""
        others = sum(nbytes_allocated(self._after(t, beginning, tokens)) for t in self.trackers[1:])
        others += self._observed(beginning, tokens)
        return limit if limit.nbytes is None or not others else replace(limit, nbytes=limit.nbytes - others)

    def _after(self, steps: StepTracker, beginning: StepTracker, tokens: int) -> tuple[Held, ...]:
        return after_append(self._layers(steps), tokens if steps is beginning else 0)

    def _decide(self, steps: StepTracker, decider: Decider, state: State, trigger: str) -> None:
        """Ask the policy, and carry out what it chose; if that cannot be done after all, ask again without it.

        The last tries are without codecs: rows can always be dropped, and the limit must hold.
        """
        decider.fit(self.probe(steps).group_size)
        failed: dict[Action, Reason] = {}
        for left in reversed(range(MOST_TRIES)):
            against = self._against_also(failed, left < TRIES_WITHOUT_CODECS)
            decision = decider.decide(state, self.profile(steps), trigger, against)
            if decision.action == Keep():
                return
            try:  # what goes wrong is in the log; generation must not break because an action did
                applied = self._execute(steps, decision.action, "policy", decider.number)
            except Exception as error:
                failed[decision.action] = Reason("failed", f"it was tried and failed: {error}")
                if self._layers(steps) != state.layers:
                    return  # it got half way: what was weighed is void
            else:
                decider.done(applied.observed_peak)
                return

    def _against_also(
        self, failed: Mapping[Action, Reason], no_codecs: bool
    ) -> Callable[[Action], tuple[Reason, ...]] | None:
        """Reasons against an action by what was tried before; None if there are none against any."""
        if not (self._guarded or failed or no_codecs):
            return None

        def against(action: Action) -> tuple[Reason, ...]:
            if no_codecs and any(isinstance(part, Quantize) for part in singles(action)):
                return (_ENOUGH_TRIED,)
            return (failed[action],) if action in failed else self._against(action)

        return against

    def _state(self, steps: StepTracker, limit: Limit, tokens: int) -> State:
        """What a decision before a step of ``tokens`` tokens is made on."""
        layers = self._layers(steps)
        remaining = None if self.horizon is None else self.horizon - max(one.offset for one in layers)
        return State(
            phase=steps.phase,
            tokens=tokens,
            layers=layers,
            each=self._unmerged(steps),
            budget=self.budget,
            limit=limit,
            horizon=DEFAULT_HORIZON if remaining is None else max(1, remaining),
            remaining=None if remaining is None else max(0, remaining),
            last_chunk=self._last_chunk,
            # Without a budget nobody has agreed to lose rows: tokens can be taken back at any time.
            rows_must_stay=self.speculative or self.budget is None,
            protect=self.protect,
            evicted_by=self.evicted_by,
        )

    def _against(self, action: Action) -> tuple[Reason, ...]:
        """Why not, from earlier attempts: the outlier guard let nothing be done of a codec with as many bits or more."""
        parts = [part for part in singles(action) if isinstance(part, Quantize)]
        return tuple(
            reason for tried, reason in self._guarded.items() if any(_no_finer(p, tried) for p in parts)
        )[:1]

    def _find_profile(self) -> Profile:
        """Figures measured on this model and machine, or the library's own, borrowed; for this share of recall."""
        return profile_for(self.models[0]).with_recall(self.recall)

    def _execute(
        self,
        steps: StepTracker,
        action: Action,
        origin: str,
        decision: int | None,
        *,
        guarded: bool = False,
    ) -> Applied:
        """Carry out ``action`` and write down what happened, also when it failed.

        Args:
            guarded: the outlier guard has let the policy's choice pass already.

        Raises whatever :func:`~lumina_cache.apply.execute` does.
        """
        asked, written = self._unmerged(steps), self._written()
        try:
            with self._busy():
                guard = self._guard_of(steps)
                if origin == "policy" and guard is not None:
                    # More bits than were weighed would take more bytes than there are: better to choose again.
                    if not guarded:
                        self._require_as_weighed(steps, action, guard)
                    guard = None
                applied = execute(
                    self._objects(steps), action, pinned=self.protect, disk=self.disk, guard=guard
                )
            self._require_something(action, applied)
        except Exception as error:
            self._count_written(written)
            self._record_failed(steps, action, origin, error, asked)
            raise
        written = self._count_written(written)
        for part in singles(action):
            if isinstance(part, Evict) and applied.rows_after < applied.rows_before:
                self.evicted_by = part.scorer
        self._record_applied(steps, applied, origin, decision, written)
        self._slack = -1
        return applied

    def _guard_of(self, steps: StepTracker) -> Guard | None:
        if self.guard is None:
            return None

        def can(action: Quantize) -> bool:
            self._probe_codecs(steps, action)
            profile = self.profile(steps)
            return all(profile.has(c) for c in action.requires)

        return Guard(self.guard, can)

    def _require_as_weighed(self, steps: StepTracker, action: Action, guard: Guard) -> None:
        """Refuse an action whose bits the outlier guard would raise, so that it is not chosen again.

        Raises:
            ActionInfeasibleError: nothing was changed.
        """
        found = first_guarded(self._objects(steps), action, guard)
        if found is None:
            return
        name, part, needed = found
        instead = "stay as they are" if needed == Keep() else f"need {needed}"
        text = (
            f"{part} would spoil the rows of {name} (predicted noise above {guard.limit} of their variance along the "
            f"tokens), which {instead}"
        )
        self._guarded[part] = Reason("outliers", text)
        raise ActionInfeasibleError(f"{action}: {text}")

    def _require_something(self, action: Action, applied: Applied) -> None:
        """Refuse an action that the outlier guard left nothing of, so that it is not chosen again.

        Raises:
            ActionInfeasibleError: nothing was changed.
        """
        if not applied.guarded or applied.layers_changed:
            return
        text = (
            f"the rows of every layer would be spoiled (predicted noise above {self.guard} of their variance along "
            "the tokens); take a codec that bears outliers, such as kivi or hadamard, or LuminaCache(guard=False)"
        )
        for part in singles(action):
            if isinstance(part, Quantize):
                self._guarded[part] = Reason("outliers", text)
        raise ActionInfeasibleError(f"{action}: {text}")

    def _record_failed(
        self, steps: StepTracker, action: Action, origin: str, error: Exception, asked: tuple[Held, ...]
    ) -> None:
        changed = [b.name for a, b in zip(asked, self._unmerged(steps), strict=True) if a != b]
        if changed:
            self._slack = -1
            self._warn(
                "action_incomplete",
                f"{action} ({origin}): {type(error).__name__}: {error}; changed before that: {', '.join(changed)}",
            )
        elif isinstance(error, ActionInfeasibleError):
            self._refuse(action, origin, [Reason(self._code(action), str(error))])
        elif isinstance(error, DiskTierError):
            self._refuse(action, origin, [Reason("disk", str(error))])
        else:
            self._warn("action_failed", f"{action} ({origin}): {type(error).__name__}: {error}")

    def _code(self, action: Action) -> str:
        """Why a feasible action was not carried out after all."""
        guarded = any(isinstance(part, Quantize) and part in self._guarded for part in singles(action))
        return "outliers" if guarded else "protected_rows"

    def _require_feasible(self, steps: StepTracker, action: Action) -> None:
        self._probe_codecs(steps, action)
        verdict = self._judge(steps, action)
        if verdict.feasible:
            return
        self._refuse(action, "caller", verdict.reasons)
        raise ActionInfeasibleError(
            f"{action} cannot be executed: " + "; ".join(r.text for r in verdict.reasons)
        )

    def _judge(self, steps: StepTracker, action: Action) -> Verdict:
        # A plan is judged by the layers that it names.
        layers = self._unmerged(steps) if isinstance(action, Plan) else self._layers(steps)
        [verdict] = classify(
            [action],
            self.profile(steps),
            layers,
            rows_must_stay=self.speculative,
            pinned=_held_within(self.protect, layers, action),
            protect=self.protect,
        )
        why = why_not_protected(self._objects(steps), action, self.protect) if verdict.feasible else None
        return verdict if why is None else Verdict(action, (Reason("protected_rows", why),))

    def _refuse(self, action: Action, origin: str, reasons: Iterable[Reason]) -> None:
        self.log.write(
            "action.refused",
            action=str(action),
            origin=origin,
            execution_state="backend_infeasible",
            layers=[],
            reasons=[r.to_record() for r in reasons],
        )

    def fit(self, steps: StepTracker, decider: Decider) -> None:
        """Make sure that the figures are of codecs that this model's head dims take, and that it is known which it reads."""
        decider.fit(self.probe(steps).group_size)
        for figure in decider.profile.codecs:
            self._probe_codecs(steps, figure.action)

    def _probe_codecs(self, steps: StepTracker, action: Action) -> None:
        """Make sure that the profile knows the packed layouts that ``action`` asks for."""
        for part in singles(action):
            if isinstance(part, Quantize) and part.read_packed:
                self._probe_codec(steps, Affine(part.key_bits, part.group_size))

    def _say_if_over(self, beginning: StepTracker, tokens: int, limit: int) -> None:
        predicted = self._predicted(beginning, tokens)
        if predicted <= limit:
            self._over_budget_said = False
            return
        if not self._over_budget_said:
            self._over_budget_said = True
            self._warn(
                "budget_exceeded",
                f"a step of {tokens} tokens takes {format_bytes(predicted)}, the limit is "
                f"{format_bytes(limit)}; rows are brought back under it after the step"
                + ("; LuminaCache.recommend_prefill_step() says which chunk fits" if tokens > 1 else ""),
            )

    def _warn(self, code: str, text: str) -> None:
        self.log.write("warning", code=code, text=text)

    def _record_step(self, steps: StepTracker) -> None:
        layers = self._unmerged(steps)
        now = Footprint.of(self._objects(steps))
        self.log.write(
            "step",
            model_part=steps.name,
            step=steps.step,
            phase=steps.phase,
            tokens_step=steps.tokens,
            rows=max((one.rows for one in layers), default=0),
            offset=max((one.offset for one in layers), default=0),
            nbytes_live=now.nbytes_live,
            nbytes_allocated=now.nbytes_allocated,
            mlx_active=now.mlx_active,
            mlx_pool=now.mlx_pool,
            mlx_peak=mx.get_peak_memory(),
        )

    def _record_applied(
        self, steps: StepTracker, applied: Applied, origin: str, decision: int | None, written: int
    ) -> None:
        self.log.write(
            "action.applied",
            action=str(applied.action),
            origin=origin,
            decision=decision,
            execution_state="real",
            layers_changed=list(applied.layers_changed),
            rows_before=applied.rows_before,
            rows_after=applied.rows_after,
            **_histories(steps),
            disk_bytes_written=written,
            guarded=dict(applied.guarded),
            predicted_live=applied.predicted_live,
            predicted_allocated=applied.predicted_allocated,
            observed_peak=applied.observed_peak,
            before=asdict(applied.before),
            after=asdict(applied.after),
            seconds=applied.seconds,
        )

    def _record_caller(self, steps: StepTracker, done: _CallerConversion) -> None:
        after = Footprint.of(self._objects(steps))
        rows = max((one.rows for one in done.asked), default=0)
        converted = set(done.layers)
        predicted = [
            after_action([one], done.action)[0] if one.name in converted else one for one in done.asked
        ]
        self.log.write(
            "action.applied",
            action=str(done.action),
            origin="kv_bits",
            decision=None,
            execution_state="real",
            layers_changed=done.layers,
            rows_before=rows,
            rows_after=rows,
            **_histories(steps),
            disk_bytes_written=done.written,
            guarded={},
            predicted_live=nbytes_live(predicted),
            predicted_allocated=nbytes_allocated(predicted),
            observed_peak=None,
            before=asdict(done.before),
            after=asdict(after),
            seconds=done.seconds,
        )

    def _renew_slack(self, beginning: StepTracker, tokens: int) -> None:
        """Until so many more tokens have come after this step, no model's bytes can change."""
        after = (one for steps in self.trackers for one in self._after(steps, beginning, tokens))
        rooms = (tokens_without_growth(after), self.reach.room())
        room = min((r for r in rooms if r is not None), default=None)
        self._slack = (1 << 30) if room is None else room

    def _index(self, steps: StepTracker) -> int:
        return 0 if steps.name == "model" else 1

    def _objects(self, steps: StepTracker) -> list[Any]:
        """Every cache object of the model, lists of caches taken apart."""
        index = self._index(steps)
        if index < len(self.entries):
            return [entry for ref in self.entries[index] if (entry := ref()) is not None]
        return [one for one in steps.layers if one.kind != "list"]

    def _unmerged(self, steps: StepTracker) -> tuple[Held, ...]:
        return held_all(self._objects(steps))

    def _layers(self, steps: StepTracker) -> tuple[Held, ...]:
        layers = self._unmerged(steps)
        probe = self.probes.get(self._index(steps))
        if probe is not None and len(probe.layers) == len(layers):
            # Before its first row a layer does not know how wide its rows will be; the probe does.
            layers = tuple(
                replace(one, key_width=like.key_width, value_width=like.value_width, itemsize=like.itemsize)
                if one.key_width == 0 and one.kind == like.kind
                else one
                for one, like in zip(layers, probe.layers, strict=True)
            )
        return merge_equal(layers)


_NO_DISK = Outcome(False, "this cache was given no disk; LuminaCache(…, disk=True) gives it one")

#: Reasons that may be gone when there are more rows.
_ABOUT_ROWS = ("too_few_rows", "nothing_to_change")


def _held_within(pinned: Pinned, layers: tuple[Held, ...], action: Action | None = None) -> int:
    """Rows that ``pinned`` keeps, of those seen so far, beside the first and last ones that ``action`` keeps."""
    seen = max((one.offset for one in layers if one.changeable), default=0)
    evictions = [] if action is None else [part for part in singles(action) if isinstance(part, Evict)]
    first = min((part.sinks for part in evictions), default=DEFAULT_SINKS)
    last = seen - min((part.recent for part in evictions), default=0)
    return covered((max(first, start), min(end, last)) for start, end in pinned)


def _plain_window(action: Action) -> bool:
    return isinstance(action, Evict) and action.scorer == "sinks_window"


def _no_finer(one: Quantize, other: Quantize) -> bool:
    """Whether ``one`` stores rows as ``other`` does, with no more bits."""
    coarser = one.key_bits <= other.key_bits and one.value_bits <= other.value_bits
    return (_codes_of(one), one.group_size) == (_codes_of(other), other.group_size) and coarser


def _codes_of(action: Quantize) -> str:
    """What codes a codec makes; others read the same ones in another way."""
    name = action.codec
    for reading in ("_fetch", "_steps", "_packed"):
        name = name.removesuffix(reading)
    return name


def _require_room(plan: Action, pinned: Pinned) -> None:
    """Raises ActionInfeasibleError if an eviction of ``plan`` to a number of rows can never keep what is protected."""
    for part in singles(plan):
        if isinstance(part, Evict) and part.rows is not None:
            protected = covered([*pinned, (0, part.sinks)]) + part.recent
            if protected >= part.rows:
                raise ActionInfeasibleError(
                    f"plan {plan} cannot be executed: {part.rows} rows leave no choice beside {protected} protected "
                    "ones; keep more rows, or protect fewer"
                )


def _end(log: AuditLog, disk: Lease | None, reach: Reach) -> None:
    """A cache is closed, or gone."""
    reach.close()
    against = None if disk is None else disk.give_up()
    if against is not None:
        log.write("warning", code="disk_not_cleared", text=str(against))
    log.end()


def _histories(steps: StepTracker) -> dict[str, Any]:
    """What was done to the rows of any layer for good."""
    all_of_them = [layer.history for layer in steps.layers]
    return {
        "lossy": any(h.lossy for h in all_of_them),
        "lowest_bits": min((h.lowest_bits for h in all_of_them if h.lowest_bits is not None), default=None),
        "rows_evicted": max((h.evicted for h in all_of_them), default=0),
    }


def _shapes(layers: tuple[Held, ...]) -> list[dict[str, int | str]]:
    """Kind and widths (elements per row over batch and heads) of each kind of layer; 0 while nothing is known."""
    kinds = merge_equal(replace(one, rows=0, capacity=0, offset=0) for one in layers)
    return [
        {
            "kind": one.kind,
            "count": one.count,
            "key_width": one.key_width,
            "value_width": one.value_width,
            "itemsize": one.itemsize,
            "max_size": one.max_size,
        }
        for one in kinds
    ]


def smallest_budget(probe: ModelProbe, pinned: int = 0) -> int:
    """Fewest bytes that this model's cache can be held in from the first token on, for any number of tokens.

    Two needs: the first token, for which mlx-lm allocates a whole growth step of dense rows; and the steady state,
    :data:`FEWEST_ROWS` rows per layer, packed where the model reads packed rows, with sliding windows and attention chunks
    full and dense and recurrent state counted. ``pinned`` rows that must stay come on top of those. Other codecs could hold
    less, but whether a model's rows bear them is known only when they are there.

    Raises:
        BudgetError: if some layer grows without bound and cannot be kept from it on this backend.
    """
    profile = probe.profile
    for one in probe.layers:
        if one.kind == "opaque":
            raise BudgetError(
                f"{profile.model_type}: no budget can be held, because it is not known how {one.name} entries grow"
            )
    if not probe.layers or any(one.kind in _GROWING and one.key_width for one in probe.layers):
        outcome = profile.outcome(ROW_GATHER)
        if not outcome.present:
            raise BudgetError(
                f"{profile.model_type}: no budget can be held, because rows cannot be evicted: {outcome.reason}"
            )
    first = nbytes_allocated(after_append((emptied(one) for one in probe.layers), 1))
    steady = [_at_least(one, FEWEST_ROWS + pinned) for one in probe.layers]
    plans: list[Action] = [Keep()]
    if probe.group_size is not None:
        plans += [
            Quantize("affine", bits, bits, probe.group_size)
            for bits in (8, 4)
            if profile.has(packed_attention(bits, probe.group_size))
        ]
    return max(first, min(nbytes_allocated(after_append(after_action(steady, plan), 1)) for plan in plans))


#: Kinds of layers that hold one row per token for as long as the generation lasts.
_GROWING = ("kv", "concatenate", "quantized")


def _at_least(held: Held, fewest: int) -> Held:
    if held.kind in ("not_kv", "opaque") or held.key_width == 0:
        return held
    rows = fewest if held.kind in _GROWING else held.max_size
    return replace(held, rows=rows, capacity=rows, offset=rows)
