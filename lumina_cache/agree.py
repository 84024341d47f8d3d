"""Several ranks that hold parts of one model's cache take the same action at the same step.

With tensor parallelism every rank runs the same tokens through its share of the heads. So all of them see the same
steps in the same order and hold the same number of rows and bytes; but each sees the memory of its own machine. If each
acted on that alone, one would evict where the other keeps.

**When.** A collective has to be entered by all ranks, or those that enter it wait for ever. So the points at which
ranks exchange what they see follow from what is the same everywhere and from nothing else: the first step, steps of a
prompt's chunk and the one after, every so many tokens while decoding, a step whose predicted bytes pass the limit
that was *agreed* last, and the step after an action. A rank in trouble waits for the next such point (at most
``every`` tokens); a rank that has nothing to report takes part all the same. Bytes may come apart (an action that
failed on one rank, heads that do not divide evenly): then the overflow is no common sign any more and only the other
points count, until they are even again. Nor does an overflow count that the last decision left as it was; it would be
decided again in every step.

**What.** At such a point every rank states what it sees (:class:`Stance`) and all go on with the tightest of it.

**Whether all chose the same.** A choice is a function of the agreed stance and of the candidates, and those rest on more
than what is exchanged: measured profiles, what the backend was probed for, the room on a disk, a user's policy. So one
exchange is not enough. A second one compares digests of what was chosen, before anything is done; if they differ, or if
some rank could not choose, every rank keeps everything and warns. It costs what the first does, and only decisions pay.
"""

from __future__ import annotations

import hashlib
import math
import struct
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .actions import Action, Keep
from .errors import AgreementError, LuminaWarning, RanksApartError
from .peers import TIMEOUT_SECONDS, GroupPeers, Peers, Row

__all__ = ["CHUNK_TOKENS", "Agreement", "Settled", "Stance", "agreement", "decode", "encode", "tightest"]

#: Fewest tokens of a step that is taken for a chunk of a prompt; the check of a speculative draft has fewer.
CHUNK_TOKENS = 32


@dataclass(frozen=True)
class Stance:
    """What one rank sees, or what all agreed on. None is unknown, and looser than anything that is known."""

    limit: int | None = field(default=None, metadata={"tightest": min})  #: bytes that the cache may take
    held: int | None = field(default=None, metadata={"tightest": max})  #: bytes allocated now
    predicted: int | None = field(default=None, metadata={"tightest": max})  #: bytes after the coming step
    available: int | None = field(
        default=None, metadata={"tightest": min}
    )  #: bytes that the machine has left
    trouble: bool | None = field(default=None, metadata={"tightest": max})  #: memory pressure, or swapping
    price_of_time: float | None = field(default=None, metadata={"tightest": max})  #: λ_T of the score
    error_mean: float | None = field(
        default=None, metadata={"tightest": max}
    )  #: of ln(observed/predicted) peaks
    error_spread: float | None = field(default=None, metadata={"tightest": max})

    def __post_init__(self) -> None:
        for name in _WHOLE:
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int) and 0 <= number < 1 << 63):
                raise AgreementError(f"{name} is a number of bytes below 2**63 or None, not {number!r}")
        for name in _REAL:
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise AgreementError(f"{name} is a finite number or None, not {number!r}")

    @property
    def over(self) -> bool:
        """Whether the coming step passes the limit, as far as is known: whether there is something to decide."""
        return self.limit is not None and self.predicted is not None and self.predicted > self.limit


_WHOLE = ("limit", "held", "predicted", "available")
_REAL = ("price_of_time", "error_mean", "error_spread")
_NAMES = tuple(f.name for f in fields(Stance))
_PACKED = struct.Struct("<q" + "".join("d" if name in _REAL else "q" for name in _NAMES))


def tightest(stances: Sequence[Stance]) -> Stance:
    """Of every number the one that allows least: the smallest limit, the most bytes, the highest price."""
    found: dict[str, Any] = {}
    for f in fields(Stance):
        known = [number for one in stances if (number := getattr(one, f.name)) is not None]
        found[f.name] = f.metadata["tightest"](known) if known else None
    return Stance(**found)


