"""What a step or an action takes for a while beside what is held, cause by cause, and the peak that follows.

The peak of a step is what is held after it, plus what exists together at its worst moment: the old buffer of a layer
that grows, and at the same time either an attention call (scores, masks, copies of packed rows, and whatever else is
alive then) or the worst moment between attention calls. Logits come after the last layer and meet neither. An action is
carried out between steps, one layer at a time, and meets no step. MLX's pool of freed buffers is not in any figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Literal

import mlx.core as mx

from .actions import Action, Keep, Quantize
from .errors import EstimateInputError
from .estimate import (
    Held,
    after_action,
    after_append,
    chunk_schedule,
    growth_nbytes,
    layout_of,
    merge_equal,
    nbytes_allocated,
    nbytes_live,
    peak_of_action,
    row_nbytes,
)
from .kernels import AttentionCall, Device, device_named, is_fused_here
from .shape import ModelShape
from .trace import Line, StepTrace

__all__ = ["Estimate", "Transient", "Wanted", "estimate_run", "longest_context", "of_action", "of_step"]

#: When an action is carried out: once after the prompt, or after every chunk of it.
When = Literal["end", "every_chunk"]


@dataclass(frozen=True)
class Transient:
    """Bytes beside what is held, by cause; those of one moment, except that ``logits`` have a moment of their own."""

    growth: int = 0  #: a layer's old buffer and the zeros that it is joined to, beside the new one
    conversion: int = 0  #: an action's new buffers of one layer, and its dense rows while they are re-encoded
    dequantise: int = 0  #: dense keys and values of one layer, where a codec decodes on fetch
    repeats: int = 0  #: packed rows copied for every query head
    scores: int = 0  #: score matrices and causal mask of one unfused attention call
    row_arrays: int = (
        0  #: other arrays that grow with the rows held: the model's own masks, scores, expanded latents
    )
    activations: int = 0  #: arrays that do not
    logits: int = 0  #: arrays as wide as the vocabulary

    @property
    def together(self) -> int:
        """The most that exists at once (bytes)."""
        step = self.growth + self.dequantise + self.repeats + self.scores + self.row_arrays + self.activations
        return max(step, self.conversion, self.logits)

    def to_record(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"together": self.together}


@dataclass(frozen=True)
class Wanted:
    """One question: a context, how it is processed, and what is done to its rows."""

    context: int  #: tokens of the prompt
    chunk: int = 2048  #: tokens per prefill step, mlx-lm's ``prefill_step_size``
    action: Action = Keep()
    when: When = "end"
    new_tokens: int = 1  #: decode steps after the prompt and the action

    def __post_init__(self) -> None:
        for name in ("context", "chunk"):
            if getattr(self, name) < 1:
                raise EstimateInputError(f"{name} = {getattr(self, name)}: expected at least one token")


@dataclass(frozen=True)
class Estimate:
    """The answer, in bytes. Weights are in none of the figures."""

    wanted: Wanted
    device: str
    measured_device: bool  #: whether the device's attention figures were measured
    resident: int  #: allocated for the cache after the prompt and the action
    live: int  #: of these, rows held
    peak: int  #: most that cache, step and action take at any moment up to the last decode step
    peak_at: str  #: which moment
    held_at_peak: int
    transient: Transient  #: of that moment
    complete: bool  #: False where what steps take is not known and only growth and conversion are counted

    def to_record(self) -> dict[str, object]:
        return {
            "context": self.wanted.context,
            "chunk": self.wanted.chunk,
            "action": str(self.wanted.action),
            "when": self.wanted.when,
            "device": self.device,
            "measured_device": self.measured_device,
            "resident": self.resident,
            "live": self.live,
            "peak": self.peak,
            "peak_at": self.peak_at,
            "held_at_peak": self.held_at_peak,
            "transient": self.transient.to_record(),
            "complete": self.complete,
        }


def estimate_run(shape: ModelShape, wanted: Wanted, device: Device | None = None) -> Estimate:
    """Bytes of processing a prompt in chunks, acting on its rows, and decoding on.

    Args:
        device: where it runs; None: where MLX runs here.

    Raises:
        EstimateInputError: the context or the chunk is less than one token.
    """
    device = device or device_named(None)
    layers = _layers(shape, wanted.action)
    decodes = _decodes_on_fetch(wanted.action)
    best: _Moment | None = None
    resident = live = 0
    for moment in _moments(shape, layers, wanted, device, decodes):
        if best is None or moment.peak > best.peak:
            best = moment
        if moment.prompt_done:
            resident, live = nbytes_allocated(moment.layers), nbytes_live(moment.layers)
    assert best is not None
    return Estimate(
        wanted=wanted,
        device=device.name,
        measured_device=device.measured,
        resident=resident,
        live=live,
        peak=best.peak,
        peak_at=best.name,
        held_at_peak=best.held,
        transient=best.transient,
        complete=bool(shape.steps),
    )


def longest_context(
    shape: ModelShape, nbytes: int, wanted: Wanted, device: Device | None = None, limit: int = 1 << 24
) -> int:
    """The longest context (tokens, at most ``limit``) whose peak stays within ``nbytes``; 0 if none does.

    The peak of a run contains the peaks of every shorter one but for its last chunk, so it rises with the context
    and can be searched by halving.
    """
    device = device or device_named(None)

    def fits(context: int) -> bool:
        return estimate_run(shape, replace(wanted, context=context), device).peak <= nbytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < limit and fits(high):
        low, high = high, high * 2
    if high >= limit:
        if fits(limit):
            return limit
        high = limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class _Moment:
    name: str
    layers: tuple[Held, ...]  #: afterwards
    held: int  #: bytes that the transient comes on top of
    transient: Transient
    prompt_done: bool = False

    @property
    def peak(self) -> int:
        return self.held + self.transient.together


def _layers(shape: ModelShape, action: Action) -> tuple[Held, ...]:
    """The shape's layers, equal ones counted together unless the action tells them apart by number."""
    merged = merge_equal(shape.layers)
    try:
        after_action(tuple(replace(one, rows=1, capacity=1) for one in merged), action)
    except ValueError:
        return shape.layers
    return merged


