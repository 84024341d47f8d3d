"""The vocabulary of actions on a KV cache: pure values with a text form that round-trips.

Four families (allocate, reclaim, compress, offload), composites of them, plans by layer, and the no-op::

    keep                                     hold everything as it is
    reserve:8192                             allocate for 8,192 rows ahead
    page:64                                  store rows in pages of 64
    reclaim                                  give back unused allocation and MLX's buffer pool
    evict:sinks_window@0.50                  keep half of the rows held, by a scorer
    evict:keydiff@rows=2048,sinks=4,recent=64   keep 2,048 rows; sinks first and recent last ones are protected
    quant:affine,bits=4,group=64             re-encode rows as packed 4-bit codes in groups of 64
    quant:kivi,kbits=3,vbits=4,group=32      separate bits for keys and values
    quant:hadamard,bits=4,group=64,residual=64   the 64 newest rows stay dense
    merge:minicache                          share the rows of neighbouring layers
    offload:layers=0-7                       move whole layers to disk
    offload:cold@0.50                        keep half of the rows in memory, move the oldest to disk
    evict:sinks_window@0.50+quant:affine,bits=8,group=64     a composite, carried out left to right
    0-7:quant:affine,bits=8,group=64;8-31:keep               a plan: layer ranges → actions

What each method needs of a backend is in the catalogue, :data:`lumina_cache.methods.METHODS`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .backend.capabilities import DENSE_REENCODE, RAGGED_LAYERS, Capability, Rung, packed_attention
from .codecs import CODECS, Layout
from .errors import ActionSyntaxError
from .methods import METHODS, Method, methods_of

__all__ = [
    "ACTION_SPACE_VERSION",
    "DEFAULT_RATIOS",
    "DEFAULT_SINKS",
    "Action",
    "Composite",
    "Evict",
    "Keep",
    "Merge",
    "Offload",
    "Page",
    "Plan",
    "Quantize",
    "Reclaim",
    "Reserve",
    "action_space",
    "evicts",
    "in_ranges",
    "parse_action",
    "singles",
]

#: Changes whenever :func:`action_space` returns another list for the same arguments.
ACTION_SPACE_VERSION = "5"

#: Codecs that are stored as mlx-lm's packed attention reads them.
_READ_PACKED = ("affine", "affine_steps")

#: Attention sinks kept by default, after Xiao et al., StreamingLLM, arXiv:2309.17453.
DEFAULT_SINKS = 4

DEFAULT_RATIOS = (0.75, 0.5, 0.375, 0.25, 0.125)

#: Ratios that composites are made with by default: all of them would square the grid.
COMPOSITE_RATIOS = (0.5, 0.25)


@dataclass(frozen=True)
class Action:
    """Base of all actions. Values: comparable, hashable, and printed in the text form that the parser reads."""

    @property
    def method(self) -> Method | None:
        """The catalogue's entry; None for the no-op, giving back, composites and plans."""
        return None

    @property
    def requires(self) -> frozenset[Capability]:
        """Capabilities without which no backend can execute this action."""
        return frozenset() if self.method is None else self.method.requires

    @property
    def rung(self) -> Rung:
        """The deepest rung among what the action requires."""
        return max((c.rung for c in self.requires), default=Rung.NATIVE)

    @property
    def lossy(self) -> bool:
        """Whether attention may see something else afterwards."""
        return self.method is not None and self.method.lossy

    @property
    def undoable(self) -> bool:
        """Whether the rows can be had back as they were."""
        return self.method is None or self.method.undoable

    @property
    def bounded_by(self) -> str:
        """The quantity that limits it: rows, head_dim, layers, memory or disk; ``"nothing"`` for the no-op."""
        return "nothing" if self.method is None else self.method.bounded_by

    @property
    def source(self) -> str | None:
        """Paper or code that the method comes from."""
        return None if self.method is None else self.method.source

    @property
    def parts(self) -> tuple[Action, ...]:
        """The single actions that this one is made of, in order."""
        return (self,)


