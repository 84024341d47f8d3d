"""The file format: safetensors with a checksum of the whole file in its header.

A file is eight bytes with the header's length, a JSON header, and the arrays' bytes one after the other
(https://huggingface.co/docs/safetensors: "Format"), so that ``mx.load`` reads it too. The header begins with the
CRC-32 of the file, taken with the eight hexadecimal digits themselves as zeros: no bit of the file is outside it. A
CRC-32 finds every change within 32 neighbouring bits, and of other accidents all but one in 2³².

MLX's own writer is not used: it copies every strided array of a file before it writes the first, whereas this one
holds one copy at a time (offloading happens when memory is short); and the exact size is known before writing.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import DiskCorruptError, DiskFormatError

__all__ = ["Contents", "Entry", "Layout", "lay_out", "read_contents", "require_text", "write_contents"]

VERSION = "1"

#: Bytes written, read and summed at a time: they stay in the processor's cache for the second pass over them.
CHUNK = 2**20

_BEFORE_DIGITS = b'{"__metadata__":{"crc32":"'
_ZEROS = b"00000000"
_DIGITS_AT = 8 + len(_BEFORE_DIGITS)
#: As in the safetensors library; a longer one is not a header but a damaged length.
_MAX_HEADER = 100_000_000

_CODES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
    "U64": mx.uint64,
    "I8": mx.int8,
    "I16": mx.int16,
    "I32": mx.int32,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
    "F64": mx.float64,
    "C64": mx.complex64,
}
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}


@dataclass(frozen=True)
class Entry:
    """One array of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.size)


@dataclass(frozen=True)
class Layout:
    """A file that is not written yet: what goes where is known to the byte."""

    head: bytes  #: length and header, with zeros for the checksum
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(e.nbytes for e in self.entries)

    @property
    def file_nbytes(self) -> int:
        return len(self.head) + self.nbytes


@dataclass(frozen=True)
class Contents:
    """What was read from a file whose checksum held."""

    arrays: dict[str, mx.array]
    entries: tuple[Entry, ...]
    metadata: dict[str, str]
    checksum: int


