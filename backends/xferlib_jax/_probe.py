"""Why JAX cannot run here, asked in the order in which each answer makes sense: package, platform, device.

Every refusal says the reason and what to do. A JAX that is broken raises its own error, untouched.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn

from xferlib.errors import BackendUnavailableError

if TYPE_CHECKING:
    from xferlib.protocol import HostStager

__all__ = ["ON_CPU", "ON_CUDA", "has_idle_gpu", "memory_grows", "open_backend"]

ON_CUDA = 'Install it with: pip install "jax[cuda12]>=0.10.2" (CUDA 12) or "jax[cuda13]>=0.10.2" (CUDA 13)'
ON_CPU = 'Install it with: pip install "jax[cuda12]>=0.10.2" (CUDA 12), "jax[cuda13]>=0.10.2" (CUDA 13) or "jax>=0.10.2" (CPU)'
OLDEST = (0, 10, 2)


def open_backend(ordinal: int) -> HostStager[Any]:
    """Return the backend for a local device, or raise `BackendUnavailableError`."""
    wanted = index(ordinal)
    jax = _import_jax()
    devices = _devices(jax)
    platform = devices[0].platform
    if platform == "cpu" and has_idle_gpu():
        _refuse(
            "there is an NVIDIA GPU, and this JAX has no plugin for it",
            f"{ON_CUDA}; or set JAX_PLATFORMS=cpu to compute on the CPU",
        )
    # JAX imports memory from elsewhere only to the first of its CPU devices.
    count = 1 if platform == "cpu" else len(devices)
    if not 0 <= wanted < count:
        numbers = "only number 0" if count == 1 else f"numbers 0 to {count - 1}"
        _refuse(f"there is no device {wanted}: on platform {platform!r} there is {numbers}", "Pick one of these with device=N")
    if platform == "cpu":
        from xferlib_jax._cpu import CpuStager

        return CpuStager(devices[0])
    if platform not in ("gpu", "cuda") or "cuda" not in devices[0].client.platform_version.lower():
        _refuse(f"this JAX computes on platform {platform!r}", f"It needs an NVIDIA GPU, or JAX_PLATFORMS=cpu. {ON_CUDA}")
    return _open_cuda(devices[wanted])


def has_idle_gpu() -> bool:
    """Tell whether there is an NVIDIA GPU that nobody told JAX to leave alone. Asks JAX nothing."""
    jax = sys.modules.get("jax")
    platforms = os.environ.get("JAX_PLATFORMS") if jax is None else jax.config.jax_platforms
    if platforms or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def _import_jax() -> Any:
    try:
        import jax
    except ModuleNotFoundError as error:
        # jax says so itself, without a name, when jaxlib is missing.
        if error.name not in ("jax", "jaxlib") and "jaxlib" not in str(error):
            raise
        _refuse("JAX is not installed", ON_CPU, error)
    # A folder of that name that is no package can still be imported: it is left of a package, or lies on the search path.
    if getattr(jax, "__file__", None) is None:
        _refuse(f"there is a folder named jax ({list(getattr(jax, '__path__', []))}), and JAX is not installed", ON_CPU)
    found = tuple(int(part) for part in re.findall(r"\d+", jax.__version__)[:3])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        _refuse(f"JAX {jax.__version__} is older than {oldest}", f'Install a newer one with: pip install "jax>={oldest}"')
    return jax


def _devices(jax: Any) -> list[Any]:
    try:
        devices: list[Any] = jax.local_devices()
    except RuntimeError as error:
        # Its first line says which platform could not be had, and why.
        reason = str(error).strip().partition("\n")[0]
        _refuse(
            f"JAX has no device ({reason})", f"Set JAX_PLATFORMS=cpu to compute on the CPU, or add the plugin. {ON_CUDA}", error
        )
    return devices


def _open_cuda(device: Any) -> HostStager[Any]:
    from xferlib_jax._driver import CudaError, Driver

    try:
        driver = Driver(device.local_hardware_id)
    except (OSError, AttributeError) as error:
        _refuse(f"the NVIDIA driver lacks what is needed ({error})", "Update the driver", error)

    from xferlib_jax._cuda import CudaStager

    try:
        return CudaStager(device, driver)
    except CudaError as error:
        if not error.out_of_memory:
            raise
        _refuse(
            "the device has no memory left beside what JAX took when it started",
            "Let it take less: set XLA_CLIENT_MEM_FRACTION (XLA_PYTHON_CLIENT_MEM_FRACTION in older versions) to 0.7",
            error,
        )


def _refuse(reason: str, advice: str, cause: Exception | None = None) -> NoReturn:
    raise BackendUnavailableError(f"backend 'jax' cannot run here: {reason}. {advice}") from cause


def memory_grows() -> str | None:
    """Return the setting by which JAX takes memory of a device as it needs it; None: it takes its share at the start."""
    value = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    return f"XLA_PYTHON_CLIENT_PREALLOCATE={value}" if value in ("0", "false") else None