@dataclass(frozen=True)
class Keep(Action):
    """The no-op."""

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True)
class Reserve(Action):
    """Allocate buffers for ``rows`` rows ahead, so that growing to there copies nothing."""

    rows: int

    def __post_init__(self) -> None:
        _positive("reserve", "rows", self.rows)

    @property
    def method(self) -> Method:
        return METHODS["reserve", "ahead"]

    def __str__(self) -> str:
        return f"reserve:{self.rows}"


@dataclass(frozen=True)
class Page(Action):
    """Store rows in pages of ``rows`` rows, allocated one by one and addressed through a table."""

    rows: int

    def __post_init__(self) -> None:
        _positive("page", "rows", self.rows)

    @property
    def method(self) -> Method:
        return METHODS["page", "table"]

    def __str__(self) -> str:
        return f"page:{self.rows}"


@dataclass(frozen=True)
class Reclaim(Action):
    """Cut unused allocation down to the live rows and return MLX's buffer pool to the system."""

    def __str__(self) -> str:
        return "reclaim"


@dataclass(frozen=True)
class Evict(Action):
    """Keep a share (``ratio`` of the rows held) or a number (``rows``) of each layer's rows; drop the rest.

    The ``sinks`` first and the ``recent`` last rows are always kept. Exactly one of ``ratio`` and ``rows`` is given.
    ``slack`` is for an eviction that is repeated while tokens come: rows may grow by as many beyond ``rows`` before it
    acts again, so that the copy is paid once in ``slack`` tokens. ``seed`` chooses among the draws of a random scorer.
    """

    scorer: str
    ratio: float | None = None
    rows: int | None = None
    sinks: int = DEFAULT_SINKS
    recent: int = 0
    slack: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _known("evict", self.scorer)
        _one_of_ratio_and_rows(f"evict:{self.scorer}", self.ratio, self.rows)
        for name in ("sinks", "recent", "slack", "seed"):
            value = getattr(self, name)
            if value < 0:
                raise ActionSyntaxError(f"evict:{self.scorer}: {name}={value} must not be negative")

    def rows_kept(self, rows_held: int) -> int:
        """How many of ``rows_held`` rows remain (tokens); never more than are held."""
        wanted = self.rows if self.rows is not None else round((self.ratio or 0.0) * rows_held)
        return min(rows_held, max(1, wanted))

    @property
    def method(self) -> Method:
        return METHODS["evict", self.scorer]

    def __str__(self) -> str:
        keep = _ratio_text(self.ratio) if self.ratio is not None else f"rows={self.rows}"
        sinks = "" if self.sinks == DEFAULT_SINKS else f",sinks={self.sinks}"
        more = "".join(f",{n}={v}" for n in ("recent", "slack", "seed") if (v := getattr(self, n)))
        return f"evict:{self.scorer}@{keep}{sinks}{more}"


