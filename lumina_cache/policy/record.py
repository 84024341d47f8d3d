"""Candidates as a line of the log has them, and back.

A record of a candidate is mostly what others have as well. In the file everything is said once:

``same``
    the inputs that no candidate has otherwise;
``reasons``
    every reason that is given, once;
``stored``
    a row for each way of storing the layers: the inputs that depend on that alone, and the text that the actions which
    lead to it end with;
``each``
    a row for each candidate: its way of storing the layers and its reasons, by their places in the lists; the text that
    its action begins with, the inputs of its own, and the score.

``fields`` name what is in a row. The terms of the score are not written: they follow from the inputs and the weights of
the state (:func:`~lumina_cache.policy.score.score`). Numbers are written so that they are read as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import LogFormatError
from .score import Inputs, Weights, score
from .values import Candidate

__all__ = ["pack", "unpack"]

#: Inputs that depend on how the layers are stored afterwards and on what follows, hardly on which rows are left.
_OF_STORAGE = (
    "nbytes_next",
    "lost_kl",
    "lost_p95",
    "source",
    "time_ratio",
    "own_seconds",
    "prompt_ratio",
    "kept",
    "then",
)
_OWN = tuple(name for name in Inputs.__dataclass_fields__ if name not in _OF_STORAGE)


def pack(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """The candidates as they are written."""
    inputs = [vars(one.inputs) for one in candidates]
    same = {
        name: value
        for name, value in (inputs[0] if inputs else {}).items()
        if all(x[name] == value for x in inputs)
    }
    shared = [name for name in _OF_STORAGE if name not in same]
    own = [name for name in _OWN if name not in same]
    texts = [str(one.action) for one in candidates]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (one, x) in enumerate(zip(candidates, inputs, strict=True)):
        groups.setdefault((len(one.action.parts), *(x[name] for name in shared)), []).append(i)
    reasons: dict[Any, int] = {}
    stored: list[list[Any]] = []
    each: list[list[Any]] = [[]] * len(candidates)
    for place, ((_, *values), members) in enumerate(groups.items()):
        end = _common_end([texts[i] for i in members])
        stored.append([end, *values])
        for i in members:
            start = texts[i][: len(texts[i]) - len(end)]
            against = [reasons.setdefault(reason, len(reasons)) for reason in candidates[i].reasons]
            x = inputs[i]
            each[i] = [place, start, against, *(x[name] for name in own), candidates[i].score.total]
    return {
        "same": same,
        "reasons": [reason.to_record() for reason in reasons],
        "stored": {"fields": ["action", *shared], "rows": stored},
        "each": {"fields": ["stored", "action", "reasons", *own, "score"], "rows": each},
    }


def _common_end(texts: Sequence[str]) -> str:
    """The longest text that all of them end with."""
    backwards = [text[::-1] for text in texts]
    first, last = min(backwards), max(backwards)
    alike = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:alike][::-1]


def unpack(packed: Mapping[str, Any], weights: Mapping[str, float]) -> list[dict[str, Any]]:
    """What :meth:`~lumina_cache.policy.values.Candidate.to_record` gives of each of the candidates.

    Args:
        weights: of the state that they were weighed in, as in its record.

    Raises:
        LogFormatError: what was packed is not there, or not as it has to be.
    """
    try:
        known = Weights(**weights)
        stored = [_named(packed["stored"]["fields"], row) for row in packed["stored"]["rows"]]
        each = [_named(packed["each"]["fields"], row) for row in packed["each"]["rows"]]
        return [_candidate(packed, stored[row["stored"]], row, known) for row in each]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise LogFormatError(
            f"decision: field 'candidates' cannot be read ({type(error).__name__}: {error})"
        ) from None


def _named(fields: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(fields, row, strict=True))


def _candidate(
    packed: Mapping[str, Any], stored: Mapping[str, Any], row: Mapping[str, Any], weights: Weights
) -> dict[str, Any]:
    values = {**packed["same"], **stored, **row}
    inputs = Inputs(**{name: values[name] for name in Inputs.__dataclass_fields__})
    reasons = [dict(packed["reasons"][place]) for place in row["reasons"]]
    return {
        "action": row["action"] + stored["action"],
        "feasible": not reasons,
        "reasons": reasons,
        "inputs": inputs.to_record(),
        "score": {**score(inputs, weights).to_record(), "total": row["score"]},
    }
