"""One way of carrying out a family of actions, as the catalogue lists it."""

from __future__ import annotations

from dataclasses import dataclass

from .backend.capabilities import ROW_CHOICE, ROW_GATHER, Capability, observed

__all__ = ["AFFINE_BITS", "AFFINE_GROUPS", "Method", "evict_method", "observed_method", "quant_method"]

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Method:
    """One way of carrying out a family of actions.

    ``bounded_by`` names the quantity that limits it; ``undoable`` says whether the rows can be had back as they were.
    ``bits`` and ``groups`` are what a codec accepts; empty for other families.
    """

    family: str
    name: str
    requires: frozenset[Capability]
    source: str
    formula: str
    lossy: bool = True
    undoable: bool = False
    bounded_by: str = "rows"
    bits: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()


def evict_method(name: str, source: str, formula: str, *needs: Capability, uniform: bool = False) -> Method:
    """A way of choosing rows; ``uniform`` where every head and layer keeps the same positions."""
    chosen = () if uniform else (ROW_CHOICE,)
    return Method("evict", name, frozenset({ROW_GATHER, *chosen, *needs}), source, formula)


def observed_method(name: str, source: str, formula: str, *needs: Capability) -> Method:
    """A way of choosing rows by what was seen of the attention, of which it keeps statistics of its own."""
    return evict_method(name, source, formula, *needs, observed(name))


def quant_method(
    name: str,
    source: str,
    formula: str,
    *needs: Capability,
    bits: tuple[int, ...] = AFFINE_BITS,
    groups: tuple[int, ...] = AFFINE_GROUPS,
) -> Method:
    """A way of storing rows; reading keys and values goes without saying."""
    return Method(
        "quant", name, frozenset(needs), source, formula, bounded_by="head_dim", bits=bits, groups=groups
    )
