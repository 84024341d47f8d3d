"""Peaks of memory, ours beside mlx-lm's own: of converting, evicting and growing a full cache, and of reading a prompt.

    python benchmarks/peaks.py [--json FILE] [--page docs/memory.md]
    python benchmarks/peaks.py --from docs/data/peaks.json --page docs/memory.md

The model is SmolLM2-135M in float32 on the default device. A peak is ``mx.get_peak_memory`` while something is done, over
what was active before it with everything evaluated and MLX's pool empty; of repeated measurements the largest counts. Rows
of the first part are normal random numbers, put into the cache without running the model; the second part runs it.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lumina_cache.lab.blas import preload_openblas

preload_openblas()

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from lumina_cache import LuminaCache  # noqa: E402
from lumina_cache.actions import Keep, parse_action  # noqa: E402
from lumina_cache.apply import held_all  # noqa: E402
from lumina_cache.errors import AnalysisError  # noqa: E402
from lumina_cache.estimate import after_append, growth_nbytes, nbytes_allocated, peak_of_action  # noqa: E402
from lumina_cache.lab.answer import arrays_nbytes  # noqa: E402
from lumina_cache.lab.corpus import demo_document  # noqa: E402
from lumina_cache.lab.evaluate.provenance import conditions, provenance  # noqa: E402
from lumina_cache.lab.models import load_model  # noqa: E402
from lumina_cache.layers import leaves  # noqa: E402
from lumina_cache.pages import update_page  # noqa: E402
from lumina_cache.shape import ModelShape, shape_from_model  # noqa: E402
from lumina_cache.transient import Wanted, estimate_run  # noqa: E402

STOCK = "mlx-lm"
BITS, GROUP = 4, 64

CONVERSIONS = (
    f"quant:affine,bits={BITS},group={GROUP}",
    f"quant:hadamard,bits={BITS},group={GROUP}",
    f"quant:kivi_hadamard,bits={BITS},group={GROUP}",
)
EVICTIONS = ("evict:sinks_window@0.50", "evict:keydiff@0.50")
#: Tokens that room is reserved for.
AHEAD = 1024


# -- rows, without the model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """One thing done to a cache. Bytes; ``peak`` and ``predicted`` are over what was active before."""

    what: str  #: "convert", "evict", "reserve" or "grow"
    how: str  #: mlx-lm's own way, or the action
    rows: int
    tokens: int  #: appended one at a time, of what grows
    before: int  #: of the cache's arrays
    after: int
    peak: int  #: the largest of the repeated measurements
    least: int  #: the smallest of them
    predicted: int | None  #: None for what no estimate is made of


@dataclass(frozen=True)
class Case:
    """How to measure one operation: a cache, what is done before the measurement, and what is measured."""

    what: str
    how: str
    make: Callable[[], Any]
    before: tuple[Callable[[Any], object], ...]
    measured: Callable[[Any], int]  #: returns the tokens appended
    predict: Callable[[Any], int] | None


def settle(cache: Iterable[Any]) -> None:
    mx.eval([entry.state for entry in cache])


def fill(cache: Any, rows: int, shape: tuple[int, int]) -> None:
    """Put ``rows`` random rows of (heads, head dim) into every layer, as one step; a copy of the same ones each."""
    heads, dim = shape
    keys, values = mx.random.normal((2, 1, heads, rows, dim), key=mx.random.key(0))
    mx.eval(keys, values)
    for layer in cache:
        _ = layer.update_and_fetch(keys + 0, values + 0)
        settle([layer])


def quantized_by_mlx_lm(cache: list[Any]) -> int:
    """What ``mlx_lm.generate`` does with ``kv_bits``."""
    maybe_quantize_kv_cache(cache, quantized_kv_start=0, kv_group_size=GROUP, kv_bits=BITS)
    settle(cache)
    return 0


def acted(action: str) -> Callable[[Any], int]:
    def act(cache: Any) -> int:
        assert cache.apply(action) is not None, "between two steps"
        settle(cache)
        return 0

    return act


def grown(tokens: int | None, shape: tuple[int, int], most: int = 256) -> Callable[[Any], int]:
    """Appends ``tokens`` single tokens, or as many as it takes for the buffers to grow. Layers are evaluated in turn, as
    they are in a model, where each needs the output of the one before."""

    def grow(cache: Any) -> int:
        heads, dim = shape
        held = arrays_nbytes(list(cache))
        row = mx.ones((1, heads, 1, dim))
        for n in range(1, (tokens or most) + 1):
            for layer in cache:
                _ = layer.update_and_fetch(row, row)
                settle([layer])
            if tokens is None and arrays_nbytes(list(cache)) > held:
                return n
        assert tokens is not None, f"no buffer grew within {most} tokens"
        return tokens

    return grow


def predicted_growth(tokens: int) -> Callable[[Any], int]:
    """The estimator's peak of appending single tokens, over what was held before."""

    def predict(cache: Any) -> int:
        layers = held_all(leaves(cache))
        before = most = nbytes_allocated(layers)
        for _ in range(tokens):
            beside = growth_nbytes(layers, 1)
            layers = after_append(layers, 1)
            most = max(most, nbytes_allocated(layers) + beside)
        return most - before

    return predict


