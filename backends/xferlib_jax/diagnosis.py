"""What the user should read about JAX on this machine, whether or not the backend is ready."""

from __future__ import annotations

import os
import re
from importlib import metadata

from xferlib_jax._probe import ON_CUDA, has_idle_gpu, memory_grows

__all__ = ["findings", "versions"]

TRUE = ("1", "y", "yes", "t", "true", "on")
"""What JAX takes for yes in a variable."""
WAITING = {
    "JAX_DEBUG_NANS": "has JAX look for NaN in every result, for which it waits",
    "JAX_DEBUG_INFS": "has JAX look for infinities in every result, for which it waits",
    "JAX_DISABLE_JIT": "has JAX launch operation by operation what it would compile as one, so that the host is seldom ahead",
}
UNFENCED = (0, 11, 2)
"""The first version on which device memory is used again without a fence, and the oldest that was run on a GPU."""
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
    found += [
        f"{name}={os.environ[name]} {what}: nothing overlaps with that. Unset it"
        for name, what in WAITING.items()
        if os.environ.get(name, "").lower() in TRUE
    ]
    release = tuple(int(part) for part in re.findall(r"\d+", installed["jax"])[:3])
    if release < UNFENCED and any(name.endswith("-plugin") for name in installed):
        found.append(
            f"JAX {installed['jax']} may free device memory that it was given while its kernels still read it. So that memory is "
            "used again only behind a fence on JAX's compute stream, for which puts may wait. Update to 0.11.2 or newer, which "
            'needs Python 3.12: pip install "jax[cuda13]>=0.11.2"'
        )
    setting = memory_grows()
    if setting is not None and any(name.endswith("-plugin") for name in installed):
        found.append(
            f"{setting} lets JAX's memory grow while it runs, by calls that may wait for the "
            "device: until it has grown, steps may stall. It is needed where other libraries share the GPU; else unset it"
        )
    return found
