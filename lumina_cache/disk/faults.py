"""What the operating system says, as an error of this library that names the remedy."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DiskDirectoryError, DiskFullError, DiskTierError

__all__ = ["as_disk_error", "disk_errors"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
_LOCKLESS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})


def as_disk_error(error: OSError, where: Path, doing: str) -> DiskTierError:
    """``error``, met while ``doing`` something at ``where``, as a typed error."""
    said = error.strerror or str(error)
    if error.errno in _FULL:
        return DiskFullError(
            f"{doing}: {said} ({_free(where)}). Make room, lower the byte budget, or choose another directory"
        )
    if error.errno in _DENIED:
        return DiskDirectoryError(
            f"{doing}: {said}. Make {where} writable for this user, or choose another directory"
        )
    if error.errno in _GONE:
        return DiskDirectoryError(
            f"{doing}: {said}. {where} was deleted or is not a directory, and what was in it is lost. "
            "Writing again makes it anew"
        )
    if error.errno in _LOCKLESS:
        return DiskDirectoryError(f"{doing}: {said}. Choose a directory on a file system with file locks")
    return DiskTierError(
        f"{doing}: {said} (errno {error.errno}). Check the drive, or choose another directory"
    )


@contextmanager
def disk_errors(where: Path, doing: str) -> Iterator[None]:
    """Turn an OSError of the block into a typed error."""
    try:
        yield
    except OSError as error:
        raise as_disk_error(error, where, doing) from error


def _free(where: Path) -> str:
    there = next((p for p in (where, *where.parents) if p.is_dir()), Path(os.sep))
    try:
        return f"{shutil.disk_usage(there).free} bytes are free in {there}"
    except OSError:
        return f"how many bytes are free in {there} is unknown"
