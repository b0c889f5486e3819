"""Pageable memory that the engine moves for this backend, without a GPU and without Numba: a device of C stands for the driver.

Streams and events are that device's, device memory is the host's, and arrays have what the backend asks of Numba's.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast, final

import numpy as np
import pytest
from xferlib_numba._stager import NumbaStager

import xferlib
from tests.core.fakes import WATCHDOG, on_thread, until
from tests.core.points import interrupted_in
from tests.engine.build import COMPILER
from tests.engine.device import Device as Library
from tests.engine.device import DeviceStream, built_device
from xferlib.cuda import driver
from xferlib.engine.native import Figures, library
from xferlib.errors import CapabilityError, TransferError
from xferlib.protocol import Event
from xferlib.staging.profile import StagingProfile

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler: a device of C was not tried")

KIB, MIB = 1 << 10, 1 << 20
PROFILE = StagingProfile(2, MIB, 64 * KIB)
"""Small chunks, so that a transfer takes several, and little on the caller's thread."""
LEGACY = 1
HOST = 1
NOT_KNOWN = 1
REFUSED = 719
Array = np.ndarray[Any, np.dtype[Any]]


@final
class Handle:
    """As the bindings' handles: an object with a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


class Failed(Exception):
    """As Numba's `CudaAPIError`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


@final
class Memory:
    """Memory that is allocated, by its address: the host's, whatever it stands for."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}

    def alloc(self, nbytes: int, *flags: int) -> int:
        block = (ctypes.c_char * (nbytes + 4096))()
        address = -(-ctypes.addressof(block) // 4096) * 4096
        self.blocks[address] = block, nbytes
        return address

    def register(self, address: int, nbytes: int, flags: int) -> None:
        self.blocks[int(address)] = None, nbytes

    def free(self, address: int) -> None:
        del self.blocks[int(address)]

    def has(self, address: int) -> bool:
        return any(low <= address < low + nbytes for low, (_, nbytes) in list(self.blocks.items()))


@final
class DeviceArray:
    """As `DeviceNDArray`, over memory of the host's."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], stream: Any = 0, gpu_data: Any = None
    ) -> None:
        self.shape, self.strides, self.dtype, self.stream = shape, strides, np.dtype(dtype), stream
        self.gpu_data = gpu_data or SimpleNamespace(device_pointer_value=None)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize

    def is_c_contiguous(self) -> bool:
        return self.strides == np.empty(self.shape, self.dtype).strides

    def values(self) -> Array:
        memory: Any = (ctypes.c_char * self.nbytes).from_address(self.gpu_data.device_pointer_value)
        values: Array = np.frombuffer(memory, self.dtype).reshape(self.shape)
        return values


def device_array(values: Array, stream: Any = 0) -> DeviceArray:
    """Return a device array over this very memory."""
    data = SimpleNamespace(device_pointer_value=values.ctypes.data, owner=values)
    return DeviceArray(values.shape, values.strides, values.dtype, stream, data)


