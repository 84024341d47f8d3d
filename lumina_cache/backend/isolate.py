"""Ask questions of a child process, so that a question that kills it is an answer too.

A kernel that does not exist on a device may abort the process instead of raising. The child reads one JSON line per
question from its standard input and writes one per answer; the parent knows which question was open when the child
died, notes that, and goes on with a new child.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from ..lab.blas import preload_openblas

__all__ = ["Answer", "ask", "first_line"]

#: Longest that a child may take for one question (seconds).
TIMEOUT = 60.0

#: Longest that a child may take to start, imports included (seconds).
START_TIMEOUT = 120.0


@dataclass(frozen=True)
class Answer:
    """What came back for one question: a value, or why there is none (killed by a signal, too slow, raised)."""

    value: Any
    died: str | None
    seconds: float


def first_line(error: BaseException) -> str:
    """Type and first line of an exception's text: ``ValueError: [quantize] The requested …``."""
    text = str(error).strip().split("\n", 1)[0].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def ask(
    target: str,
    questions: Sequence[Any],
    *,
    timeout: float = TIMEOUT,
    on_answer: Callable[[int, Answer], None] | None = None,
) -> list[Answer]:
    """Put every question to ``target`` in a child process, one after the other, in order.

    Args:
        target: ``package.module:function``; the function takes one question and returns its answer, both of them
            values that JSON can carry. An exception that it raises is an answer (``died``), and the child goes on.
        timeout: seconds for one question, after which the child is killed and the question counts as too slow.
        on_answer: called with the number of the question and its answer, as soon as it is there.
    """
    answers: list[Answer] = []
    child: _Child | None = None
    try:
        for number, question in enumerate(questions):
            if child is None:
                child = _Child(target)
            answer = child.ask(question, timeout)
            if child.dead:
                child.close()
                child = None
            answers.append(answer)
            if on_answer is not None:
                on_answer(number, answer)
    finally:
        if child is not None:
            child.close()
    return answers


class _Child:
    """One child process and a thread that reads its lines, so that waiting for one can time out."""

    def __init__(self, target: str) -> None:
        self.dead = False
        self._fresh = True
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions: IO[str] = self._process.stdin
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def ask(self, question: Any, timeout: float) -> Answer:
        start = time.perf_counter()
        if self._fresh:
            ready = self._next(START_TIMEOUT)
            self._fresh = False
            if ready is None:
                return self._died(start, START_TIMEOUT)
            start = time.perf_counter()
        try:
            self._questions.write(json.dumps(question) + "\n")
            self._questions.flush()
        except OSError:  # it died between two questions
            return self._died(start, timeout)
        line = self._next(timeout)
        if line is None:
            return self._died(start, timeout)
        reply = json.loads(line)
        return Answer(reply.get("value"), reply.get("raised"), time.perf_counter() - start)

    def close(self) -> None:
        """End the child, however it is, and leave neither process nor pipe behind."""
        with contextlib.suppress(OSError):
            self._questions.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5.0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _next(self, timeout: float) -> str | None:
        try:
            return self._lines.get(timeout=timeout)
        except queue.Empty:
            return None

    def _read(self, replies: IO[str]) -> None:
        for line in replies:
            self._lines.put(line)
        self._lines.put(None)

    def _died(self, start: float, timeout: float) -> Answer:
        self.dead = True
        seconds = time.perf_counter() - start
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5 if seconds >= timeout else 5.0)
        code = self._process.poll()
        if code is None:
            self._process.kill()
            self._process.wait()
            return Answer(None, f"no answer within {timeout:g} s", seconds)
        return Answer(None, f"the process ended: {_how_it_ended(code)}", seconds)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _serve(target: str) -> None:
    """The child's side. Whatever the answering code prints goes nowhere near the answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # no core files
    preload_openblas()
    module, _, function = target.partition(":")
    answer = getattr(importlib.import_module(module), function)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in _lines_of(sys.stdin):
        try:
            reply = json.dumps({"value": answer(json.loads(line))})
        except Exception as error:
            reply = json.dumps({"raised": first_line(error)})
        answers.write(reply + "\n")


def _lines_of(stream: IO[str]) -> Iterator[str]:
    """Lines as they come: iterating over a file object would read ahead and wait."""
    while line := stream.readline():
        yield line


if __name__ == "__main__":
    _serve(sys.argv[1])
