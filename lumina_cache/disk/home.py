"""Directories of caches: one per cache, locked by its owner for as long as that lives, swept when it is dead.

All of them are below one root. A file lock (flock) on ``lock`` in a cache's directory says that its owner lives; the
system drops it with the process, however that ends. Making, sweeping and counting go on under a lock of the root, so
that nobody sees a directory that is made but not locked yet.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DiskDirectoryError

__all__ = ["Home", "locked", "make_home", "require_safe", "sweep", "used_nbytes"]

#: Seconds to wait for the lock of the root, which is never held while arrays are written.
LOCK_TIMEOUT = 30.0

_PREFIX = "cache-"
_LOCK = "lock"
_ROOT_LOCK = ".lock"


@dataclass(eq=False)
class Home:
    """The directory of one cache, and the files in it that count."""

    directory: Path
    lock: int  #: descriptor; closed ones are -1
    pid: int
    files: dict[Path, int] = field(default_factory=dict)  #: bytes of every finished file

    # Garbage collection calls `discard` at any point of any thread, also while the store's lock is held: it takes
    # none, and every step of it is one operation on a dict or a file.
    def discard(self, path: Path) -> OSError | None:
        """Delete a file, if this is the process that wrote it. A file that cannot be deleted goes on counting."""
        if os.getpid() != self.pid:
            return None
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            return error
        self.files.pop(path, None)
        return None

    def remove(self) -> None:
        """Delete everything and let go of the lock; does nothing in a fork of the owner, and the second time."""
        if os.getpid() != self.pid or self.lock < 0:
            return
        _remove(self.directory)
        self.files.clear()
        self.let_go()

    def let_go(self) -> None:
        """Close the descriptor. In a fork of the owner this leaves the lock with the owner."""
        lock, self.lock = self.lock, -1
        if lock >= 0:
            os.close(lock)


def require_safe(root: Path) -> None:
    """Raises DiskDirectoryError if others own or may write to ``root``: what is in it is parts of prompts."""
    found = root.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise DiskDirectoryError(f"{root} is not a directory; choose another one")
    if found.st_uid != os.geteuid():
        raise DiskDirectoryError(
            f"{root} belongs to user {found.st_uid}, this process is user {os.geteuid()}; choose a directory of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DiskDirectoryError(
            f"others may write to {root} (mode {stat.S_IMODE(found.st_mode):04o}); chmod 700 it, or choose another one"
        )


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of ``root``. Raises DiskDirectoryError after :data:`LOCK_TIMEOUT`, and OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(root / _ROOT_LOCK, flags, 0o600)
    try:
        end = time.monotonic() + LOCK_TIMEOUT
        while not _try_lock(descriptor):
            if time.monotonic() > end:
                raise DiskDirectoryError(
                    f"another process has held {root / _ROOT_LOCK} for {LOCK_TIMEOUT:g} s; "
                    "end it, or choose another directory"
                )
            time.sleep(0.002)
        try:
            yield
        finally:
            # Closing would not do: a fork made meanwhile shares the lock until it ends.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def make_home(root: Path) -> Home:
    """Make and lock a directory below ``root``, readable by nobody else. To be called under :func:`locked`."""
    directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
    descriptor = -1
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        _remove(directory)
        raise
    return Home(directory, descriptor, os.getpid())


def sweep(root: Path) -> int:
    """Delete the directories of dead processes; returns how many. To be called under :func:`locked`."""
    return sum(_sweep_one(directory) for directory in _homes(root))


def used_nbytes(root: Path) -> int:
    """Bytes of all files of all caches below ``root``, unfinished ones at their full size."""
    total = 0
    for directory in _homes(root):
        with suppress(FileNotFoundError), os.scandir(directory) as entries:  # its owner may be deleting
            for entry in entries:
                with suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_size
    return total


def _homes(root: Path) -> list[Path]:
    with os.scandir(root) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False)
        ]


def _sweep_one(directory: Path) -> bool:
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Its owner died right after making or right before removing it. If it is not empty it is none of ours.
        with suppress(OSError):
            os.rmdir(directory)
            return True
        return False
    except OSError:
        return False
    try:
        if not _try_lock(descriptor):
            return False
        return _remove(directory)
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> bool:
    """Delete the files of ``directory``, its lock last so that what remains is swept later; whether it is gone."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.name != _LOCK]
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(directory / name)
        with suppress(FileNotFoundError):
            os.unlink(directory / _LOCK)
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
