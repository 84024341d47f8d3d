"""Capturing a query bank: ``lumina-cache calibrate-queries``."""

from __future__ import annotations

from .capture import CaptureSettings, capture
from .texts import own_texts

__all__ = ["CaptureSettings", "capture", "own_texts"]
