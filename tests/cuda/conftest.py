"""A thread that is in another context and in another capture mode, of a driver that takes notes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.cuda.driver import built_driver, elsewhere, use_driver
from tests.engine.build import COMPILER


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("there is no C compiler: a driver of C was not tried")
    return built_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def library(built: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """Yield the driver, and see that whatever the test did, the thread is where it was."""
    use_driver(built, monkeypatch)
    with elsewhere(built):
        yield built
