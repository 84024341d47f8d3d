"""The shipped profile's times as a table for the documents: ``python -m lumina_cache.profile_table docs/calibrate.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from .actions import Quantize
from .pages import update_page
from .profile import CodecFigure, Profile, default_profile

__all__ = ["PART", "as_markdown"]

#: The part of the page that is made.
PART = "times"


def as_markdown(profile: Profile) -> str:
    """A row per codec: decode steps and prompt chunks over those of the dense cache, and over mlx-lm's packed path.

    mlx-lm's packed path is ``quant:affine`` with as many bits; for unequal bits there is none.
    """
    texts = ", ".join(str(t["name"]) for t in profile.provenance.get("texts", ()))
    rows = sorted({rows for c in profile.codecs for rows, _ in (*c.times, *c.chunk_times)})
    heads = [f"{what}, {n:,} rows" for what in ("step", "chunk") for n in rows]
    lines = [
        f"Quality of {len(profile.codecs)} codecs and {len(profile.evictors)} scorers: all of them on "
        f"{profile.provenance.get('documents', 'an unknown number of')} of the texts {texts or '(unnamed)'}.",
        "",
        f"| codec | {' | '.join(heads)} | step over mlx-lm's, {rows[-1]:,} rows |",
        f"| --- |{' ---: |' * (len(heads) + 1)}",
    ]
    for codec in profile.codecs:
        cells = [_at(dict(times), n) for times in (codec.times, codec.chunk_times) for n in rows]
        lines.append(f"| `{codec.action}` | {' | '.join(cells)} | {_over_packed(profile, codec, rows[-1])} |")
    return "\n".join(lines)


def _at(times: dict[int, float], rows: int) -> str:
    return f"{times[rows]:.2f}" if rows in times else "–"


def _over_packed(profile: Profile, codec: CodecFigure, rows: int) -> str:
    bits, own = codec.action.key_bits, dict(codec.times).get(rows)
    if codec.action.value_bits != bits or own is None:
        return "–"
    like = Quantize("affine", bits, bits, 64)
    packed = next((dict(c.times).get(rows) for c in profile.codecs if c.action == like), None)
    return "–" if packed is None else f"{own / packed:.2f}"


if __name__ == "__main__":
    update_page(Path(sys.argv[1]), PART, as_markdown(default_profile()))
