from __future__ import annotations

import pytest

from lumina_cache.brief import brief

A, B = "quant:affine_fetch,bits=8,group=64", "evict:sinks_window@0.50+quant:hadamard,bits=4,group=64"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (f"0-1:{A};3-3:{B};4-6:{A}", f"{A} in layers 0-1,4-6; {B} in layer 3"),
        (f"2-2:{A}", f"{A} in layer 2"),
        (f"2-3:{A}", f"{A} in layers 2-3"),
        (B, B),
        ("keep", "keep"),
        ("what a later version:calls=this", "what a later version:calls=this"),
    ],
)
def test_plans_are_said_by_what_they_do_and_where(text: str, read: str) -> None:
    assert brief(text) == read
