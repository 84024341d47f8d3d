"""Contract, items 5 and 6: actions wait for step boundaries, and a step without one costs no synchronisation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from harness import feed, held_of, quiet, same_bits, settle, tokens

from lumina_cache import layers
from lumina_cache.errors import ActionInfeasibleError
from lumina_cache.lab.tiny import build
from lumina_cache.layers import KVCache, leaves

EVICT = "evict:sinks_window@rows=12"

PACKAGE = str(Path(layers.__file__).parent)


class Hook:
    """Runs something once, after one layer of the model's next step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        self.n_layers = len(model.layers)
        self._wait: int | None = None
        self._then: Callable[[], Any] = lambda: None
        for cls in {type(layer) for layer in model.layers}:
            self._wrap(monkeypatch, cls)

    def after_layer(self, at: int, then: Callable[[], Any]) -> None:
        self._wait, self._then = at, then

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, cls: type) -> None:
        run = cls.__call__

        def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
            out = run(layer, *args, **kwargs)
            if self._wait == 0:
                self._wait = None
                self._then()
            elif self._wait is not None:
                self._wait -= 1
            return out

        monkeypatch.setattr(cls, "__call__", called)


def kv(cache: Any) -> list[KVCache]:
    return [leaf for leaf in leaves(cache) if isinstance(leaf, KVCache)]


def rows(cache: Any) -> set[int]:
    return {one.rows for one in held_of(cache) if one.kind == "kv"}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3",
        "gemma3n",
        "gemma4_text",
        "llama4",
        "falcon_h1",
        "longcat_flash",
        "qwen3_next",
        "mistral3",
    ],
)
def test_an_action_asked_for_inside_a_step_waits_for_the_boundary(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, name: str, n: int
) -> None:
    """Whichever layer it is asked from, the running step computes what it would have, and the next one acts."""
    model, ids = tiny(name), tokens(30 + n)
    hook = Hook(monkeypatch, model)
    want = feed(model, quiet(model), ids, [30, n])[:, 30:]
    for at in range(hook.n_layers):
        cache = quiet(model)
        feed(model, cache, ids, [30])
        answers: list[Any] = []
        hook.after_layer(
            at, lambda cache=cache, answers=answers: answers.append((cache.apply(EVICT), rows(cache)))
        )
        got = model(ids[:, 30:], cache=cache)
        mx.eval(got)
        assert same_bits(got, want), f"asked for in layer {at}"
        [(applied, rows_then)] = answers
        # Once the last update is made and attended to, the step is over, and there is nothing to wait for.
        assert (applied is None) == (12 not in rows_then)
        assert applied is None or at >= len(cache) - 1
        settle(cache)
        assert rows(cache) == {12}, f"asked for in layer {at}"


