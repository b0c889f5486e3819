"""What users hold: `Stager` checks arguments, keeps memory alive, translates errors and closes, the same for every backend.

Invariants: arguments are all checked before anything starts; whatever a copy reads or writes is held until its event is done; a
failed start raises only when nothing of it is under way any more. No framework, and no copying of bytes, belongs here.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeAlias, final

import numpy as np
import numpy.typing as npt

from xferlib.checks import (
    check_alike,
    check_apart,
    check_out,
    checked_at,
    describe,
    positive_nbytes,
    refuse_bare_zero,
    whole_shape,
)
from xferlib.device import BlockCache, Lease, Streams
from xferlib.errors import AllocationError, BackendUnavailableError, CapabilityError, ClosedError, TransferError, XferError
from xferlib.inflight import Traffic
from xferlib.memory.arrays import Array, address_of, check_dtype, host_array
from xferlib.memory.limits import default_pinned_limit
from xferlib.memory.pool import ALIGNMENT, PinnedPool
from xferlib.pinning import Pin, Pins
from xferlib.protocol import Capabilities, Event, HostStager, Source
from xferlib.staging import Staging
from xferlib.stats import Stats
from xferlib.transfer import Transfer
from xferlib.tree import Spec, flatten, flatten_like, path, unflatten

__all__ = ["Stager"]

PACK_BELOW = 64 << 10
"""Bytes. Smaller leaves of one put share a device block; larger ones have their own, so that keeping one does not keep them all."""


@final
class Stager:
    """Moves trees of arrays between host and device. Any thread; several may use it at once.

    A context manager; `close()` waits for what is in flight. Arrays that it gave out may outlive it.
    """

    def __init__(self, backend: HostStager[Any], *, pinned_limit: int | None = None, device_limit: int | None = None) -> None:
        self._refusal: XferError | None = None
        self._closing = threading.Lock()
        self.backend = backend
        self._failures = backend.failures
        self._capabilities = backend.capabilities
        self._traffic = Traffic(backend)
        self._pool = PinnedPool(
            allocate=_PinnedAllocator(backend),
            free=backend.free_pinned,
            wait=self._traffic.wait_oldest,
            limit=default_pinned_limit() if pinned_limit is None else positive_nbytes(pinned_limit, "pinned_limit"),
        )
        self._blocks = BlockCache(backend, None if device_limit is None else positive_nbytes(device_limit, "device_limit"))
        self._staging = Staging(backend, self._pool, self._traffic)
        self._pins = Pins(backend, self._traffic)
        self._dtypes: set[np.dtype[Any]] = set()
        self._synchronous = 0
        _live.add(self)

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
        leaves, spec = flatten(tree)
        if not leaves:
            raise ValueError(f"there is no array in {tree!r}: expected a NumPy array, or a tree of them")
        try:
            sources = [self._source(leaf) for leaf in leaves] if spec is None else self._sources(leaves, spec)
            if into is not None:
                return self._put_into(sources, spec, into, stream)
            return self._put_fresh(sources, spec, stream)
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
        leaves, spec = flatten(tree)
        if not leaves:
            raise ValueError(f"there is no array in {tree!r}: expected a device array, or a tree of them")
        try:
            return self._get(leaves, spec, out, stream)
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
            synchronous=self._synchronous,
        )

    def trim(self) -> None:
        """Give idle pinned and device memory back. May wait for kernels, so not inside a loop that should overlap."""
        if self._refusal is not None:
            self._refuse()
        self._traffic.reap()
        self._pool.trim()
        self._blocks.trim()

    def close(self) -> None:
        """Wait for what is in flight and give everything back; twice is fine.

        Arrays that are still reachable stay valid, and pinned ones pinned, until their last reference goes.
        No other thread may be inside a call.
        """
        with self._closing:
            if self._refusal is not None:
                return
            self._refusal = ClosedError("this stager is closed. Open another one with xferlib.stager(...)")
        _live.discard(self)
        self._traffic.wait_all()
        self._staging.close()
        self._pins.close()
        self._pool.close()
        self._blocks.close()
        self.backend.close()

    def __enter__(self) -> Stager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # Not set if the constructor refused its arguments. At interpreter exit workers are frozen, and waiting for them would hang.
        if getattr(self, "_dtypes", None) is None or self._refusal is not None or sys.is_finalizing():
            return
        try:
            warnings.warn(f"{self!r} was never closed. Use it as a context manager", ResourceWarning, 2, source=self)
        finally:
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

    def _sources(self, leaves: list[Any], spec: Spec) -> list[_HostLeaf]:
        return [checked_at(spec, index, self._source, leaf) for index, leaf in enumerate(leaves)]

    def _source(self, leaf: Any) -> _HostLeaf:
        """Check a host leaf; its address is None if its memory must be staged."""
        array = leaf if type(leaf) is np.ndarray else host_array(leaf)
        self._check_dtype(array.dtype)
        return array, self._direct_address(array)

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        if dtype not in self._dtypes:
            check_dtype(dtype)
            self.backend.check_dtype(dtype)
            self._dtypes.add(dtype)

    def _direct_address(self, array: Array) -> int | None:
        """Return the array's address if the copy engine can use it as it is."""
        nbytes = array.nbytes
        if nbytes == 0:
            return 0
        if not array.flags.c_contiguous:
            return None
        address = address_of(array)
        if self._pool.contains(address, nbytes) or self.backend.is_pinned(address, nbytes):
            return address
        return None

    def _put_into(self, sources: list[_HostLeaf], spec: Spec, into: Any, stream: object | None) -> Transfer:
        if not self._capabilities.put_into:
            raise CapabilityError(f"backend {self.name!r} cannot overwrite an array of yours. Leave into out and use the new array")
        arrays = flatten_like(spec, into, name="into")
        targets: list[Source] = []
        for index, (array, (source, _)) in enumerate(zip(arrays, sources, strict=True)):
            try:
                check_alike(array, source.shape, source.dtype, self.name)
                targets.append(self.backend.as_target(array, stream))
            except (TypeError, ValueError) as error:
                error.add_note(f"into: {path(spec, index)}")
                raise
        if len(targets) > 1:
            check_apart([(target.address, target.nbytes) for target in targets], "into")
        event = self._start_h2d([target.address for target in targets], sources, targets)
        return self._transfer_h2d(into, event, stream, {})

    def _put_fresh(self, sources: list[_HostLeaf], spec: Spec, stream: object | None) -> Transfer:
        streams: Streams = {}
        places, sizes = _layout(sources)
        blocks = [self._blocks.take(size) for size in sizes]
        leases = [Lease(self._blocks, block, streams) for block in blocks]
        addresses = [blocks[number].address + offset for number, offset in places]
        event = self._start_h2d(addresses, sources, blocks)
        arrays = [
            self.backend.as_array(blocks[number], offset, array.shape, array.dtype, after=event, lease=leases[number])
            for (array, _), (number, offset) in zip(sources, places, strict=True)
        ]
        return self._transfer_h2d(unflatten(spec, arrays), event, stream, streams)

    def _transfer_h2d(self, value: Any, event: Event, stream: object | None, streams: Streams) -> Transfer:
        transfer = Transfer(value, event, self._failures, False, streams)
        if stream is not None:
            transfer.stream_wait(stream)
        return transfer

    def _start_h2d(self, addresses: list[int], sources: list[_HostLeaf], keepalive: object) -> Event:
        nbytes = 0
        try:
            for destination, (array, address) in zip(addresses, sources, strict=True):
                if address is None:
                    self._synchronous += 1
                    self._staging.stage(array, destination)
                elif address:
                    self.backend.copy_h2d(destination, address, array.nbytes)
                    nbytes += array.nbytes
        except BaseException:
            self._traffic.h2d.settle((sources, keepalive))
            raise
        return self._traffic.h2d.add(nbytes, (sources, keepalive))

    def _get(self, leaves: list[Any], spec: Spec, out: Any, stream: object | None) -> Transfer:
        outs = None if out is None else flatten_like(spec, out, name="out")
        sources: list[Source] = []
        alike: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        for index, leaf in enumerate(leaves):
            try:
                shape, dtype = describe(leaf, self.name)
                if outs is not None:
                    check_out(outs[index], shape, dtype)
                sources.append(self.backend.as_source(leaf, stream))
                alike.append((shape, dtype))
            except (TypeError, ValueError) as error:
                error.add_note(f"at {path(spec, index)}")
                raise
        if outs is None:
            outs = [self._pool.empty(shape, dtype) for shape, dtype in alike]
            out = unflatten(spec, outs)
        elif len(outs) > 1:
            check_apart([(address_of(array), array.nbytes) for array in outs], "out")
        event = self._start_d2h(sources, outs)
        return Transfer(out, event, self._failures, True, {})

    def _start_d2h(self, sources: list[Source], outs: list[Array]) -> Event:
        nbytes = 0
        pageable: list[tuple[int, Array]] = []
        landing: Event | None = None
        try:
            for source, array in zip(sources, outs, strict=True):
                address = self._direct_address(array)
                if address is None:
                    pageable.append((source.address, array))
                elif address:
                    self.backend.copy_d2h(address, source.address, array.nbytes)
                    nbytes += array.nbytes
            if pageable:
                self._synchronous += len(pageable)
                landing = self._staging.land(pageable)
        except BaseException:
            self._traffic.d2h.settle((sources, outs))
            raise
        event = self._traffic.d2h.add(nbytes, (sources, outs))
        return landing or event


