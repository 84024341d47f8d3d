"""Ranks agree on what they see and do: the values, the points, and real processes on mlx's ring backend."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import pytest
from harness import feed, quiet, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache import LuminaCache, controller
from lumina_cache.actions import Evict, Keep, Reclaim
from lumina_cache.agree import CHUNK_TOKENS, Agreement, Stance, agreement, decode, encode, tightest
from lumina_cache.errors import (
    AgreementError,
    LuminaError,
    LuminaWarning,
    RanksApartError,
    UnsupportedCacheError,
)
from lumina_cache.peers import GroupPeers

T = TypeVar("T")

nbytes = st.none() | st.integers(0, 2**63 - 1)
reals = st.none() | st.floats(allow_nan=False, allow_infinity=False)
stances = st.builds(
    Stance,
    limit=nbytes,
    held=nbytes,
    predicted=nbytes,
    available=nbytes,
    trouble=st.none() | st.booleans(),
    price_of_time=reals,
    error_mean=reals,
    error_spread=reals,
)


# -- values -------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(stances)
def test_a_stance_survives_the_wire_to_the_last_bit(stance: Stance) -> None:
    row = encode(stance)
    assert row.dtype == np.int64
    through_mlx = np.array(mx.array(row))
    assert decode(through_mlx) == stance
    assert encode(decode(through_mlx)).tobytes() == row.tobytes()


def test_zero_is_not_unknown() -> None:
    zero = Stance(0, 0, 0, 0, False, 0.0, 0.0, 0.0)
    assert decode(encode(zero)) == zero != Stance()
    assert decode(encode(Stance())) == Stance()


SMALLEST = {"limit", "available"}


@settings(deadline=None)
@given(st.lists(stances, min_size=1, max_size=5))
def test_the_tightest_of_every_number_wins_and_unknown_never_does(ranks: list[Stance]) -> None:
    agreed = tightest(ranks)
    for f in fields(Stance):
        known = [n for one in ranks if (n := getattr(one, f.name)) is not None]
        got = getattr(agreed, f.name)
        if not known:
            assert got is None
        elif f.name in SMALLEST:
            assert got in known
            assert all(got <= n for n in known)
        else:
            assert got in known
            assert all(got >= n for n in known)


@settings(deadline=None)
@given(stances, stances, stances)
def test_it_does_not_matter_who_is_asked_first_or_twice(a: Stance, b: Stance, c: Stance) -> None:
    assert tightest([a, b, c]) == tightest([c, b, a]) == tightest([tightest([a, b]), c, a])


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": -1},
        {"held": 2**63},
        {"available": 1.5},
        {"price_of_time": float("nan")},
        {"error_mean": float("inf")},
    ],
)
def test_numbers_that_cannot_be_sent_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(AgreementError, match=next(iter(wrong))):
        Stance(**wrong)


# -- the protocol, with threads for ranks ---------------------------------------------------------------------------------


class Together:
    """Peers that are threads of this process; a rank that nobody joins within ten seconds fails its test."""

    def __init__(self, size: int) -> None:
        self.rows: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=10)
        self.gathered = [0] * size

    def peer(self, rank: int) -> Any:
        class Peer:
            size = len(self.rows)

            def gather(_, row: Any) -> Any:
                self.rows[rank] = row
                self.gathered[rank] += 1
                self.barrier.wait()
                found = np.stack(self.rows)
                self.barrier.wait()
                return found

        one = Peer()
        one.rank = rank  # type: ignore[attr-defined]
        return one

    def run(self, body: Callable[[int, Any], T]) -> list[T | Exception]:
        found: list[Any] = [None] * len(self.rows)

        def work(rank: int) -> None:
            try:
                found[rank] = body(rank, self.peer(rank))
            except Exception as error:
                found[rank] = error
                if not isinstance(error, LuminaError):
                    self.barrier.abort()

        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(len(self.rows))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
        return found


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    st.integers(2, 3),
    st.lists(st.sampled_from([1, 1, 1, 1, 3, CHUNK_TOKENS, 200]), min_size=1, max_size=40),
    st.integers(1, 9),
)
def test_whatever_ranks_see_they_meet_at_the_same_points_and_do_the_same(
    data: st.DataObject, size: int, steps: list[int], every: int
) -> None:
    """Limits come and go on every rank by itself, actions fail on some, deciding fails on some."""
    limits = data.draw(
        st.lists(
            st.lists(st.none() | st.integers(0, 2000), min_size=len(steps), max_size=len(steps)),
            min_size=size,
            max_size=size,
        )
    )
    broken = data.draw(st.sets(st.tuples(st.integers(0, size - 1), st.integers(1, len(steps))), max_size=4))
    undecided = data.draw(
        st.sets(st.tuples(st.integers(0, size - 1), st.integers(1, len(steps))), max_size=4)
    )

    def body(rank: int, peer: Any) -> list[Any]:
        ranks, held, done = Agreement(peer, every), 0, []
        for step, count in enumerate(steps, start=1):
            predicted = held + count
            if ranks.due(step, count, ranks.over(predicted)):

                def decide(agreed: Stance, step: int = step) -> Any:
                    if (rank, step) in undecided:
                        raise OSError("no")
                    return Evict("sinks_window", rows=max(8, (agreed.limit or 0) // 2))

                settled = ranks.settle(Stance(limits[rank][step - 1], held, predicted), decide)
                done.append(
                    (step, settled.stance, settled.action, settled.agreed, ranks.even, ranks.limited_by)
                )
                if settled.action != Keep() and (rank, step) not in broken:
                    held = min(held, settled.action.rows)
            held += count
        return done

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LuminaWarning)
        together = Together(size)
        first, *others = together.run(body)
    assert not isinstance(first, Exception), first
    assert first[0][0] == 1
    for other in others:
        assert other == first
    assert len(set(together.gathered)) == 1


def test_ranks_meet_at_chunks_and_every_so_many_tokens_and_at_overflow_of_what_was_agreed() -> None:
    def body(rank: int, peer: Any) -> list[int]:
        ranks, met = Agreement(peer, every=10), []
        for step, count in enumerate([CHUNK_TOKENS, CHUNK_TOKENS, *[1] * 30], start=1):
            predicted = 1000 + step
            if ranks.due(step, count, ranks.over(predicted)):
                met.append(step)
                ranks.agree(Stance(limit=1016 if rank else None, held=predicted, predicted=predicted))
                if step == 20:
                    assert ranks.confirm(Reclaim())
        return met

    assert Together(2).run(body) == [[1, 2, 3, 13, *range(17, 33)]] * 2


def test_an_overflow_that_a_decision_left_as_it_was_waits_for_the_next_regular_point() -> None:
    def body(rank: int, peer: Any) -> list[int]:
        ranks, met = Agreement(peer, every=10), []
        for step in range(1, 31):
            if ranks.due(step, 1, ranks.over(100)):
                met.append(step)
                assert (
                    ranks.settle(Stance(limit=50, held=100, predicted=100), lambda _: Keep()).action == Keep()
                )
        return met

    assert Together(2).run(body) == [[1, 11, 21]] * 2


def test_when_bytes_come_apart_the_one_that_overflows_does_not_wait_for_the_other_alone() -> None:
    """The action fails on rank 1: it stays over the limit, in every step, and rank 0 is not."""

    def body(rank: int, peer: Any) -> list[tuple[int, bool]]:
        ranks, held, met = Agreement(peer, every=10), 100, []
        for step in range(1, 26):
            if ranks.due(step, 1, ranks.over(held + 1)):
                settled = ranks.settle(Stance(50, held, held + 1), lambda _: Evict("sinks_window", rows=20))
                met.append((step, ranks.even))
                if rank == 0:
                    held = settled.action.rows  # type: ignore[attr-defined]
            held += 1
        return met

    assert Together(2).run(body) == [[(1, True), (2, False), (12, False), (22, False)]] * 2


def test_asking_twice_about_one_step_does_not_count_its_tokens_twice() -> None:
    def body(rank: int, peer: Any) -> None:
        ranks = Agreement(peer, every=4)
        ranks.agree(Stance())
        assert [ranks.due(step, 1, False) for step in (1, 1, 2, 2, 3, 3, 4)] == [False] * 6 + [True]

    assert Together(2).run(body) == [None, None]


def test_when_choices_differ_every_rank_keeps_everything_and_says_so() -> None:
    def body(rank: int, peer: Any) -> Any:
        ranks = Agreement(peer)
        stance = Stance(limit=10, predicted=20)
        settled = [
            ranks.settle(stance, lambda _: Evict("sinks_window", rows=64 + rank)),
            ranks.settle(stance, lambda _: Reclaim() if rank else 1 / 0),  # type: ignore[arg-type, return-value]
            ranks.settle(stance, lambda _: Reclaim()),
        ]
        assert not ranks.confirm(None)  # nobody could choose: that is not an agreement
        return [(one.action, one.agreed) for one in settled]

    with pytest.warns(LuminaWarning) as caught:
        found = Together(2).run(body)
    assert found == [[(Keep(), False), (Keep(), False), (Reclaim(), True)]] * 2
    texts = sorted(str(one.message) for one in caught)
    assert len(texts) == 4
    assert "here evict:sinks_window@rows=64" in "".join(texts)
    assert "ZeroDivisionError" in "".join(texts)


@pytest.mark.parametrize("apart", ["step", "kind", "other"])
def test_ranks_at_different_points_find_out_on_both_sides(apart: str) -> None:
    def body(rank: int, peer: Any) -> None:
        ranks = Agreement(peer)
        ranks.due(7 + (rank if apart == "step" else 0), 1, False)
        if rank and apart == "other":
            peer.gather(np.arange(13, dtype=np.int64))  # numbers of some other collective
        elif rank and apart == "kind":
            ranks.confirm(Keep())
        else:
            ranks.agree(Stance())

    found = Together(2).run(body)
    assert isinstance(found[0], RanksApartError)
    assert apart == "other" or isinstance(found[1], RanksApartError)


def test_a_single_rank_pays_nothing() -> None:
    class Alone:
        """A group of one; anything but its size would be a cost."""

        def size(self) -> int:
            return 1

    assert agreement(None) is None
    assert agreement(Alone()) is None


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(AgreementError, match="every 0 tokens"):
        Agreement(Together(2).peer(0), every=0)
    with pytest.raises(AgreementError, match="-1"):
        GroupPeers(None, timeout=-1)


def test_a_copy_stands_where_the_original_stood_and_goes_its_own_way() -> None:
    def body(rank: int, peer: Any) -> Any:
        ranks = Agreement(peer, every=3)
        ranks.agree(Stance(limit=5))
        copy = ranks.copy()
        ranks.due(1, 2, False)
        return copy.agreed, [copy.due(step, 1, False) for step in (1, 2, 3)], ranks.due(2, 1, False)

    assert Together(2).run(body) == [(Stance(limit=5), [False, False, True], True)] * 2


# -- two processes --------------------------------------------------------------------------------------------------------


def test_the_outlier_guard_looks_at_the_rows_of_what_ranks_choose_once(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Alike:
        rank, size = 0, 2

        def gather(self, row: Any) -> Any:
            return np.stack([row, row])

    looked: list[str] = []
    once = controller.first_guarded
    monkeypatch.setattr(controller, "first_guarded", lambda *args: looked.append(str(args[1])) or once(*args))
    model = tiny("llama")
    cache = quiet(model, budget=300_000)
    cache._control.ranks = Agreement(Alike())
    feed(model, cache, tokens(600), [100] * 6)
    applied = [r["action"] for r in cache.log.records if r["event"] == "action.applied"]
    assert any("quant" in action for action in applied)
    assert looked == applied


def launch(scenario: str, directory: Path, seconds: float = 120) -> list[list[dict[str, Any]]]:
    """What both ranks of a scenario of ``ranks_worker.py`` said; a rank that has died has said less."""
    with socket.socket() as one, socket.socket() as two:
        for s in (one, two):
            s.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{s.getsockname()[1]}"] for s in (one, two)]
    (directory / "hosts.json").write_text(json.dumps(hosts))
    root = Path(__file__).parents[1]
    started = [
        subprocess.Popen(
            [sys.executable, str(root / "tests" / "ranks_worker.py"), scenario],
            env={
                **os.environ,
                "MLX_RANK": str(rank),
                "MLX_HOSTFILE": str(directory / "hosts.json"),
                "PYTHONPATH": str(root),
            },
            stdout=(directory / f"out{rank}").open("w"),
            stderr=(directory / f"err{rank}").open("w"),
        )
        for rank in (0, 1)
    ]
    try:
        started[0].wait(seconds)
        if scenario != "hangs":
            started[1].wait(seconds)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert started[0].returncode == 0, (directory / "err0").read_text()
    return [[json.loads(line) for line in (directory / f"out{r}").read_text().splitlines()] for r in (0, 1)]


def common(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What has to be the same on both ranks: all but times and warnings."""
    return [{k: v for k, v in one.items() if k != "seconds"} for one in said if "warnings" not in one]


