"""Codecs: how rows are stored. Adding one is a file here, a line in :data:`CODECS` and a row in the docs' table."""

from __future__ import annotations

from collections.abc import Callable

from .affine import Affine
from .base import Codec
from .dense import Dense

__all__ = ["CODECS", "Affine", "Codec", "Dense"]

#: Codecs by the name they have in an action's text form; made from bits and group size.
CODECS: dict[str, Callable[[int, int], Codec]] = {"affine": Affine}
