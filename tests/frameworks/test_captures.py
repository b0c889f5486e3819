"""A graph that the user captures survives whatever a stager does meanwhile, and no transfer becomes part of it.

CUDA invalidates a capture when anybody makes certain calls (queries, waits, allocations, frees), in global mode from any thread,
and also when work is enqueued on the NULL stream while a stream that synchronises with it is captured. Each test captures a graph,
does one thing in between, ends the capture, and replays the graph. JAX captures for itself: see its own tests.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, final

import numpy as np
import pytest

from tests.frameworks.kits.cupy import CUPY
from tests.frameworks.kits.every import CUDA_KITS, given, pairs
from tests.frameworks.kits.kit import CudaKit
from tests.frameworks.kits.numba import NUMBA
from xferlib.conformance import StagerConformance
from xferlib.conformance.values import assert_same, words
from xferlib.errors import CapabilityError
from xferlib.protocol import Stream
from xferlib.stager import Stager

NBYTES = 256 << 10
NEVER_SEEN = (3 << 20) + 20
"""Bytes: no other transfer here has this size, so both pools must grow."""


class Kind(NamedTuple):
    mode: int
    """CUDA's number: 0 forbids unsafe calls to every thread, 1 to the capturing thread, 2 to nobody."""
    non_blocking: bool = True


KINDS = {
    "global": Kind(0),
    "thread_local": Kind(1),
    "relaxed": Kind(2),
    "global_on_a_blocking_stream": Kind(0, non_blocking=False),
}


