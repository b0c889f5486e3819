"""Device arrays read piece by piece: the right bytes, in a get's order, and held against whoever would overwrite them."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream, open_stager

import xferlib
from tests.children import run
from tests.core.fakes import held, interrupted_twice, on_thread, tampered, until
from xferlib.byte_reader import ByteReader, Span
from xferlib.latch import Latch, note_copy_thread
from xferlib.pending import Reading
from xferlib.protocol import DeviceRange
from xferlib.stager import Stager

TREE = {"a": np.arange(1000, dtype=np.float32).reshape(10, 100), "name": "rides along", "b": np.arange(7, dtype=np.uint8)}


def opened(stager: Stager, tree: Any = TREE) -> tuple[Any, ByteReader]:
    there = stager.put(tree).result()
    return there, stager.reader(there)


def test_it_reads_any_span_of_any_array(stager: Stager) -> None:
    _, reader = opened(stager)
    with reader:
        assert reader.described == [((10, 100), np.dtype(np.float32)), ((7,), np.dtype(np.uint8))]
        memory = reader.empty(200)
        found = reader.read([Span(0, 40, 60), Span(1, 2, 3)], memory).result()
        assert found[:60].view(np.float32).tolist() == list(range(10, 25))
        assert found[60:].tolist() == [2, 3, 4]
        assert reader.read([], memory).result().nbytes == 0
    assert not stager._ledger.jobs.readings


def test_a_closed_one_reads_no_more(stager: Stager) -> None:
    _, reader = opened(stager)
    memory = reader.empty(10)
    reader.close()
    reader.close()
    with pytest.raises(xferlib.ClosedError, match="Make another one"):
        reader.read([Span(1, 0, 1)], memory)


@pytest.mark.parametrize("tree", [[], {"name": "text"}])
def test_a_tree_without_arrays_is_refused(stager: Stager, tree: Any) -> None:
    with pytest.raises(ValueError, match="no array"):
        stager.reader(tree)


def test_what_is_no_device_array_is_refused(stager: Stager) -> None:
    with pytest.raises(TypeError, match=r"got builtins\.object, which is neither an array"):
        stager.reader({"a": object()})


def test_a_closed_stager_is_refused() -> None:
    stager = xferlib.stager("host")
    there = stager.put(TREE).result()
    stager.close()
    with pytest.raises(xferlib.ClosedError):
        stager.reader(there)


def test_a_put_into_what_is_being_read_waits(stager: Stager) -> None:
    there, reader = opened(stager)
    other, target = np.ones((10, 100), np.float32), there["a"]
    putting = on_thread(lambda: stager.put(other, into=target).result())
    tree_putting = on_thread(lambda: stager.put({"b": np.ones(7, np.uint8)}, into={"b": there["b"]}).result())
    time.sleep(0.05)
    assert not putting.done()
    assert not tree_putting.done()
    memory = reader.empty(4000)
    found = reader.read([Span(0, 0, 4000)], memory)
    reader.close()
    putting.result(20)
    tree_putting.result(20)
    assert found.result().view(np.float32).tolist() == list(range(1000))
    assert (target == 1).all()


def test_a_copy_that_was_started_is_waited_for_once_the_reader_is_closed(stager: Stager) -> None:
    backend: Any = stager.backend
    there, reader = opened(stager)
    memory = reader.empty(4000)
    with held(backend.d2h) as gate:
        found = reader.read([Span(0, 0, 4000)], memory)
        reader.close()
        putting = on_thread(lambda: stager.put(np.ones((10, 100), np.float32), into=there["a"]).result())
        time.sleep(0.05)
        assert not putting.done()
        gate.set()
    putting.result(20)
    assert found.result().view(np.float32).tolist() == list(range(1000))


def test_a_read_that_is_interrupted_and_interrupted_again_as_it_settles_is_waited_for() -> None:
    backend, interrupts = interrupted_twice("d2h")
    array = np.arange(1000.0)
    with xferlib.stager(backend) as stager:
        with held(backend.inner.d2h) as gate:
            with stager.reader(array) as reader:
                out = reader.empty(array.nbytes)
                interrupts += [None, None]
                with pytest.raises(KeyboardInterrupt):
                    reader.read([Span(0, 0, array.nbytes)], out)
            del reader
            transfer = stager.put(np.zeros(1000), into=array)
            with pytest.raises(TimeoutError):
                transfer.result(0.1)
            gate.set()
            transfer.result(10)
        assert (out.view(np.float64) == np.arange(1000.0)).all()
        assert interrupts == []


def test_other_puts_do_not_wait(stager: Stager) -> None:
    _, reader = opened(stager)
    other = stager.put(np.zeros(5, np.uint8)).result()
    stager.put(np.ones(5, np.uint8), into=other).result()
    reader.close()


def test_one_that_is_dropped_lets_everybody_pass(stager: Stager) -> None:
    there, reader = opened(stager)
    putting = on_thread(lambda: stager.put(np.ones((10, 100), np.float32), into=there["a"]).result())
    time.sleep(0.05)
    assert not putting.done()
    del reader
    gc.collect()
    putting.result(20)
    stager.idle()
    assert not stager._ledger.busy


def test_one_that_dies_in_a_cycle_lets_everybody_pass_and_keeps_no_array(stager: Stager) -> None:
    class Loop:
        reader: Any = None
        loop: Any = None

    there, reader = opened(stager)
    target, gone = there["a"], weakref.ref(there["b"])
    loop = Loop()
    loop.loop, loop.reader = loop, reader
    putting = on_thread(lambda: stager.put(np.ones((10, 100), np.float32), into=target).result())
    time.sleep(0.05)
    del reader, loop
    assert not putting.done()
    gc.collect()
    putting.result(20)
    there.clear()
    stager._ledger.reap()
    assert until(lambda: gone() is None)


def test_who_waits_for_it_finds_room_as_soon_as_it_lets_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its thread goes no further then."""
    waiting = threading.Event()
    wait, wake = Reading.wait, Latch.wake

    def noted(self: Reading) -> None:
        waiting.set()
        wait(self)

    with xferlib.stager("host", device_limit=1 << 20) as stager:
        reader = stager.reader(stager.put(np.ones(200_000, np.float32)).result())
        changed = reader._reading._changed
        monkeypatch.setattr(Reading, "wait", noted)
        putting = on_thread(lambda: stager.put(np.zeros(200_000, np.float32)).result())
        assert waiting.wait(30)

        def stops(self: Latch) -> None:
            wake(self)
            if self is changed:
                until(putting.done, 30)

        monkeypatch.setattr(Latch, "wake", stops)
        reader.close()
        assert not putting.result(30).any()


