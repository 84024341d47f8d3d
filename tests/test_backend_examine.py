"""What the probe says of each layer is what happens when it is tried otherwise than the probe tries it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from harness import UNDECODABLE
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.backend import bench as benching
from lumina_cache.backend import packable as packing
from lumina_cache.backend import probe as probing
from lumina_cache.backend.capabilities import (
    ARRAY_MASK,
    BORROWED_KV,
    DENSE_REENCODE,
    KEYS,
    LATENT_WITH_PACKED,
    RAGGED_LAYERS,
    RESERVE,
    ROW_GATHER,
    SINKS_WITH_PACKED,
    Outcome,
    element_format,
    packed_attention,
    packed_some_layers,
)
from lumina_cache.backend.examine import examine
from lumina_cache.backend.packable import why_not_packed
from lumina_cache.backend.probe import ModelProbe, probe_model, probe_packed, remembered_probe
from lumina_cache.codecs import Affine, Codec, Layout
from lumina_cache.codecs.base import Encoded
from lumina_cache.lab.tiny import SPECS
from lumina_cache.layers import ChunkedKVCache, KVCache, RotatingKVCache, adopt, leaves
from lumina_cache.steps import StepTracker

#: Modules whose rows may not go although nothing raises when they do: they take a row's index for its position.
SILENT = {"afm7", "minimax_m3_vl"}

FILLED = 20


@pytest.fixture(scope="module")
def probed(tiny: Any) -> Callable[[str], ModelProbe]:
    known: dict[str, ModelProbe] = {}

    def of(name: str) -> ModelProbe:
        if name not in known:
            known[name] = probe_model(tiny(name))
        return known[name]

    return of


def filled(model: Any) -> list[Any]:
    steps = StepTracker()
    entries = [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))]
    run(model, entries, FILLED)
    return entries


def run(model: Any, entries: list[Any], *steps: int) -> mx.array:
    logits = mx.array(0.0)
    for n in steps:
        logits = model(mx.arange(2, 2 + n, dtype=mx.int32)[None], cache=entries)
        mx.eval(logits, [c.state for c in entries])
    return logits


def changeable(entries: list[Any]) -> list[KVCache]:
    return [leaf for leaf in leaves(entries) if isinstance(leaf, KVCache) and leaf.rows > 0]


def assert_close(got: mx.array, wanted: mx.array) -> None:
    """Equal to rounding, where logits are not minus infinity on both sides."""
    both = mx.isinf(got) & mx.isinf(wanted)
    off = mx.abs(mx.where(both, 0.0, got) - mx.where(both, 0.0, wanted)).max().item()
    assert off < 5e-3, off


def raises(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except Exception:
        return True
    return False


# -- everything present runs, everything absent fails when forced ---------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_a_layer_can_be_packed_exactly_where_the_probe_says_so(
    tiny: Any, probed: Callable[[str], ModelProbe], name: str
) -> None:
    model, probe = tiny(name), probed(name)
    for i, leaf in enumerate(probe.leaves):
        for capability, outcome in leaf.packed.items():
            codec = Affine(*capability.params)

            def attempt(i: int = i, codec: Affine = codec) -> None:
                entries = filled(model)
                list(leaves(entries))[i].reencode(Layout.both(codec))
                run(model, entries, 3, 1)

            assert raises(attempt) != outcome.present, (leaf.name, str(capability), outcome.reason)
            assert outcome.present == (outcome.reason is None)


@pytest.mark.parametrize("name", SPECS)
def test_uneven_rows_work_exactly_where_the_probe_says_so(
    tiny: Any, probed: Callable[[str], ModelProbe], name: str
) -> None:
    model, probe = tiny(name), probed(name)
    if not probe.profile.has(KEYS):
        assert not probe.profile.has(RAGGED_LAYERS)
        return

    def attempt() -> None:
        entries = filled(model)
        for n, entry in enumerate(e for e in entries if changeable([e])):
            for leaf in changeable([entry]):
                leaf.gather(np.r_[0:3, 5 + 2 * (n % 2) : FILLED].astype(np.int32))
        run(model, entries, 1, 4)

    expected = probe.profile.has(RAGGED_LAYERS) or name in SILENT
    assert raises(attempt) != expected, probe.profile.outcome(RAGGED_LAYERS).reason


@dataclass(frozen=True)
class _TwoParts(Codec):
    """bfloat16 and what is left of the row, also in bfloat16: nearly exact, and two arrays."""

    @property
    def spans(self) -> tuple[int, ...]:
        return (1, 1)

    def encode(self, rows: mx.array) -> Encoded:
        high = rows.astype(mx.bfloat16)
        return high, (rows - high.astype(rows.dtype)).astype(mx.bfloat16)

    def decode(self, encoded: Encoded, dtype: mx.Dtype) -> mx.array:
        return encoded[0].astype(dtype) + encoded[1].astype(dtype)

    def row_nbytes(self, width: int, itemsize: int) -> int:
        return 4 * width


@pytest.mark.parametrize("name", SPECS)
def test_rows_decoded_on_fetch_work_exactly_where_the_probe_says_so(
    tiny: Any, probed: Callable[[str], ModelProbe], name: str
) -> None:
    """Sliding windows and attention chunks are re-encoded as well, also where nothing else holds rows."""
    model, probe = tiny(name), probed(name)
    wanted = run(model, filled(model), 3)

    def attempt() -> None:
        entries = filled(model)
        updated = [leaf for leaf, seen in zip(leaves(entries), probe.leaves, strict=True) if seen.updated]
        encoded = [leaf for leaf in updated if isinstance(leaf, KVCache | RotatingKVCache | ChunkedKVCache)]
        for leaf in encoded:
            leaf.reencode(Layout.both(_TwoParts()))
            assert len(leaf.keys) == 2
        assert encoded, "no layer holds rows"
        assert_close(run(model, entries, 3), wanted)

    assert raises(attempt) != probe.profile.has(DENSE_REENCODE), probe.profile.outcome(DENSE_REENCODE).reason
    assert probe.profile.has(DENSE_REENCODE) or not probe.profile.has(KEYS) or name in UNDECODABLE


@pytest.mark.parametrize("name", SPECS)
def test_buffers_ahead_and_masks_as_arrays_are_not_felt_where_the_probe_says_so(
    tiny: Any, probed: Callable[[str], ModelProbe], name: str
) -> None:
    model, probe = tiny(name), probed(name)
    assert probe.profile.has(RESERVE) == probe.profile.has(ARRAY_MASK) == probe.profile.has(KEYS)
    if not probe.profile.has(KEYS):
        return
    wanted, entries = run(model, filled(model), 4), filled(model)
    for leaf in changeable(entries):
        leaf.keys, leaf.values = (
            mx.concatenate([a, mx.ones((*a.shape[:2], 600, a.shape[3]), a.dtype)], axis=2)
            for a in (leaf.keys, leaf.values)
        )
        leaf.__dict__["make_mask"] = as_array(leaf, leaf.make_mask)
    assert_close(run(model, entries, 4), wanted)


def as_array(leaf: KVCache, make_mask: Callable[..., Any]) -> Callable[..., Any]:
    def made(N: int, **options: Any) -> Any:
        mask = make_mask(N, **options)
        return create_causal_mask(N, leaf.offset) if isinstance(mask, str) else mask

    return made


# -- what it says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability", "words"),
    [
        ("gpt_oss", SINKS_WITH_PACKED, "attention sinks"),
        ("deepseek_v3", LATENT_WITH_PACKED, "latent attention"),
        ("gemma4_text", BORROWED_KV, "borrow"),
        ("iquestloopcoder", BORROWED_KV, "borrow"),
    ],
)
def test_sinks_latent_attention_and_borrowed_rows_are_named(
    probed: Callable[[str], ModelProbe], name: str, capability: Any, words: str
) -> None:
    profile = probed(name).profile
    assert words in str(profile.outcome(capability).reason)
    assert words in str(profile.outcome(packed_attention(8, probed(name).group_size or 64)).reason)
    others = {SINKS_WITH_PACKED, LATENT_WITH_PACKED, BORROWED_KV} - {capability}
    assert not others & profile.outcomes.keys()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mimo_v2_flash", "one width"),
        ("minimax_m3_vl", "no mask per head"),
        ("gemma2", "the model's own code (Attention.__call__ in mlx_lm.models.gemma2)"),
        ("plamo2", "the model's own code (Attention.__call__ in mlx_lm.models.plamo2)"),
    ],
)
def test_what_else_keeps_rows_from_being_packed_is_said_in_words(
    probed: Callable[[str], ModelProbe], name: str, words: str
) -> None:
    assert words in str(probed(name).profile.outcome(packed_attention(8, 32)).reason)


def test_a_model_that_can_be_packed_says_nothing_of_sinks_and_the_like(
    probed: Callable[[str], ModelProbe],
) -> None:
    profile = probed("llama").profile
    assert profile.has(packed_some_layers(8, 32))
    assert not {SINKS_WITH_PACKED, LATENT_WITH_PACKED, BORROWED_KV} & profile.outcomes.keys()
    for name in ("mxfp4", "mxfp8", "nvfp4"):
        assert profile.has(element_format(name))


def test_only_the_layers_that_others_borrow_from_stay_dense() -> None:
    """Nine layers of which the last three borrow: of two full-attention caches, one lends its rows."""
    from mlx_lm.models import gemma4_text

    config = dict(SPECS["gemma4_text"].config) | {
        "num_hidden_layers": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
    }
    model = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    probe = probe_model(model)
    packable = {leaf.name: [o.present for o in leaf.packed.values()] for leaf in probe.leaves if leaf.packed}
    assert packable == {"layer 2": [True, True], "layer 5": [False, False]}
    assert not probe.profile.has(packed_attention(8, 64))
    assert "layer 5" in str(probe.profile.outcome(packed_attention(8, 64)).reason)
    assert "1 of 2 layers can be packed" in str(probe.profile.outcome(packed_attention(8, 64)).reason)
    assert probe.profile.has(packed_some_layers(8, 64))


def test_the_masks_that_a_model_asks_for_are_written_down(probed: Callable[[str], ModelProbe]) -> None:
    first, second = probed("llama").leaves
    assert [(m.tokens, m.form) for m in first.masks] == [(2, "string"), (1, "none")]
    assert second.masks == ()
    window, _ = probed("mistral3").leaves
    assert {(m.tokens, m.window_size, m.form) for m in window.masks} == {(2, 16, "array"), (1, 16, "array")}
    latent, _ = probed("deepseek_v3").leaves
    assert latent.masks[0].return_array
    assert latent.masks[0].form == "array"


def test_layers_that_no_step_updates_and_layers_without_rows_are_told_apart(
    probed: Callable[[str], ModelProbe],
) -> None:
    assert [leaf.updated for leaf in probed("falcon_h1").leaves] == [None, True, None, True]
    assert [leaf.kind for leaf in probed("deepseek_v41").leaves] == ["opaque"] * 4
    for name in ("llama", "gemma3n", "afm7"):
        probe = probed(name)
        assert sum(bool(leaf.updated) for leaf in probe.leaves) == probe.updated_per_step


def test_both_halves_of_nested_caches_are_evicted_alike(probed: Callable[[str], ModelProbe]) -> None:
    for name in ("deepseek_v32", "falcon_h1", "longcat_flash"):
        assert probed(name).profile.has(ROW_GATHER)


def test_array_masks_keep_layers_even_in_chunks_but_not_one_token_at_a_time(
    probed: Callable[[str], ModelProbe],
) -> None:
    reason = str(probed("gemma2").profile.outcome(RAGGED_LAYERS).reason)
    assert "one token at a time works" in reason
    assert "one array mask" in reason


def test_one_layer_with_rows_has_none_to_differ_from(probed: Callable[[str], ModelProbe]) -> None:
    outcome = probed("qwen3_next").profile.outcome(RAGGED_LAYERS)
    assert outcome.present
    assert "one layer" in str(outcome.reason)


def test_a_layout_asked_for_later_is_explained_layer_by_layer_too(
    tiny: Any, probed: Callable[[str], ModelProbe]
) -> None:
    more = probe_packed(tiny("gemma4_text"), probed("gemma4_text"), Affine(3, 32)).profile
    assert "borrows" in str(more.outcome(packed_attention(3, 32)).reason)
    assert not more.has(packed_some_layers(3, 32))


def test_packed_rows_that_compute_something_else_are_not_called_packable(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No exception, and nonsense: the codes of the values are those of the rows in reverse."""
    real = KVCache.reencode

    def scrambled(self: KVCache, layout: Layout) -> Any:
        drifts = real(self, layout)
        if layout.packed:
            store = self.own_store()
            assert store.values is not None
            store.values = tuple(mx.contiguous(a[:, :, ::-1]) for a in store.values)
        return drifts

    monkeypatch.setattr(KVCache, "reencode", scrambled)
    probe = probe_model(tiny("llama"))
    assert "move the logits by" in str(probe.profile.outcome(packed_attention(8, 32)).reason)