@final
class UserGraph:
    """y = x, captured on a stream of the user's."""

    def __init__(self, kit: CudaKit, laws: StagerConformance, kind: Kind) -> None:
        self._kit = kit
        self._laws = laws
        self._mode = kind.mode
        self.stream = kit.non_blocking() if kind.non_blocking else kit.blocking()
        self._zeros = laws.from_numpy(np.zeros(1000, np.float32))
        self._x = laws.from_numpy(np.arange(1000, dtype=np.float32))
        self._y = laws.from_numpy(np.zeros(1000, np.float32))
        kit.enqueue(self._y, self._x, self.stream)
        self.stream.synchronize()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Capture the graph around what the test does, and assert that it is whole and does what it should."""
        kit = self._kit
        kit.enqueue(self._y, self._zeros, self.stream)
        kit.synchronize()
        # What other tests have left behind may be freed by the framework in its own way: not inside.
        gc.collect()
        kit.begin_capture(self.stream, self._mode)
        kit.enqueue(self._y, self._x, self.stream)
        try:
            yield
        except BaseException:
            with suppress(*kit.capture_failures):
                kit.end_capture(self.stream)
            raise
        try:
            graph = kit.end_capture(self.stream)
        except kit.capture_failures as error:
            pytest.fail(f"the user's capture was invalidated: {error}")
        assert self._laws.to_numpy(self._y).tolist() == [0] * 1000, "the work was not captured: it was run"
        kit.launch(graph, self.stream)
        self.stream.synchronize()
        assert self._laws.to_numpy(self._y).tolist() == list(range(1000))


@final
class World:
    """What the actions work on, made and used before the capture begins."""

    def __init__(self, kit: CudaKit, laws: StagerConformance, stager: Stager) -> None:
        self.kit = kit
        self.laws = laws
        self.stager = stager
        self.values = words(1, NBYTES)
        laws.warm(stager, self.values)
        self.source = laws.pinned(stager, self.values)
        self.large = laws.pinned(stager, words(3, NEVER_SEEN))
        self.array = laws.from_numpy(self.values)
        self.target = laws.from_numpy(words(2, NBYTES))
        handle, self.idle = kit.streams["handle"]()
        self.kept = [stager.put(self.source).value for _ in range(4)]
        # Named by a bare handle, which stays valid for as long as the stager is open.
        self.kept += [stager.put(self.source, stream=handle).value for _ in range(4)]
        self.transfer = stager.put(self.source)
        self.transfer.synchronize()
        self.orphans = self._outlive_a_stager()
        kit.synchronize()

    def _outlive_a_stager(self) -> list[Any]:
        with self.laws.new_stager() as other:
            array = other.put(self.values).result()
            return [array, other.get(array).result()]


Check = Callable[[], None]


def put(world: World) -> Check:
    transfer = world.stager.put(world.source)
    return lambda: assert_same(world.laws.to_numpy(transfer.value), world.values)


def put_from_pageable_memory(world: World) -> Check:
    transfer = world.stager.put(world.values)
    return lambda: assert_same(world.laws.to_numpy(transfer.value), world.values)


def put_into_an_array(world: World) -> Check:
    transfer = world.stager.put(world.source, into=world.target, stream=world.idle)
    return lambda: assert_same(world.laws.to_numpy(transfer.value), world.values)


def put_that_grows_the_device_memory(world: World) -> Check:
    before = world.stager.stats().device_nbytes
    transfer = world.stager.put(world.large)
    assert world.stager.stats().device_nbytes > before, "nothing was allocated: this tests nothing"
    return lambda: assert_same(world.laws.to_numpy(transfer.value), words(3, NEVER_SEEN))


def value_on_another_stream(world: World) -> Check:
    transfer = world.stager.put(world.source)
    with world.kit.current(world.idle):
        array = transfer.value
    return lambda: assert_same(world.laws.to_numpy(array), world.values)


def stream_wait_of_another_stream(world: World) -> Check:
    transfer = world.stager.put(world.source)
    transfer.stream_wait(world.idle)
    return lambda: assert_same(world.laws.to_numpy(transfer.value), world.values)


def get_on_another_stream(world: World) -> Check:
    transfer = world.stager.get(world.array, stream=world.idle)
    assert_same(transfer.result(), world.values)
    return lambda: None


def get_into_pageable_memory(world: World) -> Check:
    out = np.zeros_like(world.values)
    world.stager.get(world.array, out=out, stream=world.idle).synchronize()
    return lambda: assert_same(out, world.values)


def get_that_grows_the_pinned_memory(world: World) -> Check:
    before = world.stager.stats().pinned_nbytes
    taken = [world.stager.empty_pinned(NEVER_SEEN, np.uint8) for _ in range(3)]
    assert world.stager.stats().pinned_nbytes > before, "nothing was page-locked: this tests nothing"
    transfer = world.stager.get(world.array, stream=world.idle)

    def check() -> None:
        taken.clear()
        assert_same(transfer.result(), world.values)

    return check


def done(world: World) -> Check:
    world.laws.assert_completes(world.stager.put(world.source))
    world.laws.assert_completes(world.stager.get(world.array, stream=world.idle))
    return lambda: None


def synchronize(world: World) -> Check:
    world.stager.put(world.source).synchronize()
    return lambda: None


def result_on_another_stream(world: World) -> Check:
    with world.kit.current(world.idle):
        world.stager.put(world.source).result(timeout=world.laws.deadline_seconds)
    return lambda: None


def drop_arrays_and_put_again(world: World) -> Check:
    world.kept.clear()
    gc.collect()
    # It is the next put that looks at what was dropped.
    transfers = [world.stager.put(world.source) for _ in range(6)]
    return lambda: assert_same(world.laws.to_numpy(transfers[-1].value), world.values)


def drop_arrays_that_outlived_their_stager(world: World) -> Check:
    world.orphans.clear()
    gc.collect()
    return lambda: None


def pin_memory_in_place(world: World) -> Check:
    with world.stager.pin(world.values):
        world.stager.put(world.values).synchronize()
    return lambda: None


def stats(world: World) -> Check:
    assert world.stager.stats().h2d_nbytes > 0
    return lambda: None


def trim(world: World) -> Check:
    world.kept.clear()
    world.stager.trim()
    return lambda: None


def open_another_stager_and_close_it(world: World) -> Check:
    with world.laws.new_stager() as other:
        other.put(world.values).synchronize()
    return lambda: None


ACTIONS = (
    put,
    put_from_pageable_memory,
    put_into_an_array,
    put_that_grows_the_device_memory,
    stream_wait_of_another_stream,
    get_on_another_stream,
    get_into_pageable_memory,
    get_that_grows_the_pinned_memory,
    done,
    synchronize,
    drop_arrays_and_put_again,
    drop_arrays_that_outlived_their_stager,
    pin_memory_in_place,
    stats,
    trim,
    open_another_stager_and_close_it,
)
WITH_A_CURRENT_STREAM = (value_on_another_stream, result_on_another_stream)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("thread", ["capturing_thread", "another_thread"])
@pairs("action", {kit: ACTIONS + WITH_A_CURRENT_STREAM * kit.has_current_stream for kit in CUDA_KITS})
def test_a_capture_survives(
    kit: CudaKit, laws: StagerConformance, stager: Stager, action: Callable[[World], Check], thread: str, kind: str
) -> None:
    world, graph = World(kit, laws, stager), UserGraph(kit, laws, KINDS[kind])
    with graph.captured():
        check = action(world) if thread == "capturing_thread" else laws.assert_returns(lambda: action(world))
    check()
    # Nothing of ours was left in a state that later transfers would trip over.
    assert_same(stager.get(stager.put(world.source).value).result(), world.values)


def put_naming(world: World, stream: Any) -> None:
    world.stager.put(world.source, stream=stream)


def put_into_naming(world: World, stream: Any) -> None:
    world.stager.put(world.source, into=world.target, stream=stream)


def put_into_on_the_current_stream(world: World, stream: Any) -> None:
    with world.kit.current(stream):
        world.stager.put(world.source, into=world.target)


def put_into_an_array_bound_to_it(world: World, stream: Any) -> None:
    world.stager.put(world.source, into=world.target.bind(stream))


def get_naming(world: World, stream: Any) -> None:
    world.stager.get(world.array, stream=stream)


def get_naming_the_handle(world: World, stream: Any) -> None:
    world.stager.get(world.array, stream=world.kit.handle(stream))


def get_on_the_current_stream(world: World, stream: Any) -> None:
    with world.kit.current(stream):
        world.stager.get(world.array)


def get_of_an_array_bound_to_it(world: World, stream: Any) -> None:
    world.stager.get(world.array.bind(stream))


def get_of_a_strided_view(world: World, stream: Any) -> None:
    world.stager.get(world.array[::2], stream=stream)


def stream_wait_naming(world: World, stream: Any) -> None:
    world.transfer.stream_wait(stream)


def value_on_the_current_stream(world: World, stream: Any) -> None:
    with world.kit.current(stream):
        _ = world.transfer.value


NAMINGS = (put_naming, put_into_naming, get_naming, get_naming_the_handle, get_of_a_strided_view, stream_wait_naming)
OWN_NAMINGS = {
    CUPY: (put_into_on_the_current_stream, get_on_the_current_stream, value_on_the_current_stream),
    # Numba's arrays may name a stream themselves.
    NUMBA: (put_into_an_array_bound_to_it, get_of_an_array_bound_to_it),
}


@pytest.mark.parametrize("kind", KINDS)
@pairs("naming", {kit: NAMINGS + own for kit, own in OWN_NAMINGS.items()})
def test_a_transfer_that_names_the_capturing_stream_is_refused(
    kit: CudaKit, laws: StagerConformance, stager: Stager, naming: Callable[[World, Any], None], kind: str
) -> None:
    world, graph = World(kit, laws, stager), UserGraph(kit, laws, KINDS[kind])
    with graph.captured(), pytest.raises(CapabilityError, match="captured"):
        naming(world, graph.stream)
    naming(world, graph.stream)
    assert_same(laws.to_numpy(world.transfer.value), world.values)


@given(*CUDA_KITS)
def test_the_null_stream_is_refused_while_a_stream_that_synchronises_with_it_is_captured(
    kit: CudaKit, laws: StagerConformance, stager: Stager
) -> None:
    world, graph = World(kit, laws, stager), UserGraph(kit, laws, KINDS["global_on_a_blocking_stream"])
    with graph.captured():
        for naming in (get_on_the_current_stream, value_on_the_current_stream):
            with pytest.raises(CapabilityError, match="captured"):
                # Where there is no current stream, what names none is for the NULL stream.
                naming(world, kit.null_stream())


@given(*CUDA_KITS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fence_on_a_capturing_stream_is_reached_after_the_capture(
    kit: CudaKit, laws: StagerConformance, stager: Stager, kind: str
) -> None:
    graph = UserGraph(kit, laws, KINDS[kind])
    streams = [Stream(kit.handle(stream), stream) for stream in (graph.stream, kit.non_blocking())]
    with graph.captured():
        fence = stager.backend.retire(streams)
        assert fence is not None
        assert not any(fence.done() for _ in range(100))
    deadline = time.monotonic() + laws.deadline_seconds
    while not fence.done():
        assert time.monotonic() < deadline, "the fence was never reached"


@given(*CUDA_KITS)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_a_capturing_stream_may_read_is_reused_after_the_capture(
    kit: CudaKit, laws: StagerConformance, stager: Stager, kind: str
) -> None:
    graph = UserGraph(kit, laws, KINDS[kind])
    source = laws.pinned(stager, words(1))
    laws.warm(stager, words(1))
    transfer = stager.put(source, stream=graph.stream)
    address = kit.address(transfer.result())
    kept = []
    with graph.captured():
        del transfer
        gc.collect()
        kept += [stager.put(source) for _ in range(12)]
    assert address not in [kit.address(transfer.value) for transfer in kept]
    deadline = time.monotonic() + laws.deadline_seconds
    while kit.address(kept[-1].value) != address:
        assert time.monotonic() < deadline, "the memory was never used again"
        kept.append(stager.put(source))
