"""Where code of ours notes what it does while a trace runs: transfers, and the copies and computes of backends without a GPU.

`LOG.on` is asked on the path of every transfer, and is an attribute for that reason. Nothing else happens while no trace runs.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from _thread import get_ident, get_native_id
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeAlias, final

from xferlib.tracing.events import HOST, Event, EventKind, Memory

__all__ = ["LOG", "Log", "TracedTransfer", "is_program", "shown"]

MOST_EVENTS: Final = 2_000_000
"""And jobs. A gigabyte, at some hundreds of bytes each."""
MOST_AT_ONCE: Final = 256
"""How many jobs are taken to be under way at once, at most."""
_CORE = Path(__file__).parent.parent
OURS: Final = tuple(f"{folder}{os.sep}" for folder in {_CORE.absolute(), _CORE.resolve()})
INSTALLED: Final = tuple(
    f"{path}{os.sep}" for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
PACKAGES: Final = frozenset({"site-packages", "dist-packages"})
"""What folders of installed packages are called, those of a user and of the system, too."""
STARTERS: Final = f"{os.sep}threading.py", f"{os.sep}runpy.py"
"""Of the standard library: where threads and programs begin."""

StreamKey: TypeAlias = tuple[int, int]


class TracedTransfer(NamedTuple):
    """A transfer of ours that threads of ours cut into copies: whoever records these finds out where they were asked for."""

    noted: int
    kind: EventKind
    pieces: tuple[tuple[int, int], ...]
    """Device address and bytes of each piece."""
    site: str


@final
class Log:
    """What was noted since `start`. Any thread notes; a finalizer may, too."""

    on: bool = False
    """Whether a trace runs."""

    def __init__(self) -> None:
        self.drop()
        self.served: dict[int, str] = {}
        """By thread of ours, where the program asked for what it does, as `debug.call_site` says it."""
        os.register_at_fork(after_in_child=self.stop)
        os.register_at_fork(after_in_child=self.served.clear)

    def start(self) -> None:
        """Begin anew."""
        self.drop()
        self.on = True

    def drop(self) -> None:
        """Let go of what was noted."""
        self.events: list[Event] = []
        self.jobs: list[TracedTransfer] = []
        self.lost = 0
        self.threads: dict[int, str] = {}
        self.streams: dict[StreamKey, str] = {}
        self.null_streams: set[StreamKey] = set()
        self.devices: dict[int, str] = {}
        self.notes: list[str] = []
        """What is not among the events, in words."""

    def stop(self) -> None:
        """Note nothing more. Also in a forked child, whose parent's trace it is."""
        self.on = False

    def act_for(self, begun_at: str | None) -> None:
        """Note for whom the calling thread, one of ours, works, as `debug.call_site` says it. None: it is about to end."""
        if begun_at is None:
            self.served.pop(get_native_id(), None)
        else:
            self.served[get_native_id()] = begun_at

    def served_at(self, thread: int) -> str:
        """Return the line of the program for which a thread works; empty: it is none of ours."""
        path, _, line = self.served.get(thread, "").partition(",")[0].rpartition(":")
        return f"{_short(path)}:{line}" if line else ""

    def call(
        self, kind: EventKind, name: str, start: int, *, nbytes: int = 0, memory: Memory = "", site: str | None = None
    ) -> None:
        """Note something that the calling thread has done since `start` (`perf_counter_ns`), and has ended now."""
        thread = get_native_id()
        if thread not in self.threads:
            self.threads[thread] = _thread_name()
        found = self.site() if site is None else site
        self._add(Event(kind, name, start, perf_counter_ns(), HOST, thread, nbytes, memory, found))

    def work(self, event: Event, lane: str, device: str) -> None:
        """Note something that a device has done, in a stream of this name. `device`: the device's own name."""
        self.streams[event.device, event.stream] = lane
        self.devices[event.device] = device
        self._add(event)

    def copy(self, event: Event, lane: str, device: str, address: int) -> None:
        """Note a copy, as `work` does; `address`: of its device memory."""
        self.work(event._replace(site=self.asked_at(event, address)), lane, device)

    def asked_at(self, event: Event, address: int) -> str:
        """Return the line where a copy was asked for: its own, if it has one, or that of the job that it is a part of."""
        if event.site:
            return event.site
        last = bisect_right(self.jobs, event.issued, key=lambda job: job.noted)
        # The memory may have been used by earlier jobs, too.
        for job in reversed(self.jobs[max(0, last - MOST_AT_ONCE) : last]):
            if job.kind == event.kind and any(start <= address < start + nbytes for start, nbytes in job.pieces):
                return job.site
        return ""

    def job(self, kind: EventKind, pieces: Sequence[tuple[int, int, int, int]]) -> None:
        """Note what a lane is given; see `Lane.submit`."""
        if len(self.jobs) >= MOST_EVENTS:
            self.lost += 1
            return
        self.jobs.append(
            TracedTransfer(perf_counter_ns(), kind, tuple([(device, nbytes) for _, device, nbytes, _ in pieces]), self.site())
        )

    def site(self) -> str:
        """Return the line of the program that the calling thread is at, as in "train.py:12"; empty if it runs only our code."""
        frame: FrameType | None = sys._getframe(1)
        passed: list[FrameType] = []
        while frame is not None:
            # To find the line of a frame takes longer than all else here, so it is asked of one.
            if is_program(frame.f_code.co_filename):
                return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
            passed.append(frame)
            frame = frame.f_back
        return shown([(frame.f_code, frame.f_lineno) for frame in passed]) or self.served_at(get_native_id())

    def _add(self, event: Event) -> None:
        if len(self.events) < MOST_EVENTS:
            self.events.append(event)
        else:
            self.lost += 1


def shown(frames: Sequence[tuple[CodeType, int]]) -> str:
    """Return the first line among frames, the innermost first, that is the program's; else the first that is not ours.

    Of threads that other code started for its own purposes there may be none: then it is empty.
    """
    for code, line in frames:
        if is_program(code.co_filename):
            return f"{_short(code.co_filename)}:{line}"
    for code, line in frames:
        name = code.co_filename
        if not name.startswith(("<", *OURS)) and not name.endswith(STARTERS) and not _is_backend(name):
            return f"{_short(name)}:{line}"
    return ""


@lru_cache(maxsize=4096)
def is_program(filename: str) -> bool:
    """Tell whether a file is the program's own: not of the standard library, not in an installed package, and not ours."""
    # What is typed in, or given by -c, is the program's.
    if filename in ("<stdin>", "<string>") or filename.startswith("<ipython"):
        return True
    if filename.startswith("<"):
        return False
    path = os.path.abspath(filename)
    return not path.startswith((*OURS, *INSTALLED)) and not _is_backend(path) and PACKAGES.isdisjoint(path.split(os.sep))


def _is_backend(filename: str) -> bool:
    # A backend's package may lie anywhere, and so does that of a stranger: its name says what it is.
    return any(part.startswith("xferlib_") for part in Path(filename).parts[-3:-1])


@lru_cache(maxsize=4096)
def _short(filename: str) -> str:
    """Return a path as people name it: relative to the current folder where it is inside, else its last two parts."""
    if filename.startswith("<"):
        return filename
    path = Path(os.path.abspath(filename))
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(Path(*path.parts[-2:])) if len(path.parts) > 2 else str(path)


def _thread_name() -> str:
    # Not `current_thread`, which would enter a thread that Python does not know.
    found: Any = threading._active.get(get_ident())  # type: ignore[attr-defined]
    return "unknown thread" if found is None else str(found.name)


LOG: Final = Log()
