"""The report: what the page, the pictures and the text say is what the analysis found, and nothing comes from outside."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from lumina_cache import LuminaCache, read_log
from lumina_cache.errors import AnalysisUnavailableError
from lumina_cache.gap.decisions import gap_of_log
from lumina_cache.gap.figure import Section, Series, number, percent, share_axis, spelled, with_interval
from lumina_cache.gap.page import page
from lumina_cache.gap.report import gap_command, report_page
from lumina_cache.gap.resample import Estimate
from lumina_cache.gap.session import session_sections

pytest.importorskip("ibis")
pytest.importorskip("pyarrow")

from lumina_cache.gap.analysis import Analysis, Settings, analyse
from lumina_cache.gap.figures import pairs, sections
from lumina_cache.gap.records import BackendInfeasible, Provenance, State, What
from lumina_cache.gap.store import Store
from lumina_cache.gap.synthetic import Planted, Setting, action_space, write

SETTING = Setting(documents=3, token_noise=0.002, document_noise=0.004)
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;"
MOST_BYTES = 5_000_000


def refusal(action: str, capability: str) -> BackendInfeasible:
    reason = {"code": "missing_capability", "text": f"{capability}: not there", "capability": capability}
    origin = Provenance("campaign", "r", "2026", "m", "", "", "cpu", "chip", "0", "0", "0")
    return BackendInfeasible(State("m", "d", "prose", 8, "decode", 0, 0), What(action, 2), origin, (reason,))


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    made = Store(tmp_path_factory.mktemp("gap") / "store")
    space = action_space(60)
    runnable = [p for p in space if p.what.rung <= 2 and p.what.role != "ceiling"]
    for version in ("0.9", "0.10"):
        write(made, [*runnable, Planted(What(HOSTILE), 0.3, 0.05)], replace(SETTING, mlx_lm=version), "real")
    layers = [Planted(What(f"{i}-{i}:quant:affine,bits=4,group=32"), 0.95, 0.01 * (i + 1)) for i in range(3)]
    write(made, [*space, *layers], SETTING, "simulated")
    made.append([refusal("quant:x", "QUERIES"), refusal("quant:y", "QUERIES"), refusal("quant:z", "FUTURE")])
    failed = {"failures": [{"action": "quant:w", "error": "went wrong"}]}
    plan = {"command": "lumina-cache campaign plan.toml", "plan": {"order_seed": 7, "contexts": [1024, 4096]}}
    made.write_manifest({**plan, "units": {"unit 1": failed}})
    return made.path


@pytest.fixture(scope="module")
def analysis(store) -> Analysis:
    return analyse(store, settings=Settings(draws=200))


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    from lumina_cache.lab.tiny import build

    path, model = tmp_path_factory.mktemp("log") / "chat.jsonl", build("llama")
    with LuminaCache(model, budget=270_000, log=path) as cache:
        for _ in range(9):
            mx.eval(model(mx.arange(1, 100)[None], cache=cache), [c.state for c in cache])
    return path


@pytest.fixture(scope="module")
def html(analysis, log) -> str:
    contents = {str(log): read_log(log)}
    reports = {str(log): gap_of_log(contents[str(log)])}
    every = (*sections(analysis), *session_sections(log.name, contents[str(log)], reports[str(log)]))
    return report_page(every, analysis, contents, reports, "lumina-cache gap store log")


class Page(HTMLParser):
    """What a browser would make of the page, as far as these tests ask."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[str, dict[str, Any]] = {}
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self.kinds: list[str | None] = []
        self.policy = ""
        self.tags: list[str] = []
        self._figure: str | None = None
        self._row: list[str] | None = None
        self._cell = self._script = self._sentence = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append(tag)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        for name, value in attributes:
            local = (value or "").startswith(("#", "data:"))
            if name in ("src", "href", "action", "data", "srcset", "poster") and not local:
                self.outside.append(f"{tag} {name}={value}")
        if tag == "meta" and found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag == "figure":
            self._figure = str(found["id"])
            self.figures[self._figure] = {"tables": [], "sentence": "", "badge": None, "focus": False}
        if self._figure is not None:
            mine = self.figures[self._figure]
            classes = (found.get("class") or "").split()
            if "badge" in classes:
                mine["badge"] = classes[1]
            if "plot" in classes:
                mine["focus"] = found.get("tabindex") == "0" and bool(found.get("aria-label"))
            if "sentence" in classes:
                self._sentence = True
            if tag == "table":
                mine["tables"].append([])
            if tag == "tr":
                self._row = []
            if tag in ("td", "th") and self._row is not None:
                self._row.append("")
                self._cell = True
        if tag == "script":
            self._script = True
            self.scripts.append("")
            self.kinds.append(found.get("type"))

    def handle_endtag(self, tag: str) -> None:
        if tag == "figure":
            self._figure = None
        if tag == "tr" and self._figure is not None and self._row is not None:
            self.figures[self._figure]["tables"][-1].append(tuple(self._row))
            self._row = None
        if tag in ("td", "th"):
            self._cell = False
        if tag == "p":
            self._sentence = False
        if tag == "script":
            self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] += data
        if self._cell and self._row:
            self._row[-1] += data
        if self._sentence and self._figure is not None:
            self.figures[self._figure]["sentence"] += data


