"""Interrupts by a real signal, at random moments of an operation on the main thread, and what must be so afterwards.

`XFERLIB_INTERRUPTS` says how many for each test, `XFERLIB_SEED` at which moments: the delays are drawn from it. Where exactly a
signal strikes is the machine's affair, so a failure is repeated by more of them, not by the same one.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple, final

import xferlib

__all__ = [
    "COUNT",
    "SEED",
    "Interrupt",
    "at_rest",
    "frozen",
    "held_locks",
    "interrupted",
    "of_the_library",
    "until_free",
    "usual_seconds",
]

COUNT = int(os.environ.get("XFERLIB_INTERRUPTS", "40"))
SEED = int(os.environ.get("XFERLIB_SEED", "1"))
LEAST_SECONDS = 5e-6
AGAIN_SECONDS = 3e-3
"""From one interrupt to the next, where there is a second one: it comes while the first is dealt with."""
LATER_SECONDS = 20e-6
PATIENCE = 20.0
frozen: list[object] = []
"""What is of the library and hidden from the collector, which lists no such objects."""


class Interrupt(KeyboardInterrupt):
    """What the signal's handler raises, as that of Ctrl-C raises its own."""


class Struck(NamedTuple):
    """How it went."""

    hits: int
    """Operations that an interrupt ended."""
    swallowed: int
    """Interrupts that came inside a finalizer, where Python can raise nothing."""


@final
class _Signal:
    """The timer, and how often its handler may still raise."""

    def __init__(self, where: Callable[[FrameType], bool]) -> None:
        self.left = 0
        self._where = where

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.left:
            return
        # Never before the operation has begun, nor behind its end.
        if frame is None or frame.f_code is _Signal.strikes.__code__ or not self._where(frame):
            signal.setitimer(signal.ITIMER_REAL, LATER_SECONDS, AGAIN_SECONDS)
            return
        self.left -= 1
        raise Interrupt

    def strikes(self, operation: Callable[[], object], delay: float, *, times: int) -> bool:
        """Run an operation, interrupted after a delay. Returns whether it was."""
        try:
            self.left = times
            signal.setitimer(signal.ITIMER_REAL, delay, AGAIN_SECONDS)
            operation()
            self.left = 0
        except Interrupt:
            return True
        finally:
            self.left = 0
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False


def interrupted(
    operation: Callable[[], object],
    *,
    times: int = COUNT,
    seed: int = SEED,
    strikes: int = 1,
    where: Callable[[FrameType], bool] = lambda frame: True,
    after: Callable[[], object] = lambda: None,
    seconds: float | None = None,
) -> Struck:
    """Run an operation so many times, each interrupted at a random moment of the time that it usually takes.

    Main thread only. `operation()` must work each time. `after()` is called behind each, without interrupts. `strikes`: so many
    interrupts follow each other soon, and each strikes whatever deals with the one before. `where(frame)`: whether it may strike
    here, else it comes a little later. `seconds`: what the operation takes, else it is measured first.
    An operation that ends before its interrupt comes counts for nothing and is run again.
    """
    assert threading.current_thread() is threading.main_thread()
    chance = random.Random(seed)
    if seconds is None:
        seconds = usual_seconds(operation, after)
    hits = tries = 0
    striking = _Signal(where)
    with _handled(striking) as swallowed:
        while hits < times:
            tries += 1
            assert tries <= 200 * times + 100, f"of {tries} operations only {hits} could be interrupted"
            # Half of them early: what is set up is set up in little time.
            longest = seconds if chance.random() < 0.5 else seconds / 10
            hits += striking.strikes(operation, max(LEAST_SECONDS, chance.uniform(0, longest)), times=strikes)
            after()
    return Struck(hits, len(swallowed))


def usual_seconds(operation: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
    """Return what it takes without an interrupt: the median of three times."""
    return statistics.median(_seconds(operation, after) for _ in range(3))


def _seconds(operation: Callable[[], object], after: Callable[[], object]) -> float:
    began = time.perf_counter()
    operation()
    seconds = time.perf_counter() - began
    after()
    return seconds


@contextmanager
def _handled(striking: _Signal) -> Iterator[list[None]]:
    """Have the signal raise; count those that are lost in finalizers, and let all else that is lost there be told as ever."""
    swallowed: list[None] = []
    hook = sys.unraisablehook

    def unraisable(told: Any) -> None:
        if isinstance(told.exc_value, Interrupt):
            swallowed.append(None)
        else:
            hook(told)

    before = signal.signal(signal.SIGALRM, striking.handle)
    sys.unraisablehook = unraisable
    try:
        yield swallowed
    finally:
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def held_locks() -> list[str]:
    """Return the locks, held now, that are attributes of objects or variables of modules of the library, by name."""
    found = []
    for module in [module for name, module in sys.modules.items() if name.split(".")[0].startswith("xferlib")]:
        found += [f"{module.__name__}.{name}" for name, value in list(vars(module).items()) if _is_held(value)]
    for thing in (*frozen, *of_the_library()):
        kind = type(thing)
        found += [f"{kind.__module__}.{kind.__qualname__}.{name}" for name, value in _attributes(thing) if _is_held(value)]
    return found


def of_the_library() -> list[object]:
    """Return the objects whose types are the library's, as far as the collector has them in sight."""
    return [thing for thing in gc.get_objects() if str(type(thing).__module__).split(".")[0].startswith("xferlib")]


def until_free() -> None:
    """Wait until no lock of the library is held: threads at work hold some for moments. One that stays held is a failure."""
    deadline = time.monotonic() + PATIENCE
    while held := held_locks():
        assert time.monotonic() < deadline, f"held for ever: {held}"
        time.sleep(0.001)


def at_rest(stager: xferlib.Stager) -> None:
    """Wait until nothing of a stager's memory is in use, with nothing of it reachable; else fail."""
    deadline = time.monotonic() + PATIENCE
    while True:
        gc.collect()
        stager.trim()
        stats = stager.stats()
        left = {"pinned_used": stager._pool.usage().used, "pinned": stats.pinned_nbytes, "device": stats.device_nbytes}
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.001)


def _is_held(value: object) -> bool:
    kind = type(value)
    # Of conditions and the like, too, whose text has the lock's in it.
    return (
        kind.__module__ in ("_thread", "threading") and "lock" in kind.__name__.lower() + repr(value) and "<locked" in repr(value)
    )


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            with suppress(AttributeError):
                yield name, getattr(thing, name)
