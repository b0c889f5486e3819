"""The laws, where the engine calls a driver by the addresses of its functions, as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.build import COMPILER
from tests.engine.conformance import TestDriven
from tests.engine.device import the_device
from tests.random_programs.driver import DRIVER

__all__ = ["TestDriven"]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler: a device of C was not tried")


@pytest.fixture(scope="module")
def watched() -> None:
    """Have each copy looked at as it is run: it stays in live device memory, and in page-locked host memory."""
    the_device().watch(DRIVER.check_copy)


@pytest.fixture(autouse=True)
def strict(watched: None) -> Iterator[None]:
    yield
    DRIVER.look_at_freed()
    assert not DRIVER.violations
