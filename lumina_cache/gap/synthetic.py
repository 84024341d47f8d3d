"""Made-up observations with a known answer: for tests of the analysis, and to see how it scales. Nothing here was measured.

Every action has a true damage; an observation of it is that plus noise of the document (which both halves of its tokens
share) and noise of each half. Times are made up the same way where they are asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .records import SCHEMA, Observation, Provenance, Real, Simulated, State, What
from .store import Store, schema_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Planted", "Setting", "action_space", "observations", "table", "write"]


@dataclass(frozen=True)
class Planted:
    """An action whose damage is known."""

    what: What
    share: float  #: of dense 16-bit rows
    kl: float  #: nats per token, true
    time: float | None = None  #: decode step over that of the dense cache, true


@dataclass(frozen=True)
class Setting:
    """How much is measured, and how noisily."""

    domains: tuple[str, ...] = ("prose", "code", "dialogue")
    documents: int = 10  #: of each domain
    contexts: tuple[int, ...] = (1024,)
    seeds: int = 1
    token_noise: float = 0.0  #: standard deviation of a half's mean KL, nats per token
    document_noise: float = 0.0  #: of an action on a document, the same on both halves
    tail: float = 3.0  #: 95th percentile over mean; below 4 the score has no term for it
    seed: int = 0
    mlx_lm: str = "0.0.1"

    @property
    def states(self) -> int:
        return len(self.domains) * self.documents * len(self.contexts) * self.seeds


def action_space(size: int, *, capabilities: int = 6, ceiling: int = 2, seed: int = 0) -> list[Planted]:
    """About ``size`` actions: natives at four sizes, then methods of rising rung on a grid of bytes, three placebos.

    Each capability makes what needs it a little better, so that rungs differ.
    """
    rng = np.random.default_rng(seed)
    found = [Planted(What("keep"), 1.0, 0.0, 1.0)]
    for bits, kl in ((8, 0.002), (6, 0.01), (4, 0.08), (2, 1.5)):
        found.append(Planted(What(f"native:{bits}"), (bits + 0.5) / 16, kl, 1.1))
    for i in range(3):
        for share in (0.5, 0.25, 0.125, 0.0625):
            found.append(
                Planted(What(f"random:{share},seed={i}", 1, ("ROW_GATHER",), "placebo"), share, 0.4 / share)
            )
    for i in range(ceiling):
        for share in (0.5, 0.25, 0.125, 0.0625):
            found.append(
                Planted(What(f"oracle:{i}@{share}", 2, ("FUTURE",), "ceiling"), share, 0.004 / share)
            )
    names = [f"CAPABILITY_{i}" for i in range(capabilities)]
    number = 0
    while len(found) < size:
        rung = 1 + number % 3
        own = names[(rung - 1) * capabilities // 3 : rung * capabilities // 3]
        needs = (
            tuple(sorted(rng.choice(own, size=min(len(own), 1 + number % 2), replace=False).tolist()))
            if own
            else ()
        )
        share = float(rng.choice([0.5, 0.27, 0.25, 0.125, 0.0625]))
        kl = float(0.02 / share / rung * rng.uniform(1, 3))
        found.append(
            Planted(What(f"method{number}@{share}", rung, needs), share, kl, float(rng.uniform(0.8, 1.4)))
        )
        number += 1
    return found[:size]


_ORIGIN = Provenance(
    source="campaign",
    run="synthetic",
    made="1970-01-01T00:00:00Z",
    model_name="synthetic",
    text_sha256="0" * 64,
    tokens_sha256="0" * 64,
    device="none",
    machine="none",
    mlx="0",
    mlx_lm="0",
    lumina_cache="0",
)


def table(planted: Sequence[Planted], setting: Setting, execution_state: str = "simulated") -> pa.Table:
    """Observations of every action in every state, as columns of a data set; a million take some seconds."""
    import pyarrow as pa

    columns = _columns(planted, setting, execution_state)
    return pa.table(columns, schema=schema_of(execution_state))


def observations(
    planted: Sequence[Planted], setting: Setting, kind: type[Real] | type[Simulated] = Simulated
) -> list[Observation]:
    """The same as objects."""
    from .records import from_row

    return [
        from_row(row, kind.execution_state)
        for row in table(planted, setting, kind.execution_state).to_pylist()
    ]


def write(
    store: Store,
    planted: Sequence[Planted],
    setting: Setting,
    execution_state: str = "simulated",
    parts: int = 1,
) -> None:
    """Add the observations to ``store`` as ``parts`` part files."""
    rows = table(planted, setting, execution_state)
    size = -(-rows.num_rows // parts)
    for first in range(0, rows.num_rows, size):
        store.append_table(execution_state, rows.slice(first, size))


def _columns(planted: Sequence[Planted], setting: Setting, execution_state: str) -> dict[str, Any]:
    import pyarrow as pa

    rng = np.random.default_rng(setting.seed)
    origin = replace(_ORIGIN, mlx_lm=setting.mlx_lm)
    documents = [(f"{d}:{i}", d) for d in setting.domains for i in range(setting.documents)]
    states = [
        State("synthetic", name, domain, context, "decode", seed, 128)
        for context in setting.contexts
        for name, domain in documents
        for seed in range(setting.seeds)
    ]
    n, actions = len(states), len(planted)
    rows = n * actions
    # A state's documents share their noise over seeds and contexts no more than texts do: drawn for each state.
    true = np.repeat([p.kl for p in planted], n)
    apart = rng.normal(0.0, setting.document_noise, rows) if setting.document_noise else np.zeros(rows)
    halves = [
        true + apart + (rng.normal(0.0, setting.token_noise, rows) if setting.token_noise else 0.0)
        for _ in (0, 1)
    ]
    mean = (halves[0] + halves[1]) / 2
    shares = np.repeat([p.share for p in planted], n)
    times = np.repeat([np.nan if p.time is None else p.time for p in planted], n)

    def of_state(values: Sequence[Any]) -> Any:
        return pa.array(list(values) * actions)

    def of_action(values: Sequence[Any], kind: Any) -> Any:
        return pa.array(list(values), type=kind).take(pa.array(np.repeat(np.arange(actions), n)))

    def same(value: Any) -> Any:
        return pa.array([value] * rows)

    def number(values: Any) -> Any:
        return pa.array(np.asarray(values, dtype=np.float64), from_pandas=True)

    dense = 1 << 20
    return {
        "schema": pa.array(np.full(rows, SCHEMA, dtype=np.int32)),
        "id": pa.array(_ids(planted, states, origin, execution_state)),
        **{
            name: of_state([getattr(s, name) for s in states]).cast(
                schema_of(execution_state).field(name).type
            )
            for name in vars(states[0])
        },
        "action": of_action([p.what.action for p in planted], pa.string()),
        "rung": of_action([p.what.rung for p in planted], pa.int8()),
        "requires": of_action([list(p.what.requires) for p in planted], pa.list_(pa.string())),
        "role": of_action([p.what.role for p in planted], pa.string()),
        **{
            name: same(value) if value is not None else pa.nulls(rows, pa.string())
            for name, value in vars(origin).items()
        },
        "kl_mean": number(mean),
        "kl_p95": number(setting.tail * mean),
        "kl_half0": number(halves[0]),
        "kl_half1": number(halves[1]),
        "p95_half0": number(setting.tail * halves[0]),
        "p95_half1": number(setting.tail * halves[1]),
        "kl_spans": pa.ListArray.from_arrays(
            pa.array(np.arange(rows + 1) * 2, type=pa.int32()), number(np.stack(halves, axis=1).ravel())
        ),
        "top1": number(np.clip(1 - mean, 0, 1)),
        "nll_change": number(mean),
        "share16": number(shares),
        "share16_allocated": number(shares),
        "live": pa.array((shares * dense).astype(np.int64)),
        "allocated": pa.array((shares * dense).astype(np.int64)),
        "predicted_live": pa.nulls(rows, pa.int64()),
        "time_ratio": number(times),
        "time_low": number(times),
        "time_high": number(times),
        "take_seconds": pa.nulls(rows, pa.float64()),
    }


def _ids(
    planted: Sequence[Planted], states: Sequence[State], origin: Provenance, execution_state: str
) -> list[str]:
    """Ids as :attr:`Observation.id` makes them, without an object for each."""
    heads = [
        json.dumps([SCHEMA, execution_state, p.what.action], separators=(",", ":"))[:-1] for p in planted
    ]
    tails = [
        json.dumps([*vars(s).values(), origin.tokens_sha256, *origin.condition], separators=(",", ":"))[1:]
        for s in states
    ]
    return [hashlib.sha256(f"{head},{tail}".encode()).hexdigest() for head in heads for tail in tails]