def predicted_action(action: str) -> Callable[[Any], int]:
    def predict(cache: Any) -> int:
        layers = held_all(leaves(cache))
        return peak_of_action(layers, parse_action(action)) - nbytes_allocated(layers)

    return predict


def cases(model: Any, rows: int, shape: tuple[int, int]) -> Iterator[Case]:
    """Everything that is measured at ``rows`` rows. What grows starts with buffers that have no room left."""

    def stock() -> Any:
        return make_prompt_cache(model)

    def ours() -> Any:
        return LuminaCache(model, policy="off", telemetry=False)

    yield Case("convert", STOCK, stock, (), quantized_by_mlx_lm, None)
    for action in CONVERSIONS:
        yield Case("convert", action, ours, (), acted(action), predicted_action(action))
    for action in EVICTIONS:
        yield Case("evict", action, ours, (), acted(action), predicted_action(action))
    room = f"reserve:{rows + AHEAD}"
    yield Case("reserve", room, ours, (), acted(room), predicted_action(room))
    yield Case("grow", STOCK, stock, (), grown(None, shape), None)
    yield Case("grow", "keep", ours, (), grown(None, shape), predicted_growth(1))
    yield Case("grow", "reserve", ours, (acted(room),), grown(1, shape), predicted_growth(1))
    yield Case("grow", f"{STOCK}, {BITS} bits", stock, (quantized_by_mlx_lm,), grown(None, shape), None)
    for action in CONVERSIONS:
        layout = parse_action(action).layout  # type: ignore[attr-defined]
        # Rows are sealed in units; of these, so many are missing to one more.
        tokens = 1 if layout.unit == 1 else layout.unit - (rows - layout.sinks) % layout.unit
        yield Case("grow", action, ours, (acted(action),), grown(None, shape), predicted_growth(tokens))
        before = (acted(action), acted(room))
        yield Case("grow", f"{action}+reserve", ours, before, grown(tokens, shape), predicted_growth(tokens))


def measure(case: Case, rows: int, shape: tuple[int, int]) -> Operation:
    cache = case.make()
    fill(cache, rows, shape)
    for step in case.before:
        step(cache)
    predicted = None if case.predict is None else case.predict(cache)
    before = arrays_nbytes(list(cache))
    gc.collect()
    mx.clear_cache()
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    tokens = case.measured(cache)
    peak = max(0, mx.get_peak_memory() - active)  # MLX has no peak where nothing was allocated
    after = arrays_nbytes(list(cache))
    return Operation(case.what, case.how, rows, tokens, before, after, peak, peak, predicted)


