"""What is interrupted of the core: a stager with something of everything, operations on it, and what must be so afterwards."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias, final

import numpy as np

import xferlib
from tests.core.fakes import held, on_thread
from tests.interrupts.harness import PATIENCE, at_rest, interrupted, until_free, usual_seconds

__all__ = ["OPERATIONS", "STAGED", "STARTS", "WAITS", "Bench", "interrupt"]

KIB, MIB = 1 << 10, 1 << 20
ROUND = 500
"""Interrupts that one stager bears."""
SLOW_SECONDS = 0.0005
LARGE = 3 * MIB
"""Bytes of pageable memory that take several chunks."""


@final
class Bench:
    """A stager, and what is transferred."""

    def __init__(self, backend: str) -> None:
        self.stager = stager = xferlib.stager(backend, pinned_limit=64 * MIB)
        self.sizes = itertools.count(3 * KIB)
        self.pinned = stager.empty_pinned(100 * KIB, np.uint8)
        self.pinned[:] = 3
        self.out = stager.empty_pinned(100 * KIB, np.uint8)
        self.there = stager.put(self.pinned).result()
        self.mine = np.zeros(300 * KIB, np.uint8)
        self.large = np.full(LARGE, 4, np.uint8)
        self.landed = np.zeros(LARGE, np.uint8)
        self.large_there = stager.put(self.large).result()
        self.tree = [np.full(300, number, np.uint8) for number in range(20)]
        self.many = [np.full(6 * KIB, number % 256, np.uint8) for number in range(400)]

    def new_size(self) -> int:
        """Return a size that comes again only after many others."""
        return next(self.sizes) * 7 % (100 * KIB) + 1

    @property
    def engines(self) -> list[Any]:
        """The host backend's copy engines."""
        backend: Any = self.stager.backend
        return [backend.h2d, backend.d2h]

    def slow(self) -> None:
        """Have the copies that come next take a while, so that whoever waits is interrupted as he waits."""
        for engine in self.engines:
            engine.submit(lambda: time.sleep(SLOW_SECONDS))


Operation: TypeAlias = Callable[[Bench], object]


def pinned_of_new_size(bench: Bench) -> None:
    size = bench.new_size()
    # A part of a shared segment, one of its own, and one for which others must make room.
    for nbytes in (size, 2 * MIB + 4096 * (size % 50), 40 * MIB):
        bench.stager.empty_pinned(nbytes, np.uint8)


def pinned_in_place(bench: Bench) -> None:
    with bench.stager.pin(bench.mine):
        pass


def trimmed(bench: Bench) -> None:
    bench.stager.put(bench.pinned[: bench.new_size()]).synchronize()
    bench.stager.empty_pinned(5 * MIB, np.uint8)
    bench.stager.trim()


STARTS: dict[str, Operation] = {
    "put": lambda bench: bench.stager.put(bench.pinned),
    "put of a new size": lambda bench: bench.stager.put(bench.pinned[: bench.new_size()]),
    "put of a tree": lambda bench: bench.stager.put(bench.tree),
    "put of pageable memory": lambda bench: bench.stager.put(bench.mine),
    "get": lambda bench: bench.stager.get(bench.there),
    "get out": lambda bench: bench.stager.get(bench.there, out=bench.out),
    "empty_pinned": pinned_of_new_size,
    # One alone is over before a timer strikes.
    "stats": lambda bench: [bench.stager.stats() for _ in range(50)],
}
"""Those that wait for no copy."""
WAITS: dict[str, Operation] = {
    "result": lambda bench: bench.stager.get(bench.stager.put(bench.pinned).result(), out=bench.out).result(),
    "value": lambda bench: bench.stager.get(bench.stager.put(bench.pinned).value).value,
    "pin": pinned_in_place,
    "trim": trimmed,
}
STAGED: dict[str, Operation] = {
    "put staged": lambda bench: bench.stager.put(bench.large),
    "put of many leaves": lambda bench: bench.stager.put(bench.many),
    "put borrowed": lambda bench: bench.stager.put(bench.large, borrow=True),
    "value borrowed": lambda bench: bench.stager.put(bench.large, borrow=True).value,
    "get staged": lambda bench: bench.stager.get(bench.large_there, out=bench.landed),
    "result staged": lambda bench: bench.stager.get(bench.large_there, out=bench.landed).result(),
    "put into staged": lambda bench: bench.stager.put(bench.large, into=bench.large_there),
}
"""Those of pageable memory."""
INTO: dict[str, Operation] = {"put into": lambda bench: bench.stager.put(bench.pinned, into=bench.there)}
OPERATIONS = {
    "host": STARTS | WAITS | INTO | STAGED,
    "jax": STARTS | WAITS,
    "cupy": STARTS | WAITS | INTO,
    "numba": STARTS | WAITS | INTO,
}


