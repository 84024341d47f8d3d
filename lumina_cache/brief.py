"""Actions for people to read: a plan by what it does, and to which layers, instead of one range after the other."""

from __future__ import annotations

from .actions import Plan, parse_action
from .errors import ActionSyntaxError

__all__ = ["brief"]


def brief(text: str) -> str:
    """``0-1:A;3-3:B;4-6:A`` as ``A in layers 0-1,4-6; B in layer 3``; anything else as it is."""
    try:
        action = parse_action(text)
    except ActionSyntaxError:  # of another version
        return text
    if not isinstance(action, Plan):
        return text
    places: dict[str, list[str]] = {}
    several: set[str] = set()
    for (first, last), part in action.assignments:
        name = str(part)
        if name in places or first != last:
            several.add(name)
        places.setdefault(name, []).append(str(first) if first == last else f"{first}-{last}")
    return "; ".join(
        f"{name} in layer{'s' if name in several else ''} {','.join(at)}" for name, at in places.items()
    )