@pytest.fixture(scope="module")
def parsed(html) -> Page:
    return Page(html)


def test_every_figure_is_on_the_page_with_its_sentence_its_tables_and_its_data(analysis, parsed):
    drawn = {f["key"]: f for f in json.loads(parsed.scripts[0])}
    wanted = [f for s in sections(analysis) for f in s.figures]
    assert {f.key for f in wanted} <= set(parsed.figures) == set(drawn)
    assert len(parsed.ids) == len(set(parsed.ids))
    for figure in wanted:
        there = parsed.figures[figure.key]
        assert there["sentence"] == figure.views[0].sentence
        assert there["badge"] == figure.execution_state
        assert there["focus"]
        assert there["tables"] == [[view.heads, *view.rows] for view in figure.views]
        assert [v["sentence"] for v in drawn[figure.key]["views"]] == [v.sentence for v in figure.views]
        for view, other in zip(figure.views, drawn[figure.key]["views"], strict=True):
            assert [s["name"] for s in other["series"]] == [s.name for s in view.series]
            assert all(len(row) == len(view.heads) for row in view.rows)


def test_all_kinds_of_figures_are_there(analysis, log):
    keys = {f.key for s in sections(analysis) for f in s.figures}
    for kind in ("gap", "best", "pareto", "placebo"):
        assert {f"real-1-{kind}", f"real-2-{kind}", f"simulated-1-{kind}"} <= keys
    assert {"simulated-1-causes", "simulated-1-causes-budget", "simulated-1-domains"} <= keys
    assert {"simulated-1-layers", "simulated-1-parts", "real-trend-1", "refusals-reasons"} <= keys
    contents = read_log(log)
    found = {f.key for s in session_sections("log", contents, gap_of_log(contents)) for f in s.figures}
    assert {"log-1-memory", "log-1-machine", "log-1-gap", "log-1-sides", "log-1-candidates"} <= found


def test_the_page_is_one_file_that_asks_for_nothing(html, parsed):
    assert len(html.encode()) < MOST_BYTES
    assert parsed.outside == []
    assert not {"iframe", "object", "embed", "base", "img"} & set(parsed.tags)
    rules = dict(rule.split(" ", 1) for rule in parsed.policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert "http" not in parsed.policy
    assert "unsafe" not in rules["script-src"]
    running = [s for s, kind in zip(parsed.scripts, parsed.kinds, strict=True) if kind is None]
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in running]
    assert rules["script-src"].split() == [f"'sha256-{h}'" for h in hashes]
    assert "@import" not in html.split("</style>")[0]
    assert "url(" not in html.split("</style>")[0]


