"""Back to plain mlx-lm objects: what is saved can be loaded where this library was never imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from harness import architectures, assert_close, feed, quiet, real_bytes, same_bits, tokens
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from lumina_cache.errors import UnsupportedCacheError
from lumina_cache.lab.tiny import SPECS
from lumina_cache.layers import ManagedLayer, leaves

KINDS = ("llama", "gemma3", "llama4", "falcon_h1", "deepseek_v32", "qwen3_next", "recurrent_gemma", "mamba")
EVICT, PACK = "evict:sinks_window@rows=12", "quant:affine,bits=8,group=32"

#: Runs in a process of its own: loads the model and each cache, continues, and saves the logits.
CHILD = """
import importlib, json, sys
import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache

cases = json.load(open(sys.argv[1]))
for case in cases:
    module = importlib.import_module("mlx_lm.models." + case["module"])
    model = module.Model(module.ModelArgs.from_dict(case["config"]))
    model.load_weights(case["weights"])
    model.eval()
    cache, metadata = load_prompt_cache(case["cache"], return_metadata=True)
    assert metadata == {"kept": "yes"}, metadata
    logits, at = [], 0
    for n in case["steps"]:
        logits.append(model(mx.array([case["ids"][at : at + n]]), cache=cache))
        at += n
    mx.save_safetensors(case["logits"], {"logits": mx.concatenate(logits, axis=1)})
