"""Following a step without computing it: attention calls, buffers alive, and who stops it."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache

from lumina_cache.errors import ModelShapeError
from lumina_cache.trace import leaves_of, trace_cache, trace_step

ROWS = (4999, 9095)


class OneLayer(nn.Module):
    """A model of one K/V layer around a function of (queries, keys, values, hidden states)."""

    def __init__(self, attend: Any, width: int = 64, vocab: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self._attend = attend
        self.layers = [None]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        h = self.embed(tokens)
        rows = h[:, None]
        keys, values = cache[0].update_and_fetch(rows, rows)
        return self.head(self._attend(rows, keys, values)[:, 0])

    def make_cache(self) -> list[Any]:
        return [KVCache()]


def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask="causal")


def by_hand(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    return mx.softmax(q @ k.swapaxes(-1, -2), axis=-1) @ v


def test_an_attention_call_is_recorded_with_its_shape_and_without_its_rows() -> None:
    step = trace_step(OneLayer(plain), ROWS, 16)
    [(call, _)] = step.calls
    assert (call.q_heads, call.kv_heads, call.queries, call.key_dim, call.value_dim) == (1, 1, 16, 64, 64)
    assert (call.mask, call.sinks, call.window, call.itemsize) == ("causal", False, None, 4)


def test_a_fused_call_leaves_no_array_that_grows_with_the_rows() -> None:
    step = trace_step(OneLayer(plain), ROWS, 16)
    assert all(line.per_row == 0 for line in step.quiet)


def test_scores_that_a_model_makes_itself_grow_by_queries_times_itemsize_per_row() -> None:
    step = trace_step(OneLayer(by_hand), ROWS, 16)
    assert step.calls == ()
    assert max(line.per_row for line in step.quiet) == 16 * 4


def test_logits_are_counted_by_themselves() -> None:
    step = trace_step(OneLayer(plain), ROWS, 16)
    assert step.vocabulary == 16 * 32 * 4


def test_without_logits_the_last_layer_stops_at_its_keys_and_values() -> None:
    step = trace_step(OneLayer(plain), ROWS, 16, logits=False)
    assert step.calls == ()
    assert step.vocabulary == 0


def test_a_sliding_window_is_recorded_with_its_rows(tiny: Any) -> None:
    step = trace_step(tiny("gemma3_text"), ROWS, 16)
    # 16 rows of window less the query's own, and 16 queries.
    assert sorted(call.window or 0 for call, _ in step.calls) == [0, 16 - 1 + 16]


def test_sinks_and_mask_arrays_are_recorded(tiny: Any) -> None:
    assert all(call.sinks for call, _ in trace_step(tiny("gpt_oss"), ROWS, 16).calls)
    assert {call.mask for call, _ in trace_step(tiny("deepseek_v3"), ROWS, 16).calls} == {"additive"}


def test_arrays_that_grow_are_the_same_for_any_two_numbers_of_rows(tiny: Any) -> None:
    here = trace_step(tiny("deepseek_v3"), ROWS, 16)
    elsewhere = trace_step(tiny("deepseek_v3"), (ROWS[0] + 8192, ROWS[1] + 8192), 16)
    for (_, few), (_, many) in zip(here.calls, elsewhere.calls, strict=True):
        assert max(x.at(20_000) for x in few) == pytest.approx(max(x.at(20_000) for x in many), rel=1e-6)


def test_a_recurrence_is_one_operation_where_it_has_a_kernel(tiny: Any) -> None:
    by_token = trace_step(tiny("qwen3_next"), ROWS, 16)
    at_once = trace_step(tiny("qwen3_next"), ROWS, 16, kernels=True)
    assert by_token.recurrences == at_once.recurrences == 3
    assert max(x.fixed for x in at_once.quiet) < max(x.fixed for x in by_token.quiet)


def test_following_computes_nothing(tiny: Any) -> None:
    model = tiny("llama")
    trace_step(model, ROWS, 16)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    trace_step(model, (1_000_003, 1_004_099), 2048)
    assert mx.get_peak_memory() - before < 10_000


def test_leaves_of_nested_entries_are_named_by_their_place(tiny: Any) -> None:
    trace = trace_cache(tiny("falcon_h1"), [3])
    assert [name for name, _ in leaves_of(trace.entries)] == [
        "layer 0.0",
        "layer 0.1",
        "layer 1.0",
        "layer 1.1",
    ]


def reads_contents(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    return q * float(k.sum().item())


def calls_metal(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    raise RuntimeError("[metal_kernel] No Metal back-end.")


def fits_nothing(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    return q @ k


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (reads_contents, "evaluates arrays inside its forward"),
        (calls_metal, "calls a Metal kernel.*and this machine has no Metal"),
        (fits_nothing, "a forward of a few tokens fails.*ValueError.*matmul"),
    ],
)
def test_what_stops_the_following_is_said_with_the_module(attend: Any, message: str) -> None:
    with pytest.raises(ModelShapeError, match=rf"test_trace:? {message}"):
        trace_cache(OneLayer(attend), [3])


def test_weights_are_back_after_a_failure() -> None:
    model = OneLayer(fits_nothing)
    weight = model.head.weight
    with pytest.raises(ModelShapeError):
        trace_cache(model, [3])
    assert model.head.weight is weight


def test_attention_of_other_threads_is_not_touched() -> None:
    results: list[mx.array] = []

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        def elsewhere() -> None:
            with mx.stream(mx.cpu):
                ones = mx.ones((1, 1, 2, 8))
                results.append(mx.fast.scaled_dot_product_attention(ones, ones, ones, scale=1.0))
                mx.eval(results[-1])

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return plain(q, k, v)

    step = trace_step(OneLayer(attend), ROWS, 16)
    assert len(step.calls) == 1
    assert all(mx.array_equal(one, mx.ones((1, 1, 2, 8))) for one in results)