def test_text_from_a_store_cannot_become_markup(html, parsed):
    assert HOSTILE not in html
    rows = [row for f in parsed.figures.values() for table in f["tables"] for row in table]
    assert any(HOSTILE in cell for row in rows for cell in row)
    assert "img" not in parsed.tags


def test_no_section_and_no_series_mixes_execution_states(analysis, log):
    contents = read_log(log)
    every: list[Section] = [
        *sections(analysis),
        *session_sections("log", contents, gap_of_log(contents)),
    ]
    assert {s.execution_state for s in every} == {"real", "simulated", "backend_infeasible"}
    for section in every:
        assert {f.execution_state for f in section.figures} <= {section.execution_state}
    real = next(f for s in every for f in s.figures if f.key == "real-2-pareto")
    shown = {x.split(":")[0] for v in real.views for s in v.series for x in s.labels}
    assert not any("oracle" in one for one in shown)


def test_the_sentence_of_the_gap_tells_the_widest_one(analysis):
    one = analysis.real.strata[-1]
    widest = max(
        (g for g in one.gaps if (g.low, g.high) in pairs(one) and g.points is not None),
        key=lambda g: g.points.value,
    )
    view = next(f for s in sections(analysis) for f in s.figures if f.key == "real-2-gap").views[0]
    assert f"from {widest.low} to {widest.high} at {percent(widest.budget)}" in view.sentence
    assert with_interval(widest.points, "points") in view.sentence
    series = next(s for s in view.series if s.name == f"{widest.low} → {widest.high}")
    i = series.x.index(widest.budget)
    assert (series.y[i], series.low[i], series.high[i]) == (
        widest.points.value,
        widest.points.low,
        widest.points.high,
    )


def test_a_gap_that_cannot_be_told_is_a_reason_in_the_table_and_no_point(analysis):
    one = analysis.real.strata[-1]
    unknown = [g for g in one.gaps if g.points is None]
    assert unknown
    view = next(f for s in sections(analysis) for f in s.figures if f.key == "real-2-gap").views[0]
    for gap in unknown:
        name = f"{gap.low} → {gap.high}"
        assert (name, percent(gap.budget), "–", "–", "–", gap.why) in view.rows or gap.low_actions
        for series in view.series:
            assert series.name != name or gap.budget not in series.x


def test_the_bytes_against_damage_hold_every_action_and_the_lossless_ones_in_the_table(analysis):
    one = analysis.simulated.strata[0]
    view = next(f for s in sections(analysis) for f in s.figures if f.key == "simulated-1-pareto").views[0]
    points = [x for s in view.series if s.kind == "points" for x in s.x]
    assert len(points) == sum(p.kl.value > 0 for p in one.points)
    assert len(view.rows) == len(one.points)
    front = next(s for s in view.series if s.name == "front of A, all")
    assert list(front.y) == sorted(front.y, reverse=True)
    assert list(front.x) == sorted(front.x)


def test_causes_are_the_attributions_of_all_documents(analysis):
    figure = next(f for s in sections(analysis) for f in s.figures if f.key == "simulated-1-causes")
    wanted = [a for a in analysis.simulated.strata[0].attributions if a.documents == "all" and a.capabilities]
    assert {v.name for v in figure.views} == {f"{a.base} at {percent(a.budget)}" for a in wanted}
    totals = [
        next(a for a in wanted if f"{a.base} at {percent(a.budget)}" == v.name).total.value
        for v in figure.views
    ]
    assert totals == sorted(totals, key=abs, reverse=True)
    first = next(a for a in wanted if f"{a.base} at {percent(a.budget)}" == figure.views[0].name)
    bars = {s.name: s for s in figure.views[0].series}
    assert bars["Shapley"].y == tuple(c.shapley.value for c in first.capabilities)
    assert bars["alone"].y == tuple(c.alone.value for c in first.capabilities)


