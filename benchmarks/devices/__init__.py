"""What benchmarks need of each backend's device, by the backend's name. A device is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from benchmarks.ways import Device

__all__ = ["open_device"]

MODULES = {
    "host": "benchmarks.devices.host_memory",
    "cupy": "benchmarks.devices.cuda_by_cupy",
    "numba": "benchmarks.devices.cuda_by_numba",
    "jax": "benchmarks.devices.jax_arrays",
}


def open_device(backend: str) -> Device:
    """Return the device that belongs to a backend. Raises `LookupError` for one that the benchmarks do not know."""
    if backend not in MODULES:
        raise LookupError(
            f"the benchmarks know no device for backend {backend!r}, only for {sorted(MODULES)}. Add one in benchmarks/devices/"
        )
    device: Device = import_module(MODULES[backend]).open_device()
    return device
