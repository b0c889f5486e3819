"""What users hold: `Stager` owns the parts, refuses what cannot be, translates errors and closes, the same for every backend.

How a transfer is started stands in `puts` and `gets`; no framework, and no copying of bytes, belongs here.
"""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NoReturn, final

import numpy as np
import numpy.typing as npt

from xferlib.checks import positive_nbytes, refuse_bare_zero, whole_shape
from xferlib.device import BlockCache
from xferlib.errors import AllocationError, BackendUnavailableError, CapabilityError, ClosedError, TransferError, XferError
from xferlib.forks import forget_in_child
from xferlib.gets import Gets
from xferlib.inflight import Traffic
from xferlib.memory.arrays import Array, check_dtype
from xferlib.memory.host import HostMemory
from xferlib.memory.limits import default_pinned_limit
from xferlib.memory.pool import PinnedPool
from xferlib.pinning import Pin, Pins
from xferlib.protocol import Capabilities, HostStager
from xferlib.puts import Puts
from xferlib.staging import Staging
from xferlib.stats import Stats
from xferlib.transfer import Transfer

__all__ = ["Stager"]


@final
class Stager:
    """Moves trees of arrays between host and device. Any thread; several may use it at once.

    A context manager; `close()` waits for what is in flight. Arrays that it gave out may outlive it.
    """

    def __init__(self, backend: HostStager[Any], *, pinned_limit: int | None = None, device_limit: int | None = None) -> None:
        self._refusal: XferError | None = None
        self._closing = threading.RLock()
        self._closed = False
        self.backend = backend
        self._failures = backend.failures
        self._capabilities = backend.capabilities
        self._traffic = traffic = Traffic(backend)
        self._pool = pool = PinnedPool(
            allocate=_PinnedAllocator(backend),
            free=backend.free_pinned,
            flow=traffic,
            limit=default_pinned_limit() if pinned_limit is None else positive_nbytes(pinned_limit, "pinned_limit"),
        )
        device_limit = None if device_limit is None else positive_nbytes(device_limit, "device_limit")
        self._blocks = BlockCache(backend, traffic, device_limit)
        self._staging = Staging(backend, pool, traffic)
        self._pins = Pins(backend, traffic)
        host = HostMemory(backend, pool)
        self._puts = Puts(backend, host, self._blocks, self._staging, traffic)
        self._gets = Gets(backend, host, pool, self._staging, traffic)
        _live.add(self)
        forget_in_child(self)

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
    def capabilities(self) -> Capabilities:
        """What the backend offers."""
        return self._capabilities

    def empty_pinned(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return an array in pinned memory, contents undefined, from the bounded pool.

        The memory goes back to the pool when the last view of it is gone and no copy uses it. Where the backend cannot page-lock,
        it is ordinary memory. Waits for transfers in flight if they will make room, else raises `AllocationError`.
        """
        if self._refusal is not None:
            self._refuse()
        wanted = np.dtype(dtype)
        check_dtype(wanted)
        return self._pool.empty(whole_shape(shape), wanted)

    def pin(self, array: Array) -> Pin:
        """Page-lock memory that you own, in place, until the result is closed: `with stager.pin(array): ...`.

        Slow (about 40 ms a GiB once touched), so for memory that is transferred many times. Raises `CapabilityError`
        where the backend cannot, `ValueError` for memory that is pinned already or not contiguous, `AllocationError` where the
        driver refuses.
        """
        if self._refusal is not None:
            self._refuse()
        if not self._capabilities.register:
            raise CapabilityError(f"backend {self.name!r} cannot page-lock memory of yours. Use stager.empty_pinned(...) instead")
        return self._pins.add(array)

    def put(self, tree: Any, *, into: Any = None, stream: object | None = None) -> Transfer:
        """Start copying a tree of NumPy arrays to the device and return at once.

        Sources in pinned memory are read after this returns: do not rewrite them before `done()`. Pageable sources are free when
        it returns. `into`: device arrays of the same structure, shapes and dtypes to overwrite; the copy waits for what `stream`
        (None: the calling thread's current one) has enqueued, so earlier readers are safe. `stream`: it also waits for the copy,
        as by `Transfer.stream_wait`.

        Raises before anything starts: `TypeError` and `ValueError` for arguments, `CapabilityError`, `AllocationError`.
        Raises `TransferError` if a copy could not be started; nothing of it is under way then.
        """
        if self._refusal is not None:
            self._refuse()
        if stream is not None:
            self._check_stream(stream)
        try:
            if type(tree) is np.ndarray:
                return self._puts.one(tree, stream) if into is None else self._puts.one_into(tree, into, stream)
            return self._puts.start(tree, into, stream)
        except XferError:
            raise
        except self._failures as error:
            raise TransferError(f"the copy to the device could not be started: {error}") from error

    def get(self, tree: Any, *, out: Any = None, stream: object | None = None) -> Transfer:
        """Start copying a tree of device arrays to the host and return at once.

        The copy waits for what produces the arrays: where they do not carry their own order, for what `stream` (None: the calling
        thread's current one) has enqueued. Without `out` the result is in pinned memory from the pool. `out`: NumPy arrays of the
        same structure, shapes and dtypes, contiguous and writable; into pageable ones a worker thread makes the last step.

        Raises as `put` does.
        """
        if self._refusal is not None:
            self._refuse()
        if stream is not None:
            self._check_stream(stream)
        try:
            return self._gets.start(tree, out, stream)
        except XferError:
            raise
        except self._failures as error:
            raise TransferError(f"the copy to the host could not be started: {error}") from error

    def stats(self) -> Stats:
        """Return the figures of this moment. Cheap; works after `close()`."""
        pinned, peak, used = self._pool.usage()
        locks = 1 if self._capabilities.pinned else 0
        return Stats(
            pinned_nbytes=locks * (pinned + self._pins.nbytes),
            pinned_peak_nbytes=locks * peak,
            pinned_limit_nbytes=self._pool.limit,
            pinned_used_nbytes=locks * used,
            pool_hits=self._pool.hits,
            pool_misses=self._pool.misses,
            device_nbytes=self._blocks.nbytes,
            device_peak_nbytes=self._blocks.peak_nbytes,
            device_waits=self._blocks.waits,
            h2d_nbytes=self._traffic.h2d.nbytes,
            d2h_nbytes=self._traffic.d2h.nbytes,
            synchronous=self._staging.leaves,
        )

    def trim(self) -> None:
        """Give idle pinned and device memory back. May wait for kernels, so not inside a loop that should overlap."""
        if self._refusal is not None:
            self._refuse()
        self._pins.sweep()
        self._traffic.reap()
        self._pool.trim()
        self._blocks.trim()

    def close(self) -> None:
        """Wait for what is in flight and give everything back; twice is fine.

        Arrays that are still reachable stay valid, and pinned ones pinned, until their last reference goes.
        No other thread may be inside a call.
        """
        with self._closing:
            if self._closed or isinstance(self._refusal, BackendUnavailableError):
                return
            self._refusal = ClosedError("this stager is closed. Open another one with xferlib.stager(...)")
            # Interrupted here, it may be called again.
            self._traffic.wait_all()
            if self._closed:
                # A finalizer on this thread was faster.
                return
            self._closed = True
            _live.discard(self)
            with ExitStack() as steps:
                # Last in, first out, and each of them whatever those before it raise.
                for step in (self.backend.close, self._blocks.close, self._pool.close, self._pins.close, self._staging.close):
                    steps.callback(step)

    def forget(self) -> None:
        """Refuse everything: this process is a forked child. See `Forgetful`."""
        self._closing = threading.RLock()
        self._refusal = BackendUnavailableError(
            f"backend {self.name!r} cannot run here: this process was forked after the stager was opened. "
            "Open stagers in the child, and start processes with the spawn or forkserver method"
        )

    def __enter__(self) -> Stager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # `_gets` is not set if the constructor refused its arguments. At interpreter exit waiting for workers would hang.
        if getattr(self, "_gets", None) is None or self._refusal is not None or sys.is_finalizing():
            return
        try:
            self._warn()
        finally:
            if self._traffic.busy:
                # The collector may run on the very thread that has to finish what is in flight.
                threading.Thread(target=self.close, name="xferlib-close").start()
            else:
                self.close()

    def __repr__(self) -> str:
        state = "" if self._refusal is None else ", closed"
        return f"<Stager {self.name!r} on {self.device}{state}>"

    def _refuse(self) -> NoReturn:
        assert self._refusal is not None
        # A new one each time: several threads may be refused at once, and an exception carries one traceback.
        raise type(self._refusal)(*self._refusal.args)

    def _check_stream(self, stream: object) -> None:
        refuse_bare_zero(stream)
        if not self._capabilities.streams:
            raise CapabilityError(f"backend {self.name!r} takes no stream: its arrays order themselves. Leave stream out")

    def _warn(self) -> None:
        warnings.warn(f"{self!r} was never closed. Use it as a context manager", ResourceWarning, 3, source=self)


@final
class _PinnedAllocator:
    """`alloc_pinned` with its failures translated. Not a method of the stager: the pool must not keep the stager alive."""

    def __init__(self, backend: HostStager[Any]) -> None:
        self._backend = backend

    def __call__(self, nbytes: int) -> int:
        try:
            return self._backend.alloc_pinned(nbytes)
        except self._backend.failures as error:
            raise AllocationError(
                f"{nbytes} bytes of pinned memory could not be had: {error}. Lower pinned_limit or the batch"
            ) from error


_live: weakref.WeakSet[Stager] = weakref.WeakSet()


def _close_all() -> None:
    """Close what was never closed, while the workers still run."""
    with ExitStack() as steps:
        for stager in list(_live):
            steps.callback(stager.close)
            steps.callback(stager._warn)


atexit.register(_close_all)
