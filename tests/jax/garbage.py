"""Garbage with a finalizer, and what comes about by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["Cycle", "eventually"]

SECONDS = 10.0


class Cycle:
    """Garbage that calls something when it is collected."""

    def __init__(self, act: Callable[[], Any], *parts: Any) -> None:
        self.act, self.parts, self.me = act, parts, self

    def __del__(self) -> None:
        self.act()


def eventually(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)
