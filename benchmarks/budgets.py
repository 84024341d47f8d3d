"""A budget against hindsight: the adaptive policy, the best single action afterwards, and mlx-lm's own options.

    python benchmarks/budgets.py --out budgets.json [--domains prose code dialogue] [--context 4096] [--quick]
    python benchmarks/budgets.py --result budgets.json [--page docs/budgets.md]

For one document of each domain, with passages to copy and pairs to look up planted in its context:

- *adaptive*: ``LuminaCache(model, budget=…)`` reads the context in chunks and holds the budget from its first row on;
- *fixed*: one action on the cache that holds the whole context, solved for the same bytes after the scored tokens. It has
  seen everything before it drops anything, and had the memory for it: what it scores is out of reach for a cache that
  must keep to the budget all along. The *oracle* is the best of them by measured score, chosen afterwards;
- *mlx-lm*: its packed and its rotating cache, on the same terms as *fixed*.

Then 64 tokens are teacher-forced, passages copied, pairs looked up, and decode steps timed beside the full cache's. The
score is that of the policy, from measured figures: Q of the KL; T of (processor seconds of the prompt, and of the action,
and 256 decode steps at the measured ratio) over the same of the dense cache; R = 100 where more than the budget is held.

There are two yardsticks: text that only goes on (``recall=0``: KL of the 64 tokens), and text of which half is copied
(``recall=0.5``, the policy's default: mean of that and of the KL of the copied passages). The adaptive cache is measured
as somebody makes it who says nothing but the budget, and as somebody does who says how long prompt and answer get and
which of the two it is.

The budget is a share of what mlx-lm's dense cache takes at the end, in float32: half of it is the whole of a 16-bit cache.
Run again with the same ``--out``, it goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lumina_cache.lab.blas import preload_openblas

preload_openblas()

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache  # noqa: E402

from lumina_cache import LuminaCache  # noqa: E402
from lumina_cache.actions import Action, Composite, Evict, Quantize, parse_action  # noqa: E402
from lumina_cache.apply import held_all  # noqa: E402
from lumina_cache.backend.capabilities import Rung  # noqa: E402
from lumina_cache.estimate import after_action, after_append, dense_row_nbytes, merge_equal, nbytes_allocated  # noqa: E402
from lumina_cache.lab.compare import kl_and_agreement, percentile  # noqa: E402
from lumina_cache.lab.evaluate.documents import DOMAINS, EvalDocument, select  # noqa: E402
from lumina_cache.lab.evaluate.measure import Bench, _copied, hits, log_probabilities, nll, read_prompt  # noqa: E402
from lumina_cache.lab.evaluate.plan import Plan  # noqa: E402
from lumina_cache.lab.evaluate.provenance import conditions, provenance  # noqa: E402
from lumina_cache.lab.evaluate.storage import stored  # noqa: E402
from lumina_cache.lab.evaluate.subjects import (  # noqa: E402
    OwnAction,
    Refused,
    StockQuantized,
    StockRotating,
    Subject,
)
from lumina_cache.lab.evaluate.tasks import planted  # noqa: E402
from lumina_cache.lab.models import LoadedModel, load_model  # noqa: E402
from lumina_cache.pages import update_page  # noqa: E402
from lumina_cache.policy import Inputs, Limit, State, score  # noqa: E402
from lumina_cache.policy.candidates import next_layers  # noqa: E402

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
LEAST_USED = 0.4
CONTEXT, CHUNK, HORIZON = 4096, 256, 256
SCORED, TIMED = 64, 6
RECALLS = (0.5, 0.0)
YARDSTICKS = {0.5: "Half of what follows is copied", 0.0: "The text only goes on"}
RUNGS = (Rung.CACHE, Rung.HOOK)
#: What can be measured apart, into the same file.
KINDS = ("adaptive", "told", "fixed")
#: What tells one record from another.
PLACE = ("document", "share", "rung", "what", "family")

CODECS = (
    "quant:affine,bits=8,group=64",
    "quant:affine_fetch,bits=8,group=64",
    "quant:affine_fetch,kbits=8,vbits=4,group=64",
    "quant:kivi_hadamard,bits=4,group=64",
    "quant:kivi_hadamard,kbits=4,vbits=3,group=64",
    "quant:hadamard,bits=4,group=64",
    "quant:affine,bits=4,group=64",
    "quant:kivi_hadamard,bits=3,group=64",
)
#: Those that evictions are joined with, where they do not fit by themselves.
JOINED = (
    "quant:kivi_hadamard,kbits=4,vbits=3,group=64",
    "quant:hadamard,bits=4,group=64",
)
SCORERS = {Rung.CACHE: ("sinks_window", "query_bank"), Rung.HOOK: ("h2o_mean",)}
#: At rung hook: served by the library's own attention, and otherwise what the same codec at rung cache is.
SERVED = (
    "quant:kivi_packed,bits=8,group=64",
    "quant:kivi_hadamard_packed,bits=4,group=64",
    "quant:hadamard_packed,bits=4,group=64",
    "quant:kivi_packed,bits=3,group=64",
)
STOCK_BITS = (8, 4)


@dataclass(frozen=True)
class Fixed:
    """An action solved for a budget, and the family that it stands for at every budget."""

    family: str
    subject: Subject
    rung: Rung


def codec(text: str) -> Quantize:
    action = parse_action(text)
    assert isinstance(action, Quantize)
    return action


def rows_that_fit(state: State, joined: str | None) -> int:
    """Rows that an eviction, and a codec after it, may leave to stay within the limit; all of them where none need go."""
    limit, held = state.limit.nbytes, max(one.rows for one in state.layers)
    assert limit is not None
    room = limit

    def fits(rows: int) -> bool:
        parts: list[Action] = [Evict("sinks_window", rows=rows)] if rows < held else []
        parts += [] if joined is None else [codec(joined)]
        layers = state.layers
        for part in parts:
            layers = after_action(layers, part, state.protect)
        return nbytes_allocated(next_layers(layers, state.tokens)) <= room

    if fits(held):
        return held
    low, high = 0, held
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def nbytes_as(state: State, text: str) -> int:
    """Bytes of all rows in a codec, after the coming tokens."""
    return nbytes_allocated(next_layers(after_action(state.layers, codec(text), state.protect), state.tokens))


def solved(state: State, rung: Rung) -> Iterator[Fixed]:
    """What holds the limit of ``state`` by one action of the grid."""
    limit = state.limit.nbytes
    assert limit is not None
    held = max(one.rows for one in state.layers)
    most = {text: rows_that_fit(state, text) for text in (None, *CODECS, *SERVED)}
    fits = {text: rows >= held for text, rows in most.items()}
    if fits[None]:
        yield Fixed("keep", OwnAction(parse_action("keep")), rung)
    # With room for everything only what is fastest, or least harmful, is of interest.
    codecs = (
        SERVED if rung is Rung.HOOK else CODECS[:2] if limit >= nbytes_allocated(state.layers) else CODECS
    )
    for text in codecs:
        # What takes far less than it may is another budget's best, unless mlx-lm's own attention reads it packed.
        if fits[text] and (nbytes_as(state, text) >= LEAST_USED * limit or text.startswith("quant:affine,")):
            yield Fixed(text, OwnAction(codec(text)), rung)
    for joined in (None, *(text for text in JOINED if not fits[text])):
        rows = most[joined]
        if not 0 < rows < held:
            continue
        for scorer in SCORERS[rung]:
            action: Action = Evict(scorer, rows=rows, recent=0 if scorer == "sinks_window" else rows // 4)
            if joined is not None:
                action = Composite((action, codec(joined)))
            family = f"evict:{scorer}" + ("" if joined is None else f"+{joined}")
            yield Fixed(family, OwnAction(action), rung)


def stock(state: State) -> Iterator[Fixed]:
    """What mlx-lm's own options hold within the limit of ``state``."""
    limit, held = state.limit.nbytes, max(one.rows for one in state.layers)
    assert limit is not None
    dense = nbytes_allocated([replace(one, capacity=one.rows) for one in state.layers])
    for bits in STOCK_BITS:
        # (b + 32/g) bits per element, in steps of 256 rows
        rows = -(-(held + state.tokens) // 256) * 256
        if dense / held * rows * (bits + 64 / 64) / (8 * state.layers[0].itemsize) <= limit:
            yield Fixed(f"mlx-lm:kv_bits={bits}", StockQuantized(bits, 64), Rung.NATIVE)
    rows = int(limit * held / dense)
    if rows < held:
        yield Fixed("mlx-lm:max_kv_size", StockRotating(rows=rows), Rung.NATIVE)


class Trial(Bench):
    """One document whose context has everything planted in it, so that one prompt serves all questions."""

    @classmethod
    def of(cls, loaded: LoadedModel, document: EvalDocument, index: int, settings: Plan) -> Trial:
        asks = planted(document, loaded.tokenizer, settings, index)
        filled = replace(document, tokens=(*asks.context, *document.tokens[document.context :]))
        observe = tuple(SCORERS[Rung.HOOK])
        trial = cls(
            loaded.model,
            loaded.tokenizer,
            filled,
            replace(settings, tests=("T1",)),
            index,
            rungs=RUNGS,
            observe=observe,
        )
        trial.asks = asks
        trial.copied = [trial._copy(trial.full, one) for one in asks.copies]
        trial.looked_up = [trial._lookup(trial.full, one) for one in asks.lookups]
        return trial

    def dense_prompt(self) -> tuple[float, int]:
        """Processor seconds of reading the context with mlx-lm's own cache, and the peak of memory over before."""
        with watched() as seen:
            read_prompt(self.model, make_prompt_cache(self.model), self.task.context, self.plan.chunk)
        return seen["seconds"], seen["peak"]

    def own_figures(self) -> dict[str, Any]:
        """The full cache's own answers."""
        right = [c == q.answer for c, q in zip(self.looked_up, self.asks.lookups, strict=True)]
        return {
            "T1": self.reference["T1"],
            "copy_accuracy": statistics.fmean(map(hits, self.copied, (c.expected for c in self.asks.copies))),
            "lookup_accuracy": statistics.fmean(right) if right else None,
        }

    def state(self, limit: int) -> State:
        """The full cache, about to take as many tokens as are scored."""
        each = held_all(self.full)
        return State("decode", self.plan.scored, merge_equal(each), limit, Limit(limit, "the budget"), each)

    def copies(self, cache: Any) -> dict[str, Any]:
        """What is copied, and its KL to the full cache's copies."""
        found = self._copies(cache)
        return {"copy_kl": found["kl_mean"], "copy_accuracy": found["accuracy"]}

    def lookups(self, cache: Any) -> dict[str, Any]:
        """What is looked up."""
        return {"lookup_accuracy": self._lookups(cache)["accuracy"]} if self.asks.lookups else {}

    @property
    def row_nbytes(self) -> int:
        """Bytes of one dense row in all layers."""
        return sum(dense_row_nbytes(one) for one in held_all(self.full))

    def answers(self, cache: Any, budget: int, *, one_by_one: bool) -> dict[str, Any]:
        """Everything that is asked of a changed cache, and what it holds afterwards. ``cache`` is fed.

        Args:
            one_by_one: feed the continuation as decoding would, for a cache that acts as it goes.
        """
        found: dict[str, Any] = {"time": self._steps_beside_full(cache)}
        block = 1 if one_by_one else self.plan.block
        fed, expected = self.task.fed, self.task.expected
        start = time.perf_counter()
        tried = log_probabilities(self.model, cache, fed, block, split=self.split)
        found["seconds"] = time.perf_counter() - start
        kl, same = kl_and_agreement(self.continued, tried)
        found["T1"] = {
            "kl_mean": float(kl.mean()),
            "kl_p95": percentile(kl, 0.95),
            "top1": float(same.mean()),
            "nll_change": nll(tried, expected) - self.reference["T1"]["nll"],
        }
        found["nbytes"] = stored(cache).allocated
        # mlx-lm's rotating cache holds more by the tokens that are fed at once, less one.
        beyond = (block - 1) * self.row_nbytes if isinstance(cache[0], RotatingKVCache) else 0
        found["over"] = found["nbytes"] - beyond > budget
        return found

    def _steps_beside_full(self, cache: Any) -> dict[str, float]:
        """Processor seconds of decode steps, the full cache and this one taking turns: medians, and of the ratios."""
        spent: dict[str, list[float]] = {"full": [], "changed": []}
        with _copied(self._at(Rung.CACHE, False)) as full, _copied(cache) as changed:
            both = (("full", full), ("changed", changed))
            for i, token in enumerate(self.task.fed[: self.plan.timed_steps]):
                for name, one in both if i % 2 == 0 else both[::-1]:
                    start = time.process_time()
                    mx.eval(self.model(mx.array([[token]]), cache=one)[:, -1])
                    spent[name].append(time.process_time() - start)
        ratios = [b / a for a, b in zip(spent["full"], spent["changed"], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return {"ratio": ratio, "low": low, "high": high, "full": statistics.median(spent["full"])}

    def step_seconds(self) -> float:
        """Processor seconds of a decode step of the full cache (median)."""
        return self._steps_beside_full(self._at(Rung.CACHE, False))["full"]


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Processor seconds, and the peak of memory over what was there before (bytes)."""
    seen: dict[str, Any] = {}
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.process_time()
    yield seen
    seen["seconds"] = time.process_time() - start
    seen["peak"] = mx.get_peak_memory() - before


def scored(figures: Mapping[str, Any], dense_prompt: float, step: float, recall: float) -> dict[str, float]:
    """Score of measured figures. T: the prompt, what was done, and the horizon's steps."""
    prompt = figures.get("prompt_seconds", dense_prompt) + figures.get("action_seconds", 0.0)
    t = prompt + HORIZON * step * figures["time"]["ratio"]
    inputs = Inputs(
        nbytes_next=1 + figures["over"],
        nbytes_peak=0,
        limit=1,
        memory=None,
        kl=(1 - recall) * figures["T1"]["kl_mean"] + recall * figures["asked"]["copy_kl"],
        p95=figures["T1"]["kl_p95"],
        lost_kl=None,
        lost_p95=None,
        source="measured",
        # One step that takes as long as all of it, over one of the dense cache's.
        time_ratio=t / (dense_prompt + HORIZON * step),
        step_seconds=dense_prompt + HORIZON * step,
        own_seconds=0.0,
    )
    return dict(score(inputs).to_record())


def adaptive(trial: Trial, budget: int, rung: Rung, told: float | None) -> dict[str, Any]:
    """The budget held from the first row on.

    Args:
        told: how much is copied, beside how long the text gets; None: the cache is told nothing but the budget.
    """
    horizon = len(trial.task.context) + trial.plan.scored
    knows: dict[str, Any] = {} if told is None else {"recall": told, "horizon": horizon}
    most, over = 0, 0
    with LuminaCache(trial.model, budget=budget, telemetry=False, rung=rung, **knows) as cache:
        tokens, chunk = trial.task.context, trial.plan.chunk
        start = time.perf_counter()
        with watched() as seen:
            for i in range(0, len(tokens), chunk):
                trial.model(mx.array(tokens[i : i + chunk])[None], cache=cache)
                mx.eval([entry.state for entry in cache])
                held = cache.observe().nbytes_allocated
                most, over = max(most, held), over + (held > budget)
        took = time.perf_counter() - start
        record = {
            "prompt_seconds": seen["seconds"],
            "peak": seen["peak"],
            "held_most": most,
            "chunks_over": over,
            "asked": {**trial.copies(cache), **trial.lookups(cache)},
            **trial.answers(cache, budget, one_by_one=True),
        }
        decisions = [r for r in cache.log.records if r["event"] == "decision"]
        record["actions"] = [r["chosen"] for r in decisions if r["chosen"] != "keep"]
        record["decisions"] = len(decisions)
        record["decision_seconds"] = sum(r["seconds"] for r in decisions)
        record["rows"] = max(one.rows for one in cache.observe().layers)
        record["run_seconds"] = took + record["seconds"]
    return record


@contextmanager
def changed(trial: Trial, one: Fixed) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A copy of the full cache with the action taken, and what taking it took.

    Raises:
        Refused: it cannot be carried out.
    """
    full = trial._at(one.rung if one.rung in RUNGS else Rung.CACHE, False)
    with watched() as seen:
        taken = one.subject.take(full, trial.model)
    try:
        yield (
            taken.cache,
            {"action": one.subject.text, "action_seconds": seen["seconds"], "peak": seen["peak"]},
        )
    finally:
        if isinstance(taken.cache, LuminaCache):
            taken.cache.close()


def fixed(trial: Trial, budget: int, one: Fixed) -> dict[str, Any]:
    """One action on a copy of the full cache."""
    with changed(trial, one) as (cache, figures):
        asked = trial.copies(cache)
        return {**figures, "asked": asked, **trial.answers(cache, budget, one_by_one=False)}


def asked_of(trial: Trial, one: Fixed) -> dict[str, Any]:
    """What it still looks up; asked of those alone that turned out best."""
    with changed(trial, one) as (cache, figures):
        return {"action": figures["action"], "asked": trial.lookups(cache)}


# -- all of it ------------------------------------------------------------------------------------------------------


def run(
    loaded: LoadedModel,
    documents: Sequence[EvalDocument],
    settings: Plan,
    out: Path,
    kinds: Sequence[str] = KINDS,
) -> list[dict[str, Any]]:
    """Measure what is not in the file yet, a line for each."""
    unfinished = out.with_name(out.name + ".partial")
    header = {"conditions": conditions(loaded), "settings": settings.to_record(), "shares": list(SHARES)}
    records = _known(unfinished, header)
    done = {tuple(r[key] for key in PLACE) for r in records}
    with unfinished.open("a") as file:

        def add(record: dict[str, Any]) -> None:
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            totals = {recall: round(one["total"], 2) for recall, one in record.get("scores", {}).items()}
            print(*(record[key] for key in PLACE), *totals.items(), flush=True)

        if not records:
            file.write(json.dumps(header) + "\n")
        for index, document in enumerate(documents):
            _one(loaded, document, index, settings, kinds, done, records, add)
    return records


def _known(path: Path, header: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    first, *lines = path.read_text().splitlines()
    if json.loads(first) != json.loads(json.dumps(header)):
        raise SystemExit(f"{path} was made under other conditions: give another --out, or remove it")
    return [json.loads(line) for line in lines]


def _what(one: Fixed) -> str:
    return "mlx-lm" if one.rung is Rung.NATIVE else "fixed"


def _chosen(records: Sequence[Mapping[str, Any]], document: str, share: float, one: Fixed) -> bool:
    """Whether it is the best of its budget: of mlx-lm's, at rung cache, or at rung hook."""
    rows = [
        r
        for recall in RECALLS
        for r in rows_of(records, recall)
        if r["document"] == document and r["share"] == share
    ]
    best = [r[who] for r in rows for who in ("oracle", "mlx-lm") if r[who] is not None]
    return any(b["family"] == one.family and b["rung"] == one.rung.name.lower() for b in best)


def _one(
    loaded: LoadedModel,
    document: EvalDocument,
    index: int,
    settings: Plan,
    kinds: Sequence[str],
    done: set[tuple[Any, ...]],
    records: Sequence[Mapping[str, Any]],
    add: Callable[[dict[str, Any]], None],
) -> None:
    trial = Trial.of(loaded, document, index, settings)
    base = {"document": document.name, "domain": document.domain}
    prompt, peak = trial.dense_prompt()
    full = trial.state(1 << 60)
    # As mlx-lm allocates them, in steps.
    nbytes = nbytes_allocated(after_append(full.layers, settings.scored))
    own = {**trial.own_figures(), "prompt_seconds": prompt, "peak": peak, "nbytes": nbytes}
    if (document.name, 1.0, "native", "full", "") not in done:
        add({**base, "share": 1.0, "rung": "native", "what": "full", "family": "", **own})
    step = trial.step_seconds()

    def take(share: float, rung: Rung, what: str, family: str, measure: Callable[[], dict[str, Any]]) -> None:
        if (document.name, share, rung.name.lower(), what, family) in done:
            return
        record = {**base, "share": share, "rung": rung.name.lower(), "what": what, "family": family}
        try:
            found = measure()
        except Refused as refusal:
            add({**record, "state": "backend_infeasible", "reasons": [dict(r) for r in refusal.reasons]})
            return
        if "T1" in found:
            found["scores"] = {str(recall): scored(found, prompt, step, recall) for recall in RECALLS}
        add({**record, "state": "real", **found})

    callers = [None] * ("adaptive" in kinds) + list(RECALLS) * ("told" in kinds)
    for told in callers:
        # With room for everything nothing is decided.
        for share in SHARES if told is None else SHARES[1:]:
            for rung in RUNGS:
                measure = partial(adaptive, trial, int(share * nbytes), rung, told)
                take(share, rung, *_caller(told), measure)
    for share in SHARES if "fixed" in kinds else ():
        budget = int(share * nbytes)
        state = trial.state(budget)
        grid = [*stock(state), *(one for rung in RUNGS for one in solved(state, rung))]
        for one in grid:
            take(share, one.rung, _what(one), one.family, partial(fixed, trial, budget, one))
        for one in grid:
            if _chosen(records, document.name, share, one):
                take(share, one.rung, "asked", one.family, partial(asked_of, trial, one))
    trial.close()


# -- the page ---------------------------------------------------------------------------------------------------------


def _total(record: Mapping[str, Any], recall: float) -> float:
    return float(record["scores"][str(recall)]["total"])


def _best(records: Iterable[Mapping[str, Any]], recall: float) -> Mapping[str, Any] | None:
    within = [r for r in records if r.get("state") == "real"]
    return max(within, key=lambda r: _total(r, recall), default=None)


def rows_of(records: Sequence[Mapping[str, Any]], recall: float) -> Iterator[dict[str, Any]]:
    """For every document, budget and rung: adaptive, the best fixed action at that rung or a lower one, mlx-lm's best."""
    for document in dict.fromkeys(r["document"] for r in records):
        mine = [r for r in records if r["document"] == document]
        for share in SHARES:
            here = [r for r in mine if r["share"] == share]
            for rung in RUNGS:
                names = {"cache"} if rung is Rung.CACHE else {"cache", "hook"}
                yield {
                    "document": document,
                    "share": share,
                    "rung": rung.name.lower(),
                    "adaptive": _best(_of_caller(here, rung, None), recall),
                    "told": _best(_of_caller(here, rung, recall), recall),
                    "oracle": _best((r for r in here if r["what"] == "fixed" and r["rung"] in names), recall),
                    "mlx-lm": _best((r for r in here if r["what"] == "mlx-lm"), recall),
                }


def _caller(told: float | None) -> tuple[str, str]:
    """What and family of a record of the adaptive cache."""
    return ("adaptive", "") if told is None else ("told", f"recall={told},horizon")


def _of_caller(
    records: Iterable[Mapping[str, Any]], rung: Rung, told: float | None
) -> list[Mapping[str, Any]]:
    """Of the adaptive cache, those that were told this; with room for everything it is all the same."""
    wanted, rung_name = _caller(told), rung.name.lower()
    return [
        r
        for r in records
        if r["rung"] == rung_name
        and ((r["what"], r["family"]) == wanted or (r["what"] == "adaptive" and r["share"] == SHARES[0]))
    ]


def families(records: Sequence[Mapping[str, Any]], rung: Rung, recall: float) -> dict[str, float]:
    """Mean score over documents and budgets of each family that ever ran; where it does not fit, R alone: -100."""
    names = {"cache"} if rung is Rung.CACHE else {"cache", "hook"}
    cells = [(d, s) for d in dict.fromkeys(r["document"] for r in records) for s in SHARES]
    found: dict[str, float] = {}
    fixed_ones = [r for r in records if r["what"] in ("fixed", "mlx-lm") and r.get("state") == "real"]
    usable = [r for r in fixed_ones if r["what"] == "mlx-lm" or r["rung"] in names]
    for family in dict.fromkeys(r["family"] for r in usable):
        best = {(r["document"], r["share"]): _total(r, recall) for r in usable if r["family"] == family}
        # Where the rows fit as they are, a family of evictions keeps them all.
        keeps = {(r["document"], r["share"]): _total(r, recall) for r in usable if r["family"] == "keep"}
        fallback = keeps if family.startswith(("evict", "mlx-lm:max")) else {}
        found[family] = statistics.fmean(best.get(c, fallback.get(c, -100.0)) for c in cells)
    for name, told in (("adaptive", None), ("told", recall)):
        own = _of_caller(records, rung, told)
        if len(own) == len(cells):
            found[name] = statistics.fmean(_total(r, recall) for r in own)
    return dict(sorted(found.items(), key=lambda one: -one[1]))


#: Columns of the page: heading, and what of a record.
COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None], str], ...] = (
    ("score", lambda r: r["score"]["total"], "{:.1f}"),
    ("Q", lambda r: r["score"]["Q"], "{:.2f}"),
    ("T", lambda r: r["score"]["T"], "{:.1f}"),
    ("KL", lambda r: r["T1"]["kl_mean"], "{:.4f}"),
    ("KL copying", lambda r: r["asked"]["copy_kl"], "{:.3f}"),
    ("top-1", lambda r: r["T1"]["top1"], "{:.3f}"),
    ("copied", lambda r: r.get("asked", {}).get("copy_accuracy"), "{:.2f}"),
    ("looked up", lambda r: r.get("asked", {}).get("lookup_accuracy"), "{:.2f}"),
    ("step ×", lambda r: r["time"]["ratio"], "{:.2f}"),
    ("held", lambda r: r["share_held"], "{:.1%}"),
    ("peak MB", lambda r: r["peak"] / 1e6, "{:.0f}"),
)


