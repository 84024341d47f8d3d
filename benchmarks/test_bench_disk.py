"""Writing a block and reading it back, against MLX's own writer and reader, which check nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from lumina_cache.disk import DiskBlock, DiskStore

NBYTES = 2**20


@pytest.fixture
def arrays() -> list[mx.array]:
    made = [mx.random.normal((1, 8, NBYTES // 4 // 8 // 64, 64)) for _ in range(8)]
    mx.eval(made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path / "tier", max_bytes=None, total_max_bytes=None) as made:
        yield made


@pytest.mark.parametrize("way", ["mlx", "store"])
@pytest.mark.benchmark(group="disk: write 8 MiB and fsync")
def test_write(benchmark: Any, arrays: list[mx.array], store: DiskStore, tmp_path: Path, way: str) -> None:
    path = tmp_path / "plain.safetensors"
    named = {str(i): array for i, array in enumerate(arrays)}

    def plain() -> None:
        mx.save_safetensors(str(path), named)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def put() -> DiskBlock:
        return store.put(arrays)

    benchmark(put if way == "store" else plain)


@pytest.mark.parametrize("way", ["mlx", "store"])
@pytest.mark.benchmark(group="disk: read 8 MiB from the page cache")
def test_read(benchmark: Any, arrays: list[mx.array], store: DiskStore, way: str) -> None:
    block = store.put(arrays)

    def plain() -> None:
        mx.eval(mx.load(str(block.path)))

    def load() -> tuple[mx.array, ...]:
        return store.load(block)

    benchmark(load if way == "store" else plain)
