"""The file of the result: made at its full size, touched, written by many threads, and gone unless it was finished.

The space is reserved on disk first: a mapped file that runs out of it would end the process by a signal. Then every page is
touched, because the first write to a page of a mapping costs several times the copy; the clock does not run yet.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

import numpy as np
import numpy.typing as npt
import psutil

from xferlib.cli.demo.team import PIECE, Team, copy
from xferlib.cli.errors import CommandError

__all__ = ["ResultFile", "check_space", "in_memory"]


@final
class ResultFile:
    """A .npy file of bytes, (frames, height, width). A context manager: what was not `finish`ed is removed."""

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self.path = path
        self._partial = path.with_name(f"{path.stem}.partial{path.suffix}")
        try:
            self._frames = np.lib.format.open_memmap(self._partial, "w+", np.uint8, shape)
            with open(self._partial, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        except BaseException as error:
            # Ctrl-C, too: reserving a large file takes a while, and nobody has entered the context yet.
            self._remove()
            if not isinstance(error, OSError):
                raise
            raise CommandError(f"cannot write {str(path)!r}: {error}. Choose another folder with --out") from error

    def touch(self, team: Team) -> None:
        """Fill the file with zeros, so that no page is written for the first time under the clock."""
        flat = self._frames.reshape(-1)
        team.each(lambda start: flat[start : start + PIECE].fill(0), range(0, flat.size, PIECE))

    def write(self, start: int, frames: npt.NDArray[np.uint8]) -> None:
        """Copy frames into the file's pages. Any thread, several at once."""
        copy(self._frames[start : start + len(frames)], frames)

    def finish(self) -> float:
        """Flush the pages to the disk and give the file its name, replacing an older one. Return the seconds it took."""
        began = time.perf_counter()
        self._frames.flush()
        os.replace(self._partial, self.path)
        return time.perf_counter() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self._partial.unlink()


def check_space(folder: Path, nbytes: int) -> None:
    """Raise `CommandError` if the disk of an existing folder has no room for the result."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise CommandError(
            f"the result takes {nbytes / 2**30:.2f} GiB, {str(folder)!r} has {free / 2**30:.2f} GiB free. "
            "Choose another folder with --out, or fewer frames with --gib"
        )


def in_memory(folder: Path) -> bool:
    """Tell whether files in this folder take memory, as those in /dev/shm do."""
    place = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")
