"""What of this machine, and of the settings of this process, keeps copies from overlapping, or keeps a backend from opening.

In sentences, with what to do. Nothing is opened or measured here. `states`: what `doctor` has found of each backend.
"""

from __future__ import annotations

import glob
import os
import platform
from collections.abc import Sequence
from functools import partial
from typing import Any

from xferlib.cli.command_error import UsageError
from xferlib.debug import resolve_debug
from xferlib.memory.limits import default_pinned_limit
from xferlib.staging.profile import given_profile
from xferlib.words import in_words

__all__ = ["is_wsl", "little_memory", "no_gpu", "require_settings", "settings", "unreadable", "wsl"]

LITTLE = 256 << 20
"""Bytes. Less pinned memory than this soon becomes a limit."""


def settings() -> list[str]:
    """Return a sentence for each variable of CUDA's that keeps work from overlapping, hides the devices, or lets a tool in."""
    found = []
    # Seen on an H200: kernels of other streams stand still behind a held one, and copies do not.
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 is set: the kernels of all streams share one queue and wait for each other. Unset it, "
            "or set it to 8 or more"
        )
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0")
    if blocking not in ("", "0"):
        found.append(f"CUDA_LAUNCH_BLOCKING={blocking} is set: every launch waits for its end, so nothing overlaps. Unset it")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        found.append(f"CUDA_VISIBLE_DEVICES={visible} is set: it hides every GPU from this process. Unset it, or name one")
    tool = os.environ.get("CUDA_INJECTION64_PATH")
    if tool:
        found.append(
            f"CUDA_INJECTION64_PATH={tool} is set: CUDA loads this tool, as of a profiler, into every process. It may hold "
            "launches up, and where it uses CUPTI, xferlib trace and assert_overlaps cannot. Unset it unless you want it"
        )
    return found


def little_memory() -> list[str]:
    """Return a sentence where less memory than usual is pinned by default."""
    limit = default_pinned_limit()
    if limit >= LITTLE:
        return []
    return [
        f"at most {in_words(limit)} is pinned by default, since the machine, or the control group of this process, has little "
        "memory left. Give the container more, or pass pinned_limit= to xferlib.stager"
    ]


def is_wsl() -> bool:
    """Tell whether this is Linux inside Windows."""
    return "microsoft" in platform.release().lower()


def wsl(states: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence on Linux inside Windows, unless one of the backends was measured there, which says more."""
    if not is_wsl() or any(state["wall_nbytes"] for state in states):
        return []
    return [
        "this is Linux inside Windows (WSL): its driver page-locks 0.5 to 1 GiB, whatever the machine has. Pass "
        "pinned_limit=256 << 20 to xferlib.stager if requests are refused"
    ]


def no_gpu(states: Sequence[dict[str, Any]]) -> list[str]:
    """Return what it means that no backend is ready on a GPU, and what could not be looked at for that reason."""
    if any(state["on_gpu"] for state in states):
        return []
    names = ", ".join(state["name"] for state in states if not state["ready"])
    missed = (
        "not looked at, for want of a GPU: the link, what page-locking costs, and which copies of "
        f"{names or 'the frameworks'} are staged or wait for compute"
    )
    if glob.glob("/dev/nvidia[0-9]*"):
        return ["there is an NVIDIA GPU, and no backend is ready on it: install one as its row in the table says", missed]
    return [
        "no NVIDIA GPU is to be seen here. Programs and their tests run on the CPU, and how fast they are, or how much overlaps, "
        "tells nothing of a GPU",
        missed,
    ]


def unreadable() -> list[str]:
    """Return a sentence for each variable of ours that cannot be read: without an explicit argument no stager opens then."""
    lines = []
    for read in (given_profile, partial(resolve_debug, None)):
        try:
            read()
        except ValueError as error:
            lines.append(f"{error}. Set it anew, or unset it: it keeps every backend from opening")
    return lines


def require_settings() -> None:
    """Raise `UsageError` with these sentences, if there are any."""
    lines = unreadable()
    if lines:
        raise UsageError("; ".join(lines))
