"""From A to F: what is called feasible runs, what is called infeasible fails, and every refusal has its reason."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from harness import (
    NO_ROWS,
    UNDECODABLE,
    UNEVICTABLE,
    UNPACKABLE,
    architectures,
    disk_in,
    fast_first,
    feed,
    held_of,
    quiet,
    real_bytes,
    tokens,
)

from lumina_cache.actions import Action, Offload, Plan, Quantize, action_space, parse_action, singles
from lumina_cache.apply import execute, not_built
from lumina_cache.backend.capabilities import (
    ATTENTION_WEIGHTS,
    DENSE_REENCODE,
    DISK_TIER,
    KEYS,
    QUERIES,
    RAGGED_LAYERS,
    ROW_GATHER,
    VALUES,
    BackendProfile,
    Outcome,
    packed_attention,
)
from lumina_cache.backend.examine import ROWS_CHOSEN_TOGETHER
from lumina_cache.backend.feasibility import Reason, Verdict, classify
from lumina_cache.cache import LuminaCache
from lumina_cache.disk import DiskStore
from lumina_cache.errors import ActionInfeasibleError, EngagementError
from lumina_cache.estimate import Held, after_action, transient_of_action
from lumina_cache.lab.tiny import SPECS
from lumina_cache.layers import leaves

#: Architectures of the normal run: one of each kind of layer list, mask and attention.
FAST = (
    "deepseek_v3",
    "deepseek_v32",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma4_text",
    "gpt_oss",
    "llama",
    "llama4",
    "mamba",
    "mistral3",
    "recurrent_gemma",
)

#: Models that round their rows to whole numbers before they store them: a codec may hold those without an error.
ROUNDED = frozenset({"afm7"})

#: Tokens held, and the lengths of the steps they came in.
HELD, CAME_IN = 70, [69, 1]


def grid(group: int) -> list[Action]:
    """Everything that there is code for, in one size of each, and some of what there is none for."""
    built = [
        "keep",
        "reclaim",
        "reserve:300",
        "evict:sinks_window@0.50",
        "evict:sinks_window@rows=12,sinks=2,recent=3",
        "evict:sinks_window@0.50+evict:keydiff@0.50,recent=5",
        f"quant:affine,bits=8,group={group}",
        f"quant:affine,bits=5,group={group}",
        f"quant:affine,kbits=8,vbits=4,group={group}",
        "quant:affine_fetch,bits=8,group=32",
        f"quant:affine_fetch,bits=4,group={group},residual=40",
        "quant:kivi,kbits=4,vbits=8,group=32,residual=0",
        f"quant:hadamard,bits=6,group={group},residual=40",
        f"evict:sinks_window@0.50+quant:affine,bits=4,group={group}",
        f"quant:affine,bits=8,group={group}+evict:sinks_window@0.50",
        f"quant:affine,bits=8,group={group}+quant:affine,bits=4,group={group}+reclaim",
        "quant:kivi,bits=4,group=32+evict:key_norm@0.75+offload:cold@0.50+reserve:300",
        f"quant:affine_fetch,bits=8,group={group}+evict:random@0.50",
        "offload:cold@0.25",
        "offload:layers=0-99",
        "offload:cold@0.50+evict:sinks_window@0.50",
        f"offload:cold@0.50+quant:affine_fetch,bits=8,group={group}",
        "0:evict:sinks_window@0.50",
        "0:evict:keydiff@0.50;1-99:offload:cold@0.50",
        f"0:quant:affine_fetch,bits=4,group={group};1-99:quant:mxfp8,bits=8,group=32",
        "0-99:reserve:300",
    ]
    return [parse_action(text) for text in built] + list(
        action_space(ratios=(0.5,), composite_ratios=(), group_size=group)
    )


def goes_on(model: Any, cache: Any) -> None:
    """The next steps of the model with this cache; the first two are those of the probe."""
    logits = feed(model, cache, tokens(7, seed=4), [2, 1, 3, 1])
    if mx.isnan(logits).any().item():
        raise ValueError("logits are not numbers")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with disk_in(tmp_path_factory.mktemp("rows")) as store:
        yield store


def started(model: Any, disk: DiskStore | None) -> tuple[LuminaCache, tuple[Verdict, ...]]:
    """A cache that holds rows, and the verdicts on it."""
    cache = quiet(model, disk=disk)
    feed(model, cache, tokens(HELD), CAME_IN)
    steps = cache._control.trackers[0]
    group = cache._control.probe(steps).group_size or 32
    actions = list(dict.fromkeys(grid(group)))
    for action in actions:
        cache._control._probe_codecs(steps, action)
    return cache, classify(actions, cache._control.profile(steps), held_of(cache))


@pytest.mark.parametrize("name", fast_first(SPECS, FAST))
def test_feasible_actions_run_and_infeasible_ones_are_refused_and_fail_when_forced(
    tiny: Any, disk: DiskStore, name: str
) -> None:
    model = tiny(name)
    start, verdicts = started(model, disk)
    assert sum(v.feasible for v in verdicts) >= 2, "keep and reclaim always are"
    refusing = copy.deepcopy(start)
    for verdict in verdicts:
        if verdict.feasible:
            cache = copy.deepcopy(start)
            if name in ROUNDED and held_exactly(cache, verdict.action):
                # Nothing tells these rows from rows that were never encoded.
                with pytest.raises(EngagementError, match="gives back exactly the rows"):
                    cache.apply(verdict.action)
                continue
            applied = cache.apply(verdict.action)
            assert applied is not None
            assert applied.after.nbytes_allocated == applied.predicted_allocated == real_bytes(cache)
            goes_on(model, cache)
            continue
        with pytest.raises(ActionInfeasibleError) as refused:
            refusing.apply(verdict.action)
        assert all(reason.text in str(refused.value) for reason in verdict.reasons)
        fails_when_forced(model, copy.deepcopy(start), verdict, disk, name)
    # Whatever was refused left no trace.
    assert held_of(refusing) == held_of(start)
    assert real_bytes(refusing) == real_bytes(start)
    got, want = (feed(model, one, tokens(7, seed=4), [2, 1, 3, 1]) for one in (refusing, start))
    assert mx.array_equal(got, want, equal_nan=True).item()


def held_exactly(cache: Any, action: Action) -> bool:
    """Whether the keys or the values of some layer come back from the codec of ``action`` as they were."""
    for leaf in leaves(cache):
        parts = action.for_layer(leaf.index).parts if isinstance(action, Plan) else action.parts
        for layout in [part.layout for part in parts if isinstance(part, Quantize)]:
            for codec, rows in zip((layout.keys, layout.values), leaf.dense_rows(), strict=True):
                behind = rows[:, :, layout.sinks :]
                sealed = behind[:, :, : layout.sealable(behind.shape[2])]
                back = codec.decode(codec.encode(sealed), sealed.dtype) if sealed.size else None
                if back is not None and mx.array_equal(back, sealed).item():
                    return True
    return False


def fails_when_forced(model: Any, cache: Any, verdict: Verdict, disk: DiskStore, name: str) -> None:
    """Past the classifier, the backend says the same."""
    codes, layers = {reason.code for reason in verdict.reasons}, list(leaves(cache))
    before = held_of(cache)
    if "not_built" in codes:
        with pytest.raises(ActionInfeasibleError, match="no code for"):
            execute(layers, verdict.action, disk=disk)
        assert held_of(cache) == before
        return
    if "nothing_to_change" in codes:
        assert execute(layers, verdict.action, disk=disk).layers_changed == ()
        return
    missing = {reason.capability for reason in verdict.reasons}
    if codes == {"missing_capability", "too_few_rows"} and name in NO_ROWS:
        # The windows are re-encoded, and there is nothing to evict.
        execute(layers, verdict.action, disk=disk)
        assert not any(one.evicted for one in held_of(cache))
        return
    silent = ("ROW_GATHER" in missing and name in UNEVICTABLE) or (
        "ROW_CHOICE" in missing and name in ROWS_CHOSEN_TOGETHER
    )
    if silent and missing <= {"ROW_GATHER", "ROW_CHOICE", "RAGGED_LAYERS"}:
        # It runs, and is wrong: see test_contract_eviction.py.
        return
    with pytest.raises(Exception, match=r".") as caught:
        execute(layers, verdict.action, disk=disk)
        goes_on(model, cache)
    text = str(caught.value).strip().split("\n", 1)[0]
    if "head_dim" in codes:
        # Said here in numbers of the model, by MLX in shapes of an array.
        # What needs the hook is refused for that before anything else.
        assert any(
            said in text
            for said in ("quantiz", "attention calls", *(reason.text for reason in verdict.reasons))
        ), (text, verdict)
        return
    # The reason given beforehand is the one that forcing gives.
    assert any(_unnumbered(text) in _unnumbered(reason.text) for reason in verdict.reasons), (text, verdict)


def _unnumbered(text: str) -> str:
    """Shapes are those of as many rows as there are."""
    return re.sub(r"\d+", "#", text)


@pytest.mark.parametrize("name", architectures(but=NO_ROWS))
def test_the_feasible_set_is_that_of_the_table_of_models(tiny: Any, disk: DiskStore, name: str) -> None:
    _, verdicts = started(tiny(name), disk)
    feasible = {str(v.action) for v in verdicts if v.feasible}
    assert {"keep", "reclaim", "offload:cold@0.25", "reserve:300"} <= feasible
    assert ("evict:sinks_window@0.50" in feasible) == (name not in UNEVICTABLE)
    packed = [text for text in feasible if text.startswith("quant:affine,bits")]
    assert bool(packed) == (name not in UNPACKABLE)
    # What is decoded on fetch needs nothing of the model's attention.
    assert ("quant:affine_fetch,bits=8,group=32" in feasible) == (name not in UNDECODABLE)


def test_without_a_disk_no_action_that_needs_one_is_feasible(tiny: Any) -> None:
    cache, verdicts = started(tiny("llama"), None)
    for verdict in verdicts:
        offloads = any(isinstance(part, Offload) for part in singles(verdict.action))
        assert offloads <= ("DISK_TIER" in {r.capability for r in verdict.reasons})
    with pytest.raises(ActionInfeasibleError, match="given no disk"):
        cache.apply("offload:cold@0.25")


# -- one reason at a time, on values ---------------------------------------------------------------------------------


KV = Held(
    "layer 0", "kv", rows=600, capacity=768, offset=600, key_width=128, value_width=128, itemsize=4, index=0
)
ALL = {c: Outcome(True) for c in (KEYS, VALUES, ROW_GATHER, packed_attention(8, 64), packed_attention(4, 64))}


def profile(outcomes: Any = None) -> BackendProfile:
    return BackendProfile("cpu", "0", "0", "test", ALL if outcomes is None else outcomes)


def judge(text: str, layers: Any = (KV,), known: BackendProfile | None = None, **kwargs: Any) -> Verdict:
    [verdict] = classify([parse_action(text)], known or profile(), layers, **kwargs)
    assert verdict.feasible == (verdict.reasons == ())
    return verdict


def codes(verdict: Verdict) -> list[str]:
    return [reason.code for reason in verdict.reasons]


@pytest.mark.parametrize(
    "text",
    [
        "keep",
        "reclaim",
        "evict:sinks_window@0.50",
        "evict:sinks_window@rows=5",
        "quant:affine,bits=4,group=64",
        "evict:sinks_window@0.50+quant:affine,bits=8,group=64",
        "quant:affine,bits=8,group=64+quant:affine,bits=4,group=64",
    ],
)
def test_what_the_backend_has_and_the_state_allows_is_feasible(text: str) -> None:
    assert judge(text).feasible


def test_every_missing_capability_is_named_with_what_the_probe_said() -> None:
    known = profile(
        {
            ROW_GATHER: Outcome(False, "no"),
            KEYS: Outcome(True),
            packed_attention(4, 64): Outcome(False, "sinks"),
        }
    )
    verdict = judge("evict:sinks_window@0.50+quant:affine,bits=4,group=64", known=known)
    missing = {r.capability: r.text for r in verdict.reasons if r.code == "missing_capability"}
    assert missing == {
        "ROW_GATHER": "ROW_GATHER: no",
        "PACKED_ATTENTION(4,64)": "PACKED_ATTENTION(4,64): sinks",
    }
    assert judge("keep", known=known).feasible


@pytest.mark.parametrize("capability", [QUERIES, ATTENTION_WEIGHTS, DENSE_REENCODE])
def test_what_nobody_probed_is_missing_and_says_so(capability: Any) -> None:
    text = {
        QUERIES: "evict:snapkv@0.50",
        ATTENTION_WEIGHTS: "evict:h2o@0.50",
        DENSE_REENCODE: "quant:kivi,bits=4,group=32",
    }[capability]
    reasons = judge(text).reasons
    assert any(r.capability == str(capability) and "not probed" in r.text for r in reasons)
    assert (reasons[0].code == "not_built") == (not_built(parse_action(text)) is not None)


@pytest.mark.parametrize(
    "layers",
    [(), (Held("x", "kv"),), (Held("x", "not_kv", fixed_nbytes=9),), (replace(KV, kind="rotating"),)],
)
def test_without_rows_there_is_nothing_to_change_but_keeping_is_fine(layers: Any) -> None:
    for text in ("evict:sinks_window@0.50", "quant:affine,bits=4,group=64"):
        assert codes(judge(text, layers)) == ["nothing_to_change"]
    assert judge("keep", layers).feasible
    assert judge("reclaim", layers).feasible


@pytest.mark.parametrize(
    ("text", "wanted", "limit"),
    [
        ("evict:sinks_window@rows=600", 600, 600),
        ("evict:sinks_window@rows=9999", 600, 600),
        ("evict:sinks_window@rows=4", 4, 4),
        ("evict:sinks_window@rows=3", 3, 4),
        ("evict:sinks_window@rows=70,sinks=8,recent=64", 70, 72),
    ],
)
def test_evictions_that_would_drop_nothing_or_leave_no_choice_are_refused_with_their_numbers(
    text: str, wanted: int, limit: int
) -> None:
    [reason] = judge(text).reasons
    assert (reason.code, reason.wanted, reason.limit) == ("too_few_rows", wanted, limit)
    assert str(wanted) in reason.text


def test_rows_must_stay_while_tokens_may_be_taken_back_and_may_be_packed_meanwhile() -> None:
    assert codes(judge("evict:sinks_window@0.50", rows_must_stay=True)) == ["rows_must_stay"]
    assert judge("quant:affine,bits=4,group=64", rows_must_stay=True).feasible
    both = judge("evict:sinks_window@0.50+quant:affine,bits=4,group=64", rows_must_stay=True)
    assert codes(both) == ["rows_must_stay"]


def test_rows_are_never_packed_more_finely_than_they_are() -> None:
    packed = after_action([KV], Quantize("affine", 4, 4, 64))
    for bits in (4, 8):
        [reason] = judge(f"quant:affine,bits={bits},group=64", packed).reasons
        assert (reason.code, reason.wanted, reason.limit) == ("already_coarser", bits, 4)
    assert judge("evict:sinks_window@0.50", packed).feasible


def test_the_parts_of_a_composite_are_judged_on_what_the_parts_before_them_leave() -> None:
    assert codes(judge("quant:affine,bits=4,group=64+quant:affine,bits=8,group=64")) == ["already_coarser"]
    assert codes(judge("evict:sinks_window@rows=20+evict:sinks_window@rows=30")) == ["too_few_rows"]
    assert judge("evict:sinks_window@rows=30+evict:sinks_window@rows=20").feasible


def test_memory_for_converting_one_layer_has_to_be_there() -> None:
    layers = (KV, replace(KV, key_width=256, name="layer 1", index=1))
    action = parse_action("quant:affine,bits=8,group=64")
    needed = max(transient_of_action(one, action) for one in layers)
    assert judge(str(action), layers, available=needed).feasible
    [reason] = judge(str(action), layers, available=needed - 1).reasons
    assert (reason.code, reason.wanted, reason.limit) == ("exceeds_memory", needed, needed - 1)
    assert judge("keep", layers, available=0).feasible
    assert judge(str(action), layers, available=None).feasible, "unknown is not zero"


def test_equal_layers_counted_once_are_judged_like_layers_given_one_by_one() -> None:
    merged = (replace(KV, count=9, index=-1),)
    for text in ("evict:sinks_window@0.50", "quant:affine,bits=4,group=64"):
        for available in (0, 10**9):
            assert codes(judge(text, merged, available=available)) == codes(
                judge(text, (KV,) * 9, available=available)
            )


def test_plans_and_offloading_of_layers_can_be_judged_on_merged_layers() -> None:
    merged = (replace(KV, count=9, index=-1),)
    each = tuple(replace(KV, name=f"layer {i}", index=i) for i in range(9))
    known = profile({**ALL, DISK_TIER: Outcome(True)})
    for text in ("3-5:quant:affine,bits=4,group=64", "offload:layers=3-5", "offload:layers=3-5+reclaim"):
        assert judge(text, merged, known, available=10**9).feasible
        assert codes(judge(text, merged, known, available=0)) == ["exceeds_memory"]
        assert codes(judge(text, each, known, available=0)) == ["exceeds_memory"]


STATE = Held("layer 0", "not_kv", fixed_nbytes=64, index=0)
LANE = replace(KV, name="layer 0", kind="rotating", max_size=600)


@pytest.mark.parametrize("first", [STATE, LANE, replace(KV, rows=0, capacity=0, offset=0)])
def test_what_a_plan_assigns_to_layers_without_rows_for_it_needs_nothing_of_the_backend(first: Held) -> None:
    layers = (first, replace(KV, name="layer 1", index=1))
    evict, pack = "0:evict:keydiff@0.50", "1:quant:affine,bits=4,group=64"
    assert codes(judge(evict, layers)) == ["nothing_to_change"]
    assert codes(judge(f"{evict};1:keep", layers)) == ["nothing_to_change"]
    assert judge(f"{evict};{pack}", layers).feasible
    assert judge(f"{evict};1:reclaim", layers).feasible
    assert judge("0:keep", layers).feasible
    # The layer that holds rows is still judged, and so are layers that cannot be told apart.
    missing = {"RAGGED_LAYERS", "ROW_CHOICE"}
    for text, held in (
        (f"0-1{evict[1:]}", layers),
        (evict, (KV, layers[1])),
        (evict, (replace(KV, index=-1),)),
    ):
        assert missing == {reason.capability for reason in judge(text, held).reasons}
    # Nor does a plan run that there is no code or no disk for.
    assert codes(judge(f"0:merge:minicache;{pack}", layers)) == ["not_built"]
    assert codes(judge(f"0:offload:cold@0.50;{pack}", layers)) == ["missing_capability"]


@pytest.mark.parametrize(("kept", "limit"), [(33, 35), (35, 35), (36, None)])
def test_protected_rows_count_in_whole_blocks_where_rows_are_encoded_together(
    kept: int, limit: int | None
) -> None:
    known = profile({**ALL, DENSE_REENCODE: Outcome(True)})
    blocks = after_action([KV], parse_action("quant:kivi,bits=4,group=32"))
    verdict = judge(f"evict:sinks_window@rows={kept},recent=3", blocks, known)
    assert [r.limit for r in verdict.reasons] == ([] if limit is None else [limit])
    both = judge(f"quant:kivi,bits=4,group=32+evict:sinks_window@rows={kept},recent=3", known=known)
    assert [r.limit for r in both.reasons] == ([] if limit is None else [limit])


def test_a_reason_is_written_down_with_what_it_has_and_no_more() -> None:
    assert Reason("a", "b").to_record() == {"code": "a", "text": "b"}
    full = Reason("a", "b", 0, 2, "KEYS").to_record()
    assert full == {"code": "a", "text": "b", "wanted": 0, "limit": 2, "capability": "KEYS"}


def test_every_action_of_the_space_is_judged_and_every_refusal_has_a_text() -> None:
    actions = action_space(rows=(100,))
    verdicts = classify(actions, profile(), [KV])
    assert [v.action for v in verdicts] == list(actions)
    for verdict in verdicts:
        for reason in verdict.reasons:
            assert reason.text.strip()
        assert verdict.feasible == (
            not_built(verdict.action) is None and verdict.action.requires <= ALL.keys()
        )


# -- layers that encode different numbers of rows together ------------------------------------------------------------


def test_an_eviction_that_would_leave_layers_with_unequal_rows_needs_a_model_that_takes_them(
    tiny: Any,
) -> None:
    """Blocks of 32 rows beside single ones: 70 rows would become 64 in one layer and 70 in the other."""
    model = tiny("deepseek_v3")
    cache = quiet(model)
    feed(model, cache, tokens(128), [128])
    cache.apply("0:quant:kivi,bits=4,group=32,residual=0")
    assert not cache._control.profile(cache._control.trackers[0]).has(RAGGED_LAYERS)
    with pytest.raises(ActionInfeasibleError, match="64 to 70 rows"):
        cache.apply("evict:sinks_window@rows=70")
    with pytest.raises(ActionInfeasibleError, match="64 to 70 rows"):
        cache.apply("0-1:evict:sinks_window@rows=70")
    assert {one.rows for one in held_of(cache)} == {128}
    cache.apply("evict:sinks_window@rows=64")
    assert {one.rows for one in held_of(cache)} == {64}
    logits = feed(model, cache, tokens(40, seed=1), [39, 1])
    assert mx.isfinite(logits).all().item()
