"""Run a calibration from start to end, for as long as there is time, or on from where it stopped.

The first document gets every action, then decode steps are timed, then further documents follow, in turn of the domains.
After each of them a profile of what is known so far is put in place, so that stopping early costs precision, not the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...actions import Action, Keep
from ...backend.installation import device_kind
from ...errors import (
    CalibrationError,
    EvaluationError,
    ProfileFormatError,
)
from ...profile import Profile, read_profile
from ...profile_home import profile_key, profile_path, write_profile
from ..blas import preload_openblas
from ..corpus import Document
from ..evaluate.documents import EvalDocument, select
from ..evaluate.provenance import code_fingerprint, conditions, provenance
from ..evaluate.results import Store
from ..evaluate.run import measured
from ..evaluate.subjects import OwnAction
from ..models import LoadedModel
from .add import added, check_base, lacking, timed
from .assemble import Measured, assemble, whole_documents
from .bench import ObservedBench
from .grid import Grid, ModelShape, grid_of, shape_of
from .settings import FULL, MOST_DOCUMENTS, Settings, plan_of
from .times import CHUNK, CHUNK_TIMES, CHUNKS, DENSE_TIMES, TIMES, Clock, timings

__all__ = ["KIND", "Calibration", "Progress", "calibrate", "records_path"]

KIND = "lumina-cache calibrate"


@dataclass(frozen=True)
class Progress:
    """How far a calibration is: work in tokens fed, and seconds until its time is over."""

    done: float
    total: float
    left: float
    what: str


@dataclass(frozen=True)
class Calibration:
    """A profile, where it is, how far the assumptions were off, and what could not be measured."""

    profile: Profile
    path: Path
    records: Path
    documents: int
    complete: bool  #: whether everything that was asked for was measured before the time was over
    kept: bool = False  #: whether the profile at ``path`` was left as it is, because this one is a quick look


def records_path(path: Path, header: Mapping[str, Any]) -> Path:
    """Where the single measurements behind the profile at ``path`` are kept: a file for each set of conditions."""
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=4).hexdigest()
    return path.with_name(f"{path.stem}.{digest}.records")


def calibrate(
    loaded: LoadedModel,
    settings: Settings = FULL,
    *,
    texts: Sequence[Document] | None = None,
    out: Path | None = None,
    minutes: float = 20.0,
    command: str | None = None,
    base: Profile | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Calibration:
    """Measure ``loaded`` and put its profile in place.

    What is measured is on disk at once; the same call after a crash, an interruption or the end of its time goes on.

    Args:
        texts: the user's own; None for the three domains that every installation has.
        out: the profile's file; None for the one in the user's state directory that :func:`find_profile` reads.
        minutes: when to stop starting new measurements.
        command: what makes this profile, for its provenance.
        base: a profile to which only the codecs that it lacks are added, measured on the same documents.
        clock: seconds that pass evenly.

    Raises:
        CalibrationError: the model has nothing to calibrate, the time was over before anything was measured, or a file
            cannot be written or holds something else.
    """
    run = _Run(loaded, settings, texts, out, minutes, command, base, on_progress, clock)
    try:
        return run.all()
    finally:
        run.store.close()


class _OutOfTime(Exception):
    """No new measurement is to be started."""


class _Run:
    """State of one calibration: the store of records and how much is done."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        texts: Sequence[Document] | None,
        out: Path | None,
        minutes: float,
        command: str | None,
        base: Profile | None,
        on_progress: Callable[[Progress], None],
        clock: Callable[[], float],
    ) -> None:
        self.loaded, self.command, self.base = loaded, command, base
        self.deadline, self.on_progress, self.clock = clock() + 60.0 * minutes, on_progress, clock
        self.key = profile_key(loaded.model)
        self.settings = settings = settings if base is None else check_base(base, self.key, settings)
        self.path = profile_path(self.key) if out is None else out
        self.kept = _worth_keeping(self.path, settings, self.key)
        self.shape: ModelShape = shape_of(loaded.model)
        whole = grid_of(self.shape, settings)
        self.grid: Grid = whole if base is None else lacking(whole, base, self.key)
        self.timed = whole.codecs if base is None else timed(whole, base, self.key)
        plan = settings.plan
        self.documents, self.lacking = select(
            loaded.tokenizer, settings.context, MOST_DOCUMENTS, plan.length(settings.context), texts
        )
        self.used = self.documents[: settings.documents]
        self.store = self._open()
        self.code = code_fingerprint()
        self.done = 0.0
        self.total = sum(self._work(i) for i in range(len(self.used))) + self._timed_work()

    def _open(self) -> Store:
        header = {
            **conditions(self.loaded),
            "key": self.key,
            "plan": self.settings.plan.to_record(),
            "documents": [d.to_record() for d in self.documents],
            "timed": [self.settings.timed_rows, self.settings.timed_steps],
        }
        path = self.records = records_path(self.path, header)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            store = Store(path, header, KIND)
        except (OSError, EvaluationError) as error:
            raise CalibrationError(str(error)) from None
        for one in (path, store.partial):
            with contextlib.suppress(OSError):
                os.chmod(one, 0o600)
        return store

    # -- the order of things ----------------------------------------------------------------------------------------

    def all(self) -> Calibration:
        complete = True
        try:
            # Figures of fewer documents cannot stand beside those of a base, so that times come last there.
            timed_after = 0 if self.base is None else len(self.used) - 1
            for i, document in enumerate(self.used):
                self._document(i, document)
                if i == timed_after:
                    self._times()
                self._put()
        except _OutOfTime:
            complete = False
        found = self._put()
        if complete:
            self._finish()
        self._say("done")
        documents = len(whole_documents(self._measured(), self.grid))
        return Calibration(found, self.path, self.records, documents, complete, self.kept is not None)

    def _actions(self, index: int) -> tuple[Action, ...]:
        checks = self.grid.checks if index < self.settings.checked else ()
        return tuple(dict.fromkeys((*self.grid.core, *checks)))

    def _document(self, index: int, document: EvalDocument) -> None:
        plan = plan_of(self.settings, index)
        due = [a for a in self._actions(index) if not self._known(document.context, document.name, str(a))]
        known = self.store.get(document.context, document.name, None)
        self.done += self._subject_work() * (len(self._actions(index)) - len(due))
        if due or known is None:
            self._start(f"{document.name}  (reading)")
            bench = ObservedBench(
                self.loaded.model, self.loaded.tokenizer, document, plan, index, observe=self.grid.observed
            )
            try:
                self._subjects(index, document, bench, due, known is None)
            finally:
                bench.close()
        else:
            self.done += self._read_work()

    def _subjects(
        self, index: int, document: EvalDocument, bench: ObservedBench, due: Sequence[Action], new: bool
    ) -> None:
        if new:
            depths = list(bench.plan.depths)
            self.store.add({**bench.document_record(), "depths": depths, "code": self.code})
        self.done += self._read_work()
        for action in due:
            self._start(f"{index + 1} of {len(self.used)}  {document.name}  {action}")
            self.store.add({**measured(bench, OwnAction(action)), "code": self.code})
            self.done += self._subject_work()

    def _times(self) -> None:
        actions = self.timed
        share = self._timed_work() / max(1, 2 * len(self.settings.timed_rows) * len(actions) + 1)
        timer = Clock(self.loaded.model, self.used[0].tokens, self.settings, actions)
        before = self.done
        try:
            for what, record in timings(timer, actions, self.shape.entries, self._known):
                if record is None:
                    self._start(what)
                else:
                    self.store.add({**record, "code": self.code})
                    self.done += share
        finally:
            timer.close()
        self.done = before + self._timed_work()

    def _known(self, context: int, document: str, action: str) -> bool:
        record = self.store.get(context, document, action)
        return record is not None and (record["state"] == "real" or record["code"] == self.code)

    # -- what comes of it -------------------------------------------------------------------------------------------

    def _measured(self) -> Measured:
        names = [d.name for d in self.used]
        return Measured(
            documents={d.name: d.domain for d in self.used},
            quality=[r for n in names for a in (None, *map(str, (*self.grid.core, *self.grid.checks)))
                     if (r := self.store.get(self.settings.context, n, a)) is not None],
            steps=self._timed(TIMES),
            chunks=self._timed(CHUNK_TIMES),
            dense=self.store.get(max(self.settings.timed_rows), DENSE_TIMES, str(Keep())),
        )  # fmt: skip

    def _timed(self, document: str) -> list[dict[str, Any]]:
        texts = [*map(str, self.timed), f"offload:layers=0-{self.shape.entries - 1}"]
        found = (self.store.get(rows, document, text) for rows in self.settings.timed_rows for text in texts)
        return [record for record in found if record is not None]

    def _put(self) -> Profile:
        profile = assemble(self._measured(), self.grid, self.shape, self.settings, self._provenance())
        if not profile.codecs and not profile.evictors:
            raise CalibrationError(
                f"the time was over before any action was measured; what was is in {self.store.partial}, and the "
                "same command goes on from there: give it more --minutes"
            )
        if self.kept is not None:
            return profile
        if self.base is not None:
            if len(whole_documents(self._measured(), self.grid)) < len(self.used):
                return profile  # figures of fewer documents cannot stand beside the others
            profile = added(self.base, profile, self._measured())
        try:
            write_profile(profile, self.path)
        except OSError as error:
            raise CalibrationError(f"cannot write {self.path}: {error.strerror or error}") from None
        return profile

    def _provenance(self) -> dict[str, Any]:
        used = {d.name for d in self.used}
        described = conditions(self.loaded)
        here = provenance()
        return {
            "key": self.key,
            "name": described["model"]["name"],
            "command": self.command,
            "model": described["model"],
            "lumina_cache": described["lumina_cache"],
            "commit": here["commit"],
            "python": here["installation"]["python"],
            "system": here["installation"]["system"],
            "blas": _blas(),
            "settings": self.settings.to_record(),
            "texts": [
                {"name": d.name, "domain": d.domain, "sha256": d.tokens_sha256}
                for d in self.documents
                if d.name in used
            ],
        }

    def _finish(self) -> None:
        records = self.store.records
        try:
            self.store.finish({"kind": KIND, "schema": 1, "header": self.store.header, "records": records})
            os.chmod(self.records, 0o600)
        except (OSError, EvaluationError) as error:
            raise CalibrationError(str(error)) from None

    # -- time -------------------------------------------------------------------------------------------------------

    def _start(self, what: str) -> None:
        """Say what comes next, unless the time is over."""
        if self.clock() >= self.deadline:
            raise _OutOfTime
        self._say(what)

    def _say(self, what: str) -> None:
        self.on_progress(Progress(self.done, self.total, max(0.0, self.deadline - self.clock()), what))

    def _subject_work(self) -> float:
        plan = self.settings.plan
        return float(plan.scored + plan.planted)

    def _read_work(self) -> float:
        return 2.0 * self.settings.context + 2.0 * self._subject_work()

    def _work(self, index: int) -> float:
        return self._read_work() + len(self._actions(index)) * self._subject_work()

    def _timed_work(self) -> float:
        rows = self.settings.timed_rows
        return max(rows) + len(rows) * len(self.timed) * (8.0 * self.settings.timed_steps + CHUNK * CHUNKS)


def _blas() -> str | None:
    """Which BLAS MLX's CPU backend computes with; None on other devices."""
    if device_kind() != "cpu":
        return None
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "as many as processors")
    return (
        f"OpenBLAS, threads: {threads}" if preload_openblas().engaged else "the one that MLX was linked with"
    )


def _worth_keeping(path: Path, settings: Settings, key: Mapping[str, str]) -> Profile | None:
    """The profile at ``path`` if a quick look must not take its place.

    Raises:
        CalibrationError: there is something else than a profile, which is not written over.
    """
    try:
        found = read_profile(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CalibrationError(f"cannot use {path}: {error.strerror or error}") from None
    except ProfileFormatError as error:
        raise CalibrationError(
            f"{path} holds something else than a profile of this version, and is not written over ({error}): give "
            "another --out, or remove it"
        ) from None
    made_quickly = bool(dict(found.provenance.get("settings", {})).get("quick", True))
    better = settings.quick and not made_quickly and found.provenance.get("key") == key
    return found if better else None
