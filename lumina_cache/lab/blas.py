"""A fast BLAS for MLX's CPU backend on Linux.

The Linux wheel of MLX links the reference BLAS of Netlib, one to two orders of magnitude slower than
OpenBLAS. MLX calls it through the C interface (``cblas_sgemm`` …), whose symbols ELF looks up first among the
libraries opened with ``RTLD_GLOBAL``. An OpenBLAS opened that way *before* ``mlx.core`` is loaded therefore
takes their place; once ``mlx.core`` is loaded its symbols are bound and it is too late. Only float32 gains:
BLAS knows no 16-bit types.

This module imports neither MLX nor anything that does.

Sources: dlopen(3) and ld.so(8), order of symbol lookup; MLX, ``backend/cpu/gemms/cblas.cpp``.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

__all__ = ["BlasReport", "preload_openblas"]

# Fedora names its threaded build with a p; elsewhere the threaded build has the plain name.
_SONAMES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")

# The function of MLX's float32 matrix product: whoever provides it in the global scope serves MLX.
_SYMBOL = "cblas_sgemm"


@dataclass(frozen=True, slots=True)
class BlasReport:
    """Which library serves the matrix products of MLX's CPU backend in this process.

    `path` is the file that provides ``cblas_sgemm`` ahead of the library MLX was linked with, or None when
    MLX keeps its own; `reason` says why, in one sentence.
    """

    path: str | None
    reason: str

    @property
    def engaged(self) -> bool:
        """True when MLX's own BLAS was replaced."""
        return self.path is not None

    def __str__(self) -> str:
        return f"{self.path or 'the BLAS that MLX was linked with'}: {self.reason}"


@cache
def preload_openblas() -> BlasReport:
    """Put OpenBLAS in front of the BLAS that MLX was linked with, before the first ``import mlx.core``.

    Never raises. Does nothing on any system but Linux (macOS has Accelerate, and its linker would not let one
    library stand in for another), and nothing once ``mlx.core`` is loaded. The first answer holds for the
    life of the process: later calls return it again.
    """
    if sys.platform != "linux":
        return BlasReport(None, f"nothing to do on {sys.platform}: the preload is for MLX's Linux CPU wheel")
    try:
        return _preload()
    except Exception as error:  # a slow BLAS is no reason to stop anybody's program
        return BlasReport(None, f"preloading OpenBLAS failed: {error}")


def _preload() -> BlasReport:
    present = _provider()
    if "mlx.core" in sys.modules:
        # A library in the global scope by now may have come before or after MLX; LD_PRELOAD came before.
        if present is not None and os.environ.get("LD_PRELOAD"):
            return BlasReport(present, f"{_SYMBOL} was provided by LD_PRELOAD before mlx was imported")
        return BlasReport(None, "mlx was imported first: call preload_openblas() before importing mlx")
    if present is not None:
        return BlasReport(present, f"{_SYMBOL} was already provided in this process")
    return _open_first_candidate()


def _open_first_candidate() -> BlasReport:
    failures = []
    for name in _candidates():
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            failures.append(str(error))
            continue
        if not hasattr(library, _SYMBOL):
            failures.append(f"{name} has no {_SYMBOL}")
            continue
        return BlasReport(_provider() or name, f"opened {name} before mlx")
    return BlasReport(
        None,
        "no OpenBLAS was found; install it for faster float32 on CPU, "
        f"e.g. `apt-get install libopenblas0-pthread` ({'; '.join(failures)})",
    )


def _candidates() -> Iterator[str]:
    """Names to open, in order of preference; what ldconfig knows under another soname comes last."""
    yield from _SONAMES
    found = ctypes.util.find_library("openblas")  # runs ldconfig, and a compiler where that fails
    if found and found not in _SONAMES:
        yield found


class _SymbolOrigin(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def _provider() -> str | None:
    """Path of the file that provides `_SYMBOL` in the global scope, None when no library there does."""
    everything = ctypes.CDLL(None)
    try:
        address = ctypes.cast(getattr(everything, _SYMBOL), ctypes.c_void_p)
    except AttributeError:
        return None
    dladdr = everything.dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SymbolOrigin)]
    dladdr.restype = ctypes.c_int
    origin = _SymbolOrigin()
    if not dladdr(address, ctypes.byref(origin)) or not origin.dli_fname:
        return "(unnamed library)"
    return os.fsdecode(origin.dli_fname)