def encode(stance: Stance) -> Row:
    """int64 (9,): one bit for each number that is known, then the numbers; floats by their bits, unknown ones as 0."""
    numbers = [getattr(stance, name) for name in _NAMES]
    known = sum(1 << i for i, number in enumerate(numbers) if number is not None)
    return np.frombuffer(_PACKED.pack(known, *(number or 0 for number in numbers)), dtype=np.int64)


def decode(row: Row) -> Stance:
    """The inverse of :func:`encode`."""
    known, *numbers = _PACKED.unpack(np.ascontiguousarray(row, dtype=np.int64).tobytes())
    stated = {
        name: number for i, (name, number) in enumerate(zip(_NAMES, numbers, strict=True)) if known >> i & 1
    }
    if "trouble" in stated:
        stated["trouble"] = bool(stated["trouble"])
    return Stance(**stated)


@dataclass(frozen=True)
class Settled:
    """What all ranks will do: the same on every one of them, ``why`` included but for what failed here."""

    stance: Stance  #: agreed
    action: Action  #: :class:`~lumina_cache.actions.Keep` if nothing was to be decided
    agreed: bool  #: False: the ranks chose differently, or some could not choose; all keep everything
    why: str


class Agreement:
    """Keeps the caches of several ranks alike. One for each cache; all calls from the thread that runs the model.

    Args:
        peers: the ranks; :func:`agreement` makes them of a group.
        every: tokens after which ranks exchange what they see while nothing else calls for it.

    Raises:
        AgreementError: ``every`` is less than one token.
    """

    def __init__(self, peers: Peers, every: int = 256) -> None:
        if every < 1:
            raise AgreementError(f"ranks cannot agree every {every!r} tokens; give 1 or more")
        self.peers = peers
        self.every = every
        self.stances: tuple[Stance, ...] = ()  #: of each rank at the last point
        self.agreed: Stance | None = None  #: at the last point; None before the first
        self._step = 0
        self._tokens = 0  # since the last point, the coming step's included
        self._coming = 0  # tokens of the step that is about to begin
        self._after_chunk = False  # what a chunk has filled is looked at before the next step
        self._acted = False
        self._vain = False  # the last decision changed nothing: the next step would only repeat it
        self._number = 0  # of exchanges

    def copy(self) -> Agreement:
        """For a copy of the cache, which every rank has to make."""
        new = Agreement(self.peers, self.every)
        new.__dict__.update(self.__dict__)
        return new

    # -- when -------------------------------------------------------------------------------------------------------

    def due(self, step: int, tokens: int, predicted_over_agreed_limit: bool) -> bool:
        """Whether the boundary before step number ``step``, of ``tokens`` tokens, is a point at which ranks agree.

        To be asked at the beginning of every step, and only there: what touches a cache between two steps (a progress
        line of rank 0, say) is not the same on all ranks.

        Args:
            predicted_over_agreed_limit: what :meth:`over` said of the bytes after this step.
        """
        if step != self._step:
            self._after_chunk = self._coming >= CHUNK_TOKENS
            self._step, self._coming = step, tokens
            self._tokens += tokens
        return (
            self.agreed is None
            or self._acted
            or self._after_chunk
            or tokens >= CHUNK_TOKENS
            or self._tokens >= self.every
            or (predicted_over_agreed_limit and self.even and not self._vain)
        )

    def over(self, predicted: int) -> bool:
        """Whether ``predicted`` bytes pass the limit that was agreed last."""
        limit = None if self.agreed is None else self.agreed.limit
        return limit is not None and predicted > limit

    @property
    def even(self) -> bool:
        """Whether all ranks held the same bytes at the last point, and predicted the same."""
        return len({(one.held, one.predicted) for one in self.stances}) == 1

    @property
    def limited_by(self) -> int | None:
        """The rank whose limit was agreed on, the first of equals; None while there is no limit."""
        limits = [(one.limit, rank) for rank, one in enumerate(self.stances) if one.limit is not None]
        return min(limits)[1] if limits else None

    # -- what -------------------------------------------------------------------------------------------------------

    def agree(self, mine: Stance) -> Stance:
        """What all ranks go on with. To be called where :meth:`due` says so, and nowhere else.

        Raises:
            RankLostError: some rank has not taken part. The cache is as it was; later calls raise the same at once.
            RanksApartError: the ranks are at different points.
        """
        rows = self._exchange(_STANCE, encode(mine))
        self.stances = tuple(decode(row) for row in rows)
        self.agreed = tightest(self.stances)
        self._tokens = 0
        self._acted = self._vain = self._after_chunk = False
        return self.agreed

    def confirm(self, action: Action | None) -> bool:
        """Whether every rank has chosen the same; None: this one could not choose.

        To be called after :meth:`agree` by every rank or by none: if and only if the agreed stance says so.

        Raises:
            RankLostError: as :meth:`agree`.
            RanksApartError: as :meth:`agree`.
        """
        digest = 0 if action is None else _digest(str(action))
        row = np.zeros(_WIDTH, dtype=np.int64)
        row[0] = digest
        chosen = self._exchange(_CHOICE, row)[:, 0]
        same = bool((chosen == digest).all()) and digest != 0
        # What was carried out is looked at before the next step, since it may have failed on one rank; but once bytes have
        # come apart overflow calls for no points, and there is nothing to make sure of.
        self._acted = same and action != Keep() and self.even
        self._vain = not same or action == Keep()
        return same

    def settle(self, mine: Stance, decide: Callable[[Stance], Action]) -> Settled:
        """Agree, decide if the agreed stance is over its limit, and keep everything unless all decided the same.

        Args:
            decide: chooses from the agreed stance, and from what is the same on all ranks.

        Raises:
            RankLostError: as :meth:`agree`.
            RanksApartError: as :meth:`agree`.
        """
        stance = self.agree(mine)
        if not stance.over:
            return Settled(stance, Keep(), True, f"nothing is over {self._limit()}")
        action, failed = None, "the ranks chose different actions, or another one could not choose"
        try:
            action = decide(stance)
        except Exception as error:  # the other ranks wait for this one's answer
            failed = f"this rank could not choose: {type(error).__name__}: {error}"
        if self.confirm(action) and action is not None:
            return Settled(stance, action, True, f"{stance.predicted} bytes pass {self._limit()}")
        chosen = "" if action is None else f", here {action}"
        warnings.warn(
            f"rank {self.peers.rank}: {failed}{chosen}; all ranks keep everything. Give every rank the same budget, policy "
            "and profile",
            LuminaWarning,
            stacklevel=2,
        )
        return Settled(stance, Keep(), False, failed)

    def _limit(self) -> str:
        by = self.limited_by
        return (
            "a limit: no rank has one"
            if by is None
            else f"{self.stances[by].limit} bytes, the limit of rank {by}"
        )

    def _exchange(self, kind: int, content: Row) -> Row:
        """The content of all ranks, (size, 9), once it is certain that all are at the same point."""
        self._number += 1
        point = (_MARK, kind, self._number, self._step)
        rows = self.peers.gather(np.concatenate([np.array(point, dtype=np.int64), content]))
        for rank, row in enumerate(rows):
            if tuple(int(n) for n in row[: len(point)]) != point:
                raise RanksApartError(
                    f"rank {self.peers.rank} is at exchange {point[2]} (step {point[3]}), rank {rank} sent {row.tolist()}: "
                    "ranks have to run the same tokens in the same steps, from one thread. Nothing was decided"
                )
        return rows[:, len(point) :]


_MARK = 0x6C75_6D69_6E61_01  # a row of this layout; anything else is a message of another collective
_STANCE, _CHOICE = 1, 2
_WIDTH = 1 + len(_NAMES)


def _digest(text: str) -> int:
    """63 bits of SHA-256, never 0."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 or 1


def agreement(group: Any, every: int = 256, timeout: float = TIMEOUT_SECONDS) -> Agreement | None:
    """An agreement of the ranks of ``group``, or None if it has one rank: nothing is exchanged then, nothing is paid.

    Args:
        group: what ``mx.distributed.init()`` returned; None: there is one rank.
        every: tokens after which ranks exchange what they see while nothing else calls for it.
        timeout: seconds that other ranks have to come to the same point.

    Raises:
        AgreementError: ``every`` or ``timeout`` is not positive.
    """
    if group is None or group.size() == 1:
        return None
    return Agreement(GroupPeers(group, timeout), every)
