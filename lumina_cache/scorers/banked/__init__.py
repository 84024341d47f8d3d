"""Scorers that need a query bank. Adding one is a file here, a line in :data:`BANKED`, a row in the docs' table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .base import BankedScorer
from .expected_bank import ExpectedBank
from .q_filters import QFilters
from .query_bank import QueryBank
from .query_bank_values import QueryBankValues

__all__ = ["BANKED", "BankedScorer", "ExpectedBank", "QFilters", "QueryBank", "QueryBankValues"]

_ALL: tuple[type[BankedScorer], ...] = (QFilters, QueryBank, QueryBankValues, ExpectedBank)

#: Scorers by the name they have in an action's text form.
BANKED: Mapping[str, type[BankedScorer]] = MappingProxyType({one.method.name: one for one in _ALL})
