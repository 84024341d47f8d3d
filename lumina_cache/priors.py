"""What an action costs in quality, until a calibration on the user's own model says better.

Mean KL divergence (nats per token) to the full cache, teacher-forced over 128 tokens after a context of 1,024, measured
once with SmolLM2-135M-Instruct in float32 (4-bit weights dequantised; six documents; sinks 4 and the last 32 rows
protected). Two tasks were measured, and what comes next is not known when a decision is made, so the expectation is
their plain mean: *continuation* of the text, which forgives lost rows, and *copying* a passage planted early, which
does not. Figures borrowed from another model are an estimate: whatever is computed from them is *simulated*.
"""

from __future__ import annotations

from dataclasses import dataclass

from .estimate import Held

__all__ = ["SCORED_CODECS", "SCORED_EVICTORS", "SOURCE", "Quality", "expected_kl"]

SOURCE = "borrowed: SmolLM2-135M-Instruct, 1,024-token context, mean of continuation and copying, 6 documents"

#: codec, bits → KL of (continuation, copying), at groups of 64 (KIVI: groups of 32 and a dense tail of 32 rows).
_CODEC_KL: dict[tuple[str, int], tuple[float, float]] = {
    ("affine", 8): (0.0001, 0.0002),
    ("affine", 4): (0.0184, 0.0623),
    ("hadamard", 4): (0.0072, 0.0293),
    ("hadamard", 3): (0.0337, 0.130),
    ("kivi", 4): (0.0077, 0.0270),
    ("kivi", 2): (0.207, 0.756),
}

#: Codecs that store the same codes as another one.
_SAME_CODES = {"affine_fetch": "affine", "kivi_packed": "kivi", "hadamard_packed": "hadamard"}

#: scorer → the same pairs with half and with a quarter of the rows.
_EVICTION_KL: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "sinks_window": ((0.028, 1.48), (0.062, 2.02)),
    "keydiff": ((0.045, 1.01), (0.123, 1.61)),
    "key_norm": ((0.110, 1.06), (0.193, 1.77)),
    "snapkv": ((0.029, 1.21), (0.067, 1.80)),
}


SCORED_CODECS = tuple(dict.fromkeys(codec for codec, _ in _CODEC_KL))
SCORED_EVICTORS = tuple(_EVICTION_KL)


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
        figure = _CODEC_KL.get((_SAME_CODES.get(codec or "affine", codec or "affine"), bits))
        if figure is None:
            return Quality(None, f"no figure for {codec} at {bits} bits")
        kl, source = kl + _mean(figure), SOURCE
    share = min(one.rows / one.offset for one in changed)
    if share < 1.0:
        if scorer not in _EVICTION_KL:
            return Quality(None, f"no figure for evicting by {scorer}")
        half, quarter = (_mean(pair) for pair in _EVICTION_KL[scorer])
        kl, source = kl + _eviction_kl(half, quarter, share), SOURCE
    return Quality(kl, source)


def _mean(pair: tuple[float, float]) -> float:
    return (pair[0] + pair[1]) / 2


def _eviction_kl(half: float, quarter: float, share: float) -> float:
    """Linear in the share of rows kept through (1, 0), (½, half), (¼, quarter), continued beyond with the last slope.

    Linear because a fact that is needed again may lie anywhere, so the chance of having dropped it grows with the share
    dropped.
    """
    if share >= 0.5:
        return half * (1.0 - share) / 0.5
    return half + (quarter - half) * (0.5 - share) / 0.25
