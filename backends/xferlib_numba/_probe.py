"""Why Numba cannot run here, asked in the order in which each answer makes sense: package, driver, device, context.

Numba's `CudaSupportError` is an `ImportError`, though it says that there is no driver. So imports stand by themselves here. Every
refusal says the reason and what to do.
"""

from __future__ import annotations

import os
from operator import index

from xferlib.errors import BackendUnavailableError
from xferlib_numba._device import Device
from xferlib_numba._module import INSTALL, Numba, load, refusal

__all__ = ["open_device"]

NO_DEVICE = 100
FORKED = 3
REASONS = {
    2: ("the device has no memory left for a CUDA context", "End what else runs on it, or pick another with device=N"),
    FORKED: ("CUDA was used before this process was forked", "Start processes with the spawn or forkserver method"),
    34: ("the libcuda that was found is the stub for linking", "Take the stubs folder out of LD_LIBRARY_PATH"),
    35: (
        "the NVIDIA driver is too old for the installed cuda-bindings",
        f"Update the driver, or take the package for its CUDA. {INSTALL}",
    ),
    46: ("the device is taken by another process", "End that process, or change the compute mode with: nvidia-smi -c 0"),
    802: ("CUDA is not ready on this machine", "Start NVIDIA's fabric manager"),
    803: ("the loaded driver and its libraries do not match", "Reboot, or install one version of the NVIDIA driver"),
}


def open_device(ordinal: int) -> Device:
    """Return the device, with a context, or raise `BackendUnavailableError`. A broken Numba raises its own error, untouched."""
    wanted = index(ordinal)
    numba = load()
    count = _count(numba)
    if not 0 <= wanted < count:
        numbers = "only number 0" if count == 1 else f"numbers 0 to {count - 1}"
        raise refusal(f"there is no device {wanted}: CUDA shows {numbers}{_visible()}", "Pick one of these with device=N")
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
        return refusal("there is no NVIDIA driver (libcuda.so.1)", "Install the driver, or use a machine with an NVIDIA GPU")
    if "NO_DEVICE" in text:
        return _by_status(NO_DEVICE)
    return refusal(f"Numba could not start CUDA ({text.rstrip('.')})", "Check with nvidia-smi that the GPU works")


def _by_status(status: int, text: str = "") -> BackendUnavailableError:
    if status == NO_DEVICE:
        advice = "Let CUDA_VISIBLE_DEVICES name a GPU" if _visible() else "Check with nvidia-smi that the GPU is there"
        return refusal(f"CUDA reports no device (CUDA_ERROR_NO_DEVICE){_visible()}", advice)
    failed = f"CUDA failed ({text or f'status {status}'})", "Check with nvidia-smi that the GPU works"
    return refusal(*REASONS.get(status, failed))


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f", with CUDA_VISIBLE_DEVICES={value!r}"
