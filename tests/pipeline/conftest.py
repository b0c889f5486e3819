"""Fixtures of the pipelines' tests. Every test leaves no thread of a pipeline and nothing in flight."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail where a thread of a pipeline outlives its test."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("xferlib-prefetch"):
            thread.join(10)
            assert not thread.is_alive(), thread.name
