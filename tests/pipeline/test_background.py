"""The thread of a `BackgroundIterator` and whoever takes from it: what they tell each other, and how it ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

import xferlib
from tests.core.fakes import always_raises, on_thread
from tests.pipeline.failing import Lost
from tests.pipeline.steps import PATIENCE, PutBy, batch, thread_of, until
from xferlib import uninterrupted
from xferlib.pipeline import background, source_thread
from xferlib.pipeline.phase_timer import PhaseTimer


def test_a_stager_that_closes_waits_for_a_put_that_a_dropped_iterator_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_thread, "LET_GO_SECONDS", PATIENCE)
    inside, gate, put = threading.Event(), threading.Event(), threading.Event()

    def slow_put(tree: Any) -> xferlib.Transfer:
        inside.set()
        assert gate.wait(PATIENCE)
        transfer = stager.put(tree)
        put.set()
        return transfer

    with xferlib.stager("host") as stager:
        batches = xferlib.Prefetch([batch(0)], PutBy(slow_put))
        thread = thread_of(batches)
        assert inside.wait(PATIENCE)
        shared = batches._background._shared
        # Waits for nothing: it may be the collector that drops it, anywhere.
        del batches
        assert shared.stopping
        closing = on_thread(stager.close)
        until(lambda: shared.changed._sleepers or closing.done())
        assert not closing.done()
        gate.set()
        closing.result(PATIENCE)
        assert put.is_set()
        assert not thread.is_alive()


def test_what_the_two_sides_tell_each_other_does_not_pile_up() -> None:
    asked = threading.Semaphore(0)

    def slow() -> Iterator[int]:
        """Give an item when it is wanted, so that the thread never waits for a place."""
        for number in range(100):
            assert asked.acquire(timeout=PATIENCE)
            yield number

    shared = background.BackgroundIterator(slow(), lambda box, clock: box[0], depth=1000)
    for number in range(100):
        asked.release()
        assert shared.take() == number
        assert shared._shared.inbox.qsize() <= 8
        assert len(shared._shared.changed._sleepers) <= 2
    shared.close()


def test_where_python_starts_no_threads_since_the_program_ends_a_loop_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Python 3.12 does in handlers of `atexit`."""
    refuse = always_raises(RuntimeError, "can't create new thread at interpreter shutdown")
    with xferlib.stager("host") as stager:
        with monkeypatch.context() as ended:
            ended.setattr(threading.Thread, "start", refuse)
            ended.setattr(uninterrupted, "start_new_thread", refuse)
            batches = xferlib.prefetch([batch(0)], stager)
            with pytest.raises(xferlib.XferError, match=r"the program ends, .* with stager\.put") as told:
                next(batches)
            assert "interpreter shutdown" in str(told.value.__cause__)
            # What it says to do.
            assert (stager.put(batch(3)).result()["x"] == 3).all()
        with pytest.raises(StopIteration):
            next(batches)


def test_a_thread_whose_taker_is_behind_uses_no_processor() -> None:
    items = background.BackgroundIterator(range(9), lambda box, clock: box[0], depth=1)
    until(lambda: items.ahead == 1 and items.clock.phase == "place")
    assert items._thread.ident is not None
    used = time.pthread_getcpuclockid(items._thread.ident)
    before, mine = time.clock_gettime(used), time.thread_time()
    while time.thread_time() - mine < 0.1:
        # It would get about as much, were it to look again and again.
        pass
    assert time.clock_gettime(used) - before < 0.02
    items.close()


def test_two_takers_of_an_iterator_both_hear_of_its_end() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        assert gate.wait(PATIENCE)

    shared = background.BackgroundIterator(source(), lambda box, clock: box[0], depth=1)
    assert shared.take() == 1
    both = [on_thread(lambda: list(iter(shared.take, None))) for _ in range(2)]
    until(lambda: len(shared._shared.takers) == 2)
    gate.set()
    for taker in both:
        assert taker.result(PATIENCE) == []


@pytest.mark.parametrize("asks", [next, lambda loop: loop.bill], ids=["next", "bill"])
def test_a_source_that_waits_for_its_own_loop_is_told_so(stager: xferlib.Stager, asks: Callable[[Any], object]) -> None:
    made: list[xferlib.Prefetch[Any]] = []
    gate = threading.Event()

    def source() -> Iterator[Any]:
        assert gate.wait(PATIENCE)
        asks(made[0])
        yield batch(0)

    with xferlib.prefetch(source(), stager) as loop:
        made.append(loop)
        gate.set()
        with pytest.raises(xferlib.XferError, match="asks its own loop"):
            on_thread(lambda: next(loop)).result(PATIENCE)


