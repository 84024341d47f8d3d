"""Makes memory scarce on purpose, in a process of its own, within hard limits, with a timeline to line a
run up with.

The process takes memory in small steps of touched pages and gives it back at once when the system turns
critical, when it is told to, when its time is over, or when its parent is gone. It never takes more than
a stated share of the memory that was free at the start (or that the control group still allows), and
takes less when others need more.

    with soak("ramp", peak="50%", seconds=20, on_event=log.write) as running:
        running.wait_for_peak()
        ...                             # the experiment

Every event carries ``time.monotonic`` and Unix time, so that it can be put beside the records of a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from lumina_cache.errors import LuminaError
from lumina_cache.telemetry.assemble import SnapshotReader
from lumina_cache.telemetry.pressure import LinuxRule
from lumina_cache.telemetry.snapshot import PressureLevel, Snapshot

__all__ = [
    "BACKINGS",
    "PROFILES",
    "Soak",
    "SoakError",
    "SoakReport",
    "SoakRequest",
    "free_bytes",
    "parse_amount",
    "run",
    "soak",
    "target_share",
]

PROFILES = ("ramp", "spike", "sawtooth", "steady")
BACKINGS = ("host", "mlx")
HIGHEST_SHARE = 0.95
_CYCLE_SECONDS = 0.02
_LARGEST_STEP_BYTES = 16 << 20
_FILL_SECONDS = 120.0
"""How long taking the peak may take beyond the time asked for; first touches are slow in virtual machines."""
_EXIT_SECONDS = 30.0


class SoakError(LuminaError, ValueError):
    """A soak that would not be safe, cannot be understood, or did not come up."""


# --- what is asked for ---


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One soak. Sizes in bytes, times in seconds. Raises SoakError for what cannot be."""

    profile: str
    peak: str
    """``70%`` of the memory free at the start, or a size such as ``6GB`` or ``512MiB``."""
    seconds: float
    max_share: float = 0.8
    """Never more than this share of the memory free at the start; at most 0.95."""
    incompressible: bool = True
    backing: str = "host"
    """``host``: anonymous pages. ``mlx``: buffers of MLX's default device, GPU memory on a Mac."""
    teeth: int = 4
    """How often ``sawtooth`` rises and falls."""
    cpu_threads: int = 0
    disk_bytes: int = 0
    """Size of an unnamed file that is written, synced and overwritten all the time; 0 writes nothing."""
    disk_directory: str | None = None
    retouch_seconds: float | None = None
    """Touch every page again at this interval, so that it stays hot; None lets it grow cold."""
    report_seconds: float = 0.1
    rule: LinuxRule = field(default_factory=LinuxRule)
    """What counts as critical on Linux; macOS has its own."""

    def __post_init__(self) -> None:
        parse_amount(self.peak)
        if self.profile not in PROFILES:
            raise SoakError(f"profile {self.profile!r}: give one of {', '.join(PROFILES)}")
        if self.backing not in BACKINGS:
            raise SoakError(f"backing {self.backing!r}: give one of {', '.join(BACKINGS)}")
        if not (math.isfinite(self.seconds) and 0 < self.seconds <= 86400):
            raise SoakError(f"seconds is {self.seconds!r}: give more than 0 and at most 86400")
        if not 0 < self.max_share <= HIGHEST_SHARE:
            raise SoakError(f"max_share is {self.max_share!r}: give more than 0 and at most {HIGHEST_SHARE}")
        if self.teeth < 1 or self.cpu_threads < 0 or self.disk_bytes < 0:
            raise SoakError(
                f"teeth is {self.teeth}, cpu_threads {self.cpu_threads}, disk_bytes {self.disk_bytes}: "
                "give at least 1, 0 and 0"
            )
        if self.retouch_seconds is not None and not self.retouch_seconds > 0:
            raise SoakError(f"retouch_seconds is {self.retouch_seconds!r}: give more than 0, or nothing")
        if not self.report_seconds > 0:
            raise SoakError(f"report_seconds is {self.report_seconds!r}: give more than 0")


_AMOUNT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(%|[KMGT]?i?B)", re.IGNORECASE)
_UNITS: dict[str, int] = {"B": 1} | {
    f"{letter}{infix}B": base**power
    for power, letter in enumerate("KMGT", start=1)
    for infix, base in (("", 1000), ("I", 1024))
}


