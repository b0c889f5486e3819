"""A stager over the framework of the fixture `kit`. Without it tests skip, or fail if `XFERLIB_REQUIRE` names the backend."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest

from tests.frameworks.kits.kit import Kit
from xferlib.conformance import StagerConformance
from xferlib.conformance.base import ThreadedCalls
from xferlib.errors import SynchronousTransferWarning
from xferlib.stager import Stager

__all__ = ["laws", "stager"]

if "XLA_CLIENT_MEM_FRACTION" not in os.environ:
    # Tests start programs that use JAX, too. Left to itself, JAX takes three quarters of the device here, and they find too little.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")


@pytest.fixture
def laws(kit: Kit) -> Iterator[StagerConformance]:
    """The hooks, and what the laws are written with, which puts pageable memory, too."""
    laws = kit.hooks()
    laws.calls = ThreadedCalls()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SynchronousTransferWarning)
        yield laws


@pytest.fixture
def stager(kit: Kit, laws: StagerConformance) -> Iterator[Stager]:
    stager = laws.new_stager()
    # Made and warm before anything is held.
    assert kit.bench
    yield stager
    laws.calls.join(laws.deadline_seconds)
    stager.close()