def test_refusals_are_counted_by_reason(analysis):
    figure = next(f for s in sections(analysis) for f in s.figures if f.key == "refusals-reasons")
    (bars,) = figure.views[0].series
    assert dict(zip(bars.x, bars.y, strict=True)) == {"QUERIES": 2.0, "FUTURE": 1.0}
    assert "QUERIES is the reason of 2 of 3 refusals" in figure.sentence


def test_versions_are_in_order_and_strata_are_told_apart_by_them(analysis):
    titles = [s.title for s in sections(analysis) if s.execution_state == "real"]
    assert titles == [
        "synthetic, 1,024 tokens, decode, mlx-lm 0.10",
        "synthetic, 1,024 tokens, decode, mlx-lm 0.9",
        "Trend over versions",
    ]
    figure = next(f for s in sections(analysis) for f in s.figures if f.key == "real-trend-1")
    assert "From mlx-lm 0.9 to 0.10" in figure.sentence


def test_where_it_comes_from_is_on_the_page(html, store):
    for said in (
        str(store),
        "lumina-cache gap store log",
        "manifest: command",
        "lumina-cache campaign plan.toml",
        "<dt>manifest: plan.order_seed</dt><dd>7</dd>",
        "1024, 4096",
        "failed in unit 1: action quant:w, error went wrong",
        "prose:0, prose:1, prose:2",
        "MLX 0, mlx-lm 0.9",
        "bootstrap over documents",
        "9 (code 3, dialogue 3, prose 3)",
    ):
        assert said in html


def test_the_figures_of_a_log_are_those_of_its_report(log):
    contents = read_log(log)
    report = gap_of_log(contents)
    assert report.gaps
    found = {f.key: f for s in session_sections("log", contents, report) for f in s.figures}
    bars = {s.name: s for s in found["log-1-gap"].views[0].series}
    assert bars["backend"].y == tuple(g.backend for g in report.gaps)
    assert bars["code not there yet"].y == tuple(g.library for g in report.gaps)
    allocated = found["log-1-memory"].views[0].series[0]
    applied = contents.of("action.applied")
    assert applied
    for action in applied:
        assert action["after"]["nbytes_allocated"] / 1e6 in allocated.y
    most = max(y for y in allocated.y if y is not None)
    assert (
        f"{percent(most * 1e6 / 270_000).removesuffix(' %')} % of the budget"
        in found["log-1-memory"].sentence
    )
    for view in found["log-1-candidates"].views:
        fits = [r for r in view.rows if r[1] == "yes"]
        assert sum(s.name == "feasible (F)" and len(s.x) for s in view.series) <= len(fits)


def test_a_log_without_a_decision_says_so(tiny, tmp_path):
    path = tmp_path / "quiet.jsonl"
    model = tiny("llama")
    with LuminaCache(model, log=path) as cache:
        mx.eval(model(mx.arange(1, 9)[None], cache=cache))
    text = gap_command([path], html=tmp_path / "quiet.html")
    assert "No decision" in text
    assert "there is no gap to report" in (tmp_path / "quiet.html").read_text("utf-8")


