"""Contract, items 6 and 10, and what memory really does: old buffers go, nothing else holds rows, no limit is touched."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from harness import disk_in, feed, greedy, held_of, pieces, quiet, real_bytes, settle, tokens
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from lumina_cache.actions import parse_action
from lumina_cache.audit import AuditLog
from lumina_cache.cache import LuminaCache
from lumina_cache.errors import ActionInfeasibleError
from lumina_cache.estimate import peak_of_action, row_nbytes
from lumina_cache.lab.answer import arrays_of
from lumina_cache.lab.tiny import SPECS, build
from lumina_cache.layers import leaves

ROWS = 1100


def filled(model: Any, n: int = ROWS, **kwargs: Any) -> LuminaCache:
    """A cache of ``n`` tokens with nothing else alive."""
    cache = quiet(model, **kwargs)
    feed(model, cache, tokens(n), pieces(n, 500))
    settle(cache)
    gc.collect()
    mx.clear_cache()
    return cache


def step_nbytes(cache: LuminaCache) -> int:
    """Bytes of one growth step of 256 rows in every layer: how exact MLX's own count has to be."""
    return sum(256 * row_nbytes(one) for one in held_of(cache) if one.key_width)


@pytest.mark.parametrize(
    "action",
    [
        "evict:sinks_window@rows=100",
        "evict:sinks_window@0.50",
        "quant:affine,bits=8,group=32",
        "quant:affine,bits=4,group=32",
        "evict:sinks_window@0.25+quant:affine,bits=4,group=32",
        "evict:keydiff@0.50",
        "quant:affine_fetch,kbits=8,vbits=4,group=32,residual=40",
        "quant:kivi,bits=4,group=32+evict:key_norm@0.50",
        "quant:hadamard,bits=4,group=32",
        "offload:cold@0.25",
        "offload:layers=0-99",
        "quant:mxfp8,bits=8,group=32+offload:cold@0.50",
        "0:evict:sinks_window@0.50;1-99:quant:affine_fetch,bits=4,group=32",
        "reserve:2000",
        "reclaim",
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1"])
def test_old_buffers_are_gone_after_an_action(tiny: Any, tmp_path: Path, name: str, action: str) -> None:
    model = tiny(name)
    cache = filled(model, disk=disk_in(tmp_path))
    tolerance = step_nbytes(cache)
    cache._control.probe(cache._control.trackers[0])
    gc.collect()
    before, pool = mx.get_active_memory(), mx.get_cache_memory()
    applied = cache.apply(action)
    assert applied is not None
    fell = before - mx.get_active_memory()
    promised = applied.before.nbytes_allocated - applied.predicted_allocated
    assert abs(fell - promised) <= tolerance
    assert applied.after.nbytes_allocated == applied.predicted_allocated == real_bytes(cache)
    assert mx.get_cache_memory() <= pool, "what was freed went back to the system, not to the pool"
    # What the log says of it is what was measured.
    [record] = [r for r in cache.log.records if r["event"] == "action.applied"]
    assert record["before"]["mlx_active"] - record["after"]["mlx_active"] == pytest.approx(
        promised, abs=tolerance
    )


#: Actions, and how far below the prediction their peak may stay, in layers: the bound is drawn for the worst order in
#: which MLX may compute keys and values, and for the CPU's way of encoding and scoring.
TRANSIENTS = {
    "evict:sinks_window@0.90": 0.05,
    "evict:keydiff@0.90": 0.7,
    "evict:leverage@0.90": 0.6,
    "evict:lagkv@0.90": 1.2,
    "quant:affine,bits=8,group=32": 0.05,
    "quant:affine,bits=4,group=32": 0.05,
    "quant:affine_fetch,kbits=8,vbits=4,group=32": 0.1,
    "quant:kivi,bits=4,group=32": 0.6,
    "quant:hadamard,bits=4,group=32": 0.6,
    "quant:mxfp8,bits=8,group=32": 0.9,
    "quant:nvfp4,bits=4,group=16": 1.0,
    "evict:sinks_window@0.90+quant:affine,bits=4,group=32": 0.05,
    "quant:affine,bits=8,group=32+quant:kivi,bits=4,group=32": 1.2,
    "quant:affine_fetch,bits=8,group=32+evict:keydiff@0.50": 1.2,
    "offload:cold@0.50": 0.6,
    "offload:layers=0-99": 1.0,
    "offload:cold@0.50+evict:sinks_window@0.50": 1.2,
    "offload:cold@0.50+quant:affine_fetch,bits=8,group=32": 1.6,
    "0-3:evict:key_norm@0.50;4-5:quant:affine_fetch,bits=8,group=32": 0.6,
    "reserve:3000": 0.6,
    "reclaim": 0.6,
}


@pytest.fixture(scope="module")
def six_layers() -> Any:
    model = Model(ModelArgs.from_dict({**SPECS["llama"].config, "num_hidden_layers": 6}))
    mx.eval(model.parameters())
    return model


def with_rows(model: Any, n: int, chunk: int = 500, **kwargs: Any) -> LuminaCache:
    """A cache that ``n`` rows per layer were put into without running the model."""
    cache = quiet(model, **kwargs)
    for i, step in enumerate(pieces(n, chunk)):
        for j, layer in enumerate(cache):
            keys, values = mx.random.normal((2, 1, 2, step, 32), key=mx.random.key(100 * i + j))
            _ = layer.update_and_fetch(keys, values)
        settle(cache)
    return cache


@pytest.mark.parametrize(("n", "chunk"), [(1100, 500), (1024, 1024)], ids=["slack", "full"])
@pytest.mark.parametrize("action", TRANSIENTS)
def test_the_transient_of_an_action_is_that_of_one_layer_and_was_predicted(
    six_layers: Any, tmp_path: Path, action: str, n: int, chunk: int
) -> None:
    cache = with_rows(six_layers, n, chunk, disk=disk_in(tmp_path))
    cache._control.probe(cache._control.trackers[0])
    gc.collect()
    mx.clear_cache()
    one_layer = real_bytes(cache) // 6
    predicted = peak_of_action(held_of(cache), parse_action(action)) - real_bytes(cache)
    base = mx.get_active_memory()
    mx.reset_peak_memory()
    cache.apply(action)
    transient = max(0, mx.get_peak_memory() - base)  # the peak is 0 where nothing was allocated
    assert transient <= predicted + one_layer // 50
    assert predicted <= transient + TRANSIENTS[action] * one_layer


def appended(cache: LuminaCache, n: int) -> int:
    """Bytes that ``n`` single rows take for a while, beside the cache as it is afterwards; each is evaluated."""
    rows = mx.ones((1, 2, 1, 32))
    mx.eval(rows)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    for _ in range(n):
        for layer in cache:
            _ = layer.update_and_fetch(rows, rows)
            settle([layer])
    return mx.get_peak_memory() - mx.get_active_memory()


@pytest.mark.parametrize("before", ["reserve:1400", "quant:affine,bits=8,group=32+reserve:1400"])
def test_growing_into_reserved_room_copies_nothing(six_layers: Any, before: str) -> None:
    cache = with_rows(six_layers, 1020)
    cache.apply(before)
    held = real_bytes(cache)
    assert appended(cache, 300) < held // 6 // 20
    assert real_bytes(cache) == held, "no buffer grew"


@pytest.mark.parametrize("codec", ["kivi", "hadamard", "kivi_hadamard", "affine_fetch"])
def test_rows_are_sealed_into_reserved_room_without_a_copy_of_it(six_layers: Any, codec: str) -> None:
    """What a step returns looks at the buffers, and is not computed before they are written to."""
    cache = with_rows(six_layers, 4096, 4096)
    cache.apply(f"quant:{codec},bits=4,group=32+reserve:8192")
    sealed = cache[0].store.sealed
    buffers = sum(a.nbytes for a in (*cache[0].store.keys, *cache[0].store.values))
    transient = appended(cache, 70)
    assert cache[0].store.sealed > sealed
    assert transient < buffers // 8


@pytest.mark.parametrize("codec", ["affine", "affine_fetch", "hadamard", "kivi", "kivi_hadamard"])
@pytest.mark.parametrize("rows", [64, 1024])
def test_the_dense_rows_of_a_chunk_are_gone_once_they_were_attended_to(
    six_layers: Any, codec: str, rows: int
) -> None:
    """mlx-lm evaluates what the layers hold at the end of a chunk only; until then it keeps what that is made of."""
    cache = with_rows(six_layers, rows)
    cache.apply(f"quant:{codec},bits=4,group=32")
    chunk = 512
    settle(cache)
    gc.collect()
    mx.clear_cache()
    before, held = mx.get_active_memory(), real_bytes(cache)
    for i, layer in enumerate(cache):
        keys, values = mx.random.normal((2, 1, 2, chunk, 32), key=mx.random.key(i))
        fetched = layer.update_and_fetch(keys, values)
        mx.eval(fetched)
        del keys, values, fetched
    mx.synchronize()
    mx.clear_cache()
    dense = 2 * chunk * 2 * 32 * 4
    assert mx.get_active_memory() - before - (real_bytes(cache) - held) < dense


@pytest.mark.parametrize(
    "before", ["reclaim", "quant:affine,bits=8,group=32", "quant:kivi,bits=4,group=32", "evict:keydiff@0.95"]
)
def test_growing_without_room_takes_one_layers_buffer_for_a_while_and_no_more(
    six_layers: Any, before: str
) -> None:
    cache = with_rows(six_layers, 1020)
    cache.apply(before)
    held = real_bytes(cache)
    transient = appended(cache, 40)
    assert real_bytes(cache) > held, "every layer grew"
    # What a fetch decodes is there for a while as well: dense keys and values, by way of float32 on the CPU.
    fetched = 0 if "kivi" not in before else 3 * 1100 * 2 * 32 * 4
    assert held // 6 // 4 < transient <= 1.05 * (real_bytes(cache) // 6 + fetched)


@pytest.mark.parametrize("action", ["evict:sinks_window@rows=64", "quant:affine,bits=8,group=32", "reclaim"])
def test_no_slice_keeps_a_whole_buffer_alive(tiny: Any, action: str) -> None:
    """Actions end in buffers of their own: dropping the cache frees what it says it holds, each to within two pages.

    MLX hands out pooled buffers that are up to two pages larger than what is asked for.
    """
    cache = filled(tiny("llama"))
    cache.apply(action)
    gc.collect()  # what others left behind is not this cache's
    nbytes, active = real_bytes(cache), mx.get_active_memory()
    arrays = sum(1 for leaf in leaves(cache) for _ in arrays_of(leaf))
    del cache
    gc.collect()
    assert nbytes <= active - mx.get_active_memory() <= nbytes + arrays * 2 * 4096


def test_slack_is_counted_as_allocated_and_not_as_live(tiny: Any) -> None:
    cache = quiet(tiny("llama"))
    feed(tiny("llama"), cache, tokens(3), [3])
    view = cache.observe()
    row = row_nbytes(held_of(cache)[0])
    assert (view.nbytes_live, view.nbytes_allocated) == (2 * 3 * row, 2 * 256 * row)
    cache[0].trim(1)
    assert cache.observe().nbytes_live == (3 + 2) * row
    assert cache.observe().nbytes_allocated == 2 * 256 * row


def test_nbytes_of_an_empty_entry_is_nothing_in_every_state(tiny: Any) -> None:
    for name in ("llama", "gemma3", "llama4", "falcon_h1", "mamba"):
        cache = quiet(tiny(name))
        assert cache.nbytes == 0
        assert [entry.nbytes for entry in cache] == [0] * len(cache)
        assert all(entry.empty() for entry in cache)


class Watched:
    """Counts the bytes that one more append costs while something may hold on to the rows of the last one."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache

    def grows_by(self) -> int:
        gc.collect()
        before = mx.get_active_memory()
        logits = self.model(tokens(1), cache=self.cache)
        mx.eval(logits)
        settle(self.cache)
        del logits
        gc.collect()
        return mx.get_active_memory() - before


@pytest.mark.parametrize("log", [None, "file"])
@pytest.mark.parametrize("budget", [None, "100MB"])
def test_nothing_of_ours_holds_the_rows_of_the_last_step(
    tiny: Any, tmp_path: Any, budget: str | None, log: str | None
) -> None:
    """A view that somebody keeps makes the next append copy the whole buffer."""
    model = tiny("llama")
    cache = filled(model, budget=budget, log=None if log is None else tmp_path / "log.jsonl")
    theirs = make_prompt_cache(model)
    feed(model, theirs, tokens(ROWS), pieces(ROWS, 500))
    assert Watched(model, cache).grows_by() == Watched(model, theirs).grows_by() == 0
    held = cache[0].keys_and_values()  # the control: what a careless logger would do
    assert Watched(model, cache).grows_by() > 0
    del held


def test_the_log_holds_no_array_token_or_text(tiny: Any) -> None:
    model = tiny("gemma3")
    cache = quiet(model, budget="350kB")
    feed(model, cache, tokens(700), pieces(690, 100, 10))
    with pytest.raises(ActionInfeasibleError):
        cache.apply("evict:h2o@0.50")

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(k, str) and plain(v) for k, v in value.items())
        if isinstance(value, list):
            return len(value) < 200 and all(map(plain, value))
        return (
            value is None
            or isinstance(value, bool | int | float)
            or (isinstance(value, str) and len(value) < 400)
        )

    assert len(cache.log.records) > 5
    for record in cache.log.records:
        assert plain(record), record


CALLS = (
    "set_memory_limit",
    "set_cache_limit",
    "set_wired_limit",
    "reset_peak_memory",
    "set_default_device",
    "set_default_stream",
)


def test_no_process_wide_limit_is_changed_and_the_peak_counter_is_not_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by a run with every kind of action, nor by one that fails."""
    called: list[str] = []
    model = build("gemma3", seed=11)  # not probed yet
    cache_limit = mx.set_cache_limit(1 << 30)
    mx.set_cache_limit(cache_limit)
    filler = mx.zeros((1 << 20,))
    mx.eval(filler)
    del filler
    peak = mx.get_peak_memory()
    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(mx, name, lambda *a, _name=name, **k: called.append(_name))
        cache = LuminaCache(model, budget="400kB")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            greedy(
                model, tokens(600)[0].tolist(), cache, 10, prefill_step_size=100, kv_bits=8, kv_group_size=32
            )
        with pytest.raises(ActionInfeasibleError):
            cache.apply("evict:h2o@0.50")
        cache.apply("reclaim")
        monkeypatch.setattr(type(cache[2]), "gather", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.apply("evict:sinks_window@rows=8")
    assert called == []
    assert mx.set_cache_limit(cache_limit) == cache_limit
    assert mx.get_peak_memory() >= peak


def test_an_action_that_breaks_inside_does_not_break_generation_when_a_policy_chose_it(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    cache = quiet(model, budget="700kB")
    for method in ("gather", "reencode"):
        monkeypatch.setattr(type(cache[0]), method, lambda *_: 1 / 0)
    logits = feed(model, cache, tokens(900), pieces(890, 100, 10))
    assert mx.isfinite(logits).all().item()
    assert "action_failed" in [r.get("code") for r in cache.log.records]


def test_the_log_can_be_switched_off_and_costs_no_file(tmp_path: Any, tiny: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    cache = quiet(tiny("llama"))
    feed(tiny("llama"), cache, tokens(5), [4, 1])
    cache.close()
    assert list(tmp_path.iterdir()) == []
    assert isinstance(cache.log, AuditLog)