def actions(said: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(one["step"], one["action"]) for one in said if one.get("action", "keep") != "keep"]


@pytest.mark.slow
def test_two_processes_act_alike_while_only_one_of_them_is_short_of_memory(tmp_path: Path) -> None:
    mine, other = launch("pressure", tmp_path)
    assert common(mine) == common(other)
    # Rank 1's memory gets short before step 21 and before step 60, rank 0 never sees anything; they meet every 16 tokens.
    assert [step for step, _ in actions(mine)] == [36, 69]
    after = {one["step"]: one for one in mine if "step" in one}
    for step in (37, 70):
        assert after[step]["nbytes"] <= after[step]["limit"]
        assert after[step]["limited_by"] == 1
    assert [one["step"] for one in mine if one.get("tokens", 1) > 1] == [1, 2, 3]
    assert mine[-1] == other[-1] == {"warnings": []}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["sharded", "pending", "generate"])
def test_a_models_own_collectives_and_the_agreement_leave_each_other_alone(
    scenario: str, tmp_path: Path
) -> None:
    """A sharded llama; collectives still under way at the boundary; mlx-lm's generate_step over a sharded llama."""
    mine, other = launch(scenario, tmp_path)
    assert mine[-2]["done"], (tmp_path / "err0").read_text()
    assert common(mine) == common(other)
    assert [step for step, _ in actions(mine)] == [36, 69]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["differs", "fails"])
