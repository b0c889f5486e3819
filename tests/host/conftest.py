"""A stager of the host backend, a gate, and a stream that does not outlive the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from xferlib_host import Stream, open_stager
from xferlib_host._stager import NumpyStager

from tests.host.work import Gate


@pytest.fixture
def stager() -> Iterator[NumpyStager]:
    stager = open_stager()
    yield stager
    stager.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def stream(gate: Gate) -> Iterator[Stream]:
    stream = Stream()
    yield stream
    gate.open()
    stream.close()


@pytest.fixture(params=["h2d", "d2h"])
def direction(request: pytest.FixtureRequest) -> str:
    return str(request.param)
