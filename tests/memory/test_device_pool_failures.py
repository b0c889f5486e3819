"""Device blocks where calls are refused or interrupted, in finalizers, after close and in forked children: the account is right."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import WATCHDOG, Device, Idle, Point, held, on_thread, until
from xferlib.errors import AllocationError
from xferlib.memory.device_pool import DevicePool
from xferlib.memory.idle_blocks import BlockRow
from xferlib.memory.table import Growth
from xferlib.protocol import Stream

MIB = 1 << 20


def cache(device: Device, limit: int | None = None) -> DevicePool:
    return DevicePool(device, Idle(), limit)  # type: ignore[arg-type]  # only the part that hands out memory is played


def leave_idle(blocks: DevicePool, device: Device, *fences: Point, nbytes: int = MIB) -> list[int]:
    """Leave blocks idle, each behind its fence, and return their addresses."""
    leases = [blocks.lease(nbytes, {}) for _ in fences]
    device.fences = [*fences]
    addresses = []
    for _ in fences:
        addresses.append(leases.pop(0)[0].address)
        # Those that come back together have one fence.
        blocks._step(bool)
    return addresses


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


class Slow(Point):
    """Waits for a gate, and says when somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.entered.set()
        assert self.gate.wait(WATCHDOG)
        super().synchronize()


def interrupted_while_it_waits(call: Callable[[], object], slow: Slow) -> None:
    """Interrupt a call of the main thread, by a signal, while another thread waits for it."""

    def send() -> None:
        assert slow.entered.wait(WATCHDOG)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sending = on_thread(send)
    with pytest.raises(KeyboardInterrupt):
        call()
    sending.result(WATCHDOG)


@pytest.mark.parametrize("call", ["trim", "lease"])
def test_an_interrupt_ends_the_wait_for_readers_and_the_blocks_are_freed_all_the_same(call: str) -> None:
    device = Device()
    blocks = cache(device, 4 * MIB)
    slow = Slow()
    leave_idle(blocks, device, slow, Point(), Point(), Point())
    interrupted_while_it_waits(blocks.trim if call == "trim" else lambda: blocks.lease(4 * MIB, {}), slow)
    assert device.freed == []
    slow.gate.set()
    assert until(lambda: blocks.nbytes == 0)
    assert device.freed == device.made[:4]
    assert blocks.lease(4 * MIB, {})[0].nbytes == 4 * MIB


def test_a_new_block_for_which_nobody_waits_any_more_stays_behind_its_fence() -> None:
    """The framework may still be reading it, and whoever leases it next is told."""
    slow = Slow()
    asking: list[threading.Thread] = []

    class Late(Device):
        def alloc_device(self, nbytes: int) -> Any:
            asking.append(threading.current_thread())
            slow.synchronize()
            return super().alloc_device(nbytes)

    device = Late()
    device.fresh_is_ready = False
    blocks = cache(device, MIB)
    interrupted_while_it_waits(lambda: blocks.lease(MIB, {}), slow)
    slow.gate.set()
    asking[0].join(WATCHDOG)
    assert device.ordered == []
    ready: Any = device.made[0].ready
    blocks.trim()
    assert ready.synchronized == 1
    assert device.freed == device.made
    assert blocks.nbytes == 0


def test_new_blocks_that_the_copies_cannot_wait_for_are_not_lost() -> None:
    device = Device()
    device.fresh_is_ready = False
    blocks = cache(device, 4 * MIB)
    device.order_error = OSError("no")
    with pytest.raises(OSError, match="no"):
        blocks.lease_at_once([MIB, MIB, 2 * MIB], {})
    device.order_error = None
    assert blocks.nbytes == blocks.peak_nbytes == 4 * MIB
    leases = blocks.lease_at_once([MIB, MIB, 2 * MIB], {})
    # Each is there again, behind its own fence.
    assert {id(block) for block, _ in leases} == set(map(id, device.made))
    assert sorted(map(id, device.ordered)) == sorted(id(block.ready) for block, _ in leases)


