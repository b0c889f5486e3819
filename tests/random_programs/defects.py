"""Defects of the public face, for the tests of the programs themselves: what each kind of failure looks like when it is told."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import xferlib

__all__ = ["DEFECTS"]

kept: list[Any] = []


def changes_a_byte() -> None:
    """Every get of one array is waited for, and gives a byte that is not the array's."""
    get = xferlib.Stager.get

    def changing(self: xferlib.Stager, *arguments: Any, **named: Any) -> xferlib.Transfer:
        transfer = get(self, *arguments, **named)
        value = transfer.result()
        if isinstance(value, np.ndarray) and value.nbytes and value.dtype != bool:
            value.reshape(-1).view(np.uint8)[0] ^= 1
        return transfer

    xferlib.Stager.get = changing  # type: ignore[method-assign]


def keeps_memory() -> None:
    """Every result of a get is kept for good."""
    get = xferlib.Stager.get

    def keeping(self: xferlib.Stager, *arguments: Any, **named: Any) -> xferlib.Transfer:
        transfer = get(self, *arguments, **named)
        kept.append(transfer)
        return transfer

    xferlib.Stager.get = keeping  # type: ignore[method-assign]


def reads_what_is_freed() -> None:
    """As a copy does whose source was let go of too early."""

    def read() -> None:
        # Many: another thread may have its own memory where one was.
        for _ in range(100):
            address = np.zeros(64 << 10, np.uint8).ctypes.data
            ctypes.string_at(address + (32 << 10), 1)

    _before_trim(read)


def crashes() -> None:
    xferlib.Stager.trim = lambda self: os.abort()  # type: ignore[method-assign]


def hangs() -> None:
    xferlib.Stager.trim = lambda self: time.sleep(3600)  # type: ignore[method-assign]


def raises_on_a_thread() -> None:
    def work() -> None:
        thread = threading.Thread(target=lambda: 1 // 0, name="ours")
        thread.start()
        thread.join()

    _before_trim(work)


def leaves_a_thread() -> None:
    _before_trim(lambda: threading.Thread(target=time.sleep, args=(3600,), name="left", daemon=True).start())


def _before_trim(work: Callable[[], None]) -> None:
    trim = xferlib.Stager.trim

    def working(self: xferlib.Stager) -> None:
        work()
        trim(self)

    xferlib.Stager.trim = working  # type: ignore[method-assign]


DEFECTS: dict[str, Callable[[], None]] = {
    defect.__name__: defect
    for defect in (changes_a_byte, keeps_memory, reads_what_is_freed, crashes, hangs, raises_on_a_thread, leaves_a_thread)
}