def lay_out(arrays: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None) -> Layout:
    """The layout of a file with ``arrays``, in their order, and ``metadata``.

    Raises:
        DiskFormatError: for names that are not text, values that are not ``mx.array``, or metadata that is not text.
    """
    for name, array in arrays.items():
        if not isinstance(array, mx.array):
            raise DiskFormatError(f"array {name!r} is a {type(array).__name__}; only mx.array can be written")
    require_text([*arrays, *(metadata or {}), *(metadata or {}).values()])
    if "__metadata__" in arrays:
        raise DiskFormatError("an array cannot be named '__metadata__' in this format; choose another name")
    entries = tuple(Entry(n, tuple(a.shape), a.dtype) for n, a in arrays.items())
    header: dict[str, Any] = {}
    # "crc32" has to be the first key: its digits are looked for at a fixed place.
    header["__metadata__"] = {
        "crc32": _ZEROS.decode(),
        "format": "mlx",
        "lumina_cache": VERSION,
        "metadata": json.dumps(dict(metadata or {})),
    }
    at = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _CODE_OF[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    assert text.startswith(_BEFORE_DIGITS + _ZEROS)
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise DiskFormatError(
            f"the header would have {len(text)} bytes, at most {_MAX_HEADER} can be read back"
        )
    return Layout(len(text).to_bytes(8, "little") + text, entries)


def write_contents(descriptor: int, layout: Layout, arrays: Mapping[str, mx.array]) -> int:
    """Write a whole file to ``descriptor``, which is at its start; returns the checksum.

    The descriptor's position tells how many bytes were written, also after an error.

    Raises:
        OSError: what the file system said.
    """
    checksum = _write(descriptor, memoryview(layout.head), 0)
    for entry in layout.entries:
        checksum = _write(descriptor, _bytes_of(arrays[entry.name]), checksum)
    digits = b"%08x" % checksum
    if os.pwrite(descriptor, digits, _DIGITS_AT) != len(digits):
        raise OSError(None, "the checksum could not be written")
    return checksum


def read_contents(descriptor: int, name: str) -> Contents:
    """Read a whole file from ``descriptor``, which is at its start; the arrays are evaluated and independent of it.

    Holds the arrays and, one at a time, a second copy of their bytes. ``name`` is for messages.

    Raises:
        DiskFormatError: if it is not a file of this format and version.
        DiskCorruptError: if it is cut short, has something appended, or fails its checksum.
        OSError: what the file system said.
    """
    size = os.fstat(descriptor).st_size
    start = _read(descriptor, 8 + len(_BEFORE_DIGITS) + len(_ZEROS))
    if start[8:_DIGITS_AT] != _BEFORE_DIGITS or len(start) < _DIGITS_AT + 8:
        raise DiskFormatError(f"{name}: not a file of arrays that this library wrote ({size} bytes)")
    length = int.from_bytes(start[:8], "little")
    if not len(start) - 8 <= length <= min(_MAX_HEADER, size - 8):
        raise DiskCorruptError(f"{name}: a header of {length} bytes does not fit into a file of {size} bytes")
    head = start + _read(descriptor, 8 + length - len(start))
    stated = bytes(head[_DIGITS_AT : _DIGITS_AT + 8])
    entries, metadata = _parse(head[8:], size - 8 - length, name)

    checksum = zlib.crc32(head[:_DIGITS_AT] + _ZEROS + head[_DIGITS_AT + 8 :])
    buffer = np.empty(max((e.nbytes for e in entries), default=0), np.uint8).data
    arrays = {}
    for entry in entries:
        view = buffer[: entry.nbytes]
        checksum = _read_into(descriptor, view, checksum, name)
        arrays[entry.name] = _array_of(view, entry)
    if b"%08x" % checksum != stated:
        raise DiskCorruptError(
            f"{name}: the checksum is {checksum:08x}, the file states {stated.decode('latin-1')}"
        )
    return Contents(arrays, entries, metadata, checksum)


def require_text(names: Iterable[Any]) -> None:
    """Raises DiskFormatError for a name that a file cannot hold."""
    for name in names:
        try:
            if not isinstance(name, str):
                raise DiskFormatError(
                    f"names and metadata have to be text, not {name!r}; convert with json.dumps"
                )
            name.encode()
        except UnicodeEncodeError:
            raise DiskFormatError(f"{name!r} is not valid Unicode and cannot be written") from None


def _bytes_of(array: mx.array) -> memoryview:
    """The bytes of an array in row-major order; a copy only if they are not so in memory."""
    if array.size == 0:
        return memoryview(b"")
    flat = mx.contiguous(array, stream=mx.cpu).reshape(-1, stream=mx.cpu).view(mx.uint8, stream=mx.cpu)
    mx.eval(flat)
    return memoryview(flat)  # type: ignore[arg-type]


def _array_of(view: memoryview, entry: Entry) -> mx.array:
    if entry.nbytes == 0:
        array = mx.zeros(entry.shape, dtype=entry.dtype, stream=mx.cpu)
    else:
        raw = mx.array(np.frombuffer(view, np.uint8))
        array = raw.view(entry.dtype, stream=mx.cpu).reshape(entry.shape, stream=mx.cpu)
    mx.eval(array)
    return array


def _write(descriptor: int, data: memoryview, checksum: int) -> int:
    for start in range(0, len(data), CHUNK):
        chunk = data[start : start + CHUNK]
        checksum = zlib.crc32(chunk, checksum)
        while chunk:
            chunk = chunk[os.write(descriptor, chunk) :]
    return checksum


def _read(descriptor: int, nbytes: int) -> bytes:
    """``nbytes`` bytes, or fewer at the end of the file."""
    parts = []
    while nbytes:
        part = os.read(descriptor, nbytes)
        if not part:
            break
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def _read_into(descriptor: int, view: memoryview, checksum: int, name: str) -> int:
    while view:
        got = os.readv(descriptor, [view[:CHUNK]])
        if not got:
            raise DiskCorruptError(f"{name}: the file became shorter while it was read")
        checksum = zlib.crc32(view[:got], checksum)
        view = view[got:]
    return checksum


def _parse(text: bytes, nbytes: int, name: str) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """Entries and metadata of a header, whose arrays have to fill ``nbytes`` bytes without a gap."""
    try:
        header = json.loads(text)
        about = header.pop("__metadata__")
        version = about.get("lumina_cache")
    except (ValueError, RecursionError, KeyError, AttributeError) as error:
        raise DiskCorruptError(f"{name}: the header cannot be read ({error})") from None
    if version != VERSION:
        raise DiskFormatError(
            f"{name}: format {version!r}, this version reads {VERSION!r}; write the file anew"
        )
    at = 0
    entries = []
    try:
        metadata = json.loads(about["metadata"])
        for key, stated in header.items():
            entry = Entry(key, tuple(stated["shape"]), _CODES[stated["dtype"]])
            if not all(type(n) is int and 0 <= n < 2**31 for n in entry.shape):
                raise ValueError(f"shape {entry.shape}")
            if stated["data_offsets"] != [at, at + entry.nbytes]:
                raise ValueError(f"{key!r} is not where its predecessor ends")
            at += entry.nbytes
            entries.append(entry)
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DiskCorruptError(f"{name}: the header does not describe the arrays ({error!r})") from None
    if at != nbytes:
        raise DiskCorruptError(f"{name}: the arrays have {at} bytes, the file has {nbytes} for them")
    return tuple(entries), metadata