@pytest.mark.parametrize("call", ["trim", "lease"])
def test_who_finds_no_room_waits_for_what_another_thread_frees_or_still_gets_for_nobody(call: str) -> None:
    slow = Slow()

    class Waits(Device):
        def alloc_device(self, nbytes: int) -> Any:
            if call == "lease" and not slow.entered.is_set():
                slow.synchronize()
            return super().alloc_device(nbytes)

    device = Waits()
    blocks = cache(device, 4 * MIB)
    if call == "trim":
        leave_idle(blocks, device, slow, Point())
    interrupted_while_it_waits(blocks.trim if call == "trim" else lambda: blocks.lease(4 * MIB, {}), slow)
    asking = on_thread(lambda: blocks.lease(4 * MIB, {}))
    with pytest.raises(TimeoutError):
        asking.result(0.2)
    slow.gate.set()
    assert asking.result(WATCHDOG)[0].nbytes == blocks.nbytes == 4 * MIB


def test_room_that_a_failed_allocation_leaves_behind_the_last_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    leases: list[Any] = []
    failing: list[Any] = []
    others: set[threading.Thread] = set()

    class Refuses(Device):
        def alloc_device(self, nbytes: int) -> Any:
            if threading.current_thread() in others:
                slow.synchronize()
                raise OSError("refused on purpose")
            return super().alloc_device(nbytes)

    class Late(Idle):
        def wait_for_device(self, owns: object) -> bool:
            for fails in failing:
                # Behind this one's look for room. What its error was raised through is still there, and so has not come back.
                slow.gate.set()
                with pytest.raises(AllocationError, match="refused on purpose"):
                    fails.result(WATCHDOG)
            return False

    def ask() -> Any:
        others.add(threading.current_thread())
        return blocks.lease(MIB, {})

    def collect() -> None:
        # Room for one, and another thread is faster.
        leases.clear()
        blocks.trim()
        failing.append(on_thread(ask))
        assert slow.entered.wait(WATCHDOG)

    monkeypatch.setattr("xferlib.memory.device_pool.gc", SimpleNamespace(collect=collect))
    blocks = DevicePool(Refuses(), Late(), MIB)  # type: ignore[arg-type]  # As above.
    leases.append(blocks.lease(MIB, {}))
    assert blocks.lease(MIB, {})[0].nbytes == blocks.nbytes == MIB
    assert len(failing) == 1


def test_a_finalizer_inside_the_freeing_does_not_wait_for_its_end() -> None:
    told: list[str] = []

    class Asks(Device):
        def free_device(self, block: Any) -> None:
            with pytest.raises(AllocationError) as caught:
                blocks.lease(4 * MIB, {})
            told.append(str(caught.value))
            super().free_device(block)

    device = Asks()
    blocks = cache(device, 4 * MIB)
    leave_idle(blocks, device, Point(reached=True))
    on_thread(blocks.trim).result(WATCHDOG)
    assert len(told) == 1
    assert blocks.nbytes == 0


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_ends_the_wait_for_new_memory_which_is_then_idle(fails: bool) -> None:
    slow = Slow()

    class Waits(Device):
        def alloc_device(self, nbytes: int) -> Any:
            slow.synchronize()
            return super().alloc_device(nbytes)

    device = Waits()
    blocks = cache(device, MIB)
    device.refusals = [OSError("full"), OSError("full")] if fails else []
    interrupted_while_it_waits(lambda: blocks.lease(MIB, {}), slow)
    assert blocks.nbytes == MIB
    slow.gate.set()
    assert until(lambda: not blocks._growing)
    assert blocks.nbytes == (0 if fails else MIB)
    assert blocks.lease(MIB, {})[0] is device.made[0]
    assert blocks.nbytes == MIB


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
    assert [lease[0].address for lease in leases] == addresses
    assert blocks.nbytes == 3 * MIB


