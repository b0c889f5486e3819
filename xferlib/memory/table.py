"""What tables of memory have in common: who may come in, and what happens to a step that is cut short.

A table owns memory, and tickets name its rows. Its steps come one at a time. Each first settles what was posted since: the rows
that nobody holds any more. If the garbage collector runs a finalizer in the middle of a step, on the same thread, the finalizer is
refused: the rows are not in order then. An interrupt, or an error, may cut a step short: whatever is derived from the rows is
derived anew by the next one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, TypeVar, TypeVarTuple

from xferlib.errors import AllocationError
from xferlib.tickets import Returns

__all__ = ["Table"]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Table(ABC):
    """Any thread. `memory`: what is asked for here, in words, for refusing a finalizer. `sweep` has those tickets posted that are
    told of only when somebody asks.
    """

    def __init__(self, memory: str, sweep: Callable[[], object] = lambda: None) -> None:
        self._memory = memory
        self._sweep = sweep
        self._torn = self._closed = False
        """Torn: a step was begun, and has not come to its end."""
        self._renew()

    def _renew(self) -> None:
        """Begin with a lock that nobody holds, as in a forked child: the thread that held it may not be there."""
        # Reentrant: a foreign finalizer may ask while its thread is in here; it finds `_inside`, and is refused.
        self._lock = threading.RLock()
        self._inside = False
        self._returns = Returns()
        self._nothing_new = self._returns.nothing_new

    @property
    def entered(self) -> bool:
        """Whether the calling thread is in here already, and so is a finalizer now."""
        return self._inside and self._lock._is_owned()  # type: ignore[attr-defined]  # As `threading.Condition` asks.

    def _alone(self, step: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
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
                    self._take_back()
                outcome = step(*arguments)
                self._torn = False
                return outcome
            finally:
                self._inside = False

    def _refuse(self) -> NoReturn:
        raise AllocationError(f"{self._memory} asked by a finalizer that ran inside another request. Ask from ordinary code")

    @abstractmethod
    def _mend(self) -> None:
        """Derive anew what follows from the rows."""

    @abstractmethod
    def _take_back(self) -> None:
        """Settle the numbers that were posted, each taken out only then: one that an interrupt leaves in the middle comes again."""
