"""`prefetch`: order, back-pressure, whose stream waits, and how it ends."""

from __future__ import annotations

import gc
import signal
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import held, on_thread, succeeds
from tests.pipeline.steps import PATIENCE, Source, batch, h2d, number_of, part, thread_of, until
from xferlib.pipeline import background


def test_batches_come_in_order_the_last_one_smaller_and_may_be_kept(stager: xferlib.Stager) -> None:
    source = [batch(0), batch(1), batch(2), batch(3, rows=1)]
    kept = list(xferlib.prefetch(source, stager))
    assert [number_of(tree) for tree in kept] == [0, 1, 2, 3]
    assert kept[-1]["x"].shape == (1, 8)


def test_the_source_is_iterated_on_a_thread_of_its_own_with_a_name(stager: xferlib.Stager) -> None:
    source = Source(3)
    list(xferlib.prefetch(source, stager))
    assert source.thread is not None
    assert source.thread is not threading.current_thread()
    assert source.thread.name.startswith("xferlib-prefetch")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_source_is_asked_for_no_more_than_depth_batches_ahead(stager: xferlib.Stager, depth: int) -> None:
    source = Source(9)
    with xferlib.prefetch(source, stager, depth) as batches:
        until(lambda: source.asked == depth and part(batches) == "place")
        next(batches)
        until(lambda: source.asked == depth + 1 and part(batches) == "place")


def test_a_consumer_that_never_waits_has_no_more_than_depth_copies_under_way(stager: xferlib.Stager) -> None:
    source = Source(9)
    with Stream() as stream, held(h2d(stager)) as gate, xferlib.prefetch(source, stager, 2, rewrites=False) as batches:
        next(batches)
        next(batches)
        until(lambda: part(batches) == "copy")
        assert source.asked == 3
        gate.set()
        assert [number_of(stager.get(tree).result()) for tree in batches] == [2, 3, 4, 5, 6, 7, 8]
    stream.close()


def test_a_copy_is_started_when_the_oldest_is_done_though_a_later_one_is_not(stager: xferlib.Stager) -> None:
    source = Source(3, stop_at=1)
    with xferlib.prefetch(source, stager, 2, rewrites=False) as batches:
        assert number_of(stager.get(next(batches)).result()) == 0
        with held(h2d(stager)):
            source.gate.set()
            until(lambda: batches._background.ahead == 2)
            assert not any(transfer.done() for transfer in batches._background._shared.items)


def test_the_consumers_stream_waits_for_the_copy_and_the_consumer_does_not(stager: xferlib.Stager) -> None:
    seen = []
    with Stream() as stream, held(h2d(stager)) as gate:
        batches = xferlib.prefetch([batch(7)], stager)
        tree = next(batches)
        stream.submit(lambda: seen.append(number_of(tree)))
        assert seen == []
        assert not gate.is_set()
        gate.set()
        stream.synchronize()
        assert seen == [7]
        batches.close()
    stream.close()


def test_batches_are_put_while_the_consumers_work_is_held(stager: xferlib.Stager) -> None:
    gate = threading.Event()
    with Stream() as stream, xferlib.prefetch(Source(9), stager, 2) as batches:
        tree = next(batches)
        stream.submit(lambda: gate.wait(PATIENCE))
        stream.submit(lambda: number_of(tree))
        until(lambda: part(batches) == "place")
        until(lambda: all(transfer.done() for transfer in batches._starter._recent))
        assert not gate.is_set()
        gate.set()
    stream.close()


def failing_source(after: int, error: BaseException) -> Iterator[dict[str, Any]]:
    for number in range(after):
        yield batch(number)
    raise error


