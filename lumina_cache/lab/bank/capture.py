"""Capture a query bank: run the model over texts with the attention hook open, and keep what its queries are like.

Each text is cut into documents, which are read as prompts are. Of every layer and head are kept: the sum and the products
of all queries but the first few, before rotation and after; and a few queries, drawn without replacement from each
document, other ones for each layer. Nothing grows with the texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..._version import __version__
from ...backend.attention import attention_hook
from ...backend.hookable import hookable
from ...backend.interface import mlx_lm_version, mlx_version
from ...backend.observing import rotations
from ...bank import LayerStatistics, QueryBank
from ...errors import QueryBankError
from ...layers import KVCache, ManagedLayer, adopt, leaves
from ...scorers.observed import Rotation
from ...scorers.observed.expected_attention import turned_back
from ...steps import StepTracker
from ..corpus import Document
from ..evaluate.documents import encode
from ..models import LoadedModel

__all__ = ["CaptureSettings", "capture"]


@dataclass(frozen=True)
class CaptureSettings:
    """How much is captured. Lengths and positions in tokens."""

    queries: int = 16  #: kept per query head
    directions: int = 8  #: kept of each head's covariance; 0: neither mean nor covariance are kept
    documents: int = 8  #: most of them
    length: int = 1024  #: of a document
    shortest: int = 128  #: documents with fewer tokens are left out
    skipped: int = (
        16  #: first queries of each document that do not count: attention sinks are none of the usual ones
    )
    chunk: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("queries", "documents", "length", "chunk"):
            if getattr(self, name) < 1:
                raise QueryBankError(f"{name}={getattr(self, name)}: give at least 1")
        if not 0 <= self.skipped < self.shortest <= self.length:
            raise QueryBankError(
                f"skipped={self.skipped}, shortest={self.shortest}, length={self.length}: each has to be smaller than "
                "the next"
            )


@dataclass
class _Layer:
    """What was gathered of one layer; arrays are per query head."""

    rotation: Rotation
    scale: float = 1.0
    count: int = 0
    sinks: mx.array | None = None
    sums: dict[str, mx.array] = field(default_factory=dict)
    drawn: list[mx.array] = field(default_factory=list)

    def add(self, name: str, array: mx.array) -> None:
        self.sums[name] = self.sums[name] + array if name in self.sums else array


class _Gatherer:
    """Observes all layers; ``wanted`` are the positions whose queries are kept of the document being read."""

    def __init__(self, rotations: Mapping[str, Rotation], skipped: int) -> None:
        self.layers = {name: _Layer(rotation) for name, rotation in rotations.items()}
        self.skipped = skipped
        self.wanted: dict[str, np.ndarray] = {}

    def observe(
        self,
        layer: ManagedLayer,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> tuple[mx.array, ...]:
        one = self.layers[layer.name]
        first = int(layer.offset) - queries.shape[2]
        one.scale, one.sinks = scale, sinks
        rotated = queries.astype(mx.float32)
        plain = turned_back(rotated, first, one.rotation)[0]
        counted = slice(max(0, self.skipped - first), None)
        for name, x in (("plain", plain[:, counted]), ("rotated", rotated[0, :, counted])):
            one.add(f"{name} sum", x.sum(axis=1))
            one.add(f"{name} products", x.swapaxes(-1, -2) @ x)
        one.count += max(0, queries.shape[2] - (counted.start or 0))
        wanted = self.wanted[layer.name] - first
        wanted = wanted[(wanted >= 0) & (wanted < queries.shape[2])]
        if wanted.size:
            one.drawn.append(mx.contiguous(plain[:, mx.array(wanted)]))
        evaluated = (*one.sums.values(), *one.drawn[-1:])
        mx.async_eval(evaluated)  # type: ignore[no-untyped-call]
        return evaluated


def capture(
    loaded: LoadedModel,
    texts: Sequence[Document],
    settings: CaptureSettings | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> QueryBank:
    """The query bank of a model.

    Args:
        on_progress: called with documents read, documents in all, and what is read next.

    Raises:
        QueryBankError: no text is long enough, or no layer's queries can be seen or turned back.
    """
    settings = settings or CaptureSettings()
    model = loaded.model
    documents = list(_documents(loaded.tokenizer, texts, settings))
    if not documents:
        raise QueryBankError(
            f"no text has {settings.shortest} tokens: give a longer one with --text, better several"
        )
    found, refused = _reached(model)
    if not found:
        why = "; ".join(dict.fromkeys(refused.values())) or "the model holds no rows"
        raise QueryBankError(f"no layer's queries can be captured: {why}")
    gatherer = _Gatherer(found, settings.skipped)
    rng = np.random.default_rng(settings.seed)
    for i, (name, ids) in enumerate(documents):
        on_progress(i, len(documents), name)
        share = _share(settings.queries, len(documents), i)
        pool = np.arange(settings.skipped, len(ids))
        gatherer.wanted = {
            layer: np.sort(rng.choice(pool, min(share, pool.size), replace=False)) for layer in found
        }
        _read(model, ids, settings.chunk, gatherer)
    on_progress(len(documents), len(documents), "done")
    names = {id(module): name for name, module in model.named_modules()}
    heads = _kv_heads(model)
    layers = {}
    for name, one in gatherer.layers.items():
        path = names.get(id(one.rotation))
        if path is None:
            refused[name] = "what rotates its queries is no module of the model by name"
        else:
            layers[name] = _statistics(one, path, heads[name], settings, rng)
    return QueryBank((loaded.fingerprint,), layers, refused, _provenance(loaded, texts, documents, settings))


def _reached(model: Any) -> tuple[dict[str, Rotation], dict[str, str]]:
    """Layers whose queries can be seen and turned back, and why the others cannot."""
    seen, turned, refused = hookable(model), rotations(model), dict[str, str]()
    found = {}
    for layer in seen.layers:
        if layer.kind != "kv":
            continue
        if layer.reason is not None:
            refused[layer.name] = layer.reason
        elif not layer.direct:
            refused[layer.name] = (
                "attention reads other keys than those held, so its queries do not go with them"
            )
        elif layer.name not in turned:
            refused[layer.name] = "how its queries are rotated could not be told"
        else:
            found[layer.name] = turned[layer.name]
    return found, refused


def _documents(
    tokenizer: Any, texts: Sequence[Document], settings: CaptureSettings
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The first document of every text, then the second of every text …"""
    lead = tuple(int(t) for t in tokenizer.encode(""))[:1]
    size = settings.length - len(lead)
    cut = []
    for text in texts:
        ids = encode(tokenizer, text.text)
        starts = range(0, len(ids), size)
        cut.append([(f"{text.name}:{n}", (*lead, *ids[s : s + size])) for n, s in enumerate(starts)])
    turns = max(map(len, cut), default=0)
    found = [one[turn] for turn in range(turns) for one in cut if turn < len(one)]
    yield from [one for one in found if len(one[1]) >= settings.shortest][: settings.documents]


