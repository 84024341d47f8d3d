"""What the contract's tests share: tokens, runs, and a reference that masks rows instead of dropping them."""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache

from lumina_cache.apply import held_all
from lumina_cache.cache import LuminaCache
from lumina_cache.disk import DiskStore
from lumina_cache.errors import BudgetError
from lumina_cache.estimate import Held
from lumina_cache.lab.tiny import SPECS
from lumina_cache.layers import leaves

__all__ = [
    "CORE",
    "NO_ROWS",
    "UNDECODABLE",
    "UNEVICTABLE",
    "UNPACKABLE",
    "Hiding",
    "Masked",
    "MaskedQuantized",
    "allocated",
    "architectures",
    "assert_close",
    "attend_around_hidden",
    "disk_in",
    "fast_first",
    "feed",
    "greedy",
    "held_of",
    "hide",
    "hiding_reference",
    "masked_reference",
    "pack_reference",
    "pieces",
    "quiet",
    "real_bytes",
    "same_bits",
    "settle",
    "smallest",
    "tokens",
]

#: Architectures of the normal run; the others are marked slow.
CORE = (
    "baichuan_m1",
    "cohere2",
    "deepseek_v3",
    "deepseek_v32",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4_text",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama",
    "llama4",
    "longcat_flash",
    "mamba",
    "ministral3",
    "mistral3",
    "nemotron_h",
    "phi3",
    "plamo2",
    "qwen3",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv7",
)


def architectures(*, but: Iterable[str] = ()) -> list[Any]:
    """Parameters for a test: every architecture except ``but``, those outside :data:`CORE` marked slow."""
    left_out = frozenset(but)
    return fast_first([name for name in SPECS if name not in left_out], CORE)


def fast_first(names: Iterable[str], fast: Iterable[str]) -> list[Any]:
    """Parameters for a test: ``names``, those not among ``fast`` marked slow."""
    in_normal_run = frozenset(fast)
    return [pytest.param(name, marks=() if name in in_normal_run else pytest.mark.slow) for name in names]


#: Models none of whose entries holds one row per token for as long as the generation lasts.
NO_ROWS = frozenset({"deepseek_v41", "mamba", "mamba2", "recurrent_gemma", "rwkv7"})

#: Models whose rows cannot be evicted, because their attention takes the index of a row for its position.
UNEVICTABLE = frozenset({"afm7", "minimax_m3_vl", "phi3small"})

#: Models whose rows cannot be decoded on fetch: one of their layers computes with the arrays that it finds stored.
UNDECODABLE = frozenset({"deepseek_v32", "glm_moe_dsa", "minimax_m3_vl"})

#: Models whose attention cannot read packed rows, and why.
UNPACKABLE = {
    "afm7": "borrowed K/V",
    "bailing_hybrid": "latent attention",
    "bailing_moe_v3": "latent attention",
    "deepseek_v3": "latent attention",
    "deepseek_v32": "latent attention",
    "gear": "attention by hand",
    "gemma2": "attention by hand",
    "gemma4": "borrowed K/V",
    "gemma4_text": "borrowed K/V",
    "glm4_moe_lite": "latent attention",
    "glm_moe_dsa": "latent attention",
    "gpt_oss": "attention sinks",
    "iquestloopcoder": "borrowed K/V",
    "kimi_k25": "latent attention",
    "kimi_k3": "latent attention",
    "kimi_linear": "latent attention",
    "kimi_vl": "latent attention",
    "longcat_flash": "latent attention",
    "longcat_flash_ngram": "latent attention",
    "mimo_v2_flash": "keys and values of different widths",
    "minimax_m3_vl": "attention by hand",
    "mistral4": "attention by hand",
    "phi": "attention by hand",
    "phi3small": "attention by hand",
    "phixtral": "attention by hand",
    "plamo": "attention by hand",
    "plamo2": "attention by hand",
    "stablelm": "attention by hand",
}


def tokens(n: int, seed: int = 0, batch: int = 1) -> mx.array:
    """Token ids (batch, n), the same for the same seed."""
    return mx.array(np.random.default_rng(seed).integers(0, 96, (batch, n)))


def pieces(n: int, chunk: int, decode: int = 0) -> list[int]:
    """Step lengths: ``n`` tokens in chunks of ``chunk``, then ``decode`` single tokens."""
    full, rest = divmod(n, chunk)
    return [chunk] * full + [rest] * (rest > 0) + [1] * decode


