"""What only Numba has: arrays that name streams, memory that is freed late, reasons of its own not to open.

All else is in `frameworks`.
"""

from __future__ import annotations

import pytest

from tests.frameworks.fixtures import laws, stager
from tests.frameworks.kits.kit import Kit
from tests.frameworks.kits.numba import NUMBA

__all__ = ["kit", "laws", "stager"]


@pytest.fixture
def kit() -> Kit:
    return NUMBA
