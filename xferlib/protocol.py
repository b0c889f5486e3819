"""The contract between the core and a backend.

A backend is mechanism: it pins memory, starts copies and reports events, all on raw addresses. The core is policy: it checks
arguments, keeps memory alive, pools, packs, closes and translates errors, once, for every backend. So a method here may rely on
what the core promises: addresses are valid for `nbytes` bytes until the copy's event is done, `nbytes` is at least 1, nothing is
called after `close()` except what `close()` names.

The laws that a backend keeps are listed in `LAWS` and tested by `xferlib.conformance`.
No framework is named here, and nothing here runs but the warning about a name that has changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

__all__ = [
    "LAWS",
    "Capabilities",
    "CombinesWrites",
    "ConvertsArrays",
    "CopiesArrays",
    "DescribesArrays",
    "DeviceBlock",
    "DeviceRange",
    "DriverCalls",
    "Event",
    "FindsLater",
    "HostStager",
    "MakesMany",
    "MapsMemory",
    "Opener",
    "Place",
    "PlacesMany",
    "ReadsMany",
    "Stream",
    "TakenApart",
    "TakesTreesApart",
]

LAWS = {
    1: "Content: once done, the destination holds the source's values, shape and dtype",
    2: "The source is free once done; pageable memory that is borrowed until it is staged, once wait_staged() has returned",
    3: "Nothing the caller drops can harm a copy",
    4: "done() never says yes early, never blocks, and gets there by itself",
    5: "Starting does not wait",
    6: "Real overlap: a transfer completes while compute enqueued before it is still held",
    7: "Order: a consumer sees the copied data, a get reads after its producer",
    8: "Reuse: memory is not written again while work enqueued before the drop may read it",
    9: "Really pinned",
    10: "Close: nothing is in flight afterwards, and what is still reachable outlives it",
    11: "Flags are honest both ways",
    12: "Failures surface",
    13: "Steady state is quiet: nothing is allocated, freed, pinned or unpinned",
    14: "Ownership: what the library took is released once, when nobody holds it any more; memory of others is never written",
}

ArrayT = TypeVar("ArrayT")
ViewT_co = TypeVar("ViewT_co", covariant=True)
ArrayT_co = TypeVar("ArrayT_co", covariant=True)
ArrayT_contra = TypeVar("ArrayT_contra", contravariant=True)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend offers. A flag that is on is tested; for one that is off the refusal is tested.

    A backend may have an attribute `refusals`: a mapping that says, by the name of a flag that is off, why, and what to do instead.

    Attributes:
        pinned: `alloc_pinned` really page-locks. Off: it returns pageable memory, and programs still run.
        register: `pin` and `unpin` work on memory that the caller owns.
        streams: `stream=` accepts a stream of the user's.
        put_into: An existing device array of the caller's may be overwritten: `as_target` works.
        mapped: The device reads and writes page-locked host memory in place: the backend is a `MapsMemory`, too.
        write_combined: Page-locked memory can be had that bypasses the CPU's caches: the backend is a `CombinesWrites`, too.
        finalizers: Finalizers that the garbage collector runs may transfer: the framework survives being called inside one of its
            calls.
    """

    pinned: bool = False
    register: bool = False
    streams: bool = False
    put_into: bool = False
    mapped: bool = False
    write_combined: bool = False
    finalizers: bool = True


class Stream(NamedTuple):
    """A stream of the framework, resolved: `handle` tells streams apart, `keepalive` keeps the stream from being destroyed.

    No keepalive: the user gave a bare handle, and promises that the stream stays valid until the stager is closed.
    """

    handle: int
    keepalive: object


class Event(Protocol):
    """A point in a copy stream that is reached or not. Any thread may call any method, at the same time.

    The handle comes from a pool of the backend's own and goes back to it when the object dies. An event outlives `close()`.
    """

    def done(self) -> bool:
        """Tell whether the point is reached.

        May say no late, never yes early; never blocks; gets to yes without anyone calling `synchronize`.
        Raises one of the backend's `failures` if a copy before the point failed.
        Does not disturb a graph capture that the user has under way, on whatever thread.
        """

    def synchronize(self) -> None:
        """Block the calling thread, without the GIL, until the point is reached. Raises as `done` does."""

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        """Make later work on `stream` wait for the point, without blocking the host, and return the stream for `retire`.

        `None` is the calling thread's current stream of the framework. If the framework has no such thing, this returns None: at
        once if arrays order themselves after the event that `as_array` was given, else when the point is reached.
        Raises `CapabilityError`, before the framework is asked, if the stream is being captured into a graph.
        """


