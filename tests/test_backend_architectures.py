"""The table of architectures: made by carrying actions out, kept as data, read back without loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache.actions import parse_action
from lumina_cache.backend import architecture_page as paging
from lumina_cache.backend import architecture_table as tabling
from lumina_cache.backend import architecture_trial as trying
from lumina_cache.backend import architectures as making
from lumina_cache.backend.architecture_page import page
from lumina_cache.backend.architecture_table import (
    STATES,
    Architecture,
    ArchitectureTable,
    Entry,
    data_folder,
    load_tables,
    write_table,
)
from lumina_cache.backend.architecture_trial import Trial, grid
from lumina_cache.backend.architectures import classify_all
from lumina_cache.backend.installation import device_kind
from lumina_cache.backend.interface import mlx_lm_version
from lumina_cache.backend.isolate import Answer
from lumina_cache.errors import TableFormatError
from lumina_cache.lab.tiny import NOT_MODELS, SPECS, UNBUILDABLE, installed_modules
from lumina_cache.layers import KVCache

DOCS = Path(__file__).parents[1] / "docs" / "architectures.md"


@pytest.fixture(scope="module")
def tables() -> list[ArchitectureTable]:
    return load_tables()


def of_module(table: ArchitectureTable, module: str) -> Architecture:
    return next(a for a in table.architectures if a.module == module)


def judge(module: str, actions: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    trial = Trial(module)
    wanted = {str(parse_action(a)) for a in actions}
    return {str(v.action): trial.judge(v) for v in trial.verdicts() if str(v.action) in wanted}


# -- the data in the package ----------------------------------------------------------------------------------------


def test_the_page_of_the_docs_is_what_the_data_files_make(tables: list[ArchitectureTable]) -> None:
    assert DOCS.read_text("utf-8") == page(tables), "run: python -m lumina_cache.backend.architectures --page"


def test_at_least_a_hundred_architectures_were_built(tables: list[ArchitectureTable]) -> None:
    assert tables
    assert all(len(t.built) >= 100 for t in tables)


def test_the_files_are_small_and_named_after_their_installation(tables: list[ArchitectureTable]) -> None:
    files = sorted(data_folder().glob("*.json"))
    assert [f.name for f in files] == [t.file_name for t in tables]
    assert all(f.stat().st_size < 400_000 for f in files)


def test_every_model_module_of_the_installed_mlx_lm_is_there_or_listed_with_its_reason(
    tables: list[ArchitectureTable],
) -> None:
    here = [t for t in tables if t.mlx_lm == mlx_lm_version]
    if not here:
        pytest.skip(f"no table of mlx-lm {mlx_lm_version}")
    for table in here:
        listed = {a.module for a in table.architectures}
        assert listed == set(installed_modules()) - NOT_MODELS
        for one in table.architectures:
            if one.module not in SPECS:
                assert one.unbuildable
            if one.unbuildable is None:
                assert one.cache == SPECS[one.module].cache
            else:
                assert one.entries == ()


def test_every_refusal_has_a_reason_and_what_works_has_none(tables: list[ArchitectureTable]) -> None:
    for table in tables:
        for one in table.built:
            assert len(one.entries) == len(table.built[0].entries)
            for entry in one.entries:
                assert (entry.outcome == "works") == (entry.reasons == ())
                assert entry.state == ("backend_infeasible" if entry.outcome == "refused" else "real")
                assert all("\n" not in r for r in entry.reasons)


#: Known to be judged wrongly, all of it on the safe side: what is refused and would work for lack of a proof that it
#: always does, and rows that an element format gives back exactly because the model has rounded them itself.
KNOWN = {("iquestloopcoder", "works_when_forced"), ("afm7", "fails")}


def test_the_classifier_was_right_on_every_architecture(tables: list[ArchitectureTable]) -> None:
    wrong = [
        (a.module, e.action, e.outcome, e.reasons)
        for t in tables
        for a in t.built
        for e in a.entries
        if e.outcome in ("fails", "works_when_forced")
        if (a.module, e.outcome) not in KNOWN
    ]
    assert wrong == []


def test_what_is_known_of_some_architectures_is_in_the_data(tables: list[ArchitectureTable]) -> None:
    for table in tables:
        works = {a.module: {e.action for e in a.of("works")} for a in table.built}
        packed, evicted = "quant:affine,bits=8,group=32", "evict:sinks_window@0.50"
        assert {packed, evicted} <= works["llama"] & works["gemma3"] & works["qwen3_next"] & works[
            "falcon_h1"
        ]
        assert evicted in works["gpt_oss"] & works["deepseek_v3"] & works["gemma4_text"]
        for module in ("gpt_oss", "deepseek_v3", "gemma4_text", "gemma2", "mamba"):
            assert packed not in works[module]
        assert evicted not in works["mamba"] | works["afm7"]
        assert all("keep" in w for w in works.values())


@pytest.mark.slow
def test_the_data_file_of_this_installation_is_what_it_finds(tables: list[ArchitectureTable]) -> None:
    here = [
        t for t in tables if (t.device, t.mlx, t.mlx_lm) == (device_kind(), mx.__version__, mlx_lm_version)
    ]
    if not here:
        pytest.skip("no table of this installation")
    modules = ["llama", "gpt_oss", "deepseek_v32", "gemma4_text", "minimax_m3_vl", "mamba"]
    found = classify_all(modules=modules)
    for one in found.architectures:
        stored = of_module(here[0], one.module)
        assert one.entries == stored.entries, "run: python -m lumina_cache.backend.architectures"
        assert dict(one.capabilities) == dict(stored.capabilities)


# -- files ----------------------------------------------------------------------------------------------------------

_text = st.text(max_size=8)
_reasons = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=2).map(tuple)
_verdict = st.one_of(
    st.just(("works", ())),
    st.tuples(st.sampled_from(sorted(set(STATES) - {"works"})), _reasons),
)


@st.composite
def _tables(draw: st.DrawFn) -> ArchitectureTable:
    actions = draw(st.lists(_text, min_size=1, max_size=4, unique=True))
    architectures = []
    for module in draw(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4, unique=True)):
        if draw(st.booleans()):
            architectures.append(Architecture(module, None, MappingProxyType({}), (), draw(_text)))
            continue
        entries = tuple(Entry(a, *draw(_verdict)) for a in actions)
        capabilities = draw(st.dictionaries(_text, st.none() | _text, max_size=3))
        architectures.append(Architecture(module, draw(_text), MappingProxyType(capabilities), entries))
    names = ("device", "system", "mlx", "mlx_lm", "lumina_cache", "action_space", "date")
    return ArchitectureTable(**{n: draw(_text) for n in names}, architectures=tuple(architectures))


@given(table=_tables())
@settings(max_examples=60, deadline=None)
def test_a_table_survives_its_record(table: ArchitectureTable) -> None:
    record = json.loads(json.dumps(table.to_record()))
    assert ArchitectureTable.from_record(record) == table
    page([table])


def test_adding_a_machine_is_adding_a_file(tables: list[ArchitectureTable], tmp_path: Path) -> None:
    other = replace(tables[0], device="metal", mlx="0.99.0")
    assert write_table(tables[0], tmp_path).name == tables[0].file_name
    assert write_table(other, tmp_path).name == f"metal-mlx0.99.0-mlxlm{other.mlx_lm}.json"
    assert load_tables(tmp_path) == [tables[0], other]
    both = page(load_tables(tmp_path))
    assert f"## {tables[0].device}, MLX {tables[0].mlx}" in both
    assert "## metal, MLX 0.99.0" in both


def test_writing_twice_replaces_the_file(tables: list[ArchitectureTable], tmp_path: Path) -> None:
    write_table(tables[0], tmp_path)
    write_table(replace(tables[0], date="2000-01-01"), tmp_path)
    assert [t.date for t in load_tables(tmp_path)] == ["2000-01-01"]


@pytest.mark.parametrize(
    "contents", ["", "{", "[]", "null", '{"format": 1}', '{"format": 99, "modules": {}}', "\ud800"]
)
def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path, contents: str) -> None:
    file = tmp_path / "cpu-mlx1-mlxlm2.json"
    file.write_bytes(contents.encode("utf-8", "surrogatepass"))
    with pytest.raises(TableFormatError, match=r"cpu-mlx1-mlxlm2\.json"):
        load_tables(tmp_path)


def test_an_outcome_that_nobody_knows_is_an_error(tables: list[ArchitectureTable]) -> None:
    record = tables[0].to_record()
    record["verdicts"][0][0] = "perhaps"
    with pytest.raises(TableFormatError, match="unknown outcome"):
        ArchitectureTable.from_record(record)


def test_a_folder_without_files_has_no_tables(tmp_path: Path) -> None:
    assert load_tables(tmp_path) == []
    assert "# What works" in page([])


# -- classifying ----------------------------------------------------------------------------------------------------


def test_the_grid_is_the_whole_action_space_with_all_bit_widths() -> None:
    texts = [str(a) for a in grid()]
    assert len(texts) == len(set(texts))
    for bits in (2, 3, 4, 5, 6, 8):
        assert f"quant:affine,bits={bits},group=32" in texts
    assert {"keep", "reclaim", "evict:h2o@0.50"} <= set(texts)
    assert all(parse_action(t) == a for t, a in zip(texts, grid(), strict=True))


def test_what_runs_is_real_and_what_is_refused_is_proved_to_fail() -> None:
    found = judge(
        "gpt_oss",
        ["evict:sinks_window@0.50", "quant:affine,bits=8,group=32", "evict:h2o@0.50", "merge:minicache"],
    )
    assert found["evict:sinks_window@0.50"] == ("works", [])
    outcome, reasons = found["quant:affine,bits=8,group=32"]
    assert outcome == "refused"
    assert "attention sinks" in reasons[0]
    assert found["evict:h2o@0.50"] == ("works", [])  # with the hook, which every trial may use
    assert found["merge:minicache"][0] == "refused"


def test_a_refusal_of_something_that_works_is_found_out() -> None:
    from lumina_cache.backend.capabilities import Outcome, packed_attention

    trial = Trial("llama")
    denied = {**trial.probe.profile.outcomes, packed_attention(8, 32): Outcome(False, "so they say")}
    trial.probe = replace(trial.probe, profile=replace(trial.probe.profile, outcomes=denied))
    found = {str(v.action): trial.judge(v) for v in trial.verdicts()}
    assert found["quant:affine,bits=8,group=32"] == (
        "works_when_forced",
        ["PACKED_ATTENTION(8,32): so they say"],
    )


def test_eviction_that_differs_from_masking_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the number of rows as position, evicted rows give other logits than masked ones."""
    real = KVCache.gather

    def forgetful(self: KVCache, index: Any, tail: Any = None) -> None:
        real(self, index, tail)
        self.offset, self._dropped = self.rows, 0
        self._kept = None

    trial = Trial("llama")
    monkeypatch.setattr(KVCache, "gather", forgetful)
    verdict = next(v for v in trial.verdicts() if str(v.action) == "evict:sinks_window@0.50")
    outcome, reasons = trial.judge(verdict)
    assert outcome == "fails"
    assert "masked rows differ" in reasons[0] or "rows" in reasons[0]


