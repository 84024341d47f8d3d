"""Actions are judged where the prompt is expected to end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from figures import ABLE, FIGURES, able, dense_layers, state_of
from harness import feed, tokens

from lumina_cache import LuminaCache
from lumina_cache.actions import Evict, Quantize, parse_action
from lumina_cache.backend.capabilities import KEYS, ROW_CHOICE, ROW_GATHER, BackendProfile
from lumina_cache.backend.feasibility import Reason
from lumina_cache.estimate import nbytes_allocated
from lumina_cache.policy import Candidate, State
from lumina_cache.policy.candidates import Weighing, next_layers
from lumina_cache.profile import Profile

EIGHT, FOUR = "quant:affine,bits=8,group=64", "quant:hadamard,bits=4,group=64"
ROW = 8 * 2 * 192 * 4  # bytes of a dense row in all layers


def weighed(
    state: State, profile: Profile = FIGURES, backend: BackendProfile = ABLE, **more: object
) -> dict[str, Candidate]:
    found = Weighing.of(state, backend, profile, **more).everything()  # type: ignore[arg-type]
    return {str(one.action): one for one in found}


def reading(limit: int, rows: int = 1024, **fields: object) -> State:
    """Half of a prompt has been read, as far as anybody knows; the next chunk has 256 tokens."""
    return state_of(dense_layers(8, rows), limit, tokens=256, **fields)  # type: ignore[arg-type]


def test_what_will_fit_is_what_is_held_when_the_prompt_has_been_read() -> None:
    limit = 1400 * ROW
    keep = weighed(reading(limit))["keep"].inputs
    # In steps of 256: 1,280 rows after the chunk, one step more, and then the limit.
    after = next_layers(reading(limit).layers, 256)
    rows = 1024 + 256 + 1 + (limit - nbytes_allocated(after)) // ROW
    assert keep.kept == rows / (2048 + 256)  # and an answer of 256 tokens
    assert reading(limit).prompt_tokens == 1024
    assert keep.prompt_tokens == 512  # half believed


def test_rows_that_will_have_to_go_are_part_of_what_keeping_costs() -> None:
    everything = weighed(reading(3000 * ROW, remaining=1280))
    assert everything["keep"].inputs.kl == 0.0
    assert everything["keep"].inputs.then == ""
    tight = weighed(reading(1400 * ROW, remaining=1280), backend=able(KEYS, ROW_GATHER, ROW_CHOICE))
    keep = tight["keep"].inputs
    curve = FIGURES.evictor("keydiff")
    assert curve is not None
    assert keep.kl == pytest.approx(curve.at(keep.kept)[0])


def test_a_coarser_codec_follows_where_it_loses_less_than_dropping_rows() -> None:
    # Eight bits hold the next chunk and a little more; four hold the whole prompt.
    limit = 500 * ROW
    timed = replace(FIGURES, codecs=tuple(one for one in FIGURES.codecs if one.times))
    found = weighed(reading(limit, remaining=1280), timed)
    eight, four = found[EIGHT].inputs, found[FOUR].inputs
    assert eight.nbytes_next <= limit
    assert eight.then == FOUR
    assert eight.kl == pytest.approx(0.0002 + 0.02)
    assert four.then == ""
    assert four.kl == pytest.approx(0.02)
    assert eight.time_ratio == four.time_ratio


def test_what_nobody_has_said_is_half_believed() -> None:
    """As much again as was seen is the median of what may come: as likely nothing comes any more."""
    timed = replace(FIGURES, codecs=tuple(one for one in FIGURES.codecs if one.times))
    guessed, said = (weighed(reading(500 * ROW, remaining=n), timed)[EIGHT].inputs for n in (None, 1280))
    assert guessed.then == said.then == FOUR
    assert said.kl == pytest.approx(0.0002 + 0.02)
    assert guessed.kl == pytest.approx(0.0002 + 0.02 / 2)


def test_a_codec_that_was_tried_in_vain_does_not_follow() -> None:
    def against(action: object) -> tuple[Reason, ...]:
        return (Reason("outlier_guard", "tried"),) if str(action) == FOUR else ()

    eight = weighed(reading(500 * ROW), against=against)[EIGHT].inputs
    assert eight.then not in ("", FOUR)


def test_codes_are_not_followed_by_codes_that_are_as_fine() -> None:
    for one in weighed(reading(400 * ROW)).values():
        if one.inputs.then:
            codec, after = one.action.parts[-1], parse_action(one.inputs.then)
            assert isinstance(after, Quantize)
            if isinstance(codec, Quantize):
                assert (after.key_bits, after.value_bits) != (codec.key_bits, codec.value_bits)
                assert after.key_bits <= codec.key_bits


def test_nothing_follows_while_decoding() -> None:
    state = state_of(dense_layers(8, 1024), 500 * ROW)
    found = weighed(state)
    assert {one.inputs.then for one in found.values()} == {""}
    assert found[EIGHT].inputs.kl == pytest.approx(0.0002)
    eviction = next(one for one in found.values() if isinstance(one.action, Evict))
    assert eviction.action.rows is not None  # type: ignore[union-attr]
    assert eviction.inputs.kept == eviction.action.rows / 1024  # type: ignore[union-attr]


def test_nobody_looks_further_ahead_than_the_caller_expects() -> None:
    limit = 500 * ROW
    far, near = (weighed(reading(limit, remaining=n))[EIGHT].inputs for n in (None, 300))
    assert far.prompt_tokens == 512
    assert near.prompt_tokens == 256
    assert near.then == ""
    # The coming chunk is there in any case.
    assert reading(limit, remaining=10).prompt_tokens == 256


def test_a_chunk_that_is_shorter_than_the_one_before_is_the_last() -> None:
    state = reading(500 * ROW, last_chunk=True)
    assert state.prompt_tokens == 256
    assert state.to_come == 256 + state.horizon
    assert replace(state, tokens=1, within_prompt=True).prompt_tokens == 0
    assert replace(state, tokens=1, within_prompt=True).to_come == 0


def test_who_says_how_long_it_gets_is_looked_ahead_for_while_decoding_too() -> None:
    state = state_of(dense_layers(8, 1024), 500 * ROW, remaining=2000)
    assert (state.prompt_tokens, state.to_come, state.steps) == (0, 2000, 2000)
    assert weighed(state)[EIGHT].inputs.kept < 1.0
    half_read = reading(500 * ROW, remaining=2000)
    # Half of what is still to come, at most, is prompt.
    assert (half_read.prompt_tokens, half_read.to_come, half_read.steps) == (1000, 2000, 1000)


def test_a_shorter_chunk_is_noticed_and_the_next_prompt_begins_anew(tiny: Any) -> None:
    model, seen = tiny("llama"), []
    with LuminaCache(model, budget="10MB", telemetry=False) as cache:
        for n in (30, 30, 11, 1, 30, 30, 9, 1):
            feed(model, cache, tokens(n), [n])
            seen.append(cache._control._last_chunk)
    assert seen == [False, False, True, False, False, False, True, False]


def test_where_codecs_cannot_be_weighed_together_none_is_expected_to_follow() -> None:
    """Nobody knows the bytes that it would take."""
    unbuilt = parse_action("quant:turboquant,bits=4")
    assert isinstance(unbuilt, Quantize)
    more = replace(FIGURES, codecs=(*FIGURES.codecs, replace(FIGURES.codecs[0], action=unbuilt)))
    found = weighed(reading(500 * ROW, remaining=1280), more)
    assert found[EIGHT].inputs.kept < 1.0
    assert {one.inputs.then for one in found.values()} == {""}
