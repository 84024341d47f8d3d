"""Several rungs in one run, mlx-lm's own eviction, and logits in two halves."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock
from rich.console import Console
from test_evaluate import SMALL, Words, row, run, texts

from lumina_cache.errors import ActionSyntaxError
from lumina_cache.fingerprint import fingerprint
from lumina_cache.lab.compare import log_softmax
from lumina_cache.lab.evaluate import parse_subject
from lumina_cache.lab.evaluate.head import halves
from lumina_cache.lab.evaluate.measure import log_probabilities, read_prompt
from lumina_cache.lab.evaluate.render import as_markdown, as_table
from lumina_cache.lab.evaluate.rotating import KEEP, OneByOne, rotating
from lumina_cache.lab.models import LoadedModel

TOKENS = tuple((7 * k * k + 3) % 96 for k in range(100))
MIXED = [
    "keep",
    "mlx-lm:kv_bits=4,group=32",
    "mlx-lm:max_kv_size=25%",
    "evict:sinks_window@0.25",
    "evict:snapkv@0.25",
    "evict:dms@0.50",
]
RUNGS = "native,cache,hook"


@pytest.fixture
def loaded(tiny: Any) -> LoadedModel:
    model = tiny("llama")
    return LoadedModel(model, Words(), "tiny", fingerprint(model), mx.float32, "a test")


def full(model: Any, n: int = 64) -> list[Any]:
    cache = stock.make_prompt_cache(model)
    read_prompt(model, cache, TOKENS[:n], 32)
    return cache


def as_stock(cache: list[Any]) -> list[Any]:
    """The same rotating caches as mlx-lm's own class."""
    plain = []
    for entry in cache:
        plain.append(stock.RotatingKVCache(max_size=entry.max_size, keep=entry.keep))
        plain[-1].state = tuple(mx.array(x) if isinstance(x, mx.array) else x for x in entry.state)
    return plain


# -- mlx-lm's own eviction ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [9, 24, 63, 64, 80])
@pytest.mark.parametrize("block", [2, 8, 16])
def test_blocks_see_what_tokens_one_by_one_see_in_mlx_lms_own_class(tiny: Any, size: int, block: int) -> None:
    model = tiny("llama")
    plain = full(model)
    one_by_one = log_probabilities(model, as_stock(rotating(plain, size)), TOKENS[64:96], 1)
    blocks = log_probabilities(model, rotating(plain, size), TOKENS[64:96], block)
    assert mx.abs(one_by_one - blocks).max().item() < 1e-4


def test_mlx_lms_own_mask_for_several_tokens_would_lose_the_sinks(tiny: Any) -> None:
    """Why the class has a mask of its own: without it, what is scored is not what generation would see."""
    cache = rotating(full(tiny("llama")), 24)[0]
    theirs, ours = as_stock([cache])[0].make_mask(8), cache.make_mask(8)
    assert theirs.shape == ours.shape == (8, 23 + 8)
    assert theirs[:, :KEEP].sum(axis=1).tolist() == [4, 3, 2, 1, 0, 0, 0, 0]
    assert ours[:, :KEEP].sum(axis=1).tolist() == [KEEP] * 8
    assert theirs.sum(axis=1).tolist() == ours.sum(axis=1).tolist() == [24] * 8


def test_rows_are_where_a_run_of_mlx_lms_own_cache_has_them(tiny: Any) -> None:
    """The first layer's rows know nothing of the past, so there both ways to fill the cache hold the same."""
    model = tiny("llama")
    real = [stock.RotatingKVCache(max_size=24, keep=KEEP) for _ in model.layers]
    for token in TOKENS[:64]:
        mx.eval(model(mx.array([[token]]), cache=real))
    ours = rotating(full(model), 24)[0]
    theirs = real[0]
    assert (ours.offset, ours.keep, ours.max_size) == (theirs.offset, theirs.keep, theirs.max_size)
    for a, b in zip(ours.keys_and_values(), (theirs.keys, theirs.values), strict=True):
        assert mx.abs(a - theirs._temporal_order(b)).max().item() < 1e-5
    assert ours.nbytes == theirs.nbytes


def test_positions_go_on_where_the_full_cache_ended(tiny: Any) -> None:
    model = tiny("llama")
    cache = rotating(full(model), 24)
    assert {entry.offset for entry in cache} == {64}
    log_probabilities(model, cache, TOKENS[64:72], 8)
    assert {entry.offset for entry in cache} == {72}


def test_the_full_cache_is_left_as_it_was(tiny: Any) -> None:
    model = tiny("llama")
    plain = full(model)
    before = [mx.array(entry.keys) for entry in plain]
    log_probabilities(model, rotating(plain, 80), TOKENS[64:96], 8)
    assert all(mx.array_equal(a, entry.keys) for a, entry in zip(before, plain, strict=True))


