"""What is weighed: rows solved for to the last one, bytes exact for every candidate, plans by the layers' sensitivity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from figures import ABLE, FIGURES, dense_layers, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache.actions import (
    Action,
    Composite,
    Evict,
    Keep,
    Plan,
    Quantize,
    Reclaim,
    parse_action,
    singles,
)
from lumina_cache.estimate import (
    Held,
    after_action,
    after_append,
    merge_equal,
    nbytes_allocated,
    peak_of_action,
)
from lumina_cache.policy import Candidate, State, candidates_for, next_layers, plans_for, weigh
from lumina_cache.policy.candidates import PLAN_SHARES, PlannedLayers, columns_in, grouped
from lumina_cache.policy.fit import rows_within
from lumina_cache.profile import CodecFigure, Profile

CODECS = [
    None,
    *(
        parse_action(text)
        for text in (
            "quant:affine,bits=8,group=64",
            "quant:affine,bits=4,group=64",
            "quant:hadamard,bits=4,group=64",
            "quant:hadamard,bits=4,group=64,residual=48,sinks=4",
            "quant:kivi,bits=2,group=32",
            "quant:kivi,kbits=2,vbits=4,group=64,residual=100",
            "quant:mxfp4,bits=4,group=32",
        )
    ),
]

EMPTY = (
    Held("kv", "kv", key_width=256, value_width=256, itemsize=2, heads=4, index=0),
    Held("wide", "kv", key_width=512, value_width=128, itemsize=2, heads=2, index=1),
    Held(
        "window",
        "rotating",
        key_width=256,
        value_width=256,
        itemsize=2,
        heads=4,
        max_size=96,
        keep=4,
        index=2,
    ),
    Held("chunk", "chunked", key_width=256, value_width=256, itemsize=2, heads=4, max_size=128, index=3),
    Held("state", "not_kv", fixed_nbytes=4096, index=4),
    Held("other", "opaque", token_nbytes=17.5, index=5),
)


@st.composite
def histories(draw: Any, *, ragged: bool | None = None, disk: bool = True) -> tuple[Held, ...]:
    """Layers as steps and actions leave them: slack, heads, tails, blocks, windows that have wrapped, rows on disk."""
    ragged = draw(st.booleans()) if ragged is None else ragged
    kinds = draw(st.lists(st.sampled_from(EMPTY), min_size=1, max_size=4))
    layers = tuple(replace(one, name=f"layer {i}", index=i) for i, one in enumerate((EMPTY[0], *kinds)))
    for _ in range(draw(st.integers(1, 5))):
        event = draw(st.sampled_from(["append", "append", "quant", "evict", "reclaim", "disk"]))
        if event == "append":
            layers = after_append(layers, draw(st.integers(1, 300)))
            continue
        actions: dict[str, st.SearchStrategy[Action]] = {
            "quant": st.sampled_from([one for one in CODECS if one is not None]),
            "evict": st.builds(Evict, st.just("sinks_window"), rows=st.integers(1, 400)),
            "reclaim": st.just(Reclaim()),
            "disk": st.sampled_from([parse_action("offload:cold@0.50") if disk else Reclaim(), Reclaim()]),
        }
        if ragged:
            layers = tuple(one for each in layers for one in after_action([each], draw(actions[event])))
        else:
            layers = after_action(layers, draw(actions[event]))
    return after_append(layers, 1)


protected = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 90)).map(lambda x: (x[0], sum(x))), max_size=2
)


def bytes_with(state: State, rows: int, codec: Action | None) -> int:
    """By carrying it out on values, a step at a time."""
    eviction = Evict("sinks_window", rows=rows)
    action = eviction if codec is None else Composite((eviction, codec))
    after = after_action(state.each, action, state.protect)
    return nbytes_allocated(after_append(after_append(after, state.tokens), 1))


#: Every codec of these tests, with figures that nothing here looks at.
FITTED = replace(FIGURES, codecs=tuple(CodecFigure(one, 0.1, 0.4) for one in CODECS if one is not None))


def rows_that_fit(state: State, limit: int) -> list[int]:
    """For rows as they are stored, and for every codec in turn."""
    codecs = np.arange(-1, len(FITTED.codecs))
    layouts = [one.layout for one in state.layers]
    units = {*FITTED.codec_columns.units, *(x.unit for x in layouts), *(x.block for x in layouts)}
    return [int(n) for n in rows_within(columns_in(state, FITTED), limit, codecs, units, state.tokens)]


def most_held(state: State) -> int:
    return max((one.rows for one in state.each if one.changeable), default=0)


@settings(max_examples=40, deadline=None)
@given(
    each=histories(),
    codec=st.sampled_from(CODECS),
    share=st.floats(0.01, 1.2),
    tokens=st.sampled_from([0, 1, 2, 31, 64, 255, 256, 257, 280, 700]),
    protect=protected,
)
def test_as_many_rows_as_fit_are_found_like_trying_every_number_would(
    each: tuple[Held, ...],
    codec: Quantize | None,
    share: float,
    tokens: int,
    protect: list[tuple[int, int]],
) -> None:
    state = state_of(each, None, tokens=tokens, protect=tuple(protect))
    held = most_held(state)
    limit = int(share * bytes_with(state, max(1, held), codec))
    for other, rows in zip(CODECS, rows_that_fit(state, limit), strict=True):
        fitting = (n for n in range(held, 0, -1) if bytes_with(state, n, other) <= limit)
        assert rows == next(fitting, 0)


def test_a_row_more_may_take_fewer_bytes_and_is_kept_then() -> None:
    """At 63 rows the next two tokens fill a unit of 32, for which 256 rows are allocated; at 64 they begin one."""
    codec = parse_action("quant:hadamard,bits=4,group=64")
    state = state_of(dense_layers(4, 700), None)
    limit = bytes_with(state, 64, codec)
    assert bytes_with(state, 63, codec) > limit
    [rows] = [n for one, n in zip(CODECS, rows_that_fit(state, limit), strict=True) if one == codec]
    assert rows == 93
    assert bytes_with(state, 93, codec) == limit < bytes_with(state, 94, codec)


# -- bytes of every candidate -------------------------------------------------------------------------------------------


def planned(
    state: State, profile: Profile = FIGURES, scorer: str | None = "keydiff"
) -> tuple[PlannedLayers, ...]:
    return plans_for(state, profile, [one.action for one in profile.codecs], scorer)


def everything(state: State, profile: Profile = FIGURES) -> tuple[Candidate, ...]:
    plans = planned(state, profile)
    return (
        *weigh(state, candidates_for(state, profile), ABLE, profile),
        *weigh(state, (), ABLE, profile, plans),
    )


def check_bytes(state: State, candidate: Candidate) -> None:
    after = after_action(state.each, candidate.action, state.protect)
    assert candidate.nbytes_next == nbytes_allocated(next_layers(after, state.tokens)), candidate.action
    assert candidate.nbytes_peak == peak_of_action(state.each, candidate.action, state.protect), (
        candidate.action
    )


@settings(max_examples=60, deadline=None)
@given(
    each=histories(ragged=False),
    share=st.floats(0.1, 1.1),
    tokens=st.sampled_from([0, 1, 64, 300]),
    protect=protected,
)
def test_bytes_of_every_candidate_are_those_of_carrying_it_out(
    each: tuple[Held, ...], share: float, tokens: int, protect: list[tuple[int, int]]
) -> None:
    limit = int(share * nbytes_allocated(after_append(each, 1)))
    state = state_of(each, limit, tokens=tokens, protect=tuple(protect))
    for candidate in everything(state):
        check_bytes(state, candidate)


def test_a_callers_plan_is_weighed_like_one_of_our_own() -> None:
    state = state_of(dense_layers(4), 10**6)
    plan = parse_action(
        "0-1:evict:keydiff@0.50+quant:affine,bits=8,group=64;3:quant:hadamard,bits=4,group=64"
    )
    [candidate] = weigh(state, [plan], ABLE, FIGURES)
    check_bytes(state, candidate)
    assert candidate.feasible
    assert candidate.inputs.kl is not None


def test_an_eviction_solved_for_keeps_to_the_limit_and_one_row_more_would_not() -> None:
    state = state_of(dense_layers(), nbytes_allocated(dense_layers()) // 3)
    evictions = [
        a for a in candidates_for(state, FIGURES) if any(isinstance(part, Evict) for part in singles(a))
    ]
    assert {type(a) for a in evictions} == {Evict, Composite}
    for action in evictions:
        [within] = weigh(state, [action], ABLE, FIGURES)
        first, *rest = action.parts
        assert isinstance(first, Evict)
        assert first.rows is not None
        more = replace(first, rows=first.rows + 1)
        [beyond] = weigh(state, [Composite((more, *rest)) if rest else more], ABLE, FIGURES)
        assert within.nbytes_next <= state.budget < beyond.nbytes_next


def test_codecs_that_hold_every_row_within_the_limit_are_not_joined_to_an_eviction() -> None:
    state = state_of(dense_layers(), nbytes_allocated(dense_layers()) // 2)
    joined = {a.parts[-1] for a in candidates_for(state, FIGURES) if isinstance(a, Composite)}
    assert joined == set()
    tight = state_of(dense_layers(), nbytes_allocated(dense_layers()) // 3)
    joined = {str(a.parts[-1]) for a in candidates_for(tight, FIGURES) if isinstance(a, Composite)}
    assert joined == {"quant:affine,bits=8,group=64"}


def test_without_a_limit_nothing_is_solved_for() -> None:
    state = state_of(dense_layers(), None)
    assert candidates_for(state, FIGURES) == (Keep(), Reclaim(), *(c.action for c in FIGURES.codecs))
    assert planned(state) == ()


def test_rows_that_are_missing_already_are_dropped_further_by_the_same_scorer_only() -> None:
    state = state_of(dense_layers(), nbytes_allocated(dense_layers()) // 5, evicted_by="keydiff")
    scorers = {p.scorer for a in candidates_for(state, FIGURES) for p in singles(a) if isinstance(p, Evict)}
    assert scorers == {"keydiff"}


# -- plans --------------------------------------------------------------------------------------------------------------


def test_layers_that_mind_more_get_more_bits_and_the_whole_loses_less_than_any_codec_for_all() -> None:
    """One layer in eight carries half of the damage: at 5 bits per element it stays at 8 and the others pay."""
    each = dense_layers()
    limit = nbytes_allocated(next_layers(each, 1)) * 3 // 16
    state = state_of(each, limit)
    found = everything(state)
    fitting = [c for c in found if c.feasible and c.nbytes_next <= limit and c.inputs.kl is not None]
    plan = min((c for c in fitting if isinstance(c.action, Plan)), key=lambda c: c.inputs.kl)
    uniform = min((c for c in fitting if not isinstance(c.action, Plan)), key=lambda c: c.inputs.kl)
    assert plan.inputs.kl < uniform.inputs.kl
    bits = [plan.action.for_layer(i).key_bits for i in range(8)]
    assert bits[0] == max(bits) > min(bits)
    assert plan.score.total > uniform.score.total


def test_where_all_layers_mind_alike_no_plan_does_better_than_what_its_bytes_buy() -> None:
    each = dense_layers()
    limit = nbytes_allocated(next_layers(each, 1)) * 3 // 16
    even = replace(FIGURES, sensitivity=(1.0,) * 8)
    for one in planned(state_of(each, limit), even):
        [candidate] = weigh(state_of(each, limit), (), ABLE, even, [one])
        assert candidate.nbytes_next <= limit
        mean = sum(
            next((f.kl for f in even.codecs if f.action == part), 0.0)
            for i in range(8)
            for part in one.plan.for_layer(i).parts
        )
        if not any(isinstance(part, Evict) for part in singles(one.plan)):
            assert candidate.inputs.kl == pytest.approx(mean / 8)


def test_the_damage_of_a_plan_is_the_layers_own_weighted_by_sensitivity() -> None:
    """KL = Σ wₗ·KLₗ / L: 4·0.0002 for the first layer, (6·0.5 + 1)·0.02 for the others, over 8."""
    state = state_of(dense_layers(), 10**7)
    plan = parse_action("0:quant:affine,bits=8,group=64;1-7:quant:hadamard,bits=4,group=64")
    [candidate] = weigh(state, [plan], ABLE, FIGURES)
    assert candidate.inputs.kl == pytest.approx((4 * 0.0002 + 4 * 0.02) / 8)
    assert candidate.inputs.p95 == pytest.approx((4 * 0.0008 + 4 * 0.08) / 8)


def test_no_plan_passes_the_limit_and_every_share_is_kept_by_all_layers() -> None:
    each = dense_layers(rows=2000)
    for part in (3, 5, 9):
        limit = nbytes_allocated(next_layers(each, 1)) // part
        state = state_of(each, limit)
        plans = planned(state)
        assert plans
        for one in plans:
            [candidate] = weigh(state, (), ABLE, FIGURES, [one])
            assert candidate.nbytes_next <= limit
            rows = {a.rows for a in singles(one.plan) if isinstance(a, Evict)}
            assert rows <= {round(share * 2000) for share in PLAN_SHARES}
            assert len(rows) <= 1


def test_caches_of_one_layer_are_not_given_different_codecs() -> None:
    """Some models hold two caches per layer; a plan names layers."""
    each = tuple(replace(one, index=i // 2) for i, one in enumerate(dense_layers(16)))
    limit = nbytes_allocated(next_layers(each, 1)) * 3 // 16
    plans = planned(state_of(each, limit))
    assert plans
    for one in plans:
        [candidate] = weigh(state_of(each, limit), (), ABLE, FIGURES, [one])
        check_bytes(state_of(each, limit), candidate)


def test_layers_without_a_number_and_profiles_without_sensitivities_make_no_plan() -> None:
    each = dense_layers()
    limit = nbytes_allocated(each) // 4
    assert planned(state_of(each, limit)) != ()
    assert planned(state_of(tuple(replace(one, index=-1) for one in each), limit)) == ()
    assert planned(state_of(each, limit), replace(FIGURES, sensitivity=())) == ()


def test_in_a_mixed_model_layers_are_weighed_by_their_depth() -> None:
    """Windows between them do not shift the sensitivities of the layers that hold all rows."""
    window = [replace(one, kind="rotating", max_size=64) for one in dense_layers(8, rows=64)]
    each = tuple(one if i % 4 == 0 else window[i] for i, one in enumerate(dense_layers(8)))
    weights = {g.held.kind: g.weight for g in grouped(state_of(each, None), FIGURES)}
    assert weights == {"kv": 4.5, "rotating": 6 * 0.5 - 0.5 + 1.0}


# -- figures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "kl"),
    [
        ("keep", 0.0),
        ("reclaim", 0.0),
        ("quant:affine,bits=8,group=64", 0.0002),
        ("evict:sinks_window@0.50", 0.8),
        ("evict:sinks_window@0.75", 0.4),
        ("evict:keydiff@0.25+quant:hadamard,bits=4,group=64", 0.92),
        ("quant:hadamard,bits=3,group=64", None),
        ("evict:lagkv@0.50", None),
        ("offload:cold@0.50", None),
    ],
)
def test_expected_damage_is_that_of_the_figures_and_unknown_without_one(
    action: str, kl: float | None
) -> None:
    [candidate] = weigh(state_of(dense_layers(), 10**6), [parse_action(action)], ABLE, FIGURES)
    assert candidate.inputs.kl == (None if kl is None else pytest.approx(kl, abs=2e-3))
    if kl is None:
        assert "no figure" in candidate.inputs.source
        assert candidate.score.total is None


def test_encoding_rows_anew_cannot_undo_what_their_codes_have_lost() -> None:
    """2 bits have lost 0.6 nats; 4 bits after them lose 0.02 more, and what was lost before that stays as well."""
    coarse, finer = (parse_action(f"quant:hadamard,bits={bits},group=64") for bits in (2, 4))
    each = after_action(dense_layers(), coarse)
    state = state_of(each, 10**7, lost=(0.1, 0.3))
    keep, again = weigh(state, [Keep(), finer], ABLE, replace(FIGURES, sensitivity=()))
    assert keep.inputs.kl == pytest.approx(0.1 + 0.6)
    assert (again.inputs.kl, again.inputs.p95) == (
        pytest.approx(0.1 + 0.6 + 0.02),
        pytest.approx(0.3 + 2.4 + 0.08),
    )
    assert (again.inputs.lost_kl, again.inputs.lost_p95) == (pytest.approx(0.7), pytest.approx(2.7))
    [plan] = weigh(
        state, [parse_action("0-3:quant:hadamard,bits=4,group=64")], ABLE, replace(FIGURES, sensitivity=())
    )
    assert plan.inputs.kl == pytest.approx(0.1 + 0.6 + 0.02 / 2)
    assert plan.inputs.lost_kl == pytest.approx(0.1 + 0.6 / 2)


def test_what_is_lost_is_unknown_where_there_is_no_figure_for_how_rows_were_stored() -> None:
    each = after_action(dense_layers(), parse_action("quant:hadamard,bits=5,group=64"))
    [again] = weigh(state_of(each, 10**7), [parse_action("quant:hadamard,bits=4,group=64")], ABLE, FIGURES)
    assert (again.inputs.kl, again.inputs.lost_kl) == (None, None)
    assert "before" in again.inputs.source


def test_plans_of_our_own_count_what_is_lost_like_plans_of_a_caller() -> None:
    each = after_action(dense_layers(), parse_action("quant:affine,bits=8,group=64"))
    state = state_of(each, nbytes_allocated(next_layers(each, 1)) * 3 // 4)
    plans = planned(state)
    assert plans
    for one in plans:
        [ours] = weigh(state, (), ABLE, FIGURES, [one])
        [theirs] = weigh(state, [one.plan], ABLE, FIGURES)
        assert theirs.inputs.kl == pytest.approx(ours.inputs.kl)
        assert theirs.inputs.lost_kl == pytest.approx(ours.inputs.lost_kl)
        assert theirs.inputs.lost_kl > 0


def test_time_is_unknown_where_a_codec_was_never_timed() -> None:
    texts = ["quant:hadamard,bits=4,group=64", "quant:kivi,bits=4,group=32"]
    timed, untimed = weigh(state_of(dense_layers(), 10**6), map(parse_action, texts), ABLE, FIGURES)
    assert timed.inputs.time_ratio == pytest.approx(1.4)
    assert untimed.inputs.time_ratio is None
    assert untimed.score.time is None
    assert untimed.score.total is not None


def test_borrowed_figures_say_so() -> None:
    action = [parse_action("quant:affine,bits=8,group=64")]
    for profile, source in (
        (FIGURES, "borrowed: made up"),
        (replace(FIGURES, borrowed=False), "calibrated: made up"),
    ):
        [candidate] = weigh(state_of(dense_layers(), 10**6), action, ABLE, profile)
        assert candidate.inputs.source == source


def test_merged_layers_are_weighed_like_single_ones() -> None:
    each = dense_layers()
    single = state_of(each, nbytes_allocated(each) // 3)
    merged = replace(single, each=())
    even = replace(FIGURES, sensitivity=())
    actions = candidates_for(single, even)
    assert weigh(single, actions, ABLE, even) == weigh(merged, actions, ABLE, even)
    assert merge_equal(each) == merged.layers