def as_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """For each yardstick means over the documents by budget and rung; then what every family scores over all budgets."""
    full = {r["document"]: r for r in records if r["what"] == "full"}
    parts: list[str] = []
    for recall in RECALLS:
        parts += [f"### {YARDSTICKS[recall]}", "", *_by_budget(records, full, recall), ""]
        parts += [*_families_table(records, recall), ""]
    return "\n".join([*parts, *_notes(records, full)])


def _by_budget(
    records: Sequence[Mapping[str, Any]], full: Mapping[str, Mapping[str, Any]], recall: float
) -> list[str]:
    asked = {_place(r): r["asked"] for r in records if r["what"] == "asked"}

    def completed(record: Mapping[str, Any]) -> dict[str, Any]:
        held = record["nbytes"] / full[record["document"]]["nbytes"]
        questions = asked.get(_place(record), {})
        own = full[record["document"]]
        # What is done to the full cache comes on top of it, after its prompt.
        peak = (
            record["peak"]
            if record["what"] in ("adaptive", "told")
            else max(own["peak"], own["nbytes"] + record["peak"])
        )
        questions = {**record["asked"], **questions}
        score_of = record["scores"][str(recall)]
        return {**record, "share_held": held, "peak": peak, "asked": questions, "score": score_of}

    lines = ["| budget | | " + " | ".join(name for name, _, _ in COLUMNS) + " |"]
    lines.append("| ---: | --- |" + " ---: |" * len(COLUMNS))
    cells = list(rows_of(records, recall))
    for share in SHARES:
        for who, rung in (
            ("adaptive", "cache"), ("told", "cache"), ("oracle", "cache"),
            ("adaptive", "hook"), ("told", "hook"), ("oracle", "hook"), ("mlx-lm", "cache"),
        ):  # fmt: skip
            mine = [c[who] for c in cells if c["share"] == share and c["rung"] == rung and c[who] is not None]
            if not mine or (who == "told" and share == SHARES[0]):
                continue
            who = "adaptive, told" if who == "told" else who
            name = "mlx-lm's best" if who == "mlx-lm" else f"{who}, rung {rung}"
            values = [_mean_of([read(completed(r)) for r in mine], form) for _, read, form in COLUMNS]
            lines.append(f"| {share:.4g} | {name} | ".replace("| 1 |", "| 1.0 |") + " | ".join(values) + " |")
    return lines


