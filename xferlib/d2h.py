"""Starting transfers to the host. The invariants are those of `h2d`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np

from xferlib.byte_reader import ByteReader
from xferlib.checks import check_apart, check_like_array, check_out, without_arrays
from xferlib.errors import AllocationError, CapabilityError
from xferlib.in_flight import REAP_FROM_NBYTES
from xferlib.ledger import Ledger
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.blocks import ALIGNMENT, PAGE, round_up
from xferlib.memory.host import HostMemory
from xferlib.memory.pinned_pool import LARGE_FROM_NBYTES, PinnedPool
from xferlib.protocol import DeviceRange, Event, HostStager
from xferlib.staging.pageable import Staging
from xferlib.staging.small_gets import FILLED
from xferlib.transfer import Transfer
from xferlib.tree import ShapeDtype, Spec, note_place, path, trees_of, unflatten

__all__ = ["DeviceToHost", "pinned_nbytes"]

BYTES = np.dtype(np.uint8)
SHARE_UP_TO_NBYTES = 16 << 10
"""Results of one get up to this size share memory; larger ones have their own, so keeping one keeps no other."""
SHARED_NBYTES = 1 << 20
"""At most so much shares memory. So if one of many results is kept, it keeps no more than these."""
TUPLES: set[type] = {tuple}
MOST_DTYPES = 64
"""Objects, of arrays that are described together. Where there are more, each array has a dtype object of its own."""


class _SharedResults(NamedTuple):
    """Results that share pinned memory: its bytes, and for each result its index and its offset in there."""

    nbytes: int
    indices: list[int]
    offsets: list[int]


@final
class _ResultLayout:
    """How the results of one get lie: what shares memory, and what has its own."""

    def __init__(self, described: Sequence[ShapeDtype]) -> None:
        self.described = described
        self.shapes, self.dtypes = [shape for shape, _ in described], [dtype for _, dtype in described]
        self.kinds = set(self.dtypes)
        self.nbytes = [math.prod(shape) * dtype.itemsize for shape, dtype in described]
        self.groups: list[_SharedResults] = []
        self.alone: list[int] = []
        end = SHARED_NBYTES + 1
        for index, nbytes in enumerate(self.nbytes):
            if not 0 < nbytes <= SHARE_UP_TO_NBYTES:
                self.alone.append(index)
                continue
            if end + nbytes > SHARED_NBYTES:
                self.groups.append(_SharedResults(0, [], []))
                end = 0
            group = self.groups[-1]
            group.indices.append(index)
            group.offsets.append(end)
            end += round_up(nbytes, ALIGNMENT)
            self.groups[-1] = group._replace(nbytes=end)


@final
class DeviceToHost:
    """Starts the gets of one stager by `start`, and makes its readers. Any thread. Raises as `Stager.get`."""

    def __init__(self, backend: HostStager[Any], host: HostMemory, pool: PinnedPool, staging: Staging, ledger: Ledger) -> None:
        self._backend = backend
        self._failures = backend.failures
        self._host = host
        self._trees = trees_of(backend)
        self._describe = self._trees.describe
        # If NumPy knows the dtypes of the arrays, they are compared with those of the last get.
        self._as_numpy_does = not hasattr(backend, "describe")
        self._last = _ResultLayout(())
        self._pool = pool
        self._staging = staging
        self._ledger = ledger
        self._d2h = ledger.d2h
        self._jobs = ledger.jobs
        self._table = ledger.d2h.table
        self._as_sources = getattr(backend, "as_sources", None)
        self._places = getattr(backend, "places", None)
        can_be_found = getattr(backend, "can_be_found", None)
        # Where arrays change, or streams order them, they must be found while the caller waits.
        orders_itself = not (backend.capabilities.streams or backend.capabilities.put_into)
        self._can_be_found = can_be_found if orders_itself else None

    def start(self, tree: Any, out: Any, stream: object | None) -> Transfer:
        """Get a tree."""
        if type(tree) in self._trees.bare and (out is None or type(out) is np.ndarray):
            transfer = self._one(tree, out, stream)
            if transfer is not None:
                return transfer
        leaves, spec = self._arrays(tree)
        if out is None and len(leaves) == 1:
            transfer = self._one(leaves[0], None, stream, spec)
            if transfer is not None:
                return transfer
        given = None if out is None else self._trees.flatten_like(spec, out, name="out")
        results = self._like_last(leaves) if given is None else None
        if results is None:
            results = self._last = _ResultLayout(self._checked(leaves, spec, given))
        addresses = None if given is None else self._host.addresses(given)
        behind = given is None and self._jobs.is_issuing()
        if behind or (addresses is not None and None in addresses):
            sources, after = self._placed(leaves, spec, stream, direct=addresses is not None and any(addresses))
        else:
            # If the stream waited for these arrays now, it would hold up the copies that earlier gets still have to start.
            self._jobs.wait_issued()
            sources, after = self._each(self._backend.as_source, leaves, spec, stream, place_all=self._as_sources), None
        if addresses is not None and not any(addresses) and None in addresses:
            assert given is not None
            transfers = [(source.address, array) for source, array in zip(sources, given, strict=True) if array.nbytes]
            if self._staging.fill_small(transfers, sources, after):
                return Transfer(out, FILLED, (), True)
        reaps = given is None and sum(results.nbytes) >= REAP_FROM_NBYTES
        if reaps:
            # Before memory is asked for: mostly an earlier get is done, and its memory can be used again.
            self._d2h.reap()
        if given is None or addresses is None:
            given, addresses = self._result_memory(results)
            if behind:
                # These go through chunks, too: a direct copy would enter the stream before those that are still to be started.
                addresses = [None if address else address for address in addresses]
        event, failures = self._begin(sources, given, addresses, after, reaped=reaps, ours=out is None)
        return Transfer(unflatten(spec, given) if out is None else out, event, failures, True, table=self._table)

    def reader(self, tree: Any, stream: object | None, *, snapshot: bool) -> ByteReader:
        """Prepare reading a tree piece by piece. No copy to the host waits for what produces it: the reader does, on the host.

        `snapshot`: read copies of the arrays, where the device has room for them.
        """
        leaves, spec = self._arrays(tree)
        described = self._described_together(leaves) or self._checked(leaves, spec, None)
        copies = self._copies(leaves, stream) if snapshot else None
        read = leaves if copies is None else copies
        make = partial(ByteReader, self._backend, self._pool, self._ledger, described, spec)
        # Arrays that never change are found by whoever reads them: a state has thousands, and the caller waits here.
        if self._can_be_found is not None and self._can_be_found(read, stream):
            find = partial(self._placed, spec=None, stream=None, direct=False)
            # The framework holds what it copies.
            return make([None] * len(read), None, None if copies is None else (), (find, read))
        return make(*self._placed(read, spec, stream, direct=False), None if copies is None else leaves)

    def _copies(self, leaves: list[Any], stream: object | None) -> list[Any] | None:
        """Return copies on the device; None: it has no room for them."""
        copied = getattr(self._backend, "copied", None)
        if copied is None:
            raise CapabilityError(f"backend {self._backend.name!r} copies no arrays on the device. Leave snapshot out")
        refusals: tuple[type[Exception], ...] = (*self._failures, MemoryError)
        try:
            copies: list[Any] = copied(leaves, stream)
        except refusals:
            return None
        return copies

    def _arrays(self, tree: Any) -> tuple[list[Any], Spec]:
        leaves, spec = self._trees.arrays(tree)
        if not leaves:
            raise without_arrays(tree, spec, "a device array", "Numbers and text are on the host already")
        return leaves, spec

    def _described_together(self, leaves: list[Any]) -> list[ShapeDtype] | None:
        """Return shapes and dtypes as `_checked` does, in a fraction of its time. None: it is to be asked, and says why."""
        try:
            described = [(leaf.shape, leaf.dtype) for leaf in leaves]
        except (AttributeError, TypeError):
            return None
        if not self._as_numpy_does or {type(shape) for shape, _ in described} != TUPLES:
            return None
        # By identity: hashing a dtype takes longer than the rest.
        dtypes = {id(dtype): dtype for _, dtype in described}.values()
        if len(dtypes) > MOST_DTYPES or not all(isinstance(dtype, np.dtype) for dtype in dtypes):
            return None
        try:
            for dtype in dtypes:
                self._host.check_dtype(dtype)
        except (TypeError, ValueError):
            return None
        return described

    def _like_last(self, leaves: list[Any]) -> _ResultLayout | None:
        """Return how results lie if the arrays are like those of the last get: a training loop gets the same tree every step."""
        last = self._last
        if not self._as_numpy_does or len(leaves) != len(last.described):
            return None
        try:
            same = [leaf.shape for leaf in leaves] == last.shapes and [leaf.dtype for leaf in leaves] == last.dtypes
        except (AttributeError, TypeError):
            return None
        if not same:
            return None
        for dtype in last.kinds:
            self._host.check_dtype(dtype)
        return last

    def _result_memory(self, results: _ResultLayout) -> tuple[list[Array], list[int | None]]:
        """Return memory to copy to, and its addresses; see `HostLeaf`."""
        count = len(results.described)
        arrays: list[Any] = [None] * count
        addresses: list[int | None] = [None] * count
        for group in results.groups:
            self._pack(group, results, arrays, addresses)
        if results.alone:
            described = [results.described[index] for index in results.alone]
            for index, array in zip(results.alone, self._pool.results(described), strict=True):
                arrays[index] = array
                addresses[index] = self._host.address(array)
        return arrays, addresses

    def _pack(self, group: _SharedResults, results: _ResultLayout, arrays: list[Any], addresses: list[int | None]) -> None:
        """Enter arrays that lie together, each at an offset. Asking the pool for each one would take longer than its copy."""
        try:
            memory: Array | None = self._pool.empty((group.nbytes,), BYTES)
        except AllocationError:
            memory = None
        # If there is no room for all of them together, there may be room for each by itself.
        start = None if memory is None else self._host.address(memory)
        make, described = np.ndarray, results.described
        for index, offset in zip(group.indices, group.offsets, strict=True):
            shape, dtype = described[index]
            if memory is None:
                arrays[index] = array = self._pool.empty(shape, dtype)
                addresses[index] = self._host.address(array)
            else:
                arrays[index] = make(shape, dtype, memory, offset)
                addresses[index] = None if start is None else start + offset

    # One array into pinned memory, without the lists that `start` makes: a third of the time of a small get would go into them.

    def _checked_one(self, array: Any, out: Array | None, spec: Spec) -> ShapeDtype:
        """Check both as `_checked` does."""
        try:
            shape, dtype = self._described(array)
            self._host.check_dtype(dtype)
            if out is not None:
                check_out(out, shape, dtype)
        except (TypeError, ValueError) as error:
            self._refuse_on_host(array, f"at {path(spec, 0)}")
            note_place(error, spec, 0)
            raise
        return shape, dtype

    def _one(self, array: Any, out: Array | None, stream: object | None, spec: Spec = None) -> Transfer | None:
        """Get one array. `spec`: the tree whose only array it is, without `out`.

        None: nothing was started, because `out` is empty or earlier gets still have copies to start.
        """
        shape, dtype = self._checked_one(array, out, spec)
        address = None if out is None else self._host.address(out)
        if out is not None and address is None:
            return self._one_to_pageable(array, out, stream)
        if (out is not None and not address) or (out is None and self._jobs.is_issuing()):
            return None
        # In the order of `start`.
        self._jobs.wait_issued()
        try:
            source = self._backend.as_source(array, stream)
        except (TypeError, ValueError) as error:
            note_place(error, spec, 0)
            raise
        reaps = out is None and source.nbytes >= REAP_FROM_NBYTES
        if reaps:
            self._d2h.reap()
        if out is None:
            large = source.nbytes >= LARGE_FROM_NBYTES
            out = self._pool.results(((shape, dtype),))[0] if large else self._pool.empty(shape, dtype)
            address = self._host.address(out)
        if not address:
            event, failures = self._begin([source], [out], [address], None, reaped=reaps, ours=True)
            return Transfer(unflatten(spec, (out,)), event, failures, True, table=self._table)
        nbytes = out.nbytes
        try:
            self._backend.copy_d2h(address, source.address, nbytes)
            event = self._d2h.add(nbytes, (out,), (source,), reaped=reaps).event
        except BaseException:
            self._d2h.quiesce((source, out), (out,), (source,))
            raise
        return Transfer(out if spec is None else unflatten(spec, (out,)), event, self._failures, True, None, self._table)

    def _one_to_pageable(self, array: Any, out: Array, stream: object | None) -> Transfer:
        sources, after = self._placed([array], None, stream, direct=False)
        if self._staging.fill_small([(sources[0].address, out)], sources, after):
            return Transfer(out, FILLED, (), True)
        event, failures = self._begin(sources, [out], [None], after, reaped=False, ours=False)
        return Transfer(out, event, failures, True)

    def _checked(self, leaves: list[Any], spec: Spec, outs: list[Any] | None) -> list[ShapeDtype]:
        """Check everything that needs no order before anything is ordered: a refused leaf must not hold up later transfers."""
        described: list[ShapeDtype] = []
        known = None
        for index, leaf in enumerate(leaves):
            try:
                shape, dtype = self._described(leaf)
                if dtype is not known:
                    self._host.check_dtype(dtype)
                    # Hashing a dtype takes longer than the rest of a turn.
                    known = dtype
                if outs is not None:
                    check_out(outs[index], shape, dtype)
                described.append((shape, dtype))
            except (TypeError, ValueError) as error:
                self._refuse_on_host(leaf, f"at {path(spec, index)}")
                note_place(error, spec, index)
                raise
        if outs is not None and len(outs) > 1:
            check_apart([(address_of(array), array.nbytes) for array in outs], "out")
        return described

    def _described(self, leaf: Any) -> ShapeDtype:
        described = self._describe(leaf)
        if isinstance(leaf, Transfer):
            raise TypeError("expected a device array, got a transfer. Pass its value")
        if described is None:
            if self._as_numpy_does:
                check_like_array(leaf)
            # The backend may know what this is, and what to do about it.
            self._backend.as_source(leaf)
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise TypeError(f"expected a device array of backend {self._backend.name!r}, got {kind}")
        return described

    def _refuse_on_host(self, leaf: Any, place: str) -> None:
        """Raise `TypeError` for an array of NumPy, if the device's are others: whatever else was found, that is what is wrong."""
        if not isinstance(leaf, np.ndarray):
            return
        try:
            self._backend.place(leaf)
        except TypeError as error:
            error.add_note(place)
            raise error from None

    def _placed(
        self, leaves: list[Any], spec: Spec | None, stream: object | None, *, direct: bool
    ) -> tuple[list[DeviceRange], Event | None]:
        """Return the sources, and the event that their copies wait for.

        The engine makes the stream wait for it directly before its first copy, so that no other get waits.
        """
        sources = self._each(self._backend.place, leaves, spec, stream, place_all=self._places)
        after = self._backend.mark(stream)
        if direct:
            # Some arrays are copied at once, without the engine.
            self._jobs.wait_issued()
            if after is not None:
                self._backend.order_d2h(after)
        return sources, after

    def _each(
        self,
        place: Callable[[Any, Any], DeviceRange],
        leaves: list[Any],
        spec: Spec | None,
        stream: object | None,
        *,
        place_all: Any = None,
    ) -> list[DeviceRange]:
        if place_all is not None and len(leaves) > 1:
            found: list[DeviceRange] | None = place_all(leaves, stream)
            if found is not None:
                return found
        sources: list[DeviceRange] = []
        for index, leaf in enumerate(leaves):
            try:
                sources.append(place(leaf, stream))
            except (TypeError, ValueError) as error:
                note_place(error, spec, index)
                raise
        return sources

    def _begin(
        self,
        sources: list[DeviceRange],
        outs: list[Array],
        addresses: list[int | None],
        after: Event | None,
        *,
        reaped: bool,
        ours: bool,
    ) -> tuple[Event, tuple[type[Exception], ...]]:
        """Start the copies; return the event of the last, and what it may raise. `ours`: see `Staging.copy_out`."""
        pageable: list[tuple[int, Array]] = []
        try:
            nbytes = self._copy_pinned(sources, outs, addresses, pageable)
            event = self._d2h.add(nbytes, outs, sources, reaped=reaped).event if nbytes or not pageable else None
            if pageable:
                try:
                    # A job raises whatever a call of the backend raised.
                    return self._staging.copy_out(pageable, sources, event, after, ours=ours), (Exception,)
                except AllocationError:
                    # There was room for chunks when the results were asked for, but others have taken it since.
                    if not (ours and self._copy_locked(pageable, after)):
                        raise
                # Results that were pinned from the start are counted already.
                event = self._d2h.add(sum([array.nbytes for _, array in pageable]), outs, sources, reaped=reaped).event
        except BaseException:
            self._d2h.quiesce((sources, outs), outs, sources)
            raise
        assert event is not None
        return event, self._failures

    def _copy_locked(self, pageable: list[tuple[int, Array]], after: Event | None) -> bool:
        """Block until the results are page-locked, then start the copies to them. False: not all of them could be locked."""
        addresses = [self._host.locked_address(array) for _, array in pageable]
        if None in addresses:
            return False
        self._jobs.wait_issued()
        if after is not None:
            self._backend.order_d2h(after)
        for address, (source, array) in zip(addresses, pageable, strict=True):
            if address:
                self._backend.copy_d2h(address, source, array.nbytes)
        return True

    def _copy_pinned(
        self, sources: list[DeviceRange], outs: list[Array], addresses: list[int | None], pageable: list[tuple[int, Array]]
    ) -> int:
        """Start the copies to pinned memory, and return their bytes; enter the others in `pageable`."""
        total = 0
        copy = self._backend.copy_d2h
        for (device_address, nbytes, _, _), array, address in zip(sources, outs, addresses, strict=True):
            if address is None:
                pageable.append((device_address, array))
            elif address:
                copy(address, device_address, nbytes)
                total += nbytes
        return total


def pinned_nbytes(described: Sequence[ShapeDtype]) -> int:
    """Return how much pinned memory the results of one get take, at least: what is large has pages of its own."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in described]
    return sum([round_up(nbytes, PAGE if nbytes >= LARGE_FROM_NBYTES else ALIGNMENT) for nbytes in sizes])
