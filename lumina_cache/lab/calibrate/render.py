"""A profile as text: codecs, scorers, layers, times, and how far assumptions were off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...profile import Profile

__all__ = ["as_text"]


def as_text(profile: Profile) -> str:
    """For the terminal and, as a block, for a page."""
    about = profile.provenance
    lines = [
        f"{profile.name}: {about['documents']} documents of {about['settings']['plan']['contexts'][0][0]} tokens, "
        f"{about['key']['device']} ({about['key']['device_name']}), mlx {about['key']['mlx']}, mlx-lm "
        f"{about['key']['mlx_lm']}",
        f"kl: {about['kl_is']}, nats per token",
        f"copying: {about['copying']}",
        "",
        *_codecs(profile),
        "",
        *_evictors(profile),
        "",
        *_layers(profile),
        *_assumptions(about["assumptions"]),
        *_own_work(profile),
        *(f"not measured: {action}: {reason}" for action, reason in about["unmeasured"].items()),
        *(f"not timed: {action}: {reason}" for action, reason in about["untimed"].items()),
    ]
    return "\n".join(lines)


def _codecs(profile: Profile) -> list[str]:
    rows = sorted({n for c in profile.codecs for n, _ in c.times})
    heads = ["codec", "kl", "continuation", "copying", "p95", *(f"×time@{n}" for n in rows)]
    table = []
    for one in sorted(profile.codecs, key=lambda c: c.kl):
        times = dict(one.times)
        table.append(
            [
                str(one.action),
                *_quality(profile, str(one.action), one.kl, one.p95),
                *(f"{times[n]:.2f}" if n in times else "-" for n in rows),
            ]
        )
    return _table(heads, table)


def _quality(profile: Profile, action: str, kl: float, p95: float) -> list[str]:
    point = profile.provenance["points"].get(action, {})
    return [_kl(kl), _kl(point.get("continuation")), _kl(point.get("copying")), _kl(p95)]


def _kl(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _evictors(profile: Profile) -> list[str]:
    shares = sorted({s for e in profile.evictors for s, _, _ in e.points}, reverse=True)
    heads = ["kl at share kept", *(f"{s:.4g}" for s in shares)]
    table = []
    for one in profile.evictors:
        at = {s: kl for s, kl, _ in one.points}
        table.append([one.scorer, *(f"{at[s]:.3f}" if s in at else "-" for s in shares)])
    return _table(heads, table)


def _layers(profile: Profile) -> list[str]:
    if not profile.sensitivity:
        return []
    weights = " ".join(f"{i}:{w:.2f}" for i, w in enumerate(profile.sensitivity))
    return [f"sensitivity by layer (mean 1): {weights}", ""]


def _assumptions(found: dict[str, Any]) -> list[str]:
    lines = []
    for title, name in (
        ("damages of eviction and codec add up", "damages_add_up"),
        ("damages of layers add up, weighted by sensitivity", "layers_add_up"),
    ):
        for one in found[name]:
            alike = f", {one['all_alike']:.4g} with all layers alike" if "all_alike" in one else ""
            lines.append(f"{title}: {one['action']}: {_compared(one)}{alike}")
    if found["sum_of_layers"] is not None:
        one = found["sum_of_layers"]
        lines.append(f"single layers, added, beside all at once: {one['action']}: {_compared(one)}")
    return [*lines, ""]


def _compared(one: dict[str, Any]) -> str:
    error = "" if one["relative_error"] is None else f" ({one['relative_error']:+.0%})"
    return f"predicted {one['predicted']:.4g}, measured {one['measured']:.4g}{error}"


def _own_work(profile: Profile) -> list[str]:
    lines = [
        f"own work: {family} {seconds * 1e9:.3g} ns per byte (quartiles "
        f"{' to '.join(f'{x * 1e9:.3g}' for x in profile.provenance['own_work_spread'][family])})"
        for family, seconds in profile.seconds_per_byte.items()
    ]
    if profile.step_seconds is not None:
        lines.append(f"a dense decode step at about 1,024 rows: {profile.step_seconds * 1e3:.1f} ms")
    return lines


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns aligned, the first to the left."""
    every = [list(heads), *map(list, rows)]
    widths = [max(len(row[i]) for row in every) for i in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in every
    ]
