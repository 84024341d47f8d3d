"""How fast rows could be written to a directory and read back, measured on one small file.

The file has no name for longer than it takes to open it twice: it is unlinked before the first byte is written, so
that nothing is left behind whatever happens, even if the process is killed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .capabilities import Outcome
from .isolate import first_line

__all__ = ["DiskProbe", "default_directory", "probe_disk"]

#: Bytes written, unless the time limit ends it earlier: every probe wears the drive by as much.
NBYTES = 32 * 2**20

#: Seconds after which writing (and then reading) stops, with a rate for what was done until then.
TIME_LIMIT = 1.0

_BLOCK = 2**20

# fcntl(2) of macOS: bypass the page cache for this descriptor; wait until the drive itself has the bytes.
_F_NOCACHE, _F_FULLFSYNC = 48, 51

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


@dataclass(frozen=True)
class DiskProbe:
    """What one directory offers to a disk tier. Rates are in bytes per second; None where ``unknown`` says why."""

    path: str
    writable: bool
    reason: str | None  #: why rows cannot be written and read back there; None if they can
    free: int | None  #: bytes that an unprivileged writer may still take
    write_rate: float | None  #: until the drive has the bytes, not only the page cache
    read_rate: float | None
    page_cache_bypassed: bool | None  #: whether the read came from the drive; None if that could not be told
    how: str | None  #: how the page cache was bypassed, or why it could not be
    nbytes_written: int
    seconds: float

    def outcome(self) -> Outcome:
        """The probe as the outcome of the capability DISK_TIER."""
        return Outcome(self.reason is None, self.reason, self.seconds)

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DiskProbe:
        """Raises TypeError for a record that :meth:`to_record` did not make."""
        return cls(**record)


def default_directory() -> Path:
    """Where rows go without a word from the user.

    Below ``$XDG_CACHE_HOME`` if that is set, else ``~/Library/Caches`` (macOS) or ``~/.cache``.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return (Path(root) if os.path.isabs(root) else usual) / "lumina_cache"


def probe_disk(
    directory: str | os.PathLike[str] | None = None, *, nbytes: int = NBYTES, time_limit: float = TIME_LIMIT
) -> DiskProbe:
    """Write ``nbytes`` of random bytes to a nameless file in ``directory``, read them back and compare.

    A directory that does not exist is not made: its nearest existing parent is probed, since it would be on the same
    drive. Never raises for what the file system does, and leaves no file.
    """
    start = time.perf_counter()
    wanted = Path(default_directory() if directory is None else directory).expanduser()
    there = _existing(wanted)
    free = _free(there)
    if free is not None and free < 2 * nbytes:
        reason = f"{free} bytes are free in {there}, and the probe wants twice {nbytes}"
        return _failed(wanted, os.access(there, os.W_OK), reason, free, 0, start)
    try:
        with ExitStack() as opened:
            return _measured(wanted, there, free, nbytes, time_limit, opened, start)
    except OSError as error:
        writable = error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENOENT)
        return _failed(wanted, writable, f"{there}: {_os_reason(error)}", free, 0, start)


def _failed(
    wanted: Path, writable: bool, reason: str, free: int | None, written: int, start: float
) -> DiskProbe:
    return DiskProbe(
        path=str(wanted),
        writable=writable,
        reason=reason,
        free=free,
        write_rate=None,
        read_rate=None,
        page_cache_bypassed=None,
        how="nothing was read",
        nbytes_written=written,
        seconds=time.perf_counter() - start,
    )