# -- never at anyone's expense --------------------------------------------------------------------------------------


class Failing:
    """A model that fails at its ``after``-th step."""

    model_type = "failing"

    def __init__(self, model: Any, after: int) -> None:
        self._model, self._after = model, after
        self.layers = model.layers

    def __call__(self, ids: mx.array, cache: Any) -> Any:
        self._after -= 1
        if self._after < 0:
            raise RuntimeError("out of patience")
        return self._model(ids, cache=cache)


def test_a_model_that_fails_at_any_step_is_a_reason_and_no_crash(tiny: Any) -> None:
    whole = Failing(tiny("llama"), 1000)
    probe_model(whole)
    steps = 1000 - whole._after
    assert steps > 10
    for after in range(steps):
        probe = probe_model(Failing(tiny("llama"), after))
        reasons = [str(o.reason) for o in probe.profile.outcomes.values() if not o.present]
        assert any("out of patience" in r for r in reasons), after
    assert probe_model(Failing(tiny("llama"), steps)).profile.has(RAGGED_LAYERS)


def test_examining_a_model_without_layers_is_a_reason_and_no_crash() -> None:
    found = examine(object(), {})
    assert found.leaves == ()
    assert not any(o.present for o in found.outcomes.values())
    assert "could not be examined" in str(found.outcomes[RESERVE].reason)


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "deepseek_v32", "falcon_h1", "afm7"])
def test_no_memory_is_left_behind_without_waiting_for_the_collector(tiny: Any, name: str) -> None:
    model = tiny(name)
    probe_model(model)
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        examine(model, {packed_attention(8, 32): Outcome(False, "not tried")})
        assert mx.get_active_memory() == before
    finally:
        gc.enable()


