"""Programs that tests run in processes of their own: to their end, or, if they hang, to a traceback. And threads of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["fork", "run", "threads"]

GRACE_SECONDS = 5.0
"""For a process to show where it is."""


def threads() -> set[threading.Thread]:
    """Return the threads of this process that were started as such: not those that the library keeps for all stagers."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def run(
    command: Sequence[str], *, seconds: float, cwd: str | Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program. If it hangs, it is ended with all that it has started, and they all say on stderr where they were."""
    environment = {**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment,
        # A group of its own: its children hold the pipes, too.
        start_new_session=True,
    )
    for number, patience in ((signal.SIGABRT, seconds), (signal.SIGKILL, GRACE_SECONDS)):
        try:
            out, err = process.communicate(timeout=patience)
            break
        except subprocess.TimeoutExpired:
            _signal_group(process.pid, number)
        except BaseException:
            _signal_group(process.pid, signal.SIGKILL)
            raise
    else:
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def fork() -> int:
    """Fork this process, as `os.fork` does, where that is the point of the test."""
    with warnings.catch_warnings():
        # Python warns of a process with threads, and so does whatever framework another test has imported.
        warnings.simplefilter("ignore")
        return os.fork()


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