def operations(
    model: Any, lengths: Sequence[int], shape: tuple[int, int], repeats: int
) -> Iterator[Operation]:
    # The probe runs the model once; that is no part of any operation.
    warm = LuminaCache(model, policy="off", telemetry=False)
    fill(warm, 64, shape)
    acted(CONVERSIONS[0])(warm)
    del warm
    for rows in lengths:
        for case in cases(model, rows, shape):
            again = [measure(case, rows, shape) for _ in range(repeats)]
            yield replace(max(again, key=lambda one: one.peak), least=min(one.peak for one in again))


# -- a prompt, through the model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to read a prompt with 4-bit rows (or dense ones, for comparison)."""

    name: str
    rung: str | None  #: None: mlx-lm's own cache
    action: str | None  #: carried out after the first chunk, which is when mlx-lm packs
    kv_bits: int | None = None
    observe: tuple[str, ...] | None = None  #: as that of ``LuminaCache``

    def cache(self, model: Any) -> Any:
        if self.rung is None:
            return make_prompt_cache(model)
        return LuminaCache(model, policy="off", telemetry=False, rung=self.rung, observe=self.observe)


WAYS = (
    Way("mlx-lm, dense", None, None),
    Way("mlx-lm, kv_bits=4", None, None, BITS),
    Way("rung hook", "hook", f"quant:hadamard_packed,bits={BITS},group={GROUP}"),
    Way("rung hook", "hook", f"quant:kivi_packed,bits={BITS},group={GROUP}"),
    Way("rung cache", "cache", f"quant:hadamard,bits={BITS},group={GROUP}"),
    Way("rung hook, `observe=()`", "hook", f"quant:hadamard_packed,bits={BITS},group={GROUP}", observe=()),
)


@dataclass(frozen=True)
class Prompt:
    """A prompt of ``context`` tokens, read. Bytes."""

    way: str
    action: str | None
    context: int
    filled: int  #: rows that were put in without running the model; only the rest was read
    held: int  #: of the cache's arrays afterwards
    peak: int  #: over what was active before there was a cache: the weights are not in it
    predicted: int | None


def read_prompt(
    model: Any, ids: Sequence[int], way: Way, context: int, chunk: int, shape: tuple[int, int], *, whole: bool
) -> Prompt:
    """Read a prompt as ``mlx_lm.generate`` does, or the last chunk of it behind random rows.

    What a chunk takes grows with the rows before it, but the first one, whose rows are not encoded yet.

    Args:
        ids: tokens to read; as many as ``context``, and one that mlx-lm samples from.
        whole: read from the first token on.
    """
    filled = 0 if whole else context - chunk
    if way.action is not None:  # the probe runs the model; that is no part of reading
        probed = way.cache(model)
        fill(probed, chunk, shape)
        probed.apply(way.action)
        probed.close()
        del probed
    gc.collect()
    mx.clear_cache()
    active = mx.get_active_memory()
    cache = way.cache(model)
    if filled:
        fill(cache, filled, shape)
        if way.kv_bits is not None:
            quantized_by_mlx_lm(cache)
        if way.action is not None:
            acted(way.action)(cache)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    peaks: list[int] = []

    def progress(done: int, _total: int) -> None:
        if done == chunk and way.action is not None and not filled:
            assert cache.apply(way.action) is not None, "between two chunks"
        if done == context - filled:
            peaks.append(mx.get_peak_memory() - active)
            peaks.append(arrays_nbytes(list(cache)))

    steps = generate_step(
        mx.array(ids[filled : context + 1]),
        model,
        max_tokens=0,
        prompt_cache=cache,
        prefill_step_size=chunk,
        kv_bits=way.kv_bits,
        kv_group_size=GROUP,
        quantized_kv_start=0,
        prompt_progress_callback=progress,
    )
    assert list(steps) == []
    if way.rung is not None:
        cache.close()
    predicted = predicted_reading(shape_from_model(model), way, context, chunk)
    return Prompt(way.name, way.action, context, filled, peaks[1], peaks[0], predicted)


