"""Garbage of others whose finalizers transfer and wait, collected at any allocation of a call, on any thread: nothing hangs."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import WATCHDOG, Point, on_thread, tampered, until
from tests.core.garbage import Garbage, at_every_allocation, collected_when_told  # noqa: F401  # A fixture for each test.
from tests.interrupts.harness import at_rest
from xferlib.errors import XferError
from xferlib.memory.mapped import Views
from xferlib.memory.registered import Pin
from xferlib.pending import Fill, Jobs
from xferlib.protocol import Capabilities, Stream
from xferlib.uninterrupted import collects

KIB, MIB = 1 << 10, 1 << 20


def acts(stager: xferlib.Stager) -> dict[str, Callable[[], object]]:
    sizes, numbers = itertools.count(3 * KIB, 700), itertools.count()
    small, large = np.zeros(100, np.uint8), np.zeros(2 * MIB, np.uint8)
    there, large_there = stager.put(small).result(), stager.put(large, borrow=True).result()
    out = np.empty_like(large)

    left: list[Pin] = []

    def pin() -> None:
        # One that could not be closed on the thread where the finalizer ran is closed by the next.
        left.append(stager.pin(np.zeros(10 * KIB, np.uint8)))
        for each in left.copy():
            each.close()
            with suppress(ValueError):
                # Another finalizer, inside of this, has closed it, too.
                left.remove(each)

    def put_of_new_class() -> None:
        made: Any = dataclasses.make_dataclass(f"Made{next(numbers)}", ["x"])
        stager.put(made(small)).synchronize()

    return {
        "put": lambda: stager.put(np.zeros(next(sizes), np.uint8)).synchronize(),
        "put of new class": put_of_new_class,
        "borrowed put": lambda: stager.put(large, borrow=True).result(),
        "get": lambda: stager.get(there).result(),
        "get out": lambda: stager.get(large_there, out=out).result(),
        "empty_pinned": lambda: stager.empty_pinned(next(sizes), np.uint8),
        "pin": pin,
        "trim": stager.trim,
        "open": lambda: xferlib.stager("host", pinned_limit=MIB).close(),
    }


PAIRS = [
    ("put", "put"),
    ("put", "borrowed put"),
    ("put of new class", "put of new class"),
    ("borrowed put", "borrowed put"),
    ("borrowed put", "get out"),
    ("get", "put"),
    ("get out", "get out"),
    ("empty_pinned", "empty_pinned"),
    ("empty_pinned", "trim"),
    ("pin", "pin"),
    ("trim", "put"),
    ("open", "open"),
]


@pytest.mark.parametrize(("call", "act"), PAIRS)
@pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")
def test_finalizers_that_transfer_and_wait_run_at_any_allocation(call: str, act: str, stager: xferlib.Stager) -> None:
    known = acts(stager)
    met = on_thread(lambda: at_every_allocation(known[call], known[act])).result(3 * WATCHDOG)
    assert met.count("begun") >= 2
    # The collector comes on threads that make copies as well, where none may wait.
    refused = len([outcome for outcome in met if "makes the copies" in outcome])
    # Some come inside a step of the pool, and are told so: how many depends on where this Python collects.
    assert met.count("done") >= (met.count("begun") - refused) / 3
    # Each came to its end, with success or in words.
    assert len([outcome for outcome in met if outcome != "begun" and not outcome.startswith("call")]) == met.count("begun")
    for again in known.values():
        on_thread(again).result(WATCHDOG)
    known.clear()
    del again
    on_thread(lambda: at_rest(stager)).result(2 * WATCHDOG)


def test_a_finalizer_on_the_thread_of_a_copy_engine_is_told_that_it_cannot_wait(stager: xferlib.Stager) -> None:
    backend: Any = stager.backend
    source = stager.empty_pinned(100, np.uint8)
    transfers: list[xferlib.Transfer] = []
    told: list[str] = []
    pin = stager.pin(np.zeros(100))
    gate, ended = threading.Event(), threading.Event()

    def finalizer() -> None:
        gate.wait(WATCHDOG)
        for wait in (transfers[0].synchronize, transfers[0].result, lambda: transfers[0].value, pin.close):
            with pytest.raises(XferError, match="makes the copies") as caught:
                wait()
            told.append(str(caught.value))
        ended.set()

    backend.h2d.submit(finalizer)
    transfers.append(stager.put(source))
    gate.set()
    assert ended.wait(WATCHDOG)
    assert len(told) == 4
    # What was refused has harmed nothing.
    transfers[0].synchronize()
    pin.close()
    stager.trim()


def test_a_finalizer_on_the_thread_that_leads_a_borrowed_put_is_told_that_it_cannot_wait() -> None:
    transfers: list[xferlib.Transfer] = []
    told: list[str] = []
    gate = threading.Event()

    def copy(dst: int, src: int, nbytes: int) -> None:
        # Where the collector runs on this thread, and with it a finalizer.
        assert gate.wait(WATCHDOG)
        for wait in (transfers[0].synchronize, lambda: transfers[0].value):
            with pytest.raises(XferError, match="makes the copies") as caught:
                wait()
            told.append(str(caught.value))
        backend.inner.copy_h2d(dst, src, nbytes)

    backend = tampered(copy_h2d=copy)
    with xferlib.Stager(backend) as stager:
        transfers.append(stager.put(np.full(2 * MIB, 3, np.uint8), borrow=True))
        gate.set()
        array = on_thread(transfers[0].result).result(WATCHDOG)
        assert (stager.get(array).result() == 3).all()
    assert told


def test_a_finalizer_on_a_thread_that_starts_the_copies_of_a_get_waits_for_no_start() -> None:
    """It may be at the very part that it would wait for."""
    transfers: list[xferlib.Transfer] = []
    told: list[str] = []
    came = threading.Event()

    def finalizer() -> None:
        transfers.append(stager.get(beside))
        transfers.append(stager.put(new, into=beside))
        with pytest.raises(XferError, match="makes the copies") as caught:
            stager.put(new, into=array[-1:])
        told.append(str(caught.value))

    def copy(dst: int, src: int, nbytes: int) -> None:
        name = threading.current_thread().name
        if name == "xferlib-dispatcher" and not came.is_set():
            came.set()
            # Where the collector runs on this thread.
            finalizer()
        elif name.startswith("xferlib-"):
            assert came.wait(WATCHDOG)
        backend.inner.copy_d2h(dst, src, nbytes)

    backend = tampered(copy_d2h=copy)
    with xferlib.stager(backend, staging="4x256KiB") as stager:
        beside, new = np.array([3]), stager.empty_pinned(1, np.int64)
        new[:] = 4
        array, out = np.full(2 * MIB, 5), np.zeros(2 * MIB, np.int64)
        getting = stager.get(array, out=out)
        on_thread(getting.synchronize).result(WATCHDOG)
        assert (out == 5).all()
        assert told
        assert transfers[0].result() == [3]
        transfers[1].synchronize()
        assert beside == [4]


WITHOUT = Capabilities(register=True, streams=True, put_into=True, finalizers=False)
REFUSED = "in a finalizer that the garbage collector runs"


def in_a_finalizer(act: Callable[[], object]) -> list[str]:
    """Let a finalizer act that the collector runs; return what came of it."""
    outcomes: list[str] = []
    Garbage(act, outcomes)
    gc.collect()
    return outcomes


def test_finalizers_are_refused_where_the_framework_does_not_survive_them() -> None:
    source = np.full(2 * MIB, 3, np.uint8)
    with xferlib.Stager(tampered(capabilities=WITHOUT)) as stager:
        array, lent = stager.put(source).result(), stager.put(source, borrow=True)
        acts = (
            lambda: stager.put(source),
            lambda: stager.put(source, into=array),
            lambda: stager.get(array),
            lambda: lent.value,
            lent.result,
            lambda: lent.value_on(None),
        )
        for act in acts:
            begun, told = in_a_finalizer(act)
            assert begun == "begun"
            assert told.startswith("CapabilityError")
            assert REFUSED in told
        # What was refused has harmed nothing, and ordinary code may do all of it; so may a finalizer that no collector runs.
        assert (stager.get(lent.result()).result() == 3).all()
        outcomes: list[str] = []
        garbage = Garbage(lambda: stager.put(source).synchronize(), outcomes)
        del garbage.me
        del garbage
        assert outcomes == ["begun", "done"]


def test_trim_and_close_in_finalizers_wait_for_a_framework_that_does_not_survive_them() -> None:
    freed: list[bool] = []

    def free(block: Any) -> None:
        freed.append(collects())
        backend.inner.free_device(block)

    backend = tampered(capabilities=WITHOUT, free_device=free)
    stager = xferlib.Stager(backend)
    stager.put(np.zeros(100, np.uint8)).synchronize()
    assert in_a_finalizer(stager.trim) == ["begun", "done"]
    assert freed == []
    assert in_a_finalizer(stager.close) == ["begun", "done"]
    assert until(lambda: bool(freed))
    assert not any(freed)
    with pytest.raises(xferlib.ClosedError):
        stager.put(np.zeros(1))


def test_finalizers_that_change_a_table_while_it_is_gone_through_harm_nothing() -> None:
    jobs, views = Jobs(), Views(Retiring())  # type: ignore[arg-type]  # Only what views need is played.

    def fill() -> None:
        jobs.add(Fill())

    def view() -> None:
        row, ticket = views.lease(np.zeros(8, np.uint8))
        row.stream = Stream(1, None)
        del ticket
        views.held(0, 1)

    for call, add, count in ((jobs.reap, fill, jobs.under_way), (views.reap, view, lambda: views._fenced)):
        for _ in range(50):
            add()
        before = len(count())
        met = at_every_allocation(call, add)
        assert met.count("done") == met.count("begun") >= 1
        assert len(count()) >= before + met.count("done")


class Retiring:
    """The part of a backend that views need. No work on them ends."""

    failures = (OSError,)

    def retire(self, streams: object) -> Point:
        return Point()


def test_no_interrupt_is_lost_in_a_callback_of_the_collector() -> None:
    """Python code is interrupted at its entry, before it could handle anything, and what a callback raises goes nowhere."""
    assert not [
        callback for callback in gc.callbacks if isinstance(callback, FunctionType) and callback.__module__.startswith("xferlib")
    ]


def test_each_thread_knows_its_own_collections() -> None:
    told: list[bool] = []
    entered, go_on = threading.Event(), threading.Event()

    class Watched:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            told.append(collects())
            entered.set()
            go_on.wait(30)

    def collect() -> None:
        Watched()
        gc.collect()

    for _ in range(3):
        gc.collect()
        assert not collects()
        entered.clear()
        go_on.clear()
        other = threading.Thread(target=collect)
        other.start()
        assert entered.wait(30)
        # It collects, and this thread does not.
        assert not collects()
        go_on.set()
        other.join(30)
        assert not collects()
    assert told == [True] * 3
