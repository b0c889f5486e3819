"""Stand-ins for the core's tests: gates, a host backend with methods replaced, and pieces of a backend that are played by hand.

Nothing here waits for luck: what may hang runs on a thread of its own, or in a process that is ended with a traceback.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from xferlib_host import open_stager

from tests.children import run
from xferlib.protocol import Stream

T = TypeVar("T")

WATCHDOG = 20.0
"""Seconds after which a gate opens by itself, so that a failing test ends."""


class Timeout(RuntimeError):
    """What the handler of a signal may raise."""


def always_raises(kind: type[BaseException], *words: str) -> Callable[..., NoReturn]:
    """Return a function that raises such an error, whatever it is called with: a new one each time, which keeps nobody's frames."""

    def refuse(*_: object) -> NoReturn:
        raise kind(*words)

    return refuse


@contextmanager
def held(engine: Any) -> Iterator[threading.Event]:
    """Let nothing that starts on this engine complete until the gate is set, or the block is left."""
    gate = threading.Event()
    engine.submit(lambda: gate.wait(WATCHDOG))
    try:
        yield gate
    finally:
        gate.set()


def on_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call on a daemon thread."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def run_python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a program; one that hangs is ended."""
    return run([sys.executable, *flags, "-c", textwrap.dedent(code)], seconds=30)


def succeeds(code: str, *flags: str) -> str:
    """Run a program, expect status 0 and nothing said on stderr, and return what it printed."""
    # From 3.12 on every fork of a process with threads is a warning; here it is the point.
    # And that a put of pageable memory waits is none of their matter.
    ended = run_python(code, "-W", "ignore::DeprecationWarning", "-W", "ignore:put waits for a CPU copy", *flags)
    assert ended.returncode == 0, ended.stderr or "it hung"
    assert ended.stderr == ""
    return ended.stdout


class Tampered:
    """The host backend with some attributes replaced."""

    def __init__(self, replaced: dict[str, Any]) -> None:
        self.inner = open_stager()
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def tampered(**replaced: Any) -> Any:
    """Return a `HostStager` with these attributes instead of the host backend's."""
    return Tampered(replaced)


class Interrupted:
    """An event, with an interrupt for each of the first waits."""

    def __init__(self, event: Any, interrupts: list[None]) -> None:
        self._event = event
        self._interrupts = interrupts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def synchronize(self) -> None:
        if self._interrupts:
            self._interrupts.pop()
            raise KeyboardInterrupt
        self._event.synchronize()


def interrupted_twice(direction: str) -> tuple[Any, list[None]]:
    """Return a host backend, and a list: with two in it, one interrupt comes behind the start of a copy, one in a wait."""
    interrupts: list[None] = []

    def copy(*arguments: int) -> None:
        getattr(backend.inner, f"copy_{direction}")(*arguments)
        if len(interrupts) == 2:
            interrupts.pop()
            raise KeyboardInterrupt

    def record() -> Any:
        return Interrupted(getattr(backend.inner, f"record_{direction}")(), interrupts)

    backend = tampered(**{f"copy_{direction}": copy, f"record_{direction}": record})
    return backend, interrupts


class Gated:
    """A host backend of which copies to the device stop at a gate before they start: all, or those for which `when` is true.

    `once`: only the first of them. `entered` is set when one has come to the gate.
    """

    def __init__(self, when: Callable[[], bool] = lambda: True, *, once: bool = False) -> None:
        self.backend = tampered(copy_h2d=self._copy)
        self.entered, self.gate = threading.Event(), threading.Event()
        self._when = when
        self._once = once

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        if self._when() and not (self._once and self.entered.is_set()):
            self.entered.set()
            self.gate.wait(WATCHDOG)
        self.backend.inner.copy_h2d(dst, src, nbytes)


def until(true: Callable[[], bool], seconds: float = WATCHDOG) -> bool:
    """Wait for what is bound to come, and tell whether it came."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def off_main() -> bool:
    """Tell whether this is another thread than the test's."""
    return threading.current_thread() is not threading.main_thread()


class Point:
    """An event that the test moves."""

    def __init__(self, *, reached: bool = False, error: Exception | None = None) -> None:
        self.reached = reached
        self.error = error
        self.asked = 0
        self.synchronized = 0

    def done(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.reached

    def synchronize(self) -> None:
        self.synchronized += 1
        if self.error is not None:
            raise self.error
        self.reached = True

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        return None


class Slab:
    """A device block that is only an address."""

    def __init__(self, address: int, nbytes: int, ready: Point | None) -> None:
        self.address = address
        self.nbytes = nbytes
        self.ready = ready


class Device:
    """The part of a backend that hands out device memory."""

    failures = (OSError,)

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.made: list[Slab] = []
        self.freed: list[Slab] = []
        self.ordered: list[object] = []
        self.retired: list[list[Stream]] = []
        self.fences: list[Point | None] = []
        self.gone: set[int] = set()
        self.refusals: list[BaseException | None] = []
        self.order_error: Exception | None = None
        self.retire_error: Exception | None = None
        self.fresh_is_ready = True

    def sweep(self) -> None: ...

    def alloc_device(self, nbytes: int) -> Slab:
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        self.allocated.append(nbytes)
        self.made.append(Slab(len(self.allocated) << 30, nbytes, None if self.fresh_is_ready else Point()))
        return self.made[-1]

    def free_device(self, block: Slab) -> None:
        assert block not in self.freed, "freed twice"
        self.freed.append(block)

    def record_h2d(self) -> Point:
        return Point(reached=True)

    def retire(self, streams: Iterable[Stream]) -> Point | None:
        if self.retire_error is not None:
            raise self.retire_error
        self.retired.append(list(streams))
        return self.fences.pop(0) if self.fences else None

    def order_h2d(self, after: object) -> None:
        if self.order_error is not None:
            raise self.order_error
        self.ordered.append(after)

    def lost(self, block: Slab) -> bool:
        return block.address in self.gone


class Idle:
    """What a `DevicePool` asks of a ledger, where nothing is in flight."""

    def reap(self) -> bool:
        return False

    def wait_for_device(self, owns: object) -> bool:
        return False
