"""Why CuPy cannot run here, asked in the order in which each answer makes sense: package, driver, device, context.

Invariant: nothing of CuPy's that fails noisily is touched before the device is known to work (a `Stream` whose constructor fails
prints from its destructor). Every refusal says the reason and what to do.
"""

from __future__ import annotations

import os
from importlib import metadata
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn

from xferlib.errors import BackendUnavailableError

if TYPE_CHECKING:
    from xferlib_cupy._device import Device

__all__ = ["open_device"]

INSTALL = 'Install it with: pip install "cupy-cuda12x>=13.3" (CUDA 12) or "cupy-cuda13x>=13.6" (CUDA 13)'
DISTRIBUTIONS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
NO_DEVICE = 100
DRIVER_TOO_OLD = 35
REASONS = {
    2: ("the device has no memory left for a CUDA context", "End what else runs on it, or pick another with device=N"),
    3: ("CUDA was used before this process was forked", "Start processes with the spawn or forkserver method"),
    34: ("the libcuda that was found is the stub for linking", "Take the stubs folder out of LD_LIBRARY_PATH"),
    46: ("the device is taken by another process", "End that process, or change the compute mode with: nvidia-smi -c 0"),
    802: ("CUDA is not ready on this machine", "Start NVIDIA's fabric manager"),
    803: ("the loaded driver and its libraries do not match", "Reboot, or install one version of the NVIDIA driver"),
}


def open_device(ordinal: int) -> Device:
    """Return the device, with a context, or raise `BackendUnavailableError`. A broken CuPy raises its own error, untouched."""
    wanted = index(ordinal)
    cupy = _import_cupy()
    if cupy.cuda.runtime.is_hip:
        _refuse("this CuPy is built for ROCm, not for CUDA", f"Uninstall it and take one for CUDA. {INSTALL}")
    if os.environ.get("CUPY_ENABLE_UMP", "0") != "0":
        _refuse("CUPY_ENABLE_UMP lets CuPy compute on host memory in place, so nothing is transferred", "Unset CUPY_ENABLE_UMP")
    if cupy.cuda.runtime.driverGetVersion() == 0:
        _refuse("there is no NVIDIA driver (libcuda.so.1)", "Install the driver, or use a machine with an NVIDIA GPU")
    count = _count(cupy)
    if not 0 <= wanted < count:
        numbers = "only number 0" if count == 1 else f"numbers 0 to {count - 1}"
        _refuse(f"there is no device {wanted}: CUDA shows {numbers}{_visible()}", "Pick one of these with device=N")
    from xferlib_cupy._device import Device

    try:
        return Device(wanted, count=count)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        _refuse_status(error.status, error)
    except (OSError, AttributeError) as error:
        _refuse(f"the NVIDIA driver lacks what is needed ({error})", "Update the driver", error)


def _import_cupy() -> Any:
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy" and not (error.name or "").startswith("cupy."):
            raise
        _refuse("CuPy is not installed", INSTALL, error)
    # What is left of a package that another one overwrote before it was uninstalled: a folder that can be imported and is empty.
    if getattr(cupy, "__file__", None) is None:
        _refuse("CuPy's folder is there and its files are not", f"Uninstall every CuPy package, then install one. {INSTALL}")
    return cupy


def _count(cupy: Any) -> int:
    runtime = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        if error.status == DRIVER_TOO_OLD:
            # Within a major version CUDA runs on older drivers.
            driver, needed = (version // 1000 for version in (runtime.driverGetVersion(), runtime.runtimeGetVersion()))
            reason = f"the NVIDIA driver is for CUDA {driver} and this CuPy for CUDA {needed}"
            _refuse(reason, f"Update the driver, or take the CuPy that fits it. {INSTALL}", error)
        _refuse_status(error.status, error)
    if count == 0:
        _refuse_status(NO_DEVICE, None)
    return count


def _refuse_status(status: int, cause: Exception | None) -> NoReturn:
    if status == NO_DEVICE:
        advice = "Let CUDA_VISIBLE_DEVICES name a GPU" if _visible() else "Check with nvidia-smi that the GPU is there"
        _refuse(f"CUDA reports no device (cudaErrorNoDevice){_visible()}", advice, cause)
    reason, advice = REASONS.get(status, (f"CUDA failed ({cause})", "Check with nvidia-smi that the GPU works"))
    _refuse(reason, advice, cause)


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f", with CUDA_VISIBLE_DEVICES={value!r}"


def _refuse(reason: str, advice: str, cause: Exception | None = None) -> NoReturn:
    installed = [name for name in DISTRIBUTIONS if _is_installed(name)]
    if len(installed) > 1:
        reason += f"; {' and '.join(installed)} are installed over one another: uninstall them all, then install one"
    raise BackendUnavailableError(f"backend 'cupy' cannot run here: {reason}. {advice}") from cause


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
