"""A pytest plugin: it ends a phase of a test that hangs, with the tracebacks of all threads, and the processes that it started.

pytest's own limit is for setup, call and teardown together, and it is off as soon as a test has failed: a hang in the teardown of
that test lasts for ever. Here each phase has its own time, whether the test has failed or not. A process of its own watches, and a
call that blocks with the GIL held does not stop it.

Children are ended first. A test that waits for a child then goes on, and finds the child's traceback in what it reads of the
child's stderr. If the test does not go on, it is ended itself, and the run with it.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Final, final

import pytest

__all__ = ["allow"]

PASSING = (errno.EAGAIN, errno.EFAULT, errno.ENOMEM)
"""Numbers of errors with which the system refuses a process now, and not for good. In a sandbox EFAULT is one of them."""
PAUSES_SECONDS = (0.1, 0.5, 2.0)
"""Between the tries."""

_running: list[_Guard] = []
"""The guard of this process's run, if there is one."""


def allow(seconds: float) -> None:
    """Let the present phase take so many seconds from now on, for tests of a chosen length. Does nothing where no guard runs."""
    for guard in _running:
        guard.restart(seconds=seconds)


@final
class _Guard:
    """The process that watches this one."""

    def __init__(self, seconds: float) -> None:
        self.seconds: Final = seconds
        self._what = ""
        theirs, orders = os.pipe()
        # While tests run, pytest puts files in the place of stderr.
        stderr = os.dup(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
        try:
            self.pid: Final = _started(theirs, stderr)
        except OSError:
            os.close(orders)
            raise
        finally:
            os.close(theirs)
            os.close(stderr)
        self._orders = orders

    def restart(self, what: str | None = None, *, seconds: float | None = None) -> None:
        """Count from now. `what`: what is under way, in words."""
        self._what = self._what if what is None else what
        deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        os.write(self._orders, f"{deadline} {self._what}\n".encode())


def _started(stdin: int, stderr: int) -> int:
    """Start the process that watches, and return its number. Raises `OSError` where the system refuses again and again."""
    script = Path(__file__).with_name("guard_process.py")
    command = [sys.executable, "-I", "-S", str(script), str(os.getpid())]
    actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, stderr, 2)]
    # It stays to the very end. If it were a `Popen`, the interpreter would say then that it was left behind.
    start = partial(os.posix_spawn, sys.executable, command, os.environ, file_actions=actions)
    for pause in PAUSES_SECONDS:
        try:
            return start()
        except OSError as error:
            if error.errno not in PASSING:
                raise
        time.sleep(pause)
    return start()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("hang_seconds", "how long setup, call or teardown of a test may take before the run is ended", default="300")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # Children show where they are when they are ended, and leave no file behind.
    os.environ["PYTHONFAULTHANDLER"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    guard = _Guard(float(config.getini("hang_seconds")))
    _running.append(guard)
    guard.restart("collecting the tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    _restart(f"{item.nodeid} (setup)")
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    _restart(f"{item.nodeid} (call)")
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    _restart(f"{item.nodeid} (teardown)")
    return (yield)


def pytest_enter_pdb() -> None:
    allow(float("inf"))


def pytest_leave_pdb() -> None:
    _restart()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    # Not taken away: threads that do not end would hold up the end of the interpreter.
    _restart("the end of the process")


def _restart(what: str | None = None) -> None:
    for guard in _running:
        guard.restart(what)
