"""The file of the result: made at its full size, touched, filled through a mapping, and removed unless it was finished.

The space is reserved on disk first: if a mapped file ran out of space, a signal would end the process. Then every page is touched,
because the first write to a page of a mapping takes several times as long as the copy. The clock does not run yet.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

import numpy as np

from xferlib.cli.command_error import CommandError
from xferlib.cli.demo.source import PIECE

__all__ = ["ResultFile", "partial_of"]


def partial_of(path: Path) -> Path:
    """Return where the result is until it is finished."""
    return path.with_name(f"{path.stem}.partial{path.suffix}")


@final
class ResultFile:
    """A .npy file of bytes, (frames, height, width). A context manager: a file that was not `finish`ed is removed.

    Raises `CommandError` where it is entered, if the file cannot be made.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self.path = path
        self._partial = partial_of(path)
        self._shape = shape

    def touch(self, pool: Executor) -> None:
        """Fill the file with zeros, so that no page is written for the first time under the clock."""
        flat = self.frames.reshape(-1)
        list(pool.map(lambda start: flat[start : start + PIECE].fill(0), range(0, flat.size, PIECE)))

    def finish(self) -> float:
        """Flush the pages to the disk and give the file its name, replacing an older one. Return the seconds it took."""
        began = time.perf_counter()
        self.frames.flush()
        os.replace(self._partial, self.path)
        return time.perf_counter() - began

    def __enter__(self) -> Self:
        # Here, so that no interrupt comes between the end of it and the block.
        try:
            self.frames = np.lib.format.open_memmap(self._partial, "w+", np.uint8, self._shape)
            with open(self._partial, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        except BaseException as error:
            # Ctrl-C, too: reserving a large file takes a while.
            self._remove()
            if not isinstance(error, OSError):
                raise
            raise CommandError(f"cannot write {str(self.path)!r}: {error}. Choose another folder with --out") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self._partial.unlink()
