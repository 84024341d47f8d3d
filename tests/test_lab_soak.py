from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumina_cache.lab import soak as module
from lumina_cache.lab.soak import (
    PROFILES,
    SoakError,
    SoakRequest,
    free_bytes,
    parse_amount,
    resolve_peak,
    run,
    soak,
    step_bytes_for,
    target_share,
)
from lumina_cache.telemetry import PressureLevel
from lumina_cache.telemetry.pressure import LinuxRule
from lumina_cache.telemetry.snapshot import Reading, Snapshot

MIB = 1 << 20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks at the process through /proc")


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


# --- what is asked for ---


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("70%", 0.7),
        ("12.5 %", 0.125),
        ("6GB", 6_000_000_000),
        ("512MiB", 512 * MIB),
        ("1.5gib", 3 << 29),
        ("9b", 9),
    ],
)
def test_an_amount_is_a_share_or_a_size(text: str, amount: float) -> None:
    assert parse_amount(text) == amount
    assert type(parse_amount(text)) is type(amount)


@pytest.mark.parametrize(
    "text", ["", "6", "GB", "-6GB", "0GB", "0%", "101%", "1e9B", "6 apples", "٦GB", "nan%"]
)
def test_an_amount_that_cannot_be_read_names_itself_and_the_remedy(text: str) -> None:
    with pytest.raises(SoakError, match=r"give"):
        parse_amount(text)


@given(st.sampled_from(PROFILES), st.floats(-1, 2), st.integers(1, 9))
def test_a_profile_stays_between_nothing_and_the_peak(profile: str, progress: float, teeth: int) -> None:
    assert 0.0 <= target_share(profile, progress, teeth) <= 1.0


def test_the_profiles_have_their_shapes() -> None:
    assert [target_share("ramp", t) for t in (0, 0.25, 1)] == [0, 0.25, 1]
    assert [target_share("spike", t) for t in (0, 0.3, 0.5, 0.7, 1)] == [0, 0, 1, 0, 0]
    assert [target_share("sawtooth", t, 2) for t in (0, 0.25, 0.49, 0.5, 0.75)] == pytest.approx(
        [0, 0.5, 0.98, 0, 0.5]
    )
    assert [target_share("steady", t) for t in (0, 0.5, 1)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"profile": "wave"}, "wave"),
        ({"backing": "tape"}, "tape"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"max_share": 1.0}, "max_share"),
        ({"teeth": 0}, "teeth"),
        ({"retouch_seconds": 0.0}, "retouch_seconds"),
        ({"report_seconds": 0.0}, "report_seconds"),
        ({"peak": "lots"}, "lots"),
    ],
)
def test_a_request_that_cannot_be_names_the_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(SoakError, match=named):
        SoakRequest(**({"profile": "ramp", "peak": "10%", "seconds": 1.0} | change))


def test_the_peak_never_exceeds_the_stated_share_of_what_is_free() -> None:
    assert resolve_peak(SoakRequest("ramp", "70%", 1), 1000 * MIB) == 700 * MIB
    assert resolve_peak(SoakRequest("ramp", "70%", 1, max_share=0.7), 515_911_681) == 361_138_176
    with pytest.raises(SoakError, match=r"90%.*0\.94 GB.*80%.*1\.05 GB free.*0\.84 GB.*ask for less"):
        resolve_peak(SoakRequest("ramp", "90%", 1), 1000 * MIB)
    with pytest.raises(SoakError, match="2GB"):
        resolve_peak(SoakRequest("ramp", "2GB", 1), 1000 * MIB)
    with pytest.raises(SoakError, match="page"):
        resolve_peak(SoakRequest("ramp", "100B", 1), 1000 * MIB)


def _snapshot(**values: int | None) -> Snapshot:
    readings = {
        name: Reading.unknown("it hides", "test") if value is None else Reading(value, "test")
        for name, value in values.items()
    }
    return Snapshot.from_readings(readings, platform="test")


