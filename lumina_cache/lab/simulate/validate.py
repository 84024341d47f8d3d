"""How far the simulator is off, for actions that also run: ``python -m lumina_cache.lab.simulate.validate``.

Every action is measured as the backend runs it and simulated from the same full cache, on the same documents. The KL of a
pair agrees if it is within 2 % or 0.001 nats per token; bytes (live and allocated, as they are and in 16 bits) agree if
they are equal. The exit code is 1 if a pair does not.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...actions import Quantize, parse_action, singles
from ...backend.capabilities import Rung
from ...pages import update_page
from ..evaluate import Plan
from ..evaluate.documents import select
from ..evaluate.measure import Bench
from ..evaluate.provenance import conditions
from ..evaluate.subjects import OwnAction, Refused
from ..models import LoadedModel, load_model
from .simulator import Simulator

__all__ = ["ACTIONS", "Pair", "as_markdown", "main", "summary", "validate"]

#: The part of the page that is made.
PART = "simulator-validation"

#: Limits of an agreement: relative, and in nats per token.
RELATIVE, ABSOLUTE = 0.02, 0.001

ACTIONS = (
    "quant:affine,bits=8",
    "quant:affine,bits=4",
    "quant:affine,bits=3",
    "quant:affine,bits=2",
    "quant:affine_fetch,bits=4",
    "quant:hadamard,bits=4",
    "quant:hadamard,bits=3",
    "quant:kivi,bits=4",
    "quant:kivi,bits=2,group=32",
    "quant:kivi_hadamard,bits=4",
    "quant:kivi_hadamard,bits=3",
    "quant:kivi_packed,bits=4",
    "evict:sinks_window@0.50",
    "evict:keydiff@0.50",
    "evict:keydiff@0.25",
    "evict:random@0.50",
    "evict:random@0.25,seed=1",
    "evict:h2o_mean@0.25",
    "evict:snapkv@0.25",
    "evict:tova@0.50",
    "evict:expected_attention@0.25",
    "evict:snapkv@0.50+quant:hadamard,bits=4",
    "evict:keydiff@0.50+quant:kivi_hadamard,bits=4",
    "evict:snapkv@0.25+quant:affine,bits=4",
    "quant:kivi,bits=4+evict:snapkv@0.50",
    "0-14:quant:kivi_hadamard,bits=4;15-29:quant:kivi_hadamard,bits=3",
    "0-14:evict:snapkv@0.50;15-29:evict:snapkv@0.25",
)


@dataclass(frozen=True)
class Pair:
    """One action on one document, as it ran and as it was simulated. KL in nats per token."""

    document: str
    domain: str
    action: str
    real_kl: float
    simulated_kl: float
    worst_span: float  #: largest difference of the mean KL of 16 tokens
    real_bytes: tuple[int, int]  #: live, allocated
    simulated_bytes: tuple[int, int]
    real_share16: tuple[float, float]  #: live, allocated
    simulated_share16: tuple[float, float]
    real_seconds: float  #: to carry the action out and score it
    simulated_seconds: float  #: right behind it, in the same process
    again_kl: float | None = (
        None  #: the real KL with all tokens fed at once, where that makes no difference but rounding
    )

    @property
    def off(self) -> float:
        """Simulated KL over the real one, in nats per token."""
        return self.simulated_kl - self.real_kl

    @property
    def relative(self) -> float:
        """As :attr:`off`, over the real KL."""
        return 0.0 if self.off == 0 else self.off / self.real_kl if self.real_kl else math.inf

    @property
    def same_bytes(self) -> bool:
        shares = zip(self.real_share16, self.simulated_share16, strict=True)
        return self.real_bytes == self.simulated_bytes and all(
            math.isclose(a, b, rel_tol=1e-12) for a, b in shares
        )

    @property
    def agrees(self) -> bool:
        return self.same_bytes and _close(self.off, self.real_kl)

    @property
    def agrees_with_itself(self) -> bool | None:
        """Whether the two real runs agree; None where there is one."""
        return None if self.again_kl is None else _close(self.again_kl - self.real_kl, self.real_kl)


def _close(off: float, kl: float) -> bool:
    return abs(off) <= max(ABSOLUTE, RELATIVE * kl)


def validate(
    loaded: LoadedModel, plan: Plan, actions: Sequence[str], on_pair: Any = lambda pair: None
) -> tuple[list[Pair], dict[str, str]]:
    """Every action on every document; and the actions that the backend refused, with the reason."""
    pairs, refused = list[Pair](), dict[str, str]()
    [(context, count)] = plan.contexts
    subjects = [OwnAction(parse_action(text)) for text in actions]
    observe = tuple(dict.fromkeys(name for subject in subjects for name in subject.observes))
    documents, _ = select(loaded.tokenizer, context, count, plan.length(context))
    for number, document in enumerate(documents):
        bench = Bench(loaded.model, loaded.tokenizer, document, plan, number, rung=Rung.HOOK, observe=observe)
        simulator = Simulator(bench)
        for text, subject in zip(actions, subjects, strict=True):
            began = time.perf_counter()
            try:
                real = bench.measure(subject)
            except Refused as refusal:
                refused[text] = str(refusal)
                continue
            between = time.perf_counter()
            found = simulator.simulate(text).measured
            took = time.perf_counter() - between
            spans = zip(real["T1"]["kl_by_16"], found.quality.kl_spans, strict=True)
            pair = Pair(
                document.name,
                document.domain,
                text,
                real["T1"]["kl_mean"],
                found.quality.kl_mean,
                max(abs(a - b) for a, b in spans),
                (real["bytes"]["live"], real["bytes"]["allocated"]),
                (found.live, found.allocated),
                (real["bytes"]["share16"], real["bytes"]["share16_allocated"]),
                (found.share16, found.share16_allocated),
                between - began,
                took,
                _again(bench, subject),
            )
            pairs.append(pair)
            on_pair(pair)
        bench.close()
    return pairs, refused


def _again(bench: Bench, subject: OwnAction) -> float | None:
    """The real KL with all tokens fed at once; None where rows are not all stored as they come."""
    layouts = [part.layout for part in singles(subject.action) if isinstance(part, Quantize)]
    if not layouts or any(layout is None or layout.unit > 1 for layout in layouts):
        return None
    at_once = copy.copy(bench)
    at_once.plan = replace(bench.plan, block=bench.plan.scored)
    return float(at_once.measure(subject)["T1"]["kl_mean"])


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The error over all pairs, and what two real runs differ by."""
    twice = [(p.real_kl, p.again_kl) for p in pairs if p.again_kl is not None]
    return {
        "real_twice": len(twice),
        "real_twice_agreeing": sum(bool(p.agrees_with_itself) for p in pairs),
        "real_twice_worst_nats": max((abs(b - a) for a, b in twice), default=None),
        "real_twice_worst_relative": max((abs(b - a) / a for a, b in twice if a), default=None),
        "pairs": len(pairs),
        "actions": len({p.action for p in pairs}),
        "documents": len({p.document for p in pairs}),
        "domains": sorted({p.domain for p in pairs}),
        "agreeing": sum(p.agrees for p in pairs),
        "bytes_exact": sum(p.same_bytes for p in pairs),
        "worst_nats": max(abs(p.off) for p in pairs),
        "worst_relative": max(abs(p.relative) for p in pairs),
        "worst_span_nats": max(p.worst_span for p in pairs),
        "time_ratio": statistics.median(p.simulated_seconds / p.real_seconds for p in pairs),
    }


