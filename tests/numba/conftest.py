"""A stager over Numba for tests that need a GPU. Without one they skip, or fail if `XFERLIB_REQUIRE` names the backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from xferlib_numba import conformance

from xferlib.conformance.base import Calls
from xferlib.stager import Stager


@pytest.fixture
def laws() -> conformance.TestNumba:
    """The hooks, and what the laws are written with."""
    laws = conformance.TestNumba()
    laws.calls = Calls()
    return laws


@pytest.fixture
def stager(laws: conformance.TestNumba) -> Iterator[Stager]:
    stager = laws.new_stager()
    conformance.bench()
    yield stager
    laws.calls.join(laws.deadline_seconds)
    stager.close()
