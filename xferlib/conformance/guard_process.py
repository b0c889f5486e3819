"""End a test run that hangs, and what it has started: a script that `guard` runs in a process of its own.

It reads lines from stdin: until when the run has time, on the clock that all processes share, and what the run is doing. It ends
with the run. Only the standard library is imported here, so that it starts in a few milliseconds anywhere.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["descendants", "end"]

PERIOD_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""The time that a run has to go on when its children are gone, and a process to show where it is."""
MOST_SHOWN = 100_000
"""Bytes."""
BESIDE = (b"conformance/guard_process.py", b"xferlib/watchdog.py", b"multiprocessing.resource_tracker")
"""Programs that run beside a test run and hold nothing up."""


def descendants(of: int) -> list[int]:
    """Return the processes that a process has started, and their descendants, the youngest generation first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            # The name, in parentheses before it, may hold anything. A process may end meanwhile.
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, generation = [], [of]
    while generation:
        generation = [child for parent in generation for child in parents.get(parent, []) if not _is_beside(child)]
        found.append(generation)
    return [process for generation in reversed(found) for process in generation]


def end(processes: list[int]) -> None:
    """End processes one after another, each when it has shown where it is, or after some seconds if it does not.

    They are stopped meanwhile: what several write to one place at once cannot be read, and one that waits for another would go on.
    """
    _signal(processes, signal.SIGSTOP)
    for process in processes:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process)
            try:
                _signal([process], signal.SIGABRT)
                _signal([process], signal.SIGCONT)
                # This also works if nobody has asked for its status.
                if not select.select([descriptor], [], [], GRACE_SECONDS)[0]:
                    _signal([process], signal.SIGKILL)
            finally:
                os.close(descriptor)


def main() -> None:
    run = int(sys.argv[1])
    deadline, what = float("inf"), ""
    while os.getppid() == run:
        left = deadline - time.monotonic()
        # Also where no time is left: this process may have been kept from running, and the run may be far beyond what it was at.
        if select.select([sys.stdin], [], [], max(0.0, min(left, PERIOD_SECONDS)))[0]:
            said = os.read(sys.stdin.fileno(), 1 << 16)
            if not said:
                return
            # They come one at a time, unless this process was late.
            seconds, _, what = said.decode().splitlines()[-1].partition(" ")
            deadline = float(seconds)
        elif left <= 0:
            _end(run, what)
            deadline = float("inf")


def _end(run: int, what: str) -> None:
    children = descendants(run)
    _say(f"It hangs: {what}.")
    if children:
        _say(f"Its children are ended: {', '.join(map(str, children))}.")
        end(children)
        if select.select([sys.stdin], [], [], GRACE_SECONDS)[0]:
            # It waited for one of them.
            return
        _signal(descendants(run), signal.SIGKILL)
    _show_captured(run)
    _say("The run is ended.")
    end([run])


def _show_captured(run: int) -> None:
    """Show what the run has captured of its stderr, what its children have said there included. It would be lost with the run."""
    with suppress(OSError), open(f"/proc/{run}/fd/2", "rb") as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _say("What it has captured of stderr:")
            os.write(sys.stderr.fileno(), file.read(MOST_SHOWN) + b"\n")


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _is_beside(process: int) -> bool:
    with suppress(OSError):
        command = Path(f"/proc/{process}/cmdline").read_bytes()
        return any(name in command for name in BESIDE)
    return False


def _say(text: str) -> None:
    os.write(sys.stderr.fileno(), f"\n{text}\n".encode())


if __name__ == "__main__":
    main()
