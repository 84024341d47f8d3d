"""Codecs that a profile lacks, measured later on the same documents and put beside the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...actions import Evict
from ...errors import CalibrationError
from ...profile import CodecFigure, EvictionFigure, Parts, Profile
from .grid import Grid
from .settings import Settings

__all__ = ["added", "check_base", "lacking"]


def lacking(grid: Grid, base: Profile) -> Grid:
    """Only the codecs that ``base`` has no figures of."""
    codecs = tuple(one for one in grid.codecs if base.codec(one) is None)
    return Grid(codecs=codecs, evictions=(), composites=(), by_layer=(), groups=(), mixed=())


def check_base(base: Profile, key: Mapping[str, str], settings: Settings) -> Settings:
    """The settings by which ``base`` was measured.

    Raises:
        CalibrationError: it was measured on something else, or in another way, so that figures cannot be compared.
    """
    was = dict(base.provenance.get("settings", {}))
    mine = settings.to_record()
    other = [name for name in mine if name not in ("documents", "checked") and was.get(name) != mine[name]]
    if base.provenance.get("key") != key:
        raise CalibrationError(
            f"profile {base.name} belongs to {base.provenance.get('key')}, and this is {dict(key)}: figures of two models, "
            "machines or versions are never mixed"
        )
    if other:
        raise CalibrationError(
            f"profile {base.name} was measured with another {', '.join(other)}: its figures and new ones cannot be "
            "compared; calibrate anew"
        )
    return replace(settings, documents=int(was["documents"]), checked=int(was["checked"]))


def added(base: Profile, more: Profile) -> Profile:
    """``base`` with the codecs of ``more``, and with the dense cache's times by rows.

    Raises:
        CalibrationError: they were not measured on the same documents.
    """
    theirs, ours = (one.provenance.get("texts") for one in (base, more))
    if theirs != ours or more.provenance.get("documents") != base.provenance.get("documents"):
        raise CalibrationError(
            f"{more.provenance.get('documents')} documents were measured, and profile {base.name} has figures of "
            f"{base.provenance.get('documents')}; give it more --minutes"
        )
    whole = _with_parts(base)
    together = ("points", "time_spread", "chunk_time_spread", "unmeasured", "untimed")
    return replace(
        whole,
        codecs=(*whole.codecs, *more.codecs),
        dense_steps=more.dense_steps,
        dense_chunks=more.dense_chunks,
        provenance={
            **base.provenance,
            **{name: {**base.provenance.get(name, {}), **more.provenance.get(name, {})} for name in together},
            "added": {
                **{
                    name: more.provenance.get(name)
                    for name in ("command", "commit", "python", "system", "blas")
                },
                "codecs": [str(one.action) for one in more.codecs],
            },
        },
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
