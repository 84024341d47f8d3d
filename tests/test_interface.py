"""An mlx-lm whose interface has changed is refused by name, before any cache is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mlx_lm.models import base
from mlx_lm.models import cache as stock

from lumina_cache.backend import interface
from lumina_cache.backend.interface import TESTED_MLX_LM, check_interface
from lumina_cache.cache import LuminaCache
from lumina_cache.errors import BackendInterfaceError


@pytest.fixture(autouse=True)
def looked_up_again() -> Iterator[None]:
    check_interface.cache_clear()
    yield
    check_interface.cache_clear()


def refused(*says: str) -> None:
    with pytest.raises(BackendInterfaceError) as caught:
        check_interface()
    for text in says:
        assert text in str(caught.value)
    assert f"mlx-lm=={TESTED_MLX_LM[-1]}" in str(caught.value)


def test_the_installed_mlx_lm_is_known_and_tested() -> None:
    check_interface()
    assert interface.mlx_lm_version in TESTED_MLX_LM


def test_the_lookup_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check_interface()
    monkeypatch.delattr(stock, "make_prompt_cache")
    check_interface()


def test_no_cache_is_made_on_an_unknown_interface(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    model = tiny("llama")
    monkeypatch.delattr(stock.KVCache, "trim")
    with pytest.raises(BackendInterfaceError, match=r"KVCache\.trim"):
        LuminaCache(model)


@pytest.mark.parametrize(
    ("where", "name", "changed", "says"),
    [
        (
            stock.KVCache,
            "update_and_fetch",
            lambda self, keys, values, layer: None,
            "KVCache.update_and_fetch",
        ),
        (stock.KVCache, "update_and_fetch", lambda self, values, keys: None, "KVCache.update_and_fetch"),
        (stock.KVCache, "to_quantized", lambda self, bits, group_size: None, "KVCache.to_quantized"),
        (
            stock.RotatingKVCache,
            "make_mask",
            lambda self, N, return_array, window_size: None,
            "RotatingKVCache.make_mask",
        ),
        (stock.ArraysCache, "make_mask", lambda self, N, window: None, "ArraysCache.make_mask"),
        (
            base,
            "create_causal_mask",
            lambda batch, N, offset, window_size, right_padding, left_padding: None,
            "create_causal_mask",
        ),
        (base, "create_causal_mask", lambda N, offset, window_size: None, "create_causal_mask"),
        (
            base,
            "scaled_dot_product_attention",
            lambda queries, keys, values, cache, scale, mask: None,
            "scaled_dot_product_attention",
        ),
        (stock, "make_prompt_cache", lambda model, max_kv_size, device: None, "make_prompt_cache"),
    ],
)
def test_a_changed_signature_is_named(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, changed: Any, says: str
) -> None:
    monkeypatch.setattr(where, name, changed)
    refused(says)


@pytest.mark.parametrize(
    ("where", "name", "says"),
    [
        (stock.KVCache, "update_and_fetch", "KVCache.update_and_fetch is missing"),
        (stock.KVCache, "merge", "KVCache.merge is missing"),
        (stock, "make_prompt_cache", "make_prompt_cache is missing"),
        (stock, "ChunkedKVCache", "ChunkedKVCache"),
        (stock.KVCache, "step", "KVCache.step"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, says: str) -> None:
    monkeypatch.delattr(where, name)
    refused(says)


def test_a_missing_field_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_offset(self: Any) -> None:
        self.keys = self.values = None

    monkeypatch.setattr(stock.KVCache, "__init__", without_offset)
    refused("KVCache has no field offset")


def test_another_growth_step_is_named_because_bytes_are_predicted_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cls in (stock.KVCache, stock.RotatingKVCache, stock.QuantizedKVCache, stock.ChunkedKVCache):
        with monkeypatch.context() as patch:
            patch.setattr(cls, "step", 512)
            refused(f"{cls.__name__}.step is 512", "256")


def test_several_differences_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(stock.KVCache, "trim")
    monkeypatch.setattr(stock.KVCache, "step", 1)
    refused("KVCache.trim", "KVCache.step")


def test_a_forwarding_signature_and_a_receiver_of_another_name_are_as_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stock.ArraysCache, "make_mask", lambda *args, **kwargs: None)
    monkeypatch.setattr(stock.KVCache, "trim", lambda this, n: None)
    check_interface()
