"""The laws, for a backend that describes its arrays."""

from __future__ import annotations

from tests.tensors.hooks import TensorHooks


class TestTensors(TensorHooks):
    """No hook more, and no known failure."""
