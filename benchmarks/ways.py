"""The words of the benchmarks: a way to move bytes, a peer, a device. Nothing here runs.

Everything moves bytes: host arrays are one-dimensional NumPy arrays of `uint8`, device arrays likewise in the device's framework.
Only public names of xferlib are used in this folder; frameworks may be named here, each in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from benchmarks.steps import Bytes, Compute, Drain, Feed

__all__ = ["Bytes", "Call", "Corrupted", "Device", "Direction", "Kind", "Opener", "Peer", "Shards", "Way"]

Direction: TypeAlias = Literal["h2d", "d2h"]
Kind: TypeAlias = Literal["pinned", "pageable", "fresh", "untouched", "new"]
"""From or into pinned or pageable memory that is there and touched; from pinned memory into a new device array ("fresh"); from the
device into new pageable memory that nobody has touched; between pageable memory and a new array on the other side ("new")."""
Call: TypeAlias = Callable[[], object]


class Corrupted(Exception):
    """Raised when a destination does not hold the source's bytes after a transfer was said to be done."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to move bytes in one direction, of xferlib, of the bare runtime or of a peer."""

    name: str
    direction: Direction
    bind: Callable[[Any, Any], Call]
    """Take a source and a target (None where `result` is given) and return the call to be timed."""
    synchronize: Callable[[Sequence[object]], None]
    """Block until everything that was called is done, given what the kept calls returned."""
    result: Callable[[Any], Any] | None = None
    """For calls that make their own target: turn what a call returned, once done, into the array to be verified."""
    keep: int | None = 1
    """How many of the latest returned objects are held while others are made; None: all."""
    empty_pinned: Callable[[int], Bytes] | None = None
    """Allocate pinned memory of the peer's own, if its calls are slower, or faster, with memory that it knows."""
    waits: bool = False
    """Whether the call itself waits for the bytes: then it cannot take part in moves both ways at once."""
    once: bool = False
    """Whether a second call on the same array would find what the first has left behind, and move nothing."""
    given_new: bool = False
    """Whether it writes to a device array that is made for each call, outside the clock, with wrong bytes. See `arena.fitted`."""
    trees: bool = False
    """Whether `bind` takes a list of arrays as well."""


class Peer(Protocol):
    """A library that moves the same bytes between the same memory, in arrays of the device or of its own over them."""

    def ways(self, kind: Kind, direction: Direction) -> Sequence[Way]:
        """Return the calls that its users make for this; none if there are none."""

    def feeds(self, kind: Kind, compute: Compute) -> Sequence[Feed]:
        """Return how its users bring batches to this compute, none if they do not."""

    def drains(self, kind: Kind, compute: Compute) -> Sequence[Drain]:
        """Return how its users bring outputs of this compute to the host: into given pinned memory, or into new memory ("new")."""


Opener: TypeAlias = Callable[[], Peer]
"""Import and set up a peer. Raises whatever its import raises; the run goes on without it."""


class Shards(Protocol):
    """Devices between which the rows of an array are divided, and xferlib's and others' ways to bring arrays there."""

    @property
    def count(self) -> int:
        """How many devices."""

    @property
    def peers(self) -> Mapping[str, Callable[[Iterable[Bytes]], Iterator[Any]]]:
        """Other ways to iterate host batches as divided arrays."""

    @property
    def loaders(self) -> Mapping[str, Callable[[Path], Mapping[str, Any]]]:
        """Other ways to load a `.safetensors` file of arrays, and wait for it."""

    def place(self, batch: Bytes) -> Any:
        """Return a finished array with these bytes, without xferlib."""

    def prefetched(self, batches: Iterable[Bytes]) -> AbstractContextManager[Iterator[Any]]: ...

    def load(self, path: Path) -> Mapping[str, Any]: ...

    def differ(self, batch: Any, expected: Any) -> Any:
        """Start to compare on the devices, and return an array of one bool."""


class Device(Protocol):
    """What a benchmark needs beside the stager: device arrays, the bare copy, and how to look at data without the stager."""

    @property
    def name(self) -> str:
        """Names the file of results."""

    @property
    def peers(self) -> Mapping[str, Opener]: ...

    @property
    def in_place(self) -> bool:
        """Whether device arrays can be written to. If not, only transfers into new arrays are measured."""

    @property
    def streams(self) -> Sequence[str]:
        """Names the streams that compute may run on, the usual one first."""

    def machine(self) -> dict[str, str]: ...

    def versions(self) -> dict[str, str]: ...

    def empty(self, nbytes: int) -> Any:
        """Return a device array, contents undefined."""

    def upload(self, values: Bytes) -> Any:
        """Return a finished device array with these bytes."""

    def invert(self, source: Any, out: Any) -> None:
        """Flip every bit of one device array into another: no byte of `out` is then right by chance. Needs `in_place`."""

    def inverted(self, source: Any) -> Any:
        """Return a finished new device array with every bit flipped."""

    def cut(self, array: Any, ends: tuple[int, ...]) -> Sequence[Any]:
        """Return the pieces of a device array that end at these bytes."""

    def equal(self, left: Any, right: Any) -> bool:
        """Compare two device arrays; the right one may be a peer's."""

    def synchronize(self) -> None:
        """Block until the device has nothing to do."""

    def wait(self, arrays: Sequence[Any]) -> None:
        """Block until these arrays of the framework are done, and what its current stream has under way."""

    def raw(self, direction: Direction) -> Way:
        """Return the bare runtime call from or into pinned memory: the physical limit."""

    def floors(self, direction: Direction) -> Sequence[Way]:
        """Return other bare calls that a small transfer cannot do without."""

    def shards(self) -> Sequence[Shards]:
        """Return the first device, and all devices; nothing where there is one, or where the framework divides no arrays."""

    def busy(self) -> AbstractContextManager[Call] | None:
        """Make a compute stream current and yield a call that launches a short kernel on it; None: there is no such thing."""

    def compute(self, nbytes: int, stream: str) -> Compute:
        """Return compute on batches of `nbytes` bytes, a multiple of 8, on the stream of that name."""
