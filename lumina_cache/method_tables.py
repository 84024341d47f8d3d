"""The tables of scorers and codecs in the documentation, made from the registries.

python -m lumina_cache.method_tables docs/actions.md        # rewrites the part between the two marks
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from .actions import Evict, Quantize
from .codecs import CODECS
from .scorers import SCORERS
from .scorers.banked import BANKED

__all__ = ["FIRST", "LAST", "replaced", "tables"]

FIRST = "<!-- made by python -m lumina_cache.method_tables docs/actions.md -->"
LAST = "<!-- end of what was made -->"

#: Widths for the bytes of a row: one head of 128 elements in 16 bits.
_HEAD, _ITEMSIZE = 128, 2


def tables() -> str:
    """Both tables in Markdown."""
    return "\n".join([*_scorers(), "", *_codecs()])


def _scorers() -> Iterator[str]:
    yield "| scorer | text form | score | looks at the rows | source | needs |"
    yield "| --- | --- | --- | --- | --- | --- |"
    known = [(name, one.method, one.reads_rows) for name, one in SCORERS.items()]
    known += [(name, one.method, one.reads_rows) for name, one in BANKED.items()]
    for name, method, reads_rows in known:
        action, looks = Evict(name, 0.5), "yes" if reads_rows else "no"
        yield _row(name, f"`{action}`", method.formula, looks, method.source, _needs(action))


def _codecs() -> Iterator[str]:
    yield (
        "| codec | text form | bits | groups | encoded together | newest rows dense | bits per element stored | source | "
        "needs |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, family in CODECS.items():
        method = family.method
        bits = 4 if 4 in method.bits else method.bits[0]
        action = Quantize(name, bits, bits, 64 if 64 in method.groups else method.groups[0])
        layout = action.layout
        assert layout is not None
        stored = 8 * layout.row_nbytes(_HEAD, _HEAD, _ITEMSIZE) / (2 * _HEAD)
        yield _row(
            name,
            f"`{action}`",
            ", ".join(map(str, method.bits)),
            ", ".join(map(str, method.groups)),
            "one row" if layout.block == 1 else f"{layout.block} rows",
            str(layout.residual),
            f"{stored:g}",
            method.source,
            _needs(action),
        )


def _needs(action: Evict | Quantize) -> str:
    return ", ".join(sorted(str(c) for c in action.requires)) or "nothing"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def replaced(page: str) -> str:
    """``page`` with the part between the marks made anew."""
    before, _, rest = page.partition(FIRST)
    _, _, after = rest.partition(LAST)
    return f"{before}{FIRST}\n\n{tables()}\n\n{LAST}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(replaced(Path(name).read_text("utf-8")), "utf-8")