def as_markdown(record: Mapping[str, Any]) -> str:
    """The table by action, and the summary, of a written record."""
    figures, header = record["summary"], record["conditions"]
    by_action: dict[str, list[Mapping[str, Any]]] = {}
    for pair in record["pairs"]:
        by_action.setdefault(pair["action"], []).append(pair)
    lines = [
        f"{header['model']['name']}, {figures['documents']} documents of {record['context']} tokens "
        f"({', '.join(figures['domains'])}), {record['scored']} tokens scored in blocks of {record['block']}, "
        f"{header['device']}, mlx {header['mlx']}, mlx-lm {header['mlx_lm']}. Of {figures['pairs']} pairs "
        f"{figures['agreeing']} agree, bytes are equal in {figures['bytes_exact']}. Largest difference of the mean KL: "
        f"{figures['worst_nats']:.2g} nats per token, {100 * figures['worst_relative']:.2g} %; of 16 tokens' mean: "
        f"{figures['worst_span_nats']:.2g} nats. *time* is that of simulating over that of carrying out and scoring, the "
        f"median of documents ({figures['time_ratio']:.2f} over all pairs).",
        *_twice(figures),
        "",
        "| action | KL, real | real again | KL, simulated | largest difference | relative | bytes equal | share | time |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for action, pairs in by_action.items():
        real = statistics.fmean(p["real_kl"] for p in pairs)
        simulated = statistics.fmean(p["simulated_kl"] for p in pairs)
        second = [p["again_kl"] for p in pairs if p["again_kl"] is not None]
        again = f"{statistics.fmean(second):.6f}" if second else ""
        off = max(abs(p["simulated_kl"] - p["real_kl"]) for p in pairs)
        relative = max(abs(p["simulated_kl"] - p["real_kl"]) / p["real_kl"] for p in pairs if p["real_kl"])
        equal = sum(p["same_bytes"] for p in pairs)
        ratio = statistics.median(p["simulated_seconds"] / p["real_seconds"] for p in pairs)
        lines.append(
            f"| `{action}` | {real:.6f} | {again} | {simulated:.6f} | {off:.1e} | {100 * relative:.3f} % "
            f"| {equal} of {len(pairs)} | {100 * pairs[0]['real_share16'][0]:.1f} % | {ratio:.2f} |"
        )
    lines += [f"| `{action}` | refused: {why} | | | | | | | |" for action, why in record["refused"].items()]
    return "\n".join(lines)


def _twice(figures: Mapping[str, Any]) -> list[str]:
    if not figures["real_twice"]:
        return ["", "*Real again* (all tokens fed at once) was not measured."]
    return [
        "",
        f"*Real again* is the same action with all tokens fed at once, which moves nothing but rounding: of "
        f"{figures['real_twice']} pairs of real runs {figures['real_twice_agreeing']} agree with each other, and the "
        f"largest difference is {figures['real_twice_worst_nats']:.2g} nats per token, "
        f"{100 * figures['real_twice_worst_relative']:.2g} %.",
    ]


def _record(
    loaded: LoadedModel, plan: Plan, pairs: Iterable[Pair], refused: Mapping[str, str]
) -> dict[str, Any]:
    found = list(pairs)
    return {
        "kind": "lumina-cache simulator validation",
        "conditions": conditions(loaded),
        "context": plan.contexts[0][0],
        "scored": plan.scored,
        "block": plan.block,
        "limits": {"relative": RELATIVE, "nats": ABSOLUTE},
        "summary": summary(found),
        "refused": dict(refused),
        "pairs": [asdict(p) | {"same_bytes": p.same_bytes, "agrees": p.agrees} for p in found],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Validate, print progress, and write what was found. Exit code 1 if a pair does not agree."""
    parser = argparse.ArgumentParser(prog="python -m lumina_cache.lab.simulate.validate", description=__doc__)
    parser.add_argument("--model", help="folder or repository of a model; the embedded SmolLM2 by default")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--actions", nargs="+", default=list(ACTIONS))
    parser.add_argument("--json", type=Path, help="write pairs and summary to this file")
    parser.add_argument("--page", type=Path, help="put the table between the marks of this Markdown page")
    parser.add_argument("--from", dest="record", type=Path, help="a file written before: nothing is run")
    options = parser.parse_args(argv)
    if options.record:
        record = json.loads(options.record.read_text("utf-8"))
    else:
        loaded = load_model(options.model)
        plan = Plan(contexts=((options.context, options.documents),), tests=("T1",))
        pairs, refused = validate(loaded, plan, options.actions, _print)
        record = _record(loaded, plan, pairs, refused)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    table = as_markdown(record)
    if options.page:
        update_page(options.page, PART, table)
    print(table)
    return 0 if record["summary"]["agreeing"] == record["summary"]["pairs"] > 0 else 1


def _print(pair: Pair) -> None:
    print(
        f"{pair.document:28s} {pair.action:60s} {pair.real_kl:.6f} {pair.simulated_kl:.6f} {pair.off:+.1e} "
        f"{'' if pair.agrees else 'OFF'} {pair.real_seconds:.1f} s {pair.simulated_seconds:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    from ..blas import preload_openblas

    preload_openblas()
    raise SystemExit(main())
