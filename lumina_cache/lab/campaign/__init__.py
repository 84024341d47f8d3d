"""Campaigns: many actions on many documents, each carried out or simulated, into one store of observations.

A plan (:mod:`.plan`) is a TOML file. :func:`campaign` measures what is in it and goes on where it was stopped; the page
``docs/campaign.md`` says what is measured and how to read it.
"""

from __future__ import annotations

from .plan import CampaignPlan, parse_plan, read_plan
from .run import Outcome, Progress, campaign
from .trial import Trial, needs
from .unit import Failure

__all__ = [
    "CampaignPlan",
    "Failure",
    "Outcome",
    "Progress",
    "Trial",
    "campaign",
    "needs",
    "parse_plan",
    "read_plan",
]