_HostLeaf: TypeAlias = tuple[Array, int | None]
"""A host array, and its address if the copy engine can use it directly; 0 if it has no bytes."""


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


def _layout(sources: list[_HostLeaf]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return (block number, offset) for each leaf, and the blocks' sizes: one for all small leaves, one for each large leaf."""
    places: list[tuple[int, int]] = []
    sizes: list[int] = []
    shared = -1
    for array, _ in sources:
        if array.nbytes >= PACK_BELOW:
            places.append((len(sizes), 0))
            sizes.append(array.nbytes)
            continue
        if shared < 0:
            shared = len(sizes)
            sizes.append(0)
        places.append((shared, sizes[shared]))
        sizes[shared] += max(1, -(-array.nbytes // ALIGNMENT)) * ALIGNMENT
    return places, sizes


_live: weakref.WeakSet[Stager] = weakref.WeakSet()


def _close_all() -> None:
    # While the workers still run. The warning is for those who asked for it; by then most people's output is closed.
    for stager in list(_live):
        stager.__del__()


def _refuse_in_child() -> None:
    for stager in list(_live):
        stager._refusal = BackendUnavailableError(
            f"backend {stager.name!r} cannot run here: this process was forked after the stager was opened. "
            "Open stagers in the child, and start processes with the spawn or forkserver method"
        )
        # Nothing that the parent owns may be freed here.
        stager._pool.forget()
        stager._blocks.forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_refuse_in_child)
