"""A query bank: what a model's queries are like, captured once, so that rows can be ranked by keys and values alone."""

from __future__ import annotations

from .banks import NO_BANK, Banks, Foreseen, banks_of
from .file import read_bank, write_bank
from .home import bank_directory, bank_path, find_bank
from .statistics import LayerStatistics, QueryBank

__all__ = [
    "NO_BANK",
    "Banks",
    "Foreseen",
    "LayerStatistics",
    "QueryBank",
    "bank_directory",
    "bank_path",
    "banks_of",
    "find_bank",
    "read_bank",
    "write_bank",
]