TOUCHES: dict[str, Callable[[Any, Any], Any]] = {
    "make_mask of one token": lambda model, cache: kv(cache)[0].make_mask(1),
    "make_mask of several": lambda model, cache: kv(cache)[0].make_mask(3),
    "state": lambda model, cache: cache[-1].state,
    "nbytes of an entry": lambda model, cache: cache[-1].nbytes,
    "nbytes of the cache": lambda model, cache: cache.nbytes,
    "trim": lambda model, cache: cache[0].trim(1),
    "is_trimmable": lambda model, cache: cache[0].is_trimmable(),
    "a step": lambda model, cache: mx.eval(model(tokens(1), cache=cache)),
    "an export": lambda model, cache: cache.to_mlx(),
    "another action": lambda model, cache: cache.apply("keep"),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_a_pending_action_is_settled_by_the_next_touch_from_outside(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, touch: str
) -> None:
    model = tiny("llama")
    hook = Hook(monkeypatch, model)
    cache = quiet(model)
    feed(model, cache, tokens(30), [30])
    hook.after_layer(0, lambda: cache.apply(EVICT))
    mx.eval(model(tokens(2), cache=cache))
    assert rows(cache) == {32}
    TOUCHES[touch](model, cache)
    assert rows(cache) in ({12}, {13})
    assert next(r["action"] for r in cache.log.records if r["event"] == "action.applied") == EVICT


def test_a_first_update_of_one_token_settles_a_pending_action_too(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    hook = Hook(monkeypatch, model)
    cache = quiet(model)
    feed(model, cache, tokens(30), [30])
    hook.after_layer(0, lambda: cache.apply(EVICT))
    mx.eval(model(tokens(2), cache=cache))
    shape = (1, 2, 1, 32)
    keys, _ = cache[0].update_and_fetch(mx.ones(shape), mx.ones(shape))
    assert keys.shape[2] == 13


def test_an_action_that_turns_out_infeasible_at_the_boundary_is_reported_and_changes_nothing(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt_oss")
    hook = Hook(monkeypatch, model)
    cache = quiet(model)
    ids = tokens(40)
    want = feed(model, quiet(model), ids, [30, 3, 1])
    first = feed(model, cache, ids, [30])
    hook.after_layer(0, lambda: cache.apply("quant:affine,bits=4,group=32"))
    second = feed(model, cache, ids, [3], start=30)
    third = feed(model, cache, ids, [1], start=33)
    assert same_bits(mx.concatenate([first, second, third], axis=1), want)
    events = [r["event"] for r in cache.log.records]
    assert "action.refused" in events
    assert "pending_action_failed" in [r.get("code") for r in cache.log.records]


def test_an_action_that_breaks_at_the_boundary_does_not_break_the_next_step(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny("llama"), tokens(40)
    hook = Hook(monkeypatch, model)
    cache = quiet(model)
    feed(model, cache, ids, [30])
    hook.after_layer(0, lambda: cache.apply(EVICT))
    mx.eval(model(ids[:, 30:33], cache=cache))
    monkeypatch.setattr(KVCache, "gather", lambda *_: 1 / 0)
    want = feed(model, quiet(model), ids, [30, 3, 1])[:, 33:]
    assert same_bits(feed(model, cache, ids, [1], start=33), want)
    assert "pending_action_failed" in [r.get("code") for r in cache.log.records]


class Unused:
    """A model with one cache entry more than it has layers."""

    def __init__(self, model: Any) -> None:
        self.model, self.layers, self.model_type = model, model.layers, "unused"

    def make_cache(self) -> list[Any]:
        from mlx_lm.models import cache as stock

        return [*stock.make_prompt_cache(self.model), stock.KVCache()]

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        return self.model(ids, cache=cache[:-1])


def test_entries_a_model_never_uses_do_not_block_boundaries(tiny: Any) -> None:
    model = Unused(tiny("llama"))
    cache = quiet(model)
    feed(model, cache, tokens(20), [10, 5, 5])
    assert cache.apply("evict:sinks_window@rows=8") is not None
    assert [one.rows for one in held_of(cache)] == [8, 8, 0]


def test_entries_a_model_never_uses_are_known_from_the_start_when_there_is_a_budget(tiny: Any) -> None:
    model = Unused(tiny("llama"))
    cache = quiet(model, budget="1MB")
    feed(model, cache, tokens(10), [10])
    assert cache.apply("evict:sinks_window@rows=8") is not None
    assert [one.rows for one in held_of(cache)] == [8, 8, 0]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("name", ["llama", "longcat_flash", "kimi_linear"])
def test_a_step_cut_short_by_an_exception_does_not_confuse_boundaries(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After it, actions still wait for the last layer. (The layers that the exception kept from their tokens miss
    them for good, as in the stock cache.)"""
    model, ids = tiny(name), tokens(40)
    hook = Hook(monkeypatch, model)

    def interrupt() -> None:
        raise Interrupted

    def cut_short(cache: Any) -> None:
        hook.after_layer(0, interrupt)
        with pytest.raises(Interrupted):
            model(ids[:, 20:21], cache=cache)

    def run(asked: bool) -> tuple[mx.array, Any]:
        cache = quiet(model)
        feed(model, cache, ids, [20])
        cut_short(cache)
        for leaf in leaves(cache):  # what the layers disagree on is taken back by hand
            if leaf.kind != "not_kv" and leaf.offset == 21:
                leaf.offset = 20
        if asked:
            hook.after_layer(0, lambda: cache.apply("evict:sinks_window@rows=9"))
        return feed(model, cache, ids, [1], start=20), cache

    want, _ = run(asked=False)
    got, cache = run(asked=True)
    assert same_bits(got, want)
    settle(cache)
    assert rows(cache) == {9}


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the synchronising calls that this library makes."""
    made: list[str] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if PACKAGE in sys._getframe(1).f_code.co_filename:
                made.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in ("eval", "async_eval", "synchronize"):
        watch(mx, name)
    for name in ("item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__iter__"):
        if hasattr(mx.array, name):
            watch(mx.array, name)
    return made


@pytest.mark.parametrize("budget", [None, "1GB"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "falcon_h1", "deepseek_v32"])
def test_a_step_without_action_evaluates_nothing(
    tiny: Any, evaluations: list[str], name: str, budget: str | None
) -> None:
    model, ids = tiny(name), tokens(100)
    cache = quiet(model, budget=budget)
    # A step may not evaluate anything even where it decides: arrays are unevaluated until the caller asks for them.
    evaluations.clear()
    logits = [model(ids[:, :30], cache=cache)]
    logits += [model(ids[:, i : i + 1], cache=cache) for i in range(30, 100)]
    cache.observe()
    assert evaluations == []
    mx.eval(logits)
    cache.apply("evict:sinks_window@rows=12")
    assert evaluations, "the counter counts"


def test_masks_of_evicted_rows_with_a_window_are_built_without_reading_arrays(
    tiny: Any, evaluations: list[str]
) -> None:
    model, ids = tiny("mistral3"), tokens(50)
    cache = quiet(model)
    feed(model, cache, ids, [30])
    cache.apply(EVICT)
    evaluations.clear()
    for i, n in ((30, 1), (31, 3), (34, 1)):
        model(ids[:, i : i + n], cache=cache)
    assert evaluations == []


def test_a_callback_that_asks_in_every_layer_of_every_step_meets_itself_in_no_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first action probes the model, whose layers then ask again."""
    model = build("llama", seed=11)  # not probed yet
    hook = Hook(monkeypatch, model)
    cache = quiet(model)

    def again() -> None:
        hook.after_layer(0, again)
        with contextlib.suppress(ActionInfeasibleError):  # once 12 rows are left
            cache.apply(EVICT)

    feed(model, cache, tokens(30), [30])
    again()
    feed(model, cache, tokens(2), [2])
    assert rows(cache) == {12}


def test_layers_are_swapped_inside_and_never_replaced(tiny: Any) -> None:
    model = tiny("falcon_h1")
    cache = quiet(model)
    before = [id(leaf) for leaf in leaves(cache)], [type(leaf) for leaf in leaves(cache)]
    feed(model, cache, tokens(30), [30])
    cache.apply(EVICT)
    cache.apply("quant:affine,bits=8,group=32")
    cache.apply("reclaim")
    assert ([id(leaf) for leaf in leaves(cache)], [type(leaf) for leaf in leaves(cache)]) == before
    assert {type(leaf).__module__ for leaf in leaves(cache)} == {layers.__name__}