def test_shares_and_numbers_of_rows_are_kept_to_the_row(loaded: LoadedModel) -> None:
    result = run(loaded, ["mlx-lm:max_kv_size=25%", "mlx-lm:max_kv_size=48"])
    assert row(result, "mlx-lm:max_kv_size=25%")["share16"] == 0.25
    assert row(result, "mlx-lm:max_kv_size=48")["share16"] == 0.75
    assert row(result, "mlx-lm:max_kv_size=48")["rung"] == "native"


def test_a_window_of_everything_changes_nothing(loaded: LoadedModel) -> None:
    found = row(run(loaded, ["mlx-lm:max_kv_size=200"]), "mlx-lm:max_kv_size=200")
    assert found["share16"] == 1.0
    assert found["figures"]["kl_mean"]["mean"] < 1e-9


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("mlx-lm:max_kv_size=50%,kv_bits=4", "Quantization NYI"),
        ("mlx-lm:max_kv_size=4", "4 rows has no room beside the 4"),
    ],
)
def test_what_mlx_lm_has_not_built_is_refused(loaded: LoadedModel, action: str, says: str) -> None:
    found = row(run(loaded, [action]), parse_subject(action).text)
    assert found["state"] == "backend_infeasible"
    assert says in found["reasons"][0]["text"]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("mlx-lm:max_kv_size=50%", "mlx-lm:max_kv_size=50%"),
        ("mlx-lm:max_kv_size=12.5%", "mlx-lm:max_kv_size=12.5%"),
        ("mlx-lm:max_kv_size=256", "mlx-lm:max_kv_size=256"),
        ("mlx-lm:kv_bits=4,max_kv_size=50%", "mlx-lm:max_kv_size=50%,kv_bits=4,group=64"),
    ],
)
def test_text_forms_are_read_back(text: str, printed: str) -> None:
    assert parse_subject(text).text == printed
    assert parse_subject(printed) == parse_subject(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mlx-lm:max_kv_size=0%", "between 0 and 100 %"),
        ("mlx-lm:max_kv_size=120%", "between 0 and 100 %"),
        ("mlx-lm:max_kv_size=1.5", "cannot read 'max_kv_size=1.5'"),
        ("mlx-lm:kv_bits=50%", "cannot read 'kv_bits=50%'"),
        ("mlx-lm:group=64", "give kv_bits=N or max_kv_size=N"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, says: str) -> None:
    with pytest.raises(ActionSyntaxError, match=says):
        parse_subject(text)


# -- several rungs ------------------------------------------------------------------------------------------------------


def test_every_action_is_measured_once_at_the_least_rung_that_carries_it_out(loaded: LoadedModel) -> None:
    result = run(loaded, MIXED, rung=RUNGS)
    rungs = {r["action"]: r.get("rung") for r in result["rows"]}
    assert rungs == {
        "keep": "native",
        "mlx-lm:kv_bits=4,group=32": "native",
        "mlx-lm:max_kv_size=25%": "native",
        "evict:sinks_window@0.25": "cache",
        "evict:snapkv@0.25": "hook",
        "evict:dms@0.50": None,
    }
    (one,) = [
        r for r in result["records"] if r.get("action") == "evict:snapkv@0.25" and r["document"] == "text0:0"
    ]
    assert [r["rung"] for r in one["refused"]] == ["native", "cache"]
    assert all(r["reasons"] for r in one["refused"])
    assert {r["rung"] for r in row(result, "evict:dms@0.50")["reasons"]} == {"native", "cache", "hook"}
    assert result["header"]["rung"] == RUNGS


@pytest.mark.parametrize("action", ["evict:keydiff@0.50", "quant:hadamard,bits=4,group=32", "keep"])
def test_rows_handed_to_a_lower_rung_are_those_that_it_would_have_read(
    loaded: LoadedModel, action: str
) -> None:
    """The same figures as in a run at that rung alone: bytes to the byte, KL to rounding."""
    alone, among = (row(run(loaded, [action], rung=r), parse_subject(action).text) for r in ("cache", RUNGS))
    for name in ("live", "allocated", "share16", "bytes_exact"):
        assert alone[name] == among[name], name
    for name in ("kl_mean", "copy_kl", "nll_change"):
        a, b = alone["figures"][name]["mean"], among["figures"][name]["mean"]
        assert a == pytest.approx(b, rel=1e-3, abs=1e-6), name


def test_a_deeper_rung_is_never_worse_at_any_share(loaded: LoadedModel) -> None:
    result = run(loaded, [*MIXED, "mlx-turboquant:bits=2"], rung=RUNGS)
    best = result["best"]
    assert {b["share"] for b in best} == {0.28, 0.25, 0.125, 0.0625}
    for share in (0.28, 0.25):
        kl = [b["kl_mean"] for b in best if b["share"] == share]
        assert len(kl) == 3
        assert all(x is not None for x in kl)
        assert kl[0] >= kl[1] >= kl[2]
    assert all(b["action"] is None for b in best if b["share"] == 0.0625)
    assert all(b["share16"] <= b["share"] * 1.02 for b in best if b["action"])


def test_what_another_package_does_is_no_rungs_best(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lumina_cache.lab.answer import detached_copy
    from lumina_cache.lab.evaluate.subjects import Taken, TurboQuant, _plain

    def take(self: Any, whole: Any, model: Any) -> Taken:
        return Taken(rotating(_plain(detached_copy(whole)), 16), 0.0, True)

    monkeypatch.setattr(TurboQuant, "take", take)
    result = run(loaded, ["mlx-turboquant:bits=2"], rung=RUNGS)
    assert row(result, "mlx-turboquant:bits=2,group=64")["share16"] == 0.25
    assert all(b["action"] is None for b in result["best"])


def test_another_package_finds_mlx_lms_attention_under_the_hook(loaded: LoadedModel) -> None:
    pytest.importorskip("mlx_turboquant", reason="the package mlx-turboquant is not installed")
    alone = row(
        run(loaded, ["mlx-turboquant:bits=4,group=32"], rung="cache"), "mlx-turboquant:bits=4,group=32"
    )
    result = run(loaded, ["mlx-turboquant:bits=4,group=32", "evict:snapkv@0.25"], rung=RUNGS)
    among = row(result, "mlx-turboquant:bits=4,group=32")
    assert among["figures"]["kl_mean"]["mean"] == pytest.approx(alone["figures"]["kl_mean"]["mean"], rel=1e-3)


def test_the_tables_say_from_which_rung_on(loaded: LoadedModel) -> None:
    result = run(loaded, MIXED, rung=RUNGS)
    page = as_markdown(result)
    assert "| action | share | from rung |" in page
    assert "| `evict:snapkv@0.25` | 25.0% | hook |" in page
    assert "| share | native | cache | hook |" in page
    assert "| ≤ 6.25 % | – | – | – |" in page
    console = Console(width=200, file=io.StringIO())
    console.print(as_table(result))
    assert "from rung" in console.file.getvalue()  # type: ignore[attr-defined]
    alone = as_markdown(run(loaded, ["keep"], rung="hook"))
    assert "from rung" not in alone


# -- logits in two halves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "mixtral", "deepseek_v2"])
def test_halves_are_the_model_or_there_are_none(tiny: Any, name: str) -> None:
    model = tiny(name)
    found = halves(model)
    if found is None:
        return
    tokens = mx.array([TOKENS[:20]])
    apart = mx.abs(found.head(found.body(tokens)) - model(tokens)).max().item()
    assert apart < 1e-4


def test_a_model_whose_logits_are_bent_afterwards_is_run_whole(tiny: Any) -> None:
    """Gemma 2 caps its logits after the head, so the product alone is not what the model says."""
    assert halves(tiny("llama")) is not None

    class Bent:
        model = tiny("llama").model
        lm_head = staticmethod(tiny("llama").model.embed_tokens.as_linear)

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            return 0.9 * self.lm_head(self.model(tokens, cache))

    assert halves(Bent()) is None


def test_meeting_the_vocabulary_together_changes_nothing(tiny: Any) -> None:
    model = tiny("llama")
    split = halves(model)
    assert split is not None
    whole = log_probabilities(model, full(model), TOKENS[64:96], 8)
    parts = log_probabilities(model, full(model), TOKENS[64:96], 8, split=split)
    some = log_probabilities(model, full(model), TOKENS[64:96], 8, split=split, scored=5)
    assert whole.shape == parts.shape == (32, 128)
    assert mx.abs(whole - parts).max().item() < 1e-5
    assert mx.abs(parts[-5:] - some).max().item() < 1e-5
    direct = log_softmax(model(mx.array([TOKENS[:96]]))[0])[64:]
    assert mx.abs(direct - parts).max().item() < 1e-4


def test_the_rotating_class_is_mlx_lms(tiny: Any) -> None:
    assert all(isinstance(e, stock.RotatingKVCache) for e in rotating(full(tiny("llama")), 24))
    assert OneByOne(max_size=8, keep=4).make_mask(1) is None
    assert len(texts()) == SMALL.contexts[0][1]
