"""Defects of the public face, for the tests of the programs themselves: what each kind of failure looks like when it is told."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import xferlib

__all__ = ["DEFECTS"]

kept: list[Any] = []


def done_early() -> None:
    """A transfer says that it is done as soon as it is started."""
    xferlib.Transfer.done = lambda self: True  # type: ignore[method-assign]


def keeps_memory() -> None:
    """Every result of a get is kept for good."""
    get = xferlib.Stager.get

    def keeping(self: xferlib.Stager, *arguments: Any, **named: Any) -> xferlib.Transfer:
        transfer = get(self, *arguments, **named)
        kept.append(transfer)
        return transfer

    xferlib.Stager.get = keeping  # type: ignore[method-assign]


def crashes() -> None:
    xferlib.Stager.trim = lambda self: os.abort()  # type: ignore[method-assign]


def hangs() -> None:
    xferlib.Stager.trim = lambda self: time.sleep(3600)  # type: ignore[method-assign]


def raises_on_a_thread() -> None:
    def trim(self: xferlib.Stager) -> None:
        thread = threading.Thread(target=lambda: 1 // 0, name="ours")
        thread.start()
        thread.join()

    xferlib.Stager.trim = trim  # type: ignore[method-assign]


def leaves_a_thread() -> None:
    def trim(self: xferlib.Stager) -> None:
        threading.Thread(target=time.sleep, args=(3600,), name="left", daemon=True).start()

    xferlib.Stager.trim = trim  # type: ignore[method-assign]


DEFECTS: dict[str, Callable[[], None]] = {
    defect.__name__: defect for defect in (done_early, keeps_memory, crashes, hangs, raises_on_a_thread, leaves_a_thread)
}
