"""Runs a program as `python program ...` or `python -m module ...` would, under a trace.

`python -m xferlib.tracing JSON HTML program ...`: what the command `xferlib trace` starts.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from xferlib.errors import XferError
from xferlib.tracing.termination import Termination
from xferlib.tracing.trace import Trace, trace

__all__: list[str] = []


def main(json_file: str, html: str, program: list[str]) -> None:
    """Run the program, then write what was recorded, however the program ended. SIGTERM ends it as `sys.exit` does.

    Nothing is written of a program that could not be begun: it would take the place of an earlier trace.
    """
    # The program may change the folder.
    page = Path(html).resolve()
    traced = trace()
    try:
        traced.__enter__()
    except XferError as error:
        raise SystemExit(f"xferlib: {error}") from error
    process = os.getpid()
    events = Path(json_file).resolve()
    begin = _Beginning()
    with Termination() as termination:
        try:
            _run(program, begin)
        except BaseException as error:
            # The program's own end is the end, whatever becomes of the files. Not in what the program has forked.
            if os.getpid() == process:
                with termination.later():
                    if begin.came or _is_of_program(error):
                        _write(traced, events, page, json_file, html)
                    else:
                        _say(f"xferlib: the program could not be begun: {json_file} and {html} were not written")
            raise
        if os.getpid() == process:
            with termination.later():
                written = _write(traced, events, page, json_file, html)
            if not written:
                raise SystemExit(1)


@final
class _Beginning:
    """What `runpy` asks for names, of which it has none, when all is found and compiled and the program is about to begin."""

    came = False

    def keys(self) -> tuple[()]:
        self.came = True
        return ()


def _is_of_program(error: BaseException) -> bool:
    """Tell whether any code of the program has a part in this error: packages are imported before a module in them is found."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        is_ours = frame.f_globals is globals() or module.startswith("xferlib.")
        if not is_ours and module != "runpy" and not frame.f_code.co_filename.startswith("<frozen "):
            return True
    return False


def _write(traced: Trace, events: Path, page: Path, json_file: str, html: str) -> bool:
    """End the trace, write both files and print the summary; tell whether all of that worked."""
    # The program may have closed its streams, nobody may read them any more, and the disk behind them may be full.
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    # The interpreter waits for them later, when nothing is recorded any more.
    running = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.current_thread()]
    try:
        traced.__exit__(None, None, None)
        summary = str(traced.summary())
    except XferError as error:
        _say(f"xferlib: the trace was lost: {error}")
        return False
    _say(f"\n{summary}")
    if running:
        _say(f"threads of the program still run ({', '.join(running)}), and what they do from now on is not traced. Join them")
    failed, told = False, []
    for write, path, name in ((traced.json, events, json_file), (traced.html, page, html)):
        try:
            told.append(f"{name} (in place of an earlier one)" if path.is_file() else name)
            write(path)
        except OSError as error:
            _say(f"xferlib: {name} was not written: {error}")
            failed = True
    if not failed:
        _say(f"written: {' and '.join(told)}")
    return not failed


def _say(words: str) -> None:
    """Print to the standard error stream, if there is one yet."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(words, file=sys.stderr)


def _run(program: list[str], begin: Any) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        # As `python -m` does; here it was put there for this module already.
        runpy.run_module(program[1], begin, run_name="__main__", alter_sys=True)
        return
    sys.argv = program
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program[0]).resolve().parent)
    runpy.run_path(program[0], begin, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
