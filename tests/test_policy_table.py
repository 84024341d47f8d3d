"""Candidates that are weighed together are those that are weighed one by one, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from figures import ABLE, FIGURES, able, dense_layers, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_candidates import EMPTY, histories, protected

from lumina_cache.actions import Evict, Keep, Quantize, parse_action
from lumina_cache.backend.capabilities import (
    ATTENTION_WEIGHTS,
    DENSE_REENCODE,
    KEYS,
    OWN_PACKED_ATTENTION,
    QUERIES,
    QUERY_STATISTICS,
    ROW_CHOICE,
    ROW_GATHER,
    VALUES,
    BackendProfile,
    packed_attention,
)
from lumina_cache.estimate import after_action, nbytes_allocated
from lumina_cache.policy import POLICIES, Candidate, State, Weights, candidates_for, weigh
from lumina_cache.policy.candidates import Weighing
from lumina_cache.policy.table import Columns, Table, columns_of, position_of
from lumina_cache.profile import Profile, default_profile

SHIPPED = default_profile()
PROFILES = (
    FIGURES,
    SHIPPED,
    SHIPPED.for_groups_of(32),
    replace(FIGURES, step_seconds=None, seconds_per_byte={}, borrowed=False, sensitivity=()),
    replace(SHIPPED, prompt_seconds=None),
    replace(
        SHIPPED,
        dense_steps=((512, 0.05), (1024, 0.07), (4096, 0.2)),
        dense_chunks=((512, 0.004), (1024, 0.005)),
    ),
)
BACKENDS = (
    ABLE,
    able(),
    able(KEYS, ROW_GATHER),
    able(
        KEYS, VALUES, ROW_GATHER, ROW_CHOICE, DENSE_REENCODE, QUERIES, ATTENTION_WEIGHTS, QUERY_STATISTICS,
        OWN_PACKED_ATTENTION, *(packed_attention(bits, group) for bits in (8, 4, 3) for group in (32, 64)),
    ),
)  # fmt: skip


def one_by_one(state: State, backend: BackendProfile, profile: Profile) -> tuple[Candidate, ...]:
    found = weigh(state, candidates_for(state, profile), backend, profile)
    codecs = [c.action for c in found if c.feasible and isinstance(c.action, Quantize)]
    evictions = [
        (c.inputs.kl, c.action.parts[0].scorer)
        for c in found
        if c.feasible and isinstance(c.action.parts[0], Evict) and c.inputs.kl is not None
    ]
    scorer = min(evictions)[1] if evictions else None
    return (*found, *Weighing.of(state, backend, profile).planned(codecs, scorer))


def together(state: State, backend: BackendProfile, profile: Profile) -> Table:
    found = Weighing.of(state, backend, profile).everything()
    assert isinstance(found, Table)
    return found


@st.composite
def states(draw: Any) -> State:
    if draw(st.booleans()):
        each = draw(histories(disk=False))
    else:
        each = dense_layers(draw(st.sampled_from([3, 20])), draw(st.integers(1, 2000)))
    total = nbytes_allocated(each)
    limit = draw(
        st.one_of(st.none(), st.integers(1, 4000), st.floats(0.05, 1.1).map(lambda x: int(x * total)))
    )
    return state_of(
        each,
        limit,
        tokens=draw(st.sampled_from([0, 1, 64, 300])),
        protect=tuple(draw(protected)),
        available=draw(st.sampled_from([None, 10, total // 2, 10**12])),
        horizon=draw(st.sampled_from([1, 256])),
        within_prompt=draw(st.booleans()),
        remaining=draw(st.sampled_from([None, None, 700])),
        last_chunk=draw(st.booleans()),
        rows_must_stay=draw(st.booleans()),
        evicted_by=draw(st.sampled_from([None, None, "sinks_window", "nobody"])),
        lost=draw(st.sampled_from([(0.0, 0.0), (0.1, 0.3), None])),
        prediction_error=draw(st.sampled_from([(0.0, 0.0), (0.1, 0.2)])),
        weights=Weights(draw(st.sampled_from([0.0, 1.0, 8.0])), 1.0),
    )


@settings(max_examples=60, deadline=None)
@given(state=states(), backend=st.sampled_from(BACKENDS), profile=st.sampled_from(PROFILES))
def test_candidates_weighed_together_are_those_weighed_one_by_one(
    state: State, backend: BackendProfile, profile: Profile
) -> None:
    table, plain = together(state, backend, profile), one_by_one(state, backend, profile)
    assert len(table) == len(plain)
    for ours, theirs in zip(table, plain, strict=True):
        assert repr(ours) == repr(theirs)
    for name, policy in POLICIES.items():
        assert policy().decide(state, table) == policy().decide(state, plain), name
    for i in {0, 1, len(plain) // 2, len(plain) - 1}:
        first = [c.action for c in plain].index(plain[i].action)
        assert position_of(table, plain[i].action) == position_of(plain, plain[i].action) == first
    ours, theirs = columns_of(table), columns_of(plain)
    for column in Columns.__dataclass_fields__:
        assert getattr(ours, column).tolist() == pytest.approx(
            getattr(theirs, column).tolist(), abs=0, nan_ok=True
        )


def test_a_table_is_a_sequence_of_the_same_candidates_each_time() -> None:
    table = together(state_of(dense_layers(), nbytes_allocated(dense_layers()) // 3), ABLE, FIGURES)
    every = list(table)
    assert table[0] is every[0]
    assert table[-1] is every[-1]
    assert table[2:5] == tuple(every[2:5])
    assert every[0].action == Keep()
    with pytest.raises(IndexError):
        table[len(table)]


def test_an_action_that_was_not_weighed_has_no_place() -> None:
    table = together(state_of(dense_layers(), nbytes_allocated(dense_layers()) // 3), ABLE, FIGURES)
    rows = next(c.action.rows for c in table if isinstance(c.action, Evict))
    assert rows is not None
    for text in (
        "quant:turboquant,bits=2",
        f"evict:keydiff@rows={rows},recent=31",
        f"evict:lagkv@rows={rows},recent=32",
        "evict:keydiff@0.50",
        "offload:cold@0.50",
        "0-3:quant:affine,bits=8,group=64",
    ):
        assert table.position(parse_action(text)) is None, text


def test_rows_on_disk_and_codecs_without_code_are_weighed_one_by_one() -> None:
    """Nothing is lost but time: the candidates are there all the same."""
    away = after_action(dense_layers(), parse_action("offload:cold@0.50"))
    unbuilt = parse_action("quant:turboquant,bits=4")
    assert isinstance(unbuilt, Quantize)
    more = replace(FIGURES, codecs=(*FIGURES.codecs, replace(FIGURES.codecs[0], action=unbuilt)))
    for each, profile in ((away, FIGURES), (dense_layers(), more), ((EMPTY[0],), FIGURES)):
        state = state_of(each, nbytes_allocated(dense_layers()) // 3)
        found = Weighing.of(state, ABLE, profile).everything()
        assert not isinstance(found, Table)
        assert [repr(c) for c in found] == [repr(c) for c in one_by_one(state, ABLE, profile)]
