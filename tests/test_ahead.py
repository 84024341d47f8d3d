"""Actions are judged where the prompt is expected to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from figures import ABLE, FIGURES, able, dense_layers, state_of

from lumina_cache.actions import Evict, Quantize, parse_action
from lumina_cache.backend.capabilities import KEYS, ROW_CHOICE, ROW_GATHER, BackendProfile
from lumina_cache.backend.feasibility import Reason
from lumina_cache.estimate import after_action, after_append, nbytes_allocated
from lumina_cache.policy import Adaptive, Candidate, State, score
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
    assert keep.kept == rows / 2048
    assert keep.prompt_tokens == 1024


def test_rows_that_will_have_to_go_are_part_of_what_keeping_costs() -> None:
    everything = weighed(reading(3000 * ROW))
    assert everything["keep"].inputs.kl == 0.0
    assert everything["keep"].inputs.then == ""
    tight = weighed(reading(1400 * ROW), backend=able(KEYS, ROW_GATHER, ROW_CHOICE))
    keep = tight["keep"].inputs
    curve = FIGURES.evictor("keydiff")
    assert curve is not None
    assert keep.kl == pytest.approx(curve.at(keep.kept)[0])


def test_a_coarser_codec_follows_where_it_loses_less_than_dropping_rows() -> None:
    # Eight bits hold the next chunk and a little more; four hold the whole prompt.
    limit = 500 * ROW
    timed = replace(FIGURES, codecs=tuple(one for one in FIGURES.codecs if one.times))
    found = weighed(reading(limit), timed)
    eight, four = found[EIGHT].inputs, found[FOUR].inputs
    assert eight.nbytes_next <= limit
    assert eight.then == FOUR
    assert eight.kl == pytest.approx(0.0002 + 0.02)
    assert four.then == ""
    assert four.kl == pytest.approx(0.02)
    assert eight.time_ratio == four.time_ratio


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
    assert far.prompt_tokens == 1024
    assert near.prompt_tokens == 300
    assert near.then == ""
    # The coming chunk is there in any case.
    assert reading(limit, remaining=10).prompt_tokens == 256


def test_fewer_rows_make_steps_faster_where_that_was_measured() -> None:
    measured = replace(
        FIGURES, dense_steps=((512, 0.06), (2048, 0.12)), prompt_seconds=0.01, dense_chunks=((1024, 0.01),)
    )
    assert measured.step_at(1024) == pytest.approx(0.08)
    found = weighed(state_of(dense_layers(8, 2048), 900 * ROW), measured)
    evictions = [one for one in found.values() if isinstance(one.action, Evict)]
    assert evictions
    for one in evictions:
        assert isinstance(one.action, Evict)
        assert one.action.rows is not None
        expected = measured.step_at(one.action.rows)
        assert expected is not None
        assert one.inputs.time_ratio == pytest.approx(expected / 0.12)
        assert one.inputs.step_seconds == 0.12
    assert found[FOUR].inputs.time_ratio == pytest.approx(1.4)
    # The line does not fall to nothing.
    assert measured.step_at(-10_000) == 0.03


def test_the_score_follows_from_the_inputs_all_the_same() -> None:
    state = reading(500 * ROW)
    for one in weighed(state).values():
        assert score(one.inputs, state.weights) == one.score


def test_reading_on_the_rows_are_encoded_once_and_not_again_and_again() -> None:
    """A prompt of 2,048 tokens in chunks, under a limit that four bits hold: never coarser than that."""
    limit, each, lost, chosen = 380 * ROW, dense_layers(8, 256), (0.0, 0.0), []
    while each[0].offset < 2048:
        state = state_of(each, limit, tokens=256, lost=lost)
        if nbytes_allocated(next_layers(state.layers, 256)) > limit:
            table = Weighing.of(state, ABLE, replace(FIGURES, sensitivity=())).everything()
            action = Adaptive().decide(state, table).action
            x = next(one.inputs for one in table if one.action == action)
            each, lost = after_action(each, action), (x.lost_kl or 0.0, x.lost_p95 or 0.0)
            chosen.append(str(action))
        each = after_append(each, 256)
    assert len(chosen) <= 2, chosen
    assert each[0].layout.bits == 4
    assert not each[0].evicted
