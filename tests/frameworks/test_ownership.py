"""Who owns memory and handles: what dies in one reference cycle gives nothing away that is in use, and all comes back once.

Beside ours lies memory of others, filled with a pattern: a write to memory that was given away would be seen there.
"""

from __future__ import annotations

import ctypes
import gc
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast, final

import numpy as np
import pytest

import xferlib
from tests.frameworks.kits.every import CUDA_KITS, given
from tests.frameworks.kits.kit import CudaKit, Kit
from xferlib.conformance import StagerConformance, cuda
from xferlib.conformance.values import Array, assert_same, words
from xferlib.stager import Stager

NBYTES = 8 << 20
"""A piece of its own of every allocator, so that what is freed is what the next one of this size gets."""
CANARIES = 4
CYCLES = 4
BACK_WITHIN_SECONDS = 1.0
INTERRUPTS = 500
THREADS = 3
DEVICE_ORDINAL = 9

every_cuda_kit = given(*CUDA_KITS)


class Interrupt(BaseException):
    """What a signal's handler raises."""


@final
class Last:
    """Holds what dies with it in one reference cycle, and runs a function over it when it is finalized."""

    def __init__(self, act: Callable[[Last], None] | None, **held: Any) -> None:
        self.act = act
        self.held = held
        self.me = self

    def __del__(self) -> None:
        if self.act is not None:
            self.act(self)


@contextmanager
def canaries(kit: Kit, laws: StagerConformance) -> Iterator[None]:
    """Lay memory of others beside ours, by the framework and by the bare driver, and assert that nobody writes to it."""
    values = words(99, NBYTES)
    arrays = [laws.from_numpy(values) for _ in range(CANARIES)]
    bare = [_bare(values) for _ in range(CANARIES)] if isinstance(kit, CudaKit) else []
    yield
    for array in arrays:
        assert_same(laws.to_numpy(array), values)
    for address in bare:
        seen = np.empty_like(values)
        with cuda.context(0):
            cuda.call("cuMemcpyDtoH", seen.ctypes.data, address, seen.nbytes)
            cuda.call("cuMemFree", address)
        assert_same(seen, values)


def _bare(values: Array) -> int:
    with cuda.context(0):
        address = int(cuda.call("cuMemAlloc", values.nbytes))
        cuda.call("cuMemcpyHtoD", address, values.ctypes.data, values.nbytes)
    return address


@pytest.mark.parametrize("finalizer", ["none", "reads", "brings_back"])
@pytest.mark.parametrize("own_stager", [False, True], ids=["open_stager", "stager_in_the_cycle"])
def test_what_dies_in_a_cycle_gives_away_no_memory_that_is_in_use(
    kit: Kit, laws: StagerConformance, stager: Stager, finalizer: str, own_stager: bool
) -> None:
    seen: list[tuple[Array, Array]] = []
    kept: list[Last] = []
    acts: dict[str, Callable[[Last], None] | None] = {
        "none": None,
        "reads": lambda last: seen.append((laws.to_numpy(last.held["array"]), last.held["values"])),
        "brings_back": kept.append,
    }

    def die(values: Array) -> None:
        own = laws.new_stager() if own_stager else stager
        transfer = own.put(laws.pinned(own, values))
        array = transfer.result()
        Last(acts[finalizer], array=array, transfer=transfer, event=own.backend.record_h2d(), stager=own, values=values)

    batches = [words(seed, NBYTES) for seed in range(CYCLES)]
    with warnings.catch_warnings():
        # A stager that is dropped says so.
        warnings.simplefilter("ignore", ResourceWarning)
        for values in batches:
            die(values)
        gc.collect()
        with canaries(kit, laws):
            later = [laws.put_values(stager, words(50 + turn, NBYTES)) for turn in range(CYCLES)]
            for got, values in seen:
                assert_same(got, values)
            for last in kept:
                assert last.held["transfer"].done()
                assert last.held["event"].done()
                assert_same(laws.to_numpy(last.held["array"]), last.held["values"])
        assert len(seen) == (CYCLES if finalizer == "reads" else 0)
        assert len(kept) == (CYCLES if finalizer == "brings_back" else 0)
        for turn, array in enumerate(later):
            assert_same(laws.to_numpy(array), words(50 + turn, NBYTES))
        for last in kept:
            last.held.clear()
        kept.clear()
        gc.collect()


@every_cuda_kit
@pytest.mark.parametrize("brought_back", [False, True])
def test_an_event_that_was_finalized_is_reached_no_earlier(
    kit: CudaKit, laws: StagerConformance, stager: Stager, brought_back: bool
) -> None:
    values = words(1)
    laws.warm(stager, values)
    source, backend = laws.pinned(stager, values), stager.backend
    seen: list[bool] = []
    kept: list[Any] = []

    def ask(last: Last) -> None:
        # Handles of events that are over are used again by now, if this one's is.
        others = [backend.record_d2h() for _ in range(50)]
        for other in others:
            other.synchronize()
        seen.append(last.held["event"].done())
        if brought_back:
            kept.append(last.held["event"])

    gc.collect()
    with laws.hold_copies(backend, "h2d") as hold:
        transfer = stager.put(source)
        # The event is older, and finalized first.
        Last(ask, event=backend.record_h2d())
        gc.collect()
        others = [backend.record_d2h() for _ in range(200)]
        others[-1].synchronize()
        assert seen == [False]
        assert not any(event.done() for event in kept)
        assert hold.held
    transfer.synchronize()
    for event in kept:
        event.synchronize()
        assert event.done()