def _place(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["document"], record["share"], record["rung"], record["family"]


def _mean_of(values: Sequence[float | None], form: str) -> str:
    known = [v for v in values if v is not None]
    return form.format(statistics.fmean(known)) if len(known) == len(values) and known else "–"


def _families_table(records: Sequence[Mapping[str, Any]], recall: float) -> Iterator[str]:
    yield "| mean score over documents and budgets | rung cache | rung hook |"
    yield "| --- | ---: | ---: |"
    names = {"adaptive": "**adaptive**", "told": "**adaptive, told**"}
    both = [families(records, rung, recall) for rung in RUNGS]
    for name in sorted(
        {n for one in both for n in one}, key=lambda n: -max(one.get(n, -1e9) for one in both)
    ):
        values = [f"{one[name]:.1f}" if name in one else "–" for one in both]
        yield f"| {names.get(name, f'`{name}`')} | {values[0]} | {values[1]} |"


def _notes(records: Sequence[Mapping[str, Any]], full: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    own = [r for r in records if r["what"] in ("adaptive", "told")]
    spent, run = sum(r["decision_seconds"] for r in own), sum(r["run_seconds"] for r in own)
    most = max(r["decision_seconds"] / r["run_seconds"] for r in own)
    yield (
        f"- decisions: {sum(r['decisions'] for r in own)} in {len(own)} runs, {100 * spent / run:.2f} % of the time "
        f"of prompt and 64 decode steps; most in one run {100 * most:.2f} %"
    )
    chunks = sum(r["chunks_over"] for r in own)
    over = sum(r["over"] for r in own)
    yield (
        f"- chunks of the prompt that passed the budget before they were looked at: {chunks}; runs over it after the last "
        f"token: {over}"
    )
    copied = statistics.fmean(r["copy_accuracy"] for r in full.values())
    looked = statistics.fmean(r["lookup_accuracy"] for r in full.values())
    peak = statistics.fmean(r["peak"] for r in full.values()) / 1e6
    yield f"- the full cache copies {copied:.2f} and looks up {looked:.2f}; its prompt peaks at {peak:.0f} MB"
    yield f"- documents: {', '.join(full)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("budgets.json"))
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=list(DOMAINS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--result", type=Path, nargs="+", help="show finished results; nothing is run")
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    if asked.result is None:
        loaded = load_model(None)
        settings = Plan(
            contexts=((asked.context, 1),),
            tests=("T1", "T2", "T3"),
            chunk=CHUNK,
            scored=SCORED,
            timed_steps=TIMED,
        )
        documents = [
            one
            for domain in asked.domains
            for one in select(
                loaded.tokenizer, asked.context, 1, settings.length(asked.context), domains=[domain]
            )[0]
        ]
        records = run(loaded, documents, settings, asked.out, asked.kinds)
        header = {
            "conditions": conditions(loaded),
            "settings": settings.to_record(),
            "provenance": provenance(),
        }
        asked.out.write_text(json.dumps({**header, "records": records}, indent=1) + "\n")
    else:
        records = [r for path in asked.result for r in json.loads(path.read_text())["records"]]
    if asked.page is not None:
        update_page(asked.page, "budgets", as_markdown(records))
    for recall in RECALLS:
        print(YARDSTICKS[recall])
        for row in rows_of(records, recall):
            found = (f"{who}: {_short(row[who], recall)}" for who in ("adaptive", "told", "oracle", "mlx-lm"))
            print(row["document"], row["share"], row["rung"], *found, sep=" | ")
        for rung in RUNGS:
            print(rung.name, {k: round(v, 2) for k, v in families(records, rung, recall).items()})


def _short(record: Mapping[str, Any] | None, recall: float) -> str:
    if record is None:
        return "none"
    return (
        f"{_total(record, recall):.2f} KL {record['T1']['kl_mean']:.4f} copying {record['asked']['copy_kl']:.4f} "
        f"{record.get('action', record.get('actions'))}"
    )


if __name__ == "__main__":
    main()
