"""The vocabulary of actions on a KV cache: pure values with a text form that round-trips.

Four families and the no-op::

    keep                                   hold everything as it is
    reclaim                                give back unused allocation and MLX's buffer pool
    evict:sinks_window@0.50                keep half of the rows: attention sinks and the recent window
    evict:sinks_window@rows=1024,sinks=4   keep 1,024 rows
    quant:affine,bits=4,group=64           re-encode rows as packed 4-bit codes in groups of 64
    quant:kivi,kbits=4,vbits=4,group=32    other codecs may take separate bits for keys and values
    evict:sinks_window@0.50+quant:affine,bits=8,group=64     a composite, carried out left to right

What a method needs of a backend, whether it loses information and where it was published is in one table,
:data:`METHODS`. The table also holds methods that no MLX-LM cache can execute today: they are part of the action space
A, and the difference between A and the feasible set F is what the project measures.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .backend.capabilities import (
    ATTENTION_WEIGHTS,
    DENSE_REENCODE,
    KEYS,
    QUERIES,
    ROW_GATHER,
    VALUES,
    Capability,
    Rung,
    packed_attention,
)
from .errors import ActionSyntaxError

__all__ = [
    "ACTION_SPACE_VERSION",
    "DEFAULT_RATIOS",
    "DEFAULT_SINKS",
    "METHODS",
    "Action",
    "Composite",
    "Evict",
    "Keep",
    "Method",
    "Quantize",
    "Reclaim",
    "action_space",
    "parse_action",
]

#: Changes whenever :func:`action_space` returns another list for the same arguments.
ACTION_SPACE_VERSION = "1"

#: Attention sinks kept by default, after Xiao et al., StreamingLLM, arXiv:2309.17453.
DEFAULT_SINKS = 4

DEFAULT_RATIOS = (0.75, 0.5, 0.375, 0.25, 0.125)


@dataclass(frozen=True)
class Method:
    """One way of carrying out a family: what it needs, whether it loses information, and its source."""

    family: str
    name: str
    requires: frozenset[Capability]
    lossy: bool
    source: str


def _evictor(name: str, *needs: Capability, source: str) -> Method:
    return Method("evict", name, frozenset({ROW_GATHER, *needs}), True, source)


def _codec(name: str, *needs: Capability, source: str) -> Method:
    return Method("quant", name, frozenset(needs), True, source)


METHODS: Mapping[tuple[str, str], Method] = MappingProxyType(
    {
        (m.family, m.name): m
        for m in (
            _evictor("sinks_window", source="StreamingLLM, arXiv:2309.17453"),
            _evictor("key_norm", KEYS, source="Devoto et al., arXiv:2406.11430"),
            _evictor("keydiff", KEYS, source="KeyDiff, arXiv:2504.15364"),
            _evictor("snapkv", QUERIES, source="SnapKV, arXiv:2404.14469"),
            _evictor("h2o", ATTENTION_WEIGHTS, source="H2O, arXiv:2306.14048"),
            # Its capability depends on bits and group size: see Quantize.requires.
            _codec("affine", source="mlx.core.quantize; mlx_lm QuantizedKVCache"),
            _codec("kivi", KEYS, VALUES, DENSE_REENCODE, source="KIVI, arXiv:2402.02750"),
            _codec("hadamard", KEYS, VALUES, DENSE_REENCODE, source="QuaRot, arXiv:2404.00456"),
        )
    }
)


@dataclass(frozen=True)
class Action:
    """Base of all actions. Values: comparable, hashable, and printed in the text form that the parser reads."""

    @property
    def requires(self) -> frozenset[Capability]:
        """Capabilities without which no backend can execute this action."""
        return frozenset()

    @property
    def rung(self) -> Rung:
        """The deepest rung among what the action requires."""
        return max((c.rung for c in self.requires), default=Rung.NATIVE)

    @property
    def lossy(self) -> bool:
        return False

    @property
    def source(self) -> str | None:
        return None

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
class Reclaim(Action):
    """Cut unused allocation down to the live rows and return MLX's buffer pool to the system."""

    def __str__(self) -> str:
        return "reclaim"


