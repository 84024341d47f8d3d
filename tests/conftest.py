"""Shared fixtures. OpenBLAS has to be loaded before MLX: the Linux wheel's own BLAS is some 25 times slower."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from lumina_cache.lab.blas import preload_openblas

preload_openblas()


@cache
def _built(name: str) -> Any:
    from lumina_cache.lab.tiny import build

    return build(name)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """``tiny("llama")``: a tiny random model, built once per session; models hold no state."""
    return _built
