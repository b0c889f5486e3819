"""Device blocks: when they are written again, what the limit allows, and that the accounts stay right when calls fail."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xferlib
from tests.core.fakes import WATCHDOG, Device, Idle, Point, Slab, off_main, on_thread, tampered, until
from xferlib import h2d
from xferlib import ledger as ledgers
from xferlib.errors import AllocationError, CapabilityError
from xferlib.memory import device_pool, idle_blocks, table
from xferlib.memory.device_pool import READERS_BEHIND, WORTH_WAITING_NBYTES, DevicePool, Lease, note_reader
from xferlib.memory.idle_blocks import size_class
from xferlib.protocol import DeviceBlock, DeviceRange, Stream
from xferlib.reaper import REAPER, start_reaper

MIB = 1 << 20


def cache(device: Device, limit: int | None = None, ledger: Idle | None = None) -> DevicePool:
    played: Any = ledger or Idle()
    ledgers._open[id(played)] = played
    return DevicePool(device, played, limit)  # type: ignore[arg-type]  # only the part that hands out memory is played


@pytest.fixture(autouse=True)
def open_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a test plays, and no others: a pool asks all that are open."""
    monkeypatch.setattr(ledgers, "_open", {})


class Blocks:
    """A cache, and the leases of it that a test has not ended."""

    def __init__(self, device: Device, limit: int | None = None) -> None:
        self.cache = cache(device, limit)
        self._leases: dict[int, Lease] = {}

    def take(self, nbytes: int) -> DeviceBlock:
        lease = self.cache.lease(nbytes, {})
        self._leases[lease[0].address] = lease
        return lease[0]

    def give_back(self, *blocks: DeviceBlock) -> None:
        for block in blocks:
            del self._leases[block.address]


def test_a_table_that_is_mended_while_its_blocks_are_taken_to_be_freed_frees_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    blocks = Blocks(device)
    others: list[Future[None]] = []

    class Row(idle_blocks.BlockRow):  # type: ignore[misc]  # Final, but for this one test of what comes between two steps of it.
        __slots__ = ("taken",)

        @property
        def freed(self) -> bool:
            """Whether it was taken to be freed; after whoever asks has seen it, another thread mends the table, if it can."""
            seen = self.taken
            if self.doomed and not others:
                blocks.cache._torn = True
                others.append(on_thread(blocks.cache.trim))
                # It comes to its end, or waits for the one that is in here.
                with suppress(TimeoutError):
                    others[0].result(0.2)
            return seen

        @freed.setter
        def freed(self, value: bool) -> None:
            self.taken = value

    monkeypatch.setattr(device_pool, "BlockRow", Row)
    blocks.give_back(blocks.take(MIB))
    blocks.cache.trim()
    others[0].result(10)
    assert device.freed == device.made
    assert blocks.cache.nbytes == 0