@dataclass(frozen=True)
class Evict(Action):
    """Keep a share (``ratio`` of the rows held) or a number (``rows``) of each layer's rows; drop the rest.

    ``sinks`` first rows are always kept. Exactly one of ``ratio`` and ``rows`` is given.
    """

    scorer: str
    ratio: float | None = None
    rows: int | None = None
    sinks: int = DEFAULT_SINKS

    def __post_init__(self) -> None:
        _known("evict", self.scorer)
        if (self.ratio is None) == (self.rows is None):
            raise ActionSyntaxError(f"evict:{self.scorer}: give either a ratio or rows=N, not both or neither")
        if self.ratio is not None and not 0.0 < self.ratio < 1.0:
            raise ActionSyntaxError(f"evict:{self.scorer}@{self.ratio}: the ratio kept must lie between 0 and 1")
        if self.rows is not None and self.rows < 1:
            raise ActionSyntaxError(f"evict:{self.scorer}@rows={self.rows}: at least one row must be kept")
        if self.sinks < 0:
            raise ActionSyntaxError(f"evict:{self.scorer}: sinks={self.sinks} must not be negative")

    def rows_kept(self, rows_held: int) -> int:
        """How many of ``rows_held`` rows remain (tokens); never more than are held."""
        wanted = self.rows if self.rows is not None else round((self.ratio or 0.0) * rows_held)
        return min(rows_held, max(1, wanted))

    @property
    def requires(self) -> frozenset[Capability]:
        return METHODS["evict", self.scorer].requires

    @property
    def lossy(self) -> bool:
        return True

    @property
    def source(self) -> str:
        return METHODS["evict", self.scorer].source

    def __str__(self) -> str:
        keep = _ratio_text(self.ratio) if self.ratio is not None else f"rows={self.rows}"
        sinks = "" if self.sinks == DEFAULT_SINKS else f",sinks={self.sinks}"
        return f"evict:{self.scorer}@{keep}{sinks}"


@dataclass(frozen=True)
class Quantize(Action):
    """Re-encode all rows with a codec: ``key_bits`` and ``value_bits`` per element, groups of ``group_size`` elements."""

    codec: str
    key_bits: int
    value_bits: int
    group_size: int = 64

    def __post_init__(self) -> None:
        _known("quant", self.codec)
        for name, value, allowed in (
            ("kbits", self.key_bits, (2, 3, 4, 5, 6, 8)),
            ("vbits", self.value_bits, (2, 3, 4, 5, 6, 8)),
            ("group", self.group_size, (32, 64, 128)),
        ):
            if value not in allowed:
                raise ActionSyntaxError(f"quant:{self.codec}: {name}={value}, but MLX packs {allowed}")

    @property
    def requires(self) -> frozenset[Capability]:
        needs = METHODS["quant", self.codec].requires
        if self.codec == "affine":
            # mlx-lm's packed attention reads one pair of (bits, group size) for keys and values alike.
            if self.key_bits != self.value_bits:
                return needs | {DENSE_REENCODE}
            return needs | {packed_attention(self.key_bits, self.group_size)}
        return needs

    @property
    def lossy(self) -> bool:
        return True

    @property
    def source(self) -> str:
        return METHODS["quant", self.codec].source

    def __str__(self) -> str:
        if self.key_bits == self.value_bits:
            bits = f"bits={self.key_bits}"
        else:
            bits = f"kbits={self.key_bits},vbits={self.value_bits}"
        return f"quant:{self.codec},{bits},group={self.group_size}"


@dataclass(frozen=True)
class Composite(Action):
    """Several actions carried out left to right as one."""

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        if len(self.actions) < 2:
            raise ActionSyntaxError(f"a composite joins at least two actions, got {len(self.actions)}")
        if any(isinstance(a, Composite | Keep) for a in self.actions):
            raise ActionSyntaxError(f"{self}: a composite holds single actions other than keep")

    @property
    def requires(self) -> frozenset[Capability]:
        return frozenset().union(*(a.requires for a in self.actions))

    @property
    def lossy(self) -> bool:
        return any(a.lossy for a in self.actions)

    @property
    def source(self) -> str:
        return "; ".join(a.source for a in self.actions if a.source)

    @property
    def parts(self) -> tuple[Action, ...]:
        return self.actions

    def __str__(self) -> str:
        return "+".join(map(str, self.actions))


