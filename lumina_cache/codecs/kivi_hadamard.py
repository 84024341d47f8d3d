"""Keys in groups along the tokens, rotated values, and the attention sinks dense.

Keys are stored as in :mod:`.kivi`, one channel at a time, because some channels are large for every token. Values have no
such channels; rotated as in :mod:`.hadamard` (QuaRot, arXiv:2404.00456) they lose least. The first rows (attention sinks,
arXiv:2309.17453) have keys unlike all others: in a group along the tokens one of them widens the step for all, so they
stay dense. The combination is this library's own; each part is published.
"""

from __future__ import annotations

from ..backend.capabilities import DENSE_REENCODE
from ..method import quant_method
from .base import CodecFamily, Sides
from .hadamard import Hadamard
from .kivi import KiviKeys

__all__ = ["FAMILY"]

_LARGEST_VALUE_GROUP = 64

#: First rows that stay dense by default, as many as evictions keep.
SINKS = 4


def _make(key_bits: int, value_bits: int, group_size: int) -> Sides:
    return Sides(KiviKeys(key_bits, group_size), Hadamard(value_bits, min(group_size, _LARGEST_VALUE_GROUP)))


FAMILY = CodecFamily(
    quant_method(
        "kivi_hadamard",
        "KIVI, arXiv:2402.02750, and QuaRot, arXiv:2404.00456, combined here",
        "keys as kivi, values as hadamard, sinks dense",
        DENSE_REENCODE,
    ),
    _make,
    sinks=SINKS,
)