def test_a_cache_object_that_cannot_be_copied_is_filled_anew(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise TypeError("cannot be copied")

    monkeypatch.setattr(benching.copy, "deepcopy", refuse)
    profile = probe_model(tiny("llama")).profile
    assert profile.has(RAGGED_LAYERS)
    assert profile.has(DENSE_REENCODE)


def test_the_search_for_layers_that_can_be_packed_is_bounded(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MOST_RUNS", 1)
    probe = probe_model(tiny("afm7"))
    assert "within 1 runs" in str(probe.profile.outcome(packed_attention(8, 32)).reason)


def test_an_error_from_outside_mlx_lm_is_passed_on_as_it_is() -> None:
    why = why_not_packed(OSError("the disk is gone"))
    assert (why.cause, why.text) == ("other", "OSError: the disk is gone")


# -- once per model -------------------------------------------------------------------------------------------------


def test_a_model_is_probed_once_for_as_long_as_it_lives(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lumina_cache.lab.tiny import build

    model, runs = build("llama"), []
    real = probing.probe_model
    monkeypatch.setattr(probing, "probe_model", lambda m: runs.append(1) or real(m))
    first = remembered_probe(model)
    assert remembered_probe(model) is first
    assert len(runs) == 1
    model.set_dtype(mx.float16)
    assert {one.itemsize for one in remembered_probe(model).layers} == {2}
    assert len(runs) == 2
    known = len(probing._remembered)
    del model
    gc.collect()
    assert len(probing._remembered) == known - 1


def test_a_model_that_cannot_be_remembered_is_probed_each_time(tiny: Any) -> None:
    class Slotted:
        __slots__ = ("layers", "model")
        model_type = "slotted"

        def __init__(self, model: Any) -> None:
            self.model, self.layers = model, model.layers

        def __call__(self, ids: mx.array, cache: Any) -> Any:
            return self.model(ids, cache=cache)

    model, known = Slotted(tiny("llama")), dict(probing._remembered)
    assert remembered_probe(model) is not remembered_probe(model)
    assert remembered_probe(model).profile.has(KEYS)
    assert probing._remembered == known
