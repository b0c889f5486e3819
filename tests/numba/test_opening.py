"""Why the backend cannot be opened: each reason by name, with what to do, in a process of its own. Needs Numba, and no GPU."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

from tests import children

LIMIT_SECONDS = 90.0
OPEN = """
{before}
import xferlib_numba
from xferlib.errors import BackendUnavailableError

try:
    stager = xferlib_numba.open_stager({arguments})
except BackendUnavailableError as error:
    print(error)
else:
    print("opened", stager.device)
"""

needs_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None or importlib.util.find_spec("numba_cuda_mlir") is not None,
    reason="numba-cuda is not what stagers use here",
)


def outcome(arguments: str = "", before: str = "", **environment: str) -> str:
    """Return what opening says, with warnings as errors. `before` runs first; a module set to None there is not installed."""
    program = OPEN.format(arguments=arguments, before=before)
    child = children.run([sys.executable, "-W", "error", "-c", program], env=os.environ | environment, seconds=LIMIT_SECONDS)
    assert (child.returncode, child.stderr) == (0, "")
    return child.stdout


@needs_numba_cuda
def test_the_simulator_is_refused() -> None:
    text = outcome(NUMBA_ENABLE_CUDASIM="1")
    assert "NUMBA_ENABLE_CUDASIM simulates CUDA on the CPU" in text
    assert "Unset NUMBA_ENABLE_CUDASIM" in text


@needs_numba_cuda
def test_cuda_switched_off_is_refused_by_the_name_of_the_switch() -> None:
    assert "NUMBA_DISABLE_CUDA switches CUDA off" in outcome(NUMBA_DISABLE_CUDA="1")


@needs_numba_cuda
def test_no_visible_device_or_no_driver_is_not_taken_for_no_numba() -> None:
    text = outcome(CUDA_VISIBLE_DEVICES="")
    assert "CUDA reports no device" in text or "there is no NVIDIA driver" in text
    assert "not installed" not in text


@needs_numba_cuda
@pytest.mark.parametrize("device", [-1, 1000])
def test_a_device_that_is_not_there_is_refused(device: int) -> None:
    text = outcome(f"device={device}")
    assert f"there is no device {device}" in text or "there is no NVIDIA driver" in text or "no device (" in text


def test_a_missing_package_is_named_with_what_to_type() -> None:
    text = outcome(before="import sys; sys.modules.update(dict.fromkeys(['numba', 'numba_cuda', 'numba_cuda_mlir']))")
    assert "is not installed" in text
    assert "pip install" in text


def test_importing_the_package_imports_no_numba() -> None:
    script = "import sys, xferlib_numba, xferlib_numba.conformance; assert not {'numba', 'numba_cuda_mlir'} & set(sys.modules)"
    child = children.run([sys.executable, "-c", script], seconds=LIMIT_SECONDS)
    assert child.returncode == 0, child.stderr