@dataclass(frozen=True)
class Quantize(Action):
    """Re-encode all rows with a codec: ``key_bits`` and ``value_bits`` per element, groups of ``group_size`` elements.

    ``residual`` newest rows (tokens) and the first ``sinks`` ones stay dense; None for as many as the codec's own method
    has.
    """

    codec: str
    key_bits: int
    value_bits: int
    group_size: int = 64
    residual: int | None = None
    sinks: int | None = None

    def __post_init__(self) -> None:
        _known("quant", self.codec)
        for name in ("residual", "sinks"):
            if (getattr(self, name) or 0) < 0:
                raise ActionSyntaxError(
                    f"quant:{self.codec}: {name}={getattr(self, name)} must not be negative"
                )
        if (self.residual or self.sinks) and self.codec in _READ_PACKED:
            raise ActionSyntaxError(
                f"quant:{self.codec}: residual={self.residual or 0}, sinks={self.sinks or 0}, but mlx-lm's packed "
                "attention takes no dense rows beside packed ones; use affine_fetch"
            )
        if self.codec == "affine_steps" and self.key_bits != self.value_bits:
            raise ActionSyntaxError(
                f"quant:affine_steps: kbits={self.key_bits}, vbits={self.value_bits}, but mlx-lm's packed attention "
                "reads keys and values of equal bits; use affine_fetch"
            )
        for name, value, allowed in (
            ("kbits", self.key_bits, self.method.bits),
            ("vbits", self.value_bits, self.method.bits),
            ("group", self.group_size, self.method.groups),
        ):
            if value not in allowed:
                raise ActionSyntaxError(
                    f"quant:{self.codec}: {name}={value}, but it takes {', '.join(map(str, allowed))}"
                )

    @property
    def method(self) -> Method:
        return METHODS["quant", self.codec]

    @property
    def read_packed(self) -> bool:
        """Whether mlx-lm's packed attention reads the rows: one pair of (bits, group size) for keys and values alike."""
        return self.codec in _READ_PACKED and self.key_bits == self.value_bits

    @cached_property
    def requires(self) -> frozenset[Capability]:
        if self.codec not in _READ_PACKED:
            return self.method.requires
        if not self.read_packed:
            return self.method.requires | {DENSE_REENCODE}
        return self.method.requires | {packed_attention(self.key_bits, self.group_size)}

    def __str__(self) -> str:
        if self.key_bits == self.value_bits:
            bits = f"bits={self.key_bits}"
        else:
            bits = f"kbits={self.key_bits},vbits={self.value_bits}"
        dense = "".join(f",{n}={v}" for n in ("residual", "sinks") if (v := getattr(self, n)) is not None)
        return f"quant:{self.codec},{bits},group={self.group_size}{dense}"

    @cached_property
    def layout(self) -> Layout | None:
        """How rows are stored afterwards; None for a codec that this version of the library has no code for."""
        family = CODECS.get(self.codec)
        if family is None:
            return None
        keys, values = family.make(self.key_bits, self.value_bits, self.group_size)
        residual = family.residual if self.residual is None else self.residual
        return Layout(keys, values, residual, family.sinks if self.sinks is None else self.sinks)


@dataclass(frozen=True)
class Merge(Action):
    """Share rows between neighbouring layers."""

    how: str = "minicache"

    def __post_init__(self) -> None:
        _known("merge", self.how)

    @property
    def method(self) -> Method:
        return METHODS["merge", self.how]

    def __str__(self) -> str:
        return f"merge:{self.how}"


@dataclass(frozen=True)
class Offload(Action):
    """Move rows to disk: whole ``layers`` (first, last), or all but a share (``ratio``) of every layer's rows."""

    how: str
    layers: tuple[int, int] | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        _known("offload", self.how)
        if self.how == "layers":
            if self.layers is None or self.ratio is not None or not 0 <= self.layers[0] <= self.layers[1]:
                raise ActionSyntaxError(f"offload:layers={self.layers}: give a range of layers such as 0-7")
        else:
            if self.layers is not None:
                raise ActionSyntaxError(f"offload:{self.how}: takes a ratio, not a range of layers")
            _one_of_ratio_and_rows(f"offload:{self.how}", self.ratio, None)

    @property
    def method(self) -> Method:
        return METHODS["offload", self.how]

    def __str__(self) -> str:
        if self.layers is not None:
            return f"offload:layers={_range_text(self.layers)}"
        return f"offload:{self.how}@{_ratio_text(self.ratio or 0.0)}"


@dataclass(frozen=True)
class Composite(Action):
    """Several actions carried out left to right as one."""

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        if len(self.actions) < 2:
            raise ActionSyntaxError(f"a composite joins at least two actions, got {len(self.actions)}")
        if any(isinstance(a, Composite | Keep | Plan) for a in self.actions):
            raise ActionSyntaxError(f"{self}: a composite holds single actions other than keep")

    @property
    def requires(self) -> frozenset[Capability]:
        return frozenset().union(*(a.requires for a in self.actions))

    @property
    def lossy(self) -> bool:
        return any(a.lossy for a in self.actions)

    @property
    def undoable(self) -> bool:
        return all(a.undoable for a in self.actions)

    @property
    def bounded_by(self) -> str:
        return ",".join(dict.fromkeys(a.bounded_by for a in self.actions))

    @property
    def source(self) -> str:
        return "; ".join(a.source for a in self.actions if a.source)

    @property
    def parts(self) -> tuple[Action, ...]:
        return self.actions

    def __str__(self) -> str:
        return "+".join(map(str, self.actions))


