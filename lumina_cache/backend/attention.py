"""The attention hook: sees the queries of chosen cache layers and may answer their attention itself.

mlx-lm's models import ``scaled_dot_product_attention`` by name, so the call can only be reached in the globals of the
modules that make it. :func:`attention_hook` puts a dispatcher there, in exactly the modules whose classes one model is
built of, and takes it out again when the last hook on a module closes. The dispatcher acts only on calls that name a
cache layer which was given an observer or a server; every other call goes to mlx-lm's function as it came.

A hook belongs to one process and changes module globals, which is why it is counted, locked, and never left behind:

>>> with attention_hook(model) as hook:
...     hook.observe(layer, observer)
...     model(tokens, cache=cache)
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType, TracebackType
from typing import Any, Protocol, Self

import mlx.core as mx
from mlx_lm.models import base

from ..errors import BackendInterfaceError, LuminaWarning, UnsupportedCacheError
from ..layers import ManagedLayer

__all__ = [
    "AttentionHook",
    "Observer",
    "Server",
    "attention_hook",
    "is_hooked",
    "is_served",
    "stepped_aside",
    "warn_if_lapsed",
]

_NAME = "scaled_dot_product_attention"

#: The arguments of mlx-lm's function, in order.
_PARAMETERS = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")


class Observer(Protocol):
    """Is shown the attention of the layers it observes. It must not keep the layer: hooks hold layers weakly."""

    def observe(
        self,
        layer: ManagedLayer,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> Sequence[mx.array]:
        """Called once before each attention over ``layer``, when the layer holds the new rows already.

        Building the graph of a statistic is enough: the arrays returned are evaluated with the attention's output, so
        that no graph grows from step to step. ``queries`` may be scaled in place once this returns; keep what is
        computed from them, never the array itself.

        Args:
            queries: (B, Hq, N, D), rotated.
            keys: (B, H, T, D) as the model passes them, or what the layer's storage handed out (a packed triple).
            values: (B, H, T, Dv), likewise.
            scale: factor of q·k.
            mask: None, ``"causal"``, or an array that broadcasts to (B, Hq, N, T): bool, or added to the scores.
            sinks: (Hq,) logits of a row that holds no value, for models that have one.
        """


class Server(Protocol):
    """Computes the attention of the layers it serves, or leaves it to mlx-lm."""

    def serve(
        self,
        layer: ManagedLayer,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """The output (B, Hq, N, Dv), or None for mlx-lm's own; arguments as in :meth:`Observer.observe`."""


@dataclass(frozen=True)
class _Attached:
    """Who sees and who serves one layer, each with the hook that answers for it."""

    observers: tuple[tuple[_Token, Observer], ...] = ()
    server: tuple[_Token, Server] | None = None

    def without(self, token: _Token) -> _Attached | None:
        left = _Attached(
            tuple(o for o in self.observers if o[0] is not token),
            None if self.server is None or self.server[0] is token else self.server,
        )
        return left if left.observers or left.server else None


@dataclass(eq=False)
class _Token:
    """One hook, as its layers know it: refers to neither the hook nor the model."""

    layers: weakref.WeakSet[ManagedLayer] = field(default_factory=weakref.WeakSet)
    open: bool = True
    warned: bool = False


@dataclass(eq=False)
class _Site:
    """A name in a module's globals that holds a dispatcher while ``hooks`` is above zero."""

    namespace: dict[str, Any]
    name: str
    original: Callable[..., mx.array]
    installed: Callable[..., mx.array]
    hooks: int = 0

    def __str__(self) -> str:
        return f"{self.namespace.get('__name__', '?')}.{self.name}"


# Reentrant: the garbage collector may close one hook while this thread opens another.
_lock = threading.RLock()
_sites: dict[tuple[int, str], _Site] = {}
_attached: weakref.WeakKeyDictionary[ManagedLayer, _Attached] = weakref.WeakKeyDictionary()
_lapsed: weakref.WeakKeyDictionary[ManagedLayer, _Token] = weakref.WeakKeyDictionary()
_dispatchers: dict[Callable[..., mx.array], Callable[..., mx.array]] = {}

#: Calls that name no cache, for whoever wants to count them in this thread (see ``hookable``).
tap = threading.local()


