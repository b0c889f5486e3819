"""Finding CUPTI: the one library of a process by which a tool is told what its GPUs do."""

from __future__ import annotations

import ctypes
from typing import Any, final

from xferlib.errors import XferError

__all__ = ["CALLBACK", "DRIVER", "ENTER", "RUNTIME", "TAKEN", "CallbackData", "CuptiError", "check", "load"]

DRIVER, RUNTIME = 1, 2
"""`CUPTI_CB_DOMAIN_DRIVER_API` and `CUPTI_CB_DOMAIN_RUNTIME_API`: the domains of functions."""
ENTER = 0
"""`CUPTI_API_ENTER`: the site of a callback that comes before the call."""
TAKEN = 39
"""`CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED`."""
NO_RIGHTS = 35
"""`CUPTI_ERROR_INSUFFICIENT_PRIVILEGES`."""


@final
class CallbackData(ctypes.Structure):
    """CUpti_CallbackData of cupti_callbacks.h."""

    _fields_ = (
        ("site", ctypes.c_int),
        ("function", ctypes.c_char_p),
        ("parameters", ctypes.c_void_p),
        ("returned", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
        ("context_uid", ctypes.c_uint32),
        ("correlation_data", ctypes.c_void_p),
        ("correlation", ctypes.c_uint32),
    )


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(CallbackData))


class CuptiError(XferError):
    """Raised when CUPTI is missing, taken by another tool, or does not do what it should."""


def load() -> ctypes.CDLL:
    """Load libcupti: the one that pip has installed, if there is one, else the system's. Raises `CuptiError`."""
    names = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"]
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cupti").abs_path
    except (ImportError, RuntimeError):
        path = None
    for name in names if path is None else [path, *names]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CuptiError("libcupti is not installed. Install it with: pip install nvidia-cuda-cupti")


def check(cupti: ctypes.CDLL, function: str, *arguments: Any) -> None:
    """Call a function. Raises `CuptiError` with what CUPTI says, if that is not success."""
    status = getattr(cupti, function)(*arguments)
    if status == 0:
        return
    text = ctypes.c_char_p()
    cupti.cuptiGetResultString(status, ctypes.byref(text))
    what = f"{function} failed with {(text.value or b'?').decode()} ({status})"
    if status == TAKEN:
        what = (
            "another tool has CUPTI in this process, and it serves one at a time: a profiler (Nsight, or that of a framework), a "
            f"conformance suite, another trace. End it first ({what})"
        )
    if status == NO_RIGHTS:
        what = f"the driver lets only administrators profile here: see NVIDIA's page ERR_NVGPUCTRPERM ({what})"
    raise CuptiError(what)
