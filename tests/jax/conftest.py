"""A stager over JAX, on whatever JAX computes on here. Without JAX tests skip, or fail if `XFERLIB_REQUIRE` names the backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from xferlib_jax import conformance

from xferlib.conformance.base import Calls
from xferlib.stager import Stager


@pytest.fixture
def laws() -> conformance.TestJax:
    """The hooks, and what the laws are written with."""
    laws = conformance.TestJax()
    laws.calls = Calls()
    return laws


@pytest.fixture
def stager(laws: conformance.TestJax) -> Iterator[Stager]:
    stager = laws.new_stager()
    conformance.bench()
    yield stager
    laws.calls.join(laws.deadline_seconds)
    stager.close()
