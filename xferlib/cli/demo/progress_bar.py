"""The progress bar, on stderr. Where stderr is no terminal, nothing is shown."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Bar"]


@final
class Bar:
    """One line that says what is being done and how far it is."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._shown = console.is_terminal
        columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Each refresh takes the interpreter lock for a few milliseconds from the threads of the pipeline.
        self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
        self._task = self._progress.add_task("starting", total=None)

    def phase(self, words: str, frames: int | None = None) -> None:
        """Begin something new, of so many frames; None: nobody can say."""
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(words, total=frames)

    def advance(self, frames: int) -> None:
        """Count frames as done."""
        self._progress.advance(self._task, frames)

    def __enter__(self) -> Self:
        if self._shown:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Where nothing is shown, Rich 13 would still print an empty line.
        if self._shown:
            self._progress.stop()
