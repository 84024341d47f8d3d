"""Parts of the yardstick that need no model: texts, tasks, intervals, gates, tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_evaluate import SMALL, Words, texts

from lumina_cache.errors import EvaluationError
from lumina_cache.lab.corpus import Document
from lumina_cache.lab.evaluate.documents import DOMAINS, EvalDocument, cut, select
from lumina_cache.lab.evaluate.plan import Plan, parse_contexts
from lumina_cache.lab.evaluate.render import as_markdown, as_table
from lumina_cache.lab.evaluate.statistics import bootstrap_mean, geometric_mean
from lumina_cache.lab.evaluate.table import gates, rows
from lumina_cache.lab.evaluate.tasks import continuation, planted
from lumina_cache.policy import quality_points

# -- documents ----------------------------------------------------------------------------------------------------------


def test_documents_of_one_length_do_not_overlap_and_are_always_the_same() -> None:
    for context in (200, 1500):
        found, lacking = select(Words(), context, 12, context + 100)
        again, _ = select(Words(), context, 12, context + 100)
        assert found == again
        assert lacking == []
        assert [d.domain for d in found[:6]] == ["prose", "code", "dialogue"] * 2
        taken: dict[str, set[int]] = {}
        for one in found:
            assert len(one.tokens) == context + 100
            name = one.name.rsplit(":", 1)[0]
            here = set(range(one.start, one.start + len(one.tokens)))
            assert not here & taken.setdefault(name, set())
            taken[name] |= here


def test_texts_do_not_contain_one_another() -> None:
    shingles = {}
    for makers in DOMAINS.values():
        for make in makers():
            text = make()
            words = text.text.split()
            shingles[text.name] = {tuple(words[i : i + 12]) for i in range(len(words) - 11)}
    assert len(shingles) > 30
    names = list(shingles)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            shared = len(shingles[a] & shingles[b])
            assert shared <= 0.02 * min(len(shingles[a]), len(shingles[b])), (a, b, shared)


def test_the_first_stretch_of_every_text_comes_before_the_second_of_any() -> None:
    found = list(cut(texts(3, 100), Words(), 20, 40))
    assert [d.name for d in found] == ["text0:0", "text1:0", "text2:0", "text0:1", "text1:1", "text2:1"]


def test_too_few_documents_are_said_and_not_made_up() -> None:
    found, lacking = select(Words(), 64, 6, 113, texts(2))
    assert len(found) == 2
    assert {(s.domain, s.text) for s in lacking} == {
        ("even", "1 documents of 113 tokens, 3 were asked for"),
        ("odd", "1 documents of 113 tokens, 3 were asked for"),
    }


def test_a_sequence_begins_with_the_tokenizers_own_token() -> None:
    class Led(Words):
        def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
            return [95] * add_special_tokens + super().encode(text)

    found = list(cut(texts(1, 100), Led(), 20, 40))
    assert len(found) == 2
    assert all(d.tokens[0] == 95 and len(d.tokens) == 40 for d in found)
    assert found[1].start == 39


# -- tasks --------------------------------------------------------------------------------------------------------------


def document(length: int = 113) -> EvalDocument:
    return EvalDocument("d", "even", "s", "l", "0" * 64, 0, 64, tuple(1000 + i for i in range(length)))


def test_continuation_predicts_the_token_after_each_one_fed() -> None:
    task = continuation(document(), SMALL)
    assert task.context == tuple(range(1000, 1064))
    assert task.fed == tuple(range(1064, 1088))
    assert task.expected == tuple(range(1065, 1089))


def test_passages_stand_at_their_depths_and_nowhere_in_the_continuation() -> None:
    plan = replace(SMALL, tests=("T2",))
    asks, task = planted(document(), Words(), plan, 0), continuation(document(), plan)
    assert len(asks.context) == 64
    for copy in asks.copies:
        passage = (*copy.fed, copy.expected[-1])
        assert copy.fed[-len(copy.expected) + 1 :] == copy.expected[:-1]
        assert len(passage) == plan.cue + plan.copied
        at = asks.context.index(passage[0])
        assert asks.context[at : at + len(passage)] == passage
        assert abs(at / 64 - copy.depth) < 0.02
        assert not set(passage) & set(task.context + task.fed)
    assert asks.lookups == ()


def test_every_question_has_its_answer_in_the_context_among_candidates_that_differ() -> None:
    words = Words()
    long = replace(SMALL, contexts=((400, 1),))
    one = EvalDocument("d", "even", "s", "l", "0" * 64, 0, 400, tuple(1000 + i for i in range(449)))
    asks = planted(one, words, long, 3)
    assert len(asks.context) == 400
    assert len(asks.lookups) == 2
    for question in asks.lookups:
        assert len(set(question.candidates)) == long.candidates
        stated = words.encode(f"The secret word of {question.name} is")
        at = next(i for i in range(400) if list(asks.context[i : i + len(stated)]) == stated)
        assert asks.context[at + len(stated)] == question.candidates[question.answer]
        assert list(question.fed[-len(stated) :]) == stated
    other = planted(one, words, long, 4)
    assert [q.name for q in other.lookups] != [q.name for q in asks.lookups]


def test_values_that_a_tokenizer_cannot_tell_apart_are_not_asked_for() -> None:
    class Coarse(Words):
        def encode(self, text: str, **_: Any) -> list[int]:
            return [1] * len(text.split())

    asks = planted(document(), Coarse(), SMALL, 0)
    assert asks.lookups == ()
    assert "tells only 1 of the values apart" in str(asks.lookup_reason)


# -- intervals ----------------------------------------------------------------------------------------------------------


def test_intervals_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for i in range(300):
        values = {d: rng.exponential(1.0, 15).tolist() for d in "ab"}
        found = bootstrap_mean(values, draws=500, seed=i)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.0 <= found.high
    # 95 % in the limit; a percentile interval of 30 skewed values falls somewhat short.
    assert 0.87 <= covered / 300 <= 0.98


def test_domains_have_equal_weights_whatever_their_number_of_documents() -> None:
    found = bootstrap_mean({"a": [0.0] * 2, "b": [1.0] * 8})
    assert found is not None
    assert found.mean == found.low == found.high == 0.5
    assert found.documents == 10


def test_no_interval_is_made_of_a_single_document() -> None:
    found = bootstrap_mean({"a": [1.0], "b": [2.0, 3.0]})
    assert found is not None
    assert (found.low, found.high) == (None, None)
    assert bootstrap_mean({}) is None


def test_the_same_seed_gives_the_same_interval() -> None:
    values = {"a": np.random.default_rng(0).normal(size=20).tolist()}
    assert bootstrap_mean(values, seed=3) == bootstrap_mean(values, seed=3) != bootstrap_mean(values, seed=4)


def test_a_ratio_and_its_inverse_cancel() -> None:
    found = geometric_mean({"a": [2.0, 0.5]})
    assert found is not None
    assert found.mean == pytest.approx(1.0)


def test_one_point_is_the_damage_of_two_hundredths_of_a_nat_and_tails_cost_more() -> None:
    assert quality_points(0.02, 0.05) == pytest.approx(1.0)
    assert quality_points(0.02, 0.12) == pytest.approx(1.0 + 0.5 * 0.04 / 0.02)


# -- gates and rows -----------------------------------------------------------------------------------------------------

GATED = Plan(contexts=((1024, 3),))


def full(
    name: str,
    *,
    nll: float = 2.0,
    short: float = 3.0,
    copy: float = 0.9,
    alone: float = 0.3,
    found: float = 0.7,
) -> dict[str, Any]:
    return {
        "kind": "document",
        "document": name,
        "context": 1024,
        "T1": {"nll": nll, "nll_short_context": short},
        "T2": {"accuracy": copy, "accuracy_no_context": alone},
        "T3": {"accuracy": found, "questions": 4},
    }


def measured(name: str, action: str = "a", kl: float = 0.1) -> dict[str, Any]:
    return {
        "kind": "subject",
        "document": name,
        "context": 1024,
        "action": action,
        "state": "real",
        "bytes": {
            "live": 10,
            "allocated": 12,
            "predicted_live": 10,
            "predicted_allocated": 12,
            "share16": 0.5,
            "share16_allocated": 0.6,
        },
        "T1": {"kl_mean": kl, "kl_p95": 3 * kl, "top1": 0.9, "nll_change": 0.0},
        "T2": {"kl_mean": kl, "accuracy": 0.8, "by_depth": [{"depth": 0.15, "kl": kl, "accuracy": 0.8}]},
        "T3": {"accuracy": 0.5, "flips": 0.2},
    }


NAMES = {(1024, n): "prose" for n in "xyz"}


def test_documents_that_are_not_copied_with_the_full_cache_do_not_count() -> None:
    records = [full("x"), full("y", copy=0.84), full("z", alone=0.61)]
    records += [measured(n, kl=k) for n, k in zip("xyz", (0.1, 9, 9), strict=True)]
    gate = {g.test: g for g in gates(records, GATED)}["T2"]
    assert gate.documents == ("x",)
    (found,) = rows(records, ["a"], NAMES, GATED)
    assert found.figures is not None
    copied, continued = found.figures["copy_kl"], found.figures["kl_mean"]
    assert copied is not None
    assert continued is not None
    assert (copied.mean, copied.documents) == (0.1, 1)
    assert continued.documents == 3
    assert found.by_depth == {"0.15": {"kl": 0.1, "accuracy": 0.8}}


def test_lookup_is_dropped_where_the_full_cache_cannot_do_it() -> None:
    records = [full(n, found=0.5) for n in "xyz"] + [measured(n) for n in "xyz"]
    gate = {g.test: g for g in gates(records, GATED)}["T3"]
    assert not gate.passed
    assert "0.500 of 12 questions" in gate.text
    (found,) = rows(records, ["a"], NAMES, GATED)
    assert found.figures is not None
    assert found.figures["lookup_accuracy"] is None


def test_continuation_is_gated_on_the_context_being_of_use() -> None:
    assert {g.test: g.passed for g in gates([full("x")], GATED)}["T1"]
    assert not {g.test: g.passed for g in gates([full("x", nll=3.0, short=2.9)], GATED)}["T1"]


def test_one_fault_makes_the_row_a_fault() -> None:
    broken = {
        "kind": "subject",
        "document": "y",
        "context": 1024,
        "action": "a",
        "state": "failed",
        "error": "E: no",
    }
    (found,) = rows([full("x"), full("y"), measured("x"), broken], ["a"], NAMES, GATED)
    assert found.to_record() == {
        "action": "a",
        "context": 1024,
        "state": "failed",
        "error": "E: no (on 1 of 2 documents)",
        "documents": 0,
    }


# -- tables -------------------------------------------------------------------------------------------------------------


def result() -> dict[str, Any]:
    plan = replace(GATED, tests=("T1", "T2", "T3"))
    refused = {
        "kind": "subject",
        "document": "x",
        "context": 1024,
        "action": "no",
        "state": "backend_infeasible",
        "reasons": [{"text": "not here"}],
    }
    small = [measured(n, "small", 0.3) for n in "xy"]
    for one in small:
        one["bytes"] = {**one["bytes"], "share16": 0.25}
    records = [full("x"), full("y"), *small, *(measured(n, "large") for n in "xy"), refused]
    return {
        "header": {
            "plan": plan.to_record(),
            "documents": [{"context": 1024, "domain": "prose"}] * 2,
            "model": {"name": "m", "fingerprint": "f", "dtype": "mlx.core.float32"},
            "device": "cpu", "rung": "cache", "mlx": "1", "mlx_lm": "2", "lumina_cache": "3",
        },
        "gates": [vars(g) for g in gates(records, plan)],
        "rows": [r.to_record() for r in rows(records, ["small", "large", "no"], NAMES, plan)],
        "lacking": [],
    }  # fmt: skip


def test_rows_are_sorted_by_share_and_refusals_stand_below() -> None:
    text = as_markdown(result())
    assert (
        text.index("| `large` | 50.0%") < text.index("| `small` | 25.0%") < text.index("backend_infeasible")
    )
    assert "0.3000 [0.3000, 0.3000]" in text
    assert "no: not here" in text
    assert "time (" in text  # which was not run
    console = Console(width=200, record=True)
    console.print(as_table(result()))
    shown = console.export_text()
    assert shown.index("large") < shown.index("small")


# -- plans --------------------------------------------------------------------------------------------------------------


def test_contexts_are_read_with_their_numbers_of_documents() -> None:
    assert parse_contexts("1k,4k", "30,10") == ((1024, 30), (4096, 10))
    assert parse_contexts("400", "2") == ((400, 2),)
    assert parse_contexts("1k, 2k", "3") == ((1024, 3), (2048, 3))
    for contexts, documents in (("1k,1k", "3"), ("x", "1"), ("1k", "many"), ("1k", "0")):
        with pytest.raises(EvaluationError):
            Plan(contexts=parse_contexts(contexts, documents))


def test_a_users_text_is_one_document_domain(tmp_path: Any) -> None:
    from lumina_cache.lab.evaluate import user_texts

    path = tmp_path / "mine.txt"
    path.write_text("some words")
    assert user_texts([path]) == [Document("mine.txt", "text", "some words", str(path), "unknown")]
    path.write_text(" ")
    with pytest.raises(EvaluationError, match="is empty"):
        user_texts([path])
