"""Arrays in files come back bit for bit or not at all, and no file outlives its cache."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lumina_cache.backend.disk import default_directory
from lumina_cache.disk import DiskBlock, DiskStore, load_blocks, save_blocks
from lumina_cache.disk import format as file_format
from lumina_cache.disk import home as homes
from lumina_cache.disk import store as stores
from lumina_cache.errors import (
    BudgetError,
    DiskBudgetError,
    DiskCorruptError,
    DiskDirectoryError,
    DiskFormatError,
    DiskFullError,
    DiskTierError,
)

DTYPES = [
    mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64,
    mx.float16, mx.bfloat16, mx.float32, mx.complex64,
]  # fmt: skip

#: Big enough for some chunks of writing and reading, with a rest.
BIG = 3 * file_format.CHUNK + 12


def bits(array: mx.array) -> bytes:
    """What an array is made of: NaNs and signed zeros count."""
    if array.size == 0:
        return b""
    return bytes(memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8)))


def same(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


def random_array(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Random bits, so NaNs, infinities and denormals too."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.size
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype == mx.bool_:
        raw &= 1
    return mx.array(raw).view(dtype).reshape(shape) if count else mx.zeros(shape, dtype=dtype)


def some_arrays() -> list[mx.array]:
    return [random_array((1, 2, 5, 8), mx.float32), random_array((1, 2, 5, 8), mx.bfloat16, 1)]


def left(root: Path) -> list[Path]:
    """Every file and directory below ``root`` but its lock."""
    return sorted(p for p in root.rglob("*") if p.name != ".lock") if root.exists() else []


def files(root: Path) -> list[Path]:
    return [p for p in left(root) if p.is_file() and p.name != "lock"]


def failing(number: int, at: int = 0, real: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function that fails with ``number`` when called for the ``at``-th time, and is ``real`` until then."""
    calls = iter(range(10**9))

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) >= at:
            raise OSError(number, os.strerror(number))
        assert real is not None
        return real(*arguments, **named)

    return call


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def store(root: Path) -> Iterator[DiskStore]:
    with DiskStore(root, max_bytes=None, total_max_bytes=None) as made:
        yield made


def child(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    text = "import sys, os, signal, time\nimport mlx.core as mx\nfrom pathlib import Path\n"
    text += "from lumina_cache.disk import DiskStore, load_blocks, save_blocks\nroot = Path(sys.argv[1])\n"
    text += textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", text, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, **options
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


#: A child with one block on the disk that waits to be told what to do.
HOLDER = """
    store = DiskStore(root, max_bytes=None, total_max_bytes=None)
    block = store.put([mx.arange(1000)])
    print(block.path, flush=True)
    sys.stdin.readline()
"""


# --- round trips


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    specs=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.sampled_from(DTYPES)), max_size=5
    ),
    seed=st.integers(0, 2**31),
)
def test_arrays_of_any_shape_and_dtype_come_back_bit_for_bit(
    store: DiskStore, specs: list[tuple[tuple[int, ...], mx.Dtype]], seed: int
) -> None:
    arrays = [random_array(shape, dtype, seed + i) for i, (shape, dtype) in enumerate(specs)]
    block = store.put(arrays)
    assert block.path.stat().st_size == block.file_nbytes
    assert block.nbytes == sum(a.nbytes for a in arrays)
    assert block.shapes == tuple(a.shape for a in arrays)
    assert block.dtypes == tuple(a.dtype for a in arrays)
    loaded = store.load(block)
    assert len(loaded) == len(arrays)
    assert all(map(same, arrays, loaded))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32], ids=str)