def test_what_an_interrupt_has_kept_from_coming_back_comes_back_at_the_next_request_though_nothing_else_was_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    blocks = cache(device)
    leases = [blocks.lease(MIB, {})]
    leases.clear()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(blocks, "_take_back", lambda number, fences: interrupt())
        blocks.lease(MIB, {})
    # While the traceback lives, so does what the interrupted request was to get: that it is gone tells nobody to look.
    assert blocks.lease(MIB, {})[0] is device.made[0]
    assert len(device.made) == 1
    del caught


def test_a_trim_by_a_finalizer_inside_a_request_loses_no_block() -> None:
    device = Device()
    blocks = cache(device, 3 * MIB)
    addresses = leave_idle(blocks, device, Point(), Asked(blocks.trim), Point(reached=True))
    lease = blocks.lease(MIB, {})
    assert lease[0].address == addresses[2]
    assert blocks.nbytes == 3 * MIB
    blocks.trim()
    assert blocks.nbytes == MIB


def test_a_block_about_whose_readers_the_question_was_interrupted_is_asked_about_again() -> None:
    class Refuses(Device):
        def retire(self, streams: Iterable[Stream]) -> Point | None:
            if not asked:
                asked.append(None)
                raise KeyboardInterrupt
            return super().retire(streams)

    asked: list[None] = []
    device = Refuses()
    blocks = cache(device)
    streams = {7: Stream(7, "seven")}
    lease = [blocks.lease(MIB, streams)]
    lease.clear()
    device.fences = [Point()]
    with pytest.raises(KeyboardInterrupt):
        blocks.lease(MIB, {})
    assert blocks.lease(MIB, {})[0] is not device.made[0]
    assert device.retired[0] == [streams[7]]


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
    assert blocks.peak_nbytes == blocks.nbytes == first[0].nbytes
    second = blocks.lease(MIB, {})
    assert blocks.peak_nbytes == blocks.nbytes == 3 * MIB
    del second


def test_of_a_tree_s_blocks_those_before_the_first_that_is_refused_are_kept_and_the_others_do_not_count() -> None:
    device = Device()
    blocks = cache(device, 8 * MIB)
    device.refusals = [None, OSError("full"), OSError("still full")]
    with pytest.raises(AllocationError, match=r"no 2\.0 MiB left \(1\.0 MiB are taken by puts\): still full") as caught:
        blocks.lease_at_once([MIB, 2 * MIB, 4 * MIB], {})
    assert device.allocated == [MIB]
    assert blocks.nbytes == blocks.peak_nbytes == MIB
    del caught
    gc.collect()
    # All of the limit but this is there again.
    leases = blocks.lease_at_once([MIB, 7 * MIB], {})
    assert [block.nbytes for block, _ in leases] == [MIB, 7 * MIB]
    assert leases[0][0] is device.made[0]


def test_a_tree_s_new_blocks_count_for_the_peak_beside_what_is_freed_for_those_behind_them() -> None:
    device = Device()
    blocks = cache(device)
    leave_idle(blocks, device, Point(reached=True), nbytes=8 * MIB)
    there = blocks.nbytes
    device.refusals = [None, OSError("full")]
    assert len(blocks.lease_at_once([MIB, 2 * MIB], {})) == 2
    assert device.freed == device.made[:1]
    assert blocks.peak_nbytes == there + MIB


def test_a_table_that_is_mended_forgets_no_block_that_is_to_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    blocks = cache(device)
    leave_idle(blocks, device, Point(reached=True))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(blocks, "_free_doomed", interrupt)
        blocks.trim()
    # As an interrupt of another step leaves it.
    blocks._torn = True
    blocks.trim()
    assert device.freed == device.made
    assert blocks.nbytes == 0


def test_what_could_not_be_freed_after_close_is_looked_at_again() -> None:
    class Refuses(Device):
        refused = 0

        def sweep(self) -> None:
            if self.refused:
                self.refused -= 1
                raise OSError

    device = Refuses()
    blocks = cache(device)
    leave_idle(blocks, device, Point(reached=True))
    # So far it is known to nobody that the lease has ended.
    blocks._step(bool)
    device.refused = 1
    assert blocks.settle()
    assert device.freed == []
    assert not blocks.settle()
    assert device.freed == device.made


