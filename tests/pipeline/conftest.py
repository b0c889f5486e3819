"""Fixtures of the pipelines' tests. Every test leaves no thread of a pipeline and nothing in flight."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.pipeline.steps import PATIENCE
from xferlib import latch


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail where a thread of a pipeline outlives its test."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("xferlib-prefetch"):
            thread.join(10)
            assert not thread.is_alive(), thread.name


@pytest.fixture(autouse=True)
def is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a change does not look by himself, which would hide that nobody wakes him."""
    monkeypatch.setattr(latch, "WAIT_SECONDS", 6 * PATIENCE)