assert "lumina_cache" not in sys.modules
"""


def exported(model: Any, actions: list[str], *, n: int = 40, decode: bool = False) -> tuple[Any, list[Any]]:
    """A cache of ``n`` tokens after ``actions``, and its contents as plain objects."""
    cache = quiet(model)
    feed(model, cache, tokens(n), [n - 1, 1])
    for action in actions:
        cache.apply(action)
    return cache, cache.to_mlx(decode=decode)


CASES = [
    *((name, [], [1, 3, 1]) for name in KINDS),
    ("llama", [PACK], [1, 3, 1]),
    ("falcon_h1", [PACK], [1, 3, 1]),
    ("llama", [EVICT], [1, 3, 1]),
    ("qwen3_next", [EVICT], [1, 3, 1]),
    ("gemma3", [EVICT], [1, 1, 1]),
    ("llama", ["reclaim"], [1, 3, 1]),
    ("llama", [EVICT, PACK], [1, 3, 1]),
]


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[int, mx.array]:
    """Logits of every case, continued in another process."""
    from lumina_cache.lab.tiny import build

    home = tmp_path_factory.mktemp("export")
    jobs = []
    for i, (name, actions, steps) in enumerate(CASES):
        model = build(name)
        _, plain = exported(model, actions, decode=True)
        weights, saved = home / f"{name}.safetensors", home / f"cache{i}.safetensors"
        mx.save_safetensors(str(weights), dict(tree_flatten(model.parameters())))
        save_prompt_cache(str(saved), plain, metadata={"kept": "yes"})
        jobs.append(
            {
                "module": name,
                "config": json.loads(json.dumps(SPECS[name].config, default=dict)),
                "weights": str(weights),
                "cache": str(saved),
                "ids": tokens(sum(steps), seed=6)[0].tolist(),
                "steps": steps,
                "logits": str(home / f"logits{i}.safetensors"),
            }
        )
    job = home / "jobs.json"
    job.write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(job)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=home,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {i: mx.load(job["logits"])["logits"] for i, job in enumerate(jobs)}


@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=[f"{n}-{'+'.join(a) or 'plain'}" for n, a, _ in CASES]
)
def test_a_saved_export_continues_equally_in_a_process_that_never_imports_this_library(
    tiny: Any, continued: dict[int, mx.array], case: int
) -> None:
    name, actions, steps = CASES[case]
    model = tiny(name)
    cache, _ = exported(model, actions, decode=True)
    want = feed(model, cache, tokens(sum(steps), seed=6), steps)
    # A process without OpenBLAS differs by the order of sums; where rows were decoded, the new ones are not packed.
    assert_close(continued[case], want, 0.02 if EVICT in actions and PACK in actions else 1e-4)


@pytest.mark.parametrize("name", architectures())
def test_an_export_is_made_of_stock_objects_that_continue_bit_for_bit(tiny: Any, name: str) -> None:
    model, ids = tiny(name), tokens(60)
    cache, plain = exported(model, [], n=40)
    for ours, its in zip(leaves(cache), leaves(plain), strict=True):
        assert not isinstance(its, ManagedLayer)
        if isinstance(ours, ManagedLayer):
            assert type(its) is getattr(stock, type(ours).__name__)
    want = feed(model, cache, ids, [1, 3, 1], start=40)
    assert same_bits(feed(model, plain, ids, [1, 3, 1], start=40), want)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("filled", [True, False], ids=["filled", "empty"])
def test_an_export_shares_no_array_with_the_cache(tiny: Any, name: str, filled: bool) -> None:
    model, ids = tiny(name), tokens(60)
    cache, twin = quiet(model), quiet(model)
    if filled:
        for one in (cache, twin):
            feed(model, one, ids, [20, 1])
    plain = cache.to_mlx()
    assert filled or real_bytes(plain) == 0
    feed(model, plain, tokens(9, seed=3), [8, 1])
    assert same_bits(feed(model, cache, ids, [1, 3], start=21), feed(model, twin, ids, [1, 3], start=21))


@pytest.mark.parametrize("actions", [[PACK], [EVICT], ["reclaim"], [EVICT, "reclaim"]], ids="+".join)
def test_an_export_of_changed_rows_continues_as_the_cache_does(tiny: Any, actions: list[str]) -> None:
    model, ids = tiny("llama"), tokens(60)
    cache, plain = exported(model, actions)
    assert [type(one) for one in plain] == [
        {PACK: stock.QuantizedKVCache, EVICT: stock.ChunkedKVCache}.get(actions[0], stock.KVCache)
    ] * 2
    steps = [1, 3, 1, 300, 1, 1]
    ids = tokens(sum(steps), seed=2)
    assert_close(feed(model, plain, ids, steps), feed(model, cache, ids, steps))


def test_an_export_holds_live_rows_only_where_rows_were_changed(tiny: Any) -> None:
    cache, plain = exported(tiny("llama"), [EVICT])
    assert real_bytes(plain) == cache.observe().nbytes_live


def test_packed_rows_with_some_evicted_are_refused_by_name_and_can_be_decoded(tiny: Any) -> None:
    model = tiny("llama")
    cache = quiet(model)
    feed(model, cache, tokens(40), [40])
    cache.apply(f"{EVICT}+{PACK}")
    with pytest.raises(
        UnsupportedCacheError, match=r"layer 0 holds packed rows with some evicted.*decode=True"
    ):
        cache.to_mlx()
    plain = cache.to_mlx(decode=True)
    # New rows are packed in the one and not in the other.
    assert_close(feed(model, plain, tokens(4), [1, 3]), feed(model, cache, tokens(4), [1, 3]), 0.02)


def test_entries_without_rows_export_as_empty_stock_objects() -> None:
    from lumina_cache.codecs import Affine, Layout
    from lumina_cache.export import to_mlx
    from lumina_cache.layers import ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

    packed = KVCache()
    packed.reencode(Layout.both(Affine(4, 32)))
    for entry, kind in (
        (KVCache(), stock.KVCache),
        (RotatingKVCache(8), stock.RotatingKVCache),
        (ConcatenateKVCache(), stock.ConcatenateKVCache),
        (QuantizedKVCache(32, 4), stock.QuantizedKVCache),
        (packed, stock.QuantizedKVCache),
    ):
        plain = to_mlx(entry)
        assert type(plain) is kind
        assert plain.empty()
        rows = mx.ones((1, 1, 3, 32))
        plain.update_and_fetch(rows, rows)
        assert plain.offset == 3
    assert to_mlx(packed).bits == 4


# -- save_prompt_cache given the cache itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_an_untouched_cache_can_be_saved_directly_and_loads_as_the_stock_cache_would(
    tiny: Any, tmp_path: Path, name: str
) -> None:
    model, ids = tiny(name), tokens(60)
    cache, theirs = quiet(model), make_prompt_cache(model)
    for one in (cache, theirs):
        feed(model, one, ids, [30, 1])
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, cache)
    loaded = load_prompt_cache(path)
    assert [type(one) for one in loaded] == [type(one) for one in theirs]
    want = feed(model, theirs, ids, [1, 3, 1], start=31)
    assert same_bits(feed(model, loaded, ids, [1, 3, 1], start=31), want)
    # … and a loaded cache can be put back under management.
    ours = quiet(model)
    ours[:] = load_prompt_cache(path)
    assert same_bits(feed(model, ours, ids, [1, 3, 1], start=31), want)


@pytest.mark.parametrize("action", [EVICT, PACK])
def test_a_changed_cache_refuses_to_be_saved_directly_and_says_what_to_save_instead(
    tiny: Any, tmp_path: Path, action: str
) -> None:
    model = tiny("llama")
    cache, plain = exported(model, [action])
    path = tmp_path / "cache.safetensors"
    with pytest.raises(ValueError, match=r"changed by lumina_cache.*to_mlx"):
        save_prompt_cache(str(path), cache)
    assert not path.exists()
    save_prompt_cache(str(path), plain)
    assert len(load_prompt_cache(str(path))) == 2


def test_a_reclaimed_cache_can_be_saved_directly_because_its_rows_are_as_they_were(
    tiny: Any, tmp_path: Path
) -> None:
    cache, _ = exported(tiny("llama"), ["reclaim"])
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    assert load_prompt_cache(str(tmp_path / "cache.safetensors"))[0].offset == 40