@every_cuda_kit
def test_stagers_use_one_anothers_events(kit: CudaKit, laws: StagerConformance, stager: Stager) -> None:
    def use() -> int:
        with laws.new_stager() as own:
            for turn in range(20):
                laws.put_values(own, words(turn))
            return len(cast("Any", own.backend)._events.handles)

    first = use()
    assert {use() for _ in range(20)} == {first}


@pytest.mark.alone
@every_cuda_kit
def test_memory_of_a_closed_stager_is_back_by_nobodys_call(kit: CudaKit, laws: StagerConformance, stager: Stager) -> None:
    values = words(1, 64 << 20)
    with laws.new_stager() as own:
        before = cuda.device_free_nbytes()
        arrays = [laws.put_values(own, values), laws.put_values(own, values)]
        cycle = [arrays.pop()]
        cycle.append(cast("Any", cycle))
        assert before - cuda.device_free_nbytes() >= 2 * values.nbytes
    assert_same(laws.to_numpy(arrays[0]), values)
    del cycle
    gc.collect()
    arrays.clear()
    deadline = time.monotonic() + BACK_WITHIN_SECONDS
    while before - cuda.device_free_nbytes() >= values.nbytes:
        assert time.monotonic() < deadline, "the memory is not back"
        time.sleep(0.01)


@pytest.mark.parametrize("leaves", [2, 3, 5, 12, 40])
def test_leaves_that_may_lie_side_by_side_are_put(laws: StagerConformance, stager: Stager, leaves: int) -> None:
    for nbytes in (72 << 10, 100_000, 128 << 10, (128 << 10) - 8, 192 << 10, 256 << 10):
        for turn in range(3):
            tree = [words(turn * leaves + leaf, nbytes) for leaf in range(leaves)]
            arrays = stager.put(tree).result()
            for array, values in zip(arrays, tree, strict=True):
                assert_same(laws.to_numpy(array), values)


def _context() -> int:
    return int(cuda.call("cuCtxGetCurrent"))


def _device_of(address: int) -> int:
    # Not by the bindings: 13.3.1 says 0 for every device (NVIDIA/cuda-python, issue 2928).
    found = ctypes.c_int(-1)
    with cuda.context(1):
        status = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(found), DEVICE_ORDINAL, ctypes.c_uint64(address))
    assert status == 0
    return found.value


@pytest.fixture
def second(kit: CudaKit, stager: Stager) -> Iterator[Stager]:
    """A stager on device 1, beside the one on device 0."""
    if int(cuda.call("cuDeviceGetCount")) < 2:
        pytest.skip("there is one device")
    with xferlib.stager(kit.name, device=1) as opened:
        yield opened


@every_cuda_kit
def test_threads_without_a_context_use_a_device_that_is_not_the_first(
    kit: CudaKit, laws: StagerConformance, second: Stager
) -> None:
    def use() -> list[int]:
        found = [_context()]
        for turn in range(1, 150):
            values = words(turn, turn << 12)
            array, empty = second.put([values, np.zeros((0, 3), np.float32)]).value
            found.append(_device_of(kit.address(array)) - 1)
            assert_same(second.get(array).result(), values)
            assert second.get(empty).result().shape == (0, 3)
            second.put(words(turn + 1, turn << 12), into=array).result()
            assert_same(second.get(array).result(), words(turn + 1, turn << 12))
        return [*found, _context()]

    calls = [laws.calls.start(use) for _ in range(THREADS)]
    assert [sum(call.result(6 * laws.deadline_seconds)) for call in calls] == [0] * THREADS


@every_cuda_kit
def test_one_thread_uses_two_devices_by_turns(kit: CudaKit, laws: StagerConformance, stager: Stager, second: Stager) -> None:
    here = _context()
    for turn in range(50):
        for each, ordinal in ((stager, 0), (second, 1)):
            values = words(turn, 1000 * turn + 4)
            array = each.put(values).value
            assert _device_of(kit.address(array)) == ordinal
            assert_same(each.get(array).result(), values)
            with pytest.raises(ValueError, match=f"device={ordinal}"):
                (second if each is stager else stager).get(array)
    assert _context() == here


@every_cuda_kit
def test_interrupts_lose_no_event_and_leave_the_context_as_found(kit: CudaKit, laws: StagerConformance, stager: Stager) -> None:
    backend: Any = stager.backend
    array, here = laws.from_numpy(words(1)), _context()
    live: list[Any] = []
    armed: list[bool] = []

    def use() -> None:
        event = backend.record_h2d()
        live.append(event)
        event.done()
        event.synchronize()
        backend.retire([event.stream_wait(None)]).done()
        backend.as_source(array)
        backend.is_pinned(1 << 12, 1)
        if len(live) > 20:
            live.clear()

    def interrupt(*_: object) -> None:
        if armed:
            armed.clear()
            raise Interrupt

    use()
    created, raised = len(backend._events.handles), INTERRUPTS
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(INTERRUPTS):
            # One that comes inside of what takes no exceptions, a finalizer, say, is told to nobody.
            with suppress(Interrupt):
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, random.uniform(20e-6, 500e-6))
                while armed:
                    use()
                raised -= 1
            assert _context() == here
            handles = [_number(event) for event in (*backend._events.handles.free, *live)]
            assert len(set(handles)) == len(handles), "two have the same event"
    finally:
        armed.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised > INTERRUPTS // 2
    live.clear()
    assert len(backend._events.handles) - created <= 128


def _number(event: Any) -> int:
    """Return the driver's handle of an event, or of what an event is made of."""
    return int(getattr(event, "handle", None) or getattr(event, "_handle", event))
