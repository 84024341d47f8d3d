"""What a store says of the campaign that filled it: enough to repeat it, and to go on where it stopped.

``conditions`` are what figures depend on; a store takes observations under one set of them only. ``units`` tells which
documents are done: each is entered when its observations are on the disk, so that whatever is not there is done again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...bank import find_bank
from ...errors import CampaignError
from ...gap.store import Store
from ..evaluate.documents import EvalDocument, Shortage
from ..evaluate.provenance import code_fingerprint, conditions, provenance
from ..models import LoadedModel
from .observe import machine_name, now
from .plan import CampaignPlan

__all__ = ["KIND", "Manifest", "locked", "made_under"]

KIND, SCHEMA = "lumina-cache campaign", 1


def made_under(
    plan: CampaignPlan, models: Sequence[LoadedModel], documents: Mapping[str, Sequence[EvalDocument]]
) -> dict[str, Any]:
    """Everything that figures depend on: plan, models, machine, versions, code, and the documents' hashes."""
    each = [conditions(model) for model in models]
    return {
        "plan": plan.to_record(),
        "models": [
            {**one.pop("model"), "query_bank": _bank_of(model)}
            for one, model in zip(each, models, strict=True)
        ],
        **each[0],
        "machine": machine_name(),
        "code": code_fingerprint(),
        "documents": {model: [d.to_record() for d in some] for model, some in documents.items()},
    }


def _bank_of(model: LoadedModel) -> dict[str, Any] | None:
    """Which stored queries rows of ``model`` are ranked by, and what they were captured from; None if there are none."""
    bank = find_bank(model.fingerprint)
    if bank is None:
        return None
    digest = hashlib.sha256()
    for name, layer in sorted(bank.layers.items()):
        digest.update(name.encode())
        for key, value in sorted(vars(layer).items()):
            if isinstance(value, mx.array):
                digest.update(key.encode() + np.array(value.astype(mx.float32)).tobytes())
    return {"sha256": digest.hexdigest(), "provenance": dict(bank.provenance)}


class Manifest:
    """The manifest of a store, read and written."""

    def __init__(self, store: Store, found: dict[str, Any]) -> None:
        self._store = store
        self.record = found

    @classmethod
    def of(cls, store: Store, conditions: Mapping[str, Any], lacking: Sequence[Shortage]) -> Manifest:
        """That of the store, or a new one.

        Raises:
            CampaignError: the store holds another campaign; says what differs.
        """
        wanted = json.loads(json.dumps(conditions))
        found = store.manifest
        if found is None:
            if any(store.parts(state)[0] for state in ("real", "simulated", "backend_infeasible")):
                raise CampaignError(
                    f"{store.path} holds observations, but no manifest that says how they were made: give another --out"
                )
            text = json.dumps(wanted, sort_keys=True)
            return cls(store, {
                "kind": KIND, "schema": SCHEMA,
                "run": f"{wanted['plan']['name']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}",
                "started": now(), "finished": None,
                "conditions": wanted,
                "provenance": provenance(),
                "lacking": [vars(one) for one in lacking],
                "units": {},
            })  # fmt: skip
        if found.get("kind") != KIND or found.get("schema") != SCHEMA:
            raise CampaignError(
                f"{store.path} was not filled by a campaign of this version: give another --out"
            )
        differing = list(_differences(found["conditions"], wanted))
        if differing:
            more = f", and {len(differing) - 4} more" if len(differing) > 4 else ""
            raise CampaignError(
                f"{store.path} holds another campaign ({'; '.join(differing[:4])}{more}): give another --out, or remove it"
            )
        return cls(store, found)

    @property
    def run(self) -> str:
        """Identity of the campaign; the same for the same conditions."""
        return str(self.record["run"])

    def done(self, unit: str) -> bool:
        return unit in self.record["units"]

    def enter(self, unit: str, about: Mapping[str, Any]) -> None:
        """Say that a unit is done, after its observations are on the disk."""
        self.record["units"][unit] = dict(about)
        self.write()

    def finish(self) -> None:
        """Say that every unit is done."""
        if self.record["finished"] is None:
            self.record["finished"] = now()
            self.write()

    def write(self) -> None:
        self._store.write_manifest(self.record)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a store alone, and clear away what a writer that was killed left unfinished.

    Raises:
        CampaignError: another campaign is filling it, or the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CampaignError(f"cannot use {path} as a store: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CampaignError(
                f"another campaign is filling {path}: wait for it, or give another --out"
            ) from None
        for left in path.rglob("*.unfinished"):
            left.unlink()
        yield
    finally:
        os.close(descriptor)


def _differences(there: Any, here: Any, where: str = "") -> Iterator[str]:
    """Places where two records differ, with both values where they are short."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys((*there, *here)):
            yield from _differences(there.get(key), here.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for i, (one, other) in enumerate(zip(there, here, strict=True)):
            yield from _differences(one, other, f"{where}[{i}]")
    elif isinstance(there, list) and isinstance(here, list):
        yield f"{where}: {len(there)} entries there, {len(here)} here"
    elif there != here:
        yield f"{where}: {_short(there)} there, {_short(here)} here"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
