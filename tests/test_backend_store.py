"""Results are kept for as long as nothing that they depend on changes, and never at the price of a crash."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lumina_cache.backend import store as storing
from lumina_cache.backend.store import ProbeStore, configuration_fingerprint


class Counting:
    """Makes a value and counts how often it had to."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> dict[str, int]:
        self.made += 1
        return {"answer": self.made}


def from_record(record: Any) -> dict[str, int]:
    return {"answer": record["answer"] + 0}


def remember(store: ProbeStore, make: Callable[[], Any], **options: Any) -> tuple[Any, bool]:
    return store.remembered("subject", make, to_record=dict, from_record=from_record, **options)


def the_file(store: ProbeStore) -> Path:
    path = store.path("subject")
    assert path is not None
    return path


def test_a_result_is_made_once_and_then_read(tmp_path: Path) -> None:
    make = Counting()
    assert remember(ProbeStore(tmp_path), make) == ({"answer": 1}, False)
    assert remember(ProbeStore(tmp_path), make) == ({"answer": 1}, True)
    assert make.made == 1


def test_files_are_for_their_owner_alone_and_no_other_file_is_left(tmp_path: Path) -> None:
    store = ProbeStore(tmp_path / "lumina_cache")
    remember(store, Counting())
    assert stat.S_IMODE(the_file(store).stat().st_mode) == 0o600
    assert stat.S_IMODE(the_file(store).parent.stat().st_mode) == 0o700
    assert list((tmp_path / "lumina_cache").iterdir()) == [the_file(store)]
    assert the_file(store).name.startswith("probe-")


@pytest.mark.parametrize("what", ["mlx_version", "device_kind", "_device_name"])
def test_another_installation_is_probed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    make, store = Counting(), ProbeStore(tmp_path)
    remember(store, make)
    monkeypatch.setattr(storing, what, lambda: "other")
    assert remember(store, make) == ({"answer": 2}, False)
    assert remember(store, make) == ({"answer": 2}, True)


@pytest.mark.parametrize("what", ["mlx_lm_version", "__version__", "SCHEMA"])
def test_other_versions_are_probed_anew_and_their_file_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    make, store = Counting(), ProbeStore(tmp_path)
    remember(store, make)
    monkeypatch.setattr(storing, what, "999")
    assert remember(store, make) == ({"answer": 2}, False)
    assert len(list(tmp_path.iterdir())) == 1


def test_another_configuration_of_the_model_is_probed_anew(tmp_path: Path) -> None:
    make, store = Counting(), ProbeStore(tmp_path)
    remember(store, make, configuration="a")
    assert remember(store, make, configuration="b") == ({"answer": 2}, False)


def test_it_can_be_asked_to_probe_again(tmp_path: Path) -> None:
    make, store = Counting(), ProbeStore(tmp_path)
    remember(store, make)
    assert remember(store, make, again=True) == ({"answer": 2}, False)
    assert remember(store, make) == ({"answer": 2}, True)


@pytest.mark.parametrize(
    "contents",
    [b"", b"{", b"null", b"[]", b'"text"', b"\x00\xff\xfe", b'{"key": 1, "value": 2}', b"[" * 100_000],
)
def test_a_damaged_file_is_ignored_and_written_over(tmp_path: Path, contents: bytes) -> None:
    make, store = Counting(), ProbeStore(tmp_path)
    remember(store, make)
    the_file(store).write_bytes(contents)
    assert remember(store, make) == ({"answer": 2}, False)
    assert remember(store, make) == ({"answer": 2}, True)


def test_a_file_cut_short_at_any_byte_is_ignored(tmp_path: Path) -> None:
    make, store = Counting(), ProbeStore(tmp_path)
    remember(store, make)
    whole = the_file(store).read_bytes()
    for length in range(len(whole)):
        the_file(store).write_bytes(whole[:length])
        assert store._read("subject", store.key()) is None, length


@given(
    value=st.recursive(
        st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_value_of_another_shape_is_made_anew(tmp_path: Path, value: Any) -> None:
    make, store = Counting(), ProbeStore(tmp_path)
    the_file(store).write_text(json.dumps({"key": store.key(), "value": value}))
    assert remember(store, make) == ({"answer": 1}, False)


def test_a_directory_that_cannot_be_made_costs_a_probe_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    make, store = Counting(), ProbeStore(tmp_path / "file" / "below")
    assert remember(store, make) == ({"answer": 1}, False)
    assert remember(store, make) == ({"answer": 2}, False)


@pytest.mark.parametrize("call", ["replace", "fdopen"])
def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storing.os, call, fail)
    make, store = Counting(), ProbeStore(tmp_path)
    assert remember(store, make) == ({"answer": 1}, False)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_without_a_directory_nothing_is_kept() -> None:
    make, store = Counting(), ProbeStore(None)
    remember(store, make)
    assert remember(store, make) == ({"answer": 2}, False)
    assert store.path("subject") is None


def test_the_default_directory_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ProbeStore().directory == tmp_path / "lumina_cache"


def test_an_error_of_the_probe_itself_is_not_swallowed(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("the probe is broken")

    with pytest.raises(RuntimeError, match="broken"):
        remember(ProbeStore(tmp_path), broken)


def test_the_configuration_of_a_model_does_not_depend_on_its_weights_but_on_its_precision() -> None:
    from lumina_cache.lab.tiny import build

    model, same, half, other = (
        build("llama"),
        build("llama", seed=1),
        build("llama", dtype=mx.float16),
        build("qwen3"),
    )
    assert configuration_fingerprint(model) == configuration_fingerprint(same)
    assert len({configuration_fingerprint(m) for m in (model, half, other)}) == 3


def test_anything_at_all_has_a_configuration() -> None:
    assert len(configuration_fingerprint(object())) == 16
