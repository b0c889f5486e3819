"""What a get holds of an array of the user's until its copy is done, and how JAX lets go of it afterwards.

JAX puts what an exported capsule held on a list, and looks at the list when somebody calls into it for something else. A lease
would then outlive its array by as long as nobody does.
"""

from __future__ import annotations

from typing import Any, final

__all__ = ["Reading", "Readings"]


@final
class Reading:
    """An array and a capsule of it. While the capsule lives, the memory stays: deleting the array harms nobody.

    Donating it fails loudly on a GPU, and on the CPU leaves the memory alone.
    """

    __slots__ = ("_ended", "array", "capsule")

    def __init__(self, array: Any, capsule: Any, ended: list[None]) -> None:
        self.array = array
        self.capsule = capsule
        self._ended = ended

    def __del__(self) -> None:
        self.capsule = self.array = None
        self._ended.append(None)


@final
class Readings:
    """The readings of one stager. Any thread."""

    def __init__(self, device: Any) -> None:
        self._ended: list[None] = []
        self._look = device.memory_stats

    def make(self, array: Any, capsule: Any) -> Reading:
        return Reading(array, capsule, self._ended)

    def let_go(self) -> None:
        """Have JAX let go of what was read, if there was anything since the last call."""
        if self._ended:
            self._ended.clear()
            # The cheapest call that makes JAX look at its list: a microsecond.
            self._look()
