"""A CUPTI to be traced by, where there is no GPU: see cupti.c."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from xferlib.engine.building import compiler


@pytest.fixture(scope="session")
def built_cupti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = compiler()
    if command is None:
        pytest.skip("there is no C compiler to build the stand-in for CUPTI with")
    library = tmp_path_factory.mktemp("cupti") / "libcupti.so"
    source = Path(__file__).with_name("cupti.c")
    subprocess.run([*command, "-shared", "-fPIC", "-pthread", "-Wall", "-Werror", str(source), "-o", str(library)], check=True)
    return library


@pytest.fixture
def cupti(built_cupti: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The library, in the place of CUPTI. A `PyDLL` of it calls with the GIL held, as some frameworks do."""
    library = ctypes.CDLL(str(built_cupti))
    monkeypatch.setattr("xferlib.tracing.gpu.load", lambda: library)
    monkeypatch.setattr("xferlib.tracing.gpu.has_gpu", lambda: True)
    monkeypatch.setattr("xferlib.tracing.trace.has_gpu", lambda: True)
    library.standin_copy.argtypes = (ctypes.c_int, ctypes.c_int, *[ctypes.c_uint64] * 3, *[ctypes.c_int] * 4)
    library.standin_kernel.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64)
    for name, value in {"version": 130401, "kernel_nbytes": 248}.items():
        ctypes.c_uint32.in_dll(library, name).value = value
    ctypes.c_int64.in_dll(library, "dropped").value = 0
    yield library
    # Whatever the test did, nothing of the trace is left in it.
    assert ctypes.c_int.in_dll(library, "subscribers").value == 0
    assert ctypes.c_int.in_dll(library, "enabled").value == 0
    assert ctypes.c_int.in_dll(library, "zeroed").value == 0
    assert ctypes.c_uint64.in_dll(library, "dirty").value == 0