@final
class Driver:
    """What the backend has for a `Device`."""

    words, ordinal, several, context, numba_context = "a device of C (cuda:0)", 0, False, 1, None
    pci_bus_id = "ffff:00:00.0"
    error = Failed

    def __init__(self, device: Library, default: DeviceStream) -> None:
        self.device_memory, self.pinned_memory = Memory(), Memory()
        self.capturing: set[int] = set()
        self._c = device.library
        self._default = default.handle
        self.relaxed = self.here = lambda call, *arguments: call(*arguments)
        self.give_back = self.here
        binding = SimpleNamespace(
            CUstream=Handle,
            CUdeviceptr=Handle,
            CUresult=int,
            CUmemorytype=int,
            CUDA_MEMCPY2D=SimpleNamespace,
            CUpointer_attribute=SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2),
            cuPointerGetAttribute=lambda kind, address: (0, HOST) if self.pinned_memory.has(address) else (NOT_KNOWN, None),
            cuStreamCreate=lambda flags: (0, Handle(self._c.device_new_stream())),
            cuStreamDestroy=lambda handle: self._c.device_end_stream(int(handle)),
            cuEventCreate=lambda flags: (0, Handle(self._c.device_new_event())),
        )
        driver = SimpleNamespace(binding=binding, Stream=Stream, CudaDriverError=Failed, CudaAPIError=Failed)
        driver.MemoryPointer = lambda context, pointer, nbytes, owner: SimpleNamespace(
            device_pointer_value=int(pointer), owner=owner
        )
        self.numba = SimpleNamespace(distribution="numba", driver=driver, array=DeviceArray, from_dtype=lambda dtype: dtype)

    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        self._check(self._c.device_copy_h2d(dst, src, nbytes, self._stream(stream)))

    copy_d2h = copy_h2d

    def record(self, event: Handle, stream: Any) -> None:
        # Another each time: of one of C's, a stream that waits for it would wait for the latest record, or for less.
        event.number = self._c.device_new_event()
        self._check(self._c.device_record(int(event), self._stream(stream)))

    def wait(self, stream: Any, event: Handle, flags: int) -> None:
        self._check(self._c.device_wait(self._stream(stream), int(event), flags))

    def is_capturing(self, stream: Any) -> int:
        return int(stream) in self.capturing

    def event_status(self, event: Handle) -> tuple[int]:
        return (self._c.device_query(int(event)),)

    def synchronize(self, event: Handle) -> None:
        self._check(self._c.device_synchronize(int(event)))

    def call(self, name: str) -> Callable[..., Any]:
        calls: dict[str, Callable[..., Any]] = {"cuMemcpyDtoDAsync": self.copy_h2d, "cuMemcpy2DAsync": self._copy_rows}
        return calls[name]

    def raw(self, name: str) -> Callable[..., Any]:
        device, pinned = self.device_memory, self.pinned_memory
        calls: dict[str, Callable[..., Any]] = {
            "cuMemAlloc": device.alloc,
            "cuMemFree": device.free,
            "cuMemHostAlloc": pinned.alloc,
            "cuMemFreeHost": pinned.free,
            "cuMemHostRegister": pinned.register,
            "cuMemHostUnregister": pinned.free,
        }
        return calls[name]

    def failed(self, name: str, status: int) -> Exception:
        return Failed(status, name)

    failure = failed

    def _copy_rows(self, what: Any, stream: Any) -> None:
        for row in range(what.Height):
            self.copy_h2d(what.dstDevice + row * what.dstPitch, what.srcDevice + row * what.srcPitch, what.WidthInBytes, stream)

    def _stream(self, stream: Any) -> int:
        return self._default if int(stream) == LEGACY else int(stream)

    def _check(self, status: int) -> None:
        if status:
            raise Failed(status, "a call")


@final
class Stream:
    """As Numba's."""

    external = True

    def __init__(self, handle: Any) -> None:
        self.handle = handle


@final
class World:
    """A stager of this backend, with the device under it, its default stream and one of the user's."""

    def __init__(self, device: Library) -> None:
        self._device = device
        self.default, self.other = device.stream(), device.stream()
        self.named: Final = Stream(Handle(self.other.handle))
        self.driver = Driver(device, self.default)
        self._opened: list[xferlib.Stager] = []
        self.stager = self.opened()

    def opened(self) -> xferlib.Stager:
        """Return another stager, which is closed with the world at the latest."""
        self._opened.append(xferlib.Stager(NumbaStager(cast("Any", self.driver)), staging=PROFILE))
        return self._opened[-1]

    @property
    def backend(self) -> NumbaStager:
        return cast("NumbaStager", self.stager.backend)

    @property
    def d2h(self) -> DeviceStream:
        return DeviceStream(self._device, int(self.backend.d2h))

    @property
    def aside(self) -> DeviceStream:
        return DeviceStream(self._device, int(self.backend._aside))

    def settle(self) -> None:
        """Wait for all that the streams were told: perhaps nobody else holds the arrays that they read."""
        for stream in (self.default, self.other, self.aside, self.d2h):
            on_thread(stream.synchronize).result(WATCHDOG)

    def close(self) -> None:
        for stager in self._opened:
            on_thread(stager.close).result(WATCHDOG)
        self.default.close()
        self.other.close()


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(built_device(tmp_path_factory.mktemp("device")))


