"""A test is run with each framework, unless it names those that its question is for."""

from __future__ import annotations

import pytest

from tests.frameworks.fixtures import laws, stager
from tests.frameworks.kits.every import KITS
from tests.frameworks.kits.kit import Kit

__all__ = ["kit", "laws", "stager"]


@pytest.fixture(params=KITS, ids=lambda kit: kit.name)
def kit(request: pytest.FixtureRequest) -> Kit:
    kit: Kit = request.param
    return kit
