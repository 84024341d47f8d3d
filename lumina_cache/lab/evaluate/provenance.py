"""Where figures come from: model, machine, versions, code."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...backend.installation import probe_installation
from ..blas import preload_openblas
from ..models import LoadedModel

__all__ = ["code_fingerprint", "conditions", "provenance"]

_PACKAGE = Path(__file__).resolve().parents[2]


def conditions(loaded: LoadedModel) -> dict[str, Any]:
    """What figures depend on besides plan and documents; records made under others are not mixed in."""
    installation = probe_installation()
    return {
        "model": {
            "name": loaded.name,
            "source": loaded.source,
            "fingerprint": loaded.fingerprint,
            "dtype": str(loaded.dtype),
        },
        "device": installation.device,
        "mlx": installation.mlx,
        "mlx_lm": installation.mlx_lm,
        "lumina_cache": __version__,
    }


def provenance() -> dict[str, Any]:
    """The machine and the state of the code; unknown is None, with the reason in ``unknown``."""
    commit, reason = _commit()
    blas = preload_openblas()
    record: dict[str, Any] = {
        "installation": probe_installation().to_record(),
        "blas": str(blas) if probe_installation().device == "cpu" else None,
        "commit": commit,
        "code": code_fingerprint(),
        "unknown": {},
    }
    if commit is None:
        record["unknown"]["commit"] = reason
    if record["blas"] is None:
        record["unknown"]["blas"] = "only the CPU backend uses one"
    return record


def code_fingerprint() -> str:
    """16 hexadecimal digits that change with any source file of this package."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(_PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _commit() -> tuple[str | None, str]:
    if not (_PACKAGE.parent / ".git").exists():
        return None, "the package is not in a checkout of its repository"
    try:
        done = subprocess.run(
            [
                "git",
                "-C",
                str(_PACKAGE.parent),
                "describe",
                "--always",
                "--dirty",
                "--abbrev=40",
                "--exclude=*",
            ],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"git could not be asked: {type(error).__name__}"
    return done.stdout.strip(), ""
