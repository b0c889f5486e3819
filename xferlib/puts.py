"""Starting transfers to the device: into fresh memory, or into arrays of the caller's.

Invariants: arguments are all checked before anything starts; what a copy reads or writes is held until its event is done; a failed
start raises only when nothing of it is under way any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

from xferlib.checks import check_alike, check_apart, checked_at
from xferlib.device import BlockCache, Lease, Streams
from xferlib.errors import CapabilityError
from xferlib.inflight import Traffic
from xferlib.memory.arrays import Array
from xferlib.memory.host import HostLeaf, HostMemory
from xferlib.memory.pool import ALIGNMENT
from xferlib.protocol import Event, HostStager, Source, Stream
from xferlib.staging import Staging
from xferlib.transfer import Transfer
from xferlib.tree import Spec, flatten, flatten_like, path, unflatten

__all__ = ["Puts"]

PACK_BELOW = 64 << 10
"""Bytes. Smaller leaves of one put share a device block; larger ones have their own, so that keeping one does not keep them all."""


@final
class Puts:
    """The H2D half of one stager. Any thread."""

    def __init__(self, backend: HostStager[Any], host: HostMemory, blocks: BlockCache, staging: Staging, traffic: Traffic) -> None:
        self._backend = backend
        self._failures = backend.failures
        self._can_overwrite = backend.capabilities.put_into
        self._host = host
        # On the path of every small transfer: an attribute of this object each, no chain of them.
        self._address = host.address
        self._as_array = backend.as_array
        self._as_target = backend.as_target
        self._copy_h2d = backend.copy_h2d
        self._blocks = blocks
        self._staging = staging
        self._h2d = traffic.h2d
        self._d2h = traffic.d2h

    def start(self, tree: Any, into: Any, stream: object | None) -> Transfer:
        """Put a tree."""
        leaves, spec = flatten(tree)
        if not leaves:
            raise ValueError(f"there is no array in {tree!r}: expected a NumPy array, or a tree of them")
        sources = [checked_at(spec, index, self._host.leaf, leaf) for index, leaf in enumerate(leaves)]
        if into is None:
            return self._fresh(sources, spec, stream)
        return self._into(sources, spec, into, stream)

    # One array, without the lists that `start` makes: half of the time of a small transfer would go into them.

    def one(self, array: Array, stream: object | None) -> Transfer:
        """Put one array into fresh memory."""
        address = self._checked(array)
        if stream is not None:
            self._backend.check_stream(stream)
        streams: Streams = {}
        lease = self._blocks.lease(array.nbytes, streams)
        block = lease.block
        event = self._begin_one(block.address, array, address, block)
        try:
            value = self._as_array(block, 0, array.shape, array.dtype, after=event, lease=lease)
            transfer = Transfer(value, event, self._failures, False, streams.__setitem__)
            if stream is not None:
                transfer.stream_wait(stream)
            return transfer
        except BaseException:
            with suppress(*self._failures):
                event.synchronize()
            raise

    def one_into(self, array: Array, target: Any, stream: object | None) -> Transfer:
        """Put one array into one of the caller's."""
        address = self._checked(array)
        self._check_target(target, array)
        place = self._as_target(target, stream)
        if self._d2h.busy:
            self._order_after_reads(place)
        event = self._begin_one(place[0], array, address, place)
        transfer = Transfer(target, event, self._failures, False, partial(self._name, (place,)))
        if stream is not None:
            transfer.stream_wait(stream)
        return transfer

    def _checked(self, array: Array) -> int | None:
        """Check one array and return its address; see `HostLeaf`."""
        if array.dtype not in self._host.dtypes:
            self._host.check_dtype(array.dtype)
        return self._address(array)

    def _begin_one(self, destination: int, array: Array, address: int | None, keepalive: object) -> Event:
        if not address:
            return self._begin([destination], [(array, address)], keepalive)
        nbytes = array.nbytes
        try:
            self._copy_h2d(destination, address, nbytes)
            return self._h2d.add(nbytes, (array, keepalive))
        except BaseException:
            self._h2d.settle((array, keepalive))
            raise

    def _name(self, places: Sequence[Source], handle: int, stream: Stream) -> None:
        """Note a stream that may read arrays of the caller's; the memory of some may be ours."""
        for place in places:
            self._blocks.streams_of(place)[handle] = stream

    def _into(self, sources: list[HostLeaf], spec: Spec, into: Any, stream: object | None) -> Transfer:
        arrays = flatten_like(spec, into, name="into")
        places: list[Source] = []
        for index, (array, (source, _)) in enumerate(zip(arrays, sources, strict=True)):
            try:
                self._check_target(array, source)
                places.append(self._as_target(array, stream))
            except (TypeError, ValueError) as error:
                error.add_note(f"into: {path(spec, index)}")
                raise
        check_apart([(place.address, place.nbytes) for place in places], "into")
        for place in places:
            self._order_after_reads(place)
        event = self._begin([place.address for place in places], sources, places)
        transfer = Transfer(into, event, self._failures, False, partial(self._name, places))
        if stream is not None:
            transfer.stream_wait(stream)
        return transfer

    def _fresh(self, sources: list[HostLeaf], spec: Spec, stream: object | None) -> Transfer:
        if stream is not None:
            self._backend.check_stream(stream)
        streams: Streams = {}
        places, sizes = _layout(sources)
        leases: list[Lease] = []
        for size in sizes:
            leases.append(self._blocks.lease(size, streams))  # noqa: PERF401  # Each is held before the next may fail.
        blocks = [lease.block for lease in leases]
        event = self._begin([blocks[number].address + offset for number, offset in places], sources, blocks)
        try:
            arrays = [
                self._as_array(blocks[number], offset, array.shape, array.dtype, after=event, lease=leases[number])
                for (array, _), (number, offset) in zip(sources, places, strict=True)
            ]
            transfer = Transfer(unflatten(spec, arrays), event, self._failures, False, streams.__setitem__)
            if stream is not None:
                transfer.stream_wait(stream)
            return transfer
        except BaseException:
            with suppress(*self._failures):
                event.synchronize()
            raise

    def _check_target(self, target: Any, source: Array) -> None:
        if not self._can_overwrite:
            raise CapabilityError(
                f"backend {self._backend.name!r} cannot overwrite an array of yours. Leave into out and use the new array"
            )
        try:
            if target.shape != source.shape or target.dtype != source.dtype:
                check_alike(target, source.shape, source.dtype)
        except AttributeError:
            raise TypeError(f"expected a device array of backend {self._backend.name!r} to put into, got {target!r}") from None

    def _order_after_reads(self, place: Source) -> None:
        """Let the copy wait for earlier gets that still read what it will overwrite: the user's streams know nothing of them."""
        for read in self._d2h.readers(place):
            self._backend.order_h2d(read)

    def _begin(self, addresses: list[int], sources: list[HostLeaf], keepalive: object) -> Event:
        nbytes = 0
        # Staged leaves are the caller's again as soon as they are staged.
        held = [source for source in sources if source[1]]
        try:
            for destination, (array, address) in zip(addresses, sources, strict=True):
                if address is None:
                    self._staging.stage(array, destination)
                elif address:
                    self._copy_h2d(destination, address, array.nbytes)
                    nbytes += array.nbytes
            return self._h2d.add(nbytes, (held, keepalive))
        except BaseException:
            self._h2d.settle((held, keepalive))
            raise


def _layout(sources: Sequence[HostLeaf]) -> tuple[list[tuple[int, int]], list[int]]:
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