def settle(cache: Iterable[Any]) -> None:
    """Evaluate every array of the cache, as mlx-lm does after each prefill chunk."""
    mx.eval([entry.state for entry in cache])


def feed(model: Any, cache: Any, ids: mx.array, steps: Sequence[int], start: int = 0) -> mx.array:
    """Run ``model`` over ``ids[:, start:]`` in steps of the given lengths; logits (B, sum of steps, V), evaluated."""
    out = []
    for begin, end in itertools.pairwise(itertools.accumulate(steps, initial=start)):
        logits = model(ids[:, begin:end], cache=cache)
        mx.eval(logits)
        if end - begin > 1:
            settle(cache)
        out.append(logits)
    joined = mx.concatenate(out, axis=1)
    mx.eval(joined)  # in this thread
    return joined


def greedy(
    model: Any, prompt: Sequence[int], cache: Any, n: int, **kwargs: Any
) -> list[tuple[int, mx.array]]:
    """``n`` greedy tokens of mlx-lm's ``generate_step`` with their log-probabilities (V,)."""
    return list(greedy_steps(model, prompt, cache, n, **kwargs))


def greedy_steps(
    model: Any, prompt: Sequence[int], cache: Any, n: int, **kwargs: Any
) -> Iterator[tuple[int, mx.array]]:
    """The same, one after another."""
    steps = generate_step(mx.array(prompt), model, prompt_cache=cache, max_tokens=n, **kwargs)
    return ((int(token), logprobs) for token, logprobs in steps)


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a, b).item())


def assert_close(got: mx.array, want: mx.array, tolerance: float = 1e-5) -> None:
    """The largest difference is at most ``tolerance`` of the largest logit."""
    scale = float(mx.abs(want).max().item())
    worst = float(mx.abs(got - want).max().item())
    assert np.isfinite(worst), "logits are not finite"
    assert worst <= tolerance * scale, f"largest difference {worst:.3g} of logits up to {scale:.3g}"


def held_of(cache: Iterable[Any]) -> tuple[Held, ...]:
    return held_all(leaves(list(cache)))


def allocated(cache: LuminaCache) -> int:
    return cache.observe().nbytes_allocated


def real_bytes(cache: Iterable[Any]) -> int:
    """Bytes of the arrays that the entries really hold, asked of the arrays themselves."""
    return sum(a.nbytes for leaf in leaves(list(cache)) for a in arrays_of(leaf))


def arrays_of(leaf: Any) -> Iterator[mx.array]:
    """Every array that one entry holds as keys, values or state."""
    known = [getattr(leaf, name) for name in ("keys", "values", "cache") if hasattr(leaf, name)]
    # A class of the model's own has other names for its arrays.
    stack: list[Any] = known or list(vars(leaf).values())
    while stack:
        one = stack.pop()
        if isinstance(one, mx.array):
            yield one
        elif isinstance(one, list | tuple):
            stack.extend(one)


def disk_in(directory: Path) -> DiskStore:
    """A store of files without limits in a directory that only the user may write to."""
    return DiskStore(directory / "rows", max_bytes=None, total_max_bytes=None)


def quiet(model: Any, **kwargs: Any) -> LuminaCache:
    """A LuminaCache that does not read the machine."""
    return LuminaCache(model, telemetry=False, **kwargs)


def smallest(model: Any, **kwargs: Any) -> int:
    """The smallest budget, as the refusal of an impossible one names it."""
    with pytest.raises(BudgetError, match=r"smallest that works for this model is \d+ bytes") as caught:
        quiet(model, budget=1, **kwargs)
    found = re.search(r"(\d+) bytes", str(caught.value))
    assert found is not None
    return int(found[1])


# -- the reference: mlx-lm's own caches, complete, with some rows masked ------------------------------------------------


class Masked(stock.KVCache):
    """A complete cache whose ``hidden`` positions are masked for every query."""

    hidden = np.array([], dtype=np.int64)
    #: deepseek_v32 gathers from the mask and needs one with batch and head axes.
    four_axes = False

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        query, key = np.arange(self.offset, self.offset + N)[:, None], np.arange(self.offset + N)[None]
        mask = (key <= query) & ~np.isin(key, self.hidden)
        if window_size is not None:
            mask &= query - key < window_size
        return mx.array(mask[None, None] if self.four_axes else mask)


