"""The progress bar of commands that know how much work there is."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["progress_bar"]

#: Seconds over which speed is averaged: units of work differ, and a short memory would make the remaining time jump.
AVERAGED_OVER = 600.0


def progress_bar(console: Console) -> Progress:
    """What is being done, how far it is, and how long it will take."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=AVERAGED_OVER,
    )