def _moments(
    shape: ModelShape, layers: tuple[Held, ...], wanted: Wanted, device: Device, decodes: bool
) -> Iterator[_Moment]:
    yield _Moment("before the first token", layers, nbytes_allocated(layers), Transient())
    seen, steps = 0, list(chunk_schedule(wanted.context, wanted.chunk))
    for i, n in enumerate(steps):
        last = i == len(steps) - 1
        encoded = decodes and any(one.bits for one in layers)
        moment = _step(shape, layers, n, device, f"prefill of {n} tokens after {seen}", last, encoded)
        layers, seen = moment.layers, seen + n
        acts = last or wanted.when == "every_chunk"
        yield replace(moment, prompt_done=last)
        if acts and wanted.action != Keep():
            moment = _action(layers, wanted.action, f"{wanted.action} after {seen} tokens")
            layers = moment.layers
            yield replace(moment, prompt_done=last)
    for _ in range(wanted.new_tokens):
        encoded = decodes and any(one.bits for one in layers)
        moment = _step(shape, layers, 1, device, f"decode after {seen} tokens", True, encoded)
        layers, seen = moment.layers, seen + 1
        yield moment


def _step(
    shape: ModelShape,
    layers: tuple[Held, ...],
    n: int,
    device: Device,
    name: str,
    logits: bool,
    decodes: bool,
) -> _Moment:
    after = after_append(layers, n)
    transient = of_step(shape, layers, n, device, logits=logits, decodes_on_fetch=decodes)
    return _Moment(name, after, nbytes_allocated(after), transient)


def _action(layers: tuple[Held, ...], action: Action, name: str) -> _Moment:
    return _Moment(name, _acted(layers, action), nbytes_allocated(layers), of_action(layers, action))


def _acted(layers: tuple[Held, ...], action: Action) -> tuple[Held, ...]:
    """``after_action``, except that rows which are packed already are not packed again."""
    packed = any(one.bits is not None for one in layers)
    for part in action.parts:
        if not (packed and isinstance(part, Quantize)):
            layers = after_action(layers, part)
    return layers


def of_action(layers: Sequence[Held], action: Action) -> Transient:
    """What carrying out ``action`` takes beside the layers as they are."""
    packed = any(one.bits is not None for one in layers)
    held = nbytes_allocated(layers)
    peak, now = held, tuple(layers)
    for part in action.parts:
        if packed and isinstance(part, Quantize):
            continue
        peak = max(peak, peak_of_action(now, part))
        now = after_action(now, part)
    return Transient(conversion=peak - held)


