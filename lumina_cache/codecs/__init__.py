"""Codecs: how rows are stored. Adding one is a file here, a line in :data:`FAMILIES` and a row in the docs' table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import affine, affine_fetch, affine_steps, formats, hadamard, kivi, kivi_hadamard, own_packed
from .affine import Affine, AffineFetch, AffineSteps
from .base import Codec, CodecFamily, Sides
from .dense import Dense
from .formats import ElementFormat
from .hadamard import Hadamard
from .kivi import KiviKeys
from .layout import Layout

__all__ = [
    "CODECS",
    "Affine",
    "AffineFetch",
    "AffineSteps",
    "Codec",
    "CodecFamily",
    "Dense",
    "ElementFormat",
    "Hadamard",
    "KiviKeys",
    "Layout",
    "Sides",
]

FAMILIES: tuple[CodecFamily, ...] = (
    affine.FAMILY,
    affine_fetch.FAMILY,
    affine_steps.FAMILY,
    hadamard.FAMILY,
    kivi.FAMILY,
    kivi_hadamard.FAMILY,
    *own_packed.FAMILIES,
    *formats.FAMILIES,
)

#: Codecs by the name they have in an action's text form.
CODECS: Mapping[str, CodecFamily] = MappingProxyType({family.method.name: family for family in FAMILIES})
