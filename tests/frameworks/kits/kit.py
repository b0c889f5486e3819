"""What the tests ask of a framework: streams of every kind, work on them, graphs, and calls that a witness must count.

A kit is a framework's own way of doing these; what is tested with them stands in the tests. Nothing here or in a kit imports a
framework before it is first used, so that a machine without it skips and does not fail at collection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, final

from xferlib.conformance import StagerConformance

__all__ = ["CudaKit", "Foreign", "Kit", "Named"]


class Named(NamedTuple):
    name: Any
    """What is passed as `stream=`."""
    stream: Any
    """The framework's object for the same stream, to launch work on."""


@final
class Foreign:
    """A stream of some other library's, over one that it keeps alive."""

    def __init__(self, stream: Any, handle: int) -> None:
        self._stream = stream
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class Kit(ABC):
    """One per framework, without state: tests are parametrised with it."""

    name: ClassVar[str]
    hooks: ClassVar[type[StagerConformance]]
    whole_alias: ClassVar[str]
    """Among the aliases of the hooks, one that shows all of the array."""

    @property
    @abstractmethod
    def bench(self) -> Any:
        """The hooks' own: compute streams, memory, a kernel that copies. Made, warm, on the first call."""


class CudaKit(Kit):
    """A framework that gives its users streams."""

    streams: ClassVar[Mapping[str, Callable[[], Named]]]
    """Every way to name a stream. A stream whose handle alone is named outlives the process's arrays."""
    has_current_stream: ClassVar[bool]
    crash: ClassVar[str]
    """Lines of a program that leave the device with an error from which its context does not recover."""
    capture_failures: ClassVar[tuple[type[Exception], ...]]
    """What ending a capture raises that was invalidated."""

    @abstractmethod
    def non_blocking(self) -> Any:
        """Make a stream that does not stop for the NULL stream."""

    @abstractmethod
    def blocking(self) -> Any:
        """Make a stream as the framework does unless told otherwise: it stops for the NULL stream."""

    @abstractmethod
    def destroy(self, stream: Any) -> None:
        """Destroy a stream of `non_blocking`, to which the caller holds no other reference."""

    @abstractmethod
    def handle(self, stream: Any) -> int: ...

    @abstractmethod
    def null_stream(self) -> Any: ...

    @abstractmethod
    def current(self, stream: Any) -> AbstractContextManager[Any]:
        """Make the stream the thread's current one; do nothing where the framework has no such thing."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def address(self, array: Any) -> int: ...

    @abstractmethod
    def copy(self, array: Any, stream: Any) -> Any:
        """Return an array that a kernel on the stream fills with the values of another."""

    @abstractmethod
    def enqueue(self, target: Any, source: Any, stream: Any) -> None:
        """Enqueue what a graph of the user's is made of: as the framework likes it, the target gets the source's values."""

    @abstractmethod
    def begin_capture(self, stream: Any, mode: int) -> None: ...

    @abstractmethod
    def end_capture(self, stream: Any) -> Any:
        """Return the graph."""

    @abstractmethod
    def launch(self, graph: Any, stream: Any) -> None: ...

    @abstractmethod
    def record_and_wait(self, stream: Any) -> None:
        """Record an event and wait for it."""

    @abstractmethod
    def allocate_and_free(self, nbytes: int) -> None:
        """Make two memory calls."""

    @abstractmethod
    def allocate_and_free_pinned(self, nbytes: int) -> None:
        """Make two memory calls."""

    @abstractmethod
    def page_lock(self, address: int, nbytes: int) -> None: ...

    @abstractmethod
    def page_unlock(self, address: int) -> None: ...