def of_step(
    shape: ModelShape,
    layers: Sequence[Held],
    n: int,
    device: Device,
    *,
    logits: bool = True,
    decodes_on_fetch: bool = False,
) -> Transient:
    """What a step of ``n`` tokens takes beside what the layers hold after it.

    Args:
        layers: before the step.
        logits: whether the step's logits are evaluated; mlx-lm does so for the prompt's last token and in decode.
        decodes_on_fetch: whether rows with ``bits`` are decoded to dense rows for attention (else they are packed).
    """
    growth = growth_nbytes(layers, n)
    if not shape.steps:
        return Transient(growth=growth)
    after = after_append(layers, n)
    rows = max((one.rows for one in after if one.kind == "kv" and one.key_width), default=0)
    rows = rows or max((one.offset for one in after), default=0)
    encoded = max(
        (one for one in after if one.bits), key=lambda one: one.rows * row_nbytes(one), default=None
    )
    steps = _nearest(shape.steps if device.name == "cpu" else shape.gpu_steps, n, logits)
    moments = [_between_calls(steps, n, rows)]
    for i in range(len(steps[0].calls)):
        moments.append(_at_call(steps, i, n, rows, device, encoded, decodes_on_fetch))
    worst = max(moments, key=lambda moment: moment.together)
    wide = n * next(s.vocabulary // s.n for s in shape.steps if s.logits) if logits else 0
    return replace(worst, growth=growth, logits=wide)


def _between_calls(steps: Sequence[StepTrace], n: int, rows: int) -> Transient:
    fixed, per_row = _highest([s.quiet for s in steps], steps, n, rows)
    return Transient(row_arrays=round(per_row * rows), activations=round(fixed))


def _at_call(
    steps: Sequence[StepTrace],
    i: int,
    n: int,
    rows: int,
    device: Device,
    encoded: Held | None,
    decodes_on_fetch: bool,
) -> Transient:
    fixed, per_row = _highest([s.calls[i][1] for s in steps], steps, n, rows)
    call, traced = steps[0].calls[i][0], steps[0].n
    here = rows
    if call.window is not None:
        here = min(rows, call.window + n - traced)
    # Calls that fold the tokens into the batch keep one query each.
    call = (
        replace(call, queries=n) if call.queries == traced else replace(call, batch=call.batch * n // traced)
    )
    others = Transient(row_arrays=round(per_row * rows), activations=round(fixed))
    if encoded is None or call.window is not None:
        return replace(others, scores=device.dense_nbytes(call, here, _fused(device, call, here)))
    if decodes_on_fetch:
        dense = (encoded.key_width + encoded.value_width) * encoded.itemsize * encoded.rows
        return replace(
            others, dequantise=dense, scores=device.dense_nbytes(call, here, _fused(device, call, here))
        )
    layer = encoded.rows * row_nbytes(encoded)
    repeats = device.repeats_nbytes(call, layer)
    return replace(others, repeats=repeats, scores=device.packed_nbytes(call, here, layer) - repeats)


def _fused(device: Device, call: AttentionCall, rows: int) -> bool:
    """As MLX says where the device is the one in this machine; else by the table."""
    if device.name == "cpu" or mx.default_device() == mx.cpu or device != device_named(None):
        return device.is_fused(call)
    # Whether a kernel serves the call depends on few things, and not on the exact number of rows.
    return _asked(call, max(call.queries, min(rows, 4096)))


_asked = cache(is_fused_here)


def _nearest(steps: Sequence[StepTrace], n: int, logits: bool) -> tuple[StepTrace, ...]:
    """The followed steps to draw a line through: the one of n tokens itself, else two lengths."""
    exact = tuple(s for s in steps if s.n == n)
    several = tuple(s for s in steps if s.n > 1)
    for found in (exact, several):
        alike = tuple(s for s in found if s.logits == logits)
        if alike or found:
            return alike or found
    raise AssertionError("steps of several tokens are always followed")


def _through(values: Sequence[float], steps: Sequence[StepTrace], n: int) -> float:
    if len(values) == 1:
        return values[0]
    (a, b), (first, second) = values, (s.n for s in steps)
    return max(0.0, a + (b - a) / (second - first) * (n - first))


def _highest(
    envelopes: Sequence[Sequence[Line]], steps: Sequence[StepTrace], n: int, rows: int
) -> tuple[float, float]:
    """(fixed, per row) of the line that is highest at ``rows``, drawn through to ``n`` tokens."""
    lines = [max(envelope, key=lambda line: line.at(rows)) for envelope in envelopes]
    return _through([x.fixed for x in lines], steps, n), _through([x.per_row for x in lines], steps, n)


def _decodes_on_fetch(action: Action) -> bool:
    """Whether rows re-encoded by ``action`` are decoded for attention: mlx-lm's packed attention reads affine rows of
    one width for keys and values, and nothing else."""
    return any(isinstance(part, Quantize) and not layout_of(part).packed for part in action.parts)