def predicted_reading(shape: ModelShape, way: Way, context: int, chunk: int) -> int | None:
    """The estimator's peak; None for attention over codes of our own, which it does not know."""
    if way.rung == "hook":
        return None
    text = CONVERSIONS[0] if way.kv_bits else way.action
    action = Keep() if text is None else parse_action(text)
    wanted = Wanted(context, chunk, action, when="every_chunk", new_tokens=0)
    return estimate_run(shape, wanted).peak


# -- the page ----------------------------------------------------------------------------------------------------------


def mb(nbytes: int | None) -> str:
    return "–" if nbytes is None else f"{nbytes / 1e6:,.2f}"


def span(least: int, most: int) -> str:
    """One figure, or two where they are more than a twentieth apart."""
    return mb(most) if most - least <= most // 20 else f"{mb(least)} … {mb(most)}"


def tables(record: Mapping[str, Any]) -> str:
    """The tables of a written record."""
    header = record["conditions"]
    lines = [
        f"{header['model']['name']}, {header['model']['dtype'].removeprefix('mlx.core.')}, {header['device']}, "
        f"mlx {header['mlx']}, mlx-lm {header['mlx_lm']}. Megabytes of 10⁶ bytes."
    ]
    lengths = sorted({one["rows"] for one in record["operations"]})
    for what, title in TITLES.items():
        lines += ["", *_operations(record, what, title, lengths)]
    contexts = sorted({one["context"] for one in record["prompts"] if not whole(one)})
    if contexts:
        lines += ["", *_prompts(record, contexts)]
    return "\n".join(lines)


TITLES = {
    "convert": "Converting a full dense cache to 4 bits",
    "evict": "Evicting half of the rows",
    "reserve": "Reserving room for 1,024 rows more",
    "grow": "Growing: single tokens until buffers that are full have grown, or as many into reserved room",
}


def _operations(record: Mapping[str, Any], what: str, title: str, lengths: Sequence[int]) -> Iterator[str]:
    found = {(one["how"], one["rows"]): one for one in record["operations"] if one["what"] == what}
    hows = list(dict.fromkeys(how.split(":")[0] if what == "reserve" else how for how, _ in found))
    yield f"**{title}**"
    yield ""
    yield f"| | {' | '.join(f'{n:,} rows: peak | predicted' for n in lengths)} |"
    yield f"| --- |{' ---: | ---: |' * len(lengths)}"
    for how in hows:
        cells = []
        for rows in lengths:
            one = next(
                (v for (h, n), v in found.items() if n == rows and (h == how or h.split(":")[0] == how)), None
            )
            cells += ["–", "–"] if one is None else [span(one["least"], one["peak"]), mb(one["predicted"])]
        name = how if how.startswith(STOCK) else f"`{how}`"
        yield f"| {name} | {' | '.join(cells)} |"


def _prompts(record: Mapping[str, Any], contexts: Sequence[int]) -> Iterator[str]:
    chunk = record["chunk"]
    found = {(one["way"], one["action"], one["context"]): one for one in record["prompts"] if not whole(one)}
    read = {(one["way"], one["action"], one["context"]): one for one in record["prompts"] if whole(one)}
    ways = dict.fromkeys((one["way"], one["action"]) for one in record["prompts"])
    yield f"**Reading a prompt in chunks of {chunk}**"
    yield ""
    heads = " | ".join(f"{n:,} tokens: peak | predicted" for n in contexts)
    yield f"| | first chunk | {heads} | rows held at {contexts[-1]:,} |"
    yield f"| --- | ---: |{' ---: | ---: |' * len(contexts)} ---: |"
    for way, action in ways:
        first = read.get((way, action, chunk))
        row = [found.get((way, action, n)) for n in contexts]
        cells = [mb(None if first is None else first["peak"])]
        for one in row:
            known = one is not None and first is not None
            cells.append(mb(max(one["peak"], first["peak"]) if known else None))
            cells.append(mb(None if one is None else one["predicted"]))
        name = way if action is None else f"{way}, `{action}`"
        yield f"| {name} | {' | '.join(cells)} | {mb(None if row[-1] is None else row[-1]['held'])} |"
    compared = []
    for key, one in read.items():
        first, last = read.get((*key[:2], chunk)), found.get(key)
        if first is not None and last is not None:
            times = one["peak"] / max(first["peak"], last["peak"])
            compared.append(f"{times:.2f} times ({one['action'] or one['way']}, {one['context']:,} tokens)")
    if compared:
        yield ""
        yield f"Read from the first token to the last, a prompt took {', '.join(compared)} the figure above."


