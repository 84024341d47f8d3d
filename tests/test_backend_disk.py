"""A disk is measured with one small file, of which nothing is left."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from lumina_cache.backend import disk
from lumina_cache.backend.disk import DiskProbe, default_directory, probe_disk

SMALL = 2 * 2**20 + 4096


def nothing_left(directory: Path) -> bool:
    return list(directory.iterdir()) == []


def test_rates_are_measured_and_no_file_or_descriptor_is_left(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    found = probe_disk(tmp_path, nbytes=SMALL)
    assert found.writable
    assert found.reason is None
    assert found.outcome().present
    assert found.write_rate is not None
    assert found.write_rate > 0
    assert found.read_rate is not None
    assert found.read_rate > 0
    assert found.nbytes_written == SMALL
    assert found.free is not None
    assert found.free <= shutil.disk_usage(tmp_path).total
    assert nothing_left(tmp_path)
    assert psutil.Process().num_fds() == before


def test_it_says_how_the_page_cache_was_bypassed_or_why_not(tmp_path: Path) -> None:
    found = probe_disk(tmp_path, nbytes=SMALL)
    assert found.how
    assert found.page_cache_bypassed in (True, False, None)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory at /dev/shm")
def test_a_file_system_in_memory_is_not_taken_for_a_drive() -> None:
    found = probe_disk("/dev/shm", nbytes=SMALL)
    assert found.page_cache_bypassed is False
    assert "memory" in str(found.how)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_without_direct_reads_it_asks_whether_pages_stayed_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_reader", lambda name: (os.open(name, os.O_RDONLY), False))
    monkeypatch.setattr(disk, "_file_system", lambda there: "ext4")
    dropped = probe_disk(tmp_path, nbytes=SMALL)
    assert "DONTNEED" in str(dropped.how)
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: None)
    kept = probe_disk(tmp_path, nbytes=SMALL)
    assert kept.page_cache_bypassed is False
    assert "stayed in the page cache" in str(kept.how)
    monkeypatch.setattr(disk, "_resident", lambda *a: None)
    untold = probe_disk(tmp_path, nbytes=SMALL)
    assert untold.page_cache_bypassed is None
    assert "cannot be told" in str(untold.how)


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    wanted = tmp_path / "not" / "yet"
    found = probe_disk(wanted, nbytes=SMALL)
    assert found.outcome().present
    assert found.path == str(wanted)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_directory_that_cannot_be_written_to_is_no_disk_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(**_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk.tempfile, "mkstemp", refuse)
    found = probe_disk(tmp_path, nbytes=SMALL)
    assert not found.writable
    assert os.strerror(code) in str(found.outcome().reason)
    assert (found.write_rate, found.read_rate, found.nbytes_written) == (None, None, 0)


@pytest.mark.parametrize("call", ["write", "fsync", "preadv"])
def test_a_drive_that_fails_in_the_middle_is_a_reason_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = psutil.Process().num_fds()
    monkeypatch.setattr(os, call, fail)
    found = probe_disk(tmp_path, nbytes=SMALL)
    monkeypatch.undo()
    assert not found.outcome().present
    assert os.strerror(errno.ENOSPC) in str(found.reason)
    assert nothing_left(tmp_path)
    assert psutil.Process().num_fds() == before


def test_a_drive_that_returns_other_bytes_is_no_disk_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def flipped(descriptor: int, buffers: list[Any], offset: int) -> int:
        got = real(descriptor, buffers, offset)
        if offset > 0:
            buffers[0][100] ^= 1
        return got

    monkeypatch.setattr(os, "preadv", flipped)
    found = probe_disk(tmp_path, nbytes=SMALL)
    assert "not what was written" in str(found.reason)
    assert found.read_rate is None


def test_a_file_shorter_than_what_was_written_is_no_disk_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda *a: 0)
    assert "not what was written" in str(probe_disk(tmp_path, nbytes=SMALL).reason)


def test_a_full_drive_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_free", lambda there: SMALL)
    monkeypatch.setattr(disk.tempfile, "mkstemp", lambda **_: pytest.fail("it wrote"))
    found = probe_disk(tmp_path, nbytes=SMALL)
    assert str(SMALL) in str(found.reason)
    assert found.free == SMALL


def test_writing_stops_when_its_time_is_up(tmp_path: Path) -> None:
    found = probe_disk(tmp_path, nbytes=64 * 2**20, time_limit=1e-9)
    assert 0 < found.nbytes_written < 64 * 2**20
    assert found.write_rate is not None


def test_the_default_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "lumina_cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/ignored")
    assert default_directory() == Path.home() / ".cache" / "lumina_cache"


def test_a_probe_survives_its_record(tmp_path: Path) -> None:
    found = probe_disk(tmp_path, nbytes=SMALL)
    assert DiskProbe.from_record(found.to_record()) == found
