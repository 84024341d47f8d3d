"""The attention hook: what it leaves alone, what it sees, and that nothing of it stays behind."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import io
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from harness import fast_first, feed, pieces, quiet, same_bits, tokens
from mlx_lm.models import base, llama
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.backend import attention
from lumina_cache.backend.attention import (
    attention_hook,
    is_hooked,
    is_served,
    stepped_aside,
    warn_if_lapsed,
)
from lumina_cache.backend.hookable import hookable
from lumina_cache.errors import BackendInterfaceError, LuminaWarning, UnsupportedCacheError
from lumina_cache.lab.tiny import SPECS
from lumina_cache.layers import managed

STOCK = base.scaled_dot_product_attention

FAST = ("deepseek_v3", "gemma3n", "gpt_oss", "llama", "qwen3_next", "recurrent_gemma")

#: Models with layers that the hook does not reach: layers that hold rows, layers reached, and part of each reason.
UNREACHED = {
    "afm7": (2, 1, "name no cache"),
    "deepseek_v32": (4, 0, "a list of caches"),
    "gear": (2, 0, "does not call"),
    "gemma2": (2, 0, "softmax by hand"),
    "gemma3n": (3, 1, "in one step"),
    "gemma4": (3, 1, "name no cache"),
    "gemma4_text": (3, 1, "name no cache"),
    "glm_moe_dsa": (4, 0, "a list of caches"),
    "iquestloopcoder": (4, 2, "in one step"),
    "minimax_m3_vl": (3, 2, "does not call"),
    "phi3small": (2, 1, "does not call"),
    "plamo2": (2, 0, "calls mx.fast"),
}


class Seen:
    """Counts calls and sums the queries, so that there is something to evaluate."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.total = mx.zeros(())

    def observe(
        self, layer: Any, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> list[mx.array]:
        self.shapes.append(queries.shape)
        self.total = self.total + queries.sum()
        return [self.total]


class Answer:
    """Serves with ``answer(queries, keys, values, scale)``, or not at all."""

    def __init__(self, answer: Callable[..., mx.array] | None) -> None:
        self.answer = answer
        self.asked = 0

    def serve(
        self, layer: Any, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> mx.array | None:
        self.asked += 1
        return None if self.answer is None else self.answer(queries, keys, values, scale, mask, sinks)


def held_names() -> dict[tuple[str, str], int]:
    """Identity of mlx-lm's attention, or of what stands for it, under every name of every loaded module."""
    return {
        (module, name): id(value)
        for module, loaded in list(sys.modules.items())
        if module.startswith("mlx_lm.") and isinstance(loaded, ModuleType)
        for name, value in vars(loaded).items()
        if getattr(value, "__name__", None) == STOCK.__name__ and callable(value)
    }


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = held_names()
    yield
    gc.collect()
    after = held_names()
    assert {k: after.get(k) for k in before} == before
    assert not attention._sites
    assert not attention._attached


def rows_of(cache: Any) -> list[Any]:
    return [layer for entry in cache for layer in managed(entry) if layer.holds_rows]


# -- what it leaves alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fast_first(SPECS, FAST))
def test_an_observed_cache_gives_the_logits_of_the_stock_cache_bit_for_bit(name: str, tiny: Any) -> None:
    model, ids, steps = tiny(name), tokens(14), pieces(11, 6, decode=3)
    want = feed(model, make_prompt_cache(model), ids, steps)
    cache, seen = quiet(model), Seen()
    with attention_hook(model) as hook:
        for layer in rows_of(cache) if hook.sites else ():
            hook.observe(layer, seen)
        got = feed(model, cache, ids, steps)
    assert same_bits(got, want)
    assert not hook.sites or not hookable(model).seen or len(seen.shapes) >= len(steps)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_server_that_declines_leaves_the_logits_as_they_are(name: str, tiny: Any) -> None:
    model, ids, steps = tiny(name), tokens(9), pieces(8, 5, decode=1)
    want = feed(model, make_prompt_cache(model), ids, steps)
    cache, server = quiet(model), Answer(None)
    with attention_hook(model) as hook:
        for layer in rows_of(cache):
            hook.serve(layer, server)
        assert same_bits(feed(model, cache, ids, steps), want)
    assert server.asked == len(steps) * len(rows_of(cache))


def test_calls_that_name_no_registered_layer_go_through_as_they_came(tiny: Any) -> None:
    model = tiny("llama")
    seen: list[Any] = []
    marker = object()

    def original(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return marker

    stock, managed_cache = make_prompt_cache(model)[0], quiet(model)[0]
    dispatch = attention._dispatcher(original)  # type: ignore[arg-type]
    for cache in (None, stock, managed_cache, "no cache"):
        assert dispatch(1, 2, 3, cache, scale=4, mask=5) is marker
        assert dispatch(1, 2, 3, cache=cache, scale=4, mask=5, sinks=6) is marker
        assert seen[-2:] == [
            ((1, 2, 3, cache), {"scale": 4, "mask": 5}),
            ((1, 2, 3), {"cache": cache, "scale": 4, "mask": 5, "sinks": 6}),
        ]
    del attention._dispatchers[original]  # type: ignore[arg-type]


@pytest.mark.parametrize("observed", [False, True])
def test_wrong_calls_fail_as_mlx_lms_own(observed: bool, tiny: Any) -> None:
    model = tiny("llama")
    layer = quiet(model)[0]
    q = mx.zeros((1, 4, 2, 8))
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((q, q, q, layer), {}),
        ((q, q, q, layer, 1.0, None, None, None), {}),
        ((q, q, q), {"cache": layer, "scale": 1.0, "mask": None, "softcap": 3}),
        ((q, q[..., :4], q), {"cache": layer, "scale": 1.0, "mask": None}),
    ]
    with attention_hook(model) as hook:
        if observed:
            hook.observe(layer, Seen())
        for args, kwargs in wrong:
            texts = []
            for function in (STOCK, llama.scaled_dot_product_attention):
                with pytest.raises((TypeError, ValueError)) as error:
                    function(*args, **kwargs)
                texts.append((type(error.value), str(error.value)))
            assert texts[0] == texts[1]


# -- what it sees and serves --------------------------------------------------------------------------------------------


def test_an_observer_is_shown_every_step_of_its_layers_and_of_no_other(tiny: Any) -> None:
    model, cache, seen = tiny("llama"), quiet(tiny("llama")), Seen()
    with attention_hook(model) as hook:
        hook.observe(cache[1], seen)
        feed(model, cache, tokens(8), pieces(7, 4, decode=1))
        hook.release(cache[1])
        feed(model, cache, tokens(1), [1])
    heads, dim = seen.shapes[0][1], seen.shapes[0][3]
    assert seen.shapes == [(1, heads, n, dim) for n in (4, 3, 1)]


def test_statistics_are_evaluated_with_the_step(tiny: Any) -> None:
    model, cache, seen = tiny("llama"), quiet(tiny("llama")), Seen()
    with attention_hook(model) as hook:
        for layer in cache:
            hook.observe(layer, seen)
        mx.eval(model(tokens(5), cache=cache))
    graph = io.StringIO()
    mx.export_to_dot(graph, seen.total)
    assert "Add" not in graph.getvalue()


def test_a_server_answers_in_the_models_place(tiny: Any) -> None:
    model, ids = tiny("llama"), tokens(6)

    def uniform(queries: mx.array, keys: mx.array, values: mx.array, *_: Any) -> mx.array:
        mean = mx.repeat(values.mean(axis=2, keepdims=True), queries.shape[1] // values.shape[1], axis=1)
        return mx.broadcast_to(mean, (*queries.shape[:3], values.shape[-1]))

    def half_scaled(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, sinks: Any) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q / 2, k, v, scale=2 * scale, mask=mask, sinks=sinks)

    want = model(ids, cache=make_prompt_cache(model))
    with attention_hook(model) as hook:
        for answer, equal in ((uniform, False), (half_scaled, True)):
            cache = quiet(model)
            for layer in cache:
                hook.serve(layer, Answer(answer))
                assert is_served(layer)
            assert bool(mx.allclose(model(ids, cache=cache), want, atol=1e-5)) is equal


def test_a_layer_has_one_server_and_any_number_of_observers(tiny: Any) -> None:
    model, cache, seen = tiny("llama"), quiet(tiny("llama")), [Seen(), Seen()]
    with attention_hook(model) as hook:
        hook.serve(cache[0], Answer(None))
        with pytest.raises(UnsupportedCacheError, match="layer 0 is served by"):
            hook.serve(cache[0], Answer(None))
        for one in seen:
            hook.observe(cache[0], one)
        model(tokens(3), cache=cache)
    assert [len(one.shapes) for one in seen] == [1, 1]


def test_a_copy_of_a_layer_is_not_hooked(tiny: Any) -> None:
    model, cache, seen = tiny("llama"), quiet(tiny("llama")), Seen()
    with attention_hook(model) as hook:
        hook.observe(cache[0], seen)
        twin = copy.deepcopy(cache)
        assert not is_hooked(twin[0])
        model(tokens(3), cache=twin)
        assert not seen.shapes


def test_an_observer_that_raises_stops_the_step_and_leaves_nothing_behind(tiny: Any) -> None:
    class Broken:
        def observe(self, *_: Any) -> list[mx.array]:
            raise ZeroDivisionError("in the observer")

    model, cache = tiny("llama"), quiet(tiny("llama"))
    with pytest.raises(ZeroDivisionError, match="in the observer"):
        with attention_hook(model) as hook:
            hook.observe(cache[0], Broken())
            model(tokens(3), cache=cache)
    assert llama.scaled_dot_product_attention is STOCK


# -- that nothing stays behind -------------------------------------------------------------------------------------------


def test_only_the_models_own_modules_are_touched_and_restored(tiny: Any) -> None:
    model, before = tiny("qwen3"), held_names()
    with attention_hook(model) as hook:
        assert hook.sites == ("mlx_lm.models.qwen3.scaled_dot_product_attention",)
        changed = {k for k, v in held_names().items() if before[k] != v}
        assert changed == {("mlx_lm.models.qwen3", "scaled_dot_product_attention")}
    assert held_names() == before


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_nested_hooks_may_close_in_any_order(order: tuple[int, ...], tiny: Any) -> None:
    llamas = [tiny("llama"), tiny("ministral3"), tiny("llama")]
    cache, seen = quiet(llamas[0]), Seen()
    hooks = [attention_hook(model) for model in llamas]
    hooks[0].observe(cache[0], seen)
    for done, number in enumerate(order):
        hooks[number].close()
        hooks[number].close()
        assert hooks[number].closed
        assert (llama.scaled_dot_product_attention is STOCK) is all(hooks[n].closed for n in (0, 2))
        assert is_hooked(cache[0]) is not (0 in order[: done + 1])
    assert llama.scaled_dot_product_attention is STOCK


def test_two_hooks_on_one_layer_take_back_only_their_own(tiny: Any) -> None:
    model, cache, seen = tiny("llama"), quiet(tiny("llama")), Seen()
    with attention_hook(model) as outer:
        outer.observe(cache[0], seen)
        with attention_hook(model) as inner:
            inner.serve(cache[0], Answer(None))
            inner.observe(cache[0], Seen())
        assert is_hooked(cache[0])
        assert not is_served(cache[0])
        model(tokens(3), cache=cache)
    assert len(seen.shapes) == 1


def test_hooks_step_aside_for_who_looks_for_mlx_lms_own(tiny: Any) -> None:
    model = tiny("llama")
    with stepped_aside():
        pass  # nothing is hooked
    cache, watch = quiet(model), Seen()
    with attention_hook(model) as hook:
        for layer in rows_of(cache):
            hook.observe(layer, watch)
        installed = llama.scaled_dot_product_attention
        assert installed is not STOCK
        with pytest.raises(KeyError), stepped_aside():
            assert llama.scaled_dot_product_attention is STOCK
            feed(model, make_prompt_cache(model), tokens(4), [4])
            raise KeyError
        assert llama.scaled_dot_product_attention is installed
        feed(model, cache, tokens(4), [4])
        assert watch.shapes
        with stepped_aside():
            hook.close()
        assert llama.scaled_dot_product_attention is STOCK


def test_a_hook_that_is_dropped_is_closed(tiny: Any) -> None:
    hook = attention_hook(tiny("llama"))
    assert llama.scaled_dot_product_attention is not STOCK
    del hook
    gc.collect()
    assert llama.scaled_dot_product_attention is STOCK


def test_a_layer_that_dies_is_forgotten(tiny: Any) -> None:
    cache = quiet(tiny("llama"))
    with attention_hook(tiny("llama")) as hook:
        hook.observe(cache[0], Seen())
        assert len(attention._attached) == 1
        del cache
        gc.collect()
        assert len(attention._attached) == 0


def test_a_layer_that_outlives_its_hook_says_so_once_and_is_right(tiny: Any) -> None:
    model, ids = tiny("llama"), tokens(8)
    want = feed(model, make_prompt_cache(model), ids, [5, 1, 1, 1])
    cache, seen = quiet(model), Seen()
    with attention_hook(model):  # keeps the module hooked
        with attention_hook(model) as hook:
            for layer in cache:
                hook.observe(layer, seen)
            got = [feed(model, cache, ids[:, :5], [5])]
        with pytest.warns(LuminaWarning, match="layer 0 outlived its attention hook") as caught:
            got.append(feed(model, cache, ids[:, 5:], [1, 1]))
        assert len(caught) == 1
        got.append(feed(model, cache, ids[:, 7:], [1]))
    assert same_bits(mx.concatenate(got, axis=1), want)
    assert len(seen.shapes) == len(cache)


def test_whoever_uses_a_layer_can_ask_whether_its_hook_is_gone(tiny: Any) -> None:
    cache = quiet(tiny("llama"))
    with attention_hook(tiny("llama")) as hook:
        hook.serve(cache[0], Answer(None))
        hook.serve(cache[1], Answer(None))
        warn_if_lapsed(cache[0])
        hook.release(cache[1])
    with pytest.warns(LuminaWarning, match="layer 0"):
        warn_if_lapsed(cache[0])
    warn_if_lapsed(cache[0])
    warn_if_lapsed(cache[1])


def test_a_layer_that_is_hooked_anew_has_not_lapsed(tiny: Any) -> None:
    cache = quiet(tiny("llama"))
    for _ in range(2):
        with attention_hook(tiny("llama")) as hook:
            hook.observe(cache[0], Seen())
            warn_if_lapsed(cache[0])
    attention._lapsed.clear()


def test_what_others_put_in_its_place_is_left_alone(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "scaled_dot_product_attention", STOCK)  # puts it back in the end
    model, cache, seen = tiny("llama"), quiet(tiny("llama")), Seen()
    with pytest.warns(
        LuminaWarning, match=r"mlx_lm\.models\.llama\.scaled_dot_product_attention was replaced"
    ):
        with attention_hook(model) as hook:
            inner = llama.scaled_dot_product_attention

            def foreign(*args: Any, **kwargs: Any) -> mx.array:
                return inner(*args, **kwargs)

            llama.scaled_dot_product_attention = foreign
            hook.observe(cache[0], seen)
            model(tokens(3), cache=cache)
    assert len(seen.shapes) == 1
    assert llama.scaled_dot_product_attention is foreign
    model(tokens(3), cache=make_prompt_cache(model))
    assert attention_hook(model).sites == ()  # whose attention this is now, nobody knows


def test_other_arguments_than_known_are_refused_before_anything_is_changed(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, softcap=None): ..."
    namespace: dict[str, Any] = {}
    exec(source, vars(base), namespace)
    monkeypatch.setattr(llama, "scaled_dot_product_attention", namespace["scaled_dot_product_attention"])
    with pytest.raises(BackendInterfaceError, match="softcap"):
        attention_hook(tiny("llama"))
    assert llama.scaled_dot_product_attention is namespace["scaled_dot_product_attention"]


def test_a_module_imported_meanwhile_works_on_and_can_be_hooked(tmp_path: Path, tiny: Any) -> None:
    """It reaches attention through a hooked ``base`` and keeps what it found there."""
    source = Path(llama.__file__).read_text().replace("from .", "from mlx_lm.models.")
    path = tmp_path / "late.py"
    path.write_text(source)
    through = tmp_path / "through.py"
    through.write_text(
        source.replace(" scaled_dot_product_attention(", " base.scaled_dot_product_attention(")
        + "\nfrom mlx_lm.models import base\ndel scaled_dot_product_attention\n"
    )

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location("custom_model", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["custom_model"] = module  # for dataclasses; mlx-lm enters none
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules["custom_model"]
        return module

    def build(module: ModuleType) -> Any:
        args = vars(tiny("llama").args) | {"rope_scaling": None}
        model = module.Model(module.ModelArgs.from_dict(args))
        mx.eval(model.parameters())
        return model

    def calls(model: Any) -> int:
        cache, seen = quiet(model), Seen()
        with attention_hook(model) as hook:
            for layer in cache:
                hook.observe(layer, seen)
            model(tokens(3), cache=cache)
        return len(seen.shapes)

    model = build(load(through))
    assert calls(model) == len(model.layers)
    with attention_hook(model) as hook:
        assert hook.sites == ("mlx_lm.models.base.scaled_dot_product_attention",)
        module = load(path)
        assert module.scaled_dot_product_attention is not STOCK
    assert base.scaled_dot_product_attention is STOCK
    late = build(module)
    mx.eval(late(tokens(3), cache=make_prompt_cache(late)))
    assert calls(late) == len(late.layers)


def test_hooks_open_and_close_in_threads_while_another_runs(tiny: Any) -> None:
    model, ids = tiny("llama"), tokens(6)
    want = feed(model, make_prompt_cache(model), ids, [6])
    stop, failures = threading.Event(), []

    def churn() -> None:
        try:
            while not stop.is_set():
                cache = quiet(model)
                with attention_hook(model) as hook:
                    hook.observe(cache[0], Seen())
                    hook.release(cache[0])
        except BaseException as error:  # shown below, in the thread that can fail the test
            failures.append(error)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            cache, seen = quiet(model), Seen()
            with attention_hook(model) as hook:
                hook.observe(cache[1], seen)
                assert same_bits(feed(model, cache, ids, [6]), want)
            assert len(seen.shapes) == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert llama.scaled_dot_product_attention is STOCK


# -- mistakes ------------------------------------------------------------------------------------------------------------


def test_mistakes_are_named(tiny: Any) -> None:
    model, gemma = tiny("llama"), tiny("gemma2")
    with pytest.raises(UnsupportedCacheError, match="str is not a model"):
        attention_hook("llama")
    with attention_hook(model) as hook:
        with pytest.raises(UnsupportedCacheError, match="wrap the model's cache in a LuminaCache"):
            hook.observe(make_prompt_cache(model)[0], Seen())
    with pytest.raises(UnsupportedCacheError, match="closed"):
        hook.observe(quiet(model)[0], Seen())
    with attention_hook(gemma) as hook:
        assert hook.sites == ()
        with pytest.raises(UnsupportedCacheError, match=r"layer 0: .*hookable"):
            hook.serve(quiet(gemma)[0], Answer(None))


# -- which layers it reaches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", fast_first(SPECS, {*FAST, "gemma2", "plamo2", "afm7", "deepseek_v32", "rwkv7"})
)
def test_layers_that_the_hook_does_not_reach_are_listed_with_the_reason(name: str, tiny: Any) -> None:
    found = hookable(tiny(name))
    if name not in UNREACHED:
        assert not found.unseen
        return
    rows, reached, reason = UNREACHED[name]
    assert (len(found.layers), len(found.seen)) == (rows, reached)
    assert all(reason in one for one in found.unseen.values()), found.unseen
    assert reason in str(found)
    assert bool(found) is (reached > 0)


def test_a_layer_is_servable_if_attention_gets_what_it_returned(tiny: Any) -> None:
    assert hookable(tiny("llama")).servable == ("layer 0", "layer 1")
    latent = hookable(tiny("deepseek_v3"))
    assert latent.seen == ("layer 0", "layer 1")
    assert latent.servable == ()
    assert str(hookable(tiny("rwkv7"))) == "the model holds no rows"
