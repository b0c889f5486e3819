"""A stager for the tests of saves, which leaves no thread behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import xferlib
from tests.children import threads
from tests.files.saves import MIB
from xferlib.stager import Stager


@pytest.fixture
def stager() -> Iterator[Stager]:
    before = threads()
    with xferlib.stager("host", pinned_limit=64 * MIB) as stager:
        yield stager
    assert threads() <= before
