"""A thread that releases what is held when a step is blocked for longer than it should be: the step may wait for just that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

__all__ = ["RELEASER", "Releaser"]

TICK_SECONDS = 0.001
AGAIN_TICKS = 20


@final
class Releaser:
    """Any thread may be watched, several at once.

    Patience is counted in ticks of a thread, not by a clock: on a machine that is busy, where a step that is not blocked takes
    longer, the ticks do so, too.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: dict[int, list[Any]] = {}
        """By thread: the ticks left, and what releases."""
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, ticks: int, release: Callable[[], None]) -> Iterator[None]:
        """Call `release` on another thread if the block lasts longer than so many ticks."""
        me = threading.get_ident()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="random-programs-releaser", daemon=True)
                self._thread.start()
            before = self._watched.get(me)
            self._watched[me] = [ticks, release]
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._watched[me]
                if before is not None:
                    self._watched[me] = before

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
                late = [entry for entry in self._watched.values() if entry[0] <= 0]
                for entry in self._watched.values():
                    # Once more after a while, should something be held anew meanwhile.
                    entry[0] = AGAIN_TICKS if entry in late else entry[0] - 1
            for _, release in late:
                release()
            time.sleep(TICK_SECONDS)


RELEASER = Releaser()
