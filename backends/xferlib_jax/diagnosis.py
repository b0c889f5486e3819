"""What the user should read about JAX on this machine, whether or not the backend is ready."""

from __future__ import annotations

import os
from importlib import metadata

from xferlib_jax._probe import ON_CUDA, has_idle_gpu, memory_grows

__all__ = ["findings", "versions"]

DISTRIBUTIONS = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")


def versions() -> dict[str, str]:
    """Return the installed distributions of JAX."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def findings() -> list[str]:
    """Return sentences."""
    installed = versions()
    if "jax" not in installed:
        return []
    found = []
    if "jax-cuda12-plugin" in installed and "jax-cuda13-plugin" in installed:
        found.append(
            "JAX has plugins for CUDA 12 and for CUDA 13, as after both CUDA extras at once, and takes whichever it finds first. "
            "Uninstall one of them with: pip uninstall jax-cuda12-plugin jax-cuda12-pjrt"
        )
    if has_idle_gpu():
        plugins = [name for name in installed if name.endswith("-plugin")]
        if not plugins:
            found.append(f"there is an NVIDIA GPU, and this JAX has no plugin for it: it computes on the CPU. {ON_CUDA}")
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        found.append(
            "XLA_PYTHON_CLIENT_ALLOCATOR=platform makes JAX ask CUDA for every array, which waits for the device. Unset it"
        )
    setting = memory_grows()
    if setting is not None and any(name.endswith("-plugin") for name in installed):
        found.append(
            f"{setting} lets JAX's memory grow while it runs, by calls that may wait for the "
            "device: until it has grown, steps may stall. It is needed where other libraries share the GPU; else unset it"
        )
    return found
