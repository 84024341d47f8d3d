"""What a query bank is worth on text of another kind than it was captured from.

    python benchmarks/query_bank.py [--documents 9] [--skip 6] [--context 1024] [--out FILE]

For each document of the evaluation (T1, see docs/eval.md): actions with a bank captured from texts of the document's own
domain, and with one captured from the two others. No text that a bank is captured from is a document; stories for the
bank of dialogue are the second halves of those whose beginnings are documents.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from lumina_cache.lab.blas import preload_openblas

preload_openblas()

from lumina_cache.bank import QueryBank, banks_of  # noqa: E402
from lumina_cache.lab.bank import CaptureSettings, capture, own_texts  # noqa: E402
from lumina_cache.lab.corpus import Document, own_text  # noqa: E402
from lumina_cache.lab.evaluate.documents import select  # noqa: E402
from lumina_cache.lab.evaluate.measure import Bench  # noqa: E402
from lumina_cache.lab.evaluate.plan import Plan  # noqa: E402
from lumina_cache.lab.evaluate.subjects import parse_subject  # noqa: E402
from lumina_cache.lab.models import load_model  # noqa: E402

DOMAINS = ("prose", "code", "dialogue")
STORIES = ("night-train", "seed-library", "clock-repair")
ACTIONS = (
    "evict:query_bank@0.50,recent=128",
    "evict:query_bank_values@0.50,recent=128",
    "evict:expected_bank@0.50,recent=128",
    "evict:query_bank_values@0.25,recent=64",
    "evict:expected_bank@0.25,recent=64",
)


def texts_of(domain: str) -> list[Document]:
    if domain != "dialogue":
        return [text for text in own_texts() if text.domain == domain]
    stories = [own_text(name, domain) for name in STORIES]
    return [replace(story, text=story.text[len(story.text) // 2 :]) for story in stories]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=9)
    parser.add_argument(
        "--skip", type=int, default=6, help="first documents to leave out: settings were chosen on them"
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=128)
    parser.add_argument("--captured", type=int, default=6, help="documents that each bank is captured from")
    parser.add_argument("--actions", nargs="+", default=list(ACTIONS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    loaded = load_model()
    banks = banks_of(loaded.model)
    assert banks is not None
    plan = Plan(contexts=((asked.context, asked.documents),), tests=("T1",), scored=asked.scored)
    total = asked.skip + asked.documents
    documents, _ = select(loaded.tokenizer, asked.context, total, plan.length(asked.context))

    @cache
    def bank(domains: tuple[str, ...]) -> QueryBank:
        # Domains by turns, as documents are taken from the texts in order.
        texts = [text for turn in zip(*map(texts_of, domains), strict=True) for text in turn]
        return capture(loaded, texts, CaptureSettings(documents=asked.captured))

    found: dict[str, list[float]] = {}
    for number, document in enumerate(documents[asked.skip :], asked.skip):
        bench = Bench(loaded.model, loaded.tokenizer, document, plan, number)
        others = tuple(d for d in DOMAINS if d != document.domain)
        for which, domains in (("own domain", (document.domain,)), ("other domains", others)):
            banks.give(bank(domains))
            for action in asked.actions:
                record = bench.measure(parse_subject(action))
                found.setdefault(f"{action}, {which}", []).append(record["T1"]["kl_mean"])
        bench.close()
        print(f"{document.name} ({document.domain})")
        for what, values in found.items():
            print(
                f"  {what:60s} {sum(values) / len(values):.4f}   {' '.join(f'{v:.4f}' for v in values)}",
                flush=True,
            )
        if asked.out is not None:
            asked.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
