"""What a scorer is that needs a query bank: it ranks rows by what the model's queries are usually like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import mlx.core as mx

from ...method import Method
from ..observed import Rotation
from ..observed.weights import BLOCK_BYTES

__all__ = ["AHEAD", "BankedScorer", "Foreseen", "Known", "blocks"]

#: Positions behind the newest row at which queries are expected.
AHEAD = 128


class Known(Protocol):
    """The statistics of one layer's queries before rotation, see ``bank.LayerStatistics``."""

    @property
    def filters(self) -> mx.array: ...
    @property
    def mean(self) -> mx.array | None: ...
    @property
    def spread(self) -> mx.array | None: ...
    @property
    def scale(self) -> float: ...
    @property
    def sinks(self) -> mx.array | None: ...


class Foreseen(Protocol):
    """What is known of the queries of one layer, and how the model rotates them, see ``bank.Foreseen``."""

    @property
    def statistics(self) -> Known: ...
    @property
    def rotation(self) -> Rotation: ...

    def ahead(self, position: int, width: int) -> mx.array: ...


@dataclass(frozen=True)
class BankedScorer(ABC):
    """Ranks rows by queries captured beforehand. A value without state: what is known of the layer is passed in."""

    method: ClassVar[Method]
    #: Whether it looks at keys and values at all: every scorer of this kind does.
    reads_rows: ClassVar[bool] = True
    #: Float32 copies of keys or of values that scoring makes for a while, at most, where the rows are float32.
    copies: ClassVar[float] = 0.0
    #: Bytes that it makes besides, whatever the number of rows.
    scratch: ClassVar[int] = 0
    #: Whether scores are amounts of attention: not negative, so that sums and shares of them mean something.
    in_amounts: ClassVar[bool] = True

    @abstractmethod
    def scores(self, known: Foreseen, keys: mx.array, values: mx.array, offset: int) -> mx.array:
        """How much each row is worth keeping: float32 (B, H, T), higher is better. A pure function.

        Args:
            known: of the queries of this layer.
            keys: (B, H, T, D), as they are cached (rotated by their positions).
            values: (B, H, T, Dv).
            offset: the position that the next token will have.
        """


def blocks(
    queries: mx.array, keys: mx.array, scale: float, sinks: mx.array | None, limit: int = BLOCK_BYTES
) -> Iterator[mx.array]:
    """Weights softmax(scale·q·K) of all rows, as (B, H, n, T) float32 for a few queries of all heads of a group at a time.

    Args:
        queries: (1, Hq, N, D), at positions behind all rows.
        keys: (B, H, T, D), H dividing Hq.
        sinks: (Hq,) logits of a row without value, in the sum of the softmax only.
        limit: bytes of the weights of one block, if one query's take no more.
    """
    (_, n_heads, n, dim), (batch, heads, rows, _) = queries.shape, keys.shape
    group = n_heads // heads
    size = max(1, limit // (4 * batch * n_heads * rows))
    keys = keys.swapaxes(-1, -2)
    for first in range(0, n, size):
        some = queries[:, :, first : first + size]
        scores = (scale * some.reshape(1, heads, -1, dim) @ keys).astype(mx.float32)
        if sinks is None:
            yield mx.softmax(scores, axis=-1, precise=True)
        else:
            one = mx.repeat(sinks.astype(mx.float32).reshape(1, heads, group, 1), some.shape[2], axis=2)
            one = one.reshape(1, heads, -1, 1)
            yield mx.exp(scores - mx.logaddexp(mx.logsumexp(scores, axis=-1, keepdims=True), one))
