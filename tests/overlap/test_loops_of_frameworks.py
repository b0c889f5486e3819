"""`assert_overlaps` on a GPU: loops of four frameworks that overlap pass, and each planted fault is named with its line.

Each loop is as somebody would write it who knows nothing of xferlib, but for those over its own `put` and `prefetch`. It has the
machine to itself: others that use CUDA meanwhile would be seen.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeAlias

import numpy as np
import pytest

import xferlib

NBYTES = 8 << 20
SIDE = 1024
WARMUP = 8
"""Steps. On JAX our own pool takes its first blocks of a size by copies, which would make one step unlike the next."""
MOST_TRIES = 3
HERE = os.path.basename(__file__)

_open = ExitStack()
"""What the loop of this test has opened."""

Step: TypeAlias = Callable[[], object]
Loop: TypeAlias = Callable[[Any], Step]


def needs(framework: str) -> Any:
    """Return the framework, and skip where it has no GPU. Where it is required, that fails."""
    required = os.environ.get("XFERLIB_REQUIRE", "").split(",")
    try:
        with warnings.catch_warnings():
            # NumPy's, of what Numba does as it is imported.
            warnings.simplefilter("ignore", DeprecationWarning)
            found = importlib.import_module("numba.cuda" if framework == "numba" else framework)
        there = {
            "cupy": lambda: found.cuda.runtime.getDeviceCount() > 0,
            "numba": lambda: found.is_available(),
            "jax": lambda: found.devices()[0].platform == "gpu",
            "torch": lambda: found.cuda.is_available(),
        }[framework]()
    except Exception as error:  # What is missing, each says in its own way.
        there, why = False, str(error)
    else:
        why = "it sees no GPU"
    if not there:
        (pytest.fail if framework in required else pytest.skip)(f"{framework} cannot run a loop here: {why}")
    return found


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    with _open:
        yield


def opened(backend: str) -> Any:
    return _open.enter_context(xferlib.stager(backend))


def kept(thing: Any) -> Any:
    return _open.enter_context(thing)


# CuPy.


def cupy_pinned(cupy: Any) -> Any:
    memory = cupy.cuda.alloc_pinned_memory(NBYTES)
    array = np.frombuffer(memory, np.float32, NBYTES // 4)
    array[:] = 1
    return array


class CupySlots:
    """Device memory for batches, and what a step of compute needs."""

    def __init__(self, cupy: Any, count: int = 2) -> None:
        self.cupy = cupy
        self.compute, self.copies = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self.slots = [cupy.zeros(NBYTES // 4, np.float32) for _ in range(count)]
        self.out = [cupy.zeros(NBYTES // 4, np.float32) for _ in range(count)]
        self.read = [cupy.cuda.Event(disable_timing=True) for _ in range(count)]
        self.there = [cupy.cuda.Event(disable_timing=True) for _ in range(count)]
        self.source = cupy_pinned(cupy)
        self.number = 0
        cupy.cuda.Device().synchronize()

    def work(self, slot: int, stream: Any) -> None:
        with stream:
            for _ in range(3):
                self.cupy.sin(self.slots[slot], out=self.out[slot])

    def turn(self) -> tuple[int, int]:
        """Return the slot of this step's batch, and that of the next one's."""
        now = self.number % len(self.slots)
        self.number += 1
        return now, self.number % len(self.slots)

    def copy(self, slot: int, source: Any, stream: Any) -> None:
        stream.wait_event(self.read[slot])
        self.slots[slot].set(source, stream=stream)  # copies
        self.there[slot].record(stream)

    def step(self, source: Any, copies: Any) -> None:
        now, following = self.turn()
        self.copy(following, source, copies)
        self.compute.wait_event(self.there[now])
        self.work(now, self.compute)
        self.read[now].record(self.compute)


def cupy_two_slots(cupy: Any) -> Step:
    slots = CupySlots(cupy)
    return lambda: slots.step(slots.source, slots.copies)


def cupy_results_on_their_own_stream(cupy: Any) -> Step:
    slots, back, out = CupySlots(cupy), cupy.cuda.Stream(non_blocking=True), [cupy_pinned(cupy) for _ in range(2)]

    def step() -> None:
        now, _ = slots.turn()
        back.wait_event(slots.there[now])
        slots.out[now].get(stream=back, out=out[now], blocking=False)
        slots.read[now].record(back)
        other = 1 - now
        slots.compute.wait_event(slots.read[other])
        slots.work(other, slots.compute)
        slots.there[other].record(slots.compute)

    return step


def cupy_put_ahead(cupy: Any) -> Step:
    stager = opened("cupy")
    source = stager.empty_pinned(NBYTES // 4, np.float32)
    source[:] = 1
    stager.idle()
    compute = cupy.cuda.Stream(non_blocking=True)
    batch = [stager.put(source)]

    def step() -> None:
        with compute:
            array, following = batch[0].value, stager.put(source)
            for _ in range(3):
                cupy.sin(array, out=array)
            batch[0] = following

    return step


def cupy_same_stream(cupy: Any) -> Step:
    slots = CupySlots(cupy)
    return lambda: slots.step(slots.source, slots.compute)


def cupy_null_stream(cupy: Any) -> Step:
    slots = CupySlots(cupy)
    slots.compute = cupy.cuda.Stream()
    return lambda: slots.step(slots.source, cupy.cuda.Stream.null)


def cupy_pageable(cupy: Any) -> Step:
    slots, pageable = CupySlots(cupy), np.ones(NBYTES // 4, np.float32)
    return lambda: slots.step(pageable, slots.copies)


def cupy_one_slot(cupy: Any) -> Step:
    slots = CupySlots(cupy, 1)

    def step() -> None:
        slots.copies.wait_event(slots.read[0])
        slots.slots[0].set(slots.source, stream=slots.copies)  # fault
        slots.there[0].record(slots.copies)
        slots.compute.wait_event(slots.there[0])
        slots.work(0, slots.compute)
        slots.read[0].record(slots.compute)

    return step


def cupy_one_stream_for_both(cupy: Any) -> Step:
    slots, out = CupySlots(cupy), [cupy_pinned(cupy) for _ in range(2)]

    def step() -> None:
        now, following = slots.turn()
        slots.copies.wait_event(slots.read[following])
        slots.out[following].get(stream=slots.copies, out=out[following], blocking=False)
        slots.slots[following].set(slots.source, stream=slots.copies)  # fault
        slots.there[following].record(slots.copies)
        slots.compute.wait_event(slots.there[now])
        slots.work(now, slots.compute)
        slots.read[now].record(slots.compute)

    return step


def cupy_reads_a_number(cupy: Any) -> Step:
    slots = CupySlots(cupy)

    def step() -> None:
        now, following = slots.turn()
        slots.compute.wait_event(slots.there[now])
        slots.work(now, slots.compute)
        with slots.compute:
            float(slots.out[now][0])  # fault
        slots.copy(following, slots.source, slots.copies)

    return step


def cupy_allocates(cupy: Any) -> Step:
    slots = CupySlots(cupy)

    def step() -> None:
        cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(NBYTES))  # fault
        slots.step(slots.source, slots.copies)

    return step


# Numba.


class NumbaSlots:
    def __init__(self, cuda: Any) -> None:
        if not hasattr(np, "row_stack"):
            np.row_stack = np.vstack
        self.cuda = cuda
        self.compute, self.copies = cuda.stream(), cuda.stream()
        self.source = cuda.pinned_array(NBYTES // 4, np.float32)
        self.source[:] = 1
        self.slots = [cuda.device_array(NBYTES // 4, np.float32) for _ in range(2)]
        self.read, self.there = ([cuda.event(timing=False) for _ in range(2)] for _ in range(2))
        self.number = 0

        def double(array: Any) -> None:
            place = cuda.grid(1)
            if place < array.size:
                array[place] *= 2

        self.double = cuda.jit(double)
        for slot in self.slots:
            self.work(slot)
        cuda.synchronize()

    def work(self, slot: Any) -> None:
        self.double[NBYTES // 4 // 256, 256, self.compute](slot)

    def step(self, source: Any, copies: Any) -> None:
        now, following = self.number % 2, (self.number + 1) % 2
        self.number += 1
        self.read[following].wait(copies)
        self.slots[following].copy_to_device(source, stream=copies)  # copies
        self.there[following].record(copies)
        self.there[now].wait(self.compute)
        self.work(self.slots[now])
        self.read[now].record(self.compute)


def numba_two_slots(cuda: Any) -> Step:
    slots = NumbaSlots(cuda)
    return lambda: slots.step(slots.source, slots.copies)


def numba_put_ahead(cuda: Any) -> Step:
    slots, stager = NumbaSlots(cuda), opened("numba")
    source = stager.empty_pinned(NBYTES // 4, np.float32)
    source[:] = 1
    stager.idle()
    batch = [stager.put(source)]

    def step() -> None:
        array, following = batch[0].value_on(slots.compute), stager.put(source)
        slots.work(array)
        batch[0] = following

    return step


def numba_prefetch(cuda: Any) -> Step:
    slots, stager = NumbaSlots(cuda), opened("numba")
    sources = [np.ones(NBYTES // 4, np.float32) for _ in range(3)]
    loop = kept(xferlib.prefetch(itertools.cycle(sources), stager, rewrites=False, stream=slots.compute))
    return lambda: slots.work(next(loop))


def numba_same_stream(cuda: Any) -> Step:
    slots = NumbaSlots(cuda)
    return lambda: slots.step(slots.source, slots.compute)


def numba_pageable(cuda: Any) -> Step:
    slots, pageable = NumbaSlots(cuda), np.ones(NBYTES // 4, np.float32)
    return lambda: slots.step(pageable, slots.copies)


def numba_synchronizes(cuda: Any) -> Step:
    slots = NumbaSlots(cuda)

    def step() -> None:
        slots.there[0].wait(slots.compute)
        slots.work(slots.slots[0])
        slots.compute.synchronize()  # fault
        slots.slots[0].copy_to_device(slots.source, stream=slots.copies)
        slots.there[0].record(slots.copies)

    return step


# JAX.


def jax_work(jax: Any) -> Callable[[Any], Any]:
    work: Callable[[Any], Any] = jax.jit(lambda batch: (batch @ batch).sum())
    return work


def pinned_for_jax() -> tuple[Any, Any]:
    """Return a stager, and a batch in its pinned memory, locked by now."""
    stager = opened("jax")
    source = stager.empty_pinned((SIDE, SIDE), np.float32)
    source[:] = 1
    stager.idle()
    return stager, source


def jax_put_ahead(jax: Any) -> Step:
    work, stager, source = jax_work(jax), *pinned_for_jax()
    batch = [stager.put(source)]

    def step() -> Any:
        array, following = batch[0].value, stager.put(source)
        result = work(array)
        batch[0] = following
        return result

    return step


def jax_prefetch(jax: Any) -> Step:
    work, stager = jax_work(jax), opened("jax")
    sources = [np.ones((SIDE, SIDE), np.float32) for _ in range(3)]
    loop = kept(xferlib.prefetch(itertools.cycle(sources), stager, rewrites=False))
    return lambda: work(next(loop))


def jax_slots(jax: Any) -> Step:
    work, stager = jax_work(jax), opened("jax")
    ring = kept(xferlib.Ring(stager, ((SIDE, SIDE), np.float32), slots=4))
    stager.idle()

    def batches() -> Iterator[Any]:
        while True:
            yield ring.acquire()

    loop = kept(xferlib.prefetch(batches(), stager))
    return lambda: work(next(loop))


def jax_put_behind_the_launch(jax: Any) -> Step:
    work, source = jax_work(jax), np.ones((SIDE, SIDE), np.float32)
    batch = [jax.device_put(source)]

    def step() -> Any:
        result = work(batch[0])
        batch[0] = jax.device_put(source)  # fault
        return result

    return step


def jax_reads_its_loss(jax: Any) -> Step:
    work, stager, source = jax_work(jax), *pinned_for_jax()
    batch = [stager.put(source)]

    def step() -> None:
        float(work(batch[0].value))  # fault
        batch[0] = stager.put(source)

    return step


def jax_reads_an_array(jax: Any) -> Step:
    work, stager, source = jax_work(jax), *pinned_for_jax()
    batch = [stager.put(source)]

    def step() -> None:
        np.asarray(work(batch[0].value))  # fault
        batch[0] = stager.put(source)

    return step


# torch.


class TorchSlots:
    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.compute, self.copies = torch.cuda.Stream(), torch.cuda.Stream()
        self.source = torch.ones(NBYTES // 4).pin_memory()
        self.slots = [torch.zeros(NBYTES // 4, device="cuda") for _ in range(2)]
        self.out = torch.zeros(NBYTES // 4, device="cuda")
        self.read, self.there = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        self.number = 0
        torch.cuda.synchronize()

    def step(self, source: Any, copies: Any) -> None:
        now, following = self.number % 2, (self.number + 1) % 2
        self.number += 1
        copies.wait_event(self.read[following])
        with self.torch.cuda.stream(copies):
            self.slots[following].copy_(source, non_blocking=True)  # copies
        self.there[following].record(copies)
        self.compute.wait_event(self.there[now])
        with self.torch.cuda.stream(self.compute):
            for _ in range(3):
                self.torch.sin(self.slots[now], out=self.out)
        self.read[now].record(self.compute)


def torch_two_slots(torch: Any) -> Step:
    slots = TorchSlots(torch)
    return lambda: slots.step(slots.source, slots.copies)


def torch_batches_ahead(torch: Any) -> Step:
    copies, source = torch.cuda.Stream(), torch.ones(SIDE, SIDE).pin_memory()
    ahead = [torch.ones(SIDE, SIDE, device="cuda") for _ in range(2)]
    event = torch.cuda.Event()

    def step() -> None:
        batch = ahead.pop(0)
        with torch.cuda.stream(copies):
            following = source.to("cuda", non_blocking=True)
            event.record()
        following.record_stream(torch.cuda.current_stream())
        ahead.append(following)
        torch.mm(batch, batch)
        torch.cuda.current_stream().wait_event(event)

    return step


def torch_results_on_their_own_stream(torch: Any) -> Step:
    slots, back = TorchSlots(torch), torch.cuda.Stream()
    out = [torch.empty(NBYTES // 4).pin_memory() for _ in range(2)]

    def step() -> None:
        now, other = slots.number % 2, (slots.number + 1) % 2
        slots.number += 1
        back.wait_event(slots.there[now])
        with torch.cuda.stream(back):
            out[now].copy_(slots.slots[now], non_blocking=True)
        slots.read[now].record(back)
        slots.compute.wait_event(slots.read[other])
        with torch.cuda.stream(slots.compute):
            torch.sin(slots.slots[other], out=slots.slots[other])
        slots.there[other].record(slots.compute)

    return step


def torch_same_stream(torch: Any) -> Step:
    slots = TorchSlots(torch)
    return lambda: slots.step(slots.source, slots.compute)


def torch_pageable(torch: Any) -> Step:
    slots, pageable = TorchSlots(torch), torch.ones(NBYTES // 4)
    return lambda: slots.step(pageable, slots.copies)


def torch_reads_an_item(torch: Any) -> Step:
    slots = TorchSlots(torch)

    def step() -> None:
        slots.compute.wait_event(slots.there[0])
        with torch.cuda.stream(slots.compute):
            torch.sin(slots.slots[0], out=slots.out)
            slots.out[0].item()  # fault
        with torch.cuda.stream(slots.copies):
            slots.slots[0].copy_(slots.source, non_blocking=True)
        slots.there[0].record(slots.copies)

    return step


CLEAN: list[Loop] = [
    *(cupy_two_slots, cupy_results_on_their_own_stream, cupy_put_ahead),
    *(numba_two_slots, numba_put_ahead, numba_prefetch),
    *(jax_put_ahead, jax_prefetch, jax_slots),
    *(torch_two_slots, torch_batches_ahead, torch_results_on_their_own_stream),
]
FAULTY: list[tuple[Loop, str, Any]] = [
    (cupy_same_stream, "same stream", CupySlots),
    (cupy_null_stream, "NULL stream", CupySlots),
    (cupy_pageable, "pageable memory", CupySlots),
    (cupy_one_slot, "too few slots", None),
    (cupy_one_stream_for_both, "one stream for both directions", None),
    (cupy_reads_a_number, "host waits", None),
    (cupy_allocates, "memory call", None),
    (numba_same_stream, "same stream", NumbaSlots),
    (numba_pageable, "pageable memory", NumbaSlots),
    (numba_synchronizes, "host waits", None),
    (jax_put_behind_the_launch, "waits for compute", None),
    (jax_reads_its_loss, "host waits", None),
    (jax_reads_an_array, "host waits", None),
    (torch_same_stream, "same stream", TorchSlots),
    (torch_pageable, "pageable memory", TorchSlots),
    (torch_reads_an_item, "host waits", None),
]
"""With what is to be said, and what makes the copy that is to be named; None: the loop itself has a line that is."""


def made(loop: Loop) -> Step:
    return loop(needs(loop.__name__.partition("_")[0]))


def told(step: Step) -> str:
    """Return what is said against a loop; "": nothing."""
    for tries in range(MOST_TRIES):
        try:
            xferlib.assert_overlaps(step, warmup=WARMUP)
        except AssertionError as error:
            return str(error)
        except xferlib.UndecidedError as error:
            # It says itself when another try may tell more.
            if "Run it again" not in str(error) or tries == MOST_TRIES - 1:
                raise
        else:
            break
    return ""


def marked(thing: Any, mark: str) -> int:
    """Return the number of the line of a function or class that has this comment."""
    lines, first = inspect.getsourcelines(thing)
    (number,) = [first + index for index, line in enumerate(lines) if line.rstrip().endswith(mark)]
    return number


@pytest.mark.parametrize("loop", CLEAN, ids=lambda loop: loop.__name__)
def test_a_loop_that_overlaps_passes(loop: Loop) -> None:
    assert told(made(loop)) == ""


@pytest.mark.parametrize(("loop", "cause", "copies"), FAULTY, ids=[loop.__name__ for loop, _, _ in FAULTY])
def test_a_planted_fault_is_named_with_its_line(loop: Loop, cause: str, copies: Any) -> None:
    said = told(made(loop))
    print(said)
    findings = [line for line in said.splitlines() if line.startswith(f"- {cause}: ")]
    assert findings
    named = {int(number) for finding in findings for number in re.findall(rf"{re.escape(HERE)}:(\d+)", finding)}
    if "a thread of the framework's own" in findings[0]:
        # It says where the loop was by then.
        lines, first = inspect.getsourcelines(loop)
        assert named <= set(range(first, first + len(lines)))
    else:
        assert (marked(copies, "# copies") if copies else marked(loop, "# fault")) in named
