"""Where calibrated figures are kept, and which of them belong to a model: one file per model, device and versions.

Files lie in ``$XDG_STATE_HOME/lumina_cache/profiles`` (by default ``~/.local/state/…``), readable by nobody else. Their
provenance carries the key that they were made under; under any other key they are not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from .backend.installation import device_kind
from .backend.interface import mlx_lm_version, mlx_version
from .errors import LuminaWarning, ProfileFormatError
from .fingerprint import fingerprint
from .profile import Profile, default_profile, read_profile

__all__ = ["find_profile", "profile_directory", "profile_for", "profile_key", "profile_path", "write_profile"]


def profile_directory() -> Path:
    """Where ``lumina-cache calibrate`` puts what it measured."""
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    return base / "lumina_cache" / "profiles"


def profile_key(model: Any) -> dict[str, str]:
    """Everything that figures belong to: a difference in any of it means other figures."""
    return {
        "fingerprint": fingerprint(model),
        "device": device_kind(),
        "device_name": _device_name(),
        "mlx": mlx_version(),
        "mlx_lm": mlx_lm_version,
    }


def profile_path(key: Mapping[str, str]) -> Path:
    """The file of the figures made under ``key``."""
    digest = hashlib.blake2b(json.dumps(dict(key), sort_keys=True).encode(), digest_size=8).hexdigest()
    return profile_directory() / f"{key['fingerprint']}-{key['device']}-{digest}.json"


def find_profile(model: Any) -> Profile | None:
    """The figures measured on this very model, device and versions; None if there are none.

    Raises:
        ProfileFormatError: there is a file, but it is damaged or of another version of the format.
    """
    key = profile_key(model)
    path = profile_path(key)
    try:
        found = read_profile(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProfileFormatError(f"cannot read {path}: {error.strerror or error}") from error
    return found if found.provenance.get("key") == key else None


def profile_for(model: Any) -> Profile:
    """The figures to decide by: the model's own, else those that ship with the library, borrowed.

    A damaged file is as good as none, with a warning that says how to mend it.
    """
    try:
        found = find_profile(model)
    except (AttributeError, TypeError):  # not a module of mlx: nothing says which model it is
        return default_profile()
    except ProfileFormatError as error:
        warnings.warn(
            f"figures of another model are used: {error}. Run lumina-cache calibrate again, or remove the file",
            LuminaWarning,
            stacklevel=2,
        )
        found = None
    if found is not None:
        return found
    shipped = default_profile()
    own = shipped.provenance.get("key") == profile_key(model)
    return replace(shipped, borrowed=not own)


def write_profile(profile: Profile, path: Path) -> None:
    """Put ``profile`` in place whole, readable by nobody else.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = _text(profile.to_record())
    descriptor, temporary = tempfile.mkstemp(prefix=".profile-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _text(record: Mapping[str, Any]) -> str:
    """JSON with a line for each codec, scorer and point, so that two files can be compared by eye."""

    def compact(value: Any) -> str:
        return json.dumps(value, allow_nan=False, separators=(", ", ": "))

    def lines(value: Any, indent: str) -> str:
        # One level of a list of objects, and two of a mapping, are laid out; what is inside stays on its line.
        if isinstance(value, Mapping) and value:
            depth = len(indent) < 2
            inner = (
                f"{indent} {json.dumps(k)}: {lines(v, indent + ' ') if depth else compact(v)}"
                for k, v in value.items()
            )
            return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return "[\n" + ",\n".join(f"{indent} {compact(v)}" for v in value) + f"\n{indent}]"
        return compact(value)

    return lines(record, "") + "\n"


def _device_name() -> str:
    try:
        return str(mx.device_info().get("device_name", "unknown"))
    except Exception:
        return "unknown"
