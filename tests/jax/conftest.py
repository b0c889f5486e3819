"""What only JAX has: leases that follow buffers, donation, transformations, the CPU as a device. All else is in `frameworks`.

The tests run on whatever JAX computes on here.
"""

from __future__ import annotations

import pytest

from tests.frameworks.fixtures import laws, stager
from tests.frameworks.kits.jax import JAX
from tests.frameworks.kits.kit import Kit

__all__ = ["kit", "laws", "stager"]


@pytest.fixture
def kit() -> Kit:
    return JAX