def test_two_processes_that_do_not_choose_alike_keep_everything(scenario: str, tmp_path: Path) -> None:
    mine, other = launch(scenario, tmp_path)
    assert actions(mine) == actions(other) == []
    points = [one["step"] for one in mine if not one.get("agreed", True)]
    assert points == [one["step"] for one in other if not one.get("agreed", True)]
    assert points == [36, 52, 68, 84]
    assert mine[-2]["nbytes"] == other[-2]["nbytes"]
    assert mine[-1]["warnings"]
    assert other[-1]["warnings"]


@pytest.mark.slow
def test_an_action_that_fails_on_one_rank_does_not_take_the_ranks_apart(tmp_path: Path) -> None:
    mine, other = launch("action_fails", tmp_path)
    met = [(one["step"], one["action"], one["even"]) for one in mine if "step" in one]
    assert met == [(one["step"], one["action"], one["even"]) for one in other if "step" in one]
    assert [even for step, _, even in met if step > 36] == [False] * 4
    assert mine[-2]["done"]
    assert other[-2]["done"]
    assert mine[-2]["nbytes"] < other[-2]["nbytes"]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["dies", "hangs"])
def test_a_rank_that_is_lost_ends_the_other_with_a_typed_error_within_the_deadline(
    scenario: str, tmp_path: Path
) -> None:
    start = time.monotonic()
    mine, other = launch(scenario, tmp_path, seconds=60)
    assert time.monotonic() - start < 60
    assert max(one.get("step", 0) for one in other) == 37, (
        "the other rank was not lost where it should have been"
    )
    error, second, _ = mine[-3:]
    assert error["error"] == "RankLostError"
    assert error["step_seconds"] < {"dies": 3.0, "hangs": 4.0 + 3.0}[scenario]
    # It stays lost, and nobody waits for it again.
    assert second["second"] == "RankLostError"
    assert second["seconds"] < 0.5
    assert not [one for one in mine if one.get("step", 0) > 40]


