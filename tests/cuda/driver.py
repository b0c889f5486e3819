"""A driver that takes notes, in the place of CUDA's: see driver.c."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.build import COMPILER
from tests.engine.device import OPTIONS
from xferlib.cuda import context, driver

__all__ = ["CONTEXT", "ELSEWHERE", "REFUSED", "RELAXED", "THREAD_LOCAL", "Made", "built_driver", "elsewhere", "made", "use_driver"]

CONTEXT, ELSEWHERE = 0x5000, 0x6000
THREAD_LOCAL, RELAXED = 1, 2
REFUSED = 709


class Made(ctypes.Structure):
    """What a function of the driver notes."""

    _fields_ = (
        ("status", ctypes.c_int),
        ("count", ctypes.c_int),
        ("mode", ctypes.c_int),
        ("context", ctypes.c_void_p),
        ("given", ctypes.c_uint64 * 4),
    )


def built_driver(folder: Path) -> ctypes.CDLL:
    """Build the driver into a folder and return its library."""
    assert COMPILER is not None
    path = folder / "driver.so"
    source = Path(__file__).with_name("driver.c")
    done = subprocess.run([*COMPILER, *OPTIONS, str(source), "-o", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(path))
    library.driver_context.restype = ctypes.c_void_p
    library.driver_refuse.argtypes = (ctypes.c_void_p,)
    return library


def use_driver(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is made from now on find this driver."""
    for module in (context, driver):
        monkeypatch.setattr(module, "LIBRARY", library._name)


@contextmanager
def elsewhere(library: ctypes.CDLL) -> Iterator[None]:
    """Put the calling thread into another context and another capture mode, and see that it is still there afterwards."""
    assert library.cuCtxPushCurrent_v2(ctypes.c_void_p(ELSEWHERE)) == 0
    assert library.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(THREAD_LOCAL))) == 0
    yield
    assert (library.driver_depth(), library.driver_context(), library.driver_mode()) == (1, ELSEWHERE, THREAD_LOCAL)
    assert library.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(0))) == 0
    assert library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())) == 0


def made(library: ctypes.CDLL, name: str) -> Made:
    return Made.in_dll(library, f"made_{name}")
