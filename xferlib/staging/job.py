"""What several threads do together: claim a part, copy it, claim the next.

Invariant: `over` is reached once, when every part is done or given up and no thread is at any of them; the parts, and with them the
caller's arrays, are let go of before.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from xferlib.landing import Landing
from xferlib.latch import Latch
from xferlib.protocol import Event
from xferlib.staging.chunks import Chunk
from xferlib.staging.parts import Part

__all__ = ["Job", "Loop", "Started"]

Started: TypeAlias = tuple[Chunk, Event, Part]
"""A part on its way from the device into a chunk."""
Loop: TypeAlias = Callable[["Job", bool], None]
"""Copies parts until none is left. True: leads, so it waits for a chunk; False: helps, so it does not."""


@final
class Job:
    """One transfer's parts. Made led: `lead` or `run` must follow.

    `owner`: the thread that will call `run`; None: a thread of ours will lead.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        loop: Loop,
        *,
        owner: int | None = None,
        before: Callable[[Job], None] | None = None,
        when_begun: Callable[[], None] | None = None,
        end: Callable[[Job], None] | None = None,
    ) -> None:
        """`before`: called by who leads, first; `when_begun`: once every part was begun; `end`: before `over` is reached.

        `end` is called whatever failed, when nobody is at any part.
        """
        self.over = Landing(owner)
        self.issued = Latch()
        """Open when every part's copy to the host was started."""
        self.started: deque[Started] = deque()
        self.error: BaseException | None = None
        self._parts = parts
        self._next = itertools.count().__next__
        self._loop = loop
        self._before = before
        self._when_begun = when_begun
        self._end = end
        self._lock = threading.Lock()
        self._workers = 1
        self.parts = len(parts)
        self._to_begin = self.parts

    def claim(self) -> Part | None:
        """Return a part that nobody else has; None: there is none left."""
        if self.error is not None:
            return None
        parts = self._parts
        index = self._next()
        return parts[index] if index < len(parts) else None

    def begun(self) -> None:
        """Note that one more part was begun."""
        with self._lock:
            self._to_begin -= 1
            if self._to_begin:
                return
        self.all_begun()

    def all_begun(self) -> None:
        """Note that every part was begun."""
        when_begun, self._when_begun = self._when_begun, None
        if when_begun is not None:
            when_begun()
        self.issued.open()

    def fail(self, error: BaseException) -> None:
        """Note the first failure; what is left need not be done."""
        if self.error is None:
            self.error = error

    def help(self) -> None:
        """See `Helpful`."""
        with self._lock:
            if not self._workers:
                return
            self._workers += 1
        self._work(leading=False)

    def lead(self) -> None:
        """See `Helpful`."""
        self._work(leading=True)

    def run(self) -> None:
        """Lead on the calling thread, and return, or raise, when everything is over."""
        self.lead()
        while not self.over.reached():
            try:
                self.over.wait()
            except BaseException as interrupt:
                # The caller's memory must be at rest before he hears of it.
                self.fail(interrupt)
        if self.error is not None:
            raise self.error

    def _work(self, *, leading: bool) -> None:
        try:
            if leading and self._before is not None:
                self._before(self)
            self._loop(self, leading)
        except BaseException as error:
            self.fail(error)
        with self._lock:
            self._workers -= 1
            if self._workers:
                return
        try:
            if self._end is not None:
                self._end(self)
        except BaseException as error:
            self.fail(error)
        self._parts = ()
        self._before = self._when_begun = self._end = None
        self.issued.open()
        if self.error is not None:
            self.over.fail(self.error)
        self.over.reach()
