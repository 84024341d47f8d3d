"""A live view of everything telemetry knows, and of what it does not know and why. Needs rich (the
``cli`` extra).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from lumina_cache.errors import LuminaError
from lumina_cache.telemetry.sampler import Sampler
from lumina_cache.telemetry.snapshot import FIELD_GROUPS, PressureLevel, Snapshot, ThermalState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

__all__ = ["TopError", "render", "run_live"]

_SETTLE_SECONDS = 1.6
"""Until the slow thread has answered once and rates have two readings."""
_BAR_CELLS = 28


class TopError(LuminaError):
    """The view cannot be shown."""


def run_live(
    sampler: Sampler | None = None,
    *,
    once: bool = False,
    as_json: bool = False,
    refresh_seconds: float = 0.5,
    console: Console | None = None,
    out: TextIO | None = None,
    seconds: float | None = None,
    rest: Callable[[float], None] = time.sleep,
) -> None:
    """Show the machine until Ctrl-C, or for `seconds`, or once; as a table, or as one JSON object a line.

    Without `sampler` one is made and closed. `out` is where JSON goes (standard output). Raises TopError
    without rich.
    """
    own = sampler is None
    source = sampler if sampler is not None else Sampler()
    try:
        if own:
            rest(_SETTLE_SECONDS)
        if as_json:
            _stream_json(source, once, refresh_seconds, out or sys.stdout, seconds, rest)
        else:
            _show(source, once, refresh_seconds, console, seconds, rest)
    except KeyboardInterrupt:
        pass
    finally:
        if own:
            source.close()


def _stream_json(
    source: Sampler,
    once: bool,
    refresh_seconds: float,
    out: TextIO,
    seconds: float | None,
    rest: Callable[[float], None],
) -> None:
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        snapshot = source.latest
        print(json.dumps(snapshot.to_record(now=time.monotonic())), file=out, flush=True)
        if once or (end is not None and time.monotonic() >= end):
            return
        rest(refresh_seconds)


def _show(
    source: Sampler,
    once: bool,
    refresh_seconds: float,
    console: Console | None,
    seconds: float | None,
    rest: Callable[[float], None],
) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise TopError("the view needs rich: pip install 'lumina-cache[cli]', or ask for JSON") from error
    screen = console or Console()
    if once:
        screen.print(render(source.latest))
        return
    end = None if seconds is None else time.monotonic() + seconds
    with Live(render(source.latest), console=screen, auto_refresh=False, screen=screen.is_terminal) as live:
        while end is None or time.monotonic() < end:
            live.update(render(source.latest), refresh=True)
            rest(refresh_seconds)


# --- the picture ---

_LEVEL_STYLES = {
    PressureLevel.NORMAL: "bold green",
    PressureLevel.WARN: "bold black on yellow",
    PressureLevel.CRITICAL: "bold white on red",
    PressureLevel.UNKNOWN: "bold magenta",
}
_THERMAL_STYLES = {
    ThermalState.NOMINAL: "green",
    ThermalState.FAIR: "yellow",
    ThermalState.SERIOUS: "bold red",
    ThermalState.CRITICAL: "bold white on red",
    ThermalState.UNKNOWN: "magenta",
}


def render(snapshot: Snapshot, now: float | None = None) -> RenderableType:
    """The snapshot as a rich renderable. `now` (``time.monotonic``) is what ages are counted to."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    at = time.monotonic() if now is None else now
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold cyan", no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(style="dim", justify="right", no_wrap=True)
    for label, group, text in _rows(snapshot):
        age = snapshot.age(group, at)
        rows.add_row(label, text, "no value" if age is None else f"{age:.1f} s ago")
    title = " · ".join(filter(None, (snapshot.chip, snapshot.machine_model, snapshot.platform)))
    body: list[RenderableType] = [rows]
    lacking = _lacking(snapshot)
    if lacking:
        listed = Table.grid(padding=(0, 2), expand=True)
        listed.add_column(style="magenta", overflow="fold", ratio=3)
        listed.add_column(style="dim", overflow="fold", ratio=4)
        for reason, names in lacking.items():
            listed.add_row(", ".join(names), reason)
        body += [Text(), Text(f"unknown here ({len(snapshot.unknown)})", style="bold magenta"), listed]
    return Panel(Group(*body), title=title or "this machine", title_align="left", border_style="blue")


