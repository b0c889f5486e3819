"""Hooks that let the conformance suite hold JAX's work and look at its data: `pytest --pyargs xferlib_jax.conformance`.

Held compute is a computation of JAX's own that cannot end before a word of shared memory is written. No hold calls into Python: JAX
sometimes waits with the GIL held, and held work that needs the GIL for its release would then never be released. So even a backend
that waits where it must not ends as a failure, by the watchdog's process, and not as a hang.

Everything that runs under a hold has run before, on the same shapes. JAX is imported when the first hook runs, so that a machine
without it skips and does not fail at collection.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from xferlib.conformance import Direction, HeldArray, Hold, StagerConformance, cuda, cupti
from xferlib.conformance.values import others
from xferlib.gates import GATE_SECONDS, Gate
from xferlib.protocol import HostStager
from xferlib_jax import open_stager

if TYPE_CHECKING:
    from xferlib_jax._engine import Engine

__all__ = ["Bench", "TestJax", "bench"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

WORDS = 4
"""uint32 of a gate: the one that holds, who opened it, and the deadline, which no computation looks at."""
TOKEN_NBYTES = 1024
NON_BLOCKING = 1


class TestJax(StagerConformance):
    def open(self) -> HostStager[Any]:
        return open_stager(device=0)

    def from_numpy(self, values: Array) -> Any:
        return bench().array(values)

    def to_numpy(self, array: Any) -> Array:
        return bench().values(array)

    def hold_compute(self, stager: HostStager[Any]) -> AbstractContextManager[Hold]:
        return bench().hold()

    def hold_copies(self, stager: HostStager[Any], direction: Direction = "both") -> AbstractContextManager[Hold]:
        return bench().hold_copies(stager, direction)

    @contextmanager
    def held_array(self, stager: HostStager[Any], values: Array) -> Iterator[HeldArray]:
        before = others(values)
        # Compiled before the gate is shut.
        bench().produce(bench().array(before), bench().array(values), bench().token).block_until_ready()
        place, product = bench().array(before), bench().array(values)
        with bench().hold() as hold:
            yield _HeldJaxArray(hold, bench().produce(place, product, hold.token))

    def read_later(self, array: Any, hold: Any) -> Callable[[], Array]:
        seen = bench().read(array, hold.token)
        return lambda: bench().values(seen)

    def break_copies(self, stager: HostStager[Any]) -> AbstractContextManager[None]:
        return bench().break_copies(stager)

    def memory_calls(self, stager: HostStager[Any]) -> int:
        return bench().memory_calls(stager)

    def page_locked(self, address: int) -> bool:
        return cuda.page_locked(address)

    def write_combined(self, address: int) -> bool:
        return cuda.write_combined(address)

    def layouts(self, values: Array) -> Iterable[tuple[str, Any]]:
        from jax.experimental.layout import Format, Layout

        by_columns = Format(Layout(major_to_minor=(1, 0)), bench().jax.sharding.SingleDeviceSharding(bench().device))
        yield "by columns", bench().jax.device_put(values.copy(), by_columns).block_until_ready()

    def aliases(self, array: Any) -> Iterable[tuple[str, Any]]:
        jax = bench().jax
        yield "slice", array[1:]
        yield "asarray", jax.numpy.asarray(array)
        yield "put on its own device", jax.device_put(array, array.device)
        yield "assembled", jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
        yield "on a mesh of one", jax.device_put(array, bench().mesh)
        yield "shard", array.addressable_shards[0].data
        yield "what jit passes through", bench().passed(array)
        # A donated array is no alias: JAX refuses to take memory that others read, a get included.
        yield "imported from its capsule", jax.dlpack.from_dlpack(array)


@final
class JaxHold:
    """A computation held at a gate, and `token`, its result: whatever takes the token as an argument is held as well."""

    stream = None

    def __init__(self, shut: Callable[[], bool], release: Callable[[], None], token: Any) -> None:
        self._shut = shut
        self.release = release
        self.token = token

    @property
    def held(self) -> bool:
        return self._shut() and not self.token.is_ready()


@final
class _HeldJaxArray:
    """An array that held work produces."""

    stream = None

    def __init__(self, hold: JaxHold, array: Any) -> None:
        self._hold = hold
        self.array = array
        self.token = hold.token
        self.release = hold.release

    @property
    def held(self) -> bool:
        return self._hold.held and not self.array.is_ready()


class Bench(ABC):
    """Computations on one of JAX's platforms. One per process: `bench()`. `token` is what a hold's token is once it is released."""

    token: Any

    def __init__(self) -> None:
        import jax

        from xferlib_jax._capsule import capsules

        self.jax: Any = jax
        self.device = jax.local_devices()[0]
        sharding = self.jax.sharding
        self.mesh = sharding.NamedSharding(sharding.Mesh(np.array([self.device]), ("x",)), sharding.PartitionSpec("x"))
        self.capsules = capsules()
        # A result of its own, which is there when the token is. Without the barrier it would be the argument itself.
        jit, after = self.jax.jit, self.jax.lax.optimization_barrier
        self.read = jit(lambda array, token: after((array, token))[0], keep_unused=True)
        # Writes into the memory of its first argument, which holds other values until then.
        self.produce = jit(lambda place, product, token: after((product, token))[0], keep_unused=True, donate_argnums=0)
        self.passed = jit(lambda array: array)
        self.donated = jit(lambda array: array + array.dtype.type(0), donate_argnums=0)

    def array(self, values: Array) -> Any:
        """Return a finished array with these values, in memory that nobody else has."""
        return self.jax.device_put(values.copy(), self.device).block_until_ready()

    @abstractmethod
    def values(self, array: Any) -> Array:
        """Wait for the array and read its memory, not what JAX may have kept of it before."""

    @abstractmethod
    def hold(self) -> AbstractContextManager[JaxHold]:
        """Start a computation that cannot end."""

    @abstractmethod
    def hold_copies(self, stager: Any, direction: Direction) -> AbstractContextManager[Hold]: ...

    @abstractmethod
    def break_copies(self, stager: Any) -> AbstractContextManager[None]: ...

    @abstractmethod
    def memory_calls(self, stager: Any) -> int: ...


@final
class CpuBench(Bench):
    """On the CPU a computation is held by reading the gate's word again and again."""

    def __init__(self) -> None:
        super().__init__()
        self._spin = self.jax.jit(_spin_until_open)
        with self.hold() as hold:
            self.token = hold.token

    def values(self, array: Any) -> Array:
        return np.array(array)

    @contextmanager
    def hold(self) -> Iterator[JaxHold]:
        gate = Gate()
        with ExitStack() as stack:
            stack.callback(_give_back, gate)
            hold = JaxHold(lambda: gate.shut, gate.open, self._spin(*self._word(gate.address)))
            # Before the gate is given back, nothing may read its word any more.
            stack.callback(hold.token.block_until_ready)
            stack.callback(gate.open)
            yield hold

    @contextmanager
    def hold_copies(self, stager: Any, direction: Direction) -> Iterator[Hold]:
        engines = {"h2d": [stager.h2d], "d2h": [stager.d2h], "both": [stager.h2d, stager.d2h]}[direction]
        hold = _HeldEngines(engines)
        try:
            yield hold
        finally:
            hold.finish()

    @contextmanager
    def break_copies(self, stager: Any) -> Iterator[None]:
        stager.h2d.submit(_break)
        stager.d2h.submit(_break)
        yield

    def memory_calls(self, stager: Any) -> int:
        calls: int = stager.memory.calls
        return calls

    def _word(self, address: int) -> tuple[Any, np.int32]:
        """Return an array over memory that contains the word at this address, and the word's place in it."""
        from xferlib_jax._arrays import adopt

        first = address % 256
        shape = ((first + 4 * WORDS) // 4,)
        table = adopt(self.capsules, address - first, shape, np.dtype(np.uint32), device=(1, 0), order=None, lease=None)
        return table, np.int32(first // 4)


@final
class _HeldEngines:
    """A `Hold` over copy engines: jobs in the place of copies, which do not end before `release`."""

    stream = None

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._opened = threading.Event()
        self._ended: list[threading.Event] = []
        self._overdue = False
        for engine in engines:
            ended = threading.Event()
            self._ended.append(ended)
            engine.submit(functools.partial(self._stand, ended))

    @property
    def held(self) -> bool:
        return not self._opened.is_set() and not any(ended.is_set() for ended in self._ended)

    def release(self) -> None:
        self._opened.set()

    def finish(self) -> None:
        """Release, and wait for the jobs. Raises `TimeoutError` if one of them had been given up."""
        self.release()
        for ended in self._ended:
            ended.wait()
        if self._overdue:
            raise TimeoutError(f"the gate was given up after {GATE_SECONDS} s: something waited for what it held")

    def _stand(self, ended: threading.Event) -> None:
        if not self._opened.wait(GATE_SECONDS):
            self._overdue = True
        ended.set()


@final
class CudaBench(Bench):
    """On a GPU a computation is held by an argument that was imported behind a stream that is stopped at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self._ordinal = int(self.device.local_hardware_id)
        self._store = self.array(np.zeros(TOKEN_NBYTES, np.uint8))
        self._address = int(self._store.unsafe_buffer_pointer())
        with cuda.context(self._ordinal):
            self._streams = [int(cuda.call("cuStreamCreate", NON_BLOCKING)) for _ in range(2)]
        self._start = self.jax.jit(lambda small: small.astype(np.int32).sum())
        self._readable: set[tuple[Any, ...]] = set()
        self._witness, self._counted = _driver_calls()
        self.token = self._start(self._import(None)).block_until_ready()

    def values(self, array: Any) -> Array:
        # Not by NumPy's protocol: JAX keeps what it gave out once, and a second look would see that.
        array.block_until_ready()
        order = array.format.layout.major_to_minor if array.ndim > 1 else tuple(range(array.ndim))
        read = np.empty([array.shape[axis] for axis in order], array.dtype)
        if read.nbytes:
            with cuda.context(self._ordinal):
                cuda.call("cuMemcpyDtoH", read.ctypes.data, array.unsafe_buffer_pointer(), read.nbytes)
        return np.ascontiguousarray(read.transpose(np.argsort(order))) if array.ndim > 1 else read

    @contextmanager
    def hold(self) -> Iterator[JaxHold]:
        self._compile_readers()
        stream = self._streams.pop()
        marks: list[cuda.Mark] = []
        tokens: list[Any] = []

        def enqueue() -> None:
            mark = cuda.Mark(stream, device=self._ordinal)
            marks.append(mark)
            tokens.append(self._start(self._import(mark)))

        try:
            with cuda.hold_streams([stream], enqueue=enqueue, device=self._ordinal) as held:
                yield JaxHold(lambda: held.held, held.release, tokens[0])
        finally:
            # Leaving the hold of the stream has opened the gate, whatever happened.
            for token in tokens:
                token.block_until_ready()
            for mark in marks:
                mark.destroy()
            self._streams.append(stream)

    def hold_copies(self, stager: Any, direction: Direction) -> AbstractContextManager[Hold]:
        handles = {"h2d": [stager.h2d], "d2h": [stager.d2h], "both": [stager.h2d, stager.d2h]}
        return cuda.hold_streams(handles[direction], device=self._ordinal)

    @contextmanager
    def break_copies(self, stager: Any) -> Iterator[None]:
        # Below the protocol's methods, so that the test sees how the backend handles a failure.
        honest = stager.copies
        h2d, d2h = honest
        stager.copies = (
            lambda dst, src, nbytes, stream: h2d(cuda.NO_DEVICE_MEMORY, src, nbytes, stream),
            lambda dst, src, nbytes, stream: d2h(dst, cuda.NO_DEVICE_MEMORY, nbytes, stream),
        )
        try:
            with cuda.copies_go_nowhere(stager.driver_calls.calls):
                yield
        finally:
            stager.copies = honest

    def memory_calls(self, stager: Any) -> int:
        # Device blocks come out of JAX's pool, and the driver sees nothing of them.
        driver, blocks = self._counted(), stager.blocks_made + stager.blocks_freed
        # Shown only if the test fails: then by name.
        print(f"memory calls so far, as {self._witness} saw them: {driver}; blocks of JAX's memory taken and given back: {blocks}")
        return driver + int(blocks)

    def _compile_readers(self) -> None:
        """Let whatever can be reached now be readable under a hold, where nothing can be compiled."""
        for shape, dtype in {(array.shape, array.dtype) for array in self.jax.live_arrays()} - self._readable:
            self._readable.add((shape, dtype))
            self.read(self.array(np.zeros(shape, dtype)), self.token).block_until_ready()

    def _import(self, mark: cuda.Mark | None) -> Any:
        """Import the small array; what is computed from it waits for the mark."""
        from xferlib_jax._arrays import adopt

        def order(importing: Any) -> None:
            if mark is not None:
                cuda.call("cuStreamWaitEvent", importing, mark._event, 0)

        shape, kind = (TOKEN_NBYTES,), np.dtype(np.uint8)
        return adopt(self.capsules, self._address, shape, kind, device=(2, self._ordinal), order=order, lease=None)


def _driver_calls() -> tuple[str, Callable[[], int]]:
    """Return what counts, in words, and a function that gives what was counted so far."""
    try:
        calls = cupti.driver_calls()
    except cupti.CuptiError as error:
        return f"nobody (CUPTI cannot: {error})", lambda: 0
    return "CUPTI", lambda: calls.total


@functools.cache
def bench() -> Bench:
    """Return this process's bench, making it on the first call: not under a hold."""
    import jax

    return CpuBench() if jax.default_backend() == "cpu" else CudaBench()


def _spin_until_open(table: Any, index: Any) -> Any:
    import jax

    def shut(state: Any) -> Any:
        return jax.lax.dynamic_index_in_dim(state[0], state[1], keepdims=False) == 0

    def look_again(state: Any) -> Any:
        # The same place, in a way that no compiler can see through; otherwise it would look only once.
        return state[0], jax.numpy.maximum(state[1], index)

    # XLA runs what is cheap on the calling thread. A product of matrices is not.
    matrix = jax.numpy.full((64, 64), index, np.float32)
    _, place = jax.lax.while_loop(shut, look_again, (table, index))
    return place + (matrix @ matrix @ matrix).sum().astype(np.int32)


def _give_back(gate: Gate) -> None:
    overdue = gate.opened_by == "watchdog"
    gate.give_back()
    if overdue:
        raise TimeoutError(f"the watchdog opened the gate after {gate.seconds:g} s. Something waited for the held work")


def _break() -> None:
    raise RuntimeError("broken on purpose")
