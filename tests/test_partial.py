"""Codecs for some of the layers: those that can still take them, and those that are fast for their bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lumina_cache.actions import Plan, Quantize, in_ranges, parse_action, singles
from lumina_cache.audit import AuditLog
from lumina_cache.backend.capabilities import (
    DENSE_REENCODE,
    KEYS,
    ROW_GATHER,
    VALUES,
    BackendProfile,
    Outcome,
)
from lumina_cache.backend.feasibility import Reason
from lumina_cache.decider import Decider
from lumina_cache.estimate import Held, merge_equal, nbytes_allocated
from lumina_cache.policy import Adaptive, Limit, State
from lumina_cache.policy.candidates import Weighing
from lumina_cache.policy.partial import on_the_rest, quick
from lumina_cache.profile import default_profile


def layer(index: int, codec: str | None = None) -> Held:
    layout: Any = {} if codec is None else {"layout": parse_action(codec).layout}  # type: ignore[attr-defined]
    return Held(
        f"layer {index}", "kv", rows=512, capacity=512, offset=512, key_width=192, value_width=192, itemsize=4,
        heads=3, index=index, **layout,
    )  # fmt: skip


def state_of(each: tuple[Held, ...], **more: Any) -> State:
    return State("decode", 1, merge_equal(each), 10**6, Limit(10**6, "the budget"), each, **more)


def test_neighbours_make_one_range() -> None:
    eight = parse_action("quant:affine_fetch,bits=8,group=64")
    found = in_ranges((i, eight) for i in [0, 1, 2, 5, 7, 8])
    assert found == (((0, 2), eight), ((5, 5), eight), ((7, 8), eight))
    assert in_ranges([]) == ()


def test_a_codec_is_offered_to_the_layers_that_are_not_as_coarse_already() -> None:
    eight = "quant:affine_fetch,bits=8,group=64"
    each = (layer(0), layer(1, eight), layer(2), layer(3, "quant:affine_fetch,bits=4,group=64"))
    found = on_the_rest(state_of(each), [parse_action(eight)])  # type: ignore[list-item]
    assert [str(one) for one in found] == [f"0-0:{eight};2-2:{eight}"]
    four = parse_action("quant:affine_fetch,bits=4,group=64")
    (plan,) = on_the_rest(state_of(each), [four])  # type: ignore[list-item]
    assert [first for (first, _), _ in plan.assignments] == [0]
    assert plan.assignments[0][0] == (0, 2)


def test_where_all_layers_can_take_a_codec_or_none_can_there_is_nothing_to_offer() -> None:
    eight = parse_action("quant:affine_fetch,bits=8,group=64")
    assert on_the_rest(state_of((layer(0), layer(1))), [eight]) == ()  # type: ignore[list-item]
    four = "quant:affine_fetch,bits=4,group=64"
    assert on_the_rest(state_of((layer(0, four), layer(1, four))), [eight]) == ()  # type: ignore[list-item]


def test_quick_codecs_are_within_a_tenth_of_the_fastest() -> None:
    state = state_of((layer(0), layer(1)), within_prompt=True)
    profile = default_profile()
    codecs = [one.action for one in profile.codecs]
    found = quick(state, profile, codecs)
    assert 0 < len(found) < len(codecs)
    assert profile.prompt_seconds is not None
    assert profile.step_seconds is not None
    prompt, steps = 512 * profile.prompt_seconds, state.horizon * profile.step_seconds

    def price(codec: Any) -> float:
        figure = profile.codec(codec)
        assert figure is not None
        return prompt * figure.chunk_time_at(512) + steps * figure.time_at(512)  # type: ignore[operator]

    fastest = min(map(price, codecs))
    assert {c for c in codecs if price(c) <= fastest * 1.0999} <= set(found)
    assert all(price(c) <= fastest * 1.1001 for c in found)


def test_what_is_weighed_reaches_the_layers_that_an_earlier_plan_left_dense() -> None:
    eight = "quant:affine_fetch,bits=8,group=64"
    each = tuple(layer(i, eight if i < 3 else None) for i in range(8))
    state = replace(state_of(each), limit=Limit(2 * nbytes_allocated(each) // 3, "the budget"))
    able = BackendProfile(
        "cpu", "0", "0", "test", {c: Outcome(True) for c in (KEYS, VALUES, ROW_GATHER, DENSE_REENCODE)}
    )
    log = AuditLog()
    Decider(Adaptive(), None, lambda: None, log, default_profile).decide(state, able, "test")
    by_name = {str(c["action"]): c for c in log.records[-1]["candidates"]}
    assert not by_name[eight]["feasible"]
    rest = by_name[f"3-7:{eight}"]
    assert rest["feasible"]
    assert rest["inputs"]["nbytes_next"] < rest["inputs"]["limit"]
    # As good as the whole at 8 bits, and the best of all that keep to the limit is at least as good.
    chosen = by_name[log.records[-1]["chosen"]]
    assert chosen["score"]["total"] >= rest["score"]["total"]


def test_more_of_a_prompt_is_expected_right_after_a_chunk_of_it() -> None:
    decode = state_of((layer(0),))
    assert decode.prompt_tokens == 0
    assert replace(decode, within_prompt=True).prompt_tokens == 512


def test_plans_do_without_codecs_that_were_tried_in_vain() -> None:
    each = tuple(layer(i) for i in range(8))
    state = state_of(each)
    state = replace(state, limit=Limit(3 * nbytes_allocated(each) // 4, "the budget"))
    able = BackendProfile(
        "cpu", "0", "0", "test", {c: Outcome(True) for c in (KEYS, VALUES, ROW_GATHER, DENSE_REENCODE)}
    )

    def plans(against: Any) -> list[str]:
        found = Weighing.of(state, able, default_profile(), against).everything()
        return [str(c.action) for c in found if isinstance(c.action, Plan)]

    first = plans(None)
    used = {str(p) for text in first for p in singles(parse_action(text)) if isinstance(p, Quantize)}
    reason = Reason("outliers", "tried")
    again = plans(lambda action: (reason,) if str(action) in used else ())
    assert first
    assert again
    assert not any(name in text for name in used for text in again)