def test_a_lossy_action_without_effect_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial("llama")
    monkeypatch.setattr(trying, "execute", lambda layers, action: None)
    verdict = next(v for v in trial.verdicts() if str(v.action) == "quant:affine,bits=8,group=32")
    assert trial.judge(verdict) == ("fails", ["ValueError: a lossy action moved no logit"])


def test_a_loss_of_an_action_that_claims_none_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from lumina_cache.apply import execute

    trial = Trial("llama")
    lossy = parse_action("quant:affine,bits=2,group=32")
    monkeypatch.setattr(trying, "execute", lambda layers, action: execute(layers, lossy))
    verdict = next(v for v in trial.verdicts() if str(v.action) == "reclaim")
    assert trial.judge(verdict) == ("fails", ["ValueError: an action that loses nothing moved the logits"])


def test_chunks_that_differ_from_single_tokens_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask one row too narrow is felt by several tokens at once, not by one."""
    trial = Trial("llama")
    real = KVCache.make_mask

    def narrow(self: KVCache, N: int, *args: Any, **options: Any) -> Any:
        if not self.evicted or N == 1:
            return real(self, N, *args, **options)
        return mx.arange(self.rows, self.rows + N)[:, None] > mx.arange(self.rows + N)[None]

    monkeypatch.setattr(KVCache, "make_mask", narrow)
    verdict = next(v for v in trial.verdicts() if str(v.action) == "evict:sinks_window@0.50")
    outcome, reasons = trial.judge(verdict)
    assert outcome == "fails"
    assert "one by one" in reasons[0]


def test_a_module_that_ends_its_process_or_takes_too_long_is_listed_with_that_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(_target: str, questions: Sequence[Any], *, on_answer: Any, **_: Any) -> None:
        for number, question in enumerate(questions):
            died = {"llama": "the process ended: SIGSEGV", "phi": "no answer within 300 s"}[
                question["module"]
            ]
            on_answer(number, Answer(None, died, 0.5))

    monkeypatch.setattr(making, "ask", asked)
    found = classify_all(modules=["llama", "phi"])
    assert [(a.module, a.unbuildable) for a in found.architectures] == [
        ("llama", "the process ended: SIGSEGV"),
        ("phi", "no answer within 300 s"),
    ]
    assert found.built == ()


def test_a_module_is_classified_in_a_process_of_its_own() -> None:
    seen: list[tuple[int, int, str]] = []
    unbuildable = sorted(UNBUILDABLE)[0]
    found = classify_all(lambda *a: seen.append(a), modules=["qwen3", unbuildable, "no_such_model", "base"])
    assert [a.module for a in found.architectures] == sorted(["qwen3", unbuildable, "no_such_model"])
    assert of_module(found, unbuildable).unbuildable == UNBUILDABLE[unbuildable]
    assert "no tiny model" in str(of_module(found, "no_such_model").unbuildable)
    qwen = of_module(found, "qwen3")
    assert [e.action for e in qwen.entries] == [str(a) for a in grid()]
    assert {e.outcome for e in qwen.entries} == {"works", "refused"}
    assert seen == [(1, 1, "qwen3")]
    assert (found.device, found.mlx) == (device_kind(), mx.__version__)


def test_methods_of_actions_are_read_from_their_text() -> None:
    read = {
        "keep": "keep",
        "reserve:8192": "reserve",
        "evict:sinks_window@0.50": "evict:sinks_window",
        "offload:layers=0-7": "offload:layers",
        "evict:keydiff@0.50,recent=4+quant:kivi,kbits=3,vbits=4,group=32": "evict:keydiff+quant:kivi",
    }
    assert {a: paging._method(a) for a in read} == read


def test_reasons_are_shown_without_what_the_exception_said() -> None:
    assert paging._without_exception("layer 1: sinks (ValueError: no (really) no.); layer 2: so") == (
        "layer 1: sinks; layer 2: so"
    )


def test_the_command_refuses_arguments_that_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert making.main(["--all"]) == 2
    assert "--page" in capsys.readouterr().err


def test_the_command_makes_the_page_from_the_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: list[ArchitectureTable]
) -> None:
    monkeypatch.setattr(making, "DOCS", tmp_path)
    monkeypatch.setattr(making, "classify_all", lambda *_: pytest.fail("it classified"))
    assert making.main(["--page"]) == 0
    assert (tmp_path / "architectures.md").read_text("utf-8") == page(tables)


def test_the_command_classifies_writes_the_file_and_makes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: list[ArchitectureTable]
) -> None:
    data, docs = tmp_path / "data", tmp_path / "docs"
    docs.mkdir()
    monkeypatch.setattr(making, "DOCS", docs)
    monkeypatch.setattr(tabling, "data_folder", lambda: data)
    monkeypatch.setattr(making, "classify_all", lambda progress: tables[0])
    assert making.main([]) == 0
    assert load_tables(data) == [tables[0]]
    assert (docs / "architectures.md").read_text("utf-8") == page([tables[0]])


def test_without_a_source_tree_the_command_writes_the_data_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: list[ArchitectureTable]
) -> None:
    monkeypatch.setattr(making, "DOCS", tmp_path / "no docs")
    monkeypatch.setattr(tabling, "data_folder", lambda: tmp_path / "data")
    monkeypatch.setattr(making, "classify_all", lambda progress: tables[0])
    assert making.main([]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
