"""The other ranks of an ``mx.distributed`` group, and a small row of numbers gathered from all of them within a deadline.

What mlx's ring backend does was tried (docs/ranks.md), and this file follows from it:

- One pair of sockets carries every collective of a process, and nothing on the wire says which one a message belongs
  to. Two collectives under way at the same time in two streams mix up their numbers. So everything that was dispatched
  to the CPU stream of the caller, where ring puts a model's collectives, is waited for first.
- When a rank has died, the first collective raises, and later ones never return. A rank that hangs raises nothing. So
  the collective runs in a thread of its own, and nothing is sent any more once it has failed or passed its deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

import mlx.core as mx
import numpy as np

from .errors import AgreementError, RankLostError

__all__ = ["TIMEOUT_SECONDS", "GroupPeers", "Peers", "Row"]

#: Seconds after which a rank that does not answer is given up. Ranks of one model wait for each other in every layer,
#: so they are apart by no more than what one of them does alone: reading a file, compiling a kernel.
TIMEOUT_SECONDS = 120.0

#: Whole numbers, int64.
Row: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class Peers(Protocol):
    """Whoever a row of numbers can be exchanged with."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, row: Row) -> Row:
        """The rows (n,) of all ranks as (size, n), in the order of ranks; every rank has to call it.

        Raises:
            RankLostError: some rank has not taken part; whoever calls again gets the same at once.
        """


class GroupPeers:
    """The ranks of an ``mx.distributed`` group.

    Args:
        group: what ``mx.distributed.init()`` returned.
        timeout: seconds that the other ranks have to come to the same point.

    Raises:
        AgreementError: the timeout is not a positive number.
    """

    def __init__(self, group: Any, timeout: float = TIMEOUT_SECONDS) -> None:
        if not timeout > 0:
            raise AgreementError(
                f"other ranks cannot be waited for {timeout!r} seconds; give a positive number"
            )
        self._group = group
        self._timeout = timeout
        self.rank = int(group.rank())
        self.size = int(group.size())

    def gather(self, row: Row) -> Row:
        pending = mx.default_stream(
            mx.cpu
        )  # of this thread, and of a ``with mx.stream(...)`` around the call

        def collective() -> Row:
            mx.synchronize(pending)
            gathered = mx.distributed.all_gather(mx.array(row), group=self._group, stream=mx.cpu)
            mx.eval(gathered)
            return np.array(gathered, dtype=np.int64).reshape(self.size, -1)

        return _line().call(collective, self._timeout)


class _Line:
    """The one thread of this process from which collectives are entered, in the order in which they are asked for.

    Not an executor: those join their threads when the interpreter exits, and a thread in a collective whose other end
    hangs never returns.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Callable[[], Row], Future[Row]]] = SimpleQueue()
        self._lost: str | None = None
        threading.Thread(target=self._work, name="lumina-cache ranks", daemon=True).start()

    def call(self, collective: Callable[[], Row], timeout: float) -> Row:
        if self._lost is not None:
            raise RankLostError(self._lost)
        answer: Future[Row] = Future()
        self._asked.put((collective, answer))
        try:
            return answer.result(timeout)
        except TimeoutError:
            self._lost = (
                f"another rank has not come to the same point within {timeout:g} s: it hangs, its host is gone, or it "
                "runs something else. Nothing is decided without it; end this generation and start every rank anew"
            )
            raise RankLostError(self._lost) from None
        except RuntimeError as error:
            self._lost = (
                f"another rank is gone ({error}). Nothing is decided without it; end this generation and start every "
                "rank anew"
            )
            raise RankLostError(self._lost) from error

    def _work(self) -> None:
        while True:
            collective, answer = self._asked.get()
            try:
                answer.set_result(collective())
            except BaseException as error:  # belongs to whoever asked
                answer.set_exception(error)
            del collective, answer


@cache
def _line() -> _Line:
    return _Line()
