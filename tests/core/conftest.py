"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import xferlib


@pytest.fixture
def stager() -> Iterator[xferlib.Stager]:
    with xferlib.stager("host", pinned_limit=64 << 20) as opened:
        yield opened
