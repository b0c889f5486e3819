"""Running a program under a trace: this process becomes that program, in a new interpreter."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from xferlib.cli.command_error import UsageError

__all__ = ["command_line", "run"]

BARE = ("python", "python3")
WITH_VALUE = ("--check-hash-based-pycs",)
"""Options of the interpreter whose value is the next word."""
CLUSTER = re.compile(r"-[a-zA-Z]*?([cmWX])(.*)", re.DOTALL)
"""Short options with one that takes a value, and what of that stands in the same word."""


def run(command: Sequence[str], json_file: Path, html: Path) -> NoReturn:
    """Become the program. Raises `UsageError` if it is none of Python's, or a file could not be written."""
    line = command_line(command, json_file, html)
    program = line[line.index("xferlib.tracing") + 3]
    # The trace of nothing would take the place of an earlier one.
    if program != "-m" and not Path(program).exists():
        raise UsageError(f"there is no file {program!r}")
    for file in (json_file, html):
        if not file.resolve().parent.is_dir():
            raise UsageError(f"the folder of {str(file)!r} is not there. Make it first, or choose another file")
        try:
            is_folder = file.is_dir()
        except OSError as error:
            raise UsageError(f"{str(file)!r} can be no file: {error.strerror}. Choose another one") from error
        if is_folder:
            raise UsageError(f"{str(file)!r} is a folder. Name a file in it")
    if json_file.resolve() == html.resolve() and (json_file.is_file() or not json_file.exists()):
        raise UsageError(f"{str(html)!r} cannot be both files, the events and the page. Give one of them another name")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(line[0], line)


def command_line(command: Sequence[str], json_file: Path, html: Path) -> list[str]:
    """Return the command line that runs a program under a trace: its interpreter and that one's options stay as they are."""
    words = list(command)
    if words and words[0].endswith(".py"):
        words.insert(0, sys.executable)
    if not words or not re.fullmatch(r"python[0-9.]*", Path(words[0]).name):
        raise UsageError(
            f"only Python programs can be traced, and {' '.join(words)!r} begins with none. Begin with the interpreter: "
            "xferlib trace -- python train.py"
        )
    # By its bare name it is the one that has xferlib, also where no environment is active.
    found = sys.executable if words[0] in BARE else shutil.which(words[0])
    if found is None:
        raise UsageError(f"there is no {words[0]!r} on this machine. Name the interpreter with its path")
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-"):
        # Letters without a value may stand together, and the last of them may have one, at once or as the next word.
        cluster = CLUSTER.match(words[at])
        letter, value = cluster.groups() if cluster else ("", "")
        if letter == "c":
            raise UsageError("a program given by -c cannot be traced. Put it into a file")
        if letter == "m":
            # So that it stands alone, as what runs the program expects it.
            flags = words[at][: -len(value) - 1]
            words[at : at + 1] = [*([flags] if flags != "-" else []), "-m", *([value] if value else [])]
            continue
        at += 2 if (letter and not value) or words[at] in WITH_VALUE else 1
    if at >= len(words) or words[at] == "-" or (words[at] == "-m" and at + 1 >= len(words)):
        raise UsageError("no program is named. Name its file, or its module after -m")
    return [found, *words[1:at], "-m", "xferlib.tracing", str(json_file), str(html), *words[at:]]
