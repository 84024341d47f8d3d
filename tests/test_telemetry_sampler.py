from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from lumina_cache.telemetry.probes import NOT_READ_YET, Probe, ReaderSet, Readings, Tier
from lumina_cache.telemetry.sampler import Sampler, TelemetryError, changes
from lumina_cache.telemetry.snapshot import FIELD_GROUPS, PressureLevel, Reading, Snapshot

WAIT_SECONDS = 10.0


class Machine:
    """A machine with one fast and one slow source that can be changed, broken and made to hang."""

    def __init__(self) -> None:
        self.level = PressureLevel.NORMAL
        self.swap: int | Exception = 1
        self.disk: int | Exception = 5
        self.hang = threading.Event()
        self.hanging = threading.Event()
        self.forgotten = self.closed = 0

    def readers(self, platform: str = "test") -> ReaderSet:
        return ReaderSet(
            platform,
            (
                Probe(
                    "level", ("pressure_level",), lambda: {"pressure_level": Reading(self.level, "machine")}
                ),
                Probe("swap", ("swap_used_bytes",), lambda: self._give("swap_used_bytes", self.swap)),
                Probe("disk", ("disk_free_bytes",), self._slow, Tier.SLOW),
            ),
            forget=self._forget,
            close=self._close,
        )

    def _give(self, field: str, value: int | Exception) -> Readings:
        if isinstance(value, Exception):
            raise value
        return {field: Reading(value, "machine")}

    def _slow(self) -> Readings:
        if self.hang.is_set():
            self.hanging.set()
            while self.hang.is_set():
                time.sleep(0.01)
        return self._give("disk_free_bytes", self.disk)

    def _forget(self) -> None:
        self.forgotten += 1

    def _close(self) -> None:
        self.closed += 1


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def telemetry_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lumina-telemetry")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> object:
    before = len(telemetry_threads())
    yield
    gc.collect()
    assert eventually(lambda: len(telemetry_threads()) <= before)


def test_the_first_snapshot_is_there_at_once_and_a_later_one_replaces_it() -> None:
    machine = Machine()
    with Sampler(readers=machine.readers(), fast_seconds=0.02) as sampler:
        first = sampler.latest
        assert first.swap_used_bytes == 1
        machine.swap = 2
        assert eventually(lambda: sampler.latest.swap_used_bytes == 2)
        assert eventually(lambda: sampler.latest.disk_free_bytes == 5)
        assert sampler.latest.monotonic_seconds > first.monotonic_seconds
        age = sampler.latest.age("swap")
        assert age is not None
        assert age < 5.0


def test_a_slow_source_that_hangs_does_not_delay_the_fast_one() -> None:
    machine = Machine()
    machine.hang.set()
    with Sampler(readers=machine.readers(), fast_seconds=0.02) as sampler:
        assert machine.hanging.wait(WAIT_SECONDS)
        for value in range(10, 20):
            machine.swap = value
            assert eventually(lambda value=value: sampler.latest.swap_used_bytes == value)  # type: ignore[misc]
        assert sampler.latest.unknown["disk_free_bytes"] == NOT_READ_YET
        machine.hang.clear()
        assert eventually(lambda: sampler.latest.disk_free_bytes == 5)


def test_what_an_overdue_source_said_last_turns_unknown() -> None:
    now = [0.0]
    machine = Machine()
    sampler = Sampler(readers=machine.readers(), fast_seconds=0.02, clock=lambda: now[0])
    assert eventually(lambda: sampler.latest.disk_free_bytes == 5)
    machine.hang.set()
    assert machine.hanging.wait(WAIT_SECONDS)
    now[0] = 30.0
    assert eventually(lambda: sampler.latest.disk_free_bytes is None)
    assert sampler.latest.unknown["disk_free_bytes"] == "the reader has not answered for 30 s"
    machine.hang.clear()
    assert eventually(lambda: sampler.latest.disk_free_bytes == 5)
    sampler.close()


def test_a_failing_source_leaves_the_others_and_its_failure_is_one_event() -> None:
    machine, events = Machine(), list[dict[str, object]]()
    with Sampler(readers=machine.readers(), fast_seconds=0.01, on_change=events.append) as sampler:
        machine.swap = OSError("the counter is gone")
        assert eventually(lambda: sampler.latest.swap_used_bytes is None)
        time.sleep(0.2)
        assert sampler.latest.pressure_level is PressureLevel.NORMAL
    failures = [event for event in events if event["field"] == "swap_used_bytes"]
    assert len(failures) == 1
    assert failures[0]["reason"] == "the counter is gone"
    assert (failures[0]["old"], failures[0]["new"]) == (1, None)