@given(st.integers(1, 1 << 40))
def test_classes_are_at_most_an_eighth_too_large(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size
    assert size % 256 == 0
    assert size - nbytes < max(256, nbytes / 8 + 1)
    assert size_class(size) == size


def test_a_dropped_block_is_reused_without_a_driver_call() -> None:
    device = Device()
    blocks = Blocks(device)
    first = blocks.take(MIB)
    blocks.give_back(first)
    assert blocks.take(MIB - 5) is first
    assert device.allocated == [MIB]


def test_a_block_is_not_reused_before_its_readers_are_done() -> None:
    device = Device()
    blocks = Blocks(device)
    reader = Point()
    device.fences = [reader]
    first = blocks.take(MIB)
    blocks.give_back(first)
    second = blocks.take(MIB)
    assert second is not first
    assert reader.synchronized == 0
    reader.reached = True
    assert blocks.take(MIB) is first


def test_the_first_idle_block_whose_readers_are_done_is_taken() -> None:
    device = Device()
    blocks = Blocks(device)
    taken = [blocks.take(MIB) for _ in range(3)]
    device.fences = [Point(), Point(reached=True), Point()]
    for block in taken:
        blocks.give_back(block)
        blocks.cache._step(bool)
    assert blocks.take(MIB) is taken[1]


def test_idle_blocks_are_leased_in_one_step_and_nobody_is_asked_about_readers_before() -> None:
    device = Device()
    blocks = cache(device)
    leases = [blocks.lease(nbytes, {}) for nbytes in (MIB, MIB, 2 * MIB)]
    made = [lease[0] for lease in leases]
    leases = leases[2:]
    blocks.settle_posted()
    assert len(device.retired) == 1
    leases.clear()
    # The second is of a size of which none is idle yet, and what stands behind it waits for its turn.
    found = blocks.lease_idle([MIB, 2 * MIB, MIB], {})
    assert [lease[0] in made[:2] for lease in found] == [True]
    assert len(device.retired) == 1
    blocks.settle_posted()
    assert [lease[0] for lease in blocks.lease_idle([2 * MIB], {})] == made[2:]
    assert (len(device.retired), device.made) == (2, made)


def test_leasing_idle_blocks_mends_what_an_interrupt_has_torn_and_settles_what_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    blocks = cache(device)
    leases = [blocks.lease(MIB, {})]
    leases.clear()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(blocks, "_take_back", lambda number, fences: (_ for _ in ()).throw(KeyboardInterrupt))
        blocks.settle_posted()
    assert [lease[0] for lease in blocks.lease_idle([MIB], {})] == device.made


def test_an_interrupt_while_idle_blocks_are_leased_leaves_them_idle() -> None:
    device = Device()
    blocks = cache(device)
    leases = [blocks.lease(nbytes, {}) for nbytes in (MIB, 2 * MIB)]
    leases.clear()
    blocks.settle_posted()

    class Interrupted(dict[int, Any]):
        """Leases of which the second is not entered, though its block is idle no more."""

        def __setitem__(self, number: int, row: Any) -> None:
            if self:
                raise KeyboardInterrupt
            super().__setitem__(number, row)

    with pytest.raises(KeyboardInterrupt):
        blocks._leased = Interrupted()
        blocks.lease_idle([MIB, 2 * MIB], {})
    assert [blocks.lease(nbytes, {})[0] for nbytes in (MIB, 2 * MIB)] == device.made


def test_leasing_idle_blocks_is_refused_in_a_finalizer_inside_another_step() -> None:
    device = Device()
    blocks = cache(device)
    lease = blocks.lease(MIB, {})
    refused: list[bool] = []

    def ask() -> None:
        try:
            blocks.lease_idle([MIB], {})
        except AllocationError:
            refused.append(blocks.reentered)

    blocks._step(ask)
    assert refused == [True]
    del lease


def test_blocks_that_come_back_together_have_one_fence() -> None:
    """A tree has one for each array, and JAX computes something for each fence. What comes back later has one of its own."""
    device = Device()
    blocks = Blocks(device)
    taken = [blocks.take(MIB) for _ in range(4)]
    first, second = Point(), Point()
    device.fences = [first, second]
    blocks.give_back(*taken[:3])
    others = [blocks.take(MIB)]
    blocks.give_back(taken[3])
    others.append(blocks.take(MIB))
    assert device.retired == [[], []]
    assert not {block.address for block in taken} & {block.address for block in others}
    second.reached = True
    assert blocks.take(MIB) is taken[3]
    # That one fence is reached says nothing of another.
    assert blocks.take(MIB) not in taken
    first.reached = True
    asked = first.asked
    assert [blocks.take(MIB) for _ in range(3)] == taken[:3]
    assert first.asked == asked + 1


def test_a_block_that_comes_back_while_a_fence_is_made_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its readers may have been started behind the first."""
    device = Device()
    blocks = Blocks(device)
    first, second = blocks.take(MIB), blocks.take(MIB)
    device.fences = [Point(reached=True), Point()]
    retire = blocks.cache._retire

    def meanwhile(streams: Iterable[Stream]) -> Any:
        fence = retire(streams)
        if len(device.retired) == 1:
            blocks.give_back(second)
        return fence

    monkeypatch.setattr(blocks.cache, "_retire", meanwhile)
    blocks.give_back(first)
    assert blocks.take(MIB) is first
    assert blocks.take(MIB) is not second
    assert device.retired == [[], []]


def test_blocks_that_come_back_together_have_a_fence_for_each_that_streams_were_named_for() -> None:
    device = Device()
    blocks = cache(device)
    streams = {handle: Stream(handle, "kept") for handle in (7, 9)}
    leases = [blocks.lease(MIB, named) for named in ({7: streams[7]}, {}, {9: streams[9]}, {})]
    device.fences = [Point(), Point(reached=True), Point()]
    addresses = [leases.pop(0)[0].address for _ in range(4)]
    assert blocks.lease(MIB, {})[0].address == addresses[1]
    assert device.retired == [[streams[7]], [], [streams[9]]]


def test_blocks_that_come_back_together_are_freed_if_nobody_can_say_when_their_readers_are_done() -> None:
    device = Device()
    blocks = Blocks(device)
    taken = [blocks.take(MIB) for _ in range(2)]
    device.retire_error = OSError("no")
    blocks.give_back(*taken)
    other = blocks.take(MIB)
    assert device.freed == taken
    assert other not in taken


def test_a_lease_gives_the_streams_that_were_named_to_retire() -> None:
    device = Device()
    blocks = Blocks(device)
    streams = {7: Stream(7, "seven")}
    lease = blocks.cache.lease(MIB, streams)
    streams[9] = Stream(9, "nine")
    del lease
    blocks.take(MIB)
    assert device.retired == [[Stream(7, "seven"), Stream(9, "nine")]]


def test_streams_that_are_named_for_memory_inside_a_block_are_those_of_its_lease() -> None:
    device = Device()
    blocks = cache(device)
    first, second = blocks.lease(MIB, {}), blocks.lease(MIB, {})
    for offset in (0, 256, MIB - 1):
        assert blocks.note(DeviceRange(first[0].address + offset, 1, None), Stream(offset, "kept"))
    assert not blocks.note(DeviceRange(first[0].address - 1, 1, None), Stream(7, "of nobody"))
    del first
    third = blocks.lease(MIB, {})
    assert [stream.handle for stream in device.retired[0]] == [0, 256, MIB - 1]
    del second, third
    blocks.trim()
    assert device.retired[1:] == [[]]


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_stream_is_noted_with_whichever_stager_has_the_memory(monkeypatch: pytest.MonkeyPatch, owner: int) -> None:
    # Only those of this test: others of the process may have been opened before.
    monkeypatch.setattr(device_pool, "_open", {})
    devices = [Device() for _ in range(3)]
    caches = [cache(device) for device in devices]
    # Their addresses would be the same.
    for number, device in enumerate(devices):
        device.allocated = [0] * 10 * number
    leases = [each.lease(MIB, {}) for each in caches]
    note_reader(DeviceRange(leases[owner][0].address, 1, None), Stream(7, None), caches[1])
    leases.clear()
    for each in caches:
        each._step(bool)
    assert [device.retired for device in devices] == [[[Stream(7, None)] if number == owner else []] for number in range(3)]


def test_memory_inside_a_block_is_ours_as_long_as_it_is_leased() -> None:
    blocks = cache(Device())
    leases = [blocks.lease(MIB, {}), blocks.lease(MIB, {})]
    start = leases[1][0].address
    asked = [DeviceRange(start + offset, 1, None) for offset in (-1, 0, 256, MIB - 1, MIB)]
    assert [blocks.owns(source) for source in asked] == [False, True, True, True, False]
    del leases[1]
    # Settled: it is idle.
    blocks.lease(2 * MIB, {})
    assert blocks.nbytes == 4 * MIB
    assert not any(blocks.owns(source) for source in asked)
    blocks.trim()
    assert not any(blocks.owns(source) for source in asked)


@pytest.mark.parametrize("question", ["owns", "note"])
def test_a_question_about_memory_may_come_while_blocks_are_leased(monkeypatch: pytest.MonkeyPatch, question: str) -> None:
    taken: list[Lease] = []

    class Row(idle_blocks.BlockRow):  # type: ignore[misc]  # Final, but for this test of what comes between two steps of it.
        __slots__ = ("_address",)

        @property
        def address(self) -> int:
            """Where it lies, which is asked in the middle of the question; and then another block is leased."""
            if asking:
                asking.clear()
                taken.append(blocks.lease(MIB, {}))
            return self._address

        @address.setter
        def address(self, value: int) -> None:
            self._address = value

    monkeypatch.setattr(device_pool, "BlockRow", Row)
    asking: list[str] = []
    blocks = cache(Device())
    streams: dict[int, Stream] = {}
    leases = [blocks.lease(MIB, {}), blocks.lease(MIB, streams)]
    inside = DeviceRange(leases[1][0].address + 256, 1, None)
    asking.append(question)
    if question == "owns":
        assert blocks.owns(inside)
    else:
        assert blocks.note(inside, Stream(7, None))
        assert list(streams) == [7]
    assert taken


@pytest.mark.parametrize("offset", [0, 256])
def test_a_question_about_memory_may_come_while_the_table_is_mended(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """It takes no lock, so other threads ask meanwhile; a stream that is not noted then reads memory that is written anew."""
    answers: list[tuple[bool, bool]] = []

    class Row(idle_blocks.BlockRow):  # type: ignore[misc]  # Final, but for this test of what comes between two steps of it.
        __slots__ = ("_doomed",)

        @property
        def doomed(self) -> bool:
            """Asked of each as the table is mended."""
            if blocks._torn:
                answers.append((blocks.owns(inside), blocks.note(inside, Stream(7, None))))
            return self._doomed

        @doomed.setter
        def doomed(self, value: bool) -> None:
            self._doomed = value

    monkeypatch.setattr(device_pool, "BlockRow", Row)
    blocks = cache(Device())
    streams: dict[int, Stream] = {}
    leases = [blocks.lease(MIB, streams), blocks.lease(MIB, {})]
    inside = DeviceRange(leases[0][0].address + offset, 1, None)
    # As an interrupt leaves it.
    blocks._torn = True
    leases.append(blocks.lease(2 * MIB, {}))
    assert answers == [(True, True)] * 2
    assert list(streams) == [7]


def test_a_stream_known_by_its_handle_is_waited_for_as_any_other() -> None:
    """The caller promises that it stays valid, so no finalizer need ask about it."""
    device = Device()
    blocks = cache(device)
    device.fences = [Point()]
    bare = Stream(9, None)
    lease = blocks.lease(MIB, {9: bare})
    first = lease[0]
    del lease
    assert device.retired == []
    assert blocks.lease(MIB, {})[0] is not first
    assert device.retired[0] == [bare]


def test_a_lease_that_ends_by_itself_takes_no_lock_and_asks_nothing_of_the_backend() -> None:
    device = Device()
    blocks = cache(device)
    lease = [blocks.lease(MIB, {9: Stream(9, None)}), blocks.lease(MIB, {})]
    with blocks._lock:
        on_thread(lease.clear).result(10)
    assert (device.retired, device.freed) == ([], [])


def test_a_lease_that_ends_after_close_is_freed_by_the_reaper_and_nothing_else_is_asked() -> None:
    device = Device()
    blocks = cache(device)
    lease = blocks.lease(MIB, {9: Stream(9, None)})
    block = lease[0]
    start_reaper()
    blocks.close()
    assert device.freed == []
    del lease
    assert until(lambda: device.freed == [block])
    assert device.retired == []
    assert blocks.nbytes == 0


def test_room_that_was_made_while_nothing_was_in_flight_is_found() -> None:
    """Another thread's array may die, or its transfer end, between two looks: that is no reason to raise."""
    blocks: list[Lease] = []

    class Late(Idle):
        def wait_for_device(self, owns: object) -> bool:
            blocks.clear()
            if looks:
                blocks.append(taken.lease(MIB, {})) if looks.pop() else None
            return False

    looks = [False, True, True, True]
    taken = cache(Device(), MIB, Late())
    blocks.append(taken.lease(MIB, {}))
    assert taken.lease(MIB, {})[0].nbytes == MIB
    assert looks == []


def test_a_block_that_comes_back_in_the_last_look_is_found() -> None:
    leases: list[Lease] = []
    looks: list[str] = []

    class Late(Idle):
        def wait_for_device(self, owns: object) -> bool:
            looks.append("nothing is in flight")
            # The collector has been called for, too, and nobody looks at what has come back in between.
            if len(looks) == 2:
                leases.clear()
            return False

    blocks = cache(Device(), MIB, Late())
    leases.append(blocks.lease(MIB, {}))
    assert blocks.lease(MIB, {})[0].nbytes == MIB
    assert len(looks) == 2


def test_a_block_that_only_a_copy_that_is_done_holds_is_used_before_another_is_taken() -> None:
    leases: list[Lease] = []

    class Done(Idle):
        def reap(self) -> bool:
            leases.clear()
            return True

    device = Device()
    blocks = cache(device, ledger=Done())
    leases.append(blocks.lease(MIB, {}))
    blocks.lease(MIB, {})
    assert device.allocated == [MIB]


def test_an_idle_block_keeps_no_stream() -> None:
    class Kept:
        """What keeps a stream of the user's."""

    device = Device()
    blocks = cache(device)
    kept = Kept()
    lease = blocks.lease(MIB, {7: Stream(7, kept)})
    gone = weakref.ref(kept)
    del kept
    assert gone() is not None
    del lease
    blocks._step(bool)
    device.retired.clear()
    assert gone() is None


def test_a_finalizer_inside_the_cache_is_refused_and_harms_nothing() -> None:
    device = Device()
    refused: list[str] = []

    def sweep() -> None:
        try:
            blocks.lease(MIB, {})
        except AllocationError as error:
            refused.append(str(error))

    device.sweep = sweep  # type: ignore[method-assign]  # stands in for the collector
    blocks = cache(device)
    lease = blocks.lease(MIB, {})
    assert lease[0].nbytes == blocks.nbytes == MIB
    assert "finalizer" in refused[0]


def test_at_the_limit_the_stream_waits_and_not_the_host() -> None:
    device = Device()
    blocks = Blocks(device, 2 * MIB)
    readers = [Point(), Point()]
    device.fences = list(readers)
    first, second = blocks.take(MIB), blocks.take(MIB)
    blocks.give_back(first, second)
    assert blocks.take(MIB) is first
    assert device.ordered == [readers[0]]
    assert [reader.synchronized for reader in readers] == [0, 0]
    assert blocks.cache.waits == 1
    assert blocks.cache.nbytes == 2 * MIB


def test_a_program_that_never_waits_takes_a_bounded_amount_of_memory() -> None:
    device = Device()
    blocks = Blocks(device)
    size = WORTH_WAITING_NBYTES // READERS_BEHIND
    readers = [Point() for _ in range(3 * READERS_BEHIND)]
    device.fences = list(readers)
    for _ in readers:
        blocks.give_back(blocks.take(size))
    assert len(device.allocated) == READERS_BEHIND
    assert device.ordered == readers[: 2 * READERS_BEHIND]
    assert not any(reader.synchronized for reader in readers)


def test_small_blocks_that_wait_for_readers_hold_up_no_copy() -> None:
    device = Device()
    blocks = Blocks(device)
    device.fences = [Point() for _ in range(4 * READERS_BEHIND)]
    for _ in range(4 * READERS_BEHIND):
        blocks.give_back(blocks.take(256))
    assert device.ordered == []


def test_where_no_copy_can_wait_for_the_readers_more_memory_is_taken() -> None:
    device = Device()
    blocks = Blocks(device)
    size = WORTH_WAITING_NBYTES // READERS_BEHIND
    device.fences = [Point() for _ in range(READERS_BEHIND)]
    taken = [blocks.take(size) for _ in range(READERS_BEHIND)]
    blocks.give_back(*taken)
    device.order_error = CapabilityError("captured")
    assert blocks.take(size) not in taken
    device.order_error = None
    assert blocks.take(size) is taken[0]


def test_at_the_limit_with_nothing_idle_the_error_says_what_to_do() -> None:
    device = Device()
    blocks = Blocks(device, MIB)
    kept = blocks.take(MIB)
    with pytest.raises(AllocationError, match=r"device memory is full.*device_limit=1048576.*Raise device_limit, or drop arrays"):
        blocks.take(MIB)
    assert blocks.cache.nbytes == kept.nbytes == MIB


def test_blocks_of_other_sizes_make_room_at_the_limit() -> None:
    device = Device()
    blocks = Blocks(device, 4 * MIB)
    taken = [blocks.take(MIB) for _ in range(4)]
    blocks.give_back(*taken)
    assert blocks.take(3 * MIB).nbytes == 3 * MIB
    assert blocks.cache.nbytes == 4 * MIB


def test_two_sizes_at_the_limit_settle_down() -> None:
    device = Device()
    blocks = Blocks(device, 3 * MIB)
    taken = [blocks.take(MIB), blocks.take(2 * MIB)]
    for _ in range(3):
        readers = [Point(), Point()]
        device.fences = list(readers)
        blocks.give_back(*taken)
        taken = [blocks.take(MIB), blocks.take(2 * MIB)]
        assert [reader.synchronized for reader in readers] == [0, 0]
    assert device.allocated == [MIB, 2 * MIB]


def test_the_oldest_block_is_asked_about_once_where_another_is_taken() -> None:
    device = Device()
    blocks = cache(device)
    device.fences = [Point(), Point(reached=True)]
    oldest: Any = device.fences[0]
    leases = [blocks.lease(MIB, {number: Stream(number, None)}) for number in (7, 9)]
    addresses = [block.address for block, _ in leases]
    while leases:
        del leases[0]
    found = blocks.lease(MIB, {})
    assert found[0].address == addresses[1]
    assert oldest.asked == 1


def test_a_block_that_was_waited_for_once_has_a_fence_of_its_own_each_time() -> None:
    device = Device()
    blocks = cache(device)
    device.fences = [Point(reached=True), Point()]
    for number in (7, 9):
        lease = blocks.lease(MIB, {number: Stream(number, None)})
        del lease
    blocks.lease(MIB, {})
    assert device.retired == [[Stream(7, None)], [Stream(9, None)]]
    # The second is not reached.
    assert device.allocated == [MIB, MIB]


def test_blocks_that_streams_have_read_are_used_again_though_the_streams_come_and_go() -> None:
    device = Device()
    blocks = cache(device)
    for number in range(1, 50, 2):
        device.fences = [Point(reached=True), Point(reached=True)]
        leases = [blocks.lease(MIB, {each: Stream(each, None)}) for each in (number, number + 1)]
        leases.clear()
        # Behind the first of the two nobody waits any more when the second is asked for.
        again = [blocks.lease(MIB, {}) for _ in range(2)]
        again.clear()
    assert device.allocated == [MIB, MIB]
    assert len(blocks._idle[MIB].behind) <= 2


def test_of_blocks_behind_several_streams_the_copies_wait_for_the_oldest() -> None:
    device = Device()
    blocks = cache(device, limit=4 * MIB)
    # The two of stream 7 are the first and the last of four.
    fences = [Point() for _ in range(4)]
    device.fences = list(fences)
    leases = [blocks.lease(MIB, {number: Stream(number, None)}) for number in (7, 9, 8, 7)]
    addresses = [block.address for block, _ in leases]
    while leases:
        del leases[0]
        blocks._step(bool)
    held = []
    for address, fence in zip(addresses, fences, strict=True):
        held.append(blocks.lease(MIB, {}))
        assert held[-1][0].address == address
        assert device.ordered[-1] is fence


def test_of_many_blocks_behind_one_stream_one_is_asked_about() -> None:
    """Where the device is behind, a put asks the driver once for each stream, and not for each block."""
    device = Device()
    blocks = cache(device)
    one, both, third = {7: Stream(7, None)}, {7: Stream(7, None), 9: Stream(9, None)}, {11: Stream(11, None)}
    device.fences = [Point() for _ in range(21)]
    fences: Any = device.fences.copy()
    leases = [blocks.lease(MIB, dict(streams)) for streams in [one] * 10 + [both] * 10 + [third]]
    addresses = [block.address for block, _ in leases]
    while leases:
        # The first first.
        del leases[0]
    new = blocks.lease(MIB, {})
    assert new[0].address not in addresses
    # Some are asked about again before memory is taken.
    assert [number for number, fence in enumerate(fences) if fence.asked] == [0, 10, 20]
    # What another stream is done with is found behind them all.
    fences[20].reached = True
    last = blocks.lease(MIB, {})
    assert last[0].address == addresses[20]
    for number in range(10, 20):
        fences[number].reached = True
        found = blocks.lease(MIB, {})
        assert found[0].address == addresses[number]
        leases.append(found)
    assert fences[1].asked == 0


def test_a_lost_block_is_forgotten() -> None:
    device = Device()
    blocks = Blocks(device)
    first = blocks.take(MIB)
    blocks.give_back(first)
    device.gone.add(first.address)
    assert blocks.take(MIB) is not first
    assert blocks.cache.nbytes == MIB


def test_a_lost_block_is_forgotten_at_the_limit_too() -> None:
    device = Device()
    blocks = Blocks(device, MIB)
    first = blocks.take(MIB)
    device.fences = [Point()]
    blocks.give_back(first)
    device.gone.add(first.address)
    assert blocks.take(MIB) is not first
    assert blocks.cache.nbytes == MIB


def test_many_lost_blocks_are_forgotten_at_once() -> None:
    device = Device()
    blocks = Blocks(device)
    taken = [blocks.take(256) for _ in range(2000)]
    blocks.give_back(*taken)
    device.gone.update(block.address for block in taken)
    assert blocks.take(256) not in taken
    assert blocks.cache.nbytes == 256


def test_a_block_whose_readers_cannot_be_named_is_let_go() -> None:
    device = Device()
    blocks = Blocks(device)
    first = blocks.take(MIB)
    device.retire_error = OSError("the stream is gone")
    blocks.give_back(first)
    assert blocks.take(MIB) is not first
    assert blocks.cache.nbytes == MIB


def test_a_fence_that_fails_does_not_spoil_its_size_for_good() -> None:
    device = Device()
    blocks = Blocks(device)
    first = blocks.take(MIB)
    device.fences = [Point(error=OSError("broken"))]
    blocks.give_back(first)
    assert blocks.take(MIB) is not first
    assert blocks.take(MIB) is not first
    assert blocks.cache.nbytes == 2 * MIB


def test_a_wait_that_cannot_be_enqueued_leaves_the_accounts_right() -> None:
    device = Device()
    blocks = Blocks(device, MIB)
    first = blocks.take(MIB)
    reader = Point()
    device.fences = [reader]
    blocks.give_back(first)
    del first
    device.order_error = OSError("no")
    with pytest.raises(OSError, match="no"):
        blocks.take(MIB)
    device.order_error = None
    assert blocks.take(MIB).nbytes == MIB
    assert blocks.cache.nbytes == MIB


def test_idle_blocks_are_freed_when_the_device_is_full() -> None:
    device = Device()
    blocks = Blocks(device)
    blocks.give_back(blocks.take(MIB))
    device.refusals = [OSError("full")]
    assert blocks.take(2 * MIB).nbytes == 2 * MIB
    assert blocks.cache.nbytes == 2 * MIB


def test_a_full_device_is_an_allocation_error_with_its_cause() -> None:
    device = Device()
    blocks = Blocks(device)
    device.refusals = [OSError("full"), OSError("still full")]
    with pytest.raises(AllocationError, match=r"the device has no 1\.0 MiB left \(0 bytes are taken by puts\)") as caught:
        blocks.take(MIB)
    assert isinstance(caught.value.__cause__, OSError)
    assert blocks.cache.nbytes == 0


@pytest.mark.parametrize("refusals", [[KeyboardInterrupt()], [OSError("full"), KeyboardInterrupt()]])
def test_an_interrupted_allocation_leaves_the_accounts_right(refusals: list[BaseException]) -> None:
    device = Device()
    blocks = Blocks(device, MIB)
    device.refusals = [*refusals]
    with pytest.raises(KeyboardInterrupt):
        blocks.take(MIB)
    assert blocks.cache.nbytes == 0
    assert blocks.take(MIB).nbytes == MIB


def test_a_fresh_block_that_is_not_ready_is_ordered_and_a_spare_is_kept() -> None:
    device = Device()
    device.fresh_is_ready = False
    blocks = Blocks(device)
    first = blocks.take(MIB)
    assert device.ordered == [first.ready]
    assert device.allocated == [MIB, MIB]
    assert isinstance(device.made[1].ready, Point)
    device.made[1].ready.reached = True
    assert blocks.take(MIB) is device.made[1]
    assert device.ordered == [first.ready]


def test_while_readers_are_behind_small_blocks_are_taken_several_at_a_time() -> None:
    device = Device()
    blocks = cache(device)
    behind = {7: Stream(7, None)}
    for _ in range(100):
        device.fences = [Point()]
        lease = blocks.lease(256, dict(behind))
        del lease
    # One and as many again as there are, sixteen at most: 1, 3, 7, 15, 31, and from there by seventeen.
    grown = len(device.allocated)
    assert grown == 31 + 5 * 17
    assert blocks.nbytes == 256 * grown


class Reading(Device):
    """The backend of a program whose kernels read what was put."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[Point] = []
        self.attempts = 0
        self.refusal: type[Exception] | None = None
        self.gate: threading.Event | None = None
        self.entered = threading.Event()

    def retire(self, streams: Iterable[Stream]) -> Point:
        self.readers.append(Point())
        return self.readers[-1]

    def finish(self) -> None:
        for reader in self.readers:
            reader.reached = True

    def alloc_device(self, nbytes: int) -> Slab:
        self.attempts += 1
        if self.refusal is not None:
            raise self.refusal("full")
        gate = self.gate
        if gate is not None:
            # That of whoever comes first.
            self.gate = None
            self.entered.set()
            assert gate.wait(WATCHDOG)
        return super().alloc_device(nbytes)


class JustDone(Idle):
    """What is in flight: to look through it takes as long as the readers do."""

    def __init__(self, device: Reading) -> None:
        self.device = device
        self.looks = 0

    def reap(self) -> bool:
        # The thread that settles what earlier tests have closed looks through all that there is, too.
        if not REAPER.is_here():
            self.looks += 1
            self.device.finish()
        return False


def put_late(blocks: DevicePool, size: int = 256) -> None:
    lease = blocks.lease(size, {7: Stream(7, None)})
    del lease


@pytest.mark.parametrize(("size", "late"), [(256, 2), (256 << 10, 2), (MIB, 20)])
def test_after_a_small_put_that_came_too_early_by_a_hair_there_is_one_more_block(size: int, late: int) -> None:
    device = Reading()
    ledger = JustDone(device)
    blocks = cache(device, ledger=ledger)
    for _ in range(20):
        # All but those of the block that the put before has just let go of.
        device.finish()
        put_late(blocks, size)
    assert ledger.looks == late
    assert device.allocated == [size] * (1 if size == MIB else 2)


@pytest.mark.parametrize(("size", "most"), [(256, 16), (64 << 10, 4)])
@pytest.mark.parametrize("refusal", [None, OSError, MemoryError])
def test_puts_that_all_come_too_early_try_a_few_times_and_no_more(size: int, most: int, refusal: type[Exception] | None) -> None:
    device = Reading()
    blocks = cache(device, ledger=JustDone(device))
    kept = []
    for _ in range(2):
        device.refusal = None
        device.finish()
        put_late(blocks, size)
        tried, device.refusal = device.attempts, refusal
        for _ in range(50):
            # Every block is idle behind readers that are done only in the next look.
            kept = [blocks.lease(size, {7: Stream(7, None)}) for _ in range(len(blocks._rows))]
            kept.clear()
        assert device.attempts == tried + most
        blocks.trim()


def test_a_put_that_comes_too_early_at_the_limit_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Reading()
    blocks = cache(device, limit=256, ledger=JustDone(device))
    put_late(blocks)
    helpers = []

    def counted(call: Any, *arguments: Any) -> Any:
        helpers.append(call)
        return call(*arguments)

    monkeypatch.setattr(device_pool, "uninterrupted", counted)
    for _ in range(100):
        put_late(blocks)
    assert len(helpers) == 16
    assert device.allocated == [256]
    assert blocks.nbytes == 256


def test_a_put_that_takes_what_a_copy_held_that_is_done_wants_no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No readers were behind: the laws find out which memory is free by how much there is."""
    under_way: list[Lease] = []

    class Done(Idle):
        def reap(self) -> bool:
            under_way.clear()
            return True

    blocks = cache(Device(), ledger=Done())
    under_way.append(blocks.lease(256, {}))
    helpers: list[Any] = []
    monkeypatch.setattr(device_pool, "uninterrupted", lambda *called: helpers.append(called))
    assert blocks.lease(256, {})[0].nbytes == 256
    assert not helpers


def test_a_put_that_waited_for_a_transfer_wants_no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[Lease] = []

    class Slow(Idle):
        def wait_for_device(self, owns: object) -> bool:
            under_way.clear()
            return True

    blocks = cache(Device(), limit=256, ledger=Slow())
    under_way.append(blocks.lease(256, {}))
    helpers: list[Any] = []
    monkeypatch.setattr(device_pool, "uninterrupted", lambda *called: helpers.append(called))
    assert blocks.lease(256, {})[0].nbytes == 256
    assert not helpers


def test_who_finds_no_room_because_of_a_spare_waits_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device, sleep, slept = Reading(), time.sleep, []

    def noted(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)

    blocks = cache(device, limit=512, ledger=JustDone(device))
    put_late(blocks)
    gate = device.gate = threading.Event()
    first = on_thread(lambda: put_late(blocks))
    try:
        assert device.entered.wait(WATCHDOG)
        # The block is the first put's still, and the rest of the limit the spare's.
        monkeypatch.setattr(time, "sleep", noted)
        second = on_thread(lambda: blocks.lease(256, {}))
        assert until(lambda: second.done() or slept.count(table.ROOM_LOOK_SECONDS) > 3)
        assert not second.done()
    finally:
        gate.set()
    first.result(WATCHDOG)
    assert second.result(WATCHDOG)[0].nbytes == 256
    assert device.allocated == [256, 256]


def test_no_spare_is_taken_when_the_stager_was_closed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wanted it was interrupted, and closed the stager before the thread that was to take it had begun."""
    device = Reading()
    blocks = cache(device, ledger=JustDone(device))
    put_late(blocks)
    later: list[Any] = []
    monkeypatch.setattr(device_pool, "uninterrupted", lambda *called: later.append(partial(*called)))
    put_late(blocks)
    monkeypatch.undo()
    blocks.close()
    (take,) = later
    take()
    assert device.allocated == [256]
    assert device.freed == device.made
    assert not blocks._rows


def test_a_spare_that_is_interrupted_before_it_is_asked_for_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease has its number, so that none would settle it when it ends."""

    def interrupt(*called: Any) -> None:
        raise KeyboardInterrupt

    device = Reading()
    blocks = cache(device, ledger=JustDone(device))
    put_late(blocks)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(device_pool, "uninterrupted", interrupt)
        put_late(blocks)
    device.finish()
    blocks.trim()
    assert blocks.nbytes == 0
    assert device.freed == device.made


def test_a_spare_is_taken_where_no_interrupt_comes() -> None:
    device = Reading()
    blocks = cache(device, ledger=JustDone(device))
    put_late(blocks)
    threads = []
    allocate = device.alloc_device
    device.alloc_device = lambda nbytes: threads.append(off_main()) or allocate(nbytes)  # type: ignore[method-assign,func-returns-value]
    put_late(blocks)
    assert threads == [True]


def test_no_spare_is_taken_of_what_is_large_nor_beyond_the_limit() -> None:
    device = Device()
    blocks = cache(device, limit=2 * MIB)
    for size, count in ((MIB // 2, 2), (256, 10)):
        leases = []
        for _ in range(count):
            device.fences = [Point()]
            leases.append(blocks.lease(size, {7: Stream(7, None)}))
            leases.clear()
        if size > 256:
            assert device.allocated == [size] * count
    assert blocks.nbytes <= 2 * MIB


def test_the_spare_respects_the_limit_and_its_failure_is_not_the_caller_s() -> None:
    device = Device()
    device.fresh_is_ready = False
    limited = Blocks(device, MIB)
    limited.take(MIB)
    assert limited.cache.nbytes == MIB
    unlimited = Blocks(device)
    device.refusals = [None, OSError("full")]
    assert unlimited.take(MIB).nbytes == MIB
    assert device.refusals == []
    assert unlimited.cache.nbytes == MIB


def test_trim_frees_what_is_idle_after_its_readers() -> None:
    device = Device()
    blocks = Blocks(device)
    kept, dropped = blocks.take(MIB), blocks.take(2 * MIB)
    reader = Point()
    device.fences = [reader]
    blocks.give_back(dropped)
    blocks.cache.trim()
    assert reader.synchronized == 1
    assert device.freed == [dropped]
    assert blocks.cache.nbytes == kept.nbytes
    assert blocks.cache.peak_nbytes == 3 * MIB


def test_a_trim_beside_another_thread_s_put_is_no_finalizer_s_and_frees_what_is_idle() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Device):
        def retire(self, streams: Iterable[Stream]) -> None:
            if streams:
                entered.set()
                assert go_on.wait(WATCHDOG)

    device = Slow()
    blocks = cache(device)
    idle = blocks.lease(512, {})
    idle_address = idle[0].address
    del idle
    lease = blocks.lease(256, {7: Stream(7, None)})
    del lease
    putting = on_thread(lambda: blocks.lease(256, {}))
    try:
        assert entered.wait(WATCHDOG)
        trimming = on_thread(blocks.trim)
        with pytest.raises(TimeoutError):
            trimming.result(0.1)
    finally:
        go_on.set()
    trimming.result(WATCHDOG)
    putting.result(WATCHDOG)
    assert idle_address in [block.address for block in device.freed]


def test_close_frees_what_is_idle_and_only_that() -> None:
    device = Device()
    blocks = Blocks(device)
    lease = blocks.cache.lease(MIB, {})
    idle = blocks.take(2 * MIB)
    blocks.give_back(idle)
    blocks.cache.close()
    assert blocks.cache.nbytes == MIB
    assert device.freed == [idle]
    assert blocks.cache.settle()
    assert device.freed == [idle]
    del lease
    assert not blocks.cache.settle()
    assert blocks.cache.nbytes == 0


@pytest.mark.parametrize("limit", [4 * MIB, 8 * MIB])
def test_leases_end_on_any_thread_while_others_take(limit: int) -> None:
    device = Device()
    blocks = cache(device, limit)
    in_use: set[int] = set()
    lock = threading.Lock()

    def work() -> None:
        for _ in range(300):
            lease = blocks.lease(MIB, {})
            with lock:
                assert lease[0].address not in in_use
                in_use.add(lease[0].address)
            with lock:
                in_use.discard(lease[0].address)
            del lease

    for future in [on_thread(work) for _ in range(4)]:
        future.result(30)
    assert sum(device.allocated) == blocks.nbytes <= limit


def test_a_block_of_a_closed_cache_is_not_freed_before_named_streams_have_read_it() -> None:
    """A stream that is known by its handle alone may be gone by then, and is asked nothing."""
    device = Device()
    fence = Point()
    waited = threading.Event()

    def wait() -> None:
        waited.set()
        assert reached.wait(WATCHDOG)

    reached = threading.Event()
    fence.synchronize = wait  # type: ignore[method-assign]
    device.fences = [fence]
    blocks = cache(device)
    kept = Stream(7, "kept")
    lease = blocks.lease(MIB, {7: kept, 9: Stream(9, None)})
    start_reaper()
    blocks.close()
    del lease
    # By the reaper: nobody calls the stager any more.
    assert waited.wait(WATCHDOG)
    assert device.retired == [[kept]]
    assert device.freed == []
    reached.set()
    assert until(lambda: len(device.freed) == 1)


def test_a_stream_outlives_the_stager_that_it_dies_with_in_a_cycle() -> None:
    """Its own finalizer would destroy it, and what closes the stager asks the driver about it."""
    ended: list[None] = []

    class Owned:
        """A stream of the framework's."""

        def __del__(self) -> None:
            ended.append(None)

    def make_garbage() -> None:
        blocks = cache(Device())
        cycle: list[object] = [blocks, blocks.lease(MIB, {7: Stream(7, Owned())})]
        cycle.append(cycle)
        found.append(id(blocks))

    found: list[int] = []
    make_garbage()
    gc.collect()
    assert ended == []
    # What closes the stager has it still.
    device_pool._open[found[0]].close()
    gc.collect()
    assert ended == [None]


@pytest.mark.parametrize("idle", [0, 2])
def test_blocks_that_a_tree_lacks_are_allocated_by_one_other_thread(monkeypatch: pytest.MonkeyPatch, idle: int) -> None:
    """An interrupt comes to the main thread alone, which is this one. An idle block stands for one of those that are wanted, and
    not for all of its size."""
    threads: list[threading.Thread] = []
    with xferlib.stager("host") as stager:
        before = [stager.put(np.zeros(MIB, np.uint8)).result(WATCHDOG) for _ in range(idle)]
        del before
        real = stager.backend.alloc_device

        def alloc_device(nbytes: int) -> DeviceBlock:
            threads.append(threading.current_thread())
            return real(nbytes)

        monkeypatch.setattr(stager.backend, "alloc_device", alloc_device)
        leaves = [np.full(MIB, number, np.uint8) for number in range(6)]
        got = stager.put(leaves).result(WATCHDOG)
        assert all(np.array_equal(array, leaf) for array, leaf in zip(got, leaves, strict=True))
        assert len(threads) == 6 - idle
        assert len(set(threads)) == 1
        assert threading.current_thread() not in threads
        del got
        stager.put(leaves).result(WATCHDOG)
        assert len(threads) == 6 - idle


def test_a_tree_gets_the_blocks_that_came_back_since_the_last_step_each_for_its_own_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody waits for another thread then."""
    taken: list[object] = []

    def elsewhere(call: Callable[..., Any], *arguments: Any) -> Any:
        taken.append(call)
        return call(*arguments)

    monkeypatch.setattr(h2d, "uninterrupted", elsewhere)
    with xferlib.stager("host") as stager:
        leaves = [np.full(count * MIB, count, np.uint8) for count in (1, 2, 3, 4)]
        for _ in range(2):
            got = stager.put(leaves).result(WATCHDOG)
            assert all(np.array_equal(array, leaf) for array, leaf in zip(got, leaves, strict=True))
            del got
        assert len(taken) == 1
        assert stager.stats().device_nbytes == 10 * MIB


@pytest.mark.parametrize(("count", "most"), [(1, 6), (64, 6), (129, 18)])
def test_a_tree_s_blocks_are_counted_in_few_steps_and_each_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, count: int, most: int
) -> None:
    """Each step looks at all that may have come back. A spare is ready before the next of the size is needed."""
    device = Device()
    device.fresh_is_ready = False
    blocks = cache(device)
    swept: list[None] = []
    monkeypatch.setattr(blocks, "_sweep", lambda: swept.append(None))
    leases = blocks.lease_at_once([MIB] * count, {})
    assert len({id(block) for block, _ in leases}) == count
    assert device.allocated == [MIB] * (count + 1)
    assert device.ordered == [block.ready for block, _ in leases]
    # Counting, beginning, entering; and the same for a spare.
    assert len(swept) <= most
    assert blocks.peak_nbytes == (count + 1) * MIB


def test_a_tree_gets_blocks_up_to_the_first_for_which_there_is_no_room() -> None:
    device = Device()
    blocks = cache(device, 5 * MIB)
    leases = blocks.lease_at_once([2 * MIB, 2 * MIB, 2 * MIB, MIB], {})
    assert [block.nbytes for block, _ in leases] == [2 * MIB, 2 * MIB]
    assert blocks.nbytes == 4 * MIB
    leases.clear()
    assert len(blocks.lease_at_once([2 * MIB, MIB, 2 * MIB], {})) == 3
    assert device.allocated == [2 * MIB, 2 * MIB, MIB]
    # Nor does it get any behind that one, however many it wants.
    assert len(blocks.lease_at_once([6 * MIB] + [MIB] * 100, {})) == 0


def test_as_many_spares_come_with_a_tree_s_blocks_as_there_are_behind_their_readers() -> None:
    device = Reading()
    blocks = cache(device)
    kept = [blocks.lease(256, {7: Stream(7, None)}) for _ in range(2)]
    kept.clear()
    blocks.settle_posted()
    assert len(blocks.lease_at_once([256] * 4, {})) == 4
    assert device.allocated == [256] * (2 + 4 + 2)


def test_spares_have_no_more_bytes_together_than_one_large_small_block() -> None:
    device = Reading()
    blocks = cache(device)
    kept = [blocks.lease(64 << 10, {7: Stream(7, None)}) for _ in range(6)]
    kept.clear()
    blocks.settle_posted()
    assert len(blocks.lease_at_once([64 << 10] * 2, {})) == 2
    assert device.allocated == [64 << 10] * (6 + 2 + 4)


def test_idle_blocks_of_one_size_stand_for_none_of_another() -> None:
    blocks = cache(Device())
    leases = [blocks.lease(MIB, {}) for _ in range(3)]
    leases.clear()
    blocks.settle_posted()
    assert blocks.lacks([MIB, 2 * MIB, 2 * MIB])
    assert not blocks.lacks([MIB, MIB, 2 * MIB])


@pytest.mark.parametrize("nobody_can_use", ["whose readers nobody knows", "that are lost"])
def test_trees_free_the_blocks_that_nobody_can_use_any_more(nobody_can_use: str) -> None:
    def retire(streams: Iterable[Stream]) -> None:
        raise OSError("no event")

    lost = nobody_can_use == "that are lost"
    backend = tampered(failures=(OSError,), **({"lost": lambda block: True} if lost else {"retire": retire}))
    with xferlib.stager(backend) as stager:
        for _ in range(4):
            got = stager.put([np.zeros(MIB, np.uint8) for _ in range(3)]).result(WATCHDOG)
            del got
            # Those of this tree, and not those of the trees before it.
            assert stager.stats().device_nbytes == 3 * MIB


@pytest.mark.parametrize("idle", [0, 1, 3])
def test_all_blocks_of_a_tree_are_retired_behind_the_stream_that_reads_them(idle: int) -> None:
    retired: list[list[int]] = []

    def retire(streams: Iterable[Stream]) -> Any:
        retired.append([stream.handle for stream in streams])
        return backend.inner.retire([])

    backend = tampered(retire=retire)
    leaves = [np.zeros(MIB, np.uint8) for _ in range(4)]
    with xferlib.stager(backend) as stager:
        before = [stager.put(leaves[0]).result(WATCHDOG) for _ in range(idle)]
        before.clear()
        retired.clear()
        started = stager.put(leaves)
        started.synchronize()
        retired.clear()
        assert started._note_stream is not None
        started._note_stream(7, Stream(7, "seven"))
        del started
        stager.trim()
        assert retired == [[7]] * len(leaves)


def test_a_tree_that_does_not_fit_gives_back_the_blocks_it_has() -> None:
    with xferlib.stager("host", device_limit=4 * MIB) as stager:
        with pytest.raises(AllocationError):
            stager.put([np.zeros(MIB, np.uint8) for _ in range(6)])
        assert len(stager.put([np.zeros(MIB, np.uint8) for _ in range(3)]).result(WATCHDOG)) == 3


class Counted(int):
    """Bytes that tell how often they were added up."""

    additions = 0

    def __radd__(self, other: int) -> int:
        Counted.additions += 1
        return int(self) + other

    def __add__(self, other: int) -> int:
        Counted.additions += 1
        return int(self) + other


@pytest.mark.parametrize("limit", [None, 200 * MIB])
def test_a_new_block_has_those_that_are_there_not_counted_again(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    """Else a tree of thousands of arrays would take a time that grows with the square of their number."""
    device = Device()
    allocate = device.alloc_device

    def counted(nbytes: int) -> Slab:
        block = allocate(nbytes)
        block.nbytes = Counted(block.nbytes)
        return block

    monkeypatch.setattr(device, "alloc_device", counted)
    monkeypatch.setattr(Counted, "additions", 0)
    blocks = cache(device, limit)
    leases = [blocks.lease(MIB, {}) for _ in range(100)]
    assert Counted.additions < 5 * len(leases)
    assert blocks.peak_nbytes == blocks.nbytes == 100 * MIB
    leases.clear()
    blocks.trim()
    leases = [blocks.lease(2 * MIB, {}) for _ in range(60)]
    assert (blocks.peak_nbytes, blocks.nbytes) == (120 * MIB, 120 * MIB)


def test_a_block_whose_entry_is_cut_short_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and idle: the limit has room for one less."""
    device = Device()
    blocks = cache(device, 3 * MIB)
    lease = blocks.lease(MIB, {})
    allocate = device.alloc_device

    class Cut(int):
        def __radd__(self, other: int) -> int:
            monkeypatch.setattr(device, "alloc_device", allocate)
            device.made[-1].nbytes = blocks._rows[max(blocks._rows)].nbytes = MIB
            raise KeyboardInterrupt

    def cut(nbytes: int) -> Slab:
        block = allocate(nbytes)
        block.nbytes = Cut(nbytes)
        return block

    monkeypatch.setattr(device, "alloc_device", cut)
    with pytest.raises(KeyboardInterrupt):
        blocks.lease(MIB, {})
    assert blocks.nbytes == 2 * MIB
    others = [blocks.lease(MIB, {}) for _ in range(2)]
    assert (blocks.nbytes, blocks.peak_nbytes, len(device.made)) == (3 * MIB, 3 * MIB, 3)
    with pytest.raises(AllocationError):
        blocks.lease(MIB, {})
    del lease, others


def test_blocks_that_other_threads_free_and_take_are_counted_exactly() -> None:
    """Sizes that push each other out, at a limit that is always reached: one block too many would be over it."""
    device = Device()
    blocks = cache(device, 8 * MIB)

    def work(nbytes: int) -> None:
        for number in range(150):
            lease = blocks.lease(nbytes, {})
            del lease
            if number % 8 == 0:
                blocks.trim()

    for future in [on_thread(partial(work, nbytes)) for nbytes in (MIB, 2 * MIB, 3 * MIB)]:
        future.result(30)
    assert blocks.peak_nbytes <= 8 * MIB
    blocks.trim()
    assert blocks.nbytes == 0
    leases = [blocks.lease(MIB, {}) for _ in range(8)]
    assert blocks.nbytes == 8 * MIB
    with pytest.raises(AllocationError):
        blocks.lease(MIB, {})
    del leases
