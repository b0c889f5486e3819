"""Device blocks where calls are refused or interrupted, in finalizers, after close and in forked children: the account is right."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest

from tests.core.fakes import Device, Flow, Point
from xferlib.device import BlockCache, Lease
from xferlib.errors import AllocationError
from xferlib.protocol import Stream

MIB = 1 << 20


def cache(device: Device, limit: int | None = None) -> BlockCache:
    return BlockCache(device, Flow(), limit)  # type: ignore[arg-type]  # only the part that hands out memory is played


def leave_idle(blocks: BlockCache, device: Device, *fences: Point, nbytes: int = MIB) -> list[int]:
    """Leave blocks idle, each behind its fence, and return their addresses."""
    leases = [blocks.lease(nbytes, {}) for _ in fences]
    device.fences = [*fences]
    return [leases.pop(0).block.address for _ in fences]


class InterruptedWait(Point):
    """Interrupts the first that waits for it."""

    def synchronize(self) -> None:
        super().synchronize()
        if self.synchronized == 1:
            raise KeyboardInterrupt


class Asked(Point):
    """Does something while it is asked, the first time."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def done(self) -> bool:
        done = super().done()
        if self.asked == 1:
            self._call()
        return done


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupted_trim_forgets_every_block_that_it_drops() -> None:
    device = Device()
    blocks = cache(device, 6 * MIB)
    leave_idle(blocks, device, Point(), InterruptedWait(), Point(), Point())
    leave_idle(blocks, device, Point(), nbytes=2 * MIB)
    with pytest.raises(KeyboardInterrupt):
        blocks.trim()
    assert blocks.nbytes == 0
    assert blocks.lease(6 * MIB, {}).block.nbytes == 6 * MIB


def test_an_interrupted_wait_for_room_forgets_every_block_that_it_drops() -> None:
    device = Device()
    blocks = cache(device, 4 * MIB)
    leave_idle(blocks, device, InterruptedWait(), Point(), Point(), Point())
    with pytest.raises(KeyboardInterrupt):
        blocks.lease(4 * MIB, {})
    assert blocks.nbytes == 0
    assert blocks.lease(4 * MIB, {}).block.nbytes == 4 * MIB


def test_an_interrupted_question_loses_no_block() -> None:
    device = Device()
    blocks = cache(device, 3 * MIB)
    readers = [Point(), Asked(interrupt), Point()]
    addresses = leave_idle(blocks, device, *readers)
    with pytest.raises(KeyboardInterrupt):
        blocks.lease(MIB, {})
    for reader in readers:
        reader.reached = True
    leases = [blocks.lease(MIB, {}) for _ in addresses]
    assert [lease.block.address for lease in leases] == addresses
    assert blocks.nbytes == 3 * MIB


def test_a_trim_by_a_finalizer_inside_a_request_loses_no_block() -> None:
    device = Device()
    blocks = cache(device, 3 * MIB)
    addresses = leave_idle(blocks, device, Point(), Asked(blocks.trim), Point(reached=True))
    lease = blocks.lease(MIB, {})
    assert lease.block.address == addresses[2]
    assert blocks.nbytes == 3 * MIB
    blocks.trim()
    assert blocks.nbytes == MIB


def test_a_block_about_whose_readers_the_question_was_interrupted_is_let_go() -> None:
    class Refuses(Device):
        def retire(self, streams: object) -> Point | None:
            raise KeyboardInterrupt

    blocks = cache(Refuses())
    lease = [blocks.lease(MIB, {})]
    block = weakref.ref(lease[0].block)
    lease.clear()
    with pytest.raises(KeyboardInterrupt):
        blocks.trim()
    assert block() is None
    assert blocks.nbytes == 0


def test_what_was_refused_does_not_count_for_the_peak() -> None:
    device = Device()
    blocks = cache(device)
    device.refusals = [OSError("full"), OSError("still full")]
    with pytest.raises(AllocationError):
        blocks.lease(4 * MIB, {})
    assert blocks.peak_nbytes == 0
    # The second is the spare.
    device.fresh_is_ready = False
    device.refusals = [None, OSError("full")]
    first = blocks.lease(MIB, {})
    assert blocks.peak_nbytes == blocks.nbytes == first.block.nbytes
    second = blocks.lease(MIB, {})
    assert blocks.peak_nbytes == blocks.nbytes == 3 * MIB
    del second


@pytest.mark.parametrize("streams", [{}, {7: Stream(7, "kept")}, {9: Stream(9, None)}])
def test_leases_that_end_after_close_are_taken_off_the_account(streams: dict[int, Stream]) -> None:
    device = Device()
    blocks = cache(device)
    leases = [blocks.lease(MIB, streams), blocks.lease(2 * MIB, streams)]
    freed = [weakref.ref(lease.block) for lease in leases]
    blocks.close()
    assert blocks.nbytes == 3 * MIB
    del leases[0]
    assert blocks.nbytes == 2 * MIB
    leases.clear()
    assert blocks.nbytes == 0
    assert [block() for block in freed] == [None, None]


@pytest.mark.parametrize("closed", [False, True])
def test_a_forked_child_frees_no_block_of_a_lease_that_has_ended_or_will(closed: bool) -> None:
    def block_of(lease: Lease) -> weakref.ref[object]:
        return weakref.ref(lease.block)

    blocks = cache(Device())
    leases = [blocks.lease(MIB, {}), blocks.lease(MIB, {})]
    found = [block_of(lease) for lease in leases]
    if closed:
        blocks.close()
    else:
        del leases[0]
    blocks.forget()
    leases.clear()
    del blocks
    assert None not in [block() for block in found]
