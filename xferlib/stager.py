"""What users hold: `Stager` owns its resources, refuses what cannot be, translates errors and closes, the same for every backend.

`h2d` and `d2h` start transfers. No framework and no copying of bytes belongs here.
"""

from __future__ import annotations

import atexit
import os
import reprlib
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Literal, TypeAlias, final, overload

import numpy as np
import numpy.typing as npt

from xferlib.byte_reader import ByteReader
from xferlib.callers import user_line, wait_for_callers
from xferlib.checks import (
    lacking,
    package_of,
    positive_nbytes,
    refuse_bare_zero,
    refuse_finalizers,
    shorten,
    translated,
    uncopied,
    whole_shape,
)
from xferlib.d2h import DeviceToHost
from xferlib.debug import SourceWatch, resolve_debug, watch_get
from xferlib.errors import BackendUnavailableError, CapabilityError, ClosedError, TransferError, XferError, anew
from xferlib.forks import forget_in_child, unavailable_in_child
from xferlib.h2d import HostToDevice
from xferlib.ledger import Ledger
from xferlib.memory.arrays import Array, check_dtype
from xferlib.memory.blocks import WhenFull
from xferlib.memory.device_pool import DevicePool
from xferlib.memory.host import HostMemory, mappable
from xferlib.memory.limits import default_pinned_limit
from xferlib.memory.pages import allocators
from xferlib.memory.pinned_pool import PinnedPool
from xferlib.memory.registered import Pin, Pins
from xferlib.pageable_warning import PageableWarning
from xferlib.protocol import Capabilities, HostStager
from xferlib.reaper import close_later, closed_when_dropped, start_reaper
from xferlib.resources import StagerResources, before_closing, close_dropped
from xferlib.staging.pageable import Staging
from xferlib.staging.profile import StagingProfile, as_profile
from xferlib.stats import Stats
from xferlib.tickets import Alive
from xferlib.tracing.log import LOG
from xferlib.transfer import Transfer
from xferlib.tree import trees_of
from xferlib.typed import HasDtype, KeyT, NamedT, Sequences, TreeT, Unnamed
from xferlib.uninterrupted import collects, uninterrupted

__all__ = ["Stager", "check_stager", "open_stagers"]

Borrow: TypeAlias = bool | Literal["staged"]
CLOSED = "this stager is closed. Open another one with xferlib.stager(...)"
LEAVE_SECONDS = 10.0
"""How long `close` waits for calls on other threads, such as their finalizers make."""


