"""``lumina-cache calibrate-queries``: what the command does once its options are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ...bank import QueryBank, bank_path, banks_of, write_bank
from ...errors import QueryBankError
from ..evaluate import user_texts
from ..models import load_model
from .capture import CaptureSettings, capture
from .texts import own_texts

__all__ = ["calibrate_queries_command"]


def calibrate_queries_command(
    *, model: str | None, texts: Sequence[Path], settings: CaptureSettings, out: Path | None, as_json: bool
) -> None:
    """Capture a bank, put it in place and say what it holds. Progress goes to standard error."""
    read = user_texts(texts) if texts else own_texts()
    console = Console(stderr=True)
    with console.status("loading the model") as status:
        loaded = load_model(model)
        bank = capture(
            loaded,
            read,
            settings,
            lambda done, total, what: status.update(f"document {min(done + 1, total)} of {total}: {what}"),
        )
    path = bank_path(loaded.fingerprint) if out is None else out
    try:
        write_bank(bank, path)
    except OSError as error:
        raise QueryBankError(f"cannot write {path}: {error.strerror or error}") from error
    banks = banks_of(loaded.model)
    if banks is not None:
        banks.forget()
    print(json.dumps(_record(bank, path)) if as_json else _text(bank, path))


def _record(bank: QueryBank, path: Path) -> dict[str, object]:
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "fingerprints": list(bank.fingerprints),
        "layers": {
            name: {"heads": one.n_heads, "queries": one.queries.shape[1], "rotation": one.rotation}
            for name, one in bank.layers.items()
        },
        "refused": dict(bank.refused),
        "provenance": dict(bank.provenance),
    }


def _text(bank: QueryBank, path: Path) -> str:
    first = next(iter(bank.layers.values()))
    documents = bank.provenance["documents"]
    lines = [
        f"query bank: {path} ({path.stat().st_size / 1e6:.2f} MB)",
        f"{len(bank.layers)} layers, {first.queries.shape[1]} queries for each of {first.n_heads} heads, from "
        f"{sum(d['tokens'] for d in documents)} tokens in {len(documents)} documents",
    ]
    against: dict[str, list[str]] = {}
    for name, why in bank.refused.items():
        against.setdefault(why, []).append(name)
    lines += [f"not captured: {', '.join(names)}: {why}" for why, names in against.items()]
    return "\n".join(lines)
