"""The analysis finds what was planted: gaps, causes and their absence, and never across execution states."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("ibis")
pytest.importorskip("pyarrow")
from hypothesis import given, settings
from hypothesis import strategies as st

import lumina_cache.gap.analysis
import lumina_cache.gap.attribution
import lumina_cache.gap.cells
import lumina_cache.gap.gap
import lumina_cache.gap.records
import lumina_cache.gap.store
from lumina_cache.errors import AnalysisError, MixedExecutionStateError
from lumina_cache.gap.analysis import Settings, analyse, analyse_table, count_refusals
from lumina_cache.gap.attribution import attribute, by_layer, of_domain, together_needed
from lumina_cache.gap.cells import Cells, Fact, Stratum, cells_of, strata_of
from lumina_cache.gap.gap import (
    best_of,
    closed,
    gap_between,
    goals,
    parts,
    placebo,
    scores,
    sides,
)
from lumina_cache.gap.records import What
from lumina_cache.gap.resample import Documents
from lumina_cache.gap.store import Store, open_tables
from lumina_cache.gap.synthetic import Planted, Setting, observations, table, write

FEW = Settings(draws=500)
POINT = 0.02  #: nats

KEEP = Planted(What("keep"), 1.0, 0.0)
NATIVE = Planted(What("native"), 0.28, 0.10)
CACHE = Planted(What("cache", 1, ("DENSE_REENCODE",)), 0.28, 0.04)
HOOK = Planted(What("hook", 2, ("DENSE_REENCODE", "QUERIES")), 0.28, 0.03)
KERNEL = Planted(What("kernel", 3, ("QUERIES", "RAGGED_HEADS")), 0.28, 0.02)
ORACLE = Planted(What("oracle", 2, ("FUTURE",), "ceiling"), 0.28, 0.01)
SPACE = [KEEP, NATIVE, CACHE, HOOK, KERNEL, ORACLE]


THREE = Setting(documents=3)


def stored(path, planted, setting=THREE, state="simulated"):
    write(Store(path), planted, setting, state)
    return Store(path)


def reduced(path, planted, setting=THREE, state="simulated", **more) -> Cells:
    tables = open_tables(stored(path, planted, setting, state))
    found = tables.simulated if state == "simulated" else tables.real
    return cells_of(found, strata_of(found)[0], **{"draws": 500, **more})


def made(quality, rungs, *, shares=None, requires=None, roles=None, domains=3, draws=500, state="simulated"):
    """Cells without a store: quality in points, shape (2, actions, documents)."""
    _, actions, documents = quality.shape
    facts = tuple(
        Fact(f"a{i}", rungs[i], (requires or [()] * actions)[i], (roles or ["candidate"] * actions)[i])
        for i in range(actions)
    )
    share = np.repeat(np.array(shares or [0.25] * actions)[:, None], documents, axis=1)
    nothing = np.full((actions, documents), np.nan)
    return Cells(
        Stratum("m", "m", 1024, "decode", 128, "campaign", "cpu", "x", "0", "0", "0"),
        state,
        facts,
        tuple(map(str, range(documents))),
        Documents([str(i % domains) for i in range(documents)], draws=draws),
        documents,
        quality,
        quality * POINT,
        quality.mean(axis=0),
        quality.mean(axis=0) * POINT,
        nothing,
        nothing,
        share,
        nothing,
        True,
        (),
        (),
    )


# -- planted gaps -----------------------------------------------------------------------------------------------------


def test_planted_gaps_are_found_exactly_where_nothing_is_noise(tmp_path):
    cells = reduced(tmp_path, SPACE)
    assert sides(cells) == ("native", "cache", "hook", "all", "ceiling")
    kl = {"native": 0.10, "cache": 0.04, "hook": 0.03, "all": 0.02, "ceiling": 0.01}
    for low, high in itertools.combinations(kl, 2):
        gap = gap_between(cells, low, high, 0.28)
        wanted = (kl[low] - kl[high]) / POINT
        for one in (gap.points, gap.held_out, gap.statewise, gap.hindsight):
            assert (one.value, one.low, one.high) == pytest.approx((wanted, wanted, wanted))
        assert gap.nats.value == pytest.approx(kl[low] - kl[high])
        chosen = {"all": "kernel", "ceiling": "oracle"}
        assert gap.low_actions == (chosen.get(low, low),)
        assert gap.high_actions == (chosen.get(high, high),)


def test_the_gap_is_exactly_zero_when_everything_is_feasible(tmp_path):
    noisy = Setting(documents=4, token_noise=0.05, document_noise=0.05)
    cells = reduced(tmp_path, [KEEP, *(replace(NATIVE, what=What(f"n{i}")) for i in range(9))], noisy)
    for low, high in itertools.combinations(sides(cells), 2):
        gap = gap_between(cells, low, high, 0.28)
        for one in (gap.points, gap.nats, gap.held_out, gap.statewise, gap.hindsight):
            assert (one.value, one.low, one.high) == (0.0, 0.0, 0.0)
        assert gap.bytes_times.value == pytest.approx(1.0)


def test_a_copy_of_a_feasible_action_above_it_adds_nothing(tmp_path):
    twin = replace(NATIVE, what=What("twin", 3, ("RAGGED_HEADS",)))
    cells = reduced(tmp_path, [KEEP, NATIVE, twin])
    best = best_of(cells, "all", 0.28)
    assert (best.actions, best.ties) == (("native",), ("twin",))
    assert gap_between(cells, "native", "all", 0.28).points.value == 0.0


def test_a_gap_can_be_negative_and_is_not_clamped():
    # The deeper side's choice on even blocks is bad on odd ones, and the other way round.
    quality = np.ones((2, 2, 6))
    quality[0, 1], quality[1, 1] = 0.5, 0.5
    lucky = np.stack([quality[0, 1] - 1, quality[1, 1] + 3])
    quality = np.concatenate([quality, lucky[:, None]], axis=1)
    cells = made(quality, [0, 0, 3])
    assert gap_between(cells, "native", "all", 0.25).points.value < 0


def test_an_action_that_takes_too_many_bytes_on_one_document_does_not_fit(tmp_path):
    cells = reduced(tmp_path, SPACE)
    share = cells.share.copy()
    share[[f.action for f in cells.facts].index("cache"), 2] = 0.29
    assert best_of(replace(cells, share=share, memo={}), "cache", 0.28).actions == ("native",)
    assert best_of(cells, "cache", 0.28).actions == ("cache",)


def test_a_side_without_an_action_at_a_budget_has_no_gap_and_says_why(tmp_path):
    cells = reduced(tmp_path, SPACE)
    gap = gap_between(cells, "native", "all", 0.125)
    assert (gap.points, gap.bytes_times) == (None, None)
    assert "no action of native takes 0.125" in gap.why


def test_real_observations_have_no_side_that_nobody_ran(tmp_path):
    cells = reduced(tmp_path, [KEEP, NATIVE, CACHE, HOOK], state="real")
    assert sides(cells) == ("native", "cache", "hook")
    with pytest.raises(AnalysisError, match="'all' is no side of real"):
        gap_between(cells, "native", "all", 0.28)


def test_placebos_and_oracles_and_other_packages_are_on_no_rung(tmp_path):
    better = 0.001
    others = [Planted(What(role, 1, (), role), 0.28, better) for role in ("placebo", "ceiling", "reference")]
    cells = reduced(tmp_path, [*SPACE, *others])
    for side in ("native", "cache", "hook"):
        assert best_of(cells, side, 0.28).actions == (side,)
    assert best_of(cells, "all", 0.28).actions == ("placebo",)
    assert best_of(cells, "ceiling", 0.28).actions == ("ceiling",)


# -- missing cells ----------------------------------------------------------------------------------------------------


def test_an_action_that_was_not_measured_everywhere_is_named_and_not_chosen(tmp_path):
    store = Store(tmp_path)
    everything = observations(SPACE, Setting(documents=3, seeds=2))
    store.append(o for o in everything if not (o.what.action == "kernel" and o.state.document == "code:1"))
    tables = open_tables(store)
    cells = cells_of(tables.simulated, strata_of(tables.simulated)[0], draws=500)
    assert [(m.action, m.documents, m.of) for m in cells.missing] == [("kernel", 8, 9)]
    assert best_of(cells, "all", 0.28).actions == ("hook",)
    assert cells.states == 18


def test_a_document_at_which_a_campaign_was_cut_short_is_left_out_and_named(tmp_path):
    store = Store(tmp_path)
    for one in observations(SPACE, Setting(documents=3)):
        if one.state.document != "prose:2" or one.what.action in ("keep", "native"):
            store.append([one])
    tables = open_tables(store)
    cells = cells_of(tables.simulated, strata_of(tables.simulated)[0], draws=500)
    assert (len(cells.documents), cells.missing) == (8, ())
    assert "prose:2: left out, as 2 of 6 actions were measured on it in every state" in cells.notes


def test_a_stratum_in_which_nothing_is_complete_says_so(tmp_path):
    store = Store(tmp_path)
    everything = observations(SPACE, Setting(documents=2))
    store.append(o for i, o in enumerate(everything) if i % 7 != 0)
    (stratum,) = analyse(store, settings=FEW).simulated.strata
    assert len(stratum.missing) == len(SPACE)
    assert "no action was measured in every state" in stratum.notes
    assert all(g.points is None and g.why for g in stratum.gaps)


def test_an_action_that_lacks_one_of_a_documents_states_is_missing_there(tmp_path):
    store = Store(tmp_path)
    everything = observations(SPACE, Setting(documents=3, seeds=2))
    first = next(o for o in everything if o.what.action == "cache")
    store.append(o for o in everything if o.id != first.id)
    tables = open_tables(store)
    cells = cells_of(tables.simulated, strata_of(tables.simulated)[0], draws=500)
    assert [(m.action, m.documents) for m in cells.missing] == [("cache", 8)]
    assert cells.missing[0].why == "not measured in every state"


def test_as_many_states_that_are_others_are_not_the_same_states(tmp_path):
    store = Store(tmp_path)
    everything = observations(SPACE, Setting(documents=2, seeds=3))
    store.append(o for o in everything if not (o.what.action == "cache" and o.state.seed == 0))
    tables = open_tables(store)
    cells = cells_of(tables.simulated, strata_of(tables.simulated)[0], draws=500)
    assert {m.action for m in cells.missing} == {"cache"}
    assert cells.states == 18


def test_an_action_without_figures_of_both_halves_is_missing(tmp_path):
    store = Store(tmp_path)
    for one in observations(SPACE, Setting(documents=2)):
        if one.what.action == "cache":
            quality = replace(one.measured.quality, kl_half1=None, p95_half1=None)
            one = replace(one, measured=replace(one.measured, quality=quality))
        store.append([one])
    tables = open_tables(store)
    cells = cells_of(tables.simulated, strata_of(tables.simulated)[0], draws=500)
    assert [(m.action, m.why) for m in cells.missing] == [
        ("cache", "no figures of both halves of the tokens")
    ]
    assert cells.tail


def test_an_action_is_of_the_deepest_rung_that_it_needed_on_any_document(tmp_path):
    store = Store(tmp_path)
    everything = observations(SPACE, Setting(documents=3))
    deeper = [replace(o, what=replace(o.what, rung=2)) if i % 2 else o for i, o in enumerate(everything)]
    store.append(d if d.what.action == "cache" else o for o, d in zip(everything, deeper, strict=True))
    tables = open_tables(store)
    cells = cells_of(tables.simulated, strata_of(tables.simulated)[0], draws=500)
    assert best_of(cells, "cache", 0.28).actions == ("native",)
    assert "cache: carried out at rungs 1 to 2; counts as the deepest" in cells.notes


def test_an_action_of_two_roles_is_left_out_and_named(tmp_path):
    store = Store(tmp_path)
    everything = observations(SPACE, Setting(documents=3))
    first = next(o for o in everything if o.what.action == "kernel")
    other = replace(first, what=replace(first.what, role="reference"))
    store.append(other if o is first else o for o in everything)
    tables = open_tables(store)
    cells = cells_of(tables.simulated, strata_of(tables.simulated)[0], draws=500)
    assert best_of(cells, "all", 0.28).actions == ("hook",)
    assert cells.notes == ("kernel: role or requirements differ between observations; left out",)


def test_two_texts_of_one_name_are_two_documents(tmp_path):
    store = Store(tmp_path)
    some = observations([KEEP, NATIVE], Setting(documents=2))
    store.append(some)
    store.append(replace(o, provenance=replace(o.provenance, tokens_sha256="f" * 64)) for o in some)
    tables = open_tables(store)
    cells = cells_of(tables.simulated, strata_of(tables.simulated)[0], draws=500)
    assert len(cells.documents) == 12
    assert "code:0 (ffffffff)" in cells.documents
    assert "code:0: 2 different texts have this name" in cells.notes


def test_measurements_under_other_conditions_are_another_stratum(tmp_path):
    store = Store(tmp_path)
    some = observations([KEEP, NATIVE], Setting(documents=2))
    store.append(some)
    for change in ({"mlx_lm": "9"}, {"device": "metal"}, {"machine": "other"}, {"source": "eval"}):
        store.append(replace(o, provenance=replace(o.provenance, **change)) for o in some)
    assert len(strata_of(open_tables(store).simulated)) == 5


# -- choosing and scoring ---------------------------------------------------------------------------------------------


def covered(estimate, truth=0.0) -> bool:
    return estimate.low <= truth <= estimate.high


def noise_only(seed: int, documents: int, shared: float = 0.0):
    rng = np.random.default_rng(seed)
    quality = 10 + rng.normal(size=(2, 40, documents)) + shared * rng.normal(size=(1, 40, documents))
    return made(quality, [0] * 20 + [3] * 20, draws=1000)


@pytest.mark.parametrize("documents", [12, 30, 90])
def test_noise_alone_gives_an_interval_that_covers_zero_as_often_as_it_says(documents):
    gaps = [gap_between(noise_only(s, documents), "native", "all", 0.25) for s in range(400)]
    rate = np.mean([covered(g.points) for g in gaps])
    assert 0.92 <= rate <= 0.98  # 400 draws of a 95 % interval: standard error 1.1 %
    values = np.array([g.points.value for g in gaps])
    assert abs(values.mean()) < 4 * values.std() / math.sqrt(len(values))


def test_hindsight_among_noise_looks_like_a_gap_and_cross_fitting_does_not():
    gaps = [gap_between(noise_only(s, 30), "native", "all", 0.25) for s in range(60)]
    assert min(g.hindsight.value for g in gaps) >= 0
    assert np.mean([g.hindsight.value for g in gaps]) > 0.03
    assert abs(np.mean([g.points.value for g in gaps])) < 0.06


def test_noise_that_both_halves_share_is_told_from_a_gap_by_holding_documents_out():
    gaps = [gap_between(noise_only(s, 12, shared=3.0), "native", "all", 0.25) for s in range(300)]
    crossed = np.array([g.points.value for g in gaps])
    held = np.array([g.held_out.value for g in gaps])
    assert crossed.mean() > 4 * crossed.std() / math.sqrt(len(gaps))  # the weakness that docs/gap.md admits
    assert abs(held.mean()) < 3 * held.std() / math.sqrt(len(gaps))


def test_domains_weigh_the_same_however_many_documents_they_have():
    docs = Documents(["a"] * 8 + ["b"] * 2, draws=500)
    values = np.array([1.0] * 8 + [3.0] * 2)
    found = docs.estimate(values)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_spread_of_the_draws_is_that_of_a_mean():
    values = np.random.default_rng(0).normal(size=5)
    docs = Documents(["a"] * 5, draws=40_000)
    assert docs.draw(values[None])[0].std() == pytest.approx(values.std(ddof=1) / math.sqrt(5), rel=0.02)


def test_a_domain_with_a_single_document_has_no_interval():
    found = Documents(["a", "a", "b"]).estimate(np.ones(3))
    assert (found.value, found.low, found.high) == (1.0, None, None)


def test_states_are_paired_by_document():
    # What differs between documents is the same for both sides, so it is in no gap.
    rng = np.random.default_rng(0)
    easy = rng.normal(scale=100, size=30)
    quality = 500 + easy + np.array([1.0, 0.0])[None, :, None] + np.zeros((2, 2, 30))
    gap = gap_between(made(quality, [0, 3]), "native", "all", 0.25).points
    assert (gap.low, gap.value, gap.high) == pytest.approx((1.0, 1.0, 1.0))


def test_time_is_weighed_where_it_was_measured_and_its_absence_is_named(tmp_path):
    planted = [replace(NATIVE, time=1.0), replace(CACHE, time=1.1**8), HOOK]
    cells = reduced(tmp_path, [replace(KEEP, time=1.0), *planted])
    assert best_of(cells, "cache", 0.28, 0.0).actions == ("cache",)
    slow = best_of(cells, "cache", 0.28, 1.0)
    assert slow.actions == ("native",)
    assert slow.score.value == pytest.approx(-5.0)
    assert best_of(cells, "cache", 0.28, 0.25).score.value == pytest.approx(-(2 + 8 / 4))
    assert best_of(cells, "hook", 0.28, 1.0).untimed == ("hook",)
    assert np.isnan(scores(cells, 1.0)[0, [f.action for f in cells.facts].index("hook")]).all()


# -- bytes at equal quality -------------------------------------------------------------------------------------------


def test_bytes_at_equal_quality_are_read_off_the_line_between_neighbours():
    # Native: KL 4 points at 0.1, 2 at 0.3, 0 at 1. All: 3 points at 0.1, so native needs 0.2, twice as much.
    level = np.array([4.0, 2.0, 0.0, 3.0])
    quality = np.zeros((2, 4, 6)) + level[None, :, None]
    cells = made(quality, [0, 0, 0, 3], shares=[0.1, 0.3, 1.0, 0.1])
    gap = gap_between(cells, "native", "all", 0.1)
    assert gap.bytes_times.value == pytest.approx(2.0)
    assert (gap.bytes_times.low, gap.bytes_times.high) == pytest.approx((2.0, 2.0))


def test_quality_out_of_reach_gives_no_figure_for_bytes():
    level = np.array([4.0, 2.0, 1.0])
    quality = np.zeros((2, 3, 6)) + level[None, :, None]
    gap = gap_between(made(quality, [0, 0, 3], shares=[0.1, 0.3, 0.1]), "native", "all", 0.1)
    assert gap.bytes_times is None
    assert "native is not as good with any bytes" in gap.bytes_why


# -- shares, goals, parts, placebos -----------------------------------------------------------------------------------


def test_the_share_of_a_gap_that_is_closed(tmp_path):
    cells = reduced(tmp_path, SPACE)
    assert closed(cells, "native", "cache", "all", 0.28).share.value == pytest.approx(6 / 8)
    assert closed(cells, "native", "cache", "ceiling", 0.28).share.value == pytest.approx(6 / 9)
    assert closed(cells, "native", "cache", "full", 0.28).share.value == pytest.approx(6 / 10)
    nothing = closed(cells, "native", "cache", "native", 0.28)
    assert nothing.share is None
    assert "nothing that can be told from 0" in nothing.why


def test_a_goal_is_met_when_the_whole_interval_is(tmp_path):
    found = {(g.name, g.closed.reference): g for g in goals(reduced(tmp_path, SPACE))}
    assert found["cache at 28 %", "all"].met is True
    assert found["cache at 28 %", "full"].met is False
    assert found["cache at 28 %", "all"].gain_sure is True
    assert found["hook at 12.5 %", "all"].met is None


def test_parts_add_up_to_the_whole(tmp_path):
    cells = reduced(tmp_path, SPACE, Setting(documents=4, token_noise=0.01, document_noise=0.01))
    found = parts(cells, "cache", 0.28, policy="native")
    policy = scores(cells)[:, [f.action for f in cells.facts].index("native")].mean(axis=0)
    whole = best_of(cells, "ceiling", 0.28).score.value - cells.resampling.mean(policy)
    assert found.foresight.value + found.backend.value + found.controller.value == pytest.approx(whole)
    assert parts(cells, "cache", 0.28).controller is None
    with pytest.raises(AnalysisError, match="policy's choice 'x'"):
        parts(cells, "cache", 0.28, policy="x")


def test_choosing_among_placebos_buys_nothing_but_in_hindsight():
    bought = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        quality = 10 + rng.normal(size=(2, 4, 30))
        cells = made(quality, [1] * 4, roles=["candidate", *["placebo"] * 3])
        bought.append(placebo(cells, 0.25))
    assert np.mean([p.same.value for p in bought]) > 0.05
    assert abs(np.mean([p.crossed.value for p in bought])) < 0.05
    assert "fewer than two" in placebo(made(quality, [1] * 4), 0.25).why


# -- causes -----------------------------------------------------------------------------------------------------------


def test_one_capability_that_is_taken_away_is_the_cause_of_the_planted_gap(tmp_path):
    planted = [KEEP, NATIVE, Planted(What("a", 3, ("RAGGED_HEADS",)), 0.28, 0.04)]
    found = attribute(reduced(tmp_path, planted), "native", 0.28)
    assert found.total.value == pytest.approx(3.0)
    (one,) = found.capabilities
    assert one.name == "RAGGED_HEADS"
    assert [e.value for e in (one.alone, one.shapley, one.in_order)] == pytest.approx([3.0, 3.0, 3.0])


def test_what_is_worth_something_only_together_is_shared(tmp_path):
    both = Planted(What("both", 3, ("MIXED_ROWS", "RAGGED_HEADS")), 0.28, 0.02)
    one = Planted(What("one", 3, ("MIXED_ROWS",)), 0.28, 0.08)
    found = attribute(reduced(tmp_path, [KEEP, NATIVE, both, one]), "native", 0.28)
    by_name = {c.name: c for c in found.capabilities}
    assert by_name["MIXED_ROWS"].alone.value == pytest.approx(1.0)
    assert by_name["RAGGED_HEADS"].alone.value == pytest.approx(0.0)
    assert by_name["MIXED_ROWS"].shapley.value == pytest.approx((1 + 4) / 2)
    assert by_name["RAGGED_HEADS"].shapley.value == pytest.approx((0 + 3) / 2)
    assert [(c.order, c.in_order.value) for c in found.capabilities] == [
        (1, pytest.approx(1.0)),
        (2, pytest.approx(3.0)),
    ]
    assert found.best_sets == (
        (("MIXED_ROWS",), pytest.approx(1.0)),
        (("MIXED_ROWS", "RAGGED_HEADS"), pytest.approx(4.0)),
    )


def by_permutations(value, names):
    """Shapley values from their definition over orders."""
    found = dict.fromkeys(names, 0.0)
    orders = list(itertools.permutations(names))
    for order in orders:
        given: frozenset[str] = frozenset()
        for name in order:
            found[name] += (value(given | {name}) - value(given)) / len(orders)
            given |= {name}
    return found


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_shapley_values_are_the_mean_over_all_orders_and_add_up_to_the_gap(data):
    names = ["A", "B", "C", "D"]
    needs = data.draw(st.lists(st.sets(st.sampled_from(names), min_size=1), min_size=1, max_size=7))
    levels = data.draw(st.lists(st.integers(0, 50), min_size=len(needs), max_size=len(needs)))
    level = np.array([25.0, *levels])
    quality = np.zeros((2, len(level), 6)) + level[None, :, None]
    requires = [(), *(tuple(sorted(n)) for n in needs)]
    found = attribute(made(quality, [0, *[3] * len(needs)], requires=requires), "native", 0.25)

    def value(given):
        return max(-lv for lv, need in zip(level, requires, strict=True) if set(need) <= given)

    wanted = by_permutations(value, sorted(set().union(*needs)))
    assert {c.name: c.shapley.value for c in found.capabilities} == pytest.approx(wanted)
    assert sum(c.shapley.value for c in found.capabilities) == pytest.approx(found.total.value)
    assert sum(c.in_order.value for c in found.capabilities) == pytest.approx(found.total.value)


def test_shapley_values_add_up_to_the_gap_under_noise_as_well():
    rng = np.random.default_rng(3)
    requires = [(), ("A",), ("B",), ("A", "B"), ("C",), ("B", "C")]
    cells = made(rng.normal(5, 1, (2, 6, 12)), [0, *[3] * 5], requires=requires)
    found = attribute(cells, "native", 0.25)
    gap = gap_between(cells, "native", "all", 0.25).points
    assert sum(c.shapley.value for c in found.capabilities) == pytest.approx(gap.value)
    assert (found.total.value, found.total.low) == pytest.approx((gap.value, gap.low))


def test_capabilities_that_are_equals_are_ordered_by_name_whatever_the_last_bit():
    requires = [(), ("A", "B"), ("C",)]
    for nudge in (0.0, 1e-13, -1e-13):
        quality = np.zeros((2, 3, 6)) + np.array([5.0, 2.0, 4.0 + nudge])[None, :, None]
        found = attribute(made(quality, [0, 3, 3], requires=requires), "native", 0.25)
        assert [c.name for c in sorted(found.capabilities, key=lambda c: c.order)] == ["C", "A", "B"]


def test_sums_in_another_order_are_the_same_cells():
    from lumina_cache.gap.cells import _rounded

    some = np.random.default_rng(0).normal(size=(1000, 3)) * np.array([[1e-6], [1.0]] * 500)
    one, two = (some[:, 0] + some[:, 1]) + some[:, 2], some[:, 0] + (some[:, 1] + some[:, 2])
    assert (one != two).any()
    assert (_rounded(one) == _rounded(two)).mean() > 0.99
    assert _rounded(one) == pytest.approx(one, rel=1e-11)
    assert _rounded(np.array([0.0, -0.0, 1.0, 1e-300])).tolist() == [0.0, 0.0, 1.0, 1e-300]


def test_too_many_capabilities_to_enumerate_are_refused_by_name():
    requires = [(), *((f"C{i}",) for i in range(17))]
    cells = made(np.ones((2, 18, 6)), [0, *[3] * 17], requires=requires)
    with pytest.raises(AnalysisError, match="17 capabilities are missing from native.*C16"):
        attribute(cells, "native", 0.25)


def test_an_action_above_a_rung_that_names_nothing_missing_needs_the_rung(tmp_path):
    planted = [KEEP, NATIVE, Planted(What("odd", 3), 0.28, 0.04)]
    (one,) = attribute(reduced(tmp_path, planted), "native", 0.28).capabilities
    assert (one.name, one.shapley.value) == ("RUNG_3", pytest.approx(3.0))


def test_a_rung_has_what_it_stands_for_even_where_no_action_of_it_was_measured(tmp_path):
    cells = reduced(tmp_path, [KEEP, NATIVE, HOOK, KERNEL])
    missing = {
        b: {c.name for c in attribute(cells, b, 0.28).capabilities} for b in ("native", "cache", "hook")
    }
    assert missing["native"] == {"DENSE_REENCODE", "QUERIES", "RAGGED_HEADS"}
    assert missing["cache"] == {"QUERIES", "RAGGED_HEADS"}
    assert missing["hook"] == {"RAGGED_HEADS"}


def test_a_rung_with_nothing_at_a_budget_has_causes_of_nothing(tmp_path):
    cells = reduced(tmp_path, SPACE)
    found = attribute(cells, "native", 0.125)
    assert (found.total, found.capabilities) == (None, ())
    assert "no action of native fits" in found.why


def test_capabilities_that_come_together_are_one():
    assert together_needed(["KEYS", "VALUES", "ROW_GATHER", "ROW_CHOICE"]) == {"ROWS"}
    assert together_needed(["OBSERVED_SNAPKV", "QUERIES"]) == {"QUERIES"}
    assert together_needed(["OBSERVED_H2O"]) == {"OBSERVED"}
    assert together_needed(["FORMAT_MXFP4", "DENSE_REENCODE"]) == {"FORMATS", "DENSE_REENCODE"}


def test_a_cause_in_one_domain_shows_there_alone():
    quality = np.ones((2, 2, 12)) * 5
    quality[:, 1, ::3] = 2.0  # documents of domain "0"
    cells = made(quality, [0, 3], requires=[(), ("A",)])
    worth = {d: attribute(of_domain(cells, d), "native", 0.25).total.value for d in "012"}
    assert worth == {"0": 3.0, "1": 0.0, "2": 0.0}
    with pytest.raises(AnalysisError, match="no document of domain 'x'"):
        of_domain(cells, "x")


def test_damage_by_layer_is_told_only_by_plans_for_one_range(tmp_path):
    plan = Planted(What("0-3:quant:affine,bits=4,group=64", 0), 0.8, 0.06)
    two = Planted(What("0-3:quant:affine,bits=4,group=64;4-7:quant:affine,bits=8,group=64", 0), 0.7, 0.07)
    (one,) = by_layer(reduced(tmp_path / "1", [KEEP, plan, two, CACHE]))
    assert (one.layers, one.action) == ((0, 3), "quant:affine,bits=4,group=64")
    assert one.points.value == pytest.approx(3.0)
    assert by_layer(reduced(tmp_path / "2", SPACE)) == ()


# -- the whole --------------------------------------------------------------------------------------------------------


def test_a_whole_analysis_is_made_of_json(tmp_path):
    store = stored(tmp_path, SPACE)
    write(store, [KEEP, NATIVE, CACHE], Setting(documents=3), "real")
    found = analyse(store, settings=FEW)
    again = json.loads(json.dumps(found.to_record(), allow_nan=False))
    assert again["simulated"]["strata"][0]["gaps"][0]["points"] is None or again["kind"] == "lumina-cache gap"
    assert found.simulated.strata[0].gap("native", "all", 0.28).points.value == pytest.approx(4.0)
    assert found.real.strata[0].gap("native", "cache", 0.28).points.value == pytest.approx(3.0)
    assert found.real.strata[0].attributions == ()
    assert found.real.execution_state == "real"
    assert {s.execution_state for s in found.simulated.strata} == {"simulated"}
    assert "no times: quality at equal bytes only" in found.simulated.strata[0].notes


def test_several_stores_of_several_versions_make_a_trend(tmp_path):
    stored(tmp_path / "1", SPACE, Setting(documents=3, mlx_lm="0.9.0"))
    better = [replace(p, kl=0.04) if p is NATIVE else p for p in SPACE]
    stored(tmp_path / "2", better, Setting(documents=3, mlx_lm="0.10.0"))
    found = analyse([tmp_path / "1", tmp_path / "2"], settings=FEW).simulated
    (one,) = [t for t in found.trends if (t.low, t.high, t.budget) == ("native", "all", 0.28)]
    assert [(v, e.value) for v, e in one.versions] == [
        ("0.9.0", pytest.approx(4.0)),
        ("0.10.0", pytest.approx(1.0)),
    ]


def test_versions_of_something_else_are_told_apart_in_a_trend(tmp_path):
    store = Store(tmp_path)
    some = observations(SPACE, THREE)
    store.append(some)
    store.append(replace(o, provenance=replace(o.provenance, mlx="1")) for o in some)
    found = analyse(store, settings=FEW).simulated
    assert {v for t in found.trends for v, _ in t.versions} == {
        "0.0.1 (mlx 0, lumina-cache 0)",
        "0.0.1 (mlx 1, lumina-cache 0)",
    }


def test_the_same_store_and_seed_give_the_same_figures(tmp_path):
    store = stored(tmp_path, SPACE, Setting(documents=4, token_noise=0.01))
    one, two = (analyse(store, settings=FEW).to_record() for _ in range(2))
    assert {**one, "seconds": 0} == {**two, "seconds": 0}


def test_a_store_without_an_observation_is_an_error_that_names_what_lies_there(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "part-1.parquet").write_text("x")
    with pytest.raises(AnalysisError, match="no observation in .*truncated"):
        analyse(tmp_path)


def test_synthetic_ids_are_those_of_the_observations():
    some = observations([KEEP, CACHE], Setting(documents=2))
    assert len({o.id for o in some}) == 12
    assert table([KEEP, CACHE], Setting(documents=2))["id"].to_pylist() == [o.id for o in some]


# -- execution states never mix ---------------------------------------------------------------------------------------

MODULES = [
    lumina_cache.gap.analysis,
    lumina_cache.gap.attribution,
    lumina_cache.gap.cells,
    lumina_cache.gap.gap,
    lumina_cache.gap.records,
    lumina_cache.gap.store,
]

#: Public functions that put observations together → how each is called with something.
TAKERS = {
    "analyse_table": lambda x: analyse_table(x, FEW),
    "count_refusals": count_refusals,
    "strata_of": strata_of,
    "cells_of": lambda x: cells_of(x, ANY.stratum),
    "attribute": lambda x: attribute(x, "native", 0.28),
    "begin": lambda x: lumina_cache.gap.attribution.begin(x, "native", 0.28),
    "by_layer": by_layer,
    "of_domain": lambda x: of_domain(x, "0"),
    "best_of": lambda x: best_of(x, "native", 0.28),
    "closed": lambda x: closed(x, "native", "cache", "full", 0.28),
    "fits": lambda x: lumina_cache.gap.gap.fits(x, np.array([0]), 0.28),
    "gap_between": lambda x: gap_between(x, "native", "cache", 0.28),
    "goals": goals,
    "members": lambda x: lumina_cache.gap.gap.members(x, "native"),
    "parts": lambda x: parts(x, "native", 0.28),
    "placebo": lambda x: placebo(x, 0.28),
    "prepare": lambda x: lumina_cache.gap.gap.prepare(x, [0.28], [0.0]),
    "scores": scores,
    "sides": sides,
    "together": lumina_cache.gap.gap.together,
    "one_state": lambda x: lumina_cache.gap.records.one_state([x]),
    "of_one_state": lumina_cache.gap.store.of_one_state,
}
#: Public functions that are given no observations of a state: stores keep the states apart, and the rest are of one row.
OTHERS = {"analyse", "empty_file", "together_needed", "from_row", "quality_of", "open_tables", "schema_of"}
ANY = made(np.ones((2, 2, 6)), [0, 1])


def public_functions() -> set[str]:
    return {n for m in MODULES for n in m.__all__ if inspect.isfunction(getattr(m, n))}


def test_every_public_function_is_tried_with_what_must_not_mix():
    assert public_functions() == set(TAKERS) | OTHERS


@pytest.fixture(scope="module")
def of_each_state(tmp_path_factory):
    from tests.test_gap_store import real, refused, simulated

    store = Store(tmp_path_factory.mktemp("store"))
    one = [real(), simulated(), refused()]
    store.append(one)
    tables = open_tables(store)
    return {
        "real": [tables.real, one[0], made(np.ones((2, 2, 6)), [0, 1], state="real")],
        "simulated": [tables.simulated, one[1], ANY],
        "backend_infeasible": [
            tables.refusals,
            one[2],
            made(np.ones((2, 2, 6)), [0, 1], state="backend_infeasible"),
        ],
    }


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_execution_states_mix_in_no_public_function(of_each_state, data):
    name = data.draw(st.sampled_from(sorted(TAKERS)))
    call = TAKERS[name]
    states = data.draw(st.permutations(sorted(of_each_state)).map(lambda s: s[:2]))
    form = data.draw(st.integers(0, 2))
    mixed = [of_each_state[s][form] for s in states]
    if name in ("together", "of_one_state"):
        with pytest.raises(MixedExecutionStateError):
            call(*mixed)
    elif name == "one_state":
        with pytest.raises(MixedExecutionStateError):
            lumina_cache.gap.records.one_state(mixed)
    else:
        with pytest.raises(MixedExecutionStateError):
            call(mixed)
    if name not in ("one_state", "count_refusals"):
        with pytest.raises(MixedExecutionStateError):
            call(of_each_state["backend_infeasible"][form])
