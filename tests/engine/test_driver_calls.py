"""The engine calls a device itself, by addresses of functions: a device of C stands for a driver."""

from __future__ import annotations

import ctypes
import gc
import queue
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast, final

import numpy as np
import pytest

import xferlib
from tests.core.fakes import WATCHDOG, off_main, on_thread, until
from tests.engine.build import COMPILER
from tests.engine.device import FUNCTIONS, Device, DeviceError, DeviceStream, Driven, built_device
from xferlib.byte_reader import Span
from xferlib.engine.jobs import WAIT_MICROSECONDS, Job
from xferlib.engine.lanes import Lane
from xferlib.engine.native import _SIGNATURES as SIGNATURES
from xferlib.engine.native import FINISHED, OK, Figures, gil_library, library
from xferlib.errors import ClosedError, TransferError, XferError
from xferlib.staging.profile import StagingProfile

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler: a device of C was not tried")

KIB, MIB = 1 << 10, 1 << 20
PROFILE = StagingProfile(2, MIB, 64 * KIB)
"""Small chunks, so that a transfer takes several, and little on the caller's thread."""
WAIT_SECONDS = WAIT_MICROSECONDS / 1e6
BROKEN = 700
QUESTIONS: list[Callable[[xferlib.Transfer], object]] = [
    lambda transfer: transfer.synchronize(),
    lambda transfer: transfer.done(),
    lambda transfer: transfer.result(),
    lambda transfer: transfer.value,
]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    return Device(built_device(tmp_path_factory.mktemp("device")))


@pytest.fixture
def stream(device: Device) -> Iterator[DeviceStream]:
    """Return a stream of the user's. It outlives the stagers that know it."""
    stream = device.stream()
    yield stream
    stream.close()


@pytest.fixture
def opened(device: Device, stream: DeviceStream) -> Iterator[Callable[[], xferlib.Stager]]:
    """Return what opens a stager. Whatever the test has done to it, it closes."""
    stagers: list[xferlib.Stager] = []

    def opens() -> xferlib.Stager:
        stagers.append(xferlib.Stager(Driven(device), staging=PROFILE))
        return stagers[-1]

    yield opens
    for stager in stagers:
        on_thread(stager.close).result(WATCHDOG)
        with pytest.raises(ClosedError):
            stager.put(np.ones(3))


@pytest.fixture
def stager(opened: Callable[[], xferlib.Stager]) -> xferlib.Stager:
    return opened()