def test_lines_that_were_left_out_are_on_the_page(log, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(log.read_text("utf-8") + '{"schema": 1, "event"', "utf-8")
    gap_command([broken], html=tmp_path / "broken.html")
    text = (tmp_path / "broken.html").read_text("utf-8")
    assert "1 lines left out" in text
    assert read_log(broken).problems[0].split(":")[0] in text


@pytest.mark.slow
def test_every_view_is_written_as_a_picture_and_twice_the_same(analysis, tmp_path):
    pytest.importorskip("matplotlib")
    from lumina_cache.gap.plots import write_plots

    few = tuple(
        replace(s, figures=tuple(replace(f, views=f.views[:2]) for f in s.figures[:1]))
        for s in sections(analysis)[-3:]
    )
    first = write_plots(few, tmp_path / "a")
    views = sum(len(f.views) for s in few for f in s.figures)
    assert len(first) == len(set(first)) == 2 * views
    again = write_plots(few, tmp_path / "b")
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
    for path in first:
        if path.suffix == ".svg":
            state = "backend_infeasible" if path.name.startswith("refusals") else path.name.split("-")[0]
            assert f"[{state}]" in path.read_text("utf-8")


def test_without_matplotlib_the_error_names_the_extra(analysis, monkeypatch, tmp_path):
    from lumina_cache.gap.plots import write_plots

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AnalysisUnavailableError, match=r"lumina-cache\[analysis\]"):
        write_plots(sections(analysis), tmp_path)


def test_a_log_needs_no_package_of_the_analysis(log, tmp_path):
    script = (
        "import sys\n"
        "for name in ('ibis', 'duckdb', 'pyarrow', 'matplotlib', 'pandas'): sys.modules[name] = None\n"
        "from lumina_cache.cli import main\n"
        f"main(['gap', {str(log)!r}, '--html', {str(tmp_path / 'page.html')!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "log-1-memory" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.slow
def test_text_and_json_of_a_store(store, log):
    text = gap_command([store])
    assert text.count("[execution state: real]") == 2
    assert text.count("[execution state: simulated]") == 1
    assert "2  QUERIES" in text
    assert "trend native → hook" in text
    found = json.loads(gap_command([store], as_json_text=True))
    assert found["kind"] == "lumina-cache gap"
    assert found["real"]["execution_state"] == "real"
    both = json.loads(gap_command([store, log], as_json_text=True))
    assert set(both) == {"analysis", "logs"}
    assert both["logs"][str(log)]["execution_state"] == "simulated"


def test_a_gap_of_nothing_is_drawn_as_nothing(tmp_path):
    """F = A: every point of the gap is 0 exactly."""
    made = Store(tmp_path / "same")
    space = [p for p in action_space(20, ceiling=0) if p.what.role == "candidate"]
    write(made, [replace(p, what=replace(p.what, rung=0, requires=())) for p in space], SETTING, "simulated")
    found = analyse(made, settings=Settings(draws=100))
    view = next(f for s in sections(found) for f in s.figures if f.key == "simulated-1-gap").views[0]
    assert view.series
    assert {y for s in view.series for y in s.y} == {0.0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.12345, "0.123"),
        (-12.345, "-12.3"),
        (12345.6, "12,346"),
        (100.0, "100"),
        (1e-6, "1e-06"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_shares_intervals_and_lists_for_people():
    assert [percent(s) for s in (None, 0.0, 0.0625, 0.5, 1.0)] == ["–", "0 %", "6.25 %", "50 %", "100 %"]
    assert with_interval(Estimate(1.5, 1.0, 2.0, 30), "points") == "1.5 points [1, 2]"
    assert with_interval(Estimate(1.5, None, None, 1)) == "1.5 (no interval)"
    assert [spelled(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
    assert [text for _, text in share_axis([0.25, 0.28, 0.5]).ticks] == ["50 %", "28 %", "\n25 %"]
    with pytest.raises(ValueError, match="different lengths"):
        Series("odd", "line", (1.0, 2.0), (1.0,))


def test_a_page_without_figures_is_a_page():
    text = page("Nothing", (), (("a", "<b>"),), problems=("p & q",))
    assert "&lt;b&gt;" in text
    assert "p &amp; q" in text


def test_the_table_can_be_taken_along_as_csv(parsed, tmp_path):
    """The button writes the table's cells, so a cell must be one line of plain text."""
    for figure in parsed.figures.values():
        for table in figure["tables"]:
            with (tmp_path / "t.csv").open("w", newline="") as file:
                csv.writer(file).writerows(table)
            assert all("\n" not in cell for row in table for cell in row)