def whole(prompt: Mapping[str, Any]) -> bool:
    """Whether the prompt was read from the first token on."""
    return bool(prompt["filled"] == 0)


PART = "peaks"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=[1024, 2048, 4096, 8192], help="multiples of the chunk"
    )
    parser.add_argument(
        "--whole", type=int, nargs="*", default=[], help="contexts to read from the first token on too"
    )
    parser.add_argument("--ways", type=int, nargs="*", help="only those of WAYS, by number")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--page", type=Path, help="put the tables between the marks of this Markdown page")
    parser.add_argument(
        "--from",
        dest="records",
        type=Path,
        nargs="+",
        help="files written before, put together: nothing is run",
    )
    options = parser.parse_args(arguments)
    if options.records:
        record = joined([json.loads(path.read_text("utf-8")) for path in options.records])
        write(record, options.json)
    else:
        record = run(options)
    if options.page:
        update_page(options.page, PART, tables(record))
    print(tables(record))


def joined(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Records of several runs as one.

    Raises:
        AnalysisError: they were made under different conditions.
    """
    first = records[0]
    for one in records[1:]:
        for name in ("kind", "conditions", "chunk"):
            if one[name] != first[name]:
                raise AnalysisError(f"{name}: {first[name]} in one record and {one[name]} in another")
    lists = ("provenance", "operations", "prompts")
    return {**first, **{name: [item for one in records for item in one[name]] for name in lists}}


def write(record: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def run(options: argparse.Namespace) -> dict[str, Any]:
    loaded = load_model()
    model = loaded.model
    attention = model.layers[0].self_attn
    shape = attention.n_kv_heads, attention.k_proj.weight.shape[0] // attention.n_kv_heads
    record: dict[str, Any] = {
        "kind": "lumina-cache peaks of memory",
        "conditions": conditions(loaded),
        "provenance": [provenance()],
        "repeats": options.repeats,
        "chunk": options.chunk,
        "operations": [],
        "prompts": [],
    }
    for one in operations(model, options.rows, shape, options.repeats):
        record["operations"].append(asdict(one))
        print(
            f"{one.rows:6d} {one.what:8s} {one.how:45s} {one.tokens:3d} tokens {mb(one.before)} -> {mb(one.after)} "
            f"peak {mb(one.least)} … {mb(one.peak)}, predicted {mb(one.predicted)}",
            flush=True,
        )
        write(record, options.json)
    text = loaded.tokenizer.encode(demo_document().text)
    longest = max([*options.contexts, *options.whole, 0]) + 1
    ids = (text * -(-longest // len(text)))[:longest]
    for way in WAYS if options.ways is None else [WAYS[i] for i in options.ways]:
        first = [options.chunk] if options.contexts else []
        lengths = [
            *((n, n not in first) for n in (*first, *options.contexts)),
            *((n, False) for n in options.whole),
        ]
        for context, behind in lengths:
            read = read_prompt(model, ids, way, context, options.chunk, shape, whole=not behind)
            record["prompts"].append(asdict(read))
            print(
                f"{read.way:20s} {read.action or '':40s} {read.context:6d} tokens, {read.filled:6d} filled, "
                f"{mb(read.held)} held, peak {mb(read.peak)}, predicted {mb(read.predicted)}",
                flush=True,
            )
            write(record, options.json)
    return record


if __name__ == "__main__":
    main()
