"""What a program asks of a framework beyond the hooks of its conformance module: streams, layouts, canaries. One kit per backend.

Frameworks are imported when a kit is made.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from typing import Any, ClassVar, final

import numpy as np

import xferlib
from tests.random_programs.canary import ArenaCanary, Canary, CupyCanary, DriverCanary, JaxCanary, NumbaCanary, NumpyCanary
from tests.random_programs.content import EXTENSIONS, Array, dtype_named, viewed
from tests.random_programs.driver import DRIVER, StrictStager
from xferlib.registry import backend_module

__all__ = ["NAMES", "Kit", "kit_named"]

NAMES = ("host", "driven", "jax", "cupy", "numba")
SLICED_BY_NUMBA = 4096
"""Elements."""
PLAIN = ("bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64", "complex128")


class Kit(ABC):
    """One framework. `canaries`: by name, what makes one of some bytes."""

    name: ClassVar[str]
    canaries: dict[str, Callable[[Array], Canary]]
    devices = 1
    holds = 2
    """That may be open at once."""
    wait_holds_gil = False
    """Whether to wait for device work keeps other threads from running, so that none could release it meanwhile."""
    most_ahead: int | None = None
    """Arrays that may be put behind what is held, where the framework's queue may be full then, and waits as above."""
    held_sizes: tuple[int, ...] = ()
    """Bytes that readers and held producers may have, where each size is compiled; empty: any."""
    patience = 6
    """Milliseconds, on a machine that is not busy, that a step may be blocked by what is held, before it is released."""

    def __init__(self) -> None:
        module = backend_module(self.name, "conformance")
        assert module is not None
        (hooks,) = [kind for name, kind in vars(module).items() if name.startswith("Test") and kind.__module__ == module.__name__]
        self._take(hooks(), import_module(module.__name__.rpartition(".")[0]).open_stager)

    def _take(self, hooks: Any, opener: Any) -> None:
        self.hooks: Any = hooks
        self.opener: Any = opener
        with xferlib.stager(opener()) as stager:
            self.flags = stager.capabilities
            self.on_gpu = stager.on_gpu
            self.dtypes = tuple(name for name in (*PLAIN, *EXTENSIONS) if _is_taken(stager.backend, name))

    def warm(self) -> None:
        """Run once what programs run under a hold, and start the threads that stay."""
        with xferlib.stager(self.open(0, locks=True), pinned_limit=64 << 20):
            # Where memory is locked there is one more.
            pass
        with xferlib.stager(self.open(0, locks=False), pinned_limit=64 << 20, staging="2x64KiB") as stager:
            self._warm_layouts(stager)
            for nbytes in self.held_sizes or (256,):
                values = np.ones(nbytes, np.uint8)
                array = stager.put(values).result()
                stager.put(np.ones(300_000, np.uint8)).result()
                with self.hooks.hold_compute(stager.backend) as hold:
                    read = self.hooks.read_later(array, hold)
                    hold.release()
                    read()
                with self.hooks.held_array(stager.backend, values) as held:
                    held.release()
                with self.hooks.hold_copies(stager.backend) as hold:
                    hold.release()

    def _warm_layouts(self, stager: xferlib.Stager) -> None:
        """Get and read what is not contiguous, once for each dtype: a copy on the device is compiled and loaded for that."""
        if self.held_sizes:
            # It is compiled for each size.
            return
        for name in self.dtypes:
            for shape in ((6,), (4, 6)):
                values = np.zeros(shape, dtype_named(name))
                arrays = [self.foreign(values, layout) for layout in self.layouts]
                arrays += [self.view(arrays[0], how) for how in self.views if how != "turned" or len(shape) == 2]
                for array in arrays:
                    # What fails here fails in a program, which tells it better.
                    with suppress(Exception):
                        stager.get(array).result()
                        self.read(array)

    def open(self, device: int, *, locks: bool) -> Any:
        """Open a backend for a stager."""
        return self.opener(device=device)

    def be_late(self, microseconds: int) -> None:
        """Have copies, streams and events be late now and then, by at most so much, where they can be made so."""
        return

    def open_gates(self) -> None:
        """Release whatever is held on a GPU, of holds that are being entered as well."""
        if self.on_gpu:
            from xferlib.gates import gate_table
            from xferlib.watchdog import BY_TEST, OPEN, SHUT, SLOT_NBYTES, TABLE_NBYTES

            words = gate_table().words
            for word in range(0, TABLE_NBYTES // 4, SLOT_NBYTES // 4):
                if words[word] == SHUT:
                    words[word + 1] = BY_TEST
                    words[word] = OPEN

    def read(self, array: Any) -> Array:
        """Wait for the calling thread's current stream on the array's device, and return what it holds, without a stager."""
        values: Array = self.hooks.to_numpy(array)
        return values

    def read_later(self, array: Any, hold: Any) -> Callable[[], Array]:
        """Enqueue what reads the array behind what is held."""
        values: Callable[[], Array] = self.hooks.read_later(array, hold)
        return values

    def stream(self) -> Any:
        raise NotImplementedError

    def end_stream(self, stream: Any) -> None:
        """Wait for a stream; it is not used any more."""
        stream.synchronize()

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        """Make the stream the thread's current one. Only where `has_current`."""
        raise NotImplementedError

    has_current = False
    views: tuple[str, ...] = ("tail", "steps", "backwards", "turned")
    has_empty_views = True
    layouts: tuple[str, ...] = ("C",)

    def foreign(self, values: Array, layout: str) -> Any:
        """Return a finished device array of the framework's own, on its first device."""
        return self.hooks.from_numpy(values)

    def view(self, array: Any, how: str) -> Any:
        return viewed(array, how)

    def settle(self, device: int) -> None:
        """Wait for a device."""
        return

    def ask(self) -> None:
        """Call the framework for nothing: some let go of what was dropped only when they are called."""
        return

    def while_held(self) -> AbstractContextManager[Any]:
        """Keep the framework from what would wait for held work, for reasons of its own."""
        return nullcontext()


class HostKit(Kit):
    name = "host"
    has_current = True
    layouts = ("C", "F", "steps", "backwards")

    def __init__(self) -> None:
        super().__init__()
        self.canaries = {"numpy": NumpyCanary, "arena": ArenaCanary}

    def open(self, device: int, *, locks: bool) -> Any:
        # Half of them look like arrays written in Python, as CuPy's and Numba's are.
        return StrictStager(self.opener(), locks=locks, visible=locks)

    def read_later(self, array: Any, hold: Any) -> Callable[[], Array]:
        # As bytes: NumPy's array interface cannot spell the dtypes of extensions.
        dtype, shape = array.dtype, array.shape
        values: Callable[[], Array] = self.hooks.read_later(array.reshape(-1).view(np.uint8), hold)
        return lambda: values().view(dtype).reshape(shape)

    def stream(self) -> Any:
        import xferlib_host

        return xferlib_host.Stream()

    def end_stream(self, stream: Any) -> None:
        stream.close()

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        entered: AbstractContextManager[Any] = stream
        return entered

    def foreign(self, values: Array, layout: str) -> Any:
        return laid_out(values, layout)


@final
class DrivenKit(HostKit):
    """The host's, where the engine calls a driver by the addresses of its functions. Copies, streams and events are often late."""

    name = "driven"

    def __init__(self) -> None:
        from tests.engine.conformance import TestDriven
        from tests.engine.device import Driven, the_device

        self.device = the_device()
        self._take(TestDriven(), lambda: Driven(self.device))
        self.canaries = {"numpy": NumpyCanary, "arena": ArenaCanary}
        self.device.watch(DRIVER.check_copy)

    def be_late(self, microseconds: int) -> None:
        self.device.library.device_be_late(microseconds)

    def stream(self) -> Any:
        return self.device.stream()


@final
class JaxKit(Kit):
    name = "jax"
    views = ("same",)
    wait_holds_gil = True
    # Each that is held has one of the few threads that compute, and what finds none left waits with the interpreter's lock held.
    holds = 1
    held_sizes = (256, 4096, 300_000)

    def __init__(self) -> None:
        super().__init__()
        import jax

        self.jax: Any = jax
        # XLA enqueues calls of the host with each import and each computation. The driver has room for so many, and JAX waits for
        # more with the interpreter's lock held: seen behind held copies at the fifth put of fourteen arrays, and behind held
        # compute at the sixth of eleven. Half of that, since finalizers put, too.
        self.most_ahead = 30 if self.on_gpu else None
        self.devices = len(jax.local_devices()) if self.on_gpu else 1
        self.layouts = ("C", "F")
        self.canaries = {"jax": functools.partial(JaxCanary, jax)}
        if self.on_gpu:
            self.canaries["driver"] = DriverCanary
        else:
            self.canaries["arena"] = ArenaCanary

    def open(self, device: int, *, locks: bool) -> Any:
        backend = self.opener(device=device)
        return backend if self.on_gpu else StrictStager(backend, locks=locks)

    def read(self, array: Any) -> Array:
        if self.devices == 1:
            return super().read(array)
        from xferlib.conformance import cuda

        # As the hook does, on the device of this array.
        array.block_until_ready()
        order = array.format.layout.major_to_minor if array.ndim > 1 else tuple(range(array.ndim))
        read = np.empty([array.shape[axis] for axis in order], array.dtype)
        if read.nbytes:
            with cuda.context(int(array.device.local_hardware_id)):
                cuda.call("cuMemcpyDtoH", read.ctypes.data, array.unsafe_buffer_pointer(), read.nbytes)
        return np.ascontiguousarray(read.transpose(np.argsort(order))) if array.ndim > 1 else read

    def view(self, array: Any, how: str) -> Any:
        # No view, but another array over the same memory.
        return self.jax.device_put(array, array.device)

    def foreign(self, values: Array, layout: str) -> Any:
        if layout == "C" or values.ndim != 2 or 0 in values.shape:
            return self.hooks.from_numpy(values)
        from jax.experimental.layout import Format, Layout

        device = self.jax.local_devices()[0]
        form = Format(Layout(major_to_minor=(1, 0)), self.jax.sharding.SingleDeviceSharding(device))
        return self.jax.device_put(values, form).block_until_ready()

    def settle(self, device: int) -> None:
        self.jax.effects_barrier()

    def ask(self) -> None:
        from jaxlib import _jax

        # Not by what keeps the interpreter while it waits for the lock of JAX's device memory.
        _jax.collect_garbage()


@final
class CupyKit(Kit):
    name = "cupy"
    has_current = True
    layouts = ("C", "F", "steps", "backwards")

    def __init__(self) -> None:
        super().__init__()
        import cupy

        self.cupy: Any = cupy
        self.devices = int(cupy.cuda.runtime.getDeviceCount())
        self.canaries = {"cupy": functools.partial(CupyCanary, cupy), "driver": DriverCanary}

    def read(self, array: Any) -> Array:
        with array.device:
            if array.flags.c_contiguous or is_numpys(array.dtype):
                values: Array = self.hooks.to_numpy(array)
                return values
            # What is not contiguous is copied by a kernel first, which CuPy does not have for every dtype of an extension.
            read: Array = self.hooks.to_numpy(array.view(f"u{array.dtype.itemsize}"))
        return read.view(array.dtype)

    def stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        entered: AbstractContextManager[Any] = stream
        return entered

    def foreign(self, values: Array, layout: str) -> Any:
        if layout == "C":
            return self.hooks.from_numpy(values)
        array = laid_out(values, layout)
        base = array if array.base is None else array.base
        raw = self.cupy.asarray(np.ascontiguousarray(base.reshape(-1, order="A")).view(np.uint8))
        self.cupy.cuda.get_current_stream().synchronize()
        offset = array.ctypes.data - base.ctypes.data
        return self.cupy.ndarray(array.shape, array.dtype, raw.data + offset, strides=array.strides)

    def settle(self, device: int) -> None:
        self.cupy.cuda.Device(device).synchronize()


@final
class NumbaKit(Kit):
    name = "numba"
    views = ("tail", "steps", "turned")
    # Of an empty slice some versions make an array that they cannot read, and slices of empty arrays get the wrong shape.
    has_empty_views = False
    layouts = ("C", "F")

    def __init__(self) -> None:
        if not hasattr(np, "row_stack"):
            # Numba asks for it as it is imported.
            np.row_stack = np.vstack
        super().__init__()
        from xferlib_numba._module import load

        self.cuda: Any = load().cuda
        self.devices = len(list(self.cuda.gpus))
        self.canaries = {"numba": functools.partial(NumbaCanary, self.cuda), "driver": DriverCanary}

    def stream(self) -> Any:
        return self.cuda.stream()

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def read(self, array: Any) -> Array:
        if not array.size:
            # There is nothing to be read, and such an array names no device.
            return np.empty(array.shape, array.dtype)
        if self.devices == 1:
            return super().read(array)
        with self.cuda.gpus[array.gpu_data.context.device.id]:
            return super().read(array)

    def foreign(self, values: Array, layout: str) -> Any:
        if layout == "C" or values.ndim != 2:
            return self.hooks.from_numpy(values)
        return self.view(self.hooks.from_numpy(np.ascontiguousarray(values.T)), "turned")

    def view(self, array: Any, how: str) -> Any:
        if how == "turned":
            # Its own `T` is no view, but a new array that a kernel fills, compiled for the dtype, at once and behind nothing.
            return self._seen_as(array, array.shape[::-1], array.strides[::-1])
        if how == "steps" and array.size > SLICED_BY_NUMBA:
            # It goes through such a slice element by element, in Python.
            first, *rest = array.shape
            return self._seen_as(array, (-(-first // 2), *rest), (2 * array.strides[0], *array.strides[1:]))
        return super().view(array, how)

    def _seen_as(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return a view that begins where the array does."""
        return type(array)(shape, strides, array.dtype, array.stream, array.gpu_data)

    def settle(self, device: int) -> None:
        with self.cuda.gpus[device]:
            self.cuda.synchronize()

    def while_held(self) -> AbstractContextManager[Any]:
        # Numba frees in batches, which wait for whatever runs.
        deferred: AbstractContextManager[Any] = self.cuda.defer_cleanup()
        return deferred


def is_numpys(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is one of NumPy's, and not of an extension."""
    return np.dtype(dtype.type).isbuiltin == 1


def laid_out(values: Array, layout: str) -> Array:
    """Return the values in new memory of this layout: C, F, every second place, or last first."""
    if layout == "F":
        array = np.empty(values.shape, values.dtype, "F")
    elif layout == "steps" and values.ndim:
        array = np.zeros((2 * values.shape[0], *values.shape[1:]), values.dtype)[::2]
    elif layout == "backwards" and values.ndim:
        array = np.empty(values.shape, values.dtype)[::-1]
    else:
        array = np.empty(values.shape, values.dtype)
    same = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}.get(values.dtype.itemsize, np.complex128)
    if values.ndim:
        array.view(same)[...] = values.view(same)
    else:
        array[...] = values
    return array


def _is_taken(backend: Any, name: str) -> bool:
    try:
        backend.check_dtype(dtype_named(name))
    except (TypeError, ImportError):
        return False
    return True


@functools.cache
def kit_named(name: str) -> Kit:
    """Return this process's kit for a backend. Raises `BackendUnavailableError` where it cannot be opened."""
    kinds: dict[str, type[Kit]] = {kind.name: kind for kind in (HostKit, DrivenKit, JaxKit, CupyKit, NumbaKit)}
    return kinds[name]()
