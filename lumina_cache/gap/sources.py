"""Observations out of what was measured before there was a store: results of ``lumina-cache eval``.

An audit log gives none. Its scores are estimates made before anything ran, of a text that nobody kept, and what was done
has no quality; they are analysed as what they are in :mod:`lumina_cache.gap.decisions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..backend.capabilities import Rung
from ..errors import ActionSyntaxError, LogFormatError
from .records import BLOCK, BackendInfeasible, Measured, Observation, Provenance, Quality, Real, State, What

__all__ = ["Read", "from_eval"]


@dataclass(frozen=True)
class Read:
    """Observations, and one sentence for everything that gave none."""

    observations: tuple[Observation, ...]
    problems: tuple[str, ...]


def from_eval(path: Path) -> Read:
    """The observations of a result of ``lumina-cache eval``: its test T1, continuation of the text.

    Halves are made of the means of blocks that the result has. It has no 95th percentile of each half, so that an
    analysis of these observations uses the term of the mean alone, and says so.

    Raises:
        EvaluationError: the file cannot be read or is something else.
    """
    from ..lab.evaluate.results import read_result

    result = read_result(path)
    documents = {(d["context"], d["name"]): d for d in result["header"]["documents"]}
    observations: list[Observation] = []
    problems: list[str] = []
    for record in result["records"]:
        if record["kind"] != "subject":
            continue
        where = f"{record['action']} on {record['document']} at {record['context']} tokens"
        try:
            document = documents[record["context"], record["document"]]
            observations += _observed(record, document, result, path)
        except _Nothing as reason:
            problems.append(f"{where}: {reason}")
        except (KeyError, LogFormatError, ActionSyntaxError) as error:
            what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            problems.append(f"{where}: {what}")
    return Read(tuple(observations), tuple(problems))


class _Nothing(Exception):
    """A record that is no observation."""


def _observed(
    record: Mapping[str, Any], document: Mapping[str, Any], result: Mapping[str, Any], path: Path
) -> Iterator[Observation]:
    header = result["header"]
    rungs = [Rung[name.upper()] for name in header.get("rung", "cache").split(",")]
    horizon = int(header["plan"]["scored"])
    state = State(
        model=header["model"]["fingerprint"],
        document=document["name"],
        domain=document["domain"],
        context=record["context"],
        phase="decode",
        seed=int(header["plan"]["seed"]),
        horizon=horizon,
    )
    what, origin = _what(record), _origin(document, result, path)
    for refusal in record.get("refused", ()):
        at = Rung[refusal["rung"].upper()]
        yield BackendInfeasible(state, what, origin, tuple(refusal["reasons"]), int(at))
    if record["state"] == "backend_infeasible":
        for at in rungs:
            name = at.name.lower()
            own = [r for r in record["reasons"] if r.get("rung", name) == name]
            reasons = tuple({k: v for k, v in r.items() if k != "rung"} for r in own)
            if reasons:
                yield BackendInfeasible(state, what, origin, reasons, int(at))
    elif record["state"] == "real":
        if "T1" not in record:
            raise _Nothing("T1 was not run")
        yield Real(state, what, origin, _measured(record, horizon))
    else:
        raise _Nothing(f"{record['state']}: {record.get('error', 'no reason')}")


def _what(record: Mapping[str, Any]) -> What:
    from ..lab.campaign.trial import read_trial

    what = read_trial(record["action"], "real").what()
    return replace(what, rung=int(Rung[record["rung"].upper()])) if record.get("rung") else what


def _origin(document: Mapping[str, Any], result: Mapping[str, Any], path: Path) -> Provenance:
    header, provenance = result["header"], result["provenance"]
    chip = (provenance["installation"].get("device_info") or {}).get("device_name")
    return Provenance(
        source="eval",
        run=path.name,
        made=provenance["finished"],
        model_name=header["model"]["name"],
        text_sha256=document["text_sha256"],
        tokens_sha256=document["tokens_sha256"],
        device=header["device"],
        machine=chip or provenance["installation"]["system"],
        mlx=header["mlx"],
        mlx_lm=header["mlx_lm"],
        lumina_cache=header["lumina_cache"],
        git_commit=provenance["commit"],
    )


def _measured(record: Mapping[str, Any], horizon: int) -> Measured:
    test = record["T1"]
    spans = tuple(float(x) for x in test["kl_by_16"])
    sizes = [min(BLOCK, horizon - BLOCK * i) for i in range(len(spans))]
    halves = [_mean(spans[half::2], sizes[half::2]) for half in (0, 1)]
    quality = Quality(
        kl_mean=test["kl_mean"],
        kl_p95=test["kl_p95"],
        kl_half0=halves[0],
        kl_half1=halves[1],
        kl_spans=spans,
        top1=test["top1"],
        nll_change=test["nll_change"],
    )
    return Measured.of_trial(quality, record)


def _mean(values: tuple[float, ...], sizes: list[int]) -> float | None:
    tokens = sum(sizes)
    return sum(v * n for v, n in zip(values, sizes, strict=True)) / tokens if tokens else None