@dataclass(frozen=True)
class Plan(Action):
    """Layer ranges (first, last; inclusive) → actions. Layers that no range names are kept as they are."""

    assignments: tuple[tuple[tuple[int, int], Action], ...]

    def __post_init__(self) -> None:
        if not self.assignments:
            raise ActionSyntaxError("a plan assigns at least one range of layers")
        taken: set[int] = set()
        for (first, last), action in self.assignments:
            if not 0 <= first <= last:
                raise ActionSyntaxError(f"{first}-{last} is not a range of layers")
            if isinstance(action, Plan):
                raise ActionSyntaxError(f"{first}-{last}: a plan cannot hold a plan")
            layers = set(range(first, last + 1))
            if taken & layers:
                raise ActionSyntaxError(f"{first}-{last}: layer {min(taken & layers)} is assigned twice")
            taken |= layers

    @cached_property
    def distinct(self) -> tuple[Action, ...]:
        """The actions that are assigned, each once; those that are the same object are not compared."""
        once = {id(action): action for _, action in self.assignments}
        return tuple(dict.fromkeys(once.values()))

    def for_layer(self, index: int) -> Action:
        """The action for one layer."""
        return next((a for (first, last), a in self.assignments if first <= index <= last), Keep())

    @property
    def requires(self) -> frozenset[Capability]:
        needs: frozenset[Capability] = frozenset().union(*(a.requires for a in self.distinct))
        evictions = {tuple(p for p in a.parts if isinstance(p, Evict)) for a in self.distinct}
        if any(evictions) and evictions != {()}:
            # Unnamed layers keep all rows, so any eviction in a plan may leave layers with different numbers of them.
            needs |= {RAGGED_LAYERS}
        return needs

    @property
    def lossy(self) -> bool:
        return any(a.lossy for _, a in self.assignments)

    @property
    def undoable(self) -> bool:
        return all(a.undoable for _, a in self.assignments)

    @property
    def bounded_by(self) -> str:
        return ",".join(dict.fromkeys(a.bounded_by for _, a in self.assignments))

    @property
    def source(self) -> str:
        return "; ".join(dict.fromkeys(a.source for _, a in self.assignments if a.source))

    def __str__(self) -> str:
        return ";".join(f"{_range_text(layers)}:{action}" for layers, action in self.assignments)


def in_ranges(chosen: Iterable[tuple[int, Action]]) -> tuple[tuple[tuple[int, int], Action], ...]:
    """A plan's assignments: runs of neighbouring layers with the same action; layers that are kept need no name.

    Args:
        chosen: (number of a layer, its action), ascending.
    """
    runs: list[tuple[int, int, Action]] = []
    for index, action in chosen:
        if runs and runs[-1][1] == index - 1 and (runs[-1][2] is action or runs[-1][2] == action):
            runs[-1] = (runs[-1][0], index, action)
        elif not isinstance(action, Keep):
            runs.append((index, index, action))
    return tuple(((first, last), action) for first, last, action in runs)


def singles(action: Action) -> tuple[Action, ...]:
    """Every single action in ``action``, those of a plan included."""
    if isinstance(action, Plan):
        return tuple(part for _, assigned in action.assignments for part in assigned.parts)
    return action.parts


def evicts(action: Action) -> bool:
    """Whether rows are dropped by ``action``."""
    return any(isinstance(part, Evict) for part in singles(action))


