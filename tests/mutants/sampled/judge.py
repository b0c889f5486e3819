"""Runs tests over a scratch tree, in an order that ends early, and says what was the first to fail."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, final

__all__ = ["Judge", "Verdict"]

FIRST = re.compile(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - (.*))?$", re.MULTILINE)
STUCK = re.compile(r'File "[^"]*?(tests/[^"]+\.py)", line \d+ in (test_\w+)')
TAIL = 3000


class Verdict(NamedTuple):
    """`killer` is the first test that failed, None where none did."""

    killer: str | None
    reason: str
    seconds: float


@final
class Judge:
    """Runs pytest in `folder`, one process at a time, at the lowest priority."""

    def __init__(self, folder: Path, limit_seconds: float, hang_seconds: int) -> None:
        """`hang_seconds`: after which the guard of the tests takes one for hung, and ends it with a traceback."""
        self._folder = folder
        self._hang = hang_seconds
        self._limit = limit_seconds
        path = [str(folder), str(folder / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}

    def warm(self) -> None:
        """Compile everything once, so that mutants need not."""
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "xferlib", "backends", "tests"],
            cwd=self._folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
            check=False,
        )

    def judge(self, targets: list[str]) -> Verdict:
        """Run the targets until one fails."""
        start = time.monotonic()
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"),
                *("-o", "addopts=--import-mode=importlib", "-rfE"),
                *("-p", "xferlib.conformance.guard", "-o", f"hang_seconds={self._hang}"),
                *targets,
            ],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_lower,
        )
        try:
            shown, _ = child.communicate(timeout=self._limit)
            late = False
        except subprocess.TimeoutExpired:
            late, shown = True, ""
        finally:
            # Processes that a broken pool of workers left behind would run on beside the next mutant.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if late:
            shown, _ = child.communicate()
        return self._read(child.returncode, shown, late, time.monotonic() - start)

    @staticmethod
    def _read(status: int, shown: str, late: bool, seconds: float) -> Verdict:
        if status == 0:
            return Verdict(None, "", seconds)
        failed = FIRST.search(shown)
        if failed is not None:
            return Verdict(failed[1], (failed[2] or "")[:300], seconds)
        stuck = STUCK.search(shown)
        where = f"{stuck[1]}::{stuck[2]}" if stuck else "the run"
        if late or "It hangs:" in shown:
            return Verdict(where, "hung: ended by the guard", seconds)
        return Verdict(where, f"ended with status {status}: {shown[-TAIL:]}", seconds)


def _lower() -> None:
    """In the child, before it is pytest: give way to others, and mind Ctrl-C, which shells have their background jobs ignore."""
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
