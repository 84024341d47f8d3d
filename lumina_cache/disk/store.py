"""The disk tier's store: blocks of arrays in files that live no longer than the cache they belong to."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..backend.disk import default_directory
from ..errors import BudgetError, DiskBudgetError, DiskCorruptError, DiskDirectoryError, DiskTierError
from .faults import as_disk_error, disk_errors
from .format import Entry, Layout, lay_out, read_contents, write_contents
from .home import Home, locked, make_home, require_safe, sweep, used_nbytes

__all__ = ["DiskBlock", "DiskStore"]


@dataclass(frozen=True, eq=False)
class DiskBlock:
    """A handle of arrays in a file. The file is deleted when the last reference to the handle is gone.

    A copy of a cache shares its blocks: copying a handle, also deeply, gives the handle itself.
    """

    path: Path
    entries: tuple[Entry, ...]  #: names, shapes and dtypes, in the order in which they were put
    file_nbytes: int  #: bytes of the file
    checksum: int  #: CRC-32 of the file, see ``format.py``
    _release: weakref.finalize[..., DiskBlock] = field(init=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(e.name for e in self.entries)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(e.shape for e in self.entries)

    @property
    def dtypes(self) -> tuple[mx.Dtype, ...]:
        return tuple(e.dtype for e in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, which is what they take in memory."""
        return sum(e.nbytes for e in self.entries)

    def __copy__(self) -> DiskBlock:
        return self

    def __deepcopy__(self, memo: Any) -> DiskBlock:
        return self

    def __reduce__(self) -> Any:
        raise DiskTierError(
            f"{self.path.name} lives no longer than its process; use save_blocks to keep arrays"
        )