def test_critical_shows_with_the_next_reading_and_warn_needs_two() -> None:
    machine = Machine()
    sampler = Sampler(readers=machine.readers(), enabled=True, fast_seconds=3600.0)
    core = sampler._core
    machine.level = PressureLevel.WARN
    assert core.fast_step().pressure_level is PressureLevel.NORMAL
    assert core.fast_step().pressure_level is PressureLevel.WARN
    machine.level = PressureLevel.CRITICAL
    assert core.fast_step().pressure_level is PressureLevel.CRITICAL
    machine.level = PressureLevel.NORMAL
    levels = [core.fast_step().pressure_level for _ in range(8)]
    assert levels == [PressureLevel.CRITICAL] * 7 + [PressureLevel.NORMAL]
    sampler.close()


def test_events_are_plain_json_and_one_per_change() -> None:
    machine, events = Machine(), list[dict[str, object]]()
    sampler = Sampler(readers=machine.readers(), fast_seconds=3600.0, on_change=events.append)
    machine.level = PressureLevel.CRITICAL
    for _ in range(5):
        sampler._core.fast_step()
    sampler.close()
    of_level = [event for event in json.loads(json.dumps(events)) if event["field"] == "pressure_level"]
    assert len(of_level) == 1
    assert of_level[0]["event"] == "telemetry"
    assert (of_level[0]["old"], of_level[0]["new"]) == ("normal", "critical")
    assert of_level[0]["source"] == "machine"
    assert of_level[0]["monotonic_seconds"] > 0


def _with(**readings: Reading) -> Snapshot:
    return Snapshot.from_readings(readings, platform="test")


def test_a_value_that_was_only_not_read_yet_arrives_without_an_event() -> None:
    pending = Reading.unknown(NOT_READ_YET, "x")
    lost = Reading.unknown("broken", "x")
    known = Reading(5, "x")
    assert changes(_with(disk_free_bytes=pending), _with(disk_free_bytes=known)) == []
    assert len(changes(_with(disk_free_bytes=lost), _with(disk_free_bytes=known))) == 1
    assert changes(_with(disk_free_bytes=known), _with(disk_free_bytes=Reading(6, "x"))) == []
    assert changes(_with(disk_free_bytes=lost), _with(disk_free_bytes=Reading.unknown("still", "x"))) == []


def test_a_gpu_reset_is_an_event() -> None:
    events = changes(_with(gpu_recoveries_total=Reading(1, "x")), _with(gpu_recoveries_total=Reading(2, "x")))
    assert [(event["field"], event["old"], event["new"]) for event in events] == [
        ("gpu_recoveries_total", 1, 2)
    ]


def test_swapping_is_one_event_when_it_begins_and_one_when_it_is_over() -> None:
    now, rate = [0.0], [0.0]
    events: list[dict[str, object]] = []
    probe = Probe(
        "swap",
        ("swap_out_bytes_per_second",),
        lambda: {"swap_out_bytes_per_second": Reading(rate[0], "test")},
    )
    sampler = Sampler(
        readers=ReaderSet("test", (probe,)),
        fast_seconds=3600.0,
        on_change=events.append,
        clock=lambda: now[0],
    )
    for second in range(100):
        now[0] = float(second)
        rate[0] = 1e6 if second in (10, 12, 20, 21, 40) else 0.0  # in bursts
        sampler._core.fast_step()
    sampler.close()
    assert [(event["field"], event["new"], event["monotonic_seconds"]) for event in events] == [
        ("swapping", True, 10.0),
        ("swapping", False, 70.0),
    ]


def test_what_the_callback_raises_is_kept_and_sampling_goes_on() -> None:
    def broken(event: dict[str, object]) -> None:
        raise OSError("disk full")

    machine = Machine()
    with Sampler(readers=machine.readers(), fast_seconds=0.02, on_change=broken) as sampler:
        machine.level = PressureLevel.CRITICAL
        assert eventually(lambda: sampler.last_callback_error == "OSError: disk full")
        machine.swap = 9
        assert eventually(lambda: sampler.latest.swap_used_bytes == 9)


def test_closing_ends_both_threads_and_lets_go_of_the_handles_once() -> None:
    machine = Machine()
    sampler = Sampler(readers=machine.readers(), fast_seconds=0.02)
    assert sampler.running
    sampler.close()
    sampler.close()
    assert eventually(lambda: not sampler.running)
    assert machine.closed == 1
    assert sampler.latest.swap_used_bytes == 1


def test_closing_does_not_wait_for_a_source_that_hangs() -> None:
    machine = Machine()
    machine.hang.set()
    sampler = Sampler(readers=machine.readers(), fast_seconds=0.02)
    assert machine.hanging.wait(WAIT_SECONDS)
    begun = time.monotonic()
    sampler.close()
    assert time.monotonic() - begun < 3.0
    assert machine.closed == 0  # its handles are still in use
    machine.hang.clear()
    assert eventually(lambda: machine.closed == 1)


def test_a_sampler_that_nobody_holds_ends_its_threads() -> None:
    machine = Machine()
    sampler = Sampler(readers=machine.readers(), fast_seconds=0.02)
    threads = sampler._core.threads
    del sampler
    gc.collect()
    assert eventually(lambda: not any(thread.is_alive() for thread in threads))
    assert eventually(lambda: machine.closed == 1)