def test_free_memory_is_what_is_available_or_on_a_mac_free_and_inactive_or_else_an_error() -> None:
    assert free_bytes(_snapshot(memory_available_bytes=5, memory_free_bytes=9)) == 5
    assert free_bytes(_snapshot(memory_free_bytes=2, memory_inactive_bytes=3)) == 5
    with pytest.raises(SoakError, match="it hides"):
        free_bytes(_snapshot(memory_free_bytes=2, memory_inactive_bytes=None))


@given(st.integers(1, 1 << 40))
def test_a_step_is_whole_pages_and_never_large(peak: int) -> None:
    step = step_bytes_for(peak)
    assert step % 4096 == 0
    assert 4096 <= step <= 16 * MIB


# --- the pages ---


def test_pages_are_incompressible_one_by_one_and_no_two_are_equal() -> None:
    pages = module._HostPages(MIB, incompressible=True)
    for _ in range(4):
        pages.grow(MIB)
    contents = [bytes(chunk[at : at + 4096]) for chunk in pages._chunks for at in range(0, MIB, 4096)]
    assert len(set(contents)) == len(contents)
    assert min(len(zlib.compress(page)) for page in contents) >= 4096
    pages.retouch()
    pages.shrink_to(0)
    assert pages.held_bytes == 0
    squashable = module._HostPages(MIB, incompressible=False)
    squashable.grow(MIB)
    assert len(zlib.compress(squashable._chunks[0][:4096])) < 100
    squashable.shrink_to(0)