def action_space(
    *,
    ratios: Iterable[float] = DEFAULT_RATIOS,
    composite_ratios: Iterable[float] = COMPOSITE_RATIOS,
    bits: Iterable[int] = (8, 4),
    group_size: int = 64,
    rows: Iterable[int] = (),
    evictors: Iterable[str] | None = None,
    codecs: Iterable[str] | None = None,
    others: bool = True,
) -> tuple[Action, ...]:
    """The action space A over a grid that can be narrowed and widened.

    Every eviction method × ratio, every codec × bits it takes, and composites of the two.

    Args:
        rows: adds evictions to exact row counts, for a caller that solved for what fits a budget.
        evictors, codecs: names from the catalogue; None for all of them.
        others: whether to add allocation, merging and offloading.
    """
    ratios, bits, rows = tuple(ratios), tuple(bits), tuple(rows)
    scorers = [m.name for m in methods_of("evict")] if evictors is None else list(evictors)
    names = [m.name for m in methods_of("quant")] if codecs is None else list(codecs)
    exact = [Evict(s, rows=n) for s in scorers for n in rows]
    evictions = [Evict(s, ratio=r) for s in scorers for r in ratios] + exact
    quantized = [
        _quantize(METHODS["quant", c], b, group_size)
        for c in names
        for b in bits
        if b in METHODS["quant", c].bits
    ]
    joined = [Evict(s, ratio=r) for s in scorers for r in composite_ratios] + exact
    composites = [Composite((e, q)) for e in joined for q in quantized]
    more: list[Action] = []
    if others:
        more = [Reserve(8192), Page(64), Merge()]
        more += [
            Offload(m.name, ratio=r)
            for m in methods_of("offload")
            if m.name != "layers"
            for r in composite_ratios
        ]
    return (Keep(), Reclaim(), *more, *quantized, *evictions, *composites)


def _quantize(method: Method, bits: int, group_size: int) -> Quantize:
    return Quantize(method.name, bits, bits, group_size if group_size in method.groups else method.groups[0])


def parse_action(text: str) -> Action:
    """Read an action from its text form.

    Raises:
        ActionSyntaxError: naming the part of the text that was not understood and what would be.
    """
    if _PLAN.match(text.strip()):
        return Plan(tuple(_parse_assignment(part.strip(), text) for part in text.split(";")))
    return _parse_composite(text, text)


_PLAN = re.compile(r"\d+(-\d+)?:")
_TERM = re.compile(r"(?P<family>[a-z]+)(?::(?P<method>[a-z0-9_]+)(?:(?P<mark>[@,=])(?P<args>.*))?)?$")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")


def _parse_assignment(part: str, whole: str) -> tuple[tuple[int, int], Action]:
    layers, colon, rest = part.partition(":")
    if not colon:
        raise ActionSyntaxError(
            f"{whole!r}: cannot read {part!r}; a plan is ranges and actions such as 0-7:reclaim"
        )
    return _parse_range(layers, whole), _parse_composite(rest, whole)


def _parse_composite(text: str, whole: str) -> Action:
    actions = tuple(_parse_term(t.strip(), whole) for t in text.strip().split("+"))
    return actions[0] if len(actions) == 1 else Composite(actions)


def _parse_term(term: str, whole: str) -> Action:
    match = _TERM.match(term)
    if match is None:
        raise ActionSyntaxError(f"{whole!r}: cannot read {term!r}; an action looks like {_EXAMPLES}")
    family, method, mark, args = match["family"], match["method"], match["mark"], match["args"]
    if family not in _FAMILIES:
        raise ActionSyntaxError(f"{whole!r}: unknown family {family!r}; known: {', '.join(_FAMILIES)}")
    if family in ("keep", "reclaim"):
        if method is not None:
            raise ActionSyntaxError(f"{whole!r}: {family!r} takes nothing after it")
        return Keep() if family == "keep" else Reclaim()
    if method is None:
        example = (
            "a number of rows" if family in ("reserve", "page") else f"one of {', '.join(_names(family))}"
        )
        raise ActionSyntaxError(f"{whole!r}: {family!r} needs {example} after it")
    if family in ("reserve", "page"):
        if mark is not None:
            raise ActionSyntaxError(f"{whole!r}: {family!r} takes one number of rows")
        rows = _whole_number(family, method, whole)
        return Reserve(rows) if family == "reserve" else Page(rows)
    _known(family, method)
    if family == "merge":
        if mark is not None:
            raise ActionSyntaxError(f"{whole!r}: merge:{method} takes no settings")
        return Merge(method)
    if family == "offload":
        return _parse_offload(method, mark, args, whole)
    return _parse_evict(method, args, whole) if family == "evict" else _parse_quant(method, args, whole)


