"""Programs that tests run in processes of their own: to their end, or, if they hang, to a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["run"]

GRACE_SECONDS = 5.0
"""For a process to show where it is."""


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


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
