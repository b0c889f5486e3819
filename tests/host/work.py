"""What the tests of the host backend do with it: gates to stand behind, things to drop, and calls that may hang.

Gates decide every order; the only time limits are those after which a hang counts as a failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from xferlib_host._engine import Engine
from xferlib_host._stager import NumpyStager

__all__ = ["SECONDS", "Gate", "Lease", "address", "engine_of", "raise_error", "until", "within"]

SECONDS = 30.0


class Gate:
    """Something to stand behind. `arrived` tells that the work in front of the gate has come to it."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._opened = threading.Event()

    def stand(self) -> None:
        self.arrived.set()
        if not self._opened.wait(SECONDS):
            raise TimeoutError("nobody opened the gate")

    def open(self) -> None:
        self._opened.set()

    def open_when_arrived(self) -> None:
        self.arrived.wait(SECONDS)
        self.open()


class Lease:
    """Something that can be seen to be dropped."""


def raise_error(error: BaseException) -> None:
    raise error


def engine_of(stager: NumpyStager, direction: str) -> Engine:
    return stager.h2d if direction == "h2d" else stager.d2h


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def within(seconds: float, what: Callable[[], Any]) -> Any:
    """Return what the call returns on another thread; fail if it does not end in time."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(what()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "the call did not end, or raised"
    return results[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
