"""Codecs: how rows are stored. Adding one is a file here, a line in :data:`FAMILIES` and a row in the docs' table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import affine, affine_fetch
from .affine import Affine, AffineFetch
from .base import Codec, CodecFamily, Sides
from .dense import Dense
from .layout import Layout

__all__ = ["CODECS", "Affine", "AffineFetch", "Codec", "CodecFamily", "Dense", "Layout", "Sides"]

FAMILIES: tuple[CodecFamily, ...] = (
    affine.FAMILY,
    affine_fetch.FAMILY,
)

#: Codecs by the name they have in an action's text form.
CODECS: Mapping[str, CodecFamily] = MappingProxyType({family.method.name: family for family in FAMILIES})
