"""Scorers that need queries or weights. Adding one is a file here, a line in :data:`OBSERVED`, a row in the docs' table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .base import Attended, ObservedScorer, Rotation, Statistics
from .expected_attention import ExpectedAttention
from .h2o import H2O, H2OMean
from .snapkv import SnapKV
from .tova import TOVA
from .vatp import VATP

__all__ = [
    "H2O",
    "OBSERVED",
    "TOVA",
    "VATP",
    "Attended",
    "ExpectedAttention",
    "H2OMean",
    "ObservedScorer",
    "Rotation",
    "SnapKV",
    "Statistics",
]

_ALL: tuple[type[ObservedScorer], ...] = (H2O, H2OMean, VATP, SnapKV, TOVA, ExpectedAttention)

#: Scorers by the name they have in an action's text form.
OBSERVED: Mapping[str, type[ObservedScorer]] = MappingProxyType({one.method.name: one for one in _ALL})