class MaskedQuantized(stock.QuantizedKVCache):
    hidden = np.array([], dtype=np.int64)
    four_axes = False
    make_mask = Masked.make_mask


def masked_reference(model: Any) -> list[Any]:
    """The stock cache of ``model`` in which rows can be hidden with :func:`hide`."""
    four_axes = type(model).__module__.endswith(("deepseek_v32", "glm_moe_dsa"))

    def swap(entry: Any) -> Any:
        if isinstance(entry, stock.CacheList):
            return stock.CacheList(*map(swap, entry.caches))
        if type(entry) is not stock.KVCache:
            return entry
        masked = Masked()
        masked.four_axes = four_axes
        return masked

    return [swap(entry) for entry in make_prompt_cache(model)]


def hide(reference: Iterable[Any], positions: Iterable[int]) -> None:
    """Hide these positions, besides those hidden before, from every later query."""
    for leaf in leaves(list(reference)):
        if isinstance(leaf, Masked | MaskedQuantized):
            leaf.hidden = np.union1d(leaf.hidden, np.array(list(positions), dtype=np.int64))


class Hiding(stock.KVCache):
    """A complete cache that knows which rows each head must not see; see :func:`attend_around_hidden`."""

    hidden: np.ndarray | None = None  #: bool (B, H, T) of the first T rows
    returned: Any = None  #: keys of the last step, by which layers that borrow them are told

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)
        self.returned = fetched[0]
        return fetched


def hiding_reference(model: Any) -> list[Any]:
    """The stock cache of ``model`` in which every layer and head can hide rows of its own."""

    def swap(entry: Any) -> Any:
        if isinstance(entry, stock.CacheList):
            return stock.CacheList(*map(swap, entry.caches))
        return Hiding() if type(entry) is stock.KVCache else entry

    return [swap(entry) for entry in make_prompt_cache(model)]


def attend_around_hidden(patch: pytest.MonkeyPatch, reference: Iterable[Any]) -> list[Any]:
    """Have mlx-lm's attention mask what the caches of ``reference`` hide; those that it did so for.

    Masks that models make are shared by layers, so the reference is put where attention is computed.
    """
    gc.collect()  # a cache with a hook that nobody holds any more keeps its dispatcher in the way until then
    real, served = base.scaled_dot_product_attention, []
    hiding = [leaf for leaf in leaves(list(reference)) if isinstance(leaf, Hiding)]

    def attend(
        queries: mx.array, keys: mx.array, values: mx.array, cache: Any, *args: Any, **kwargs: Any
    ) -> Any:
        owner = next((one for one in hiding if one is cache or one.returned is keys), None)
        if owner is None or owner.hidden is None:
            return real(queries, keys, values, cache, *args, **kwargs)
        served.append(owner)
        given = inspect.signature(real).bind(queries, keys, values, cache, *args, **kwargs)
        given.arguments["mask"] = _around(owner.hidden, given.arguments["mask"], queries, keys)
        return real(*given.args, **given.kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, real.__name__, None) is real:
            patch.setattr(module, real.__name__, attend)
    return served


def _around(hidden: np.ndarray, mask: Any, queries: mx.array, keys: mx.array) -> mx.array:
    batch, heads, seen = hidden.shape
    n, rows = queries.shape[2], keys.shape[2]
    visible = np.ones((batch, heads, rows), dtype=bool)
    visible[..., :seen] = ~hidden
    by_query_head = np.repeat(visible, queries.shape[1] // heads, axis=1)
    allowed = mx.array(by_query_head)[:, :, None]
    if mask is None:
        return allowed
    if isinstance(mask, str):
        return mx.array(np.tri(n, rows, rows - n, dtype=bool)) & allowed
    return mask & allowed if mask.dtype == mx.bool_ else mx.where(allowed, mask, mx.finfo(mask.dtype).min)


def pack_reference(reference: list[Any], bits: int, group_size: int) -> list[Any]:
    """The same reference with its rows packed by mlx-lm's own ``to_quantized``; hidden rows stay hidden."""

    def swap(entry: Any) -> Any:
        if isinstance(entry, stock.CacheList):
            return stock.CacheList(*map(swap, entry.caches))
        if not isinstance(entry, Masked):
            return entry
        packed = MaskedQuantized(group_size, bits)
        packed.__dict__.update(entry.to_quantized(group_size, bits).__dict__)
        packed.hidden, packed.four_axes = entry.hidden, entry.four_axes
        return packed

    return [swap(entry) for entry in reference]
