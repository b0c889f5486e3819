"""Why CuPy cannot run here, asked in the order in which each answer makes sense: package, driver, device, context.

Invariant: nothing of CuPy's that fails noisily is touched before the device is known to work (a `Stream` whose constructor fails
prints from its destructor). Every refusal says the reason and what to do.
"""

from __future__ import annotations

import os
from importlib import metadata
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn

from xferlib.cuda.refusals import NO_DEVICE, NO_DRIVER, device_not_there, failed_with
from xferlib.errors import BackendUnavailableError

if TYPE_CHECKING:
    from xferlib_cupy._device import Device

__all__ = ["open_device"]

INSTALL = 'Install it with: pip install "cupy-cuda12x>=13.3" (CUDA 12) or "cupy-cuda13x>=13.6" (CUDA 13)'
DISTRIBUTIONS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
DRIVER_TOO_OLD = 35


def open_device(ordinal: int) -> Device:
    """Return the device, with a context, or raise `BackendUnavailableError`. A broken CuPy raises its own error, untouched."""
    wanted = index(ordinal)
    cupy = _import_cupy()
    if cupy.cuda.runtime.is_hip:
        _refuse("this CuPy is built for ROCm, not for CUDA", f"Uninstall it and take one for CUDA. {INSTALL}")
    if os.environ.get("CUPY_ENABLE_UMP", "0") != "0":
        _refuse("CUPY_ENABLE_UMP lets CuPy compute on host memory in place, so nothing is transferred", "Unset CUPY_ENABLE_UMP")
    if cupy.cuda.runtime.driverGetVersion() == 0:
        _refuse(*NO_DRIVER)
    count = _count(cupy)
    if not 0 <= wanted < count:
        _refuse(*device_not_there(wanted, count))
    from xferlib_cupy._device import Device

    try:
        return Device(wanted, count=count)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        _refuse(*failed_with(error.status, error), error)
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
        _refuse(*failed_with(error.status, error), error)
    if count == 0:
        _refuse(*failed_with(NO_DEVICE))
    return count


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