def test_an_owner_whose_method_is_the_callback_can_be_collected() -> None:
    class Owner:
        def __init__(self, machine: Machine) -> None:
            self.seen: list[dict[str, object]] = []
            self.sampler = Sampler(readers=machine.readers(), fast_seconds=0.02, on_change=self.log)

        def log(self, event: dict[str, object]) -> None:
            self.seen.append(event)

    machine = Machine()
    owner = Owner(machine)
    machine.level = PressureLevel.CRITICAL
    seen = owner.seen
    assert eventually(lambda: bool(seen))
    gone = weakref.ref(owner)
    threads = owner.sampler._core.threads
    del owner
    gc.collect()
    assert gone() is None
    assert eventually(lambda: not any(thread.is_alive() for thread in threads))


def test_when_off_there_is_no_thread_and_everything_is_unknown() -> None:
    before = len(telemetry_threads())
    sampler = Sampler(enabled=False)
    assert len(telemetry_threads()) == before
    assert not sampler.running
    assert set(sampler.latest.unknown.values()) == {"telemetry is off"}
    assert set(sampler.latest.unknown) == set(FIELD_GROUPS)
    sampler.close()


def test_importing_starts_no_thread_and_the_process_ends_with_a_sampler_open() -> None:
    code = (
        "import threading, lumina_cache.telemetry as t; assert threading.active_count() == 1;"
        "s = t.Sampler(); assert threading.active_count() == 3; print(s.latest.platform)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_a_source_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import time\n"
        "from lumina_cache.telemetry.probes import Probe, ReaderSet, Tier\n"
        "from lumina_cache.telemetry.sampler import Sampler\n"
        "probe = Probe('hang', ('disk_free_bytes',), lambda: time.sleep(600), Tier.SLOW)\n"
        "sampler = Sampler(readers=ReaderSet('test', (probe,)))\n"
        "time.sleep(0.2)\n",
        "utf-8",
    )
    begun = time.monotonic()
    subprocess.run(
        [sys.executable, str(script)], timeout=60, check=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert time.monotonic() - begun < 30


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads_on_first_use_with_fresh_handles() -> None:
    machine = Machine()
    with Sampler(readers=machine.readers(), fast_seconds=0.02) as sampler:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                forgotten = machine.forgotten == 1
                stale = sampler._core.latest is None and not sampler.running
                machine.swap = 77
                seen = sampler.latest.swap_used_bytes == 77 and sampler.running
                machine.swap = 78
                fresh = eventually(lambda: sampler.latest.swap_used_bytes == 78)
                status = 0 if forgotten and stale and seen and fresh else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert machine.forgotten == 0
        machine.swap = 3
        assert eventually(lambda: sampler.latest.swap_used_bytes == 3)


@pytest.mark.parametrize(
    ("name", "value"), [("fast_seconds", 0.0), ("fast_seconds", -1.0), ("slow_seconds", 0.5)]
)
def test_a_pace_that_cannot_be_is_refused_with_the_remedy(name: str, value: float) -> None:
    with pytest.raises(TelemetryError, match=rf"{name} is {value}.*give"):
        Sampler(**{name: value})  # type: ignore[arg-type]


def test_the_real_machine_is_sampled_with_its_rates() -> None:
    with Sampler(fast_seconds=0.05) as sampler:
        assert eventually(lambda: sampler.latest.disk_free_bytes is not None)
        if sys.platform in ("linux", "darwin"):
            assert eventually(lambda: sampler.latest.swap_out_bytes_per_second is not None)
            assert sampler.latest.pressure_level is not PressureLevel.UNKNOWN


def test_a_fault_of_telemetry_itself_shows_as_unknown_and_not_as_an_old_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Sampler(readers=Machine().readers(), fast_seconds=0.02) as sampler:

        def broken(*_: object, **__: object) -> None:
            raise KeyError("a fault")

        monkeypatch.setattr("lumina_cache.telemetry.sampler.derive", broken)
        assert eventually(lambda: sampler.latest.swap_used_bytes is None)
        assert "KeyError" in sampler.latest.unknown["swap_used_bytes"]
        monkeypatch.undo()
        assert eventually(lambda: sampler.latest.swap_used_bytes == 1)


@pytest.mark.slow
def test_ten_thousand_samples_do_not_grow_the_process() -> None:
    if sys.platform != "linux":
        pytest.skip("counts resident pages and descriptors through /proc")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with Sampler(fast_seconds=3600.0) as sampler:
        core = sampler._core
        for _ in range(1000):
            core.fast_step()
            core.slow_step()
        gc.collect()
        before, files = resident(), len(os.listdir("/proc/self/fd"))
        for _ in range(10_000):
            core.fast_step()
            core.slow_step()
        gc.collect()
        assert resident() - before < 1 << 20
        assert len(os.listdir("/proc/self/fd")) == files
