"""One HTML file with everything in it: figures that answer to mouse, finger and keyboard, and a table under each.

Drawn by plotly.js (its bundle of basic charts, MIT licence, in ``assets``), which is written into the page. The page
asks no network for anything, and its content security policy would not let it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

from .figure import Figure, Section, View

__all__ = ["STATES", "page"]

#: What each execution state means, in a sentence.
STATES = {
    "real": "the action ran in the backend on a real forward of the model, and was measured there",
    "simulated": "figures come from a forward that keeps the whole cache, or from estimates; never compared with real ones",
    "backend_infeasible": "the backend, or the classifier before it, refused; there is a reason and no measurement",
}

Facts = Sequence[tuple[str, str]]


def page(
    title: str,
    sections: Sequence[Section],
    facts: Facts,
    *,
    lead: Sequence[str] = (),
    problems: Sequence[str] = (),
) -> str:
    """The page as text.

    Args:
        facts: where all of it comes from: command, versions, what was read.
        lead: what it comes to, a sentence each.
        problems: what was left out, and why.
    """
    script, plotly = _asset("page.js"), _asset("plotly-basic.min.js")
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"script-src {_hash(plotly)} {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    figures = [f for s in sections for f in s.figures]
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>{_asset('page.css')}</style>",
        "</head>",
        "<body>",
        '<a class="skip" href="#content">To the figures</a>',
        *_header(title, sections, lead),
        '<main id="content">',
        *(line for section in sections for line in _section(section)),
        *_provenance(facts, problems),
        "</main>",
        '<footer class="faint small"><p>Drag in a plot to zoom, double-click to see all again. With the keyboard: Tab '
        "to a plot, then the arrow keys walk its points; each plot has its figures in a table.</p></footer>",
        f'<script type="application/json" id="figures">{_json([_record(f) for f in figures])}</script>',
        f"<script>{plotly}</script>",
        f"<script>{script}</script>",
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(parts)


def _header(title: str, sections: Sequence[Section], lead: Sequence[str]) -> Iterator[str]:
    yield f'<header><div class="top"><h1>{escape(title)}</h1><button id="theme" type="button" hidden></button></div>'
    yield from (f"<p>{escape(one)}</p>" for one in lead)
    yield '<nav aria-label="Sections"><ul>'
    for section in sections:
        yield (
            f'<li><a href="#{section.key}">{escape(section.title)}</a> {_badge(section.execution_state)}</li>'
        )
    yield '<li><a href="#provenance">Where this comes from</a></li></ul></nav>'
    used = dict.fromkeys(s.execution_state for s in sections)
    yield "<dl>"
    yield from (f"<dt>{_badge(state)}</dt><dd>{escape(STATES[state])}</dd>" for state in used)
    yield "</dl>"
    yield (
        "<noscript><p><strong>Plots need JavaScript. All of their figures are in the tables.</strong></p></noscript>"
    )
    yield "</header>"


def _badge(state: str) -> str:
    return f'<span class="badge {state}">{state.replace("_", " ")}</span>'


def _section(section: Section) -> Iterator[str]:
    yield f'<section id="{section.key}" aria-labelledby="{section.key}-title">'
    yield (
        f'<div class="title"><h2 id="{section.key}-title">{escape(section.title)}</h2>'
        f"{_badge(section.execution_state)}</div>"
    )
    if section.lead:
        yield '<ul class="lead">'
        yield from (f"<li>{escape(one)}</li>" for one in section.lead)
        yield "</ul>"
    yield from _list(section.facts)
    if section.notes:
        yield f"<details><summary>{_counted(len(section.notes), 'note')}</summary><ul class='notes'>"
        yield from (f"<li>{escape(one)}</li>" for one in section.notes)
        yield "</ul></details>"
    yield '<div class="grid">'
    for figure, wide in zip(section.figures, _wide(section.figures), strict=True):
        yield from _figure(figure, wide)
    yield "</div></section>"


def _list(facts: Facts) -> Iterator[str]:
    if facts:
        yield "<dl>"
        yield from (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
        yield "</dl>"


def _wide(figures: Sequence[Figure]) -> list[bool]:
    """Which figures take the whole width: those that need it, and those that would be left alone in a row of two."""
    wide = [any(v.horizontal or len(v.series) > 6 for v in f.views) for f in figures]
    alone = False
    for i, one in enumerate(wide):
        if one:
            wide[i - 1] = wide[i - 1] or alone
            alone = False
        else:
            alone = not alone
    if alone:
        wide[-1] = True
    return wide


def _figure(figure: Figure, wide: bool) -> Iterator[str]:
    key = figure.key
    width = ' class="wide"' if wide else ""
    yield f'<figure id="{key}"{width} aria-labelledby="{key}-title">'
    yield (
        f'<div class="title"><h3 id="{key}-title">{escape(figure.title)}</h3>{_badge(figure.execution_state)}</div>'
    )
    yield f'<p class="sentence" id="{key}-sentence" aria-live="polite">{escape(figure.sentence)}</p>'
    if len(figure.views) > 1:
        yield f'<div class="controls"><label>{escape(figure.choice)} <select>'
        yield from (f"<option>{escape(view.name)}</option>" for view in figure.views)
        yield "</select></label></div>"
    yield f'<div class="legend" role="group" aria-label="Series of {escape(figure.title)}"></div>'
    yield (
        f'<div class="plot" tabindex="0" role="group" aria-roledescription="plot" aria-label="{escape(figure.title)}" '
        f'aria-describedby="{key}-sentence"></div>'
    )
    yield '<p class="status" aria-live="polite"></p>'
    yield '<div class="foot">'
    for i, view in enumerate(figure.views):
        hidden = " hidden" if i else ""
        yield f'<details data-view="{i}"{hidden}><summary>Table: {escape(_caption(figure, view))}</summary>'
        yield from _table(figure, view)
        yield "</details>"
    yield (
        '<div class="save"><button type="button" data-save="svg">SVG</button>'
        '<button type="button" data-save="png">PNG</button><button type="button" data-save="csv">CSV</button></div>'
    )
    yield "</div></figure>"


def _caption(figure: Figure, view: View) -> str:
    return figure.title + (f", {view.name}" if view.name else "")


def _table(figure: Figure, view: View) -> Iterator[str]:
    caption = escape(f"{_caption(figure, view)} [{figure.execution_state}]")
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table><caption>{caption}</caption>'
    yield (
        "<thead><tr>"
        + "".join(f'<th scope="col">{escape(head)}</th>' for head in view.heads)
        + "</tr></thead>"
    )
    yield "<tbody>"
    for first, *rest in view.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        yield f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _provenance(facts: Facts, problems: Sequence[str]) -> Iterator[str]:
    yield '<section id="provenance" aria-labelledby="provenance-title"><h2 id="provenance-title">Where this comes from</h2>'
    yield from _list(facts)
    if problems:
        yield f"<details open><summary>{_counted(len(problems), 'thing')} left out</summary><ul class='notes'>"
        yield from (f"<li>{escape(one)}</li>" for one in problems)
        yield "</ul></details>"
    yield "</section>"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _record(figure: Figure) -> dict[str, Any]:
    """What the script draws; six digits, which is more than a screen can show. Tables are in the page already."""
    views = [{k: v for k, v in asdict(view).items() if k not in ("heads", "rows")} for view in figure.views]
    return {"key": figure.key, "views": [_rounded(view) for view in views]}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value


def _json(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    text = files("lumina_cache.gap").joinpath("assets", name).read_text("utf-8")
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError(f"{name} cannot be written into a page")
    return text


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