@pytest.mark.parametrize("streams", [{}, {7: Stream(7, "kept")}, {9: Stream(9, None)}])
def test_leases_that_end_after_close_are_freed_and_taken_off_the_account(streams: dict[int, Stream]) -> None:
    device = Device()
    blocks = cache(device)
    leases = [blocks.lease(MIB, streams), blocks.lease(2 * MIB, streams)]
    blocks.close()
    assert blocks.nbytes == 3 * MIB
    del leases[0]
    assert blocks.settle()
    assert blocks.nbytes == 2 * MIB
    leases.clear()
    assert not blocks.settle()
    assert blocks.nbytes == 0
    assert device.freed == device.made


@pytest.mark.parametrize("closed", [False, True])
def test_a_forked_child_frees_no_block_of_a_lease_that_has_ended_or_will(closed: bool) -> None:
    device = Device()
    blocks = cache(device)
    leases = [blocks.lease(MIB, {}), blocks.lease(MIB, {})]
    if closed:
        blocks.close()
    else:
        del leases[0]
    blocks.forget()
    leases.clear()
    blocks.settle()
    blocks.trim()
    assert device.freed == []


@pytest.mark.parametrize("state", ["idle", "to be freed"])
def test_a_forked_child_frees_no_block_that_was_not_leased(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    device = Device()
    blocks = cache(device)
    leave_idle(blocks, device, Point(reached=True))
    if state == "idle":
        # So far it is known to nobody that the lease has ended.
        blocks._step(bool)
    else:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(blocks, "_free_doomed", interrupt)
            blocks.trim()
    blocks.forget()
    blocks.settle()
    blocks.trim()
    assert device.freed == []


def test_a_block_whose_lease_ended_at_once_is_not_freed_while_a_copy_to_it_is_in_flight() -> None:
    with xferlib.stager("host") as stager:
        source = stager.empty_pinned(MIB, np.uint8)
        backend: Any = stager.backend
        with held(backend.h2d) as gate:
            stager.put(source)
            trimming = on_thread(stager.trim)
            until(lambda: trimming.done(), 0.1)
            assert backend.memory.calls().device_frees == 0
            gate.set()
            trimming.result(WATCHDOG)
        assert backend.memory.calls().device_frees == 1


def test_a_block_that_is_being_freed_is_not_freed_again_by_who_derives_anew_what_is_to_be_freed() -> None:
    slow = Slow()

    class Frees(Device):
        def free_device(self, block: Any) -> None:
            if not slow.entered.is_set():
                slow.synchronize()
            super().free_device(block)

    device = Frees()
    blocks = cache(device)
    leave_idle(blocks, device, Point(reached=True))
    trimming = on_thread(blocks.trim)
    assert slow.entered.wait(WATCHDOG)
    # An interrupted step: the next one looks at every block.
    leave_idle(blocks, device, Asked(interrupt), nbytes=2 * MIB)
    with pytest.raises(KeyboardInterrupt):
        blocks.lease(2 * MIB, {})
    on_thread(blocks.trim).result(WATCHDOG)
    slow.gate.set()
    trimming.result(WATCHDOG)
    assert sorted(map(id, device.freed)) == sorted(map(id, device.made))
    assert blocks.nbytes == 0


def test_a_block_that_is_entered_while_the_reaper_looks_is_looked_at_again() -> None:
    """As one that an interrupted put still allocated when its stager was closed."""
    blocks = cache(Device())
    blocks.close()
    blocks._growing[7] = Growth(MIB)

    class Entered(dict[int, BlockRow]):
        def __len__(self) -> int:
            seen = super().__len__()
            if blocks._growing.pop(7, None) is not None:
                self[7] = BlockRow(7, blocks._backend.alloc_device(MIB))
            return seen

    blocks._rows = Entered()
    assert blocks.settle()
