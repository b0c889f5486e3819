"""Threads that release what is held when a step is blocked for longer than it should be: the step may wait for just that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import final

__all__ = ["RELEASER", "Releaser"]

TICK_SECONDS = 0.001
AGAIN_TICKS = 20
SECOND_TICKS = 50
"""How much more patient the second thread is."""


@final
class _Watched:
    """A step. `ticks`: what is left of each thread's patience."""

    def __init__(self, ticks: int, release: Callable[[], object]) -> None:
        self.ticks = [ticks, ticks + SECOND_TICKS]
        self.release = release


@final
class Releaser:
    """Any thread may be watched, several at once.

    Patience is counted in ticks of a thread, not by a clock: on a machine that is busy, where a step that is not blocked takes
    longer, the ticks do so, too.

    The collector may run on any thread, and what it finalizes may wait for what is held. So there are two threads, since only one
    at a time can be in the collector; and there is no lock that a step could hold then.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        """By thread."""
        self._wake: list[SimpleQueue[None]] = [SimpleQueue(), SimpleQueue()]
        self._started: list[None] = []

    @contextmanager
    def watch(self, ticks: int, release: Callable[[], object]) -> Iterator[None]:
        """Call `release` on another thread if the block lasts longer than so many ticks."""
        self._start()
        me = threading.get_ident()
        before = self._watched.get(me)
        self._watched[me] = _Watched(ticks, release)
        for queue in self._wake:
            queue.put(None)
        try:
            yield
        finally:
            if before is None:
                del self._watched[me]
            else:
                self._watched[me] = before

    def _start(self) -> None:
        # Of several threads that come here at once, the first one appends first.
        if self._started:
            return
        self._started.append(None)
        if len(self._started) == 1:
            for number in range(len(self._wake)):
                threading.Thread(target=self._run, args=(number,), name=f"random-programs-releaser-{number}", daemon=True).start()

    def _run(self, number: int) -> None:
        wake = self._wake[number]
        while True:
            if not self._watched:
                wake.get()
                while not wake.empty():
                    wake.get()
            for watched in self._watched.copy().values():
                watched.ticks[number] -= 1
                if watched.ticks[number] < 0:
                    # Once more after a while, should something be held anew meanwhile.
                    watched.ticks[number] = AGAIN_TICKS
                    watched.release()
            time.sleep(TICK_SECONDS)


RELEASER = Releaser()
