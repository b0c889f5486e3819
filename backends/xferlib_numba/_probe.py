"""Why Numba cannot run here, asked in the order in which each answer makes sense: package, driver, device, context.

Numba's `CudaSupportError` is an `ImportError`, though it says that there is no driver. So imports stand by themselves here. Every
refusal says the reason and what to do.
"""

from __future__ import annotations

import os
from operator import index

from xferlib.cuda.refusals import FORKED, NO_DEVICE, NO_DRIVER, device_not_there, failed_with
from xferlib.errors import BackendUnavailableError
from xferlib_numba._device import Device
from xferlib_numba._module import INSTALL, Numba, load, refusal

__all__ = ["open_device"]

DRIVER_TOO_OLD = 35


def open_device(ordinal: int) -> Device:
    """Return the device, with a context, or raise `BackendUnavailableError`. A broken Numba raises its own error, untouched."""
    wanted = index(ordinal)
    numba = load()
    count = _count(numba)
    if not 0 <= wanted < count:
        raise refusal(*device_not_there(wanted, count))
    driver = numba.driver
    try:
        return Device(numba, wanted, count=count)
    except driver.CudaAPIError as error:
        raise _by_status(int(error.code), str(error)) from error
    except driver.CudaSupportError as error:
        raise refusal(f"Numba does not support the device ({error})", "Pick another with device=N") from error


def _count(numba: Numba) -> int:
    driver, binding = numba.driver.driver, numba.driver.binding
    if driver.is_initialized and driver.initialization_error is not None:
        raise _by_text(str(driver.initialization_error))
    if driver.pid is not None and driver.pid != os.getpid():
        raise _by_status(FORKED)
    for call in (lambda: binding.cuInit(0), binding.cuDeviceGetCount):
        status, *found = call()
        if status:
            raise _by_status(int(status))
    try:
        # Numba's own part of it, which it would do at its first call.
        driver.ensure_initialized()
    except numba.driver.CudaSupportError as error:
        raise _by_text(str(error)) from error
    (count,) = found
    if count == 0:
        raise _by_status(NO_DEVICE)
    return int(count)


def _by_text(text: str) -> BackendUnavailableError:
    """Return the refusal for what Numba found when it looked for the driver: a sentence."""
    text = " ".join(text.split())
    if "NUMBA_DISABLE_CUDA" in text:
        return refusal("NUMBA_DISABLE_CUDA switches CUDA off", "Unset NUMBA_DISABLE_CUDA")
    if "cannot be found" in text:
        return refusal(*NO_DRIVER)
    if "NO_DEVICE" in text:
        return _by_status(NO_DEVICE)
    return refusal(f"Numba could not start CUDA ({text.rstrip('.')})", "Check with nvidia-smi that the GPU works")


def _by_status(status: int, text: str = "") -> BackendUnavailableError:
    if status == DRIVER_TOO_OLD:
        return refusal(
            "the NVIDIA driver is too old for the installed cuda-bindings",
            f"Update the driver, or take the package for its CUDA. {INSTALL}",
        )
    return refusal(*failed_with(status, text))
