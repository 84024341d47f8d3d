"""The text form of actions: what is printed is read back, and what cannot be read is named."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumina_cache.actions import (
    Action,
    Composite,
    Evict,
    Keep,
    Merge,
    Offload,
    Page,
    Plan,
    Quantize,
    Reclaim,
    Reserve,
    action_space,
    parse_action,
)
from lumina_cache.backend.capabilities import (
    DENSE_REENCODE,
    KEYS,
    QUERIES,
    RAGGED_LAYERS,
    ROW_CHOICE,
    ROW_GATHER,
    Rung,
    observed,
    packed_attention,
)
from lumina_cache.errors import ActionSyntaxError, LuminaError
from lumina_cache.methods import METHODS, methods_of

#: A shared machine may take its time.
unhurried = settings(deadline=None)

ratios = st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)
counts = st.integers(1, 10**6)
scorers = st.sampled_from([m.name for m in methods_of("evict")])
guards = {"sinks": st.integers(0, 100), "recent": st.integers(0, 100)}


@st.composite
def quantized(draw: Any) -> Quantize:
    method = draw(st.sampled_from(methods_of("quant")))
    bits = st.sampled_from(method.bits)
    return Quantize(method.name, draw(bits), draw(bits), draw(st.sampled_from(method.groups)))


ranges = st.tuples(st.integers(0, 60), st.integers(0, 30)).map(lambda r: (r[0], r[0] + r[1]))
singles: st.SearchStrategy[Action] = st.one_of(
    st.just(Reclaim()),
    st.builds(Reserve, counts),
    st.builds(Page, counts),
    st.builds(Evict, scorers, ratio=ratios, **guards),
    st.builds(Evict, scorers, rows=counts, **guards),
    quantized(),
    st.builds(Merge, st.sampled_from([m.name for m in methods_of("merge")])),
    st.builds(Offload, st.just("layers"), layers=ranges),
    st.builds(
        Offload, st.sampled_from([m.name for m in methods_of("offload") if m.name != "layers"]), ratio=ratios
    ),
)
composites = st.lists(singles, min_size=2, max_size=4).map(lambda parts: Composite(tuple(parts)))
anything = st.one_of(st.just(Keep()), singles, composites)


@st.composite
def plans(draw: Any) -> Plan:
    at, assignments = 0, []
    for _ in range(draw(st.integers(1, 4))):
        first = at + draw(st.integers(0, 3))
        at = first + draw(st.integers(0, 9))
        assignments.append(((first, at), draw(anything)))
        at += 1
    return Plan(tuple(assignments))


@unhurried
@given(st.one_of(anything, plans()))
def test_what_an_action_prints_is_read_back_as_the_same_action(action: Action) -> None:
    assert parse_action(str(action)) == action
    assert parse_action(f"  {action} ") == action
    assert hash(parse_action(str(action))) == hash(action)


@unhurried
@given(
    ratios=st.lists(ratios, max_size=3),
    bits=st.lists(st.sampled_from([2, 3, 4, 5, 6, 8]), max_size=3),
    group_size=st.sampled_from([32, 64, 128]),
    rows=st.lists(counts, max_size=2),
)
def test_the_whole_action_space_round_trips(
    ratios: list[float], bits: list[int], group_size: int, rows: list[int]
) -> None:
    space = action_space(
        ratios=ratios, composite_ratios=ratios[:1], bits=bits, group_size=group_size, rows=rows
    )
    for action in space:
        assert parse_action(str(action)) == action


def test_the_action_space_holds_no_action_twice_and_begins_with_the_no_op() -> None:
    space = action_space()
    assert len(set(space)) == len(space) == len(set(map(str, space)))
    assert space[0] == Keep()
    assert {type(a) for a in space} == {
        Keep,
        Reclaim,
        Reserve,
        Page,
        Merge,
        Offload,
        Quantize,
        Evict,
        Composite,
    }
    assert {a.scorer for a in space if isinstance(a, Evict)} == {m.name for m in methods_of("evict")}
    assert {a.codec for a in space if isinstance(a, Quantize)} >= {"affine", "kivi", "hadamard"}


def test_the_action_space_can_be_narrowed_and_widened() -> None:
    narrow = action_space(ratios=(0.5,), bits=(4,), evictors=["keydiff"], codecs=["affine"], others=False)
    assert [str(a) for a in narrow] == [
        "keep",
        "reclaim",
        "quant:affine,bits=4,group=64",
        "evict:keydiff@0.50",
        "evict:keydiff@0.50+quant:affine,bits=4,group=64",
        "evict:keydiff@0.25+quant:affine,bits=4,group=64",
    ]
    assert Evict("sinks_window", rows=77) in action_space(rows=(77,))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "''"),
        ("shrink", "'shrink'"),
        ("Keep", "'Keep'"),
        ("keep:now", "'keep'"),
        ("reclaim:all", "'reclaim'"),
        ("evict", "'evict'"),
        ("evict:", "'evict:'"),
        ("evict:sinks", "sinks_window"),
        ("evict:no_such_thing@0.5", "evict:no_such_thing"),
        ("evict:sinks_window", "sinks_window"),
        ("evict:sinks_window@half", "'half'"),
        ("evict:sinks_window@1.5", "1.5"),
        ("evict:sinks_window@0", "0"),
        ("evict:sinks_window@nan", "nan"),
        ("evict:sinks_window@0.5,rows=7", "not both"),
        ("evict:sinks_window@0.5,0.25", "0.25"),
        ("evict:sinks_window@rows=0", "rows=0"),
        ("evict:sinks_window@rows=many", "'many'"),
        ("evict:sinks_window@rows=3,rows=4", "'rows' is given twice"),
        ("evict:sinks_window@0.5,sinks=-1", "sinks=-1"),
        ("evict:sinks_window@0.5,tail=3", "'tail'"),
        ("quant:affine", "bits=N"),
        ("quant:affin,bits=4", "'affine'"),
        ("quant:affine,kbits=4", "vbits"),
        ("quant:affine,bits=7", "kbits=7"),
        ("quant:affine,kbits=4,vbits=16", "vbits=16"),
        ("quant:affine,bits=4,group=48", "group=48"),
        ("quant:nvfp4,bits=8", "kbits=8"),
        ("quant:affine,bits=four", "'four'"),
        ("reserve", "number of rows"),
        ("reserve:0", "rows=0"),
        ("reserve:lots", "'lots'"),
        ("page:64,2", "one number"),
        ("merge:minicache,2", "no settings"),
        ("merge:maxicache", "minicache"),
        ("offload:layers", "0-7"),
        ("offload:layers=a-b", "'a-b'"),
        ("offload:layers=7-3", "(7, 3)"),
        ("offload:cold", "0.50"),
        ("offload:cold@2", "2.0"),
        ("offload:cold=0-7", "offload:cold@0.50"),
        ("reclaim+", "''"),
        ("keep+reclaim", "keep"),
        ("reclaim+evict:what@0.5", "evict:what"),
        ("0-7:", "''"),
        ("0-7:keep;5-9:reclaim", "layer 5 is assigned twice"),
        ("7-0:keep", "7-0"),
        ("0-7:keep;reclaim", "'reclaim'"),
        ("0-7:keep;x-9:reclaim", "'x-9'"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_bad_part_named(text: str, says: str) -> None:
    with pytest.raises(ActionSyntaxError, match=re.escape(says)) as caught:
        parse_action(text)
    assert isinstance(caught.value, LuminaError)


@unhurried
@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789:@=,;+-._ ", max_size=30))
def test_no_text_at_all_makes_the_parser_raise_anything_else(text: str) -> None:
    try:
        action = parse_action(text)
    except ActionSyntaxError:
        return
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Evict("sinks_window"), "either a ratio or rows"),
        (lambda: Evict("sinks_window", ratio=0.5, rows=3), "not both"),
        (lambda: Composite((Reclaim(),)), "at least two"),
        (lambda: Composite((Keep(), Reclaim())), "other than keep"),
        (lambda: Composite((Composite((Reclaim(), Reclaim())), Reclaim())), "single actions"),
        (lambda: Plan(()), "at least one range"),
        (lambda: Plan((((0, 1), Plan((((0, 1), Keep()),))),)), "cannot hold a plan"),
        (lambda: Offload("cold", layers=(0, 1)), "not a range"),
    ],
)
def test_values_that_make_no_sense_cannot_be_built(make: Any, says: str) -> None:
    with pytest.raises(ActionSyntaxError, match=says):
        make()


@unhurried
@given(held=st.integers(1, 10**6), ratio=ratios, rows=counts)
def test_rows_kept_are_at_least_one_and_never_more_than_are_held(held: int, ratio: float, rows: int) -> None:
    for action in (Evict("sinks_window", ratio=ratio), Evict("sinks_window", rows=rows)):
        assert 1 <= action.rows_kept(held) <= held
    assert Evict("sinks_window", rows=rows).rows_kept(held) == min(rows, held)


def test_what_an_action_requires_is_what_its_method_and_its_numbers_require() -> None:
    assert Keep().requires == Reclaim().requires == frozenset()
    assert Evict("sinks_window", ratio=0.5).requires == {ROW_GATHER}
    assert Evict("keydiff", ratio=0.5).requires == {ROW_GATHER, ROW_CHOICE, KEYS}
    assert Quantize("affine", 4, 4, 32).requires == {packed_attention(4, 32)}
    assert DENSE_REENCODE in Quantize("affine", 8, 4, 32).requires
    both = parse_action("evict:snapkv@0.50+quant:affine,bits=4,group=64")
    assert both.requires == {ROW_GATHER, ROW_CHOICE, QUERIES, observed("snapkv"), packed_attention(4, 64)}
    assert both.rung == Rung.HOOK
    assert Keep().rung == Rung.NATIVE


def test_a_plan_that_leaves_layers_uneven_requires_that_they_may_be() -> None:
    assert RAGGED_LAYERS in parse_action("0-3:evict:keydiff@0.50;4-7:keep").requires
    assert RAGGED_LAYERS not in parse_action("0-3:quant:affine,bits=4,group=64;4-7:keep").requires
    plan = parse_action("0-3:reclaim;5:keep")
    assert isinstance(plan, Plan)
    assert (plan.for_layer(2), plan.for_layer(4), plan.for_layer(5)) == (Reclaim(), Keep(), Keep())


def test_what_loses_information_says_so_and_where_it_comes_from() -> None:
    assert not Keep().lossy
    assert not Reclaim().lossy
    assert not Reserve(8).lossy
    for family, name in METHODS:
        if family == "evict":
            action: Action = Evict(name, ratio=0.5)
            assert action.lossy
            assert not action.undoable
            assert action.source
    both = parse_action("reclaim+quant:affine,bits=4,group=64")
    assert both.lossy
    assert not both.undoable
    assert "quantize" in str(both.source)