def test_a_finalizer_of_what_is_let_go_of_does_not_wait_for_that() -> None:
    """It runs in the middle of the close, on whatever thread that is."""
    said: list[str] = []

    def puts() -> None:
        try:
            stager.put(np.ones(200_000, np.float32))
        except xferlib.AllocationError as error:
            said.append(str(error))
        else:
            # The newest interpreters let go of what an object has before they tell of its end.
            said.append("")

    with xferlib.stager("host", device_limit=1 << 20) as stager:
        array = stager.put(np.ones(200_000, np.float32)).result()
        weakref.finalize(array, puts)
        reader = stager.reader(array)
        del array
        on_thread(reader.close).result(30)
        assert len(said) == 1
        assert not said[0] or "device memory is full" in said[0]


def test_closing_the_stager_waits_for_it() -> None:
    stager = xferlib.stager("host")
    _, reader = opened(stager)
    closing = on_thread(stager.close)
    time.sleep(0.05)
    assert not closing.done()
    found = reader.read([Span(1, 0, 7)], reader.empty(7)).result()
    reader.close()
    closing.result(20)
    assert found.tolist() == list(range(7))


def test_the_thread_that_reads_does_not_wait_for_itself(stager: Stager) -> None:
    there, reader = opened(stager)
    with pytest.raises(xferlib.XferError, match="Close the reader first"):
        stager.put(np.ones((10, 100), np.float32), into=there["a"])
    # Neither do these.
    stager.idle()
    # What is read is the old, so nothing was overwritten.
    assert reader.read([Span(0, 4, 4)], reader.empty(4)).result().view(np.float32).tolist() == [1]
    reader.close()
    stager.put(np.ones((10, 100), np.float32), into=there["a"]).result()


def test_one_that_was_dropped_on_its_thread_is_in_nobodys_way(stager: Stager) -> None:
    there, reader = opened(stager)
    reader.read([Span(0, 4, 4)], reader.empty(4)).result()
    del reader
    stager.put(np.ones((10, 100), np.float32), into=there["a"]).result()
    stager._ledger.reap()
    assert not stager._ledger.jobs.readings


def test_closing_the_stager_on_the_thread_that_reads_closes_the_reader() -> None:
    with xferlib.stager("host") as stager:
        _, reader = opened(stager)
        memory = reader.empty(4)
    with pytest.raises(xferlib.ClosedError, match="this reader is closed"):
        reader.read([Span(0, 4, 4)], memory)


