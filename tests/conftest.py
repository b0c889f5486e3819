"""For all tests: a stager on the host, for those that have none of their own; and Ctrl-C, which shells have their background jobs
ignore, reaches the tests that send it, and their children. Collections of garbage do not go through all tests again and again.
A process that the kernel could not start is started again.
"""

from __future__ import annotations

import errno
import functools
import gc
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

import xferlib

_start = subprocess.Popen.__init__


@functools.wraps(_start)
def started(self: subprocess.Popen[Any], *arguments: Any, **settings: Any) -> None:
    """Start a process; once more where the kernel could not read what it was to start: nothing has run then.

    Under load those of some virtual machines answer so, once in several thousand starts.
    """
    try:
        _start(self, *arguments, **settings)
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        _start(self, *arguments, **settings)


def pytest_configure() -> None:
    subprocess.Popen.__init__ = started  # type: ignore[method-assign]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_are_frozen() -> None:
    """Leave what is alive before a file's tests out of their collections: the suite is a hundred times what a test makes."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def stager() -> Iterator[xferlib.Stager]:
    with xferlib.stager("host", pinned_limit=64 << 20) as opened:
        yield opened
