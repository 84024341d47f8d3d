"""The analysis of one store on DuckDB and on Spark, and how far their figures are apart: run from the repository's root.

    pip install "lumina-cache[spark]"                 # needs Java as well
    python benchmarks/gap_engines.py                  # 100,000 made-up observations
    python benchmarks/gap_engines.py --store DIR      # a store of one's own

Every number of both analyses is compared, and everything else must be equal.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from lumina_cache.gap.analysis import Settings, analyse
from lumina_cache.gap.spark import Spark
from lumina_cache.gap.store import DuckDB, Store, schema_of
from lumina_cache.gap.synthetic import Setting, action_space, observations, table, write

#: What differs by design: the engine's name, and how long it took.
APART = {"engine", "seconds"}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, text and null of a record, with its place."""
    if isinstance(value, dict):
        for key, one in value.items():
            if not (path == "" and key in APART):
                yield from leaves(one, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from leaves(one, f"{path}/{i}")
    else:
        yield path, value


def compared(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    a, b = dict(leaves(one)), dict(leaves(two))
    numbers = [p for p in a if isinstance(a[p], float) and isinstance(b.get(p), float)]
    apart = [p for p in {*a, *b} - set(numbers) if p not in a or p not in b or a[p] != b[p]]
    differences = {p: abs(a[p] - b[p]) for p in numbers}
    relative = {p: d / max(abs(a[p]), abs(b[p])) for p, d in differences.items() if d}
    worst = max(relative, key=lambda p: relative[p], default=None)
    return {
        "numbers": len(numbers),
        "numbers_equal_to_the_last_bit": sum(d == 0 for d in differences.values()),
        "largest_difference": max(differences.values(), default=0.0),
        "largest_relative_difference": relative[worst] if worst else 0.0,
        "where": worst,
        "others": len(a) - len(numbers),
        "others_that_differ": sorted(apart)[:20],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--draws", type=int, default=2_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = given.store or Path(scratch) / "store"
        if given.store is None:
            fill(Store(path), given.rows)
        settings = Settings(draws=given.draws)
        records = {}
        for engine in (DuckDB(), Spark()):
            for _ in range(2):  # the first run starts the engine
                start = time.perf_counter()
                records[engine.name] = analyse(path, engine=engine, settings=settings).to_record()
                print(f"{engine.name:7} {time.perf_counter() - start:6.1f} s", flush=True)
        found = compared(records["duckdb"], records["spark"])
        kept = [records["duckdb"][state]["observations"] for state in ("real", "simulated")]
        print(f"{sum(kept)} observations; left out: {[p['kind'] for p in records['duckdb']['problems']]}")
        print(json.dumps(found, indent=1))
        if found["others_that_differ"] or not math.isfinite(found["largest_difference"]):
            raise SystemExit("the engines disagree")


def fill(store: Store, rows: int, contexts: tuple[int, ...] = (1024, 4096)) -> None:
    """Real and simulated observations, some of them twice, one with another figure, one of them odd."""
    planted = action_space(60)
    setting = Setting(
        documents=max(2, rows // (60 * 3 * len(contexts) * 3 * 2)),
        contexts=contexts,
        seeds=3,
        token_noise=0.01,
        document_noise=0.01,
    )
    for state in ("real", "simulated"):
        write(store, [p for p in planted if state == "simulated" or p.what.rung < 3], setting, state, parts=3)
    again = table(planted, setting)
    store.append_table("simulated", again.slice(0, 20))
    other = observations(planted[:2], replace(setting, documents=2))[0]
    store.append([replace(other, measured=replace(other.measured, share16=0.9))])
    rows_odd = again.slice(again.num_rows - 3, 3).to_pylist()
    store.append_table(
        "simulated",
        pa.Table.from_pylist(
            [{**r, "id": "odd", "rung": 9} for r in rows_odd], schema=schema_of("simulated")
        ),
    )


if __name__ == "__main__":
    main()
