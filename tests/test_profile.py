"""A profile is a value: known answers of its interpolation, a round trip, and nothing read that is not a figure."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumina_cache.actions import Quantize
from lumina_cache.errors import ProfileFormatError
from lumina_cache.figure_columns import Curves
from lumina_cache.profile import (
    CodecFigure,
    EvictionFigure,
    Profile,
    default_profile,
    interpolate,
    read_profile,
)

AFFINE4 = Quantize("affine", 4, 4, 64)
KIVI2 = Quantize("kivi", 2, 2, 32)

PROFILE = Profile(
    name="a model",
    borrowed=False,
    codecs=(
        CodecFigure(AFFINE4, 0.02, 0.08, ((512, 1.1), (1024, 1.2), (4096, 1.8))),
        CodecFigure(KIVI2, 0.4, 1.5),
    ),
    evictors=(EvictionFigure("keydiff", 32, ((0.25, 0.9, 3.0), (0.5, 0.5, 2.0))),),
    sensitivity=(2.0, 1.0, 0.5, 0.5),
    seconds_per_byte={"evict": 2e-9, "quant": 5e-9},
    step_seconds=0.03,
    provenance={"key": {"fingerprint": "0123"}},
)


def record() -> dict[str, Any]:
    return copy.deepcopy(json.loads(json.dumps(PROFILE.to_record())))


def test_a_profile_comes_back_from_json_as_it_was() -> None:
    assert Profile.from_record(record(), borrowed=False) == PROFILE
    assert Profile.from_record(record(), borrowed=True).borrowed


@pytest.mark.parametrize(
    ("x", "within", "beyond"),
    [
        (1.0, 10.0, 10.0),
        (2.0, 20.0, 20.0),
        (1.5, 15.0, 15.0),
        (3.0, 15.0, 15.0),
        (0.0, 10.0, 0.0),  # the first slope, 10 per 1, goes on
        (6.0, 10.0, 0.0),  # the last slope, -5 per 1, goes on
    ],
)
def test_interpolation_has_known_answers(x: float, within: float, beyond: float) -> None:
    points = ((1.0, 10.0), (2.0, 20.0), (4.0, 10.0))
    assert interpolate(points, x) == pytest.approx(within)
    assert interpolate(points, x, beyond=True) == pytest.approx(beyond)


def test_a_single_point_says_the_same_everywhere() -> None:
    assert interpolate(((512, 1.3),), 10) == interpolate(((512, 1.3),), 9999, beyond=True) == 1.3


@given(st.floats(0.0, 5000.0))
def test_times_lie_between_those_that_were_measured(rows: float) -> None:
    found = PROFILE.codecs[0].time_at(int(rows))
    assert found is not None
    assert 1.1 <= found <= 1.8


@pytest.mark.parametrize(
    ("rows", "time"), [(100, 1.1), (512, 1.1), (768, 1.15), (1024, 1.2), (2560, 1.5), (9999, 1.8)]
)
def test_decode_times_are_interpolated_and_not_continued(rows: int, time: float) -> None:
    assert PROFILE.codecs[0].time_at(rows) == pytest.approx(time)


points = st.lists(
    st.tuples(st.integers(0, 50), st.floats(0, 9)), max_size=5, unique_by=lambda one: one[0]
).map(sorted)


@given(curves=st.lists(points, min_size=1, max_size=4), where=st.floats(-5, 60), beyond=st.booleans())
def test_curves_read_together_give_what_each_gives_by_itself(
    curves: list[list[tuple[int, float]]], where: float, beyond: bool
) -> None:
    which = np.arange(len(curves))
    found = Curves.of(curves, beyond=beyond).at(which, np.full(len(curves), where))
    for points_, value in zip(curves, found.tolist(), strict=True):
        assert math.isnan(value) if not points_ else value == interpolate(points_, where, beyond=beyond)


def test_a_codec_that_was_not_timed_has_no_time() -> None:
    assert PROFILE.codecs[1].time_at(1024) is None


@pytest.mark.parametrize(
    ("share", "kl", "p95"),
    [
        (1.0, 0.0, 0.0),
        (0.75, 0.25, 1.0),  # halfway to the full cache
        (0.5, 0.5, 2.0),
        (0.375, 0.7, 2.5),
        (0.25, 0.9, 3.0),
        (0.125, 1.1, 3.5),  # below the smallest share the last slope goes on
    ],
)
def test_the_damage_of_an_eviction_is_interpolated_to_the_full_cache_and_continued_below(
    share: float, kl: float, p95: float
) -> None:
    assert PROFILE.evictors[0].at(share) == (pytest.approx(kl), pytest.approx(p95))


def test_no_damage_is_ever_negative() -> None:
    falling = EvictionFigure("odd", 0, ((0.25, 0.1, 0.1), (0.5, 0.6, 0.6)))
    assert falling.at(0.01) == (0.0, 0.0)


def test_figures_are_found_by_the_whole_action() -> None:
    assert PROFILE.codec(AFFINE4) is PROFILE.codecs[0]
    assert PROFILE.codec(Quantize("affine", 4, 4, 32)) is None
    assert PROFILE.codec(Quantize("kivi", 2, 2, 32, residual=64)) is None
    assert PROFILE.evictor("keydiff") is PROFILE.evictors[0]
    assert PROFILE.evictor("snapkv") is None


def test_sensitivity_is_that_of_the_same_depth_in_a_model_with_other_layers() -> None:
    assert [PROFILE.weight(i, 4) for i in range(4)] == [2.0, 1.0, 0.5, 0.5]
    assert [PROFILE.weight(i, 8) for i in range(8)] == [2.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    assert [PROFILE.weight(i, 2) for i in range(2)] == [2.0, 0.5]


def test_layers_without_a_sensitivity_are_all_alike() -> None:
    plain = Profile("plain", True, (), ())
    assert plain.weight(3, 8) == 1.0
    assert PROFILE.weight(8, 8) == PROFILE.weight(-1, 8) == 1.0


def _without(name: str) -> dict[str, Any]:
    found = record()
    del found[name]
    return found


def _with(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = record()
    at: Any = found
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return found


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (_with(("schema",), 99), "schema 99"),
        (_without("codecs"), "codecs"),
        (_without("sensitivity"), "sensitivity"),
        (_with(("codecs", 0, "action"), "evict:keydiff@0.50"), "not a codec"),
        (_with(("codecs", 0, "action"), "quant:nothing,bits=4"), "nothing"),
        (_with(("codecs", 0, "kl"), math.nan), "nan"),
        (_with(("codecs", 0, "kl"), -0.1), "-0.1"),
        (_with(("codecs", 0, "kl"), None), "None"),
        (_with(("codecs", 0, "times"), [[512, 1.0], [512, 1.2]]), "same point"),
        (_with(("codecs",), 7), "int"),
        (_with(("evictors", 0, "points"), []), "keydiff"),
        (_with(("evictors", 0, "points"), [[1.5, 0.1, 0.1]]), "between 0 and 1"),
        (_with(("evictors", 0, "points"), [[0.5, 0.1]]), "unpack"),
        (_with(("evictors", 0, "points"), [[0.5, 0.1, 0.1], [0.5, 0.2, 0.2]]), "same point"),
        (_with(("sensitivity",), ["much"]), "much"),
        (_with(("step_seconds",), "soon"), "soon"),
        (_with(("seconds_per_byte",), {"evict": math.inf}), "evict"),
        (_with(("provenance",), None), "NoneType"),
    ],
)
def test_what_is_no_figure_is_refused_and_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ProfileFormatError, match=says) as refused:
        Profile.from_record(wrong, borrowed=False)
    assert "calibrate again" in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "\x00"])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileFormatError, match="profile"):
        read_profile(path)


def test_a_file_of_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileFormatError, match="not JSON"):
        read_profile(path)


def test_the_shipped_figures_are_whole_and_say_where_they_come_from() -> None:
    profile = default_profile()
    assert profile.borrowed
    assert len(profile.sensitivity) == 30
    assert sum(profile.sensitivity) / 30 == pytest.approx(1.0, abs=1e-3)
    assert profile.step_seconds is not None
    assert set(profile.seconds_per_byte) >= {"evict", "quant", "offload"}
    assert {c.action.codec for c in profile.codecs} >= {"affine", "affine_fetch", "hadamard", "kivi"}
    assert {e.scorer for e in profile.evictors} >= {"sinks_window", "keydiff", "random"}
    assert profile.provenance["command"].startswith("lumina-cache calibrate")
    assert profile.provenance["documents"] >= 1
    for one in profile.codecs:
        assert [rows for rows, _ in one.times] == [512, 1024, 4096]


def test_fewer_bits_cost_more_in_the_shipped_figures() -> None:
    profile = default_profile()
    for codec in ("affine", "hadamard", "kivi"):
        by_bits = sorted(
            (c.action.key_bits, c.kl)
            for c in profile.codecs
            if c.action.codec == codec and c.action.key_bits == c.action.value_bits
        )
        kls = [kl for _, kl in by_bits]
        assert len(kls) >= 4
        assert kls == sorted(kls, reverse=True)


PARTS = replace(
    PROFILE,
    codecs=(replace(PROFILE.codecs[0], parts=(0.01, 0.03)), replace(PROFILE.codecs[1], parts=(0.4, None))),
    evictors=(replace(PROFILE.evictors[0], parts=((0.1, 1.7), (0.0, 1.0))),),
)


def test_figures_are_put_together_by_how_much_will_be_copied() -> None:
    assert PARTS.with_recall(0.5) is PARTS
    going = PARTS.with_recall(0.0)
    assert [one.kl for one in going.codecs] == [0.01, 0.4]
    assert going.evictors[0].points == ((0.25, 0.1, 3.0), (0.5, 0.0, 2.0))
    looked_up = PARTS.with_recall(1.0)
    assert [one.kl for one in looked_up.codecs] == [0.03, 0.4]
    assert looked_up.recall == 1.0
    assert PARTS.with_recall(0.25).codecs[0].kl == pytest.approx(0.015)
    # From the parts, not from what was put together of them.
    assert going.with_recall(1.0).codecs == looked_up.codecs


def test_figures_that_were_never_apart_cannot_be_put_together_otherwise() -> None:
    with pytest.raises(ProfileFormatError, match="calibrate"):
        PROFILE.with_recall(0.1)
    with pytest.raises(ValueError, match="share"):
        PARTS.with_recall(1.5)


def test_parts_and_times_by_rows_are_written_and_read() -> None:
    known = replace(PARTS, dense_steps=((512, 0.02), (1024, 0.03)), dense_chunks=((512, 0.001),))
    assert Profile.from_record(json.loads(json.dumps(known.to_record())), borrowed=known.borrowed) == known
    assert known.step_at(768) == pytest.approx(0.025)
    assert known.chunk_at(10_000) == 0.001
    assert PARTS.step_at(768) == PARTS.step_seconds


def test_parts_of_other_points_are_refused() -> None:
    record = PARTS.to_record()
    record["evictors"][0]["parts"].pop()
    with pytest.raises(ProfileFormatError, match="parts"):
        Profile.from_record(record, borrowed=False)
