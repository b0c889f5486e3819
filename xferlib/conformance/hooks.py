"""What a backend author writes so that the laws can be tested: how to hold work, and how to look at data without the stager.

The laws themselves stand in `laws/`. Nothing here knows a framework, and no code here runs.

Holds make "in flight" a state instead of a race: inside a hold, work is prevented from completing until it is released. Before you
take a hold, warm up whatever will run under it: first launches, compiles and frees may wait for the held work. Give every hold a
watchdog that releases it after some seconds, so that a failing law ends as a failure and not as a hang.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from xferlib.protocol import HostStager

__all__ = ["Direction", "HeldArray", "Hold", "Hooks"]

Direction = Literal["h2d", "d2h", "both"]


class Hold(Protocol):
    """Work that cannot finish before it is released."""

    @property
    def held(self) -> bool:
        """Whether the gate is still shut and the held work has indeed not finished. Does not block."""

    @property
    def stream(self) -> object | None:
        """What to pass as `stream=` to name the held compute; None where arrays order themselves, and for held copies.

        Usable until the context manager is left, even after the hold was released.
        """

    def release(self) -> None:
        """Open the gate. Twice is fine; leaving the context manager releases and waits for the held work."""


class HeldArray(Hold, Protocol):
    """A hold, and the device array that the held work produces on `stream`."""

    @property
    def array(self) -> Any: ...


class Hooks(ABC):
    """Subclass `StagerConformance`, which adds the laws, and write these.

    Methods are called on a fresh instance for each test. What needs the framework is imported inside them, so that a machine
    without it skips in `open` and does not fail at collection.
    """

    known_failures: ClassVar[Mapping[str, str]] = {}
    """Test name -> reason, with a link. Strict: a listed test that passes is a failure."""

    @abstractmethod
    def open(self) -> HostStager[Any]:
        """Return the backend under test. The only place that may raise `BackendUnavailableError`, which skips."""

    @abstractmethod
    def from_numpy(self, values: np.ndarray) -> Any:
        """Return a finished device array with these values, made without the stager."""

    @abstractmethod
    def to_numpy(self, array: Any) -> np.ndarray:
        """Wait for the array and return its values, without the stager."""

    @abstractmethod
    def hold_compute(self, stager: HostStager[Any]) -> AbstractContextManager[Hold]:
        """Enqueue device work that cannot finish, on a compute stream (not the calling thread's current one)."""

    @abstractmethod
    def hold_copies(self, stager: HostStager[Any], direction: Direction = "both") -> AbstractContextManager[Hold]:
        """Let no transfer of this direction that starts inside complete."""

    @abstractmethod
    def held_array(self, stager: HostStager[Any], values: np.ndarray) -> AbstractContextManager[HeldArray]:
        """Yield an array whose producer is held: it gets these values only after the release, and holds others before."""

    @abstractmethod
    def read_later(self, array: Any, hold: Hold) -> Callable[[], np.ndarray]:
        """Enqueue behind the held compute, on `hold.stream`, work that reads the array.

        The returned callable waits for that work (after the release) and returns the values that it read. Keep nothing alive that
        reaches the array: the test drops the array while the reader is still held.
        """

    @abstractmethod
    def break_copies(self, stager: HostStager[Any]) -> AbstractContextManager[None]:
        """Make copies in both directions fail inside, at once or later. It may leave this stager broken, but not the process."""

    @abstractmethod
    def memory_calls(self, stager: HostStager[Any]) -> int:
        """Count the allocations, frees, page-locks and unlocks of host and device memory so far, as the driver saw them."""

    def page_locked(self, address: int) -> bool:
        """Ask the driver, not the stager, whether the address is page-locked. Needed where `pinned` is declared."""
        raise NotImplementedError(f"{type(self).__name__} declares pinned memory: override page_locked")

    def write(self, array: Any, values: np.ndarray) -> None:
        """Let work on the device write these values into the array, and wait for it, without the stager.

        Needed where `mapped` is declared. Write by a kernel, not by a copy.
        """
        raise NotImplementedError(f"{type(self).__name__} declares mapped memory: override write")

    def write_combined(self, address: int) -> bool:
        """Ask the driver, not the stager, whether the address is in write-combined memory. Needed where it is declared."""
        raise NotImplementedError(f"{type(self).__name__} declares write-combined memory: override write_combined")

    def current(self, stream: object) -> AbstractContextManager[object] | None:
        """Return a context inside which a hold's stream is the calling thread's current one; None where there is no such thing."""
        return None

    def layouts(self, values: np.ndarray) -> Iterable[tuple[str, Any]]:
        """Yield two-dimensional named device arrays with these values that do not lie in C order, made without the stager.

        One for each way in which the framework lets an array lie in memory; none where all lie in C order.
        """
        return ()

    def aliases(self, array: Any) -> Iterable[tuple[str, Any]]:
        """Yield named views and aliases of a one-dimensional array, each keeping the same memory reachable."""
        yield "slice", array[1:]