class DeviceBlock(Protocol):
    """Device memory that the core reuses. A table of the core's owns it: it has no finalizer, and `free_device` frees it."""

    @property
    def address(self) -> int:
        """A multiple of 256."""

    @property
    def nbytes(self) -> int: ...

    @property
    def ready(self) -> Event | None:
        """The event before which the block may not be written. None: it may be written at once."""


class Place(NamedTuple):
    """Where in a block an array lies: `offset` is a multiple of 256."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class DeviceRange(NamedTuple):
    """Device memory that a copy reads or writes. The core holds `keepalive` until the copy's event is done."""

    address: int
    nbytes: int
    keepalive: object
    origin: tuple[int, int] | None = None
    """At least the range (address, bytes) from which work on the device first gathers the elements. None: nothing is gathered."""


if TYPE_CHECKING:
    Source = DeviceRange
else:

    def __getattr__(name: str) -> object:
        """Give `DeviceRange` by the name that it had once, with a warning."""
        if name != "Source":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import warnings

        warnings.warn("xferlib.protocol.Source is called DeviceRange now", DeprecationWarning, 2)
        return DeviceRange


class HostStager(Protocol[ArrayT]):
    """What a backend author writes: one object per device, made by the backend's `open_stager`.

    Every method may be called from any thread, several at the same time, except `close`; a backend sets its device inside each
    call and leaves the caller's as found. Failures are raised as they come; their classes stand in `failures`.
    """

    @property
    def name(self) -> str:
        """The backend's name, as in `xferlib.stager(name)`."""

    @property
    def device(self) -> str:
        """The device in words, with its number where there may be several."""

    @property
    def on_gpu(self) -> bool: ...

    @property
    def pci_bus_id(self) -> str | None:
        """Where the device is on the PCI bus, such as `0000:3b:00.0`: host memory and copying threads are placed near it.

        None: it is on no PCI bus, or this is unknown.
        """

    @property
    def fallback(self) -> bool:
        """Whether "auto" may choose this backend where none on a GPU is ready."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What the framework raises when a copy, a page-lock or an allocation fails."""

    # Page-locked host memory.

    def alloc_pinned(self, nbytes: int) -> int:
        """Return the address of new page-locked memory, a multiple of 256. Slow, may wait for the GPU: never in steady state.

        The core calls this unless `pinned` and `register` are both on. With both, it maps pages near the device and has `pin` lock
        them.
        """

    def free_pinned(self, address: int) -> None:
        """Free what `alloc_pinned` returned. May wait for the GPU. Works after `close()`."""

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock memory of the caller's, in place. Needs the capability `register`."""

    def unpin(self, address: int) -> None:
        """Undo `pin`, given the same address. May wait for the GPU. Works after `close()`."""

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Ask the driver whether both ends of the range are page-locked, no matter by whom: a copy engine uses such memory
        directly."""

    # Stream-ordered copies and events. For each direction the backend has a stream of its own.

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        """Start a copy to the device. Copies of a direction run in the order they were started.

        From page-locked memory it returns at once, whatever is held. Nothing else enters the stream.
        """

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        """Start a copy to the host, as `copy_h2d`."""

    def record_h2d(self) -> Event:
        """Return an event that covers every `copy_h2d` that returned before this call, whichever thread made it."""

    def record_d2h(self) -> Event:
        """Return an event that covers every `copy_d2h` that returned before this call, whichever thread made it."""

    def order_h2d(self, after: Event) -> None:
        """Let later copies to the device start only after the event. The host does not wait."""

    def order_d2h(self, after: Event) -> None:
        """Let later copies to the host start only after the event, as `order_h2d`."""

    def check_stream(self, stream: object) -> None:
        """Raise what `Event.stream_wait` would raise for this stream, and do nothing else. Needs the capability `streams`."""

    # Device memory and arrays.

    def check_dtype(self, dtype: np.dtype[Any]) -> bool | None:
        """Raise `TypeError`, saying what to do, if an array of this dtype cannot be had or would be narrowed.

        Called once for each dtype. If it returns True, the answer may change, and it is called again each time.
        """

    def alloc_device(self, nbytes: int) -> DeviceBlock:
        """Return new device memory of exactly this size, contents undefined. Never in steady state; may block for a new size.

        Called on a thread that no interrupt comes to.
        """

    def free_device(self, block: DeviceBlock) -> None:
        """Free what `alloc_device` returned. May wait for the GPU. Works after `close()`.

        Called once for each block, by ordinary code and never by a finalizer, when no array can reach it. Work of the user's that
        reads the memory may still be under way if nobody could tell: frees of this kind wait for it, or are ordered behind it.
        """

    def as_array(
        self, block: DeviceBlock, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, after: Event, lease: object
    ) -> ArrayT:
        """Make the framework's array over part of the block, without a copy. `offset` is a multiple of 256.

        Holds `lease`, an opaque object, until no array, view, alias or donated result can reach the memory; several arrays may
        share one. It is released by dropping the last reference, on any thread, and by nothing else.
        If a framework's arrays order themselves, it orders every use after `after`; other frameworks, those with the capability
        `streams`, ignore it: it may be recorded only after this call.
        A zero-size array takes no memory: `block` is then any block, perhaps a smaller one.
        """

    def as_source(self, array: ArrayT, stream: object | None = None) -> DeviceRange:
        """Make later copies to the host wait for what produces the array, or for what `stream` has enqueued; for nothing else.

        Returns its memory in C order: a view that is not contiguous is copied by the framework, on that stream.
        Raises `TypeError` for what is not an array of this framework, `ValueError` for one of another device, and
        `CapabilityError`, before the framework is asked, for a capturing stream.
        The same in one step as `place`, `mark`, and `order_d2h` with its event: gets into pinned memory come here.
        """

    def place(self, array: ArrayT, stream: object | None = None) -> DeviceRange:
        """Return what `as_source` returns, and raise as it does, but make nothing wait. Gets into pageable memory use it."""

    def mark(self, stream: object | None = None) -> Event | None:
        """Return an event behind what `stream` (None: the calling thread's current one) has enqueued; None: it is done.

        Called once `place` was called for every array of a get. Where arrays carry their own order, the event also covers what
        produces them: it is recorded on a stream, used for no copies, that `place` has made wait for each of them.
        """

    def as_target(self, array: ArrayT, stream: object | None = None) -> DeviceRange:
        """Make later copies to the device wait as `as_source` does, so that earlier readers of the array are safe. Needs
        `put_into`.

        Raises as `as_source`, and `ValueError` for an array that is not contiguous in C order.
        """

    def sweep(self) -> None:
        """Let go of leases whose arrays are gone, if the framework tells of them only when asked. Cheap; any thread.

        Works after `close()`.
        """

    def retire(self, streams: Iterable[Stream]) -> Event | None:
        """Return an event that is reached when the work enqueued on these streams so far is done; None: nothing to wait for.

        Called when a lease has ended, by a later put or, after `close()`, by whoever frees the memory then. The streams are those
        that `stream_wait` returned for its transfer.
        A stream that is being captured now is recorded later, inside `done`, when the capture has ended.
        """

    def lost(self, block: DeviceBlock) -> bool:
        """Tell whether the framework took the block's memory back, so that the core forgets it."""

    def close(self) -> None:
        """Give back streams and workers. Called once, with nothing in flight.

        Afterwards `free_pinned`, `unpin`, `free_device`, `retire` and `sweep` still work. Events and arrays work for as long as
        anyone holds them.
        """


class MakesMany(Protocol[ArrayT_co]):
    """What a backend may offer in addition, if making many arrays at once costs less than one by one."""

    def as_arrays(self, block: DeviceBlock, places: tuple[Place, ...], *, after: Event, lease: object) -> Sequence[ArrayT_co]:
        """Make many small arrays over parts of one block, as `HostStager.as_array` makes each; they share the lease.

        They may be copies, made by work on the device that is ordered after `after`; the lease is then held until that is done.
        The same `places` come again and again: what is made for them may be kept.
        """


class ReadsMany(Protocol[ArrayT_contra]):
    """What a backend may offer in addition, if one step can make the copies of many arrays wait for what is before them."""

    def as_sources(self, arrays: Sequence[ArrayT_contra], stream: object | None = None) -> list[DeviceRange] | None:
        """Return what `HostStager.as_source` would return for each array, in order.

        None: they are not all of a kind for which that is right, or one of them is refused. Then nothing was told to wait, and the
        core asks for each.
        """


class PlacesMany(Protocol[ArrayT_contra]):
    """What a backend may offer in addition, if finding many arrays costs less than finding each: a state has thousands."""

    def places(self, arrays: Sequence[ArrayT_contra], stream: object | None = None) -> list[DeviceRange] | None:
        """Return what `HostStager.place` would return for each array, in order; they may share what keeps them alive.

        None: they are not all of a kind for which that is right, or one of them is refused. Then the core asks for each.
        """


class FindsLater(Protocol[ArrayT_contra]):
    """What a backend may offer in addition, if its arrays never change and carry their own order: a save then finds them piece by
    piece, on threads of its own, and its call takes no time for that."""

    def can_be_found(self, arrays: Sequence[ArrayT_contra], stream: object | None = None) -> bool:
        """Tell whether `place` would take all of these now. False: it refuses one, or may: the core asks for each, which says why.

        True: the core calls `place` or `places` and `mark` for them later, on any thread. Those raise for one deleted meanwhile.
        """


class CopiesArrays(Protocol[ArrayT_contra]):
    """What a backend may offer in addition, if its framework copies arrays on the device: then a save holds up nobody."""

    def copied(self, arrays: Sequence[ArrayT_contra], stream: object | None = None) -> list[Any]:
        """Start copying arrays on the device and return the copies, in C order where the framework can, in memory of its own.

        What is returned is asked for nothing but its memory: it may be whatever this backend's `place`, and `places` and
        `can_be_found` if there are any, take. So thousands of small copies may be parts of a few arrays.

        They get what the arrays hold at this point of `stream` (None: the calling thread's current one), or what produces them
        leaves there. Work that is enqueued there afterwards may overwrite the arrays, or take them over: the framework orders it
        behind the copies. The host waits for nothing. The core holds the arrays until the copies are made.
        Raises as `HostStager.place` does, and `MemoryError` or one of `failures` where the device has no room.
        """


class DescribesArrays(Protocol):
    """What a backend may offer in addition, if NumPy does not know the dtypes of its arrays, or its arrays have no `shape`."""

    @staticmethod
    def describe(array: Any) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Return the shape and dtype of an array of this framework, the dtype as NumPy has it; None for anything else.

        Also None for an array whose dtype NumPy does not have: `as_source` then says what to do. If this returns None for an object
        that has a `shape` and a `dtype` that NumPy knows, the core takes those. Looks at no data. Static, as the
        methods of `TakesTreesApart` are.
        """


class ConvertsArrays(Protocol[ArrayT]):
    """What a backend may offer in addition, if `astype(dtype)` of its arrays is not all that converts them on its device."""

    def convert(self, array: ArrayT, dtype: np.dtype[Any]) -> ArrayT:
        """Start making an array of another dtype, on the calling thread's current stream of this device, and return it.

        It is in memory of the framework's own. Raises one of `failures`, or `MemoryError`.
        """


class DriverCalls(Protocol):
    """How the engine calls a device itself: the addresses of the driver's functions, and what these take.

    A backend may offer this in addition, as its attribute `driver_calls`. Without it, the core makes the engine's calls through the
    methods of `HostStager`, on one thread of the process. Copies of many arrays that a save reads are also started by these.
    """

    @property
    def calls(self) -> ctypes.Structure:
        """`xferlib.engine.native.Calls`. It must stay."""

    @property
    def streams(self) -> tuple[int, int]:
        """The handles of the copy streams, to the device and to the host."""

    def new_event(self) -> tuple[Event, int]:
        """Return an event that the engine will record, and its handle. It may be asked as soon as that is done."""

    def handle(self, event: Event) -> int:
        """Return the handle of an event of the backend's own."""

    def failure(self, status: int) -> Exception:
        """Return what the framework raises for a status: one of the backend's `failures`."""


class MapsMemory(Protocol[ViewT_co]):
    """What a backend with the capability `mapped` offers in addition."""

    def as_mapped(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, stream: object | None, lease: object
    ) -> tuple[ViewT_co, Stream | None]:
        """Make the framework's array over page-locked host memory, without a copy, for work on `stream`.

        Returns the array, and the stream for `retire`, found as by `Event.stream_wait`. Holds `lease` as `as_array` does. The
        memory is in C order, writable, at least one byte long, and anywhere in page-locked memory, no matter who locked it.
        """


class CombinesWrites(Protocol):
    """What a backend with the capability `write_combined` offers in addition."""

    def alloc_write_combined(self, nbytes: int) -> int:
        """Return memory as `alloc_pinned` does, but such that the CPU writes past its caches, and hardly reads. `free_pinned` frees
        it."""


class TakenApart(NamedTuple):
    """A node of a tree, one level deep. `structure` equals that of every node that has the same parts.

    `names` are those of the children, for errors: a `str` is an attribute, anything else is shown as an index.
    """

    children: Sequence[Any]
    structure: Any
    names: Sequence[Any]


class TakesTreesApart(Protocol):
    """What a backend may offer in addition, if classes are registered with its framework as trees.

    The core itself knows dict, list, tuple, named tuple, dataclass and None; a dataclass that the framework knows is the
    framework's. The methods are static: what the core learns of a class holds for the process.
    """

    @staticmethod
    def take_apart(node: Any) -> TakenApart | None:
        """Return what the framework takes an instance apart into, one level deep; None for what is no tree to it."""

    @staticmethod
    def put_together(structure: Any, children: Sequence[Any]) -> Any:
        """Make a node of this structure again from other children, which may be anything."""


class Opener(Protocol):
    """What an entry point of the group `xferlib.backends` loads: usually `open_stager` in the backend's package.

    Raises `BackendUnavailableError` with the reason and what to type; imports its framework inside, not before.
    Beside it, as submodules of the same package: `workload` (device work for commands) and `conformance` (hooks for the suite).
    """

    def __call__(self, *, device: int = 0) -> HostStager[Any]: ...
