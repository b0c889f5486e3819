"""The public conformance suite: the laws of `xferlib.protocol.LAWS` as tests that every backend inherits.

Write the hooks (`Hooks`) in a subclass of `StagerConformance`, and pytest does the rest. Needs pytest, which nothing else in the
package imports.
"""

from __future__ import annotations

import pytest

# Before the laws are imported, so that a failing law shows its operands, whoever runs it and from wherever.
pytest.register_assert_rewrite(
    "xferlib.conformance.base",
    "xferlib.conformance.moves",
    "xferlib.conformance.values",
    "xferlib.conformance.laws",
)

from xferlib.conformance.hooks import Direction as Direction  # noqa: E402  (after the rewriting is registered)
from xferlib.conformance.hooks import HeldArray as HeldArray  # noqa: E402
from xferlib.conformance.hooks import Hold as Hold  # noqa: E402
from xferlib.conformance.hooks import Hooks as Hooks  # noqa: E402
from xferlib.conformance.suite import StagerConformance as StagerConformance  # noqa: E402
