"""For all tests: Ctrl-C, which shells have their background jobs ignore, reaches the tests that send it, and their children."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