def test_an_item_that_comes_with_the_end_between_two_looks_of_a_taker_is_not_lost() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        assert gate.wait(PATIENCE)
        yield 1

    class Raced(deque[Any]):
        """Finds nothing, and before it can say so the thread has given its last item and ended."""

        def popleft(self) -> Any:
            try:
                return super().popleft()
            except IndexError:
                if not gate.is_set():
                    gate.set()
                    until(lambda: items._shared.ended)
                raise

    items = background.BackgroundIterator(source(), lambda box, clock: box[0], depth=2)
    items._shared.items = Raced()
    assert items.take() == 1
    with pytest.raises(StopIteration):
        items.take()
    items.close()


def test_an_item_that_is_started_behind_a_close_that_could_not_wait_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.05)
    inside, gate = threading.Event(), threading.Event()

    def start(box: list[object], clock: PhaseTimer) -> object:
        inside.set()
        assert gate.wait(PATIENCE)
        return box[0]

    items = background.BackgroundIterator([object()], start, depth=1)
    assert inside.wait(PATIENCE)
    items.close()
    gate.set()
    until(lambda: items._shared.ended)
    assert not items._shared.items


def test_who_waits_until_nothing_is_started_is_woken_where_a_start_fails() -> None:
    inside, gate = threading.Event(), threading.Event()

    def start(box: list[int], clock: PhaseTimer) -> int:
        if box == [1]:
            inside.set()
            assert gate.wait(PATIENCE)
            raise xferlib.AllocationError("full")
        return box[0]

    items = background.BackgroundIterator(range(2), start, depth=2)
    assert inside.wait(PATIENCE)
    pausing = on_thread(items.pause)
    until(lambda: items._shared.changed._sleepers or pausing.done())
    assert not pausing.done()
    gate.set()
    pausing.result(PATIENCE)
    items.close()


def test_an_iterator_that_is_made_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[tuple[threading.Thread, Any]] = []
    monkeypatch.setattr(background, "start_thread", lambda *start: wanted.append(start))
    making = on_thread(lambda: background.BackgroundIterator(range(1), lambda box, clock: box[0], depth=1))
    until(lambda: wanted and (wanted[0][1].__self__.changed._sleepers or making.done()))
    assert not making.done()
    wanted[0][0].start()
    assert making.result(PATIENCE).take() == 0
    making.result().close()


def test_a_thread_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", always_raises(RuntimeError, "can't start new thread"))
        items = background.BackgroundIterator(range(1), lambda box, clock: box[0], depth=1)
    with pytest.raises(RuntimeError, match="can't start"):
        items.take()
    with pytest.raises(StopIteration):
        items.take()
    items.close()


@pytest.mark.parametrize("first", ["it runs", "it is refused"])
def test_a_thread_that_runs_although_it_was_refused_gives_all_or_nothing(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Python takes memory behind the start of a thread, too."""
    start, asked = threading.Thread.start, threading.Event()

    def source() -> Iterator[int]:
        asked.set()
        yield from range(3)

    def started_and_refused(thread: threading.Thread) -> NoReturn:
        if first == "it runs":
            start(thread)
            assert asked.wait(PATIENCE)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", started_and_refused)
        items = background.BackgroundIterator(source(), lambda box, clock: box[0], depth=1)
        if first == "it is refused":
            until(lambda: items._shared.ended)
    if first == "it runs":
        assert list(iter(items.take, None)) == [0, 1, 2]
    else:
        items._thread.start()
        items._thread.join(PATIENCE)
        with pytest.raises(MemoryError):
            items.take()
        with pytest.raises(StopIteration):
            items.take()
        assert not asked.is_set()
    items.close()


def test_an_error_that_was_told_is_held_by_nobody() -> None:
    def source() -> Iterator[int]:
        raise Lost
        yield 1

    items = background.BackgroundIterator(source(), lambda box, clock: box[0], depth=1)
    gc.disable()
    try:
        items.take()
    except Lost as error:
        held = weakref.ref(error)
    finally:
        gc.enable()
    assert held() is None
    items.close()


def test_the_thread_keeps_no_item_while_the_source_makes_the_next() -> None:
    """A batch may be as large as memory allows."""

    class Batch:
        """Something that one can see the end of."""

    waiting, gate = threading.Event(), threading.Event()
    kept: list[weakref.ref[Batch]] = []

    def made() -> Batch:
        batch = Batch()
        kept.append(weakref.ref(batch))
        return batch

    def source() -> Iterator[Batch]:
        yield made()
        waiting.set()
        assert gate.wait(PATIENCE)

    items = background.BackgroundIterator(source(), lambda box, clock: "started", depth=1)
    assert items.take() == "started"
    assert waiting.wait(PATIENCE)
    assert kept[0]() is None
    gate.set()
    items.close()
