"""Text files that are written whole, or stay as they were: a JSON or a page that is cut short does not open."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from xferlib.files.temporary import TemporaryFile

__all__ = ["atomic_text"]


@contextmanager
def atomic_text(path: Path) -> Iterator[TextIO]:
    """Give a file to be written inside; it takes the place of `path` at the end. If anything is raised, what was there stays."""
    # A link stays one.
    target = path.resolve()
    if target.exists() and not target.is_file():
        # A pipe or a device, whose place nothing may take.
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    temporary = TemporaryFile(target)
    try:
        temporary.begin()
        with io.TextIOWrapper(temporary.as_file(), encoding="utf-8") as file:
            yield file
        temporary.publish()
    except OSError as error:
        if error.errno is not None and error.filename is None:
            # The system says of no write to which file it was.
            error.filename = str(target)
        raise
    finally:
        temporary.close()
