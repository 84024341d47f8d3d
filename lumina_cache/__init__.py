"""An adaptive KV cache for MLX-LM that holds a memory budget and writes down every decision.

    cache = LuminaCache(model, budget="2GB")
    mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)

Names are imported when first used, so that importing the package does not load MLX (on Linux a faster BLAS has to be
loaded before it).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .actions import Action as Action
    from .actions import parse_action as parse_action
    from .apply import Applied as Applied
    from .audit import read_log as read_log
    from .cache import CacheView as CacheView
    from .cache import LuminaCache as LuminaCache
    from .errors import LuminaError as LuminaError
    from .errors import LuminaWarning as LuminaWarning
    from .policy import Candidate as Candidate
    from .policy import Decision as Decision
    from .policy import Policy as Policy
    from .policy import State as State

_HOME = {
    "Action": "actions",
    "Applied": "apply",
    "CacheView": "cache",
    "Candidate": "policy",
    "Decision": "policy",
    "LuminaCache": "cache",
    "LuminaError": "errors",
    "LuminaWarning": "errors",
    "Policy": "policy",
    "State": "policy",
    "parse_action": "actions",
    "read_log": "audit",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