class Recorder:
    """Stands for memory: remembers how much was held."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.most = 0

    def grow(self, nbytes: int) -> None:
        self.held_bytes += nbytes
        self.most = max(self.most, self.held_bytes)

    def shrink_to(self, nbytes: int) -> None:
        self.held_bytes = min(self.held_bytes, nbytes)

    def retouch(self) -> None: ...


class Others:
    """A reader of a machine on which other processes take memory while the soak runs."""

    def __init__(self, backing: Recorder, free_at: Callable[[int], int], level: str = "normal") -> None:
        self.backing, self.free_at, self.level = backing, free_at, level
        self.reads = 0

    def read(self) -> Snapshot:
        self.reads += 1
        readings = {
            "memory_available_bytes": Reading(
                max(0, self.free_at(self.reads) - self.backing.held_bytes), "test"
            ),
            "pressure_level": Reading(PressureLevel(self.level), "test"),
        }
        return Snapshot.from_readings(readings, platform="test")


def _hold(
    request: SoakRequest, free_at: Callable[[int], int], reserve: int, level: str = "normal"
) -> tuple[str, int]:
    worker = module._Worker(request, lambda event: None)
    backing = Recorder()
    worker._reader = Others(backing, free_at, level)  # type: ignore[assignment]
    return worker._hold(backing, resolve_peak(request, free_at(0)), reserve, None), backing.most


def test_the_reserve_is_left_to_others_even_when_they_come_later() -> None:
    request = SoakRequest("ramp", "80MB", 0.3)
    outcome, most = _hold(request, lambda reads: 100_000_000 if reads < 5 else 50_000_000, reserve=20_000_000)
    assert outcome == "time over"
    assert most <= 30_000_000


def test_critical_pressure_ends_it_before_another_page_is_taken() -> None:
    assert _hold(SoakRequest("steady", "80MB", 5), lambda reads: 100_000_000, 0, "critical") == (
        "critical pressure",
        0,
    )


def test_when_pressure_turns_critical_everything_held_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    worker = module._Worker(SoakRequest("ramp", "80MB", 30), events.append)
    backing = Recorder()
    others = Others(backing, lambda reads: 100_000_000)
    worker._reader = others  # type: ignore[assignment]
    monkeypatch.setattr(worker, "_backing", lambda peak: backing)
    monkeypatch.setattr(worker, "_bound_address_space", lambda peak: None)

    def emit(event: dict[str, Any]) -> None:
        events.append(event)
        if event["held_bytes"] > 500_000:
            others.level = "critical"

    worker._emit = emit
    worker.main()
    assert events[-1]["outcome"] == "critical pressure"
    assert events[-1]["held_at_end_bytes"] == backing.most > 500_000
    assert events[-1]["held_bytes"] == backing.held_bytes == 0


# --- the process ---


@linux_only
@pytest.mark.parametrize(
    ("profile", "seconds"), [("ramp", 0.6), ("steady", 0.6), ("sawtooth", 0.8), ("spike", 0.9)]
)
def test_what_is_held_is_resident_within_3_percent_and_reaches_the_peak(profile: str, seconds: float) -> None:
    report = run(profile, peak="128MiB", seconds=seconds, report_seconds=0.02, teeth=2)
    assert report.outcome == "time over"
    assert report.held_peak_bytes == pytest.approx(128 * MIB, rel=0.03)
    for event in report.timeline:
        held, seen = event["held_bytes"], event["resident_bytes"]
        assert isinstance(held, int)
        assert isinstance(seen, int)
        assert abs(seen - held) <= max(0.03 * 128 * MIB, MIB)


@linux_only
def test_the_kernel_sees_the_same_from_outside_and_release_is_quick() -> None:
    with soak("steady", peak="256MiB", seconds=60) as running_soak:
        assert running_soak.pid is not None
        assert running_soak.wait_for_peak(30)
        started = running_soak.timeline[0]
        assert resident(running_soak.pid) >= 256 * MIB
        assert started["phase"] == "started"
        begun = time.monotonic()
        report = running_soak.release()
        assert time.monotonic() - begun < 1.0
    assert report.outcome == "released"
    assert not running(running_soak.pid)
    assert report.release_seconds is not None
    assert report.release_seconds < 1.0
    assert report.timeline[-1]["held_bytes"] == 0


@linux_only
def test_mlx_buffers_are_resident_too() -> None:
    pytest.importorskip("mlx.core")
    report = run("steady", peak="512MiB", seconds=0.3, backing="mlx")
    assert report.outcome == "time over"
    assert report.held_peak_bytes == pytest.approx(512 * MIB, rel=0.03)
    assert report.resident_peak_bytes == pytest.approx(512 * MIB, rel=0.03)
    after = report.timeline[-1]["resident_bytes"]  # the process is still there
    assert isinstance(after, int)
    assert abs(after) < 0.03 * 512 * MIB


def test_the_timeline_goes_to_the_callback_and_to_the_log_with_times_to_line_up(tmp_path: Path) -> None:
    log, events = tmp_path / "soak.jsonl", list[dict[str, object]]()
    before = time.monotonic()
    report = run("ramp", peak="16MiB", seconds=0.3, on_event=events.append, log_path=log)
    after = time.monotonic()
    assert str(report).startswith("time over: held 0.017 of 0.017 GB asked for, resident ")
    written = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert written == events == list(report.timeline)
    assert [written[0]["phase"], written[-1]["phase"]] == ["started", "ended"]
    times = [event["monotonic_seconds"] for event in written]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= after  # one clock in both processes


def test_a_callback_that_raises_does_not_end_the_soak() -> None:
    def broken(event: dict[str, object]) -> None:
        raise OSError("disk full")

    with soak("steady", peak="4MiB", seconds=0.1, on_event=broken) as running_soak:
        assert running_soak.wait().outcome == "time over"
    assert running_soak.last_callback_error == "OSError: disk full"


def test_more_than_the_stated_share_is_refused_by_the_process_itself() -> None:
    with pytest.raises(SoakError, match=r"50% of the .* GB free now"):
        run("ramp", peak="60%", seconds=1, max_share=0.5)


@linux_only
def test_a_machine_that_is_critical_already_is_left_alone() -> None:
    report = run("ramp", peak="64MiB", seconds=4, rule=LinuxRule(critical_available_share=1.0))
    assert report.outcome == "critical pressure"
    assert report.worst_pressure == "critical"
    assert report.held_peak_bytes == 0


@linux_only
def test_the_process_is_bounded_and_first_in_line_for_the_killer() -> None:
    with soak("steady", peak="16MiB", seconds=30) as running_soak:
        limits = Path(f"/proc/{running_soak.pid}/limits").read_text("ascii")
        address_space = next(line for line in limits.splitlines() if line.startswith("Max address space"))
        assert address_space.split()[3].isdigit()
        assert Path(f"/proc/{running_soak.pid}/oom_score_adj").read_text("ascii") == "1000\n"


def test_cpu_and_disk_load_run_beside_it_and_leave_no_file(tmp_path: Path) -> None:
    with soak(
        "steady", peak="4MiB", seconds=30, cpu_threads=1, disk_bytes=4 * MIB, disk_directory=str(tmp_path)
    ) as running_soak:
        assert running_soak.pid is not None
        if sys.platform == "linux":

            def ticks() -> int:
                fields = Path(f"/proc/{running_soak.pid}/stat").read_text("ascii").rpartition(")")[2].split()
                return int(fields[11]) + int(fields[12])

            def written() -> int:
                lines = Path(f"/proc/{running_soak.pid}/io").read_text("ascii").splitlines()
                return int(next(line for line in lines if line.startswith("wchar")).split()[1])

            begun = ticks()
            assert within(20, lambda: ticks() - begun > 30)
            assert within(20, lambda: written() > 8 * MIB)
        assert running_soak.release().outcome == "released"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_load_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SoakError, match="more than half"):
        run("steady", peak="4MiB", seconds=1, disk_bytes=1 << 60, disk_directory=str(tmp_path))


def test_a_soak_is_started_once_and_released_as_often_as_one_likes() -> None:
    running_soak = soak("steady", peak="4MiB", seconds=30)
    with pytest.raises(SoakError, match="not started"):
        running_soak.release()
    running_soak.start()
    with pytest.raises(SoakError, match="started before"):
        running_soak.start()
    assert running_soak.release().outcome == running_soak.release().outcome == "released"


PARENT = """
import os, sys, time
from lumina_cache.lab.soak import soak
running = soak("steady", peak="64MiB", seconds=120).start()
running.wait_for_peak()
held = 0
if sys.argv[1] == "forked":
    held = os.fork()
    if held == 0:
        time.sleep(60)
        os._exit(0)
