"""The codes of :mod:`.kivi`, :mod:`.hadamard` and :mod:`.kivi_hadamard`, attended to as codes and never decoded.

Rows are stored as by the family of the same name; what differs is what is asked of the backend: that attention is ours to
compute (:mod:`lumina_cache.backend.packed`), so that a step takes neither the time nor the memory of decoded rows.
"""

from __future__ import annotations

from dataclasses import replace

from ..backend.capabilities import DENSE_REENCODE, OWN_PACKED_ATTENTION, QUERIES
from . import hadamard, kivi, kivi_hadamard
from .base import CodecFamily

__all__ = ["FAMILIES"]


def _packed(family: CodecFamily, formula: str) -> CodecFamily:
    method = family.method
    needs = method.requires - {DENSE_REENCODE} | {QUERIES, OWN_PACKED_ATTENTION}
    return replace(
        family, method=replace(method, name=f"{method.name}_packed", requires=needs, formula=formula)
    )


FAMILIES = (
    _packed(kivi.FAMILY, "as kivi, attention over the codes"),
    _packed(hadamard.FAMILY, "as hadamard, the query rotated instead"),
    _packed(kivi_hadamard.FAMILY, "as kivi_hadamard, attention over the codes"),
)
