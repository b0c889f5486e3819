"""Fixtures of the pipelines' tests. Every test leaves no thread of a pipeline and nothing in flight."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import xferlib


@pytest.fixture
def stager() -> Iterator[xferlib.Stager]:
    with xferlib.stager("host", pinned_limit=64 << 20) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail where a thread of a pipeline outlives its test."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("xferlib-prefetch"):
            thread.join(10)
            assert not thread.is_alive(), thread.name
