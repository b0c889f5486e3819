"""For all tests: a stager on the host, for those that have none of their own; and Ctrl-C, which shells have their background jobs
ignore, reaches the tests that send it, and their children.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import xferlib


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def stager() -> Iterator[xferlib.Stager]:
    with xferlib.stager("host", pinned_limit=64 << 20) as opened:
        yield opened