@pytest.mark.parametrize("error", [KeyError("source"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_what_the_source_raises_comes_behind_its_batches_with_its_traceback(stager: xferlib.Stager, error: BaseException) -> None:
    batches = xferlib.prefetch(failing_source(3, error), stager)
    assert [number_of(next(batches)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(type(error)) as caught:
        next(batches)
    assert caught.value is error
    assert "failing_source" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    # A generator that raised has ended; what is not meant for the program closes the loop.
    for _ in range(2):
        with pytest.raises(StopIteration if isinstance(error, Exception) else xferlib.ClosedError):
            next(batches)
    assert not thread_of(batches).is_alive()


def test_leaving_the_loop_early_ends_the_thread_and_closes_the_generator(stager: xferlib.Stager) -> None:
    source = Source(1000)
    generator = iter(source)
    for tree in xferlib.prefetch(generator, stager):
        if number_of(tree) == 3:
            break
    assert source.thread is not None
    source.thread.join(PATIENCE)
    assert not source.thread.is_alive()
    assert source.closed.is_set()


def test_the_thread_does_not_keep_the_iterator_alive(stager: xferlib.Stager) -> None:
    source = Source(9, stop_at=1)
    batches = xferlib.prefetch(source, stager)
    assert source.stopped.wait(PATIENCE)
    alive, thread = weakref.ref(batches), thread_of(batches)
    gc.disable()
    try:
        del batches
        assert alive() is None
    finally:
        gc.enable()
    source.gate.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert source.asked == 2


def test_dropping_in_a_reference_cycle_ends_the_thread(stager: xferlib.Stager) -> None:
    batches = xferlib.prefetch(Source(1000), stager)
    thread = thread_of(batches)
    cycle: list[Any] = [batches]
    cycle.append(cycle)
    del batches, cycle
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_close_returns_when_nothing_is_in_flight(stager: xferlib.Stager) -> None:
    with held(h2d(stager)) as gate:
        batches = xferlib.prefetch(Source(9), stager)
        until(lambda: part(batches) == "place")
        closed = on_thread(batches.close)
        until(lambda: not thread_of(batches).is_alive())
        assert not closed.done()
        gate.set()
        closed.result(PATIENCE)
    assert all(transfer.done() for transfer in batches._starter._recent)
    batches.close()


def test_the_end_of_the_source_leaves_no_thread(stager: xferlib.Stager) -> None:
    batches = xferlib.prefetch(Source(3), stager)
    list(batches)
    assert not thread_of(batches).is_alive()


def test_close_does_not_wait_for_ever_for_a_source_that_is_stuck(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.05)
    source = Source(9, stop_at=1)
    batches = xferlib.prefetch(iter(source), stager)
    assert source.stopped.wait(PATIENCE)
    with pytest.warns(ResourceWarning, match="did not come back") as told:
        batches.close()
    assert told[0].filename == __file__
    # Such as the end of a `with` block, behind an interrupt: it would wait for nothing.
    with monkeypatch.context() as patches:
        patches.setattr(background.BackgroundIterator, "_join", lambda _: pytest.fail("it waits again"))
        batches.close()
    moved = stager.stats().h2d_nbytes
    source.gate.set()
    thread_of(batches).join(PATIENCE)
    assert not thread_of(batches).is_alive()
    assert source.closed.is_set()
    assert stager.stats().h2d_nbytes == moved


def test_rewrites_is_yes_or_no(stager: xferlib.Stager) -> None:
    with pytest.raises(TypeError, match="rewrites='no': expected True or False"):
        xferlib.prefetch([np.ones(3)], stager, rewrites="no")  # type: ignore[call-overload]


def test_ctrl_c_while_the_consumer_waits_ends_the_loop(stager: xferlib.Stager) -> None:
    source = Source(9, stop_at=0)
    batches = xferlib.prefetch(source, stager)

    def interrupt() -> None:
        until(lambda: batches._background._shared.takers)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        # Only now, so that the consumer does wait.
        source.gate.set()

    interrupted = on_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    interrupted.result(PATIENCE)
    assert not thread_of(batches).is_alive()


def test_another_thread_that_waits_is_woken_by_close(stager: xferlib.Stager) -> None:
    source = Source(9, stop_at=0)
    batches = xferlib.prefetch(source, stager)
    taken = on_thread(lambda: list(batches))
    until(lambda: batches._background._shared.takers)
    closing = on_thread(batches.close)
    with pytest.raises(xferlib.ClosedError, match="before its end"):
        taken.result(PATIENCE)
    assert not source.gate.is_set()
    source.gate.set()
    closing.result(PATIENCE)


def numbers_of(batches: Iterator[Any]) -> list[int]:
    return [number_of(tree) for tree in batches]


def test_two_consumers_share_the_batches(stager: xferlib.Stager) -> None:
    batches = xferlib.prefetch(Source(50), stager)
    # Begun before either takes: one may be through with all of them before the other thread has started.
    begun = [iter(batches) for _ in range(2)]
    halves = [on_thread(partial(numbers_of, mine)) for mine in begun]
    taken = [half.result(PATIENCE) for half in halves]
    assert sorted(taken[0] + taken[1]) == list(range(50))


def rewriting(array: np.ndarray, asked: list[int]) -> Iterator[np.ndarray]:
    for number in range(5):
        asked.append(number)
        array[:] = number
        yield array


@pytest.mark.parametrize("depth", [1, 3])
def test_a_source_that_rewrites_pinned_memory_is_asked_only_when_the_copy_is_done(stager: xferlib.Stager, depth: int) -> None:
    asked: list[int] = []
    with Stream() as stream, held(h2d(stager)) as gate:
        batches = xferlib.prefetch(rewriting(stager.empty_pinned(1000, np.int32), asked), stager, depth)
        first = next(batches)
        until(lambda: part(batches) == "read")
        assert asked == [0]
        gate.set()
        kept = [first, *batches]
        stream.synchronize()
    stream.close()
    assert [set(tree.tolist()) for tree in kept] == [{0}, {1}, {2}, {3}, {4}]


def test_one_pinned_array_among_others_is_enough_for_the_source_to_wait(stager: xferlib.Stager) -> None:
    asked: list[int] = []
    ordinary = np.zeros(3)
    with held(h2d(stager)) as gate:
        source = ([ordinary, array] for array in rewriting(stager.empty_pinned(1000, np.int32), asked))
        batches = xferlib.prefetch(source, stager, 3)
        until(lambda: part(batches) == "read")
        assert asked == [0]
        gate.set()
        kept = list(batches)
    assert [set(tree[1].tolist()) for tree in kept] == [{0}, {1}, {2}, {3}, {4}]


def test_a_source_that_promises_not_to_rewrite_is_asked_at_once(stager: xferlib.Stager) -> None:
    slots = [stager.empty_pinned(1000, np.int32) for _ in range(4)]
    for number, slot in enumerate(slots):
        slot[:] = number
    with held(h2d(stager)) as gate:
        batches = xferlib.prefetch(slots, stager, 3, rewrites=False)
        until(lambda: part(batches) == "place" and len(batches._starter._recent) == 3)
        gate.set()
    assert [int(tree[-1]) for tree in batches] == [0, 1, 2, 3]


def test_ordinary_memory_is_lent_only_where_the_source_does_not_rewrite_it(stager: xferlib.Stager) -> None:
    large = [np.full(3 << 20, number, np.uint8) for number in range(3)]
    # Nobody who could be warned waits for the CPU copies.
    assert [int(tree[-1]) for tree in xferlib.prefetch(large, stager)] == [0, 1, 2]
    copied = stager.stats().synchronous
    assert [int(tree[-1]) for tree in xferlib.prefetch(large, stager, rewrites=False)] == [0, 1, 2]
    assert stager.stats().synchronous == copied


def test_a_depth_that_the_device_has_no_room_for_is_refused_before_anything_is_put() -> None:
    nbytes = 64 << 10
    with xferlib.stager("host", device_limit=5 * nbytes) as stager:
        source = [np.full(nbytes, number, np.uint8) for number in range(12)]
        with xferlib.prefetch(source, stager, 6) as batches:
            expected = (
                r"depth=6 needs 512\.0 KiB of device memory, 8 x 64\.0 KiB batches, more than device_limit=327680 \(320\.0 KiB\)"
            )
            for _ in range(2):
                with pytest.raises(
                    xferlib.AllocationError, match=rf"{expected}\. Use depth=3, raise device_limit, or make smaller"
                ):
                    next(batches)
            assert batches.bill.device_nbytes == 8 * nbytes
        assert stager.stats().device_peak_nbytes == stager.stats().h2d_nbytes == 0
        # What it advises does.
        assert [int(tree[-1]) for tree in xferlib.prefetch(source, stager, 3)] == list(range(12))
        assert stager.stats().device_peak_nbytes <= 5 * nbytes == stager.stats().device_limit_nbytes


@pytest.mark.parametrize("count", [1, 2, 3])
def test_batches_that_all_have_room_are_refused_at_no_depth(count: int) -> None:
    nbytes = 64 << 10
    with xferlib.stager("host", device_limit=count * nbytes) as stager:
        source = [np.full(nbytes, number, np.uint8) for number in range(count)]
        kept = list(xferlib.prefetch(source, stager, 9))
        assert [int(tree[-1]) for tree in kept] == list(range(count))


def test_batches_of_which_no_depth_has_room_are_refused_without_naming_one() -> None:
    # What is allocated for it is an eighth larger at most.
    tree = {"x": np.zeros((64 << 10) + 1, np.uint8), "y": np.zeros(1), "name": "text"}
    with xferlib.stager("host", device_limit=180_000) as stager:
        batches = xferlib.prefetch([tree] * 3, stager, 1)
        with pytest.raises(xferlib.AllocationError, match=r"3 x 72\.2 KiB .* KiB\)\. Raise device_limit, or make smaller batches"):
            next(batches)


def test_a_slot_that_there_is_no_room_for_goes_back_to_its_ring() -> None:
    with xferlib.stager("host", device_limit=64 << 10) as stager, xferlib.Ring(stager, (64 << 10, np.uint8), slots=1) as ring:
        for _ in range(2):
            with (
                xferlib.prefetch((ring.acquire() for _ in range(1)), stager) as batches,
                pytest.raises(xferlib.AllocationError, match="depth=2 needs") as raised,
            ):
                next(batches)
            # What the loop has is said already.
            assert not any("depth=2" in note for note in raised.value.__notes__)


def test_a_consumer_that_keeps_more_than_the_device_holds_is_told_in_place() -> None:
    nbytes = 64 << 10
    with xferlib.stager("host", device_limit=4 * nbytes) as small:
        source = [np.full(nbytes, number, np.uint8) for number in range(9)]
        batches = xferlib.prefetch(source, small, 2, rewrites=False)
        kept = [next(batches) for _ in range(4)]
        with pytest.raises(xferlib.AllocationError, match="device memory is full") as raised:
            next(batches)
        assert any("depth=2 has up to 4 batches on the device" in note for note in raised.value.__notes__)
        assert [int(tree[-1]) for tree in kept] == [0, 1, 2, 3]
        del kept
        assert [int(tree[-1]) for tree in batches] == [5, 6, 7, 8]


def test_the_bill_is_known_before_the_consumer_begins(stager: xferlib.Stager) -> None:
    with xferlib.prefetch([stager.empty_pinned(1 << 20, np.uint8)] * 4, stager, 2) as batches:
        bill = batches.bill
    assert bill.device_nbytes == 4 << 20
    assert bill.pinned_nbytes == 3 << 20
    assert str(bill) == "3.0 MiB pinned: 3 x 1.0 MiB batches of the source's own\n4.0 MiB device: 4 x 1.0 MiB batches"
    assert str(xferlib.prefetch([], stager).bill) == "nothing"
    with xferlib.prefetch([stager.empty_pinned(1 << 20, np.uint8)] * 2, stager, 4) as batches:
        assert batches.bill.pinned_nbytes == 2 << 20


def test_who_asks_for_the_bill_waits_for_the_first_batch(stager: xferlib.Stager) -> None:
    source = Source(2, stop_at=0)
    with xferlib.prefetch(source, stager, 2) as batches:
        assert source.stopped.wait(PATIENCE)
        changed = batches._background._shared.changed
        before = len(changed._sleepers)
        asking = on_thread(lambda: batches.bill)
        until(lambda: len(changed._sleepers) > before or asking.done())
        source.gate.set()
        assert asking.result(PATIENCE).device_nbytes == 4 * sum(leaf.nbytes for leaf in batch(0).values())


def test_the_interpreter_exits_while_a_source_is_stuck() -> None:
    shown = succeeds(
        """
        import threading, numpy as np, xferlib
        def source():
            yield np.zeros(4)
            threading.Event().wait()
        stager = xferlib.stager("host")
        batches = xferlib.prefetch(source(), stager)
        next(batches)
        stager.close()
        print("end")
        """
    )
    assert shown == "end\n"


def test_a_forked_child_is_told_that_it_has_no_thread() -> None:
    shown = succeeds(
        """
        import os, numpy as np, xferlib
        with xferlib.stager("host") as stager:
            batches = xferlib.prefetch([np.zeros(4)] * 9, stager)
            next(batches)
            child = os.fork()
            if child == 0:
                try:
                    next(batches)
                except xferlib.BackendUnavailableError as error:
                    print("forked" in str(error), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            print(len(list(batches)))
        """
    )
    assert shown == "True\n8\n"


def test_a_source_says_itself_whether_it_rewrites_its_batches(stager: xferlib.Stager) -> None:
    class Prepared(list[Any]):
        rewrites = False

    slots = Prepared(stager.empty_pinned(1000, np.int32) for _ in range(4))
    for number, slot in enumerate(slots):
        slot[:] = number
    with held(h2d(stager)) as gate:
        batches = xferlib.prefetch(slots, stager, 3)
        until(lambda: part(batches) == "place" and len(batches._starter._recent) == 3)
        gate.set()
    assert [int(tree[-1]) for tree in batches] == [0, 1, 2, 3]


class Sized(list[Any]):
    """Batches, and what `len` says, or raises, of them."""

    def __init__(self, count: int, says: int | Exception) -> None:
        super().__init__(np.full(1 << 18, number, np.int32) for number in range(count))
        self.says = says

    def __len__(self) -> int:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@pytest.mark.parametrize(
    ("says", "depth"), [(3, 3), (0, 1), (1, 1), (500, 50), (TypeError("no length"), 50), (NotImplementedError(), 50)], ids=str
)
def test_depth_is_no_more_than_there_are_batches_where_that_is_known(
    stager: xferlib.Stager, says: int | Exception, depth: int
) -> None:
    with xferlib.prefetch(Sized(3, says), stager, depth=50) as batches:
        assert repr(batches).endswith(f" ahead of {depth}>")
        assert batches.bill.device_nbytes == (52 if isinstance(says, Exception) else min(depth + 2, max(1, says))) << 20
        # Whatever it says, all of them come.
        with pytest.warns(RuntimeWarning, match="it gives more batches") if says in (0, 1) else nullcontext():
            assert [int(batch[0]) for batch in batches] == [0, 1, 2]


def test_a_depth_of_none_is_refused_of_a_source_without_batches_too(stager: xferlib.Stager) -> None:
    with pytest.raises(ValueError, match="depth=0"):
        xferlib.prefetch([], stager, depth=0)


@pytest.mark.parametrize("depth", ["2", None, 1.5, True])
def test_a_depth_that_is_no_whole_number_is_refused_in_words(stager: xferlib.Stager, depth: Any) -> None:
    for begin in (
        lambda: xferlib.prefetch([np.ones(3)], stager, depth=depth),
        lambda: xferlib.drain([], stager, depth=depth),
        lambda: xferlib.stream_map(lambda batch: batch, [np.ones(3)], stager, depth=depth),
    ):
        with pytest.raises(TypeError, match=f"depth={depth!r}: expected a whole number"):
            begin()


def test_every_epoch_uses_the_memory_of_those_before(stager: xferlib.Stager) -> None:
    source = [np.full(4 << 20, number, np.uint8) for number in range(6)]
    for _ in range(8):
        with xferlib.prefetch(source, stager, rewrites=False) as loop:
            assert [int(batch[-1]) for batch in loop] == list(range(6))
            assert stager.stats().device_peak_nbytes <= loop.bill.device_nbytes


def test_what_is_raised_while_a_loop_waits_has_nothing_before_it(stager: xferlib.Stager) -> None:
    """An interrupt of the wait is no consequence of an empty queue, and is not told as one."""
    ready, gate, main = threading.Event(), threading.Event(), threading.get_ident()

    def source() -> Iterator[np.ndarray[Any, Any]]:
        ready.wait(PATIENCE)
        while not gate.wait(0.01):
            signal.pthread_kill(main, signal.SIGINT)
        yield np.zeros(3)

    def hear(*_: object) -> None:
        if not gate.is_set():
            gate.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    try:
        with xferlib.prefetch(source(), stager) as batches:
            with pytest.raises(KeyboardInterrupt) as raised:
                ready.set()
                next(batches)
            assert raised.value.__context__ is None
    finally:
        signal.signal(signal.SIGINT, before)
