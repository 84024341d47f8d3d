"""Where query banks are kept, and which of them belongs to a model: one file per model, named after its fingerprint.

Files lie in ``$XDG_STATE_HOME/lumina_cache/queries`` (by default ``~/.local/state/…``), readable by nobody else. Every file
carries the fingerprints that it was made for, and is used for no other model. A bank of the embedded model ships with the
library.
"""

from __future__ import annotations

import os
from importlib.resources import as_file, files
from pathlib import Path

from ..errors import QueryBankError
from .file import read_bank
from .statistics import QueryBank

__all__ = ["SHIPPED", "bank_directory", "bank_path", "find_bank", "required_for"]

SHIPPED = "smollm2-135m.safetensors"


def bank_directory() -> Path:
    """Where ``lumina-cache calibrate-queries`` puts what it captured."""
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    return base / "lumina_cache" / "queries"


def bank_path(fingerprint: str) -> Path:
    """The file of the model of that fingerprint."""
    return bank_directory() / f"{fingerprint}.safetensors"


def find_bank(fingerprint: str) -> QueryBank | None:
    """The bank captured from this very model, or the one that ships with the library if it is of this model; else None.

    Raises:
        QueryBankError: there is a file under the model's name, but it is damaged, or of another model.
    """
    path = bank_path(fingerprint)
    if path.exists():
        return required_for(read_bank(path), fingerprint, str(path))
    resource = files("lumina_cache").joinpath("data", "queries", SHIPPED)
    if not resource.is_file():
        return None
    with as_file(resource) as shipped:
        bank = read_bank(shipped)
    return bank if fingerprint in bank.fingerprints else None


def required_for(bank: QueryBank, fingerprint: str, source: str) -> QueryBank:
    """``bank``, if it was captured from the model of that fingerprint.

    Raises:
        QueryBankError: it was not.
    """
    if fingerprint not in bank.fingerprints:
        raise QueryBankError(
            f"{source} was captured from {', '.join(bank.fingerprints)}, and this model is {fingerprint}: queries of "
            "another model say nothing about its keys. Run lumina-cache calibrate-queries with this model"
        )
    return bank