def test_an_error_behind_an_open_reader_comes_out() -> None:
    """Its traceback holds the reader."""
    with pytest.raises(ZeroDivisionError), xferlib.stager("host") as stager:
        _, reader = opened(stager)
        assert reader.described[0][0][0] / 0


def test_device_memory_that_the_same_thread_reads_is_not_waited_for() -> None:
    with xferlib.stager("host", device_limit=1 << 20) as stager:
        there = stager.put(np.zeros(1 << 20, np.uint8)).result()
        with stager.reader(there), pytest.raises(xferlib.AllocationError):
            stager.put(np.zeros(1 << 20, np.uint8))


def test_device_memory_that_the_same_thread_reads_is_not_waited_for_by_a_tree_of_several_blocks() -> None:
    """Those that are allocated are had on another thread, where the main thread is waiting."""
    program = """
import numpy as np, xferlib
with xferlib.stager("host", device_limit=8 << 20) as stager:
    with stager.reader(stager.put(np.zeros(6 << 20, np.uint8)).result()):
        try:
            stager.put([np.zeros(nbytes << 20, np.uint8) for nbytes in (1, 2, 3)])
        except xferlib.AllocationError as error:
            print(error)
"""
    done = run([sys.executable, "-c", program], seconds=30)
    assert "device memory is full" in done.stdout, done.stderr


def test_threads_of_ours_read_until_they_leave(stager: Stager) -> None:
    there, reader = opened(stager)
    reader.hand_over()
    reader.join()
    with pytest.raises(xferlib.XferError, match="finalizer"):
        stager.put(np.ones((10, 100), np.float32), into=there["a"])
    with pytest.raises(xferlib.XferError, match="finalizer"):
        stager.idle()
    # A finalizer that closes here has it closed when the reader is: by the reaper.
    stager.close()
    assert reader.read([Span(0, 4, 4)], reader.empty(4)).result().view(np.float32).tolist() == [1]
    reader.leave()
    reader.close()
    assert until(lambda: stager._resources.closed)


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ((2, 0, 1), "no array number 2"),
        ((-1, 0, 1), "no array number -1"),
        ((1, 0, 8), "array 1 has 7 bytes, and 8 from 0"),
        ((1, 5, 3), "array 1 has 7 bytes, and 3 from 5"),
        ((1, -1, 2), "array 1 has 7 bytes"),
        ((1, 3, -2), "array 1 has 7 bytes"),
    ],
)
def test_bytes_that_are_not_there_are_refused(stager: Stager, span: tuple[int, int, int], words: str) -> None:
    _, reader = opened(stager)
    memory = reader.empty(100)
    with pytest.raises(ValueError, match=words):
        reader.read([Span(1, 0, 1), Span(*span)], memory)
    assert reader.read([Span(1, 5, 2)], memory).result().tolist() == [5, 6]


@pytest.mark.parametrize("span", [(0, 1.0, 1), (0, 0, "1"), ("0", 0, 1)])
def test_what_is_no_number_is_refused(stager: Stager, span: Any) -> None:
    _, reader = opened(stager)
    with pytest.raises(TypeError):
        reader.read([Span(*span)], reader.empty(100))


def test_numbers_of_numpy_do_not_overflow(stager: Stager) -> None:
    small: Any = np.uint8
    with stager.reader(stager.put(np.arange(250, dtype=np.uint8)).result()) as reader:
        memory = reader.empty(300)
        with pytest.raises(ValueError, match="250 bytes, and 100 from 200 on"):
            reader.read([Span(0, small(200), small(100))], memory)
        spans = [Span(small(0), small(start), small(100)) for start in (0, 100, 150)]
        with pytest.raises(ValueError, match="the spans have 300"):
            reader.read(spans, memory[:44])
        assert reader.read(spans, memory).result().tolist() == [*range(200), *range(150, 250)]


def test_memory_that_is_too_small_or_not_pinned_is_refused(stager: Stager) -> None:
    _, reader = opened(stager)
    memory = reader.empty(100)
    with pytest.raises(ValueError, match="out has 3 bytes, and the spans have 7"):
        reader.read([Span(1, 0, 7)], memory[:3])
    wrongs: list[Any] = [np.zeros(100, np.uint8), np.zeros(100, np.float32), memory[::2], b"bytes", memory.reshape(10, 10)]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="empty"):
            reader.read([Span(1, 0, 7)], wrong)
    with pytest.raises(ValueError, match="nbytes"):
        reader.empty(0)


def test_memory_is_held_while_it_is_read_into(stager: Stager) -> None:
    backend: Any = stager.backend
    _, reader = opened(stager)
    stager.idle()
    before = stager._pool.usage().used
    with held(backend.d2h) as gate:
        reader.read([Span(0, 0, 100)], reader.empty(100))
        gc.collect()
        assert stager._pool.usage().used > before
        gate.set()


