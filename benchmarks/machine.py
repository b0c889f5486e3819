"""Where and with what a figure was measured: both belong to every record."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from benchmarks.ways import Device

__all__ = ["machine", "slug", "versions"]

PACKAGES = (
    "xferlib",
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "torch",
    "jax",
    "numba",
    "numba-cuda",
    "numba-cuda-mlir",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "cuda-bindings",
    "flax",
    "grain",
    "safetensors",
    "orbax-checkpoint",
)


def machine(device: Device) -> dict[str, str]:
    """Return the hardware and the system, in words."""
    cores = len(os.sched_getaffinity(0))
    return {
        **device.machine(),
        "cpu": f"{_cpu_model()}, {cores} core{'s' if cores > 1 else ''}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(device: Device) -> dict[str, str]:
    """Return the versions of everything that has a part in the figures."""
    found = {"python": platform.python_version(), **device.versions()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def slug(name: str) -> str:
    """Turn a device's name into the stem of its file of results."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