def numbers(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def driven(stager: xferlib.Stager) -> Driven:
    return cast("Driven", stager.backend)


def jobs() -> int:
    """Return how many jobs the engine has had."""
    found = Figures()
    library().xe_read_figures(found)
    return int(found.jobs)


@pytest.mark.parametrize("borrow", [False, True])
@pytest.mark.parametrize("nbytes", [64 * KIB + 1, MIB, 9 * MIB + 13, 40 * MIB])
def test_ordinary_memory_crosses_both_ways(stager: xferlib.Stager, nbytes: int, borrow: bool) -> None:
    source, before = numbers(nbytes), jobs()
    there = stager.put(source, borrow=borrow).value
    assert np.array_equal(there, source)
    out = np.zeros_like(source)
    stager.get(there, out=out).synchronize()
    assert np.array_equal(out, source)
    assert jobs() == before + 2


def test_a_source_may_be_rewritten_behind_a_put(stager: xferlib.Stager) -> None:
    source = numbers(20 * MIB)
    kept = source.copy()
    transfer = stager.put(source)
    source[:] = 0
    assert np.array_equal(transfer.value, kept)


@pytest.mark.parametrize("borrow", [False, True])
def test_a_tree_of_many_leaves_crosses_both_ways(stager: xferlib.Stager, borrow: bool) -> None:
    sizes = np.random.default_rng(1).integers(1, 40 * KIB, 300)
    sizes[::50] = 3 * MIB
    tree = {f"{n}": {"leaf": numbers(int(size), n)} for n, size in enumerate(sizes)}
    before = jobs()
    there = stager.put(tree, borrow=borrow).value
    out = {name: {"leaf": np.zeros_like(node["leaf"])} for name, node in tree.items()}
    stager.get(there, out=out).synchronize()
    for name, node in tree.items():
        assert np.array_equal(there[name]["leaf"], node["leaf"])
        assert np.array_equal(out[name]["leaf"], node["leaf"])
    assert jobs() == before + 2


def _small_leaves() -> list[np.ndarray[Any, Any]]:
    return [numbers(1 + n * 100 % (30 * KIB), n) for n in range(500)]


def test_a_tree_of_small_leaves_is_one_job_and_free_behind_the_put(stager: xferlib.Stager) -> None:
    for _ in range(2):
        tree, kept, before = _small_leaves(), _small_leaves(), jobs()
        transfer = stager.put(tree)
        for leaf in tree:
            leaf[:] = 0
        assert all(np.array_equal(there, leaf) for there, leaf in zip(transfer.value, kept, strict=True))
        assert jobs() == before + 1
    assert stager.stats().h2d_nbytes == 2 * sum(leaf.nbytes for leaf in kept)


def test_a_tree_of_small_leaves_is_done_when_its_last_copy_is(stager: xferlib.Stager, stream: DeviceStream) -> None:
    tree = _small_leaves()
    stager.put(tree).synchronize()
    driven(stager).h2d.hold()
    try:
        transfer = on_thread(lambda: stager.put(tree)).result(WATCHDOG)
        on_thread(partial(transfer.stream_wait, stream)).result(WATCHDOG)
        read = stream.record()
        assert not transfer.done()
        assert not read.done()
    finally:
        driven(stager).h2d.release()
    read.synchronize()
    assert transfer.done()
    assert all(np.array_equal(there, leaf) for there, leaf in zip(transfer.value, tree, strict=True))


@pytest.mark.parametrize("after", [0, 3])
def test_a_copy_that_is_refused_fails_the_put_of_a_tree_of_small_leaves(stager: xferlib.Stager, after: int) -> None:
    tree = _small_leaves()
    refs = [weakref.ref(leaf) for leaf in tree]
    driven(stager).h2d.refuse(after, BROKEN)
    with pytest.raises(TransferError) as raised:
        stager.put(tree)
    assert isinstance(raised.value.__cause__, DeviceError)
    assert all(np.array_equal(there, leaf) for there, leaf in zip(stager.put(tree).value, tree, strict=True))
    del raised, tree
    gc.collect()
    assert not any(ref() is not None for ref in refs)


def _check_failed(transfer: xferlib.Transfer) -> None:
    """Each question says so, and again."""
    for ask in QUESTIONS * 2:
        with pytest.raises(TransferError) as raised:
            ask(transfer)
        assert isinstance(raised.value.__cause__, DeviceError)
        assert raised.value.__cause__.status == BROKEN


@pytest.mark.parametrize("after", [0, 3])
def test_a_copy_that_is_refused_fails_its_put(stager: xferlib.Stager, after: int) -> None:
    source = numbers(9 * MIB)
    driven(stager).h2d.refuse(after, BROKEN)
    with pytest.raises(TransferError) as raised:
        stager.put(source)
    assert isinstance(raised.value.__cause__, DeviceError)
    assert raised.value.__cause__.status == BROKEN
    assert np.array_equal(stager.put(source).value, source)


@pytest.mark.parametrize("after", [0, 3])
def test_a_copy_that_is_refused_fails_its_borrowing_put(stager: xferlib.Stager, after: int) -> None:
    source = numbers(9 * MIB)
    driven(stager).h2d.refuse(after, BROKEN)
    _check_failed(stager.put(source, borrow=True))
    assert np.array_equal(stager.put(source, borrow=True).value, source)


def test_a_borrowing_put_of_which_the_engine_says_that_it_failed_is_never_done(stager: xferlib.Stager) -> None:
    driven(stager).h2d.refuse(0, BROKEN)
    transfer = stager.put(numbers(9 * MIB), borrow=True)
    for job in stager._ledger.jobs.h2d.values():
        assert until(partial(job.has_reached, FINISHED))
        break
    with pytest.raises(TransferError):
        transfer.done()


@pytest.mark.parametrize("after", [0, 3])
def test_a_copy_that_is_refused_fails_its_get(stager: xferlib.Stager, after: int) -> None:
    source, out = numbers(9 * MIB), np.zeros(9 * MIB, np.uint8)
    driven(stager).d2h.refuse(after, BROKEN)
    _check_failed(stager.get(source, out=out))
    stager.get(source, out=out).synchronize()
    assert np.array_equal(out, source)


@pytest.mark.parametrize("borrow", [False, True])
def test_a_device_that_breaks_fails_what_is_put(stager: xferlib.Stager, borrow: bool) -> None:
    """Nobody knows then whether its copies go on: their chunks are lost."""
    driven(stager).h2d.break_with(BROKEN)
    if borrow:
        _check_failed(stager.put(numbers(9 * MIB), borrow=True))
        return
    # It says so itself where the device has failed before all was started.
    with pytest.raises(TransferError) as raised:
        stager.put(numbers(9 * MIB)).synchronize()
    assert isinstance(raised.value.__cause__, DeviceError)


def test_a_device_that_breaks_fails_what_is_got(stager: xferlib.Stager) -> None:
    driven(stager).d2h.break_with(BROKEN)
    _check_failed(stager.get(numbers(9 * MIB), out=np.zeros(9 * MIB, np.uint8)))


def test_a_get_that_is_held_holds_up_nobody_else(stream: DeviceStream, opened: Callable[[], xferlib.Stager]) -> None:
    stager, other = opened(), opened()
    array, out = np.zeros(9 * MIB, np.uint8), np.zeros(9 * MIB, np.uint8)
    source = numbers(array.nbytes)
    stream.hold()
    try:
        held = on_thread(lambda: stager.get(array, out=out, stream=stream)).result(WATCHDOG)
        for turn in range(3):
            mine = numbers(9 * MIB + turn, turn)
            for one in (other, stager):
                assert np.array_equal(on_thread(partial(one.put, mine)).result(WATCHDOG).result(WATCHDOG), mine)
            back = np.zeros_like(mine)
            on_thread(other.get(mine, out=back).synchronize).result(WATCHDOG)
            assert np.array_equal(back, mine)
        assert not held.done()
        assert not out.any()
        # What the producer makes, the get reads.
        array[:] = source
    finally:
        stream.release()
    held.synchronize()
    assert np.array_equal(out, source)


def test_a_put_that_borrows_is_done_behind_its_last_copy(stager: xferlib.Stager, stream: DeviceStream) -> None:
    source = numbers(4 * MIB)
    driven(stager).h2d.hold()
    try:
        transfer = stager.put(source, borrow=True)
        on_thread(partial(transfer.stream_wait, stream)).result(WATCHDOG)
        read = stream.record()
        assert not transfer.done()
        assert not read.done()
    finally:
        driven(stager).h2d.release()
    read.synchronize()
    assert transfer.done()
    assert np.array_equal(transfer.value, source)


def test_memory_of_the_source_comes_back_though_nobody_asks_for_the_end_of_its_copy(stager: xferlib.Stager) -> None:
    free: queue.SimpleQueue[Any] = queue.SimpleQueue()
    free.put(np.empty(4 * MIB, np.uint8))

    def source() -> Iterator[Any]:
        for number in range(4):
            memory = free.get(timeout=WATCHDOG)
            batch = memory[:]
            batch[:] = number
            weakref.finalize(batch, free.put, memory)
            yield batch
            del batch

    with xferlib.prefetch(source(), stager) as batches:
        found = [set(np.asarray(batch).tolist()) for batch in batches]
    assert found == [{0}, {1}, {2}, {3}]
    assert not free.empty()


def test_a_put_into_an_array_comes_behind_a_get_that_reads_it(stager: xferlib.Stager) -> None:
    before, after = numbers(4 * MIB, 1), numbers(4 * MIB, 2)
    array, out = before.copy(), np.zeros_like(before)
    driven(stager).d2h.hold()
    try:
        got = stager.get(array, out=out)
        put = on_thread(partial(stager.put, after, into=array)).result(WATCHDOG)
        assert not put.done()
    finally:
        driven(stager).d2h.release()
    got.synchronize()
    assert np.array_equal(out, before)
    put.synchronize()
    assert np.array_equal(array, after)


def test_a_finalizer_of_what_a_get_lets_go_of_may_overwrite_what_is_got(stager: xferlib.Stager) -> None:
    """It waits until gets have started their copies: the one that lets go must not be among them yet, since it has no chunks."""

    class Owner:
        def __init__(self, memory: np.ndarray[Any, Any]) -> None:
            self.memory = memory
            self.__array_interface__ = memory.__array_interface__

    there = stager.put(numbers(8 * MIB)).value
    source, new = np.asarray(Owner(numbers(8 * MIB, 1))), numbers(MIB, 2)
    ended: list[bool] = []

    def overwrite() -> None:
        stager.put(new, into=there[:MIB]).synchronize()
        ended.append(True)

    assert source.base is not None
    weakref.finalize(source.base, overwrite)
    transfer = stager.put(source, borrow=True)
    (number,) = stager._ledger.jobs.h2d
    assert until(lambda: gil_library().xe_wait(number, FINISHED, 0) == OK)
    # Until somebody asks, the job has the last reference.
    del transfer, source
    assert not ended
    out = np.zeros(8 * MIB, np.uint8)
    on_thread(lambda: stager.get(there, out=out).synchronize()).result(WATCHDOG)
    assert ended == [True]
    assert np.array_equal(out[:MIB], new)
    assert np.array_equal(out, there)


def test_a_finalizer_in_the_start_of_a_get_does_not_wait_for_that(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    there = stager.put(numbers(8 * MIB)).value
    page_locked = stager.empty_pinned((MIB,), np.uint8)
    told: list[str] = []
    feed = Lane.feed

    def meanwhile(lane: Lane, job: Job, nbytes: int, blocks: int) -> None:
        if not told:
            with pytest.raises(XferError, match="starts them") as caught:
                stager.put(numbers(MIB, 1), into=there[:MIB])
            told.append(str(caught.value))
            stager.get(there[:MIB], out=page_locked).synchronize()
        feed(lane, job, nbytes, blocks)

    out = np.zeros(8 * MIB, np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "feed", meanwhile)
        on_thread(lambda: stager.get(there, out=out).synchronize()).result(WATCHDOG)
    assert len(told) == 1
    assert np.array_equal(page_locked, there[:MIB])
    assert np.array_equal(out, there)
    assert np.array_equal(out, numbers(8 * MIB))


def test_arrays_that_are_read_together_come_one_behind_the_other(stager: xferlib.Stager, device: Device) -> None:
    """By one call of C, in which other threads have the interpreter."""
    arrays = [numbers(100 + number, number) for number in range(70)]
    spans = [Span(number, number, array.nbytes - number) for number, array in enumerate(arrays)]
    spans[10:10] = [Span(3, 0, 0), Span(4, 7, 5)]
    wanted = b"".join(arrays[number][start : start + nbytes].tobytes() for number, start, nbytes in spans)
    context = ctypes.c_void_p(4711)
    device.library.device_enter(context)
    with stager.reader(arrays) as reader:
        found = reader.read(spans, reader.empty(len(wanted)))
        assert found.result().tobytes() == wanted
    device.library.device_current(ctypes.byref(context))
    assert context.value == 4711


@pytest.mark.parametrize("after", [0, 3])
def test_a_copy_that_is_refused_fails_the_read(stager: xferlib.Stager, after: int) -> None:
    """The copies before it are waited for: their memory is used again."""
    arrays = [numbers(100, number) for number in range(6)]
    spans = [Span(number, 0, 100) for number in range(6)]
    with stager.reader(arrays) as reader:
        memory = reader.empty(600)
        memory[:] = 255
        driven(stager).d2h.refuse(after, BROKEN)
        with pytest.raises(XferError, match="could not be started: the device says") as raised:
            reader.read(spans, memory)
        assert isinstance(raised.value.__cause__, DeviceError)
        assert memory[: after * 100].tobytes() == b"".join(array.tobytes() for array in arrays[:after])
        assert (memory[after * 100 :] == 255).all()
        assert reader.read(spans, memory).result().tobytes() == b"".join(array.tobytes() for array in arrays)


@final
class Counted:
    """Something whose methods are counted, and those of the calls of its driver."""

    def __init__(self, inner: Any, said: list[str]) -> None:
        self._inner = inner
        self._said = said

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == "driver_calls":
            return Counted(found, self._said)
        return counted(found, name, self._said) if callable(found) else found


def counted(call: Callable[..., Any], name: str, said: list[str]) -> Callable[..., Any]:
    def counts(*args: Any, **named: Any) -> Any:
        # Stagers that were dropped before are closed on another thread, and ask whether anything still uses what they had.
        if not off_main():
            said.append(name)
        return call(*args, **named)

    return counts


QUESTIONS_ASKED = {"xe_wait", "xe_forget", "xe_finished", "device_query"}
"""How often is asked whether something has come depends on how long that takes: by a job's slices of 50 ms, and a few more."""
WAYS: dict[str, Callable[[xferlib.Stager, Any, Any], xferlib.Transfer]] = {
    "put": lambda stager, source, out: stager.put(source),
    "borrow": lambda stager, source, out: stager.put(source, borrow=True),
    "get": lambda stager, source, out: stager.get(source, out=out),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_larger_transfer_takes_no_more_calls_of_python(device: Device, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    said: list[str] = []
    backend = Driven(device)
    for called in (device.library, library(), gil_library()):
        for name in FUNCTIONS if called is device.library else SIGNATURES:
            monkeypatch.setattr(called, name, counted(getattr(called, name), name, said))
    small, large = MIB, 64 * MIB
    source, out = numbers(large), np.zeros(large, np.uint8)
    told: dict[int, Counter[str]] = {}
    with xferlib.Stager(Counted(backend, said), staging=PROFILE) as stager:

        def moves(nbytes: int) -> tuple[int, float]:
            """Have nothing left of it; return how many questions it took until it was there, and how many seconds."""
            said.clear()
            began = time.monotonic()
            WAYS[way](stager, source[:nbytes], out[:nbytes]).synchronize()
            took, questions = time.monotonic() - began, sum(name in QUESTIONS_ASKED for name in said)
            # What asks here is this test.
            assert until(lambda: not (stager._ledger.reap() or stager._ledger.busy))
            return questions, took

        for nbytes in (large, small):
            # Chunks and blocks are there from then on.
            for _ in range(3):
                moves(nbytes)
            questions, seconds = moves(nbytes)
            told[nbytes] = Counter(name for name in said if name not in QUESTIONS_ASKED)
            assert questions <= 20 + 4 * seconds / WAIT_SECONDS
    # Of 64 times the bytes; what dies meanwhile adds a call or two to either.
    assert told[large].total() <= told[small].total() + 5 <= 25
    assert told[large]["xe_submit"] == told[small]["xe_submit"] == 1
