"""How long a million made-up observations take to be analysed, and how much memory: run it from the repository's root.

    python benchmarks/gap_scale.py                          # 1,000,000 observations, DuckDB bound to 512 MB
    python benchmarks/gap_scale.py --rows 100000 --keep DIR # keep the store

The observations are synthetic (:mod:`lumina_cache.gap.synthetic`); the times and bytes printed are measured. The analysis
runs in a process of its own, whose peak of resident memory is what the operating system says it was.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ACTIONS, DOCUMENTS, CONTEXTS = 200, 100, (1024, 4096, 8192)


def analysed(store: str, memory: str, draws: int) -> None:
    """Analyse and print one line of JSON."""
    before = _peak()
    start = time.perf_counter()
    import lumina_cache.gap.analysis as analysis
    from lumina_cache.gap.store import DuckDB

    cpu = time.process_time()
    imported, with_imports = time.perf_counter(), _peak()
    found = analysis.analyse(store, engine=DuckDB(memory=memory), settings=analysis.Settings(draws=draws))
    done = time.perf_counter()
    assert found.simulated is not None
    print(
        json.dumps(
            {
                "observations": found.simulated.observations,
                "strata": len(found.simulated.strata),
                "gaps": sum(len(s.gaps) for s in found.simulated.strata),
                "problems": len(found.problems),
                "seconds_analysis": round(done - imported, 2),
                "cpu_seconds": round(time.process_time() - cpu, 2),
                "load": [round(x, 1) for x in os.getloadavg()],
                "seconds_imports": round(imported - start, 2),
                "peak_mb": round(_peak() / 1e6),
                "peak_mb_after_imports": round(with_imports / 1e6),
                "peak_mb_python": round(before / 1e6),
                "duckdb_memory_limit": memory,
                "draws": draws,
            }
        )
    )


def _peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--memory", default="512MB")
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="write the store here, and leave it")
    parser.add_argument("--analyse", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.analyse:
        analysed(given.analyse, given.memory, given.draws)
        return

    from lumina_cache.gap.store import Store
    from lumina_cache.gap.synthetic import Setting, action_space, write

    with tempfile.TemporaryDirectory() as scratch:
        path = given.keep or Path(scratch) / "store"
        seeds = 2
        planted = action_space(ACTIONS)
        documents = max(2, round(given.rows / (ACTIONS * 3 * len(CONTEXTS) * seeds)))
        start = time.perf_counter()
        for context in CONTEXTS:
            setting = Setting(
                documents=documents,
                contexts=(context,),
                seeds=seeds,
                token_noise=0.01,
                document_noise=0.01,
                seed=context,
            )
            write(Store(path), planted, setting, parts=4)
        nbytes = sum(f.stat().st_size for f in path.rglob("*.parquet"))
        print(f"written in {time.perf_counter() - start:.1f} s: {nbytes / 1e6:.0f} MB of Parquet")
        for _ in range(given.repeats):
            command = [
                sys.executable,
                __file__,
                "--analyse",
                str(path),
                "--memory",
                given.memory,
                "--draws",
                str(given.draws),
            ]
            print(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True
            )


if __name__ == "__main__":
    main()
