"""Work spread over processes of their own, each with its own copy of MLX.

MLX's CPU backend runs a graph on one thread and leaves only matrix products to BLAS's threads, so that two processes with
one BLAS thread each do more than one with two. This module imports neither MLX nor anything that does: a worker starts
here, puts the faster BLAS in place, and only then imports what it is to do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import LuminaError
from .blas import preload_openblas

__all__ = ["WorkerLostError", "in_processes"]


class WorkerLostError(LuminaError):
    """A worker ended before its task was done, or its task raised."""


def in_processes(
    function: str,
    tasks: Sequence[Any],
    workers: int,
    *,
    on_message: Callable[[Any], None] = lambda message: None,
) -> Iterator[Any]:
    """Results of ``function(task, say)`` for every task, as they come.

    Workers end with the iteration, whatever ends it; and by themselves if this process is killed.

    Args:
        function: where it is, as ``"package.module:name"``.
        workers: most processes at a time; processors are shared out among them.
        on_message: called with everything that a task says.

    Raises:
        WorkerLostError: a task raised, or a worker was killed.
    """
    count = min(workers, len(tasks))
    threads = max(1, (os.cpu_count() or 1) // max(1, workers))
    with _started(function, count, threads) as lines:
        due = iter(tasks)
        busy = 0
        for line in lines:
            busy += _give(line, due)
        while busy:
            for ready in wait(lines):
                line = next(one for one in lines if one is ready)
                try:
                    kind, what = line.recv()
                except EOFError:
                    raise WorkerLostError(
                        "a worker was killed before its task was done; was there memory enough? The same command "
                        "goes on, with fewer --workers if need be"
                    ) from None
                if kind == "failed":
                    raise WorkerLostError(f"a worker failed:\n{what}")
                if kind == "said":
                    on_message(what)
                    continue
                busy -= 1
                yield what
                busy += _give(line, due)


def _give(line: Connection, due: Iterator[Any]) -> int:
    """Hand the next task to a worker, if there is one."""
    for task in due:
        line.send(task)
        return 1
    return 0


@contextlib.contextmanager
def _started(function: str, count: int, threads: int) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    processes, lines = [], []
    try:
        with _environment("OPENBLAS_NUM_THREADS", str(threads)):
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, function), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                lines.append(ours)
        yield lines
    finally:
        for line in lines:
            line.close()
        for process in processes:
            process.terminate()
            process.join()


def _serve(line: Connection, function: str) -> None:
    """What a worker does until the other end of its line is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its workers
    preload_openblas()
    module, _, name = function.partition(":")
    # Without the parent, the first message or the next wait for a task ends the worker.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        work = getattr(import_module(module), name)
        while True:
            task = line.recv()
            try:
                line.send(("done", work(task, lambda message: line.send(("said", message)))))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception:
                line.send(("failed", traceback.format_exc()))


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = before or value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
