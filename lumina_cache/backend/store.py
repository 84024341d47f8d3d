"""Results of probes, kept between processes for as long as the installation and the model are the same.

One small JSON file per subject in the user's cache directory, readable by nobody else. It carries the key that it was
made under (versions, device, configuration of the model); under any other key it is probed anew and written over, so
that files do not pile up. A file that is damaged, or a directory that cannot be written to, costs a probe and
nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from .._version import __version__
from .disk import default_directory
from .installation import device_kind
from .interface import mlx_lm_version, mlx_version

__all__ = ["ProbeStore", "configuration_fingerprint"]

#: Changes whenever a probe would find something else on the same installation, or writes it down differently.
SCHEMA = 1

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ProbeStore:
    """Where results are kept. ``directory`` None: nothing is read or written."""

    directory: Path | None = dataclasses.field(default_factory=default_directory)

    def remembered(
        self,
        subject: str,
        make: Callable[[], T],
        *,
        to_record: Callable[[T], Any],
        from_record: Callable[[Any], T],
        configuration: str = "",
        again: bool = False,
    ) -> tuple[T, bool]:
        """The result for ``subject``, and whether it was already there.

        Args:
            subject: what was probed; names the file.
            make: probes. Called when nothing usable is stored, or ``again``.
            to_record, from_record: to and from values that JSON can carry.
            configuration: what else the result depends on, such as :func:`configuration_fingerprint`.
        """
        key = self.key(configuration)
        if not again:
            stored = self._read(subject, key)
            if stored is not None:
                with contextlib.suppress(Exception):  # a value of another shape is as good as none
                    return from_record(stored["value"]), True
        value = make()
        self._write(subject, {"key": key, "value": to_record(value)})
        return value, False

    def key(self, configuration: str = "") -> dict[str, str | int]:
        """Everything that a result depends on; a difference in any of it means probing again."""
        return {
            "schema": SCHEMA,
            "lumina_cache": __version__,
            "mlx": mlx_version(),
            "mlx_lm": mlx_lm_version,
            "device": device_kind(),
            "device_name": str(_device_name()),
            "configuration": configuration,
        }

    def path(self, subject: str) -> Path | None:
        if self.directory is None:
            return None
        digest = hashlib.blake2b(f"{device_kind()} {subject}".encode(), digest_size=8).hexdigest()
        return self.directory / f"probe-{digest}.json"

    def _read(self, subject: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        path = self.path(subject)
        try:
            found = None if path is None else json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        usable = isinstance(found, dict) and found.get("key") == key and "value" in found
        return found if usable else None

    def _write(self, subject: str, contents: Mapping[str, Any]) -> None:
        path = self.path(subject)
        if path is None:
            return
        text = json.dumps(contents)
        temporary: str | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Made with 0600 and put in place whole: a reader never sees half a file.
            descriptor, temporary = tempfile.mkstemp(prefix=".probe-", dir=path.parent)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except OSError:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)


def configuration_fingerprint(model: Any) -> str:
    """16 hexadecimal digits that change with a model's class, configuration, and parameters' names, shapes or dtypes.

    Weights do not matter to what a cache can do, so none is read.
    """
    args = getattr(model, "args", None)
    known = dataclasses.is_dataclass(args) and not isinstance(args, type)
    parameters = tree_flatten(model.parameters()) if hasattr(model, "parameters") else []
    header = [
        f"{type(model).__module__}.{type(model).__qualname__}",
        dataclasses.asdict(args) if known else None,  # type: ignore[arg-type]
        sorted((name, list(array.shape), str(array.dtype)) for name, array in parameters),
    ]
    text = json.dumps(header, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _device_name() -> str | int:
    try:
        return mx.device_info().get("device_name", "unknown")
    except Exception:
        return "unknown"