# -- a cache that agrees by itself ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_caches_of_two_ranks_hold_one_budget_alike_while_only_one_sees_pressure(tmp_path: Path) -> None:
    """A sharded llama under mlx-lm's ``generate_step``; rank 0 knows nothing of its memory, and is looked at in between."""
    mine, other = launch("whole", tmp_path)
    assert common(mine) == common(other)
    applied = [one for one in mine if "applied" in one]
    # The first while the prompt is read, under the budget; the second under the pressure that rank 1 sees.
    assert len(applied) >= 2, applied
    assert all(one["after"] <= 150_000 for one in applied)
    assert mine[-2]["nbytes"] <= 150_000
    assert len(mine[-2]["tokens"]) == 90
    assert mine[-1] == {"warnings": []}


@pytest.mark.slow
def test_caches_of_ranks_that_choose_differently_fall_back_on_eviction_by_position(tmp_path: Path) -> None:
    mine, other = launch("whole_differs", tmp_path)
    assert common(mine) == common(other)
    assert [one["warned"] for one in mine if one.get("warned") == "ranks_apart"] == ["ranks_apart"]
    applied = [one["applied"] for one in mine if "applied" in one]
    assert applied
    assert all(one.startswith("evict:sinks_window") for one in applied)
    assert mine[-2]["nbytes"] <= 300_000


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_generation_of_the_other(tmp_path: Path) -> None:
    start = time.monotonic()
    mine, _ = launch("whole_dies", tmp_path, seconds=60)
    assert time.monotonic() - start < 60
    [error] = [one for one in mine if "error" in one]
    assert error["error"] in ("RankLostError", "RuntimeError")
    assert error["step_seconds"] < 10.0


def test_ranks_cannot_share_a_joint_cache_with_a_draft(tiny: Any) -> None:
    model = tiny("llama")
    with pytest.raises(UnsupportedCacheError, match="draft_model"):
        LuminaCache(model, draft_model=model, group=object())
