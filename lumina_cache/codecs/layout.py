"""How one layer's rows are stored: the codecs of keys and values, and how many of the newest rows stay dense.

Rows are *sealed* (encoded) in units from the front; what is left over behind them is the dense *tail*. The newest rows
draw much of the attention, so new ones are worth keeping dense for a while even without a residual window. The first
rows (attention sinks) can stay dense as well: their keys are unlike all others, and spoil groups that they are in.
Only packed rows, which mlx-lm's attention takes no dense ones beside, and rows that are not encoded have no tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .base import Codec
from .dense import Dense

__all__ = ["SEAL", "Layout"]

#: Fewest rows that are sealed at once where there is a tail: sealing one row per token would move it each time.
SEAL = 32


@dataclass(frozen=True)
class Layout:
    """Codecs of both sides, and how many of the newest (``residual``) and first (``sinks``) rows (tokens) stay dense."""

    keys: Codec = Dense()
    values: Codec = Dense()
    residual: int = 0
    sinks: int = 0

    @classmethod
    def both(cls, codec: Codec) -> Layout:
        """Keys and values in the same codec."""
        return cls(codec, codec)

    @cached_property
    def _hash(self) -> int:
        return hash((self.keys, self.values, self.residual, self.sinks))

    def __hash__(self) -> int:
        # Layouts are looked up some hundred times in every decision.
        return self._hash

    @cached_property
    def block(self) -> int:
        """Rows that are encoded together on one side or the other."""
        return max(self.keys.block, self.values.block)

    @cached_property
    def unit(self) -> int:
        """Rows are sealed in multiples of this."""
        by_itself = all(side.packed or side.code_bits is None for side in (self.keys, self.values))
        return 1 if by_itself and self.block == 1 and self.residual == 0 else max(self.block, SEAL)

    @cached_property
    def tail_capacity(self) -> int:
        """Rows allocated for the dense tail; 0 where there is none."""
        return 0 if self.unit == 1 else self.residual + self.unit

    @cached_property
    def dense(self) -> bool:
        """Whether nothing is encoded."""
        return self.keys.code_bits is None and self.values.code_bits is None

    @cached_property
    def packed(self) -> bool:
        """Whether mlx-lm's packed attention reads the rows as they are."""
        return self.keys.packed and self.keys == self.values and self.unit == 1 and self.sinks == 0

    @cached_property
    def decoded_for_chunks(self) -> bool:
        """Whether packed rows are decoded for a step of several tokens."""
        return self.packed and self.keys.decoded_for_chunks

    @cached_property
    def bits(self) -> int | None:
        """Fewest bits per element of either side; None where nothing is encoded."""
        return min((b for b in (self.keys.code_bits, self.values.code_bits) if b is not None), default=None)

    @cached_property
    def row_by_row(self) -> bool:
        """Whether rows may be stored one by one in another order than their positions', and decoded on fetch."""
        return self.block == 1 and not self.packed

    def sealable(self, tail: int) -> int:
        """How many of ``tail`` dense rows are to be sealed."""
        if self.unit == 1:
            return tail
        return max(0, tail - self.residual) // self.unit * self.unit

    def row_nbytes(self, key_width: int, value_width: int, itemsize: int) -> int:
        """Exact bytes of one sealed row: widths in elements over all heads, ``itemsize`` of the dense dtype in bytes."""
        return self.keys.row_nbytes(key_width, itemsize) + self.values.row_nbytes(value_width, itemsize)

    def why_not(self, key_dim: int, value_dim: int) -> str | None:
        """Why rows of these head dims cannot be stored like this; None if they can."""
        return self.keys.why_not(key_dim) or self.values.why_not(value_dim)

    def __str__(self) -> str:
        sides = str(self.keys) if self.keys == self.values else f"keys {self.keys}, values {self.values}"
        dense = [f"{n} {which}" for n, which in ((self.sinks, "first"), (self.residual, "newest")) if n]
        return f"{sides}, {' and '.join(dense)} rows dense" if dense else sides
