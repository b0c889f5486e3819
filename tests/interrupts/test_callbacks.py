"""What Python calls by itself, as objects go: an interrupt that comes there is reported and forgotten, and the program goes on.

Stagers, pins and saves have finalizers that warn of what was never closed or asked for. Nothing that runs with each transfer or
each loop has one.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
import xferlib_host

import xferlib
from tests.interrupts.harness import at_rest
from xferlib.byte_reader import Span

LARGE = 3 << 20

Operation = Callable[[xferlib.Stager], object]


def forgotten(call: Callable[[], object], backend: ModuleType) -> tuple[list[str], int]:
    """Call again and again, each time with an interrupt at the entry of the next function of ours. Return those whose interrupt was
    forgotten, and how many there were.

    A generator that is closed is entered, too, but CPython looks for no interrupt there.
    """
    ours = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (xferlib, backend))
    lost: list[str] = []
    hook = sys.unraisablehook
    number = 0
    while True:
        number += 1
        left, name = number, ""

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal left, name
            code = frame.f_code
            if event != "call" or code.co_flags & inspect.CO_GENERATOR or not code.co_filename.startswith(ours):
                return
            left -= 1
            if left == 0:
                name = code.co_qualname
                raise KeyboardInterrupt

        def unraisable(told: Any) -> None:
            if isinstance(told.exc_value, KeyboardInterrupt):
                lost.append(name)  # noqa: B023  # Called in this turn alone.
            else:
                hook(told)

        sys.unraisablehook = unraisable
        sys.setprofile(profile)
        try:
            call()
        except KeyboardInterrupt:
            continue
        finally:
            sys.setprofile(None)
            sys.unraisablehook = hook
        if left > 0:
            return lost, number - 1


def put(stager: xferlib.Stager) -> None:
    stager.put({"a": np.ones(10, np.float32), "b": np.ones(LARGE, np.uint8)}).result()


def borrow(stager: xferlib.Stager) -> None:
    stager.put(np.ones(LARGE, np.uint8), borrow=True).result()


def on_device(stager: xferlib.Stager) -> list[Any]:
    arrays: list[Any] = stager.put([np.ones(10, np.float32), np.ones(LARGE, np.uint8)]).value
    return arrays


def get(stager: xferlib.Stager) -> None:
    stager.get(on_device(stager)).result()


def get_into(stager: xferlib.Stager) -> None:
    stager.get(on_device(stager)[0], out=np.zeros(10, np.float32)).result()


def read(stager: xferlib.Stager) -> None:
    with stager.reader(on_device(stager)) as reader:
        reader.read([Span(0, 0, 40)], reader.empty(40)).result()


def mapped(stager: xferlib.Stager) -> None:
    stager.mapped(stager.empty_pinned(10, np.uint8))


def ring(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, ((10,), np.uint8), slots=2) as ring:
        ring.acquire().put().result()
        ring.acquire().release()


def loop(stager: xferlib.Stager) -> None:
    for _ in xferlib.prefetch(iter([np.ones(10, np.float32)] * 3), stager):
        pass


def loop_that_is_left(stager: xferlib.Stager) -> None:
    for _ in xferlib.prefetch(iter([np.ones(10, np.float32)] * 3), stager):
        break


OPERATIONS = [put, borrow, get, get_into, read, ring, loop, loop_that_is_left]


@pytest.mark.parametrize("operation", [*OPERATIONS, mapped])
@pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning", "ignore::ResourceWarning")
def test_no_function_of_ours_runs_where_an_interrupt_is_forgotten(operation: Operation) -> None:
    with xferlib.stager("host") as stager:
        operation(stager)
        lost, count = forgotten(lambda: operation(stager), xferlib_host)
        assert lost == []
        assert count > 5
        at_rest(stager)
