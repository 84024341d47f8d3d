"""The yardstick: what an action on the cache costs in quality, bytes and time, measured against the full cache.

For every document the prompt is read once; each action is applied to a copy of the cache, and the same tokens go through
the copy and the full cache. All actions so see the same state. Sections 5 and 6 of the design give the reasons; the page
``docs/eval.md`` says what is measured, on what, and what it does not show.
"""

from __future__ import annotations

from .documents import EvalDocument, select, user_texts
from .plan import QUICK, Plan
from .results import read_result
from .run import Progress, evaluate
from .subjects import parse_subject, parse_subjects

__all__ = [
    "QUICK",
    "EvalDocument",
    "Plan",
    "Progress",
    "evaluate",
    "parse_subject",
    "parse_subjects",
    "read_result",
    "select",
    "user_texts",
]
