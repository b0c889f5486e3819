"""Who is told how far a load has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

__all__ = ["Tell", "told"]

Tell: TypeAlias = Callable[[int, int], object]
"""Takes the bytes that are done, and those of all."""


@contextmanager
def told(progress: bool | Tell | None, what: str) -> Iterator[Tell | None]:
    """Give what is to be called. `progress`: the caller's function, or True for a bar on the standard error stream.

    Raises `TypeError` for anything else.
    """
    if progress is None or progress is False:
        yield None
    elif progress is True:
        with _bar(what) as tell:
            yield tell
    elif callable(progress):
        yield progress
    else:
        raise TypeError(f"progress={progress!r}: expected True, or a function that takes the bytes done and those of all")


@contextmanager
def _bar(what: str) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    # Names of files are no markup.
    name = TextColumn("{task.description}", markup=False)
    columns = name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
