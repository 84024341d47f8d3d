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

__all__ = ["LEAST_MEASURED", "Cells", "Fact", "Missing", "Stratum", "cells_of", "strata_of"]


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

#: A document on which less than this share of the actions was measured is left out: its campaign was cut short there.
LEAST_MEASURED = 0.5

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

    Only actions that were measured in every state of every document are here; the others are in ``missing``. Documents
    on which less than LEAST_MEASURED of all actions was measured are left out before, and named in ``notes``.
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
    states = _states(here)
    return _assembled(table.execution_state, stratum, found, states, facts, notes, draws, seed)


def _reduced(here: ibis.Table) -> ibis.Table:
    import ibis

    rows = here.mutate(
        q0=quality_points(here.kl_half0, here.p95_half0, ibis.greatest),
        q1=quality_points(here.kl_half1, here.p95_half1, ibis.greatest),
        q=quality_points(here.kl_mean, here.kl_p95, ibis.greatest),
        t=time_points(here.time_ratio, lambda ratio: ratio.ln()),
        text=_text(here),
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


def _text(here: ibis.Table) -> Any:
    """A document by name and tokens."""
    return here.document + _TAB + here.tokens_sha256


def _states(here: ibis.Table) -> dict[str, int]:
    """Document → states in which anything was measured on it."""
    named = here.select(text=_text(here), seed=here.seed)
    found = named.group_by("text").aggregate(states=named.seed.nunique()).to_pyarrow()
    return dict(zip(found["text"].to_pylist(), found["states"].to_pylist(), strict=True))


def _facts(here: ibis.Table) -> tuple[dict[str, Fact], list[str]]:
    """Facts by action; an action of which two things are said is in the notes instead.

    An action that one rung executes on some documents and only a deeper one on others is of the deeper one: the former
    does not execute it everywhere.
    """
    joined = here.mutate(needs=here.requires.join("\n"))
    found = joined.group_by("action").aggregate(
        rung=joined.rung.max(),
        rung_first=joined.rung.min(),
        role=joined.role.min(),
        role_last=joined.role.max(),
        needs=joined.needs.min(),
        needs_last=joined.needs.max(),
    )
    facts: dict[str, Fact] = {}
    notes: list[str] = []
    for r in found.to_pyarrow().to_pylist():
        if (r["role"], r["needs"]) != (r["role_last"], r["needs_last"]):
            notes.append(f"{r['action']}: role or requirements differ between observations; left out")
            continue
        if r["rung"] != r["rung_first"]:
            notes.append(
                f"{r['action']}: carried out at rungs {r['rung_first']} to {r['rung']}; counts as the deepest"
            )
        needs = tuple(n for n in (r["needs"] or "").split("\n") if n)
        facts[r["action"]] = Fact(r["action"], int(r["rung"]), needs, r["role"])
    return facts, sorted(notes)


class _Grid:
    """Columns of the reduced observations as arrays of shape (actions, documents); NaN where nothing was measured."""

    def __init__(self, found: Any) -> None:
        self.actions, self._row = _coded(found, "action")
        self.documents, self._column = _coded(found, "text")
        self._found = found

    def __getitem__(self, name: str) -> Array:
        out = np.full((len(self.actions), len(self.documents)), np.nan)
        values = self._found[name].to_numpy(zero_copy_only=False).astype(np.float64)
        out[self._row, self._column] = _rounded(values)
        return out

    def domains(self) -> tuple[list[str], list[str]]:
        """The domain of each document, and a note for each document of several."""
        domains = [""] * len(self.documents)
        notes = dict[str, None]()
        columns = (self._column.tolist(), *(self._found[c].to_pylist() for c in ("domain", "domains")))
        for where, name, several in zip(*columns, strict=True):
            if several > 1 or domains[where] not in ("", name):
                notes[f"{self.documents[where].split(_TAB)[0]}: is said to be of several domains"] = None
            domains[where] = name
        return domains, list(notes)


def _rounded(values: Array) -> Array:
    """To 12 significant digits: engines add in any order, and equals should stay equal."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (11 - np.floor(np.log10(np.abs(values))))
        found: Array = np.where(np.isfinite(scale) & (scale != 0), np.round(values * scale) / scale, values)
    return found


def _assembled(
    execution_state: str,
    stratum: Stratum,
    found: Any,
    states_of: dict[str, int],
    facts: dict[str, Fact],
    notes: list[str],
    draws: int,
    seed: int,
) -> Cells:
    grid = _Grid(found)
    expected = np.array([states_of[d] for d in grid.documents])
    there = np.nan_to_num(grid["states"]) == expected
    halves = np.nan_to_num(grid["halves"]) == expected
    known = np.array([a in facts for a in grid.actions])
    begun = there.mean(axis=0) < LEAST_MEASURED
    documents = np.flatnonzero(~begun)
    usable = known & (there & halves)[:, documents].all(axis=1) & (documents.size > 0)
    # Ties go to the first of equals, hence to the lower rung.
    order = sorted(
        np.flatnonzero(usable).tolist(), key=lambda i: (facts[grid.actions[i]].rung, grid.actions[i])
    )
    kept = np.ix_(np.array(order, dtype=np.int64), documents)
    tail = bool((grid["tails"][kept] == expected[documents]).all())
    domains, more = grid.domains()
    names, still_more = _named(grid.documents)
    notes = [*notes, *more, *still_more]
    for i in np.flatnonzero(begun):
        measured = f"{int(there[:, i].sum())} of {len(grid.actions)} actions were measured on it"
        notes.append(f"{names[i]}: left out, as {measured} in every state")
    if not tail:
        notes.append(
            "no 95th percentile of both halves of the tokens: Q is the mean's term alone, for all actions"
        )
    kl = np.stack([grid["kl0"][kept], grid["kl1"][kept]])
    quality = np.stack([grid["q0"][kept], grid["q1"][kept]])
    return Cells(
        stratum=stratum,
        execution_state=execution_state,
        facts=tuple(facts[grid.actions[i]] for i in order),
        documents=tuple(names[i] for i in documents),
        resampling=Documents([domains[i] for i in documents], draws=draws, seed=seed),
        states=int(expected[documents].sum()),
        quality=quality if tail else np.asarray(quality_points(kl)),
        kl=kl,
        quality_whole=grid["q"][kept] if tail else np.asarray(quality_points(grid["kl"][kept])),
        kl_whole=grid["kl"][kept],
        top1=grid["top1"][kept],
        nll_change=grid["nll_change"][kept],
        share=grid["share"][kept],
        time=grid["t"][kept],
        tail=tail,
        missing=_missing(grid.actions, facts, there[:, documents], usable),
        notes=tuple(notes),
    )


def _missing(actions: list[str], facts: dict[str, Fact], there: Any, usable: Any) -> tuple[Missing, ...]:
    found = []
    for i, action in enumerate(actions):
        if action in facts and not usable[i]:
            why = (
                "no figures of both halves of the tokens" if there[i].all() else "not measured in every state"
            )
            fact = facts[action]
            found.append(Missing(action, fact.role, fact.rung, int(there[i].sum()), there.shape[1], why))
    return tuple(sorted(found, key=lambda m: (m.rung, m.action)))


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