def _parse_evict(scorer: str, args: str | None, whole: str) -> Evict:
    ratio: float | None = None
    given: dict[str, int] = {}
    for arg in _split(args):
        if "=" in arg:
            _put(given, arg, ("rows", "sinks", "recent", "slack", "seed"), whole)
        elif ratio is None:
            ratio = _ratio(arg, whole)
        else:
            raise ActionSyntaxError(f"{whole!r}: {arg!r} is a second ratio")
    return Evict(scorer, ratio, **given)


def _parse_quant(codec: str, args: str | None, whole: str) -> Quantize:
    given: dict[str, int] = {}
    for arg in _split(args):
        _put(given, arg, ("bits", "kbits", "vbits", "group", "residual", "sinks"), whole)
    key_bits, value_bits = given.get("kbits", given.get("bits")), given.get("vbits", given.get("bits"))
    if key_bits is None or value_bits is None:
        raise ActionSyntaxError(f"{whole!r}: give bits=N, or kbits=N and vbits=N")
    groups = METHODS["quant", codec].groups
    group = given.get("group", 64 if 64 in groups else groups[0])
    return Quantize(codec, key_bits, value_bits, group, given.get("residual"), given.get("sinks"))


def _parse_offload(how: str, mark: str | None, args: str | None, whole: str) -> Offload:
    if how == "layers":
        if mark != "=" or not args:
            raise ActionSyntaxError(f"{whole!r}: give a range of layers such as offload:layers=0-7")
        return Offload(how, layers=_parse_range(args, whole))
    if mark != "@" or not args:
        raise ActionSyntaxError(f"{whole!r}: give the share that stays in memory, such as offload:{how}@0.50")
    return Offload(how, ratio=_ratio(args, whole))


def _parse_range(text: str, whole: str) -> tuple[int, int]:
    match = _RANGE.match(text.strip())
    if match is None:
        raise ActionSyntaxError(f"{whole!r}: {text!r} is not a range of layers such as 0-7")
    return int(match[1]), int(match[2] or match[1])


def _split(args: str | None) -> list[str]:
    return [a.strip() for a in re.split(r"[,@]", args) if a.strip()] if args else []


def _put(given: dict[str, int], arg: str, allowed: tuple[str, ...], whole: str) -> None:
    name, _, number = arg.partition("=")
    if name not in allowed:
        raise ActionSyntaxError(f"{whole!r}: unknown setting {name!r}; known: {', '.join(allowed)}")
    if name in given:
        raise ActionSyntaxError(f"{whole!r}: {name!r} is given twice")
    given[name] = _whole_number(name, number, whole)


def _whole_number(name: str, number: str, whole: str) -> int:
    try:
        return int(number)
    except ValueError:
        raise ActionSyntaxError(f"{whole!r}: {name}={number!r} is not a whole number") from None


def _ratio(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ActionSyntaxError(f"{whole!r}: {text!r} is neither a ratio nor name=number") from None


def _one_of_ratio_and_rows(what: str, ratio: float | None, rows: int | None) -> None:
    if (ratio is None) == (rows is None):
        raise ActionSyntaxError(f"{what}: give either a ratio or rows=N, not both or neither")
    if ratio is not None and not 0.0 < ratio < 1.0:
        raise ActionSyntaxError(f"{what}@{ratio}: the ratio kept must lie between 0 and 1")
    if rows is not None and rows < 1:
        raise ActionSyntaxError(f"{what}@rows={rows}: at least one row must be kept")


def _positive(what: str, name: str, value: int) -> None:
    if value < 1:
        raise ActionSyntaxError(f"{what}: {name}={value} must be at least 1")


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if round(ratio, 2) == ratio else repr(ratio)


def _range_text(layers: tuple[int, int]) -> str:
    return f"{layers[0]}-{layers[1]}"


def _names(family: str) -> list[str]:
    return [m.name for m in methods_of(family)]


def _known(family: str, name: str) -> None:
    if (family, name) not in METHODS:
        near = difflib.get_close_matches(name, _names(family), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(_names(family))}"
        raise ActionSyntaxError(f"{family}:{name}: no such method{hint}")


_FAMILIES = ("keep", "reserve", "page", "reclaim", "evict", "quant", "merge", "offload")
_EXAMPLES = "keep, reclaim, evict:sinks_window@0.50, quant:affine,bits=4,group=64, or several joined by +"
