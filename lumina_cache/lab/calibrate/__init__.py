"""Measure on a model what a policy has to know: what each action costs in quality and time, and which layers mind most.

Quality is measured with the yardstick of :mod:`lumina_cache.lab.evaluate`; ``docs/calibrate.md`` says what is measured,
what is assumed, and how far off the assumptions were found to be.
"""

from __future__ import annotations

from ...profile_home import find_profile, profile_for
from .run import Calibration, Progress, calibrate
from .settings import QUICK, Settings

__all__ = ["QUICK", "Calibration", "Progress", "Settings", "calibrate", "find_profile", "profile_for"]