def interrupt(backend: str, operation: Operation, *, times: int, seed: int, strikes: int, meanwhile: str) -> int:
    """Interrupt an operation so often, and see each few hundred times that all is well; return how often.

    `meanwhile`: "idle"; "held", no copy comes to its end while the operation is interrupted; "slow", each takes a while.
    """
    done = 0
    while done < times:
        bench = Bench(backend)
        with ExitStack() as stack:
            seconds = None
            if meanwhile == "held":
                # Now: what waits for memory that copies use has no end then.
                seconds = usual_seconds(lambda: operation(bench))  # noqa: B023  # As below.
                for engine in bench.engines:
                    stack.enter_context(held(engine))
            done += interrupted(
                lambda: operation(bench),  # noqa: B023  # Called in this turn alone.
                times=min(ROUND, times - done),
                seed=seed + done,
                strikes=strikes,
                after=bench.slow if meanwhile == "slow" else lambda: None,
                seconds=seconds,
            ).hits
        well(bench)
        ended(bench, bench.stager.close)
    return done


def well(bench: Bench) -> None:
    """See that nothing is held, that this thread and others can work on, and that what nobody holds comes back."""
    until_free()
    _work(bench)
    on_thread(lambda: _work(bench)).result(PATIENCE)
    # What was interrupted has written nothing but what it was to write.
    assert (bench.large == 4).all()
    assert set(np.unique(bench.landed)) <= {0, 4}
    del bench.there, bench.pinned, bench.out, bench.large, bench.landed, bench.large_there
    on_thread(lambda: at_rest(bench.stager)).result(2 * PATIENCE)
    assert not bench.stager._pins._rows
    assert not bench.stager._ledger.busy


def _work(bench: Bench) -> None:
    stager, source = bench.stager, bench.stager.empty_pinned(100 * KIB, np.uint8)
    source[:] = 5
    there = stager.put(source).result()
    assert (stager.get(there).result() == 5).all()
    assert (stager.get(there, out=np.zeros(100 * KIB, np.uint8)).result() == 5).all()
    large = stager.put(np.full(LARGE, 7, np.uint8), borrow=True).result()
    assert (stager.get(large, out=np.zeros(LARGE, np.uint8)).result() == 7).all()
    if stager.capabilities.put_into:
        source[:] = 6
        assert (stager.get(stager.put(source, into=there).result()).result() == 6).all()
    with stager.pin(np.zeros(100 * KIB, np.uint8)):
        stager.trim()


def ended(bench: Bench, close: Callable[[], object]) -> None:
    """See that a stager of which nothing is held any more can be closed, twice, and has given everything back."""
    on_thread(close).result(PATIENCE)
    bench.stager.close()
    until_free()
    assert given_back(bench.stager)


def given_back(stager: xferlib.Stager) -> bool:
    """Tell whether the backend has everything again; wait for the reaper, if need be."""
    assert stager.stats().device_nbytes == stager._pool.nbytes == 0
    memory: Any = getattr(stager.backend, "memory", None)
    if stager.name != "host":
        return True
    calls = memory.calls()
    return bool(
        calls.pinned_allocations == calls.pinned_frees
        and calls.pins == calls.unpins
        and calls.device_allocations == calls.device_frees
    )
