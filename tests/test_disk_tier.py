"""Rows in files: the same numbers as in memory, one layer's rows at a time, and no wrong number when the disk fails."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from harness import feed, greedy, held_of, pieces, quiet, real_bytes, same_bits, settle, tokens
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from lumina_cache.audit import validate
from lumina_cache.cache import LuminaCache
from lumina_cache.disk import DiskStore
from lumina_cache.errors import (
    ActionInfeasibleError,
    DiskBudgetError,
    DiskCorruptError,
    DiskFullError,
    DiskTierError,
)
from lumina_cache.layers import leaves


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def records(cache: LuminaCache, event: str) -> list[dict[str, Any]]:
    return [r for r in cache.log.records if r["event"] == event]


def filled(model: Any, disk: Any, n: int = 200, **kwargs: Any) -> LuminaCache:
    cache = quiet(model, disk=disk, **kwargs)
    feed(model, cache, tokens(n), pieces(n, 64))
    settle(cache)
    return cache


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(bytes(data))


# -- the same numbers --------------------------------------------------------------------------------------------------

WHERE = ["offload:layers=0-0", "offload:layers=0-9", "offload:cold@0.50"]
BEFORE = [
    "",
    "quant:affine,bits=8,group=32+",
    "quant:kivi,bits=4,group=32+",
    "quant:hadamard,bits=4,group=32+",
]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("before", BEFORE)
def test_what_is_generated_is_that_of_the_same_cache_in_memory(
    tiny: Any, tmp_path: Path, before: str, where: str
) -> None:
    model = tiny("llama")
    in_memory, on_disk = filled(model, None), filled(model, tmp_path)
    in_memory.apply(before + "reclaim")
    on_disk.apply(before + where)
    assert sum(layer.on_disk for layer in on_disk) > 0
    assert on_disk.observe().nbytes_allocated == real_bytes(on_disk) < real_bytes(in_memory)
    more = tokens(50, seed=4)
    steps = [1] * 40 + [7, 3]
    assert same_bits(feed(model, on_disk, more, steps), feed(model, in_memory, more, steps))
    assert [one.rows for one in held_of(on_disk)] == [one.rows for one in held_of(in_memory)]


@pytest.mark.parametrize("name", ["gemma3", "jamba", "deepseek_v3", "gemma3n", "gpt_oss"])
def test_models_with_other_layers_beside_generate_the_same(tiny: Any, tmp_path: Path, name: str) -> None:
    model, prompt = tiny(name), tokens(60)[0].tolist()
    want = [t for t, _ in greedy(model, prompt, make_prompt_cache(model), 15)]
    cache = quiet(model, plan="offload:cold@0.25", disk=tmp_path)
    assert [t for t, _ in greedy(model, prompt, cache, 15)] == want
    assert [r["action"] for r in records(cache, "action.applied")] == ["offload:cold@0.25"]


def test_a_copy_shares_the_files_and_goes_its_own_way(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    cache = filled(model, tmp_path)
    cache.apply("offload:layers=0-9")
    fork, n = copy.deepcopy(cache), len(files(tmp_path))
    assert len(files(tmp_path)) == n
    want = feed(model, cache, tokens(5, seed=1), [1] * 5)
    fork.apply("evict:sinks_window@rows=40")
    assert same_bits(feed(model, copy.deepcopy(cache), tokens(2), [2]), feed(model, cache, tokens(2), [2]))
    assert mx.isfinite(want).all().item()
    assert {one.rows for one in held_of(fork)} == {40}


@pytest.mark.parametrize(
    "then", ["evict:sinks_window@rows=64", "evict:keydiff@0.50", "quant:affine,bits=8,group=32", "reclaim"]
)
def test_actions_on_rows_that_are_on_disk_are_those_on_rows_in_memory(
    tiny: Any, tmp_path: Path, then: str
) -> None:
    model = tiny("llama")
    in_memory, on_disk = filled(model, None), filled(model, tmp_path)
    on_disk.apply("offload:cold@0.50")
    for cache in (in_memory, on_disk):
        cache.apply(then)
    more = tokens(6, seed=2)
    assert same_bits(feed(model, on_disk, more, [1] * 6), feed(model, in_memory, more, [1] * 6))
    assert sum(layer.on_disk for layer in on_disk) > 0


def test_rows_on_disk_come_back_when_tokens_are_taken_back_into_them(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    in_memory, on_disk = filled(model, None), filled(model, tmp_path)
    on_disk.apply("offload:layers=0-9")
    for cache in (in_memory, on_disk):
        assert {layer.trim(30) for layer in cache} == {30}
    more = tokens(6, seed=2)
    assert same_bits(feed(model, on_disk, more, [1] * 6), feed(model, in_memory, more, [1] * 6))


# -- memory ---------------------------------------------------------------------------------------------------------------


def test_a_step_holds_the_rows_of_one_layer_at_a_time(tmp_path: Path) -> None:
    mx.random.seed(0)
    layers = 6
    model = Model(ModelArgs("llama", 128, layers, 128, 2, 1e-5, 64, head_dim=64, num_key_value_heads=2))
    mx.eval(model.parameters())
    cache = filled(model, tmp_path, 6000)
    [one_layer] = {layer.nbytes_live for layer in cache}
    cache.apply("offload:layers=0-9")
    gc.collect()
    mx.clear_cache()
    held = mx.get_active_memory()
    peaks = []
    for i in range(3):
        mx.reset_peak_memory()
        mx.eval(model(tokens(1, seed=i), cache=cache))
        peaks.append(mx.get_peak_memory() - held)
    # A layer's rows as read and joined to the newest ones, while those of the layer before are just being let go of.
    assert one_layer <= min(peaks)
    assert max(peaks) < 3 * one_layer < layers * one_layer


# -- failures -------------------------------------------------------------------------------------------------------------


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("how", [gone, damage])
@pytest.mark.parametrize(
    "action", ["offload:layers=1-1", "offload:cold@0.50", "quant:affine,bits=8,group=32+offload:cold@0.50"]
)
def test_a_lost_file_stops_the_step_before_a_wrong_number_and_leaves_the_cache_as_it_was(
    tiny: Any, tmp_path: Path, action: str, how: Any
) -> None:
    model = tiny("llama")
    cache = filled(model, tmp_path)
    cache.apply(action)
    feed(model, cache, tokens(3), [1] * 3)
    twin, before = copy.deepcopy(cache), held_of(cache)
    victim = files(tmp_path)[-1]
    content = victim.read_bytes()
    how(victim)
    for n in (1, 5):
        with pytest.raises(DiskCorruptError, match="computed anew|checksum"):
            mx.eval(model(tokens(n), cache=cache))
        assert held_of(cache) == before
        assert {int(layer.offset) for layer in cache} == {203}
    # The file is back (a share that was not mounted for a while): as if nothing had been.
    victim.write_bytes(content)
    more = tokens(6, seed=1)
    assert same_bits(feed(model, cache, more, [1, 5]), feed(model, twin, more, [1, 5]))


def test_mlx_lm_s_generation_raises_and_can_be_taken_up_again(tiny: Any, tmp_path: Path) -> None:
    model, prompt = tiny("llama"), tokens(60)[0].tolist()
    want = [t for t, _ in greedy(model, prompt, make_prompt_cache(model), 20)]
    cache = quiet(model, plan="offload:layers=1-1", disk=tmp_path)
    got: list[int] = []
    with pytest.raises(DiskTierError):
        from mlx_lm.generate import generate_step

        for token, _ in generate_step(mx.array(prompt), model, prompt_cache=cache, max_tokens=20):
            got.append(int(token))
            if len(got) == 5:
                [victim] = files(tmp_path)
                content = victim.read_bytes()
                victim.unlink()
    victim.write_bytes(content)
    assert got == want[: len(got)]
    known = prompt + want
    rest = known[cache[0].offset :]
    more = [t for t, _ in greedy(model, rest[:1], cache, len(want) - len(got) - 1)]
    assert more == known[cache[0].offset - len(more) + 1 :][: len(more)] or more == want[-len(more) :]


@pytest.mark.parametrize("name", ["jamba", "falcon_h1"])
def test_a_step_that_cannot_be_taken_back_bars_every_further_one(
    tiny: Any, tmp_path: Path, name: str
) -> None:
    model = tiny(name)
    cache = filled(model, tmp_path)
    cache.apply("offload:cold@0.50")
    victim = files(tmp_path)[-1]
    content = victim.read_bytes()
    victim.unlink()
    with pytest.raises(DiskCorruptError):
        mx.eval(model(tokens(1), cache=cache))
    victim.write_bytes(content)
    for _ in range(2):
        with pytest.raises(DiskTierError, match="in a new cache"):
            mx.eval(model(tokens(1), cache=cache))
    with pytest.raises(DiskTierError, match="in a new cache"):
        mx.eval(model(tokens(1), cache=copy.deepcopy(cache)))


def full_after(monkeypatch: pytest.MonkeyPatch, puts: int) -> None:
    """The file system is full after so many more files."""
    put, left = DiskStore._put, [puts]

    def limited(self: DiskStore, *args: Any) -> Any:
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return put(self, *args)

    monkeypatch.setattr(DiskStore, "_put", limited)


@pytest.mark.parametrize("puts", [0, 1])
def test_a_full_disk_leaves_every_layer_whole_and_the_log_says_which_were_changed(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, puts: int
) -> None:
    model = tiny("llama")
    in_memory, cache = filled(model, None), filled(model, tmp_path)
    full_after(monkeypatch, puts)
    with pytest.raises(DiskFullError):
        cache.apply("offload:layers=0-9")
    assert [layer.on_disk > 0 for layer in cache] == [True] * puts + [False] * (len(cache) - puts)
    assert cache.observe().nbytes_allocated == real_bytes(cache)
    if puts:
        [said] = records(cache, "warning")
        assert said["code"] == "action_incomplete"
        assert "changed before that: layer 0" in said["text"]
        assert "layer 1" not in said["text"].split("before that")[1]
    else:
        [said] = records(cache, "action.refused")
        assert said["reasons"][0]["code"] == "disk"
    assert records(cache, "action.applied") == []
    more = tokens(5, seed=1)
    assert same_bits(feed(model, cache, more, [1] * 5), feed(model, in_memory, more, [1] * 5))


@pytest.mark.parametrize("then", ["evict:keydiff@0.50", "quant:affine,bits=8,group=32"])
def test_rows_that_find_no_room_on_their_way_back_stay_consistent(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    model = tiny("llama")
    cache = filled(model, tmp_path)
    cache.apply("offload:cold@0.50")
    full_after(monkeypatch, 0)
    with pytest.raises(DiskFullError):
        cache.apply(then)
    for layer in cache:
        assert layer.rows == layer.store.rows == layer.positions().shape[-1]
    assert cache.observe().nbytes_allocated == real_bytes(cache)
    assert mx.isfinite(feed(model, cache, tokens(3), [1] * 3)).all().item()
    said = records(cache, "warning") + records(cache, "action.refused")
    assert len(said) == 1
    assert "No space left" in str(said)


def test_a_full_disk_does_not_stop_generation_under_a_plan(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny("llama"), tokens(60)[0].tolist()
    want = [t for t, _ in greedy(model, prompt, make_prompt_cache(model), 10)]
    cache = quiet(model, plan="offload:layers=0-9", disk=tmp_path)
    full_after(monkeypatch, 1)
    assert [t for t, _ in greedy(model, prompt, cache, 10)] == want
    [said] = records(cache, "warning")
    assert said["code"] == "action_incomplete"


def test_a_limit_of_the_store_is_a_typed_error(tiny: Any, tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_bytes=10_000, total_max_bytes=None) as store:
        cache = filled(tiny("llama"), store)
        before = held_of(cache)
        with pytest.raises(DiskBudgetError, match="max_bytes"):
            cache.apply("offload:layers=0-9")
        assert held_of(cache) == before


def test_without_a_disk_offloading_is_refused_with_the_remedy(tiny: Any) -> None:
    cache = filled(tiny("llama"), None)
    with pytest.raises(ActionInfeasibleError, match="disk=True"):
        cache.apply("offload:cold@0.50")
    [said] = records(cache, "action.refused")
    assert said["reasons"][0]["capability"] == "DISK_TIER"


# -- who owns the files ----------------------------------------------------------------------------------------------


def test_files_are_gone_after_close(tiny: Any, tmp_path: Path) -> None:
    with filled(tiny("llama"), tmp_path) as cache:
        cache.apply("offload:layers=0-9")
        assert files(tmp_path)
    assert list(tmp_path.glob("cache-*")) == []
    cache.close()
    with pytest.raises(DiskTierError):
        mx.eval(tiny("llama")(tokens(1), cache=cache))


def test_files_are_gone_when_the_cache_is(tiny: Any, tmp_path: Path) -> None:
    cache = filled(tiny("llama"), tmp_path)
    cache.apply("offload:layers=0-9")
    assert files(tmp_path)
    del cache
    gc.collect()
    assert list(tmp_path.glob("cache-*")) == []


def test_the_last_of_a_cache_and_its_copies_closes_their_disk(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    cache = filled(model, tmp_path)
    cache.apply("offload:layers=0-9")
    fork = copy.deepcopy(cache)
    cache.close()
    assert mx.isfinite(feed(model, fork, tokens(2), [1, 1])).all().item()
    fork.close()
    assert list(tmp_path.glob("cache-*")) == []


def test_a_store_that_was_passed_is_the_callers_to_close(tiny: Any, tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_bytes=None, total_max_bytes=None) as store:
        cache = filled(tiny("llama"), store)
        cache.apply("offload:layers=0-9")
        cache.close()
        assert store.nbytes > 0
        assert store.put([mx.zeros((3,))]).nbytes == 12


# -- the log --------------------------------------------------------------------------------------------------------------


def test_bytes_written_are_in_the_log_and_add_up(tiny: Any, tmp_path: Path) -> None:
    with DiskStore(tmp_path / "rows", max_bytes=None, total_max_bytes=None) as store:
        with filled(tiny("llama"), store) as cache:
            cache.apply("offload:cold@0.50")
            cache.apply("reclaim")
            first, none = (r["disk_bytes_written"] for r in records(cache, "action.applied"))
            assert first == store.bytes_written_total > 0
            assert none == 0
            cache.suspend()
            [moved] = records(cache, "session.suspended")
            assert first + moved["disk_bytes_written"] == store.bytes_written_total
            cache.resume()
        [end] = records(cache, "session.ended")
        assert end["disk_bytes_written_total"] == store.bytes_written_total
        assert end["unknown"] == {}
        for record in cache.log.records:
            validate(record)


@pytest.mark.parametrize("disk", [False, True])
def test_no_disk_is_told_from_a_disk_that_was_not_used(tiny: Any, tmp_path: Path, disk: bool) -> None:
    with quiet(tiny("llama"), disk=tmp_path if disk else None) as cache:
        pass
    [end] = records(cache, "session.ended")
    assert end["disk_bytes_written_total"] == (0 if disk else None)
    assert ("disk_bytes_written_total" in end["unknown"]) is not disk


def test_leaves_say_how_many_of_their_rows_are_on_disk(tiny: Any, tmp_path: Path) -> None:
    cache = filled(tiny("llama"), tmp_path)
    cache.apply("offload:cold@0.25")
    assert [leaf.on_disk for leaf in leaves(cache)] == [150] * len(cache)