def _rows(s: Snapshot) -> list[tuple[str, str, Text]]:
    from rich.text import Text

    def known(*parts: str | None) -> Text:
        said = [part for part in parts if part]
        return Text("  ".join(said)) if said else Text("unknown", style="magenta")

    level = Text().append(f" {s.pressure_level} ", style=_LEVEL_STYLES[s.pressure_level])
    if s.pressure_raw is not None:
        level.append(f"  raw {s.pressure_raw}", style="dim")
    if s.headroom_bytes is not None:
        level.append(f"  headroom {_bytes(s.headroom_bytes)}")
    if s.pressure_ratio is not None:
        level.append(f"  ratio {s.pressure_ratio:.2f}", style="dim")
    thermal = Text().append(str(s.thermal_state), style=_THERMAL_STYLES[s.thermal_state])
    if s.thermal_raw is not None:
        thermal.append(f"  raw {s.thermal_raw:g}", style="dim")
    low = None if s.low_power_mode is None else f"low-power mode {'on' if s.low_power_mode else 'off'}"
    source = None if "power_source" in s.unknown else str(s.power_source)
    return [
        ("pressure", "pressure", level),
        ("memory", "memory", _memory_bar(s)),
        (
            "",
            "memory",
            known(
                _labelled("free", s.memory_free_bytes),
                _labelled("active", s.memory_active_bytes),
                _labelled("inactive", s.memory_inactive_bytes),
                _labelled("wired", s.memory_wired_bytes),
                _labelled("compressed", s.memory_compressed_bytes),
                _labelled("purgeable", s.memory_purgeable_bytes),
                _labelled("limit", s.memory_limit_bytes),
            ),
        ),
        (
            "swap",
            "swap",
            known(
                _labelled("used", s.swap_used_bytes),
                _labelled("of", s.swap_total_bytes),
                _rate("out", s.swap_out_bytes_per_second),
                _rate("in", s.swap_in_bytes_per_second),
            ),
        ),
        (
            "this process",
            "process",
            known(
                _labelled("footprint", s.process_footprint_bytes),
                _labelled("resident", s.process_resident_bytes),
            ),
        ),
        (
            "MLX",
            "mlx",
            known(
                _labelled("active", s.mlx_active_bytes),
                _labelled("pool", s.mlx_pool_bytes),
                _labelled("peak", s.mlx_peak_bytes),
            ),
        ),
        (
            "GPU",
            "gpu",
            known(
                _percent("busy", s.gpu_utilization_percent),
                _labelled("allocated", s.gpu_allocated_bytes),
                _labelled("in use", s.gpu_in_use_bytes),
                None if not s.gpu_recoveries_total else f"resets {s.gpu_recoveries_total}",
            ),
        ),
        (
            "GPU limits",
            "limits",
            known(
                _labelled("working set", s.gpu_working_set_bytes),
                _labelled("wired limit", s.wired_limit_bytes),
            ),
        ),
        ("thermal", "thermal", thermal),
        ("power", "power", known(source, _percent("charge", s.battery_percent), low)),
        ("disk", "disk", known(_labelled("free", s.disk_free_bytes))),
    ]


def _memory_bar(s: Snapshot) -> Text:
    """Share that is taken: on Linux what is not available; on macOS, where free memory says nothing, what
    is wired or compressed.
    """
    from rich.text import Text

    sizes = [size for size in (s.memory_total_bytes, s.memory_limit_bytes) if size is not None]
    total = min(sizes, default=0)
    if total and s.memory_available_bytes is not None:
        taken, said = total - s.memory_available_bytes, f"available {_bytes(s.memory_available_bytes)}"
    elif total and s.memory_wired_bytes is not None and s.memory_compressed_bytes is not None:
        taken = s.memory_wired_bytes + s.memory_compressed_bytes
        said = f"wired and compressed {_bytes(taken)}"
    else:
        return Text("unknown", style="magenta")
    cells = round(_BAR_CELLS * min(1.0, max(0.0, taken / total)))
    bar = Text().append("█" * cells, style="blue").append("░" * (_BAR_CELLS - cells), style="dim")
    return bar.append(f"  {said} of {_bytes(total)}")


def _lacking(snapshot: Snapshot) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name in FIELD_GROUPS:
        if name in snapshot.unknown:
            grouped.setdefault(snapshot.unknown[name], []).append(_short(name))
    return grouped


def _short(name: str) -> str:
    for ending in ("_bytes_per_second", "_bytes", "_percent"):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name


def _bytes(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}" if count < 100 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


def _labelled(label: str, count: int | None) -> str | None:
    return None if count is None else f"{label} {_bytes(count)}"


def _rate(label: str, per_second: float | None) -> str | None:
    return None if per_second is None else f"{label} {_bytes(per_second)}/s"


def _percent(label: str, value: int | None) -> str | None:
    return None if value is None else f"{label} {value} %"