@final
class Stager:
    """Moves trees of arrays between host and device. Any thread; several may use it at once.

    A context manager; `close()` waits for what is in flight. Arrays that it gave out may outlive it.
    """

    __reduce_ex__ = uncopied("Threads may share it; another process opens one of its own with xferlib.stager(...)")

    def __init__(
        self,
        backend: HostStager[Any],
        *,
        pinned_limit: int | None = None,
        device_limit: int | None = None,
        when_full: WhenFull = "wait",
        strict: bool = False,
        staging: StagingProfile | str | None = None,
        debug: bool | None = None,
    ) -> None:
        self._opened_at = user_line()
        self._refusal: XferError | None = None
        self._closing = threading.RLock()
        self._resources = resources = StagerResources(backend)
        # First: whatever happens from here on, all resources that exist by then are given back.
        self._ticket: object = closed_when_dropped(resources.close)
        self.backend = backend
        self._failures = resources.failures
        self._capabilities = backend.capabilities
        self._finalizers = self._capabilities.finalizers
        # An interrupt between the making of a resource and its entry would leave it in a table of its own for ever.
        uninterrupted(self._make_resources, pinned_limit, device_limit, when_full, strict, staging, debug)
        # Only now does the stager own it: if the constructor does not come to its end, the backend stays open.
        resources.owns_backend = True

    def _make_resources(
        self,
        pinned_limit: int | None,
        device_limit: int | None,
        when_full: WhenFull,
        strict: bool,
        staging: StagingProfile | str | None,
        debug: bool | None,
    ) -> None:
        """Make the resources, or give back those that there are. On a thread that no interrupt comes to."""
        backend, resources = self.backend, self._resources
        with ExitStack() as undo:
            # Nothing was asked of them yet.
            undo.callback(resources.give_back)
            # First: if something is refused below, the reaper takes care of what is dropped.
            start_reaper()
            resources.ledger = self._ledger = ledger = Ledger(backend)
            memory = allocators(backend)
            resources.pool = self._pool = pool = PinnedPool(
                allocate=memory.allocate,
                allocate_write_combined=memory.allocate_write_combined,
                # Whoever is strict must never meet memory of ours that is not pinned.
                unlocked=None if strict else memory.unlocked,
                free=memory.free,
                ledger=ledger,
                limit=default_pinned_limit() if pinned_limit is None else positive_nbytes(pinned_limit, "pinned_limit"),
                when_full=when_full,
            )
            device_limit = None if device_limit is None else positive_nbytes(device_limit, "device_limit")
            resources.blocks = self._blocks = DevicePool(backend, ledger, device_limit)
            resources.staging = self._staging = staged = Staging(backend, pool, ledger, as_profile(staging))
            pool.release = staged.release
            resources.pins = self._pins = Pins(backend, ledger, pool)
            host = HostMemory(backend, pool)
            self._host = host
            self._puts = HostToDevice(backend, host, self._blocks, staged, ledger, PageableWarning(strict=strict))
            resources.source_watch = self._source_watch = (
                SourceWatch(host.leaf, trees_of(backend)) if resolve_debug(debug) else None
            )
            self._gets = DeviceToHost(backend, host, pool, staged, ledger)
            resources.enter()
            _live.add(self)
            forget_in_child(self)
            undo.pop_all()

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.name

    @property
    def device(self) -> str:
        """The device in words."""
        return self.backend.device

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.backend.on_gpu

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is being closed."""
        return isinstance(self._refusal, ClosedError)

    @property
    def capabilities(self) -> Capabilities:
        """What the backend offers."""
        return self._capabilities

    @property
    def staging(self) -> StagingProfile:
        """How many threads copy pageable memory, and through chunks of which size: as given, or the default."""
        return self._staging.profile

    def empty_pinned(self, shape: int | Sequence[int], dtype: npt.DTypeLike, *, write_combined: bool = False) -> Array:
        """Return an array in pinned memory, contents undefined, from the bounded pool.

        The memory goes back to the pool when the last view of it is gone and no copy uses it. If the backend cannot page-lock, it
        is pageable memory. If the limit has no room, the stager's `when_full` decides: with "wait" this waits for transfers in
        flight if they will make room, else it raises `AllocationError`.

        `write_combined`: memory that the CPU writes past its caches, for sources that are filled once, from front to back, and put:
        the caches stay free for other work. Reading it on the CPU takes a hundred times as long, so it is no target for `get`.
        Raises `CapabilityError` where the backend has none.
        """
        self._check_open()
        if write_combined and not self._capabilities.write_combined:
            raise lacking(self.backend, "write_combined", "has no write-combined memory. Leave write_combined out")
        # Before the dtype: of the two in the wrong order, NumPy's error says nothing of that.
        sizes = whole_shape(shape)
        wanted = np.dtype(dtype)
        check_dtype(wanted)
        return self._pool.empty(sizes, wanted, write_combined=write_combined)

    def pin(self, array: Array) -> Pin:
        """Page-lock memory that you own, in place, until the result is closed: `with stager.pin(array): ...`.

        The NumPy array may lie over memory of any kind: shared memory, files that are mapped privately, memory that is read-only.
        Locking takes some 40 ms a GiB once touched, and whole pages. It pays for memory that is transferred many times, and hardly
        below a megabyte (`xferlib doctor` tells from which transfer on). Memory that another library has locked needs no pin: it is
        transferred as it is.

        It counts against `pinned_limit`, even if the backend does not really lock: a program meets the same limit everywhere.
        Idle memory of the pool makes room for it.

        Raises `CapabilityError` where the backend cannot; `ValueError` for memory that is locked already, not contiguous, or a
        writable shared mapping of a file on disk; `AllocationError` where the limit has no room or the driver refuses.
        """
        self._check_open()
        if not self._capabilities.register:
            raise CapabilityError(f"backend {self.name!r} cannot page-lock memory of yours. Use stager.empty_pinned(...) instead")
        return self._pins.add(array)

    def mapped(self, array: Array, *, stream: object | None = None) -> Any:
        """Return the device's view of an array in pinned host memory, without a copy: the device works on it over the link.

        This is for memory that the device reads or writes once, or a little of. What it uses again and again is better put. The
        device sees what the host had written when the work was enqueued; the host sees what the device wrote once it has waited for
        the work.
        `stream` (None: the calling thread's current one) is where the work goes. The view holds the array. When the last view has
        gone, the memory is held until the work that was enqueued there before is done. Work on other streams is yours to wait for.
        A view of memory that `pin` locked ends with the pin, which waits for that work.

        Raises `CapabilityError` where the backend has no such views, `ValueError` for memory that is not pinned, not contiguous in
        C order, or read-only.
        """
        self._check_open()
        if not self._capabilities.mapped:
            raise lacking(self.backend, "mapped", "gives the device no view of host memory. Copy it with put")
        if stream is not None:
            self._check_stream(stream)
        return self._ledger.views.view(*mappable(array, self._host), stream)

    @overload
    def put(self, tree: NamedT, *, into: None = None, stream: object | None = None, borrow: Borrow = False) -> Transfer[NamedT]: ...
    @overload
    def put(
        self, tree: dict[KeyT, Any], *, into: None = None, stream: object | None = None, borrow: Borrow = False
    ) -> Transfer[dict[KeyT, Any]]: ...
    @overload
    def put(self, tree: Unnamed, *, into: None = None, stream: object | None = None, borrow: Borrow = False) -> Transfer[Any]: ...
    @overload
    def put(self, tree: TreeT, *, into: None = None, stream: object | None = None, borrow: Borrow = False) -> Transfer[TreeT]: ...
    @overload
    def put(self, tree: Any, *, into: TreeT, stream: object | None = None, borrow: Borrow = False) -> Transfer[TreeT]: ...
    def put(self, tree: Any, *, into: Any = None, stream: object | None = None, borrow: Borrow = False) -> Transfer[Any]:
        """Start copying a tree of NumPy arrays to the device and return at once.

        Sources in pinned memory are read after this returns: do not rewrite them before `done()`. Pageable sources are free when it
        returns, which it does when the CPU has copied them. It then issues a `SynchronousTransferWarning`, the first time on each
        line.

        - `into`: device arrays of the same structure, shapes and dtypes to overwrite. The copy waits for what `stream` (None: the
          calling thread's current one) has enqueued, so earlier readers are safe. The CPU has copied pageable sources when this
          returns, so `into` does not go together with `borrow`.
        - `stream`: this stream also waits for the copy, as by `Transfer.stream_wait`.
        - `borrow`: True: pageable sources are borrowed until `done()`. Threads of ours copy large ones after this has returned, and
          `value` then waits on the host until the copies are started. "staged": likewise, but only until `Transfer.wait_staged` has
          returned; debug mode does not watch these.

        Text, numbers, times, paths and members of enumerations among the arrays ride along: they come out where they stood, and
        `into` keeps its own. NumPy's scalars, such as `numpy.float32(3)`, are arrays: they come out as arrays of shape ().

        For type checkers, a class that names its parts comes out as itself: declare its arrays as `Any`, since the device's arrays
        are of another library. For the same reason a bare array comes out as `Any`, and a plain dict, list or tuple with `Any` in
        it.

        Raises before anything starts: `TypeError` and `ValueError` for arguments, `CapabilityError`, `AllocationError`; in debug
        mode `SourceRewrittenError` for an earlier put whose transfer nobody holds any more.
        Raises `TransferError` if a copy could not be started; nothing of it is under way then.
        """
        self._admit()
        if stream is not None:
            self._check_stream(stream)
        if borrow and borrow is not True and borrow != "staged":
            raise ValueError(f"borrow={borrow!r}: expected False, True or 'staged'")
        if borrow and into is not None:
            raise ValueError(
                f"borrow={borrow!r} together with into: what overwrites arrays of yours is copied by the CPU before put returns, "
                "and cannot be borrowed. Leave borrow out, or into"
            )
        started = perf_counter_ns() if LOG.on else 0
        try:
            watch = self._source_watch
            watched = watch and watch.look(tree, borrow=borrow is True)
            if type(tree) is not np.ndarray:
                transfer = self._puts.start(tree, into, stream, borrow)
            else:
                transfer = self._puts.one(tree, stream, borrow, None, into)
            if started:
                self._note_put(tree, started, borrow)
            return watched.watch(transfer) if watched else transfer
        except XferError:
            raise
        except self._failures as error:
            raise TransferError(f"the copy to the device could not be started: {error}") from error
        except (TypeError, ValueError) as error:
            shorten(error, package_of(self.backend))
            raise

    @overload
    def get(self, tree: NamedT, *, out: None = None, stream: object | None = None) -> Transfer[NamedT]: ...
    @overload
    def get(self, tree: dict[KeyT, Any], *, out: None = None, stream: object | None = None) -> Transfer[dict[KeyT, Any]]: ...
    @overload
    def get(self, tree: Sequences, *, out: None = None, stream: object | None = None) -> Transfer[Any]: ...
    @overload
    def get(self, tree: HasDtype, *, out: None = None, stream: object | None = None) -> Transfer[Array]: ...
    @overload
    def get(self, tree: TreeT, *, out: None = None, stream: object | None = None) -> Transfer[TreeT]: ...
    @overload
    def get(self, tree: Any, *, out: TreeT, stream: object | None = None) -> Transfer[TreeT]: ...
    def get(self, tree: Any, *, out: Any = None, stream: object | None = None) -> Transfer[Any]:
        """Start copying a tree of device arrays to the host and return at once.

        The copy waits for what produces the arrays. They are read after this returns: do not overwrite them in place before
        `done()`, or have the stream that overwrites them wait first, by `Transfer.stream_wait`. `put(into=)` waits by itself.

        - `out`: NumPy arrays of the same structure, shapes and dtypes, contiguous and writable. For pageable ones, threads of ours
          take the last step. Small ones, of at most 512 KiB together, are filled by the caller itself if a GPU has computed them
          and nothing stands before the copy: that takes microseconds, less than waking a thread.
        - `stream`: where the arrays do not carry their own order, the copy waits for what this stream (None: the calling thread's
          current one) has enqueued.

        Without `out` the result is in pinned memory from the pool. Arrays of at most 16 KiB each that belong to one tree lie there
        together, up to a MiB, so that keeping one keeps those beside it. If the pool has to grow by 8 MiB or more, the new memory
        is filled through chunks and page-locked soon after this has returned (`idle` waits for that), unless the stager is strict.

        Types come out as those of `put` do; a bare array of any library comes out as NumPy's.

        Raises as `put` does.
        """
        self._admit()
        if stream is not None:
            self._check_stream(stream)
        started = perf_counter_ns() if LOG.on else 0
        try:
            transfer = self._gets.start(tree, out, stream)
            if started:
                LOG.call("get", f"get ({self.name})", started)
            return watch_get(transfer) if self._source_watch else transfer
        except XferError:
            raise
        except self._failures as error:
            raise TransferError(f"the copy to the host could not be started: {error}") from error
        except (TypeError, ValueError) as error:
            shorten(error, package_of(self.backend))
            raise

    def reader(self, tree: Any, *, stream: object | None = None, snapshot: bool = False) -> ByteReader:
        """Return what reads a tree of device arrays piece by piece, through as little pinned memory as the caller likes.

        It reads what the arrays hold when what produces them, or what `stream` (None: the calling thread's current one) has
        enqueued, is done, and returns at once. See `ByteReader` for what must not happen to the arrays meanwhile. The arrays come
        in the order of the tree's leaves; what rides along is skipped.
        `snapshot`: have the framework copy the arrays on the device first, in memory of its own, and read the copies. Where there
        is no room for all of them, the arrays themselves are read: `ByteReader.snapshot` says which.

        Raises as `get` does, and `CapabilityError` for a snapshot that the backend cannot make.
        """
        self._admit()
        if stream is not None:
            self._check_stream(stream)
        try:
            return self._gets.reader(tree, stream, snapshot=snapshot)
        except XferError:
            raise
        except self._failures as error:
            raise TransferError(f"the arrays cannot be read: {error}") from error
        except (TypeError, ValueError) as error:
            shorten(error, package_of(self.backend))
            raise

    def _note_put(self, tree: Any, started: int, borrow: Borrow) -> None:
        """Tell the trace of a put."""
        leaves = [leaf for leaf in trees_of(self.backend).arrays(tree)[0] if isinstance(leaf, np.ndarray)]
        pageable = not borrow and any(self._host.address(leaf) is None for leaf in leaves)
        nbytes = sum([leaf.nbytes for leaf in leaves])
        LOG.call("put", f"put ({self.name})", started, nbytes=nbytes, memory="pageable" if pageable else "")

    def stats(self) -> Stats:
        """Return the figures of this moment. Cheap; works after `close()`."""
        pool = self._pool.usage()
        locks = 1 if self._capabilities.pinned else 0
        return Stats(
            pinned_nbytes=locks * pool.pinned,
            pinned_peak_nbytes=locks * pool.peak,
            pinned_limit_nbytes=self._pool.limit,
            pinned_used_nbytes=pool.used,
            pinned_asked_nbytes=locks * pool.asked,
            pinned_asked_peak_nbytes=locks * pool.asked_peak,
            pool_hits=self._pool.hits,
            pool_misses=self._pool.misses,
            pool_waits=self._pool.waits,
            pool_wait_seconds=self._pool.wait_seconds,
            pool_fallbacks=self._pool.fallbacks,
            device_nbytes=self._blocks.nbytes,
            device_limit_nbytes=self._blocks.limit,
            device_peak_nbytes=self._blocks.peak_nbytes,
            device_waits=self._blocks.waits,
            h2d_nbytes=self._ledger.h2d.nbytes,
            d2h_nbytes=self._ledger.d2h.nbytes,
            synchronous=self._staging.synchronous,
        )

    @property
    def when_full(self) -> WhenFull:
        """What happens at pinned_limit."""
        return self._pool.when_full

    def idle(self) -> None:
        """Block until nothing is in flight, and the memory that gets have taken is page-locked: the end of a warm-up.

        If there is no idle memory for the results of a get, the get takes more, and nobody waits for its page-lock: meanwhile the
        results lie in pageable memory, and come through chunks. After this, transfers of sizes that were there before page-lock
        nothing. Memory that the driver refuses to lock is pageable; the driver is asked once more when it is handed out again.
        Raises nothing about failed transfers, but `XferError` in a finalizer that would wait for the call that it runs inside.
        """
        self._check_open()
        if self._reentered:
            # Other threads may wait for a lock of ours in the middle of their transfers, and this would wait for those transfers.
            raise XferError("a finalizer would wait for the call that it runs inside of. Ask from ordinary code")
        self._ledger.wait_all()
        self._pool.idle()

    def trim(self) -> None:
        """Give idle pinned and device memory back. Not inside a loop that should overlap.

        On CUDA the driver does so when the device has nothing to do. Until then, transfers and kernels that other threads start
        have to wait (seen on an H200, driver 580).
        """
        self._check_open()
        if not self._reentered:
            uninterrupted(self._trim)

    def _trim(self) -> None:
        with translated(self._failures, "idle memory could not be given back"):
            self._pins.sweep()
            self._ledger.reap()
            self._staging.release()
            self._pool.trim()
            self._blocks.trim()

    @property
    def _reentered(self) -> bool:
        """Whether this is a finalizer that must wait: for another call of this thread to come to its end, or for the framework."""
        if self._blocks.reentered or self._pool.reentered or self._ledger.jobs.reads_here:
            return True
        return not self._finalizers and collects()

    def close(self) -> None:
        """Wait for what is in flight and give everything back; twice is fine.

        Arrays that are still reachable stay valid, and pinned ones pinned, until their last reference goes.
        No other thread may be inside a call. A finalizer may, on any thread, and this waits for it. In debug mode this raises
        `SourceRewrittenError` at the end, if there is one that nobody was told of.
        """
        if self._reentered:
            close_later(self.close)
            return
        for wait in before_closing:
            wait()
        with self._closing:
            if self._resources.closed or isinstance(self._refusal, BackendUnavailableError):
                return
            self._refusal = ClosedError(CLOSED)
            # If this is interrupted here, it may be called again; else the stager is closed when it is dropped.
            wait_for_callers(self, _CALLS, LEAVE_SECONDS)
            self._resources.give_back()

    def forget(self) -> None:
        """Refuse everything: this process is a forked child. See `ForkSafe`."""
        self._closing = threading.RLock()
        self._refusal = unavailable_in_child(f"backend {self.name!r} cannot run", "the stager was opened")

    def __enter__(self) -> Stager:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # This only warns. The ticket does the closing, which an interrupt in here does not stop.
        # If the constructor was cut off, nobody has had the stager.
        resources = self.__dict__.get("_resources")
        if resources is None or not resources.owns_backend or self._refusal is not None or sys.is_finalizing():
            return
        said = self._never_closed()
        # Finalizers that run beside this one may use it still.
        self._refusal = ClosedError(CLOSED)
        # First: where warnings are errors, the exception keeps this object.
        self.__dict__.pop("_ticket", None)
        # Not where it was dropped: that may be anywhere, such as in a collection.
        self._opened_at.warn(said, ResourceWarning, self)

    def check_stream(self, stream: object) -> None:
        """Raise what naming this stream to a transfer would raise, and do nothing else."""
        self._check_open()
        try:
            self._check_stream(stream)
            self.backend.check_stream(stream)
        except (TypeError, ValueError) as error:
            shorten(error, package_of(self.backend))
            raise

    def __repr__(self) -> str:
        state = ("" if self._source_watch is None else ", debug") + ("" if self._refusal is None else ", closed")
        return f"<Stager {self.name!r} on {self.device}{state}>"

    def _admit(self) -> None:
        """Refuse a transfer where the stager is closed, or the parent's, and in a finalizer that the framework does not survive."""
        if self._refusal is not None:
            raise anew(self._refusal)
        if not self._finalizers:
            refuse_finalizers(self.backend)

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise anew(self._refusal)

    def _check_stream(self, stream: object) -> None:
        if not self._capabilities.streams:
            raise CapabilityError(f"backend {self.name!r} takes no stream: its arrays order themselves. Leave stream out")
        refuse_bare_zero(stream)

    def _never_closed(self) -> str:
        return f"{self!r} was never closed. Use it as a context manager"


_CALLS = frozenset(
    call.__code__ for call in (Stager.empty_pinned, Stager.pin, Stager.mapped, Stager.put, Stager.get, Stager.reader)
)
_live: Alive[Stager] = Alive()
# What is the parent's is not given back in a forked child.
os.register_at_fork(after_in_child=_live.clear)


def open_stagers() -> list[Stager]:
    """Return the stagers of this process that are not closed. Any thread."""
    return [stager for stager in _live if not stager._resources.closed]


def _close_all() -> None:
    """Close what was never closed, while the workers still run."""
    with ExitStack() as steps:
        steps.callback(close_dropped)
        for stager in open_stagers():
            steps.callback(stager.close)
            steps.callback(stager._opened_at.warn, stager._never_closed(), ResourceWarning, stager)


atexit.register(_close_all)


def check_stager(stager: object, other: object = None, *, comes: str = "second") -> None:
    """Raise `TypeError` unless this is a stager, `ClosedError` for one that is closed.

    `other`: the argument where it may stand by mistake; `comes`: where it belongs.
    """
    if isinstance(stager, Stager):
        if stager.closed:
            raise ClosedError(CLOSED)
        return
    name = repr(stager) if isinstance(stager, str) else '"auto"'
    advice = f"The stager comes {comes}" if isinstance(other, Stager) else f"Open one with xferlib.stager({name})"
    raise TypeError(f"stager={reprlib.repr(stager)}: expected a stager. {advice}")
