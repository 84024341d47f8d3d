"""The preload of OpenBLAS: every claim about a process is checked in a process of its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lumina_cache.lab import blas

_CALL = "from lumina_cache.lab.blas import preload_openblas\nr = preload_openblas()\n"

_MATMUL = """
import sys, time
from lumina_cache.lab.blas import preload_openblas
if {preload}:
    report = preload_openblas()
    assert report.engaged, report
import mlx.core as mx
mx.set_default_device(mx.cpu)
n = 384
a, b = mx.random.normal((n, n)), mx.random.normal((n, n))
mx.eval(a, b, a @ b)
best = float("inf")
for _ in range(5):
    start = time.perf_counter()
    mx.eval(a @ b)
    best = min(best, time.perf_counter() - start)
print(2 * n**3 / best / 1e9)
"""


def run(script: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | environment
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def openblas() -> str:
    """The path that a fresh process reports, or a skip that gives the report's own reason."""
    path, reason = run(f"{_CALL}print(r.path)\nprint(r.reason)").splitlines()
    if path == "None":
        pytest.skip(reason)
    return path


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The first answer is forgotten, and the process looks as if it held neither MLX nor a BLAS."""
    blas.preload_openblas.cache_clear()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_provider", lambda: None)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    yield monkeypatch
    blas.preload_openblas.cache_clear()


def test_openblas_makes_float32_matmul_more_than_three_times_faster(openblas: str) -> None:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for preload in (False, True, False, True):
        rates[preload].append(float(run(_MATMUL.format(preload=preload))))
    ratio = max(rates[True]) / max(rates[False])
    print(f"GFLOP/s without {rates[False]}, with {rates[True]}, ratio {ratio:.1f}")
    assert ratio > 3


def test_the_report_names_a_file_that_exists(openblas: str) -> None:
    assert os.path.isfile(openblas)
    assert "openblas" in os.path.basename(openblas)


def test_a_second_call_keeps_the_first_answer_after_mlx_is_loaded(openblas: str) -> None:
    assert run(f"{_CALL}import mlx.core\nprint(preload_openblas() is r)") == "True"


def test_after_mlx_is_imported_it_says_too_late_and_opens_nothing() -> None:
    script = (
        f"import mlx.core\n{_CALL}"
        "from pathlib import Path\n"
        "maps = Path('/proc/self/maps')\n"
        "print(r.path, maps.exists() and 'openblas' in maps.read_text())\n"
        "print(r.reason)"
    )
    state, reason = run(script).splitlines()
    assert state == "None False"
    assert "imported first" in reason or "nothing to do on" in reason


def test_a_library_from_ld_preload_is_recognised_even_after_mlx(openblas: str) -> None:
    path = run(f"import mlx.core\n{_CALL}print(r.path)", LD_PRELOAD=openblas)
    assert os.path.samefile(path, openblas)


def test_importing_and_calling_it_does_not_import_mlx() -> None:
    script = (
        f"import sys\n{_CALL}print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'numpy')])"
    )
    assert run(script) == "[]"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_it_does_nothing_on_other_systems(fresh: pytest.MonkeyPatch, platform: str) -> None:
    fresh.setattr(sys, "platform", platform)
    fresh.setattr(blas, "_preload", lambda: pytest.fail("looked for a library"))
    report = blas.preload_openblas()
    assert not report.engaged
    assert platform in report.reason


def test_without_the_library_it_says_how_to_install_one(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(blas, "_SONAMES", ("libno-such-openblas.so.0",))
    fresh.setattr(ctypes.util, "find_library", lambda name: None)
    report = blas.preload_openblas()
    assert report.path is None
    assert "apt-get install" in report.reason
    assert "libno-such-openblas.so.0" in report.reason


def test_a_library_without_the_c_interface_is_not_called_a_success(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(blas, "_SONAMES", ("libm.so.6",))
    fresh.setattr(ctypes.util, "find_library", lambda name: None)
    assert blas.preload_openblas().path is None


def test_a_fault_while_looking_is_reported_not_raised(fresh: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> str:
        raise RuntimeError("ldconfig went away")

    fresh.setattr(blas, "_SONAMES", ())
    fresh.setattr(ctypes.util, "find_library", broken)
    report = blas.preload_openblas()
    assert report.path is None
    assert "ldconfig went away" in report.reason
