"""A hang ends with a traceback: what is looked for here is locks that stay held."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from tests.interrupts.harness import COUNT


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    faulthandler.dump_traceback_later(60 + COUNT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