def test_arrays_of_several_chunks_come_back_bit_for_bit(store: DiskStore, dtype: mx.Dtype) -> None:
    arrays = [random_array((BIG // dtype.size,), dtype, i) for i in range(2)]
    assert all(map(same, arrays, store.load(store.put(arrays))))


def test_rows_of_a_buffer_with_slack_are_written_without_the_slack(store: DiskStore) -> None:
    buffer = random_array((1, 4, 256, 16), mx.float32)
    live = [buffer[..., 3:77, :], buffer.swapaxes(1, 2), buffer[..., ::-1, :]]
    block = store.put(live)
    assert block.nbytes == 4 * 74 * 16 * 4 + 2 * buffer.nbytes
    assert all(map(same, live, store.load(block)))


def test_arrays_that_are_not_evaluated_yet_are_written(store: DiskStore) -> None:
    x = mx.arange(10)
    assert same(store.load(store.put([x * 2 + 1]))[0], mx.arange(10) * 2 + 1)


def test_names_keep_their_order(store: DiskStore) -> None:
    named = {"keys": mx.zeros(3), 'a "quoted" ключ': mx.ones(2), "": mx.array(5)}
    block = store.put(named)
    assert block.names == tuple(named)
    assert all(map(same, named.values(), store.load(block)))


def test_loaded_arrays_do_not_need_the_file(store: DiskStore) -> None:
    arrays = [random_array((BIG // 4,), mx.float32)]
    block = store.put(arrays)
    loaded = store.load(block)
    with block.path.open("r+b") as file:
        file.write(b"\0" * block.file_nbytes)
    store.drop(block)
    again = mx.array(loaded[0])
    assert same(loaded[0], arrays[0])
    assert same(again, arrays[0])


def test_files_are_safetensors_that_mlx_reads(store: DiskStore) -> None:
    named = {
        "k": random_array((2, 3), mx.bfloat16),
        "é": random_array((4,), mx.uint32),
        "none": mx.zeros((0, 2)),
    }
    block = store.put(named)
    loaded, metadata = mx.load(str(block.path), return_metadata=True)
    assert set(loaded) == set(named)
    assert all(same(loaded[name], named[name]) for name in named)
    assert metadata["format"] == "mlx"


def test_no_descriptor_is_left_open(store: DiskStore) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc/self/fd on this system: open descriptors cannot be counted")
    store.put([])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        block = store.put(some_arrays())
        store.load(block)
        block.path.write_bytes(b"no")
        with pytest.raises(DiskCorruptError):
            store.load(block)
        store.drop(block)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "arrays", [[1.0], {1: mx.zeros(1)}, {"__metadata__": mx.zeros(1)}, {"\ud800": mx.zeros(1)}, [np.zeros(2)]]
)
def test_what_a_file_cannot_hold_is_refused(store: DiskStore, root: Path, arrays: Any) -> None:
    with pytest.raises(DiskFormatError):
        store.put(arrays)
    assert left(root) == []


# --- damage


def damaged(store: DiskStore, block: DiskBlock) -> None:
    with pytest.raises(DiskTierError) as caught:
        store.load(block)
    assert isinstance(caught.value, DiskCorruptError | DiskFormatError)
    assert str(block.path) in str(caught.value)


def test_every_single_bit_of_a_file_is_guarded(store: DiskStore) -> None:
    block = store.put([random_array((2,), mx.float32)])
    whole = block.path.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[at] ^= 1 << bit
            block.path.write_bytes(changed)
            damaged(store, block)
    block.path.write_bytes(whole)
    store.load(block)


def test_bits_flipped_at_random_places_of_a_big_file_are_found(store: DiskStore) -> None:
    block = store.put([random_array((BIG // 4,), mx.float32)])
    whole = block.path.read_bytes()
    chosen = random.Random(1)
    for flips in [1, 1, 1, 1, 2, 3, 8, 1000]:
        changed = bytearray(whole)
        for place in chosen.sample(range(8 * len(whole)), flips):
            changed[place // 8] ^= 1 << place % 8
        block.path.write_bytes(changed)
        damaged(store, block)


def test_a_file_cut_short_anywhere_or_lengthened_is_refused(store: DiskStore) -> None:
    block = store.put([mx.arange(3), mx.arange(5)])
    whole = block.path.read_bytes()
    for length in range(len(whole)):
        block.path.write_bytes(whole[:length])
        damaged(store, block)
    block.path.write_bytes(whole + b"\0")
    damaged(store, block)
    block.path.write_bytes(whole)
    store.load(block)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = store.put([random_array((BIG // 4,), mx.float32)])
    real = os.readv

    def readv(*arguments: Any) -> int:
        os.truncate(block.path, file_format.CHUNK)
        return real(*arguments)

    monkeypatch.setattr(file_format.os, "readv", readv)
    damaged(store, block)


def test_a_deleted_file_is_refused(store: DiskStore) -> None:
    block = store.put(some_arrays())
    block.path.unlink()
    with pytest.raises(DiskCorruptError, match="does not exist"):
        store.load(block)


def test_a_file_replaced_by_another_whole_one_is_refused(store: DiskStore) -> None:
    first, second = store.put([mx.zeros(8)]), store.put([mx.ones(8)])
    shutil.copy(second.path, first.path)
    store.load(second)
    with pytest.raises(DiskCorruptError, match="was replaced"):
        store.load(first)


def test_a_link_in_the_place_of_a_file_is_not_followed(store: DiskStore) -> None:
    first, second = store.put([mx.zeros(8)]), store.put([mx.zeros(8)])
    first.path.unlink()
    first.path.symlink_to(second.path)
    with pytest.raises(DiskTierError):
        store.load(first)


def test_an_unreadable_drive_is_a_typed_error(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    block = store.put(some_arrays())
    with monkeypatch.context() as patch:
        patch.setattr(file_format.os, "readv", failing(errno.EIO))
        with pytest.raises(DiskTierError, match="Input/output error"):
            store.load(block)
    store.load(block)


# --- budgets


def test_the_budget_of_a_cache_is_kept_to_the_byte(root: Path) -> None:
    with DiskStore(root / "probe", max_bytes=None, total_max_bytes=None) as probe:
        size = probe.put(some_arrays()).file_nbytes
    with DiskStore(root, max_bytes=2 * size, total_max_bytes=None) as store:
        kept = [store.put(some_arrays()), store.put(some_arrays())]
        assert store.nbytes == 2 * size
        written = store.bytes_written_total
        with pytest.raises(DiskBudgetError, match=f"max_bytes={2 * size}.*at least {3 * size}"):
            store.put(some_arrays())
        assert store.bytes_written_total == written
        assert len(files(root)) == 2
        store.drop(kept.pop())
        kept.append(store.put(some_arrays()))


def test_a_budget_of_nothing_writes_nothing(root: Path) -> None:
    with DiskStore(root, max_bytes=0, total_max_bytes=None) as store:
        with pytest.raises(DiskBudgetError):
            store.put(some_arrays())
    assert not root.exists()


def test_the_budget_of_all_caches_counts_those_of_others(root: Path, store: DiskStore) -> None:
    kept = store.put(some_arrays())
    with DiskStore(root, max_bytes=None, total_max_bytes=2 * kept.file_nbytes) as other:
        mine = other.put(some_arrays())
        with pytest.raises(DiskBudgetError, match="total_max_bytes"):
            other.put(some_arrays())
        store.drop(kept)
        other.put(some_arrays())
        other.load(mine)


def test_a_block_that_is_being_written_counts_at_its_full_size(
    root: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = some_arrays()
    size = store.put(arrays).file_nbytes  # the handle is dropped at once
    refused: list[str] = []
    real = stores.write_contents

    def write(*arguments: Any) -> int:
        monkeypatch.setattr(stores, "write_contents", real)
        with DiskStore(root, max_bytes=None, total_max_bytes=2 * size - 1) as other:
            with pytest.raises(DiskBudgetError) as caught:
                other.put(arrays)
        refused.append(str(caught.value))
        return real(*arguments)

    monkeypatch.setattr(stores, "write_contents", write)
    store.put(arrays)
    assert len(refused) == 1


def test_what_a_crash_left_makes_room_before_a_write_is_refused(root: Path) -> None:
    with DiskStore(root, max_bytes=None, total_max_bytes=9000) as store:
        process = child(HOLDER, root)
        assert process.stdout is not None
        assert process.stdout.readline()
        with pytest.raises(DiskBudgetError):
            store.put([mx.zeros(2000)])
        process.kill()
        process.communicate()
        store.put([mx.zeros(2000)])


@pytest.mark.parametrize("value", [-1, 1.5, True, "2GB"])
@pytest.mark.parametrize("name", ["max_bytes", "total_max_bytes"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(root: Path, name: str, value: Any) -> None:
    with pytest.raises(BudgetError, match=name):
        DiskStore(root, **{"max_bytes": None, "total_max_bytes": None, name: value})


def test_bytes_written_and_read_are_counted(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (store.nbytes, store.bytes_written_total, store.bytes_read_total) == (0, 0, 0)
    block = store.put([random_array((BIG // 4,), mx.float32)])
    size = block.file_nbytes
    assert (store.nbytes, store.bytes_written_total, store.bytes_read_total) == (size, size, 0)
    store.load(block)
    store.load(block)
    assert store.bytes_read_total == 2 * size
    monkeypatch.setattr(file_format.os, "write", failing(errno.ENOSPC, 2, os.write))
    with pytest.raises(DiskFullError):
        store.put([random_array((BIG // 4,), mx.float32)])
    assert store.bytes_written_total == size + file_format.CHUNK + size - BIG
    store.drop(block)
    assert store.nbytes == 0


# --- what the file system refuses


@pytest.mark.parametrize(
    ("call", "number", "expected"),
    [
        ("write", errno.ENOSPC, DiskFullError),
        ("write", errno.EDQUOT, DiskFullError),
        ("write", errno.EIO, DiskTierError),
        ("ftruncate", errno.EFBIG, DiskTierError),
        ("fsync", errno.ENOSPC, DiskFullError),
        ("fsync", errno.EIO, DiskTierError),
        ("rename", errno.EACCES, DiskDirectoryError),
        ("open", errno.EACCES, DiskDirectoryError),
        ("open", errno.EROFS, DiskDirectoryError),
        ("open", errno.EMFILE, DiskTierError),
        ("pwrite", errno.ENOSPC, DiskFullError),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_write_that_fails_leaves_nothing_and_the_store_usable(
    store: DiskStore,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    expected: type[DiskTierError],
    first: bool,
) -> None:
    kept = [] if first else [store.put(some_arrays())]
    held = store.nbytes
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(number))
        with pytest.raises(DiskTierError) as caught:
            store.put(some_arrays())
        assert type(caught.value) is expected
        assert os.strerror(number) in str(caught.value)
    assert files(root) == [b.path for b in kept]
    assert store.nbytes == held
    kept.append(store.put(some_arrays()))
    for block in kept:
        assert all(map(same, some_arrays(), store.load(block)))


def test_an_interrupted_write_leaves_nothing(
    store: DiskStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stores, "write_contents", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put(some_arrays())
    assert files(root) == []
    store.load(store.put(some_arrays()))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    there = tmp_path / "small"
    there.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(there)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here (that takes root on Linux)")
    try:
        yield there
    finally:
        subprocess.run(["umount", str(there)], check=True)


def test_a_disk_that_is_really_full_is_a_typed_error(small_disk: Path) -> None:
    with DiskStore(small_disk, max_bytes=None, total_max_bytes=None) as store:
        kept = store.put([mx.arange(100_000)])
        with pytest.raises(DiskFullError, match="bytes are free"):
            store.put([mx.arange(200_000)])
        assert files(small_disk) == [kept.path]
        assert same(store.load(kept)[0], mx.arange(100_000))
        store.drop(kept)
        kept = store.put([mx.arange(200_000)])
        assert same(store.load(kept)[0], mx.arange(200_000))
        with pytest.raises(DiskFullError):
            save_blocks(small_disk / "saved", {"k": [mx.arange(200_000)]})
        assert files(small_disk) == [kept.path]
    assert left(small_disk) == []


def test_a_limit_on_the_size_of_files_is_a_typed_error(root: Path) -> None:
    out = finished(
        child(
            """
            import resource
            from lumina_cache.errors import DiskTierError
            store = DiskStore(root, max_bytes=None, total_max_bytes=None)
            kept = store.put([mx.arange(1000)])
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
            try:
                store.put([mx.arange(10_000)])
            except DiskTierError as error:
                print(error)
            print(store.load(kept)[0][-1].item(), len(list(kept.path.parent.glob("*"))))
            """,
            root,
        )
    )
    assert "File too large" in out
    assert out.endswith("999 2\n")
    assert left(root) == []


def test_a_directory_without_write_permission_is_a_typed_error() -> None:
    code = """
        from lumina_cache.errors import DiskDirectoryError
        if os.geteuid() == 0:  # whom permissions do not bind
            os.chown(root, 65534, 65534)
            os.seteuid(65534)
        with DiskStore(root / "tier", max_bytes=None, total_max_bytes=None) as store:
            kept = store.put([mx.arange(1000)])
            kept.path.parent.chmod(0o500)
            for refused in (lambda: store.put([mx.arange(10)]), lambda: store.drop(kept)):
                try:
                    refused()
                except DiskDirectoryError as error:
                    print("writable for this user" in str(error), len(list(kept.path.parent.iterdir())))
            print(store.nbytes == kept.file_nbytes)
            kept.path.parent.chmod(0o700)
            block = store.put([mx.arange(10)])
            print(store.load(block)[0].sum().item(), store.load(kept)[0].sum().item())
        """
    # Not in tmp_path, below which nobody but its owner may go.
    with tempfile.TemporaryDirectory() as there:
        assert finished(child(code, there)) == "True 2\nTrue 2\nTrue\n45 499500\n"
        assert left(Path(there)) == [Path(there) / "tier"]


def test_a_file_that_cannot_be_deleted_goes_on_counting(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = store.put(some_arrays())
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing(errno.EACCES))
        with pytest.raises(DiskDirectoryError):
            store.drop(block)
    assert store.nbytes == block.file_nbytes


def test_closing_says_so_when_something_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root, max_bytes=None, total_max_bytes=None)
    block = store.put(some_arrays())
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing(errno.EACCES))
        with pytest.raises(DiskDirectoryError, match="delete it by hand"):
            store.close()
    assert block.path.exists()
    del block
    DiskStore(root, max_bytes=None, total_max_bytes=None)
    assert left(root) == []


@pytest.mark.parametrize("deleted", ["cache", "root"])
def test_a_deleted_directory_is_noticed_and_made_anew(store: DiskStore, root: Path, deleted: str) -> None:
    lost = store.put(some_arrays())
    shutil.rmtree(lost.path.parent if deleted == "cache" else root)
    with pytest.raises(DiskCorruptError):
        store.load(lost)
    with pytest.raises(DiskDirectoryError, match="deleted"):
        store.put(some_arrays())
    block = store.put(some_arrays())
    assert all(map(same, some_arrays(), store.load(block)))
    store.drop(lost)
    assert store.nbytes == block.file_nbytes


# --- who may see and have what


def test_nobody_else_can_read_what_is_on_the_disk(root: Path) -> None:
    before = os.umask(0)
    try:
        with DiskStore(root, max_bytes=None, total_max_bytes=None) as store:
            block = store.put(some_arrays())
            modes = [p.stat().st_mode & 0o777 for p in (root, block.path.parent, block.path)]
            save_blocks(root / "saved", {"k": some_arrays()})
            modes.append((root / "saved").stat().st_mode & 0o777)
    finally:
        os.umask(before)
    assert modes == [0o700, 0o700, 0o600, 0o600]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_directory_that_others_may_write_to_is_refused(root: Path, mode: int, when: str) -> None:
    if when == "before":
        root.mkdir()
        root.chmod(mode)
        with pytest.raises(DiskDirectoryError, match="others may write"):
            DiskStore(root, max_bytes=None, total_max_bytes=None)
        assert left(root) == []
        return
    store = DiskStore(root, max_bytes=None, total_max_bytes=None)
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(DiskDirectoryError, match="others may write"):
        store.put(some_arrays())
    assert left(root) == []


def test_a_directory_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(mode=0o700)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(DiskDirectoryError, match=f"belongs to user {me}"):
        DiskStore(root, max_bytes=None, total_max_bytes=None)


def test_a_file_in_the_place_of_the_directory_is_refused(root: Path) -> None:
    root.write_text("mine")
    with pytest.raises(DiskDirectoryError, match="not a directory"):
        DiskStore(root, max_bytes=None, total_max_bytes=None)
    assert root.read_text() == "mine"


def test_a_file_system_without_locks_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root, max_bytes=None, total_max_bytes=None)
    monkeypatch.setattr(homes.fcntl, "flock", failing(errno.ENOLCK))
    with pytest.raises(DiskDirectoryError, match="file locks"):
        store.put(some_arrays())
    assert left(root) == []


def test_a_lock_that_is_never_let_go_is_an_error_after_a_while(
    root: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put([])
    monkeypatch.setattr(homes, "LOCK_TIMEOUT", 0.05)
    with homes.locked(root), pytest.raises(DiskDirectoryError, match="another process has held"):
        store.put(some_arrays())
    store.load(store.put(some_arrays()))


def test_the_default_directory_is_in_the_users_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with DiskStore(max_bytes=None, total_max_bytes=None) as store:
        assert store.put([]).path.parent.parent == tmp_path / "lumina_cache" / "disk"
    monkeypatch.delenv("XDG_CACHE_HOME")
    for platform, expected in [("darwin", "Library/Caches"), ("linux", ".cache")]:
        monkeypatch.setattr(sys, "platform", platform)
        assert default_directory() == Path.home() / expected / "lumina_cache"


# --- how long files live


def test_there_is_no_directory_before_the_first_block(root: Path) -> None:
    with DiskStore(root, max_bytes=None, total_max_bytes=None) as store:
        assert not root.exists()
        store.put(some_arrays())
        assert root.exists()


def test_a_dropped_block_is_gone_and_dropping_again_does_nothing(store: DiskStore, root: Path) -> None:
    block = store.put(some_arrays())
    store.drop(block)
    assert files(root) == []
    store.drop(block)
    with pytest.raises(DiskCorruptError, match="dropped"):
        store.load(block)


def test_a_block_lives_as_long_as_any_copy_of_its_handle(store: DiskStore, root: Path) -> None:
    layers = [[store.put(some_arrays())], [store.put(some_arrays())]]
    forked = copy.deepcopy(layers)
    assert forked[0][0] is layers[0][0]
    assert copy.copy(forked[0][0]) is layers[0][0]
    assert len(files(root)) == 2
    del layers
    gc.collect()
    assert len(files(root)) == 2
    store.load(forked[1][0])
    del forked[1]
    assert len(files(root)) == 1
    forked.clear()
    assert files(root) == []
    assert store.nbytes == 0


def test_copies_of_a_cache_share_the_store(store: DiskStore) -> None:
    assert copy.deepcopy({"store": store})["store"] is store


def test_a_handle_cannot_go_to_another_process(store: DiskStore) -> None:
    with pytest.raises(DiskTierError, match="save_blocks"):
        pickle.dumps(store.put(some_arrays()))


def test_a_closed_store_leaves_nothing_and_refuses_work(root: Path) -> None:
    with DiskStore(root, max_bytes=None, total_max_bytes=None) as store:
        block = store.put(some_arrays())
    assert left(root) == []
    assert store.nbytes == 0
    assert store.bytes_written_total == block.file_nbytes
    store.close()
    store.drop(block)
    with pytest.raises(DiskTierError, match="closed"):
        store.put(some_arrays())
    with pytest.raises(DiskCorruptError, match="closed"):
        store.load(block)


def test_a_store_that_is_collected_takes_its_files_along(root: Path) -> None:
    store = DiskStore(root, max_bytes=None, total_max_bytes=None)
    block = store.put(some_arrays())
    cycle = [store]
    cycle.append(cycle)  # type: ignore[arg-type]
    del store, cycle
    gc.collect()
    assert left(root) == []
    del block


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "raise SystemExit", "assert False"])
def test_the_end_of_the_interpreter_takes_the_files_along(root: Path, end: str) -> None:
    process = child(HOLDER + f"    {end}\n", root)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    assert path.exists()
    process.communicate("go\n", timeout=60)
    assert left(root) == []


# --- crashes, other processes, forks


def test_the_next_start_deletes_what_a_killed_process_left(root: Path) -> None:
    process = child(HOLDER, root)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert path.exists()
    (path.parent / "1.tmp").write_bytes(b"half")
    DiskStore(root, max_bytes=None, total_max_bytes=None)
    assert left(root) == []


def test_the_files_of_a_living_process_are_left_alone(root: Path) -> None:
    code = HOLDER + "    print(store.load(block)[0].sum().item())\n"
    process = child(code, root)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    with DiskStore(root, max_bytes=None, total_max_bytes=None) as store:
        store.load(store.put(some_arrays()))
        assert path.exists()
    DiskStore(root, max_bytes=None, total_max_bytes=None)
    out, err = process.communicate("go\n", timeout=60)
    assert out == "499500\n", err
    assert left(root) == []


def test_a_store_of_the_same_process_is_left_alone(root: Path, store: DiskStore) -> None:
    block = store.put(some_arrays())
    with DiskStore(root, max_bytes=None, total_max_bytes=None) as other:
        other.put(some_arrays())
    store.load(block)


def test_sweeping_touches_nothing_that_is_not_a_caches(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "cache-of-photographs").mkdir()
    (root / "cache-of-photographs" / "me.jpg").write_text("smile")
    (root / "notes").write_text("cache")
    (root / "cache-1-died-before-its-lock").mkdir()
    (root / "elsewhere").mkdir()
    (root / "cache-2-link").symlink_to(root / "elsewhere")
    DiskStore(root, max_bytes=None, total_max_bytes=None)
    assert {p.name for p in left(root)} == {
        "cache-of-photographs", "me.jpg", "notes", "elsewhere", "cache-2-link",
    }  # fmt: skip


def test_processes_that_start_at_once_do_not_harm_each_other(root: Path) -> None:
    """Each makes and closes stores, and so sweeps, while the others hold blocks; what a crash left is in the way."""
    dead = child(HOLDER, root)
    assert dead.stdout is not None
    assert dead.stdout.readline()
    dead.kill()
    dead.communicate()
    code = """
        print("ready", flush=True)
        sys.stdin.readline()
        for turn in range(40):
            with DiskStore(root, max_bytes=None, total_max_bytes=10_000_000) as store:
                blocks = [store.put([mx.arange(100) + turn + i]) for i in range(3)]
                for i, block in enumerate(blocks):
                    assert store.load(block)[0].tolist() == list(range(turn + i, 100 + turn + i))
        """
    processes = [child(code, root) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        finished(process)
    assert left(root) == []


def test_processes_together_keep_the_budget_of_all(root: Path) -> None:
    code = """
        from lumina_cache.errors import DiskBudgetError
        store = DiskStore(root, max_bytes=None, total_max_bytes=100_000)
        print("ready", flush=True)
        sys.stdin.readline()
        blocks = []
        for turn in range(30):
            try:
                blocks.append(store.put([mx.zeros(1000)]))
            except DiskBudgetError:
                pass
        print(store.nbytes, flush=True)
        sys.stdin.readline()
        """
    processes = [child(code, root) for _ in range(2)]
    lines = []
    for message in (None, "go\n"):
        for process in processes:
            if message is not None:
                assert process.stdin is not None
                process.stdin.write(message)
                process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            lines.append(process.stdout.readline())
    held = sum(map(int, lines[2:]))
    assert 90_000 < held <= 100_000
    assert held == sum(p.stat().st_size for p in files(root))
    for process in processes:
        process.communicate("go\n", timeout=60)
    assert left(root) == []


FORKED = """
    store = DiskStore(root, max_bytes=None, total_max_bytes=None)
    block = store.put([mx.arange(1000)])
    child = os.fork()
    if child == 0:
        {act}
        sys.exit(0)  # runs the finalizers, as os._exit would not
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert block.path.exists()
    print(store.load(block)[0].sum().item(), store.nbytes > 0)
"""


@pytest.mark.parametrize("act", ["pass", "store.drop(block)", "store.close()", "del block, store"])
def test_a_fork_deletes_nothing_of_its_parents(root: Path, act: str) -> None:
    assert finished(child(FORKED.format(act=act), root)) == "499500 True\n"
    assert left(root) == []


def test_a_fork_writes_to_a_directory_of_its_own(root: Path) -> None:
    # An array that is evaluated and contiguous before the fork: MLX has no threads to compute with after it.
    code = """
        x = mx.array(5)
        mx.eval(x)
        store = DiskStore(root, max_bytes=None, total_max_bytes=None)
        block = store.put([mx.arange(1000)])
        child = os.fork()
        if child == 0:
            assert store.nbytes == 0
            own = store.put([])
            assert own.path.parent != block.path.parent and own.path.exists()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print(store.load(block)[0].sum().item())
        """
    assert finished(child(code, root)) == "499500\n"
    assert left(root) == []


def test_a_fork_that_outlives_its_parent_does_not_keep_the_files(root: Path) -> None:
    code = """
        store = DiskStore(root, max_bytes=None, total_max_bytes=None)
        block = store.put([mx.arange(1000)])
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL) if sys.stdin.readline() else None
        """
    process = child(code, root)
    assert process.stdout is not None
    assert process.stdin is not None
    orphan = int(process.stdout.readline())
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
        process.wait(timeout=60)
        assert len(files(root)) == 1
        DiskStore(root, max_bytes=None, total_max_bytes=None)
        assert left(root) == []
    finally:
        os.kill(orphan, signal.SIGKILL)
        process.communicate()


def test_threads_may_share_a_store(store: DiskStore, root: Path) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            for turn in range(15):
                value = random_array((64,), mx.float32, 100 * seed + turn)
                block = store.put([value])
                if not same(store.load(block)[0], value):
                    wrong.append((seed, turn))
                if turn % 2:
                    store.drop(block)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert files(root) == []
    assert store.nbytes == 0


# --- files that a user names


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "chat.cache"
    blocks = {"0.keys": some_arrays(), "0.keys.1": [mx.array(3)], "empty": []}
    nbytes = save_blocks(path, blocks, {"model": "tiny ☃", "blocks": "mine"})
    assert nbytes == path.stat().st_size
    return path


def test_saved_blocks_come_back_in_another_process(tmp_path: Path) -> None:
    path = saved(tmp_path)
    out = finished(
        child(
            """
            found = load_blocks(root)
            print({k: [a.shape for a in v] for k, v in found.blocks.items()}, ascii(found.metadata))
            save_blocks(root.with_suffix(".again"), found.blocks, found.metadata)
            """,
            path,
        )
    )
    shapes = {"0.keys": [(1, 2, 5, 8)] * 2, "0.keys.1": [()], "empty": []}
    metadata = {"model": "tiny ☃", "blocks": "mine"}
    assert out == f"{shapes} {metadata!a}\n"
    again = load_blocks(path.with_suffix(".again"))
    assert all(map(same, some_arrays(), again.blocks["0.keys"]))
    assert path.with_suffix(".again").read_bytes() == path.read_bytes()


def test_every_single_bit_of_a_saved_file_is_guarded(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    save_blocks(path, {"k": [mx.array([1.5, -2.0])]}, {"model": "a"})
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises((DiskCorruptError, DiskFormatError)):
                load_blocks(path)


def test_a_saved_file_cut_short_anywhere_or_lengthened_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for part in [*(whole[:n] for n in range(len(whole))), whole + b"\0"]:
        path.write_bytes(part)
        with pytest.raises((DiskCorruptError, DiskFormatError), match=str(path)):
            load_blocks(path)


@pytest.mark.parametrize("kind", ["safetensors", "text", "empty", "huge", "block"])
def test_a_file_of_somebody_else_is_refused(tmp_path: Path, store: DiskStore, kind: str) -> None:
    path = tmp_path / "foreign.safetensors"
    if kind == "safetensors":
        mx.save_safetensors(str(path), {"a": mx.zeros(3)}, {"format": "mlx"})
    elif kind == "block":
        block = store.put(some_arrays())
        shutil.copy(block.path, path)
    else:
        path.write_bytes({"text": b"Dear diary, " * 50, "empty": b"", "huge": b"\xff" * 100}[kind])
    with pytest.raises(DiskFormatError, match=str(path)):
        load_blocks(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(file_format, "VERSION", "0")
        path = saved(tmp_path)
        load_blocks(path)
    with pytest.raises(DiskFormatError, match="format '0', this version reads '1'"):
        load_blocks(path)


def test_a_missing_saved_file_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(DiskCorruptError, match="does not exist"):
        load_blocks(tmp_path / "nowhere")
    with pytest.raises(DiskTierError):
        load_blocks(tmp_path)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failed_save_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(errno.ENOSPC))
        with pytest.raises(DiskFullError):
            save_blocks(path, {"other": [mx.zeros(5)]})
    assert path.read_bytes() == before
    assert left(tmp_path) == [path]
    save_blocks(path, {"other": [mx.zeros(5)]})
    assert list(load_blocks(path).blocks) == ["other"]


def test_saving_into_a_missing_directory_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(DiskDirectoryError):
        save_blocks(tmp_path / "nowhere" / "file", {"k": some_arrays()})


@pytest.mark.parametrize(
    ("blocks", "metadata"),
    [({1: []}, {}), ({"k": [1.0]}, {}), ({"k": []}, {"a": 1}), ({"k": []}, {1: "a"}), ({"\ud800": []}, {})],
)
def test_what_a_saved_file_cannot_hold_is_refused(tmp_path: Path, blocks: Any, metadata: Any) -> None:
    with pytest.raises(DiskFormatError):
        save_blocks(tmp_path / "file", blocks, metadata)
    assert left(tmp_path) == []
