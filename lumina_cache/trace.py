"""Follow one step of a model without computing it: shapes of its cache and logits, and which arrays live when.

MLX builds a graph and computes only what is asked for, so a forward whose result nobody evaluates costs microseconds
per layer and no memory, whatever the model's size. Two things are read off it:

- :func:`trace_cache`: the cache objects after a few tokens. Their arrays have shapes and types but no contents.
- :func:`trace_step`: the operations of one step of n tokens over ``rows`` held rows, run through an account of which
  buffers are alive at each of them. Attention calls are recorded and left out of the account, because what they take
  depends on the device (:mod:`lumina_cache.kernels`).

Every weight is a placeholder while a model is followed, so nothing can be evaluated by accident: a module that wants
the contents of an array (to route tokens in Python, for example) raises, and that becomes a typed error. Models are
followed on the CPU stream on every machine, where MLX uses no fused kernels other than its own.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as stock
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache

from .codecs.base import STEP
from .errors import ModelShapeError
from .kernels import AttentionCall, MaskKind

__all__ = ["CacheTrace", "Line", "StepTrace", "leaves_of", "trace_cache", "trace_step"]


@dataclass(frozen=True)
class CacheTrace:
    """Cache objects whose arrays have shapes and types only, and the logits (B, n, vocab) of the step."""

    entries: tuple[Any, ...]
    logits: mx.array


@dataclass(frozen=True)
class Line:
    """Bytes as a line over rows held: ``fixed + per_row·rows``."""

    fixed: float
    per_row: float

    def at(self, rows: int) -> float:
        return self.fixed + self.per_row * rows


@dataclass(frozen=True)
class StepTrace:
    """Bytes that one step of ``n`` tokens takes besides weights and cache, as lines over the rows held.

    With ``logits`` evaluated the last layer runs to its end; without (mlx-lm's prefill) only as far as its keys and
    values. ``quiet`` is the upper envelope of all moments outside attention; ``calls`` holds for each kind of attention call
    the envelope of what else is alive while it runs. ``vocabulary`` is what arrays as wide as that take.
    """

    n: int
    logits: bool
    recurrences: int  #: delta-rule recurrences in the step, which run token by token on the CPU and in a kernel on a GPU
    quiet: tuple[Line, ...]
    calls: tuple[tuple[AttentionCall, tuple[Line, ...]], ...]
    vocabulary: int


def leaves_of(entries: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every cache object that is not a list of others, with its name: "layer 3", or "layer 3.1" inside a list."""
    for i, entry in enumerate(entries):
        yield from _leaves(f"layer {i}", entry)


def _leaves(name: str, entry: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(entry, stock.CacheList):
        for i, part in enumerate(entry.caches):
            yield from _leaves(f"{name}.{i}", part)
    else:
        yield name, entry


def trace_cache(model: Any, tokens: Sequence[int]) -> CacheTrace:
    """The prompt cache of ``model`` after steps of ``tokens`` tokens each, shapes only.

    Raises:
        ModelShapeError: the model evaluates arrays, or needs a device that is not there, naming the line that does.
    """

    def run(token: mx.array, weights: Sequence[mx.array]) -> CacheTrace:
        entries = make_prompt_cache(model)
        logits = token
        for n in tokens:
            logits = model(mx.broadcast_to(token, (1, n)), cache=entries)
        return CacheTrace(tuple(entries), logits)

    followed: CacheTrace = _follow(model, run)
    return followed


class _Followed(Exception):
    """Leaves the traced function once everything is known, so that nothing is compiled or computed."""

    def __init__(self, result: Any) -> None:
        self.result = result


def _follow(model: Any, run: Callable[[mx.array, Sequence[mx.array]], Any]) -> Any:
    paths, weights = _weights(model)

    def traced(token: mx.array, placeholders: Sequence[mx.array]) -> None:
        model.update(tree_unflatten(list(zip(paths, placeholders, strict=True))))
        raise _Followed(run(token, placeholders))

    try:
        with mx.stream(mx.cpu):
            mx.compile(traced)(mx.zeros((1, 1), dtype=mx.int32), weights)
    except _Followed as done:
        return done.result
    except Exception as error:
        raise _untraceable(model, error) from error
    finally:
        model.update(tree_unflatten(list(zip(paths, weights, strict=True))))
    raise AssertionError("a followed function returned")


def _weights(model: Any) -> tuple[list[str], list[mx.array]]:
    flat = tree_flatten(model.parameters())
    return [path for path, _ in flat], [array for _, array in flat]


def _untraceable(model: Any, error: Exception) -> ModelShapeError:
    name = type(model).__module__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "mlx_lm" in f.filename]
    where = f" in {frames[-1].name}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    text = str(error).strip().split("\n", 1)[0]
    if "eval an array during" in text:
        return ModelShapeError(
            f"{name} evaluates arrays inside its forward{where}; its shapes cannot be known without computing. "
            "Load the model and estimate from it"
        )
    if "No Metal back-end" in text or "Metal" in text:
        return ModelShapeError(f"{name} calls a Metal kernel{where}, and this machine has no Metal: {text}")
    return ModelShapeError(
        f"{name}: a forward of a few tokens fails{where}: {type(error).__name__}: {text}. "
        "The fields of the configuration do not fit each other, or this mlx-lm does not support them"
    )


# -- one step, operation by operation ----------------------------------------------------------------------------------


def trace_step(
    model: Any,
    rows: tuple[int, int],
    n: int,
    *,
    logits: bool = True,
    kernels: bool = False,
    shapes: CacheTrace | None = None,
) -> StepTrace:
    """The bytes of one step of ``n`` tokens on a cache of ``rows`` rows, followed for two numbers of rows at once.

    The model is followed once for each number; an array whose size differs between them grows with the rows held.
    Layers with a bound of their own (sliding windows, chunks) hold as many rows as they ever do.

    Args:
        logits: whether logits are evaluated, or the cache's arrays only.
        shapes: the cache after a few tokens, where that was followed already.
        kernels: whether delta-rule recurrences are one operation, as on a GPU, or token by token, as on the CPU.

    Raises:
        ModelShapeError: the step cannot be followed; the message says why.
    """
    shapes = shapes or trace_cache(model, [1])
    few, many = (_graph(model, shapes.entries, r, n, logits, kernels) for r in rows)
    if [o.name for o in few.operations] != [o.name for o in many.operations]:
        raise ModelShapeError(f"{type(model).__module__} takes other steps for other numbers of rows held")
    moments = _account(few, many, rows, vocab=shapes.logits.shape[-1])
    return StepTrace(n, logits, few.recurrences, *moments)


_Shaped = tuple[str, tuple[int, ...], mx.Dtype]


@dataclass(frozen=True)
class _Operation:
    name: str
    inputs: tuple[_Shaped, ...]
    outputs: tuple[_Shaped, ...]


@dataclass(frozen=True)
class _Graph:
    operations: tuple[_Operation, ...]
    state: tuple[_Shaped, ...]  #: the cache's arrays before the step
    weights: frozenset[str]
    outputs: tuple[str, ...]
    calls: tuple[AttentionCall, ...]
    recurrences: int


def _graph(
    model: Any, template: Sequence[Any], rows: int, n: int, evaluate_logits: bool, kernels: bool
) -> _Graph:
    paths, weights = _weights(model)
    plan = [_enlarged(name, leaf, rows, n) for name, leaf in leaves_of(template)]
    state = [mx.zeros(shape, dtype) for fields in plan for shape, dtype in _arrays(fields)]
    recorder = _Recorder(rows, n, kernels)
    nodes: list[dict[str, Any]] = []

    def step(token: mx.array, *given: mx.array) -> list[mx.array]:
        model.update(tree_unflatten(list(zip(paths, given[: len(paths)], strict=True))))
        entries = make_prompt_cache(model)
        arrays = iter(given[len(paths) :])
        for (_, leaf), fields in zip(leaves_of(entries), plan, strict=True):
            for field, value in fields.items():
                setattr(leaf, field, _filled(value, arrays))
        with recorder:
            logits = model(mx.broadcast_to(token, (1, n)), cache=entries)
        after = [a for _, leaf in leaves_of(entries) for a in _held_arrays(leaf)]
        return [logits, *after] if evaluate_logits else after

    try:
        with mx.stream(mx.cpu):
            mx.export_function(nodes.append, step, mx.zeros((1, 1), dtype=mx.int32), *weights, *state)
    except Exception as error:
        raise _untraceable(model, error) from error
    finally:
        model.update(tree_unflatten(list(zip(paths, weights, strict=True))))
    given = [tuple(i) for i in next(d for d in nodes if d["type"] == "inputs")["inputs"]]
    return _Graph(
        operations=tuple(
            _Operation(d["name"], tuple(map(tuple, d["inputs"])), tuple(map(tuple, d["outputs"])))
            for d in nodes
            if d["type"] == "primitive"
        ),
        state=tuple(given[1 + len(weights) :]),
        weights=frozenset(name for name, _, _ in given[: 1 + len(weights)]),
        outputs=tuple(o[0] for o in next(d for d in nodes if d["type"] == "outputs")["outputs"]),
        calls=tuple(recorder.calls),
        recurrences=recorder.recurrences,
    )


@dataclass(frozen=True)
class _Array:
    """An array to be put into a cache object's field."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


def _enlarged(name: str, leaf: Any, rows: int, n: int) -> dict[str, Any]:
    """Fields of a cache object like ``leaf`` that holds ``rows`` rows and has room for ``n`` more."""
    if isinstance(leaf, stock.ArraysCache):
        return {"cache": [None if a is None else _Array(a.shape, a.dtype) for a in leaf.cache]}
    if not isinstance(leaf, stock.KVCache | stock.RotatingKVCache | stock.ChunkedKVCache):
        raise ModelShapeError(f"{name} is a {type(leaf).__name__}, whose fields are not known")
    if leaf.keys is None:
        return {}

    def at(held: int) -> dict[str, Any]:
        def wide(a: mx.array) -> _Array:
            return _Array((*a.shape[:2], held, a.shape[3]), a.dtype)

        return {"keys": wide(leaf.keys), "values": wide(leaf.values), "offset": rows}

    if isinstance(leaf, stock.RotatingKVCache):
        # After a chunk of n tokens a window holds n − 1 rows more than it shows; in decode just what it shows.
        held = min(rows, leaf.max_size - 1 + n)
        return {**at(held), "_idx": held}
    if isinstance(leaf, stock.ChunkedKVCache):
        held = min(rows, leaf.chunk_size)
        # Room is left at the end, so that growing, which is counted elsewhere, does not happen here.
        return {**at(held + n + STEP), "start_position": rows - held}
    return at(rows + n)


def _arrays(value: Any) -> Iterator[tuple[tuple[int, ...], mx.Dtype]]:
    if isinstance(value, _Array):
        yield value.shape, value.dtype
    elif isinstance(value, dict):
        for part in value.values():
            yield from _arrays(part)
    elif isinstance(value, list):
        for part in value:
            yield from _arrays(part)


def _filled(value: Any, arrays: Iterator[mx.array]) -> Any:
    if isinstance(value, _Array):
        return next(arrays)
    if isinstance(value, list):
        return [_filled(part, arrays) for part in value]
    return value


def _held_arrays(leaf: Any) -> list[mx.array]:
    if isinstance(leaf, stock.ArraysCache):
        return [a for a in leaf.cache if a is not None]
    return [a for a in (leaf.keys, leaf.values) if a is not None]


class _Recorder:
    """Notes attention calls and recurrences, and puts stand-ins of the right shape into the graph.

    Other threads are not affected.
    """

    def __init__(self, rows: int, n: int, kernels: bool) -> None:
        self.calls: list[AttentionCall] = []
        self.recurrences = 0
        self._rows, self._n, self._kernels = rows, n, kernels

    def __enter__(self) -> _Recorder:
        self._thread = threading.get_ident()
        self._attention, self._contiguous = mx.fast.scaled_dot_product_attention, mx.contiguous
        self._delta = gated_delta.gated_delta_ops
        gated_delta.gated_delta_ops = self._recurrence
        mx.fast.scaled_dot_product_attention = self._stand_in
        # Exporting knows no contiguous copy; an absolute value takes the same bytes.
        mx.contiguous = self._copy
        return self

    def __exit__(self, *_: object) -> None:
        mx.fast.scaled_dot_product_attention = self._attention
        mx.contiguous = self._contiguous
        gated_delta.gated_delta_ops = self._delta

    def _recurrence(self, q: mx.array, k: mx.array, v: mx.array, *given: Any, **named: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._delta(q, k, v, *given, **named)
        self.recurrences += 1
        if not self._kernels:
            return self._delta(q, k, v, *given, **named)
        _, _, state, *_ = given
        needs = [a for a in (k, v, state) if isinstance(a, mx.array)]
        out = mx.depends(mx.abs(mx.broadcast_to(q[:, :, :1, :1], v.shape)), needs)
        return out, mx.abs(state) if isinstance(state, mx.array) else state

    def _copy(self, array: mx.array, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._contiguous(array, *args, **kwargs)
        return mx.abs(array)

    def _stand_in(self, q: mx.array, k: mx.array, v: mx.array, **given: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._attention(q, k, v, **given)
        mask, sinks = given.get("mask"), given.get("sinks")
        rows = k.shape[2]
        self.calls.append(
            AttentionCall(
                batch=q.shape[0],
                q_heads=q.shape[1],
                kv_heads=k.shape[1],
                queries=q.shape[2],
                key_dim=q.shape[3],
                value_dim=v.shape[3],
                itemsize=q.dtype.size,
                mask=_mask_kind(mask),
                sinks=sinks is not None,
                window=None if rows == self._rows + self._n else rows,
            )
        )
        out = mx.abs(mx.broadcast_to(q[..., :1], (*q.shape[:3], v.shape[3])))
        needs = [a for a in (q, k, v, mask, sinks) if isinstance(a, mx.array)]
        missing = _STAND_IN_INPUTS + len(self.calls) - 2 - len(needs)
        return mx.depends(out, [*needs, *[q] * missing])


def _mask_kind(mask: Any) -> MaskKind:
    if mask is None:
        return "none"
    if isinstance(mask, str):
        return "causal"
    return "bool" if mask.dtype == mx.bool_ else "additive"


# -- the account: which buffers are alive at each operation -------------------------------------------------------------

#: Operations whose result is another view of their first input's buffer.
_VIEWS = frozenset(
    {
        "AsStrided",
        "Broadcast",
        "BroadcastAxes",
        "Copy",
        "Depends",
        "DynamicSlice",
        "ExpandDims",
        "Flatten",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "StopGradient",
        "Transpose",
        "Unflatten",
        "View",
    }
)

#: Views after which neighbours in the array are not neighbours in memory, so that a later reshape has to copy.
_STRIDING = frozenset(
    {"AsStrided", "Broadcast", "BroadcastAxes", "DynamicSlice", "Slice", "Split", "Transpose"}
)
_RESHAPING = frozenset({"Flatten", "Reshape"})

#: Operations that never write into an input's buffer, though result and input are equally large.
_FRESH = frozenset(
    {"Arange", "Concatenate", "Full", "Gather", "GatherAxis", "Matmul", "AddMM", "GatherMM", "Reduce"}
)

#: Operations that may wait before MLX goes into depth (its ``MLX_BFS_MAX_WIDTH``).
_WIDTH = 20

#: Operations for which MLX is assumed to allocate while an earlier one still runs; it queues a bounded number.
_AHEAD = 10

#: Inputs of the stand-in for the first attention call: its own array, queries, keys, values, mask, sinks, and repeats
#: of the queries up to this number. Every further call's has one more.
_STAND_IN_INPUTS = 7


def _account(
    few: _Graph, many: _Graph, rows: tuple[int, int], vocab: int
) -> tuple[tuple[Line, ...], tuple[tuple[AttentionCall, tuple[Line, ...]], ...], int]:
    """Walk both graphs side by side and keep the moments that are worst for some number of rows."""
    order = _evaluation_order(few)
    moments, taken, end = _alive(few, many, order, lambda shape: shape[-1:] != (vocab,))
    calls: dict[AttentionCall, list[tuple[int, int]]] = {}
    for at, i in enumerate(order):
        number = _stand_in_for(few.operations[i])
        if number is not None:
            ahead = taken[min(at + _AHEAD, len(taken) - 1)]
            both = (moments[at][k] + ahead[k] - taken[at][k] for k in (0, 1))
            calls.setdefault(few.calls[number], []).append((next(both), next(both)))
    most_wide = 0
    if any(shape[-1:] == (vocab,) for one in few.operations for _, shape, _ in one.outputs):
        wide, _, _ = _alive(few, many, order, lambda shape: shape[-1:] == (vocab,))
        most_wide = max(alive[0] for alive in wide)
    return (
        _envelope(moments, end, rows),
        tuple((call, _envelope(alive, end, rows)) for call, alive in calls.items()),
        most_wide,
    )


def _alive(
    few: _Graph, many: _Graph, order: list[int], counts: Callable[[tuple[int, ...]], bool]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], tuple[int, int]]:
    """Bytes in both graphs: alive while each operation runs, allocated in all up to it, and alive after the last.

    Only arrays whose shape ``counts`` are counted.
    """

    def size(one: _Shaped, other: _Shaped) -> tuple[int, int]:
        return (_nbytes(one), _nbytes(other)) if counts(one[1]) else (0, 0)

    uses: dict[str, int] = dict.fromkeys(few.outputs, 1)
    for operation in few.operations:
        for name, _, _ in operation.inputs:
            uses[name] = uses.get(name, 0) + 1
    book = _Book(uses, free=few.weights)
    for a, b in zip(few.state, many.state, strict=True):
        book.hold(a[0], size(a, b))
    moments, taken = [], []
    for i in order:
        one, other = few.operations[i], many.operations[i]
        for a, b in zip(one.outputs, other.outputs, strict=True):
            book.write(one, a[0], size(a, b))
        moments.append(book.alive)
        taken.append(book.taken)
        book.read(one)
    return moments, taken, book.alive


def _stand_in_for(operation: _Operation) -> int | None:
    """The number of the attention call that an operation stands for; a call's stand-in counts it by its inputs."""
    if operation.name != "Depends" or len(operation.inputs) < _STAND_IN_INPUTS:
        return None
    return len(operation.inputs) - _STAND_IN_INPUTS


def _evaluation_order(graph: _Graph) -> list[int]:
    """Indices of the operations in the order in which ``mx.eval`` carries them out.

    MLX walks from the results towards the inputs, level by level, an operation after all of its readers, and does
    what it met last first. Where more than :data:`_WIDTH` operations wait it goes into depth.
    """
    maker = {name: i for i, one in enumerate(graph.operations) for name, _, _ in one.outputs}
    inputs = [[maker[name] for name, _, _ in one.inputs if name in maker] for one in graph.operations]
    inputs.append([maker[name] for name in graph.outputs if name in maker])
    readers: dict[int, int] = {}
    waiting = [len(graph.operations)]
    while waiting:
        for i in inputs[waiting.pop()]:
            if i not in readers:
                waiting.append(i)
            readers[i] = readers.get(i, 0) + 1
    met, at, put_off = [len(graph.operations)], 0, list[tuple[int, int]]()
    while readers:
        if at < len(met):
            one, first = met[at], 0
            at += 1
        else:
            one, first = put_off.pop()
        for k in range(first, len(inputs[one])):
            if len(met) - at >= _WIDTH:
                put_off.append((one, k))
                break
            i = inputs[one][k]
            readers[i] -= 1
            if readers[i] == 0:
                del readers[i]
                met.append(i)
    return met[:0:-1]


class _Book:
    """Buffers alive, with their bytes in both graphs.

    MLX frees a buffer after its last reader, and writes a result into an input's buffer where that has no other
    reader and is as large.
    """

    def __init__(self, uses: dict[str, int], free: frozenset[str]) -> None:
        self.alive = self.taken = (0, 0)
        self._uses = uses
        self._buffer: dict[str, str] = {}  # array → buffer that holds it
        self._size: dict[str, tuple[int, int]] = {}
        self._arrays: dict[str, int] = {}  # buffer → arrays that still need it
        self._free = free
        self._strided: set[str] = set()

    def hold(self, name: str, size: tuple[int, int]) -> None:
        self._buffer[name], self._size[name], self._arrays[name] = name, size, 1
        self.alive = (self.alive[0] + size[0], self.alive[1] + size[1])
        self.taken = (self.taken[0] + size[0], self.taken[1] + size[1])

    def write(self, operation: _Operation, name: str, size: tuple[int, int]) -> None:
        old = self._reused(operation, size)
        if old is None:
            self.hold(name, size)
        else:
            self._buffer[name] = old
            self._arrays[old] += 1

    def _reused(self, operation: _Operation, size: tuple[int, int]) -> str | None:
        if operation.name in _VIEWS and operation.inputs:
            viewed = operation.inputs[0][0]
            if operation.name in _RESHAPING and viewed in self._strided:
                return None
            if operation.name in _STRIDING or viewed in self._strided:
                self._strided.add(operation.outputs[0][0])
            return self._viewed(viewed)
        if operation.name in _FRESH:
            return None
        for name, _, _ in operation.inputs:
            buffer = self._buffer.get(name)
            if (
                buffer is not None
                and self._uses.get(name) == 1
                and self._arrays[buffer] == 1
                and self._size[buffer] == size
            ):
                return buffer
        return None

    def _viewed(self, name: str) -> str:
        """The buffer of an array; weights and constants take nothing."""
        if name not in self._buffer:
            self._buffer[name], self._size[name], self._arrays[name] = name, (0, 0), 1
        return self._buffer[name]

    def read(self, operation: _Operation) -> None:
        for name, _, _ in operation.inputs:
            self._uses[name] -= 1
            if self._uses[name] == 0 and name not in self._free:
                self._drop(name)
        for name, _, _ in operation.outputs:
            if self._uses.get(name, 0) == 0:
                self._drop(name)

    def _drop(self, name: str) -> None:
        buffer = self._buffer.get(name)
        if buffer is None:
            return
        self._arrays[buffer] -= 1
        if self._arrays[buffer] == 0 and buffer not in self._free:
            size = self._size[buffer]
            self.alive = (self.alive[0] - size[0], self.alive[1] - size[1])


def _nbytes(shaped: _Shaped) -> int:
    return math.prod(shaped[1]) * shaped[2].size


def _envelope(alive: list[tuple[int, int]], end: tuple[int, int], rows: tuple[int, int]) -> tuple[Line, ...]:
    """The lines over rows that are highest somewhere between none and infinitely many rows."""
    lines = {
        Line((few - end[0]) - slope * rows[0], slope)
        for few, many in set(alive)
        for slope in [((many - end[1]) - (few - end[0])) / (rows[1] - rows[0])]
    }
    kept: list[Line] = []
    for line in sorted(lines, key=lambda one: (-one.fixed, -one.per_row)):
        if not kept or line.per_row > kept[-1].per_row:
            kept.append(line)
    return tuple(replace(one, fixed=max(0.0, one.fixed)) for one in kept)