def parse_amount(text: str) -> float | int:
    """``70%`` as the share 0.7 (a float), ``6GB`` or ``512MiB`` as bytes (an int). Raises SoakError."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise SoakError(f"{text!r} is no amount of memory: give a share such as 70% or a size such as 6GB")
    number, unit = float(match[1]), match[2].upper()
    if number == 0:
        raise SoakError(f"{text!r} is nothing: give more than 0")
    if unit != "%":
        return round(number * _UNITS[unit])
    if number > 100:
        raise SoakError(f"{text!r} is more than there is: give at most 100%")
    return number / 100


def free_bytes(snapshot: Snapshot) -> int:
    """Memory that can be taken without taking it from somebody: on Linux what is available within the
    control group's limit; on macOS free plus inactive pages. Raises SoakError when the machine does not
    say.
    """
    if snapshot.memory_available_bytes is not None:
        return snapshot.memory_available_bytes
    if snapshot.memory_free_bytes is not None and snapshot.memory_inactive_bytes is not None:
        return snapshot.memory_free_bytes + snapshot.memory_inactive_bytes
    reason = snapshot.unknown.get("memory_free_bytes") or snapshot.unknown.get("memory_inactive_bytes")
    raise SoakError(f"free memory is unknown ({reason}): no soak without knowing it")


def resolve_peak(request: SoakRequest, free: int) -> int:
    """The peak in bytes. Raises SoakError when it is above ``max_share`` of `free`."""
    amount = parse_amount(request.peak)
    peak = int(amount * free) if isinstance(amount, float) else amount
    ceiling = int(request.max_share * free)
    if peak > ceiling:
        raise SoakError(
            f"a peak of {request.peak} is {peak / 1e9:.2f} GB, but {request.max_share:.0%} of the "
            f"{free / 1e9:.2f} GB free now is {ceiling / 1e9:.2f} GB: ask for less, or for a larger share"
        )
    if peak < mmap.PAGESIZE:
        raise SoakError(f"a peak of {request.peak} is less than one page of {mmap.PAGESIZE} bytes")
    return peak


def target_share(profile: str, progress: float, teeth: int = 4) -> float:
    """Share of the peak to hold when `progress` (0 to 1) of the time is over.

    ``ramp`` rises evenly; ``spike`` is at the peak in the middle third and at nothing before and after;
    ``sawtooth`` rises evenly and drops, `teeth` times; ``steady`` is at the peak all the time.
    """
    progress = min(1.0, max(0.0, progress))
    if profile == "ramp":
        return progress
    if profile == "spike":
        return 1.0 if 1 / 3 <= progress < 2 / 3 else 0.0
    if profile == "sawtooth":
        return 1.0 if progress == 1.0 else (progress * teeth) % 1.0
    return 1.0


# --- the process that takes the memory ---


class _Backing(Protocol):
    held_bytes: int

    def grow(self, nbytes: int) -> None: ...
    def shrink_to(self, nbytes: int) -> None: ...
    def retouch(self) -> None: ...


class _HostPages:
    """Anonymous private pages, each written in full, in chunks that can be unmapped one by one."""

    def __init__(self, step_bytes: int, incompressible: bool) -> None:
        # Compressors look at one page at a time: random bytes cannot be compressed, one repeated byte can.
        self._pattern = memoryview(os.urandom(step_bytes) if incompressible else b"\x5a" * step_bytes)
        self._chunks: list[mmap.mmap] = []
        self._turn = 0
        self.held_bytes = 0

    def grow(self, nbytes: int) -> None:
        nbytes = min(len(self._pattern), -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        chunk = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Another rotation for each chunk, so that no two pages are equal and none can be merged.
        self._turn = (self._turn + 61 * 64 + 1) % nbytes
        first = nbytes - self._turn
        with memoryview(chunk) as view:
            view[:first] = self._pattern[self._turn : nbytes]
            view[first:] = self._pattern[: self._turn]
        self._chunks.append(chunk)
        self.held_bytes += nbytes

    def shrink_to(self, nbytes: int) -> None:
        while self._chunks and self.held_bytes > nbytes:
            chunk = self._chunks.pop()
            self.held_bytes -= len(chunk)
            chunk.close()

    def retouch(self) -> None:
        for chunk in self._chunks:
            chunk[:: mmap.PAGESIZE] = os.urandom(-(-len(chunk) // mmap.PAGESIZE))


class _MlxBuffers:
    """Evaluated MLX arrays. This process's own buffer pool is switched off, so that a freed buffer is
    given back.
    """

    def __init__(self, step_bytes: int, incompressible: bool) -> None:
        import mlx.core as mx
        import numpy as np

        mx.set_cache_limit(0)
        self._mx = mx
        pattern = bytearray(os.urandom(step_bytes) if incompressible else b"\x5a" * step_bytes)
        self._pattern = np.frombuffer(pattern, dtype=np.uint32)
        self._arrays: list[Any] = []
        self.held_bytes = 0

    def grow(self, nbytes: int) -> None:
        words = max(1, nbytes // 4)
        self._pattern += 1  # in place: no two buffers are equal, and no temporary is left over
        array = self._mx.array(self._pattern[:words])
        self._mx.eval(array)
        self._arrays.append(array)
        self.held_bytes += array.nbytes

    def shrink_to(self, nbytes: int) -> None:
        while self._arrays and self.held_bytes > nbytes:
            self.held_bytes -= self._arrays.pop().nbytes
        self._mx.clear_cache()

    def retouch(self) -> None:
        self._mx.eval([array.max() for array in self._arrays])


def step_bytes_for(peak: int) -> int:
    """Size of one step: a 64th of the peak in whole pages, between one page and 16 MiB."""
    pages = max(1, peak // 64 // mmap.PAGESIZE)
    return min(_LARGEST_STEP_BYTES, pages * mmap.PAGESIZE)


class _Worker:
    """The loop of the soaking process. `emit` writes one event; `stop` is set from outside."""

    def __init__(self, request: SoakRequest, emit: Callable[[dict[str, object]], None]) -> None:
        self._request = request
        self._emit = emit
        self.stop = threading.Event()
        self.stop_reason = "released"
        self._reader = SnapshotReader(fast_only=True, rule=request.rule)
        self._parent = os.getppid()

    def main(self) -> None:
        request = self._request
        first = self._reader.read()
        free = free_bytes(first)
        peak = resolve_peak(request, free)
        reserve = free - int(request.max_share * free)
        self._check_disk()
        backing = self._backing(peak)
        baseline = self._reader.read().process_resident_bytes
        self._bound_address_space(peak)
        loads = self._start_loads()
        self._tell("started", backing, peak, 0, baseline, free_at_start_bytes=free, reserve_bytes=reserve)
        outcome = "error"
        held_at_end = 0
        try:
            outcome = self._hold(backing, peak, reserve, baseline)
        except (MemoryError, OSError) as error:
            outcome = f"refused by the system: {type(error).__name__}"
        finally:
            held_at_end = backing.held_bytes
            begun = time.monotonic()
            backing.shrink_to(0)
            release_seconds = time.monotonic() - begun
            self.stop.set()
            for load in loads:
                load.join(1.0)
            end = {"outcome": outcome, "held_at_end_bytes": held_at_end, "release_seconds": release_seconds}
            self._tell("ended", backing, peak, 0, baseline, **end)

    def _backing(self, peak: int) -> _Backing:
        step, incompressible = step_bytes_for(peak), self._request.incompressible
        backing: _Backing
        if self._request.backing == "mlx":
            backing = _MlxBuffers(step, incompressible)
        else:
            backing = _HostPages(step, incompressible)
        backing.grow(step)  # whatever comes with the first step belongs to the baseline
        backing.shrink_to(0)
        return backing

    def _hold(self, backing: _Backing, peak: int, reserve: int, baseline: int | None) -> str:
        """Follow the profile until something ends it; the reason is returned.

        The clock of ``steady`` starts when the peak is held, so that `seconds` is how long it is held.
        """
        request = self._request
        step = step_bytes_for(peak)
        start = reported = retouched = time.monotonic()
        at_peak = False
        while True:
            now = time.monotonic()
            elapsed = now - start
            if request.profile == "steady" and not at_peak and elapsed > _FILL_SECONDS:
                return "peak not reached"
            progress = 0.0 if request.profile == "steady" and not at_peak else elapsed / request.seconds
            if self.stop.is_set():
                return self.stop_reason
            if os.getppid() != self._parent:
                return "parent gone"
            snapshot = self._reader.read()
            if snapshot.pressure_level is PressureLevel.CRITICAL:
                return "critical pressure"
            wanted = round(peak * target_share(request.profile, progress, request.teeth))
            room = free_bytes(snapshot) - reserve
            allowed = min(wanted, max(0, backing.held_bytes + room))
            busy = self._approach(backing, allowed, step)
            if backing.held_bytes >= peak - step // 2 and not at_peak:
                at_peak = True
                if request.profile == "steady":
                    start = time.monotonic()
                self._tell("peak", backing, peak, wanted, baseline)
            near = backing.held_bytes >= wanted - step // 4
            if progress >= 1.0 and (near or allowed < wanted):
                return "time over"
            if progress >= 1.0 and elapsed > request.seconds + _FILL_SECONDS:
                return "peak not reached"
            if request.retouch_seconds is not None and now - retouched >= request.retouch_seconds:
                backing.retouch()
                retouched = time.monotonic()
            if now - reported >= request.report_seconds:
                self._tell("step", backing, peak, wanted, baseline, held_back_bytes=wanted - allowed)
                reported = now
            if not busy:
                self.stop.wait(_CYCLE_SECONDS)

    def _approach(self, backing: _Backing, allowed: int, step: int) -> bool:
        """One step towards `allowed`; True when there is more to do at once."""
        missing = allowed - backing.held_bytes
        if missing >= mmap.PAGESIZE:
            # A slowly rising target is followed in whole steps, a distant one without a pause.
            if missing >= step or self._request.profile in ("steady", "spike"):
                backing.grow(min(step, missing))
                return allowed - backing.held_bytes >= step
            if missing >= max(step // 8, mmap.PAGESIZE):
                backing.grow(missing)
        elif missing <= -step or (missing < 0 and allowed == 0):
            backing.shrink_to(max(0, allowed))
        return False

    def _tell(
        self,
        phase: str,
        backing: _Backing,
        peak: int,
        target: int,
        baseline: int | None,
        **more: object,
    ) -> None:
        seen = self._reader.read()
        resident = seen.process_resident_bytes
        if self._request.backing == "mlx" and seen.platform == "darwin":
            resident = seen.process_footprint_bytes  # the resident set leaves Metal buffers out
        level = seen.pressure_level
        self._emit(
            {
                "event": "soak",
                "phase": phase,
                "profile": self._request.profile,
                "peak_bytes": peak,
                "target_bytes": target,
                "held_bytes": backing.held_bytes,
                "resident_bytes": None if resident is None or baseline is None else resident - baseline,
                "available_bytes": seen.memory_available_bytes,
                "pressure_level": None if level is PressureLevel.UNKNOWN else level.value,
                "stall_some_percent": seen.stall_some_percent,
                "stall_full_percent": seen.stall_full_percent,
                "monotonic_seconds": time.monotonic(),
                "unix_seconds": time.time(),
                **more,
            }
        )

    # --- safety ---

    def _bound_address_space(self, peak: int) -> None:
        """On Linux, so that a fault of this file cannot take more than was asked; and first in line for
        the killer.
        """
        if sys.platform != "linux":
            return
        import resource

        with contextlib.suppress(OSError, ValueError):
            pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
            mlx_slack = peak // 4 if self._request.backing == "mlx" else 0
            bound = pages * mmap.PAGESIZE + peak + mlx_slack + (512 << 20)
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            if hard == resource.RLIM_INFINITY or bound < hard:
                resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", "ascii")

    def _check_disk(self) -> None:
        if self._request.disk_bytes == 0:
            return
        directory = self._request.disk_directory or tempfile.gettempdir()
        stat = os.statvfs(directory)
        free = stat.f_bavail * stat.f_frsize
        if self._request.disk_bytes > free // 2:
            raise SoakError(
                f"disk_bytes is {self._request.disk_bytes}, more than half of the {free} bytes free in "
                f"{directory}: ask for less, or name another directory"
            )

    def _start_loads(self) -> list[threading.Thread]:
        targets = [self._burn] * self._request.cpu_threads
        if self._request.disk_bytes:
            targets.append(self._write)
        threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in threads:
            thread.start()
        return threads

    def _burn(self) -> None:
        block = os.urandom(1 << 20)
        while not self.stop.is_set():
            hashlib.sha256(block).digest()  # releases the GIL

    def _write(self) -> None:
        block = os.urandom(1 << 20)
        with tempfile.TemporaryFile(dir=self._request.disk_directory) as file:
            while not self.stop.is_set():
                file.seek(0)
                left = self._request.disk_bytes
                while left > 0 and not self.stop.is_set():
                    left -= file.write(block[: min(left, len(block))])
                file.flush()
                os.fsync(file.fileno())


def _worker_main() -> None:
    """Entry of the soaking process: the request is the first line of standard input, whose end means: let
    go.
    """
    asked = json.loads(_read_line(0))
    request = SoakRequest(**(asked | {"rule": LinuxRule(**asked["rule"])}))

    def emit(event: dict[str, object]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(event).encode() + b"\n")

    worker = _Worker(request, emit)

    def let_go(reason: str) -> None:
        worker.stop_reason = reason
        worker.stop.set()

    def await_end_of_input() -> None:
        while os.read(0, 4096):
            pass
        let_go("released")
        time.sleep(2.0)
        os._exit(0)  # whatever hung, the memory goes back now

    def await_end_of_time() -> None:
        time.sleep(request.seconds + _FILL_SECONDS + _EXIT_SECONDS)
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: let_go("interrupted"))
    for watch in (await_end_of_input, await_end_of_time):
        threading.Thread(target=watch, daemon=True).start()
    try:
        worker.main()
    except SoakError as error:
        emit({"event": "soak", "phase": "refused", "reason": str(error)})
    except Exception as error:
        emit({"event": "soak", "phase": "refused", "reason": f"{type(error).__name__}: {error}"})
    os._exit(0)  # all is said; the watching threads hold nothing that needs an orderly end


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (chunk := os.read(descriptor, 4096)):
        line += chunk
    return line


# --- the process that asks for it ---


@dataclass(frozen=True, slots=True)
class SoakReport:
    """How a soak went. `outcome` is ``time over``, ``released``, ``interrupted``, ``critical pressure``
    or a refusal.
    """

    outcome: str
    peak_bytes: int
    held_peak_bytes: int
    resident_peak_bytes: int | None
    worst_pressure: str | None
    """Worst level that the soak itself saw; None when it was never known."""
    release_seconds: float | None
    timeline: tuple[dict[str, object], ...]

    def __str__(self) -> str:
        seen = self.resident_peak_bytes
        resident = "unknown" if seen is None else f"{seen / 1e9:.3f} GB"
        released = "" if self.release_seconds is None else f", given back in {self.release_seconds:.3f} s"
        return (
            f"{self.outcome}: held {self.held_peak_bytes / 1e9:.3f} of {self.peak_bytes / 1e9:.3f} GB "
            f"asked for, resident {resident}, worst pressure {self.worst_pressure or 'unknown'}{released}"
        )


class Soak:
    """A soak as a context manager: memory is taken inside the block and given back at its end.

    `on_event` gets every event (from a thread of its own); `log_path` gets them as JSON lines. Raises
    SoakError on entry when the soak is refused or does not start.
    """

    def __init__(
        self,
        request: SoakRequest,
        *,
        on_event: Callable[[dict[str, object]], object] | None = None,
        log_path: Path | str | None = None,
    ) -> None:
        self.request = request
        self._on_event = on_event
        self._log_path = log_path
        self._child: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._events: list[dict[str, object]] = []
        self._news = threading.Condition()
        self._listening = False
        self.last_callback_error: str | None = None

    @property
    def timeline(self) -> tuple[dict[str, object], ...]:
        with self._news:
            return tuple(self._events)

    @property
    def _longest_seconds(self) -> float:
        return self.request.seconds + _FILL_SECONDS + 2 * _EXIT_SECONDS

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def start(self, timeout_seconds: float = 60.0) -> Self:
        """Start the process and wait until it is ready to take memory."""
        if self._child is not None:
            raise SoakError("this soak was started before: make another one")
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        self._child = subprocess.Popen(
            [sys.executable, "-c", "from lumina_cache.lab.soak import _worker_main; _worker_main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A fixed threshold: glibc would otherwise move freed MLX buffers to its heap, which keeps them.
            env=os.environ | {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"},
            text=True,
        )
        self._listening = True
        self._listener = threading.Thread(target=self._listen, name="lumina-soak", daemon=True)
        self._listener.start()
        try:
            assert self._child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.write(json.dumps(asdict(self.request)) + "\n")
                self._child.stdin.flush()
            self._wait_until(lambda: bool(self._events) or not self._listening, timeout_seconds)
            first = self.timeline[:1]
            if not first:
                raise SoakError(f"the soaking process did not come up within {timeout_seconds:g} s")
            if first[0]["phase"] == "refused":
                raise SoakError(str(first[0]["reason"]))
        except BaseException:
            self.release()
            raise
        return self

    def _listen(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(open(self._log_path, "a", encoding="utf-8")) if self._log_path else None
            for line in self._child.stdout:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # something else in the child printed
                if log is not None:
                    log.write(line)
                    log.flush()
                with self._news:
                    self._events.append(event)
                    self._news.notify_all()
                if self._on_event is not None:
                    try:
                        self._on_event(event)
                    except Exception as error:
                        self.last_callback_error = f"{type(error).__name__}: {error}"
        with self._news:
            self._listening = False
            self._news.notify_all()

    def _wait_until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        with self._news:
            return self._news.wait_for(condition, timeout_seconds)

    def wait_for_peak(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the peak is held. False when the soak ended, or the time was over, before that."""
        limit = (
            self.request.seconds + _FILL_SECONDS + 2 * _EXIT_SECONDS
            if timeout_seconds is None
            else timeout_seconds
        )

        def reached() -> bool:
            return any(event["phase"] == "peak" for event in self._events)

        self._wait_until(lambda: reached() or not self._listening, limit)
        return reached()

    def wait(self, timeout_seconds: float | None = None) -> SoakReport:
        """Wait until the soak ends by itself, then report. Releases it when the time is over."""
        limit = (
            self.request.seconds + _FILL_SECONDS + 2 * _EXIT_SECONDS
            if timeout_seconds is None
            else timeout_seconds
        )
        self._wait_until(lambda: not self._listening, limit)
        return self.release()

    def release(self) -> SoakReport:
        """Have all memory given back, now; the process is killed if it does not answer within two seconds."""
        child = self._child
        if child is None:
            raise SoakError("this soak was not started")
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        try:
            child.wait(2.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if self._listener is not None:
            self._listener.join(2.0)
        if child.stdout is not None:
            child.stdout.close()
        return self.report()

    def report(self) -> SoakReport:
        """What is known so far."""
        events = self.timeline
        ended = next((event for event in events if event["phase"] == "ended"), None)
        refused = next((event for event in events if event["phase"] == "refused"), None)
        residents = [r for event in events if isinstance(r := event.get("resident_bytes"), int)]
        levels = [
            PressureLevel(str(event["pressure_level"])) for event in events if event.get("pressure_level")
        ]
        worst = max(levels, key=lambda level: level.severity or 0, default=None)
        outcome = "running" if self._listening else "killed"
        if refused is not None:
            outcome = f"refused: {refused['reason']}"
        if ended is not None:
            outcome = str(ended["outcome"])
        seconds = ended.get("release_seconds") if ended else None
        return SoakReport(
            outcome=outcome,
            peak_bytes=max((b for e in events if isinstance(b := e.get("peak_bytes"), int)), default=0),
            held_peak_bytes=max((b for e in events if isinstance(b := e.get("held_bytes"), int)), default=0),
            resident_peak_bytes=max(residents, default=None),
            worst_pressure=worst.value if worst else None,
            release_seconds=seconds if isinstance(seconds, float) else None,
            timeline=events,
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def soak(
    profile: str,
    *,
    peak: str,
    seconds: float,
    on_event: Callable[[dict[str, object]], object] | None = None,
    log_path: Path | str | None = None,
    **options: Any,
) -> Soak:
    """A `Soak` for a ``with`` block; `options` are the other fields of `SoakRequest`. Raises SoakError."""
    return Soak(replace(SoakRequest(profile, peak, seconds), **options), on_event=on_event, log_path=log_path)


def run(
    profile: str,
    *,
    peak: str,
    seconds: float,
    on_event: Callable[[dict[str, object]], object] | None = None,
    log_path: Path | str | None = None,
    **options: Any,
) -> SoakReport:
    """Soak until the time is over, then report; Ctrl-C gives everything back and reports ``interrupted``.

    `options` are the other fields of `SoakRequest`. Raises SoakError when it is refused.
    """
    running = soak(profile, peak=peak, seconds=seconds, on_event=on_event, log_path=log_path, **options)
    try:
        running.start()
        return running.wait()
    except KeyboardInterrupt:
        report = running.release()
        return replace(report, outcome="interrupted")
