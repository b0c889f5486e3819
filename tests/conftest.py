"""For all tests: a stager on the host, for those that have none of their own; and Ctrl-C, which shells have their background jobs
ignore, reaches the tests that send it, and their children. Collections of garbage do not go through all tests again and again.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

import xferlib


def pytest_configure() -> None:
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
