"""The probe finds out by running the model, and leaves nothing behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from harness import NO_ROWS, UNEVICTABLE, UNPACKABLE, architectures, feed, held_of, quiet, same_bits, tokens
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.backend import probe as probing
from lumina_cache.backend.capabilities import (
    DENSE_REENCODE,
    KEYS,
    PAGED_ROWS,
    QUERIES,
    ROW_GATHER,
    VALUES,
    packed_attention,
)
from lumina_cache.backend.probe import ROW_INDEX_IS_POSITION, pick_group_size, probe_model, probe_packed
from lumina_cache.codecs import Affine
from lumina_cache.layers import leaves

LIMITS = ("set_memory_limit", "set_cache_limit", "set_wired_limit", "reset_peak_memory", "set_default_device")


@pytest.mark.parametrize("name", architectures())
def test_probing_never_raises_and_leaves_no_memory_files_or_limits_behind(
    tiny: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny(name)
    monkeypatch.chdir(tmp_path)
    for limit in LIMITS:
        monkeypatch.setattr(mx, limit, lambda *a, _limit=limit, **k: pytest.fail(f"{_limit} was called"))
    state = [mx.array(s) for s in mx.random.state]
    probe_model(
        model
    )  # what the model itself builds on first use, such as tables of angles, is not the probe's
    gc.collect()
    active = mx.get_active_memory()
    probe = probe_model(model)
    gc.collect()
    assert mx.get_active_memory() == active
    assert list(tmp_path.iterdir()) == []
    assert all(same_bits(a, b) for a, b in zip(state, mx.random.state, strict=True))
    rows = name not in NO_ROWS and probe.profile.has(KEYS)
    assert probe.profile.has(VALUES) == probe.profile.has(KEYS)
    assert probe.profile.has(ROW_GATHER) == (rows and name not in UNEVICTABLE)
    group = probe.group_size or 64
    for bits in (8, 4):
        outcome = probe.profile.outcome(packed_attention(bits, group))
        assert outcome.present == (rows and name not in UNPACKABLE), outcome.reason
        assert outcome.present == (outcome.reason is None)


@pytest.mark.parametrize("name", architectures())
def test_probed_shapes_are_those_of_a_real_run(tiny: Any, name: str) -> None:
    model = tiny(name)
    probe, cache = probe_model(model), quiet(model)
    feed(model, cache, tokens(9), [9])
    for found, real in zip(probe.layers, held_of(cache), strict=True):
        for field in ("name", "kind", "key_width", "value_width", "itemsize", "max_size", "bits"):
            assert getattr(found, field) == getattr(real, field), field
    steps = cache._control.trackers[0]
    assert probe.updated_per_step == sum(
        layer._seen == steps.step for layer in steps.layers if layer.holds_rows
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt_oss", "sinks"),
        ("deepseek_v3", "swapaxes"),
        ("gemma4_text", "scaled_dot_product_attention"),
        ("gemma2", "expand_dims"),
        ("recurrent_gemma", "no K/V rows that could be changed"),
        ("mamba", "no K/V rows that could be changed"),
    ],
)
def test_what_is_absent_has_a_reason_of_one_line(tiny: Any, name: str, reason: str) -> None:
    probe = probe_model(tiny(name))
    why = str(probe.profile.outcome(packed_attention(4, probe.group_size or 64)).reason)
    assert reason in why
    assert "\n" not in why


def test_what_no_cache_object_can_see_is_absent_and_what_nobody_probed_says_so(tiny: Any) -> None:
    profile = probe_model(tiny("llama")).profile
    assert "keys and values only" in str(profile.outcome(QUERIES).reason)
    assert profile.has(DENSE_REENCODE)
    assert "not probed" in str(profile.outcome(PAGED_ROWS).reason)
    record = profile.to_record()
    assert record["device"] == mx.default_device().type.name
    assert "PACKED_ATTENTION(8,32)" in record["capabilities"]  # type: ignore[operator]


def test_rows_of_models_that_take_their_index_for_their_position_are_not_evicted() -> None:
    from lumina_cache.lab.tiny import SPECS, build

    assert set(ROW_INDEX_IS_POSITION) == UNEVICTABLE
    for name in UNEVICTABLE & SPECS.keys():
        outcome = probe_model(build(name)).profile.outcome(ROW_GATHER)
        assert ROW_INDEX_IS_POSITION[name] in str(outcome.reason)


def test_a_model_that_cannot_be_run_by_itself_has_no_capabilities_and_the_reason_says_why() -> None:
    class Multimodal:
        model_type = "multimodal"
        layers = ()

        def make_cache(self) -> list[Any]:
            return []

        def __call__(self, ids: mx.array, cache: Any) -> mx.array:
            raise TypeError("pixel_values is missing")

    probe = probe_model(Multimodal())
    assert (probe.layers, probe.updated_per_step, probe.group_size) == ((), 0, None)
    for outcome in probe.profile.outcomes.values():
        assert not outcome.present
        assert "pixel_values is missing" in str(outcome.reason)


def test_a_probe_in_the_middle_of_a_generation_does_not_touch_it(tiny: Any) -> None:
    model, ids = tiny("gemma3"), tokens(40)
    cache, theirs = quiet(model), make_prompt_cache(model)
    for one in (cache, theirs):
        feed(model, one, ids, [20, 1])
    probe_model(model)
    assert same_bits(feed(model, cache, ids, [1, 5], start=21), feed(model, theirs, ids, [1, 5], start=21))


def test_a_layout_asked_for_later_is_added_to_the_same_profile(tiny: Any) -> None:
    model = tiny("llama")
    probe = probe_model(model)
    assert not probe.profile.has(packed_attention(3, 32))
    more = probe_packed(model, probe, Affine(3, 32))
    assert more.profile.has(packed_attention(3, 32))
    assert more.layers == probe.layers
    too_wide = probe_packed(model, more, Affine(4, 64))
    assert "divi" in str(too_wide.profile.outcome(packed_attention(4, 64)).reason)


def test_a_model_without_rows_cannot_have_them_packed_however_the_layout(tiny: Any) -> None:
    model = tiny("mamba")
    more = probe_packed(model, probe_model(model), Affine(3, 32))
    assert not more.profile.has(packed_attention(3, 32))


@pytest.mark.parametrize(
    ("dims", "group"),
    [
        ({48}, None),
        ({80}, None),
        ({64}, 64),
        ({96}, 32),
        ({128}, 64),
        ({256}, 64),
        ({64, 96}, 32),
        ({128, 48}, None),
        ({192, 128}, 64),
        (set(), None),
    ],
)
def test_the_group_size_divides_all_head_dims_of_keys_and_values(dims: set[int], group: int | None) -> None:
    assert pick_group_size(dims) == group


def test_the_probe_runs_models_on_caches_of_its_own(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = tiny("llama"), []

    def watched(m: Any) -> Any:
        made.append(make_prompt_cache(m))
        return made[-1]

    monkeypatch.setattr(probing, "make_prompt_cache", watched)
    probe_model(model)
    assert len(made) == 4, "dense, evicted, packed at 8 and at 4 bits"
    assert {leaf.offset for cache in made for leaf in leaves(cache)} == {0}