def test_the_first_read_waits_for_what_produces_the_arrays(stager: Stager) -> None:
    gate, array = threading.Event(), np.zeros(10, np.uint8)
    with closing(Stream()) as stream:
        stream.submit(gate.wait, 20)
        stream.submit(array.fill, 7)
        reader = stager.reader(array, stream=stream)
        memory = reader.empty(10)
        reading = on_thread(lambda: reader.read([Span(0, 0, 10)], memory).result().tolist())
        time.sleep(0.05)
        assert not reading.done()
        gate.set()
        assert reading.result(20) == [7] * 10
        reader.close()


def test_a_thread_that_makes_copies_does_not_wait(stager: Stager) -> None:
    there, reader = opened(stager)

    def put() -> None:
        note_copy_thread()
        stager.put(np.ones((10, 100), np.float32), into=there["a"])

    with pytest.raises(xferlib.XferError, match="finalizer"):
        on_thread(put).result(20)
    reader.close()


def test_memory_that_is_not_there_is_not_waited_for() -> None:
    with xferlib.stager("host", pinned_limit=4 << 20) as stager:
        _, reader = opened(stager)
        stager.trim()
        kept = stager.empty_pinned(4 << 20, np.uint8)
        with pytest.raises(xferlib.AllocationError, match="now"):
            reader.empty(1 << 20, wait=False)
        del kept
        assert reader.empty(1 << 20, wait=False).nbytes == 1 << 20
        reader.close()


def test_device_memory_that_is_read_last_comes_back() -> None:
    """At the limit a put waits until what is dropped has been read."""
    with xferlib.stager("host", device_limit=1 << 20) as stager:
        reader = stager.reader(stager.put(np.arange(1 << 20, dtype=np.uint8)).result())
        putting = on_thread(lambda: stager.put(np.zeros(1 << 20, np.uint8)).result())
        time.sleep(0.05)
        assert not putting.done()
        found = reader.read([Span(0, 0, 10)], reader.empty(10)).result()
        reader.close()
        putting.result(20)
        assert found.tolist() == list(range(10))


class Odd:
    """An array of a library that has lists for shapes, or names for dtypes."""

    def __init__(self, inner: np.ndarray[Any, Any], shape: Any, dtype: Any) -> None:
        self.inner, self.shape, self.dtype = inner, shape, dtype


@pytest.mark.parametrize(("shape", "dtype"), [([2, 3], np.dtype(np.int16)), ((2, 3), "int16")])
def test_arrays_are_described_as_numpy_does_whatever_the_library_has(shape: Any, dtype: Any) -> None:
    array = Odd(np.arange(6, dtype=np.int16).reshape(2, 3), shape, dtype)
    inner = open_stager()
    backend = tampered(place=lambda array, stream=None: inner.place(array.inner, stream))
    with xferlib.stager(backend) as stager, stager.reader(array) as reader:
        assert reader.described == [((2, 3), np.dtype(np.int16))]
        ((found, kind),) = reader.described
        assert (type(found), isinstance(kind, np.dtype)) == (tuple, True)
        assert reader.read([Span(0, 2, 4)], reader.empty(4)).result().view(np.int16).tolist() == [1, 2]
    inner.close()


def test_arrays_whose_producers_failed_when_they_were_found_are_not_taken_for_found(stager: Stager) -> None:
    """They are found again, whatever was found in between."""
    arrays = [np.full(100, number, np.uint8) for number in range(2)]
    failures: list[Exception] = []

    class Producer:
        def synchronize(self) -> None:
            if failures:
                raise failures[0]

    found: list[int] = []

    def find(wanted: list[Any]) -> tuple[list[DeviceRange], Any]:
        found.append(int(wanted[0][0]))
        return [stager.backend.place(array) for array in wanted], Producer()

    backend: Any = stager.backend
    described = [(array.shape, array.dtype) for array in arrays]
    with ByteReader(backend, stager._pool, stager._ledger, described, None, [None, None], None, None, (find, arrays)) as reader:
        memory = reader.empty(100)
        failures.append(backend.failures[0]("a producer failed"))
        for number in (0, 1, 0):
            with pytest.raises(xferlib.XferError, match="could not be computed: a producer failed"):
                reader.read([Span(number, 0, 100)], memory)
        failures.clear()
        for number in (1, 0):
            assert set(reader.read([Span(number, 0, 100)], memory).result().tolist()) == {number}
        assert found == [0, 1, 0, 1, 0]
        reader.read([Span(1, 0, 100)], memory).result()
        assert found == [0, 1, 0, 1, 0]