def _share(queries: int, documents: int, index: int) -> int:
    """How many of ``queries`` are drawn from document ``index``: all add up, and differ by one at most."""
    return queries * (index + 1) // documents - queries * index // documents


def _read(model: Any, ids: tuple[int, ...], chunk: int, gatherer: _Gatherer) -> None:
    steps = StepTracker(name="capture")
    entries = [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))]
    with attention_hook(model) as hook:
        for layer in leaves(entries):
            if isinstance(layer, KVCache) and layer.name in gatherer.layers:
                hook.observe(layer, gatherer)
        for first in range(0, len(ids), chunk):
            model(mx.array(ids[first : first + chunk])[None], cache=entries)
            mx.eval([entry.state for entry in entries])


def _kv_heads(model: Any) -> dict[str, int]:
    steps = StepTracker(name="capture")
    entries = [adopt(c, steps, f"layer {i}") for i, c in enumerate(make_prompt_cache(model))]
    mx.eval(model(mx.ones((1, 2), dtype=mx.int32), cache=entries))
    return {x.name: int(x.heads[1]) for x in leaves(entries) if isinstance(x, KVCache) and x.rows}


def _statistics(
    one: _Layer, path: str, kv_heads: int, settings: CaptureSettings, rng: np.random.Generator
) -> LayerStatistics:
    queries = mx.concatenate(one.drawn, axis=1)
    # The bank spreads its queries over positions in this order, which should not be that of the documents.
    queries = queries[:, mx.array(rng.permutation(queries.shape[1]))].astype(mx.float16).astype(mx.float32)
    at = settings.length
    statistics = LayerStatistics(
        queries=queries,
        filters=_filters(one, kv_heads),
        scale=one.scale,
        rotation=path,
        turned_at=at,
        turned=one.rotation(queries[None, :1, :1], at)[0, 0, 0],
        sinks=one.sinks,
    )
    if settings.directions:
        mean = one.sums["plain sum"] / one.count
        statistics = replace(statistics, mean=mean, spread=_spread(one, mean, settings.directions))
    mx.eval(statistics.turned, statistics.filters)
    return statistics


def _filters(one: _Layer, kv_heads: int) -> mx.array:
    """First right singular vector of all rotated queries, towards their mean; the mean over each group (H, D)."""
    _, vectors = mx.linalg.eigh(one.sums["rotated products"], stream=mx.cpu)
    first = vectors[..., -1]
    first = first * mx.sign((first * one.sums["rotated sum"]).sum(axis=-1, keepdims=True))
    return first.reshape(kv_heads, -1, first.shape[-1]).mean(axis=1)


def _spread(one: _Layer, mean: mx.array, directions: int) -> mx.array:
    """The largest ``directions`` eigenvectors of the covariance, each times the root of its eigenvalue: (Hq, R, D)."""
    covariance = one.sums["plain products"] / one.count - mean[..., :, None] * mean[..., None, :]
    values, vectors = mx.linalg.eigh(covariance, stream=mx.cpu)
    scaled = vectors * mx.sqrt(mx.maximum(values, 0.0))[..., None, :]
    return scaled[..., -directions:].swapaxes(-1, -2)


def _provenance(
    loaded: LoadedModel,
    texts: Sequence[Document],
    documents: Sequence[tuple[str, tuple[int, ...]]],
    settings: CaptureSettings,
) -> dict[str, Any]:
    return {
        "model": loaded.name,
        "dtype": str(loaded.dtype),
        "lumina_cache": __version__,
        "mlx": mlx_version(),
        "mlx_lm": mlx_lm_version,
        "settings": asdict(settings),
        "texts": [
            {
                "name": t.name,
                "domain": t.domain,
                "licence": t.licence,
                "sha256": hashlib.sha256(t.text.encode()).hexdigest(),
            }
            for t in texts
        ],
        "documents": [{"name": name, "tokens": len(ids)} for name, ids in documents],
    }
