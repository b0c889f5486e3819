"""With each framework that is here, as the tests of frameworks are run."""

from __future__ import annotations

from tests.frameworks.conftest import kit
from tests.frameworks.fixtures import laws, stager

__all__ = ["kit", "laws", "stager"]
