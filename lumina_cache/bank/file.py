"""The file of a query bank: safetensors, with everything that is no array as JSON in its metadata."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import QueryBankError
from .statistics import LayerStatistics, QueryBank

__all__ = ["KIND", "SCHEMA", "read_bank", "write_bank"]

KIND, SCHEMA = "lumina_cache query bank", 1

_ARRAYS = ("queries", "filters", "turned", "mean", "spread", "sinks")
_NEEDED = ("queries", "filters", "turned")


def write_bank(bank: QueryBank, path: Path) -> None:
    """Put ``bank`` in place whole, readable by nobody else; most of it as float16.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    arrays = {
        f"{name}/{what}": _stored(what, array)
        for name, one in bank.layers.items()
        for what in _ARRAYS
        if (array := getattr(one, what)) is not None
    }
    plain = {
        "kind": KIND,
        "schema": SCHEMA,
        "fingerprints": list(bank.fingerprints),
        "layers": {
            name: {"scale": one.scale, "rotation": one.rotation, "turned_at": one.turned_at}
            for name, one in bank.layers.items()
        },
        "refused": dict(bank.refused),
        "provenance": dict(bank.provenance),
    }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # mlx appends the suffix to names that lack it.
    descriptor, temporary = tempfile.mkstemp(prefix=".bank-", suffix=".safetensors", dir=path.parent)
    os.close(descriptor)
    try:
        mx.save_safetensors(temporary, arrays, {"lumina_cache": json.dumps(plain, allow_nan=False)})
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _stored(what: str, array: mx.array) -> mx.array:
    return array.astype(mx.float32 if what in ("turned", "sinks") else mx.float16)


def read_bank(path: Path) -> QueryBank:
    """The bank in ``path``.

    Raises:
        FileNotFoundError: there is none.
        QueryBankError: the file is damaged, or of another version of the format.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        arrays, metadata = loaded
        plain = json.loads(metadata["lumina_cache"])
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise QueryBankError(f"{path} is not a query bank: {error}. {_REMEDY}") from None
    if not isinstance(plain, dict) or plain.get("kind") != KIND or plain.get("schema") != SCHEMA:
        raise QueryBankError(
            f"{path} holds {plain.get('kind')!r}, schema {plain.get('schema')!r}, where {KIND!r}, schema {SCHEMA} is "
            f"read. {_REMEDY}"
            if isinstance(plain, dict)
            else f"{path} is not a query bank. {_REMEDY}"
        )
    try:
        layers = {name: _layer(name, said, arrays) for name, said in plain["layers"].items()}
        return QueryBank(
            tuple(map(str, plain["fingerprints"])), layers, plain["refused"], plain["provenance"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise QueryBankError(f"{path}: {type(error).__name__}: {error}. {_REMEDY}") from None


_REMEDY = "Run lumina-cache calibrate-queries again, or remove the file"


def _layer(name: str, said: dict[str, Any], arrays: dict[str, mx.array]) -> LayerStatistics:
    found = {what: arrays.get(f"{name}/{what}") for what in _ARRAYS}
    lacking = [what for what in _NEEDED if found[what] is None]
    if lacking:
        raise ValueError(f"{name} lacks {', '.join(lacking)}")
    found = {what: a if a is None else a.astype(mx.float32) for what, a in found.items()}
    one = LayerStatistics(
        scale=float(said["scale"]),
        rotation=str(said["rotation"]),
        turned_at=int(said["turned_at"]),
        **found,  # type: ignore[arg-type]
    )
    if one.queries.ndim != 3 or one.n_heads % one.n_kv_heads or one.filters.shape[-1] != one.dim:
        raise ValueError(f"{name}: queries {one.queries.shape} do not go with filters {one.filters.shape}")
    return one
