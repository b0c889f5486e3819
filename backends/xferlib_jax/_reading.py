"""What a get holds of the user's array until its copy is done, and how JAX lets go of it afterwards.

JAX puts what an exported capsule held on a list, and looks at the list when somebody calls JAX for something else. Until then a
lease would outlive its array. The list is the process's, and so is the table of what to look for: the memory may belong to another
stager than the one that read it, which nobody may call any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, final

from xferlib.tickets import Returns, ticket

__all__ = ["Reading", "Readings", "readings"]


@final
class Reading:
    """An array and a capsule of it. While the capsule lives, the memory stays: deleting the array harms nobody.

    Donating the array fails loudly on a GPU, and leaves the memory alone on the CPU.
    """

    # Python lets go of them in alphabetical order: of the ticket last.
    __slots__ = ("array", "capsule", "ticket")

    def __init__(self, array: Any, capsule: Any, ticket: object) -> None:
        self.array = array
        self.capsule = capsule
        self.ticket = ticket


@final
class Readings:
    """The readings of this process, of all stagers. Any thread. There is one: `readings()`."""

    def __init__(self, look: Callable[[], object]) -> None:
        """`look` makes JAX look at its list, and waits for nothing: `jaxlib._jax.collect_garbage`.

        That call is private, but JAX itself has made it after each collection since 2023. Public calls do the same, but keep the
        interpreter meanwhile: `Device.memory_stats` waits that way for the lock of JAX's device memory, which may be held inside
        the driver while that memory grows. No Python thread runs then, and if the driver waits for one, none ever does.
        """
        self._numbers = itertools.count()
        self._ended = Returns()
        self._put = self._ended.put
        self._look = look

    def make(self, array: Any, capsule: Any) -> Reading:
        return Reading(array, capsule, ticket(self._put, next(self._numbers)))

    def let_go(self) -> None:
        """Have JAX let go of what was read, if there was anything since the last call."""
        if self._ended:
            numbers = self._ended.unsettled()
            self._look()
            for number in numbers:
                self._ended.settled(number)


def readings() -> Readings:
    """Return this process's readings."""
    from jaxlib import _jax

    # One step: two threads may open the first stagers at once.
    return _OF_PROCESS.setdefault("", Readings(_jax.collect_garbage))


_OF_PROCESS: dict[str, Readings] = {}
"""Those of this process, once JAX is there."""
