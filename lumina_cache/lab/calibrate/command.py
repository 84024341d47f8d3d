"""``lumina-cache calibrate``: what the command does once its options are read."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from ...errors import CalibrationError
from ...profile import Profile, read_profile
from ..evaluate import user_texts
from ..models import load_model
from .render import as_text
from .run import Calibration, Progress, calibrate
from .settings import FULL, MOST_DOCUMENTS, QUICK, Settings

__all__ = ["QUICK_MINUTES", "calibrate_command"]

#: After so many minutes no new measurement is started, if the user says nothing else.
MINUTES, QUICK_MINUTES = 20.0, 1.25


def calibrate_command(
    *,
    model: str | None,
    texts: Sequence[Path],
    quick: bool,
    minutes: float | None,
    documents: int | None,
    out: Path | None,
    add_to: Path | None = None,
    as_json: bool,
) -> None:
    """Measure, put the profile in place and print it. Progress goes to standard error."""
    settings = QUICK if quick else FULL
    if documents is not None:
        settings = _with_documents(settings, documents)
    minutes = minutes if minutes is not None else QUICK_MINUTES if quick else MINUTES
    own = user_texts(texts) if texts else None
    base = None if add_to is None else _base(add_to, quick, documents, out)
    command = _command(model, texts, quick, minutes, documents, add_to, out)
    console = Console(stderr=True)
    with console.status("loading the model"):
        loaded = load_model(model)
    with _bar(console) as bar:
        task = bar.add_task("", total=None, left="")

        def show(progress: Progress) -> None:
            left = (
                f"at most {progress.left / 60:.0f} min"
                if progress.left > 90
                else f"at most {progress.left:.0f} s"
            )
            bar.update(
                task, completed=progress.done, total=progress.total, description=progress.what, left=left
            )

        try:
            found = calibrate(
                loaded,
                settings,
                texts=own,
                out=out,
                minutes=minutes,
                command=command,
                base=base,
                on_progress=show,
            )
        except KeyboardInterrupt:
            bar.stop()
            console.print(f"what was measured is kept; to go on:  {command}", highlight=False, soft_wrap=True)
            raise
    if as_json:
        print(json.dumps(_record(found)))
    else:
        print(as_text(found.profile))
    _say_state(found, command, console)


def _base(path: Path, quick: bool, documents: int | None, out: Path | None) -> Profile:
    """The profile that codecs are added to.

    Raises:
        CalibrationError: it cannot be read, or options do not go with it.
    """
    if quick or documents is not None or out is None or out.resolve() == path.resolve():
        raise CalibrationError(
            f"--add-to {path} needs --out with another file, and takes neither --quick nor --documents: what is added is "
            "measured on as many documents as the rest was"
        )
    try:
        return read_profile(path)
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror or error}") from None


def _with_documents(settings: Settings, documents: int) -> Settings:
    if not 1 <= documents <= MOST_DOCUMENTS:
        raise CalibrationError(f"--documents {documents}: give a number from 1 to {MOST_DOCUMENTS}")
    return replace(settings, documents=documents, checked=min(settings.checked, documents))


def _command(
    model: str | None,
    texts: Sequence[Path],
    quick: bool,
    minutes: float,
    documents: int | None,
    add_to: Path | None,
    out: Path | None,
) -> str:
    parts = ["lumina-cache", "calibrate"]
    parts += ["--model", model] if model is not None else []
    for text in texts:
        parts += ["--text", str(text)]
    parts += ["--quick"] if quick else []
    parts += ["--minutes", f"{minutes:g}"]
    parts += ["--documents", str(documents)] if documents is not None else []
    parts += ["--add-to", str(add_to)] if add_to is not None else []
    parts += ["--out", str(out)] if out is not None else []
    return shlex.join(parts)


def _bar(console: Console) -> Bar:
    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        console=console,
    )


def _record(found: Calibration) -> dict[str, object]:
    return {
        "path": str(found.path),
        "records": str(found.records),
        "documents": found.documents,
        "complete": found.complete,
        "written": not found.kept,
        "profile": found.profile.to_record(),
    }


def _say_state(found: Calibration, command: str, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if found.kept:
        say(f"not kept: {found.path} was measured in full, and this was a quick look")
    else:
        say(f"profile: {found.path}")
    if not found.complete:
        say(
            f"the time was over with {found.documents} documents measured in full; the same command goes on from "
            f"there:  {command}"
        )
