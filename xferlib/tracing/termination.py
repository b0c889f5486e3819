"""SIGTERM, which ends a program at once and takes with it what was recorded: here it ends the program as `sys.exit` does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import ClassVar, final

__all__ = ["Termination"]

STATUS = 128 + signal.SIGTERM
"""What a shell says of a program that SIGTERM has ended."""


@final
class Termination:
    """While it is entered, SIGTERM raises `SystemExit` on the main thread. A context manager, to be entered once.

    Only where the program leaves SIGTERM to the system: a handler of its own stays, and one that it sets meanwhile stays, too.
    Entered on any thread but the main one it does nothing, since Python sets handlers there alone. In a forked child the signal
    ends the process at once, as ever.
    """

    entered: ClassVar[Termination | None] = None
    """That which has set the handler of this process."""

    def __init__(self) -> None:
        self._set = False
        self._held = False
        self._came = False

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread() and _ends_process(signal.getsignal(signal.SIGTERM)):
            self._set = True
            Termination.entered = self
            signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._set:
            self._set = False
            with suppress(ValueError):  # Left on another thread than it was entered on: then the handler does as the system.
                self.give_back()

    @contextmanager
    def later(self) -> Iterator[None]:
        """Let the signal wait until the end of the block, where it raises: for files that are being written."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self._came:
                raise SystemExit(STATUS)

    def give_back(self) -> None:
        """Leave SIGTERM to the system, unless the program has set a handler meanwhile."""
        # Compared, not identified: each look at a method makes another object of it.
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if Termination.entered is self:
            Termination.entered = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._set:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._held:
            self._came = True
        else:
            raise SystemExit(STATUS)


def _ends_process(handler: object) -> bool:
    """Tell whether a handler does as the system, as one of ours does that was left on another thread."""
    owner = getattr(handler, "__self__", None)
    return handler is signal.SIG_DFL or (isinstance(owner, Termination) and not owner._set)


_masks: dict[int, set[int]] = {}
"""By thread that forks."""


def _before_fork() -> None:
    # Python drops what comes to a child before it is one: with a handler the signal would be lost, so it waits.
    if Termination.entered is not None:
        _masks[threading.get_ident()] = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})}


def _after_fork_in_parent() -> None:
    mask = _masks.pop(threading.get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    if Termination.entered is not None:
        Termination.entered.give_back()
    _after_fork_in_parent()
    _masks.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