def _measured(
    wanted: Path,
    there: Path,
    free: int | None,
    nbytes: int,
    time_limit: float,
    opened: ExitStack,
    start: float,
) -> DiskProbe:
    name = tempfile.mkstemp(prefix=".lumina-probe-", dir=there)
    writer: int = name[0]
    opened.callback(os.close, writer)
    try:
        reader, direct = _reader(name[1])
        opened.callback(os.close, reader)
    finally:
        os.unlink(name[1])
    if sys.platform == "darwin":
        _fcntl(writer, _F_NOCACHE, 1)
        _fcntl(reader, _F_NOCACHE, 1)
    # Page-aligned, as direct reads want it; random, as a drive or file system that compresses would flatter itself.
    blocks = mmap.mmap(-1, _BLOCK)
    opened.callback(blocks.close)
    pattern = os.urandom(_BLOCK)

    written, write_seconds = 0, 0.0
    while written < nbytes and write_seconds < time_limit:
        block = _block(pattern, written // _BLOCK)[: nbytes - written]
        begun = time.perf_counter()
        written += _write_all(writer, block)
        write_seconds += time.perf_counter() - begun
    begun = time.perf_counter()
    _flush(writer)
    write_seconds += time.perf_counter() - begun

    bypassed, how = _drop_pages(reader, direct, written, there)
    read, read_seconds, same = 0, 0.0, True
    while read < written and read_seconds < time_limit:
        begun = time.perf_counter()
        got = os.preadv(reader, [blocks], read)
        read_seconds += time.perf_counter() - begun
        same = same and got > 0 and blocks[:got] == _block(pattern, read // _BLOCK)[:got]
        if not same:
            break
        read += got

    reason = None
    if not same:
        reason = f"{there}: what was read back is not what was written"
    return DiskProbe(
        path=str(wanted),
        writable=True,
        reason=reason,
        free=free,
        write_rate=written / write_seconds,
        read_rate=None if reason else read / read_seconds,
        page_cache_bypassed=bypassed,
        how=how,
        nbytes_written=written,
        seconds=time.perf_counter() - start,
    )


def _block(pattern: bytes, number: int) -> bytes:
    """Block ``number`` of the file: the pattern turned by as many bytes, so that no two blocks are alike."""
    return pattern[number:] + pattern[:number]


def _write_all(descriptor: int, block: bytes) -> int:
    done = 0
    while done < len(block):
        done += os.write(descriptor, block[done:])
    return done


def _reader(name: str) -> tuple[int, bool]:
    """A second descriptor of the file, and whether its reads go past the page cache by themselves."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return os.open(name, os.O_RDONLY | direct), True
        except OSError:  # the file system has no direct reads
            pass
    return os.open(name, os.O_RDONLY), False


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)
    if sys.platform == "darwin":
        _fcntl(descriptor, _F_FULLFSYNC, 0)


def _fcntl(descriptor: int, command: int, argument: int) -> None:
    import fcntl

    fcntl.fcntl(descriptor, command, argument)


def _drop_pages(reader: int, direct: bool, nbytes: int, there: Path) -> tuple[bool | None, str]:
    """Make reads come from the drive where that can be done; whether it worked, and how."""
    kind = _file_system(there)
    if kind in _MEMORY_FILE_SYSTEMS:
        return False, f"{kind} keeps files in memory"
    if direct:
        return True, "O_DIRECT"
    if sys.platform == "darwin":
        # Written pages may have stayed in the cache before F_NOCACHE could keep them out; nothing tells.
        return None, "F_NOCACHE; whether written pages had been cached cannot be told"
    if not hasattr(os, "posix_fadvise"):
        return None, "this system cannot drop pages"
    try:
        os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        return None, f"posix_fadvise: {_os_reason(error)}"
    resident = _resident(reader, nbytes)
    if resident is None:
        return None, "POSIX_FADV_DONTNEED; whether it worked cannot be told"
    if resident:
        return False, f"{resident} pages stayed in the page cache after POSIX_FADV_DONTNEED"
    return True, "POSIX_FADV_DONTNEED"


def _resident(reader: int, nbytes: int) -> int | None:
    """Pages of the file in the page cache, by mincore(2); None where that cannot be asked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        with mmap.mmap(reader, nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as view:
            vector = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
            # The view is private and never written to: mincore sees the file's own pages.
            buffer = ctypes.c_char.from_buffer(view)
            status = libc.mincore(ctypes.c_void_p(ctypes.addressof(buffer)), ctypes.c_size_t(nbytes), vector)
            del buffer
            return None if status else sum(v & 1 for v in vector)
    except (AttributeError, OSError, ValueError, BufferError):
        return None


def _file_system(there: Path) -> str | None:
    """Type of the file system that holds ``there``, from /proc/self/mounts; None where there is no such file."""
    try:
        lines = Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()
        resolved = there.resolve()
    except OSError:
        return None
    best, kind = -1, None
    for line in lines:
        fields = line.split(" ")
        mounted = Path(fields[1].replace("\\040", " ")) if len(fields) > 2 else None
        if mounted is not None and resolved.is_relative_to(mounted) and len(mounted.parts) >= best:
            best, kind = len(mounted.parts), fields[2]
    return kind


def _existing(path: Path) -> Path:
    return next((p for p in (path, *path.absolute().parents) if p.is_dir()), Path("/"))


def _free(there: Path) -> int | None:
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return None


def _os_reason(error: OSError) -> str:
    return error.strerror or first_line(error)
