"""The pytest fixture `assert_overlaps`, for tests of users' loops. Installed with xferlib; nothing else in pytest is changed.

    def test_training_overlaps(assert_overlaps):
        loop = Training(...)
        assert_overlaps(loop.step)

pytest imports this module in every run of the environment, so it stands beside the package and not in it: neither xferlib nor NumPy
is loaded before a test asks for the fixture. Nobody imports it by name: to pytest the plugin is `xferlib`, as in `-p no:xferlib`.
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
    """Give `xferlib.assert_overlaps`, which skips the test where there is no GPU, once the loop has run some steps.

    A loop that fails by itself fails the test there, too. If `XFERLIB_REQUIRE` is set, as in CI with a GPU, the test fails for want
    of a GPU. Where there is a GPU, and CUPTI is missing or another
    tool has it, nothing is skipped: `BackendUnavailableError` says what to do.
    """
    from xferlib.overlap.libcuda import NoGpuError
    from xferlib.overlap.loops import assert_overlaps as checked

    def check(step: Callable[[], object], **options: int) -> None:
        __tracebackhide__ = True
        try:
            checked(step, **options)
        except NoGpuError as error:
            if os.environ.get(REQUIRE):
                pytest.fail(f"{REQUIRE}={os.environ[REQUIRE]} forbids to skip this: {error}")
            pytest.skip(str(error))

    return check
