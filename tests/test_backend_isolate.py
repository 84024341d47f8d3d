"""A question that kills the process that answers it is an answer too."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import psutil
import pytest

from lumina_cache.backend.isolate import Answer, ask, first_line

HERE = f"{__name__}:reply"


def reply(question: Any) -> Any:
    """Runs in the child process."""
    match question:
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("no such layout\nand a second line")
        case "sleep":
            time.sleep(60)
        case "print":
            print("noise on standard output", flush=True)
            os.write(1, b"and on its descriptor\n")
        case "not json":
            return object()
    return {"question": question, "pid": os.getpid()}


def pids(answers: list[Answer]) -> list[int]:
    return [a.value["pid"] for a in answers if a.died is None]


def test_questions_are_answered_in_order_by_one_other_process() -> None:
    answers = ask(HERE, ["a", {"b": [1, 2]}, None])
    assert [a.value["question"] for a in answers] == ["a", {"b": [1, 2]}, None]
    assert len(set(pids(answers))) == 1
    assert os.getpid() not in pids(answers)
    assert all(a.seconds > 0 for a in answers)


@pytest.mark.parametrize(("question", "how"), [("abort", "SIGABRT"), ("exit", "exit code 3")])
def test_a_question_that_ends_the_process_is_an_outcome_and_the_next_one_is_still_answered(
    question: str, how: str
) -> None:
    before, died, after = ask(HERE, ["before", question, "after"])
    assert before.died is None
    assert how in str(died.died)
    assert died.value is None
    assert after.value["question"] == "after"
    assert before.value["pid"] != after.value["pid"]


def test_a_question_that_raises_is_an_outcome_and_its_process_goes_on() -> None:
    before, raised, unserialisable, after = ask(HERE, ["before", "raise", "not json", "after"])
    assert raised.died == "ValueError: no such layout"
    assert "not JSON serializable" in str(unserialisable.died)
    assert before.value["pid"] == after.value["pid"]


def test_a_question_that_takes_too_long_is_given_up() -> None:
    start = time.perf_counter()
    slow, after = ask(HERE, ["sleep", "after"], timeout=0.5)
    assert slow.died == "no answer within 0.5 s"
    assert after.value["question"] == "after"
    assert time.perf_counter() - start < 30


def test_what_the_answering_code_prints_does_not_reach_the_answers(capfd: pytest.CaptureFixture[str]) -> None:
    (noisy,) = ask(HERE, ["print"])
    assert noisy.value["question"] == "print"
    assert capfd.readouterr().out == ""


def test_no_process_and_no_descriptor_is_left_behind() -> None:
    me = psutil.Process()
    children, descriptors = set(me.children()), me.num_fds()
    ask(HERE, ["a", "abort", "b"])
    assert set(me.children()) <= children
    assert me.num_fds() <= descriptors


def test_a_process_that_cannot_start_is_an_outcome_of_every_question() -> None:
    answers = ask("no_such_module:reply", ["a", "b"])
    assert all("exit code 1" in str(a.died) for a in answers)


def test_answers_are_reported_as_they_come() -> None:
    seen: list[tuple[int, str | None]] = []
    ask(HERE, ["a", "abort"], on_answer=lambda number, answer: seen.append((number, answer.died)))
    assert [n for n, _ in seen] == [0, 1]
    assert seen[0][1] is None


def test_the_child_imports_what_the_parent_imports() -> None:
    assert any(p.endswith("tests") for p in sys.path), "otherwise the child could not find this file"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (KeyError(), "KeyError"),
        (OSError("  padded  "), "OSError: padded"),
    ],
)
def test_the_first_line_of_an_exception_names_its_type(error: Exception, text: str) -> None:
    assert first_line(error) == text