print(running.pid, held, flush=True)
time.sleep(120)
"""


def _package_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])}


@linux_only
@pytest.mark.parametrize("how", ["alone", "forked"])
def test_it_dies_with_a_parent_that_is_killed_even_if_a_fork_holds_the_pipe(how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True, env=_package_path()
    )
    assert parent.stdout is not None
    pid, held = map(int, parent.stdout.readline().split())
    try:
        assert resident(pid) >= 64 * MIB
        parent.kill()
        parent.wait()
        assert within(3.0, lambda: not running(pid))
    finally:
        parent.stdout.close()
        if held:
            os.kill(held, signal.SIGKILL)


INTERRUPTED = """
from lumina_cache.lab.soak import run
def show(event):
    if event["phase"] == "peak":
        print("peak", flush=True)
report = run("steady", peak="64MiB", seconds=120, on_event=show)
print(report.outcome, report.timeline[-1]["phase"], report.timeline[-1]["held_bytes"])
"""


def test_ctrl_c_gives_everything_back_without_a_traceback() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_package_path(),
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "peak\n"
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to the whole group
    out, err = child.communicate(timeout=30)
    assert (out, err, child.returncode) == ("interrupted ended 0\n", "", 0)


JOINED = """
import json, os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from lumina_cache.lab.soak import SoakError, run
from lumina_cache.telemetry import read_once
before = read_once()
try:
    run("steady", peak=f"{before.memory_limit_bytes}B", seconds=1)
    refused = None
except SoakError as error:
    refused = str(error)
report = run("ramp", peak="70%", seconds=1)
print(json.dumps([before.memory_limit_bytes, refused, report.outcome, report.held_peak_bytes]))
"""


@linux_only
@pytest.mark.skipif(
    not os.environ.get("LUMINA_CGROUP"),
    reason="LUMINA_CGROUP names no control group with a limit to join: soaking under one was not tested",
)
def test_in_a_control_group_the_limit_counts_and_not_the_machine() -> None:
    group = os.environ["LUMINA_CGROUP"]
    done = subprocess.run(
        [sys.executable, "-c", JOINED, group],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=_package_path(),
    )
    limit, refused, outcome, held = json.loads(done.stdout)
    assert "ask for less" in refused
    assert outcome == "time over"
    assert 0 < held < limit
