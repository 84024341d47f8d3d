"""From observations to one cell per action and document of a stratum: the only pass over all rows.

Written once in ibis, for whatever engine the tables come from. A *stratum* is all observations whose figures may be
compared: one model, context, phase and horizon, measured under the same conditions. Figures of a cell are means over the
states (seeds) of its document.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import AnalysisError
from ..policy import quality_points, time_points
from .resample import Array, Documents
from .store import ScoredTable, of_one_state

if TYPE_CHECKING:
    import ibis

__all__ = ["Cells", "Fact", "Missing", "Stratum", "cells_of", "strata_of"]


@dataclass(frozen=True, order=True)
class Stratum:
    """What observations have in common that may be compared."""

    model: str
    model_name: str
    context: int
    phase: str
    horizon: int
    source: str
    device: str
    machine: str
    mlx: str
    mlx_lm: str
    lumina_cache: str

    @property
    def label(self) -> str:
        return f"{self.model_name}, {self.context} tokens, {self.phase}, {self.device}, mlx-lm {self.mlx_lm}"

    def to_record(self) -> dict[str, Any]:
        return dict(vars(self)) | {"label": self.label}


_TAB = "\t"
_KEYS = tuple(f.name for f in fields(Stratum))


@dataclass(frozen=True)
class Fact:
    """What is known of an action besides its figures."""

    action: str
    rung: int
    requires: tuple[str, ...]
    role: str


@dataclass(frozen=True)
class Missing:
    """An action that is left out of every choice, because it was not measured everywhere."""

    action: str
    role: str
    rung: int
    documents: int  #: on which it was measured in every state
    of: int  #: documents of the stratum
    why: str

    def to_record(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class Cells:
    """The figures of a stratum's actions on all of its documents. Arrays have shape (actions, documents).

    Only actions that were measured in every state of every document are here; the others are in ``missing``.
    """

    stratum: Stratum
    execution_state: str
    facts: tuple[Fact, ...]
    documents: tuple[str, ...]
    resampling: Documents
    states: int  #: documents × seeds
    quality: Array  #: Q in points, shape (2, actions, documents): over even and odd blocks
    kl: Array  #: nats per token, shape (2, actions, documents)
    quality_whole: Array  #: Q over the whole horizon
    kl_whole: Array
    top1: Array
    nll_change: Array
    share: Array  #: share16, the largest of a document's states
    time: Array  #: T in points, NaN where it was not measured
    tail: bool  #: whether Q has its term for the tail
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]
    memo: dict[Any, Any] = field(
        default_factory=dict, repr=False
    )  #: what was worked out of these cells before

    @property
    def shares(self) -> Array:
        """Largest share16 of each action over the documents: what a budget has to cover, shape (actions,)."""
        found: Array = self.share.max(axis=1)
        return found


def strata_of(table: ScoredTable) -> list[Stratum]:
    """All strata of a table.

    Raises:
        MixedExecutionStateError: not a table of real or of simulated observations.
    """
    of_one_state(table)
    found = table.table.select(*_KEYS).distinct().to_pyarrow().to_pylist()
    return sorted(Stratum(**row) for row in found)


def cells_of(table: ScoredTable, stratum: Stratum, *, draws: int = 10_000, seed: int = 0) -> Cells:
    """Reduce the observations of one stratum.

    Raises:
        MixedExecutionStateError: not a table of real or of simulated observations.
        AnalysisError: the table has no such stratum.
    """
    of_one_state(table)
    here = table.table.filter(*(table.table[k] == getattr(stratum, k) for k in _KEYS))
    found = _reduced(here).to_pyarrow()
    if not found.num_rows:
        raise AnalysisError(f"no observation of {stratum.label}")
    facts, notes = _facts(here)
    return _assembled(table.execution_state, stratum, found, facts, notes, draws, seed)


def _reduced(here: ibis.Table) -> ibis.Table:
    import ibis

    rows = here.mutate(
        q0=quality_points(here.kl_half0, here.p95_half0, ibis.greatest),
        q1=quality_points(here.kl_half1, here.p95_half1, ibis.greatest),
        q=quality_points(here.kl_mean, here.kl_p95, ibis.greatest),
        t=time_points(here.time_ratio, lambda ratio: ratio.ln()),
        text=here.document + "\t" + here.tokens_sha256,
    )
    return rows.group_by("action", "text").aggregate(
        states=rows.count(),
        halves=rows.kl_half1.count(),
        tails=rows.p95_half1.count(),
        domain=rows.domain.min(),
        domains=rows.domain.nunique(),
        q0=rows.q0.mean(),
        q1=rows.q1.mean(),
        kl0=rows.kl_half0.mean(),
        kl1=rows.kl_half1.mean(),
        q=rows.q.mean(),
        kl=rows.kl_mean.mean(),
        top1=rows.top1.mean(),
        nll_change=rows.nll_change.mean(),
        share=rows.share16.max(),
        t=rows.t.mean(),
    )


def _facts(here: ibis.Table) -> tuple[dict[str, Fact], list[str]]:
    """Facts by action; an action of which two things are said is in the notes instead."""
    joined = here.mutate(needs=here.requires.join("\n"))
    found = joined.group_by("action").aggregate(
        rung=joined.rung.min(),
        rung_last=joined.rung.max(),
        role=joined.role.min(),
        role_last=joined.role.max(),
        needs=joined.needs.min(),
        needs_last=joined.needs.max(),
    )
    facts: dict[str, Fact] = {}
    notes: list[str] = []
    for r in found.to_pyarrow().to_pylist():
        if (r["rung"], r["role"], r["needs"]) != (r["rung_last"], r["role_last"], r["needs_last"]):
            notes.append(f"{r['action']}: rung, role or requirements differ between observations; left out")
            continue
        needs = tuple(n for n in (r["needs"] or "").split("\n") if n)
        facts[r["action"]] = Fact(r["action"], int(r["rung"]), needs, r["role"])
    return facts, sorted(notes)


def _assembled(
    execution_state: str,
    stratum: Stratum,
    found: Any,
    facts: dict[str, Fact],
    notes: list[str],
    draws: int,
    seed: int,
) -> Cells:
    actions, row = _coded(found, "action")
    documents, column = _coded(found, "text")
    size = len(actions), len(documents)

    def grid(name: str) -> Array:
        out = np.full(size, np.nan)
        out[row, column] = found[name].to_numpy(zero_copy_only=False)
        return out

    states = np.nan_to_num(grid("states"))
    expected = states.max(axis=0)
    complete = (states == expected).all(axis=1)
    halved = (np.nan_to_num(grid("halves")) == expected).all(axis=1)
    usable = np.array([a in facts for a in actions]) & complete & halved
    order = sorted(
        np.flatnonzero(usable).tolist(), key=lambda i: (facts[actions[i]].rung, actions[i])
    )  # a tie goes to the lower rung
    missing = [
        Missing(
            actions[i],
            facts[actions[i]].role,
            facts[actions[i]].rung,
            int((states[i] == expected).sum()),
            size[1],
            "not measured in every state" if not complete[i] else "no figures of both halves of the tokens",
        )
        for i in range(size[0])
        if actions[i] in facts and not usable[i]
    ]
    domains = [""] * size[1]
    for where, name, several in zip(
        column.tolist(), found["domain"].to_pylist(), found["domains"].to_pylist(), strict=True
    ):
        if several > 1 or domains[where] not in ("", name):
            notes.append(f"{documents[where].split(_TAB)[0]}: is said to be of several domains")
        domains[where] = name
    names, more = _named(documents)
    notes = [*dict.fromkeys(notes), *more]
    kept = np.array(order, dtype=np.int64)
    tail = bool((grid("tails")[kept] == expected).all()) if order else True
    if not tail:
        notes.append(
            "no 95th percentile of both halves of the tokens: Q is the mean's term alone, for all actions"
        )
    kl = np.stack([grid("kl0"), grid("kl1")])[:, kept]
    quality = np.stack([grid("q0"), grid("q1")])[:, kept] if tail else np.asarray(quality_points(kl))
    return Cells(
        stratum=stratum,
        execution_state=execution_state,
        facts=tuple(facts[actions[i]] for i in order),
        documents=tuple(names),
        resampling=Documents(domains, draws=draws, seed=seed),
        states=int(expected.sum()),
        quality=quality,
        kl=kl,
        quality_whole=grid("q")[kept] if tail else np.asarray(quality_points(grid("kl")[kept])),
        kl_whole=grid("kl")[kept],
        top1=grid("top1")[kept],
        nll_change=grid("nll_change")[kept],
        share=grid("share")[kept],
        time=grid("t")[kept],
        tail=tail,
        missing=tuple(sorted(missing, key=lambda m: (m.rung, m.action))),
        notes=tuple(notes),
    )


def _coded(found: Any, name: str) -> tuple[list[str], Any]:
    """Distinct values, sorted, and the number of each row's among them."""
    import pyarrow.compute as pc

    column = found[name].combine_chunks()
    values = sorted(pc.unique(column).to_pylist())
    place = {v: i for i, v in enumerate(values)}
    encoded = column.dictionary_encode()
    codes = np.array([place[v] for v in encoded.dictionary.to_pylist()], dtype=np.int64)
    return values, codes[encoded.indices.to_numpy(zero_copy_only=False)]


def _named(documents: list[str]) -> tuple[list[str], list[str]]:
    """Names of documents; two texts of one name are two documents, told apart by the first digits of their hash."""
    texts: dict[str, list[str]] = {}
    for one in documents:
        name, _, text = one.partition(_TAB)
        texts.setdefault(name, []).append(text)
    names = [
        name if len(texts[name]) == 1 else f"{name} ({text[:8]})"
        for name, _, text in (one.partition(_TAB) for one in documents)
    ]
    notes = [f"{name}: {len(t)} different texts have this name" for name, t in texts.items() if len(t) > 1]
    return names, notes