def action_space(
    *,
    ratios: Iterable[float] = DEFAULT_RATIOS,
    bits: Iterable[int] = (8, 4),
    group_size: int = 64,
    rows: Iterable[int] = (),
) -> tuple[Action, ...]:
    """The action space A over a grid: every eviction method × ratio, every codec × bits, and their composites.

    ``rows`` adds evictions to exact row counts, for a caller that solved for what fits a budget.
    The list is causal: nothing in it looks at tokens that are not there yet.
    """
    ratios, bits, rows = tuple(ratios), tuple(bits), tuple(rows)
    evictions = [
        *(Evict(s, ratio=r) for f, s in METHODS if f == "evict" for r in ratios),
        *(Evict(s, rows=n) for f, s in METHODS if f == "evict" for n in rows),
    ]
    codecs = [Quantize(c, b, b, group_size) for f, c in METHODS if f == "quant" for b in bits]
    composites = [Composite((e, q)) for e in evictions for q in codecs]
    return (Keep(), Reclaim(), *codecs, *evictions, *composites)


def parse_action(text: str) -> Action:
    """Read an action from its text form.

    Raises:
        ActionSyntaxError: naming the part of the text that was not understood and what would be.
    """
    terms = [t.strip() for t in text.strip().split("+")]
    actions = tuple(_parse_term(t, text) for t in terms)
    return actions[0] if len(actions) == 1 else Composite(actions)


_TERM = re.compile(r"(?P<family>[a-z]+)(?::(?P<method>[a-z0-9_]+)(?:[@,](?P<args>.*))?)?$")


def _parse_term(term: str, whole: str) -> Action:
    match = _TERM.match(term)
    if match is None:
        raise ActionSyntaxError(f"{whole!r}: cannot read {term!r}; an action looks like {_EXAMPLES}")
    family, method, args = match["family"], match["method"], match["args"]
    if family in ("keep", "reclaim"):
        if method is not None:
            raise ActionSyntaxError(f"{whole!r}: {family!r} takes nothing after it")
        return Keep() if family == "keep" else Reclaim()
    if family not in ("evict", "quant"):
        raise ActionSyntaxError(f"{whole!r}: unknown family {family!r}; known: keep, reclaim, evict, quant")
    if method is None:
        raise ActionSyntaxError(f"{whole!r}: {family!r} needs a method, one of {', '.join(_names(family))}")
    _known(family, method)
    return _parse_evict(method, args, whole) if family == "evict" else _parse_quant(method, args, whole)


def _parse_evict(scorer: str, args: str | None, whole: str) -> Evict:
    ratio: float | None = None
    given: dict[str, int] = {}
    for arg in _split(args):
        if "=" in arg:
            _put(given, arg, ("rows", "sinks"), whole)
        else:
            try:
                ratio = float(arg)
            except ValueError:
                raise ActionSyntaxError(f"{whole!r}: {arg!r} is neither a ratio nor name=number") from None
    return Evict(scorer, ratio=ratio, rows=given.get("rows"), sinks=given.get("sinks", DEFAULT_SINKS))


def _parse_quant(codec: str, args: str | None, whole: str) -> Quantize:
    given: dict[str, int] = {}
    for arg in _split(args):
        _put(given, arg, ("bits", "kbits", "vbits", "group"), whole)
    key_bits, value_bits = given.get("kbits", given.get("bits")), given.get("vbits", given.get("bits"))
    if key_bits is None or value_bits is None:
        raise ActionSyntaxError(f"{whole!r}: give bits=N, or kbits=N and vbits=N")
    return Quantize(codec, key_bits, value_bits, given.get("group", 64))


def _split(args: str | None) -> list[str]:
    return [a.strip() for a in re.split(r"[,@]", args) if a.strip()] if args else []


def _put(given: dict[str, int], arg: str, allowed: tuple[str, ...], whole: str) -> None:
    name, _, number = arg.partition("=")
    if name not in allowed:
        raise ActionSyntaxError(f"{whole!r}: unknown setting {name!r}; known: {', '.join(allowed)}")
    if name in given:
        raise ActionSyntaxError(f"{whole!r}: {name!r} is given twice")
    try:
        given[name] = int(number)
    except ValueError:
        raise ActionSyntaxError(f"{whole!r}: {name}={number!r} is not a whole number") from None


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if round(ratio, 2) == ratio else repr(ratio)


def _names(family: str) -> list[str]:
    return [name for f, name in METHODS if f == family]


def _known(family: str, name: str) -> None:
    if (family, name) not in METHODS:
        near = difflib.get_close_matches(name, _names(family), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(_names(family))}"
        raise ActionSyntaxError(f"{family}:{name}: no such method{hint}")


_EXAMPLES = "keep, reclaim, evict:sinks_window@0.50, quant:affine,bits=4,group=64, or two joined by +"