@pytest.fixture
def world(device: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    # Another device than the last test's: events and their numbers are this one's.
    monkeypatch.setattr("xferlib_numba._events._pools", {})
    monkeypatch.setattr(driver, "cuda_calls", lambda context: device.calls())
    world = World(device)
    yield world
    world.close()


def numbers(nbytes: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def jobs() -> int:
    """Return how many jobs the engine has had."""
    found = Figures()
    library().xe_read_figures(found)
    return int(found.jobs)


def is_reached(event: Event) -> bool:
    return until(event.done)


@pytest.mark.parametrize("borrow", [False, True])
@pytest.mark.parametrize("nbytes", [64 * KIB + 1, 9 * MIB + 13])
def test_ordinary_memory_crosses_both_ways(world: World, nbytes: int, borrow: bool) -> None:
    source, before = numbers(nbytes), jobs()
    there = world.stager.put(source, borrow=borrow).result()
    assert np.array_equal(there.values(), source)
    out = np.zeros_like(source)
    world.stager.get(there, out=out).synchronize()
    assert np.array_equal(out, source)
    assert jobs() == before + 2


def test_a_refusal_is_raised_as_the_error_of_numba(world: World) -> None:
    values, out = numbers(4 * MIB), np.zeros(4 * MIB, np.uint8)
    world.d2h.refuse(1, REFUSED)
    with pytest.raises(TransferError) as raised:
        world.stager.get(device_array(values), out=out).synchronize()
    assert isinstance(raised.value.__cause__, Failed)
    assert raised.value.__cause__.code == REFUSED
    world.stager.get(device_array(values), out=out).synchronize()
    assert np.array_equal(out, values)


PIECES: dict[str, Callable[[Any], Any]] = {
    "whole": lambda values: values,
    "columns": lambda values: values[:, 3:-5],
    "every_third_row": lambda values: values[::3],
}


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("producer", ["default", "the array's", "the caller's"])
def test_a_get_reads_after_its_producer_and_holds_up_nobody_else(world: World, device: Library, producer: str, piece: str) -> None:
    values = np.zeros((3000, 1000), np.uint8)
    there = PIECES[piece](values)
    array = device_array(there, stream=world.named if producer == "the array's" else 0)
    held = world.default if producer == "default" else world.other
    stream = world.named if producer == "the caller's" else None
    out = np.full(there.shape, 255, np.uint8)
    other = world.opened()
    held.hold()
    try:
        got = on_thread(lambda: world.stager.get(array, out=out, stream=stream)).result(WATCHDOG)
        mine = numbers(9 * MIB)
        for one in (other, world.stager):
            assert np.array_equal(on_thread(lambda one=one: one.put(mine).synchronize() or mine).result(WATCHDOG), mine)  # type: ignore[misc]  # default
        back, idle = np.zeros_like(mine), device.stream()
        on_thread(other.get(device_array(mine), out=back, stream=idle.handle).synchronize).result(WATCHDOG)
        assert np.array_equal(back, mine)
        idle.close()
        assert not got.done()
        values[:] = numbers(values.nbytes, 1).reshape(values.shape)
    finally:
        held.release()
    on_thread(got.synchronize).result(WATCHDOG)
    assert np.array_equal(out, there)


def test_each_leaf_of_a_tree_is_waited_for(world: World, device: Library) -> None:
    streams = [device.stream() for _ in range(3)]
    values = [np.zeros(MIB, np.uint8) for _ in streams]
    arrays = [device_array(value, Stream(Handle(stream.handle))) for value, stream in zip(values, streams, strict=True)]
    out = [np.ones(MIB, np.uint8) for _ in streams]
    for stream in streams:
        stream.hold()
    got = world.stager.get(arrays, out=out)
    for number, stream in enumerate(streams):
        assert not got.done()
        values[number][:] = number + 7
        stream.release()
    on_thread(got.synchronize).result(WATCHDOG)
    assert [set(np.unique(each)) for each in out] == [{7}, {8}, {9}]
    for stream in streams:
        stream.close()


def test_nothing_is_told_to_wait_by_a_place_and_a_mark(world: World) -> None:
    """But the stream aside: neither the copies nor the user's streams."""
    backend = world.backend
    world.other.hold()
    try:
        for values in (np.zeros((8, 8), np.uint8), np.zeros((8, 8), np.uint8)[:, ::2]):
            backend.place(device_array(values, world.named))
            assert not backend.mark().done()
        for event in (backend.record_d2h(), backend.record_h2d(), world.default.record()):
            assert is_reached(event)
    finally:
        world.other.release()
        # They read the arrays, which nobody but this test holds.
        world.settle()


def test_programs_whose_arrays_name_no_stream_have_the_short_way(world: World) -> None:
    backend = world.backend
    values = np.zeros(8, np.uint8)
    told: list[int] = []
    wait, driver = world.driver.wait, cast("Any", world.driver)

    def noted(stream: Any, event: Handle, flags: int) -> None:
        told.append(int(stream))
        wait(stream, event, flags)

    driver.wait = noted
    for name in (0, None, LEGACY, backend._streams.numba_default, world.stager.put(values).result().stream):
        backend.place(device_array(values, name))
    backend.place(device_array(values, world.named), world.named)
    told.clear()
    assert is_reached(backend.mark())
    assert is_reached(backend.mark(world.named))
    assert told == []
    backend.place(device_array(values, world.named))
    assert is_reached(backend.mark())
    assert set(told) == {int(backend._aside)}


def test_a_finalizers_get_between_place_and_mark_takes_nothing_away(world: World) -> None:
    backend, plain = world.backend, device_array(np.zeros(8, np.uint8))
    world.other.hold()
    try:
        backend.place(device_array(np.zeros(8, np.uint8), world.named))
        backend.place(plain)
        backend.mark()
        event = backend.mark()
        assert not until(event.done, seconds=0.1)
    finally:
        world.other.release()
    assert is_reached(event)


@pytest.mark.parametrize("stream", ["default", "the caller's"])
def test_a_mark_covers_what_it_names_behind_gets_that_went_aside(world: World, stream: str) -> None:
    backend, plain = world.backend, device_array(np.zeros(8, np.uint8))
    backend.place(device_array(np.zeros(8, np.uint8), world.named))
    assert is_reached(backend.mark())
    name, held = (None, world.default) if stream == "default" else (world.named, world.other)
    held.hold()
    try:
        backend.place(plain, name)
        event = backend.mark(name)
        assert not until(event.done, seconds=0.1)
    finally:
        held.release()
    assert is_reached(event)


@pytest.mark.parametrize("piece", ["whole", "columns"])
def test_an_interrupt_anywhere_loses_no_wait_of_the_next(device: Library, world: World, piece: str) -> None:
    array = device_array(PIECES[piece](np.zeros((30, 30), np.uint8)), world.named)

    def placed(backend: NumbaStager) -> Event:
        backend.place(array)
        return backend.mark()

    for step in itertools.count():
        # New each time: the first such call of a stager is another than those to come.
        backend = NumbaStager(cast("Any", world.driver))
        world.other.hold()
        try:
            went_on = interrupted_in(step, partial(placed, backend))
            event = placed(backend)
            held = world.other.record()
            assert not event.done()
            assert not held.done()
        finally:
            world.other.release()
        assert is_reached(event)
        backend.close()
        if not went_on:
            assert step > 10
            return


def test_a_capturing_stream_is_refused_before_anything_waits(world: World) -> None:
    backend = world.backend
    world.driver.capturing.add(world.other.handle)
    values = np.zeros((8, 8), np.uint8)
    for array, stream in [
        (device_array(values, world.named), None),
        (device_array(values), world.named),
        (device_array(values[:, ::2]), world.named),
    ]:
        with pytest.raises(CapabilityError, match="captured"):
            world.stager.get(array, out=np.zeros(array.shape, np.uint8), stream=stream)
    with pytest.raises(CapabilityError, match="captured"):
        backend.mark(world.named)
    world.driver.capturing.clear()
    world.other.hold()
    try:
        assert is_reached(backend.mark())
    finally:
        world.other.release()


def test_memory_that_one_stream_still_gathers_into_is_not_used_by_the_other(world: World) -> None:
    """Where a get came to nothing nobody holds it, and the copies into it are still to come."""
    backend, array = world.backend, device_array(numbers(64 * KIB).reshape(256, 256)[:, ::2])
    world.default.hold()
    try:
        by_engine, directly = [{take(array).address for _ in range(3)} for take in (backend.place, backend.as_source)]
        assert len(by_engine) == len(directly) == 1
        assert by_engine != directly
    finally:
        world.default.release()
        # They read the array, which nobody but this test holds.
        world.settle()


@pytest.mark.parametrize("pinned", [False, True])
def test_gathered_memory_is_idle_when_its_get_is_done(world: World, pinned: bool) -> None:
    backend, values = world.backend, numbers(64 * KIB).reshape(256, 256)[:, ::2]
    gathering = backend._gathering if pinned else backend._gathering_aside
    out = None if pinned else np.zeros(values.shape, np.uint8)
    world.default.hold()
    try:
        got = [on_thread(lambda: world.stager.get(device_array(values), out=out)).result(WATCHDOG)]
        gathering._settle()
        assert gathering._held
    finally:
        world.default.release()
    assert np.array_equal(on_thread(got[0].result).result(WATCHDOG), values)
    got.clear()
    assert until(lambda: not (world.stager._ledger.reap() or world.stager._ledger.busy))
    gathering._settle()
    assert not gathering._held
    assert any(gathering._idle.values())


def test_a_closed_stager_leaves_no_memory(world: World) -> None:
    before = dict(world.driver.device_memory.blocks)
    with world.opened() as own:
        values, out = np.zeros((3000, 1000), np.uint8), np.zeros((3000, 500), np.uint8)
        own.get(device_array(values[:, ::2]), out=out).synchronize()
    assert until(lambda: world.driver.device_memory.blocks == before)
