"""What an action costs in quality, until a calibration on the user's own model says better.

Mean KL divergence (nats per token) of the teacher-forced continuation of a 1,024-token text against the full cache,
measured once with SmolLM2-135M-Instruct in float32 (4-bit weights dequantised, six documents, one domain; sinks 4 and
the last 32 tokens protected). Figures borrowed from another model are an estimate, so whatever is computed from
them is *simulated*, and says ``borrowed``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .estimate import Held

__all__ = ["SOURCE", "Quality", "expected_kl"]

SOURCE = "borrowed: SmolLM2-135M-Instruct, 1,024-token prose, 6 documents"

#: codec, bits → KL at groups of 64 (KIVI: groups of 32 and a dense tail of 32 rows).
_CODEC_KL: dict[tuple[str, int], float] = {
    ("affine", 8): 0.0001,
    ("affine", 4): 0.0184,
    ("affine", 3): 0.0998,
    ("hadamard", 4): 0.0072,
    ("hadamard", 3): 0.0337,
    ("kivi", 4): 0.0077,
    ("kivi", 2): 0.207,
}

#: scorer → KL with half and with a quarter of the rows.
_EVICTION_KL: dict[str, tuple[float, float]] = {
    "sinks_window": (0.028, 0.062),
    "keydiff": (0.045, 0.123),
    "key_norm": (0.110, 0.193),
    "snapkv": (0.029, 0.067),
}


@dataclass(frozen=True)
class Quality:
    """An expected KL in nats per token with where it comes from, or None with the reason why there is none."""

    kl: float | None
    source: str


def expected_kl(layers: tuple[Held, ...], codec: str | None, scorer: str | None) -> Quality:
    """Expected mean KL of a cache held like this for the rest of the generation.

    Args:
        layers: the storage *after* the action; the share of tokens still held is rows over offset.
        codec: name of the codec that rows are or would be stored with; None if they are dense.
        scorer: name of the scorer by which rows were or would be dropped; None if none are missing.

    KL of a codec and of an eviction are added: neither interacts with the other in the published composites by more
    than the spread between documents.
    """
    changed = [one for one in layers if one.kind == "kv" and one.offset > 0]
    if not changed:
        return Quality(0.0, "exact: no rows were changed")
    kl, source = 0.0, "exact: dense and complete"
    bits = min((one.bits for one in changed if one.bits is not None), default=None)
    if bits is not None:
        figure = _CODEC_KL.get((codec or "affine", bits))
        if figure is None:
            return Quality(None, f"no figure for {codec} at {bits} bits")
        kl, source = kl + figure, SOURCE
    share = min(one.rows / one.offset for one in changed)
    if share < 1.0:
        if scorer not in _EVICTION_KL:
            return Quality(None, f"no figure for evicting by {scorer}")
        kl, source = kl + _eviction_kl(*_EVICTION_KL[scorer], share), SOURCE
    return Quality(kl, source)


def _eviction_kl(half: float, quarter: float, share: float) -> float:
    """Linear in log2(1/share) through (1, 0), (½, half), (¼, quarter), continued beyond with the last slope."""
    octaves = math.log2(1.0 / share)
    return half * octaves if octaves <= 1.0 else half + (quarter - half) * (octaves - 1.0)
