"""A hang ends with a traceback: what is looked for here is locks that stay held."""

from __future__ import annotations

import faulthandler
import gc
from collections.abc import Iterator

import pytest

from tests.interrupts.harness import COUNT, frozen, of_the_library


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_are_frozen() -> Iterator[None]:
    """As for all tests; but those that have locks are kept in sight."""
    gc.unfreeze()
    gc.collect()
    frozen[:] = of_the_library()
    gc.freeze()
    yield
    frozen.clear()


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    faulthandler.dump_traceback_later(60 + COUNT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
