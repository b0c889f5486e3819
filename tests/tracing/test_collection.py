"""The collector waits while something long is made, and only then."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from tests.children import fork
from tests.tracing.tables import kernel, recording
from xferlib.tracing.collection import uncollected
from xferlib.tracing.page import page

PATIENCE = 20.0


class Interrupt(BaseException):
    """What a handler raises."""


@pytest.fixture(autouse=True)
def the_collector() -> Iterator[None]:
    before = gc.isenabled()
    yield
    (gc.enable if before else gc.disable)()


def interrupted_at(entry: int) -> BaseException | None:
    """Make a page, interrupted at the entry of a function, the first, the second and so on; None: there are fewer."""
    entered = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        # What is raised at a generator's end is lost, and warned of.
        if event == "call" and not frame.f_code.co_name.startswith("<"):
            entered += 1
            if entered == entry:
                raise Interrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        page(recording(kernel(0, 1)))
    except Interrupt as error:
        return error
    finally:
        sys.settrace(before)
    return None


@pytest.mark.parametrize("runs", [True, False])
def test_an_interrupt_at_any_entry_leaves_the_collector_as_it_was_though_its_traceback_is_kept(runs: bool) -> None:
    (gc.enable if runs else gc.disable)()
    count = 1
    while (error := interrupted_at(count)) is not None:
        assert gc.isenabled() is runs, error.__traceback__
        count += 1
    assert gc.isenabled() is runs
    assert count > 20


@pytest.mark.parametrize("first", [0, 1])
def test_two_threads_at_once_leave_it_as_it_was(first: int) -> None:
    gc.enable()
    inside, gates = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def wait(number: int) -> None:
        inside[number].set()
        assert gates[number].wait(PATIENCE)

    threads = [threading.Thread(target=uncollected, args=(wait, number)) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        assert inside[number].wait(PATIENCE)
    assert not gc.isenabled()
    for number in (first, 1 - first):
        gates[number].set()
        threads[number].join()
    assert gc.isenabled()


@pytest.mark.parametrize("runs", [True, False])
def test_a_child_that_is_forked_meanwhile_has_its_collector(runs: bool) -> None:
    (gc.enable if runs else gc.disable)()
    inside, gate = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert gate.wait(PATIENCE)

    thread = threading.Thread(target=uncollected, args=(wait,))
    thread.start()
    assert inside.wait(PATIENCE)
    try:
        child = fork()
        if not child:
            os._exit(gc.isenabled())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == runs
    finally:
        gate.set()
        thread.join()
    assert gc.isenabled() is runs
