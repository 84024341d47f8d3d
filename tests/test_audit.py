"""The audit log: what is written, that it survives, and that a reader is told what is wrong."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import mlx.core as mx
import pytest
import structlog

from lumina_cache import LuminaCache, read_log
from lumina_cache.audit import EVENTS, KEPT_IN_MEMORY, SCHEMA, AuditLog, default_log_path, validate
from lumina_cache.errors import LogFormatError, LuminaWarning


def _decode(model, cache, steps: int, start: int = 0) -> None:
    for i in range(start, start + steps):
        mx.eval(model(mx.array([[i % 90 + 1]]), cache=cache))


def test_every_line_validates_and_numbers_are_consecutive(tiny, tmp_path):
    model, path = tiny("llama"), tmp_path / "run.jsonl"
    with LuminaCache(model, budget=700_000, log=path) as cache:
        mx.eval(model(mx.arange(1, 60)[None], cache=cache))
        _decode(model, cache, 70)
        cache.apply("evict:sinks_window@rows=20")
    contents = read_log(path)
    assert contents.problems == ()
    events = [r["event"] for r in contents.records]
    assert events[0] == "session.started"
    assert events[-1] == "session.ended"
    assert {"step", "action.applied"} <= set(events)
    assert [r["seq"] for r in contents.records] == list(range(1, len(events) + 1))
    assert contents.records[-1]["steps_total"] == 71
    assert contents.records[-1]["tokens_total"] == 59 + 70


def test_the_file_is_for_its_owner_only(tiny, tmp_path):
    path = tmp_path / "run.jsonl"
    LuminaCache(tiny("llama"), log=path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_log_true_makes_a_file_in_the_users_state_directory(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    cache = LuminaCache(tiny("llama"), log=True)
    assert cache.log.path is not None
    assert cache.log.path.parent == tmp_path / "state" / "lumina_cache"
    assert stat.S_IMODE(cache.log.path.parent.stat().st_mode) == 0o700
    assert default_log_path("aa").parent == cache.log.path.parent


def test_without_a_path_the_last_thousand_records_stay_in_memory():
    log = AuditLog()
    for i in range(KEPT_IN_MEMORY + 5):
        log.write("warning", code="x", text=str(i))
    assert len(log.records) == KEPT_IN_MEMORY
    assert log.records[0]["text"] == "5"
    assert log.path is None


def test_an_unwritable_log_warns_once_and_generation_goes_on(tiny, tmp_path):
    model = tiny("llama")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(LuminaWarning, match="cannot be written") as caught:
        cache = LuminaCache(model, log=blocked / "run.jsonl")
        _decode(model, cache, 3)
        cache.apply("reclaim")
    assert len(caught) == 1
    assert cache.observe().layers[0].rows == 3
    assert cache.log.totals["records_dropped_total"] >= 1
    assert any(r["event"] == "action.applied" for r in cache.log.records)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full to fill a disk with")
def test_a_full_disk_in_mid_run_warns_once_and_generation_goes_on(tiny):
    model = tiny("llama")
    with pytest.warns(LuminaWarning, match="cannot be written") as caught:
        cache = LuminaCache(model, log="/dev/full")
        _decode(model, cache, 130)
    assert len(caught) == 1
    assert cache.observe().layers[0].rows == 130


def test_a_process_that_vanishes_leaves_a_readable_log(tmp_path):
    path = tmp_path / "run.jsonl"
    program = textwrap.dedent(
        f"""
        import os
        import mlx.core as mx
        from lumina_cache import LuminaCache
        from lumina_cache.lab.tiny import build
        model = build("llama")
        cache = LuminaCache(model, log={str(path)!r})
        mx.eval(model(mx.arange(1, 40)[None], cache=cache))
        cache.apply("evict:sinks_window@rows=20")
        os._exit(9)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    assert done.returncode == 9
    contents = read_log(path)
    assert contents.problems == ()
    assert [r["event"] for r in contents.records] == ["session.started", "step", "action.applied"]


