"""Why CUDA cannot be used on this machine, and what to do, in words: for `BackendUnavailableError`.

How to get a framework is the affair of its backend.
"""

from __future__ import annotations

import os

__all__ = ["FORKED", "NO_DEVICE", "NO_DRIVER", "device_not_there", "failed_with"]

NO_DRIVER = "there is no NVIDIA driver (libcuda.so.1)", "Install the driver, or use a machine with an NVIDIA GPU"
FORKED, NO_DEVICE = 3, 100
"""Statuses, of the driver and of the runtime alike."""
REASONS = {
    2: ("the device has no memory left for a CUDA context", "End what else runs on it, or pick another with device=N"),
    FORKED: ("CUDA was used before this process was forked", "Start processes with the spawn or forkserver method"),
    34: ("the libcuda that was found is the stub for linking", "Take the stubs folder out of LD_LIBRARY_PATH"),
    46: ("the device is taken by another process", "End that process, or change the compute mode with: nvidia-smi -c 0"),
    802: ("CUDA is not ready on this machine", "Start NVIDIA's fabric manager"),
    803: ("the loaded driver and its libraries do not match", "Reboot, or install one version of the NVIDIA driver"),
}


def failed_with(status: int, said: object = None) -> tuple[str, str]:
    """Return the reason for a status, and the advice. `said` is what is known of a status that means nothing in particular."""
    if status == NO_DEVICE:
        advice = "Let CUDA_VISIBLE_DEVICES name a GPU" if _visible() else "Check with nvidia-smi that the GPU is there"
        return f"CUDA reports no device (CUDA_ERROR_NO_DEVICE){_visible()}", advice
    return REASONS.get(status, (f"CUDA failed ({said or f'status {status}'})", "Check with nvidia-smi that the GPU works"))


def device_not_there(wanted: int, count: int) -> tuple[str, str]:
    """Return the reason and the advice where another device is wanted than one of the `count` that there are."""
    numbers = "only number 0" if count == 1 else f"numbers 0 to {count - 1}"
    return f"there is no device {wanted}: CUDA shows {numbers}{_visible()}", "Pick one of these with device=N"


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f", with CUDA_VISIBLE_DEVICES={value!r}"
