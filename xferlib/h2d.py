"""Starting transfers to the device: into fresh memory, or into arrays of the caller's.

Invariants: arguments are all checked before anything starts; what a copy reads or writes is held until its event is done; a failed
start raises only when nothing of it is under way any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, final

import numpy as np

from xferlib.checks import check_alike, check_apart, checked_at, refuse_finalizers, without_arrays
from xferlib.engine.jobs import Job
from xferlib.errors import CapabilityError, TransferError
from xferlib.in_flight import uses
from xferlib.ledger import Ledger, all_ledgers
from xferlib.memory.arrays import Array
from xferlib.memory.device_pool import DevicePool, Lease, note_reader
from xferlib.memory.host import ASSUMED_OF_FEW_NBYTES, FEW_LEAVES, HostLeaf, HostMemory
from xferlib.memory.idle_blocks import Streams
from xferlib.packing import PackedBlock, Packing, Packings
from xferlib.pageable_warning import PageableWarning
from xferlib.protocol import DeviceBlock, DeviceRange, Event, HostStager, Place, Stream
from xferlib.sketch import sketched
from xferlib.staging.coalesce import Placed
from xferlib.staging.pageable import Staging
from xferlib.transfer import LazyValue, Transfer
from xferlib.tree import NUMPY, Spec, path, trees_of, unflatten
from xferlib.uninterrupted import uninterrupted

__all__ = ["HostToDevice"]

BORROW_FROM_NBYTES = 1 << 20
"""Waiting until fewer are staged takes about as long as waking a thread, and then nobody has to keep the sources."""


@final
class HostToDevice:
    """Starts the puts of one stager: `start` those of trees, `one` those of an array. Any thread. Raises as `Stager.put`."""

    def __init__(
        self,
        backend: HostStager[Any],
        host: HostMemory,
        blocks: DevicePool,
        staging: Staging,
        ledger: Ledger,
        warning: PageableWarning,
    ) -> None:
        self._backend = backend
        self._failures = backend.failures
        self._can_overwrite = backend.capabilities.put_into
        self._makes_meanwhile = backend.capabilities.streams
        """Arrays that order themselves are made behind the event that they are to wait for. That takes as long as all else that a
        put does, so it is left to whoever asks for them: until then the caller can launch what runs beside the copy."""
        self._host = host
        self._dtypes = host.dtypes
        # On the path of every small transfer: each is one attribute of this object, not a chain of attributes.
        self._address = host.address
        self._as_array = backend.as_array
        self._as_target = backend.as_target
        self._copy_h2d = backend.copy_h2d
        self._as_arrays = getattr(backend, "as_arrays", self._one_by_one)
        self._trees = trees_of(backend)
        self._blocks = blocks
        self._staging = staging
        self._stage_one = staging.stage_one
        self._warning = warning
        self._packings = Packings()
        self._ledger = ledger
        self._h2d = ledger.h2d
        self._table = ledger.h2d.table

    def start(self, tree: Any, into: Any, stream: object | None, borrow: object) -> Transfer:
        """Put a tree: `one` a single array, `_small` small pageable arrays, `_borrowed` what the caller lends, `_many` all else."""
        leaves, spec = self._trees.arrays(tree)
        if not leaves:
            raise without_arrays(tree, spec, "a NumPy array", "Convert numbers with numpy.asarray")
        if into is None:
            (leaf,) = leaves if len(leaves) == 1 else (None,)
            if type(leaf) is np.ndarray and leaf.dtype in self._dtypes:
                return self.one(leaf, stream, borrow, spec)
            transfer = self._small(leaves, spec, stream, borrow)
            if transfer is not None:
                return transfer
        sources = self._host.leaves(leaves)
        if sources is None:
            sources = [checked_at(spec, index, self._host.leaf, leaf) for index, leaf in enumerate(leaves)]
        if borrow and sum([array.nbytes for array, address in sources if address is None]) >= BORROW_FROM_NBYTES:
            return self._borrowed(sources, spec, stream)
        if not borrow:
            self._warning.put(sources, spec, into=into is not None)
        return self._many(sources, spec, into, stream)

    # A tree of small pageable arrays, without a look at each, and without the lists that `start` makes: for hundreds of leaves
    # these would take longer than the copies.

    def _small(self, leaves: list[Any], spec: Spec, stream: object | None, borrow: object) -> Transfer | None:
        """Put a tree of small pageable arrays. None: it may be none, and nothing was started."""
        if set(map(type, leaves)) != NUMPY:
            return None
        packing = self._packings.of_arrays(leaves)
        packed = packing.packed
        if packed is None or not packing.dtypes <= self._dtypes or (borrow and packed.nbytes >= BORROW_FROM_NBYTES):
            return None
        if not _are_outside(leaves):
            return None
        # As `HostMemory.leaves`: the driver is asked about the first of small ones, and about each of a few larger ones.
        for leaf in leaves if packing.count < FEW_LEAVES and packed.largest > ASSUMED_OF_FEW_NBYTES else leaves[:1]:
            if self._address(leaf) is not None:
                return None
        if not borrow and self._warning.concerns(packed.nbytes):
            self._warning.warn(leaves, spec, outside=True)
        if stream is not None:
            self._backend.check_stream(stream)
        streams: Streams = {}
        block, lease = self._blocks.lease(packing.sizes[0], streams)
        event = self._staging.stage_packed(packed, block.address, leaves, lease)
        value = None
        if event is None:
            event, value = self._by_engine(leaves, packing, packed, (block, lease), spec)
        try:
            if value is None:
                value = self._make_arrays(packing, [(block, lease)], spec, event)
            transfer = Transfer(value, event, self._failures, False, streams.__setitem__)
            if stream is not None:
                transfer.stream_wait(stream)
            return transfer
        except BaseException:
            self._h2d.wait(event)
            raise

    def _by_engine(self, leaves: list[Array], packing: Packing, packed: PackedBlock, lease: Lease, spec: Spec) -> tuple[Event, Any]:
        """Copy a tree of small pageable arrays by the engine. Return the event, and the tree of arrays; None: they are not made."""
        address = lease[0].address
        begun: list[Job] = []
        value = None
        try:
            if self._staging.begin_packed(packed, address, leaves, begun, lease):
                job = begun[0]
                if job.event is not None and self._makes_meanwhile:
                    # The making takes as long as the copies.
                    value = self._make_arrays(packing, [lease], spec, job.event)
                self._staging.wait_issued(job)
                event = job.enqueued()
                self._h2d.nbytes += packed.nbytes
            else:
                sources: list[HostLeaf] = [(leaf, None) for leaf in leaves]
                event = self._begin(packing.addresses([address]), sources, packing.numbers, lease, ())
        except BaseException:
            for job in begun:
                job.abandoned = True
                self._staging.abandon(job)
            self._h2d.quiesce(lease)
            raise
        return event, value

    # One array, without the lists that `start` makes: they would take half of the time of a small transfer.

    def one(self, array: Array, stream: object | None, borrow: object, spec: Spec = None, into: Any = None) -> Transfer:
        """Put one array into fresh memory, or `into` one of the caller's. `spec`: the tree whose only array it is.

        In this order: where the array lies (`HostMemory.address`); a block for it (`DevicePool.lease`); the copy; an event behind
        it, in flight (`InFlight.add`); the array over the block; the transfer.
        """
        # All in line: two calls fewer save a twentieth of the time.
        if array.dtype not in self._dtypes:
            self._host.check_dtype(array.dtype)
        # None: the CPU has to copy the array first. 0: there is nothing to copy.
        address = self._address(array)
        nbytes = array.nbytes
        if address is None:
            if borrow and nbytes >= BORROW_FROM_NBYTES:
                return self._borrowed([(array, address)], spec, stream)
            if not borrow and self._warning.concerns(nbytes):
                self._warning.warn((array,), spec, into=into is not None)
        overwritten: tuple[DeviceRange, ...] = ()
        target: Any
        if into is None:
            if stream is not None:
                self._backend.check_stream(stream)
            streams: Streams = {}
            block, target = self._blocks.lease(nbytes, streams)
            # The pool keeps them with the block, and the transfer enters those that it is told of.
            to, note_stream = block.address, streams.__setitem__
        else:
            self._check_target(into, array)
            target = self._as_target(into, stream)
            overwritten = (target,)
            if not self._ledger.has_no_readers and self._may_have_readers():
                self._order_after_users(target)
            to, note_stream = target.address, partial(self._note_stream, overwritten)
        if address:
            try:
                self._copy_h2d(to, address, nbytes)
                event = self._h2d.add(nbytes, (array,), overwritten).event
            except BaseException:
                self._h2d.quiesce((array, target), (array,), overwritten)
                raise
        else:
            found = self._stage_one(to, array, overwritten, target) if address is None else None
            event = self._begin([to], [(array, address)], (0,), target, overwritten) if found is None else found
        try:
            value = into
            if into is None:
                dtype = array.dtype
                # A switch of the calling thread decides about some.
                if self._makes_meanwhile or dtype not in self._dtypes:
                    value = self._make_array(block, array.shape, dtype, event, target, spec)
                else:
                    make = partial(self._make_array, block, array.shape, dtype, event, target, spec)
                    value = self._lazily((block,), make)
            transfer = Transfer(value, event, self._failures, False, note_stream, self._table)
            if address:
                transfer._in_place = True
            if stream is not None:
                transfer.stream_wait(stream)
            return transfer
        except BaseException:
            self._h2d.wait(event)
            raise

    def _note_stream(self, overwritten: Sequence[DeviceRange], handle: int, stream: Stream) -> None:
        """Note a stream that may read arrays of the caller's. The memory of some of them may be a stager's."""
        for target in overwritten:
            note_reader(target, stream, self._blocks)

    def _many(self, sources: list[HostLeaf], spec: Spec, into: Any, stream: object | None) -> Transfer:
        """Put a tree, as `one` puts one array."""
        overwritten: list[DeviceRange] = []
        if into is None:
            streams, packing, leases, addresses = self._lease_packed(sources, stream)
            event = self._begin(addresses, sources, packing.numbers, leases, ())
        else:
            overwritten = self._target_ranges(sources, spec, self._trees.flatten_like(spec, into, name="into"), stream)
            if self._may_have_readers():
                for target in overwritten:
                    self._order_after_users(target)
            event = self._begin(
                [target.address for target in overwritten], sources, range(len(overwritten)), overwritten, overwritten
            )
        try:
            if into is None:
                self._blocks.settle_posted()
            value = into
            if into is None:
                make = partial(self._make_arrays, packing, leases, spec, event)
                # As in `one`.
                at_once = self._makes_meanwhile or not packing.dtypes <= self._dtypes
                value = make() if at_once else self._lazily([block for block, _ in leases], make)
            note_stream = streams.__setitem__ if into is None else partial(self._note_stream, overwritten)
            transfer = Transfer(value, event, self._failures, False, note_stream, self._table)
            transfer._in_place = any(map(_ADDRESS, sources))
            if stream is not None:
                transfer.stream_wait(stream)
            return transfer
        except BaseException:
            self._h2d.wait(event)
            raise

    def _lease_packed(self, sources: list[HostLeaf], stream: object | None) -> tuple[Streams, Packing, list[Lease], list[int]]:
        """Lease fresh memory for a tree, and say where in it each leaf belongs. `stream` is checked first."""
        if stream is not None:
            self._backend.check_stream(stream)
        streams: Streams = {}
        packing = self._packings.of(sources)
        leases = self._leases(packing, streams)
        return streams, packing, leases, packing.addresses([block.address for block, _ in leases])

    def _target_ranges(self, sources: list[HostLeaf], spec: Spec, targets: list[Any], stream: object | None) -> list[DeviceRange]:
        overwritten: list[DeviceRange] = []
        index = 0
        try:
            # All checks first: a backend that is asked where one lies makes every later copy wait for what the target waits for.
            for index, (target, (source, _)) in enumerate(zip(targets, sources, strict=True)):  # noqa: B007  # The note says it.
                self._check_target(target, source)
            # Only the backend knows where a target lies and whether it may be written. If it refuses one after another target was
            # found, later copies were held up for nothing: they are late, not wrong.
            for index, target in enumerate(targets):  # noqa: B007  # The note says it.
                overwritten.append(self._as_target(target, stream))
        except (TypeError, ValueError) as error:
            error.add_note(f"into: {path(spec, index)}")
            raise
        check_apart([(memory.address, memory.nbytes) for memory in overwritten], "into")
        return overwritten

    def _borrowed(self, sources: list[HostLeaf], spec: Spec, stream: object | None) -> Transfer:
        """Put a tree and borrow its pageable leaves, which threads of ours copy after this has returned."""
        streams, packing, leases, addresses = self._lease_packed(sources, stream)
        staged: list[Placed] = []
        pinned: list[Array] = []
        try:
            self._copy_pinned(addresses, sources, packing.numbers, pinned, staged)
            # The leases are held until then: otherwise a block could be used again before its last copy is started, which would
            # then overwrite it.
            copy = self._staging.borrow(staged, until_started=leases, beside=pinned, meanwhile=self._blocks.settle_posted)
        except BaseException:
            self._h2d.quiesce((pinned, leases), pinned)
            raise

        blocks = [block for block, _ in leases]
        value = self._lazily(blocks, lambda: self._make_arrays(packing, leases, spec, copy.enqueued()))
        transfer = Transfer(value, copy, (Exception,), False, streams.__setitem__)
        transfer._in_place = bool(pinned)
        if stream is not None:
            try:
                transfer.stream_wait(stream)
            except BaseException:
                with suppress(Exception):
                    copy.synchronize()
                raise
        return transfer

    def _leases(self, packing: Packing, streams: Streams) -> list[Lease]:
        # Asked for here, outside of the pool's own steps: inside of these, what a foreign finalizer asks for is refused.
        sizes = packing.sizes
        leases = self._blocks.lease_idle(sizes, streams)
        if len(sizes) - len(leases) > 1:
            # This makes idle what has come back since, as to lease a single one does.
            self._blocks.settle_posted()
            leases += self._blocks.lease_idle(sizes[len(leases) :], streams)
        missing = sizes[len(leases) :]
        if len(missing) > 1 and self._blocks.lacks(missing):
            # For each block that is allocated the main thread waits for another one: so once for all of them. What has to be waited
            # for is waited for here: another thread would wait for a reader of this one's, too.
            leases += uninterrupted(self._blocks.lease_at_once, missing, streams)
        for size in sizes[len(leases) :]:
            leases.append(self._blocks.lease(size, streams))
        return leases

    def _lazily(self, blocks: Iterable[DeviceBlock], make: Callable[[], Any]) -> LazyValue[Any]:
        """Return a value that is made, over these blocks, when it is first asked for."""

        def made() -> Any:
            refuse_finalizers(self._backend)
            # An array that is there already is deleted with its block. One that is made over it would be of memory of others.
            if any(map(self._backend.lost, blocks)):
                raise TransferError(
                    "the memory of what was put is gone, since somebody has deleted every array of the framework's. Put it again"
                )
            return make()

        return LazyValue(made)

    def _make_array(
        self, block: DeviceBlock, shape: tuple[int, ...], dtype: np.dtype[Any], event: Event, lease: object, spec: Spec
    ) -> Any:
        array = self._as_array(block, 0, shape, dtype, after=event, lease=lease)
        return array if spec is None else unflatten(spec, (array,))

    def _make_arrays(self, packing: Packing, leases: list[Lease], spec: Spec, event: Event) -> Any:
        arrays: list[Any] = [None] * packing.count
        for (block, lease), indices, places in zip(leases, packing.indices, packing.places, strict=True):
            if len(places) == 1:
                ((offset, shape, dtype),) = places
                arrays[indices[0]] = self._as_array(block, offset, shape, dtype, after=event, lease=lease)
                continue
            made = self._as_arrays(block, places, after=event, lease=lease)
            if len(made) == packing.count:
                return unflatten(spec, made)
            for index, array in zip(indices, made, strict=True):
                arrays[index] = array
        return unflatten(spec, arrays)

    def _one_by_one(self, block: DeviceBlock, places: tuple[Place, ...], *, after: Event, lease: object) -> list[Any]:
        make = self._as_array
        return [make(block, offset, shape, dtype, after=after, lease=lease) for offset, shape, dtype in places]

    def _check_target(self, target: Any, source: Array) -> None:
        if not self._can_overwrite:
            raise CapabilityError(
                f"backend {self._backend.name!r} cannot overwrite an array of yours. Leave into out and use the new array"
            )
        try:
            alike = target.shape == source.shape and target.dtype == source.dtype
        except AttributeError:
            alike = False
        if alike:
            return
        described = self._trees.describe(target)
        if described is None:
            raise TypeError(f"expected a device array of backend {self._backend.name!r} to put into, got {sketched(target)}")
        check_alike(described, (source.shape, source.dtype))

    def _may_have_readers(self) -> bool:
        """Tell whether a get may still read arrays of the caller's. Asked once for each put; gets that are done are let go of
        first."""
        if self._ledger.has_no_readers:
            return False
        # Each get that is done but still noted would make the stream wait, once for each target.
        for ledger in all_ledgers():
            ledger.d2h.reap()
        return not self._ledger.has_no_readers

    def _order_after_users(self, target: DeviceRange) -> None:
        """Let the copy wait for earlier copies that still use what it will overwrite: the user's streams know nothing of them.

        If those belong to a stager of another backend or device, the host waits for them: no stream of this one could.
        """
        for ledger in all_ledgers():
            ledger.jobs.wait_issued(target)
            for job in list(ledger.jobs.d2h.values()):
                if any(uses(used, target) for used in job.device_ranges):
                    self._order_after(job.event, ledger, job)
            for reading in list(ledger.jobs.readings.values()):
                # Some copies are not started, so no stream can wait for them. What they are behind then is in an entry.
                if any(uses(used, target) for used in reading.device_ranges):
                    reading.wait()
            if not ledger.d2h.busy and (ledger is self._ledger or not ledger.h2d.busy):
                continue
            for entry in ledger.d2h.entries() if ledger is self._ledger else ledger.entries():
                if not entry.uses_device(target):
                    continue
                self._order_after(entry.event, ledger, entry.event)

    def _order_after(self, event: Event | None, ledger: Ledger, completion: Event) -> None:
        if event is not None and ledger.backend_device == self._ledger.backend_device:
            self._backend.order_h2d(event)
            return
        with suppress(Exception):
            # A copy that failed does not use it any more, and whoever holds the transfer is told.
            completion.synchronize()

    def _begin(
        self,
        addresses: Sequence[int],
        sources: list[HostLeaf],
        blocks: Sequence[int],
        target: object,
        overwritten: Sequence[DeviceRange],
    ) -> Event:
        """Start copies. `blocks`: for each leaf, the number of the block that its address is in.

        `target` is kept if nobody can say when they end. `overwritten`: memory of the caller's.
        """
        pinned: list[Array] = []
        staged: list[Placed] = []
        try:
            nbytes = self._copy_pinned(addresses, sources, blocks, pinned, staged)
            event = self._staging.stage(staged, nbytes, pinned, overwritten, target) if staged else None
            # Staged leaves are the caller's again as soon as they are staged; pinned ones are not.
            return self._h2d.add(nbytes, pinned, overwritten).event if event is None else event
        except BaseException:
            self._h2d.quiesce((pinned, target), pinned, overwritten)
            raise

    def _copy_pinned(
        self,
        addresses: Sequence[int],
        sources: list[HostLeaf],
        blocks: Sequence[int],
        pinned: list[Array],
        staged: list[Placed],
    ) -> int:
        """Start the copies of pinned leaves, noted in `pinned`; note the others in `staged`. Return the bytes of all."""
        nbytes = 0
        for destination, number, (array, address) in zip(addresses, blocks, sources, strict=True):
            nbytes += array.nbytes
            if address is None:
                staged.append(Placed(destination, array, number))
            elif address:
                # Before the copy is started: whatever happens then, it is waited for.
                pinned.append(array)
                self._copy_h2d(destination, address, array.nbytes)
        return nbytes


def _are_outside(arrays: list[Array]) -> bool:
    """Tell whether none of the arrays can be in memory of a pool. NumPy itself has allocated the memory of one without a base."""
    bases = [array.base for array in arrays]
    if set(map(id, bases)) == _NONE:
        return True
    different = {id(base): base for base in bases}
    return all(base is None or (type(base) is np.ndarray and base.base is None) for base in different.values())


_NONE = {id(None)}
_ADDRESS = itemgetter(1)
