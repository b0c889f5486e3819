"""What tables of memory have in common: who may come in, what happens to a step that is cut short, and how a table grows.

A table owns memory, and tickets name its rows. Its steps come one at a time. Each first settles what was posted since: the rows
that nobody holds any more. If the garbage collector runs a finalizer in the middle of a step, on the same thread, the finalizer is
refused: the rows are not in order then. An interrupt, or an error, may cut a step short: whatever is derived from the rows is
derived anew by the next one.

A table grows outside of its steps, since drivers take milliseconds. One step counts the memory, so that the limit holds. Then a
thread that no interrupt comes to asks the driver, and enters the row in another step. Until then the request may be given up.
"""

from __future__ import annotations

import itertools
import threading
import time
from _thread import get_ident
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, TypeVarTuple, final

from xferlib.errors import AllocationError
from xferlib.protocol import Event
from xferlib.tickets import Returns
from xferlib.uninterrupted import uninterrupted

__all__ = ["ROOM_LOOK_SECONDS", "AtWork", "Growth", "Table"]

ROOM_LOOK_SECONDS = 0.0005
"""How often a waiting thread looks whether another one is done with memory that it takes or gives back."""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


@final
class Growth:
    """Memory that is counted, and has no row yet. `begun`: the driver is being asked for it. `wanted`: somebody waits for it."""

    __slots__ = ("begun", "nbytes", "wanted")

    def __init__(self, nbytes: int, *, wanted: bool = True) -> None:
        self.nbytes = nbytes
        self.wanted = wanted
        self.begun = False


@final
class AtWork:
    """The threads that take memory for a table or give it back, perhaps for a request that was interrupted. A context manager."""

    def __init__(self) -> None:
        self._threads: list[int] = []

    def __enter__(self) -> None:
        self._threads.append(get_ident())

    def __exit__(self, *raised: object) -> None:
        self._threads.remove(get_ident())

    def __bool__(self) -> bool:
        return bool(self._threads)

    def is_more_to_come(self) -> bool:
        """Tell whether another thread is at work, and may have room when it is done: nobody needs to do anything for that."""
        # Not for a finalizer inside such a call: the finalizer must end first.
        return bool(self._threads) and get_ident() not in self._threads


class Table(ABC):
    """The rows of one kind of memory, changed in steps that come one at a time. Any thread."""

    def __init__(self, memory: str, sweep: Callable[[], object] = bool) -> None:
        """`memory`: what is asked for here, in words, for refusing a finalizer.

        `sweep` is called before each step: it has tickets posted of which nobody tells without being asked.
        """
        self._memory = memory
        self._sweep = sweep
        self._torn = self._closed = False
        """Torn: a step was begun, and has not come to its end."""
        self._count = itertools.count().__next__
        self._changes = 0
        """How often there was more room than before. A request that found none looks again if this has changed meanwhile."""
        self._growing: dict[int, Growth] = {}
        """By the number of the row to come."""
        self._at_work = AtWork()
        self._renew()

    def _renew(self) -> None:
        """Begin with a lock that nobody holds, as in a forked child: the thread that held it may not be there."""
        # Reentrant: a foreign finalizer may ask while its thread is in here; it finds `_inside`, and is refused.
        self._lock = threading.RLock()
        self._inside = False
        self._returns = Returns()
        self._nothing_new = self._returns.nothing_new

    @property
    def reentered(self) -> bool:
        """Whether the calling thread is in here already, and so is a finalizer now."""
        return self._inside and self._lock._is_owned()  # type: ignore[attr-defined]  # As `threading.Condition` asks.

    def _step(self, step: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Take a step with the lock, after settling what was given back. Raises `AllocationError` inside another step."""
        with self._lock:
            if self._inside:
                self._refuse()
            self._inside = True
            try:
                torn, self._torn = self._torn, True
                if torn:
                    self._mend()
                self._sweep()
                # Numbers that were looked at and not settled are there only after an interrupt or an error.
                if torn or not self._nothing_new():
                    # All in line: a call fewer, and on the path of every small put.
                    pending = self._returns.pending()
                    fences: list[Event | None] = []
                    for number in pending.copy():
                        if not self._take_back(number, fences):
                            self._give_up(number)
                        # Only now: a number that an interrupt leaves in the middle comes again.
                        pending.popleft()
                        self._changes += 1
                outcome = step(*arguments)
                self._torn = False
                return outcome
            finally:
                self._inside = False

    def _before_settling(self, step: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Take a step as `_step` does, but leave what was given back to the next one, which must come soon."""
        with self._lock:
            # `_torn` is set by the second instruction of a step, and stays set until it ends.
            if self._torn or self._inside:
                return self._step(step, *arguments)
            self._inside = self._torn = True
            try:
                outcome = step(*arguments)
                self._torn = False
                return outcome
            finally:
                self._inside = False

    def _refuse(self) -> NoReturn:
        raise AllocationError(f"{self._memory} asked by a finalizer that ran inside another request. Ask from ordinary code")

    def trim(self) -> None:
        """Give all memory back to the driver that nobody holds. May wait for kernels."""
        if not self.reentered:
            uninterrupted(self._trim)

    def _counted(self, entered: dict[int, Any]) -> int:
        """Return the bytes of what is entered and of what the driver is being asked for. Takes no lock."""
        # One call: other threads change both meanwhile. What is just being entered is in both under one number, and counts once.
        return sum([memory.nbytes for memory in (self._growing | entered).values()])

    @contextmanager
    def _grows(self, *numbers: int) -> Iterator[None]:
        """Ask the driver, inside of this, for memory that was counted, and enter it. On a thread that no interrupt comes to.

        What is not entered at the end counts no more. Raises `AllocationError` if the request was given up meanwhile.
        """
        with self._at_work:
            try:
                if not self._step(self._begin, numbers):
                    # The caller was interrupted: nobody will look at what is raised, either.
                    raise AllocationError("nobody waits for this memory any more")
                yield
            finally:
                for number in numbers:
                    self._growing.pop(number, None)
                self._changes += 1

    def _begin(self, numbers: tuple[int, ...]) -> bool:
        if not all(number in self._growing for number in numbers):
            return False
        for number in numbers:
            self._growing[number].begun = True
        return True

    def _give_up(self, number: int) -> None:
        """Note, in a step, that nobody waits for some memory any more. If the driver is being asked for it, it will be entered."""
        growth = self._growing.get(number)
        if growth is None:
            return
        if growth.begun:
            growth.wanted = False
        else:
            # It may be gone: the end of a growth is no step.
            self._growing.pop(number, None)

    def _grown(self, number: int) -> bool:
        """Count the growth no more, in the step that enters its memory; tell whether anybody still waits for it."""
        growth = self._growing.pop(number, None)
        return growth is not None and growth.wanted

    def _worth_another_look(self, changes: int) -> bool:
        """Tell, after a look that found no room, whether another one may find some. `changes`: how many there were before it.

        Sleeps for a moment where another thread takes memory or gives it back.
        """
        if self._at_work.is_more_to_come():
            time.sleep(ROOM_LOOK_SECONDS)
            return True
        return changes != self._changes or bool(self._returns)

    @abstractmethod
    def _trim(self) -> None:
        """See `trim`. On a thread that no interrupt comes to."""

    @abstractmethod
    def _mend(self) -> None:
        """Derive anew what follows from the rows."""

    @abstractmethod
    def _take_back(self, number: int, fences: list[Event | None]) -> bool:
        """Take back the row that nobody holds any more. False: there is no row of this number.

        `fences`: empty at first, for an event that all rows may share which are taken back in one step: nobody holds them any more.
        """
