"""Arrays of a whole cache in one file that the user names, to be read by another process."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..errors import DiskCorruptError, DiskFormatError
from .faults import disk_errors
from .format import lay_out, read_contents, require_text, write_contents

__all__ = ["SavedBlocks", "load_blocks", "save_blocks"]


@dataclass(frozen=True)
class SavedBlocks:
    """What a file holds."""

    blocks: dict[str, tuple[mx.array, ...]]
    metadata: dict[str, str]


def save_blocks(
    path: str | os.PathLike[str],
    blocks: Mapping[str, Sequence[mx.array]],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write arrays under names to ``path``, readable by this user only; returns the bytes of the file.

    What was at ``path`` is replaced as a whole when the drive has all bytes, or is left as it was.

    Raises:
        DiskFullError, DiskDirectoryError, DiskTierError: what the file system said; nothing half-written is left.
        DiskFormatError: if something is not an array, or names or metadata are not text.
    """
    target = Path(path).expanduser().absolute()
    require_text(blocks)
    counts = {name: len(arrays) for name, arrays in blocks.items()}
    arrays = {f"{name}.{i}": array for name, block in blocks.items() for i, array in enumerate(block)}
    layout = lay_out(arrays, {"blocks": json.dumps(counts), **_prefixed(metadata or {})})
    mx.eval(arrays)
    with disk_errors(target.parent, f"writing {layout.file_nbytes} bytes to {target}"):
        descriptor, unfinished = tempfile.mkstemp(prefix=f".{target.name}-", suffix=".tmp", dir=target.parent)
        try:
            try:
                write_contents(descriptor, layout, arrays)
                _make_durable(descriptor)
            finally:
                os.close(descriptor)
            os.replace(unfinished, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        # The new name, too, has to reach the drive. Some file systems have no fsync of directories.
        with suppress(OSError):
            directory = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    return layout.file_nbytes


def load_blocks(path: str | os.PathLike[str]) -> SavedBlocks:
    """Read what :func:`save_blocks` wrote, bit for bit; the arrays are evaluated and independent of the file.

    Raises:
        DiskFormatError: if the file was not written by :func:`save_blocks`, or by a version with another format.
        DiskCorruptError: if the file does not exist, is cut short or altered; none of its numbers is given out.
        DiskTierError: for anything else that the file system says.
    """
    source = Path(path).expanduser().absolute()
    with disk_errors(source.parent, f"reading {source}"):
        try:
            descriptor = os.open(source, os.O_RDONLY)
        except FileNotFoundError:
            raise DiskCorruptError(f"{source} does not exist; check the path") from None
        try:
            contents = read_contents(descriptor, str(source))
        finally:
            os.close(descriptor)
    stated = contents.metadata
    if "blocks" not in stated:
        raise DiskFormatError(f"{source}: a block of the disk tier, not a file of save_blocks")
    return SavedBlocks(
        {
            name: tuple(contents.arrays[f"{name}.{i}"] for i in range(count))
            for name, count in json.loads(stated["blocks"]).items()
        },
        {key.removeprefix("user."): value for key, value in stated.items() if key.startswith("user.")},
    )


def _prefixed(metadata: Mapping[str, str]) -> dict[str, str]:
    """Keys under a prefix, so that none can be taken for one of this format."""
    require_text(metadata)
    return {f"user.{key}": value for key, value in metadata.items()}


def _make_durable(descriptor: int) -> None:
    os.fsync(descriptor)
    if sys.platform == "darwin":
        # Beyond fsync: until the drive has written its own cache. Network file systems do not know it.
        import fcntl

        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
