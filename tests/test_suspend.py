"""A suspended cache holds no memory and comes back bit for bit when it is used, whatever its layers are."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from harness import architectures, feed, held_of, pieces, quiet, real_bytes, same_bits, settle, tokens

from lumina_cache.cache import LuminaCache
from lumina_cache.errors import ActionInfeasibleError, DiskCorruptError, DiskFullError
from lumina_cache.layers import leaves

ACTIONS = [
    "quant:affine,bits=4,group=32",
    "quant:kivi,bits=4,group=32",
    "quant:affine_fetch,bits=8,group=32",
    "evict:keydiff@0.50",
    "evict:sinks_window@0.50+quant:affine,bits=8,group=32",
    "offload:cold@0.50",
]


def filled(model: Any, disk: Any, n: int = 150, action: str | None = None) -> LuminaCache:
    cache = quiet(model, disk=disk)
    feed(model, cache, tokens(n), pieces(n, 64))
    settle(cache)
    if action is not None:
        cache.apply(action)
    return cache


def events(cache: LuminaCache) -> list[str]:
    return [r["event"] for r in cache.log.records if r["event"].startswith("session.")]


@pytest.mark.parametrize("name", architectures())
def test_logits_afterwards_are_bit_equal_on_every_kind_of_layer(tiny: Any, tmp_path: Path, name: str) -> None:
    model = tiny(name)
    cache = filled(model, tmp_path)
    twin, more = copy.deepcopy(cache), tokens(7, seed=3)
    nbytes = real_bytes(cache)
    assert cache.suspend() == nbytes
    assert cache.suspended == (nbytes > 0)  # caches of a class of the model's own are not touched
    assert real_bytes(cache) == 0
    # Straight from the model: nothing but the step itself brings it back.
    got = feed(model, cache, more, [1, 1, 5])
    assert not cache.suspended
    assert same_bits(got, feed(model, twin, more, [1, 1, 5]))
    moved = ["session.suspended", "session.resumed"] if nbytes else []
    assert events(cache) == ["session.started", *moved]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1", "llama4"])
def test_changed_layers_come_back_as_they_were(tiny: Any, tmp_path: Path, name: str, action: str) -> None:
    model = tiny(name)
    cache = filled(model, tmp_path)
    try:
        cache.apply(action)
    except ActionInfeasibleError as error:
        pytest.skip(f"{name}: {error}")
    twin, before, more = copy.deepcopy(cache), held_of(cache), tokens(7, seed=3)
    cache.suspend()
    cache.resume()
    assert held_of(cache) == before
    assert [leaf.history for leaf in leaves(cache)] == [leaf.history for leaf in leaves(twin)]
    assert same_bits(feed(model, cache, more, [1, 1, 5]), feed(model, twin, more, [1, 1, 5]))


def test_memory_falls_by_what_the_arrays_held(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    cache = filled(model, tmp_path, 2000)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    freed = cache.suspend()
    gc.collect()
    assert freed == 2 * 2 * 2048 * 2 * 32 * 4
    assert before - mx.get_active_memory() == pytest.approx(freed, rel=0.001)
    cache.resume()
    gc.collect()
    assert mx.get_active_memory() == pytest.approx(before, rel=0.001)


USES: dict[str, Callable[[LuminaCache], object]] = {
    "make_mask": lambda c: c[0].make_mask(1),
    "state": lambda c: c[0].state,
    "trim": lambda c: c[0].trim(1),
    "is_trimmable": lambda c: c[0].is_trimmable(),
    "deepcopy": copy.deepcopy,
    "deepcopy of a layer": lambda c: copy.deepcopy(c[0]),
    "to_mlx": lambda c: c.to_mlx(),
    "apply": lambda c: c.apply("reclaim"),
    "replacing a layer": lambda c: c.__setitem__(0, copy.deepcopy(c[0])),
    "update": lambda c: c[0].update_and_fetch(mx.zeros((1, 2, 1, 32)), mx.zeros((1, 2, 1, 32))),
}


@pytest.mark.parametrize("use", USES)
def test_any_use_brings_it_back(tiny: Any, tmp_path: Path, use: str) -> None:
    cache = filled(tiny("llama"), tmp_path)
    rows = mx.array(cache[1].keys[:, :, :150])
    cache.suspend()
    USES[use](cache)
    assert not cache.suspended
    assert same_bits(cache[1].keys[:, :, :150], rows)
    assert cache.suspended is False
    assert not any(tmp_path.rglob("*.safetensors")) or use.startswith("deepcopy")


def test_looking_at_it_does_not(tiny: Any, tmp_path: Path) -> None:
    cache = filled(tiny("llama"), tmp_path)
    cache.suspend()
    view = cache.observe()
    assert (view.nbytes_live, view.nbytes_allocated, cache.nbytes) == (0, 0, 0)
    assert {one.offset for one in view.layers} == {150}
    assert not any(layer.empty() for layer in cache)
    assert cache.suspended


def test_suspending_twice_is_suspending_once(tiny: Any, tmp_path: Path) -> None:
    cache = filled(tiny("llama"), tmp_path)
    assert cache.suspend() > 0
    assert cache.suspend() == 0
    assert events(cache).count("session.suspended") == 1
    cache.resume()
    cache.resume()
    assert events(cache).count("session.resumed") == 1
    assert cache.suspend() > 0


def test_a_copy_of_a_cache_that_was_suspended_is_its_own(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    cache = filled(model, tmp_path)
    cache.suspend()
    fork = copy.deepcopy(cache)
    cache.suspend()
    assert not fork.suspended
    want = feed(model, fork, tokens(3), [1] * 3)
    assert same_bits(feed(model, cache, tokens(3), [1] * 3), want)


@pytest.mark.parametrize("name", ["llama", "mamba", "jamba"])
def test_a_lost_file_is_an_error_and_the_cache_stays_suspended(tiny: Any, tmp_path: Path, name: str) -> None:
    model = tiny(name)
    cache = filled(model, tmp_path)
    twin = copy.deepcopy(cache)
    cache.suspend()
    [file] = tmp_path.rglob("*.safetensors")
    content = file.read_bytes()
    file.unlink()
    more = tokens(4, seed=2)
    for use in (cache.resume, lambda: mx.eval(model(more[:, :1], cache=cache)), lambda: cache[0].state):
        for _ in range(2):
            with pytest.raises(DiskCorruptError, match="computed anew"):
                use()
            assert cache.suspended
    assert {r["code"] for r in cache.log.records if r["event"] == "warning"} == {"resume_failed"}
    file.write_bytes(content)
    assert same_bits(feed(model, cache, more, [1, 3]), feed(model, twin, more, [1, 3]))


def test_a_full_disk_leaves_everything_in_memory(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lumina_cache.disk import DiskStore

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    model = tiny("llama")
    cache = filled(model, tmp_path)
    twin = copy.deepcopy(cache)
    monkeypatch.setattr(DiskStore, "_put", full)
    with pytest.raises(DiskFullError):
        cache.suspend()
    assert not cache.suspended
    assert same_bits(feed(model, cache, tokens(3), [1] * 3), feed(model, twin, tokens(3), [1] * 3))


def test_a_step_under_way_is_not_cut_in_two(tiny: Any, tmp_path: Path) -> None:
    cache = filled(tiny("llama"), tmp_path)
    cache[0].make_mask(1)
    with pytest.raises(ActionInfeasibleError, match="inside a step; call it between two steps"):
        cache.suspend()
    assert not cache.suspended


def test_without_a_disk_there_is_nowhere_to_go(tiny: Any) -> None:
    with pytest.raises(ActionInfeasibleError, match="disk=True"):
        filled(tiny("llama"), None).suspend()


def test_an_empty_cache_can_be_suspended_and_used(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    cache, plain = quiet(model, disk=tmp_path), quiet(model)
    assert cache.suspend() == 0
    assert not cache.suspended
    assert same_bits(feed(model, cache, tokens(9), [8, 1]), feed(model, plain, tokens(9), [8, 1]))


def test_a_plan_goes_on_after_a_pause(tiny: Any, tmp_path: Path) -> None:
    model, plan = tiny("llama"), "evict:keydiff@rows=40,slack=5"
    cache, plain = quiet(model, disk=tmp_path, plan=plan), quiet(model, plan=plan)
    for one in (cache, plain):
        feed(model, one, tokens(60), [59, 1])
    for seed in range(9):
        cache.suspend()
        more = tokens(3, seed=seed)
        assert same_bits(feed(model, cache, more, [1] * 3), feed(model, plain, more, [1] * 3))
    assert held_of(cache) == held_of(plain)


def test_a_suspended_cache_that_is_dropped_takes_its_file_along(tiny: Any, tmp_path: Path) -> None:
    cache = filled(tiny("llama"), tmp_path)
    cache.suspend()
    assert list(tmp_path.rglob("*.safetensors"))
    del cache
    gc.collect()
    assert list(tmp_path.glob("cache-*")) == []
