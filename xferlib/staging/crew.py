"""The threads that help: few, shared by every stager of the process, one crew a direction.

A crew only ever helps: who leads a transfer does all of it alone if nobody comes. So no stager waits for a thread that another
holds up. The threads start with the first large transfer and end when the last stager that used them closes.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import Final, Protocol, TypeAlias, final

from xferlib.forks import forget_in_child
from xferlib.latch import note_copying

__all__ = ["CREWS", "Crew", "Helpful", "Leader"]


class Helpful(Protocol):
    """Something that threads do together."""

    def help(self) -> None:
        """Do a share of it, if there is one left. Raises nothing."""

    def lead(self) -> None:
        """Do all that nobody else does. Raises nothing."""


Queue: TypeAlias = "queue.SimpleQueue[Helpful | None]"


@final
class Crew:
    """The helping threads of one direction. Any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.forget()
        forget_in_child(self)

    def forget(self) -> None:
        """See `Forgetful`: threads do not survive a fork."""
        self._lock = threading.RLock()
        self._members: set[object] = set()
        self._threads: list[threading.Thread] = []
        self._tickets: Queue = queue.SimpleQueue()

    def ask(self, member: object, work: Helpful, count: int) -> None:
        """Ask `count` threads to help, for a member that will `dismiss` itself."""
        with self._lock:
            self._members.add(member)
            # Without threads the work is done all the same, by who leads it.
            with suppress(RuntimeError):
                self._start_up_to(count)
            tickets = self._tickets
        for _ in range(count):
            tickets.put(work)

    def dismiss(self, member: object) -> None:
        """Let a member go; with the last one the threads end."""
        with self._lock:
            self._members.discard(member)
            if self._members:
                return
            threads, self._threads = self._threads, []
            tickets, self._tickets = self._tickets, queue.SimpleQueue()
        for _ in threads:
            tickets.put(None)
        for thread in threads:
            _join(thread)

    def _start_up_to(self, count: int) -> None:
        while len(self._threads) < count:
            self._start_one()

    def _start_one(self) -> None:
        name = f"xferlib-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=_help, args=(self._tickets,), name=name, daemon=True)
        # First: an interrupt while it starts leaves it running.
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.remove(thread)
            raise


CREWS: Final = (Crew("to-device"), Crew("to-host"))
"""By direction."""


@final
class Leader:
    """One stager's thread for one direction: it leads what callers do not wait for. Started when first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: Queue = queue.SimpleQueue()
        # Reentrant: a finalizer may come here while the thread is made.
        self._starting = threading.RLock()
        self.thread: threading.Thread | None = None

    def submit(self, work: Helpful) -> None:
        """Lead this after what was submitted before. Raises `RuntimeError` if no thread can be started."""
        with self._starting:
            if self.thread is None:
                self._start()
            self._queue.put(work)

    def close(self) -> None:
        """End the thread when everything submitted is done."""
        with self._starting:
            thread, self.thread = self.thread, None
        if thread is not None:
            self._queue.put(None)
            _join(thread)

    def _start(self) -> None:
        thread = threading.Thread(target=_lead, args=(self._queue,), name=f"xferlib-{self._name}", daemon=True)
        if self.thread is not None:
            return
        self.thread = thread
        try:
            thread.start()
        except RuntimeError:
            self.thread = None
            raise


def _join(thread: threading.Thread) -> None:
    # Refused for the calling thread, and for one that an interrupt met before it ran.
    with suppress(RuntimeError):
        thread.join()


def _help(tickets: Queue) -> None:
    note_copying()
    while (work := tickets.get()) is not None:
        work.help()
        # While it waits for the next one it holds nothing of the caller's.
        del work


def _lead(works: Queue) -> None:
    note_copying()
    while (work := works.get()) is not None:
        work.lead()
        del work
