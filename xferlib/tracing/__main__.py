"""Runs a program as `python program ...` or `python -m module ...` would, under a trace.

`python -m xferlib.tracing JSON HTML program ...`: what the command `xferlib trace` starts.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from xferlib.errors import XferError
from xferlib.tracing.trace import trace

__all__: list[str] = []


def main(json_file: str, html: str, program: list[str]) -> None:
    """Run the program, then write what was recorded, however the program ended."""
    # The program may change the folder.
    page = Path(html).resolve()
    try:
        traced = trace(json_file)
        traced.__enter__()
    except XferError as error:
        raise SystemExit(f"xferlib: {error}") from error
    process = os.getpid()
    try:
        _run(program)
    finally:
        # Not in what the program has forked.
        if os.getpid() == process:
            traced.__exit__(None, None, None)
            traced.html(page)
            sys.stdout.flush()
            print(f"\n{traced.summary()}\nwritten: {json_file} and {html}", file=sys.stderr)


def _run(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        # As `python -m` does; here it was put there for this module already.
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = program
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program[0]).resolve().parent)
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