class DiskStore:
    """Blocks of arrays in files of one cache, in a directory of its own that is made at the first :meth:`put`.

    The files are deleted with their handles; all of them and the directory by :meth:`close`, when the store is garbage
    collected, and when the interpreter exits. After a crash the next store of the same directory deletes them. A fork
    deletes nothing of its parent's and starts with no directory. One lock serialises all methods.

    Args:
        directory: where the caches' directories are; by default ``disk`` in the user's cache directory.
        max_bytes: of this store's files; None for no limit.
        total_max_bytes: of the files of all stores in ``directory``, of any process; None for no limit. Each store
            looks at its own limit only.

    Raises:
        BudgetError: if a limit is not a number of bytes.
        DiskDirectoryError: if ``directory`` exists and belongs to another user, or others may write to it, or it cannot
            be locked.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None,
        total_max_bytes: int | None,
    ) -> None:
        self.root = (
            default_directory() / "disk" if directory is None else Path(directory).expanduser()
        ).absolute()
        self.max_bytes = _limit(max_bytes, "max_bytes")
        self.total_max_bytes = _limit(total_max_bytes, "total_max_bytes")
        self._home: Home | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._written = self._read = 0
        self._lock = threading.RLock()
        _STORES.add(self)
        with disk_errors(self.root, f"opening {self.root}"):
            if self.root.exists():
                require_safe(self.root)
                with locked(self.root):
                    sweep(self.root)

    @property
    def nbytes(self) -> int:
        """Bytes of this store's files on the disk now."""
        home = self._home
        return 0 if home is None else sum(list(home.files.values()))

    @property
    def bytes_written_total(self) -> int:
        """Bytes written since the store was made, those of writes that failed included."""
        return self._written

    @property
    def bytes_read_total(self) -> int:
        """Bytes read since the store was made, those of reads that failed included."""
        return self._read

    def put(self, arrays: Sequence[mx.array] | Mapping[str, mx.array]) -> DiskBlock:
        """Write arrays of any shapes and dtypes to a new file. They are evaluated; strided ones are copied one at a time.

        Raises, and leaves the store and the disk as they were:
            DiskBudgetError: before anything is written, if a limit would be exceeded.
            DiskFullError: if the file system is full.
            DiskDirectoryError: if the directory was deleted (the next call makes it anew) or may not be written to.
            DiskFormatError: if something is not an array, or a name is not text.
            DiskTierError: for anything else that the file system says, and after :meth:`close`.
        """
        named = dict(arrays) if isinstance(arrays, Mapping) else {str(i): a for i, a in enumerate(arrays)}
        layout = lay_out(named)
        mx.eval(named)  # what fails here fails before there is a file
        with self._lock:
            if self._closed:
                raise DiskTierError(f"the store in {self.root} is closed; make another one")
            self._require_room(layout.file_nbytes)
            try:
                return self._put(named, layout)
            except OSError as error:
                home = self._home
                where = self.root if home is None else home.directory
                if home is not None and not where.exists():
                    self._home = None
                    home.let_go()
                doing = f"writing {layout.file_nbytes} bytes to {where}"
                raise as_disk_error(error, where, doing) from error

    def load(self, block: DiskBlock) -> tuple[mx.array, ...]:
        """The arrays of a block in the order in which they were put, bit for bit; evaluated and independent of the file.

        Raises:
            DiskCorruptError: if the file is gone or is not, to the bit, what was written.
            DiskTierError: for anything else that the file system says.
        """
        with self._lock, disk_errors(block.path.parent, f"reading {block.path}"):
            try:
                descriptor = os.open(block.path, os.O_RDONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                raise DiskCorruptError(
                    f"{block.path} does not exist: it was dropped, its store closed, or someone deleted it; "
                    "its rows have to be computed anew"
                ) from None
            try:
                size = os.fstat(descriptor).st_size
                if size != block.file_nbytes:
                    raise DiskCorruptError(
                        f"{block.path} has {size} bytes, {block.file_nbytes} were written; "
                        "its rows have to be computed anew"
                    )
                contents = read_contents(descriptor, str(block.path))
            finally:
                self._read += os.lseek(descriptor, 0, os.SEEK_CUR)
                os.close(descriptor)
        if contents.checksum != block.checksum or contents.entries != block.entries:
            raise DiskCorruptError(
                f"{block.path} was replaced: its checksum is {contents.checksum:08x}, {block.checksum:08x} was written; "
                "its rows have to be computed anew"
            )
        return tuple(contents.arrays[name] for name in block.names)

    def drop(self, block: DiskBlock) -> None:
        """Delete a block's file now; once it is deleted, does nothing.

        Raises:
            DiskTierError: if the file system does not let it be deleted. It goes on counting until :meth:`close`.
        """
        error = block._release()
        if error is not None:
            raise as_disk_error(error, block.path.parent, f"deleting {block.path}") from error

    def close(self) -> None:
        """Delete all files and the directory; no block can be read after it. Closing again does nothing.

        Raises:
            DiskDirectoryError: if something could not be deleted. The next store of the directory tries again.
        """
        with self._lock:
            self._closed = True
            home, self._home = self._home, None
            if home is None:
                return
            home.remove()
            if os.getpid() == home.pid and home.directory.exists():
                raise DiskDirectoryError(
                    f"not everything in {home.directory} could be deleted; delete it by hand"
                )

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> DiskStore:
        """The store itself: copies of a cache share blocks, and with them the store."""
        return self

    def __repr__(self) -> str:
        return f"DiskStore({str(self.root)!r}, {self.nbytes} of at most {self.max_bytes} bytes)"

    def _put(self, arrays: Mapping[str, mx.array], layout: Layout) -> DiskBlock:
        home = self._require_home()
        path = home.directory / f"{next(self._numbers)}.safetensors"
        unfinished = path.with_suffix(".tmp")
        try:
            descriptor = self._reserve(unfinished, layout.file_nbytes)
            try:
                try:
                    checksum = write_contents(descriptor, layout, arrays)
                finally:
                    self._written += os.lseek(descriptor, 0, os.SEEK_CUR)
                # Not for the sake of a crash, after which the file is of no use: some file systems notice only here
                # that they are full, and until here the page cache holds what was to leave memory.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(unfinished, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        home.files[path] = layout.file_nbytes
        block = DiskBlock(path, layout.entries, layout.file_nbytes, checksum)
        release = weakref.finalize(block, home.discard, path)
        release.atexit = False  # the directory goes as a whole
        object.__setattr__(block, "_release", release)
        return block

    def _require_home(self) -> Home:
        if self._home is None:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_safe(self.root)
            with locked(self.root):
                self._home = make_home(self.root)
            weakref.finalize(self, self._home.remove)
        return self._home

    def _require_room(self, nbytes: int) -> None:
        held = self.nbytes
        if self.max_bytes is not None and held + nbytes > self.max_bytes:
            raise DiskBudgetError(
                f"{nbytes} bytes more than the {held} on the disk exceed max_bytes={self.max_bytes}; "
                f"drop blocks, or give at least {held + nbytes}"
            )

    def _reserve(self, path: Path, nbytes: int) -> int:
        """A new file, empty but of full length: other processes count it while it is being written."""
        with locked(self.root):
            limit = self.total_max_bytes
            if limit is not None:
                used = used_nbytes(self.root)
                if used + nbytes > limit and sweep(self.root):
                    used = used_nbytes(self.root)
                if used + nbytes > limit:
                    raise DiskBudgetError(
                        f"{nbytes} bytes more than the {used} of all caches in {self.root} exceed "
                        f"total_max_bytes={limit}; drop blocks, close other caches, or give at least {used + nbytes}"
                    )
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.ftruncate(descriptor, nbytes)
            except OSError:
                os.close(descriptor)
                raise
            return descriptor

    def _after_fork(self) -> None:
        """In the child: the directory, and perhaps a lock in mid-flight, are the parent's."""
        home, self._home = self._home, None
        self._lock = threading.RLock()
        if home is not None:
            home.let_go()


def _limit(value: int | None, name: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise BudgetError(
            f"{name}={value!r}: give a number of bytes (an int, 0 or more), or None for no limit"
        )
    return value


_STORES: weakref.WeakSet[DiskStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_STORES):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
