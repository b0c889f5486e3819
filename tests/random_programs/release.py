"""A thread that releases what is held when a step is blocked for longer than it should be: the step may wait for just that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

__all__ = ["RELEASER", "Releaser"]


@final
class Releaser:
    """Any thread may be watched, several at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[int, tuple[float, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, seconds: float, release: Callable[[], None]) -> Iterator[None]:
        """Call `release` on another thread if the block lasts longer."""
        me = threading.get_ident()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="random-programs-releaser", daemon=True)
                self._thread.start()
            before = self._due.get(me)
            self._due[me] = (time.monotonic() + seconds, release)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._due[me]
                if before is not None:
                    self._due[me] = before

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                late = [(me, release) for me, (due, release) in self._due.items() if due <= now]
                for me, release in late:
                    # Once more, should something be held anew meanwhile.
                    self._due[me] = (now + 0.05, release)
                if not late:
                    first = min((due for due, _ in self._due.values()), default=None)
                    self._changed.wait(None if first is None else first - now)
                    continue
            for _, release in late:
                release()


RELEASER = Releaser()
