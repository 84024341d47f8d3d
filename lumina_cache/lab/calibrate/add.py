"""Codecs that a profile lacks, measured later on the same documents and put beside the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...actions import Evict, Quantize
from ...errors import CalibrationError
from ...profile import CodecFigure, EvictionFigure, Parts, Profile
from .assemble import Measured, times_of
from .grid import Grid
from .settings import Settings

__all__ = ["added", "check_base", "lacking", "timed"]


def lacking(grid: Grid, base: Profile, key: Mapping[str, str]) -> Grid:
    """The codecs that ``base`` has no figures of; on another machine two evictions as well, for what they take."""
    codecs = tuple(one for one in grid.codecs if base.codec(one) is None)
    evictions = () if _same_machine(base, key) else grid.evictions[:2]
    return Grid(codecs=codecs, evictions=evictions, composites=(), by_layer=(), groups=(), mixed=())


def timed(grid: Grid, base: Profile, key: Mapping[str, str]) -> tuple[Quantize, ...]:
    """The codecs whose times are measured: on another machine all of them."""
    return lacking(grid, base, key).codecs if _same_machine(base, key) else grid.codecs


def _same_machine(base: Profile, key: Mapping[str, str]) -> bool:
    return base.provenance.get("key") == dict(key)


def check_base(base: Profile, key: Mapping[str, str], settings: Settings) -> Settings:
    """The settings by which ``base`` was measured.

    Raises:
        CalibrationError: it was measured on something else, or in another way, so that figures cannot be compared.
    """
    was, theirs = dict(base.provenance.get("settings", {})), dict(base.provenance.get("key", {}))
    if {**theirs, "device_name": ""} != {**key, "device_name": ""}:
        raise CalibrationError(
            f"profile {base.name} belongs to {theirs}, and this is {dict(key)}: figures of two models, devices or "
            "versions are never mixed"
        )
    mine = settings.to_record()
    other = [name for name in mine if name not in ("documents", "checked") and was.get(name) != mine[name]]
    if other:
        raise CalibrationError(
            f"profile {base.name} was measured with another {', '.join(other)}: its figures and new ones cannot be "
            "compared; calibrate anew"
        )
    return replace(settings, documents=int(was["documents"]), checked=int(was["checked"]))


def added(base: Profile, more: Profile, measured: Measured) -> Profile:
    """``base`` with the codecs of ``more``, and with the dense cache's times by rows.

    Damage does not depend on the machine, time does: if it is another one, all times are those of ``measured``.

    Raises:
        CalibrationError: they were not measured on the same documents.
    """
    theirs, ours = (one.provenance.get("texts") for one in (base, more))
    if theirs != ours or more.provenance.get("documents") != base.provenance.get("documents"):
        raise CalibrationError(
            f"{more.provenance.get('documents')} documents were measured, and profile {base.name} has figures of "
            f"{base.provenance.get('documents')}; give it more --minutes"
        )
    key = more.provenance["key"]
    same, whole = _same_machine(base, key), _with_parts(base)
    if not same:
        whole = replace(
            whole,
            codecs=tuple(_timed_anew(one, measured) for one in whole.codecs),
            seconds_per_byte=more.seconds_per_byte,
            step_seconds=more.step_seconds,
            prompt_seconds=more.prompt_seconds,
        )
    of_quality, of_time = ("points", "unmeasured"), ("time_spread", "chunk_time_spread", "untimed")
    both = {
        name: {
            **(base.provenance.get(name, {}) if same or name in of_quality else {}),
            **more.provenance[name],
        }
        for name in (*of_quality, *of_time)
    }
    both["points"] = {**more.provenance["points"], **base.provenance.get("points", {})}
    return replace(
        whole,
        codecs=(*whole.codecs, *more.codecs),
        dense_steps=more.dense_steps,
        dense_chunks=more.dense_chunks,
        provenance={
            **base.provenance,
            **both,
            "key": key,
            "own_work_spread": (base if same else more).provenance["own_work_spread"],
            "added": {
                **{name: more.provenance[name] for name in ("command", "commit", "python", "system", "blas")},
                "codecs": [str(one.action) for one in more.codecs],
                "times": "of these codecs" if same else "of all codecs",
                "quality_measured_on": dict(base.provenance.get("key", {})).get("device_name"),
            },
        },
    )


def _timed_anew(one: CodecFigure, measured: Measured) -> CodecFigure:
    return replace(
        one, times=times_of(one.action, measured.steps), chunk_times=times_of(one.action, measured.chunks)
    )


def _with_parts(profile: Profile) -> Profile:
    """What every KL is the mean of, from ``provenance.points``, where it stands nowhere else."""
    points: Mapping[str, Any] = profile.provenance.get("points", {})

    def parts(action: str) -> Parts | None:
        found = points.get(action)
        return None if found is None else (found["continuation"], found["copying"])

    def of_codec(one: CodecFigure) -> CodecFigure:
        return one if one.parts is not None else replace(one, parts=parts(str(one.action)))

    def of_evictor(one: EvictionFigure) -> EvictionFigure:
        names = [str(Evict(one.scorer, ratio=share, recent=one.recent)) for share, _, _ in one.points]
        found = tuple(known for name in names if (known := parts(name)) is not None)
        return one if one.parts is not None or len(found) < len(names) else replace(one, parts=found)

    return replace(
        profile,
        codecs=tuple(map(of_codec, profile.codecs)),
        evictors=tuple(map(of_evictor, profile.evictors)),
    )