def test_a_cache_that_is_forgotten_still_ends_its_session(tmp_path):
    path = tmp_path / "run.jsonl"
    program = textwrap.dedent(
        f"""
        from lumina_cache import LuminaCache
        from lumina_cache.lab.tiny import build
        model = build("llama")
        a = LuminaCache(model, log={str(path)!r})
        b = LuminaCache(model, log={str(path)!r})
        del a
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    ended = read_log(path).of("session.ended")
    assert len({r["cache"] for r in ended}) == 2


def test_the_host_applications_logging_is_not_touched(tiny, tmp_path, capfd):
    handlers, level = list(logging.root.handlers), logging.root.level
    config = structlog.get_config()
    model = tiny("llama")
    cache = LuminaCache(model, log=tmp_path / "run.jsonl")
    _decode(model, cache, 3)
    assert (logging.root.handlers, logging.root.level) == (handlers, level)
    assert structlog.get_config() == config
    assert capfd.readouterr() == ("", "")


def test_a_host_that_configured_structlog_does_not_change_the_log(tiny, tmp_path):
    saved = structlog.get_config()
    try:
        structlog.configure(
            processors=[structlog.processors.KeyValueRenderer()], cache_logger_on_first_use=True
        )
        path = tmp_path / "run.jsonl"
        LuminaCache(tiny("llama"), log=path)
    finally:
        structlog.configure(**saved)
    assert read_log(path).problems == ()


def test_no_array_and_no_token_reaches_a_record(tiny):
    model = tiny("llama")
    cache = LuminaCache(model, budget=700_000)
    mx.eval(model(mx.arange(1, 300)[None], cache=cache))
    _decode(model, cache, 5)
    for record in cache.log.records:
        json.dumps(record, allow_nan=False)
    assert not any(isinstance(v, mx.array) for r in cache.log.records for v in r.values())


def test_copies_write_under_their_own_id_and_name_their_parent(tiny, tmp_path):
    import copy

    path = tmp_path / "run.jsonl"
    cache = LuminaCache(tiny("llama"), log=path)
    twin = copy.deepcopy(cache)
    started = read_log(path).of("session.started")
    assert [r["cache"] for r in started] == [cache.log.cache_id, twin.log.cache_id]
    assert started[1]["copied_from"] == cache.log.cache_id


def _record(**changes):
    base = {
        "schema": SCHEMA,
        "event": "warning",
        "seq": 1,
        "time": 1.0,
        "cache": "ab",
        "code": "c",
        "text": "t",
    }
    return {k: v for k, v in {**base, **changes}.items() if v is not ...}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (_record(text=...), r"field 'text' is missing"),
        (_record(text=3), r"field 'text' is 3; expected str"),
        (_record(seq=True), r"field 'seq' is True; expected int"),
        (_record(schema=99), r"field 'schema' is 99; this version reads schema 3"),
        (_record(event="warnin"), r"field 'event' is 'warnin'; known events"),
        ([1], r"a record is a JSON object, not list"),
    ],
)
def test_a_wrong_record_is_refused_with_the_field_at_fault(record, says):
    with pytest.raises(LogFormatError, match=says):
        validate(record)


def test_a_damaged_log_names_each_bad_line_and_keeps_the_good_ones(tmp_path):
    path = tmp_path / "run.jsonl"
    good = [json.dumps(_record(seq=n)) for n in (1, 2, 4)]
    path.write_text(
        "\n".join([good[0], "{not json", good[1], good[2], json.dumps(_record(seq=5, code=None))]) + '\n{"sch'
    )
    contents = read_log(path)
    assert [r["seq"] for r in contents.records] == [1, 2, 4]
    text = "\n".join(contents.problems)
    assert "line 2: not JSON" in text
    assert "line 4: cache ab: field 'seq' is 4, expected 3" in text
    assert "line 5: warning: field 'code' is None" in text
    assert "line 6: not JSON" in text
    assert "cut short" in text


def test_a_log_that_is_not_there_is_a_typed_error(tmp_path):
    with pytest.raises(LogFormatError, match="cannot read the log"):
        read_log(tmp_path / "none.jsonl")


def test_the_documented_event_table_is_the_one_in_force():
    text = (Path(__file__).parent.parent / "docs" / "log.md").read_text(encoding="utf-8")
    for event, fields in EVENTS.items():
        section = text.split(f"### `{event}`", 1)
        assert len(section) == 2, f"{event} is not documented"
        body = section[1].split("### ", 1)[0]
        for name, field in fields.items():
            assert f"`{name}`" in body, f"{event}.{name} is not documented"
            assert field.meaning in body, f"{event}.{name} is documented with another meaning"


def test_writing_never_raises_into_the_caller(tmp_path):
    path = tmp_path / "run.jsonl"
    log = AuditLog(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log.write("warning", code="nan", text=float("nan"))
        log.write("warning", code="after", text="still in memory")
    assert len(caught) == 1
    assert [r["code"] for r in log.records] == ["nan", "after"]
    assert os.path.getsize(path) == 0


def test_a_sampler_of_the_caches_own_writes_changes_and_ends_with_the_cache(tiny, monkeypatch):
    import gc
    import threading

    from lumina_cache import cache as module

    class Sampler:
        def __init__(self, *, on_change):
            self.on_change = on_change
            self.latest = None

    monkeypatch.setattr(module, "Sampler", Sampler)
    cache = LuminaCache(tiny("llama"), telemetry=True)
    before = threading.active_count()
    change = {"field": "pressure_level", "old": "normal", "new": "warn", "source": "test"}
    cache._control.read_machine.__closure__[0].cell_contents.on_change(change)
    record = cache.log.records[-1]
    assert validate(record)["change"] == change
    del cache
    gc.collect()
    assert threading.active_count() == before
