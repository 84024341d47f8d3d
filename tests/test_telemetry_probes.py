from __future__ import annotations

import pytest

from lumina_cache.telemetry.probes import Probe, ProbeRunner, Readings, merge
from lumina_cache.telemetry.snapshot import Reading


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Source:
    """A probe function that counts its calls and can be made to fail."""

    def __init__(self, field: str, value: int | None = 1) -> None:
        self.field, self.value = field, value
        self.calls = 0
        self.error: Exception | None = None

    def __call__(self) -> Readings:
        self.calls += 1
        if self.error is not None:
            raise self.error
        if self.value is None:
            return {self.field: Reading.unknown("it says nothing", "source")}
        return {self.field: Reading(self.value, "source")}


def _probe(source: Source, name: str = "one", period: float = 0.0, fallback: bool = False) -> Probe:
    return Probe(name, (source.field,), source, period_seconds=period, fallback=fallback)


def test_a_probe_of_a_field_that_does_not_exist_is_a_mistake_of_its_author() -> None:
    with pytest.raises(ValueError, match="swap_usd"):
        Probe("typo", ("swap_usd",), dict)


def test_a_source_is_read_at_its_own_pace() -> None:
    clock, source = Clock(), Source("swap_used_bytes")
    runner = ProbeRunner([_probe(source, period=1.0)], clock=clock)
    for tick in range(41):
        clock.now = tick * 0.25
        runner.run_due()
    assert source.calls == 11


def test_a_source_that_fails_gives_unknown_and_is_asked_again_once_a_minute() -> None:
    clock, source = Clock(), Source("swap_used_bytes")
    source.error = PermissionError(1, "not allowed", "/proc/thing")
    runner = ProbeRunner([_probe(source)], clock=clock)
    for tick in range(4 * 130):
        clock.now = tick * 0.25
        runner.run_due()
    assert source.calls == 3  # at 0, 60 and 120 seconds
    reading = runner.parts["one"]["swap_used_bytes"]
    assert reading.value is None
    assert reading.reason == "not allowed: /proc/thing"
    source.error = None
    clock.now = 200.0
    runner.run_due()
    assert runner.parts["one"]["swap_used_bytes"].value == 1


def test_one_failing_source_does_not_keep_the_others_from_being_read() -> None:
    bad, good = Source("swap_used_bytes"), Source("disk_free_bytes")
    bad.error = RuntimeError("broken")
    runner = ProbeRunner([_probe(bad), _probe(good, "two")], clock=Clock())
    runner.run_due()
    assert runner.parts["two"]["disk_free_bytes"].value == 1
    assert runner.parts["one"]["swap_used_bytes"].reason == "RuntimeError: broken"


def test_a_source_that_leaves_a_field_out_makes_it_unknown() -> None:
    runner = ProbeRunner([Probe("empty", ("swap_used_bytes",), dict)], clock=Clock())
    runner.run_due()
    assert runner.parts["empty"]["swap_used_bytes"].reason == "the source did not give it"


def test_a_fallback_rests_while_a_preferred_source_answers() -> None:
    clock = Clock()
    preferred, fallback = Source("swap_used_bytes"), Source("swap_used_bytes", 2)
    runner = ProbeRunner([_probe(preferred), _probe(fallback, "command", fallback=True)], clock=clock)
    runner.run_due()
    assert fallback.calls == 0
    preferred.error = OSError("gone")
    clock.now = 1.0
    runner.run_due()
    assert fallback.calls == 1
    assert merge([runner.parts["one"], runner.parts["command"]])["swap_used_bytes"].value == 2
    preferred.error = None
    clock.now = 100.0
    runner.run_due()
    assert "command" not in runner.parts


def test_a_fallback_that_says_nothing_is_asked_again_once_a_minute() -> None:
    clock, fallback = Clock(), Source("swap_used_bytes", None)
    runner = ProbeRunner([_probe(fallback, fallback=True)], clock=clock)
    for tick in range(4 * 130):
        clock.now = tick * 0.25
        runner.run_due()
    assert fallback.calls == 3


def test_a_fallback_rests_while_another_thread_has_the_field() -> None:
    fallback = Source("swap_used_bytes")
    runner = ProbeRunner([_probe(fallback, fallback=True)], clock=Clock())
    runner.run_due(lambda name: name == "swap_used_bytes")
    assert fallback.calls == 0
    runner.run_due(lambda name: False)
    assert fallback.calls == 1


def test_a_source_that_answers_in_part_is_not_doubted() -> None:
    def partly() -> Readings:
        return {"swap_used_bytes": Reading(1, "a"), "swap_total_bytes": Reading.unknown("not printed", "a")}

    fallback = Source("swap_total_bytes")
    preferred = Probe("partly", ("swap_used_bytes", "swap_total_bytes"), partly)
    ProbeRunner([preferred, _probe(fallback, "command", fallback=True)], clock=Clock()).run_due()
    assert fallback.calls == 0


def test_a_source_that_settles_that_there_is_no_value_is_not_doubted() -> None:
    fallback = Source("wired_limit_bytes")

    def unset() -> Readings:
        return {"wired_limit_bytes": Reading.unknown("not set", "a", settled=True)}

    preferred = Probe("limit", ("wired_limit_bytes",), unset)
    ProbeRunner([preferred, _probe(fallback, "command", fallback=True)], clock=Clock()).run_due()
    assert fallback.calls == 0


def test_only_values_make_a_group_fresh() -> None:
    clock, silent = Clock(), Source("swap_used_bytes", None)
    runner = ProbeRunner([_probe(silent)], clock=clock)
    clock.now = 5.0
    runner.run_due()
    assert runner.read_at == {}
    assert runner.answered_at == {"one": 5.0}
    silent.value = 3
    clock.now = 6.0
    runner.run_due()
    assert runner.read_at == {"swap": 6.0}


def test_results_are_published_one_by_one() -> None:
    seen: list[int] = []
    sources = [Source("swap_used_bytes"), Source("disk_free_bytes")]
    runner = ProbeRunner([_probe(sources[0]), _probe(sources[1], "two")], clock=Clock())
    runner.run_due(after_each=lambda: seen.append(len(runner.parts)))
    assert seen == [1, 2]


def test_merging_takes_the_first_known_reading_and_otherwise_gives_all_reasons() -> None:
    lost, found = Reading.unknown("no such sysctl", "a"), Reading(7, "b")
    assert merge([{"chip": lost}, {"chip": found}, {"chip": Reading(8, "c")}])["chip"] == found
    both = merge([{"chip": lost}, {"chip": Reading.unknown("no such command", "b")}])["chip"]
    assert both.reason == "no such sysctl; b: no such command"