def _dispatcher(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """What stands in for ``original``: the same one each time, for whoever imported it meanwhile keeps it for good."""
    if original in _dispatchers:
        return _dispatchers[original]

    def attend(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        attached = _attached.get(cache)
        if attached is None:
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        evaluated: list[mx.array] = []
        for _, observer in attached.observers:
            evaluated.extend(observer.observe(cache, queries, keys, values, scale, mask, sinks))
        output = None
        if attached.server is not None:
            output = attached.server[1].serve(cache, queries, keys, values, scale, mask, sinks)
        if output is None:
            output = original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if evaluated:
            output = mx.depends(output, evaluated)
        return output

    # A call with the wrong arguments must fail with mlx-lm's own words.
    attend.__name__ = attend.__qualname__ = _NAME

    def dispatch(*args: Any, **kwargs: Any) -> mx.array:
        cache = kwargs["cache"] if "cache" in kwargs else args[3] if len(args) > 3 else None
        if isinstance(cache, ManagedLayer):
            if cache in _attached:
                return attend(*args, **kwargs)
            warn_if_lapsed(cache)
        elif (seen := getattr(tap, "calls", None)) is not None:
            seen.append((args, kwargs))
        return original(*args, **kwargs)

    dispatch.__name__ = dispatch.__qualname__ = _NAME
    dispatch.__wrapped__ = original  # type: ignore[attr-defined]
    _dispatchers[original] = dispatch
    return dispatch


def is_hooked(layer: ManagedLayer) -> bool:
    """Whether an open hook sees or serves the attention of ``layer``."""
    return layer in _attached


def is_served(layer: ManagedLayer) -> bool:
    """Whether an open hook serves ``layer``: if not, what it hands to attention must be what mlx-lm can read.

    A layer whose rows only its server can read asks this before each fetch, and decodes them when the answer is no.
    """
    attached = _attached.get(layer)
    return attached is not None and attached.server is not None


def warn_if_lapsed(layer: ManagedLayer) -> None:
    """Say, once for each hook, that ``layer`` outlived the hook it was attached to and is not seen or served any more.

    For whoever uses the layer; costs a dictionary look-up. Attention is mlx-lm's own from then on.
    """
    token = _lapsed.pop(layer, None) if _lapsed else None
    if token is not None and not token.warned:
        token.warned = True
        warnings.warn(
            f"{layer.name} outlived its attention hook: its attention is mlx-lm's own again, and what was observed of "
            "it stands still. Keep the hook open for as long as the cache is used, or release the layer first",
            LuminaWarning,
            stacklevel=3,
        )


class AttentionHook:
    """A hook on one model's attention calls, open until :meth:`close`. Make one with :func:`attention_hook`."""

    def __init__(self, model: Any) -> None:
        self._token = _Token()
        with _lock:
            # All are found, and found to be right, before the first is changed.
            self._sites = tuple(_find_sites(model))
            for site in self._sites:
                _sites[id(site.namespace), site.name] = site
                site.hooks += 1
                if site.hooks == 1:
                    site.namespace[site.name] = site.installed
        self._closing = weakref.finalize(self, _close, self._token, self._sites)
        self._closing.atexit = False

    @property
    def sites(self) -> tuple[str, ...]:
        """The names hooked, such as ``mlx_lm.models.llama.scaled_dot_product_attention``; empty if there are none."""
        return tuple(map(str, self._sites))

    @property
    def closed(self) -> bool:
        return not self._token.open

    def observe(self, layer: ManagedLayer, observer: Observer) -> None:
        """Show ``observer`` every attention over ``layer``; several observers are shown it in order.

        Raises:
            UnsupportedCacheError: if the hook is closed, the layer is none of this library's, or the model makes no
                call that could be hooked.
        """
        self._check(layer)
        with _lock:
            had = _attached.get(layer, _Attached())
            self._attach(layer, replace(had, observers=(*had.observers, (self._token, observer))))

    def serve(self, layer: ManagedLayer, server: Server) -> None:
        """Let ``server`` answer every attention over ``layer``.

        Raises:
            UnsupportedCacheError: as :meth:`observe`, or if the layer has a server already.
        """
        self._check(layer)
        with _lock:
            had = _attached.get(layer, _Attached())
            if had.server is not None:
                raise UnsupportedCacheError(
                    f"{layer.name} is served by {had.server[1]!r} already; release it first"
                )
            self._attach(layer, replace(had, server=(self._token, server)))

    def release(self, layer: ManagedLayer) -> None:
        """Take back what this hook attached to ``layer``; nothing if it attached nothing."""
        with _lock:
            self._token.layers.discard(layer)
            _detach(layer, self._token)

    def close(self) -> None:
        """Release every layer and, if no other hook needs them, restore the module globals. May be called again."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, layer: ManagedLayer) -> None:
        if self.closed:
            raise UnsupportedCacheError(f"the attention hook for {layer!r} is closed; open a new one")
        if not isinstance(layer, ManagedLayer):
            raise UnsupportedCacheError(
                f"a {type(layer).__name__} cannot be hooked: wrap the model's cache in a LuminaCache"
            )
        if not self._sites:
            raise UnsupportedCacheError(
                f"{layer.name}: no module of this model calls mlx-lm's {_NAME}; hookable(model) says what it does"
            )

    def _attach(self, layer: ManagedLayer, attached: _Attached) -> None:
        _attached[layer] = attached
        _lapsed.pop(layer, None)
        self._token.layers.add(layer)


def attention_hook(model: Any) -> AttentionHook:
    """Hook the attention calls of ``model``, a model of mlx-lm; nothing changes until a layer is attached.

    Safe to nest, and to open for several models that share modules and from several threads. Closing restores the very
    objects that were there, also when the ``with`` block raises or the hook is dropped.

    Raises:
        UnsupportedCacheError: if ``model`` is not a model.
        BackendInterfaceError: if mlx-lm's function has other arguments than this version knows.
    """
    return AttentionHook(model)


@contextmanager
def stepped_aside() -> Iterator[None]:
    """mlx-lm's own functions in all names hooked, and the dispatchers back afterwards, for as long as hooks are open.

    For packages that look for mlx-lm's attention to put their own in its place: they would not find it. Meanwhile no layer
    is seen or served.
    """
    with _lock:
        aside = [site for site in _sites.values() if site.namespace.get(site.name) is site.installed]
        for site in aside:
            site.namespace[site.name] = site.original
    try:
        yield
    finally:
        with _lock:
            for site in aside:
                if site.hooks and site.namespace.get(site.name) is site.original:
                    site.namespace[site.name] = site.installed


def namespaces(model: Any) -> list[dict[str, Any]]:
    """The globals of every module that defines a class, or a method of a class, that ``model`` is built of."""
    if not hasattr(model, "modules"):
        raise UnsupportedCacheError(f"a {type(model).__name__} is not a model of mlx-lm: it has no modules()")
    found: dict[int, dict[str, Any]] = {}
    classes = {c for part in model.modules() for c in type(part).__mro__}
    for one in sorted(classes, key=lambda c: (c.__module__, c.__qualname__)):
        module = sys.modules.get(one.__module__)
        if module is not None:
            found[id(vars(module))] = vars(module)
        # A model file beside the weights is run without being entered in sys.modules.
        for member in vars(one).values():
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                found[id(function.__globals__)] = function.__globals__
    return list(found.values())


def is_stock(value: Any) -> bool:
    """Whether ``value`` is mlx-lm's own attention function."""
    return (
        isinstance(value, FunctionType)
        and value.__globals__ is vars(base)
        and value.__code__.co_name == _NAME
    )


def _find_sites(model: Any) -> Iterator[_Site]:
    """Every name in the model's modules that holds mlx-lm's function, or that is hooked already."""
    through_base = False
    for namespace in namespaces(model):
        if namespace is vars(base):
            continue
        for name, value in list(namespace.items()):
            through_base |= isinstance(value, ModuleType) and vars(value) is vars(base)
            if (site := _site(namespace, name, value)) is not None:
                yield site
    if through_base and (site := _site(vars(base), _NAME, getattr(base, _NAME))) is not None:
        yield site


def _site(namespace: dict[str, Any], name: str, value: Any) -> _Site | None:
    known = _sites.get((id(namespace), name))
    if known is not None:
        return known
    if isinstance(value, FunctionType) and value in _dispatchers.values():
        # The module was imported while mlx-lm's own was hooked, and got the dispatcher for good.
        return _Site(namespace, name, value, value)
    if not is_stock(value):
        return None
    parameters = tuple(inspect.signature(value).parameters)
    if parameters != _PARAMETERS:
        raise BackendInterfaceError(
            f"mlx-lm's {_NAME} takes ({', '.join(parameters)}), not ({', '.join(_PARAMETERS)}); "
            "install a version of mlx-lm that this version of lumina_cache names in its requirements"
        )
    return _Site(namespace, name, value, _dispatcher(value))


def _close(token: _Token, sites: Iterable[_Site]) -> None:
    replaced = []
    with _lock:
        token.open = False
        for layer in list(token.layers):
            _detach(layer, token)
            if layer not in _attached:
                _lapsed[layer] = token
        for site in sites:
            site.hooks -= 1
            if site.hooks > 0:
                continue
            del _sites[id(site.namespace), site.name]
            now = site.namespace.get(site.name)
            if now is site.installed:
                site.namespace[site.name] = site.original
            elif now is not site.original:
                replaced.append(str(site))
    if replaced:
        warnings.warn(
            f"{', '.join(replaced)} was replaced by something else while it was hooked, and is left as it is; "
            "undo such replacements before the hook is closed",
            LuminaWarning,
            stacklevel=3,
        )


def _detach(layer: ManagedLayer, token: _Token) -> None:
    had = _attached.get(layer)
    left = None if had is None else had.without(token)
    if left is not None:
        _attached[layer] = left
    elif had is not None:
        del _attached[layer]
