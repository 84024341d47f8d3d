"""How much of what comes next is copied is the caller's to say, and changes what is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from figures import FIGURES
from harness import feed, quiet, tokens

from lumina_cache import LuminaCache
from lumina_cache.errors import ProfileFormatError, UnsupportedCacheError
from lumina_cache.profile import CodecFigure, EvictionFigure, Profile


def apart(one: Any) -> Any:
    """Codecs lose alike in both; a scorer loses next to nothing while the text goes on, and much when it is copied."""
    if isinstance(one, CodecFigure):
        return replace(one, parts=(one.kl, one.kl))
    assert isinstance(one, EvictionFigure)
    return replace(one, parts=tuple((0.0001, 2 * kl) for _, kl, _ in one.points))


PROFILE = replace(
    FIGURES,
    codecs=tuple(map(apart, FIGURES.codecs)),
    evictors=tuple(
        replace(apart(one), points=tuple((s, kl, 0.0) for s, kl, _ in one.points)) for one in FIGURES.evictors
    ),
    sensitivity=(),
)


@pytest.mark.parametrize("bad", [-0.1, 1.01, "much", True, float("nan")])
def test_what_is_no_share_is_refused(tiny: Any, bad: Any) -> None:
    with pytest.raises(UnsupportedCacheError, match="recall="):
        quiet(tiny("llama"), recall=bad)


def test_a_profile_that_does_not_say_is_found_out_before_anything_is_generated(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lumina_cache.controller.profile_for", lambda model: FIGURES)
    quiet(tiny("llama"), budget="1MB").close()
    with pytest.raises(ProfileFormatError, match="calibrate"):
        quiet(tiny("llama"), budget="1MB", recall=0.0)
    # Where nobody decides nothing is asked of a profile.
    quiet(tiny("llama"), policy="off", recall=0.0).close()


def chosen(model: Any, profile: Profile, recall: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("lumina_cache.controller.profile_for", lambda model: profile)
    with quiet(model, policy="off") as cache:
        feed(model, cache, tokens(1000), [1000])
        half = cache.nbytes // 2
    with LuminaCache(model, budget=half, telemetry=False, recall=recall) as cache:
        feed(model, cache, tokens(1000), [200] * 5)
        decisions = [r for r in cache.log.records if r["event"] == "decision"]
    assert {r["recall"] for r in decisions} == {recall}
    return [r["chosen"] for r in decisions if r["chosen"] != "keep"]


def test_rows_are_dropped_for_text_that_goes_on_and_encoded_for_text_that_looks_back(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, looks_back = (chosen(tiny("llama"), PROFILE, recall, monkeypatch) for recall in (0.0, 0.5))
    assert goes_on
    assert goes_on[0].startswith("evict:")
    assert looks_back
    assert looks_back[0].startswith("quant:")
