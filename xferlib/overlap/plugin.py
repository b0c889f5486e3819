"""The pytest fixture `assert_overlaps`, for tests of users' loops. Installed with xferlib; nothing else in pytest is changed.

    def test_training_overlaps(assert_overlaps):
        loop = Training(...)
        assert_overlaps(loop.step)

Where there is no GPU or no CUPTI the test is skipped; it fails there if `XFERLIB_REQUIRE` is set, as in CI with a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

__all__ = ["assert_overlaps"]

REQUIRE = "XFERLIB_REQUIRE"
"""Environment variable: what may not be skipped."""


@pytest.fixture(name="assert_overlaps")
def assert_overlaps() -> Callable[..., None]:
    """Give `xferlib.assert_overlaps`, which skips the test where it cannot run."""
    # Here, so that a test run without it imports nothing more.
    from xferlib.errors import BackendUnavailableError
    from xferlib.overlap.loops import assert_overlaps as checked

    def check(step: Callable[[], object], **options: int) -> None:
        __tracebackhide__ = True
        try:
            checked(step, **options)
        except BackendUnavailableError as error:
            if os.environ.get(REQUIRE):
                pytest.fail(f"{REQUIRE}={os.environ[REQUIRE]} forbids to skip this: {error}")
            pytest.skip(str(error))

    return check
