"""JAX backends that break one promise each, and the tests that must fail by it, where JAX computes on the CPU and on a GPU.

Here stand the mistakes that only JAX invites: its own transfers, imports without their hand-shake, leases on the wrong object.
`pytest tests/mutants/laws/jax.py` shows how each fails.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from xferlib_jax.conformance import TestJax as Jax
from xferlib_jax.conformance import bench

from tests.mutants.laws.broken import BrokenBackend, BrokenEvent, BrokenEvents, KeepsTheInterpreter, Mutant
from xferlib.protocol import DeviceRange, Event

__all__ = ["MUTANTS", "JaxMutant"]

LAW06 = "test_law06_a_transfer_completes_while_compute_is_held"
LAW06_OPPOSITE = "test_law06_a_transfer_completes_while_the_opposite_direction_is_held"
LAW08_READER = "test_law08_memory_of_a_dropped_array_is_not_rewritten_under_a_reader"
LAW08_ALIASES = "test_law08_views_and_aliases_keep_the_memory"
LAW13 = "test_law13_a_hundred_transfers_call_for_no_memory"
LAW14_OTHERS_RUN = "test_law14_other_threads_run_while_memory_is_released"

W = TypeVar("W", bound=Callable[..., Any])


class JaxMutant(NamedTuple):
    """What must fail, by platform."""

    cpu: tuple[str, ...]
    cuda: tuple[str, ...]
    wall: Callable[[Any], Any]

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.cpu, *self.cuda)))


MUTANTS: dict[str, JaxMutant] = {}
"""By the name of the class that is collected."""


def broken_jax(*tests: str, cpu: tuple[str, ...] = (), cuda: tuple[str, ...] = ()) -> Callable[[W], W]:
    """List a wall as the mutant by which these tests fail, on either platform or on one of them."""

    def listed(wall: W) -> W:
        assert wall.__doc__, "a mutant says what it does wrong"
        MUTANTS[f"TestJax_{wall.__name__}"] = JaxMutant((*tests, *cpu), (*tests, *cuda), wall)
        return wall

    return listed


@broken_jax("test_law01_put_keeps_values_shape_and_dtype[float64]", "test_law01_put_keeps_values_shape_and_dtype[int64]")
class NarrowsWideTypes(BrokenBackend):
    """Accepts what JAX narrows, and narrows it."""

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Accept it."""

    def as_array(self, block: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], **rest: Any) -> Any:
        narrow = np.dtype({"d": "f", "l": "i"}.get(dtype.char, dtype))
        return self.inner.as_array(block, offset, shape, narrow, **rest)


class WhenJaxIsReady(BrokenEvent):
    """Reached when an array is there."""

    array: Any = None

    def done(self) -> bool:
        return bool(self.array is None or self.array.is_ready())

    def synchronize(self) -> None:
        if self.array is not None:
            self.array.block_until_ready()


@broken_jax(
    cpu=("test_law02_a_pinned_source_is_free_once_done[small]", "test_law02_a_pinned_source_is_free_once_done[large]"),
    cuda=(f"{LAW06}[small-put]", f"{LAW06}[large-put]"),
)
class PutsAsJaxDoes(BrokenEvents):
    """Transfers with `jax.device_put`."""

    event = WhenJaxIsReady

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.sources: dict[int, int] = {}

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.sources[dst] = src

    def as_array(self, block: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, after: Any, lease: object) -> Any:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(self.sources[block.address + offset])
        after.array = bench().jax.device_put(np.frombuffer(memory, dtype).reshape(shape), bench().device)
        return after.array


class Unordered(BrokenEvent):
    """Lets nobody wait."""

    def stream_wait(self, stream: object | None = None) -> None:
        return None

    def hold_back(self, stream: Any) -> None:
        """Let it run."""


@broken_jax("test_law07_value_can_be_used_at_once", "test_law07_work_behind_stream_wait_sees_the_data")
class AdoptsWithoutAHandshake(BrokenEvents):
    """Hands arrays to JAX and tells it nothing of the copies that fill them."""

    event = Unordered


@broken_jax(f"{LAW08_READER}[small]", f"{LAW08_READER}[large]", LAW08_ALIASES)
class LeasesToThePythonArray(BrokenBackend):
    """Ends the lease when the Python object that it made dies, by a weak reference."""

    def as_array(self, *arguments: Any, after: Event, lease: object) -> Any:
        array = self.inner.as_array(*arguments, after=after, lease=None)
        weakref.finalize(array, forget, lease).atexit = False
        return array


@broken_jax(f"{LAW08_READER}[small]", LAW08_ALIASES)
class LeasesToTheStore(BrokenBackend):
    """Has a store of JAX's export its memory, and ends the lease with the store: its capsule keeps the buffer, and tells nobody."""

    def as_array(self, *arguments: Any, after: Event, lease: object) -> Any:
        store = self.inner.as_array(*arguments, after=after, lease=None)
        weakref.finalize(store, forget, lease).atexit = False
        return bench().jax.dlpack.from_dlpack(store)


def forget(lease: object) -> None:
    """Hold the lease until called."""


@broken_jax("test_law03_get_survives_the_loss_of_its_array[small]", "test_law03_get_survives_the_loss_of_its_array[large]")
class ReadsWhatNobodyKeeps(BrokenBackend):
    """Names the memory of an array that is to be read, and holds nothing of it."""

    def as_source(self, array: Any, stream: object | None = None) -> DeviceRange:
        source = self.inner.as_source(array, stream)
        return DeviceRange(source.address, source.nbytes, None)


@broken_jax("test_law05_get_returns_while_its_producer_is_held", "test_law06_put_completes_while_a_get_waits_for_its_producer")
class AsksJaxForTheAddress(BrokenBackend):
    """Waits for an array before it starts to get it, as asking JAX where an array lies does."""

    def as_source(self, array: Any, stream: object | None = None) -> DeviceRange:
        array.block_until_ready()
        source: DeviceRange = self.inner.as_source(array, stream)
        return source


@broken_jax(f"{LAW06_OPPOSITE}[put]", f"{LAW06_OPPOSITE}[get]", "test_law06_put_completes_while_a_get_waits_for_its_producer")
def copies_both_ways_in_one_queue(honest: Any) -> Any:
    """Has one queue for both directions."""
    honest.d2h = honest.h2d
    return honest


@broken_jax(f"{LAW13}[small-put]", f"{LAW13}[large-get]")
class TakesABlockForEachCopy(BrokenBackend):
    """Takes device memory for each copy, and gives it back."""

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.free_device(self.inner.alloc_device(256))
        self.inner.copy_h2d(dst, src, nbytes)

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.free_device(self.inner.alloc_device(256))
        self.inner.copy_d2h(dst, src, nbytes)


class LocksByTheClient(BrokenBackend):
    """Locks and unlocks by the client."""

    def pin(self, address: int, nbytes: int) -> None:
        bench().device.client.dma_map(address, nbytes)

    def unpin(self, address: int) -> None:
        bench().device.client.dma_unmap(address)


@broken_jax(*(f"{LAW14_OTHERS_RUN}[{way}]" for way in ("trim", "unpin", "close")))
def waits_as_jaxs_client_does(honest: Any) -> Any:
    """Locks memory by JAX's client, which keeps the interpreter's lock as it waits. On the CPU, where it locks none, waits so."""
    return LocksByTheClient(honest) if bench().device.platform == "gpu" else KeepsTheInterpreter(honest)


for _name, _mutant in MUTANTS.items():
    globals()[_name] = Mutant(tests=_mutant.tests, hooks=Jax, wall=_mutant.wall).make_tests(_name)
