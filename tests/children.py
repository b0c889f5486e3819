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

from xferlib.conformance.guard_process import descendants, end

__all__ = ["fork", "run", "threads"]


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
    late = threading.Timer(seconds, _end, (process.pid,))
    late.start()
    try:
        out, err = process.communicate()
    except BaseException:
        _signal_group(process.pid, signal.SIGKILL)
        raise
    finally:
        late.cancel()
        late.join()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def fork() -> int:
    """Fork this process, as `os.fork` does, where that is the point of the test."""
    with warnings.catch_warnings():
        # Python warns of a process with threads, and so does whatever framework another test has imported.
        warnings.simplefilter("ignore")
        return os.fork()


def _end(leader: int) -> None:
    # Whoever waits for a child is stopped before that ends, and so does not go on.
    _signal_group(leader, signal.SIGSTOP)
    end([*descendants(leader), leader])
    # Those whose parents had ended before.
    _signal_group(leader, signal.SIGKILL)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
